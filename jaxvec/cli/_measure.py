"""Measures an env: bare, in pools of many sizes, and what a step of the best pool is made of."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

import jax
import numpy as np

from jaxvec._util import usable_cores
from jaxvec.cli import _records, _verdict
from jaxvec.cli._bench_setup import ROUNDS, BenchSetup, Request
from jaxvec.cli._breakdown import break_down
from jaxvec.cli._command import UsageError, counted
from jaxvec.cli._progress import Progress
from jaxvec.cli._records import Measurement, Sample
from jaxvec.cli._systems import Bare, Pool, System, Turn
from jaxvec.cli._target import Target
from jaxvec.cli._toys import Times

_NUM_ENVS = (16, 64, 256)  # that are tried by default
_MAX_START = 5.0  # seconds, for the constructors of a pool, above which a default size is left out
_MAX_STEP = 0.25  # seconds, for a step of a pool of the fewest workers, likewise


def measure(target: Target, request: Request, progress: Progress) -> Measurement:
    """Measures an env.

    Raises:
        UsageError: no pool has as many envs as workers.
        JaxvecError: the env failed.
    """
    cores, load = usable_cores(), os.getloadavg()[0]
    with ExitStack() as stack:
        with progress("the bare env", 2) as advance:
            one = Bare(stack, target, 1, here=True)
            times = one.times(2 * request.seconds)
            advance()
            turn = one(request.seconds)
            advance()
        lanes = max(int(cores / max(turn.busy[0], 0.01)), 1)
        setup = BenchSetup(target, request, progress, 1 / turn.rate, lanes, one.envs.spec)
        grid, left_out = _grid(setup, cores, turn.busy[0], times[0].build / cores)
        copies = max(cores, *(num_workers for _, num_workers in grid))
        every = Bare(stack, target, copies)
        times += every.times(request.seconds)
        samples, ones, alls = _sweep(setup, grid, one, every)
        bare = _bare(times, ones, alls, copies)
        best = _verdict.best(samples)
        breakdown, variants, transport = break_down(
            setup,
            best.num_envs,
            best.num_workers,
            times=[each.steps for each in times],
            reset_share=bare.reset_share,
        )
    return Measurement(
        env=target.name,
        kwargs=target.kwargs,
        cores=cores,
        load=load,
        platform=jax.default_backend(),
        transport=transport,
        rounds=ROUNDS,
        seconds=request.seconds,
        bare=bare,
        samples=samples,
        breakdown=breakdown,
        variants=variants,
        left_out=left_out,
    )


def default_workers(cores: int, core_share: float) -> Sequence[int]:
    """Returns what is worth trying: where envs wait more than they compute, more than there are cores."""
    more = (2 * cores, 4 * cores) if core_share < 0.5 else ()
    return sorted({1, max(cores // 4, 1), max(cores // 2, 1), cores, *more})


def _grid(
    setup: BenchSetup, cores: int, core_share: float, build: float
) -> tuple[list[tuple[int, int]], tuple[str, ...]]:
    """Returns the numbers of envs and of workers to try, and what is left out and why."""
    all_workers = setup.request.num_workers or default_workers(cores, core_share)
    sizes, left_out = list(setup.request.num_envs or ()), list[str]()
    if not sizes:
        step = setup.step_seconds / min(*all_workers, setup.lanes)
        for num_envs in _NUM_ENVS:
            if num_envs * build > _MAX_START:
                left_out.append(f"{counted(num_envs, 'env')}: they take {num_envs * build:.0f} s to build")
            elif num_envs * step > _MAX_STEP:
                left_out.append(
                    f"{counted(num_envs, 'env')}: a step of them takes up to {num_envs * step:.1f} s"
                )
            else:
                sizes.append(num_envs)
    grid: list[tuple[int, int]] = []
    for num_envs in sizes or [max(all_workers)]:
        for num_workers in all_workers:
            if num_workers <= num_envs:
                grid.append((num_envs, num_workers))
            else:
                left_out.append(f"{counted(num_envs, 'env')} on {num_workers} workers: a worker needs an env")
    if not grid:
        raise UsageError("--num-workers: every pool would have more workers than envs")
    return grid, tuple(left_out)


def _sweep(
    setup: BenchSetup, grid: Sequence[tuple[int, int]], one: Bare, every: Bare
) -> tuple[tuple[Sample, ...], list[Turn], list[Turn]]:
    """Returns samples of all pools, and the bare loops' turns between them."""
    samples: list[Sample] = []
    ones: list[Turn] = []
    alls: list[Turn] = []
    for num_envs in dict(grid):
        worker_counts = [num_workers for each, num_workers in grid if each == num_envs]
        with ExitStack() as stack:
            systems: dict[str, System] = {"one": one, "all": every}
            length = setup.length(num_envs, max(worker_counts))
            for num_workers in worker_counts:
                pool = Pool(stack, setup.pool(num_envs, num_workers), length)
                systems |= {f"host {num_workers}": pool.host, f"scan {num_workers}": pool.scan}
            turns = setup.turns(systems, f"pools of {num_envs}")
        ones.append(turns["one"])
        alls.append(turns["all"])
        for num_workers in worker_counts:
            scan, host = turns[f"scan {num_workers}"], turns[f"host {num_workers}"]
            samples.append(Sample(num_envs, num_workers, scan.rate, host.rate, statistics.mean(scan.busy)))
    return tuple(samples), ones, alls


def _bare(times: Sequence[Times], ones: Sequence[Turn], alls: Sequence[Turn], copies: int) -> _records.Bare:
    steps = np.concatenate([each.steps for each in times])
    resets = np.concatenate([each.resets for each in times])
    return _records.Bare(
        one=statistics.median(turn.rate for turn in ones),
        all=statistics.median(turn.rate for turn in alls),
        copies=copies,
        core_share=statistics.median(turn.busy[0] for turn in ones),
        build_seconds=statistics.mean(each.build for each in times),
        step_us=float(steps.mean()) * 1e6,
        step_us_median=float(np.median(steps)) * 1e6,
        step_us_p99=float(np.percentile(steps, 99)) * 1e6,
        reset_us=float(resets.mean()) * 1e6 if len(resets) else 0.0,
        reset_share=float(resets.sum() / steps.sum()),
    )
