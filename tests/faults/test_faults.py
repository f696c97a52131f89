"""A catalogue of disasters: each becomes a typed error, is repeated, and leaves a pool that closes.

Every case runs in all ways to drive a pool; its variants in two of them, and on the host. What fails in a
constructor fails in `make`, before there is a dispatch or a driver: such cases have no ways.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from support import disasters, probe
from support.disasters import (
    DEATHS,
    FAILURES,
    ODD,
    OUT_OF_MEMORY,
    FailingEnv,
    SleepingEnv,
    Way,
    assert_broken,
    assert_death,
    assert_env_error,
    failing,
    in_halves,
    in_two_ways,
    throw,
    unfinished,
    wait_until,
    wait_until_dead,
    waiting_for,
    within,
)
from support.probe import supervisor_module as supervisor
from support.scripts import run_python, run_script

import jaxvec
from jaxvec.testing import CountingEnv

FILE = Path(disasters.__file__).name

# --- Exceptions in an env ---------------------------------------------------------------------


@pytest.mark.slow(but=15)
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_an_exception_in_an_env_becomes_a_typed_error(make, backend, name, where):
    with pytest.raises(jaxvec.EnvError) as caught:
        envs = make(failing(where, FAILURES[name][0]), 4, backend=backend)
        envs.reset(seed=0)
        envs.step(np.full(4, 7))
    assert_env_error(caught.value, name, where, file=FILE, worker=1 if backend == "process" else None)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_exception_breaks_the_pool_in_every_way(drive, where):
    driver = drive(failing(where, FAILURES["picklable"][0]))
    with pytest.raises(jaxvec.EnvError) as caught:
        driver.reset()
        driver.step(0, times=3)
        driver.step(7, times=3)
    assert_env_error(caught.value, "picklable", where, file=FILE)
    assert_broken(driver, caught.value)


@pytest.mark.slow(but=3)
@in_two_ways
@pytest.mark.parametrize("name", FAILURES | OUT_OF_MEMORY)
def test_every_exception_breaks_the_pool(drive, name):
    driver = drive(failing("step", (FAILURES | OUT_OF_MEMORY)[name][0]))
    driver.reset()
    driver.step(0)
    with pytest.raises(jaxvec.EnvError) as caught:
        driver.step(7)
    assert_env_error(caught.value, name, "step", file=FILE)
    assert_broken(driver, caught.value)


@pytest.mark.parametrize("name", ODD)
def test_a_text_with_odd_characters_arrives_whole_on_the_host(make, backend, name):
    envs = make(failing("step", lambda: throw(ValueError(ODD[name]))), 4, backend=backend)
    envs.reset()
    with pytest.raises(jaxvec.EnvError, match="(?s)ValueError in step.*: is .* end"):
        envs.step(np.full(4, 7))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("transport", ["ffi", "io_callback"])
@pytest.mark.nightly(but=2)
def test_a_text_with_odd_characters_arrives_whole_from_a_program(transport, name):
    """In a process of its own, which the text might end."""
    way = Way("native" if transport == "ffi" else "portable", transport, False)
    with run_script(
        f"raise ValueError({ODD[name]!r})",
        """
try:
    driver.step()
except jaxvec.EnvError as error:
    print("typed:", "is " in str(error) and " end" in str(error), flush=True)
