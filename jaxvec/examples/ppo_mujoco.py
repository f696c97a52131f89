"""PPO on MuJoCo envs in one `jax.jit`, with normalised observations and rewards.

    python -m jaxvec.examples.ppo_mujoco
    python -m jaxvec.examples.ppo_mujoco --env Hopper-v5 --total-steps 1000000

Observations are scaled to mean 0 and standard deviation 1. Rewards are divided by the standard deviation of
the discounted return so far. `VecNormalize` of Stable-Baselines3 does the same outside of compiled
programs; here the statistics are part of the training state. The reported returns are sums of unscaled
rewards. The shared parts of PPO are imported from `ppo.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxvec
from jaxvec.examples import _training, ppo
from jaxvec.examples._training import Report, Result, Returns, finish, need, option, parse, repeat
from jaxvec.examples.ppo import Agent


@dataclass(frozen=True)
class Config(ppo.Config):
    env: str = option("HalfCheetah-v5", "Gymnasium id of a MuJoCo env")
    num_envs: int = option(16, "number of envs")
    num_steps: int = option(128, "steps of each env in an update")
    total_steps: int = option(2_000_000, "env steps, rounded up to a multiple of num-envs x num-steps")
    num_epochs: int = option(10, "passes over the steps of an update")
    num_minibatches: int = option(32, "gradient steps per pass")
    lr: float = option(3e-4, "learning rate, falling linearly to 0")
    entropy_weight: float = option(0.0, "weight of the entropy bonus")


class State(NamedTuple):
    """State of training between two updates."""

    learner: ppo.State  # its `reward_stats` describe discounted returns
    discounted: jax.Array  # [num_envs] float32, return of each running episode

    @property
    def returns(self) -> Returns:
        """The returns of the latest episodes."""
        return self.learner.returns


def discount(
    gamma: float, before: jax.Array, reward: jax.Array, done: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the discounted return of the running episodes: after the last step, and after each step.

    Args:
        gamma: discount per step.
        before: return before the first step, `[num_envs]`.
        reward: reward of each step, `[num_steps, num_envs]`.
        done: whether the episode ended in the step, `[num_steps, num_envs]`.
    """

    def add(total: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total = gamma * total + now[0]
        return jnp.where(now[1], 0, total), total

    return jax.lax.scan(add, before, (reward, done))


def update(agent: Agent, state: State, key: jax.Array) -> State:
    """Collects steps and learns from them, once."""
    play_key, learn_key = jax.random.split(key)
    seen = state.learner.obs_stats  # learning must use the same statistics as acting
    learner, steps = ppo.collect(agent, state.learner, play_key)
    discounted, so_far = discount(agent.config.gamma, state.discounted, steps.reward, steps.done)
    learner = learner._replace(
        obs_stats=seen.update(steps.obs),
        reward_stats=learner.reward_stats.update(so_far),
        returns=learner.returns.add(steps.done, steps.episode_return),
    )
    steps = steps._replace(
        obs=seen.normalize(steps.obs),
        next_obs=seen.normalize(steps.next_obs),
        reward=learner.reward_stats.scale(steps.reward),
    )
    return State(ppo.learn(agent, learner, steps, learn_key), discounted)


def train(
    agent: Agent, report: Report, handle: jaxvec.Handle, timestep: jaxvec.TimeStep, key: jax.Array
) -> tuple[State, jax.Array, jax.Array]:
    """Trains, starting at the `handle` and `timestep` of a reset; see `repeat`."""
    init_key, train_key = jax.random.split(key)
    state = State(ppo.begin(agent, handle, timestep, init_key), jnp.zeros(agent.config.num_envs))
    return repeat(partial(update, agent), state, train_key, agent.config, report)


def run(config: Config) -> Result:
    need("mujoco", "mujoco")
    with jaxvec.make(config.env, config.num_envs, num_workers=config.num_workers) as envs:
        return _training.run(config, envs, partial(train, ppo.make_agent(config, envs)))


def main(argv: Sequence[str] | None = None) -> Result:
    config = parse(Config, "ppo_mujoco", "Train PPO on a MuJoCo env.", argv)
    return finish(config, "PPO", "ppo_mujoco", run(config))


if __name__ == "__main__":
    main()
