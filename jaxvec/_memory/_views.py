"""The parent's views of a segment: actions and seeds go in by them, time steps come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._memory._segment import Arrays
from jaxvec._spec import PoolSpec

Rows = Sequence[NDArray[Any]]  # an array `[n, ...]` for each leaf
Place = Callable[
    [Rows], Sequence[Any]
]  # copies rows to where they are wanted; when it returns, all are there


class Views:
    """All arrays are `[num_envs, ...]`; calls name their envs by `slots`, `[n]`.

    Attributes:
        seeds: of the next reset.
        over: terminated and truncated.
        stats: what the workers count.
        has_info: whether the env's raw info says anything.
    """

    def __init__(self, spec: PoolSpec, arrays: Arrays) -> None:
        self.seeds = arrays["seed",]
        self.stats = arrays["stats",]
        self.has_info = arrays["has_info",]
        self.over = (arrays["terminated",], arrays["truncated",])
        self._actions = [arrays[leaf.path] for leaf in spec.action_leaves]
        self._results = [arrays[leaf.path] for leaf in spec.timestep_leaves]

    def write_actions(self, slots: NDArray[Any], actions: Rows) -> None:
        """Stores the actions of `slots`."""
        index = index_of(slots)
        for stored, action in zip(self._actions, actions, strict=True):
            stored[index] = action

    def read(self, slots: NDArray[Any], out: Rows | None, *, copy: bool = True) -> Rows:
        """Returns the time step of `slots`, which belong to the caller.

        Args:
            slots: `[n]`.
            out: where to copy it; to new arrays if `None`.
            copy: whether rows that are evenly spaced are copied; else they are the segment's, read-only.
        """
        index = index_of(slots)
        if out is not None:
            for target, array in zip(out, self._results, strict=True):
                np.copyto(target, array[index])
            return out
        rows = [array[index] for array in self._results]
        if isinstance(index, slice):
            rows = [array.copy() for array in rows] if copy else [_read_only(array) for array in rows]
        return rows


def index_of(slots: NDArray[Any]) -> slice | NDArray[Any]:
    """Returns `slots` as a slice, if they are evenly spaced in ascending order."""
    if not len(slots):
        return slots
    first, last = int(slots[0]), int(slots[-1])
    step = int(slots[1]) - first if len(slots) > 1 else 1
    if step < 1 or (slots[1:] - slots[:-1] != step).any():  # quicker than by np.diff
        return slots
    return slice(first, last + 1, step)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
