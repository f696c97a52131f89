"""Measures an env: bare, in pools of many sizes, and what a step of the best pool is made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from gymnasium import Space, spaces

import jaxvec
from jaxvec._cores import usable_cores
from jaxvec._spaces import Leaf
from jaxvec._spec import PoolSpec
from jaxvec._vector_env import VectorEnv
from jaxvec.cli import _records, _verdict
from jaxvec.cli._command import UsageError
from jaxvec.cli._progress import Progress
from jaxvec.cli._records import Breakdown, Measurement, Sample, Variant
from jaxvec.cli._systems import Bare, Callback, Pool, System, Turn, take_turns
from jaxvec.cli._target import Target
from jaxvec.cli._toys import HollowEnv

ROUNDS = 5
_NUM_ENVS = (16, 64, 256)  # that are tried by default
_MAX_START = 5.0  # seconds, for the constructors of a pool, above which a default size is left out
_MAX_STEP = 0.25  # seconds, for a step of a pool of the fewest workers, likewise
_UNEVEN = 1.2  # straggling from which first-ready batches are tried
_RESETS = 0.15  # share of resets from which spare envs are


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        num_envs, num_workers: of pools; `None` for what suits env and machine.
        seconds: of one system's turn.
        transport: of programs.
    """

    num_envs: tuple[int, ...] | None
    num_workers: tuple[int, ...] | None
    seconds: float
    transport: str


def measure(target: Target, request: Request, progress: Progress) -> Measurement:
    """Measures an env.

    Raises:
        UsageError: no pool has as many envs as workers.
        JaxvecError: the env failed.
    """
    return _Run(target, request, progress).measure()


