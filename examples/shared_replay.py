"""Learning from a replay buffer: step all envs, store the transitions, learn from a sample, repeat.

The buffer is flashbax's: arrays on the device, which the compiled loop writes to. The next observation of a
transition belongs to the *same episode*. At the end of an episode, `jaxvec.step` already returns the first
observation of the next one, so the buffer stores `info["final_obs"]` instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from shared_training import Options, Report, Returns, Trained, encode, option, repeat

import jaxvec
from jaxvec import _util
from jaxvec.normalize import RunningMeanStd

try:
    import flashbax
except ImportError as _error:
    raise ImportError(f"this example needs flashbax: {_util.install_command('replay')}") from _error


@dataclass(frozen=True)
class ReplayOptions(Options):
    """Options of the programs with a replay buffer."""

    num_envs: int = option(16, "number of envs")
    num_steps: int = option(32, "steps of each env between two reports")
    buffer_size: int = option(100_000, "transitions to store, rounded up to a multiple of num-envs")
    learn_after: int = option(1_000, "transitions before the first gradient step")
    gradient_steps: int = option(4, "gradient steps after each step of the envs")
    batch_size: int = option(128, "transitions per gradient step")
    gamma: float = option(0.99, "discount per step")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.batch_size <= self.learn_after <= self.buffer_size:
            raise ValueError("--batch-size must be at most --learn-after, and that at most --buffer-size")


class Transition(NamedTuple):
    """A step of one env. Observations are stored raw, and normalised with the latest statistics on use."""

    obs: jax.Array  # [obs_size] float32
    action: jax.Array  # [...], in the representation of the algorithm
    reward: jax.Array  # [] float32
    next_obs: jax.Array  # [obs_size] float32, of the same episode
    terminated: jax.Array  # [] bool; if false, the value of next_obs is bootstrapped


class Algorithm(Protocol):
    """Interface of an algorithm. `learned` is a pytree of its parameters and optimiser state."""

    def init(self, obs: jax.Array, key: jax.Array) -> Any:
        """Returns the initial `learned`, for observations `[num_envs, obs_size]`."""
        ...

    def act(self, learned: Any, obs: jax.Array, progress: jax.Array, key: jax.Array) -> jax.Array:
        """Chooses actions, `[num_envs, ...]`. `progress` is the completed fraction of training, `[]`."""
        ...

    def to_env(self, action: jax.Array) -> jax.Array: ...

    def descend(self, learned: Any, batch: Transition, key: jax.Array) -> Any:
        """Takes a gradient step from `[batch_size]` transitions."""
        ...


class State(NamedTuple):
    """State of training between two steps."""

    learned: Any
    buffer: Any
    obs_stats: RunningMeanStd  # [obs_size]
    handle: jaxvec.Handle
    obs: jax.Array  # [num_envs, obs_size] float32
    num_steps: jax.Array  # [] int32, steps of each env so far
    returns: Returns


@dataclass(frozen=True)
class Loop:
    """The parts that do not change during training."""

    algorithm: Algorithm
    options: ReplayOptions
    buffer: Any  # flashbax's functions for a buffer of `Transition`

    def play(self, state: State, key: jax.Array) -> State:
        """Steps the envs once, and stores the transitions."""
        progress = state.num_steps / (self.options.num_updates * self.options.num_steps)
        obs = state.obs_stats.normalize(state.obs)
        action = self.algorithm.act(state.learned, obs, progress, key)
        handle, timestep = jaxvec.step(state.handle, self.algorithm.to_env(action))
        obs, done = encode(timestep.obs), timestep.terminated | timestep.truncated
        within = jnp.where(done[:, None], encode(timestep.info["final_obs"]), obs)
        transitions = Transition(state.obs, action, timestep.reward, within, timestep.terminated)
        return state._replace(
            buffer=self.buffer.add(state.buffer, transitions),
            obs_stats=state.obs_stats.update(within),
            handle=handle,
            obs=obs,
            num_steps=state.num_steps + 1,
            returns=state.returns.add(done, timestep.info["episode_return"]),
        )

    def learn(self, state: State, key: jax.Array) -> Any:
        """Takes the gradient steps after a step of the envs, and returns the next `learned`."""

        def descend(learned: Any, key: jax.Array) -> tuple[Any, None]:
            sample_key, descend_key = jax.random.split(key)
            batch = self.buffer.sample(state.buffer, sample_key).experience
            obs, next_obs = map(state.obs_stats.normalize, (batch.obs, batch.next_obs))
            batch = batch._replace(obs=obs, next_obs=next_obs)
            return self.algorithm.descend(learned, batch, descend_key), None

        return jax.lax.scan(descend, state.learned, jax.random.split(key, self.options.gradient_steps))[0]

    def update(self, state: State, key: jax.Array) -> State:
        """Plays `num_steps` steps in every env, and learns after each."""

        def step(state: State, key: jax.Array) -> tuple[State, None]:
            play_key, learn_key = jax.random.split(key)
            state = self.play(state, play_key)
            learned = jax.lax.cond(
                self.buffer.can_sample(state.buffer),
                lambda: self.learn(state, learn_key),
                lambda: state.learned,
            )
            return state._replace(learned=learned), None

        return jax.lax.scan(step, state, jax.random.split(key, self.options.num_steps))[0]


def train(
    algorithm: Algorithm,
    options: ReplayOptions,
    report: Report,
    handle: jaxvec.Handle,
    timestep: jaxvec.TimeStep,
    key: jax.Array,
) -> Trained[State]:
    """Trains, starting at the `handle` and `timestep` of a reset; see `repeat`."""
    init_key, act_key, train_key = jax.random.split(key, 3)
    buffer = flashbax.make_item_buffer(
        max_length=-(-options.buffer_size // options.num_envs) * options.num_envs,
        min_length=options.learn_after,
        sample_batch_size=options.batch_size,
        add_batches=True,
    )
    obs = encode(timestep.obs)
    learned = algorithm.init(obs, init_key)
    action = algorithm.act(learned, obs, jnp.float32(0), act_key)  # only its shape and dtype matter
    one = Transition(obs[0], action[0], jnp.float32(0), obs[0], jnp.bool_(False))
    state = State(
        learned=learned,
        buffer=buffer.init(one),
        obs_stats=RunningMeanStd.create(obs[0], count=0),
        handle=handle,
        obs=obs,
        num_steps=jnp.int32(0),
        returns=Returns.create(),
    )
    return repeat(Loop(algorithm, options, buffer).update, state, train_key, options, report)
