"""Page-locks a pool's memory, so that GPUs copy to and from it by themselves; or says why not.

By CUDA's driver, which is opened when it is wanted; nothing of CUDA is needed to install jaxvec. Where it
can't be done all works as well, but the driver copies rows to memory of its own first.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LIBRARY = "libcuda.so.1"
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for every GPU of this process


class PinningError(RuntimeError):
    """Memory can't be page-locked here; the text says why."""


class Pinned:
    """Page-locked memory, which stays mapped for as long as we live."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """Page-locks `memory`; raises `PinningError`."""
        self._driver = _Driver.open(_LIBRARY)
        self._memory: NDArray[np.uint8] | None = memory
        with self._driver.context():
            self._driver.call("cuMemHostRegister_v2", memory.ctypes.data, memory.nbytes, _PORTABLE)

    def close(self) -> None:
        """Undoes it; call this before the memory is unmapped. Twice is fine."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        try:
            with self._driver.context():
                self._driver.call("cuMemHostUnregister", memory.ctypes.data)
        except PinningError:
            pass  # the driver has ended before us, or its device has failed: no GPU copies any more


def pin(memory: NDArray[np.uint8]) -> Pinned:
    """Page-locks `memory`.

    Raises:
        PinningError: there is no driver, no GPU, or it refuses; says what it said.
    """
    return Pinned(memory)


@contextmanager
def context() -> Generator[None]:
    """Has a context of CUDA's be current, for page-locking memory elsewhere.

    Raises:
        PinningError: as `pin`.
    """
    with _Driver.open(_LIBRARY).context():
        yield


def reason_unavailable() -> str | None:
    """Tries it with a page; says why it can't be done, `None` if it can."""
    try:
        pin(np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)).close()
    except PinningError as error:
        return str(error)
    return None


class _Driver:
    """CUDA's driver, as far as we need it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.call("cuInit", 0)
        self._primary = ctypes.c_void_p()

    @classmethod
    @cache
    def open(cls, name: str) -> _Driver:
        """Returns the driver in the library of this name; it stays open."""
        try:
            return cls(ctypes.CDLL(name))
        except OSError as error:
            if "No such file" in str(error):
                raise PinningError(f"no NVIDIA driver was found, as there is no {name}") from error
            raise PinningError(f"CUDA's driver can't be opened: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver; raises `PinningError` with the driver's words if that fails."""
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise PinningError(f"CUDA's driver has no {name}") from error
        code = function(*(ctypes.c_size_t(a) if isinstance(a, int) else a for a in arguments))
        if code:
            raise PinningError(f"{name}: {self._describe(code)}")

    @contextmanager
    def context(self) -> Generator[None]:
        """Sees to it that some context is current; that of the first GPU, which JAX uses, if none is."""
        current = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if current:
            yield
            return
        if not self._primary:  # kept for good: memory that is page-locked in a context ends with it
            device = ctypes.c_int()
            self.call("cuDeviceGet", ctypes.byref(device), 0)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._primary), device)
        self.call("cuCtxSetCurrent", self._primary)
        try:
            yield
        finally:
            self.call("cuCtxSetCurrent", current)

    def _describe(self, code: int) -> str:
        words: list[str] = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            getattr(self._library, name)(code, ctypes.byref(text))
            if text.value:
                words.append(text.value.decode())
        return ": ".join(words) or f"error {code}"
