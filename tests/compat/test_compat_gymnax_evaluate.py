"""The evaluation for rejax on gymnax's API: the episodes are those of Gymnasium."""

import copy

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

import jaxvec
from jaxvec.compat import gymnax
from jaxvec.testing import CountingEnv

KEY = jax.random.key(7)


def seeds_of(keys):
    return [int(jax.random.bits(key, (1,), np.uint32)[0] >> 1) for key in keys]


def towards(obs, key):
    return jnp.int32(obs[2] > 0)


def episodes(keys, policy):
    """Returns lengths and returns of one episode per seed, as Gymnasium plays it."""
    played = []
    for seed in seeds_of(keys):
        env = gymnasium.make("CartPole-v1", max_episode_steps=60)
        obs, _ = env.reset(seed=seed)
        length, total, over = 0, 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(int(policy(obs, None)))
            length, total, over = length + 1, total + reward, terminated or truncated
        played.append((length, total))
    return tuple(np.array(column) for column in zip(*played, strict=True))


def test_evaluate_plays_the_episodes_of_gymnasium():
    with gymnax.make("CartPole-v1", max_episode_steps=60)[0] as env:
        found = jax.jit(lambda key: gymnax.evaluate(towards, key, env, 5))(KEY)
    lengths, returns = episodes(jax.random.split(jax.random.split(KEY)[1], 5), towards)
    np.testing.assert_array_equal(found[0], lengths)
    np.testing.assert_array_equal(found[1], returns)
    assert len(set(lengths.tolist())) > 1


class FragileOnceEnv(CountingEnv):
    """Fails in the second step of its first episode."""

    def step(self, action):
        if self.resets == 1 and self.steps == 1:
            raise ValueError("lost")
        return super().step(action)


def test_evaluate_plays_again_after_a_fault():
    policy = jaxvec.Restart(rate=None)
    with gymnax.make(FragileOnceEnv, episode_length=3, on_fault=policy)[0] as env:
        lengths, returns = gymnax.evaluate(lambda obs, key: jnp.int32(0), KEY, env, 2)
    assert (lengths.tolist(), returns.tolist()) == ([3, 3], [6, 6])


def test_evaluate_under_vmap_is_evaluate_of_each_key():
    keys = jax.random.split(KEY, 3)
    with gymnax.make("CartPole-v1", max_episode_steps=60)[0] as env:
        program = jax.jit(lambda key: gymnax.evaluate(towards, key, env, 2))
        each = [program(key) for key in keys]
        lengths, returns = jax.jit(jax.vmap(program))(keys)
        assert sorted(env.pools) == [1, 2, 6]
    np.testing.assert_array_equal(lengths, [one for one, _ in each])
    np.testing.assert_array_equal(returns, [one for _, one in each])


def test_a_copy_of_an_environment_is_itself():
    env, params = gymnax.make(CountingEnv)
    with env:
        copied = copy.deepcopy({"env": env, "params": params})
        assert copied["env"] is env
        assert copied["params"] == params
