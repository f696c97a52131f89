"""Envs that fail, and a driver that steps them in all ways, for tests of failures.

conftest.py registers this module for pickling by value, so workers load its envs without importing JAX.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from support import probe
from support.probe import _ffi, _native, pool_of

import jaxvec
from jaxvec.testing import CountingEnv

PATIENCE = 200  # seconds; limits what should take milliseconds, as a busy machine may pause for long

# --- Ways to drive a pool ---------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A combination of dispatch, Python or a transport of programs, and whole or half batches."""

    dispatch: str
    face: str  # "python", or the transport of the compiled program
    first_ready: bool

    def __str__(self) -> str:
        return f"{self.dispatch}-{self.face}-{'first ready' if self.first_ready else 'sync'}"

    def reason_unavailable(self) -> str | None:
        return (_native.reason_unavailable() if self.dispatch == "native" else None) or (
            _ffi.reason_unavailable() if self.face == "ffi" else None
        )

    def similarity(self, other: Way) -> tuple[bool, bool, bool]:
        """Returns a sort key, in which the same dispatch counts most, then the same face."""
        return self.dispatch == other.dispatch, self.face == other.face, self.first_ready == other.first_ready


WAYS = [
    Way(*cell) for cell in product(("native", "portable"), ("python", "io_callback", "ffi"), (False, True))
]
# The default ways. The first never enters Python, the second always does.
TWO_WAYS = [Way("native", "ffi", True), Way("portable", "io_callback", False)]
in_halves = pytest.mark.parametrize("way", [w for w in WAYS if w.first_ready], ids=str, indirect=True)
in_two_ways = pytest.mark.parametrize("way", TWO_WAYS, ids=str, indirect=True)


def make(*args: object, **options: object) -> jaxvec.VectorEnv:
    """Makes a pool. Also takes timeouts as separate arguments, and settings of `jaxvec.config`."""
    settings = {
        name: options.pop(name) for name in ("transport", "dispatch", "wrapper_bypass") if name in options
    }
    names = {"start_timeout": "start", "reset_timeout": "reset", "step_timeout": "step"}
    limits = {name: options.pop(flat) for flat, name in names.items() if flat in options}
    if limits:
        options["timeouts"] = jaxvec.Timeouts(**{"start": PATIENCE} | limits)
    with jaxvec.config.override(**settings):
        return jaxvec.make(*args, **options)


