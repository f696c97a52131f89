"""DQN on Gymnasium envs, with the replay buffer and all of training in one `jax.jit`. The file is complete.

    python -m jaxvec.examples.dqn
    python -m jaxvec.examples.dqn --resume runs/NAME
    python -m jaxvec.examples.dqn --evaluate runs/NAME

This is double DQN with a slowly updated target network and normalised layers. Without them, values grew
without bound. The buffer is flashbax's: arrays on the device, which the compiled loop writes to. Each run has
a folder in `runs`. Ctrl-C saves, and ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
    """Trains DQN on a Gymnasium env with Box observations and Discrete actions."""

    num_envs: int = 16  # number of envs
    total_steps: int = 160_000  # env steps, rounded up to a multiple of num-envs x num-steps
    num_steps: int = 32  # steps of each env between two reports
    buffer_size: int = 200_000  # transitions to store; with fewer, the policy forgets early failures
    learn_after: int = 1_000  # transitions before the first gradient step
    gradient_steps: int = 8  # gradient steps after each step of the envs
    batch_size: int = 128  # transitions per gradient step
    gamma: float = 0.99  # discount per step
    lr: float = 1e-4  # learning rate, falling linearly to 0
    exploration_fraction: float = 0.1  # fraction of training in which epsilon decays from 1
    epsilon: float = 0.02  # exploration rate after this decay
    tau: float = 0.01  # step size of the target network's update after each gradient step

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.batch_size <= self.learn_after <= self.buffer_size:
            raise ValueError("--batch-size must be at most --learn-after, and that at most --buffer-size")


class QNetwork(nn.Module):
    """Two hidden layers, each normalised."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Maps `[..., obs_size]` to the actions' values `[..., num_actions]`."""
        for _ in range(2):
            obs = nn.relu(nn.LayerNorm()(nn.Dense(128)(obs)))
        return nn.Dense(self.num_actions)(obs)


class Transition(NamedTuple):
    """A step of one env. Observations are stored raw, and normalised with the latest statistics on use."""

    obs: jax.Array  # [obs_size] float32
    action: jax.Array  # [] int32, from 0
    reward: jax.Array  # [] float32
    next_obs: jax.Array  # [obs_size] float32, of the same episode
    terminated: jax.Array  # [] bool; if false, the value of next_obs is bootstrapped


class Learned(NamedTuple):
    """Parameters and optimiser state."""

    params: Any
    target_params: Any
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


