"""Conversions between values of envs and rows of the segment, and packing of rows for other machines."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec import _native
from jaxvec._memory.segment import Arrays, align, index_of
from jaxvec._spec import DictNode, KeyPath, Leaf, Node, TupleNode, format_path, leaves

# ----------------------------------------------------------------------------------------------------------
# Writing and reading values
#
# Values are cast by NumPy's `same_kind`, as in `gymnasium.vector.SyncVectorEnv`: float64 values fit a
# float32 space, but floats do not fit an integer space.
# ----------------------------------------------------------------------------------------------------------

Write: TypeAlias = Callable[[int, Any], None]


class InvalidValue(Exception):
    """A value that does not fit its leaf. It becomes an `EnvDataError`, which also names the env."""


def writer(node: Node, arrays: Arrays) -> Write:
    """Returns a function `write(slot, value)`, which writes a nested value of an env to its row of `arrays`.

    It raises `InvalidValue` if the value does not have the structure, shapes and dtypes of `node`.
    """
    compiled = _native.ext
    if isinstance(node, Leaf):
        write_leaf = _leaf_writer(node, arrays[node.path])
        return write_leaf if compiled is None else compiled.leaf_writer(write_leaf, arrays[node.path])
    children = tuple(writer(child, arrays) for child in node.children)
    keys = node.keys if isinstance(node, DictNode) else tuple(range(len(children)))
    kinds = (dict, Mapping) if isinstance(node, DictNode) else (tuple, list)
    pairs = tuple(zip(keys, children, strict=True))

    def write(slot: int, value: Any) -> None:
        if not isinstance(value, kinds) or len(value) != len(pairs):
            raise InvalidValue(_wrong_structure(node, value))
        try:
            for key, write_child in pairs:
                write_child(slot, value[key])
        except KeyError as error:
            raise InvalidValue(_wrong_structure(node, value)) from error

    if compiled is None:
        return write
    return compiled.nested_writer(write, keys if isinstance(node, DictNode) else None, children)


def reader(node: Node, arrays: Arrays) -> Callable[[slice | NDArray[Any]], Iterator[Any]]:
    """Returns a function `read(index)`, which yields the nested value of each slot, as envs expect it.

    `index` is an array of slots or, faster, a slice with start, stop and step. Values are copies in the env's
    own dtype, which the env may keep and modify; leaves of shape `()` are NumPy scalars.
    """
    if isinstance(node, Leaf):
        array, dtype = arrays[node.path], node.dtype
        if node.shape == ():
            return lambda index: array[index].astype(dtype).flat
        return lambda index: iter(array[index].astype(dtype))
    children = [reader(child, arrays) for child in node.children]
    if isinstance(node, TupleNode):
        if not children:
            return lambda index: repeat((), _count(index))
        return lambda index: zip(*(read(index) for read in children), strict=True)
    if not children:
        return lambda index: ({} for _ in range(_count(index)))
    keys = repeat(node.keys)
    # `dict(zip(node.keys, values))` for each of the values, without bytecode per value.
    return lambda index: map(dict, map(zip, keys, zip(*(read(index) for read in children), strict=True)))


def _count(index: slice | NDArray[Any]) -> int:
    return len(range(index.start, index.stop, index.step)) if isinstance(index, slice) else len(index)


def zeroer(node: Node, arrays: Arrays) -> Callable[[int], None]:
    """Returns a function `clear(slot)`, which zeroes the slot's row of every leaf."""
    fields = [(arrays[leaf.path], None if leaf.is_object else 0) for leaf in leaves(node)]

    def clear(slot: int) -> None:
        for array, zero in fields:
            array[slot] = zero

    return clear


def column(node: Node, arrays: Arrays) -> NDArray[Any]:
    """Returns the array `[num_envs, ...]` of a node that must be a leaf."""
    (leaf,) = leaves(node)
    return arrays[leaf.path]


def scalars(array: NDArray[Any]) -> Any:
    """Returns the view of `array` that writes single elements, or rows, fastest."""
    return array.data if array.ndim == 1 else array


