"""`spare_envs`: resets done in advance, of envs that take turns; the data depend on seeds alone."""

import os

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import jaxvec
from jaxvec.testing import CountingEnv


class SlowEnv(CountingEnv):
    """Notes each of its resets in a folder, so that it can be waited for; an observation is random, too."""

    def __init__(self, folder=None, **kwargs):
        super().__init__(**kwargs)
        self._folder = folder

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        if self._folder is not None:
            (self._folder / f"{os.getpid()}-{id(self)}-{self.resets}").touch()
        return result

    def step(self, action):
        obs, *rest = super().step(action)
        obs[3] = self.np_random.integers(1 << 30)
        return obs, *rest


def rollout(envs, actions):
    timesteps = [envs.reset(seed=3), *(envs.step(action) for action in actions)]
    return np.stack([t.obs for t in timesteps]), np.stack([t.terminated for t in timesteps])


def wait_for_resets(folder, count):
    while len(list(folder.iterdir())) < count:
        os.sched_yield()


def test_episodes_with_spare_envs_equal_those_without(make, tmp_path):
    """Whether a spare env is ready changes nothing but time; seeds make all runs equal."""
    actions = np.ones((40, 3), int)
    runs = []
    for folder in (None, tmp_path):
        envs = make(SlowEnv, 3, num_workers=2, spare_envs=2, folder=folder, episode_length=4)
        if folder is None:
            runs.append(rollout(envs, actions))
            continue
        first = envs.reset(seed=3)
        obs, over = [first.obs], [first.terminated]
        for action in actions:
            wait_for_resets(folder, 3 + 4)  # all spare envs: built and ready at the start
            timestep = envs.step(action)
            obs.append(timestep.obs)
            over.append(timestep.terminated)
        runs.append((np.stack(obs), np.stack(over)))
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    np.testing.assert_array_equal(runs[0][1], runs[1][1])
    starts = runs[0][0][:, :, 3][1:][runs[0][0][1:, :, 2] == 1]
    assert len(np.unique(starts)) == len(starts)  # no episode is a repetition of another


def test_spare_and_rebuilt_envs_have_different_seeds(make, tmp_path):
    log = tmp_path / "seeds"

    class Env(CountingEnv):
        def reset(self, *, seed=None, options=None):
            with log.open("a") as file:
                file.write(f"{seed}\n")
            return super().reset(seed=seed, options=options)

        def step(self, action):
            if action == 7:
                raise ValueError("built anew")
            return super().step(action)

    rebuild = jaxvec.Restart(retry="rebuild", max_restarts=None, rate=None)
    envs = make(Env, 1, spare_envs=2, on_fault=rebuild, episode_length=2)
    envs.reset(seed=3)
    envs.step([7])
    for _ in range(8):
        envs.step([1])
    seeds = [line for line in log.read_text().split() if line != "None"]
    assert len(seeds) == len({*seeds}) == 4  # of the env, of the rebuilt env, and of both spare envs


def test_a_reset_with_another_seed_makes_resets_in_advance_void(make, tmp_path):
    runs = []
    for seeds in ((0, 1), (1,)):
        folder = tmp_path / str(len(seeds))
        folder.mkdir()
        envs = make(SlowEnv, 1, spare_envs=1, folder=folder, episode_length=2)
        for seed in seeds:
            envs.reset(seed=seed)
            if seed == 0:
                wait_for_resets(folder, 2)
        runs.append([int(envs.step([1]).obs[0, 3]) for _ in range(6)])
    assert runs[0] == runs[1]


def test_failed_reset_in_advance_is_an_error_of_the_env_that_uses_it(make):
    class Env(CountingEnv):
        def __init__(self):
            super().__init__(episode_length=2)

        def reset(self, *, seed=None, options=None):
            if self.steps == 0 and seed is not None and seed > 100:  # derived seeds are large
                raise ValueError("bad luck")
            return super().reset(seed=seed, options=options)

    envs = make(Env, 1, spare_envs=1)
    envs.reset(seed=0)
    envs.step([1])
    with pytest.raises(jaxvec.EnvError, match="(?s)env 0 .* raised ValueError in reset.*bad luck"):
        envs.step([1])


def test_an_image_of_an_env_that_waits_is_not_overwritten(make):
    """Its first observation stays its own until it is used."""

    class Shared(gymnasium.Env):
        observation_space = spaces.Box(0, 255, (8, 8), np.uint8)
        action_space = spaces.Discrete(2)

        def __init__(self):
            self._frame = np.zeros((8, 8), np.uint8)
            self._steps = 0

        def reset(self, *, seed=None, options=None):
            self._frame[:] = 9
            self._steps = 0
            return self._frame, {}

        def step(self, action):
            self._steps += 1
            self._frame[:] = self._steps
            return self._frame, 0.0, self._steps == 2, False, {}

    envs = make(Shared, 2, num_workers=1, spare_envs=1)
    envs.reset()
    for _ in range(10):
        assert (envs.step([0, 0]).obs == 1).all()
        over = envs.step([0, 0])
        assert (over.obs == 9).all()
        assert (over.info["final_obs"] == 2).all()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"spare_envs": -1}, "spare_envs must be an integer of at least 0"),
        ({"spare_envs": 1, "backend": "serial"}, "spare_envs needs worker processes"),
        ({"spare_envs": 1, "autoreset_mode": "DISABLED"}, "needs autoreset"),
    ],
)
def test_spare_envs_that_can_not_be_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        jaxvec.make(CountingEnv, 1, **arguments)
