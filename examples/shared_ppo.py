"""Shared parts of `ppo_atari`, `ippo` and `impala`: policy, network, and the loss of PPO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from gymnasium import spaces
from shared_training import Options, option


@dataclass(frozen=True)
class Config(Options):
    num_epochs: int = option(4, "passes over the steps of an update")
    num_minibatches: int = option(8, "gradient steps per pass")
    lr: float = option(1e-3, "learning rate, falling linearly to 0")
    gamma: float = option(0.99, "discount per step")
    gae_lambda: float = option(0.95, "decay of the advantage estimate per step")
    clip: float = option(0.2, "PPO clip range")
    entropy_weight: float = option(0.005, "weight of the entropy bonus")
    value_weight: float = option(0.5, "weight of the value loss")
    max_grad_norm: float = option(0.5, "maximum norm of the gradient")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_epochs, self.num_minibatches) < 1:
            raise ValueError("the numbers of epochs and minibatches must be at least 1")
        if self.steps_per_update % self.num_minibatches:
            raise ValueError("--num-envs times --num-steps must be a multiple of --num-minibatches")


@dataclass(frozen=True)
class Categorical:
    """Policy for a `Discrete` space. The network returns logits; actions are `[...]` int32 from 0."""

    space: spaces.Discrete

    def sample(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, logits)

    def evaluate(self, logits: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the action's log-probability and the policy's entropy, `[...]` in nats."""
        log_probs = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
        return log_prob, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def to_env(self, action: jax.Array) -> jax.Array:
        return action + int(self.space.start)


class ActorCritic(nn.Module):
    """Separate networks for policy and value, with two hidden layers each."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[..., obs_size]` to logits `[..., num_actions]` and values `[...]`."""

        def network(num_outputs: int, scale: float) -> jax.Array:
            hidden = obs
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(hidden))
            return nn.Dense(num_outputs, kernel_init=nn.initializers.orthogonal(scale))(hidden)

        logits = network(self.num_actions, 0.01)  # small, so the initial policy is nearly uniform
        return logits, network(1, 1.0)[..., 0]


@dataclass(frozen=True)
class Agent:
    """The parts that do not change during training."""

    config: Config
    policy: Categorical
    network: Any  # a flax module; Any because flax annotates no result type for `apply`
    optimizer: optax.GradientTransformation


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Returns Adam with clipped gradients and a learning rate that decays to 0.

    It flattens all parameters into one vector, so there are fewer operations to compile and run.
    """
    lr = optax.linear_schedule(config.lr, 0, config.num_updates * config.num_epochs * config.num_minibatches)
    return optax.flatten(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(lr)))


def advantages(
    config: Config, reward: Any, terminated: Any, done: Any, *, value: jax.Array, next_value: jax.Array
) -> jax.Array:
    """Returns generalised advantages from arrays `[num_steps, num_envs]`, also of values after each step."""
    gamma, decay = config.gamma, config.gamma * config.gae_lambda
    # Bootstrap unless the episode terminated: a truncated episode could have continued.
    surprise = reward + gamma * jnp.where(terminated, 0, next_value) - value

    def add(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        advantage = now[0] + jnp.where(now[1], 0, decay * later)
        return advantage, advantage

    return jax.lax.scan(add, jnp.zeros_like(value[0]), (surprise, done), reverse=True)[1]


class Batch(NamedTuple):
    """Training data, `[num_steps, num_envs, ...]`, or a minibatch of it."""

    obs: jax.Array  # [...], inputs of the network
    action: jax.Array  # [...], samples of the policy
    log_prob: jax.Array  # float32
    advantage: jax.Array  # float32
    target: jax.Array  # float32, target of the value


def objective(
    config: Config, policy: Categorical, outputs: jax.Array, value: jax.Array, batch: Batch
) -> jax.Array:
    """Returns PPO's loss of the current outputs and values, `[]` float32."""
    log_prob, entropy = policy.evaluate(outputs, batch.action)
    ratio = jnp.exp(log_prob - batch.log_prob)
    clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    gain = jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
    error = 0.5 * jnp.square(value - batch.target)
    return jnp.mean(config.value_weight * error - gain - config.entropy_weight * entropy)


def standardize(advantage: jax.Array) -> jax.Array:
    """Scales advantages to mean 0 and standard deviation 1."""
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def shuffle(config: Config, key: jax.Array, count: int) -> jax.Array:
    """Returns indices up to `count`, each once per pass, `[gradient steps, minibatch]` int32."""
    order = jax.vmap(jax.random.permutation, (0, None))(jax.random.split(key, config.num_epochs), count)
    return order.reshape(config.num_epochs * config.num_minibatches, -1)


def descend_on(
    loss: Callable[[Any, jax.Array], jax.Array], agent: Any, learned: tuple[Any, Any], minibatches: jax.Array
) -> tuple[Any, Any]:
    """Takes a gradient step of `loss(params, indices)` per minibatch. Returns the next `learned`."""

    def step(learned: tuple[Any, Any], indices: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, opt_state = learned
        change, opt_state = agent.optimizer.update(jax.grad(loss)(params, indices), opt_state, params)
        return (optax.apply_updates(params, change), opt_state), None

    return jax.lax.scan(step, learned, minibatches)[0]


def descend(agent: Agent, params: Any, opt_state: Any, batch: Batch, key: jax.Array) -> tuple[Any, Any]:
    """Takes the gradient steps of an update. Returns the next parameters and optimiser state."""
    config = agent.config
    batch = batch._replace(advantage=standardize(batch.advantage))
    rows: Batch = jax.tree.map(lambda leaf: leaf.reshape(config.steps_per_update, *leaf.shape[2:]), batch)

    def loss(params: Any, chosen: jax.Array) -> jax.Array:
        minibatch: Batch = jax.tree.map(partial(jnp.take, indices=chosen, axis=0), rows)
        outputs, value = agent.network.apply(params, minibatch.obs)
        return objective(config, agent.policy, outputs, value, minibatch)

    order = jnp.argsort(jax.random.uniform(key, (config.num_epochs, config.steps_per_update)))
    chosen = order.reshape(config.num_epochs * config.num_minibatches, -1)
    return descend_on(loss, agent, (params, opt_state), chosen)