def _leaf_writer(leaf: Leaf, array: NDArray[Any]) -> Write:
    if leaf.is_object:
        return array.__setitem__
    # JAX may store narrower integers than the space has, in which a value may not fit.
    narrowed = leaf.dtype.kind in "iu" and leaf.stored.itemsize < leaf.dtype.itemsize
    if leaf.shape == () and leaf.dtype.kind in "iu":

        def write_integer(slot: int, value: Any) -> None:
            # NumPy checks the range of a Python int, but not that of an array.
            try:
                array[slot] = operator.index(value)
            except TypeError:
                array[slot] = int(conform(leaf, value))
            except OverflowError as error:
                raise InvalidValue(_overflow(leaf, value)) from error

        return write_integer

    shape, ndarray = leaf.shape, np.ndarray
    dtype = np.dtype(leaf.dtype.str)  # NumPy's own object, for `is` below; an unpickled dtype is a copy
    rows = [array[slot : slot + 1].reshape(shape) for slot in range(len(array))]  # faster than array[slot]

    def write(slot: int, value: Any) -> None:
        # Locals and `is` keep the usual case fast: this runs once per leaf and step.
        if (
            value.__class__ is not ndarray
            or (value.dtype is not dtype and value.dtype != dtype)
            or value.shape != shape
        ):
            value = conform(leaf, value)
        if value.dtype.kind == leaf.stored.kind == "f" and leaf.stored.itemsize < value.dtype.itemsize:
            _write_narrower_floats(leaf, rows[slot], value)
            return
        rows[slot][...] = value
        if narrowed and not np.array_equal(rows[slot], value):
            raise InvalidValue(_overflow(leaf, value))

    return write


def _write_narrower_floats(leaf: Leaf, row: NDArray[Any], value: NDArray[Any]) -> None:
    try:
        with np.errstate(over="raise"):
            row[...] = value
    except FloatingPointError as error:
        worst = value.flat[np.abs(value, where=np.isfinite(value), out=np.zeros_like(value)).argmax()]
        raise InvalidValue(f"{leaf}: {worst} doesn't fit into {leaf.stored}, its stored dtype") from error


