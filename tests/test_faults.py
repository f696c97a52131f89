"""A catalogue of disasters: each becomes a typed error, is repeated, and leaves a pool that closes."""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from gymnasium import spaces

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.timeout(60)


class TwoArguments(Exception):
    """Can be pickled, but not unpickled: `__init__` wants two arguments."""

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


FAILURES = {
    "picklable": (lambda: throw(ValueError("bad luck")), "ValueError.*bad luck"),
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


class FailingEnv(CountingEnv):
    """Does `action()` in `where` of env `victim`, in step on the action 7 only."""

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


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_an_exception_in_an_env_becomes_a_typed_error(make, backend, name, where):
    action, text = FAILURES[name]
    with pytest.raises(jaxvec.EnvError) as caught:
        envs = make(failing(where, action), 4, backend=backend)
        envs.reset(seed=0)
        envs.step(np.full(4, 7))
    error = caught.value
    assert re.search(rf"env 2.* in {where}.*{text}", str(error), re.DOTALL)
    assert error.env_id == 2
    assert error.operation == where
    assert error.worker == (1 if backend == "process" else None)
    assert error.action == ("np.int64(7)" if where == "step" else None)
    assert Path(__file__).name in error.remote_traceback
    assert len(str(error)) < 50_000
    if name in ("picklable", "sys.exit", "base exception", "group") or backend == "serial":
        assert type(error.__cause__).__name__ in text


def test_a_broken_pool_repeats_the_cause_and_closes(make, backend):
    envs = make(failing("step", FAILURES["picklable"][0]), 4, backend=backend)
    envs.reset()
    with pytest.raises(jaxvec.EnvError) as first:
        envs.step(np.full(4, 7))
    for call in (lambda: envs.step(np.zeros(4, int)), envs.reset, lambda: envs.call("steps")):
        with pytest.raises(jaxvec.PoolBrokenError, match=r"env 2 .*bad luck") as again:
            call()
        assert again.value.__cause__ is first.value
    with pytest.raises(jaxvec.EnvError) as raised:
        envs.raise_if_failed()
    assert raised.value is first.value
    assert "broken" in repr(envs)
    envs.close()
    envs.close()
    with pytest.raises(jaxvec.PoolClosedError):
        envs.reset()


@pytest.mark.parametrize("name", ["picklable", "unpicklable", "two arguments"])
def test_in_a_program_the_error_comes_as_text_and_typed_from_with(name):
    action, text = FAILURES[name]

    @jax.jit
    def run(handle):
        return jax.lax.scan(lambda h, _: (jaxvec.step(h, jnp.full(4, 7))[0], None), handle, length=5)

    with pytest.raises(jaxvec.EnvError, match=f"(?s)env 2.*{text}") as caught:
        with jaxvec.make(failing("step", action), 4) as envs:
            handle, _ = jaxvec.reset(envs, seed=0)
            with pytest.raises(RuntimeError, match=f"(?s)env 2 .worker 1. raised .*{text}") as program:
                jax.block_until_ready(run(handle))
            assert not isinstance(program.value, jaxvec.JaxvecError)
            with pytest.raises(RuntimeError, match="PoolBrokenError.*env 2"):
                jax.block_until_ready(run(handle))
            with pytest.raises(jaxvec.PoolBrokenError) as typed:
                envs.raise_if_failed()
            assert isinstance(typed.value.__cause__, jaxvec.EnvError)
            raise typed.value.__cause__
    assert caught.value.env_id == 2


def test_with_raises_the_typed_error_behind_a_programs_error():
    with pytest.raises(jaxvec.EnvError) as caught:
        with jaxvec.make(failing("step", FAILURES["picklable"][0]), 4) as envs:
            handle, _ = jaxvec.reset(envs, seed=0)
            jax.block_until_ready(jax.jit(jaxvec.step)(handle, jnp.full(4, 7)))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert envs.closed


DEATHS = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL", -9),
    "SIGSEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV", -11),
    "os._exit": (lambda: os._exit(17), "exited with code 17", 17),
}


