"""Recorded episodes, against episodes that Gymnasium's envs play alone."""

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


@pytest.mark.slow(but=3)
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


HARM = 9


class FragileEnv(CountingEnv):
    """Fails in a step with `HARM`, and has an info in the last steps of episodes."""

    def step(self, action):
        if action == HARM:
            raise ValueError("harm")
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"score": reward} if terminated else {}


def play_fragile(length, seed, actions, resets, mode):
    """Yields the episodes of an env played alone, as `(seed, observations, actions, truncated)`."""
    env = FragileEnv(length)
    given, observations, sent, over = seed, [env.reset(seed=seed)[0]], [], False

    def end(truncated):
        nonlocal given, observations, sent
        if sent:
            yield given, np.array(observations), sent, truncated
        given, observations, sent = None, [], []

    for action, reset in zip(actions, resets, strict=True):
        if over:
            if mode == "NEXT_STEP":
                observations, over = [env.reset()[0]], False
        elif action == HARM:
            yield from end(truncated=True)
            over = True
        else:
            obs, _, over, _, _ = env.step(action)
            observations.append(obs)
            sent.append(action)
            if over:
                yield from end(truncated=False)
        if over and mode == "SAME_STEP":
            observations, over = [env.reset()[0]], False
        if reset or (over and mode == "DISABLED"):
            yield from end(truncated=True)
            given, observations, over = seed + 10, [env.reset(seed=seed + 10)[0]], False
    yield from end(truncated=True)


@pytest.mark.parametrize("mode", [*MODES, "DISABLED"])
def test_resets_by_mask_and_faults_lose_no_transition(make, mode):
    lengths, num_steps = [2, 5, 3], 40
    actions = np.random.default_rng(1).integers(0, 4, (num_steps, 3))
    actions[[0, 6, 13, 14, 30], [0, 0, 1, 1, 2]] = HARM
    resets = np.zeros((num_steps, 3), bool)
    resets[7::8] = [True, True, False] if mode != "EPISODIC" else True
    resets[17] = True
    options = {"env_configs": [{"episode_length": length} for length in lengths], "autoreset_mode": mode}
    policy = jaxvec.Restart(rate=None, max_restarts=None)
    envs = make(FragileEnv, 3, num_workers=1, on_fault=policy, info={"score": float}, **options)
    recorder = Recorder(envs, envs.reset(seed=0), seed=0)
    waiting = []
    for action, reset in zip(actions, resets, strict=True):
        timestep = envs.step(action)
        waiting.append((action, timestep))
        mask = reset | ((mode == "DISABLED") & (timestep.terminated | timestep.truncated))
        if mask.any():  # adds the steps before it at once
            recorder.add(*jax.tree.map(lambda *parts: np.stack(parts), *waiting))
            waiting = []
            recorder.add_reset(envs.reset(seed=10, mask=mask), mask, seed=10)
    if waiting:
        recorder.add(*jax.tree.map(lambda *parts: np.stack(parts), *waiting))
    found = recorder.take(cut=True)
    for number, length in enumerate(lengths):
        expected = play_fragile(length, number, actions[:, number], resets[:, number], mode)
        for seed, observations, sent, truncated in expected:
            (episode,) = [
                one
                for one in found
                if one.observations.tolist() == observations.tolist()
                and one.actions.tolist() == sent
                and one.seed == seed
            ]
            found = [one for one in found if one is not episode]
            assert episode.rewards.tolist() == [*range(1, len(sent) + 1)]
            assert (episode.truncations[-1], episode.terminations[-1]) == (truncated, not truncated)
            assert not (episode.truncations | episode.terminations)[:-1].any()
            has_score = np.arange(len(sent) + 1) == (-1 if truncated else len(sent))
            assert episode.infos["_score"].tolist() == has_score.tolist()
    assert found == []


@pytest.mark.parametrize("mode", ["SAME_STEP", "EPISODIC", "DISABLED"])
def test_a_reset_that_was_not_recorded_is_an_error(make, mode):
    envs = make(CountingEnv, 2, episode_length=4, autoreset_mode=mode, num_workers=1)
    recorder = Recorder(envs, envs.reset(seed=0), seed=0)
    action = np.array([0, 1])
    recorder.add(action, envs.step(action))
    envs.reset(mask=np.array([False, True]))
    timestep = envs.step(action)
    with pytest.raises(ValueError, match=r"env 1 was reset or restored .* pass .* to add_reset"):
        recorder.add(action, timestep)
    (first, second) = recorder.take(cut=True)
    assert (len(first.rewards), len(second.rewards)) == (1, 1)


def test_a_restored_state_starts_an_episode(make):
    envs = make(CountingEnv, 2, episode_length=4, states=2, num_workers=1)
    handle, first = jaxvec.reset(envs, seed=0)
    recorder, actions = Recorder(envs, first), np.array([[1, 2], [3, 4], [5, 6]])
    handle, timestep = jaxvec.step(handle, actions[0])
    recorder.add(actions[0], timestep)
    handle, states = jaxvec.save(handle)
    handle, timestep = jaxvec.step(handle, actions[1])
    recorder.add(actions[1], timestep)
    handle, timestep = jaxvec.restore(handle, states)
    recorder.add_reset(timestep)
    handle, timestep = jaxvec.step(handle, actions[2])
    recorder.add(actions[2], timestep)
    assert [one.observations[:, 3].tolist() for one in recorder.take(cut=True)] == [
        [-1, 1, 3],
        [-1, 2, 4],
        [1, 5],
        [2, 6],
    ]


@pytest.mark.parametrize("options", [{"final_obs": False}, {"batch_size": 1}])
def test_pools_without_whole_episodes_are_refused(options):
    with jaxvec.make(CountingEnv, 2, **options) as envs:
        first = envs.reset(seed=0)
        with pytest.raises(ValueError, match="a Recorder needs a pool with final_obs and without batch_size"):
            Recorder(envs, first)
