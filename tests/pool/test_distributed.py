"""Several processes that train one policy, each in a `jax.distributed` program with a pool of its own."""

import csv
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from support.runs import assert_same_state, load_params

from jaxvec.examples import data_parallel

# The time limits of what is started come before that of the test, whose message would say less.
pytestmark = [pytest.mark.jax_version, pytest.mark.timeout(300)]

# An env writes down, when it is closed, how often it was stepped and a checksum of what it returned.
ENVS = """
import os
import zlib
from pathlib import Path

import gymnasium


class Counted(gymnasium.Wrapper):
    steps = seen = 0

    def step(self, action):
        self.steps += 1
        result = super().step(action)
        self.seen = zlib.crc32(result[0].tobytes(), self.seen)
        return result

    def close(self):
        Path(os.environ["COUNTS"], str(self.np_random_seed)).write_text(f"{self.steps} {self.seen}")
        super().close()


class Failing(gymnasium.Wrapper):
    def step(self, action):
        if self.np_random_seed == 102:
            raise ValueError("of the first process")
        return super().step(action)


gymnasium.register("Counted-v0", entry_point=lambda: Counted(gymnasium.make("CartPole-v1")))
gymnasium.register("Failing-v0", entry_point=lambda: Failing(gymnasium.make("CartPole-v1")))
"""


@pytest.fixture
def counts(tmp_path, monkeypatch):
    """Makes the module `own_envs` one that processes can import, and yields where its envs count."""
    (tmp_path / "own_envs.py").write_text(ENVS)
    (tmp_path / "counts").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("COUNTS", str(tmp_path / "counts"))
    return tmp_path / "counts"


@pytest.fixture
def start(counts):
    """Yields what starts the example with 4 envs, seeds from 100 on, and ends it after the test."""
    started = []

    def start(*options):
        command = [sys.executable, data_parallel.__file__, "--num-envs", "4", "--seed", "100"]
        started.append(
            subprocess.Popen(
                [*command, *map(str, options)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=counts.parent,
                start_new_session=True,  # with the processes that it starts, to end them too
            )
        )
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in started:
            process.wait(timeout=200)
            process.stdout.close()
            process.stderr.close()


@pytest.mark.slow
def test_two_processes_train_one_policy_each_on_envs_of_its_own(start, counts):
    options = "--env", "own_envs:Counted-v0", "--total-steps", 1536, "--num-steps", 64, "--num-processes", 2
    options += "--name", "a"
    address = data_parallel.free_address()
    processes = [start(*options, "--coordinator", address, "--process-id", i) for i in range(2)]
    returns, parameters = [], []
    for i, process in enumerate(processes):
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert ("results are in" in out) == (i == 0)
        result = re.search(rf"^process {i}: mean return (\d+\.\d) here, parameters (\w{{8}})$", out, re.M)
        assert result, out
        returns.append(result[1])
        parameters.append(result[2])
    assert parameters[0] == parameters[1]
    assert returns[0] != returns[1]
    with (counts.parent / "runs" / "a" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["env_steps"] for row in rows] == ["512", "1024", "1536"]  # of both processes
    means = [float(mean) for mean in returns]
    assert float(rows[-1]["episode_return"]) == pytest.approx(np.mean(means), abs=0.1)
    columns = "episode_length policy_loss value_loss entropy explained_variance"
    assert {*columns.split()} < {*rows[0]}
    assert isinstance(load_params(counts.parent / "runs" / "a")["params"], list)
    steps, seen = zip(*(path.read_text().split() for path in counts.iterdir()), strict=True)
    assert sorted(int(path.name) for path in counts.iterdir()) == list(range(100, 108))  # 4 for each process
    assert set(steps) == {"192"}
    assert len(set(seen)) == 8


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_all_processes_and_a_resumed_run_is_equal(name, start, tmp_path):
    options = "--total-steps", 64_000, "--num-workers", 1, "--name"
    whole, err = (process := start(*options, "whole")).communicate(timeout=200)
    assert process.returncode == 0, err
    process = start(*options, "half")
    while "mean return" not in (line := process.stderr.readline()):  # after the first update
        assert line
    process.send_signal(signal.Signals[name])
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert [line for line in out.splitlines() if "Gloo" not in line][-1].startswith("stopped: ")
    assert "process" not in out
    out, err = (process := start("--resume", "runs/half")).communicate(timeout=200)
    assert process.returncode == 0, err
    line = r"^process \d: mean return \d+\.\d here, parameters \w{8}$"
    assert len(results := sorted(re.findall(line, out, re.M))) == 2
    assert results == sorted(re.findall(line, whole, re.M))
    assert_same_state(tmp_path / "runs" / "half", tmp_path / "runs" / "whole")


@pytest.mark.slow
def test_when_one_process_fails_all_end(start):
    out, err = (process := start("--env", "own_envs:Failing-v0")).communicate(timeout=200)
    assert process.returncode == 1
    line = r"data_parallel: env 2 \(worker 1\) raised ValueError .*: of the first process"
    assert re.search(rf'^{line} \("\S+/own_envs\.py", line \d+\)$', err, re.M), err
    assert "process 1" not in out
