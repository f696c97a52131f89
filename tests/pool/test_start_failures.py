"""Failures of fork servers and of spawned workers, and how the pool reports them."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import numpy as np
import psutil
import pytest
from support import probe
from support.disasters import wait_until
from support.probe import fork as _fork
from support.probe import fork_servers
from support.scripts import gone, run_python
from test_start_methods import FREE, AskedEnv, ask, methods, server

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.skipif(
    _fork.reason_unavailable() is not None, reason=str(_fork.reason_unavailable())
)

# --- What can go wrong -------------------------------------------------------------------------


def test_a_server_that_was_killed_is_followed_by_another(make):
    ask(make, "0")
    killed = server()
    killed.kill()
    wait_until(lambda: killed.status() == psutil.STATUS_ZOMBIE)
    assert ask(make, "os.getpid() > 0", num_envs=2) == [True, True]
    assert server().pid != killed.pid


def test_a_pool_goes_on_without_its_server(make):
    envs = make(AskedEnv, 2, num_workers=2, on_fault=FREE, workers=jaxvec.Workers(start_method="forkserver"))
    envs.reset(seed=0)
    killed = server()
    pids = envs.call("ask", "os.getpid()")
    killed.kill()
    wait_until(lambda: killed.status() == psutil.STATUS_ZOMBIE)
    assert envs.step(np.array([1, 2])).obs[:, 3].tolist() == [1, 2]
    assert envs.step(np.array([7, 2])).info["fault"].tolist() == [True, False]
    assert envs.call("ask", "os.getpid()")[1] == pids[1]
    said = str(probe.supervisor(envs).last_errors[0])
    assert "ended with an unknown exit code, since the fork server had ended before" in said
    envs.close()
    assert gone(pids)


def test_a_reset_that_reads_the_infos_and_fails_names_its_env(make, backend):
    class Env(CountingEnv):
        def reset(self, **kwargs):
            raise ValueError("no luck")

    with pytest.raises(jaxvec.EnvError, match=r"^env 0 (\(worker 0\) )?raised ValueError in reset") as caught:
        make(Env, 2, backend=backend, info=["seed"])
    assert (caught.value.env_id, caught.value.operation) == (0, "reset")


def test_a_worker_that_dies_before_the_pool_is_made_is_not_replaced(make, caplog):
    with pytest.raises(jaxvec.WorkerDiedError, match=r"^worker 0 \(env 0\) exited with code 3"):
        make(lambda: os._exit(3), 1, on_fault=FREE)
    assert not caplog.records


def test_a_stopped_server_is_a_timeout(make, new_workers):
    ask(make, "0")
    stopped = server()
    stopped.suspend()
    try:
        with pytest.raises(
            jaxvec.EnvTimeoutError, match=r"worker 0 \(env 0\) did not start within 0.5 s \(Timeouts.start\)"
        ):
            make(CountingEnv, 1, start_timeout=0.5)
    finally:
        stopped.resume()
    assert ask(make, "1") == [1]
    wait_until(lambda: len(new_workers()) == 2)  # the server has also forked the one that came too late


def test_a_fork_that_fails_is_a_typed_error_and_the_next_may_succeed(make, tmp_path, monkeypatch):
    (tmp_path / "no_forks.py").write_text(f"""
import os
fork = os.fork
def refuse():
    if os.path.exists({str(tmp_path / "no")!r}):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = refuse
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"num_workers": 2, "workers": jaxvec.Workers(preload=["no_forks"]), "on_fault": FREE}
    others = fork_servers()
    make(AskedEnv, 2, **options).close()
    (server,) = fork_servers() - others
    descriptors = len(os.listdir(f"/proc/{server}/fd"))
    envs = make(AskedEnv, 2, **options)
    envs.reset(seed=0)
    (tmp_path / "no").touch()
    with pytest.raises(
        jaxvec.WorkerDiedError, match=r"worker 0 \(env 0\) could not be started: .*unavailable"
    ):
        make(AskedEnv, 2, **options)
    with pytest.raises(jaxvec.WorkerDiedError, match=r"worker 1 \(env 1\) could not be started") as caught:
        envs.step(np.array([0, 7]))
    assert "worker 1 was killed by SIGKILL" in str(caught.value.__cause__)
    with pytest.raises(jaxvec.PoolBrokenError):
        envs.step(np.zeros(2, int))
    envs.close()
    assert len(os.listdir(f"/proc/{server}/fd")) == descriptors
    (tmp_path / "no").unlink()
    assert make(AskedEnv, 2, **options).reset(seed=0).obs.shape == (2, 4)