""",
        way,
    ) as script:
        out, err = script.communicate(timeout=200)
    assert script.returncode == 0, err
    assert "typed: True" in out


@pytest.mark.parametrize("where", ["constructor", "reset"])
def test_an_env_that_is_out_of_memory_says_so(make, where):
    with pytest.raises(jaxvec.EnvError) as caught:
        make(failing(where, OUT_OF_MEMORY["out of memory"][0]), 4).reset()
    assert_env_error(caught.value, "out of memory", where, file=FILE)


def test_a_reset_between_two_episodes_fails_as_a_reset(drive):
    class Env(CountingEnv):
        def reset(self, *, seed=None, options=None):
            if self.resets == 1:
                raise ValueError("only once")
            return super().reset(seed=seed, options=options)

    driver = drive(lambda: Env(episode_length=2))
    driver.reset()
    driver.step()
    with pytest.raises(jaxvec.EnvError, match=r"env \d .* in reset: only once") as caught:
        driver.step()
    assert (caught.value.operation, caught.value.action) == ("reset", None)
    assert_broken(driver, caught.value)


@in_halves
def test_a_failure_is_noticed_while_other_envs_go_on(drive):
    """Also by who never has to wait, because a batch of others is always ready."""
    driver = drive(failing("step", FAILURES["picklable"][0], victim=0), num_workers=4)
    driver.reset()
    driver.send(7, [0])

    def turns():
        others = [1, 2]
        while True:
            driver.send(0, others)
            wait_until(lambda: unfinished(driver.envs) == [0])
            others = driver.recv()

    with pytest.raises(jaxvec.EnvError, match="env 0 .*bad luck") as caught:
        within(turns)
    assert_broken(driver, caught.value)


# --- Several failures at once -------------------------------------------------------------------


class Doomed(CountingEnv):
    """At action 7 each env fails in another way; env 3 never does."""

    def __init__(self, env_id):
        super().__init__()
        self.ways = [
            lambda: throw(LookupError("no door")),
            lambda: os._exit(3),
            lambda: throw(ValueError("bad luck")),
        ]
        self.fail = dict(enumerate(self.ways)).get(env_id, lambda: None)

    def step(self, action):
        if action == 7:
            self.fail()
        return super().step(action)

    def ask(self):
        self.fail()


@pytest.mark.parametrize(
    "way", [way for way in disasters.WAYS if not way.first_ready], ids=str, indirect=True
)
def test_all_that_fails_in_a_step_is_told_and_logged(drive, monkeypatch, caplog):
    monkeypatch.setattr(
        supervisor, "_COLLECT_TIMEOUT", disasters.PATIENCE
    )  # a busy machine may take its time
    driver = drive(Doomed, 4, num_workers=4)
    driver.reset()
    driver.step()
    with pytest.raises(
        jaxvec.JaxvecError, match="2 more failures in the same operation: see error.others"
    ) as caught:
        driver.step(7)
    errors = sorted([caught.value, *caught.value.others], key=lambda error: error.worker)
    assert [type(error) for error in errors] == [jaxvec.EnvError, jaxvec.WorkerDiedError, jaxvec.EnvError]
    assert [error.worker for error in errors] == [0, 1, 2]
    assert [errors[0].env_id, errors[1].env_ids, errors[2].env_id] == [0, (1,), 2]
    assert [errors[0].action, errors[1].exitcode, errors[2].operation] == ["np.int64(7)", 3, "step"]
    assert [type(errors[0].__cause__), type(errors[2].__cause__)] == [LookupError, ValueError]
    assert not caplog.messages, "which would come before the error"
    after = str(caught.value).splitlines()[2:4]
    for other in caught.value.others:
        assert other.others == ()
        assert f"also failed in the same operation: {str(other).splitlines()[0]}" in after
    come = pickle.loads(pickle.dumps(caught.value))
    assert [str(each) for each in (come, *come.others)] == [
        str(each) for each in (caught.value, *caught.value.others)
    ]
    assert_broken(driver, caught.value)


def test_who_hangs_or_is_done_does_not_hold_up_the_error_of_another(make):
    fail = partial(FailingEnv, 2, "step")
    envs = make(
        [partial(fail, FAILURES["picklable"][0]), CountingEnv, partial(fail, signal.pause)], num_workers=3
    )
    envs.reset()
    with pytest.raises(jaxvec.EnvError) as caught:
        within(partial(envs.step, [7, 7, 7]))
    assert caught.value.others == ()


def test_a_call_that_fails_in_several_workers_tells_of_each(make):
    envs = make([partial(Doomed, env_id) for env_id in (3, 0, 3, 2)], num_workers=4)
    with pytest.raises(jaxvec.EnvError, match="env 1 .*no door") as caught:
        envs.call("ask")
    (other,) = caught.value.others
    assert (other.env_id, other.worker, other.operation) == (3, 3, "ask")
    envs.reset()


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize(
    "error",
    [
        jaxvec.EnvError("bad luck", env_id=2, worker=1, operation="step", action="7"),
        jaxvec.WorkerDiedError("it died", worker=1, env_ids=(2, 3), exitcode=-9),
        jaxvec.EnvTimeoutError("it is late", env_ids=(2, 3)),
        jaxvec.PoolClosedError("the pool was closed"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_error_travels_whole(error, protocol):
    come = pickle.loads(pickle.dumps(error, protocol))
    assert type(come) is type(error)
    assert (str(come), come.args, vars(come)) == (str(error), error.args, vars(error))


FAILING_PROGRAM = """
import jax, jax.numpy as jnp, jaxvec

class Fails(jaxvec.testing.CountingEnv):
    def step(self, action):
        if action == 7:
            raise KeyError("no such room")
        return super().step(action)

