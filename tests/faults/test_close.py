"""The end of a pool: called for, in any state and from any thread, or come by itself."""

import atexit
import gc
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
from support import disasters, probe
from support.disasters import (
    PATIENCE,
    TWO_WAYS,
    WAYS,
    Background,
    SleepingEnv,
    assert_closes,
    bad_luck,
    failing,
    in_two_ways,
    wait_until,
    wait_until_dead,
    wait_until_running,
    within,
)
from support.probe import connections, dispatch, fork, pool_of
from support.scripts import STEPPING, gone, read_pids, run_python, run_script

import jaxvec
from jaxvec.compat.gymnasium import AsyncVectorEnv
from jaxvec.testing import CountingEnv


def error(driver):
    with pytest.raises(jaxvec.EnvError):
        driver.step(7)


def death(driver):
    driver.workers[0].kill()
    with pytest.raises(jaxvec.WorkerDiedError):
        driver.step()


def timeout(driver):
    driver.workers[0].suspend()
    probe.set_timeouts(driver.envs, 1, 1, 0.5)
    with pytest.raises(jaxvec.EnvTimeoutError):
        driver.step()


def unnoticed_death(driver):
    driver.workers[0].kill()
    wait_until_dead(driver.workers[0])


def unnoticed_stop(driver):
    driver.workers[0].suspend()


def nothing(driver):
    driver.step()


STATES = [nothing, error, death, timeout, unnoticed_death, unnoticed_stop]


@pytest.fixture
def driver(drive):
    driver = drive(failing("step", bad_luck))
    driver.reset()
    return driver


# A stopped worker is waited for, as one whose env takes its time to close: below, and in two ways.
@pytest.mark.slow(but=2)
@pytest.mark.parametrize("state", STATES[:-1])
def test_a_pool_closes_in_any_state(driver, state):
    state(driver)
    assert_closes(driver)


@pytest.mark.slow(but=2)
@in_two_ways
@pytest.mark.parametrize("state", STATES)
def test_a_pool_closes_in_any_state_from_several_threads_at_once(driver, state):
    state(driver)
    calls = [Background(driver.envs.close) for _ in range(4)]
    for call in calls:
        call.result()
    assert_closes(driver)


def test_threads_that_begin_to_close_at_once_close_a_pool_once(monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: errors.append(failed.exc_value))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(500):
            envs = jaxvec.make(CountingEnv, 1, backend="serial")
            barrier = threading.Barrier(4)
            threads = [
                threading.Thread(target=lambda: (barrier.wait(60), envs.close()))
                for _ in range(barrier.parties)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=60)
            assert envs.closed
            assert not errors
    finally:
        sys.setswitchinterval(before)


# On the host alone: the caches of programs hold what a driver drives.
@pytest.mark.slow(but=1)
@in_two_ways
@pytest.mark.parametrize("state", STATES)
def test_a_pool_that_is_dropped_in_any_state_ends_its_workers(way, state):
    class Dropped:
        def __init__(self):
            first_ready = {"batch_size": 2} if way.first_ready else {}
            self.envs = disasters.make(
                failing("step", bad_luck), 4, num_workers=2, dispatch=way.dispatch, **first_ready
            )
            self.workers = probe.processes(self.envs)
            self.envs.reset()
            if way.first_ready:
                self.envs.recv()

        def step(self, action=0):
            self.envs.send([action] * 4)
            for _ in range(2 if way.first_ready else 1):
                self.envs.recv()

    dropped = Dropped()
    closing = pool_of(dropped.envs).finalizer  # without the error, whose frames hold the envs
    try:
        state(dropped)
        within(partial(delattr, dropped, "envs"))
        within(gc.collect)  # the errors' frames are in cycles
        assert psutil.wait_procs(dropped.workers, timeout=200)[1] == []
    finally:
        closing.close()


def test_close_during_a_step_ends_it(drive):
    driver = drive(SleepingEnv, step_timeout=None)
    driver.reset()
    step = Background(partial(driver.step, 7))
    wait_until_running(driver.envs)
    driver.close()
    with pytest.raises(jaxvec.PoolClosedError):
        step.result()
    assert_closes(driver)


def test_close_during_a_reset_ends_it(drive):
    driver = drive(failing("reset", signal.pause), reset_timeout=None, step_timeout=None)
    reset = Background(driver.reset)
    wait_until_running(driver.envs)
    driver.close()
    with pytest.raises(jaxvec.PoolClosedError):
        reset.result()
    assert_closes(driver)


def test_close_while_steps_go_on_ends_them(drive):
    driver = drive(CountingEnv)
    driver.reset()
    started = threading.Event()

    def step():
        while True:
            driver.step(times=50)
            started.set()

    steps = Background(step)
    assert started.wait(PATIENCE)
    driver.close()
    with pytest.raises(jaxvec.PoolClosedError):
        steps.result()
    assert_closes(driver)


