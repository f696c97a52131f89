"""Measures a policy between the steps of envs, and the gain of overlapping one thing with another.

The latter are a policy and envs, slow and fast envs, and resets and learning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxvec
from benchmarks.loads import LOADS, BusyEnv, Load
from benchmarks.measure import measure, rate_of
from benchmarks.systems import Run, System

Policy = Callable[[jax.Array], jax.Array]


class WaitingEnv(BusyEnv):
    """An env that sleeps for `milliseconds` per step, like one that waits for a remote simulator."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__(0)
        self._seconds = milliseconds / 1000

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        return super().step(action)


def policy_between(rounds: int, seconds: float) -> dict[str, float]:
    """Returns the rate of steps with a policy between them, relative to the sum of both times alone.

    The envs are 64 CartPoles, and the policy has two hidden layers of 256. The rates are by transport.
    """
    load = LOADS["CartPole x 64"]
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (4, 256), (256, 256), (256, 2)
    layers = [jax.random.normal(key, shape) / 16 for key, shape in zip(keys, shapes, strict=True)]

    def policy(obs: jax.Array) -> jax.Array:
        for layer in layers[:-1]:
            obs = jnp.tanh(obs @ layer)
        return (obs @ layers[-1]).argmax(1)

    systems: dict[str, System] = {"policy": partial(_policy_alone, policy=policy)}
    for transport in ("ffi", "io_callback"):
        systems[transport] = partial(_synchronous, policy=_push_pole, transport=transport, num_workers=None)
        systems[f"{transport}, both"] = partial(
            _synchronous, policy=policy, transport=transport, num_workers=None
        )
    times = {
        name: 1 / rate_of(each)
        for name, each in measure(load, systems, rounds=rounds, seconds=seconds).items()
    }
    return {
        transport: (times["policy"] + times[transport]) / times[f"{transport}, both"]
        for transport in ("ffi", "io_callback")
    }


@contextmanager
def _policy_alone(load: Load, *, policy: Policy) -> Generator[Run]:
    """Computes the policy on other observations in each step, so that XLA can't do it once."""

    def turn(obs: jax.Array, _: Any) -> Any:
        return obs.at[:, 0].set(policy(obs).astype(jnp.float32) + obs[:, 1]), None

    yield _run(turn, jnp.ones((load.num_envs, 4)), None, turns=1)


def double_buffering(rounds: int, seconds: float) -> float:
    """Returns the rate of two alternating halves of the envs relative to a synchronous loop.

    An env takes 1 ms per step and the policy 1 ms per batch. Both loops use 2 workers and batches of 2 envs,
    one in each worker.
    """
    load = Load("1 ms x 2", 2, make=lambda _: partial(WaitingEnv, 1))
    policy = _policy(milliseconds=1, num_envs=2)
    systems: dict[str, System] = {
        "synchronous": partial(_synchronous, policy=policy, num_workers=2),
        "halves": partial(_first_ready, policy=policy, num_envs=4, batch_size=2, recv_order="sent"),
    }
    return _ratio(load, systems, rounds, seconds)


def mixed(rounds: int, seconds: float) -> float:
    """Returns the rate of first-ready batches relative to a synchronous pool of as many envs.

    There are 16 envs with one worker each. One env in eight takes 10 ms per step, and the others take 1 ms.
    """
    load = Load("mixed x 16", 16, make=lambda i: partial(WaitingEnv, 1 if i % 8 else 10))
    systems: dict[str, System] = {
        "synchronous": partial(_synchronous, policy=_push_pole, num_workers=16),
        "first ready": partial(
            _first_ready, policy=_push_pole, num_envs=16, batch_size=4, recv_order="ready"
        ),
    }
    return _ratio(load, systems, rounds, seconds)


