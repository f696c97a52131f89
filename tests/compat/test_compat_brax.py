"""Brax's face, with brax's own classes, wrappers and trainer."""

import warnings
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from support import probe
from support.disasters import closing_all

import jaxvec
from jaxvec.testing import CountingEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the versions of others
    envs = pytest.importorskip("brax.envs", reason="brax is not installed", exc_type=ImportError)
    training = pytest.importorskip("brax.envs.wrappers.training", exc_type=ImportError)
    from jaxvec.compat import brax as face

KEY = jax.random.PRNGKey(7)  # brax's wrappers know no other keys
STEPS, EPISODE_STEPS = 1, 2  # columns of CountingEnv's observation


@pytest.fixture
def make():
    with closing_all(lambda env=CountingEnv, **kwargs: face.make(env, **kwargs)) as make:
        yield make


class BoxEnv(CountingEnv):
    """Takes flat actions, and gives them back as its observation."""

    def __init__(self, length=None, low=(-2.0, 0.0, -1.0), high=(2.0, 10.0, 1.0)):
        super().__init__(length, truncate=True)
        self.action_space = spaces.Box(np.array(low), np.array(high), dtype=np.float64)
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.first = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first += 100  # each episode's first observation is another
        return np.full(3, float(self.first)), {}

    def step(self, action):
        _, reward, terminated, truncated, info = super().step(0)
        return np.array(action), reward, terminated, truncated, info


def test_states_have_brax_s_fields(make):
    env = make(partial(CountingEnv, 2), info={"steps": int})
    state = jax.jit(env.reset)(KEY)
    assert (state.pipeline_state, state.metrics) == (None, {})
    assert (state.obs.tolist(), state.reward, state.done) == ([1, 0, 0, -1], 0, 0)
    state = state.replace(info={**state.info, "theirs": 5}, metrics={"mine": 1})
    state = jax.jit(env.step)(state, 7)
    assert (state.obs.tolist(), state.reward, state.done) == ([1, 1, 1, 7], 1, 0)
    state = jax.jit(env.step)(state, 7)
    assert (state.obs.tolist(), state.reward, state.done) == ([2, 2, 0, -1], 2, 1)
    assert (state.reward.dtype, state.done.dtype) == (np.float32, np.float32)
    assert (state.info["theirs"], state.metrics) == (5, {"mine": 1})
    info = state.info["env"]
    assert info["final_obs"].tolist() == [1, 2, 2, 7]
    assert (info["episode_return"], info["terminated"], info["truncated"]) == (3, True, False)
    assert (info["steps"], info["_steps"], "final_info" in info) == (2, True, False)  # of the step itself


def test_with_brax_it_is_brax_s_env_and_state(make):
    env = make(BoxEnv)
    assert isinstance(env, envs.Env)
    assert isinstance(env, face.Env)
    assert type(env.reset(KEY)) is envs.State
    assert (env.observation_size, env.action_size, env.backend) == (3, 3, "jaxvec")
    assert env.unwrapped is env


def test_actions_are_scaled_to_finite_bounds_and_clipped(make):
    env = make(BoxEnv)
    state = env.reset(KEY)
    for action, expected in (
        ([-1, -1, -1], [-2, 0, -1]),
        ([1, 1, 1], [2, 10, 1]),
        ([0, 0.5, -3], [0, 7.5, -1]),
    ):
        state = env.step(state, jnp.array(action, float))
        assert state.obs.tolist() == expected


@pytest.mark.parametrize("how", ["asked", "infinite"])
def test_or_they_are_passed_on_as_they_are(make, how):
    if how == "asked":
        env = make(BoxEnv, scale_actions=False)
    else:
        env = make(partial(BoxEnv, high=(np.inf, 1.0, 1.0)))
    assert env.step(env.reset(KEY), jnp.array([0.5, 0.25, 3])).obs.tolist() == [0.5, 0.25, 3]