@pytest.mark.parametrize("name", DEATHS)
@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_a_dead_worker_is_named_with_env_and_action(make, name, where):
    action, text, exitcode = DEATHS[name]
    with pytest.raises(jaxvec.WorkerDiedError, match=text) as caught:
        envs = make(failing(where, action), 4)
        envs.reset()
        envs.step(np.full(4, 7))
    error = caught.value
    assert (error.worker, error.env_ids, error.exitcode) == (1, (2, 3), exitcode)
    assert "envs 2, 3" in str(error)
    if where != "constructor":
        assert "env 2 (worker 1) is running" in str(error)
    if where == "step":
        assert "last action np.int64(7)" in str(error)


def test_an_idle_worker_killed_from_outside_is_noticed(make):
    envs = make(CountingEnv, 4)
    envs.reset()
    workers = psutil.Process().children()
    workers[0].kill()
    with pytest.raises(jaxvec.WorkerDiedError, match="was killed by SIGKILL"):
        envs.step(np.zeros(4, int))
    with pytest.raises(jaxvec.PoolBrokenError, match="SIGKILL"):
        envs.step(np.zeros(4, int))
    envs.close()
    assert not any(worker.is_running() and worker.status() != "zombie" for worker in workers)


def test_a_worker_whose_fork_outlives_it_is_noticed(make):
    """A child forked by the env holds the dead worker's socket open: there is no end of file."""

    class Forking(CountingEnv):
        def step(self, action):
            if os.fork() == 0:
                signal.pause()
            os._exit(5)

    envs = make(Forking, 1)
    envs.reset()
    with pytest.raises(jaxvec.WorkerDiedError, match="exited with code 5"):
        envs.step(np.zeros(1, int))
    envs.close()  # the session's watch for leftovers sees that the fork is gone, too


class SleepingEnv(CountingEnv):
    def __init__(self, env_id):
        super().__init__()
        self._sleeps = env_id == 1

    def step(self, action):
        if self._sleeps and action == 7:
            signal.pause()
        return super().step(action)


def wait_until_running(envs):
    """Waits until a worker is inside an env's code."""
    running = envs.pool._workers._arrays["running",]
    deadline = time.monotonic() + 10
    while not running.any():
        assert time.monotonic() < deadline


def test_a_hanging_env_is_named_by_the_timeout(make):
    envs = make(SleepingEnv, 4, num_workers=2, step_timeout=1.0)
    envs.reset()
    envs.step(np.zeros(4, int))
    with pytest.raises(
        jaxvec.EnvTimeoutError,
        match=r"step timed out after 1.0 s: env 1 .worker 0. is running, last "
        r"action np.int64\(7\)",
    ) as caught:
        envs.step(np.full(4, 7))
    assert caught.value.env_ids == (0, 1)  # env 0 finished, but its slice was not handed back
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(jaxvec.PoolBrokenError, match="env 1"):
        envs.step(np.zeros(4, int))


def test_a_stopped_worker_is_named_by_the_timeout(make):
    class Env(CountingEnv):
        def pid(self):
            return os.getpid()

    envs = make(Env, 2, num_workers=2, step_timeout=1.0)
    envs.reset()
    stopped = psutil.Process(envs.call("pid")[0])
    stopped.suspend()
    with pytest.raises(jaxvec.EnvTimeoutError, match="step timed out.* unfinished: env 0"):
        envs.step(np.zeros(2, int))
    envs.close()
    assert not stopped.is_running()


@pytest.mark.parametrize("size", [1, 10_000_000])
def test_a_call_to_a_stopped_worker_times_out(make, size):
    """Be it that the answer does not come, or that the question does not fit into the socket."""

    class Env(CountingEnv):
        def pid(self, _):
            return os.getpid()

    envs = make(Env, 2, num_workers=2, step_timeout=1.0)
    psutil.Process(envs.call("pid", 0)[1]).suspend()
    with pytest.raises(
        jaxvec.EnvTimeoutError, match="call timed out after 1.0 s: .* of env 1 have not answered"
    ):
        envs.call("pid", bytes(size))
    with pytest.raises(jaxvec.PoolBrokenError, match="call timed out"):
        envs.reset()