@contextmanager
def closing_all(make: Callable[..., Any], **options: Any) -> Iterator[Callable[..., Any]]:
    """Yields `make`, and closes all that it made; `options` are of `close`."""
    made: list[Any] = []

    def make_and_remember(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    yield make_and_remember
    for closable in made:
        closable.close(**options)


class Driver:
    """A pool that is driven in one way, with typed errors in all of them.

    Its timeouts end a test whose failure jaxvec does not notice, with an `EnvTimeoutError`.
    """

    def __init__(self, way: Way, env: object, num_envs: int = 4, **kwargs: object) -> None:
        options = {
            "num_workers": 2,
            "dispatch": way.dispatch,
            "start_timeout": PATIENCE,
            "reset_timeout": PATIENCE,
            "step_timeout": PATIENCE,
        }
        if way.first_ready:
            options["batch_size"] = num_envs // 2
        if way.face != "python":
            options["transport"] = way.face
        self.way = way
        self.envs = make(env, num_envs, **options | kwargs)
        self.workers = probe.processes(self.envs)
        self._handle = None

    def reset(self) -> object:
        """Resets every env; returns the observations of all, in env order."""
        if self.way.face != "python":
            self._handle, obs = self._run(_reset, probe.fresh_handle(self.envs, self.envs.num_envs))
            return obs
        timesteps = [self.envs.reset()]
        return _in_env_order(timesteps + [self.envs.recv() for _ in range(self._turns - 1)], np)

    def step(self, action: int = 0, times: int = 1) -> object:
        """Steps every env `times` times; returns the observations of all, in env order."""
        actions = np.full(self.envs.num_envs, action)
        if self.way.face != "python":
            handle = jaxvec.reset(self.envs)[0] if self._handle is None else self._handle
            self._handle, obs = self._run(partial(_step, times=times), handle, actions)
            return obs
        for _ in range(times):
            if self.way.first_ready:
                self.envs.send(actions)
                obs = _in_env_order([self.envs.recv() for _ in range(self._turns)], np)
            else:
                obs = self.envs.step(actions).obs
        return obs

    def forever(self) -> None:
        """Steps until something fails. The Python API raises the error itself, a jitted loop its text."""
        if self.way.face == "python":
            self.step(times=10**9)
        else:
            jax.block_until_ready(_step(self._handle, np.zeros(self.envs.num_envs, int), times=10**9))

    def send(self, action: int, env_ids: object) -> None:
        """Sends `action` to some envs."""
        actions, env_ids = np.full(len(env_ids), action), np.asarray(env_ids)
        if self.way.face == "python":
            self.envs.send(actions, env_ids)
        else:
            self._handle = self._run(_send, self._handle, actions, env_ids)

    def recv(self) -> object:
        """Receives a batch; returns its env ids."""
        if self.way.face == "python":
            return self.envs.recv().info["env_id"]
        self._handle, timestep = self._run(_recv, self._handle)
        return timestep.info["env_id"]

    def close(self) -> None:
        """Closes the pool within `PATIENCE`, and checks that no worker is left."""
        within(self.envs.close)
        assert self.envs.closed
        assert not any(worker.is_running() for worker in self.workers)

    @property
    def _turns(self) -> int:
        return self.envs.num_envs // self.envs.batch_size

    def _run(self, program: Callable[..., object], *args: object) -> object:
        try:
            return jax.block_until_ready(program(*args))
        except jax.errors.JaxRuntimeError as error:
            text = str(error)
        with pytest.raises(BaseException) as typed:  # noqa: PT011 - any type
            self.envs.raise_if_failed()
        said = f"{type(typed.value).__name__}: {typed.value}"
        assert said.encode(errors="replace").decode() in text
        raise typed.value


_send, _recv = jax.jit(jaxvec.send), jax.jit(jaxvec.recv)


@jax.jit
def _reset(handle):
    """Resets a whole pool as `jaxvec.reset(envs)` does, compiled once for all pools of an equal spec."""
    handle, timestep = probe.bind_reset(handle, None, None, None, fresh=True)
    return _receive(handle, [timestep])


@partial(jax.jit, static_argnames="times")
def _step(handle, actions, times):
    def once(handle):
        if handle.spec.first_ready:
            return _receive(jaxvec.send(handle, actions), [])
        handle, timestep = jaxvec.step(handle, actions)
        return handle, timestep.obs

    # A carry, not stacked results, as a loop may be endless.
    obs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(once, handle)[1])
    return jax.lax.scan(lambda carry, _: (once(carry[0]), None), (handle, obs), length=times)[0]


def _receive(handle, timesteps):
    while len(timesteps) < handle.spec.num_envs // handle.spec.batch_size:
        handle, timestep = jaxvec.recv(handle)
        timesteps.append(timestep)
    return handle, _in_env_order(timesteps, jnp)


def _in_env_order(timesteps, numpy):
    order = numpy.argsort(numpy.concatenate([timestep.info["env_id"] for timestep in timesteps]))
    return jax.tree.map(lambda *rows: numpy.concatenate(rows)[order], *[each.obs for each in timesteps])


# --- Checks of every broken pool -------------------------------------------------------


