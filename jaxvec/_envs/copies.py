"""Copies of values that a caller gives to several envs."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._util import Pickler

# Values of these types never change. Subclasses may have attributes.
_CONSTANTS = frozenset((int, float, complex, bool, str, bytes, type(None)))


MapAgain: TypeAlias = Callable[[Any], Any]


def copied(value: Any, depth: int = 2, *, map_again: MapAgain = lambda _: None) -> Any:
    """Returns a copy of a value that the caller gives to several envs, as if each had a process of its own.

    It is what pickling would make of the value, but shares functions, classes, modules and read-only arrays
    with it. A value that can't be pickled, such as one with a lock, is returned itself; of a tuple or dict,
    to this `depth`, only the entries that can't be pickled.

    Args:
        value: The value.
        depth: Levels of tuples and dicts whose entries are copied one by one if the whole can't be pickled.
        map_again: Returns memory with the content of a buffer, or None if that has to be copied.
    """
    try:
        return _copy_plain(value, {}, map_again)
    except (_NotPlain, RecursionError):
        pass
    try:
        return _Copier(map_again).copy(value)
    except MemoryError:
        raise
    except Exception:  # of the objects' own code, too
        if depth and type(value) is tuple:
            return tuple(copied(item, depth - 1, map_again=map_again) for item in value)
        if depth and type(value) is dict:
            return {key: copied(item, depth - 1, map_again=map_again) for key, item in value.items()}
        return value


class _NotPlain(Exception):
    """A value has parts that only pickling can copy."""


def _copy_plain(value: Any, copies: dict[int, Any], map_again: MapAgain) -> Any:
    """Copies nested tuples, lists, dicts and arrays, in a tenth of the time that pickling takes.

    `copies` has the copies so far, by the ids of their originals.
    """
    kind = type(value)
    if kind in _CONSTANTS:
        return value
    if kind is tuple:
        if _CONSTANTS.issuperset(map(type, value)):
            return value
        return tuple([_copy_plain(item, copies, map_again) for item in value])
    if (copy := copies.get(id(value))) is not None:
        return copy
    if kind is list:
        copy = copies[id(value)] = []
        copy.extend(_copy_plain(item, copies, map_again) for item in value)
    elif kind is dict:
        copy = copies[id(value)] = {}
        for key, item in value.items():
            copy[_copy_plain(key, copies, map_again)] = _copy_plain(item, copies, map_again)
    elif _is_shared(value):
        return value
    elif kind is np.ndarray and not value.dtype.hasobject:
        copy = copies[id(value)] = _copy_array(value, map_again)
        copy.flags.writeable = value.flags.writeable or not value.flags.forc  # as pickling does
    else:
        raise _NotPlain
    return copy


def _copy_array(array: NDArray[Any], map_again: MapAgain) -> NDArray[Any]:
    memory = map_again(array) if array.flags.forc else None
    if memory is None:
        return array.copy(order="K")
    return np.ndarray(array.shape, array.dtype, memory, order="F" if array.flags.fnc else "C")


def _is_shared(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return _is_read_only(value)
    return isinstance(value, FunctionType | type | ModuleType | np.number | np.bool_)


def _is_read_only(array: NDArray[Any]) -> bool:
    """Returns True if neither the array nor one that it is a view of can be written to.

    Arrays with gaps are left out, because they can be written to after they were pickled.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable or base.dtype.hasobject:
            return False
        base = base.base
    return array.flags.forc


class _Copier(Pickler):
    """Pickles a value in memory, except for its parts that a copy shares."""

    def __init__(self, map_again: MapAgain) -> None:
        self._map_again = map_again
        self._file = io.BytesIO()
        self._buffers = list[pickle.PickleBuffer]()
        super().__init__(self._file, 5, buffer_callback=self._buffers.append)  # copies arrays only once
        self._shared: list[Any] = []

    def copy(self, value: Any) -> Any:
        self.dump(value)
        self._file.seek(0)
        buffers = [
            bytes(buffer) if buffer.raw().readonly else (self._map_again(buffer.raw()) or bytearray(buffer))
            for buffer in self._buffers
        ]
        unpickler = _SharingUnpickler(self._file, buffers=buffers)
        unpickler.shared = self._shared
        return unpickler.load()

    def persistent_id(self, obj: Any) -> int | None:
        if not _is_shared(obj):
            return None
        self._shared.append(obj)
        return len(self._shared) - 1


class _SharingUnpickler(pickle.Unpickler):
    shared: list[Any]

    def persistent_load(self, pid: int) -> Any:
        return self.shared[pid]
