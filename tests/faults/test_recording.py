"""`RecordFaults` and `jaxvec replay`: the recorded episode is the one that failed."""

import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.disasters import PATIENCE
from support.probe import _main

import jaxvec
from jaxvec.adapters import recording
from jaxvec.adapters.recording import RecordFaults
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
    env_fn = lambda env_id: RecordFaults(WalkingEnv, path, name=f"env{env_id}")  # noqa: E731 - for a worker
    envs = make(env_fn, 4, on_fault=on_fault, **kwargs)
    envs.reset(seed=3)
    for number in range(before):
        envs.step(actions(4, number))
    return envs, envs.step(actions(4, before, kind))


def only_record(path, pattern="*.episode"):
    (file,) = path.glob(pattern)
    return file, recording.read(file)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("kind", [RAISE, KILL, SEGFAULT, HANG, NAN, NAN_REWARD])
def test_record_contains_the_actions_of_the_episode(make, tmp_path, kind, mode):
    each = LENGTH + (mode == "NEXT_STEP")  # steps from reset to reset
    before = 2 * each + 2
    run(make, tmp_path, kind, before=before, autoreset_mode=mode, step_timeout=2.0 if kind == HANG else 60.0)
    died = kind in (KILL, SEGFAULT, HANG)
    lines = [recording.describe(file) for file in tmp_path.iterdir()]
    (line,) = filter(None, lines)
    file, _, cause = line.partition("  ")
    record = recording.read(file)
    expected = [
        {key: value[-1] for key, value in actions(4, number, kind if number == before else 0).items()}
        for number in range(2 * each, before + 1)
    ]
    assert [action["kind"] for action in record.actions] == [action["kind"] for action in expected]
    np.testing.assert_array_equal(
        [action["push"] for action in record.actions], [action["push"] for action in expected]
    )
    assert Path(file).name.startswith("env3-")
    assert (record.seed, record.generator is None, record.in_call) == (None, False, died or kind == RAISE)
    assert {RAISE: "ValueError in step: lost", NAN: "not finite", NAN_REWARD: "not finite"}.get(
        kind, "the process ended in step 3"
    ) in cause


@pytest.mark.parametrize("backend", ["process", "serial"])
@pytest.mark.parametrize("kind", [RAISE, NAN, NAN_REWARD])
@pytest.mark.parametrize("before", [2, 12])
def test_replay_repeats_the_fault(make, tmp_path, capfd, kind, before, backend):
    workers = {} if backend == "serial" else {"num_workers": 2}
    run(make, tmp_path, kind, before=before, backend=backend, **workers)
    file, record = only_record(tmp_path)
    assert record.seed == (6 if before == 2 else None)
    assert _main.main(["replay", str(file)]) == 0
    out, err = capfd.readouterr()
    assert "The env repeated the fault." in out
    assert "step 3, action" in err
    assert _main.main(["replay", str(tmp_path)]) == 0
    assert f"{file}  {record.cause}" in capfd.readouterr().out


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("kind", "number"), [(KILL, signal.SIGKILL), (SEGFAULT, signal.SIGSEGV)])
def test_replay_of_a_death_dies_in_the_same_step(make, tmp_path, kind, number):
    run(make, tmp_path, kind, num_workers=4)
    (file,) = filter(recording.describe, tmp_path.iterdir())
    words = [sys.executable, "-m", "jaxvec", "replay", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == -number
    assert "step 3, action" in done.stderr
    assert "did not repeat" not in done.stderr


def test_error_names_the_file_and_the_pool_breaks_as_before(make, tmp_path):
    envs = make(lambda: RecordFaults(WalkingEnv, tmp_path / "new"), 4)
    envs.reset(seed=0, options={"start": 5})
    with pytest.raises(jaxvec.EnvError, match="lost") as caught:
        envs.step(actions(4, 0, RAISE))
    file, record = only_record(tmp_path / "new")
    assert f"jaxvec replay {file}" in str(caught.value)
    assert (record.options, record.seed) == ({"start": 5}, 3)
    assert _main.main(["replay", str(file)]) == 0


def test_asynchronous_pool_records_the_env_that_failed(make, tmp_path):
    env_fn = lambda: RecordFaults(WalkingEnv, tmp_path)  # noqa: E731 - for a worker
    envs = make(env_fn, 4, num_workers=2, batch_size=2, on_fault="restart")
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


def test_each_of_two_faults_in_one_step_is_recorded(make, tmp_path):
    envs = make(lambda: RecordFaults(WalkingEnv, tmp_path), 4, on_fault="restart", num_workers=1)
    envs.reset(seed=3)
    action = actions(4, 0, RAISE)
    action["kind"][1] = NAN
    envs.step(action)
    causes = sorted(recording.read(file).cause for file in tmp_path.glob("*.episode"))
    assert causes == ["ValueError in step: lost", "it returned numbers that are not finite"]


def test_nan_of_a_reset_is_recorded_and_replayed(tmp_path, capfd):
    class WrongStart(WalkingEnv):
        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed)
            obs["x"][0] = np.nan if options else 0
            return obs, info

    env = RecordFaults(WrongStart, tmp_path)
    env.reset(seed=3, options={"wrong": True})
    file, record = only_record(tmp_path)
    assert (record.seed, record.actions, record.options) == (3, [], {"wrong": True})
    assert _main.main(["replay", str(file)]) == 0
    assert "The reset returned numbers that are not finite." in capfd.readouterr().err
    env.step({"kind": RAISE - 1, "push": np.zeros(2)})  # the rest of the episode is not recorded
    env.reset(seed=4)
    env.close()
    assert [*tmp_path.iterdir()] == [file]


