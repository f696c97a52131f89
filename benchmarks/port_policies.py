"""Trains policies on JAX ports by PPO, with the network of `jaxvec.examples.ppo`, for `benchmarks.ports`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from jaxvec._ports.port import advance, is_done
from jaxvec._ports.program import select
from jaxvec.examples.ppo import ActorCritic, Config, Obs, Steps, advantages
from jaxvec.normalize import RunningMeanStd
from jaxvec.ports import Port


def train(port: Port, space: Any, config: Config) -> Callable[[jax.Array, Any], Any]:
    """Trains on envs that are reset when an episode ends.

    Args:
        port: The port.
        space: Gymnasium's space of its actions.
        config: The options of PPO; those about folders and Python envs have no effect.

    Returns:
        The policy, a function `(key, obs) -> action` of one env, which samples actions.
    """
    network: Any = ActorCritic(space)
    num_gradients = config.num_epochs * config.num_minibatches
    rate = optax.linear_schedule(config.lr, 0, config.num_updates * num_gradients)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(rate))

    def reset(key: jax.Array) -> Any:
        return jax.vmap(port.reset)(jax.random.split(key, config.num_envs))

    def loss(params: Any, stats: Any, steps: Steps, advantage: Any, target: Any) -> jax.Array:
        outputs, value = network.apply(params, stats, steps.obs)
        log_prob, entropy = network.evaluate(outputs, steps.action)
        ratio = jnp.exp(log_prob - steps.log_prob)
        clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
        gain = jnp.minimum(ratio * advantage, clipped * advantage).mean()
        error = 0.5 * jnp.square(value - target).mean()
        return config.value_weight * error - gain - config.entropy_weight * entropy.mean()

    def update(carry: Any, key: jax.Array) -> tuple[Any, None]:
        learned, stats, playing = carry
        play_key, learn_key = jax.random.split(key)
        act = partial(network.apply, learned.params, stats)

        def play(playing: Any, key: jax.Array) -> tuple[Any, Steps]:
            state, obs = playing
            act_key, step_key, reset_key = jax.random.split(key, 3)
            outputs, value = act(_inputs(obs))
            action = network.sample(outputs, act_key)
            log_prob, _ = network.evaluate(outputs, action)
            keys = jax.random.split(step_key, config.num_envs)
            after, results = advance(port, keys, state, network.to_env(action))
            done = is_done(results)
            steps = Steps(
                *(_inputs(obs), action, log_prob, value, act(_inputs(results["obs"]))[1]),
                *(results["reward"], results["terminated"], done, jnp.zeros_like(value)),
            )
            return select(done, reset(reset_key), (after, results["obs"])), steps

        playing, steps = jax.lax.scan(play, playing, jax.random.split(play_key, config.num_steps))
        advantage = advantages(config, steps)
        target = advantage + steps.value
        batch = steps, (advantage - advantage.mean()) / (advantage.std() + 1e-8), target
        batch = jax.tree.map(lambda leaf: leaf.reshape(config.steps_per_update, *leaf.shape[2:]), batch)

        def descend(learned: TrainState, chosen: jax.Array) -> tuple[TrainState, None]:
            minibatch = jax.tree.map(partial(jnp.take, indices=chosen, axis=0), batch)
            return learned.apply_gradients(grads=jax.grad(loss)(learned.params, stats, *minibatch)), None

        order = jnp.argsort(jax.random.uniform(learn_key, (config.num_epochs, config.steps_per_update)))
        learned, _ = jax.lax.scan(descend, learned, order.reshape(num_gradients, -1))
        return (learned, stats.update(steps.obs.vector), playing), None

    @jax.jit
    def run(key: jax.Array) -> Any:
        key, reset_key, init_key = jax.random.split(key, 3)
        playing = reset(reset_key)
        obs = _inputs(playing[1])
        stats = RunningMeanStd.create(obs.vector[0], count=0)
        params = network.init(init_key, stats, obs)
        learned = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)
        keys = jax.random.split(key, config.num_updates)
        (learned, stats, _), _ = jax.lax.scan(update, (learned, stats, playing), keys)
        return learned.params, stats

    params, stats = run(jax.random.key(config.seed))

    def policy(key: jax.Array, obs: Any) -> Any:
        outputs, _ = network.apply(params, stats, _inputs(obs[None]))
        return network.to_env(network.sample(outputs, key))[0]

    return policy


def _inputs(obs: jax.Array) -> Obs:
    return Obs(obs.reshape(len(obs), -1).astype(jnp.float32))
