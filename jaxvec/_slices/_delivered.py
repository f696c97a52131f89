"""What the program has of each env: its row as it was before the step that runs.

The row of a fault says what was delivered before, and never what a worker left half-done. So before a step
touches any row, its slice keeps what such a row is made of, in memory that outlives the worker:

1. it copies observation, return, length, and whether the episode was over;
2. it notes for which request: only now do the copies count;
3. the envs step, and their rows are overwritten.

A worker that dies before 2. has left the row itself as it was; after 2., the copies are whole. Who takes
its place finds in the note which of the two it is, and keeps nothing anew for that request, however often
it is tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._memory import _rows
from jaxvec._memory._segment import Arrays
from jaxvec._memory._views import index_of
from jaxvec._spaces import KeyPath
from jaxvec._spec import PoolSpec

_BY_FAULT = 2  # is what ended an episode


class Delivered:
    """Of the envs of a slice, which go by their index there."""

    def __init__(self, spec: PoolSpec, rows: Arrays) -> None:
        """Prepares to keep the envs' rows of the segment's arrays."""
        self._rows = {leaf.path: rows[leaf.path] for leaf in spec.kept_leaves}
        self._kept = {
            leaf.path: np.empty_like(rows[leaf.path]) if leaf.is_object else rows["kept", *leaf.path]
            for leaf in spec.kept_leaves
        }
        self._terminated, self._truncated = rows["terminated",], rows["truncated",]
        self._fault = rows["info", "fault"]
        self._over, self._for, self._requested = (
            rows[name,] for name in ("kept_over", "kept_for", "requested")
        )
        self._read_obs = _rows.reader(spec.obs, self._kept)
        self._zero: Any = np.zeros(spec.reward.shape) if spec.reward.shape else 0.0

    def keep(self, indices: NDArray[Any]) -> None:
        """Keeps the rows of envs that are about to step; once for each request."""
        new = indices[self._for[indices] != self._requested[indices]]
        if not new.size:
            return
        index = index_of(new)
        for path, kept in self._kept.items():
            kept[index] = self._rows[path][index]
        over = self._terminated[index] | self._truncated[index]
        self._over[index] = over + self._fault[index].view(np.uint8)
        self._for[index] = self._requested[index]  # last

    def take_over(self, objects: Mapping[KeyPath, NDArray[Any]]) -> None:
        """Takes what is not in the segment, and went with the process that had it, from the program."""
        for path, column in objects.items():
            self._rows[path][:] = self._kept[path][:] = column

    def obs(self, index: int) -> Any:
        """Returns a copy of the observation."""
        (obs,) = self._read_obs(np.array([index]))
        return obs

    def over(self, index: int) -> bool:
        """Says whether the row ended an episode."""
        return bool(self._over[index])

    def over_by_fault(self, index: int) -> bool:
        """Says whether the row told of a fault, which ended an episode."""
        return bool(self._over[index] == _BY_FAULT)

    def episode(self, index: int, resumed: tuple[Any, int] | None) -> tuple[Any, int]:
        """Returns return and length of the episode that runs; of one that has not begun, zeros.

        `resumed` are those with which it went on from a saved state, if it did so in that row.
        """
        if self.over_by_fault(index) and resumed is not None:
            return resumed
        if self._over[index]:
            return self._zero, 0
        episode_return = self._kept["info", "episode_return"][index]
        return self._zero + episode_return, int(self._kept["info", "episode_length"][index])