class _Run:
    """One measurement, as far as it has come."""

    def __init__(self, target: Target, request: Request, progress: Progress) -> None:
        self._target = target
        self._request = request
        self._progress = progress
        self._cores = usable_cores()
        self._left_out: list[str] = []

    def measure(self) -> Measurement:
        """Measures all."""
        seconds = self._request.seconds
        with ExitStack() as stack:
            with self._progress("the bare env", 2) as advance:
                self._one = Bare(stack, self._target, 1, here=True)
                self._times = self._one.times(2 * seconds)
                advance()
                turn = self._one(seconds)
                self._step, self._core_share = 1 / turn.rate, turn.busy[0]
                advance()
            grid = list(self._grid())
            copies = max(self._cores, *(num_workers for _, num_workers in grid))
            self._all = Bare(stack, self._target, copies)
            self._times += self._all.times(seconds)
            bare, samples = self._sweep(grid, copies)
            best = _verdict.best(samples)
            breakdown, variants, transport = self._break_down(best, bare)
        return Measurement(
            env=self._target.name,
            kwargs=self._target.kwargs,
            cores=self._cores,
            platform=jax.default_backend(),
            transport=transport,
            rounds=ROUNDS,
            seconds=seconds,
            bare=bare,
            samples=samples,
            breakdown=breakdown,
            variants=variants,
            left_out=tuple(self._left_out),
        )

    def _grid(self) -> Iterator[tuple[int, int]]:
        """Yields the numbers of envs and of workers to try."""
        all_workers = self._request.num_workers or _default_workers(self._cores, self._core_share)
        found = False
        for num_envs in self._request.num_envs or self._default_num_envs(all_workers):
            for num_workers in all_workers:
                if num_workers <= num_envs:
                    found = True
                    yield num_envs, num_workers
                else:
                    self._left_out.append(f"{num_envs} envs on {num_workers} workers: a worker needs an env")
        if not found:
            raise UsageError("--num-workers: every pool would have more workers than envs")

    def _default_num_envs(self, all_workers: Sequence[int]) -> Sequence[int]:
        build = statistics.mean(times.build for times in self._times) / self._cores
        step = self._step / min(min(all_workers), self._lanes)
        chosen: list[int] = []
        for num_envs in _NUM_ENVS:
            start = num_envs * build
            if start > _MAX_START:
                self._left_out.append(f"{num_envs} envs: they take {start:.0f} s to build")
            elif num_envs * step > _MAX_STEP:
                self._left_out.append(f"{num_envs} envs: a step of them takes up to {num_envs * step:.1f} s")
            else:
                chosen.append(num_envs)
        return chosen or [max(all_workers)]

    @property
    def _lanes(self) -> int:
        """How many envs this machine steps at a time."""
        return max(int(self._cores / max(self._core_share, 0.01)), 1)

    def _sweep(
        self, grid: Sequence[tuple[int, int]], copies: int
    ) -> tuple[_records.Bare, tuple[Sample, ...]]:
        samples: list[Sample] = []
        ones: list[Turn] = []
        alls: list[Turn] = []
        for num_envs in dict(grid):
            with ExitStack() as stack:
                systems: dict[str, System] = {"one": self._one, "all": self._all}
                pools = [num_workers for each, num_workers in grid if each == num_envs]
                length = self._length(num_envs, max(pools))
                for num_workers in pools:
                    pool = Pool(stack, self._pool(num_envs, num_workers), length)
                    systems |= {f"host {num_workers}": pool.host, f"scan {num_workers}": pool.scan}
                turns = self._turns(systems, f"pools of {num_envs}")
            ones.append(turns["one"])
            alls.append(turns["all"])
            for num_workers in pools:
                scan, host = turns[f"scan {num_workers}"], turns[f"host {num_workers}"]
                samples.append(
                    Sample(num_envs, num_workers, scan.rate, host.rate, statistics.mean(scan.busy))
                )
        steps = np.concatenate([times.steps for times in self._times])
        resets = np.concatenate([times.resets for times in self._times])
        bare = _records.Bare(
            one=statistics.median(turn.rate for turn in ones),
            all=statistics.median(turn.rate for turn in alls),
            copies=copies,
            core_share=statistics.median(turn.busy[0] for turn in ones),
            build_seconds=statistics.mean(times.build for times in self._times),
            step_us=float(steps.mean()) * 1e6,
            step_us_median=float(np.median(steps)) * 1e6,
            step_us_p99=float(np.percentile(steps, 99)) * 1e6,
            reset_us=float(resets.mean()) * 1e6 if len(resets) else 0.0,
            reset_share=float(resets.sum() / steps.sum()),
        )
        return bare, tuple(samples)

    def _break_down(self, best: Sample, bare: _records.Bare) -> tuple[Breakdown, tuple[Variant, ...], str]:
        num_envs, num_workers = best.num_envs, best.num_workers
        with ExitStack() as whole:
            with ExitStack() as stack:
                envs = self._pool(num_envs, num_workers)
                transport = _transport(envs)
                pool = Pool(whole, envs, self._length(num_envs, num_workers))
                systems: dict[str, System] = {
                    "pool": pool.scan,
                    "bare": Bare(stack, self._target, num_workers),
                }
                for name, (count, *spaces_) in self._toys(envs).items():
                    length = self._length(count, num_workers, toy=True)
                    toys = self._hollow(count, num_workers, *spaces_)
                    systems[name] = Pool(stack, toys, length).scan
                    if name == "empty" and transport == "io_callback":
                        systems["callback"] = Callback(toys, length)
                turns = self._turns(systems, "what a step is made of")
            us = {name: num_envs / turn.rate * 1e6 for name, turn in turns.items()}
            us.setdefault("flat", us["hollow"])
            busy = turns["pool"].busy
            straggling = max(
                _verdict.straggling([times.steps for times in self._times], num_envs, num_workers),
                max(busy) / statistics.mean(busy),
            )
            breakdown = Breakdown(
                num_envs=num_envs,
                num_workers=num_workers,
                step_us=us["pool"],
                bare_us=us["bare"],
                hollow_us=us["hollow"],
                flat_us=us["flat"],
                empty_us=us["empty"],
                single_us=num_workers / turns["single"].rate * 1e6,
                callback_us=us.get("callback", 0.0),
                straggling=straggling,
                obs_bytes=_obs_bytes(envs.spec),
                num_leaves=len(_obs_leaves(envs.spec)) + len(envs.spec.action_leaves),
                memcpy_us=_memcpy(num_envs * _obs_bytes(envs.spec), self._request.seconds) * 1e6,
            )
            variants = [
                self._try(pool, name, settings)
                for name, settings in _variants(num_envs, num_workers, straggling, bare.reset_share)
            ]
        return breakdown, tuple(variants), transport

    def _toys(self, envs: VectorEnv) -> dict[str, tuple[int, Space[Any], Space[Any]]]:
        """Returns how many, and spaces, of envs that do nothing, by the names of `Breakdown`'s fields."""
        obs, action = envs.single_observation_space, envs.single_action_space
        tiny, binary = spaces.Box(0, 255, (1,), np.uint8), spaces.Discrete(2)
        toys: dict[str, tuple[int, Space[Any], Space[Any]]] = {
            "hollow": (envs.num_envs, obs, action),
            "empty": (envs.num_envs, tiny, binary),
            "single": (envs.num_workers, tiny, binary),
        }
        if not _is_flat(envs.spec):
            flat = spaces.Box(0, 255, (max(_obs_bytes(envs.spec), 1),), np.uint8)
            toys["flat"] = envs.num_envs, flat, binary
        return toys

    def _try(self, pool: Pool, name: str, settings: dict[str, Any]) -> Variant:
        num_envs, num_workers = pool.envs.num_envs, pool.envs.num_workers
        with ExitStack() as stack:
            other = Pool(
                stack,
                self._pool(num_envs, num_workers, **settings),
                self._length(settings.get("batch_size", num_envs), num_workers),
            )
            turns = self._turns({"as it is": pool.scan, name: other.scan}, name)
        return Variant(name, settings, turns[name].rate / turns["as it is"].rate)

    def _turns(self, systems: dict[str, System], what: str) -> dict[str, Turn]:
        return take_turns(
            systems, rounds=ROUNDS, seconds=self._request.seconds, what=what, progress=self._progress
        )

    def _pool(self, num_envs: int, num_workers: int, **settings: Any) -> VectorEnv:
        return self._target.make(
            num_envs=num_envs, num_workers=num_workers, transport=self._request.transport, **settings
        )

    def _hollow(self, num_envs: int, num_workers: int, obs: Space[Any], action: Space[Any]) -> VectorEnv:
        return jaxvec.make(
            partial(HollowEnv, obs, action),
            num_envs,
            num_workers=num_workers,
            transport=self._request.transport,
        )

    def _length(self, num_envs: int, num_workers: int, *, toy: bool = False) -> int:
        """Returns the length of scans, of which a turn should have some: by a rough and high estimate."""
        step = 30e-6 + num_envs * (1e-6 + 4e-9 * _obs_bytes(self._one.envs.spec))
        if not toy:
            step += num_envs * self._step / min(num_workers, self._lanes)
        return int(np.clip(self._request.seconds / 4 / step, 1, 1000))


