"""Shows where the time of a step goes on many cores: `python -m benchmarks.accelerator.cores cores FILE`.

Programs on the CPU step CartPoles with a worker per core and fewer, pinned or not, and with each candidate of
`JAXVEC_CANDIDATES`. Bare loops show what the cores can do, and those that meet in a spin barrier after each
step bound every synchronous step.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import jax
import numpy as np
from numpy.typing import NDArray

import jaxvec
from benchmarks.accelerator.programs import Answers, main
from benchmarks.systems import Run, scan_pool
from jaxvec._memory.segment import split_evenly
from jaxvec._settings import CANDIDATES
from jaxvec._util import usable_cores

_STEPS = 64  # of a run
_LINE = 8  # int64 numbers of a cache line


def cores(answers: Answers, device: jax.Device, short: bool) -> None:
    """Measures bare loops and pools: rates, waits for a core, and the phases of a step."""
    number = usable_cores()
    fewer = sorted({number, number - 1, number - 2, number * 3 // 4, number // 2}, reverse=True)
    ways: dict[str, Any] = {f"{n} workers": {"num_workers": n} for n in fewer if n > 0}
    for n in (number, max(number - 1, 1)):
        ways[f"{n} pinned workers"] = {"num_workers": n, "workers": jaxvec.Workers(pin=True)}
    for words in sorted({*CANDIDATES, ",".join(CANDIDATES)}):
        ways[f"candidates {words}"] = {"candidates": words}
    seconds = 0.05 if short else 0.4
    with jax.default_device(jax.devices("cpu")[0]):
        for num_envs in (8,) if short else (64, 256, 1024):
            load = f"CartPole x {num_envs}"
            answers.keep(f"{load}, bare loops", partial(_measure_loops, num_envs, seconds))
            for name, options in ways.items():
                answers.keep(f"{load}, {name}", partial(_measure_pool, num_envs, seconds, **options))


def _rate(run: Run, num_envs: int, seconds: float) -> tuple[int, int]:
    """Returns env steps per second, the median of 3 rounds, and the number of steps of all rounds."""
    rates = []
    steps = 0
    for _ in range(3):
        before = steps
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            run(_STEPS)
            steps += _STEPS
        rates.append((steps - before) * num_envs / (time.perf_counter() - start))
    return round(statistics.median(rates)), steps


def _measure_loops(num_envs: int, seconds: float) -> dict[str, Any]:
    results = {}
    with _bare_loops(num_envs) as (run, slices):
        for name, meet in (("apart", False), ("that meet after each step", True)):
            run(_STEPS, meet=meet)
            slices.clear()
            rate, _ = _rate(partial(run, meet=meet), num_envs, seconds)
            results[name] = {"steps/s": rate, "slice, us": _spread(slices)}
    return results


@contextmanager
def _bare_loops(num_envs: int) -> Generator[tuple[Callable[..., None], list[float]]]:
    """Yields a run of plain loops in one process per core, and the list of their times per step in µs."""
    context = multiprocessing.get_context("spawn")
    parts = split_evenly(num_envs, min(usable_cores(), num_envs))
    progress = context.RawArray("q", _LINE * len(parts))
    pipes = []
    slices: list[float] = []
    for number, (first, stop) in enumerate(parts):
        pipe, child_pipe = context.Pipe()
        arguments = (number, stop - first, child_pipe, progress)
        context.Process(target=_loop, args=arguments, daemon=True).start()
        child_pipe.close()
        pipes.append(pipe)

    def run(num_steps: int, *, meet: bool) -> None:
        for pipe in pipes:
            pipe.send((num_steps, meet))
        for pipe in pipes:
            slices.extend(pipe.recv())

    try:
        yield run, slices
    finally:
        for pipe in pipes:
            pipe.send(None)


def _loop(number: int, num_envs: int, pipe: Any, progress: Any) -> None:
    """Steps envs as often as the pipe says; loops that meet spin after each step until all have made it."""
    envs = [gymnasium.make("CartPole-v1") for _ in range(num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    made = np.frombuffer(progress, np.int64)[::_LINE]  # steps of each loop
    for num_steps, meet in iter(pipe.recv, None):
        slices = []
        for step in range(num_steps):
            start = time.perf_counter()
            for env in envs:
                _, _, terminated, truncated, _ = env.step(step % 2)
                if terminated or truncated:
                    env.reset()
            slices.append((time.perf_counter() - start) * 1e6)
            if meet:
                made[number] += 1
                while made.min() < made[number]:
                    pass
        pipe.send(slices)


def _measure_pool(num_envs: int, seconds: float, *, candidates: str = "", **options: Any) -> dict[str, Any]:
    with (
        mock.patch.dict(os.environ, JAXVEC_CANDIDATES=candidates),
        jaxvec.config.override(transport="ffi"),
        jaxvec.make("CartPole-v1", num_envs, **options) as envs,
        tempfile.TemporaryDirectory() as folder,
    ):
        run = scan_pool(envs)
        run(_STEPS)
        before = _usage(envs)
        rate, steps = _rate(run, num_envs, seconds)
        used = (_usage(envs) - before) / steps
        with envs.trace(Path(folder, "trace.json")) as trace:
            run(_STEPS)
        events = json.loads(trace.read_text())["traceEvents"]
    program, *workers = used.tolist()
    slices, running, waiting = zip(*workers, strict=True)
    per_step = {
        "whole": round(num_envs / rate * 1e6, 1),
        "slice": _spread(slices),
        "a worker runs": _spread(running),
        "a worker waits for a core": _spread(waiting),
        "the program runs": round(program[1], 1),
        "the program waits for a core": round(program[2], 1),
    }
    return {"steps/s": rate, "us per step": per_step, "us since the call, in a trace": _phases(events)}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(statistics.mean(values), 1), "max": round(max(values), 1)}


def _usage(envs: jaxvec.VectorEnv) -> NDArray[np.float64]:
    """Returns µs in envs, on a core, and waiting for one, `[1 + num_workers, 3]`, the program's first."""
    rows = [[0.0, *_scheduled("self")]]
    for worker in envs.stats().workers:
        pid = worker.process.pid if worker.process else "none"
        rows.append([(worker.step_time + worker.reset_time) * 1e6, *_scheduled(pid)])
    return np.array(rows)


