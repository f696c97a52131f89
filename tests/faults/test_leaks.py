"""Nothing outlives a program or a pool, whatever is killed or full: no worker, descriptor, thread, memory."""

import gc
import os
import resource
import signal
import textwrap

import numpy as np
import psutil
import pytest
from support.disasters import PATIENCE, WAYS, wait_until
from support.probe import fork
from support.scripts import STEPPING, gone, read_pids, run_python, run_script, shared_names

import jaxvec
from jaxvec.testing import CountingEnv

# --- The parent is killed ---------------------------------------------------------------------


KILLED = {
    "idle": ("pass", "print('stepping', flush=True); signal.pause()"),
    "in step": (STEPPING, "driver.step()"),
    "holding the GIL": (
        r'os.write(1, b"stepping\n"); __import__("ctypes").PyDLL(None).sleep(100)',
        "driver.step()",
    ),
    "while steps go on": ("pass", "driver.reset(); print('stepping', flush=True); driver.forever()"),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("when", KILLED)
@pytest.mark.nightly(but=4)
def test_nothing_is_left_of_a_killed_parent(way, when):
    step, then = KILLED[when]
    shm = shared_names()
    with run_script(step, then, way) as script:
        pids = read_pids(script)
        assert script.stdout.readline() == "stepping\n"
        script.kill()
        script.wait(timeout=200)
        assert gone(pids, timeout=200)
        assert script.stdout.read().count("\n") <= 1  # to its end: nobody else holds the pipe
        assert script.stderr.read() == ""
    assert shared_names() == shm


@pytest.mark.parametrize("way", WAYS[::5], ids=str, indirect=True)
def test_what_envs_have_started_dies_with_a_killed_parent(way):
    step = r'os.write(1, b"%d\n" % __import__("subprocess").Popen(["sleep", "100"]).pid)'
    with run_script(step, FORKS, way) as script:
        pids = read_pids(script)
        pids += [int(script.stdout.readline()) for _ in range(2)]
        assert script.stdout.readline() == "stepped\n"
        script.kill()
        script.wait(timeout=200)
        assert gone(pids, timeout=200)


FORKS = "driver.step(); print('stepped', flush=True); signal.pause()"


CLOSING = r"""
class Closing(Env):
    def __init__(self):
        __import__("subprocess").Popen(["sleep", "1000"])  # which has the script's stdout, too
    def close(self):
        CLOSE
others = jaxvec.make(Closing, 2, num_workers=2, workers=jaxvec.Workers(start_method="START_METHOD"))
others.reset()
print(*others.call("pid"), flush=True)
THEN
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.parametrize("dispatch", ["native", "portable"])
@pytest.mark.parametrize(
    ("close", "then", "output"),
    [
        (r'os.write(1, b"closed\n")', "signal.pause()", "closed\n" * 2),
        (r'os.write(1, b"closed\n")', "while True: others.step(np.zeros(2, int))", "closed\n" * 2),
        ("signal.pause()", "signal.pause()", ""),
    ],
    ids=["idle", "while steps go on", "close hangs"],
)
def test_workers_close_their_envs_when_sigterm_ends_the_program(close, then, output, dispatch, start_method):
    if start_method == "forkserver" and (reason := fork.reason_unavailable()):
        pytest.skip(reason)
    closing = CLOSING.replace("CLOSE", close).replace("THEN", then).replace("START_METHOD", start_method)
    with run_script(then="envs.close()" + closing, dispatch=dispatch) as script:
        read_pids(script)
        pids = read_pids(script)
        script.terminate()
        assert script.wait(timeout=200) == -signal.SIGTERM
        assert gone(pids)
        assert script.stdout.read() == output
        assert script.stderr.read() == ""


VERIFYING = r"""
class Hangs(Env):
    def __init__(self):
        self.worker = os.getpid()
    def step(self, action):
        if os.getpid() != self.worker:
            os.write(1, b"%d %d\n" % (self.worker, os.getpid())); signal.pause()
        return super().step(action)
envs = jaxvec.make(Hangs, 1, states=2, workers=jaxvec.Workers(start_method="START_METHOD"))
envs.reset()
try:
    envs.save()
except jaxvec.WorkerDiedError:
    signal.pause()
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("killed", ["program", "worker"])
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_process_that_verifies_a_state_ends_with_its_parents(killed, start_method):
    if start_method == "forkserver" and (reason := fork.reason_unavailable()):
        pytest.skip(reason)
    with run_script(then="envs.close()" + VERIFYING.replace("START_METHOD", start_method)) as script:
        read_pids(script)
        worker, child = map(int, script.stdout.readline().split())
        if killed == "program":
            script.kill()
        else:
            os.kill(worker, signal.SIGKILL)
        assert gone([child])


# --- Pools come and go ------------------------------------------------------------------------


def test_many_pools_leave_nothing_behind(new_workers):
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
    wait_until(lambda: process.num_threads() <= threads)  # a pool tells its own to end, and does not wait
    assert new_workers() == []


@pytest.mark.slow
def test_the_memory_of_large_pools_is_given_back(make):
    class Env(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = type(self.observation_space)(0, 255, (4 << 20,), np.uint8)

        def _observe(self, action):
            return np.ones(4 << 20, np.uint8)

    def run():
        with jaxvec.make(Env, 2, num_workers=1, final_obs=False) as envs:
            envs.reset()

    run()
    before = psutil.Process().memory_info()
    for _ in range(10):
        run()
    after = psutil.Process().memory_info()
    assert after.rss - before.rss < 16 << 20  # of 80 MiB
    assert after.shared - before.shared < 4 << 20


# --- No room ----------------------------------------------------------------------------------

LIMITED = """
import gc, os, resource, sys
import gymnasium, numpy as np, psutil, jaxvec
from jaxvec._workers import fork as _fork
from gymnasium import spaces

class Env(gymnasium.Env):
    observation_space = spaces.Box(0, 255, ({size},), np.uint8)
    action_space = spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros({size}, np.uint8), {{}}
    def step(self, action):
        return np.zeros({size}, np.uint8), 1.0, False, False, {{}}

jaxvec.config.dispatch = {dispatch!r}

def make():
    return jaxvec.make(Env, {envs}, num_workers=2, timeouts=jaxvec.Timeouts(start={patience}))

make().close()
if not {kept}:
    _fork.end_all()
gc.collect()
process = psutil.Process()
fds = process.num_fds()
limits = resource.getrlimit(resource.{limit})
resource.setrlimit(resource.{limit}, ({value}, limits[1]))
try:
    make()
    print("no error")
except Exception as error:
    print(type(error).__name__, str(error).replace("\\n", " "))
resource.setrlimit(resource.{limit}, limits)
gc.collect()
if not {kept}:
    _fork.end_all()
left = len(process.children(recursive=True)) - len(_fork._servers)
print(process.num_fds() - fds, left, open("/proc/self/maps").read().count("memfd:jaxvec"))
envs = make()
print(envs.reset().obs.shape)
"""


def run_limited(dispatch, limit, value, size=4, envs=2, kept=True):
    """Starts a pool under a limit, then one without; returns the first's error, and stderr.

    Args:
        dispatch: of the pools.
        limit, value: what is limited, and to what.
        size: of an observation, in bytes.
        envs: how many.
        kept: whether the fork server that the workers come from is older than the limit.
    """
    source = textwrap.dedent(LIMITED).format(
        dispatch=dispatch, limit=limit, value=value, size=size, envs=envs, kept=kept, patience=PATIENCE
    )
    shm = shared_names()
    script = run_python("-c", source, timeout=500)
    assert script.returncode == 0, script.stderr
    error, left, again = script.stdout.splitlines()
    assert left == "0 0 0", script.stdout
    assert again == f"({envs}, {size})"
    assert shared_names() == shm
    return error, script.stderr


dispatches = pytest.mark.parametrize("dispatch", ["native", "portable"])


@pytest.mark.slow
@dispatches
@pytest.mark.nightly(but=1)
def test_a_full_disk_is_a_clear_error(dispatch):
    """The memory of a segment is taken at once; this limit is the one that we can fill."""
    error, err = run_limited(dispatch, "RLIMIT_FSIZE", 1 << 20, size=4 << 20)
    assert error.startswith("OSError [Errno 27] File too large: ")
    assert "ulimit -f" in error
    assert err == ""


@pytest.mark.slow
@dispatches
@pytest.mark.nightly(but=1)
def test_too_little_memory_for_the_segment_is_a_clear_error(dispatch):
    """A worker inherits the limit, but has less without it: so it is here that there is no room."""
    vms = "process.memory_info().vms"
    error, _ = run_limited(
        dispatch, "RLIMIT_AS", f"max({vms}, 500 << 20) + (64 << 20)", size=1 << 20, envs=64
    )
    assert error.startswith("OSError [Errno 12] Cannot allocate memory")


def test_memory_error_while_pickling_a_constructor_is_reported():
    class Large:
        def __reduce__(self):
            raise MemoryError

    with pytest.raises(MemoryError):
        jaxvec.make(lambda large=Large(): CountingEnv(), 2)  # noqa: B008 - a closure's memory


@pytest.mark.slow(but=1)
@dispatches
@pytest.mark.parametrize("room", range(0, 15, 3))
@pytest.mark.nightly(but=3)
def test_too_few_descriptors_are_a_clear_error(dispatch, room):
    """With room for more and more of what a start opens, until it is enough."""
    value = f"max(map(int, os.listdir('/proc/self/fd'))) + {room}"
    error, _ = run_limited(dispatch, "RLIMIT_NOFILE", value, kept=room % 2)
    assert error == "no error" or error.startswith(
        ("OSError [Errno 24] Too many open files", "WorkerDiedError", "EnvError", "ImportError")
    )
    if room == 0:
        assert "Too many open files" in error


@pytest.mark.parametrize("victim", range(2))
def test_a_worker_without_room_for_its_envs_says_so(victim, new_workers):
    """Its limit is its own: what fails is its env's constructor."""

    def limited(env_id):
        if env_id == victim:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
            open("/dev/null").close()
        return CountingEnv()

    with pytest.raises(jaxvec.EnvError, match=f"env {victim} .*in constructor: .*Too many open files"):
        jaxvec.make(limited, 2, num_workers=2)
    assert new_workers() == []