def test_a_slow_constructor_and_a_slow_reset_time_out(make):
    def slow(env_id):
        if env_id == 3:
            signal.pause()
        return CountingEnv()

    with pytest.raises(jaxvec.EnvTimeoutError, match=r"constructor timed out after 4 s.* envs 2, 3"):
        make(slow, 4, start_timeout=4)
    envs = make(failing("reset", signal.pause, victim=0), 2, num_workers=2, reset_timeout=1.0)
    with pytest.raises(jaxvec.EnvTimeoutError, match="reset timed out after 1.0 s: env 0"):
        envs.reset()


WRONG_DATA = {
    "shape": (lambda obs: obs[:2], r"obs: expected shape \(4,\), got \(2,\)"),
    "dtype": (lambda obs: obs * 0.5, "obs: expected int32, got float64"),
    "None": (lambda obs: None, r"obs: expected shape \(4,\), got \(\)"),
    "structure": (lambda obs: {"x": obs}, r"obs: expected shape \(4,\), got \(\)"),
    "ragged": (lambda obs: [1, [2]], "obs: expected shape .*ragged"),
}


@pytest.mark.parametrize("name", WRONG_DATA)
@pytest.mark.parametrize("where", ["reset", "step"])
def test_wrong_observations_name_env_and_leaf(make, backend, name, where):
    change, text = WRONG_DATA[name]

    class Wrong(CountingEnv):
        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed, options=options)
            return (change(obs) if where == "reset" else obs), info

        def step(self, action):
            obs, *rest = super().step(action)
            return change(obs), *rest

    envs = make(Wrong, 2, backend=backend)
    with pytest.raises(jaxvec.EnvDataError, match=f"env [01] .*{where}.*{text}"):
        envs.reset()
        envs.step(np.zeros(2, int))
    with pytest.raises(jaxvec.PoolBrokenError):
        envs.reset()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ((np.zeros(4, np.int32), 0.0, False, {}), "a tuple of 4"),
        (None, "NoneType"),
        ((np.zeros(4, np.int32), None, False, False, {}), "reward: expected a number"),
        ((np.zeros(4, np.int32), np.zeros(2), False, False, {}), "reward: .*reward_space"),
        ((np.zeros(4, np.int32), 0.0, False, False, None), "info as a dict, got NoneType"),
    ],
)
def test_wrong_results_of_step_say_what_is_expected(make, backend, result, text):
    class Wrong(CountingEnv):
        def step(self, action):
            return result

    envs = make(Wrong, 2, backend=backend)
    envs.reset()
    with pytest.raises(jaxvec.EnvDataError, match=text):
        envs.step(np.zeros(2, int))


def test_envs_with_different_spaces_are_refused(make, backend):
    def different(env_id):
        env = CountingEnv()
        if env_id == 3:
            env.action_space = spaces.Discrete(5)
        return env

    with pytest.raises(jaxvec.SpaceMismatchError, match=r"env 3 has action space Discrete\(5\)"):
        make(different, 4, backend=backend)


def test_a_failed_call_leaves_the_pool_usable(make, backend):
    envs = make(CountingEnv, 2, backend=backend)
    envs.reset()
    with pytest.raises(jaxvec.EnvError, match="env 0 .* in no_such_thing"):
        envs.call("no_such_thing")
    envs.step(np.zeros(2, int))
    assert envs.get_attr("steps") == (1, 1)


def test_an_answer_that_does_not_travel_leaves_the_pool_usable(make):
    class Env(CountingEnv):
        def lock(self):
            return threading.Lock()

        def unpicklable_here(self):
            return TwoArguments(1, 2)

    envs = make(Env, 2)
    with pytest.raises(jaxvec.EnvError, match=r"env 0 .*cannot pickle '_thread.lock'"):
        envs.call("lock")
    with pytest.raises(jaxvec.EnvError, match="worker 0 .*can't be unpickled here: TwoArguments"):
        envs.call("unpicklable_here")
    assert envs.get_attr("resets") == (0, 0)


def test_close_during_a_step_ends_it(make):
    envs = make(SleepingEnv, 2, num_workers=2)
    envs.reset()
    outcome: list[BaseException] = []

    def step():
        try:
            envs.step(np.full(2, 7))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    wait_until_running(envs)
    envs.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert isinstance(outcome[0], jaxvec.PoolClosedError)


