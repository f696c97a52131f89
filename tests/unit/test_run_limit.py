"""`max_running`: how many workers run their envs at once, and that no turn is lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from itertools import accumulate

import numpy as np
import pytest
from gymnasium import spaces

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="max_running needs Linux")

KILL, HANG = 7, 8


class TimedEnv(CountingEnv):
    """Takes a moment for each step, and tells from when to when."""

    action_space = spaces.Discrete(9)
    spans = ()

    def step(self, action):
        began = time.monotonic_ns()
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == HANG:
            signal.pause()
        time.sleep(0.01)
        self.spans += ((began, time.monotonic_ns()),)
        return super().step(action % 2)


def most_at_once(steps):
    """Returns how many of these spans of time overlapped at some moment."""
    events = sorted((time, change) for span in steps for time, change in zip(span, (1, -1), strict=True))
    return max(accumulate(change for _, change in events))


@pytest.mark.parametrize("limit", [1, 3, 9])
@pytest.mark.parametrize("batch_size", [6, 2])
def test_no_more_workers_than_allowed_run_at_once(make, limit, batch_size):
    envs = make(TimedEnv, 6, num_workers=6, batch_size=batch_size, workers=jaxvec.Workers(max_running=limit))
    envs.reset(seed=0)
    for _ in range(8):
        if batch_size == 6:
            envs.step(np.zeros(6, int))
        else:
            timestep = envs.recv()
            envs.send(np.zeros(2, int), timestep.info["env_id"])
    steps = [span for spans in envs.get_attr("spans") for span in spans]
    assert len(steps) >= 16
    assert 1 <= most_at_once(steps) <= limit


def test_as_many_run_at_once_as_allowed(make, tmp_path):
    os.mkfifo(tmp_path / "meeting")

    class Meeting(CountingEnv):
        def step(self, action):
            for number, mode in enumerate(("rb", "wb")):  # of the first and of the second who come
                with suppress(FileExistsError):
                    (tmp_path / str(number)).touch(exist_ok=False)
                    (tmp_path / "meeting").open(mode).close()  # waits for the other
                    break
            return super().step(action)

    envs = make(Meeting, 4, num_workers=4, workers=jaxvec.Workers(max_running=2))
    envs.reset(seed=0)
    envs.step(np.zeros(4, int))  # would time out
    assert {"0", "1"} < {path.name for path in tmp_path.iterdir()}
    assert envs.get_attr("steps") == (1,) * 4


@pytest.mark.parametrize("fault", [KILL, HANG])
def test_a_worker_that_is_gone_leaves_its_turn_to_others(make, fault):
    envs = make(
        TimedEnv, 4, num_workers=4, workers=jaxvec.Workers(max_running=1), on_fault="restart", step_timeout=3
    )
    envs.reset(seed=0)
    for victim in range(4):
        timestep = envs.step(np.where(np.arange(4) == victim, fault, 0))
        assert timestep.info["fault"].tolist() == (np.arange(4) == victim).tolist()
        assert not envs.step(np.zeros(4, int)).info["fault"].any()


def test_only_who_hangs_is_named(make):
    envs = make(TimedEnv, 3, num_workers=3, workers=jaxvec.Workers(max_running=1), step_timeout=3)
    envs.reset(seed=0)
    with pytest.raises(jaxvec.EnvTimeoutError, match=r"Still running: env 1 \(worker 1, ") as caught:
        envs.step(np.array([0, HANG, 0]))
    assert caught.value.env_ids == (1,)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_running": 0}, "must be an integer of at least 1, not 0"),
        ({"max_running": True}, "must be an integer"),
        ({"max_running": 2, "backend": "ray"}, "needs workers on this machine"),
        ({"max_running": 2, "backend": "serial"}, "needs worker processes"),
    ],
)
def test_bad_limits_are_refused(options, said):
    with pytest.raises(ValueError, match=rf"Workers\(max_running=...\) {said}"):
        workers = jaxvec.Workers(max_running=options.pop("max_running"))
        jaxvec.make(CountingEnv, 2, workers=workers, **options)
