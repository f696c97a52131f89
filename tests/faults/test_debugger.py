"""`breakpoint()`, `make(debug=True)` and `python -m jaxvec attach`, at terminals of the test."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap

import pexpect
import pytest
from pexpect import fdpexpect
from support import probe
from support.disasters import PATIENCE
from support.notebooks import finish_cell, kernel, run_cell  # noqa: F401 - a fixture

import jaxvec
from jaxvec.cli import _main
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

    def type(self, text):
        self._child.send(text)

    def ctrl_c(self):
        self._child.send("\x03")

    def hang_up(self):
        self._child.close()
        self._process.wait(PATIENCE)

    def kill(self):
        self._process.kill()
        self._process.wait(PATIENCE)
        self._child.close()

    def expect_end(self, code=0):
        self._child.expect(pexpect.EOF)
        self._child.close()
        assert self._process.wait(PATIENCE) == code, self._child.before


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


# --- python -m jaxvec attach ------------------------------------------------------------------


class Attached(Terminal):
    """The command, at a terminal of its own."""

    def __init__(self, pid, *, env_id=1):
        self._env_id = env_id
        super().__init__(f"""
        from jaxvec.cli import _main
        sys.exit(_main.main(["attach", "{pid}", "--env", "{env_id}"]))
        """)

    def expect_prompt(self):
        return self.expect(f"(Pdb env {self._env_id}) ")

    def run(self, command):
        """Returns the output of a command of pdb."""
        self.send(command)
        return self.expect_prompt()


# Env 1 waits in its first step, also of a new process, until it is released.
LOOP = """if self.env_id == 1 and self.steps == 0:
            print("looping", flush=True)
            while not hasattr(self, "released"):
                time.sleep(0.01)"""
STEP_TWICE = """
envs = jaxvec.make(Env, 2, num_workers={workers}{more})
envs.reset(seed=0)
print("first", envs.step([1, 1]).reward.tolist())
print("second", envs.step([1, 1]).reward.tolist())
envs.close()
"""


def looping_program(*, workers=2, more=""):
    program = Terminal(STEP_TWICE.format(workers=workers, more=more), step=LOOP)
    program.expect("looping")
    return program


def expect_both_steps(program):
    program.expect("first [1.0, 1.0]")
    program.expect("second [2.0, 2.0]")
    program.expect_end()


JITTED = """
import gymnasium, jax
from gymnasium.envs.classic_control import CartPoleEnv

class Cart(CartPoleEnv):
    def __init__(self, waits):
        super().__init__()
        self.waits, self.steps = waits, 0

    def step(self, action):
        self.steps += 1
        if self.waits and self.steps == 30:
            print("looping", flush=True)
            while self.waits:
                time.sleep(0.01)
        return super().step(action)

def make_env(waits=False):
    return gymnasium.wrappers.TimeLimit(Cart(waits), 20)

actions = np.random.default_rng(0).integers(2, size=(60, 3))
oracle = gymnasium.vector.SyncVectorEnv([make_env] * 3)
oracle.reset(seed=5)
expected = [oracle.step(each)[:4] for each in actions]

@jax.jit
def run(handle, actions):
    def step(handle, action):
        handle, timestep = jaxvec.step(handle, action)
        return handle, (timestep.obs, timestep.reward, timestep.terminated, timestep.truncated)
    return jax.lax.scan(step, handle, actions)[1]

env_fns = [make_env, lambda: make_env(True), make_env]
with jaxvec.make(env_fns, num_workers=1, autoreset_mode="NEXT_STEP") as envs:
    found = run(jaxvec.reset(envs, seed=5)[0], actions)
    print("equal", [bool((one == np.stack(other)).all()) for one, other in zip(found, zip(*expected))])
