"""Ctrl-C: in a terminal it goes to the whole group, from elsewhere to the parent alone."""

import gc
import itertools
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support import disasters, probe
from support.disasters import WAYS, wait_until
from support.notebooks import finish_cell, kernel, run_cell  # noqa: F401 - a fixture
from support.probe import _ffi, pool_of
from support.probe import pool_module as _pool
from support.scripts import STEPPING, gone, read_pids, run_python, run_script

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.jax_version


def test_ctrl_c_ends_a_script_with_one_traceback():
    with run_script(STEPPING, "envs.step(np.zeros(2, int))", start_new_session=True) as script:
        pids = read_pids(script)
        assert script.stdout.readline() == "stepping\n"  # so the parent waits for it, or is about to
        os.killpg(script.pid, signal.SIGINT)
        _, err = script.communicate(timeout=200)
    assert script.returncode != 0
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert gone(pids)


LOOPS = {
    "steps go on": (
        r'self.__dict__.setdefault("first", True) and os.write(1, b"stepping\n"); self.first = False',
        "driver.forever()",
    ),
    "an env hangs": (STEPPING, "driver.forever()"),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("to", ["group", "parent"])
def test_ctrl_c_ends_a_loop_with_one_traceback(way, to, loop):
    """In programs, a jitted loop."""
    code, err, pids = interrupt(way, to, loop)
    if code == -signal.SIGSEGV and way.face == "io_callback":
        # JAX's own: where a signal comes while its C++ takes over a callback's results, jaxlib 0.7.2 reads
        # the strides of no array (xla::nb_numpy_ndarray::strides in XlaFfiPythonCpuCallback, says a core
        # file), twice in several hundred runs on a busy machine. Twice in a row it would be ours.
        code, err, pids = interrupt(way, to, loop)
    assert code != 0
    assert "KeyboardInterrupt" in err, code
    # Of an io_callback, JAX logs the error, too, and repeats its traceback in the program's.
    assert err.count("Traceback (most recent call last)") <= (3 if way.face == "io_callback" else 1)
    assert gone(pids)


def interrupt(way, to, loop):
    """Runs a loop until Ctrl-C; returns the exit code, what was written to stderr, and the workers' pids."""
    with run_script(*LOOPS[loop], way, start_new_session=True) as script:
        pids = read_pids(script)
        assert script.stdout.readline() == "stepping\n"
        (os.killpg if to == "group" else os.kill)(script.pid, signal.SIGINT)
        _, err = script.communicate(timeout=200)
    return script.returncode, err, pids


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transport", ["auto", "io_callback"])
@pytest.mark.parametrize("width", [1, 512], ids=["small", "large"])
@pytest.mark.parametrize("at_once", [False, True], ids=["in the wait", "before the wait"])
@pytest.mark.nightly(but=3)
def test_ctrl_c_ends_a_program_whose_env_hangs_and_breaks_the_pool(transport, width, at_once):
    """Also one that XLA runs, wholly or in part, in threads to which Python passes no signal."""
    then = f"""
import jax, jax.numpy as jnp
from jaxvec._native import interrupts
from jaxvec._vector_env import pool_of
from jaxvec._workers.process import ProcessWorkers
def wait(self, slots, count, limits, wait=ProcessWorkers.wait):
    while {at_once} and limits.name == "step" and not interrupts.count():
        time.sleep(0.001)
    wait(self, slots, count, limits)
ProcessWorkers.wait = wait
with jaxvec.config.override(transport="{transport}"):
    envs = jaxvec.make(Env, 2, timeouts=jaxvec.Timeouts(step=None))
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
    # In one piece: another env may say "stepping" meanwhile.
    broken_by = type(pool_of(envs).state.broken_by).__name__
    print(f"{{'KeyboardInterrupt' in repr(error)}} {{broken_by}}", flush=True)
try:
    envs.step(np.zeros(2, int))
except jaxvec.PoolBrokenError as error:
    print(error, flush=True)
envs.close()
"""
    with run_script(STEPPING, then, start_new_session=True) as script:
        script.stdout.readline()
        assert script.stdout.readline() == "stepping\n"
        os.killpg(script.pid, signal.SIGINT)
        out, err = script.communicate(timeout=200)
    assert "True KeyboardInterrupt" in out
    assert "is broken since an earlier failure" in out
    assert transport == "io_callback" or err == ""  # where JAX logs its own traceback


AT_EVERY_EXIT = """
logging = __import__("logging"); logging.disable()
def interrupted(n):
    # Steps, and interrupts that at the n-th end of a `with` block of a generator: where a handler may run.
    def tracer(frame, event, _):
        nonlocal n
        n -= event == "call" and frame.f_code.co_name == "__exit__"
        if n == 0:
            n = -1
            raise KeyboardInterrupt
    sys.settrace(tracer)
    try:
        driver.step()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(None)

kept = []  # as a notebook or a debugger keeps the last error, and its frames what is in them
for n in range(1, 100):
    kept.append(interrupted(n))
    if kept[-1] is None:
        break
    close = threading.Thread(target=envs.close, daemon=True)
    close.start()
    close.join(disasters.PATIENCE)
    print(n, "hangs" if close.is_alive() else "closed", flush=True)
    if close.is_alive():
        break
    driver = disasters.Driver(driver.way, Env, 2)
    envs = driver.envs
    driver.reset()
os._exit(0)
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("way", [w for w in WAYS if w.face == "python"], ids=str, indirect=True)
def test_ctrl_c_at_any_block_exit_leaves_a_pool_that_closes(way):
    with run_script(then=AT_EVERY_EXIT, way=way) as script:
        read_pids(script)
        out, err = script.communicate(timeout=500)
    assert "closed" in out, err
    assert "hangs" not in out


SLOW_TO_CLOSE = r"""
class Slow(Env):
    def close(self):
        os.write(1, b"closing\n"); signal.pause()
envs = jaxvec.make(Slow, 2, num_workers=2)
print(*envs.call("pid"), flush=True)
try:
    envs.close()
except KeyboardInterrupt:
    print("interrupted", envs.closed, "memfd" in open("/proc/self/maps").read(), flush=True)
envs.close()
signal.pause()
"""


def test_ctrl_c_while_a_pool_closes_leaves_nothing_behind():
    with run_script(then="envs.close()" + SLOW_TO_CLOSE) as script:
        read_pids(script)
        pids = read_pids(script)
        assert [script.stdout.readline() for _ in pids] == ["closing\n"] * 2
        os.kill(script.pid, signal.SIGINT)
        assert script.stdout.readline() == "interrupted True False\n"
        assert gone(pids)
        assert script.poll() is None


CALL_IN_A_THREAD = r"""
class Hangs(Env):
    def hang(self):
        os.write(1, b"called\n"); signal.pause()
envs = jaxvec.make(Hangs, 1)
def call():
    try:
        envs.call("hang")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
thread = threading.Thread(target=call, daemon=True)
while True:
    try:
        thread.ident or thread.start()  # Ctrl-C may come at any time from here on
        signal.pause()
    except KeyboardInterrupt:
        pass
"""


def test_ctrl_c_ends_a_call_in_a_thread_that_gets_no_signals():
    with run_script(then="envs.close()" + CALL_IN_A_THREAD) as script:
        read_pids(script)
        assert script.stdout.readline() == "called\n"
        os.kill(script.pid, signal.SIGINT)
        assert script.stdout.readline() == "interrupted\n"


def interrupt_at(n, call):
    """Does `call`, with Ctrl-C at the n-th point where a handler may run, and in a wait at the latest.

    Returns:
        The function where that was; `None` if the call had fewer points.
    """
    where = None

    def tracer(frame, event, _):
        nonlocal n, where
        n -= event == "call" or frame.f_code.co_filename == _pool.__file__
        if where is None and (n <= 0 or frame.f_code.co_name == "check_wait"):
            where = frame.f_code.co_name
            raise KeyboardInterrupt
        return tracer

    gc.disable()  # else finalizers of other pools are among the points
    sys.settrace(tracer)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        gc.enable()
    return where


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("verb", ["reset", "step"])
@pytest.mark.parametrize("way", [w for w in WAYS if w.face == "python"], ids=str, indirect=True)
def test_ctrl_c_before_wait_leaves_no_untracked_env(drive, way, verb):
    """The pool is broken by it, or goes on; then its envs have not moved."""
    driver, broken, steps = None, 0, 0
    for n in itertools.count(1, 4):  # each part of a call, and each gap between them, has more points
        if driver is None:
            driver, steps = drive(CountingEnv, 2, num_workers=1), 0
            driver.reset()
        driver.workers[0].suspend()  # what was handed over is under way for as long as we look
        where = interrupt_at(n, getattr(driver, verb))
        pool = pool_of(driver.envs)
        if where == "check_wait" or (pool.state.broken_by is None and probe.pending_envs(pool).num_sent[0]):
            break  # it is in the wait, or between two calls, with envs in flight
        driver.workers[0].resume()
        if pool.state.broken_by is None:
            steps += 1
            assert driver.step()[:, 1].tolist() == [steps, steps]  # as many as the envs have made
        else:
            broken += 1
            with pytest.raises(jaxvec.PoolBrokenError, match="failed with KeyboardInterrupt"):
                driver.step()
            pool.close(timeout=0)
            driver = None
    # Where C++ sends, Python comes to no point at which envs are on their way but between two calls.
    sent_by_cpp = way.dispatch == "native" and way.first_ready and verb == "step"
    assert (broken, n > 25) == (0, True) if sent_by_cpp else broken > 5


# --- In a notebook ----------------------------------------------------------------------------

CELL = """
import os, sys
sys.path.insert(0, {tests!r})
import cloudpickle
from support import disasters
cloudpickle.register_pickle_by_value(disasters)
from jaxvec.testing import CountingEnv
class Env(CountingEnv):  # of a notebook cell
    def step(self, action):
        if self.steps == 20:
            open({path!r}, "w").close()
        return super().step(action)
driver = disasters.Driver(disasters.{way!r}, Env)
driver.reset()
print(*[worker.pid for worker in driver.workers])
"""


@pytest.mark.slow(but=1)
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own
@pytest.mark.parametrize("way", WAYS[::2] + WAYS[1:2], ids=str, indirect=True)
def test_interrupted_notebook_cell_raises_once_and_the_kernel_lives(way, kernel, tmp_path):
    manager, client = kernel
    path = tmp_path / "stepping"
    code = CELL.format(tests=str(Path(__file__).parents[1]), path=str(path), way=way)
    printed, errors = run_cell(client, code)
    assert not errors, errors
    pids = [int(word) for word in printed.split()]
    cell = client.execute("driver.forever()")
    wait_until(path.exists)
    manager.interrupt_kernel()
    _, errors = finish_cell(client, cell)
    assert len(errors) == 1
    assert "KeyboardInterrupt" in errors[0][0] + errors[0][1]
    show = "print(type(pool_of(driver.envs).state.broken_by).__name__)"
    printed, errors = run_cell(client, f"from support.probe import pool_of; driver.close(); {show}")
    assert not errors, errors
    assert printed in ("KeyboardInterrupt\n", "NoneType\n")  # between two calls, it breaks nothing
    assert gone(pids)


OTHER_SIGNAL = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, jaxvec
from jaxvec.testing import CountingEnv
nap, transport, handled = float(sys.argv[1]), sys.argv[2], sys.argv[3]

class Env(CountingEnv):
    def step(self, action):
        if nap:
            time.sleep(nap)
        if self.steps == 100:
            os.kill(program, signal.SIGTERM)
        return super().step(action)

def handle(*_):
    if handled == "exit":
        sys.exit(5)
    noted.append(True)

def going(carry):
    return ~jax.pure_callback(lambda steps: bool(noted), jax.ShapeDtypeStruct((), bool), carry[1])

program, noted = os.getpid(), []
signal.signal(signal.SIGTERM, handle)
jaxvec.config.transport = transport
with jaxvec.make(Env, 1) as envs:  # two signals may raise in JAX, which aborts
    start = jaxvec.reset(envs)[0], 0
    def step(carry):
        return jaxvec.step(carry[0], jnp.zeros(1, int))[0], carry[1] + 1
    if handled == "exit":
        jax.lax.while_loop(lambda carry: carry[1] < 10**9, step, start)
    else:
        jax.lax.while_loop(going, step, start)
print("went on")
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transport", ["auto", "io_callback"])
@pytest.mark.parametrize("nap", [0.0, 0.01], ids=["quick envs", "slow envs"])
@pytest.mark.nightly(but=2)
def test_a_handler_of_another_signal_can_end_a_program(nap, transport):
    """As that of SIGTERM does, which schedulers send before they take the machine away."""
    done = run_python("-c", OTHER_SIGNAL, nap, transport, "exit")
    assert done.returncode == 5, done.stderr
    assert "TypeError" not in done.stderr


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("nap", [0.0, 0.01], ids=["quick envs", "slow envs"])
def test_a_handler_of_another_signal_runs_while_a_program_does(nap):
    done = run_python("-c", OTHER_SIGNAL, nap, "auto", "note")
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


class Stopped(BaseException):
    """What the handler of a signal raises, as `SystemExit`."""


@contextmanager
def stopped_at(line, worker):
    """Raises `Stopped` at the so-manieth line of `_ffi`; yields those that came, it the last.

    Until the first, the worker is suspended: so a step can't be done before Python is asked.
    """
    lines = []

    def trace(frame, event, _):
        if frame.f_code.co_filename != _ffi.__file__:
            return None
        if not lines:
            worker.resume()
        lines.append((frame.f_code.co_name, frame.f_lineno, event))
        if len(lines) == line:
            sys.settrace(None)
            raise Stopped
        return trace

    worker.suspend()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


@pytest.mark.slow(but=1)
@pytest.mark.skipif(_ffi.reason_unavailable() is not None, reason="FFI")
@pytest.mark.parametrize("verb", [jaxvec.reset, jaxvec.step], ids=["reset", "step"])
def test_what_a_handler_raises_in_an_answer_is_kept_wherever_it_comes(monkeypatch, verb):
    """A step is under way then, and the pool broken by it; a reset has not begun, or has ended."""
    monkeypatch.setattr("jaxvec._engine.native_engine._WAIT", 1_000_000)  # ns, after which Python is asked
    program = jax.jit(verb)
    with disasters.make(CountingEnv, 2, num_workers=1, transport="ffi", dispatch="native") as envs:
        handle, _ = jaxvec.reset(envs)
        operands = () if verb is jaxvec.reset else (jnp.zeros(2, int),)
        program(handle, *operands)  # compiles
    for line in itertools.count(1, 3):
        with disasters.make(CountingEnv, 2, num_workers=1, transport="ffi", dispatch="native") as envs:
            handle, _ = jaxvec.reset(envs)
            worker = probe.processes(envs)[0]
            error = None
            with stopped_at(line, worker) as lines:
                try:
                    jax.block_until_ready(program(handle, *operands))
                except jax.errors.JaxRuntimeError as raised:
                    error = raised
            if len(lines) < line:
                break
            assert "Stopped" in str(error), lines
            assert isinstance(pool_of(envs).state.take_error(), Stopped), lines
            expected = Stopped if verb is jaxvec.step else None | Stopped
            assert isinstance(pool_of(envs).state.broken_by, expected), lines
    assert line > 50
