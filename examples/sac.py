"""SAC on Gymnasium envs, with the replay buffer and all of training in one `jax.jit`.

    python examples/sac.py

The program has two critics, a policy that is squashed to the action bounds, and a learned temperature.
`shared_replay.py` contains the loop of env steps, buffer and gradient steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import shared_replay
import shared_training
from flax import linen as nn
from gymnasium import spaces
from shared_replay import ReplayOptions, Transition
from shared_training import Result, finish, option, parse

import jaxvec


@dataclass(frozen=True)
class Config(ReplayOptions):
    env: str = option("Pendulum-v1", "Gymnasium id of an env with Box observations and actions")
    num_envs: int = option(4, "number of envs")
    num_steps: int = option(200, "steps of each env between two reports")
    total_steps: int = option(24_000, "env steps, rounded up to whole reports")
    lr: float = option(1e-3, "learning rate")
    tau: float = option(0.01, "step size of the target critics' update after each gradient step")


class Mlp(nn.Module):
    """A network with two hidden layers."""

    num_outputs: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps `[..., num_inputs]` to `[..., num_outputs]`."""
        for _ in range(2):
            inputs = nn.relu(nn.Dense(256)(inputs))
        return nn.Dense(self.num_outputs)(inputs)


class Weights(NamedTuple):
    """Parameters that Adam updates."""

    policy: Any
    critics: Any  # parameters of two networks, stacked on a first axis
    log_alpha: jax.Array  # [] float32, log of the temperature, the weight of the entropy


class Learned(NamedTuple):
    """Parameters, target parameters and optimiser state."""

    weights: Weights
    target_critics: Any
    opt_state: Any


@dataclass(frozen=True)
class Sac:
    """The algorithm; see `shared_replay.Algorithm`. Its actions are float32; -1 and 1 are the bounds."""

    config: Config
    space: spaces.Box  # the action space
    policy: Any  # an Mlp; Any because flax annotates no result type for `apply`
    critic: Any
    optimizer: optax.GradientTransformation

    def init(self, obs: jax.Array, key: jax.Array) -> Learned:
        policy_key, critic_key = jax.random.split(key)
        size = int(np.prod(self.space.shape))
        inputs = jnp.concatenate([obs, jnp.zeros((len(obs), size))], axis=-1)
        critics = jax.vmap(self.critic.init, (0, None))(jax.random.split(critic_key), inputs)
        weights = Weights(self.policy.init(policy_key, obs), critics, jnp.float32(0))
        return Learned(weights, critics, self.optimizer.init(weights))

    def sample(self, policy: Any, obs: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Samples actions, `[..., size]`, and returns them with their log-densities, `[...]` in nats."""
        mean, log_std = jnp.split(self.policy.apply(policy, obs), 2, axis=-1)
        log_std = jnp.clip(log_std, -5, 2)
        drawn = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        density = jax.scipy.stats.norm.logpdf(drawn, mean, jnp.exp(log_std))
        # Log of tanh's derivative, 1 - tanh(x)^2, in a form without cancellation.
        slope = 2 * (np.log(2) - drawn - jax.nn.softplus(-2 * drawn))
        return jnp.tanh(drawn), (density - slope).sum(-1)

    def values(self, critics: Any, obs: jax.Array, action: jax.Array) -> jax.Array:
        inputs = jnp.concatenate([obs, action], axis=-1)
        return jax.vmap(self.critic.apply, (0, None))(critics, inputs)[..., 0]

    def act(self, learned: Learned, obs: jax.Array, progress: jax.Array, key: jax.Array) -> jax.Array:
        """Samples actions of the policy, or uniform ones before learning starts."""
        random_key, policy_key = jax.random.split(key)
        action, _ = self.sample(learned.weights.policy, obs, policy_key)
        random = jax.random.uniform(random_key, action.shape, minval=-1, maxval=1)
        return jnp.where(progress * self.config.total_steps < self.config.learn_after, random, action)

    def to_env(self, action: jax.Array) -> jax.Array:
        """Returns `[num_envs, ...]` in the env's units."""
        low, high = jnp.asarray(self.space.low), jnp.asarray(self.space.high)
        action = (low + high) / 2 + (high - low) / 2 * action.reshape(-1, *self.space.shape)
        return jnp.clip(action, low, high)  # rounding errors may exceed the bounds

    def loss(self, weights: Weights, target_critics: Any, batch: Transition, key: jax.Array) -> jax.Array:
        """Returns the summed losses of critics, policy and temperature, for `[batch_size]` transitions."""
        next_key, policy_key = jax.random.split(key)
        fixed = jax.lax.stop_gradient(weights)
        alpha = jnp.exp(fixed.log_alpha)

        next_action, next_log_prob = self.sample(fixed.policy, batch.next_obs, next_key)
        next_value = self.values(target_critics, batch.next_obs, next_action).min(0) - alpha * next_log_prob
        # Bootstrap unless the episode terminated: a truncated episode could have continued.
        target = batch.reward + self.config.gamma * jnp.where(batch.terminated, 0, next_value)
        error = self.values(weights.critics, batch.obs, batch.action) - target
        critic_loss = 0.5 * jnp.square(error).mean(1).sum()

        action, log_prob = self.sample(weights.policy, batch.obs, policy_key)
        value = self.values(fixed.critics, batch.obs, action).min(0)
        policy_loss = jnp.mean(alpha * log_prob - value)

        size = int(np.prod(self.space.shape))  # the target entropy is -size nats
        alpha_loss = -weights.log_alpha * jnp.mean(jax.lax.stop_gradient(log_prob) - size)
        return critic_loss + policy_loss + alpha_loss

    def descend(self, learned: Learned, batch: Transition, key: jax.Array) -> Learned:
        """Takes a gradient step, and moves the target critics towards the critics."""
        gradient = jax.grad(self.loss)(learned.weights, learned.target_critics, batch, key)
        change, opt_state = self.optimizer.update(gradient, learned.opt_state, learned.weights)
        weights: Any = optax.apply_updates(learned.weights, change)
        target = optax.incremental_update(weights.critics, learned.target_critics, self.config.tau)
        return Learned(weights, target, opt_state)


def make_sac(config: Config, envs: jaxvec.VectorEnv) -> Sac:
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(obs_space, spaces.Box) or not isinstance(action_space, spaces.Box):
        raise SystemExit(f"{config.env}: this SAC takes Box spaces, not {obs_space} and {action_space}")
    if not action_space.is_bounded():
        raise SystemExit(f"{config.env}: this SAC needs actions with bounds, not {action_space}")
    size = int(np.prod(action_space.shape))
    return Sac(config, action_space, Mlp(2 * size), Mlp(1), optax.adam(config.lr))


def run(config: Config) -> Result:
    with jaxvec.make(config.env, config.num_envs, num_workers=config.num_workers) as envs:
        return shared_training.run(config, envs, partial(shared_replay.train, make_sac(config, envs), config))


def main(argv: Sequence[str] | None = None) -> Result:
    about = "Train SAC on a Gymnasium env with Box observations and actions."
    config = parse(Config, "sac", about, argv)
    return finish(config, "SAC", "sac", run(config))


if __name__ == "__main__":
    main()