class SlowlyResetEnv(WaitingEnv):
    """An env with resets of 5 ms, steps of 0.1 ms, and episodes that are truncated after 20 steps."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self._steps = 0

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(0.005)
        self._steps = 0
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._steps += 1
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, self._steps == 20, info


def resets_in_advance(rounds: int, seconds: float) -> float:
    """Returns the rate of a pool with four spare envs per worker relative to one without spare envs.

    There are 8 envs in 2 workers. All episodes end after 20 steps, and then a learner computes for 40 ms.
    """
    load = Load("slow resets x 8", 8, make=lambda _: SlowlyResetEnv)
    learn = _policy(milliseconds=40, num_envs=8)
    systems: dict[str, System] = {
        name: partial(_learning, learn=learn, spare_envs=spare_envs)
        for name, spare_envs in (("no spare envs", 0), ("spare envs", 4))
    }
    return _ratio(load, systems, rounds, seconds)


@contextmanager
def _learning(load: Load, *, learn: Policy, spare_envs: int) -> Generator[Run]:
    with jaxvec.make(load.env_fns(), num_workers=2, spare_envs=spare_envs) as envs:

        def turn(handle: jaxvec.Handle, action: jax.Array) -> Any:
            handle, timesteps = jax.lax.scan(lambda h, _: jaxvec.step(h, action), handle, length=20)
            return handle, learn(timesteps.obs[-1])

        run = _run(turn, jaxvec.reset(envs)[0], jnp.zeros(8, jnp.int32), turns=1)
        yield lambda num_steps: run(max(num_steps // 20, 1))


def _ratio(load: Load, systems: dict[str, System], rounds: int, seconds: float) -> float:
    slower, faster = measure(load, systems, rounds=rounds, seconds=seconds).values()
    return rate_of(faster) / rate_of(slower)


@contextmanager
def _synchronous(
    load: Load, *, policy: Policy, transport: str = "auto", num_workers: int | None
) -> Generator[Run]:
    with jaxvec.config.override(transport=transport):
        envs = jaxvec.make(load.env_fns(), num_workers=num_workers)
    with envs:
        handle, timestep = jaxvec.reset(envs)

        def turn(handle: jaxvec.Handle, timestep: jaxvec.TimeStep) -> Any:
            return jaxvec.step(handle, policy(timestep.obs))

        yield _run(turn, handle, timestep, turns=1)


@contextmanager
def _first_ready(
    load: Load, *, policy: Policy, num_envs: int, batch_size: int, recv_order: str
) -> Generator[Run]:
    fns = load.env_fns(num_envs)
    with jaxvec.make(fns, num_workers=load.num_envs, batch_size=batch_size, recv_order=recv_order) as envs:
        handle, timestep = jaxvec.reset(envs)

        def turn(handle: jaxvec.Handle, timestep: jaxvec.TimeStep) -> Any:
            return jaxvec.recv(jaxvec.send(handle, policy(timestep.obs), timestep.info["env_id"]))

        yield _run(turn, handle, timestep, turns=load.num_envs // batch_size)


def _run(turn: Callable[..., Any], first: Any, second: Any, *, turns: int) -> Run:
    """Returns a `Run` that calls `turn` `turns` times per step of all envs of the load."""

    @partial(jax.jit, static_argnums=1)
    def rollout(carry: Any, length: int) -> Any:
        return jax.lax.scan(lambda carry, _: (turn(*carry), None), carry, length=length)[0]

    carries = [(first, second)]

    def run(num_steps: int) -> None:
        carries[0] = jax.block_until_ready(rollout(carries[0], num_steps * turns))

    return run


def _push_pole(obs: jax.Array) -> jax.Array:
    return (obs[:, 0] > 0).astype(jnp.int32)


def _policy(milliseconds: float, num_envs: int) -> Policy:
    """Returns a policy that takes `milliseconds` per batch of `num_envs` envs on this machine."""
    weights = jnp.eye(64)

    def policy(obs: jax.Array, iterations: int) -> jax.Array:
        hidden = jnp.zeros((len(obs), 64)).at[:, :4].set(obs)
        hidden = jax.lax.fori_loop(0, iterations, lambda _, x: jnp.tanh(x @ weights), hidden)
        return _push_pole(hidden)

    obs, iterations = jnp.zeros((num_envs, 4)), 100_000
    timed = jax.jit(policy, static_argnums=1)
    seconds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(timed(obs, iterations))
        seconds.append(time.perf_counter() - start)
    return partial(policy, iterations=int(milliseconds / 1000 / min(seconds) * iterations))