def test_sizes_of_other_spaces(make):
    class Other(CountingEnv):
        def __init__(self):
            super().__init__()
            image = spaces.Box(0, 255, (4, 4, 3), np.uint8)
            self.observation_space = spaces.Dict({"state": spaces.Box(0, 1, (5,)), "image": image})
            self.action_space = spaces.MultiDiscrete([2, 3])

    env = make(Other)
    assert env.observation_size == {"state": 5, "image": (4, 4, 3)}
    with pytest.raises(jaxvec.UnsupportedSpaceError, match="action_size"):
        _ = env.action_size
    assert make(CountingEnv).action_size == 1000


def test_under_brax_s_own_wrappers_observations_are_the_new_episodes(make):
    env = training.wrap(make(partial(BoxEnv, 2)), episode_length=100, action_repeat=1)
    state = jax.jit(env.reset)(jax.random.split(KEY, 3))
    assert state.obs[:, 0].tolist() == [100] * 3
    seen, steps = [], []
    stepped = jax.jit(env.step)
    for _ in range(6):
        state = stepped(state, jnp.zeros((3, 3)))
        seen.append(state.obs[0, 1].item())
        steps.append((state.info["steps"][0].item(), state.done[0].item()))
    assert seen == [5, 200, 5, 300, 5, 400]  # and not 100, the first of all, in place of the hundreds
    assert steps == [(1, 0), (2, 1)] * 3


def test_under_ours_the_envs_own_time_limit_is_a_truncation(make):
    env = face.wrap(make(partial(BoxEnv, 2)), episode_length=100)
    state = jax.jit(env.reset)(jax.random.split(KEY, 3))
    stepped = jax.jit(env.step)
    flags = []
    for _ in range(4):
        state = stepped(state, jnp.zeros((3, 3)))
        flags.append((state.done[0].item(), state.info["truncation"][0].item()))
    assert flags == [(0, 0), (1, 1)] * 2
    ended = face.wrap(make(partial(CountingEnv, 1)))
    state = ended.step(ended.reset(jax.random.split(KEY, 2)), jnp.zeros(2, int))
    assert (state.done.tolist(), state.info["truncation"].tolist()) == ([1, 1], [0, 0])


def test_what_is_terminated_at_the_time_limit_is_no_truncation(make):
    env = face.wrap(make(lambda: TimeLimit(CountingEnv(1), 1)))
    state = env.step(env.reset(jax.random.split(KEY, 2)), jnp.zeros(2, int))
    assert state.info["env"]["truncated"].tolist() == [True, True]
    assert (state.done.tolist(), state.info["truncation"].tolist()) == ([1, 1], [0, 0])


def test_wrap_refuses_what_would_lose_the_ends_of_episodes(make):
    with pytest.raises(ValueError, match="action_repeat must be 1, not 4"):
        face.wrap(make(), action_repeat=4)
    with pytest.raises(ValueError, match="randomization_fn"):
        face.wrap(make(), randomization_fn=lambda system: system)


def test_brax_s_ppo_trains(make, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train = pytest.importorskip("brax.training.agents.ppo.train", exc_type=ImportError).train
    # brax 0.14 calls a name that jax 0.10 has no more.
    monkeypatch.setattr(
        jax,
        "device_put_replicated",
        lambda tree, devices: jax.tree.map(lambda leaf: jnp.stack([leaf] * len(devices)), tree),
        raising=False,
    )
    env = make("Pendulum-v1", max_episode_steps=10)
    metrics = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(
            env,
            num_timesteps=160,
            max_devices_per_host=1,
            num_evals=2,
            episode_length=10,
            num_envs=8,
            num_eval_envs=4,
            unroll_length=5,
            batch_size=8,
            num_minibatches=2,
            num_updates_per_batch=1,
            normalize_observations=True,
            wrap_env_fn=face.wrap,
            progress_fn=lambda _, each: metrics.append(each),
        )
    assert [each["eval/avg_episode_length"] for each in metrics] == [10, 10]
    assert np.isfinite([each["eval/episode_reward"] for each in metrics]).all()
    pool = env.pools[8]
    steps = pool.stats().total.steps
    assert steps >= 160
    assert probe.num_served(pool) == 1 + steps // 8
    assert gymnasium.spec("Pendulum-v1").max_episode_steps == 200
