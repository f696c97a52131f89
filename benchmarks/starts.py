"""What the start of workers costs, over that of bare interpreters: `python -m benchmarks.starts`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import jaxvec

_IMPORTS = "import numpy, gymnasium"


NO_LIMIT = jaxvec.Timeouts(start=None)


def imports(modules: str = _IMPORTS) -> float:
    """Returns the seconds that a bare interpreter takes to import NumPy and Gymnasium, and to end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", modules], check=True)
    return time.perf_counter() - began


def pool(num_workers: int, env: str = "CartPole-v1", **options: object) -> float:
    """Returns the seconds that `make` takes, with an env in each worker."""
    began = time.perf_counter()
    with jaxvec.make(env, num_workers, num_workers=num_workers, timeouts=NO_LIMIT, **options):
        return time.perf_counter() - began


def ratio(num_workers: int, rounds: int) -> float:
    """Returns what a pool takes over what a bare interpreter does, each the least of interleaved rounds."""
    pool(num_workers)  # the first pool's also starts the fork server
    pairs = [(pool(num_workers), imports()) for _ in range(rounds)]
    pools, bare = zip(*pairs, strict=True)
    return min(pools) / min(bare)


def memory(num_workers: int = 64) -> float:
    """Returns the megabytes of a worker, its proportional set size, with so many of them."""
    with jaxvec.make("CartPole-v1", num_workers, num_workers=num_workers, timeouts=NO_LIMIT) as envs:
        envs.reset(seed=0)
        return statistics.mean(pss(each.pid) for each in envs.pool._workers.supervisor._processes)


def preload(env: str, modules: list[str], rounds: int) -> tuple[float, float]:
    """Returns the seconds of pools of two workers whose envs import `modules`, without and with `preload`."""
    pool(2, env, workers=jaxvec.Workers(preload=modules))
    pairs = [(pool(2, env), pool(2, env, workers=jaxvec.Workers(preload=modules))) for _ in range(rounds)]
    without, preloaded = zip(*pairs, strict=True)
    return min(without), min(preloaded)


def pss(pid: int) -> float:
    """Returns the proportional set size of a process, in megabytes."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (line,) = [line for line in rollup.splitlines() if line.startswith("Pss:")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    print(f"bare interpreter that imports NumPy and Gymnasium: {min(imports() for _ in range(5)):.3f} s")
    for workers in (2, 64):
        print(f"pool of {workers} workers over it: {ratio(workers, 5):.2f}")
    print(f"a worker of 64: {memory():.1f} MB")
