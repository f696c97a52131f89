"""DQN on Gymnasium envs, with the replay buffer and all of training in one `jax.jit`.

    python examples/dqn.py

This is double DQN with a slowly updated target network and normalised layers. Without them, values grew
without bound. `shared_replay.py` contains the loop of env steps, buffer and gradient steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import shared_replay
import shared_training
from flax import linen as nn
from shared_replay import ReplayOptions, Transition
from shared_training import Result, discrete_actions, finish, option, parse

import jaxvec


@dataclass(frozen=True)
class Config(ReplayOptions):
    total_steps: int = option(160_000, "env steps, rounded up to whole reports")
    buffer_size: int = option(200_000, "transitions to store; with fewer, the policy forgets early failures")
    gradient_steps: int = option(8, "gradient steps after each step of the envs")
    lr: float = option(1e-4, "learning rate, falling linearly to 0")
    exploration_fraction: float = option(0.1, "fraction of training in which epsilon decays from 1")
    epsilon: float = option(0.02, "exploration rate after this decay")
    tau: float = option(0.01, "step size of the target network's update after each gradient step")


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
    """Parameters and optimiser state."""

    params: Any
    target_params: Any
    opt_state: Any


@dataclass(frozen=True)
class Dqn:
    """The algorithm; see `shared_replay.Algorithm`. Its actions are int32 from 0."""

    config: Config
    first_action: int  # the start of the action space
    network: Any  # a QNetwork; Any because flax annotates no result type for `apply`
    optimizer: optax.GradientTransformation

    def init(self, obs: jax.Array, key: jax.Array) -> Learned:
        """Initialises the networks with equal parameters."""
        params = self.network.init(key, obs)
        return Learned(params, params, self.optimizer.init(params))

    def act(self, learned: Learned, obs: jax.Array, progress: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the best action or, with probability epsilon, a random one."""
        explore_key, action_key = jax.random.split(key)
        decayed = jnp.minimum(progress / self.config.exploration_fraction, 1)
        epsilon = 1 + (self.config.epsilon - 1) * decayed
        values = self.network.apply(learned.params, obs)
        random = jax.random.randint(action_key, obs.shape[:1], 0, values.shape[-1])
        explores = jax.random.uniform(explore_key, obs.shape[:1]) < epsilon
        return jnp.where(explores, random, values.argmax(-1))

    def to_env(self, action: jax.Array) -> jax.Array:
        return action + self.first_action

    def loss(self, params: Any, target_params: Any, batch: Transition) -> jax.Array:
        """Returns the mean Huber loss of `[batch_size]` transitions, `[]` float32."""
        value = _of(batch.action, self.network.apply(params, batch.obs))
        best = self.network.apply(params, batch.next_obs).argmax(
            -1
        )  # double DQN: chosen by one network, evaluated by the other
        next_value = _of(best, self.network.apply(target_params, batch.next_obs))
        # Bootstrap unless the episode terminated: a truncated episode could have continued.
        reward = (1 - self.config.gamma) * batch.reward  # scales values to the magnitude of one reward
        target = reward + self.config.gamma * jnp.where(batch.terminated, 0, next_value)
        return optax.losses.huber_loss(value, jax.lax.stop_gradient(target)).mean()

    def descend(self, learned: Learned, batch: Transition, key: jax.Array) -> Learned:
        """Takes a gradient step, and moves the target network towards the parameters."""
        gradient = jax.grad(self.loss)(learned.params, learned.target_params, batch)
        change, opt_state = self.optimizer.update(gradient, learned.opt_state, learned.params)
        params = optax.apply_updates(learned.params, change)
        target_params = optax.incremental_update(params, learned.target_params, self.config.tau)
        return Learned(params, target_params, opt_state)


def _of(action: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, action[:, None], axis=-1)[:, 0]


def make_dqn(config: Config, envs: jaxvec.VectorEnv) -> Dqn:
    action_space = discrete_actions(config, envs, "DQN")
    lr = optax.linear_schedule(config.lr, 0, config.num_updates * config.num_steps * config.gradient_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(10), optax.adam(lr))
    return Dqn(config, int(action_space.start), QNetwork(int(action_space.n)), optimizer)


def run(config: Config) -> Result:
    with jaxvec.make(config.env, config.num_envs, num_workers=config.num_workers) as envs:
        return shared_training.run(config, envs, partial(shared_replay.train, make_dqn(config, envs), config))


def main(argv: Sequence[str] | None = None) -> Result:
    about = "Train DQN on a Gymnasium env with Box observations and Discrete actions."
    config = parse(Config, "dqn", about, argv)
    return finish(config, "DQN", "dqn", run(config))


if __name__ == "__main__":
    main()