def _default_workers(cores: int, core_share: float) -> Sequence[int]:
    """Returns what is worth trying: where envs wait more than they compute, more than there are cores."""
    more = (2 * cores, 4 * cores) if core_share < 0.5 else ()
    return sorted({1, max(cores // 4, 1), max(cores // 2, 1), cores, *more})


def _variants(
    num_envs: int, num_workers: int, straggling: float, reset_share: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields settings that may suit the env."""
    if num_envs > 1:
        yield "halves", {"batch_size": num_envs // 2, "recv_order": "sent"}
    if straggling > _UNEVEN:
        for batch_size in sorted({num_envs // 4, num_envs // 2} - {0}):
            yield "first-ready", {"batch_size": batch_size}
    if reset_share > _RESETS:
        yield "spare envs", {"spare_envs": max(num_envs // num_workers // 4, 1)}


def _obs_leaves(spec: PoolSpec) -> list[Leaf]:
    return [leaf for leaf in spec.timestep_leaves if leaf.path[0] == "obs"]


def _obs_bytes(spec: PoolSpec) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.stored.itemsize for leaf in _obs_leaves(spec))


def _is_flat(spec: PoolSpec) -> bool:
    """Whether observation and action are an array each, and rows are written as they are."""
    obs = _obs_leaves(spec)
    return len(obs) == len(spec.action_leaves) == 1 and obs[0].dtype == obs[0].stored


def _transport(envs: VectorEnv) -> str:
    if envs.transport == "auto":
        return "ffi" if jax.default_backend() == "cpu" else "io_callback"
    return envs.transport


def _memcpy(num_bytes: int, seconds: float) -> float:
    """Returns the seconds of a plain copy of so many bytes."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return _median_time(lambda: np.copyto(target, source), seconds / 4)


def _median_time(function: Callable[[], object], seconds: float) -> float:
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while not taken or time.perf_counter() < until:
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
