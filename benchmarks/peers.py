"""Systems of other libraries, with the interface that `systems` defines."""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from jax.experimental import io_callback

from benchmarks.loads import Load
from benchmarks.systems import NotRun, Run, draw, loop, on_device, scan
from jaxvec._util import usable_cores

MAX_PROCESSES = 64


@contextmanager
def gymnasium_sync(load: Load, *, to_device: bool = False) -> Generator[Run]:
    """Steps Gymnasium's `SyncVectorEnv`."""
    with _closing(SyncVectorEnv(load.env_fns(), autoreset_mode=AutoresetMode.SAME_STEP)) as envs:
        yield loop(on_device(envs.step) if to_device else envs.step, draw(envs.action_space))


@contextmanager
def _async(load: Load) -> Generator[Any]:
    _check_num_processes(load)
    # The default start method forks this process, which is unsafe because JAX has started threads.
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
    """Steps `AsyncVectorEnv` through an ordered `io_callback` in a jitted scan, without jaxvec."""
    with _async(load) as envs:
        space = envs.observation_space
        if not isinstance(space, gymnasium.spaces.Box):
            raise NotRun("a bridge of nested spaces is not written in a few lines")
        flags = jax.ShapeDtypeStruct((load.num_envs,), np.bool_)
        rewards = jax.ShapeDtypeStruct((load.num_envs,), np.float32)
        results = (jax.ShapeDtypeStruct(space.shape, space.dtype), rewards, flags, flags)

        def host_step(action: Any) -> Any:
            obs, reward, terminated, truncated, _ = envs.step(np.asarray(action))
            return obs, reward.astype(np.float32), terminated, truncated

        def step(state: None, action: jax.Array) -> tuple[None, jax.Array]:
            _, reward, _, _ = io_callback(host_step, results, action, ordered=True)
            return state, reward

        yield scan(step, None, draw(envs.action_space))


@contextmanager
def stable_baselines3(load: Load, *, name: str, module: str) -> Generator[Run]:
    """Steps a vector env class with the interface of Stable-Baselines3.

    Args:
        load: The envs.
        name: Name of the class, `"SubprocVecEnv"` or `"DummyVecEnv"`.
        module: Name of the module that defines the class, in Stable-Baselines3 or jaxvec.
    """
    spawns = name == "SubprocVecEnv" and module.startswith("stable_baselines3")
    if spawns and load.num_envs > 8:
        raise NotRun("each of its processes imports torch; not measured above 8 envs, for lack of memory")
    try:
        cls = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise NotRun(str(error)) from error
    options = {"start_method": "spawn"} if spawns else {}  # the default may fork, see `_async`
    with _closing(cls(load.env_fns(), **options)) as envs:
        yield loop(envs.step, draw(gymnasium.vector.utils.batch_space(envs.action_space, load.num_envs)))


@contextmanager
def gxm(load: Load) -> Generator[Run]:
    """Steps gxm's Gymnasium adapter under `vmap` in a jitted scan.

    The adapter calls `SyncVectorEnv` through `pure_callback`.
    """
    if load.env_id is None:
        raise NotRun("takes registered ids only")
    try:
        import gxm as library
    except ImportError as error:
        raise NotRun(str(error)) from error
    env = library.make(f"Gymnasium/{load.env_id}", vectorization_mode="sync")
    keys = jax.random.split(jax.random.key(0), load.num_envs)
    state, _ = jax.vmap(env.init)(keys)

    def step(state: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        state, timestep = jax.vmap(env.step)(keys, state, action)
        return state, timestep.reward

    yield scan(step, state, draw(_binary_actions(load)))


@contextmanager
def envpool_xla(load: Load) -> Generator[Run]:
    """Steps EnvPool's C++ CartPole with the functions that its `xla()` returns.

    It shows the rate of a compiled env.
    """
    if load.env_id != "CartPole-v1":
        raise NotRun("has its own C++ envs only")
    try:
        import envpool
    except Exception as error:
        raise NotRun(f"{type(error).__name__}: {error}") from error
    envs = envpool.make_gymnasium(load.env_id, num_envs=load.num_envs, num_threads=usable_cores())
    envs.reset()
    handle, _, _, xla_step = envs.xla()

    def step(handle: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        handle, (_, reward, *_) = xla_step(handle, action)
        return handle, reward

    yield scan(step, handle, draw(_binary_actions(load)))


@contextmanager
def pufferlib(load: Load, *, python: str | None) -> Generator[Run]:
    """Steps PufferLib's `Multiprocessing` in a server process with another interpreter.

    PufferLib 1.0.1 requires old versions of its dependencies, which conflict with those of jaxvec.
    """
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
        # Its workers busy-wait, which would slow other systems, so the group is stopped between runs.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGCONT)
        print(num_steps, file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], 120)[0] or server.stdout.readline() != "done\n":
            raise NotRun("the server did not respond within 120 s; see its output on standard error")
        os.killpg(server.pid, signal.SIGSTOP)

    try:
        run(1)
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


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


def _binary_actions(load: Load) -> gymnasium.Space[Any]:
    """Returns the batched action space of envs with two actions, such as CartPole."""
    return gymnasium.spaces.MultiDiscrete([2] * load.num_envs)


def _check_num_processes(load: Load) -> None:
    if load.num_envs > MAX_PROCESSES:
        raise NotRun(f"starts a process per env; not measured above {MAX_PROCESSES}")
