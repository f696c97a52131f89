"""Measures the CPU time of steps with `record_faults`, as a ratio to steps without it.

    python benchmarks/flight.py

The pools take turns, in one process, so other programs on the machine disturb both alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import numpy as np

import jaxvec

SECONDS, NUM_ENVS, NUM_STEPS = 60, 64, 20


def main() -> None:
    """Prints the medians of three pools: without, with, and again without the recorder."""
    options: list[dict[str, Any]] = [{}, {"record_faults": tempfile.mkdtemp()}, {}]
    pools = [jaxvec.make("CartPole-v1", NUM_ENVS, backend="serial", **each) for each in options]
    actions = np.random.default_rng(0).integers(0, 2, (NUM_STEPS, NUM_ENVS))
    for envs in pools:
        envs.reset(seed=0)
    times: list[list[float]] = [[] for _ in pools]
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for envs, taken in zip(pools, times, strict=True):
            start = time.thread_time()
            for action in actions:
                envs.step(action)
            taken.append(time.thread_time() - start)
    base, *others = [statistics.median(each[1:]) for each in times]
    print(f"{len(times[0])} turns of {NUM_STEPS} steps, {base / NUM_STEPS * 1e6:.0f} µs per step without")
    for name, median in zip(("with", "again without"), others, strict=True):
        print(f"{name}: {median / base:.3f}")


if __name__ == "__main__":
    main()
