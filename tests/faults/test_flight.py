"""`make(record_faults=...)` and `python -m jaxvec replay`: the recorded episode is the one that failed."""

from __future__ import annotations

import itertools
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.disasters import PATIENCE

import jaxvec
from jaxvec.cli import _main
from jaxvec.compat.gymnasium import SyncVectorEnv
from jaxvec.testing import CountingEnv

RAISE, KILL, SEGFAULT, HANG, NAN, NAN_REWARD, WRONG = 3, 4, 5, 6, 7, 8, 9
LENGTH = 5


class WalkingEnv(gymnasium.Env):
    """Walks at random, and fails as its action says."""

    observation_space = spaces.Dict({"x": spaces.Box(-1e9, 1e9, (3,)), "n": spaces.Discrete(9)})
    action_space = spaces.Dict({"kind": spaces.Discrete(10), "push": spaces.Box(-1, 1, (2,))})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.x = self.np_random.normal(size=3) + (options or {}).get("start", 0)
        return self._obs(), {}

    def _obs(self):
        return {"x": self.x.astype(np.float32), "n": self.steps}

    def step(self, action):
        kind = action["kind"]
        self.steps += 1
        self.x = self.x + self.np_random.random(3) + action["push"].sum()
        reward = 1.0
        if kind == RAISE:
            raise ValueError("lost")
        if kind == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == SEGFAULT:
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == HANG:
            threading.Event().wait()
        if kind == NAN:
            self.x[1] = np.nan
        if kind == NAN_REWARD:
            reward = float("inf")
        if kind == WRONG:
            return {"x": np.zeros(4, np.float32), "n": 0}, 1.0, False, False, {}
        return self._obs(), reward, self.steps == LENGTH, False, {}


def actions(num_envs, number, kind=0):
    """Returns the actions of a step, which differ in each env and step; `kind` is of the last env."""
    kinds = np.full(num_envs, number % 3)
    kinds[-1] = kind or kinds[-1]
    push = np.linspace(-1, 1, num_envs)[:, None] * [[1, 0.5]] / (number + 1)
    return {"kind": kinds, "push": push.astype(np.float32)}


def run(make, path, kind, *, before=12, on_fault="restart", **kwargs):
    """Steps a pool until the last env fails, in the third step of its third episode by default."""
    envs = make(WalkingEnv, 4, record_faults=path, on_fault=on_fault, **kwargs)
    envs.reset(seed=3)
    for number in range(before):
        envs.step(actions(4, number))
    return envs, envs.step(actions(4, before, kind))


def only_record(path):
    (file,) = path.glob("*.episode")
    return file, pickle.loads(file.read_bytes())


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("kind", [RAISE, KILL, SEGFAULT, HANG, NAN, NAN_REWARD, WRONG])
def test_record_contains_the_actions_of_the_episode(make, tmp_path, kind, mode):
    each = LENGTH + (mode == "NEXT_STEP")  # steps from reset to reset
    before = 2 * each + 2
    run(make, tmp_path, kind, before=before, autoreset_mode=mode, step_timeout=2.0 if kind == HANG else 60.0)
    _, record = only_record(tmp_path)
    expected = [
        {key: value[-1] for key, value in actions(4, number, kind if number == before else 0).items()}
        for number in range(2 * each, before + 1)
    ]
    assert record.env_id == 3
    assert [action["kind"] for action in record.actions] == [action["kind"] for action in expected]
    np.testing.assert_array_equal(
        [action["push"] for action in record.actions], [action["push"] for action in expected]
    )
    assert (record.seed, record.missing, record.generator is None) == (None, 0, False)


