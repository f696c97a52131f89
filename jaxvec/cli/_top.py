"""The workers of a running program as a table, from /proc and shared memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxvec import _stats
from jaxvec._workers import stacks
from jaxvec.cli import UsageError

_CLEAR = "\x1b[H\x1b[J"
_ROW_BYTES = 8 * _stats.WIDTH
_COLUMNS = (
    *("PID", "POOL", "ENVS", "MEMORY", "SHARE", "FILES", "THREADS", "CHILDREN", "AGE"),
    *("STEPS", "STEPS/S", "EPISODES", "FAULTS", "REPLACED", "RECYCLED"),
)
_COUNTERS = "steps", "episodes", "faults", "replaced", "recycled"


def look(pid: int) -> list[dict[str, Any]]:
    """Returns the workers of a program, those with the most memory first. Raises `UsageError` for none."""
    family = _stats.family_of(pid)
    workers = list[dict[str, Any]]()
    envs = {worker.pid: f"{worker.first}-{worker.last}" for worker in stacks.find_all(pid)}
    for pool, segment in enumerate(_segments(pid)):
        # The rows of the statistics come first. Rows of no worker are other data.
        rows = np.frombuffer(segment[: len(segment) // _ROW_BYTES * _ROW_BYTES], np.int64)
        for row in rows.reshape(-1, _stats.WIDTH)[: len(family)].tolist():
            worker = row[_stats.PID]
            if worker in family and (process := _stats.read_process(worker)) is not None:
                counters = {name: row[getattr(_stats, name.upper())] for name in _COUNTERS}
                counters["replaced"] -= counters["recycled"]  # leaves those after faults
                workers.append({"pool": pool, "envs": envs.get(worker, "?"), **asdict(process), **counters})
    if not workers:
        raise UsageError(
            f"process {pid} has no workers of jaxvec on this machine; a pool with backend='serial' has none"
        )
    return sorted(workers, key=lambda worker: -worker["memory"])


def live(pid: int, seconds: float) -> Iterator[str]:
    """Yields a table again and again, until Ctrl-C or the end of the program."""
    before: dict[tuple[int, str], tuple[float, int]] = {}
    with suppress(UsageError, KeyboardInterrupt):
        while True:
            now = time.monotonic()
            workers = look(pid)
            for worker in workers:
                key = worker["pool"], worker["envs"]
                if key in before:
                    worker["rate"] = (worker["steps"] - before[key][1]) / (now - before[key][0])
                before[key] = now, worker["steps"]
            yield (_CLEAR if sys.stdout.isatty() else "") + table(workers) + "\n"
            time.sleep(seconds)


def table(workers: Sequence[dict[str, Any]]) -> str:
    rows = [_COLUMNS, *map(_cells, workers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def _cells(worker: dict[str, Any]) -> tuple[str, ...]:
    sizes = (f"{worker[name] / 1e6:,.0f} MB" for name in ("memory", "proportional_memory"))
    counts = (str(worker[name]) for name in ("descriptors", "threads", "children"))
    rate = f"{worker['rate']:,.0f}" if "rate" in worker else "-"
    more = (f"{worker[name]:,}" for name in _COUNTERS[1:])
    names = str(worker["pid"]), str(worker["pool"]), worker["envs"]
    return *names, *sizes, *counts, f"{worker['age']:,.0f} s", f"{worker['steps']:,}", rate, *more


def _segments(pid: int) -> Iterator[bytes]:
    """Yields the beginning of each pool's shared memory, which the program has open."""
    try:
        descriptors = sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name))
    except FileNotFoundError as error:
        raise UsageError(f"there is no process {pid}, or no /proc to read (as on macOS)") from error
    except PermissionError as error:
        raise UsageError(f"process {pid} belongs to another user; run this command as that user") from error
    seen: set[int] = set()  # inodes: the mapping has a descriptor of its own
    for path in descriptors:
        with suppress(OSError):  # closed meanwhile
            if (
                os.readlink(path).startswith(("/memfd:jaxvec", "/dev/shm/jaxvec"))
                and (inode := path.stat().st_ino) not in seen
            ):
                seen.add(inode)
                with path.open("rb") as file:
                    yield file.read(_ROW_BYTES * 4096)
