"""Comparison of a jitted scan over PettingZoo envs with the envs stepped by hand."""

import jax
import numpy as np
import pytest
from gymnasium import spaces

import jaxvec

pytest.importorskip("pettingzoo", reason="pettingzoo is not installed: the extra of its name has it")
from jaxvec.adapters.pettingzoo import INFO, PettingZooEnv


def scan(handle, actions):
    return jax.lax.scan(jaxvec.step, handle, actions)[1]


def sample_actions(space, num_steps, num_envs):
    """Returns `[num_steps, num_envs, ...]` actions, in JAX's dtypes."""
    space.seed(3)
    samples = [space.sample() for _ in range(num_steps * num_envs)]
    return jax.tree.map(
        lambda *leaves: (
            np.stack(leaves)
            .reshape(num_steps, num_envs, *leaves[0].shape)
            .astype(jax.dtypes.canonicalize_dtype(leaves[0].dtype))
        ),
        *samples,
    )


def zeros(space):
    match space:
        case spaces.Dict():
            return {key: zeros(child) for key, child in space.items()}
        case spaces.Tuple():
            return tuple(zeros(child) for child in space)
        case _:
            return np.zeros(space.shape, space.dtype)


def assert_jitted_steps_are_those_by_hand(make, env_fn, *, num_envs, num_steps, seed=5):
    """Compares the results of a scan, and counts terminated and truncated episodes, and agents that left."""
    envs = make(lambda: PettingZooEnv(env_fn()), num_envs, num_workers=2, info=INFO)
    actions = sample_actions(envs.single_action_space, num_steps, num_envs)
    handle, first = jaxvec.reset(envs, seed=seed)
    got = jax.tree.map(np.asarray, scan(handle, actions))
    lost = 0
    for n in range(num_envs):
        env = env_fn()
        agents = env.possible_agents
        nothing = {agent: zeros(env.observation_space(agent)) for agent in agents}
        observations, _ = env.reset(seed=seed + n)
        assert_obs(first.obs, n, nothing | observations)
        assert_masks(first.info, n, agents, env.agents, {}, {})
        fates = {}  # how each agent of this episode ended
        for t in range(num_steps):
            at, acting = (t, n), env.agents[:]
            taken = {
                agent: jax.tree.map(
                    lambda like, leaf: np.asarray(leaf[t, n], like.dtype)[()],
                    env.action_space(agent).sample(),
                    actions[agent],
                )
                for agent in acting
            }
            observations, rewards, terminations, truncations, _ = env.step(taken)
            alive = [agent for agent in env.agents if not (terminations.get(agent) or truncations.get(agent))]
            fates |= {agent: terminations.get(agent, False) for agent in {*acting, *alive}}
            lost += len(set(acting) - set(alive))
            assert got.reward[at].tolist() == [np.float32(rewards[a]) if a in acting else 0 for a in agents]
            assert got.terminated[at] == (not alive and all(fates.values()))
            assert got.truncated[at] == (not alive and not all(fates.values()))
            info = got.info if alive else got.info["final_info"]
            assert_masks(info, at, agents, alive, terminations, truncations)
            assert got.info["_final_obs"][at] == (not alive)
            if not alive:
                assert_obs(got.info["final_obs"], at, nothing | observations)
                observations, _ = env.reset()
                fates = {}
            assert_obs(got.obs, at, nothing | observations)
    return int(got.terminated.sum()), int(got.truncated.sum()), lost


def assert_obs(got, at, expected):
    jax.tree.map(
        lambda leaf, value: np.testing.assert_array_equal(leaf[at], np.asarray(value).astype(leaf.dtype)),
        got,
        expected,
    )


def assert_masks(info, at, agents, alive, terminations, truncations):
    assert info["alive"][at].tolist() == [agent in alive for agent in agents]
    assert info["turn"][at].tolist() == info["alive"][at].tolist()
    assert info["terminated"][at].tolist() == [bool(terminations.get(agent)) for agent in agents]
    assert info["truncated"][at].tolist() == [bool(truncations.get(agent)) for agent in agents]
