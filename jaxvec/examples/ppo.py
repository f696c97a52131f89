"""PPO on Gymnasium envs, with all of training in one `jax.jit`.

    python -m jaxvec.examples.ppo
    python -m jaxvec.examples.ppo --env Pendulum-v1

The envs are plain Python in worker processes, and `jaxvec.step` steps them from inside the compiled loop. So
one call of `train` plays, learns and reports until the last step.
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
from flax import linen as nn
from gymnasium import Space, spaces

import jaxvec
from jaxvec.examples import _training
from jaxvec.examples._training import Options, Report, Result, Returns, Trained, finish, option, parse, repeat
from jaxvec.normalize import RunningMeanStd


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
        """Converts to actions of the env, `[num_envs]`."""
        return action + int(self.space.start)


@dataclass(frozen=True)
class Gaussian:
    """Policy for a `Box`. The network returns means and log standard deviations; actions are `[..., n]`."""

    space: spaces.Box

    def sample(self, outputs: jax.Array, key: jax.Array) -> jax.Array:
        """Samples an action; -1 and 1 are the bounds."""
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)

    def evaluate(self, outputs: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the unclipped action's log-density and the policy's entropy, `[...]` in nats."""
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        log_prob = jax.scipy.stats.norm.logpdf(action, mean, jnp.exp(log_std))
        return log_prob.sum(-1), (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)

    def to_env(self, action: jax.Array) -> jax.Array:
        """Returns `[num_envs, ...]` in the env's units, clipped."""
        low, high = self.space.low.astype(np.float64), self.space.high.astype(np.float64)
        bounded = high - low < 1e6  # some spaces use the largest float as infinity
        low, high = np.where(bounded, low, -1), np.where(bounded, high, 1)
        middle, reach = ((low + high) / 2).astype(np.float32), ((high - low) / 2).astype(np.float32)
        return jnp.clip(middle + reach * action.reshape(-1, *low.shape), self.space.low, self.space.high)