def chosen(action: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the values `[n]` of actions `[n]` from `[n, num_actions]`."""
    return jnp.take_along_axis(values, action[:, None], axis=-1)[:, 0]


class Agent:
    """The parts that do not change during training, and the functions that are compiled."""

    def __init__(self, config: Config, obs_space: Any, action_space: Any) -> None:
        if not isinstance(obs_space, spaces.Box) or not isinstance(action_space, spaces.Discrete):
            raise SystemExit(
                f"{config.env}: this DQN takes Box observations and Discrete actions, not {obs_space} and "
                f"{action_space}"
            )
        self.config: Config = config
        self.first_action: int = int(action_space.start)
        self.network: Any = QNetwork(int(action_space.n))  # Any: flax annotates no result type for `apply`
        num_steps = config.num_updates * config.num_steps * config.gradient_steps
        adam = optax.adam(optax.linear_schedule(config.lr, 0, num_steps))
        self.optimizer: optax.GradientTransformation = optax.chain(optax.clip_by_global_norm(10), adam)
        self.buffer: Any = flashbax.make_item_buffer(
            max_length=-(-config.buffer_size // config.num_envs) * config.num_envs,
            min_length=config.learn_after,
            sample_batch_size=config.batch_size,
            add_batches=True,
        )

    def begin(self, handle: jaxvec.Handle, timestep: jaxvec.TimeStep) -> tuple[State, Playing]:
        """Returns the initial states, given the `handle` and `timestep` of a reset."""
        obs = encode(timestep.obs)
        params = self.network.init(jax.random.key(self.config.seed), obs)
        one = Transition(obs[0], jnp.int32(0), jnp.float32(0), obs[0], jnp.bool_(False))
        stats, learned = RunningMeanStd.create(obs[0], count=0), self.optimizer.init(params)
        learned = Learned(params, params, learned)
        state = State(jnp.int32(0), learned, self.buffer.init(one), stats, Episodes.create())
        return state, Playing(handle, obs)

    def act(self, params: Any, obs: jax.Array, progress: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the best actions or, with probability epsilon, random ones, `[num_envs]` int32.

        `progress` is the completed fraction of training.
        """
        explore_key, action_key = jax.random.split(key)
        decayed = jnp.minimum(progress / self.config.exploration_fraction, 1)
        epsilon = 1 + (self.config.epsilon - 1) * decayed
        values = self.network.apply(params, obs)
        random = jax.random.randint(action_key, obs.shape[:1], 0, values.shape[-1])
        explores = jax.random.uniform(explore_key, obs.shape[:1]) < epsilon
        return jnp.where(explores, random, values.argmax(-1))

    def play(
        self, state: State, playing: Playing, progress: jax.Array, key: jax.Array
    ) -> tuple[State, Playing]:
        """Steps the envs once, and stores the transitions."""
        action = self.act(state.learned.params, state.obs_stats.normalize(playing.obs), progress, key)
        handle, timestep = jaxvec.step(playing.handle, action + self.first_action)
        # At the end of an episode, timestep.obs is already the first one of the next episode.
        obs, within = encode(timestep.obs), encode(timestep.last_obs)
        transitions = Transition(playing.obs, action, timestep.reward, within, timestep.terminated)
        state = state._replace(
            buffer=self.buffer.add(state.buffer, transitions),
            obs_stats=state.obs_stats.update(within),
            episodes=state.episodes.add(timestep),
        )
        return state, Playing(handle, obs)

    def loss(self, params: Any, target_params: Any, batch: Transition) -> jax.Array:
        """Returns the mean Huber loss of `[batch_size]` transitions, `[]` float32."""
        value = chosen(batch.action, self.network.apply(params, batch.obs))
        # Double DQN: the next action is chosen by one network, and evaluated by the other.
        best = self.network.apply(params, batch.next_obs).argmax(-1)
        next_value = chosen(best, self.network.apply(target_params, batch.next_obs))
        # Bootstrap unless the episode terminated: a truncated episode could have continued.
        reward = (1 - self.config.gamma) * batch.reward  # scales values to the magnitude of one reward
        target = reward + self.config.gamma * jnp.where(batch.terminated, 0, next_value)
        return optax.losses.huber_loss(value, jax.lax.stop_gradient(target)).mean()

    def learn(self, state: State, key: jax.Array) -> tuple[Learned, jax.Array]:
        """Takes the gradient steps after a step of the envs. Also returns the mean loss, `[]`."""

        def descend(learned: Learned, key: jax.Array) -> tuple[Learned, jax.Array]:
            batch = self.buffer.sample(state.buffer, key).experience
            obs, next_obs = map(state.obs_stats.normalize, (batch.obs, batch.next_obs))
            batch = batch._replace(obs=obs, next_obs=next_obs)
            loss, gradient = jax.value_and_grad(self.loss)(learned.params, learned.target_params, batch)
            change, opt_state = self.optimizer.update(gradient, learned.opt_state, learned.params)
            params = optax.apply_updates(learned.params, change)
            target_params = optax.incremental_update(params, learned.target_params, self.config.tau)
            return Learned(params, target_params, opt_state), loss

        keys = jax.random.split(key, self.config.gradient_steps)
        learned, losses = jax.lax.scan(descend, state.learned, keys)
        return learned, losses.mean()

    def update(self, state: State, playing: Playing) -> tuple[State, Playing, dict[str, jax.Array]]:
        """Plays `num_steps` steps in every env, and learns after each. Also returns metrics, `[]`."""
        first = state.number * self.config.num_steps
        total = self.config.num_updates * self.config.num_steps

        def step(carry: tuple[State, Playing], now: Any) -> tuple[Any, jax.Array]:
            number, (play_key, learn_key) = now
            state, playing = self.play(*carry, (first + number) / total, play_key)
            ready = self.buffer.can_sample(state.buffer)
            stay = lambda: (state.learned, jnp.float32(jnp.nan))  # noqa: E731
            learned, loss = jax.lax.cond(ready, lambda: self.learn(state, learn_key), stay)
            return (state._replace(learned=learned), playing), loss

        # The key depends only on the number of the update, so a resumed run equals an uninterrupted one.
        key = jax.random.fold_in(jax.random.key(self.config.seed + 1), state.number)
        keys = jax.random.split(key, (self.config.num_steps, 2))
        steps = jnp.arange(self.config.num_steps), keys
        (state, playing), losses = jax.lax.scan(step, (state, playing), steps)
        metrics = {"value_loss": jnp.nanmean(losses)} | state.episodes.means()
        return state._replace(number=state.number + 1), playing, metrics

    def best(self, saved: Any, _: None, obs: jax.Array, __: Any) -> tuple[None, jax.Array]:
        """Returns the best actions, from what `main` saves for `load`."""
        stats = RunningMeanStd(**saved["stats"])
        values = self.network.apply(saved["params"], stats.normalize(encode(obs)))
        return None, values.argmax(-1) + self.first_action


def load(folder: str | Path) -> Policy:
    """Returns the policy of a run: a function from an observation to the best action."""
    return Policy(folder, Config, lambda *parts: Agent(*parts).best)


def main(argv: Sequence[str] | None = None) -> TrainingRun:
    with training(Config, argv, program="dqn") as (config, run), run.make() as envs:
        agent = Agent(config, envs.single_observation_space, envs.single_action_space)
        params = lambda state: {"params": state.learned.params, "stats": vars(state.obs_stats)}  # noqa: E731
        run.train(envs, agent.begin, agent.update, params=params, act=agent.best)
    return run


if __name__ == "__main__":
    main()
