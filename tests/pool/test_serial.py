"""The serial backend: envs in this process, which the C++ engine or the one in Python steps."""

from __future__ import annotations

import contextvars
import decimal
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from support import probe
from support.disasters import PATIENCE
from support.probe import _ffi, _native
from support.scripts import read_line

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.jax_version

needs_ffi = pytest.mark.skipif(_ffi.reason_unavailable() is not None, reason=str(_ffi.reason_unavailable()))
step = jax.jit(jaxvec.step)
FAIL = 7  # the action that fails


def scan(handle, length, actions):
    return jax.lax.scan(lambda h, _: jaxvec.step(h, actions), handle, length=length)


@pytest.fixture(params=["native", "portable"])
def serial(request, make):
    """Makes a serial pool with either engine."""
    if request.param == "native" and _native.reason_unavailable() is not None:
        pytest.skip(_native.reason_unavailable())

    def serial(env, num_envs, **kwargs):
        return make(env, num_envs, backend="serial", dispatch=request.param, **kwargs)

    return serial


class FailingEnv(CountingEnv):
    """Raises `error` in a step with the action FAIL; or Ctrl-C arrives, if there is none."""

    def __init__(self, error=None):
        super().__init__()
        self._error = error

    def step(self, action):
        if action == FAIL:
            if self._error is None:
                signal.raise_signal(signal.SIGINT)
            else:
                raise self._error
        return super().step(action)


# --- Failures -----------------------------------------------------------------------------------


def assert_broken(envs, error, steps):
    assert probe.steps_in_process(envs) == steps
    with pytest.raises(jaxvec.PoolBrokenError, match=type(error).__name__):
        envs.step([0, 0, 0])


def test_env_error_on_host_breaks_serial_pool(serial):
    envs = serial(lambda: FailingEnv(ValueError("bad luck")), 3)
    envs.reset(seed=0)
    envs.step([0, 0, 0])
    with pytest.raises(jaxvec.EnvError, match="bad luck") as caught:
        envs.step([0, FAIL, 0])
    assert (caught.value.env_id, caught.value.operation) == (1, "step")
    assert isinstance(caught.value.__cause__, ValueError)
    assert_broken(envs, caught.value, [2, 1, 1])


def test_env_error_in_program_breaks_serial_pool(serial):
    envs = serial(lambda: FailingEnv(ValueError("bad luck")), 3)
    handle, _ = scan(jaxvec.reset(envs, seed=0)[0], 4, jnp.zeros(3, int))
    with pytest.raises(jax.errors.JaxRuntimeError, match="bad luck"):
        jax.block_until_ready(step(handle, jnp.array([0, FAIL, 0])))
    with pytest.raises(jaxvec.EnvError, match="bad luck") as caught:
        envs.raise_if_failed()
    assert (caught.value.env_id, caught.value.operation) == (1, "step")
    assert isinstance(caught.value.__cause__, ValueError)
    assert_broken(envs, caught.value, [5, 4, 4])


def test_ctrl_c_in_serial_env_breaks_the_pool(serial):
    envs = serial(FailingEnv, 3)
    envs.reset(seed=0)
    with pytest.raises(KeyboardInterrupt) as caught:
        envs.step([0, FAIL, 0])
    assert_broken(envs, caught.value, [1, 0, 0])


def test_ctrl_c_in_serial_env_of_program_breaks_the_pool(serial):
    envs = serial(FailingEnv, 3)
    handle, _ = jaxvec.reset(envs, seed=0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="KeyboardInterrupt"):
        jax.block_until_ready(step(handle, jnp.array([0, FAIL, 0])))
    with pytest.raises(KeyboardInterrupt) as caught:
        envs.raise_if_failed()
    assert_broken(envs, caught.value, [1, 0, 0])


def test_failed_step_releases_the_serial_pool(serial):
    """The next call of another thread does not wait for the thread whose step has failed."""
    envs = serial(lambda: FailingEnv(ValueError("bad luck")), 2)
    handle, _ = jaxvec.reset(envs, seed=0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="bad luck"):
        jax.block_until_ready(step(handle, jnp.array([FAIL, 0])))
    with ThreadPoolExecutor() as threads, pytest.raises(jaxvec.PoolBrokenError):
        threads.submit(envs.step, [0, 0]).result(PATIENCE)


# --- Handles ------------------------------------------------------------------------------------