"""


def test_data_of_a_jitted_loop_are_as_without_attach():
    program = Terminal(JITTED)
    program.expect("looping")
    other = Attached(program.pid)
    other.expect_prompt()
    assert "30" in other.run("p self.steps")
    assert "True" in other.run("p self.waits")
    other.run("self.waits = False")
    for _ in range(30):  # into Gymnasium's code, and past the next steps of the other envs
        other.run("next")
    assert "30" not in other.run("p self.steps")
    other.send("continue")
    other.expect("worker 0 continues")
    other.expect_end()
    program.expect("equal [True, True, True, True]")
    program.expect_end()


def test_attach_stops_in_a_batched_env():
    program = """
    class Batch(gymnasium.vector.VectorEnv):
        num_envs, metadata = 2, {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        single_observation_space = gymnasium.spaces.Discrete(9)
        single_action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, place):
            self.place = place

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.int64), {}

        def step(self, actions):
            if self.place == 1:
                print("looping", flush=True)
                while not hasattr(self, "released"):
                    time.sleep(0.01)
            return np.zeros(2, np.int64), np.ones(2), np.zeros(2, bool), np.zeros(2, bool), {}

    with jaxvec.make([lambda: Batch(0), lambda: Batch(1)], 4, envs_per_instance=2, num_workers=1) as envs:
        envs.reset(seed=0)
        print("reward", envs.step([1, 1, 1, 1]).reward.tolist())
    """
    program = Terminal("import gymnasium\n" + textwrap.dedent(program))
    program.expect("looping")
    other = Attached(program.pid, env_id=3)
    other.expect("(Pdb env 2) ")  # the first env of the batch
    other.send("self.released = True")
    other.expect("(Pdb env 2) ")
    other.send("c")
    other.expect_end()
    program.expect("reward [1.0, 1.0, 1.0, 1.0]")
    program.expect_end()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_attach_prompts_with_line_editing(start_method):
    program = looping_program(more=f", workers=jaxvec.Workers(start_method={start_method!r})")
    other = Attached(program.pid)
    other.expect_prompt()
    assert "42" in other.run("p marker + 1")
    other.send("for number in (1, 2): print(number, input())")  # lines of input for the code
    other.send("a")
    other.expect("1 a")
    other.send("b")
    other.expect("2 b")
    other.expect_prompt()
    assert "410" in other.run("p marker + 2\x01\x0bp marker * 10")  # to the start of the line, and cut it
    other.run("self.released = True")
    other.run("next")
    other.send("continue")
    other.expect("worker 1 continues")
    other.expect_end()
    expect_both_steps(program)


def test_attach_waits_for_an_idle_env_and_suspends_timeouts():
    program = Terminal(
        """
        with jaxvec.make(Env, 2, timeouts=jaxvec.Timeouts(step=2)) as envs:
            envs.reset(seed=0)
            input("idle? ")
            print("first", envs.step([1, 1]).reward.tolist())
        """
    )
    program.expect("idle? ")
    other = Attached(program.pid)
    other.expect("waiting until env 1 runs")
    program.send("no")
    other.expect_prompt()
    other.run("time.sleep(3)")
    assert "(1, 0)" in other.run("p self.env_id, self.steps")
    other.send("c")
    other.expect_end()
    program.expect("first [1.0, 1.0]")
    program.expect_end()


def test_ctrl_c_cancels_the_wait_of_attach():
    program = Terminal(
        """
        with jaxvec.make(Env, 1) as envs:
            envs.reset(seed=0)
            envs.step([1])
            input("idle? ")
            print("second", envs.step([1]).reward.tolist())
        """,
        step="print('left:', sys.gettrace(), sorted(os.listdir('/proc/self/fd')), 'end', flush=True)",
    )
    program.expect("left: None")
    before = program.expect("end")
    program.expect("idle? ")
    other = Attached(program.pid, env_id=0)
    other.expect("waiting until env 0 runs")
    other.ctrl_c()
    other.expect("interrupted")
    other.expect_end(130)
    program.send("no")
    program.expect("left: None")
    assert program.expect("end") == before
    program.expect("second [2.0]")
    program.expect_end()


def test_ctrl_c_in_attach_ends_the_command_or_clears_the_line():
    program = looping_program()
    other = Attached(program.pid)
    other.expect_prompt()
    for _ in range(3):
        other.send("print('sleeping'); time.sleep(10**6)")
        other.expect("\nsleeping")
        other.ctrl_c()
        other.expect("KeyboardInterrupt")
        other.expect_prompt()
    other.type("p never typed")
    other.expect("never typed")
    other.ctrl_c()
    other.expect_prompt()
    for _ in range(20):  # between commands
        other.send("p marker")
        other.ctrl_c()
    other.send("self.released = 'yes'; 'set'")
    other.expect("'set'")
    other.send("c")
    other.expect_end()
    expect_both_steps(program)


@pytest.mark.parametrize("end", ["quit", "EOF", "close", "kill"])
def test_end_of_attach_lets_the_env_go_on(end):
    program = looping_program()
    other = Attached(program.pid)
    other.expect_prompt()
    other.run("self.released = True")
    other.run("from jaxvec.testing import CountingEnv")
    assert "Breakpoint" in other.run("break CountingEnv.step")
    if end == "kill":
        other.kill()
    elif end == "close":
        other.hang_up()
    else:
        other.send("quit" if end == "quit" else "\x04")
        other.expect("worker 1 continues")
        other.expect_end()
    expect_both_steps(program)


def test_breakpoint_of_attach_stops_only_its_env():
    program = looping_program(workers=1)
    other = Attached(program.pid)
    other.expect_prompt()
    other.run("self.released = True")
    other.run("from jaxvec.testing import CountingEnv")
    assert "Breakpoint" in other.run("break CountingEnv.step")
    other.run("continue")
    assert "(1, 0)" in other.run("p self.env_id, self.steps")
    other.run("continue")
    assert "(1, 1)" in other.run("p self.env_id, self.steps")
    other.send("q")
    other.expect("continues")
    other.expect_end()
    expect_both_steps(program)


def test_death_of_the_worker_ends_attach_and_its_replacement_steps():
    program = looping_program(more=', on_fault="restart"')
    other = Attached(program.pid)
    other.expect_prompt()
    other.send("import os; os.kill(os.getpid(), 9)")
    other.expect("worker 1 has ended")
    other.expect_end(1)
    program.expect("first [1.0, 0.0]")
    program.expect("looping")
    other = Attached(program.pid)
    other.expect_prompt()
    other.run("self.released = True")
    other.send("q")
    other.expect_end()
    program.expect("second [2.0, 1.0]")
    program.expect_end()


def test_second_attach_is_refused_while_the_first_prompts():
    program = looping_program()
    first = Attached(program.pid)
    first.expect_prompt()
    second = Attached(program.pid)
    second.expect("worker 1 has a prompt at another terminal")
    second.expect_end(2)
    first.run("self.released = True")
    first.send("q")
    first.expect_end()
    expect_both_steps(program)


def test_attach_refuses_what_it_cannot_debug(make, capfd, monkeypatch):
    def error(*words):
        assert _main.main(["attach", *map(str, words)]) == 2
        return capfd.readouterr().err

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        assert f"process {other.pid} has no workers" in error(other.pid, "--env", 0)
        other.communicate()
    assert f"there is no process {other.pid}" in error(other.pid, "--env", 0)
    pids = [probe.pids(make(CountingEnv, 3, num_workers=1))[0] for _ in range(2)]
    assert f"process {os.getpid()} has no worker with env 3" in error(os.getpid(), "--env", 3)
    assert f"instead of {os.getpid()}, pass one of {pids[0]}, {pids[1]}" in error(os.getpid(), "--env", 0)
    assert "a prompt needs --env" in error(pids[0])
    assert "has no --json" in error(pids[0], "--env", 0, "--json")
    monkeypatch.setattr("jaxvec._workers.debugger._TERMINAL", "/nowhere")
    assert "attach needs a terminal" in error(pids[0], "--env", 0)


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


# --- In a notebook ----------------------------------------------------------------------------

CELL = """
import jax, jaxvec, numpy as np
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    def __init__(self, env_id):
        super().__init__()
        self.env_id = env_id

    def step(self, action):
        marker = 40 + self.env_id
        {step}
        return super().step(action)

