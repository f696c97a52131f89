"""PPO with a memory (GRU) on Gymnasium envs, with all of training in one `jax.jit`.

    python examples/ppo_recurrent.py
    python examples/ppo_recurrent.py --entries 0,1,2,3

With the first command, the agent observes only the positions of cart and pole, so it needs a memory to
estimate their velocities. The memory is cleared at the end of an episode. The shared parts of PPO are
imported from `shared_ppo.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import shared_ppo
import shared_training
from flax import linen as nn
from gymnasium import spaces
from shared_ppo import Batch, Categorical
from shared_training import Report, Result, Returns, Trained, finish, option, parse, repeat

import jaxvec
from jaxvec.normalize import RunningMeanStd


@dataclass(frozen=True)
class Config(shared_ppo.Config):
    entries: str = option("0,2", "indices of the observation entries that the agent sees, from 0")
    num_units: int = option(64, "size of the memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_envs % self.num_minibatches:
            raise ValueError(
                "--num-envs must be a multiple of --num-minibatches, because minibatches contain whole envs"
            )
        if not all(entry.strip().isdecimal() for entry in self.entries.split(",")):
            raise ValueError(f"--entries must be comma-separated numbers, not {self.entries!r}")


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


@dataclass(frozen=True)
class Agent:
    """The parts that do not change during training."""

    config: Config
    entries: tuple[int, ...]
    policy: Categorical
    network: Any  # a RecurrentActorCritic; Any because flax annotates no result type for `apply`
    optimizer: optax.GradientTransformation

    def encode(self, obs: jax.Array) -> jax.Array:
        """Selects the visible entries, `[num_envs, obs_size]` float32."""
        return obs[:, jnp.array(self.entries)].astype(jnp.float32)


def make_agent(config: Config, envs: jaxvec.VectorEnv) -> Agent:
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(obs_space, spaces.Box) or len(obs_space.shape) != 1:
        raise SystemExit(f"{config.env}: this PPO takes observations with one axis, not {obs_space}")
    if not isinstance(action_space, spaces.Discrete):
        raise SystemExit(f"{config.env}: this PPO takes Discrete actions, not {action_space}")
    entries = tuple(map(int, config.entries.split(",")))
    if max(entries) >= obs_space.shape[0]:
        raise SystemExit(
            f"{config.env}: --entries {max(entries)} is out of range for {obs_space.shape[0]} entries"
        )
    network = RecurrentActorCritic(int(action_space.n), config.num_units)
    return Agent(config, entries, Categorical(action_space), network, shared_ppo.make_optimizer(config))


class State(NamedTuple):
    """State of training between two updates."""

    params: Any
    opt_state: Any
    obs_stats: RunningMeanStd  # [obs_size]
    handle: jaxvec.Handle
    obs: jax.Array  # [num_envs, obs_size] float32
    memory: jax.Array  # [num_envs, num_units] float32
    returns: Returns


class Steps(NamedTuple):
    """Data of one step of all envs. `collect` stacks them to `[num_steps, num_envs, ...]`."""

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


def collect(agent: Agent, state: State, key: jax.Array) -> tuple[State, Steps]:
    normalize = state.obs_stats.normalize

    def play(carry: Any, key: jax.Array) -> tuple[Any, tuple[Steps, jax.Array, jax.Array]]:
        handle, raw, memory = carry
        obs = normalize(raw)
        memory, logits, value = agent.network.apply(state.params, memory, obs)
        action = agent.policy.sample(logits, key)
        log_prob, _ = agent.policy.evaluate(logits, action)
        handle, timestep = jaxvec.step(handle, agent.policy.to_env(action))
        next_raw, done = agent.encode(timestep.obs), timestep.terminated | timestep.truncated
        # At the end of an episode, timestep.obs is already the first one of the next episode.
        within = jnp.where(done[:, None], agent.encode(timestep.info["final_obs"]), next_raw)
        _, _, next_value = agent.network.apply(state.params, memory, normalize(within))
        ends = timestep.terminated, done
        steps = Steps(obs, action, log_prob, value, next_value, timestep.reward, *ends)
        return (handle, next_raw, empty(memory, done)), (steps, raw, timestep.info["episode_return"])

    keys = jax.random.split(key, agent.config.num_steps)
    carry, (steps, raw, returns) = jax.lax.scan(play, (state.handle, state.obs, state.memory), keys)
    handle, obs, memory = carry
    state = state._replace(
        obs_stats=state.obs_stats.update(raw),
        handle=handle,
        obs=obs,
        memory=memory,
        returns=state.returns.add(steps.done, returns),
    )
    return state, steps


def loss(agent: Agent, params: Any, memory: jax.Array, done: jax.Array, batch: Batch) -> jax.Array:
    """Returns PPO's loss of whole sequences, `[]` float32. `memory` is the memory before the first steps."""

    def remember(memory: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        obs, done = now
        memory, logits, value = agent.network.apply(params, memory, obs)
        return empty(memory, done), (logits, value)

    _, (logits, value) = jax.lax.scan(remember, memory, (batch.obs, done))
    return shared_ppo.objective(agent.config, agent.policy, logits, value, batch)


def update(agent: Agent, state: State, key: jax.Array) -> State:
    """Collects and learns once. A minibatch contains all steps of some envs, to recompute their memories."""
    config = agent.config
    play_key, learn_key = jax.random.split(key)
    before = state.memory
    state, steps = collect(agent, state, play_key)
    reward = (1 - config.gamma) * steps.reward  # scales values to the magnitude of one reward
    ends = steps.terminated, steps.done
    advantage = shared_ppo.advantages(config, reward, *ends, value=steps.value, next_value=steps.next_value)
    target = advantage + steps.value
    batch = Batch(steps.obs, steps.action, steps.log_prob, shared_ppo.standardize(advantage), target)

    def loss_of(params: Any, envs: jax.Array) -> jax.Array:
        minibatch: Batch = jax.tree.map(lambda leaf: leaf[:, envs], batch)
        return loss(agent, params, before[envs], steps.done[:, envs], minibatch)

    envs = shared_ppo.shuffle(config, learn_key, config.num_envs)
    params, opt_state = shared_ppo.descend_on(loss_of, agent, (state.params, state.opt_state), envs)
    return state._replace(params=params, opt_state=opt_state)


def train(
    agent: Agent, report: Report, handle: jaxvec.Handle, timestep: jaxvec.TimeStep, key: jax.Array
) -> Trained[State]:
    """Trains, starting at the `handle` and `timestep` of a reset; see `repeat`."""
    init_key, train_key = jax.random.split(key)
    obs = agent.encode(timestep.obs)
    memory = jnp.zeros((len(obs), agent.config.num_units))
    params = agent.network.init(init_key, memory, obs)
    state = State(
        params=params,
        opt_state=agent.optimizer.init(params),
        obs_stats=RunningMeanStd.create(obs[0], count=0),
        handle=handle,
        obs=obs,
        memory=memory,
        returns=Returns.create(),
    )
    return repeat(partial(update, agent), state, train_key, agent.config, report)


def run(config: Config) -> Result:
    with jaxvec.make(config.env, config.num_envs, num_workers=config.num_workers) as envs:
        return shared_training.run(config, envs, partial(train, make_agent(config, envs)))


def main(argv: Sequence[str] | None = None) -> Result:
    about = "Train PPO with a GRU on a partially observed Gymnasium env."
    config = parse(Config, "ppo_recurrent", about, argv)
    return finish(config, "PPO with a GRU", "ppo_recurrent", run(config))


if __name__ == "__main__":
    main()
