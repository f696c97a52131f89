"""Benchmarks an env, alone and in pools, for `jaxvec bench`.

`measure` alternates between plain `env.step` loops, Python loops of `envs.step` and compiled programs, for
a grid of pool sizes. `report` formats the medians, notes about the machine, and one recommendation. Workers
import this module to run `bare_loop`, so it imports JAX only inside functions of the main process.
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

import jaxvec
from jaxvec._settings import config
from jaxvec._util import usable_cores
from jaxvec._vector_env import VectorEnv, pool_of

ROUNDS = 5
_System: TypeAlias = Callable[[float], float]  # measures for some seconds, and returns env steps per second

_NUM_ACTIONS = 64  # batches of actions, drawn in advance
_DEFAULT_NUM_ENVS = (16, 64, 256)
_MAX_START_S = 5.0  # time to construct the envs of a pool; larger default sizes are skipped
_MAX_STEP_S = 0.25  # time of one step with the fewest workers; larger default sizes are skipped
_AS_GOOD = 0.95  # fraction of the best rate above which fewer workers and envs are preferred
_BUSY = 0.5  # load per core above which other programs disturb the measurement
_SHARED = 0.75  # fraction of the expected rate below which parallel loops must be sharing cores
_PATIENCE = 10.0  # times the length of a measurement, to wait for the ends of episodes
_ABOVE_BOUND = 1.1  # fraction of the bound above which the rates must vary
_SLOW_RESETS = 0.2  # fraction of time in resets above which spare envs are worth a try
_WAITS = 0.5  # CPU use, in cores, below which an env waits more than it computes


@dataclass(frozen=True)
class Sample:
    """Env steps per second of one pool, in a Python loop (`host`) and inside a jitted `lax.scan` (`scan`)."""

    num_envs: int
    num_workers: int
    host: float
    scan: float


@dataclass(frozen=True)
class Measurement:
    """Result of one run of `bench`. Rates are env steps per second.

    Attributes:
        cores: number of cores that this process may use.
        load: load average of the system over the minute before the run.
        platform: platform of the compiled programs.
        seconds: length of each measurement.
        one: rate of one `env.step` loop in this process.
        all: total rate of `copies` parallel loops, one process each; the upper bound on this machine.
        copies: number of these loops.
        core_share: fraction of a loop's time in which the env computes; it waits in the rest.
        reset_share: fraction of a loop's time in resets after the first; `None` if no episode ended.
        samples: rates of the pools.
        left_out: default numbers of envs that were skipped because the env is slow.
    """

    cores: int
    load: float
    platform: str
    seconds: float
    one: float
    all: float
    copies: int
    core_share: float
    samples: tuple[Sample, ...]
    reset_share: float | None = 0.0
    left_out: tuple[int, ...] = ()


def bare_loop(env: Any, seconds: float, patience: float = 1.0) -> tuple[float, float, float | None]:
    """Steps an env in a plain loop, for an episode at least if that takes up to `patience` times as long.

    Returns steps per second, including resets, the `core_share`, and the fraction of time in resets, `None`
    if no episode has ended.
    """
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(_NUM_ACTIONS)]
    step = env.step
    reset = env.reset
    steps = 0
    chunk = 1
    episodes = 0
    in_reset = 0.0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = time.process_time()
    began = now = time.perf_counter()
    while now - began < seconds or not steps or (not episodes and now - began < patience * seconds):
        for action in actions[:chunk]:
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                episodes += 1
                reset_at = time.perf_counter()
                reset()
                in_reset += time.perf_counter() - reset_at
        steps += chunk
        before = now
        now = time.perf_counter()
        if now - before < 1e-3:  # fast envs read the clock less often, as it would distort their rate
            chunk = min(2 * chunk, _NUM_ACTIONS)
    elapsed = now - began
    cpu = time.process_time() - cpu
    after = resource.getrusage(resource.RUSAGE_SELF)
    # Only voluntary context switches show that the env waits; a preempted process waits for other programs.
    preempted = after.ru_nivcsw - usage.ru_nivcsw
    waited = after.ru_nvcsw - usage.ru_nvcsw > max(preempted, 100 * elapsed)
    return steps / elapsed, cpu / elapsed if waited else 1.0, in_reset / elapsed if episodes else None


def measure(
    make: Callable[..., VectorEnv],
    *,
    num_envs: Sequence[int] | None,
    num_workers: Sequence[int] | None,
    seconds: float,
    transport: str,
) -> Measurement:
    """Measures an env in pools that `make` returns. Raises a `JaxvecError` if it fails.

    By default, the speed of the env determines the pool sizes, and the usable cores the worker counts. Each
    measurement takes `seconds`.
    """
    import jax

    cores = usable_cores()
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        # JAX logs the error of a failing env, which is also raised.
        log = logging.getLogger("jax")
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)
        single_env = stack.enter_context(make(num_envs=1, num_workers=1, backend="serial"))
        began = time.perf_counter()
        make(num_envs=1, num_workers=1, backend="serial").close()
        build = time.perf_counter() - began  # of the second env, as the first one imports modules
        rate, core_share, reset_share = single_env.map(bare_loop, seconds, _PATIENCE)[0]
        patience = 1.0 if reset_share is None else _PATIENCE
        workers = num_workers or default_workers(cores, core_share)
        at_once = max(int(cores / max(core_share, 0.01)), 1)  # envs that step concurrently
        fits = {
            n: n * build / cores <= _MAX_START_S and n / rate / min(*workers, at_once) <= _MAX_STEP_S
            for n in _DEFAULT_NUM_ENVS
        }
        sizes = num_envs or [n for n in fits if fits[n] and n >= min(workers)] or [max(workers)]
        grid = [(n, [w for w in workers if w <= n]) for n in sizes]
        copies = max(cores, *(w for _, some in grid for w in some))
        every = stack.enter_context(make(num_envs=copies, num_workers=copies))
        bare_pools = ("one", single_env), ("all", every)
        samples: list[Sample] = []
        bare: list[tuple[float, float]] = []
        for n, some in grid:
            with ExitStack() as pools:
                systems: dict[str, _System] = {
                    name: partial(_bare_rate, pool, patience=patience) for name, pool in bare_pools
                }
                for w in some:
                    with config.override(transport=transport):
                        envs = pools.enter_context(make(num_envs=n, num_workers=w))
                    step = n / rate / min(w, at_once) + 1e-4
                    host, scan = _host_and_scan(envs, int(np.clip(seconds / 4 / step, 1, 1000)), patience)
                    systems |= {f"host {w}": host, f"scan {w}": scan}
                rates = _medians(systems, seconds)
            bare.append((rates["one"], rates["all"]))
            samples += [Sample(n, w, rates[f"host {w}"], rates[f"scan {w}"]) for w in some]
    return Measurement(
        cores=cores,
        load=load,
        platform=jax.default_backend(),
        seconds=seconds,
        one=statistics.median(alone for alone, _ in bare),
        all=statistics.median(together for _, together in bare),
        copies=copies,
        core_share=core_share,
        reset_share=reset_share,
        samples=tuple(samples),
        left_out=() if num_envs else tuple(n for n in fits if not fits[n]),
    )


def default_workers(cores: int, core_share: float) -> list[int]:
    """Returns the worker counts to try: more than `cores` only if envs wait more than they compute."""
    more = (2 * cores, 4 * cores) if core_share < _WAITS else ()
    return sorted({1, max(cores // 4, 1), max(cores // 2, 1), cores, *more})


def best(samples: Sequence[Sample]) -> Sample:
    """Returns the pool with the fewest workers, then the fewest envs, among those close to the best rate."""
    fastest = max(sample.scan for sample in samples)
    good = [sample for sample in samples if sample.scan >= _AS_GOOD * fastest]
    return min(good, key=lambda sample: (sample.num_workers, sample.num_envs))


def notes(found: Measurement) -> Iterator[str]:
    """Yields the reasons why rates are lower than they could be, and the sizes that were skipped."""
    if found.load > _BUSY * found.cores:
        yield (
            f"other programs keep this machine busy (load {found.load:.1f}, usable cores {found.cores}), "
            "so all rates are lower than on an idle machine"
        )
    # Loops that wait more than they compute do not need a core each.
    at_once = min(found.copies, found.cores)
    if found.core_share >= _WAITS and at_once > 1 and found.all < _SHARED * at_once * found.one:
        yield (
            f"{found.copies} loops together are only {found.all / found.one:.2f} times as fast as one: they "
            "share the cores with other programs or slow each other down, and no pool can be faster than them"
        )
    if above := [
        sample for sample in found.samples if max(sample.scan, sample.host) > _ABOVE_BOUND * found.all
    ]:
        yield (
            f"a pool of {above[0].num_envs} envs is faster than its bound, so the rates vary from one "
            f"measurement to the next; --seconds {min(5 * found.seconds, 60):g} measures longer"
        )
    if found.reset_share is None:
        yield (
            f"no episode ended in {_PATIENCE * found.seconds:g} s, so these rates are without resets; "
            f"--seconds {min(10 * found.seconds, 60):g} measures longer"
        )
    elif found.reset_share > _SLOW_RESETS:
        yield (
            f"resets take {found.reset_share:.0%} of the time; make(..., spare_envs=1) resets an env of each "
            "worker in advance, while the program computes"
        )
    if found.left_out:
        yield (
            f"the env is slow, so pools of {', '.join(map(str, found.left_out))} envs were not measured; "
            f"--num-envs {found.left_out[0]} measures them"
        )


def report(found: Measurement, name: str, line: str) -> Iterator[str]:
    """Yields the lines of the report on the env `name`. `line` is the code of the recommended pool."""
    yield (
        f"{name}, env steps per second: medians of {ROUNDS} measurements of {found.seconds} s, programs on "
        f"{found.platform}, usable cores {found.cores}\n"
    )
    yield f"  {'env.step in a loop':38} {found.one:10,.0f}"
    yield f"  {f'{found.copies} loops in parallel (upper bound here)':38} {found.all:10,.0f}\n"
    yield "  num_envs  num_workers   in lax.scan  of bound   envs.step  of bound"
    for sample in found.samples:
        yield (
            f"  {sample.num_envs:8}  {sample.num_workers:11}  {sample.scan:12,.0f}  "
            f"{sample.scan / found.all:8.2f}  {sample.host:10,.0f}  {sample.host / found.all:8.2f}"
        )
    yield ""
    yield from (f"note: {note}" for note in notes(found))
    yield "Recommended:"
    yield f"  {line}"


def _bare_rate(envs: VectorEnv, seconds: float, *, patience: float) -> float:
    return sum(rate for rate, *_ in envs.map(bare_loop, seconds, patience))


def _host_and_scan(envs: VectorEnv, length: int, patience: float = 1.0) -> tuple[_System, _System]:
    """Returns two functions that step a pool with random actions for some seconds, and return the rate.

    They take up to `patience` times as long until as many episodes have ended as there are envs.
    """
    import jax
    import jax.numpy as jnp

    from jaxvec.spaces import pad

    space = envs.single_action_space
    space.seed(0)
    actions = [pad(space, [space.sample() for _ in range(envs.num_envs)]) for _ in range(_NUM_ACTIONS)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *actions)

    @jax.jit
    def rollout(handle: Any, actions: Any) -> Any:
        def step(handle: Any, i: jax.Array) -> Any:
            action = jax.tree.map(lambda leaf: leaf[i % _NUM_ACTIONS], actions)
            return jaxvec.step(handle, action)[0], None

        return jax.lax.scan(step, handle, jnp.arange(length))[0]

    def episodes_ended() -> bool:
        return pool_of(envs).stats(processes=False).total.episodes >= envs.num_envs

    def rate(calls: Iterator[Any], num_steps: int, seconds: float) -> float:
        # The envs go on with their episodes from one measurement to the next, so resets count as often as
        # they are.
        steps = 0
        began = time.perf_counter()
        elapsed = 0.0
        due = seconds
        limit = seconds if episodes_ended() else patience * seconds
        while not steps or elapsed < limit:
            next(calls)
            steps += num_steps
            elapsed = time.perf_counter() - began
            if due <= elapsed < limit:
                if episodes_ended():
                    break
                due = elapsed + seconds / 10  # not in each step, whose time it would add to
        return steps * envs.num_envs / elapsed

    def host(seconds: float) -> float:
        return rate(map(envs.step, itertools.cycle(actions)), 1, seconds)

    def rollouts(handle: Any) -> Iterator[Any]:
        while True:
            handle = jax.block_until_ready(rollout(handle, stacked))
            yield handle

    def scan(seconds: float) -> float:
        handle, _ = jaxvec.reset(envs, mask=np.zeros(envs.num_envs, np.bool_))  # resets no env
        return rate(rollouts(handle), length, seconds)

    envs.reset(seed=0)
    scan(0.0)  # compiles
    return host, scan


def _medians(systems: dict[str, _System], seconds: float) -> dict[str, float]:
    """Returns the median rate of each system. They alternate, so a slower machine slows all of them."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(ROUNDS):
        for name, system in systems.items():
            rates[name].append(system(seconds))
    return {name: statistics.median(some) for name, some in rates.items()}
