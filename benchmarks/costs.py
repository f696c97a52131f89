"""Measures memory, scaling with workers and envs, callbacks and copies, for `targets`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from gymnasium import spaces
from jax.experimental import io_callback

import jaxvec
from benchmarks.loads import LOADS, BusyEnv, Load
from benchmarks.measure import measure, rate_of
from benchmarks.peers import gymnasium_async
from benchmarks.starts import pss
from benchmarks.systems import NUM_ACTIONS, Run, System, jaxvec_scan, scan
from jaxvec._vector_env import pool_of

FASTEST = partial(jaxvec_scan, transport="ffi", dispatch="native")
CARTPOLES = LOADS["CartPole x 64"]


def memory() -> dict[str, float]:
    """Returns the proportional set size (PSS) in megabytes of processes, by description."""
    found: dict[str, float] = {}
    imports = "import numpy, gymnasium, sys; print(flush=True); sys.stdin.read()"
    bare = [
        subprocess.Popen([sys.executable, "-c", imports], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for process in bare:
            assert process.stdout is not None
            process.stdout.readline()
        with jaxvec.make(CARTPOLES.env_fns(), num_workers=2) as envs:
            envs.reset(seed=0)
            found["jaxvec worker with 32 CartPoles"] = _mean_pss(
                worker.pid for worker in pool_of(envs).workers.supervisor.connections.processes
            )
            found["bare interpreter with NumPy and Gymnasium"] = statistics.mean(pss(p.pid) for p in bare)
        with gymnasium_async(replace(CARTPOLES, num_envs=2)):
            found["AsyncVectorEnv worker with one"] = _mean_pss(
                child.pid
                for child in psutil.Process().children()
                if "multiprocessing.spawn import spawn_main" in " ".join(child.cmdline())
            )
    finally:
        for process in bare:
            process.kill()
            process.communicate()
    return found


def workers(rounds: int, seconds: float) -> float:
    """Returns the rate of CartPole x 256 with 8 workers relative to 2 workers."""
    systems: dict[str, System] = {str(n): partial(FASTEST, num_workers=n) for n in (2, 8)}
    rates = measure(LOADS["CartPole x 256"], systems, rounds=rounds, seconds=seconds)
    return rate_of(rates["8"]) / rate_of(rates["2"])


def size(rounds: int, seconds: float) -> float:
    """Returns the time per env step of 4,096 CartPoles relative to 256."""
    load = LOADS["CartPole x 256"]
    large = replace(load, num_envs=4096)

    def large_system(_: object) -> AbstractContextManager[Run]:
        return FASTEST(large)

    systems: dict[str, System] = {"256": FASTEST, "4096": large_system}
    results = measure(load, systems, rounds=rounds, seconds=seconds)
    # `measure` counts 256 env steps per step for both systems.
    return rate_of(results["256"]) / (rate_of(results["4096"]) * 4096 / 256)


def callback(rounds: int, seconds: float) -> float:
    """Returns the time per step of 8 no-op envs through `io_callback` relative to a bare `io_callback`."""
    step = partial(jaxvec_scan, transport="io_callback", dispatch="native", num_workers=1)
    systems: dict[str, System] = {"step": step, "bare": _bare_callback}
    rates = measure(LOADS["no-op x 8"], systems, rounds=rounds, seconds=seconds)
    return rate_of(rates["bare"]) / rate_of(rates["step"])


@contextmanager
def _bare_callback(load: Load) -> Generator[Run]:
    """Calls a function that returns a small array through `io_callback` in a jitted scan."""
    array = np.zeros(load.num_envs, np.float32)

    def call(state: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = io_callback(lambda _: array, jax.ShapeDtypeStruct(array.shape, array.dtype), state)
        return result, result

    yield scan(call, jnp.asarray(array), [array] * NUM_ACTIONS)


class _Shows(BusyEnv):
    """An env that always shows the same value of a space."""

    def __init__(self, space: spaces.Space[Any], value: Any) -> None:
        super().__init__(0)
        self.observation_space, self._obs = space, value  # pyright: ignore[reportAttributeAccessIssue]


_BYTES = spaces.Box(0, 255, (32,), np.uint8)
_BYTES_SHOWN = np.zeros(32, np.uint8)
_NODES = spaces.Box(-1, 1, (3,))

# An observation space, a value of it, and the maximum sizes.
_PADDED = {
    "32 bytes": (_BYTES, _BYTES_SHOWN, None),
    "a text of 32 characters": (spaces.Text(32, charset="ab"), "ab" * 16, None),
    "a sequence of 8 numbers": (spaces.Sequence(spaces.Discrete(9)), tuple(range(8)), {"obs": 8}),
    "a graph of 8 nodes": (
        spaces.Graph(_NODES, None),
        spaces.GraphInstance(np.zeros((8, 3), np.float32), None, None),
        {"obs/nodes": 8},
    ),
    "one of two spaces": (spaces.OneOf([_BYTES, spaces.Discrete(9)]), (0, _BYTES_SHOWN), None),
}


def padded(rounds: int, seconds: float) -> dict[str, float]:
    """Returns the microseconds that a padded observation takes longer than one of 32 bytes, by kind.

    64 envs step in one worker, in a jitted scan.
    """
    systems: dict[str, System] = {name: partial(_padded_scan, kind=name) for name in _PADDED}
    results = measure(LOADS["no-op x 64"], systems, rounds=rounds, seconds=seconds)
    step, *others = (1e6 / rate_of(result) for result in results.values())
    return {name: other - step for name, other in zip(list(_PADDED)[1:], others, strict=True)}


@contextmanager
def _padded_scan(load: Load, kind: str) -> Generator[Run]:
    space, value, maxima = _PADDED[kind]
    with jaxvec.make(
        [partial(_Shows, space, value)] * load.num_envs, num_workers=1, max_sizes=maxima
    ) as envs:
        handle, _ = jaxvec.reset(envs, seed=0)

        def step(handle: jaxvec.Handle, action: jax.Array) -> tuple[jaxvec.Handle, jax.Array]:
            handle, timestep = jaxvec.step(handle, action)
            return handle, timestep.reward

        yield scan(step, handle, [np.zeros(load.num_envs, int)] * NUM_ACTIONS)


def memcpy(num_bytes: int, seconds: float) -> float:
    """Returns the bytes per second of a copy of `num_bytes` with NumPy."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return _rate(lambda: np.copyto(target, source), seconds) * num_bytes


def _rate(function: Callable[[], object], seconds: float) -> float:
    function()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        function()
        count += 1
    return count / (time.perf_counter() - start)


def _mean_pss(pids: Iterable[int]) -> float:
    return statistics.mean(map(pss, pids))
