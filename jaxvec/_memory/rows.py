"""Values in rows of the segment: read, written, checked and packed."""

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
# Between an env's values and rows of the segment: checks and casts one way, copies the other.
#
# The rules of casting are those of `gymnasium.vector.SyncVectorEnv`, which stacks observations with NumPy's
# `same_kind`: float64 into a float32 space is fine, a float into an integer space is not.
# ----------------------------------------------------------------------------------------------------------

Write: TypeAlias = Callable[[int, Any], None]


class InvalidValue(Exception):
    """An env's value doesn't fit its leaf; becomes an `EnvDataError` that names the env too."""


def writer(node: Node, arrays: Arrays) -> Write:
    """Returns `write(slot, value)`, which writes one env's nested value into row `slot` of `arrays`.

    It raises `InvalidValue` where the value has another structure, shape or dtype than `node`.
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
    """Returns `read(index)`, which yields each slot's nested value, as Gymnasium's envs take it.

    `index` says which slots: an array of them, or, quicker, a slice with a start, a stop and a step.

    Values are copies that an env may keep and change: rows of a fresh array in the env's own dtype,
    NumPy scalars where a leaf has no shape.
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
    # As `dict(zip(node.keys, values))` for each of the values, with nothing of Python in between.
    return lambda index: map(dict, map(zip, keys, zip(*(read(index) for read in children), strict=True)))


def _count(index: slice | NDArray[Any]) -> int:
    return len(range(index.start, index.stop, index.step)) if isinstance(index, slice) else len(index)


def zeroer(node: Node, arrays: Arrays) -> Callable[[int], None]:
    """Returns `clear(slot)`, which zeroes row `slot` of every leaf."""
    fields = [(arrays[leaf.path], None if leaf.is_object else 0) for leaf in leaves(node)]

    def clear(slot: int) -> None:
        for array, nothing in fields:
            array[slot] = nothing

    return clear


def column(node: Node, arrays: Arrays) -> NDArray[Any]:
    """Returns the array `[num_envs, ...]` of a node that is a leaf."""
    (leaf,) = leaves(node)
    return arrays[leaf.path]


def scalars(array: NDArray[Any]) -> Any:
    """Returns what is quickest to write one element of `array` at a time, or one row if it has rows."""
    return array.data if array.ndim == 1 else array


def _leaf_writer(leaf: Leaf, array: NDArray[Any]) -> Write:
    if leaf.is_object:
        return array.__setitem__
    narrowed = _narrowed(leaf)
    if leaf.shape == () and leaf.dtype.kind in "iu":

        def write_integer(slot: int, value: Any) -> None:
            # A Python int, unlike an array, makes NumPy refuse what doesn't fit.
            try:
                array[slot] = operator.index(value)
            except TypeError:
                array[slot] = int(conform(leaf, value))
            except OverflowError as error:
                raise InvalidValue(_overflow(leaf, value)) from error

        return write_integer

    shape, ndarray = leaf.shape, np.ndarray
    dtype = _one(leaf.dtype)
    rows = [array[slot : slot + 1].reshape(shape) for slot in range(len(array))]  # quicker than array[slot]

    def write(slot: int, value: Any) -> None:
        if (
            value.__class__ is not ndarray
            or (value.dtype is not dtype and value.dtype != dtype)
            or value.shape != shape
        ):
            value = conform(leaf, value)
        if _shrinks(leaf, value.dtype):
            _write_shrunk(leaf, rows[slot], value)
            return
        rows[slot][...] = value
        if narrowed and not np.array_equal(rows[slot], value):
            raise InvalidValue(_overflow(leaf, value))

    return write


def _narrowed(leaf: Leaf) -> bool:
    """Says whether a value may not fit where it is stored."""
    return leaf.dtype.kind in "iu" and leaf.stored.itemsize < leaf.dtype.itemsize


def _shrinks(leaf: Leaf, dtype: np.dtype[Any]) -> bool:
    """Says whether a value of this dtype may be too large for the floats as which it is stored."""
    return dtype.kind == leaf.stored.kind == "f" and leaf.stored.itemsize < dtype.itemsize


def _write_shrunk(leaf: Leaf, row: NDArray[Any], value: NDArray[Any]) -> None:
    try:
        with np.errstate(over="raise"):
            row[...] = value
    except FloatingPointError as error:
        worst = value.flat[np.abs(value, where=np.isfinite(value), out=np.zeros_like(value)).argmax()]
        text = f"{leaf}: {worst} doesn't fit into {leaf.stored}, as which it is stored"
        raise InvalidValue(text) from error


