"""Page-locking of a pool's memory, so that GPUs copy to and from it directly.

This uses CUDA's driver library, which is opened on first use; jaxvec installs without CUDA. Without
page-locking everything works, but the driver first copies rows to memory of its own.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LIBRARY = "libcuda.so.1"
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for all contexts, so for every GPU


class PinningError(RuntimeError):
    """Memory can't be page-locked: there is no driver or no GPU, or the driver reported an error."""


class Pinned:
    """Page-locked memory, which stays mapped until `close`."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """Page-locks memory; raises `PinningError`."""
        self._driver = _Driver.open(_LIBRARY)
        self._memory: NDArray[np.uint8] | None = memory  # until `close`
        with self._driver.context():
            self._driver.call("cuMemHostRegister_v2", memory.ctypes.data, memory.nbytes, _PORTABLE)

    def close(self) -> None:
        """Unlocks the memory, which must still be mapped. May be called more than once."""
        memory = self._memory
        self._memory = None
        if memory is None:
            return
        # Raised if the driver has shut down, or its device has failed: no GPU copies any more.
        with suppress(PinningError), self._driver.context():
            self._driver.call("cuMemHostUnregister", memory.ctypes.data)


@contextmanager
def context() -> Generator[None]:
    """Makes a CUDA context current, for page-locking in C++; raises `PinningError`."""
    with _Driver.open(_LIBRARY).context():
        yield


def reason_unavailable() -> str | None:
    """Page-locks one page as a test; returns the error's text, or `None`."""
    try:
        Pinned(np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)).close()
    except PinningError as error:
        return str(error)
    return None


class _Driver:
    """The functions of CUDA's driver that page-locking needs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.call("cuInit", 0)
        self._primary = ctypes.c_void_p()

    @classmethod
    @cache
    def open(cls, name: str) -> _Driver:
        try:
            return cls(ctypes.CDLL(name))
        except OSError as error:
            if "No such file" in str(error):
                raise PinningError(f"no NVIDIA driver was found, as there is no {name}") from error
            raise PinningError(f"CUDA's driver can't be opened: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver; raises `PinningError` with the driver's description of an error."""
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise PinningError(f"CUDA's driver has no {name}") from error
        code = function(*(ctypes.c_size_t(a) if isinstance(a, int) else a for a in arguments))
        if code:
            raise PinningError(f"{name}: {self._describe(code)}")

    @contextmanager
    def context(self) -> Generator[None]:
        """Makes the primary context of the first GPU current, which JAX uses, unless one is current."""
        current = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if current:
            yield
            return
        if not self._primary:  # never released: its end would unlock the memory
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
