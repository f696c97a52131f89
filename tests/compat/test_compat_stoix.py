"""Stoix's env factory, with stoa's own time steps and spaces."""

import importlib
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from support.disasters import closing_all

import jaxvec
from jaxvec.testing import CountingEnv

stoa = pytest.importorskip("stoa", reason="stoa-env is not installed")
from jaxvec.compat.stoix import EnvFactory, register  # noqa: E402 - it needs stoa


class DictEnv(CountingEnv):
    """Observes a dict."""

    def __init__(self, length, *, truncate=False):
        super().__init__(length, truncate=truncate)
        self.observation_space = spaces.Dict(
            {"count": self.observation_space, "pair": spaces.Tuple((spaces.Box(0, 9, (), np.float64),) * 2)}
        )

    def _observe(self, action):
        return {"count": super()._observe(action), "pair": (float(self._episode_steps), 1.0)}


@pytest.fixture
def make():
    with closing_all(lambda *args, num_envs=2, **kwargs: EnvFactory(*args, **kwargs)(num_envs)) as make:
        yield make


def test_time_steps_are_stoa_s_and_autoreset_is_same_step(make):
    env = make(partial(CountingEnv, 2))
    timestep = env.reset()
    assert isinstance(timestep, stoa.TimeStep)
    assert timestep.first().tolist() == [True, True]
    assert timestep.observation.tolist() == [[1, 0, 0, -1]] * 2
    assert timestep.extras["metrics"]["is_terminal_step"].tolist() == [False, False]
    timestep = env.step(np.array([5, 6]))
    assert timestep.mid().tolist() == [True, True]
    assert (
        timestep.extras["next_obs"].tolist() == timestep.observation.tolist() == [[1, 1, 1, 5], [1, 1, 1, 6]]
    )
    assert timestep.extras["metrics"]["episode_return"].tolist() == [0, 0]
    timestep = env.step(np.array([5, 6]))
    assert (timestep.last().tolist(), timestep.terminated().tolist()) == ([True, True], [True, True])
    assert (timestep.reward.tolist(), timestep.discount.tolist()) == ([2, 2], [0, 0])
    assert timestep.observation.tolist() == [[2, 2, 0, -1]] * 2
    assert timestep.extras["next_obs"].tolist() == [[1, 2, 2, 5], [1, 2, 2, 6]]
    metrics = timestep.extras["metrics"]
    assert (metrics["episode_return"].tolist(), metrics["episode_length"].tolist()) == ([3, 3], [2, 2])
    assert metrics["is_terminal_step"].tolist() == [True, True]
    metrics = env.step(np.array([5, 6])).extras["metrics"]  # the last episode's, as long as it is the last
    assert (metrics["episode_return"].tolist(), metrics["is_terminal_step"].tolist()) == (
        [3, 3],
        [False, False],
    )
    arrays = (timestep.observation, timestep.reward, timestep.discount, timestep.step_type)
    assert all(type(array) is np.ndarray for array in arrays)


def test_a_truncation_is_one_and_keeps_its_discount(make):
    env = make(partial(CountingEnv, 1, truncate=True))
    env.reset()
    timestep = env.step(np.zeros(2, int))
    assert (timestep.truncated().tolist(), timestep.discount.tolist()) == ([True, True], [1, 1])


def test_what_is_terminated_at_the_time_limit_is_no_truncation(make):
    env = make(lambda: TimeLimit(CountingEnv(1), 1))
    env.reset()
    timestep = env.step(np.zeros(2, int))
    assert (timestep.terminated().tolist(), timestep.truncated().tolist()) == ([True, True], [False, False])
    assert timestep.discount.tolist() == [0, 0]


def test_dict_observations_and_their_last_ones(make):
    env = make(partial(DictEnv, 2))
    env.reset()
    env.step(np.zeros(2, int))
    timestep = env.step(np.zeros(2, int))
    assert timestep.observation["count"].tolist() == [[2, 2, 0, -1]] * 2
    assert timestep.extras["next_obs"]["count"].tolist() == [[1, 2, 2, 0]] * 2
    assert [part.tolist() for part in timestep.extras["next_obs"]["pair"]] == [[2, 2], [1, 1]]
    space = env.observation_space()
    assert isinstance(space, stoa.DictSpace)
    value = space.generate_value()
    assert (value["count"].shape, value["count"].dtype, value["pair"][0].shape) == ((4,), np.int32, ())


