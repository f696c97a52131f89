"""Rows of a segment as one contiguous buffer, for those who step them where the segment is not mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._memory._layout import ALIGNMENT, align
from jaxvec._memory._segment import Arrays
from jaxvec._memory._views import index_of
from jaxvec._spaces import Path

_COUNT = 8  # bytes


class Freight:
    """Rows of the same arrays, packed on one machine and unpacked on another.

    The buffer holds how many slots there are, int64; which, `[n]` int64; and then, one after the other
    and each from a multiple of `ALIGNMENT` on as in the segment, `alone`, and the rows `[n, ...]` of each
    path. Of a sparse path it holds those rows alone whose flag is set; the others are zeros.
    """

    def __init__(
        self,
        arrays: Arrays,
        paths: Sequence[Path],
        *,
        alone: Sequence[NDArray[Any]] = (),
        sparse: Mapping[Path, Path] | None = None,
    ) -> None:
        """Prepares for these arrays.

        Args:
            arrays: of the segment.
            paths: of those whose rows travel, `[num_envs, ...]`.
            alone: further arrays that travel each time, whatever the slots.
            sparse: flags of those of `paths` that are mostly zeros, by the path of these.
        """
        self._alone = list(alone)
        sparse = sparse or {}
        # Flags come first: they say how long what follows is.
        self._dense = [arrays[path] for path in paths if path not in sparse]
        self._sparse = [(arrays[path], arrays[sparse[path]]) for path in paths if path in sparse]

    def pack(self, slots: NDArray[Any]) -> NDArray[np.uint8]:
        """Returns the rows of `slots`, `[n]`, ascending."""
        index = index_of(slots)
        chosen = [index_of(slots[flags[index]]) for _, flags in self._sparse]
        parts = [np.array([len(slots)]), slots, *self._alone, *(array[index] for array in self._dense)]
        parts += [array[rows] for (array, _), rows in zip(self._sparse, chosen, strict=True)]
        places = list(_places([(part.shape, part.dtype) for part in parts]))
        buffer = np.empty(places[-1][1], np.uint8)
        for part, (start, stop) in zip(parts, places, strict=True):
            _view(buffer, start, stop, part.shape, part.dtype)[...] = part
        return buffer

    def unpack(self, buffer: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Writes the rows where they belong, and returns whose they are."""
        count = int(buffer[:_COUNT].view(np.int64)[0])
        slots = self._read(buffer, ALIGNMENT, np.zeros(0, np.int64), count)[0].copy()
        index = index_of(slots)
        place = ALIGNMENT + align(slots.nbytes)
        for array in self._alone:
            part, place = self._read(buffer, place, array, None)
            array[...] = part
        before = [flags[index].copy() for _, flags in self._sparse]
        for array in self._dense:
            part, place = self._read(buffer, place, array, count)
            array[index] = part
        for (array, flags), old in zip(self._sparse, before, strict=True):
            new = flags[index]
            array[slots[old & ~new]] = 0
            part, place = self._read(buffer, place, array, int(np.count_nonzero(new)))
            array[index_of(slots[new])] = part
        return slots

    @staticmethod
    def _read(
        buffer: NDArray[np.uint8], start: int, like: NDArray[Any], count: int | None
    ) -> tuple[NDArray[Any], int]:
        """Returns an array `like` another, of `count` rows if that is given, and where the next begins."""
        shape = like.shape if count is None else (count, *like.shape[1:])
        stop = start + prod(shape) * like.dtype.itemsize
        return _view(buffer, start, stop, shape, like.dtype), start + align(stop - start)


def _places(arrays: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> Iterator[tuple[int, int]]:
    start = 0
    for shape, dtype in arrays:
        nbytes = prod(shape) * dtype.itemsize
        yield start, start + nbytes
        start += align(nbytes)


def _view(
    buffer: NDArray[np.uint8], start: int, stop: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    return buffer[start:stop].view(dtype).reshape(shape)
