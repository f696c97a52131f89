"""PPO with a memory (GRU) on Gymnasium envs, with all of training in one `jax.jit`. The file is complete.

    python -m jaxvec.examples.ppo_recurrent
    python -m jaxvec.examples.ppo_recurrent --entries 0,1,2,3

With the first command, the agent observes only the positions of cart and pole, so it needs a memory to
estimate their velocities. The memory is cleared at the end of an episode. Each run has a folder in `runs`.
Ctrl-C saves, and ends the run; `--resume runs/NAME` continues it.
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


@dataclass(frozen=True)
class Config(Options):
    """Trains PPO with a GRU on a partially observed Gymnasium env."""

    entries: tuple[int, ...] = (0, 2)  # indices of the observation entries that the agent sees, from 0
    num_units: int = 64  # size of the memory
    total_steps: int = 524_288  # env steps, rounded up to a multiple of num-envs x num-steps
    num_epochs: int = 4  # passes over the steps of an update
    num_minibatches: int = 8  # gradient steps per pass
    lr: float = 1e-3  # learning rate, falling linearly to 0
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95  # decay of the advantage estimate per step
    clip: float = 0.2  # PPO clip range
    entropy_weight: float = 0.005  # weight of the entropy bonus
    value_weight: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # maximum norm of the gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_epochs, self.num_minibatches) < 1 or self.num_envs % self.num_minibatches:
            raise ValueError(
                "--num-envs must be a multiple of --num-minibatches, because minibatches contain whole envs"
            )


class RecurrentActorCritic(nn.Module):
    """A dense layer, a GRU, and a dense layer each for policy and value."""

    num_actions: int
    num_units: int

    @nn.compact
    def __call__(self, memory: jax.Array, obs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Maps memories `[n, num_units]` and `[n, obs_size]` to the next memories, logits, values `[n]`."""
        hidden = nn.tanh(nn.Dense(self.num_units)(obs))
        memory, hidden = nn.GRUCell(self.num_units)(memory, hidden)
        logits = nn.Dense(self.num_actions, kernel_init=nn.initializers.orthogonal(0.01))(hidden)
        return memory, logits, nn.Dense(1)(hidden)[..., 0]


class State(NamedTuple):
    """State of training between two updates."""

    number: jax.Array  # [] int32, updates so far
    params: Any
    opt_state: Any
    obs_stats: RunningMeanStd  # [obs_size]
    episodes: Episodes


class Playing(NamedTuple):
    """State of the running episodes between two updates."""

    handle: jaxvec.Handle
    obs: jax.Array  # [num_envs, obs_size] float32
    memory: jax.Array  # [num_envs, num_units] float32


class Steps(NamedTuple):
    """Data of one step of all envs. `collect` stacks them to `[num_steps, num_envs, ...]`."""

    raw: jax.Array  # [num_envs, obs_size] float32
    obs: jax.Array  # [num_envs, obs_size] float32, normalised
    action: jax.Array  # [num_envs] int32
    log_prob: jax.Array  # [num_envs] float32
    value: jax.Array  # [num_envs] float32
    next_value: jax.Array  # [num_envs] float32, of the same episode
    reward: jax.Array  # [num_envs] float32
    terminated: jax.Array  # [num_envs] bool
    done: jax.Array  # [num_envs] bool


def empty(memory: jax.Array, done: jax.Array) -> jax.Array:
    """Clears the memories, `[n, num_units]`, of envs with `done`, `[n]`."""
    return jnp.where(done[:, None], 0, memory)


