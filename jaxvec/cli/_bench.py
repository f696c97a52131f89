"""Measures an env, alone and in pools, for `python -m jaxvec bench`.

`measure` gives turns to bare loops of `env.step`, to Python loops of `envs.step` and to compiled programs,
over a grid of pools. `report` writes the medians, notes about the machine, and one recommendation. Workers
import this module to run `bare_loop`, so JAX is only imported where programs are made.
"""

from __future__ import annotations

import logging
import os
import resource
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import jaxvec
from jaxvec._util import usable_cores
from jaxvec._vector_env import VectorEnv

ROUNDS = 5

_NUM_ACTIONS = 64  # batches, drawn in advance
_DEFAULT_NUM_ENVS = (16, 64, 256)
_MAX_START_S = 5.0  # for the constructors of a pool; larger default sizes are left out
_MAX_STEP_S = 0.25  # for a step of the pool with the fewest workers; larger default sizes are left out
_AS_GOOD = 0.95  # share of the best rate for which fewer workers and envs are preferred
_BUSY = 0.5  # load per core from which other programs disturb the measurement
_SHARED = 0.75  # share of the expected rate below which parallel loops must be sharing cores
_WAITS = 0.5  # share of a core below which an env waits more than it computes


@dataclass(frozen=True)
class Sample:
    """Env steps a second of one pool.

    Attributes:
        num_envs, num_workers: size of the pool.
        host: rate of a Python loop of `envs.step`.
        scan: rate inside a jitted `lax.scan`.
    """

    num_envs: int
    num_workers: int
    host: float
    scan: float