def conform(leaf: Leaf, value: Any) -> NDArray[Any]:
    """Returns `value` as an array that has the leaf's shape and casts to its dtype; raises `InvalidValue`."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidValue(f"{leaf}: expected shape {leaf.shape}, got a ragged sequence") from error
    if array.shape != leaf.shape:
        raise InvalidValue(f"{leaf}: expected shape {leaf.shape}, got {array.shape}")
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        name = type(value).__name__
        dtype = name if array.dtype.kind == "O" else f"{array.dtype} ({name})"
        raise InvalidValue(f"{leaf}: expected {leaf.dtype}, got {dtype}")
    return array


def _wrong_structure(node: DictNode | TupleNode, value: Any) -> str:
    where = format_path(node.path)
    if isinstance(node, TupleNode):
        expected = f"a tuple of {len(node.children)}"
        got = f"one of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
        return f"{where}: expected {expected}, got {got}"
    if not isinstance(value, Mapping):
        return f"{where}: expected a dict with keys {list(node.keys)}, got {type(value).__name__}"
    missing = [key for key in node.keys if key not in value]
    extra = [key for key in value if key not in node.keys]
    return f"{where}: expected keys {list(node.keys)}; missing {missing}, not in the space {extra}"


def _overflow(leaf: Leaf, value: Any) -> str:
    return f"{leaf}: {value!r} doesn't fit into {leaf.stored}, in which JAX stores the space's {leaf.dtype}"


# ----------------------------------------------------------------------------------------------------------
# Packing rows into one buffer, for machines that can't map the segment
# ----------------------------------------------------------------------------------------------------------

_INTEGER = np.dtype(np.int64)
_SLOTS_OFFSET = align(_INTEGER.itemsize)


class _Batch:
    """A buffer for the rows of some slots, and views of its parts except sparse rows."""

    def __init__(
        self,
        slots: NDArray[np.int64],
        buffer: NDArray[np.uint8] | None,
        whole: Sequence[NDArray[Any]],
        dense: Sequence[NDArray[Any]],
    ) -> None:
        shapes = [*(array.shape for array in whole), *((len(slots), *array.shape[1:]) for array in dense)]
        dtypes = [array.dtype for array in (*whole, *dense)]
        sizes = [align(prod(shape) * dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)]
        starts = [*accumulate(sizes, initial=_SLOTS_OFFSET + align(slots.nbytes))]
        self.stop = starts.pop()  # offset of the sparse rows
        self.slots = slots
        self.index = index_of(slots)
        if buffer is None:
            buffer = np.zeros(self.stop, np.uint8)
            _view(buffer, 0, (1,), _INTEGER)[0] = len(slots)
            _view(buffer, _SLOTS_OFFSET, slots.shape, _INTEGER)[:] = slots
        self.buffer = buffer
        parts = [_view(buffer, *each) for each in zip(starts, shapes, dtypes, strict=True)]
        self.whole, self.dense = parts[: len(whole)], parts[len(whole) :]
        self._head = buffer[: _SLOTS_OFFSET + slots.nbytes]
        self._head_bytes = self._head.tobytes()

    def matches(self, buffer: NDArray[np.uint8]) -> bool:
        """Returns whether `buffer` is the same object and still holds rows of the same slots."""
        return buffer is self.buffer and self._head.tobytes() == self._head_bytes


class RowPacker:
    """Packs rows of some arrays, and unpacks them into equal arrays of another segment.

    A buffer holds the number of slots `n`, int64; the slots, int64 `[n]`; the arrays that are sent whole; and
    the rows `[n, ...]` of each path. Each part starts at a multiple of `ALIGNMENT`. Sparse rows come last:
    only those with a set flag are in the buffer, and the others are zeros.

    Args:
        arrays: Arrays of the segment.
        paths: Paths of the arrays `[num_envs, ...]` with the rows to send.
        whole: Further arrays, which are sent whole with every buffer.
        sparse: Path of the flags of each sparse path. The flags must be among `paths`.
    """

    def __init__(
        self,
        arrays: Arrays,
        paths: Sequence[KeyPath],
        *,
        whole: Sequence[NDArray[Any]] = (),
        sparse: Mapping[KeyPath, KeyPath] | None = None,
    ) -> None:
        self._whole = whole
        sparse = sparse or {}
        self._dense = [arrays[path] for path in paths if path not in sparse]
        self._sparse = [(arrays[path], arrays[sparse[path]]) for path in paths if path in sparse]
        # The latest batches. A synchronous pool always sends the same slots, and creating the views costs
        # more than copying the rows.
        self._packed: _Batch | None = None
        self._unpacked: _Batch | None = None

    def pack(self, slots: NDArray[Any]) -> NDArray[np.uint8]:
        """Packs the rows of `slots`, ascending `[n]`. The buffer is valid until the next call."""
        batch = self._packed
        if batch is None or batch.slots.tobytes() != slots.tobytes():
            batch = self._packed = _Batch(slots.copy(), None, self._whole, self._dense)
        for array, part in zip(self._whole, batch.whole, strict=True):
            part[...] = array
        for array, part in zip(self._dense, batch.dense, strict=True):
            part[...] = array[batch.index]
        sparse = [array[index_of(slots[flags[batch.index]])] for array, flags in self._sparse]
        if not any(len(part) for part in sparse):
            return batch.buffer
        starts = [*accumulate((align(part.nbytes) for part in sparse), initial=batch.stop)]
        buffer = np.empty(starts.pop(), np.uint8)
        buffer[: batch.stop] = batch.buffer
        for part, start in zip(sparse, starts, strict=True):
            _view(buffer, start, part.shape, part.dtype)[...] = part
        return buffer

    def unpack(self, buffer: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Writes the rows of a buffer to the arrays, and returns their slots.

        It is fastest if the same buffer object holds rows of the same slots each time.
        """
        batch = self._unpacked
        if batch is None or not batch.matches(buffer):
            count = int(_view(buffer, 0, (1,), _INTEGER)[0])
            slots = _view(buffer, _SLOTS_OFFSET, (count,), _INTEGER).copy()
            batch = self._unpacked = _Batch(slots, buffer, self._whole, self._dense)
        index, slots, start = batch.index, batch.slots, batch.stop
        before = [flags[index].copy() for _, flags in self._sparse]
        for array, part in zip(self._whole, batch.whole, strict=True):
            array[...] = part
        for array, part in zip(self._dense, batch.dense, strict=True):
            array[index] = part
        for (array, flags), old in zip(self._sparse, before, strict=True):
            new = flags[index]
            array[slots[old & ~new]] = 0  # rows that are no longer sent
            flagged = slots[new]
            part = _view(buffer, start, (len(flagged), *array.shape[1:]), array.dtype)
            array[index_of(flagged)] = part
            start += align(part.nbytes)
        return slots


def _view(
    buffer: NDArray[np.uint8], start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    return buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