def test_a_stopped_fork_server_delays_close_only_once(make, monkeypatch):
    waits = []  # without an answer, in seconds
    wait = fork.wait

    def record(objects, seconds):
        answered = wait(objects, seconds)
        if not answered:
            waits.append(seconds)
        return answered

    envs = make(CountingEnv, 3, num_workers=3, workers=jaxvec.Workers(start_method="forkserver"))
    envs.reset()
    stopped = psutil.Process().children(recursive=True)  # the server, too
    monkeypatch.setattr(fork, "wait", record)
    try:
        for process in stopped:
            process.suspend()
        envs.close(timeout=0)
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()
    assert sum(waits) == fork._ANSWER_TIMEOUT


class SlowToClose(CountingEnv):
    """Env 1 tells when it closes, and waits for a file."""

    def __init__(self, folder, env_id):
        super().__init__()
        self.folder, self.env_id = folder, env_id

    def close(self):
        if self.env_id == 1:
            (self.folder / "closing").touch()
            while not (self.folder / "gate").exists():
                threading.Event().wait(0.001)
        (self.folder / f"closed {self.env_id}").touch()


def closed(folder):
    return sorted(path.name for path in folder.glob("closed*"))


@pytest.fixture
def time_flies(monkeypatch, tmp_path):
    """Lets a thousand seconds pass once env 1 closes."""
    clock = time.monotonic
    flying = SimpleNamespace(monotonic=lambda: clock() + 1000 * (tmp_path / "closing").exists())
    for module in (connections, dispatch):
        monkeypatch.setattr(module, "time", flying)


UNSEEN = """
import os, sys
from contextlib import suppress
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
import jaxvec
from jaxvec.testing import CountingEnv

pipe, transport, end, when = sys.argv[1:]
os.mkfifo(pipe)

class Env(CountingEnv):
    def step(self, action):
        open(pipe).close()  # waits for the program, which opens the other end when its call has returned
        if self.env_id == 1:
            raise ValueError("bad luck")
        return super().step(action)

    def __init__(self, env_id):
        super().__init__()
        self.env_id = env_id

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
program = jax.jit(jax.shard_map(jaxvec.step, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
with jaxvec.config.override(transport=transport):
    envs = jaxvec.make(Env, 2, num_workers=2)

def call():
    result = program(handle, action)
    writer = open(pipe, "w")
    if when == "before":
        with suppress(RuntimeError):
            jax.effects_barrier()  # until it has failed, but without a look at its result
    elif when == "waiting":
        jax.block_until_ready(result)
    return result, writer

try:
    handle, _ = jaxvec.reset(envs)
    action = jax.device_put(jnp.zeros(2, int), jax.sharding.NamedSharding(mesh, P("d")))
    if end == "close":
        kept = call()
        envs.close()
    else:
        with envs:
            kept = call()
except jaxvec.JaxvecError as error:
    if when == "waiting" and isinstance(error, jaxvec.PoolBrokenError):  # another device met it last
        error = error.__cause__
    print(error.env_id, error.__cause__, envs.closed)
"""


@pytest.mark.slow(but=5)
@pytest.mark.parametrize(
    ("end", "when"),
    [("with", "before"), ("with", "during"), ("with", "waiting"), ("close", "before"), ("close", "during")],
)
def test_the_error_of_a_program_that_runs_on_is_raised_once_at_the_end(tmp_path, transport, end, when):
    """Over several devices, as on a GPU, the call of a program returns before the program has failed."""
    run = run_python("-c", UNSEEN, tmp_path / "pipe", transport, end, when)
    assert run.stdout == "1 bad luck True\n", run.stderr
    assert "atexit" not in run.stderr  # where JAX would raise it again


def test_a_success_on_another_device_does_not_hide_what_broke_the_pool(make):
    pool = pool_of(make(CountingEnv, 2))
    error = jaxvec.EnvTimeoutError("late", env_ids=(0,))
    pool.state.keep_error(error, under_way=True)
    pool.engine.count_success()
    assert pool.state.take_error() is error


def test_envs_whose_close_takes_too_long_are_named(make, caplog, tmp_path, time_flies):
    envs = make(partial(SlowToClose, tmp_path), 3, num_workers=1, spare_envs=1)
    within(partial(envs.close, timeout=200))
    assert closed(tmp_path)[:1] == ["closed 0"]
    text = "close of envs 1, 2 (worker 0) was cut off after 200 s; close(timeout=None) waits for it"
    assert [record.getMessage() for record in caplog.records] == [text]
    with pytest.raises(ValueError, match="timeout must be at least 0 seconds, or None, not -1"):
        envs.close(timeout=-1)


