"""SAC on Gymnasium envs, with the replay buffer and all of training in one `jax.jit`. The file is complete.

    python -m jaxvec.examples.sac
    python -m jaxvec.examples.sac --resume runs/NAME
    python -m jaxvec.examples.sac --evaluate runs/NAME

The program has two critics, a policy that is squashed to the action bounds, and a learned temperature. The
buffer is flashbax's: arrays on the device, which the compiled loop writes to. Each run has a folder in
`runs`. Ctrl-C saves, and ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from gymnasium import spaces

import jaxvec
from jaxvec.logging import Episodes, Options, Policy, TrainingRun, training
from jaxvec.normalize import RunningMeanStd

try:
    import flashbax
except ImportError as _error:
    raise (SystemExit if __name__ == "__main__" else ImportError)(
        'this example needs flashbax: pip install "flashbax>=0.1.3"'
    ) from _error


@dataclass(frozen=True)
class Config(Options):
    """Trains SAC on a Gymnasium env with Box observations and actions."""

    env: str = "Pendulum-v1"  # Gymnasium id of an env with Box observations and actions
    num_envs: int = 4  # number of envs
    total_steps: int = 24_000  # env steps, rounded up to a multiple of num-envs x num-steps
    num_steps: int = 200  # steps of each env between two reports
    buffer_size: int = 100_000  # transitions to store, rounded up to a multiple of num-envs
    learn_after: int = 1_000  # transitions before the first gradient step
    gradient_steps: int = 4  # gradient steps after each step of the envs
    batch_size: int = 128  # transitions per gradient step
    gamma: float = 0.99  # discount per step
    lr: float = 1e-3  # learning rate
    tau: float = 0.01  # step size of the target critics' update after each gradient step

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.batch_size <= self.learn_after <= self.buffer_size:
            raise ValueError("--batch-size must be at most --learn-after, and that at most --buffer-size")


class Mlp(nn.Module):
    """A network with two hidden layers."""

    num_outputs: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps `[..., num_inputs]` to `[..., num_outputs]`."""
        for _ in range(2):
            inputs = nn.relu(nn.Dense(256)(inputs))
        return nn.Dense(self.num_outputs)(inputs)


class Transition(NamedTuple):
    """A step of one env. Observations are stored raw, and normalised with the latest statistics on use."""

    obs: jax.Array  # [obs_size] float32
    action: jax.Array  # [size] float32; -1 and 1 are the bounds
    reward: jax.Array  # [] float32
    next_obs: jax.Array  # [obs_size] float32, of the same episode
    terminated: jax.Array  # [] bool; if false, the value of next_obs is bootstrapped


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


class State(NamedTuple):
    """State of training between two updates."""

    number: jax.Array  # [] int32, updates so far
    learned: Learned
    buffer: Any
    obs_stats: RunningMeanStd  # [obs_size]
    episodes: Episodes


class Playing(NamedTuple):
    """State of the running episodes between two updates."""

    handle: jaxvec.Handle
    obs: jax.Array  # [num_envs, obs_size] float32


def encode(obs: jax.Array) -> jax.Array:
    """Flattens observations, `[num_envs, ...]`, to `[num_envs, obs_size]` float32."""
    return obs.reshape(len(obs), -1).astype(jnp.float32)


