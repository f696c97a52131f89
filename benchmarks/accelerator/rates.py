"""Measures env steps per second with a device: `python -m benchmarks.accelerator.rates QUESTION FILE`."""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np

import jaxvec
from benchmarks import peers, systems, time_to_solve
from benchmarks.accelerator.programs import Answers, main
from benchmarks.loads import Load
from benchmarks.measure import measure
from benchmarks.systems import NotRun, Run

ATARI_SECONDS = 75


@contextmanager
def ale_xla(load: Load) -> Generator[Run]:
    """Steps ALE's own `AtariVectorEnv` with the functions that its `xla()` returns."""
    try:
        from ale_py.vector_env import AtariVectorEnv
    except ImportError as error:
        raise NotRun(str(error)) from error
    envs = AtariVectorEnv("pong", num_envs=load.num_envs)
    envs.reset()
    handle, _, step = envs.xla()
    drawn = [np.asarray(batch, np.int32) for batch in systems.draw(envs.action_space)]

    def step_once(handle: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        handle, (_, reward, *_) = step(handle, action)
        return handle, reward

    yield systems.scan(step_once, handle, drawn)


@contextmanager
def ale_by_jaxvec(load: Load) -> Generator[Run]:
    """Steps the same `AtariVectorEnv` as a batched env of jaxvec."""
    try:
        from ale_py.vector_env import AtariVectorEnv
    except ImportError as error:
        raise NotRun(str(error)) from error
    with jaxvec.make(AtariVectorEnv("pong", num_envs=load.num_envs)) as envs:
        yield systems.scan_pool(envs)


def _rates(load: Load, named: dict[str, Any], short: bool) -> dict[str, Any]:
    """Returns env steps per second of each system, or why it did not run."""
    results = measure(load, named, rounds=1 if short else 3, seconds=0.05 if short else 0.5)
    return {name: result.not_run or round(result.rate) for name, result in results.items()}


def rates(answers: Answers, device: jax.Device, short: bool) -> None:
    """Compares ways to have the time steps on the device: programs, loops that copy, and compiled envs."""
    scan = partial(systems.jaxvec_scan, dispatch="auto")
    ways = {
        "scan, ffi": partial(scan, transport="ffi"),
        "scan, io_callback": partial(scan, transport="io_callback"),
        "host loop of jaxvec, device_put": partial(systems.jaxvec_host, to_device=True),
        "SyncVectorEnv, device_put": partial(peers.gymnasium_sync, to_device=True),
        "EnvPool, xla()": peers.envpool_xla,
    }
    for num_envs in (8,) if short else (64, 256, 1024):
        load = Load(f"CartPole x {num_envs}", num_envs, env_id="CartPole-v1")
        answers.keep(load.name, lambda load=load: _rates(load, ways, short))
    num_envs = 2 if short else 64
    pong = Load(f"Pong x {num_envs}", num_envs, make=lambda _: _pong)
    ways = {
        "scan, ffi": partial(scan, transport="ffi"),
        "ALE, xla()": ale_xla,
        "ALE by jaxvec": ale_by_jaxvec,
    }
    answers.keep(pong.name, lambda: _rates(pong, ways, short))


def _pong() -> gymnasium.Env[Any, Any]:
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)


def learning(answers: Answers, device: jax.Device, short: bool) -> None:
    """Trains PPO on the device: seconds until CartPole is solved, and the last figures of a while of Pong."""
    answers.keep("CartPole solved, s", lambda: "not run" if short else time_to_solve.jaxvec_seconds(seed=1))
    answers.keep("Pong", lambda: "not run" if short else _pong_for_a_while())


def _pong_for_a_while() -> dict[str, str]:
    """Returns the last row of metrics of a run of `ATARI_SECONDS`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxvec.examples.ppo_atari", "--name", "run"]
        done = None
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, cwd=folder, timeout=ATARI_SECONDS, capture_output=True, text=True, check=False
            )
        if done is not None and done.returncode:
            raise RuntimeError(done.stderr[-600:])
        with open(Path(folder, "runs/run/metrics.csv")) as file:
            return list(csv.DictReader(file))[-1]


if __name__ == "__main__":
    main(rates, learning)