def assert_broken(driver: Driver, cause: BaseException) -> None:
    """Checks that every call raises the cause, and that the pool can be closed twice."""
    envs = driver.envs
    actions = np.zeros(envs.num_envs, int)
    calls = [
        driver.step,
        driver.reset,
        envs.reset,
        envs.recv,
        partial(envs.step, actions),
        partial(envs.send, actions),
        partial(envs.call, "steps"),
        partial(envs.set_attr, "steps", 0),
        envs.render,
        lambda: envs.infos(),
    ]
    for call in calls:
        with pytest.raises(jaxvec.PoolBrokenError) as again:
            call()
        assert again.value.__cause__ is cause
        assert f"failed with {type(cause).__name__}: {cause}" in str(again.value)
    with pytest.raises(type(cause)) as first:
        envs.raise_if_failed()
    assert first.value is cause
    assert pool_of(envs).state.broken_by is cause
    assert "broken" in repr(envs)
    assert_closes(driver)


def assert_closes(driver: Driver) -> None:
    """Checks that the pool can be closed twice and then raises `PoolClosedError`."""
    driver.close()
    driver.close()
    with pytest.raises(jaxvec.PoolClosedError):
        driver.reset()
    with pytest.raises(jaxvec.PoolClosedError):
        driver.envs.call("steps")


def within(function: Callable[[], object], seconds: float = PATIENCE) -> object:
    """Calls `function` in a thread, and fails if it takes longer."""
    return Background(function).result(seconds)


class Background:
    """A call of a function in a thread."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._outcome: list[object] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()

    def _call(self) -> None:
        try:
            self._outcome.append(self._function())
        except BaseException as error:
            self._error = error

    def result(self, seconds: float = PATIENCE) -> object:
        """Returns the function's result or raises its error; fails if it takes longer."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"{self._function} takes more than {seconds} s"
        error, self._error = self._error, None  # no cycle
        if error is not None:
            raise error
        return self._outcome[0]


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Polls a condition for which there is no event."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.001)


def wait_until_running(envs: jaxvec.VectorEnv) -> None:
    """Waits until a worker is inside an env's code."""
    running = probe.array(envs, "running")
    wait_until(running.any)


def wait_until_dead(worker: psutil.Process) -> None:
    """Waits until a worker has ended, which the pool may not have noticed yet."""
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def unfinished(envs: jaxvec.VectorEnv) -> list[int]:
    """Returns the envs that have not completed their latest request."""
    return probe.unfinished(envs)


# --- Exceptions -------------------------------------------------------------------------------


class TwoArguments(Exception):
    """An error that can be pickled but not unpickled, as `__init__` needs two arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class RaisesInReduce(Exception):
    def __reduce__(self):
        raise RuntimeError("no")


class RaisesInStr(Exception):
    def __str__(self):
        raise RuntimeError("no")


def recurse():
    return recurse() + 1


def throw(error):
    raise error


def bad_luck():
    raise ValueError("bad luck")


def exhaust_memory():
    """Sets the memory limit of the process to its use, and then exceeds it."""
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
    bytearray(1 << 30)


FAILURES = {
    "picklable": (bad_luck, "ValueError.*bad luck"),
    "two arguments": (lambda: throw(TwoArguments("a", "b")), "TwoArguments.*a and b"),
    "unpicklable": (lambda: throw(Unpicklable()), "Unpicklable.*holds a lock"),
    "raising in __reduce__": (lambda: throw(RaisesInReduce("x")), "RaisesInReduce.*x"),
    "raising in __str__": (lambda: throw(RaisesInStr()), "RaisesInStr.*__str__ raised RuntimeError"),
    "ten megabytes": (lambda: throw(ValueError("x" * 10_000_000)), "ValueError.*characters left out"),
    "base exception": (lambda: throw(BaseException("base")), "BaseException.*base"),
    "sys.exit": (lambda: sys.exit(3), "SystemExit.*3"),
    "group": (lambda: throw(ExceptionGroup("two", [ValueError("1"), KeyError("2")])), "ExceptionGroup.*two"),
    "recursion": (recurse, "RecursionError"),
}
TRAVEL = (
    "picklable",
    "sys.exit",
    "base exception",
    "group",
)  # failures whose error object reaches the parent
# C ends a string at a zero. A lone surrogate, as in file names that are not UTF-8, can't be encoded.
ODD = {"a zero": "is \0 end", "a lone surrogate": "is \udcff end"}
# Not for the serial backend, where this would limit the memory of the test process.
OUT_OF_MEMORY = {"out of memory": (exhaust_memory, "MemoryError")}

DEATHS = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL", -9),
    "SIGSEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV", -11),
    "os._exit": (lambda: os._exit(17), "exited with code 17", 17),
}


def assert_env_error(error, name, where, *, file, worker=1):
    """Checks message and attributes of the `EnvError` of env 2 for the failure `name`."""
    _, text = (FAILURES | OUT_OF_MEMORY)[name]
    assert type(error) is jaxvec.EnvError
    assert re.search(rf"env 2.* in {where}.*{text}", str(error), re.DOTALL)
    assert error.env_id == 2
    assert error.operation == where
    assert error.worker == worker
    assert error.action == ("np.int64(7)" if where == "step" else None)
    assert file in error.remote_traceback
    assert len(str(error)) < 50_000
    if name in TRAVEL or worker is None:
        assert type(error.__cause__).__name__ in text


def assert_death(error, name, where):
    """Checks message and attributes of the `WorkerDiedError` of env 2's worker for the death `name`."""
    _, text, exitcode = DEATHS[name]
    assert type(error) is jaxvec.WorkerDiedError
    assert text in str(error)
    assert (error.worker, error.env_ids, error.exitcode) == (1, (2, 3), exitcode)
    assert "worker 1 (envs 2, 3)" in str(error)
    doing = {"reset": "while resetting env 2.", "step": "while stepping env 2 with action 7."}
    assert doing.get(where, "") in str(error)