@pytest.mark.parametrize("backend", ["process", "serial"])
@pytest.mark.parametrize("kind", [RAISE, NAN, NAN_REWARD, WRONG])
@pytest.mark.parametrize("before", [2, 12])
def test_replay_repeats_the_fault(make, tmp_path, capfd, kind, before, backend):
    workers = {} if backend == "serial" else {"num_workers": 2}
    run(make, tmp_path, kind, before=before, backend=backend, **workers)
    file, record = only_record(tmp_path)
    assert record.seed == (6 if before == 2 else None)
    assert _main.main(["replay", str(file)]) == 0
    out, err = capfd.readouterr()
    assert "The env repeated the fault." in out
    assert ("After step 2, the observation is the recorded one" in err) == (kind == RAISE)
    assert "step 3, action" in err


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("kind", "number"), [(KILL, signal.SIGKILL), (SEGFAULT, signal.SIGSEGV)])
def test_replay_of_a_death_dies_in_the_same_step(make, tmp_path, kind, number):
    run(make, tmp_path, kind, num_workers=2)
    file, _ = only_record(tmp_path)
    words = [sys.executable, "-m", "jaxvec", "replay", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == -number
    assert "After step 2, the observation is the recorded one" in done.stderr
    assert "step 3, action" in done.stderr


def test_error_names_the_file_and_the_pool_breaks_as_before(make, tmp_path):
    envs = make(WalkingEnv, 4, record_faults=tmp_path / "new")
    envs.reset(seed=0, options={"start": 5})
    with pytest.raises(jaxvec.EnvError, match="lost") as caught:
        envs.step(actions(4, 0, RAISE))
    file, record = only_record(tmp_path / "new")
    assert f"python -m jaxvec replay {file}" in str(caught.value)
    assert (record.options, record.seed) == ({"start": 5}, 3)
    assert _main.main(["replay", str(file)]) == 0


def test_asynchronous_pool_records_the_env_that_failed(make, tmp_path):
    envs = make(WalkingEnv, 4, num_workers=2, batch_size=2, record_faults=tmp_path, on_fault="restart")
    ids = envs.reset(seed=0).info["env_id"]  # the envs that were ready first, which may include env 3
    pushed = []
    for number in itertools.count():
        kinds = np.where(ids == 3, RAISE if len(pushed) == 7 else 0, 0)
        push = np.random.default_rng(number).random((2, 2), np.float32)
        pushed += [push[place] for place in np.flatnonzero(ids == 3)]
        envs.send({"kind": kinds, "push": push}, ids)
        if (kinds == RAISE).any():
            break
        ids = envs.recv().info["env_id"]
    while not list(tmp_path.glob("*.episode")):
        ids = envs.recv().info["env_id"]
        envs.send({"kind": np.zeros(2, int), "push": np.zeros((2, 2), np.float32)}, ids)
    file, record = only_record(tmp_path)
    np.testing.assert_array_equal([each["push"] for each in record.actions], pushed[LENGTH:])
    assert _main.main(["replay", str(file)]) == 0


class LastStepEnv(gymnasium.Env):
    """Has numbers that are not finite in the step or reset that its action or options name."""

    observation_space = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (2,)), "n": spaces.Discrete(9)})
    action_space = spaces.Discrete(10)

    def __init__(self, end="terminated"):
        self.end, self.resets = end, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.resets = 0, self.resets + 1
        start = np.nan if (options or {}).get("wrong") else self.np_random.random()
        return {"x": np.full(2, start, np.float32), "n": 0}, {}

    def step(self, action):
        self.steps += 1
        x = np.full(2, -np.inf if action == NAN else self.steps, np.float32)
        reward = np.nan if action == NAN_REWARD else 1.0
        over = self.steps == 3
        ends = over and self.end != "truncated", over and self.end != "terminated"
        return {"x": x, "n": self.steps}, reward, *ends, {}


@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("kind", [NAN, NAN_REWARD])
@pytest.mark.parametrize("mode", ["SAME_STEP", "without final_obs", "NEXT_STEP", "DISABLED", "EPISODIC"])
def test_nan_in_the_last_step_is_recorded(make, tmp_path, kind, mode, end):
    options = {"autoreset_mode": mode} if mode != "without final_obs" else {"final_obs": False}
    envs = make(LastStepEnv, 2, end=end, record_faults=tmp_path, backend="serial", **options)
    envs.reset(seed=3)
    episode = [[1, 2], [3, 4], [5, kind]]
    for action in episode:
        envs.step(action)
    file, record = only_record(tmp_path)
    assert (record.env_id, record.seed, record.actions) == (1, 4, [2, 4, kind])
    assert record.cause == "the env returned numbers that are not finite"
    assert _main.main(["replay", str(file)]) == 0
    file.unlink()
    if mode in ("DISABLED", "EPISODIC"):
        envs.reset(mask=np.ones(2, bool))
    for action in [[6, 6]] * (mode == "NEXT_STEP") + episode:
        envs.step(action)
    _, record = only_record(tmp_path)
    assert (record.env_id, record.seed, record.actions) == (1, None, [2, 4, kind])