def _scheduled(pid: int | str) -> list[float]:
    """Returns µs on a core and in a run queue, summed over the threads of a process; zeros if unknown."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    times = [file.read_text().split()[:2] for file in files]
    return (np.array(times, float).reshape(-1, 2).sum(0) / 1e3).tolist()


def _phases(events: list[dict[str, Any]]) -> dict[str, float]:
    """Returns when the phases of a step end, and how long slices take; medians over the steps of a trace."""
    spans = [event for event in events if event["ph"] == "X"]
    calls = sorted(span["ts"] for span in spans if span["name"] == "jaxvec.step")
    ends: list[dict[str, float]] = [{} for _ in calls]  # µs since the call, by span of the program
    slices: list[dict[int, list[float]]] = [defaultdict(list) for _ in calls]  # by worker: starts and ends
    for span in spans:
        index = bisect(calls, span["ts"]) - 1
        if index < 0:
            continue
        start = span["ts"] - calls[index]
        if "env" in span["name"]:
            slices[index][span["tid"]] += start, start + span["dur"]
        elif span["name"] != "wait":
            ends[index][span["name"]] = start + span["dur"]
    rows = []
    for index in range(len(calls) - 1):
        starts = [min(times) for times in slices[index].values()]
        stops = [max(times) for times in slices[index].values()]
        lengths = np.subtract(stops, starts)
        rows.append(
            {
                "actions written": ends[index]["write actions"],
                "workers woken": ends[index]["dispatch"],
                "first worker starts": min(starts),
                "last worker starts": max(starts),
                "mean slice": lengths.mean(),
                "longest slice": lengths.max(),
                "last worker done": max(stops),
                "program woken": ends[index].get("wait for workers", ends[index]["dispatch"]),
                "results read": ends[index]["copy results"],
                "next call": calls[index + 1] - calls[index],
            }
        )
    return {name: round(float(np.median([row[name] for row in rows])), 1) for name in rows[0]}


if __name__ == "__main__":
    main(cores)