def test_a_program_that_can_not_start_an_interpreter_says_so(make, monkeypatch):
    broken = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    def start(*args, **kwargs):
        broken.wait()
        return broken

    monkeypatch.setattr(_fork, "start", start)
    with pytest.raises(jaxvec.WorkerDiedError, match="worker 0 .*the fork server exited with code 3"):
        make(CountingEnv, 1, workers=jaxvec.Workers(env={"JAXVEC": "broken"}))


KILLED = """
import os, signal, sys
import jaxvec
from jaxvec._workers import fork as _fork, spawn as _spawn
from jaxvec._engine.channel import Channel
from jaxvec.testing import CountingEnv

def die_after(where, name, times):
    real = getattr(where, name)
    def call(*args, **kwargs):
        nonlocal times
        result = real(*args, **kwargs)
        times -= 1
        if times == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(where, name, call)

{moment}
jaxvec.make(CountingEnv, 3, num_workers=3, workers=jaxvec.Workers(start_method={method!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""

MOMENTS = {
    "the server runs": ("forkserver", "die_after(_fork, 'start', 1)"),
    "the server imports": ("forkserver", "die_after(_fork._ForkServer, '__init__', 1)"),
    "a fork was asked for": ("forkserver", "die_after(_fork._ForkServer, 'fork', 1)"),
    "another was": ("forkserver", "die_after(_fork._ForkServer, 'fork', 3)"),
    "a worker knows where it is": ("forkserver", "die_after(Channel, 'send', 2)"),
    "a worker was started": ("forkserver", "die_after(_fork.Forker, 'launch', 1)"),
    "all were": ("forkserver", "die_after(_fork.Forker, 'launch', 3)"),
    "envs are built": ("forkserver", "die_after(Channel, 'receive', 5)"),
    "all serve": ("forkserver", ""),
    "an interpreter runs": ("spawn", "die_after(_spawn, 'start', 1)"),
    "all interpreters do": ("spawn", "die_after(_spawn.Spawner, 'launch', 3)"),
    "their envs are built": ("spawn", "die_after(Channel, 'receive', 1)"),
}


def of_environment(mark):
    """Returns the processes that were started with this mark in their environment, and live."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process)
    return found


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.nightly(but=5)
def test_program_killed_while_making_a_pool_leaves_nothing_behind(moment):
    method, patch = MOMENTS[moment]
    mark = uuid.uuid4().hex
    source = KILLED.format(method=method, moment=patch)
    done = run_python("-c", source, env={**os.environ, "JAXVEC_MARK": mark})
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: of_environment(mark) == [])


ENDINGS = {
    "it returns": "",
    "it raises": "raise KeyError('no such room')",
    "it exits at once": "os._exit(3)",
    "it is killed": "os.kill(os.getpid(), 9)",
    "a worker is stopped": "os.kill(envs.call('pid')[0], 19)",
}

SIMULATED = """
import os, subprocess
import jaxvec
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    def __init__(self):
        super().__init__()
        self.simulator = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    def pid(self):
        return os.getpid()

envs = jaxvec.make(Env, 2, num_workers=2, workers=jaxvec.Workers(start_method="forkserver"))
envs.reset()
{ending}
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.nightly(but=3)
def test_nothing_is_left_of_a_program_however_it_ends(ending):
    mark = uuid.uuid4().hex
    source = SIMULATED.format(ending=ENDINGS[ending])
    # Not through pipes, which a stopped worker would keep open.
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "capture_output": False}
    run_python("-c", source, env={**os.environ, "JAXVEC_MARK": mark}, **nowhere)
    wait_until(lambda: of_environment(mark) == [])


FORKING = """
import ctypes, os, signal, sys, time, warnings
warnings.simplefilter("ignore")
import jaxvec
from jaxvec.testing import CountingEnv
envs = jaxvec.make(CountingEnv, 2, num_workers=2, workers=jaxvec.Workers(start_method={method!r}))
envs.reset(seed=0)
helper = {fork}
if helper == 0:
    time.sleep(100)
