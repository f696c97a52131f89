"""The stacks of workers that hang: in the error of a timeout, and by `jaxvec stack`."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support import probe
from support.disasters import PATIENCE, wait_until
from support.probe import _main, stacks

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stacks need /proc and real-time signals")


class HangingEnv(CountingEnv):
    """Hangs in the step with action 7 without the GIL, and with action 8 in C with the GIL."""

    def step(self, action):
        if action == 7:
            self.wait_for_a_door()
        if action == 8:
            self.count_grains()
        return super().step(action)

    def wait_for_a_door(self):
        while True:
            time.sleep(60)

    def count_grains(self):
        sum(range(10**15))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.parametrize(("action", "place"), [(7, "wait_for_a_door"), (8, "count_grains")])
def test_timeout_error_contains_the_stack_of_the_env(make, start_method, action, place):
    workers = jaxvec.Workers(start_method=start_method)
    envs = make(HangingEnv, 4, num_workers=2, step_timeout=1.0, workers=workers)
    envs.reset(seed=0)
    with pytest.raises(jaxvec.EnvTimeoutError, match="Still running: env 2") as caught:
        envs.step([0, 0, action, 0])
    _, _, stack = str(caught.value).partition("The stack of worker 1 (envs 2, 3), most recent call first:\n")
    lines = stack.splitlines()
    assert [line.rpartition(" in ")[2] for line in lines] == [place, "step"]
    assert all(__file__ in line for line in lines)


def test_replaced_worker_leaves_its_stack_in_last_error(make):
    envs = make(HangingEnv, 2, num_workers=2, step_timeout=1.0, on_fault="restart")
    envs.reset(seed=0)
    assert envs.step([0, 7]).info["fault"].tolist() == [False, True]
    assert "wait_for_a_door" in str(probe.workers(envs).last_errors[1])
    probe.set_timeouts(envs, PATIENCE, PATIENCE, PATIENCE)
    assert envs.step([0, 0]).reward.tolist() == [2.0, 1.0]


def test_stack_of_a_pause_does_not_let_the_env_continue(make):
    class PausingEnv(CountingEnv):
        def step(self, action):
            if action == 7:
                signal.pause()  # which any signal ends
            return super().step(action)

    envs = make(PausingEnv, 2, num_workers=1, step_timeout=1.0, on_fault="restart")
    envs.reset(seed=0)
    assert envs.step([0, 7]).info["fault"].tolist() == [True, True]


def test_stack_command_shows_a_hanging_env_that_continues(make, tmp_path, capfd):
    class WaitingEnv(CountingEnv):
        def step(self, action):
            self.look_for(tmp_path / "go")
            return super().step(action)

        def look_for(self, path):
            while not path.exists():
                time.sleep(0.01)

    envs = make(WaitingEnv, 4, num_workers=2)
    envs.reset(seed=0)
    envs.send([0, 0, 0, 0])
    running = probe.array(envs, "running")
    wait_until(lambda: running[:, 0].all())
    assert _main.main(["stack", str(os.getpid()), "--env", "3", "--json"]) == 0
    (worker,) = json.loads(capfd.readouterr().out)["workers"]
    assert (worker["worker"], worker["envs"], worker["pid"]) == (1, [2, 3], probe.pids(envs)[1])
    assert "in look_for" in worker["stack"]
    assert _main.main(["stack", str(os.getpid())]) == 0
    assert capfd.readouterr().out.count("in look_for") == 2
    (tmp_path / "go").touch()
    assert envs.recv().reward.tolist() == [1.0] * 4


def test_stack_command_reports_what_it_cannot_find(make, capfd):
    envs = make(CountingEnv, 1)
    pid = probe.pids(envs)[0]
    assert _main.main(["stack", str(pid), "--env", "5"]) == 2
    assert f"process {pid} has no worker with env 5" in capfd.readouterr().err
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        assert _main.main(["stack", str(other.pid)]) == 2
        assert f"process {other.pid} has no worker" in capfd.readouterr().err
        other.communicate()
    assert _main.main(["stack", str(other.pid)]) == 2
    assert f"there is no process {other.pid}" in capfd.readouterr().err
    probe.processes(envs)[0].suspend()
    assert _main.main(["stack", str(pid)]) == 1
    assert "no answer" in capfd.readouterr().out


def test_no_signal_is_sent_to_a_worker_without_a_handler(make):
    class Env(CountingEnv):
        def ignore(self):
            signal.signal(stacks.DUMP, signal.SIG_DFL)

        def alive(self):
            return True

    envs = make(Env, 1)
    (worker,) = stacks.find_all(probe.pids(envs)[0])
    assert "Current thread" in worker.request_stack()()
    envs.call("ignore")
    assert worker.request_stack()() == ""
    assert envs.call("alive") == (True,)


def test_breakpoint_in_a_worker_names_the_serial_backend(make, monkeypatch):
    class StoppingEnv(CountingEnv):
        def step(self, action):
            breakpoint()
            return super().step(action)

    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    envs = make(StoppingEnv, 1)
    envs.reset(seed=0)
    with pytest.raises(jaxvec.EnvError, match='no terminal. Make the pool with backend="serial"'):
        envs.step([0])
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    envs = make(StoppingEnv, 1)
    envs.reset(seed=0)
    assert envs.step([0]).reward.tolist() == [1.0]
