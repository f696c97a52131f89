"""Packs rows of a segment into one payload buffer, for workers of machines that can't map the segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._memory._layout import align
from jaxvec._memory._segment import Arrays
from jaxvec._memory._views import index_of
from jaxvec._spaces import KeyPath

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
