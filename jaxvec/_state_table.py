"""The saved states of a pool, as the parent knows them: which there are, who has each, and its time step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._errors import StaleStateError
from jaxvec._memory._views import Rows
from jaxvec._spec import PoolSpec

_NOBODY, _LOST = -1, -2  # in place of a worker that has a state


@dataclass(frozen=True)
class PackedStates:
    """States on their way to another pool, or to a file.

    Attributes:
        data: `[n]` states of envs, each the bytes of a pickle.
        rows: the leaves of the time steps that were current then, `[n, ...]`.
        needs_reset: `[n]` bool, whether the env has to be reset before it is stepped.
    """

    data: Sequence[bytes]
    rows: Rows
    needs_reset: NDArray[np.bool_]


class StateTable:
    """A ring of places. A state's number says its place, and that it is this state: no other ever has it.

    The states themselves are in their workers. Nobody but who is inside the pool's engine, alone, uses this.

    Attributes:
        rows: the leaves of the time steps, `[capacity, ...]`.
        worker: `[capacity]` who has each.
        needs_reset: `[capacity]` bool, of its env.
    """

    def __init__(self, spec: PoolSpec, capacity: int, *, pool_id: int) -> None:
        """Begins without states.

        Args:
            spec: of the pool.
            capacity: how many are kept.
            pool_id: by which the states name their pool.
        """
        self._pool_id, self._capacity = pool_id, capacity
        # Memory that nobody touches yet is none.
        self.rows: list[NDArray[Any]] = [
            np.zeros((capacity, *leaf.shape), object if leaf.is_object else leaf.stored)
            for leaf in spec.timestep_leaves
        ]
        self.worker: NDArray[np.int_] = np.full(capacity, _NOBODY)
        self.needs_reset: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self._life = np.zeros(capacity, np.int64)
        self._numbers = np.zeros(capacity, np.int64)
        self._next = 1

    @property
    def count(self) -> int:
        """How many states there are."""
        return int(np.count_nonzero(self.worker >= 0))

    @property
    def row_bytes(self) -> int:
        """Bytes of the time steps that were ever kept."""
        used = min(self._next - 1, self._capacity)
        return sum(row[:used].nbytes for row in self.rows)

    def allocate(self, count: int) -> NDArray[np.int64]:
        """Returns numbers for as many new states, whose places nobody else has any more.

        Raises:
            ValueError: the pool keeps fewer than that.
        """
        if count > self._capacity:
            raise ValueError(
                f"{count} states at once, but pool {self._pool_id} keeps {self._capacity}"
                + ("" if self._capacity else ", none at all")
                + f"; make it with states={count} or more: as many as your program uses at the same time"
            )
        numbers = np.arange(self._next, self._next + count)
        self._next += count
        self.worker[self.places(numbers)] = _NOBODY
        return numbers

    @property
    def oldest(self) -> int:
        """The number before which workers are to forget all states."""
        return self._next - self._capacity

    def fill(
        self,
        numbers: NDArray[np.int64],
        workers: NDArray[np.int_],
        lives: NDArray[np.int64],
        needs_reset: NDArray[np.bool_],
    ) -> NDArray[np.int_]:
        """Takes note of states that workers keep by now; returns their places, whose rows are the caller's.

        Args:
            numbers: `[n]`, as `allocate` returned them.
            workers: `[n]`, who has each.
            lives: `[n]`, how often that worker was replaced.
            needs_reset: `[n]`, of their envs.
        """
        places = self.places(numbers)
        self._numbers[places], self.worker[places], self._life[places] = numbers, workers, lives
        self.needs_reset[places] = needs_reset
        return places

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int_]:
        """Returns where in `rows` the states of these numbers are, if they are."""
        return numbers % max(self._capacity, 1)

    def read(self, places: NDArray[np.int_]) -> list[NDArray[Any]]:
        """Returns copies of the time steps in these places."""
        return [row[places] for row in self.rows]

    def ids(self, numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Returns the names of states, `[n, 3]`: the pool, and the number's low and high word."""
        ids = np.empty((len(numbers), 3), np.uint32)
        ids[:, 0], ids[:, 1:] = self._pool_id, numbers.astype("<i8").view("<u4").reshape(-1, 2)
        return ids

    def find(self, ids: NDArray[np.uint32], lives: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of states by their names.

        Args:
            ids: `[n, 3]`.
            lives: `[num_workers]` how often each worker was replaced.

        Raises:
            StaleStateError: one is gone, or of another pool.
        """
        foreign = np.flatnonzero(ids[:, 0] != self._pool_id)
        if foreign.size:
            raise StaleStateError(
                f"state {foreign[0]} is of pool {ids[foreign[0], 0]}, not of pool {self._pool_id}"
                if ids[foreign[0]].any()
                else f"state {foreign[0]} is all zeros, which is none that save or simulate returned"
            )
        numbers = np.ascontiguousarray(ids[:, 1:]).astype("<u4").view("<i8").reshape(-1)
        if not self._capacity:
            self.allocate(1)
        places = self.places(numbers)
        kept = (self._numbers[places] == numbers) & (self.worker[places] != _NOBODY) & (numbers > 0)
        gone = np.flatnonzero(~kept)
        if gone.size:
            raise StaleStateError(
                f"state {gone[0]} is gone: pool {self._pool_id} keeps {self._capacity}, and newer ones took "
                f"the place of the oldest. Make the pool with more states than {self._capacity}, as many as "
                "your program uses at the same time"
            )
        lost = (self.worker[places] == _LOST) | (self._life[places] != lives[self.worker[places]])
        if lost.any():
            raise self.lost(numbers[lost])
        return numbers

    def lost(self, numbers: NDArray[np.int64]) -> StaleStateError:
        """Takes note of states that went with a worker, and returns the error of who asks for them."""
        self.worker[self.places(numbers)] = _LOST
        return StaleStateError(
            f"{len(numbers)} of these states are gone: the worker that had them was replaced after a fault; "
            "reset its envs, and save states anew"
        )
