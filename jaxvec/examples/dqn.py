"""DQN on Gymnasium envs, the replay buffer and the whole of training under one `jax.jit`.

    python -m jaxvec.examples.dqn

Double DQN, with a target network that follows slowly, and layers that are normalised, without which
values grew beyond all bounds here. How envs, buffer and gradient steps take turns is in `_replay.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxvec
from jaxvec.examples import _replay, _training
from jaxvec.examples._replay import ReplayOptions, Transition
from jaxvec.examples._training import Result, discrete_actions, finish, option, parse


@dataclass(frozen=True)
class Config(ReplayOptions):
    """Holds the command line's options."""

    total_steps: int = option(160_000, "env steps, rounded up to whole reports")
    buffer_size: int = option(200_000, "transitions to keep; with fewer, the policy forgets early failures")
    gradient_steps: int = option(8, "gradient steps after each step of the envs")
    lr: float = option(1e-4, "learning rate, falling linearly to 0")
    explore: float = option(0.1, "fraction of training in which the exploration rate falls from 1")
    epsilon: float = option(0.02, "exploration rate from then on")
    follow: float = option(0.01, "tau: step size of the target network's update, in each gradient step")


class QNetwork(nn.Module):
    """Two hidden layers, each normalised."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Maps `[..., obs_size]` to the actions' values `[..., num_actions]`."""
        for _ in range(2):
            obs = nn.relu(nn.LayerNorm()(nn.Dense(128)(obs)))
        return nn.Dense(self.num_actions)(obs)


class Learned(NamedTuple):
    """What gradient steps change."""

    params: Any
    target_params: Any
    opt_state: Any


@dataclass(frozen=True)
class Dqn:
    """The algorithm; see `_replay.Algorithm`. Its actions are int32 from 0."""

    config: Config
    first_action: int  # as the env counts
    network: Any  # a QNetwork, whose `apply` flax leaves without a result type
    optimizer: optax.GradientTransformation

    def init(self, obs: jax.Array, key: jax.Array) -> Learned:
        """Makes the networks, which are equal."""
        params = self.network.init(key, obs)
        return Learned(params, params, self.optimizer.init(params))

    def act(self, learned: Learned, obs: jax.Array, progress: jax.Array, key: jax.Array) -> jax.Array:
        """Takes the best action or, with a probability that falls, any."""
        explore_key, action_key = jax.random.split(key)
        fallen = jnp.minimum(progress / self.config.explore, 1)
        epsilon = 1 + (self.config.epsilon - 1) * fallen
        values = self.network.apply(learned.params, obs)
        random = jax.random.randint(action_key, obs.shape[:1], 0, values.shape[-1])
        explores = jax.random.uniform(explore_key, obs.shape[:1]) < epsilon
        return jnp.where(explores, random, values.argmax(-1))

    def to_env(self, action: jax.Array) -> jax.Array:
        """Returns `[num_envs]` as the env counts."""
        return action + self.first_action

    def loss(self, params: Any, target_params: Any, batch: Transition) -> jax.Array:
        """Returns the mean Huber loss of `[batch_size]` transitions, `[]` float32."""
        value = _of(batch.action, self.network.apply(params, batch.obs))
        best = self.network.apply(params, batch.next_obs).argmax(-1)  # chosen by one, judged by the other
        next_value = _of(best, self.network.apply(target_params, batch.next_obs))
        # Only a terminated episode has no future: what a time limit truncates would have gone on.
        reward = (1 - self.config.gamma) * batch.reward  # so that values are of the order of a reward
        target = reward + self.config.gamma * jnp.where(batch.terminated, 0, next_value)
        return optax.losses.huber_loss(value, jax.lax.stop_gradient(target)).mean()

    def descend(self, learned: Learned, batch: Transition, key: jax.Array) -> Learned:
        """Takes a gradient step, and lets the target network follow."""
        gradient = jax.grad(self.loss)(learned.params, learned.target_params, batch)
        change, opt_state = self.optimizer.update(gradient, learned.opt_state, learned.params)
        params = optax.apply_updates(learned.params, change)
        target_params = optax.incremental_update(params, learned.target_params, self.config.follow)
        return Learned(params, target_params, opt_state)


def _of(action: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, action[:, None], axis=-1)[:, 0]


def make_dqn(config: Config, envs: jaxvec.VectorEnv) -> Dqn:
    """Fits the algorithm to the spaces of the envs."""
    action_space = discrete_actions(config, envs, "DQN")
    lr = optax.linear_schedule(config.lr, 0, config.num_updates * config.num_steps * config.gradient_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(10), optax.adam(lr))
    return Dqn(config, int(action_space.start), QNetwork(int(action_space.n)), optimizer)


def run(config: Config) -> Result:
    """Starts the envs, trains, and closes them."""
    with jaxvec.make(config.env, config.num_envs, num_workers=config.num_workers) as envs:
        return _training.run(config, envs, partial(_replay.train, make_dqn(config, envs), config))


def main(argv: Sequence[str] | None = None) -> Result:
    """Trains as `argv` or the command line says, prints the outcome, plots the learning curve."""
    about = "Trains DQN on a Gymnasium env with Box observations and Discrete actions."
    config = parse(Config, "dqn", about, argv)
    return finish(config, "DQN", "dqn", run(config))


if __name__ == "__main__":
    main()
