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

_INTEGER = np.zeros(1, np.int64)


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

    def pack(self, slots: NDArray[Any]) -> NDArray[np.uint8]:
        """Returns the rows of `slots`, `[n]`, ascending."""
        index = index_of(slots)
        parts = [np.array([len(slots)]), slots, *self._whole, *(array[index] for array in self._dense)]
        parts += [array[index_of(slots[flags[index]])] for array, flags in self._sparse]
        starts = [0, *accumulate(align(part.nbytes) for part in parts)]
        buffer = np.empty(starts.pop(), np.uint8)
        for part, start in zip(parts, starts, strict=True):
            _view(buffer, start, part.shape, part.dtype)[...] = part
        return buffer

    def unpack(self, buffer: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Writes the rows where they belong, and returns their slots."""
        start = 0

        def take(like: NDArray[Any], count: int | None = None) -> NDArray[Any]:
            """Returns the next part of the buffer: an array `like` this one, or `count` rows of such."""
            nonlocal start
            part = _view(buffer, start, like.shape if count is None else (count, *like.shape[1:]), like.dtype)
            start += align(part.nbytes)
            return part

        count = int(take(_INTEGER)[0])
        slots = take(_INTEGER, count).copy()
        index = index_of(slots)
        for array in self._whole:
            array[...] = take(array)
        before = [flags[index].copy() for _, flags in self._sparse]
        for array in self._dense:
            array[index] = take(array, count)
        for (array, flags), old in zip(self._sparse, before, strict=True):
            new = flags[index]
            array[slots[old & ~new]] = 0
            array[index_of(slots[new])] = take(array, int(np.count_nonzero(new)))
        return slots


def _view(
    buffer: NDArray[np.uint8], start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    return buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
