"""Nodes of NumPy's arrays and of the memory that they share.

A snapshot keeps which arrays share memory. An array that has its own memory is an `Array`. A part of
another array is a `_View`: an offset, a shape and strides in the memory of its owner, which is a node itself.
An array in memory of another library is restored in place, if it still exists (`_Foreign`).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxvec._extensions.states.snapshots.nodes import CannotCopy, Node, Restorer, Saver
from jaxvec._memory.large_buffers import PrivateMemory


@dataclass(slots=True, eq=False)
class Array(Node):
    """An array that has its own memory. The native code knows this class and its slot."""

    array: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        return _copy(self.array)


@dataclass(slots=True, eq=False)
class _View(Node):
    """An array in the memory of `owner`."""

    owner: Any
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    writeable: bool

    def restore(self, restorer: Restorer, old: Any) -> Any:
        in_place = isinstance(self.owner, _Foreign) and isinstance(old, np.ndarray)
        owner = restorer.value(self.owner, owner_of(old) if in_place else None)
        locked = not owner.flags.writeable
        if locked:  # the view may have been made before, and may be written to
            owner.flags.writeable = True
        view: Any = np.ndarray(self.shape, self.dtype, _flat(owner).view(np.uint8), self.offset, self.strides)
        if locked:
            owner.flags.writeable = False
        if not self.writeable:
            view.flags.writeable = False
        return view


class _NewMemory(bytearray):
    """The memory of a `_Foreign` array that was made anew."""


@dataclass(slots=True, eq=False)
class _Foreign(Node):
    """An array in memory that is not NumPy's, such as a row for observations. Restoring writes into it."""

    array: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        foreign = isinstance(old, np.ndarray) and not owner_of(old).flags.owndata
        fits = foreign and (old.shape, old.dtype) == (self.array.shape, self.array.dtype)
        if fits and restorer.reuse(old):  # what were several may be one array now
            if old.flags.writeable:
                np.copyto(old, self.array)
            return old
        # Not NumPy's memory either, so that the next snapshot has the same nodes.
        made: Any = np.ndarray(self.array.shape, self.array.dtype, _NewMemory(self.array.tobytes()))
        made.flags.writeable = self.array.flags.writeable
        return made


def save_array(saver: Saver, value: Any) -> Any:
    """Takes an array, and the memory that it shares with others."""
    if type(value) is not np.ndarray:
        raise CannotCopy(f"it is a {type(value).__qualname__}, which may hold more than an array")
    if value.dtype.hasobject:
        raise CannotCopy("it is an array of Python objects", "Keep them in a list")
    if saver.by_value:
        return saver.remember(value, Array(_copy(value)))
    save_dtype(saver, value.dtype)
    if value.base is None:
        return saver.remember(value, Array(_copy(value)))
    if is_constant(value):
        return value
    owner = owner_of(value)
    memory = owner.base.obj if isinstance(owner.base, memoryview) else owner.base
    # Other memory than that of a large array of the worker may have other users, too.
    if owner.flags.owndata or (value is not owner and isinstance(memory, PrivateMemory)):
        return saver.remember(value, _save_view(saver, value, owner))
    if not isinstance(memory, (mmap.mmap, _NewMemory)) and type(memory).__name__ not in _LIBRARIES:
        raise CannotCopy(f"it is an array in the memory of a {type(memory).__qualname__}")
    return saver.remember(value, _Foreign(_copy(value)))


_LIBRARIES = ("PyCapsule", "nb_ndarray")  # own the memory of arrays that pybind11 and nanobind return


def save_memmap(saver: Saver, value: Any) -> Any:
    """Takes an array in a file that nothing can write to by it."""
    if type(value) is not np.memmap or value.mode != "r":
        raise CannotCopy("it is a mapped file, which can't be copied; open it with mode='r'")
    return value


def save_dtype(saver: Saver, value: Any) -> Any:
    if value.names is not None:
        raise CannotCopy("it has a dtype with fields", "Keep one array for each field")
    return value


# --- The memory behind an array --------------------------------------------------------------------------


def is_constant(value: Any) -> bool:
    """Returns whether an array can't change: it is in `bytes`, in a map to read, or in another such array."""
    owner = owner_of(value)
    if type(owner) is np.memmap:
        return owner.mode == "r"
    base = owner.base
    if isinstance(base, bytes):
        return True
    if not (isinstance(base, memoryview) and base.readonly):
        return False
    return isinstance(base.obj, mmap.mmap) or (isinstance(base.obj, np.ndarray) and is_constant(base.obj))


def owner_of(value: Any) -> Any:
    """Returns the array at the end of a chain of views."""
    while True:
        base = value.base
        if type(base).__name__ == "DummyArray":  # of `numpy.lib.stride_tricks.as_strided`
            base = base.base
        if not isinstance(base, np.ndarray):
            return value
        value = base


def _save_view(saver: Saver, value: Any, owner: Any) -> _View:
    if not (owner.flags.forc or owner.transpose(_axes(owner)).flags.c_contiguous):
        raise CannotCopy("it is in an array whose memory has gaps")
    return _View(
        owner=saver.value(owner),
        dtype=value.dtype,
        shape=value.shape,
        strides=value.strides,
        offset=_address_of(value) - _address_of(owner),
        writeable=value.flags.writeable,
    )


def _address_of(array: Any) -> int:
    return array.__array_interface__["data"][0]


def _axes(array: Any) -> tuple[int, ...]:
    """Returns the axes of an array, from the largest stride to the smallest."""
    return tuple(sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis])))


def _flat(owner: Any) -> Any:
    """Returns all of a dense array as one axis, in the order of its memory, without a copy."""
    return owner.reshape(-1, order="A") if owner.flags.forc else owner.transpose(_axes(owner)).reshape(-1)


def _copy(value: Any) -> Any:
    """Returns a copy that is as writeable: an env may lock its own array, and unlock it for a change."""
    made = value.copy("K")
    made.flags.writeable = value.flags.writeable
    return made
