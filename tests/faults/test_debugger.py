"""`breakpoint()` and `make(debug=True)` in worker processes, at a terminal of the test."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap

import pexpect
import pytest
from pexpect import fdpexpect
from support.disasters import PATIENCE

import jaxvec
from jaxvec.testing import CountingEnv

ENV = """
import fcntl, logging, os, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
import numpy as np, jaxvec
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    def __init__(self, env_id):
        super().__init__()
        self.env_id = env_id
        {constructor}

    def step(self, action):
        marker = 40 + self.env_id
        {step}
        return super().step(action)
"""


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, program, *, step="pass", constructor="pass"):
        source = ENV.format(step=step, constructor=constructor) + textwrap.dedent(program)
        ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", source], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        self.pid = self._process.pid
        os.close(theirs)
        self._child = fdpexpect.fdspawn(ours, encoding="utf-8", timeout=PATIENCE)

    def expect(self, text):
        self._child.expect_exact(text)
        return self._child.before

    def send(self, line):
        self._child.sendline(line)

    def ctrl_c(self):
        self._child.send("\x03")

    def expect_end(self):
        self._child.expect(pexpect.EOF)
        self._child.close()
        assert self._process.wait(PATIENCE) == 0, self._child.before


STEPS = """
with jaxvec.make(Env, 2, num_workers=2, timeouts=jaxvec.Timeouts(step=0.5), workers=workers) as envs:
    envs.reset(seed=0)
    print("reward", envs.step([1, 1]).reward.tolist())
    print("reward", envs.step([1, 1]).reward.tolist())
    print("typed", input("then? "))
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_breakpoint_in_a_worker_gets_the_terminal(start_method):
    program = f"workers = jaxvec.Workers(start_method={start_method!r})" + STEPS
    terminal = Terminal(program, step="if self.env_id and self.steps == 0: breakpoint()")
    terminal.expect("(Pdb env 1) ")
    terminal.send("p marker + 1")
    terminal.expect("42")
    terminal.expect("(Pdb env 1) ")
    terminal.send("import time; time.sleep(2); marker")  # longer than the timeout of a step
    terminal.expect("41")
    terminal.expect("(Pdb env 1) ")
    terminal.ctrl_c()
    terminal.expect("--KeyboardInterrupt--")
    terminal.expect("(Pdb env 1) ")
    terminal.send("p marker + 2\x01\x0bp marker * 10")  # readline: to the start of the line, and cut it
    terminal.expect("410")
    terminal.expect("(Pdb env 1) ")
    terminal.send("continue")
    assert "reward" in terminal.expect("then? ")
    terminal.send("the program has its terminal back")
    terminal.expect("typed the program has its terminal back")
    terminal.expect_end()


def test_workers_prompt_one_after_the_other():
    terminal = Terminal("workers = jaxvec.Workers()" + STEPS, step="if self.steps == 0: breakpoint()")
    seen = set()
    for _ in range(2):
        terminal.expect("(Pdb env ")
        env_id = terminal.expect(") ")
        seen.add(env_id)
        terminal.send("p marker")
        terminal.expect(f"\n{40 + int(env_id)}")
        terminal.expect(f"(Pdb env {env_id}) ")
        terminal.send("c")
    assert seen == {"0", "1"}
    terminal.expect("then? ")
    terminal.send("yes")
    terminal.expect_end()


def test_quit_at_a_breakpoint_raises_env_error():
    program = """
    envs = jaxvec.make(Env, 2, num_workers=2)
    envs.reset(seed=0)
    try:
        envs.step([1, 1])
    except jaxvec.EnvError as error:
        print("caught", error.env_id, error.operation, type(error.__cause__).__name__)
    envs.close()
    """
    terminal = Terminal(program, step="if self.env_id: breakpoint()")
    terminal.expect("(Pdb env 1) ")
    terminal.send("q")
    terminal.expect("caught 1 step BdbQuit")
    terminal.expect_end()


def test_breakpoint_in_a_constructor_suspends_the_start_timeout():
    program = """
    with jaxvec.make(Env, 1, timeouts=jaxvec.Timeouts(start=3)) as envs:
        print("built", envs.call("env_id"))
    """
    terminal = Terminal(program, constructor="breakpoint()")
    terminal.expect("(Pdb worker 0) ")
    terminal.send("import time; time.sleep(4)")
    terminal.expect("(Pdb worker 0) ")
    terminal.send("c")
    terminal.expect("built (0,)")
    terminal.expect_end()


def test_terminal_returns_when_a_debugged_worker_dies():
    program = """
    before = termios.tcgetattr(0)
    with jaxvec.make(Env, 1, on_fault="restart") as envs:
        logging.disable()
        envs.reset(seed=0)
        print("fault", envs.step([1]).info["fault"])
        print("same terminal", termios.tcgetattr(0) == before)
        print("typed", input("then? "))
    """
    terminal = Terminal(program, step="breakpoint()")
    terminal.expect("(Pdb env 0) ")
    terminal.send("import os; os.kill(os.getpid(), 9)")
    terminal.expect("fault [ True]")
    terminal.expect("same terminal True")
    terminal.expect("then? ")
    terminal.send("yes")
    terminal.expect("typed yes")
    terminal.expect_end()


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_debug_opens_pdb_where_an_env_raises(backend):
    program = f"""
    envs = jaxvec.make(Env, 2, debug=True, backend={backend!r})
    envs.reset(seed=0)
    try:
        envs.step([1, 1])
    except jaxvec.EnvError as error:
        print("caught", error.env_id, error.operation, repr(error.__cause__))
    envs.close()
    """
    terminal = Terminal(program, step='if self.env_id: raise ValueError("lost")')
    terminal.expect("env 1 raised ValueError in step: lost" if backend == "serial" else "(Pdb env 1) ")
    terminal.send("p marker, action")
    terminal.expect("(41, ")
    terminal.send("q")
    terminal.expect("caught 1 step ValueError('lost')")
    terminal.expect_end()


class StoppingEnv(CountingEnv):
    def step(self, action):
        breakpoint()
        return super().step(action)


def test_breakpoint_without_a_terminal_names_the_way(make, monkeypatch):
    monkeypatch.setattr("jaxvec._workers.debugger._TERMINAL", "/nowhere")
    envs = make(StoppingEnv, 1)
    envs.reset(seed=0)
    with pytest.raises(jaxvec.EnvError, match=r"needs a terminal.* or use backend=\"serial\"") as raised:
        envs.step([0])
    assert (raised.value.env_id, raised.value.operation) == (0, "step")


def test_debug_without_a_terminal_raises_in_make(monkeypatch):
    monkeypatch.setattr("jaxvec._workers.debugger._TERMINAL", "/nowhere")
    with pytest.raises(RuntimeError, match=r"debug=True opens pdb.*serial"):
        jaxvec.make(CountingEnv, 1, debug=True)
    with pytest.raises(ValueError, match="debug must be one of False, True, not 1.5"):
        jaxvec.make(CountingEnv, 1, debug=1.5)
    with pytest.raises(ValueError, match="debug=True needs workers on this machine"):
        jaxvec.make(CountingEnv, 1, debug=True, backend="ray")


def test_pythonbreakpoint_0_disables_breakpoints(make):
    envs = make(StoppingEnv, 1, workers=jaxvec.Workers(env={"PYTHONBREAKPOINT": "0"}))
    envs.reset(seed=0)
    assert envs.step([0]).reward.shape == (1,)