def evaluate(logits: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the action's log-probability and the policy's entropy, `[...]` in nats."""
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
    return log_prob, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def advantages(config: Config, steps: Steps) -> jax.Array:
    """Returns generalised advantages, `[num_steps, num_envs]` float32."""
    reward = (1 - config.gamma) * steps.reward  # scales values to the magnitude of one reward
    # Bootstrap unless the episode terminated: a truncated episode could have continued.
    surprise = reward + config.gamma * jnp.where(steps.terminated, 0, steps.next_value) - steps.value

    def add(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        advantage = now[0] + jnp.where(now[1], 0, config.gamma * config.gae_lambda * later)
        return advantage, advantage

    return jax.lax.scan(add, jnp.zeros_like(steps.value[0]), (surprise, steps.done), reverse=True)[1]


class Agent:
    """The parts that do not change during training, and the functions that are compiled."""

    def __init__(self, config: Config, obs_space: Any, action_space: Any) -> None:
        if not isinstance(obs_space, spaces.Box) or len(obs_space.shape) != 1:
            raise SystemExit(f"{config.env}: this PPO takes observations with one axis, not {obs_space}")
        if not isinstance(action_space, spaces.Discrete):
            raise SystemExit(f"{config.env}: this PPO takes Discrete actions, not {action_space}")
        last, size = max(config.entries), obs_space.shape[0]
        if last >= size:
            raise SystemExit(f"{config.env}: --entries {last} is out of range for {size} entries")
        self.config: Config = config
        self.first_action: int = int(action_space.start)
        # Any because flax annotates no result type for `apply`.
        self.network: Any = RecurrentActorCritic(int(action_space.n), config.num_units)
        num_steps = config.num_updates * config.num_epochs * config.num_minibatches
        adam = optax.adam(optax.linear_schedule(config.lr, 0, num_steps))
        clipped = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam)
        # All parameters in one vector: there are fewer operations to compile and run.
        self.optimizer: optax.GradientTransformation = optax.flatten(clipped)

    def encode(self, obs: jax.Array) -> jax.Array:
        """Selects the visible entries, `[num_envs, obs_size]` float32."""
        return obs[:, jnp.array(self.config.entries)].astype(jnp.float32)

    def begin(self, handle: jaxvec.Handle, timestep: jaxvec.TimeStep) -> tuple[State, Playing]:
        """Returns the initial states, given the `handle` and `timestep` of a reset."""
        obs = self.encode(timestep.obs)
        memory = jnp.zeros((len(obs), self.config.num_units))
        params = self.network.init(jax.random.key(self.config.seed), memory, obs)
        stats, opt_state = RunningMeanStd.create(obs[0], count=0), self.optimizer.init(params)
        state = State(jnp.int32(0), params, opt_state, stats, Episodes.create())
        return state, Playing(handle, obs, memory)

    def collect(self, state: State, playing: Playing, key: jax.Array) -> tuple[Playing, Episodes, Steps]:
        """Plays `num_steps` steps in every env."""
        normalize = state.obs_stats.normalize

        def play(carry: Any, key: jax.Array) -> tuple[Any, Steps]:
            (handle, raw, memory), episodes = carry
            obs = normalize(raw)
            memory, logits, value = self.network.apply(state.params, memory, obs)
            action = jax.random.categorical(key, logits)
            log_prob, _ = evaluate(logits, action)
            handle, timestep = jaxvec.step(handle, action + self.first_action)
            # At the end of an episode, timestep.obs is already the first one of the next episode.
            next_raw, within = self.encode(timestep.obs), self.encode(timestep.last_obs)
            _, _, next_value = self.network.apply(state.params, memory, normalize(within))
            ends = timestep.terminated, timestep.done
            steps = Steps(raw, obs, action, log_prob, value, next_value, timestep.reward, *ends)
            return (Playing(handle, next_raw, empty(memory, timestep.done)), episodes.add(timestep)), steps

        keys = jax.random.split(key, self.config.num_steps)
        (playing, episodes), steps = jax.lax.scan(play, (playing, state.episodes), keys)
        return playing, episodes, steps

    def outputs(self, params: Any, memory: jax.Array, steps: Steps) -> tuple[jax.Array, jax.Array]:
        """Returns logits and values of whole sequences, given the memory before their first steps."""

        def remember(memory: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
            memory, logits, value = self.network.apply(params, memory, now[0])
            return empty(memory, now[1]), (logits, value)

        return jax.lax.scan(remember, memory, (steps.obs, steps.done))[1]

    def loss(self, params: Any, memory: jax.Array, steps: Steps, advantage: Any, target: Any) -> Any:
        """Returns PPO's loss of whole sequences, `[]` float32, and its parts."""
        logits, value = self.outputs(params, memory, steps)
        log_prob, entropy = evaluate(logits, steps.action)
        log_ratio, clip = log_prob - steps.log_prob, self.config.clip
        ratio = jnp.exp(log_ratio)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage).mean()
        error, entropy = 0.5 * jnp.square(value - target).mean(), entropy.mean()
        total = self.config.value_weight * error - gain - self.config.entropy_weight * entropy
        metrics = {"policy_loss": -gain, "value_loss": error, "entropy": entropy}
        return total, metrics | {"kl": jnp.mean(ratio - 1 - log_ratio)}

    def update(self, state: State, playing: Playing) -> tuple[State, Playing, dict[str, jax.Array]]:
        """Collects steps and learns from them, once. Also returns metrics, `[]` float32.

        A minibatch contains all steps of some envs, to recompute their memories.
        """
        config, memory = self.config, playing.memory
        # The key depends only on the number of the update, so a resumed run equals an uninterrupted one.
        play_key, learn_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), state.number))
        playing, episodes, steps = self.collect(state, playing, play_key)
        advantage = advantages(config, steps)
        target = advantage + steps.value
        scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

        def descend(carry: tuple[Any, Any], envs: jax.Array) -> tuple[tuple[Any, Any], Any]:
            params, opt_state = carry
            minibatch = jax.tree.map(lambda leaf: leaf[:, envs], (steps, scaled, target))
            gradient, metrics = jax.grad(self.loss, has_aux=True)(params, memory[envs], *minibatch)
            change, opt_state = self.optimizer.update(gradient, opt_state, params)
            return (optax.apply_updates(params, change), opt_state), metrics

        order = jnp.argsort(jax.random.uniform(learn_key, (config.num_epochs, config.num_envs)))
        chosen = order.reshape(config.num_epochs * config.num_minibatches, -1)  # [gradient steps, envs]
        (params, opt_state), metrics = jax.lax.scan(descend, (state.params, state.opt_state), chosen)
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["explained_variance"] = 1 - jnp.var(advantage) / (jnp.var(target) + 1e-8)
        obs_stats = state.obs_stats.update(steps.raw)
        state = State(state.number + 1, params, opt_state, obs_stats, episodes)
        return state, playing, metrics | episodes.means()

    def best(self, saved: Any, memory: Any, obs: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the next memory and the best actions, from what `main` saves for `load`."""
        obs = RunningMeanStd(**saved["stats"]).normalize(self.encode(obs))
        memory = jnp.zeros((len(obs), self.config.num_units)) if memory is None else memory
        memory, logits, _ = self.network.apply(saved["params"], memory, obs)
        return memory, logits.argmax(-1) + self.first_action


def load(folder: str | Path) -> Policy:
    """Returns the policy of a run: a function from an observation to the best action."""
    return Policy(folder, Config, lambda *parts: Agent(*parts).best)


def main(argv: Sequence[str] | None = None) -> TrainingRun:
    with training(Config, argv, program="ppo_recurrent") as (config, run), run.make() as envs:
        agent = Agent(config, envs.single_observation_space, envs.single_action_space)
        params = lambda state: {"params": state.params, "stats": vars(state.obs_stats)}  # noqa: E731
        run.train(envs, agent.begin, agent.update, params=params, act=agent.best)
    return run


if __name__ == "__main__":
    main()