def test_a_worker_whose_exit_takes_too_long_is_named(make, caplog, tmp_path, time_flies):
    class Lingering(CountingEnv):
        def __init__(self):
            super().__init__()
            atexit.register(self.linger)

        def linger(self):
            (tmp_path / "closing").touch()
            threading.Event().wait()

    envs = make(Lingering, 2, num_workers=1)
    within(partial(envs.close, timeout=200))
    what = "spare envs, threads, atexit functions (worker 0)"
    text = f"close of {what} was cut off after 200 s; close(timeout=None) waits for it"
    assert [record.getMessage() for record in caplog.records] == [text]


@pytest.mark.parametrize("face", ["pool", "gymnasium"])
def test_envs_may_take_any_time_to_close(make, caplog, tmp_path, time_flies, face):
    fns = [partial(SlowToClose, tmp_path, env_id) for env_id in range(3)]
    envs = make(fns, num_workers=1) if face == "pool" else AsyncVectorEnv(fns, num_workers=1)
    closing = Background(partial(envs.close, **({"timeout": None} if face == "pool" else {})))
    wait_until((tmp_path / "closing").exists)
    assert closed(tmp_path) == ["closed 0"]
    (tmp_path / "gate").touch()
    closing.result()
    assert closed(tmp_path) == ["closed 0", "closed 1", "closed 2"]
    assert not caplog.records


def test_close_names_the_env_that_fails(make, backend, caplog):
    class Env(CountingEnv):
        def close(self):
            raise ValueError("won't")

    envs = make([CountingEnv, CountingEnv, Env], num_workers=1, backend=backend)
    text = "raised ValueError in close: won't"
    if backend == "serial":
        with pytest.raises(jaxvec.EnvError, match=f"^env 2 {text}"):
            envs.close()
    else:
        envs.close()
        assert [record.getMessage().partition("\n")[0] for record in caplog.records] == [
            f"env 2 (worker 0) {text}"
        ]


# --- At the end of a program ------------------------------------------------------------------


def run_to_end(*source, **options):
    """Runs a script; returns its exit code, and what it printed after its workers' pids."""
    with run_script(*source, **options) as script:
        pids = read_pids(script)
        out, err = script.communicate(timeout=200)
    assert gone(pids)
    return script.returncode, out, err


def test_a_script_that_just_ends_closes_its_pool():
    assert run_to_end(then="envs.step(np.zeros(2, int))") == (0, "", "")


REPLACED = """
other = jaxvec.make(Env, 2, num_workers=1, on_fault=jaxvec.Restart(rate=None))
other.reset()
os.kill(other.call("pid")[0], signal.SIGKILL)
while not other.stats().total.restarts:
    other.step(np.zeros(2, int))
print(other.call("pid")[0], flush=True)
"""


def test_script_exit_closes_a_pool_with_a_replaced_worker():
    """That worker's own end, which Python might make before the pool's, must not get in its way."""
    code, out, err = run_to_end(then=REPLACED)
    assert gone([int(out)])
    assert [line for line in err.splitlines() if "recovers from fault" not in line] == []
    assert code == 0


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("way", WAYS, ids=str, indirect=True)
def test_a_script_that_ends_with_an_error_says_so_once(way):
    code, _, err = run_to_end("raise ValueError('bad luck')", "driver.step()", way)
    assert code == 1
    assert "env 0 (worker 0) raised ValueError in step" in err or "env 1 (worker 1) raised" in err
    assert err.rstrip().endswith("ValueError: bad luck")


ENDS = {
    "an error": ("raise ValueError('bad luck')", "driver.step()"),
    "a death": ("os._exit(3)", "driver.step()"),
    "a stopped worker": ("pass", "driver.workers[0].suspend()"),
    "a killed worker": ("pass", "driver.workers[0].kill()"),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("way", TWO_WAYS, ids=str, indirect=True)
@pytest.mark.nightly(but=4)
def test_a_script_ends_whatever_its_pool_does(way, name):
    step, then = ENDS[name]
    then = f"try: {then}\nexcept jaxvec.JaxvecError: print('caught', flush=True)"
    code, out, err = run_to_end(step, then, way)
    assert code == 0, err
    assert ("caught" in out) == (name in ("an error", "a death"))
    if way.face != "io_callback":  # where JAX logs a traceback of its own
        cut_off = "close of env 0 (worker 0) was cut off after 5.0 s; close(timeout=None) waits for it\n"
        assert err == (cut_off if name == "a stopped worker" else "")


IN_THREADS = {
    "a step": (
        STEPPING,
        "threading.Thread(target=driver.step, daemon=True).start(); disasters.wait_until_running(envs)",
    ),
    "steps": ("pass", "disasters.Background(driver.forever)"),
}


# Not in programs: up to Python 3.13 the end may abort while a daemon thread is in any callback of JAX.
@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", IN_THREADS)
@pytest.mark.parametrize("way", [w for w in WAYS if w.face == "python"], ids=str, indirect=True)
def test_a_script_ends_while_a_daemon_thread_steps(way, name):
    step, then = IN_THREADS[name]
    code, _, err = run_to_end(step, then, way)
    assert code == 0, err
