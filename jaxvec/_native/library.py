"""Finds and loads the native library, or says why there is none."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from enum import IntEnum
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


def check_records(*mirrors: type[ctypes.Structure]) -> None:
    """Raises `NativeUnavailableError` if a field is not where C++ has it; it goes by names, but for a `_`."""
    for mirror in mirrors:
        words: list[Any] = [ctypes.sizeof(mirror)]
        for name, *_ in mirror._fields_:
            field = getattr(mirror, name)
            words += [name, field.offset, field.size]
        _require(mirror.__name__.lstrip("_"), words)


def check_values(numbers: type[IntEnum], *names: str) -> None:
    """Raises `NativeUnavailableError` if a name has another number in C++; without `names`, any of all."""
    members = [numbers[name] for name in names] if names else numbers
    _require(numbers.__name__, [word for each in members for word in (each.name, int(each))])


def _require(name: str, words: Sequence[Any]) -> None:
    if [name, *map(str, words)] not in _records():
        raise _other_version()


@cache
def _records() -> list[list[str]]:
    """Returns the lines of records.cc, in words."""
    text: bytes = declare(jaxvec_records=(ctypes.c_char_p, [])).jaxvec_records()
    return [line.split() for line in text.decode().splitlines()]


def _other_version() -> NativeUnavailableError:
    return NativeUnavailableError("the native library is of another version; reinstall jaxvec")


def reason_unavailable() -> str | None:
    """Says why the native library can't be used; `None` if it can."""
    try:
        load()
    except NativeUnavailableError as error:
        return str(error)
    return None
