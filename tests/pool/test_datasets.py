"""Recorded episodes, against episodes that Gymnasium's envs play alone."""

from __future__ import annotations

from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import jaxvec
from jaxvec.datasets import Episode, Recorder
from jaxvec.testing import CountingEnv, NestedEnv

NUM_ENVS, NUM_STEPS = 3, 60
MODES = ["SAME_STEP", "NEXT_STEP", "EPISODIC"]


class LandscapeEnv(gymnasium.Wrapper):
    """CartPole with nested observations and an info in every step."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=15))
        image = spaces.Box(0, 255, (2, 2, 3), np.uint8)
        self.observation_space = spaces.Dict({"z": self.env.observation_space, "a": spaces.Tuple((image,))})
        self.count = 0

    def observe(self, obs):
        return {"z": obs, "a": (np.full((2, 2, 3), self.count, np.uint8),)}

    def reset(self, **kwargs):
        obs, _ = self.env.reset(**kwargs)
        self.count = 0
        return self.observe(obs), {"count": -1}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.env.step(action)
        self.count += 1
        return self.observe(obs), reward, terminated, truncated, {"count": self.count}


def play(env, seed, actions, mode):
    """Returns the episodes of one env, played alone, as lists of fields; the last one is cut."""
    obs, info = env.reset(seed=seed)
    episodes, steps, seeds = [], [], [seed]
    episode, over = ([obs], [info["count"]]), False
    for action in actions:
        if over:
            if mode == "EPISODIC":
                break
            (obs, info), over = env.reset(), False
            episode = ([obs], [info["count"]])
            if mode == "NEXT_STEP":  # the step was a reset
                continue
        obs, reward, terminated, truncated, info = env.step(action)
        steps.append((action, reward, terminated, truncated))
        episode[0].append(obs)
        episode[1].append(info["count"])
        over = terminated or truncated
        if over:
            episodes.append((seeds.pop() if seeds else None, *episode, steps))
            steps = []
    if steps:
        steps[-1] = (*steps[-1][:3], True)
        episodes.append((seeds.pop() if seeds else None, *episode, steps))
    return episodes


def key(episode):
    return (episode.seed is None, str(episode.seed), len(episode.rewards), np.sum(episode.observations["z"]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [60, 7, 1])
def test_episodes_are_those_that_envs_play_alone(mode, length):
    actions = np.random.default_rng(1).integers(0, 2, (NUM_STEPS, NUM_ENVS))
    found = []
    with jaxvec.make(LandscapeEnv, NUM_ENVS, autoreset_mode=mode, info={"count": int}) as envs:
        handle, first = jaxvec.reset(envs, seed=5)
        recorder = Recorder(envs, first, seed=5)
        for start in range(0, NUM_STEPS, length):
            part = actions[start : start + length]
            if length == 1:
                handle, timestep = jaxvec.step(handle, jnp.asarray(part[0]))
                recorder.add(part[0], timestep)
            else:
                handle, timesteps = jax.lax.scan(jaxvec.step, handle, jnp.asarray(part))
                recorder.add(part, timesteps)
            found += recorder.take()
        found += recorder.take(cut=True)
    expected = []
    for env_id in range(NUM_ENVS):
        for seed, obs, counts, steps in play(LandscapeEnv(), 5 + env_id, actions[:, env_id], mode):
            stacked = {
                "z": np.stack([each["z"] for each in obs]),
                "a": (np.stack([each["a"][0] for each in obs]),),
            }
            columns = map(np.array, zip(*steps, strict=True))
            infos = {"count": np.array(counts), "_count": np.ones(len(counts), bool)}
            expected.append(Episode(seed, None, stacked, *columns, infos))
    assert len(found) == len(expected) > NUM_ENVS * (mode != "EPISODIC")
    for one, other in zip(sorted(found, key=key), sorted(expected, key=key), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_nested_actions_are_recorded():
    with jaxvec.make(NestedEnv, 2, episode_length=2) as envs:
        recorder = Recorder(envs, envs.reset(seed=3))
        envs.action_space.seed(0)
        sent = [envs.action_space.sample() for _ in range(5)]
        for action in sent:
            recorder.add(action, envs.step(action))
    assert len(recorder.take()) == 4
    assert recorder.take() == []
    last = recorder.take(cut=True)
    assert [(one.seed, len(one.rewards), one.truncations.tolist()) for one in last] == [(None, 1, [True])] * 2
    for env_id, episode in enumerate(last):
        own = jax.tree.map(lambda leaf, i=env_id: leaf[i], sent[4])
        jax.tree.map(lambda got, one: np.testing.assert_array_equal(got[0], one), episode.actions, own)
        obs = episode.observations["last"]
        jax.tree.map(lambda got, one: np.testing.assert_array_equal(got[1], one.astype(got.dtype)), obs, own)


def test_seeds_and_options_belong_to_the_first_episodes():
    with jaxvec.make(CountingEnv, 2, episode_length=2) as envs:
        first = envs.reset(seed=[3, None], options=[{"a": 1}, None])
        recorder = Recorder(envs, first, seed=[3, None], options=[{"a": 1}, None])
        for _ in range(4):
            recorder.add(np.array([7, 8]), envs.step(np.array([7, 8])))
    episodes = recorder.take(cut=True)
    assert sorted((str(one.seed), one.options or {}) for one in episodes[:2]) == [
        ("3", {"a": 1}),
        ("None", {}),
    ]
    assert [(one.seed, one.options) for one in episodes[2:]] == [(None, None)] * 2
    assert [one.observations[:, 3].tolist() for one in episodes] == [[-1, 7, 7], [-1, 8, 8]] * 2


@pytest.mark.parametrize("options", [{"autoreset_mode": "DISABLED"}, {"final_obs": False}, {"batch_size": 1}])
def test_pools_without_whole_episodes_are_refused(options):
    with jaxvec.make(CountingEnv, 2, **options) as envs:
        first = envs.reset(seed=0)
        with pytest.raises(ValueError, match="a Recorder needs a pool with autoreset, with final_obs"):
            Recorder(envs, first)


@pytest.mark.filterwarnings("ignore:`.*` is set to None|env_spec is None:UserWarning")
def test_minari_reads_back_what_was_recorded(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with jaxvec.make(partial(LandscapeEnv), 2, info={"count": int}) as envs:
        recorder = Recorder(envs, envs.reset(seed=1), seed=1)
        for _ in range(40):
            recorder.add(np.ones(2, int), envs.step(np.ones(2, int)))
        spaces = {
            "observation_space": envs.single_observation_space,
            "action_space": envs.single_action_space,
        }
    episodes = recorder.take(cut=True)
    buffers = [minari.data_collector.EpisodeBuffer(**one._asdict()) for one in episodes]
    dataset = minari.create_dataset_from_buffers(
        "cartpole/right-v0", buffers[:3], jpeg_encoding=False, **spaces
    )
    dataset.update_dataset_from_buffer(buffers[3:])
    read = list(minari.load_dataset("cartpole/right-v0"))
    assert len(read) == len(episodes) > 3
    for one, episode in zip(read, episodes, strict=True):
        for name in ("observations", "actions", "rewards", "terminations", "truncations", "infos"):
            jax.tree.map(np.testing.assert_array_equal, getattr(one, name), getattr(episode, name))
    metadata = list(dataset.storage.get_episode_metadata(range(len(episodes))))
    assert [one.get("seed") for one in metadata] == [one.seed for one in episodes]