print(helper, flush=True)
signal.pause()
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("method", "fork"),
    [("forkserver", "os.fork()"), ("forkserver", "ctypes.CDLL(None).fork()"), ("spawn", "os.fork()")],
)
def test_workers_do_not_outlive_a_killed_program_that_had_forked(method, fork):
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", FORKING.format(method=method, fork=fork)],
        env={**os.environ, "JAXVEC_MARK": mark},
        stdout=subprocess.PIPE,
        text=True,
    ) as script:
        helper = int(script.stdout.readline())
        try:
            assert len(of_environment(mark)) == (5 if method == "forkserver" else 4)
            script.kill()
            script.wait(timeout=200)
            wait_until(lambda: [each.pid for each in of_environment(mark)] == [helper])
        finally:
            os.kill(helper, signal.SIGKILL)


def test_a_fork_of_the_program_has_servers_and_lifelines_of_its_own():
    source = """
        import gc, os, warnings
        warnings.simplefilter("ignore")
        import jaxvec
        from jaxvec.compat.gymnasium import AsyncVectorEnv
        from jaxvec.testing import CountingEnv
        envs = AsyncVectorEnv([CountingEnv] * 2)
        envs.reset(seed=0)
        child = os.fork()
        if child == 0:
            mine = AsyncVectorEnv([CountingEnv] * 2)
            mine.reset(seed=0)
            assert mine.step([1, 1])[0][:, 3].tolist() == [1, 1]
            mine.close()
            del envs  # a copy of the program's
            gc.collect()
            raise SystemExit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert envs.step([2, 2])[0][:, 3].tolist() == [2, 2]
        envs.close()
    """
    done = run_python("-W", "error", "-c", textwrap.dedent(source))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("where", "name"),
    [(_fork._ForkServer, "fork"), (_fork, "affinity"), (_fork._ForkServer, "reap")],
)
def test_ctrl_c_while_a_worker_is_started_or_ended_leaves_none_behind(monkeypatch, new_workers, where, name):
    """The next pool is as good as any."""
    real = getattr(where, name)

    def interrupted(*args, **kwargs):
        real(*args, **kwargs)
        raise KeyboardInterrupt

    def pool():
        return jaxvec.make(CountingEnv, 2, num_workers=2, workers=jaxvec.Workers(start_method="forkserver"))

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(where, name, interrupted)
        with contextlib.closing(pool()) as envs:
            envs.close()
    wait_until(lambda: new_workers() == [])
    with pool() as envs:
        assert envs.reset(seed=0).obs.shape == (2, 4)
    assert new_workers() == []


BAD = [
    (
        {"start_method": "fork"},
        ValueError,
        r"\(start_method=...\) must be one of auto, forkserver, spawn, not 'fork'",
    ),
    ({"preload": [3]}, TypeError, r"\(preload=...\) must be names of modules, as strings, not 3"),
    ({"preload": ["math"], "start_method": "spawn"}, ValueError, r"\(preload=...\) needs the fork server"),
    ({"preload": ["math"]}, ValueError, r"\(preload=...\) needs worker processes"),
    (
        {"env": {"A": 1}},
        TypeError,
        r"\(env=...\): 'A' is 1; names must be strings, and values strings or None",
    ),
    ({"env": {"A=B": "1"}}, ValueError, r"\(env=...\): 'A=B'='1' is not a valid environment variable"),
]


@pytest.mark.parametrize(("options", "error", "said"), BAD)
def test_bad_arguments_are_named(options, error, said):
    with pytest.raises(error, match="Workers" + said):
        jaxvec.make(CountingEnv, 2, backend="serial", workers=jaxvec.Workers(**options))


def test_without_pidfds_workers_are_interpreters(make, monkeypatch, caplog):
    def refuse(pid):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert ask(make, "os.getppid()", "auto") == [os.getpid()]
    assert not caplog.records
    assert ask(make, "os.getppid()", "auto", preload="colorsys") == [os.getpid()]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "preload=['colorsys'] has no effect" in record.message
    assert "the system has no pidfds" in record.message
    with pytest.raises(RuntimeError, match="not possible here: the system has no pidfds: .*not implemented"):
        make(CountingEnv, 1, workers=jaxvec.Workers(start_method="forkserver"))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds nothing to cores")
@methods
def test_pinned_workers_have_a_core_each_in_turn(make, method):
    class Pinned(CountingEnv):
        def cores(self):
            return sorted(os.sched_getaffinity(0))

    cores = sorted(os.sched_getaffinity(0))
    envs = make(Pinned, 5, num_workers=5, workers=jaxvec.Workers(pin=True, start_method=method))
    assert envs.call("cores") == tuple([cores[i % len(cores)]] for i in range(5))
    assert sorted(os.sched_getaffinity(0)) == cores
