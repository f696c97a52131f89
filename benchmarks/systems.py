"""The systems: each a context manager that starts it with a load and yields `run(num_steps)`.

All step the same Python envs with the same actions, drawn in advance, and let them reset themselves.
One that can't take a load raises `NotRun`, and the table says why.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from jax.experimental import io_callback

import jaxvec
from benchmarks.loads import EnvFn, Load
from jaxvec._cores import usable_cores
from jaxvec._layout import split

Run = Callable[[int], None]  # takes that many steps of every env
System = Callable[[Load], Any]

NUM_ACTIONS = 64  # drawn in advance, for each env
MAX_PROCESSES = 64


class NotRun(Exception):
    """Why a system does not take part."""


def draw(space: Any) -> list[Any]:
    """Draws `NUM_ACTIONS` batches of actions."""
    space.seed(0)
    return [space.sample() for _ in range(NUM_ACTIONS)]


def scan(handle: jaxvec.Handle, space: Any) -> Run:
    """Returns a run of jitted scans from a handle on."""
    actions = jax.tree.map(lambda *leaves: jnp.stack(leaves), *draw(space))

    @partial(jax.jit, static_argnums=1)
    def rollout(handle: jaxvec.Handle, num_steps: int) -> tuple[jaxvec.Handle, jax.Array]:
        def body(carry: tuple[jaxvec.Handle, jax.Array], i: jax.Array) -> Any:
            handle, total = carry
            handle, timestep = jaxvec.step(handle, jax.tree.map(lambda leaf: leaf[i % NUM_ACTIONS], actions))
            return (handle, total + timestep.reward.sum()), None

        return jax.lax.scan(body, (handle, jnp.float32(0)), jnp.arange(num_steps))[0]

    state = [handle]

    def run(num_steps: int) -> None:
        state[0], _ = jax.block_until_ready(rollout(state[0], num_steps))

    return run


def loop(step: Callable[[Any], Any], actions: list[Any]) -> Run:
    """Returns a run of a Python loop."""

    def run(num_steps: int) -> None:
        for i in range(num_steps):
            step(actions[i % NUM_ACTIONS])

    return run


@contextmanager
def jaxvec_scan(
    load: Load, *, transport: str, handoff: str, num_workers: int | None = None
) -> Generator[Run]:
    """Steps by `jaxvec.step` in a jitted scan."""
    fns = load.env_fns()
    with jaxvec.make(fns, transport=transport, handoff=handoff, num_workers=num_workers) as envs:
        yield scan(jaxvec.reset(envs, seed=0)[0], envs.action_space)


@contextmanager
def jaxvec_host(load: Load) -> Generator[Run]:
    """Steps by `VectorEnv.step` in a Python loop."""
    with jaxvec.make(load.env_fns()) as envs:
        envs.reset(seed=0)
        yield loop(envs.step, draw(envs.action_space))


@contextmanager
def gymnasium_sync(load: Load) -> Generator[Run]:
    """Steps Gymnasium's `SyncVectorEnv`."""
    with _closing(SyncVectorEnv(load.env_fns(), autoreset_mode=AutoresetMode.SAME_STEP)) as envs:
        yield loop(envs.step, draw(envs.action_space))


@contextmanager
def _async(load: Load) -> Generator[Any]:
    _require_few(load)
    # Its own default would fork a process that has JAX's threads.
    envs = AsyncVectorEnv(load.env_fns(), context="spawn", autoreset_mode=AutoresetMode.SAME_STEP)
    with _closing(envs):
        yield envs


@contextmanager
def gymnasium_async(load: Load) -> Generator[Run]:
    """Steps Gymnasium's `AsyncVectorEnv`."""
    with _async(load) as envs:
        yield loop(envs.step, draw(envs.action_space))


@contextmanager
def gymnasium_async_in_jit(load: Load) -> Generator[Run]:
    """Steps `AsyncVectorEnv` by an ordered `io_callback` in a jitted scan, as users do today."""
    with _async(load) as envs:
        drawn = draw(envs.action_space)
        if not isinstance(drawn[0], np.ndarray):
            raise NotRun("a bridge of nested actions is not written in a line")
        actions = jnp.stack([jnp.asarray(action) for action in drawn])
        reward = jax.ShapeDtypeStruct((load.num_envs,), np.float32)

        def host_step(action: Any) -> Any:
            return np.asarray(envs.step(np.asarray(action))[1], np.float32)

        @partial(jax.jit, static_argnums=0)
        def rollout(num_steps: int) -> jax.Array:
            def body(total: jax.Array, i: jax.Array) -> Any:
                return total + io_callback(
                    host_step, reward, actions[i % NUM_ACTIONS], ordered=True
                ).sum(), None

            return jax.lax.scan(body, jnp.float32(0), jnp.arange(num_steps))[0]

        yield lambda num_steps: jax.block_until_ready(rollout(num_steps)) and None


@contextmanager
def stable_baselines3(load: Load) -> Generator[Run]:
    """Steps Stable-Baselines3's `SubprocVecEnv`."""
    if (load.num_envs > 8 and load.env_id is None) or load.num_envs > MAX_PROCESSES:
        raise NotRun("each of its processes imports torch; above 8 envs measured on CartPole x 64 only")
    try:
        from stable_baselines3.common.vec_env import SubprocVecEnv
    except ImportError as error:
        raise NotRun(str(error)) from error
    with _closing(SubprocVecEnv(load.env_fns(), start_method="spawn")) as envs:  # pyright: ignore[reportArgumentType]
        yield loop(envs.step, draw(gymnasium.vector.utils.batch_space(envs.action_space, load.num_envs)))


