"""Statistics of the workers, which count in the shared segment, and of their processes, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Columns of a worker's row in the segment, `[num_workers, ...]` int64. Only the worker writes its row.
STEPS, EPISODES, RESETS, FAULTS, STEP_NS, RESET_NS, WAIT_NS, STATE_BYTES, SIMULATED = range(9)
PID, REPLACED, RECYCLED = range(9, 12)  # id of the process; number of its predecessors; those recycled
WIDTH = 16  # columns: whole cache lines, so that no two workers write to the same line


# --- Processes, as /proc shows them ----------------------------------------------------------------------

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessStats:
    """A worker process and its child processes, as they are now.

    Attributes:
        pid: Process id.
        memory: Resident memory in bytes, with that of the child processes, and with pages that processes
            share.
        proportional_memory: As `memory`, but a page that `n` processes share counts `1 / n`. 0 if the system
            does not show it.
        descriptors: Number of open file descriptors.
        threads: Number of threads.
        children: Number of child processes, and their child processes.
        age: Seconds since the process was started.
    """

    pid: int
    memory: int
    proportional_memory: int
    descriptors: int
    threads: int
    children: int
    age: float


def read_process(pid: int) -> ProcessStats | None:
    """Returns what /proc shows of a process; `None` if it has ended, or without /proc."""
    family = family_of(pid)
    with suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(status[19]) / _TICKS
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        threads = int(status[17])
        shares = sum(map(_proportional_memory, family))
        return ProcessStats(pid, memory_of(family), shares, descriptors, threads, len(family) - 1, age)
    return None


def family_of(pid: int) -> list[int]:
    """Returns a process, its child processes, and their child processes."""
    family = [pid]
    for member in family:  # which grows
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{member}/task"):
                family += map(int, Path(f"/proc/{member}/task/{thread}/children").read_text().split())
    return family


def memory_of(pids: Sequence[int]) -> int:
    """Returns the resident memory of processes in bytes. Those that have ended have none."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return total


def _proportional_memory(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


# --- The statistics of a pool ----------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerStats:
    """The work of one worker, or of all workers, since the pool was made.

    Attributes:
        steps: Number of steps of the envs, without those that a fault cut short.
        episodes: Number of episodes that ended by termination, truncation or a fault.
        resets: Number of resets of the envs, including automatic ones.
        faults: Number of steps that a fault cut short.
        restarts: Number of faults from which the pool recovered by a new worker or a new env.
        recycled: Number of processes that were replaced because of `Workers(recycle=...)`.
        step_time: Seconds spent in the envs' steps and in writing their results, without resets.
        reset_time: Seconds spent in the envs' resets.
        wait_time: Seconds spent waiting for work.
        state_bytes: Approximate size in bytes of the saved states, measured on pickles of some of them. The
            Python objects take up to 50% more. Memory that MuJoCo allocates is not measured, but takes less
            than the pickle, which contains the model.
        simulated: Number of steps of `simulate`, which `steps` does not include.
        process: Memory, descriptors and age of the worker process, as a `ProcessStats`. `None` in the sum of
            all workers, while a process is replaced, for the serial backend, on other machines, and without
            /proc.

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
    recycled: int = 0
    step_time: float = 0.0
    reset_time: float = 0.0
    wait_time: float = 0.0
    state_bytes: int = 0
    simulated: int = 0
    process: ProcessStats | None = None

    def __add__(self, other: WorkerStats) -> WorkerStats:
        """Returns the sum of both, field by field, without the processes."""
        return WorkerStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)[:-1]))


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


def read(
    rows: NDArray[np.int64], restarts: Sequence[int], processes: Sequence[ProcessStats | None]
) -> tuple[WorkerStats, ...]:
    """Returns the statistics in the workers' rows `[num_workers, WIDTH]`, with the counts of the parent."""
    workers: list[WorkerStats] = []
    for row, restarted, process in zip(rows.tolist(), restarts, processes, strict=True):
        steps, episodes, resets, faults, step_ns, reset_ns, wait_ns, size, simulated = row[:PID]
        counts = steps, episodes, resets, faults, restarted, row[RECYCLED]  # in the order of the fields
        times = step_ns / 1e9, reset_ns / 1e9, wait_ns / 1e9
        workers.append(WorkerStats(*counts, *times, size, simulated, process))
    return tuple(workers)
