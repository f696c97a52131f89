"""Stable-Baselines3's vector envs over a pool, against its own `DummyVecEnv`."""

import copy
import importlib
import os
import warnings
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.disasters import closing_all

from jaxvec.testing import CountingEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip(
        "stable_baselines3.common.vec_env", reason="stable-baselines3 is not installed", exc_type=ImportError
    )
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

import jaxvec
from jaxvec.compat.stable_baselines3 import DummyVecEnv, SubprocVecEnv

CLASSES = {
    "subproc": SubprocVecEnv,
    "subproc, portable": jaxvec.config.override(dispatch="portable")(SubprocVecEnv),
    "dummy": DummyVecEnv,
}


@pytest.fixture(params=CLASSES)
def face(request):
    """Makes vector envs that are closed in the end."""
    with closing_all(CLASSES[request.param]) as make:
        yield make


class StructuredEnv(CountingEnv):
    """Observes a dict or a tuple, and goes on with its infos' list; each third episode has nothing to say."""

    def __init__(self, kind, length):
        super().__init__(length, truncate=True)
        children = {"n": spaces.Discrete(1000), "row": spaces.Box(-1, 999, (4,), np.int32)}
        self._kind = kind
        self.observation_space = (
            spaces.Dict(children) if kind is dict else spaces.Tuple(tuple(children.values()))
        )
        self._list = []

    def _observe(self, action):
        values = {"n": self.steps, "row": super()._observe(action)}
        return values if self._kind is dict else tuple(values.values())

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        self._list.append(int(action))
        return obs, reward, terminated, truncated, {"list": self._list} if self.resets % 3 else {}


class SeedOnlyEnv(CountingEnv):
    """Has a reset that knows no options."""

    def reset(self, *, seed=None):
        return super().reset(seed=seed)


KINDS = {
    "ends by itself": [partial(CountingEnv, n) for n in (1, 3, 4)],
    "cut at its limit": [partial(CountingEnv, n, truncate=True) for n in (2, 3, 5)],
    "both at once": [lambda: gymnasium.wrappers.TimeLimit(CountingEnv(3), 3)] * 3,
    "dict": [partial(StructuredEnv, dict, n) for n in (2, 3, 4)],
    "tuple": [partial(StructuredEnv, tuple, n) for n in (2, 3, 4)],
    "floats": [partial(gymnasium.make, "Pendulum-v1", max_episode_steps=4)] * 3,
    "numbers": [partial(gymnasium.make, "FrozenLake-v1")] * 3,
    "no options": [partial(SeedOnlyEnv, 3)] * 3,
}


def same(ours, other):
    """Asserts that values are equal, in structure, in keys' order, and arrays in shape and dtype."""
    if isinstance(other, dict):
        assert list(ours) == list(other)
        for key, value in other.items():
            same(ours[key], value)
    elif isinstance(other, (list, tuple)):
        assert len(ours) == len(other)
        for mine, value in zip(ours, other, strict=True):
            same(mine, value)
    elif isinstance(other, np.ndarray):
        assert (ours.dtype, ours.shape) == (other.dtype, other.shape)
        assert np.array_equal(ours, other)
    else:
        assert ours == other


def compare(mine, other, steps=13):
    """Steps both with the same actions, and asserts that they return the same."""
    assert mine.observation_space == other.observation_space
    other.action_space.seed(0)
    for seed in (5, None):
        for envs in (mine, other):
            if seed is not None:
                envs.seed(seed)
        first = mine.reset()
        same(first, other.reset())
        same(mine.reset_infos, other.reset_infos)
        for _ in range(steps):
            actions = np.array([other.action_space.sample() for _ in range(other.num_envs)])
            (obs, rewards, *rest), (other_obs, other_rewards, *other_rest) = (
                envs.step(actions) for envs in (mine, other)
            )
            same(obs, other_obs)
            same(rewards.astype(np.float32), other_rewards)  # as all algorithms store them
            assert rewards.dtype == (np.float32 if isinstance(mine, DummyVecEnv) else np.float64)
            same(rest, other_rest)
            same(mine.reset_infos, other.reset_infos)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_data_as_stable_baselines3(face, kind):
    mine, other = face(KINDS[kind]), theirs.DummyVecEnv(KINDS[kind])
    assert isinstance(mine, theirs.VecEnv)
    compare(mine, other)
    other.close()


