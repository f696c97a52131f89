"""The parent's views of a segment: actions and seeds go in by them, time steps come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._memory._segment import Arrays
from jaxvec._spec import PoolSpec

Rows = Sequence[NDArray[Any]]  # an array `[n, ...]` for each leaf
Index = slice | NDArray[Any]  # of rows
Place = Callable[[Rows], Sequence[Any]]  # copies rows to a device; when it returns, all are there
Deliver = Callable[[Rows, Index], Sequence[Any]]  # gives a caller its rows of the segment's leaves


class Views:
    """All arrays are `[num_envs, ...]`; calls name their envs by `slots`, `[n]`.

    Attributes:
        seeds: of the next reset.
        states: the numbers of those that are to be saved, or restored.
        oldest_state: `[1]`, the number of the oldest that is kept.
        over: terminated and truncated.
        stats: what the workers count.
        raw_info: what the env's raw info says, a `RawInfo`.
    """

    def __init__(self, spec: PoolSpec, arrays: Arrays, rows: Callable[[NDArray[Any]], Index]) -> None:
        """Takes the views that calls need; `rows` knows a slice for all envs, as `Admission.rows`."""
        self.seeds = arrays["seed",]
        self.states, self.oldest_state = arrays["state",], arrays["oldest_state",]
        self.stats = arrays["stats",]
        self.raw_info = arrays["raw_info",]
        self.over = (arrays["terminated",], arrays["truncated",])
        self._actions = [arrays[leaf.path] for leaf in spec.action_leaves]
        self._results = [arrays[leaf.path] for leaf in spec.timestep_leaves]
        self._rows = rows

    def write_actions(self, slots: NDArray[Any], actions: Rows) -> None:
        """Stores the actions of `slots`."""
        index = self._index_of(slots)
        for stored, action in zip(self._actions, actions, strict=True):
            stored[index] = action

    def write(self, slots: NDArray[Any], rows: Rows) -> None:
        """Writes the time step of `slots`, which belong to the caller."""
        index = self._index_of(slots)
        for stored, row in zip(self._results, rows, strict=True):
            stored[index] = row

    def read(self, slots: NDArray[Any], deliver: Deliver) -> Any:
        """Delivers the time step of `slots`, which belong to the caller."""
        return deliver(self._results, self._index_of(slots))

    def _index_of(self, slots: NDArray[Any]) -> Index:
        rows = self._rows(slots)
        return rows if isinstance(rows, slice) else index_of(rows)


def copies(leaves: Rows, index: Index) -> Rows:
    """Delivers new arrays."""
    copy = isinstance(index, slice)  # else NumPy does
    return [leaf[index].copy() if copy else leaf[index] for leaf in leaves]


def views(leaves: Rows, index: Index) -> Rows:
    """Delivers rows as they are in the segment, read-only; copies of those that are not evenly spaced."""
    rows = [leaf[index] for leaf in leaves]
    if isinstance(index, slice):
        for row in rows:
            row.flags.writeable = False
    return rows


def into(out: Rows) -> Deliver:
    """Delivers into these arrays, but for those without rows."""

    def deliver(leaves: Rows, index: Index) -> Rows:
        for target, leaf in zip(out, leaves, strict=True):
            if len(target):
                np.copyto(target, leaf[index])
        return out

    return deliver


def placed(place: Place) -> Deliver:
    """Delivers what `place` makes of rows that it may read until it returns."""
    return lambda leaves, index: place(views(leaves, index))


def index_of(slots: NDArray[Any]) -> Index:
    """Returns `slots` as a slice, if they are evenly spaced in ascending order."""
    if not len(slots):
        return slots
    first, last = int(slots[0]), int(slots[-1])
    step = int(slots[1]) - first if len(slots) > 1 else 1
    if step < 1 or (slots[1:] - slots[:-1] != step).any():  # quicker than by np.diff
        return slots
    return slice(first, last + 1, step)