def test_a_pool_dropped_without_close_ends_its_workers(make):
    envs = jaxvec.make(CountingEnv, 2)
    handle, _ = jaxvec.reset(envs)
    before = psutil.Process().children()
    assert len(before) == 2
    del envs
    assert psutil.wait_procs(before, timeout=5)[1] == []
    with pytest.raises(jaxvec.PoolClosedError, match="garbage collected"):
        jaxvec.step(handle, jnp.zeros(2, int))


def test_a_pool_made_in_a_thread_outlives_the_thread(make):
    made: list[jaxvec.VectorEnv] = []
    thread = threading.Thread(target=lambda: made.append(make(CountingEnv, 2)))
    thread.start()
    thread.join(timeout=30)
    made[0].reset()
    assert made[0].step(np.zeros(2, int)).obs[:, 1].tolist() == [1, 1]


SCRIPT = """
import os, signal, sys, threading, time
import numpy as np, gymnasium, jaxvec
from gymnasium import spaces

class Env(gymnasium.Env):  # of __main__, and there is no main guard
    observation_space = spaces.Box(0, 1, (2,))
    action_space = spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {{}}
    def pid(self):
        return os.getpid()
    def step(self, action):
        {step}
        return np.zeros(2, np.float32), 1.0, False, False, {{}}

envs = jaxvec.make(Env, num_envs=2, num_workers=2)
envs.reset()
print(*envs.call("pid"), flush=True)
{then}
"""


def run_script(step="pass", then="pass", **kwargs):
    source = textwrap.dedent(SCRIPT).format(step=step, then=then)
    return subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def gone(pids, timeout=5):
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return psutil.wait_procs(alive, timeout=timeout)[1] == []


@pytest.mark.parametrize(
    "step",
    ["pass", "signal.pause()", "__import__('ctypes').PyDLL(None).sleep(100)"],
    ids=["idle", "in step", "holding the GIL"],
)
def test_workers_die_with_a_killed_parent(step):
    then = "envs.step(np.zeros(2, int)); signal.pause()" if step != "pass" else "signal.pause()"
    script = run_script(step, then)
    pids = list(map(int, script.stdout.readline().split()))
    assert len(pids) == 2
    script.kill()
    script.wait(timeout=10)
    assert gone(pids, timeout=2)
    script.stdout.close()
    script.stderr.close()


def test_a_script_that_just_ends_closes_its_pool():
    script = run_script(then="envs.step(np.zeros(2, int))")
    out, err = script.communicate(timeout=30)
    assert script.returncode == 0
    assert err == ""
    assert gone(map(int, out.split()))


def test_a_fork_of_the_parent_can_neither_use_nor_close_the_pool():
    then = """
if os.fork() == 0:
    try:
        envs.step(np.zeros(2, int))
    except jaxvec.PoolClosedError as error:
        print("fork:", error, flush=True)
    sys.exit()
os.wait()
print(envs.step(np.zeros(2, int)).reward)
"""
    script = run_script(then=then)
    out, err = script.communicate(timeout=30)
    pids, fork, parent = out.splitlines()
    assert "belongs to process" in fork
    assert (parent, err) == ("[1. 1.]", "")
    assert gone(map(int, pids.split()))


def test_ctrl_c_ends_a_script_with_one_traceback():
    step = r'os.write(1, b"stepping\n"); signal.pause()'
    script = run_script(step, "envs.step(np.zeros(2, int))", start_new_session=True)
    pids = list(map(int, script.stdout.readline().split()))
    assert script.stdout.readline() == "stepping\n"  # so the parent waits for it, or is about to
    os.killpg(script.pid, signal.SIGINT)
    _, err = script.communicate(timeout=10)
    assert script.returncode != 0
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert gone(pids)