def test_spaces_are_stoa_s(make):
    env = make("CartPole-v1")
    assert env.action_space().num_values == 2
    assert isinstance(env.action_space(), stoa.DiscreteSpace)
    assert (env.observation_space().shape, env.observation_space().dtype) == ((4,), np.float32)

    class Others(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.MultiBinary(4)
            self.action_space = spaces.MultiDiscrete([3, 4])

    env = make(Others)
    assert env.observation_space().shape == (4,)
    assert env.action_space().num_values.tolist() == [3, 4]

    class From1(CountingEnv):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Discrete(3, start=1)

    with pytest.raises(jaxvec.UnsupportedSpaceError, match="^action: stoa has no space like"):
        make(From1).action_space()


def test_each_env_of_a_factory_has_a_seed_of_its_own():
    factory = EnvFactory(CountingEnv, 7)
    with ThreadPoolExecutor(3) as threads:
        envs = list(threads.map(factory, [3, 2, 1]))
    seeds = []
    for env in envs:
        env.reset()
        seeds += [info["seed"] for info in env.env.infos()]
    assert sorted(seeds) == list(range(7, 13))
    envs[0].reset()  # goes on
    assert [info["seed"] for info in envs[0].env.infos()] == [-1] * 3
    envs[0].reset(seed=[4, 8, 9])
    assert [info["seed"] for info in envs[0].env.infos()] == [4, 8, 9]
    for env in envs:
        env.close()
        env.close()


def test_wrappers_are_applied_and_arguments_passed_on():
    factory = EnvFactory(
        "CartPole-v1", apply_wrapper_fn=lambda env: (env,), final_obs=False, max_episode_steps=1
    )
    (env,) = factory(2)
    env.reset()
    timestep = env.step(np.zeros(2, int))
    assert timestep.truncated().tolist() == [True, True]
    assert "next_obs" not in timestep.extras
    env.close()
    with pytest.raises(TypeError, match="autoreset_mode can't be set here"):
        EnvFactory("CartPole-v1", autoreset_mode="NEXT_STEP")


def test_it_is_a_subclass_of_stoix_s_where_that_is_imported(monkeypatch):
    import abc

    theirs = types.ModuleType("stoix.utils.env_factory")
    theirs.EnvFactory = abc.ABCMeta("EnvFactory", (), {})
    monkeypatch.setitem(sys.modules, "stoix.utils.env_factory", theirs)
    assert isinstance(EnvFactory("CartPole-v1"), theirs.EnvFactory)


class Config(dict):
    """As OmegaConf's."""

    __getattr__ = dict.__getitem__


def test_registered_name_makes_stoix_systems_use_jaxvec_envs(monkeypatch):
    theirs = types.ModuleType("stoix.utils.make_env")
    theirs.make_factory = lambda config: ("theirs", config.env.env_name)
    hydra = types.ModuleType("hydra.utils")
    hydra.instantiate = lambda config, *, _partial_: lambda env: (config._target_, env) if _partial_ else None
    monkeypatch.setitem(sys.modules, "stoix", types.ModuleType("stoix"))
    monkeypatch.setitem(sys.modules, "stoix.utils", types.ModuleType("stoix.utils"))
    monkeypatch.setitem(sys.modules, "stoix.utils.make_env", theirs)
    monkeypatch.setitem(sys.modules, "hydra", types.ModuleType("hydra"))
    monkeypatch.setitem(sys.modules, "hydra.utils", hydra)
    register()
    register()
    env = Config(env_name="jaxvec", scenario=Config(name="CartPole-v1"), kwargs={"max_episode_steps": 3})
    config = Config(arch=Config(seed=9), env=env)
    factory = theirs.make_factory(config)
    assert (factory.task_id, factory.seed, factory.kwargs) == ("CartPole-v1", 9, {"max_episode_steps": 3})
    with factory(2).env as envs:
        assert envs.num_envs == 2
    env["wrapper"] = Config(_target_="a.Wrapper")
    name, wrapped = theirs.make_factory(config)(1)
    assert name == "a.Wrapper"
    wrapped.close()
    env["env_name"] = "gymnasium"
    assert theirs.make_factory(config) == ("theirs", "gymnasium")


def test_without_stoa_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "stoa", None)
    monkeypatch.delitem(sys.modules, "jaxvec.compat.stoix")
    with pytest.raises(ImportError, match='pip install "stoa-env>='):
        importlib.import_module("jaxvec.compat.stoix")


# --- EnvPool's tasks --------------------------------------------------------------------------


@pytest.fixture
def ale():
    pytest.importorskip("ale_py", reason='Atari needs the extra: pip install "jaxvec[atari]"')
    pytest.importorskip("cv2", reason='Atari needs the extra: pip install "jaxvec[atari]"')


LIVES = {"lives": "i4", "reward": "f4"}


class GameEnv(CountingEnv):
    """Its info tells of the step, and after a reset of none."""

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs, {**info, "lives": 3, "reward": 0.0}

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {**info, "lives": 3 - terminated, "reward": 10 * reward}


def test_stoix_s_extras_are_of_the_step_and_not_of_the_reset_after_it(make):
    env = make(partial(GameEnv, 2), info=LIVES)
    env.reset()
    rows = [env.step(np.zeros(2, int)).extras for _ in range(3)]
    assert [row["lives"].tolist() for row in rows] == [[3, 3], [2, 2], [3, 3]]
    assert [row["reward"].tolist() for row in rows] == [[10, 10], [20, 20], [10, 10]]


def test_stoix_s_metrics_of_a_game_are_its_score_over_all_lives(ale, make):
    options = {"episodic_life": True, "reward_clip": True, "repeat_action_probability": 0.25}
    env = make("Breakout-v5", init_seed=3, num_envs=2, max_episode_steps=27_000, **options)
    env.reset()
    score, length, told, games, lives = np.zeros(2), np.zeros(2, int), np.zeros((2, 2)), 0, 0
    for action in np.random.default_rng(0).integers(4, size=(500, 2)):
        timestep = env.step(action)
        extras = timestep.extras
        score, length = score + extras["reward"], length + 1
        over = extras["terminated"].astype(bool)
        told = np.where(over, [score, length], told)
        metrics = extras["metrics"]
        np.testing.assert_array_equal([metrics["episode_return"], metrics["episode_length"]], told)
        np.testing.assert_array_equal(metrics["is_terminal_step"], timestep.last())
        score, length = np.where(over, 0, score), np.where(over, 0, length)
        games, lives = games + over.sum(), lives + timestep.last().sum()
    assert lives >= 4 * games > 0
