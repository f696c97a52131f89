"""Predicts step rates on machines with many cores from costs that two cores suffice to measure.

    python -m benchmarks.many_cores

A step of N envs in W workers, each with a core of its own, takes

    T = call + row·N + wakes + (N/W)·(env + loop)

`call` and `row` are CPU time of the program, and `loop` is the worker's time per env step beside `env.step`.
Workers spin for 0.2 ms after a step, and then fall asleep. While they spin, `wakes` is zero. Afterwards it is

    wake·W + latency            with less than 16 workers
    wake·(W/8 + 7) + latency    with more, of which each eighth wakes the seven behind it

where `latency` is the time from a wake until the worker runs, and back. Bare loops take (N/W)·env.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy as np

import jaxvec
from benchmarks.loads import BusyEnv
from benchmarks.systems import Run, scan_pool
from jaxvec._workers import process

_CORES, _ENVS = (16, 64, 128), (64, 256, 1024, 4096)
_ENV_TIMES = {"CartPole, 4.5 µs": 4.5e-6, "100 µs": 1e-4, "1 ms": 1e-3}


@dataclass(frozen=True)
class Costs:
    """Terms of the model, in seconds."""

    call: float
    wake: float
    row: float
    latency: float
    loop: float

    def step(self, cores: int, num_envs: int, env: float, *, asleep: bool) -> float:
        """Returns the predicted duration of a step."""
        share = -(-num_envs // cores)
        in_turn = cores if cores < 16 else cores / 8 + 7
        wakes = self.wake * in_turn + self.latency if asleep else 0.0
        return self.call + self.row * num_envs + wakes + share * (env + self.loop)


def measure(steps: int, turns: int) -> Costs:
    """Measures the terms with envs that do nothing, in jitted scans over FFI."""
    least = partial(_least, steps=steps, turns=turns)
    # CPU time and duration of 4 and 14 workers with 64 envs, and of 4 workers with 4,096 envs.
    few, more, long = least(4, 64), least(14, 64), least(4, 4096)
    wake = (more[0] - few[0]) / (14 - 4)
    row = (long[0] - few[0]) / (4096 - 64)
    call = few[0] - 4 * wake - 64 * row
    one, many = least(1, 64), least(1, 4096)
    loop = (many[1] - one[1]) / (4096 - 64) - row - _bare()
    latency = one[1] - one[0] - 64 * (loop + _bare())
    return Costs(call, wake, row, latency, loop)


def _least(workers: int, num_envs: int, steps: int, turns: int) -> tuple[float, float]:
    """Returns the least CPU time of the program per step, and the least duration, of several turns."""
    with _sleeping_pool(workers, num_envs) as run:
        run(steps)
        times = []
        for _ in range(turns):
            cpu, start = time.process_time(), time.perf_counter()
            run(steps)
            times.append(((time.process_time() - cpu) / steps, (time.perf_counter() - start) / steps))
    return min(each[0] for each in times), min(each[1] for each in times)


@contextmanager
def _sleeping_pool(workers: int, num_envs: int) -> Generator[Run]:
    """Yields the steps of a pool whose workers sleep between steps, as after a slow policy."""
    with (
        mock.patch.object(process, "_SPIN_NS", 0),
        jaxvec.config.override(transport="ffi", dispatch="native"),
        jaxvec.make([partial(BusyEnv, 0)] * num_envs, num_workers=workers) as envs,
    ):
        yield scan_pool(envs)


def _bare(steps: int = 100_000) -> float:
    """Returns the duration of a step of an env that does nothing."""
    env, action, times = BusyEnv(0), np.int64(0), []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            env.step(action)
        times.append((time.perf_counter() - start) / steps)
    return min(times)


def main() -> None:
    """Prints the measured terms and the predictions, as tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_cores", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=15, help="turns, of which the least counts")
    options = parser.parse_args()
    costs = measure(options.steps, options.turns)
    print("| term | µs |\n| --- | ---: |")
    for name, value in vars(costs).items():
        print(f"| {name} | {value * 1e6:.3g} |")
    print("\nPredicted rates over bare loops, while the workers spin · after they fell asleep:\n")
    print("| env step | cores |", " | ".join(f"{num_envs:,} envs" for num_envs in _ENVS), "|")
    print("| --- | ---: |", " | ".join("---:" for _ in _ENVS), "|")
    for (name, env), cores in itertools.product(_ENV_TIMES.items(), _CORES):
        cells = []
        for num_envs in _ENVS:
            bare = -(-num_envs // cores) * env
            both = (bare / costs.step(cores, num_envs, env, asleep=asleep) for asleep in (False, True))
            cells.append(" · ".join(f"{each:.2f}" for each in both) if num_envs >= cores else "–")
        print(f"| {name} | {cores} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