def test_nan_beside_a_python_object_is_recorded(tmp_path):
    class TalkingEnv(LastStepEnv):
        observation_space = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (2,)), "n": spaces.Text(9)})

        def step(self, action):
            obs, *rest = super().step(action)
            return {**obs, "n": "a"}, *rest

        def reset(self, **kwargs):
            obs, info = super().reset(**kwargs)
            return {**obs, "n": "b"}, info

    envs = SyncVectorEnv([TalkingEnv], autoreset_mode="SAME_STEP", record_faults=tmp_path)
    envs.reset(seed=3)
    for action in (1, 2, NAN):
        envs.step(np.array([action]))
    envs.close()
    file, record = only_record(tmp_path)
    assert (record.seed, record.actions) == (3, [1, 2, NAN])
    assert _main.main(["replay", str(file)]) == 0


def test_nan_is_recorded_where_another_env_fails(make, tmp_path):
    envs = make(WalkingEnv, 4, record_faults=tmp_path, on_fault="restart", num_workers=1)
    envs.reset(seed=3)
    action = actions(4, 0, RAISE)
    action["kind"][1] = NAN
    envs.step(action)
    records = [pickle.loads(file.read_bytes()) for file in tmp_path.glob("*.episode")]
    assert sorted((record.env_id, record.raised) for record in records) == [(1, False), (3, True)]


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_nan_of_a_reset_is_recorded_and_replayed(make, tmp_path, capfd, mode):
    envs = make(LastStepEnv, 1, record_faults=tmp_path, num_workers=1, autoreset_mode=mode)
    envs.reset(seed=3, options={"wrong": True})
    envs.step([1])
    file, record = only_record(tmp_path)
    assert (record.seed, record.actions, record.options) == (3, [], {"wrong": True})
    assert _main.main(["replay", str(file)]) == 0
    assert "The reset returned numbers that are not finite." in capfd.readouterr().err


class ForgetfulEnv(CountingEnv):
    """Fails in its third step overall, also in later episodes, which a new env does not repeat."""

    def step(self, action):
        if self.steps == 6:
            raise ValueError("seven steps")
        return super().step(action)


def test_replay_says_that_the_env_did_not_repeat(make, tmp_path, capfd):
    envs = make(ForgetfulEnv, 1, episode_length=4, record_faults=tmp_path)
    envs.reset(seed=0)
    with pytest.raises(jaxvec.EnvError, match="seven steps"):
        for _ in range(9):
            envs.step([2])
    file, _ = only_record(tmp_path)
    assert _main.main(["replay", str(file)]) == 1
    out, err = capfd.readouterr()
    assert "did not repeat the fault" in out
    assert "The env did not repeat: after step 2, obs was [2 6 2 2], now it is [1 2 2 2]" in err
    assert "The env did not repeat: step 3 returned without a fault." in err


def test_replay_refuses_an_episode_longer_than_the_record(make, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("jaxvec._memory.segment._RING_STEPS", 4)
    envs = make(CountingEnv, 1, record_faults=tmp_path, backend="serial")
    envs.reset(seed=0)
    for number in range(7):
        envs.step([number])
    monkeypatch.setattr(CountingEnv, "step", lambda self, action: 1 / 0)
    with pytest.raises(jaxvec.EnvError, match="ZeroDivisionError"):
        envs.step([7])
    file, record = only_record(tmp_path)
    assert (record.actions, record.missing) == ([4, 5, 6, 7], 4)
    assert _main.main(["replay", str(file)]) == 1
    assert "can't be made again" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"envs_per_instance": 2}, "envs_per_instance"),
        ({"spare_envs": 1}, "spare_envs"),
        ({"reset_options": spaces.Dict({"start": spaces.Discrete(2)})}, "reset_options"),
        ({"backend": "ray"}, "workers on other machines"),
    ],
)
def test_record_faults_rejects_what_it_cannot_record(tmp_path, options, name):
    with pytest.raises(ValueError, match=f"{name} does not go with record_faults"):
        jaxvec.make(CountingEnv, 2, record_faults=tmp_path, **options)


def test_directory_that_cannot_be_written_is_no_fault(make, tmp_path):
    (tmp_path / "file").touch()
    _, timestep = run(make, tmp_path / "file" / "sub", KILL)
    assert timestep.info["fault"].tolist()[-1]
    assert _main.main(["replay", str(tmp_path / "nothing")]) == 2


def test_record_that_does_not_fit_on_the_disk_leaves_no_file(make, tmp_path):
    class Filling(CountingEnv):
        def step(self, action):
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            raise ValueError("lost")

    envs = make(Filling, 1, record_faults=tmp_path, on_fault="restart")
    envs.reset(seed=0)
    assert envs.step([1]).info["fault"].all()
    assert list(tmp_path.iterdir()) == []
