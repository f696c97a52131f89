"""Measures the rates and CPU times of several systems that alternate.

Because the systems alternate, a temporary slowdown of the machine affects all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.loads import Load
from benchmarks.systems import NotRun, Run, System


@dataclass(frozen=True)
class Result:
    """Medians of a system over the rounds, or the reason why it did not run.

    Attributes:
        rate: Env steps per second.
        cpu: Seconds of CPU time per env step, of this process and all its children.
        start: Seconds from the start of the system until its envs are reset, measured once.
        not_run: Reason why the system did not run, or an empty string.
    """

    rate: float = 0.0
    cpu: float = 0.0
    start: float = 0.0
    not_run: str = ""


def measure(
    load: Load,
    systems: Mapping[str, System],
    *,
    rounds: int,
    seconds: float,
    beside: AbstractContextManager[Any] | None = None,
) -> dict[str, Result]:
    """Runs a load on all systems and returns a result per system.

    Args:
        load: The envs.
        systems: Systems by name.
        rounds: Number of measurements of each system.
        seconds: Approximate duration of a measurement.
        beside: Context manager of background load. It is entered after all systems have started.
    """
    results: dict[str, Result] = {}
    turns: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        starts: dict[str, float] = {}
        steps: dict[str, int] = {}
        for name, system in systems.items():
            try:
                start = time.perf_counter()
                runs[name] = stack.enter_context(system(load))
                starts[name] = time.perf_counter() - start
            except NotRun as reason:
                results[name] = Result(not_run=str(reason))
            except Exception as error:
                results[name] = _failed(error)
        stack.enter_context(beside or nullcontext())
        for turn in range(rounds + 1):
            for name, run in list(runs.items()):
                try:
                    if turn == 0:
                        steps[name] = _steps_in(run, seconds)
                        continue
                    turns.setdefault(name, []).append(_turn(run, steps[name], steps[name] * load.num_envs))
                except Exception as error:
                    results[name] = _failed(error)
                    del runs[name]
                    turns.pop(name, None)
    for name, pairs in turns.items():
        rates, cpus = zip(*pairs, strict=True)
        results[name] = Result(statistics.median(rates), statistics.median(cpus), starts[name])
    return {name: results[name] for name in systems}


def rate_of(result: Result) -> float:
    """Returns the rate, or raises `RuntimeError` if the system did not run."""
    if result.not_run:
        raise RuntimeError(result.not_run)
    return result.rate


def _steps_in(run: Run, seconds: float) -> int:
    """Returns the number of steps that take about `seconds`, after a warm-up with that number."""
    steps = 10
    while True:
        run(steps)  # compiles the program for this number of steps
        start = time.perf_counter()
        run(steps)
        taken = time.perf_counter() - start
        if taken > seconds / 2:
            return steps
        # The number grows at most tenfold, because a few steps may fit into one time slice of the scheduler.
        steps = max(int(steps * min(seconds / taken, 10)), steps + 1)


def _turn(run: Run, steps: int, env_steps: int) -> tuple[float, float]:
    """Runs the steps and returns env steps per second and seconds of CPU time per env step."""
    children, own, start = _children_cpu(), time.process_time(), time.perf_counter()
    run(steps)
    taken, own = time.perf_counter() - start, time.process_time() - own
    return env_steps / taken, (own + _children_cpu() - children) / env_steps


def _failed(error: Exception) -> Result:
    return Result(not_run=f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _children_cpu() -> float:
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
