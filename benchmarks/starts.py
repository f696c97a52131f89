"""Measures the start of workers relative to bare Python interpreters: `python -m benchmarks.starts`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import jaxvec
from jaxvec._vector_env import pool_of

_IMPORTS = "import numpy, gymnasium"
NO_LIMIT = jaxvec.Timeouts(start=None)


def imports(code: str = _IMPORTS) -> float:
    """Returns the seconds that a bare interpreter takes to start, to run `code` and to exit."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def pool(num_workers: int, env: str = "CartPole-v1", **options: object) -> float:
    """Returns the seconds that `jaxvec.make` takes for one env per worker."""
    start = time.perf_counter()
    with jaxvec.make(env, num_workers, num_workers=num_workers, timeouts=NO_LIMIT, **options):
        return time.perf_counter() - start


def ratio(num_workers: int, rounds: int) -> float:
    """Returns the start time of a pool relative to a bare interpreter, from minima of alternating rounds."""
    pool(num_workers)  # the first pool also starts the fork server
    pairs = [(pool(num_workers), imports()) for _ in range(rounds)]
    pools, bare = zip(*pairs, strict=True)
    return min(pools) / min(bare)


def memory(num_workers: int = 64) -> float:
    """Returns the mean proportional set size (PSS) of the workers of a pool, in megabytes."""
    with jaxvec.make("CartPole-v1", num_workers, num_workers=num_workers, timeouts=NO_LIMIT) as envs:
        envs.reset(seed=0)
        connections = pool_of(envs).workers.supervisor.connections
        return statistics.mean(pss(process.pid) for process in connections.processes)


def preload(env: str, modules: list[str], rounds: int) -> tuple[float, float]:
    """Returns the start times of a pool with two workers without and with `preload`, in seconds.

    Args:
        env: Id of an env that imports `modules`.
        modules: Names of the modules to preload.
        rounds: Number of alternating rounds. The minima are returned.
    """
    pool(2, env, workers=jaxvec.Workers(preload=modules))
    pairs = [(pool(2, env), pool(2, env, workers=jaxvec.Workers(preload=modules))) for _ in range(rounds)]
    without, preloaded = zip(*pairs, strict=True)
    return min(without), min(preloaded)


def pss(pid: int) -> float:
    """Returns the proportional set size (PSS) of a process in megabytes."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (line,) = [line for line in rollup.splitlines() if line.startswith("Pss:")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    print(f"bare interpreter that imports NumPy and Gymnasium: {min(imports() for _ in range(5)):.3f} s")
    for workers in (2, 64):
        print(f"pool of {workers} workers relative to it: {ratio(workers, 5):.2f}")
    print(f"PSS per worker, with 64 workers: {memory():.1f} MB")