@jax.jit
def rollout(handle):
    return jax.lax.scan(lambda h, action: jaxvec.step(h, action), handle, jnp.full((5, 4), 7))

with jaxvec.make(Fails, 4, num_workers=2) as envs:
    handle, _ = jaxvec.reset(envs, seed=0)
    rollout(handle)
"""


def test_failing_env_in_a_program_prints_few_lines(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(FAILING_PROGRAM)
    done = run_python(str(path))
    lines = done.stderr.splitlines()
    assert len(lines) <= 25, done.stderr
    assert sum(line.startswith("jaxvec._errors.EnvError: env ") for line in lines) == 1
    for line in ("    rollout(handle)", '    raise KeyError("no such room")'):  # the user's own frames
        assert line in lines
    assert "XLA" not in done.stderr
    assert "JaxRuntimeError" not in done.stderr
    internal = [line for line in lines if line.startswith('  File "') and f"{os.sep}jaxvec{os.sep}" in line]
    assert [line.rpartition(" ")[2] for line in internal] == ["__exit__"]


# --- Deaths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEATHS)
@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_a_dead_worker_is_named_with_env_and_action(make, name, where):
    with pytest.raises(jaxvec.WorkerDiedError) as caught:
        envs = make(failing(where, DEATHS[name][0]), 4)
        envs.reset()
        envs.step(np.full(4, 7))
    assert_death(caught.value, name, where)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_dead_worker_breaks_the_pool_in_every_way(drive, where):
    driver = drive(failing(where, DEATHS["SIGKILL"][0]))
    with pytest.raises(jaxvec.WorkerDiedError) as caught:
        driver.reset()
        driver.step(0, times=3)
        driver.step(7, times=3)
    assert_death(caught.value, "SIGKILL", where)
    assert_broken(driver, caught.value)


@pytest.mark.parametrize("then", ["reset", "step"])
def test_an_idle_worker_killed_from_outside_is_noticed(drive, then):
    driver = drive(CountingEnv)
    driver.reset()
    driver.step()
    driver.workers[1].kill()
    wait_until_dead(driver.workers[1])
    with pytest.raises(jaxvec.WorkerDiedError, match="was killed by SIGKILL") as caught:
        getattr(driver, then)()
    assert (caught.value.worker, caught.value.env_ids, caught.value.exitcode) == (1, (2, 3), -9)
    assert_broken(driver, caught.value)


def test_a_worker_killed_this_moment_is_noticed(drive):
    """Nobody waits for it to be dead: it may get its work yet, or not."""
    driver = drive(CountingEnv)
    driver.reset()
    driver.workers[0].kill()
    with pytest.raises(jaxvec.WorkerDiedError, match="was killed by SIGKILL") as caught:
        driver.step()
    assert caught.value.worker == 0
    assert_broken(driver, caught.value)


@in_two_ways
@pytest.mark.parametrize("name", ["SIGSEGV", "os._exit"])  # sys.exit in a thread ends the thread alone
def test_a_worker_that_ends_while_idle_is_noticed(drive, name, tmp_path):
    """Its env's thread does it; so does the kernel, by SIGKILL, when the machine is out of memory."""

    class Env(CountingEnv):
        def __init__(self, env_id):
            super().__init__()
            if env_id == 2:
                threading.Thread(target=self._end, daemon=True).start()

        def _end(self):
            waiting_for(tmp_path / "end")()
            DEATHS[name][0]()

    driver = drive(Env)
    driver.reset()
    (tmp_path / "end").touch()
    wait_until_dead(driver.workers[1])
    with pytest.raises(jaxvec.WorkerDiedError) as caught:
        driver.step()
    assert_death(caught.value, name, "idle")
    assert_broken(driver, caught.value)


def test_a_worker_whose_fork_outlives_it_is_noticed(drive):
    """A child forked by the env holds the dead worker's socket open: there is no end of file."""

    class Forking(CountingEnv):
        def step(self, action):
            if os.fork() == 0:
                signal.pause()
            os._exit(5)

    driver = drive(Forking, 2)
    driver.reset()
    with pytest.raises(jaxvec.WorkerDiedError, match="exited with code 5") as caught:
        driver.step()
    assert_broken(driver, caught.value)  # the session's watch for leftovers sees that the fork is gone, too


# --- Timeouts ---------------------------------------------------------------------------------


