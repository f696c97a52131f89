"""Finds and loads the native library, or says why there is none."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jaxvec._native as package

_NAME = "libjaxvec.so"


class NativeUnavailableError(ImportError):
    """The native library can't be used here; the text says why."""


@cache
def load() -> ctypes.CDLL:
    """Returns the native library.

    Raises:
        NativeUnavailableError: it was not built, or can't be loaded.
    """
    if sys.platform != "linux":
        raise NativeUnavailableError(f"the native library needs Linux's futexes, not {sys.platform}")
    for folder in package.__path__:
        path = Path(folder) / _NAME
        if path.is_file():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                raise NativeUnavailableError(f"{path} can't be loaded: {error}") from error
    raise NativeUnavailableError(f"{_NAME} was not built: install jaxvec where there is a C++17 compiler")


def declare(**functions: tuple[Any, Sequence[Any]]) -> ctypes.CDLL:
    """Returns the library, with the result and argument types of `functions` declared.

    Raises:
        NativeUnavailableError: as `load`, or a function is missing.
    """
    library = load()
    for name, (result, arguments) in functions.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise _other_version() from error
        function.restype, function.argtypes = result, arguments
    return library


def require_size(structure: type[ctypes.Structure], size: int) -> None:
    """Raises `NativeUnavailableError` if C++ thinks that `structure` has another size."""
    if ctypes.sizeof(structure) != size:
        raise _other_version()


def _other_version() -> NativeUnavailableError:
    return NativeUnavailableError("the native library is of another version; reinstall jaxvec")


def reason_unavailable() -> str | None:
    """Says why the native library can't be used; `None` if it can."""
    try:
        load()
    except NativeUnavailableError as error:
        return str(error)
    return None