def test_serial_envs_step_in_parts_and_in_the_handles_order(serial):
    envs = serial(CountingEnv, 4)
    handle, _ = jaxvec.reset(envs, seed=0)
    odd = jax.tree.map(lambda leaf: leaf[jnp.array([3, 1])], handle)
    odd, timestep = jax.jit(lambda h: scan(h, 3, jnp.array([30, 10])))(odd)
    np.testing.assert_array_equal(timestep.info["env_id"], [[3, 1]] * 3)
    np.testing.assert_array_equal(timestep.obs[:, :, 3], [[30, 10]] * 3)
    assert probe.steps_in_process(envs) == [0, 3, 0, 3]
    with pytest.raises(jax.errors.JaxRuntimeError, match="stale handle"):
        jax.block_until_ready(step(handle, jnp.zeros(4, int)))
    even = jax.tree.map(lambda leaf: leaf[::2], handle)
    jax.block_until_ready(step(even, jnp.zeros(2, int)))
    assert probe.steps_in_process(envs) == [1, 3, 1, 3]


# --- Threads ------------------------------------------------------------------------------------


def test_two_threads_step_halves_of_a_serial_pool(serial):
    envs = serial(CountingEnv, 4)
    handle, _ = jaxvec.reset(envs, seed=0)
    program = jax.jit(lambda handle: scan(handle, 200, jnp.zeros(2, int)))
    halves = [jax.tree.map(lambda leaf, i=i: leaf[i::2], handle) for i in range(2)]
    with ThreadPoolExecutor() as threads:
        for handle, timestep in threads.map(program, halves, timeout=PATIENCE):
            np.testing.assert_array_equal(timestep.obs[:, :, 1], np.arange(1, 201)[:, None] * [1, 1])
            assert probe.num_moves(envs, handle.token[:, 2]) == [201] * 2
    assert probe.steps_in_process(envs) == [200] * 4


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("in_program", [False, pytest.param(True, marks=needs_ffi)])
def test_close_during_a_serial_step_raises_pool_closed(serial, in_program):
    started, gate = threading.Event(), threading.Event()

    class WaitingEnv(CountingEnv):
        def step(self, action):
            started.set()
            assert gate.wait(PATIENCE)
            return super().step(action)

    envs = serial(WaitingEnv, 2)
    handle, _ = jaxvec.reset(envs, seed=0)
    call = (step, handle, jnp.zeros(2, int)) if in_program else (envs.step, [0, 0])
    with ThreadPoolExecutor() as threads:
        running = threads.submit(lambda: jax.block_until_ready(call[0](*call[1:])))
        assert started.wait(PATIENCE)
        envs.close()
        gate.set()
        with pytest.raises((jaxvec.PoolClosedError, jax.errors.JaxRuntimeError), match=r"closed|PoolClosed"):
            running.result(PATIENCE)


class ThreadLocalEnv(CountingEnv):
    """Counts its steps in each thread."""

    local = threading.local()

    def step(self, action):
        self.local.steps = getattr(self.local, "steps", 0) + 1
        seen.setdefault(threading.get_native_id(), []).append(self.local.steps)
        return super().step(action)


seen: dict[int, list[int]] = {}  # by thread, the counts of ThreadLocalEnv


@needs_ffi
def test_threads_of_xla_keep_their_python_state(make):
    """A program with large products steps envs in threads of XLA, which have no Python state at first."""
    seen.clear()
    envs = make(ThreadLocalEnv, 1, backend="serial")
    weights = jnp.ones((512, 512)) / 600

    def body(carry, _):
        handle, x = carry
        x = jnp.tanh(x @ weights) * (jnp.sin(x) @ weights.T)
        handle, timestep = jaxvec.step(handle, (x[:1, 0] > 2).astype(int))
        return (handle, x + timestep.reward.sum()), None

    program = jax.jit(lambda handle: jax.lax.scan(body, (handle, weights), length=40)[0])
    jax.block_until_ready(program(jaxvec.reset(envs, seed=0)[0]))
    assert sum(map(len, seen.values())) == 40
    for counts in seen.values():
        assert counts == list(range(1, len(counts) + 1))


number = contextvars.ContextVar("number", default=0)