def test_a_hanging_env_is_named_by_the_timeout(drive, way):
    driver = drive(SleepingEnv, step_timeout=1.0)
    driver.reset()
    driver.step(0)
    with pytest.raises(
        jaxvec.EnvTimeoutError,
        match=r"step timed out after 1.0 s\. Still running: env 1 \(worker 0, action 7\)\. .*on_fault=",
    ) as caught:
        driver.step(7)
    # Env 0 has finished; but who waits for all gets a worker's slice as a whole.
    assert caught.value.env_ids == ((1,) if way.first_ready else (0, 1))
    assert isinstance(caught.value, TimeoutError)
    assert_broken(driver, caught.value)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_after_a_timeout_no_row_of_the_slow_env_is_taken(drive, where, tmp_path):
    """It finishes meanwhile, and it does not help."""
    driver = drive(
        failing(where, waiting_for(tmp_path / "go"), victim=0), reset_timeout=1.0, step_timeout=1.0
    )
    with pytest.raises(
        jaxvec.EnvTimeoutError, match=r"timed out after 1.0 s\. Still running: env 0 \(worker 0, "
    ) as caught:
        driver.reset()
        driver.step(7)
    (tmp_path / "go").touch()
    wait_until(lambda: not unfinished(driver.envs))
    assert_broken(driver, caught.value)


@pytest.mark.slow(but=1)
def test_the_limit_of_a_reset_or_step_counts_for_each_env(drive):
    class Slow(CountingEnv):
        def reset(self, **kwargs):
            threading.Event().wait(1.5)
            return super().reset(**kwargs)

        def step(self, action):
            if action == 7:
                signal.pause()
            threading.Event().wait(1.5)
            return super().step(action)

    driver = drive(Slow, 2, num_workers=1, reset_timeout=2.8, step_timeout=2.8)
    driver.reset()
    driver.step(0)
    with pytest.raises(jaxvec.EnvTimeoutError, match=r"step timed out after 2.8 s\. Still running: env \d"):
        driver.step(7)


@in_halves
def test_a_reset_has_its_own_time_also_where_recv_waits_for_it(drive):
    driver = drive(failing("reset", signal.pause, victim=1), reset_timeout=2.0, step_timeout=0.5)
    with pytest.raises(
        jaxvec.EnvTimeoutError,
        match=r"reset timed out after 2.0 s\. Still running: env 1 \(worker 0, resetting\)",
    ) as caught:
        driver.reset()  # returns without env 1, which is of the second batch
    assert_broken(driver, caught.value)


def test_reset_timeout_starts_anew_when_another_reset_waits(make):
    envs = make(failing("reset", signal.pause, victim=1), 2, reset_timeout=0.2, step_timeout=0.1)
    envs.reset_async()
    with pytest.raises(jaxvec.EnvTimeoutError, match=r"reset timed out after 0.2 s"):
        envs.reset()


def test_a_stopped_worker_is_named_by_the_timeout(drive):
    driver = drive(CountingEnv, step_timeout=1.0)
    driver.reset()
    wait_until(lambda: not probe.array(driver.envs, "running").any())  # a row is here a moment before
    driver.workers[1].suspend()
    with pytest.raises(
        jaxvec.EnvTimeoutError,
        match=r"step timed out after 1.0 s\. No env is running\. Unfinished: envs 2, 3\. Raise",
    ) as caught:
        driver.step()
    assert caught.value.env_ids == (2, 3)
    assert_broken(driver, caught.value)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("size", [1, 10_000_000])
@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_a_call_to_a_stopped_worker_times_out(make, size, dispatch):
    """Be it that the answer does not come, or that the question does not fit into the socket."""

    class Env(CountingEnv):
        def pid(self, _):
            return os.getpid()

    envs = make(Env, 2, num_workers=2, step_timeout=1.0, dispatch=dispatch)
    psutil.Process(envs.call("pid", 0)[1]).suspend()
    with pytest.raises(
        jaxvec.EnvTimeoutError, match=r"call timed out after 1.0 s\. No reply from the workers of env 1\."
    ):
        envs.call("pid", bytes(size))
    with pytest.raises(jaxvec.PoolBrokenError, match="call timed out"):
        envs.reset()


# --- Constructors -----------------------------------------------------------------------------


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("options", [{}, {"spare_envs": 2}, {"envs_per_instance": 1}], ids=str)
def test_the_limit_of_a_start_counts_for_each_env(make, options):
    class Slow(CountingEnv):
        def __init__(self):
            super().__init__()
            threading.Event().wait(1.2)

    def batched():
        return gymnasium.vector.SyncVectorEnv([Slow])

    env = batched if "envs_per_instance" in options else Slow
    # The start of an interpreter would take of the time, too; the server has started after the first pool.
    forked = {"num_workers": 1, "workers": jaxvec.Workers(start_method="forkserver")}
    make(CountingEnv, 1, **forked).close()
    envs = make(env, 1 if "spare_envs" in options else 3, start_timeout=3, **forked, **options)
    envs.reset()