def _one(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns NumPy's one object for a dtype, quick to compare; an unpickled one is a copy."""
    return np.dtype(dtype.str)


def conform(leaf: Leaf, value: Any) -> NDArray[Any]:
    """Returns `value` as an array of the leaf's shape that casts to its dtype by `same_kind`.

    Raises:
        InvalidValue: it has another shape, or a dtype of another kind.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidValue(f"{leaf}: expected shape {leaf.shape}, got a ragged sequence") from error
    if array.shape != leaf.shape:
        raise InvalidValue(f"{leaf}: expected shape {leaf.shape}, got {array.shape}")
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        raise InvalidValue(f"{leaf}: expected {leaf.dtype}, got {_describe(value, array.dtype)}")
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
    return f"{leaf}: {value!r} doesn't fit into {leaf.stored}, as which JAX stores the space's {leaf.dtype}"


def _describe(value: Any, dtype: np.dtype[Any]) -> str:
    return type(value).__name__ if dtype.kind == "O" else f"{dtype} ({type(value).__name__})"


# ----------------------------------------------------------------------------------------------------------
# Packs rows of a segment into one payload buffer, for workers of machines that can't map the segment.
# ----------------------------------------------------------------------------------------------------------

_INTEGER = np.dtype(np.int64)
_SLOTS = align(_INTEGER.itemsize)  # where they begin


class _Batch:
    """The parts of a buffer that holds rows of some slots, but for sparse ones.

    Attributes:
        slots: `[n]`.
        buffer: all of it.
        whole: the arrays that travel so.
        dense: the rows of others.
        stop: where sparse rows begin.
    """

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
        starts = [*accumulate(sizes, initial=_SLOTS + align(slots.nbytes))]
        self.stop = starts.pop()
        self.slots = slots
        self.index = index_of(slots)
        if buffer is None:
            buffer = np.zeros(self.stop, np.uint8)
            _view(buffer, 0, (1,), _INTEGER)[0] = len(slots)
            _view(buffer, _SLOTS, slots.shape, _INTEGER)[:] = slots
        self.buffer = buffer
        parts = [_view(buffer, *each) for each in zip(starts, shapes, dtypes, strict=True)]
        self.whole, self.dense = parts[: len(whole)], parts[len(whole) :]
        self._head = buffer[: _SLOTS + slots.nbytes]
        self._said = self._head.tobytes()

    def is_in(self, buffer: NDArray[np.uint8]) -> bool:
        """Says whether this is the buffer, and holds rows of these slots now."""
        return buffer is self.buffer and self._head.tobytes() == self._said


class RowPacker:
    """Packs rows of some arrays, and unpacks them into the same arrays of another segment.

    The buffer holds how many slots there are, int64; which, `[n]` int64; then the arrays that travel
    `whole`, and the rows `[n, ...]` of each path. Each part begins at a multiple of `ALIGNMENT`, as in the
    segment. Of a sparse path the buffer holds only the rows whose flag is set; the others are zeros.
    """

    def __init__(
        self,
        arrays: Arrays,
        paths: Sequence[KeyPath],
        *,
        whole: Sequence[NDArray[Any]] = (),
        sparse: Mapping[KeyPath, KeyPath] | None = None,
    ) -> None:
        """Prepares for these arrays.

        Args:
            arrays: of the segment.
            paths: of those whose rows travel, `[num_envs, ...]`.
            whole: further arrays that travel each time, whatever the slots.
            sparse: flags of those of `paths` that are mostly zeros, by the path of these.
        """
        self._whole = whole
        sparse = sparse or {}
        # Flags come first: they say how long what follows is.
        self._dense = [arrays[path] for path in paths if path not in sparse]
        self._sparse = [(arrays[path], arrays[sparse[path]]) for path in paths if path in sparse]
        # The last ones: a pool in lock step has but one, and to find its parts costs more than to copy them.
        self._packed: _Batch | None = None
        self._unpacked: _Batch | None = None

    def pack(self, slots: NDArray[Any]) -> NDArray[np.uint8]:
        """Returns the rows of `slots`, `[n]`, ascending; they are good until the next call."""
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
        """Writes the rows where they belong, and returns their slots.

        It is quickest if one buffer, as an object, brings rows of the same slots each time.
        """
        batch = self._unpacked
        if batch is None or not batch.is_in(buffer):
            count = int(_view(buffer, 0, (1,), _INTEGER)[0])
            slots = _view(buffer, _SLOTS, (count,), _INTEGER).copy()
            batch = self._unpacked = _Batch(slots, buffer, self._whole, self._dense)
        index, slots, start = batch.index, batch.slots, batch.stop
        before = [flags[index].copy() for _, flags in self._sparse]
        for array, part in zip(self._whole, batch.whole, strict=True):
            array[...] = part
        for array, part in zip(self._dense, batch.dense, strict=True):
            array[index] = part
        for (array, flags), old in zip(self._sparse, before, strict=True):
            new = flags[index]
            array[slots[old & ~new]] = 0
            flagged = slots[new]
            part = _view(buffer, start, (len(flagged), *array.shape[1:]), array.dtype)
            array[index_of(flagged)] = part
            start += align(part.nbytes)
        return slots


def _view(
    buffer: NDArray[np.uint8], start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    return buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