class StateEnv(gymnasium.Env):
    """Observes the state of the thread that runs it, some of which its constructor sets, and its steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        decimal.getcontext().prec = 3
        number.set(5)
        self._steps = 0

    def observe(self):
        self._steps += 1
        third = float(decimal.Decimal(1) / decimal.Decimal(3))
        raises = np.geterr()["over"] == "raise"
        has_denormals = sys.float_info.min / (1 + self._steps**0) > 0
        return np.array([third, number.get(), self._steps, raises, has_denormals], np.float32)

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 0.0, False, False, {}


class JaxStateEnv(StateEnv):
    def render(self):
        return jnp.zeros(())


class StateBatch(gymnasium.vector.SyncVectorEnv):
    def __init__(self):
        super().__init__([StateEnv] * 2)


@pytest.mark.filterwarnings('ignore:use backend="process"')  # of the envs that call JAX
@pytest.mark.slow(but=6)
@pytest.mark.parametrize("kind", ["batched", "single", "calls JAX"])
@pytest.mark.parametrize("size", [0, 40])
@pytest.mark.parametrize("here", [True, False])
def test_envs_have_the_thread_state_of_the_host_in_programs_of_every_size(serial, here, size, kind):
    """XLA flushes denormals in a program, and runs parts of a large one in threads without the state."""

    def run():
        with np.errstate(over="raise"), ThreadPoolExecutor() as threads:
            env = JaxStateEnv if kind == "calls JAX" else StateEnv
            envs = make_batch() if kind == "batched" else serial(env, 2)
            handle, first = jaxvec.reset(envs)

            @jax.jit
            def program(handle, x):
                products = [jnp.sin(x + i) @ x for i in range(size)]
                handle, rows = jax.lax.scan(
                    lambda handle, _: jaxvec.step(handle, jnp.zeros(2, int)), handle, length=3
                )
                return handle, rows.obs, sum(products, jnp.zeros(()))

            arguments = handle, jnp.ones((300, 300))
            result = program(*arguments) if here else threads.submit(program, *arguments).result(PATIENCE)
            handle, rows, _ = result
            return [first.obs, *rows, envs.step([0, 0]).obs]

    def make_batch():
        return serial(StateBatch, 2, envs_per_instance=2)

    rows = np.array(contextvars.copy_context().run(run))
    expected = [[0.333, 5, count, True, True] for count in range(1, 6)]
    np.testing.assert_allclose(rows[:, 0], expected, rtol=1e-6)


def test_batched_spaces_leave_the_spaces_of_the_env_unchanged(make):
    envs = make("CartPole-v1", 2, backend="serial")
    envs.action_space.seed(3)
    envs.single_action_space.seed(3)
    assert envs.action_space.shape == (2,)
    has_generators = envs.map(
        lambda env: [space._np_random is not None for space in (env.observation_space, env.action_space)]
    )
    assert has_generators == ([False, False], [False, False])


HANGING = """
import sys
import jax, jax.numpy as jnp
import jaxvec
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    def step(self, action):
        jax.jit(jnp.negative)(1).block_until_ready()
        return super().step(action)

jaxvec.config.dispatch = sys.argv[1]
envs = jaxvec.make(Env, 2, backend="serial", timeouts=jaxvec.Timeouts(step=float(sys.argv[2])))
handle, _ = jaxvec.reset(envs, seed=0)
step = jax.jit(jaxvec.step)
print("stepping", flush=True)
for _ in range(20):
    action = jnp.ones((300, 300))
    for _ in range(64):
        action = action @ action * 0.001
    handle, _ = step(handle, (action[0, :2] * 0).astype(int))
jax.block_until_ready(handle)
"""


def test_an_attribute_whose_class_has_no_module_is_fine(serial):
    class WithoutModule(type):
        @property
        def __module__(cls):
            raise AttributeError("__module__")

    class Env(CountingEnv):
        world = None

        def __init__(self):
            super().__init__()
            self.world = WithoutModule("World", (), {})()

    assert serial(Env, 2).reset(seed=0).obs.shape == (2, 4)


@needs_ffi
@pytest.mark.parametrize("dispatch", ["native", "portable"])
@pytest.mark.parametrize(("limit", "error"), [(2, "EnvTimeoutError"), (1000, "KeyboardInterrupt")])
def test_a_hang_of_an_env_that_calls_jax_ends(dispatch, limit, error):
    """Its computations and the program's queued ones wait for each other."""
    words = [sys.executable, "-c", HANGING, dispatch, str(limit)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert read_line(program.stdout) == "stepping\n"
        assert 'use backend="process"' in read_line(program.stderr)
        if limit > 2:
            read_line(program.stderr)
            program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=PATIENCE)
    assert error in err
    assert program.returncode != 0
