"""Statistics of the workers, which count in the shared segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

# Columns of a worker's row in the segment, `[num_workers, ...]` int64. Only the worker writes its row.
STEPS, EPISODES, RESETS, FAULTS, STEP_NS, RESET_NS, WAIT_NS, STATE_BYTES, SIMULATED = range(9)
WIDTH = 16  # columns: whole cache lines, so that no two workers write to the same line


@dataclass(frozen=True)
class WorkerStats:
    """The work of one worker, or of all workers, since the pool was made.

    Attributes:
        steps: Number of steps of the envs, without those that a fault cut short.
        episodes: Number of episodes that ended by termination, truncation or a fault.
        resets: Number of resets of the envs, including automatic ones.
        faults: Number of steps that a fault cut short.
        restarts: Number of faults from which the pool recovered by a new worker or a new env.
        step_time: Seconds spent in the envs' steps and in writing their results, without resets.
        reset_time: Seconds spent in the envs' resets.
        wait_time: Seconds spent waiting for work.
        state_bytes: Approximate size in bytes of the saved states, measured on pickles of some of them. The
            Python objects take up to 50% more. Memory that MuJoCo allocates is not measured, but takes less
            than the pickle, which contains the model.
        simulated: Number of steps of `simulate`, which `steps` does not include.

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
        """Returns the sum of both, field by field."""
        return WorkerStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Stats:
    """The work of a pool.

    Attributes:
        workers: Statistics of each worker, in worker order.
        total: Sum of the statistics of all workers.
        states: Number of saved states that the pool keeps.
        state_row_bytes: Size in bytes of the time steps that belong to saved states, in this process.

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
    """Returns the statistics in the workers' rows `[num_workers, WIDTH]`, with the counts of the parent."""
    workers = tuple(
        WorkerStats(
            steps=row[STEPS],
            episodes=row[EPISODES],
            resets=row[RESETS],
            faults=row[FAULTS],
            restarts=count,
            step_time=row[STEP_NS] / 1e9,
            reset_time=row[RESET_NS] / 1e9,
            wait_time=row[WAIT_NS] / 1e9,
            state_bytes=row[STATE_BYTES],
            simulated=row[SIMULATED],
        )
        for row, count in zip(rows.tolist(), restarts, strict=True)
    )
    return Stats(workers, sum(workers, WorkerStats()), states, state_row_bytes)