# --- Envs -------------------------------------------------------------------------------------


class FailingEnv(CountingEnv):
    """An env that calls `action()` in `where` if its id is `victim`; in `step` only on action 7."""

    def __init__(self, env_id, where, action, victim=2):
        super().__init__()
        self._fail = action if env_id == victim else None
        self._where = where
        if self._fail and where == "constructor":
            self._fail()

    def reset(self, *, seed=None, options=None):
        if self._fail and self._where == "reset":
            self._fail()
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self._fail and self._where == "step" and action == 7:
            self._fail()
        return super().step(action)


def failing(where, action, victim=2):
    return lambda env_id: FailingEnv(env_id, where, action, victim)


class RaisingEnv(CountingEnv):
    """An env that raises an error in a step with action 7."""

    def step(self, action):
        if action == 7:
            bad_luck()
        return super().step(action)


def waiting_for(path):
    """Returns a function that returns once a file exists."""

    def wait():
        while not path.exists():
            threading.Event().wait(0.001)

    return wait


class SleepingEnv(CountingEnv):
    """An env that sleeps for ever on action 7 if its id is 1."""

    def __init__(self, env_id):
        super().__init__()
        self._sleeps = env_id == 1

    def step(self, action):
        if self._sleeps and action == 7:
            signal.pause()
        return super().step(action)


class GatedEnv(CountingEnv):
    """An env whose steps with action 7 wait until a file exists."""

    def __init__(self, gate):
        super().__init__()
        self._gate = gate

    def step(self, action):
        while action == 7 and not self._gate.exists():
            threading.Event().wait(0.001)
        return super().step(action)


class SlowEnv(CountingEnv):
    """An env whose steps with action 7 or 8 wait for longer than a program waits without Python."""

    def step(self, action):
        if action == 7:
            threading.Event().wait(0.5)
        if action == 8:
            threading.Event().wait(1.8)
        return super().step(action)


class ImageEnv(CountingEnv):
    """An env that observes so much that each row is copied by itself, straight from the segment."""

    def __init__(self):
        super().__init__(3)
        self.observation_space = spaces.Box(0, 255, (90, 200), np.uint8)

    def _observe(self, action):
        return np.full((90, 200), 0 if action < 0 else (10 * action + self.steps) % 256, np.uint8)