class ForgetfulEnv(CountingEnv):
    """Fails in its seventh step overall, and has other values in each episode; a new env repeats neither."""

    def step(self, action):
        if self.steps == 6:
            raise ValueError("seven steps")
        return super().step(action)


def test_replay_says_that_the_env_did_not_repeat(make, tmp_path, capfd):
    envs = make(lambda: RecordFaults(lambda: ForgetfulEnv(4), tmp_path), 1)
    envs.reset(seed=0)
    with pytest.raises(jaxvec.EnvError, match="seven steps"):
        for _ in range(9):
            envs.step([2])
    file, _ = only_record(tmp_path)
    assert _main.main(["replay", str(file)]) == 1
    out, err = capfd.readouterr()
    assert "did not repeat the fault" in out
    assert "The env did not repeat: the reset returned other values than recorded." in err


class Tame(WalkingEnv):
    action_space = spaces.Dict({**WalkingEnv.action_space, "kind": spaces.Discrete(RAISE + 1)})


def test_a_restored_env_is_recorded_from_its_next_reset_on(make, tmp_path):
    policy = jaxvec.Restart(rate=None)
    envs = make(lambda: RecordFaults(Tame, tmp_path), 2, states=4, num_workers=1, on_fault=policy)
    envs.reset(seed=0)
    envs.step(actions(2, 0))
    state = envs.save()  # proves it by steps in a forked copy, which the record must not contain
    envs.simulate(state, actions(2, 1))
    envs.step(actions(2, 1))
    lengths = [len(recording.read(file).actions) for file in tmp_path.glob("*.running")]
    assert lengths.count(2) == 2
    envs.restore(state[[1, 0]])
    envs.step(actions(2, 1, RAISE))
    assert not [*tmp_path.glob("*.episode")]
    envs.reset(seed=5)
    envs.step(actions(2, 0))
    envs.step(actions(2, 1, RAISE))
    file, record = only_record(tmp_path)
    assert (record.seed, len(record.actions)) == (6, 2)
    assert _main.main(["replay", str(file)]) == 0


def test_closed_envs_leave_no_files(make, tmp_path):
    envs = make(lambda: RecordFaults("CartPole-v1", tmp_path), 3, spare_envs=1, num_workers=1)
    envs.reset(seed=0)
    for _ in range(40):
        envs.step([1, 1, 0])
    assert len([*tmp_path.iterdir()]) == 4
    envs.close()
    assert not [*tmp_path.iterdir()]


def test_a_step_before_the_first_reset_is_the_envs_own_error(tmp_path):
    env = RecordFaults("CartPole-v1", tmp_path)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    env.close()


def test_make_says_what_replaces_its_option():
    with pytest.raises(TypeError, match=r"record_faults.*RecordFaults\(make_env, folder\)"):
        jaxvec.make(CountingEnv, 2, record_faults="faults")


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

    envs = make(lambda: RecordFaults(Filling, tmp_path), 1, on_fault="restart")
    envs.reset(seed=0)
    assert envs.step([1]).info["fault"].all()
    assert list(tmp_path.iterdir()) == []
