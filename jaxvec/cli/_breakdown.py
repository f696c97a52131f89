"""Measures what a step of a pool is made of, by pools that lack a part each; and other settings of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from jaxvec._vector_env import VectorEnv
from jaxvec.cli import _verdict
from jaxvec.cli._bench_setup import BenchSetup, obs_bytes, obs_leaves
from jaxvec.cli._records import Breakdown, Variant
from jaxvec.cli._systems import Bare, Callback, Pool, System

_UNEVEN = 1.2  # straggling from which first-ready batches are tried
_RESETS = 0.15  # share of resets from which spare envs are


def break_down(
    setup: BenchSetup, num_envs: int, num_workers: int, *, times: Sequence[NDArray[Any]], reset_share: float
) -> tuple[Breakdown, tuple[Variant, ...], str]:
    """Takes a pool's step apart.

    Args:
        setup: of the run.
        num_envs, num_workers: of the pool.
        times: seconds of steps, of some envs each.
        reset_share: of the env's time, that resets take.

    Returns:
        The breakdown, other settings that were tried, and the transport that programs used.
    """
    with ExitStack() as stack:
        pool = Pool(stack, setup.pool(num_envs, num_workers), setup.length(num_envs, num_workers))
        transport = _transport(pool.envs)
        us, busy = _parts(setup, pool, transport)
        uneven = max(
            _verdict.straggling(times, num_envs, num_workers), max(busy) / max(statistics.mean(busy), 1e-9)
        )
        breakdown = Breakdown(
            num_envs=num_envs,
            num_workers=num_workers,
            step_us=us["pool"],
            bare_us=us["bare"],
            no_op_us=us["no_op"],
            flat_us=us.get("flat", us["no_op"]),
            empty_us=us["empty"],
            single_us=us["single"],
            callback_us=us.get("callback", 0.0),
            straggling=uneven,
            obs_bytes=obs_bytes(setup.spec),
            num_leaves=len(obs_leaves(setup.spec)) + len(setup.spec.action_leaves),
            memcpy_us=_memcpy(num_envs * obs_bytes(setup.spec), setup.request.seconds / 4) * 1e6,
        )
        settings = _worth_trying(num_envs, num_workers, uneven, reset_share)
        variants = tuple(_try(setup, pool, name, each) for name, each in settings)
    return breakdown, variants, transport


def _parts(setup: BenchSetup, pool: Pool, transport: str) -> tuple[dict[str, float], tuple[float, ...]]:
    """Returns microseconds of steps, by the names of `Breakdown`'s fields, and how busy the workers were."""
    num_envs, num_workers = pool.envs.num_envs, pool.envs.num_workers
    with ExitStack() as stack:
        systems: dict[str, System] = {"pool": pool.scan, "bare": Bare(stack, setup.target, num_workers)}
        for name, (count, obs, action) in _toys(setup, pool.envs).items():
            length = setup.length(count, num_workers, no_op=True)
            toys = Pool(stack, setup.no_op(count, num_workers, obs, action), length)
            systems[name] = toys.scan
            if name == "empty" and transport == "io_callback":
                systems["callback"] = Callback(toys.envs, length)
        turns = setup.turns(systems, "what a step is made of")
    counts = {name: num_workers if name == "single" else num_envs for name in turns}
    return {name: counts[name] / turn.rate * 1e6 for name, turn in turns.items()}, turns["pool"].busy


def _toys(setup: BenchSetup, envs: VectorEnv) -> dict[str, tuple[int, Space[Any], Space[Any]]]:
    """Returns how many, and the spaces, of envs that do nothing."""
    tiny, binary = spaces.Box(0, 255, (1,), np.uint8), spaces.Discrete(2)
    toys: dict[str, tuple[int, Space[Any], Space[Any]]] = {
        "no_op": (envs.num_envs, envs.single_observation_space, envs.single_action_space),
        "empty": (envs.num_envs, tiny, binary),
        "single": (envs.num_workers, tiny, binary),
    }
    as_it_is = [leaf.dtype == leaf.stored for leaf in obs_leaves(setup.spec)]
    if as_it_is != [True] or len(setup.spec.action_leaves) != 1:  # else it is flat already
        flat = spaces.Box(0, 255, (max(obs_bytes(setup.spec), 1),), np.uint8)
        toys["flat"] = envs.num_envs, flat, binary
    return toys


def _worth_trying(
    num_envs: int, num_workers: int, uneven: float, reset_share: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields settings that may suit the env, with a name."""
    if num_envs > 1:
        yield "halves", {"batch_size": num_envs // 2, "recv_order": "sent"}
    if uneven > _UNEVEN:
        for batch_size in sorted({num_envs // 4, num_envs // 2} - {0}):
            yield "first-ready", {"batch_size": batch_size}
    if reset_share > _RESETS:
        yield "spare envs", {"spare_envs": max(num_envs // num_workers // 4, 1)}


def _try(setup: BenchSetup, pool: Pool, name: str, settings: dict[str, Any]) -> Variant:
    num_envs, num_workers = pool.envs.num_envs, pool.envs.num_workers
    with ExitStack() as stack:
        envs = setup.pool(num_envs, num_workers, **settings)
        other = Pool(stack, envs, setup.length(envs.batch_size, num_workers))
        turns = setup.turns({"as it is": pool.scan, name: other.scan}, name)
    return Variant(name, settings, turns[name].rate / turns["as it is"].rate)


def _transport(envs: VectorEnv) -> str:
    if envs.transport == "auto":
        on_cuda = "cuda" in jax.devices()[0].client.platform_version.lower()
        return "ffi" if on_cuda or jax.default_backend() == "cpu" else "io_callback"
    return envs.transport


def _memcpy(num_bytes: int, seconds: float) -> float:
    """Returns the seconds of a plain copy of so many bytes."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while not taken or time.perf_counter() < until:
        began = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