jaxvec.config.transport = {transport!r}
envs = jaxvec.make(Env, 2, num_workers=2, timeouts=jaxvec.Timeouts(step=0.5){more})
"""
STOP = "if self.env_id and self.steps in (0, 2): breakpoint()"
ON_HOST = """
envs.reset(seed=0)
print([envs.step([1, 1]).reward.tolist() for _ in range(3)])
"""
COMPILED = """
handle, _ = jaxvec.reset(envs, seed=0)
run = jax.jit(lambda handle: jax.lax.scan(jaxvec.step, handle, np.ones((3, 2), int))[1].reward)
print(run(handle).tolist())
"""
PROMPT = "(Pdb env 1) "
NOTEBOOK_WAYS = pytest.mark.parametrize(
    ("transport", "steps"),
    [("auto", ON_HOST), ("auto", COMPILED), ("io_callback", COMPILED)],
    ids=["host", "ffi", "io_callback"],
)


def make_in(client, *, transport="auto", step=STOP, more=""):
    assert run_cell(client, CELL.format(transport=transport, step=step, more=more)) == ("", [])


@NOTEBOOK_WAYS
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own
def test_breakpoint_in_a_notebook_prompts_in_its_input_box(kernel, transport, steps):
    _, client = kernel
    make_in(client, transport=transport)
    slow = "import time; time.sleep(2); marker"  # longer than the timeout of a step
    answers = [
        *[(PROMPT, "p marker + 1"), (PROMPT, slow)],
        *[(PROMPT, "marker + int(input('how many? '))"), ("how many? ", "9"), (PROMPT, "continue")],
        *[(PROMPT, "p self.steps"), (PROMPT, "continue")],
    ]
    printed, errors = finish_cell(client, client.execute(steps), answers)
    assert not errors, errors
    lines = [line for line in printed.splitlines() if "step()" not in line and not line.startswith("->")]
    assert lines == ["42", "41", "50", "2", str([[n, n] for n in (1.0, 2.0, 3.0)])]
    assert run_cell(client, "envs.close()") == ("", [])


@NOTEBOOK_WAYS
@pytest.mark.parametrize("command", [None, "while True: print(marker)"])
@pytest.mark.filterwarnings("ignore")
def test_interrupt_of_a_debugged_cell_leaves_a_working_kernel(kernel, transport, steps, command):
    manager, client = kernel
    make_in(client, transport=transport)

    def interrupt():
        if command is not None:
            client.input(command)
            while "41\n" not in client.get_iopub_msg(timeout=PATIENCE)["content"].get("text", ""):
                pass
        manager.interrupt_kernel()

    _, errors = finish_cell(client, client.execute(steps), [(PROMPT, interrupt)])
    assert len(errors) == 1
    assert "KeyboardInterrupt" in errors[0][0] + errors[0][2]
    after = client.execute("envs.close(timeout=0); print('typed', input('then? '))")
    assert finish_cell(client, after, [("then? ", "yes")]) == ("typed yes\n", [])


@pytest.mark.filterwarnings("ignore")
def test_debug_and_quit_in_a_notebook_raise_env_error(kernel):
    _, client = kernel
    make_in(client, step="assert not self.env_id", more=", debug=True")
    printed, errors = finish_cell(client, client.execute(ON_HOST), [(PROMPT, "p marker"), (PROMPT, "q")])
    assert "41" in printed
    assert errors[0][0] == "EnvError"
    assert "AssertionError" in errors[0][1]
    make_in(client)
    printed, errors = finish_cell(client, client.execute(ON_HOST), [(PROMPT, "\x04")])
    assert errors[0][0] == "EnvError"
    assert "BdbQuit" in errors[0][1]


@pytest.mark.filterwarnings("ignore")
def test_breakpoint_in_a_notebook_without_input_names_the_way(kernel):
    _, client = kernel
    make_in(client)
    _, errors = run_cell(client, ON_HOST, allow_stdin=False)
    assert errors[0][0] == "EnvError"
    assert 'or use backend="serial"' in errors[0][1]