@pytest.mark.parametrize("wrapper", ["VecNormalize", "VecFrameStack"])
def test_the_same_through_their_wrappers(face, wrapper):
    wrap = {
        "VecNormalize": theirs.VecNormalize,
        "VecFrameStack": partial(theirs.VecFrameStack, n_stack=2),
    }[wrapper]
    env_fns = [partial(gymnasium.make, "Pendulum-v1", max_episode_steps=n) for n in (3, 4, 5)]
    mine, other = (theirs.VecMonitor(cls(env_fns)) for cls in (face, theirs.DummyVecEnv))
    mine, other = wrap(mine), wrap(other)
    for envs in (mine, other):
        envs.seed(1)
        envs.action_space.seed(0)
    same(mine.reset(), other.reset())
    for _ in range(11):
        actions = np.array([other.action_space.sample() for _ in range(3)])
        (obs, rewards, dones, infos), (*expected, other_infos) = mine.step(actions), other.step(actions)
        for info in (*infos, *other_infos):
            info.get("episode", {}).pop("t", None)  # the time of day
        assert np.allclose(obs, expected[0])  # rewards are summed in float64, and in float32
        assert np.allclose(rewards, expected[1])
        assert dones.tolist() == expected[2].tolist()
        assert [info.keys() for info in infos] == [info.keys() for info in other_infos]
    other.close()


def test_what_was_returned_is_the_callers(face):
    envs = face(KINDS["dict"])
    obs = envs.reset()
    kept = {key: value.copy() for key, value in obs.items()}
    _, _, _, infos = envs.step(np.ones(3, int))
    listed = [list(info["list"]) for info in infos]
    envs.step(np.zeros(3, int))
    same(obs, kept)
    assert [info["list"] for info in infos] == listed
    obs["row"][0] = 7  # and can be written to


def test_actions_that_are_no_array_reach_the_envs(face):
    class Pairs(CountingEnv):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Tuple((spaces.Discrete(9), spaces.Discrete(9)))

        def step(self, action):
            return super().step(action[0] * 10 + action[1])

    envs = face([Pairs] * 2)
    envs.reset()
    assert envs.step([(1, 2), (3, 4)])[0][:, 3].tolist() == [12, 34]  # an action each, not a leaf each
    with pytest.raises(ValueError, match="got 1 actions for 2 envs"):
        envs.step([(1, 2)])


def test_options_and_seeds_are_for_one_reset(face):
    envs = face([CountingEnv] * 2)
    envs.seed(7)
    envs.set_options([{"a": 1}, {}])
    envs.reset()
    assert envs.reset_infos == [{"seed": 7, "options": {"a": 1}}, {"seed": 8, "options": None}]
    envs.reset()
    assert envs.reset_infos == [{"seed": -1, "options": None}] * 2


def test_attributes_methods_and_wrappers(face):
    envs = face([lambda: gymnasium.wrappers.TimeLimit(CountingEnv(), 9), CountingEnv, CountingEnv])
    assert envs.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [True, False, False]
    envs.set_attr("mark", 1, indices=[0, -1])
    assert not envs.has_attr("mark")
    assert envs.get_attr("mark", indices=[-1, 0, 0]) == [1, 1, 1]
    with pytest.raises(AttributeError, match="mark"):
        envs.get_attr("mark", indices=1)
    envs.env_method("reset", indices=[1, 1])
    assert envs.get_attr("resets") == [0, 2, 0]
    assert (envs.env_method("reset", indices=[]), envs.render_mode) == ([], None)


def test_images_are_tiled(face):
    envs = face([partial(gymnasium.make, "FrozenLake-v1", render_mode="rgb_array")] * 2)
    envs.reset()
    frame, _ = envs.get_images()
    assert envs.render().shape == (2 * frame.shape[0], frame.shape[1], 3)


def test_an_env_s_own_exception_is_raised(face):
    class Failing(CountingEnv):
        def step(self, action):
            raise LookupError("lost")

    envs = face([Failing] * 2)
    envs.reset()
    with pytest.raises(LookupError, match="lost"):
        envs.step(np.zeros(2, int))


def test_envs_of_a_worker_are_their_own():
    env = CountingEnv()
    envs = SubprocVecEnv([lambda: env] * 3, num_workers=1)
    assert envs.reset()[:, 0].tolist() == [1, 1, 1]
    envs.close()
    with pytest.raises(ValueError, match="the same env for env 0 and env 1;"):
        DummyVecEnv([lambda: env] * 3)