class ActorCritic(nn.Module):
    """Separate networks for policy and value, with two hidden layers each."""

    num_actions: int
    gaussian: bool

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[..., obs_size]` to the policy's outputs `[..., num_outputs]` and values `[...]`."""

        def network(num_outputs: int, scale: float) -> jax.Array:
            hidden = obs
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(hidden))
            return nn.Dense(num_outputs, kernel_init=nn.initializers.orthogonal(scale))(hidden)

        outputs = network(self.num_actions, 0.01)  # small, so the initial policy is nearly uniform
        if self.gaussian:
            log_std = self.param("log_std", nn.initializers.zeros, (self.num_actions,))
            outputs = jnp.concatenate([outputs, jnp.broadcast_to(log_std, outputs.shape)], axis=-1)
        return outputs, network(1, 1.0)[..., 0]


@dataclass(frozen=True)
class Agent:
    """The parts that do not change during training."""

    config: Config
    obs_space: Space[Any]
    policy: Categorical | Gaussian
    network: Any  # an ActorCritic; Any because flax annotates no result type for `apply`
    optimizer: optax.GradientTransformation

    def encode(self, obs: jax.Array) -> jax.Array:
        """Converts observations `[num_envs, ...]` to `[num_envs, obs_size]` float32."""
        if isinstance(self.obs_space, spaces.Discrete):
            return jax.nn.one_hot(obs - int(self.obs_space.start), int(self.obs_space.n))
        return obs.reshape(len(obs), -1).astype(jnp.float32)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Returns Adam with clipped gradients and a learning rate that decays to 0.

    It flattens all parameters into one vector, so there are fewer operations to compile and run.
    """
    lr = optax.linear_schedule(config.lr, 0, config.num_updates * config.num_epochs * config.num_minibatches)
    return optax.flatten(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(lr)))


def make_agent(config: Config, envs: jaxvec.VectorEnv) -> Agent:
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(obs_space, spaces.Box | spaces.Discrete):
        raise SystemExit(f"{config.env}: this PPO takes Box and Discrete observations, not {obs_space}")
    if isinstance(action_space, spaces.Discrete):
        policy, num_actions = Categorical(action_space), int(action_space.n)
    elif isinstance(action_space, spaces.Box) and np.issubdtype(action_space.dtype, np.floating):
        policy, num_actions = Gaussian(action_space), int(np.prod(action_space.shape))
    else:
        raise SystemExit(f"{config.env}: this PPO takes Discrete and float Box actions, not {action_space}")
    network = ActorCritic(num_actions, gaussian=isinstance(policy, Gaussian))
    return Agent(config, envs.single_observation_space, policy, network, make_optimizer(config))


class State(NamedTuple):
    """State of training between two updates."""

    params: Any
    opt_state: Any
    obs_stats: RunningMeanStd  # [obs_size]
    reward_stats: RunningMeanStd  # []
    handle: jaxvec.Handle
    obs: jax.Array  # [num_envs, obs_size] float32
    returns: Returns


class Steps(NamedTuple):
    """Data of one step of all envs. `collect` stacks them to `[num_steps, num_envs, ...]`."""

    obs: jax.Array  # [num_envs, obs_size] float32
    next_obs: jax.Array  # [num_envs, obs_size] float32, of the same episode
    action: jax.Array  # [num_envs] int32 or [num_envs, num_actions] float32
    log_prob: jax.Array  # [num_envs] float32
    reward: jax.Array  # [num_envs] float32
    terminated: jax.Array  # [num_envs] bool
    done: jax.Array  # [num_envs] bool
    episode_return: jax.Array  # [num_envs] float32


def collect(agent: Agent, state: State, key: jax.Array) -> tuple[State, Steps]:

    def play(carry: tuple[jaxvec.Handle, jax.Array], key: jax.Array) -> tuple[Any, Steps]:
        handle, obs = carry
        outputs, _ = agent.network.apply(state.params, state.obs_stats.normalize(obs))
        action = agent.policy.sample(outputs, key)
        log_prob, _ = agent.policy.evaluate(outputs, action)
        handle, timestep = jaxvec.step(handle, agent.policy.to_env(action))
        next_obs, reward, terminated, truncated, info = timestep
        next_obs, final_obs = agent.encode(next_obs), agent.encode(info["final_obs"])
        done = terminated | truncated
        # At the end of an episode, next_obs is already the first one of the next episode.
        within = jnp.where(done[:, None], final_obs, next_obs)
        steps = Steps(obs, within, action, log_prob, reward, terminated, done, info["episode_return"])
        return (handle, next_obs), steps

    keys = jax.random.split(key, agent.config.num_steps)
    (handle, obs), steps = jax.lax.scan(play, (state.handle, state.obs), keys)
    return state._replace(handle=handle, obs=obs), steps


def estimate(agent: Agent, params: Any, steps: Steps) -> tuple[jax.Array, jax.Array]:
    """Returns generalised advantages and value targets, `[num_steps, num_envs]` float32."""
    _, value = agent.network.apply(params, steps.obs)
    _, next_value = agent.network.apply(params, steps.next_obs)
    ends = steps.terminated, steps.done
    advantage = advantages(agent.config, steps.reward, *ends, value=value, next_value=next_value)
    return advantage, advantage + value


def advantages(
    config: Config,
    reward: jax.Array,
    terminated: jax.Array,
    done: jax.Array,
    *,
    value: jax.Array,
    next_value: jax.Array,
) -> jax.Array:
    """Returns generalised advantages, given the values before and after each step.

    All arrays are `[num_steps, num_envs]`.
    """
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
    config: Config, policy: Categorical | Gaussian, outputs: jax.Array, value: jax.Array, batch: Batch
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


def descend(agent: Agent, params: Any, opt_state: Any, batch: Batch, key: jax.Array) -> tuple[Any, Any]:
    """Takes the gradient steps of an update. Returns the next parameters and optimiser state."""
    config = agent.config
    batch = batch._replace(advantage=standardize(batch.advantage))
    rows: Batch = jax.tree.map(lambda leaf: leaf.reshape(config.steps_per_update, *leaf.shape[2:]), batch)

    def loss(params: Any, minibatch: Batch) -> jax.Array:
        outputs, value = agent.network.apply(params, minibatch.obs)
        return objective(config, agent.policy, outputs, value, minibatch)

    def step(carry: tuple[Any, Any], chosen: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, opt_state = carry
        gradient = jax.grad(loss)(params, jax.tree.map(partial(jnp.take, indices=chosen, axis=0), rows))
        change, opt_state = agent.optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, change), opt_state), None

    order = jnp.argsort(jax.random.uniform(key, (config.num_epochs, config.steps_per_update)))
    chosen = order.reshape(config.num_epochs * config.num_minibatches, -1)  # [gradient steps, minibatch]
    return jax.lax.scan(step, (params, opt_state), chosen)[0]


def learn(agent: Agent, state: State, steps: Steps, key: jax.Array) -> State:
    advantage, target = estimate(agent, state.params, steps)
    batch = Batch(steps.obs, steps.action, steps.log_prob, advantage, target)
    params, opt_state = descend(agent, state.params, state.opt_state, batch, key)
    return state._replace(params=params, opt_state=opt_state)


def update(agent: Agent, state: State, key: jax.Array) -> State:
    """Collects steps and learns from them, once."""
    play_key, learn_key = jax.random.split(key)
    before = state.obs_stats
    state, steps = collect(agent, state, play_key)
    reward = state.reward_stats.update(steps.reward)
    state = state._replace(
        obs_stats=before.update(steps.obs),
        reward_stats=reward,
        returns=state.returns.add(steps.done, steps.episode_return),
    )
    # Scales values to a magnitude of about 1: a value is a sum of about 1 / (1 - gamma) similar rewards.
    unit = jnp.sqrt((reward.mean**2 + reward.var + 1e-8) / max(1 - agent.config.gamma, 1e-3))
    steps = steps._replace(
        obs=before.normalize(steps.obs), next_obs=before.normalize(steps.next_obs), reward=steps.reward / unit
    )
    return learn(agent, state, steps, learn_key)


def begin(agent: Agent, handle: jaxvec.Handle, timestep: jaxvec.TimeStep, key: jax.Array) -> State:
    """Returns the initial state, given the `handle` and `timestep` of a reset."""
    obs = agent.encode(timestep.obs)
    params = agent.network.init(key, obs)
    return State(
        params=params,
        opt_state=agent.optimizer.init(params),
        obs_stats=RunningMeanStd.create(obs[0], count=0),
        reward_stats=RunningMeanStd.create(0.0, count=0),
        handle=handle,
        obs=obs,
        returns=Returns.create(),
    )


def train(
    agent: Agent, report: Report, handle: jaxvec.Handle, timestep: jaxvec.TimeStep, key: jax.Array
) -> Trained[State]:
    """Trains, starting at the `handle` and `timestep` of a reset; see `repeat`."""
    init_key, train_key = jax.random.split(key)
    state = begin(agent, handle, timestep, init_key)
    return repeat(partial(update, agent), state, train_key, agent.config, report)


def run(config: Config) -> Result:
    with jaxvec.make(config.env, config.num_envs, num_workers=config.num_workers) as envs:
        return _training.run(config, envs, partial(train, make_agent(config, envs)))


def main(argv: Sequence[str] | None = None) -> Result:
    about = "Train PPO on a Gymnasium env with Box or Discrete observations and actions."
    config = parse(Config, "ppo", about, argv)
    return finish(config, "PPO", "ppo", run(config))


if __name__ == "__main__":
    main()