def test_a_slow_constructor_and_a_slow_reset_time_out(make, new_workers):
    def slow(env_id):
        if env_id == 3:
            signal.pause()
        return CountingEnv()

    make(CountingEnv, 1).close()  # the start of a fork server would take of the time, too
    text = (
        r"constructor timed out after 4 s.* envs 2, 3; worker 1 has built 1 of 3 envs\. "
        r"Raise Timeouts\(start=...\), .* or num_workers \(2\)"
    )
    with pytest.raises(jaxvec.EnvTimeoutError, match=text):
        make(slow, 4, num_workers=2, start_timeout=4, spare_envs=1)
    assert new_workers() == []
    envs = make(failing("reset", signal.pause, victim=0), 2, num_workers=2, reset_timeout=1.0)
    with pytest.raises(
        jaxvec.EnvTimeoutError,
        match=r"reset timed out after 1.0 s\. Still running: env 0 .*Raise Timeouts\(reset=...\)",
    ):
        envs.reset()


SPACES = {"observation_space": spaces.Box(0, 1, (2,)), "action_space": spaces.Discrete(2)}


@pytest.mark.parametrize("name", SPACES)
def test_an_env_without_a_space_is_an_env_error(backend, name, new_workers):
    whole, rest = (type("Bare", (gymnasium.Env,), {**SPACES}) for _ in range(2))
    delattr(rest, name)
    text = rf"env 1 .*raised AttributeError in {name}: 'Bare' object has no attribute '{name}'"
    with pytest.raises(jaxvec.EnvError, match=text) as caught:
        jaxvec.make([whole, rest], backend=backend)
    assert (caught.value.env_id, caught.value.operation) == (1, name)
    assert isinstance(caught.value.__cause__, AttributeError)
    setattr(rest, name, None)
    with pytest.raises(jaxvec.EnvError, match=f"env 1 .*set {name} to a space .*, not to None"):
        jaxvec.make([whole, rest], backend=backend)
    assert new_workers() == []


@pytest.mark.parametrize("name", [*SPACES, "reward_space", "metadata", "render_mode"])
def test_a_space_that_raises_is_an_env_error(backend, name, new_workers):
    closed: list[Any] = []

    def read(env):
        raise LookupError("no simulator")

    env = type(
        "Bare", (gymnasium.Env,), {**SPACES, "close": lambda env: closed.append(env), name: property(read)}
    )
    with pytest.raises(jaxvec.EnvError, match=rf"env 0 .*raised LookupError in {name}: no sim") as caught:
        jaxvec.make(env, 2, num_workers=1, backend=backend)
    assert "in read" in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, LookupError)
    assert new_workers() == []
    assert len(closed) == (2 if backend == "serial" else 0)  # workers have lists of their own


def test_an_attribute_that_raises_once_spaces_are_known(backend, new_workers):
    class Painter(CountingEnv):
        @property
        def set_observation_buffer(self):
            raise LookupError("no simulator")

    with pytest.raises(jaxvec.EnvError, match="env 0 .*raised LookupError in constructor: no simulator"):
        jaxvec.make(Painter, 2, num_workers=1, backend=backend)
    assert new_workers() == []


def test_a_failed_constructor_does_not_wait_for_a_slow_one(new_workers):
    def make_env(env_id):
        if env_id == 0:
            signal.pause()
        return FailingEnv(env_id, "constructor", FAILURES["picklable"][0])

    with pytest.raises(jaxvec.EnvError, match="env 2 .*in constructor: bad luck"):
        jaxvec.make(make_env, 4, num_workers=2, timeouts=jaxvec.Timeouts(start=disasters.PATIENCE))
    assert new_workers() == []


# --- What is not a disaster -------------------------------------------------------------------


@pytest.mark.slow(but=1)
@in_two_ways
def test_megabytes_that_envs_print_into_a_pipe_come_through(way):
    """They wait for the pipe's reader, which the parent's own output goes to."""
    step = "[print('x' * 10**6, file=stream, flush=True) for stream in (sys.stdout, sys.stderr)]"
    with run_script(step, "driver.step()", way) as script:
        out, err = script.communicate(timeout=200)
    assert script.returncode == 0
    assert (out.count("x"), err.count("x")) == (2_000_000, 2_000_000)
