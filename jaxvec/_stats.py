"""What the workers have done and how long it took: counted in the segment, read as a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

# Columns of a worker's row in the segment, `[num_workers, ...]` int64. The worker alone writes them.
STEPS, EPISODES, RESETS, FAULTS, STEP_NS, RESET_NS, WAIT_NS, STATE_BYTES, SIMULATED = range(9)
WIDTH = 16  # columns: whole cache lines, so that no two workers write to one


@dataclass(frozen=True)
class WorkerStats:
    """The work of one worker, or of all, since the pool was made.

    Attributes:
        steps: of its envs, without those that a fault cut short.
        episodes: that have ended, by termination, truncation or a fault.
        resets: of its envs, the automatic ones, too.
        faults: steps cut short by a fault, whose results say so.
        restarts: faults that the pool recovered from: of the worker, or of an env.
        step_time: seconds in the envs' steps and in writing what they returned, without resets.
        reset_time: seconds in the envs' resets.
        wait_time: seconds without work.
        state_bytes: of the saved states that it keeps, about: as many as some of them had when pickled.
            Python's objects take up to half more. What MuJoCo allocates nobody can tell, but its states take
            less, since a pickle has the model, too.
        simulated: steps that `simulate` took from saved states, which are not among `steps`.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2, num_workers=1) as envs:
            envs.reset(seed=0)
            envs.step([0, 1])
            (worker,) = envs.stats().workers
            print(worker.steps, worker.resets, worker.faults)  # 2 2 0
        ```
    """

    steps: int = 0
    episodes: int = 0
    resets: int = 0
    faults: int = 0
    restarts: int = 0
    step_time: float = 0.0
    reset_time: float = 0.0
    wait_time: float = 0.0
    state_bytes: int = 0
    simulated: int = 0

    def __add__(self, other: WorkerStats) -> WorkerStats:
        """Adds each field to the other's."""
        return WorkerStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Stats:
    """The work of a pool.

    Attributes:
        workers: of each worker.
        total: of all together.
        states: how many saved states the pool keeps.
        state_row_bytes: of the time steps that belong to them, which are kept in this process.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            envs.reset(seed=0)
            envs.step([0, 1])
            stats = envs.stats()
            print(stats.total.steps, len(stats.workers) == envs.num_workers)  # 2 True
        ```
    """

    workers: tuple[WorkerStats, ...]
    total: WorkerStats
    states: int = 0
    state_row_bytes: int = 0


def read(rows: NDArray[np.int64], restarts: Sequence[int], *, states: int, state_row_bytes: int) -> Stats:
    """Reads the workers' rows, and adds how often each was restarted, and what the pool itself keeps."""
    workers = tuple(
        WorkerStats(
            row[STEPS],
            row[EPISODES],
            row[RESETS],
            row[FAULTS],
            count,
            row[STEP_NS] / 1e9,
            row[RESET_NS] / 1e9,
            row[WAIT_NS] / 1e9,
            row[STATE_BYTES],
            row[SIMULATED],
        )
        for row, count in zip(rows.tolist(), restarts, strict=True)
    )
    return Stats(workers, sum(workers, WorkerStats()), states, state_row_bytes)
