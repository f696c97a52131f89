"""The processes of workers, as /proc shows them, and `jaxvec top`."""

import json
import os
import subprocess
import sys
import types
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support import probe
from support.disasters import wait_until
from support.probe import pool_of

import jaxvec
from jaxvec import _stats
from jaxvec.cli import _top
from jaxvec.cli._main import main
from jaxvec.testing import CountingEnv

MB = 1_000_000


# --- Statistics of processes ----------------------------------------------------------------------------


@pytest.fixture
def stop():
    """Stops all threads of a process until the end of the test; a worker starts and ends some at any time."""
    stopped = []

    def stop(process):
        def states():
            with suppress(OSError):  # a thread has ended
                stats = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/stat")]
                return {stat.rpartition(")")[2].split()[0] for stat in stats}

        stopped.append(process)
        process.suspend()
        wait_until(lambda: states() == {"T"})

    yield stop
    for process in stopped:
        process.resume()


def test_stats_show_the_process_of_each_worker(make, stop):
    envs = make(CountingEnv, 4, num_workers=2)
    envs.reset(seed=0)
    for process in probe.processes(envs):
        stop(process)
    for worker, pid in zip(envs.stats().workers, probe.pids(envs), strict=True):
        process, expected = worker.process, psutil.Process(pid)
        assert process.pid == pid
        assert abs(process.memory - expected.memory_info().rss) < 5 * MB
        assert 0 < process.proportional_memory <= process.memory
        assert process.descriptors == expected.num_fds()
        assert process.threads == expected.num_threads()
        assert process.children == worker.recycled == 0
        assert 0 <= process.age < 600
    assert envs.stats().total.process is None
    with jaxvec.make(CountingEnv, 2, backend="serial") as envs:
        assert envs.stats().workers[0].process is None


def test_memory_of_child_processes_counts():
    class Parent(CountingEnv):
        def reset(self, **kwargs):
            code = "x = b'x' * 100_000_000; print(flush=True); input()"
            pipe = subprocess.PIPE
            self.child = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)
            self.child.stdout.readline()
            return super().reset(**kwargs)

    with jaxvec.make(Parent, 1) as envs:
        before = envs.stats().workers[0].process
        envs.reset(seed=0)
        after = envs.stats().workers[0].process
    assert after.children == 1
    assert after.memory - before.memory > 100 * MB


def test_an_ended_process_has_no_stats():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert _stats.read_process(child.pid) is None
    assert _stats.memory_of([child.pid]) == 0


# --- top ------------------------------------------------------------------------------------------------


def test_top_shows_the_workers_of_another_program(capsys):
    code = """
import gymnasium, jaxvec, numpy
table = numpy.ones(1 << 20)  # in shared memory of its own, which is no pool
env_fn = lambda: table is not None and gymnasium.make("CartPole-v1")
with jaxvec.make(env_fn, 4, num_workers=2) as envs, jaxvec.make("CartPole-v1", 1) as more:
    envs.reset(seed=0)
    for _ in range(10):
        envs.step([0] * 4)
    print(flush=True)
    input()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as program:
        program.stdout.readline()
        assert main(["top", str(program.pid), "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert main(["top", str(program.pid), "--once"]) == 0
        head, *lines = capsys.readouterr().out.splitlines()
        frames = _top.live(program.pid, seconds=0.01)
        assert "\x1b" not in next(frames)
        assert next(frames).splitlines()[0] == head
        program.stdin.close()
        program.wait()
        assert [*frames] == []  # it ends with the program
    workers = sorted(record["workers"], key=lambda worker: (worker["pool"], worker["envs"]))
    assert [(each["pool"], each["envs"], each["steps"]) for each in workers] == [
        (0, "0-1", 20),
        (0, "2-3", 20),
        (1, "0-0", 0),
    ]
    assert len(lines) == 3
    assert head.split()[:4] == ["PID", "POOL", "ENVS", "MEMORY"]
    sizes = [each["memory"] for each in record["workers"]]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("pid", "text"), [(None, "has no workers"), (2**30, "there is no process")])
def test_top_says_why_it_has_nothing_to_show(pid, text, capsys):
    assert main(["top", str(pid or os.getpid()), "--once"]) == 2
    assert text in capsys.readouterr().err


# --- The time of the dispatch to workers ----------------------------------------------------------------


def jax_env():
    sys.modules.setdefault("jax", types.ModuleType("jax"))  # in the worker
    return CountingEnv()


@pytest.mark.parametrize(
    ("step_us", "options", "is_faster"),
    [
        (40, {}, True),
        (29, {}, False),
        (40, {"env": jax_env}, False),
        (40, {"batch_size": 2}, False),
        (40, {"on_fault": "restart"}, False),
        (40, {"workers": jaxvec.Workers(start_method="forkserver")}, False),
    ],
)
def test_serial_backend_is_recommended_for_cheap_steps(caplog, step_us, options, is_faster):
    with jaxvec.config.override(dispatch="native"):
        envs = jaxvec.make(**{"env": CountingEnv, "num_envs": 4, "num_workers": 2} | options)
    stats = pool_of(envs).views.stats
    stats[:, [_stats.STEPS, _stats.STEP_NS]] = 2000, 10_000_000
    pool_of(envs).engine.steps_ns[0] = 1_000_000 * step_us
    with caplog.at_level("INFO", "jaxvec"):
        envs.close()
        pool_of(envs).workers.close(timeout=1)  # as after Ctrl-C in the first one
    text = "all of them together take 20.0 us, and their dispatch to workers takes 30.0 us (means of 1000 "
    assert [text in message for message in caplog.messages] == [True] * is_faster


def test_only_steps_of_all_envs_are_timed(make):
    envs = make(CountingEnv, 2, dispatch="native")
    steps_ns = pool_of(envs).engine.steps_ns
    handle, _ = jaxvec.reset(envs, seed=0)
    handle = jaxvec.send(handle, [0, 0], [0, 1])
    handle, _ = jaxvec.recv(handle)
    jaxvec.step(handle[:1], [0])
    assert steps_ns[0] == 0
    envs.step([0, 0])
    assert steps_ns[0] > 0
