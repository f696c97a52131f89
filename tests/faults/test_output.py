"""`Workers(output=...)`: what workers print, in the program's log or in files."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from support.disasters import PATIENCE, wait_until
from support.probe import output

import jaxvec
from jaxvec.testing import CountingEnv

HELLO, ERROR, NATIVE, WARN, REPEAT, DIFFER, KILL, PARTS, CHILD = range(1, 10)
ENVS = 4


class ChattyEnv(CountingEnv):
    """Prints as its action says."""

    def step(self, action):
        if action == HELLO:
            print("hello")
        if action == ERROR:
            print("first\nsecond", file=sys.stderr)
        if action == NATIVE:
            os.write(1, b"from C\n")
            import ctypes

            ctypes.CDLL(None).puts(b"from printf")
        if action == WARN:
            warnings.warn("too slow", stacklevel=1)
        if action == REPEAT:
            for _ in range(41):
                print("again")
        if action == DIFFER:
            for number in range(100_000):
                print("line", number)
        if action == KILL:
            print("goodbye", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        if action == PARTS:
            print("one", 2, "three", end="\r")
            print("without an end", end="")
        if action == CHILD:
            subprocess.run(["echo", "from a child"], check=True)
        return super().step(action)


@pytest.fixture
def log(caplog):
    """Closes a pool, and returns the messages of a level, those of worker 0 first."""
    caplog.set_level(logging.INFO, "jaxvec")

    def messages(envs, level):
        envs.close()
        messages = [each.getMessage() for each in caplog.records if each.levelno == level]
        return sorted(messages, key=lambda message: message[: len("worker 0")])

    return messages


def step(make, action, *, env=3, output="log", **options):
    """Makes a pool of two workers, and steps it; one env gets the action, and the others 0."""
    workers = jaxvec.Workers(output=output, **options.pop("process", {}))
    envs = make(ChattyEnv, ENVS, num_workers=2, workers=workers, **options)
    envs.reset(seed=0)
    envs.step([action if each == env else 0 for each in range(ENVS)])
    return envs


@pytest.mark.parametrize(
    "process",
    [{"start_method": "forkserver"}, {"start_method": "spawn"}, {"python": sys.executable}],
    ids=str,
)
def test_print_of_an_env_is_logged_with_worker_and_env(make, log, process):
    envs = step(make, HELLO, process=process)
    assert log(envs, logging.INFO) == ["worker 1 (envs 2, 3), env 3: hello"]


@pytest.mark.filterwarnings("default:too slow")
def test_stderr_and_warnings_are_logged_as_warnings(make, log):
    envs = step(make, ERROR)
    envs.step([WARN, 0, 0, 0])
    warning, first, second = log(envs, logging.WARNING)
    assert (first, second) == tuple(f"worker 1 (envs 2, 3), env 3: {each}" for each in ("first", "second"))
    assert re.fullmatch(r"worker 0 \(envs 0, 1\), env 0: .*:\d+: UserWarning: too slow", warning)


def test_output_of_c_code_and_child_processes_is_logged(make, log):
    envs = step(make, NATIVE)
    envs.step([CHILD, 0, 0, 0])
    assert log(envs, logging.WARNING) == [
        "worker 0 (envs 0, 1): from a child",
        "worker 1 (envs 2, 3): from C",
        "worker 1 (envs 2, 3): from printf",
    ]


def test_repeated_lines_are_counted(make, log, caplog, monkeypatch):
    monkeypatch.setattr(output, "_INTERVAL", 1000.0)  # until the end of the pool
    envs = step(make, HELLO)
    wait_until(lambda: "hello" in caplog.text)
    envs.step([REPEAT] * ENVS)
    (repeated,) = [each for each in log(envs, logging.INFO) if "again" in each]
    assert re.fullmatch(rf"worker \d \(envs ., .\), env \d: again \({41 * ENVS} times\)", repeated)


def test_line_without_an_end_is_delivered(make, log):
    envs = step(make, PARTS)
    assert log(envs, logging.INFO) == [
        f"worker 1 (envs 2, 3), env 3: {each}" for each in ("one 2 three", "without an end")
    ]


def test_different_lines_without_end_are_not_all_logged(make, log):
    envs = step(make, DIFFER)
    messages = log(envs, logging.INFO) + log(envs, logging.WARNING)
    assert "line 0" in messages[0]
    assert len(messages) < 100_000
    assert re.search(r"prints more different lines than are logged \(\d+ times\)", messages[-1])


@pytest.mark.slow
def test_log_handler_that_hangs_does_not_stop_an_env(make):
    entered, released = threading.Event(), threading.Event()

    class Hanging(logging.Handler):
        def emit(self, record):
            entered.set()
            assert released.wait(PATIENCE)

    handler = Hanging()
    logging.getLogger("jaxvec").addHandler(handler)
    try:
        envs = step(make, ERROR)
        assert entered.wait(PATIENCE)
        for _ in range(3):
            envs.step([DIFFER] * ENVS)  # far more than a pipe holds
        assert envs.step([0] * ENVS).reward.tolist() == [5.0] * ENVS
    finally:
        released.set()
        envs.close()
        logging.getLogger("jaxvec").removeHandler(handler)


def test_error_of_a_dead_worker_cites_its_last_lines(make, log):
    envs = make(ChattyEnv, 2, num_workers=2, workers=jaxvec.Workers(output="log"))
    envs.reset(seed=0)
    with pytest.raises(jaxvec.WorkerDiedError, match=r"action 7\. Its last lines:\n  goodbye$"):
        envs.step([0, KILL])
    assert log(envs, logging.WARNING) == ["worker 1 (env 1): goodbye"]


def test_replacement_of_a_worker_is_logged_too(make, log):
    envs = step(make, KILL, on_fault="restart")
    envs.step([0, 0, 0, HELLO])
    assert "worker 1 (envs 2, 3), env 3: hello" in log(envs, logging.INFO)


def test_files_contain_the_output_also_after_a_restart(make, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "jaxvec")
    envs = step(make, HELLO, output="file", on_fault="restart")
    envs.step([0, 0, 0, KILL])
    envs.step([NATIVE, 0, 0, HELLO])
    envs.close()
    (folder,) = Path("jaxvec-output").iterdir()
    assert f"the output of workers goes to {tmp_path / folder}" in caplog.text
    assert f"Look at the worker's output in {tmp_path / folder / 'worker-1.log'}." in caplog.text
    assert (folder / "worker-1.log").read_text() == "hello\ngoodbye\nhello\n"
    assert (folder / "worker-0.log").read_text() == "from C\nfrom printf\n"


def test_each_pool_has_files_of_its_own(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        step(make, HELLO, output="file").close()
    assert [each.read_text() for each in tmp_path.glob("*/*/worker-1.log")] == ["hello\n"] * 2


def test_output_rejects_other_names_and_the_serial_backend():
    with pytest.raises(ValueError, match=r"Workers\(output=...\) must be one of .*, not 'stderr'"):
        jaxvec.Workers(output="stderr")
    with pytest.raises(ValueError, match=r"Workers\(output=...\) needs worker processes"):
        jaxvec.make(CountingEnv, 1, backend="serial", workers=jaxvec.Workers(output="log"))


def test_closed_pool_leaves_no_thread(make):
    before = threading.active_count()
    step(make, HELLO).close()
    wait_until(lambda: threading.active_count() <= before)