@contextmanager
def gxm(load: Load) -> Generator[Run]:
    """Steps gxm's Gymnasium adapter, vmapped, in a jitted scan: `pure_callback` over `SyncVectorEnv`."""
    if load.env_id is None:
        raise NotRun("takes registered ids only")
    try:
        import gxm as library
    except ImportError as error:
        raise NotRun(str(error)) from error
    env = library.make(f"Gymnasium/{load.env_id}", vectorization_mode="sync")
    keys = jax.random.split(jax.random.key(0), load.num_envs)
    state, _ = jax.vmap(env.init)(keys)
    actions = jnp.stack([jnp.asarray(a) for a in draw(gymnasium.spaces.MultiDiscrete([2] * load.num_envs))])

    @partial(jax.jit, static_argnums=1)
    def rollout(state: Any, num_steps: int) -> Any:
        def body(carry: Any, i: jax.Array) -> Any:
            state, total = carry
            state, timestep = jax.vmap(env.step)(keys, state, actions[i % NUM_ACTIONS])
            return (state, total + timestep.reward.sum()), None

        return jax.lax.scan(body, (state, jnp.float32(0)), jnp.arange(num_steps))[0]

    states = [state]

    def run(num_steps: int) -> None:
        states[0], _ = jax.block_until_ready(rollout(states[0], num_steps))

    yield run


@contextmanager
def envpool_xla(load: Load) -> Generator[Run]:
    """Steps EnvPool's own CartPole, written in C++, by its `xla()`: what a compiled env can reach."""
    if load.env_id != "CartPole-v1":
        raise NotRun("has its own C++ envs only")
    try:
        import envpool
    except Exception as error:
        raise NotRun(f"{type(error).__name__}: {error}") from error
    envs = envpool.make_gymnasium(load.env_id, num_envs=load.num_envs, num_threads=usable_cores())
    envs.reset()
    handle, _, _, step = envs.xla()
    actions = jnp.stack([jnp.asarray(a) for a in draw(gymnasium.spaces.MultiDiscrete([2] * load.num_envs))])

    @partial(jax.jit, static_argnums=1)
    def rollout(handle: Any, num_steps: int) -> Any:
        def body(carry: Any, i: jax.Array) -> Any:
            handle, total = carry
            handle, (_, reward, *_) = step(handle, actions[i % NUM_ACTIONS])
            return (handle, total + reward.sum()), None

        return jax.lax.scan(body, (handle, jnp.float32(0)), jnp.arange(num_steps))[0]

    handles = [handle]

    def run(num_steps: int) -> None:
        handles[0], _ = jax.block_until_ready(rollout(handles[0], num_steps))

    yield run


@contextmanager
def pufferlib(load: Load, *, python: str | None) -> Generator[Run]:
    """Steps PufferLib's `Multiprocessing`, in an environment of its own, since it wants old packages."""
    if python is None:
        raise NotRun("no --pufferlib-python")
    if load.env_id is None:
        raise NotRun("measured with registered ids only")
    script = str(Path(__file__).with_name("pufferlib_server.py"))
    command = [python, script, load.env_id, str(load.num_envs), str(max(usable_cores() - 1, 1))]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def run(num_steps: int) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        # Its workers wait by looking all the time, which would take a core from the others' turns.
        os.killpg(server.pid, signal.SIGCONT)
        print(num_steps, file=server.stdin, flush=True)
        if server.stdout.readline() != "done\n":
            raise NotRun(f"its server ended with {server.wait(10)}")
        os.killpg(server.pid, signal.SIGSTOP)

    try:
        run(1)
        yield run
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


@contextmanager
def bare_loops(load: Load) -> Generator[Run]:
    """Steps an equal share of the envs in a process per core, with nothing between env and loop."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Any] = []
    processes: list[Any] = []
    for first, stop in split(load.num_envs, min(usable_cores(), load.num_envs)):
        ours, theirs = context.Pipe()
        env_fns = load.env_fns()[first:stop]
        process = context.Process(target=_bare_loop, args=(env_fns, theirs), daemon=True)
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


def _bare_loop(env_fns: list[EnvFn], pipe: Any) -> None:
    envs = [env_fn() for env_fn in env_fns]
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
        pipe.send(None)


@contextmanager
def _closing(envs: Any) -> Generator[Any]:
    try:
        if isinstance(envs, gymnasium.vector.VectorEnv):
            envs.reset(seed=0)
        else:
            envs.reset()
        yield envs
    finally:
        envs.close()


def _require_few(load: Load) -> None:
    if load.num_envs > MAX_PROCESSES:
        raise NotRun(f"starts a process per env; not measured above {MAX_PROCESSES}")


def systems(pufferlib_python: str | None) -> dict[str, System]:
    """Returns all systems by name; the first is what the others are compared to."""
    ours = {
        f"jaxvec in scan: {transport}, {handoff}": partial(jaxvec_scan, transport=transport, handoff=handoff)
        for transport in ("ffi", "io_callback")
        for handoff in ("native", "portable")
    }
    return {
        "bare env.step loops, one per core": bare_loops,
        **ours,
        "jaxvec, Python loop": jaxvec_host,
        "Gymnasium SyncVectorEnv": gymnasium_sync,
        "Gymnasium AsyncVectorEnv (spawn)": gymnasium_async,
        "AsyncVectorEnv by io_callback in scan": gymnasium_async_in_jit,
        "Stable-Baselines3 SubprocVecEnv (spawn)": stable_baselines3,
        "gxm in scan (pure_callback)": gxm,
        "PufferLib 1.0.1 Multiprocessing": partial(pufferlib, python=pufferlib_python),
        "EnvPool xla(), its C++ CartPole": envpool_xla,
    }