class Agent:
    """The parts that do not change during training, and the functions that are compiled."""

    def __init__(self, config: Config, obs_space: Any, action_space: Any) -> None:
        if not isinstance(obs_space, spaces.Box) or not isinstance(action_space, spaces.Box):
            raise SystemExit(f"{config.env}: this SAC takes Box spaces, not {obs_space} and {action_space}")
        if not action_space.is_bounded():
            raise SystemExit(f"{config.env}: this SAC needs actions with bounds, not {action_space}")
        self.config: Config = config
        self.space: spaces.Box = action_space
        self.size: int = int(np.prod(action_space.shape))
        self.policy: Any = Mlp(2 * self.size)  # Any because flax annotates no result type for `apply`
        self.critic: Any = Mlp(1)
        self.optimizer: optax.GradientTransformation = optax.adam(config.lr)
        self.buffer: Any = flashbax.make_item_buffer(
            max_length=-(-config.buffer_size // config.num_envs) * config.num_envs,
            min_length=config.learn_after,
            sample_batch_size=config.batch_size,
            add_batches=True,
        )

    def begin(self, handle: jaxvec.Handle, timestep: jaxvec.TimeStep) -> tuple[State, Playing]:
        """Returns the initial states, given the `handle` and `timestep` of a reset."""
        obs = encode(timestep.obs)
        policy_key, critic_key = jax.random.split(jax.random.key(self.config.seed))
        inputs = jnp.concatenate([obs, jnp.zeros((len(obs), self.size))], axis=-1)
        critics = jax.vmap(self.critic.init, (0, None))(jax.random.split(critic_key), inputs)
        weights = Weights(self.policy.init(policy_key, obs), critics, jnp.float32(0))
        learned = Learned(weights, critics, self.optimizer.init(weights))
        one = Transition(obs[0], jnp.zeros(self.size), jnp.float32(0), obs[0], jnp.bool_(False))
        stats = RunningMeanStd.create(obs[0], count=0)
        state = State(jnp.int32(0), learned, self.buffer.init(one), stats, Episodes.create())
        return state, Playing(handle, obs)

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

    def act(self, policy: Any, obs: jax.Array, random: jax.Array, key: jax.Array) -> jax.Array:
        """Samples actions of the policy or, if `random`, uniform ones, `[num_envs, size]` float32."""
        random_key, policy_key = jax.random.split(key)
        action, _ = self.sample(policy, obs, policy_key)
        return jnp.where(random, jax.random.uniform(random_key, action.shape, minval=-1, maxval=1), action)

    def to_env(self, action: jax.Array) -> jax.Array:
        """Returns `[num_envs, ...]` in the env's units."""
        low, high = jnp.asarray(self.space.low), jnp.asarray(self.space.high)
        action = (low + high) / 2 + (high - low) / 2 * action.reshape(-1, *self.space.shape)
        return jnp.clip(action, low, high)  # rounding errors may exceed the bounds

    def play(
        self, state: State, playing: Playing, random: jax.Array, key: jax.Array
    ) -> tuple[State, Playing]:
        """Steps the envs once, and stores the transitions."""
        obs = state.obs_stats.normalize(playing.obs)
        action = self.act(state.learned.weights.policy, obs, random, key)
        handle, timestep = jaxvec.step(playing.handle, self.to_env(action))
        # At the end of an episode, timestep.obs is already the first one of the next episode.
        obs, within = encode(timestep.obs), encode(timestep.last_obs)
        transitions = Transition(playing.obs, action, timestep.reward, within, timestep.terminated)
        state = state._replace(
            buffer=self.buffer.add(state.buffer, transitions),
            obs_stats=state.obs_stats.update(within),
            episodes=state.episodes.add(timestep),
        )
        return state, Playing(handle, obs)

    def loss(self, weights: Weights, target_critics: Any, batch: Transition, key: jax.Array) -> Any:
        """Returns the loss of critics, policy and temperature for `[batch_size]` transitions, and metrics."""
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

        # The target entropy is -size nats.
        alpha_loss = -weights.log_alpha * jnp.mean(jax.lax.stop_gradient(log_prob) - self.size)
        metrics = {"value_loss": critic_loss, "policy_loss": policy_loss, "entropy": -log_prob.mean()}
        return critic_loss + policy_loss + alpha_loss, metrics | {"alpha": alpha}

    def learn(self, state: State, key: jax.Array) -> tuple[Learned, dict[str, jax.Array]]:
        """Takes the gradient steps after a step of the envs. Also returns the means of metrics, `[]`."""

        def descend(learned: Learned, key: jax.Array) -> tuple[Learned, Any]:
            sample_key, loss_key = jax.random.split(key)
            batch = self.buffer.sample(state.buffer, sample_key).experience
            obs, next_obs = map(state.obs_stats.normalize, (batch.obs, batch.next_obs))
            batch = batch._replace(obs=obs, next_obs=next_obs)
            fixed = learned.target_critics, batch, loss_key
            gradient, metrics = jax.grad(self.loss, has_aux=True)(learned.weights, *fixed)
            change, opt_state = self.optimizer.update(gradient, learned.opt_state, learned.weights)
            weights: Any = optax.apply_updates(learned.weights, change)
            target = optax.incremental_update(weights.critics, learned.target_critics, self.config.tau)
            return Learned(weights, target, opt_state), metrics

        keys = jax.random.split(key, self.config.gradient_steps)
        learned, metrics = jax.lax.scan(descend, state.learned, keys)
        return learned, jax.tree.map(jnp.mean, metrics)

    def update(self, state: State, playing: Playing) -> tuple[State, Playing, dict[str, jax.Array]]:
        """Plays `num_steps` steps in every env, and learns after each. Also returns metrics, `[]`."""
        first = state.number * self.config.num_steps

        def step(carry: tuple[State, Playing], now: Any) -> tuple[Any, Any]:
            number, (play_key, learn_key) = now
            random = (first + number) * self.config.num_envs < self.config.learn_after
            state, playing = self.play(*carry, random, play_key)
            ready = self.buffer.can_sample(state.buffer)
            none = dict.fromkeys(("value_loss", "policy_loss", "entropy", "alpha"), jnp.float32(jnp.nan))
            stay = lambda: (state.learned, none)  # noqa: E731
            learned, metrics = jax.lax.cond(ready, lambda: self.learn(state, learn_key), stay)
            return (state._replace(learned=learned), playing), metrics

        # The key depends only on the number of the update, so a resumed run equals an uninterrupted one.
        key = jax.random.fold_in(jax.random.key(self.config.seed + 1), state.number)
        keys = jax.random.split(key, (self.config.num_steps, 2))
        steps = jnp.arange(self.config.num_steps), keys
        (state, playing), metrics = jax.lax.scan(step, (state, playing), steps)
        metrics = jax.tree.map(jnp.nanmean, metrics) | state.episodes.means()
        return state._replace(number=state.number + 1), playing, metrics

    def best(self, saved: Any, _: None, obs: jax.Array, __: Any) -> tuple[None, jax.Array]:
        """Returns the means of the policy, given what `main` saves for `load` and evaluations."""
        obs = RunningMeanStd(**saved["stats"]).normalize(encode(obs))
        mean = jnp.split(self.policy.apply(saved["params"], obs), 2, axis=-1)[0]
        return None, self.to_env(jnp.tanh(mean))


def load(folder: str | Path) -> Policy:
    """Returns the policy of a run: a function from an observation to the best action."""
    return Policy(folder, Config, lambda *parts: Agent(*parts).best)


def main(argv: Sequence[str] | None = None) -> TrainingRun:
    with training(Config, argv, program="sac") as (config, run), run.make() as envs:
        agent = Agent(config, envs.single_observation_space, envs.single_action_space)
        params = lambda state: {"params": state.learned.weights.policy, "stats": vars(state.obs_stats)}  # noqa: E731
        run.train(envs, agent.begin, agent.update, params=params, act=agent.best)
    return run


if __name__ == "__main__":
    main()
