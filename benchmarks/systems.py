"""A system: a context manager that starts it with a load and yields `run(num_steps)`.

All step the same Python envs with random actions, drawn in advance. One that can't take a load raises
`NotRun`, and the table says why. Here are jaxvec and the limit; `peers` has the others.
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

Run = Callable[[int], None]  # takes that many steps of every env
System = Callable[[Load], Any]

NUM_ACTIONS = 64  # drawn in advance, for each env


class NotRun(Exception):
    """Why a system does not take part."""


def draw(space: Any) -> list[Any]:
    """Draws `NUM_ACTIONS` batches of actions."""
    space.seed(0)
    return [space.sample() for _ in range(NUM_ACTIONS)]


def scan(step: Callable[[Any, Any], tuple[Any, jax.Array]], state: Any, drawn: list[Any]) -> Run:
    """Returns a run of jitted scans of `step(state, action) -> (state, rewards)`."""
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


def loop(step: Callable[[Any], Any], actions: list[Any]) -> Run:
    """Returns a run of a Python loop."""

    def run(num_steps: int) -> None:
        for i in range(num_steps):
            step(actions[i % NUM_ACTIONS])

    return run


@contextmanager
def jaxvec_scan(
    load: Load, *, transport: str, dispatch: str, num_workers: int | None = None, backend: str = "process"
) -> Generator[Run]:
    """Steps by `jaxvec.step` in a jitted scan."""
    fns = load.env_fns()
    with jaxvec.config.override(transport=transport, dispatch=dispatch):
        envs = jaxvec.make(fns, num_workers=num_workers, backend=backend)
    with envs:

        def step(handle: jaxvec.Handle, action: Any) -> tuple[jaxvec.Handle, jax.Array]:
            handle, timestep = jaxvec.step(handle, action)
            return handle, timestep.reward

        yield scan(step, jaxvec.reset(envs, seed=0)[0], draw(envs.action_space))


@contextmanager
def jaxvec_host(load: Load, *, backend: str = "process") -> Generator[Run]:
    """Steps by `VectorEnv.step` in a Python loop."""
    with jaxvec.make(load.env_fns(), backend=backend) as envs:
        envs.reset(seed=0)
        yield loop(envs.step, draw(envs.action_space))


@contextmanager
def jaxvec_sync(load: Load) -> Generator[Run]:
    """Steps `jaxvec.compat.gymnasium.SyncVectorEnv` in a Python loop."""
    with closing(SyncVectorEnv(load.env_fns(), autoreset_mode=AutoresetMode.SAME_STEP)) as envs:
        envs.reset(seed=0)
        yield loop(envs.step, draw(envs.action_space))


@contextmanager
def bare_loops(load: Load, *, meet: bool = False, unwrapped: bool = False) -> Generator[Run]:
    """Steps an equal share of the envs in a process per core, with nothing between env and loop.

    Args:
        load: the envs.
        meet: whether the processes wait for each other after each step, as those of a vector env do.
        unwrapped: whether to leave out the wrappers, with their time limit.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Any] = []
    processes: list[Any] = []
    slices = split_evenly(load.num_envs, min(usable_cores(), load.num_envs))
    bells = [context.Pipe(duplex=False) for _ in slices] if meet else []
    for number, (first, stop) in enumerate(slices):
        ours, theirs = context.Pipe()
        env_fns = load.env_fns()[first:stop]
        bell = bells[number][0] if meet else None
        others = [ring for other, (_, ring) in enumerate(bells) if other != number]
        process = context.Process(
            target=_bare_loop, args=(env_fns, theirs, bell, others, unwrapped), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)

    def run(num_steps: int) -> None:
        for pipe in pipes:
            pipe.send(num_steps)
        for pipe in pipes:
            if not pipe.poll(120):
                raise TimeoutError("a bare loop did not answer")
            pipe.recv()

    try:
        run(1)  # waits for the envs
        yield run
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(10)


def _bare_loop(env_fns: list[EnvFn], pipe: Any, bell: Any, others: list[Any], unwrapped: bool) -> None:
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
            for other in others:
                os.write(other.fileno(), b".")
            missing = len(others)
            while missing:
                missing -= len(os.read(bell.fileno(), missing))
        pipe.send(None)