@dataclass(frozen=True)
class Measurement:
    """Result of one run of `bench`. Rates are env steps a second.

    Attributes:
        cores: number of cores that this process may use.
        load: the system's load average of the minute before the run.
        platform: platform of the compiled programs.
        seconds: length of each turn.
        one: rate of a loop of `env.step` in this process.
        all: total rate of `copies` such loops, in a process each; the limit of this machine.
        copies: number of these loops.
        core_share: share of a loop's time in which the env computes; it waits in the rest.
        samples: rates of the pools.
        left_out: default numbers of envs that were not measured, since the env is slow.
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
    left_out: tuple[int, ...] = ()


def bare_loop(env: Any, seconds: float) -> tuple[float, float]:
    """Steps an env with random actions, with nothing between loop and env.

    Returns:
        Steps a second, with the resets between; and the share of the time in which the env computed.
    """
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(_NUM_ACTIONS)]
    step, reset = env.step, env.reset
    steps, chunk = 0, 1
    usage, cpu = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    began = now = time.perf_counter()
    while now - began < seconds or not steps:
        for action in actions[:chunk]:
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                reset()
        steps += chunk
        before, now = now, time.perf_counter()
        if now - before < 1e-3:  # so that fast envs do not pay for the clock
            chunk = min(2 * chunk, _NUM_ACTIONS)
    elapsed, cpu = now - began, time.process_time() - cpu
    after = resource.getrusage(resource.RUSAGE_SELF)
    # A process that hardly ever gave up its core by itself was only kept waiting by other programs.
    preempted = after.ru_nivcsw - usage.ru_nivcsw
    waited = after.ru_nvcsw - usage.ru_nvcsw > max(preempted, 100 * elapsed)
    return steps / elapsed, cpu / elapsed if waited else 1.0


def measure(
    make: Callable[..., VectorEnv],
    *,
    num_envs: Sequence[int] | None,
    num_workers: Sequence[int] | None,
    seconds: float,
    transport: str,
) -> Measurement:
    """Measures an env.

    Args:
        make: makes a pool of the env, from keyword arguments of `jaxvec.make`.
        num_envs: sizes of pools; by default those that suit the env's speed.
        num_workers: worker counts; by default up to the usable cores, and more if the env waits.
        seconds: length of each turn.
        transport: transport of the programs.

    Raises:
        JaxvecError: the env failed.
    """
    import jax

    cores, load = usable_cores(), os.getloadavg()[0]
    with ExitStack() as stack, _jax_log_off():
        one = stack.enter_context(make(num_envs=1, num_workers=1, backend="serial"))
        began = time.perf_counter()
        make(num_envs=1, num_workers=1, backend="serial").close()
        build = time.perf_counter() - began  # of the second: the first imports modules
        rate, core_share = one.map(bare_loop, seconds)[0]
        workers = num_workers or default_workers(cores, core_share)
        at_once = max(int(cores / max(core_share, 0.01)), 1)  # envs that this machine steps at a time
        fits = {
            n: n * build / cores <= _MAX_START_S and n / rate / min(*workers, at_once) <= _MAX_STEP_S
            for n in _DEFAULT_NUM_ENVS
        }
        sizes = num_envs or [n for n in fits if fits[n] and n >= min(workers)] or [max(workers)]
        grid = [(n, [w for w in workers if w <= n]) for n in sizes]
        copies = max(cores, *(w for _, some in grid for w in some))
        every = stack.enter_context(make(num_envs=copies, num_workers=copies))
        samples: list[Sample] = []
        bare: list[tuple[float, float]] = []
        for n, some in grid:
            with ExitStack() as pools:
                systems: dict[str, Callable[[float], float]] = {
                    "one": partial(_bare_rate, one),
                    "all": partial(_bare_rate, every),
                }
                for w in some:
                    envs = pools.enter_context(make(num_envs=n, num_workers=w, transport=transport))
                    step = n / rate / min(w, at_once) + 1e-4
                    host, scan = _host_and_scan(envs, int(np.clip(seconds / 4 / step, 1, 1000)))
                    systems |= {f"host {w}": host, f"scan {w}": scan}
                rates = _take_turns(systems, seconds)
            bare.append((rates["one"], rates["all"]))
            samples += [Sample(n, w, rates[f"host {w}"], rates[f"scan {w}"]) for w in some]
    ones, alls = zip(*bare, strict=True)
    return Measurement(
        cores=cores,
        load=load,
        platform=jax.default_backend(),
        seconds=seconds,
        one=statistics.median(ones),
        all=statistics.median(alls),
        copies=copies,
        core_share=core_share,
        samples=tuple(samples),
        left_out=() if num_envs else tuple(n for n in fits if not fits[n]),
    )


def default_workers(cores: int, core_share: float) -> list[int]:
    """Returns worker counts worth trying: more than cores only if envs wait more than they compute."""
    more = (2 * cores, 4 * cores) if core_share < _WAITS else ()
    return sorted({1, max(cores // 4, 1), max(cores // 2, 1), cores, *more})


def best(samples: Sequence[Sample]) -> Sample:
    """Returns the pool with the fewest workers, then envs, that is about as fast as the fastest."""
    fastest = max(sample.scan for sample in samples)
    good = [sample for sample in samples if sample.scan >= _AS_GOOD * fastest]
    return min(good, key=lambda sample: (sample.num_workers, sample.num_envs))


def notes(found: Measurement) -> Iterator[str]:
    """Yields reasons why the figures are lower than this machine could have them, and what was left out."""
    if found.load > _BUSY * found.cores:
        yield (
            f"other programs keep this machine busy (load {found.load:.1f}, usable cores {found.cores}): "
            "all figures are lower than they would be on a quiet machine"
        )
    # Loops that wait more than they compute don't need a core each.
    at_once = min(found.copies, found.cores)
    if found.core_share >= _WAITS and at_once > 1 and found.all < _SHARED * at_once * found.one:
        yield (
            f"{found.copies} loops together are only {found.all / found.one:.2f} times as fast as one: the "
            "cores are shared with others or slow down together, and no pool can be faster than these loops"
        )
    if found.left_out:
        sizes = ", ".join(map(str, found.left_out))
        yield (
            f"the env is slow, so pools of {sizes} envs were not measured; "
            f"--num-envs {found.left_out[0]} does"
        )


def report(found: Measurement, name: str, line: str) -> Iterator[str]:
    """Yields the lines that people read.

    Args:
        found: the measurement.
        name: name of the env.
        line: the line of Python that makes the recommended pool.
    """
    yield (
        f"{name}, env steps a second: medians of {ROUNDS} turns of {found.seconds} s, programs on "
        f"{found.platform}, usable cores {found.cores}"
    )
    yield ""
    loops = f"{found.copies} such loops, a process each"
    yield f"  {'env.step in a loop':32} {found.one:12,.0f}"
    yield f"  {loops:32} {found.all:12,.0f}   the limit of this machine"
    yield ""
    yield "  num_envs  num_workers   in lax.scan  of limit   envs.step  of limit"
    for sample in found.samples:
        yield (
            f"  {sample.num_envs:8}  {sample.num_workers:11}  {sample.scan:12,.0f}  "
            f"{sample.scan / found.all:8.2f}  {sample.host:10,.0f}  {sample.host / found.all:8.2f}"
        )
    yield ""
    yield from (f"note: {note}" for note in notes(found))
    yield "Recommended:"
    yield f"  {line}"


def _bare_rate(envs: VectorEnv, seconds: float) -> float:
    return sum(rate for rate, _ in envs.map(bare_loop, seconds))


def _host_and_scan(envs: VectorEnv, length: int) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Returns functions that step a pool with random actions for so many seconds, and return the rate."""
    import jax
    import jax.numpy as jnp

    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(_NUM_ACTIONS)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *actions)

    @jax.jit
    def rollout(handle: Any, actions: Any) -> Any:
        def step(handle: Any, i: jax.Array) -> Any:
            action = jax.tree.map(lambda leaf: leaf[i % _NUM_ACTIONS], actions)
            return jaxvec.step(handle, action)[0], None

        return jax.lax.scan(step, handle, jnp.arange(length))[0]

    def host(seconds: float) -> float:
        envs.reset(seed=0)
        steps, began, elapsed = 0, time.perf_counter(), 0.0
        while not steps or elapsed < seconds:
            envs.step(actions[steps % _NUM_ACTIONS])
            steps += 1
            elapsed = time.perf_counter() - began
        return steps * envs.num_envs / elapsed

    def scan(seconds: float) -> float:
        handle, _ = jaxvec.reset(envs, seed=0)
        steps, began, elapsed = 0, time.perf_counter(), 0.0
        while not steps or elapsed < seconds:
            handle = jax.block_until_ready(rollout(handle, stacked))
            steps += length
            elapsed = time.perf_counter() - began
        return steps * envs.num_envs / elapsed

    scan(0.0)  # compiles
    return host, scan


def _take_turns(systems: dict[str, Callable[[float], float]], seconds: float) -> dict[str, float]:
    """Returns the median rate of each system. They take turns: a machine that slows down slows them all."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(ROUNDS):
        for name, system in systems.items():
            rates[name].append(system(seconds))
    return {name: statistics.median(some) for name, some in rates.items()}


@contextmanager
def _jax_log_off() -> Generator[None]:
    """Keeps JAX from logging the error of an env that fails, which is raised anyway."""
    log = logging.getLogger("jax")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
