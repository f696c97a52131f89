"""The memory of workers: what /proc shows, trends, warnings of growth, and `python -m jaxvec top`."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support import probe
from support.disasters import wait_until

import jaxvec
from jaxvec import _stats
from jaxvec._stats import Growth
from jaxvec._util import memory_left
from jaxvec._workers.process import MemoryWatch
from jaxvec.cli import _top
from jaxvec.cli._main import main
from jaxvec.testing import CountingEnv

MB = 1_000_000


def grown(values, interval=15.0):
    growth = Growth()
    for number, value in enumerate(values):
        growth.add(number * interval, value)
    return growth


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
        assert process.children == process.growth == worker.recycled == 0
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


def test_memory_left_is_that_of_the_tightest_cgroup(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "a/b").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 9000 kB\n")
    assert memory_left(str(proc)) == 9000 * 1024
    (proc / "self/cgroup").write_text("0::/a/b\n")
    (proc / "self/mountinfo").write_text(f"30 23 0:26 / {cgroups} rw - cgroup2 cgroup2 rw\n")
    for folder, limit, used in (("a/b", "max", 10), ("a", "5000", 1000)):
        (cgroups / folder / "memory.max").write_text(f"{limit}\n")
        (cgroups / folder / "memory.current").write_text(f"{used}\n")
    assert memory_left(str(proc)) == 4000


# --- Trends and warnings --------------------------------------------------------------------------------


def test_growth_is_the_slope_over_the_last_hour():
    growth = grown([100 * MB + number * MB for number in range(41)])  # 10 minutes
    assert growth.seconds == 600
    assert growth.rate == pytest.approx(240 * MB)
    assert growth.is_steady
    flat = grown([100 * MB] * 1000 + [200 * MB] * 241)
    assert flat.seconds == 3600
    assert flat.rate == pytest.approx(0, abs=1)


@pytest.mark.parametrize(
    "values",
    [
        [100 * MB + number * MB for number in range(39)],  # too short
        [100 * MB] * 200,
        [100 * MB + (number % 50) * MB for number in range(200)],  # rises and falls
        [100 * MB + number for number in range(200)],  # less than 5%
        [100 * MB] * 30 + [300 * MB] * 170,  # grew once
    ],
)
def test_other_trends_are_not_steady(values):
    assert not grown(values).is_steady


def test_a_warning_names_the_worker_and_class_that_grow(caplog):
    class Hoarder(CountingEnv):
        pass

    with jaxvec.make(Hoarder, 4, num_workers=2) as envs:
        growing = probe.pids(envs)[1]
        watch = MemoryWatch(probe.supervisor(envs), "Hoarder")
        with caplog.at_level(logging.WARNING, "jaxvec"):
            for number in range(300):
                watch.look(15.0 * number, lambda pid, n=number: 100 * MB + n * MB * (pid == growing))
        (warning, again) = caplog.messages  # once an hour
        assert warning.startswith(
            "worker 1 (envs 2, 3) grows steadily: env class Hoarder, memory 140 MB, 240 MB"
        )
        assert "last" in again
        assert watch.rate(growing) == pytest.approx(240 * MB)
        assert watch.rate(probe.pids(envs)[0]) == 0
        watch.close()


# --- top ------------------------------------------------------------------------------------------------


def test_top_shows_the_workers_of_another_program(capsys):
    code = """
import jaxvec
with jaxvec.make("CartPole-v1", 4, num_workers=2) as envs, jaxvec.make("CartPole-v1", 1) as more:
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