@pytest.mark.parametrize("transport", ["auto", "io_callback"])
@pytest.mark.parametrize("width", [1, 512], ids=["small", "large"])
@pytest.mark.parametrize("at_once", [False, True], ids=["in the wait", "before the wait"])
def test_ctrl_c_ends_a_program_whose_env_hangs_and_breaks_the_pool(transport, width, at_once):
    """Also one that XLA runs, wholly or in part, in threads to which Python passes no signal."""
    step = r'os.write(1, b"stepping\n"); signal.pause()'
    then = f"""
import jax, jax.numpy as jnp
from jaxvec._native import interrupts
from jaxvec._workers import ProcessWorkers
def wait(self, slots, count, patience, wait=ProcessWorkers.wait):
    while {at_once} and patience.name == "step" and not interrupts.count():
        time.sleep(0.001)
    wait(self, slots, count, patience)
ProcessWorkers.wait = wait
envs = jaxvec.make(Env, 2, transport="{transport}", step_timeout=None)
@jax.jit
def program(handle, x):
    def body(carry, _):
        handle, x = carry
        x = jnp.tanh(x @ x)
        handle, _ = jaxvec.step(handle, (x.sum() > 0).astype(int).repeat(2))
        return (handle, x), None
    return jax.lax.scan(body, (handle, x), length=100)
try:
    jax.block_until_ready(program(jaxvec.reset(envs)[0], jnp.ones(({width}, {width}))))
except (RuntimeError, KeyboardInterrupt) as error:
    print("KeyboardInterrupt" in repr(error), type(envs.pool.broken_by).__name__, flush=True)
try:
    envs.step(np.zeros(2, int))
except jaxvec.PoolBrokenError as error:
    print(error, flush=True)
envs.close()
"""
    script = run_script(step, then, start_new_session=True)
    try:
        script.stdout.readline()
        assert script.stdout.readline() == "stepping\n"
        os.killpg(script.pid, signal.SIGINT)
        out, err = script.communicate(timeout=20)
    finally:
        script.kill()
        script.wait(timeout=10)
    assert "True KeyboardInterrupt" in out
    assert "is broken since an earlier failure" in out
    assert transport == "io_callback" or err == ""  # where JAX logs its own traceback


@pytest.mark.parametrize("transport", ["auto", "io_callback"])
@pytest.mark.parametrize("width", [1, 128], ids=["small", "large"])
def test_ctrl_c_ends_a_program_whose_steps_are_quick(transport, width):
    """And where a whole step was taken, the pool is not broken by it."""
    then = f"""
import jax, jax.numpy as jnp
envs = jaxvec.make(Env, 2, transport="{transport}", step_timeout=None)
@jax.jit
def program(handle, x):
    def body(carry, _):
        handle, x = carry
        x = jnp.tanh(x @ x)
        handle, _ = jaxvec.step(handle, (x.sum() > 0).astype(int).repeat(2))
        return (handle, x), None
    return jax.lax.scan(body, (handle, x), length=2**30)
try:
    jax.block_until_ready(program(jaxvec.reset(envs)[0], jnp.ones(({width}, {width}))))
except (RuntimeError, KeyboardInterrupt) as error:
    print("KeyboardInterrupt" in repr(error), flush=True)
if envs.pool.broken_by is None:
    print(jaxvec.step(jaxvec.reset(envs)[0], jnp.zeros(2, int))[1].reward)
"""
    step = r'self.n = getattr(self, "n", 0) + 1; self.n == 1000 and os.write(1, b"stepping\n")'
    script = run_script(step, then, start_new_session=True)
    try:
        script.stdout.readline()
        assert script.stdout.readline() == "stepping\n"
        for _ in range(20):  # a thread of XLA's may be busy elsewhere when it comes
            os.killpg(script.pid, signal.SIGINT)
            if select.select([script.stdout], [], [], 0.5)[0]:
                break
        out, err = script.communicate(timeout=20)
    finally:
        script.kill()
        script.wait(timeout=10)
    assert "True" in out
    assert transport == "io_callback" or err == ""
    assert transport == "io_callback" or "[1. 1.]" in out


def test_a_worker_never_imports_jax(make):
    class Env(CountingEnv):
        def imported(self):
            return [name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib", "chex")]

    envs = make(Env, 2)
    envs.reset()
    envs.step(np.zeros(2, int))
    assert envs.call("imported") == ([], [])


def test_many_pools_leave_nothing_behind():
    process = psutil.Process()
    with jaxvec.make(CountingEnv, 2):
        pass
    gc.collect()  # what earlier tests left to it
    fds, threads = process.num_fds(), process.num_threads()
    for _ in range(10):
        with jaxvec.make(CountingEnv, 2) as envs:
            envs.reset()
    gc.collect()
    assert process.num_fds() <= fds
    assert process.num_threads() <= threads
    assert process.children() == []