def test_a_step_is_under_way_until_it_is_waited_for():
    envs = SubprocVecEnv([CountingEnv] * 2)
    envs.reset()
    envs.step_async(np.array([4, 5]))
    assert envs.step_wait()[0][:, 3].tolist() == [4, 5]
    envs.step_async(np.array([4, 5]))
    assert envs.reset()[:, 0].tolist() == [2, 2]
    envs.close()
    envs.close()
    assert envs.closed


def test_bad_arguments():
    with pytest.raises(ValueError, match="cannot find context for 'illegal'"):
        SubprocVecEnv([CountingEnv], start_method="illegal")
    with pytest.raises(TypeError, match="final_obs can't be set here"):
        DummyVecEnv([CountingEnv], final_obs=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["stable_baselines3", "sbx"])
def test_ppo_trains(library):
    algorithm = (
        stable_baselines3
        if library == "stable_baselines3"
        else pytest.importorskip("sbx", reason="SBX (sbx-rl) is not installed, beside stable-baselines3")
    )
    options = {"num_workers": 2, "workers": jaxvec.Workers(preload=["stable_baselines3"])}
    envs = make_vec_env("CartPole-v1", 4, seed=0, vec_env_cls=SubprocVecEnv, vec_env_kwargs=options)
    kwargs = {"device": "cpu"} if library == "stable_baselines3" else {}
    model = algorithm.PPO("MlpPolicy", envs, n_steps=32, batch_size=64, n_epochs=1, seed=0, **kwargs)
    model.learn(256)
    assert model.num_timesteps == 256
    assert len(model.ep_info_buffer) > 3  # of the Monitors in the workers
    assert evaluate_policy(model, envs, n_eval_episodes=2)[0] > 5
    envs.close()


class NoisyEnv(CountingEnv):
    """Its reward is a random number of torch, and the action 9 ends its process."""

    def step(self, action):
        if action == 9:
            os._exit(1)
        obs, _, *rest = super().step(action)
        return obs, importlib.import_module("torch").randn(1).item(), *rest


def test_preloaded_torch_has_other_random_numbers_in_each_worker_and_replacement():
    workers = jaxvec.Workers(preload=["torch"])
    with jaxvec.make(NoisyEnv, 4, num_workers=4, workers=workers, on_fault="restart") as envs:
        envs.reset()
        rewards = [envs.step([0] * 4).reward.tolist() for _ in range(3)]
        envs.step([0, 9, 0, 0])
        rewards += [envs.step([0] * 4).reward.tolist() for _ in range(3)]
    numbers = {reward for row in rewards for reward in row}
    assert len(numbers) == 24


class CameraEnv(CountingEnv):
    """Has an image in a dict, and ends its process in a step with action 9."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict({"camera": spaces.Box(0, 255, (36, 36, 3), np.uint8)})

    def _observe(self, action):
        if action == 9:
            os._exit(1)
        return {"camera": np.full((36, 36, 3), self.steps, np.uint8)}


@pytest.mark.parametrize("kind", ["subproc", "dummy"])
def test_vecnormalize_leaves_the_spaces_of_the_pool(kind):
    options = {"on_fault": "restart", "num_workers": 1} if kind == "subproc" else {"check": "strict"}
    below = (SubprocVecEnv if kind == "subproc" else DummyVecEnv)([CameraEnv] * 2, **options)
    expected = copy.deepcopy(below.pool.single_observation_space)
    envs = theirs.VecNormalize(below, norm_obs_keys=["camera"])
    try:
        envs.reset()
        assert envs.observation_space["camera"].dtype == np.float32  # as with their own class
        assert below.pool.single_observation_space == expected
        envs.step(np.array([1, 2]))
        if kind == "subproc":  # the new worker's envs have the spaces of the old ones
            assert envs.step(np.array([1, 9]))[2].all()
        else:
            assert below.envs[0].observation_space == expected
    finally:
        envs.close()


def test_spaces_are_those_of_env_0_if_bounds_differ(face):
    def bounded(limit):
        env = CountingEnv()
        env.observation_space = spaces.Box(-1, limit, (4,), np.int32)
        return env

    env_fns = [partial(bounded, limit) for limit in (5, 9, 3)]
    envs, original = face(env_fns), theirs.DummyVecEnv(env_fns)
    assert envs.observation_space == original.observation_space == spaces.Box(-1, 5, (4,), np.int32)
