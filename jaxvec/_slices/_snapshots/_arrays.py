"""NumPy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxvec._slices._snapshots._core import CannotCopy, Node, Putter, TakesParts


class Array(Node):
    """An array that has its memory."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def put(self, putter: Putter, old: Any) -> Any:
        return _copy(self.array)


class _Constant(Node):
    """An array in memory that nobody can write to."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def put(self, putter: Putter, old: Any) -> Any:
        return self.array


class _View(Node):
    """An array in the memory of another one."""

    __slots__ = ("dtype", "offset", "shape", "strides", "whole")

    whole: Array
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def put(self, putter: Putter, old: Any) -> Any:
        whole = putter.value(self.whole, None)
        flat = whole.reshape(-1, order="A").view(np.uint8)
        return np.ndarray(self.shape, self.dtype, flat, self.offset, self.strides)


class _Objects(Node):
    """An array of Python objects."""

    __slots__ = ("items", "shape")

    shape: tuple[int, ...]
    items: list[Any]

    def put(self, putter: Putter, old: Any) -> Any:
        array = np.empty(len(self.items), object)
        same = isinstance(old, np.ndarray) and old.shape == self.shape
        olds = old.ravel().tolist() if same else [None] * len(self.items)
        for number, item in enumerate(self.items):
            array[number] = putter.value(item, olds[number])
        return array.reshape(self.shape)


class _Elsewhere(Node):
    """An array in memory that is not NumPy's: what was there is written there again."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def put(self, putter: Putter, old: Any) -> Any:
        fits = _is_elsewhere(old) and (old.shape, old.dtype) == (self.array.shape, self.array.dtype)
        if fits and putter.reuse(old):  # what were several may be one array now
            if old.flags.writeable:
                np.copyto(old, self.array)
            return old
        memory = bytearray(self.array.tobytes())  # not NumPy's either, so it is taken the same way again
        return np.ndarray(self.array.shape, self.array.dtype, memory)


def _owner(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _copy(array: Any) -> Any:
    """Returns a copy that is as writeable; an env may lock its own array and unlock it for a change."""
    copy = array.copy("K")
    if not array.flags.writeable:
        copy.flags.writeable = False
    return copy


def _is_constant(value: Any) -> bool:
    memory = _owner(value).base
    return isinstance(memory.obj if isinstance(memory, memoryview) else memory, bytes)


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not _owner(value).flags.owndata


def take_array(taker: TakesParts, value: Any) -> Any:
    node: Any
    if value.dtype.hasobject:
        if value.dtype != object:
            raise CannotCopy("it is an array of records with Python objects in them")
        node = _Objects()
        taker.remember(value, node)
        node.shape = value.shape
        node.items = taker.items(value.ravel().tolist())
        return node
    base = value.base
    if base is None:
        node = Array(_copy(value))
    elif _is_constant(value):
        node = _Constant(value)
    elif _is_elsewhere(value):
        node = _Elsewhere(value.copy())
    else:
        node = _take_view(taker, value, _owner(value))
    taker.remember(value, node)
    return node


def _take_view(taker: TakesParts, value: Any, owner: Any) -> Any:
    dense = owner.flags.forc and owner.size
    if (
        not dense
        or not owner.flags.writeable
        or owner.nbytes > 64 * max(value.nbytes, 64)
        or owner.dtype.hasobject
    ):
        return Array(value.copy("K"))  # such as one number of a table
    node = _View()
    node.whole = taker.value(owner)
    node.dtype, node.shape, node.strides = value.dtype, value.shape, value.strides
    node.offset = value.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return node
