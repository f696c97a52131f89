"""The systems of jaxvec and the upper bound. `peers` contains the other systems.

A system is a context manager that starts the envs of a load and yields `run(num_steps)`. All systems step the
same Python envs with random actions that were drawn in advance. A system that does not support a load raises
`NotRun` with the reason, which the report lists.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from gymnasium.vector import AutoresetMode

import jaxvec
from benchmarks.loads import EnvFn, Load
from jaxvec._memory.segment import split_evenly
from jaxvec._util import usable_cores
from jaxvec.compat.gymnasium import SyncVectorEnv

Run = Callable[[int], None]  # steps every env that many times
System = Callable[[Load], Any]

NUM_ACTIONS = 64  # batches of actions that are drawn in advance


class NotRun(Exception):
    """Exception of a system that does not run a load. Its text is the reason."""


def draw(space: Any) -> list[Any]:
    """Samples `NUM_ACTIONS` batches of actions with a fixed seed."""
    space.seed(0)
    return [space.sample() for _ in range(NUM_ACTIONS)]


def scan(step: Callable[[Any, Any], tuple[Any, jax.Array]], state: Any, drawn: list[Any]) -> Run:
    """Returns a `Run` that scans `step(state, action) -> (state, rewards)` in a jitted function."""
    actions = jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)

    @partial(jax.jit, static_argnums=1)
    def rollout(state: Any, num_steps: int) -> tuple[Any, jax.Array]:
        def body(carry: tuple[Any, jax.Array], i: jax.Array) -> Any:
            state, total = carry
            state, rewards = step(state, jax.tree.map(lambda leaf: leaf[i % NUM_ACTIONS], actions))
            return (state, total + rewards.sum()), None

        return jax.lax.scan(body, (state, jnp.float32(0)), jnp.arange(num_steps))[0]

    states = [state]

    def run(num_steps: int) -> None:
        states[0], _ = jax.block_until_ready(rollout(states[0], num_steps))

    return run


def scan_pool(envs: jaxvec.VectorEnv) -> Run:
    """Returns a `Run` that steps a pool in a jitted scan."""

    def step(handle: jaxvec.Handle, action: Any) -> tuple[jaxvec.Handle, jax.Array]:
        handle, timestep = jaxvec.step(handle, action)
        return handle, timestep.reward

    return scan(step, jaxvec.reset(envs, seed=0)[0], draw(envs.action_space))


def loop(step: Callable[[Any], Any], actions: list[Any]) -> Run:
    """Returns a `Run` that calls `step(action)` in a Python loop."""

    def run(num_steps: int) -> None:
        for i in range(num_steps):
            step(actions[i % NUM_ACTIONS])

    return run


def on_device(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `step` followed by the copy of its arrays, without infos, to JAX's default device."""
    return lambda action: jax.block_until_ready(jax.device_put(step(action)[:4]))


@contextmanager
def jaxvec_scan(
    load: Load, *, transport: str, dispatch: str, num_workers: int | None = None, backend: str = "process"
) -> Generator[Run]:
    """Steps the envs with `jaxvec.step` in a jitted scan."""
    fns = load.env_fns()
    with jaxvec.config.override(transport=transport, dispatch=dispatch):
        envs = jaxvec.make(fns, num_workers=num_workers, backend=backend)
    with envs:
        yield scan_pool(envs)


@contextmanager
def jaxvec_host(load: Load, *, backend: str = "process", to_device: bool = False) -> Generator[Run]:
    """Steps the envs with `VectorEnv.step` in a Python loop."""
    with jaxvec.make(load.env_fns(), backend=backend) as envs:
        envs.reset(seed=0)
        yield loop(on_device(envs.step) if to_device else envs.step, draw(envs.action_space))


@contextmanager
def jaxvec_sync(load: Load) -> Generator[Run]:
    """Steps `jaxvec.compat.gymnasium.SyncVectorEnv` in a Python loop."""
    with closing(SyncVectorEnv(load.env_fns(), autoreset_mode=AutoresetMode.SAME_STEP)) as envs:
        envs.reset(seed=0)
        yield loop(envs.step, draw(envs.action_space))


@contextmanager
def bare_loops(load: Load, *, meet: bool = False, unwrapped: bool = False) -> Generator[Run]:
    """Steps an equal share of the envs in one process per core, in plain loops over `env.step`.

    This is the upper bound for systems that step Python envs on this machine.

    Args:
        load: The envs.
        meet: Whether the processes synchronise after each step, like the workers of a vector env.
        unwrapped: Whether to step `env.unwrapped`, without wrappers such as the time limit.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Any] = []
    processes: list[Any] = []
    slices = split_evenly(load.num_envs, min(usable_cores(), load.num_envs))
    barriers = [context.Pipe(duplex=False) for _ in slices] if meet else []  # (reader, writer) per process
    for number, (first, stop) in enumerate(slices):
        pipe, child_pipe = context.Pipe()
        env_fns = load.env_fns()[first:stop]
        barrier = barriers[number][0] if meet else None
        others = [writer for other, (_, writer) in enumerate(barriers) if other != number]
        process = context.Process(
            target=_bare_loop, args=(env_fns, child_pipe, barrier, others, unwrapped), daemon=True
        )
        process.start()
        pipes.append(pipe)
        processes.append(process)

    def run(num_steps: int) -> None:
        for pipe in pipes:
            pipe.send(num_steps)
        for pipe in pipes:
            if not pipe.poll(120):
                raise TimeoutError("a process of the bare loops did not respond within 120 s")
            pipe.recv()

    try:
        run(1)  # returns when all envs have been reset
        yield run
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(10)


def _bare_loop(env_fns: list[EnvFn], pipe: Any, barrier: Any, others: list[Any], unwrapped: bool) -> None:
    envs = [env_fn() for env_fn in env_fns]
    if unwrapped:
        envs = [env.unwrapped for env in envs]
    for i, env in enumerate(envs):
        env.reset(seed=i)
        env.action_space.seed(i)
    actions = [[env.action_space.sample() for env in envs] for _ in range(NUM_ACTIONS)]
    while True:
        try:
            num_steps = pipe.recv()
        except EOFError:
            return
        for i in range(num_steps):
            for env, action in zip(envs, actions[i % NUM_ACTIONS], strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            # Each process writes one byte to every other process, and waits for one byte from each.
            for other in others:
                os.write(other.fileno(), b".")
            missing = len(others)
            while missing:
                missing -= len(os.read(barrier.fileno(), missing))
        pipe.send(None)
