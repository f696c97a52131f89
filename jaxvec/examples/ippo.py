"""Independent PPO (IPPO) on PettingZoo's multi-agent envs, with all of training in one `jax.jit`.

    python -m jaxvec.examples.ippo
    python -m jaxvec.examples.ippo --env pettingzoo.butterfly.knights_archers_zombies_v11
    python -m jaxvec.examples.ippo --resume runs/NAME
    python -m jaxvec.examples.ippo --evaluate runs/NAME

The file is complete: copy and change it. The agents share one network, and each learns from its own rewards.
Agents may leave before the episode ends: the masks of the adapter mark the agents that act, and rows of
others have no weight in the loss. Each run has a folder in `runs`. Ctrl-C saves, and ends the run.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from gymnasium import spaces

import jaxvec
from jaxvec.logging import Episodes, Options, TrainingRun, training
from jaxvec.normalize import RunningMeanStd

try:
    from jaxvec.adapters.pettingzoo import INFO, PettingZooEnv
except ImportError as _error:
    raise (SystemExit if __name__ == "__main__" else ImportError)(str(_error)) from _error


@dataclass(frozen=True)
class Config(Options):
    """Trains IPPO on a parallel env of PettingZoo."""

    env: str = "mpe2.simple_spread_v3"  # module with a function parallel_env, of equal Discrete agents
    num_envs: int = 16  # number of envs
    total_steps: int = 100_000  # env steps, rounded up to a multiple of num-envs x num-steps
    num_steps: int = 50  # steps of each env per update
    num_epochs: int = 4  # passes over the steps of an update
    num_minibatches: int = 4  # gradient steps per pass
    lr: float = 1e-3  # learning rate, falling linearly to 0
    gamma: float = 0.95  # discount per step
    gae_lambda: float = 0.95  # decay of the advantage estimate per step
    clip: float = 0.2  # PPO clip range
    entropy_weight: float = 0.01  # weight of the entropy bonus
    value_weight: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # maximum norm of the gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_epochs, self.num_minibatches) < 1 or self.steps_per_update % self.num_minibatches:
            raise ValueError("--num-envs times --num-steps must be a multiple of --num-minibatches")

    def env_fn(self) -> Any:
        """Returns a function that makes the env of the module `env`."""
        try:
            module = importlib.import_module(self.env)
        except ImportError as error:
            raise ValueError(f"--env {self.env}: {error}; the default env needs: pip install mpe2") from None
        return lambda **options: PettingZooEnv(module.parallel_env(**options))


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


class State(NamedTuple):
    """State of training between two updates."""

    number: jax.Array  # [] int32, updates so far
    params: Any
    opt_state: Any
    obs_stats: RunningMeanStd  # [obs_size]
    episodes: Episodes  # with returns that are means over the agents


class Playing(NamedTuple):
    """State of the running episodes between two updates."""

    handle: jaxvec.Handle
    obs: jax.Array  # [num_envs, num_agents, obs_size] float32
    alive: jax.Array  # [num_envs, num_agents] bool


class Steps(NamedTuple):
    """Data of one step of all envs. `collect` stacks them to `[num_steps, num_envs, num_agents, ...]`."""

    raw: jax.Array  # [num_envs, num_agents, obs_size] float32
    obs: jax.Array  # [num_envs, num_agents, obs_size] float32, normalised
    action: jax.Array  # [num_envs, num_agents] int32, from 0
    log_prob: jax.Array  # [num_envs, num_agents] float32
    value: jax.Array  # [num_envs, num_agents] float32
    next_value: jax.Array  # [num_envs, num_agents] float32, of the same episode
    reward: jax.Array  # [num_envs, num_agents] float32
    terminated: jax.Array  # [num_envs, num_agents] bool, of the agent
    done: jax.Array  # [num_envs, num_agents] bool, whether the step was the agent's last
    acted: jax.Array  # [num_envs, num_agents] bool, whether the agent took part in the step


def evaluate(logits: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the action's log-probability and the policy's entropy, `[...]` in nats."""
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
    return log_prob, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def advantages(config: Config, steps: Steps) -> jax.Array:
    """Returns generalised advantages, `[num_steps, num_envs, num_agents]` float32."""
    reward = (1 - config.gamma) * steps.reward  # scales values to the magnitude of one reward
    # Bootstrap unless the agent terminated: a truncated episode could have continued.
    surprise = reward + config.gamma * jnp.where(steps.terminated, 0, steps.next_value) - steps.value

    def add(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        advantage = now[0] + jnp.where(now[1], 0, config.gamma * config.gae_lambda * later)
        return advantage, advantage

    return jax.lax.scan(add, jnp.zeros_like(steps.value[0]), (surprise, steps.done), reverse=True)[1]


class Agent:
    """The parts that do not change during training, and the functions that are compiled."""

    def __init__(self, config: Config, names: Sequence[str], obs_space: Any, action_space: Any) -> None:
        first = action_space[names[0]]
        shapes = {obs_space[name].shape for name in names}
        equal = all(action_space[name] == first for name in names)
        if not isinstance(first, spaces.Discrete) or not equal or len(shapes) > 1 or None in shapes:
            raise SystemExit(
                f"{config.env}: this IPPO takes agents with observations of one shape and the same Discrete "
                f"actions, not {obs_space} and {action_space}"
            )
        self.config: Config = config
        self.names: tuple[str, ...] = tuple(names)  # in the order of the rewards
        self.first_action: int = int(first.start)
        self.network: Any = ActorCritic(int(first.n))  # Any: flax annotates no result type for `apply`
        num_steps = config.num_updates * config.num_epochs * config.num_minibatches
        adam = optax.adam(optax.linear_schedule(config.lr, 0, num_steps))
        clipped = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam)
        # All parameters in one vector: there are fewer operations to compile and run.
        self.optimizer: optax.GradientTransformation = optax.flatten(clipped)

    def encode(self, obs: dict[str, jax.Array]) -> jax.Array:
        """Stacks the agents' observations to `[num_envs, num_agents, obs_size]` float32.

        The last entries are the agent's number, one-hot, so that agents can take different roles.
        """
        rows = [obs[name].reshape(len(obs[name]), -1).astype(jnp.float32) for name in self.names]
        numbers = jnp.broadcast_to(jnp.eye(len(rows)), (len(rows[0]), len(rows), len(rows)))
        return jnp.concatenate([jnp.stack(rows, 1), numbers], axis=-1)

    def to_env(self, action: jax.Array) -> dict[str, jax.Array]:
        """Converts actions `[num_envs, num_agents]` to a dict with `[num_envs]` for each agent."""
        return {name: action[:, number] + self.first_action for number, name in enumerate(self.names)}

    def begin(self, handle: jaxvec.Handle, timestep: jaxvec.TimeStep) -> tuple[State, Playing]:
        """Returns the initial states, given the `handle` and `timestep` of a reset."""
        obs = self.encode(timestep.obs)
        params = self.network.init(jax.random.key(self.config.seed), obs)
        stats, opt_state = RunningMeanStd.create(obs[0, 0], count=0), self.optimizer.init(params)
        state = State(jnp.int32(0), params, opt_state, stats, Episodes.create())
        return state, Playing(handle, obs, timestep.info["alive"])

    def collect(self, state: State, playing: Playing, key: jax.Array) -> tuple[Playing, Episodes, Steps]:
        """Plays `num_steps` steps in every env."""
        normalize = state.obs_stats.normalize

        def play(carry: Any, key: jax.Array) -> tuple[Any, Steps]:
            (handle, raw, acted), episodes = carry
            obs = normalize(raw)
            logits, value = self.network.apply(state.params, obs)
            action = jax.random.categorical(key, logits)
            log_prob, _ = evaluate(logits, action)
            handle, timestep = jaxvec.step(handle, self.to_env(action))
            over, info = timestep.done, timestep.info
            # At the end of an episode, `obs` and `info` are already those of the next episode.
            terminated, truncated = (timestep.last_info[name] for name in ("terminated", "truncated"))
            next_raw, within = self.encode(timestep.obs), self.encode(timestep.last_obs)
            _, next_value = self.network.apply(state.params, normalize(within))
            ends = terminated, terminated | truncated | over[:, None]
            steps = Steps(raw, obs, action, log_prob, value, next_value, timestep.reward, *ends, acted)
            mean = timestep._replace(info=info | {"episode_return": info["episode_return"].mean(-1)})
            return (Playing(handle, next_raw, info["alive"]), episodes.add(mean)), steps

        keys = jax.random.split(key, self.config.num_steps)
        (playing, episodes), steps = jax.lax.scan(play, (playing, state.episodes), keys)
        return playing, episodes, steps

    def loss(self, params: Any, steps: Steps, advantage: jax.Array, target: jax.Array) -> tuple[Any, Any]:
        """Returns PPO's loss of the rows `[n, ...]` with `acted`, `[]` float32, and its parts."""

        def mean(values: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(steps.acted, values, 0)) / jnp.maximum(steps.acted.sum(), 1)

        logits, value = self.network.apply(params, steps.obs)
        log_prob, entropy = evaluate(logits, steps.action)
        log_ratio, clip = log_prob - steps.log_prob, self.config.clip
        ratio = jnp.exp(log_ratio)
        gain = mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage))
        error, entropy = mean(0.5 * jnp.square(value - target)), mean(entropy)
        total = self.config.value_weight * error - gain - self.config.entropy_weight * entropy
        metrics = {"policy_loss": -gain, "value_loss": error, "entropy": entropy}
        return total, metrics | {"kl": mean(ratio - 1 - log_ratio)}

    def update(self, state: State, playing: Playing) -> tuple[State, Playing, dict[str, jax.Array]]:
        """Collects steps and learns from them, once. Also returns metrics, `[]` float32."""
        config = self.config
        # The key depends only on the number of the update, so a resumed run equals an uninterrupted one.
        play_key, learn_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), state.number))
        playing, episodes, steps = self.collect(state, playing, play_key)
        advantage = advantages(config, steps)
        target = advantage + steps.value
        mean, std = advantage.mean(where=steps.acted), advantage.std(where=steps.acted)
        scaled = (advantage - mean) / (std + 1e-8)
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), (steps, scaled, target))

        def descend(carry: tuple[Any, Any], chosen: jax.Array) -> tuple[tuple[Any, Any], Any]:
            params, opt_state = carry
            minibatch = jax.tree.map(partial(jnp.take, indices=chosen, axis=0), rows)
            gradient, metrics = jax.grad(self.loss, has_aux=True)(params, *minibatch)
            change, opt_state = self.optimizer.update(gradient, opt_state, params)
            return (optax.apply_updates(params, change), opt_state), metrics

        order = jnp.argsort(jax.random.uniform(learn_key, (config.num_epochs, steps.reward.size)))
        chosen = order.reshape(config.num_epochs * config.num_minibatches, -1)  # [gradient steps, minibatch]
        (params, opt_state), metrics = jax.lax.scan(descend, (state.params, state.opt_state), chosen)
        metrics = jax.tree.map(jnp.mean, metrics)
        unexplained = jnp.var(advantage, where=steps.acted) / (jnp.var(target, where=steps.acted) + 1e-8)
        obs_stats = state.obs_stats.update(steps.raw)
        state = State(state.number + 1, params, opt_state, obs_stats, episodes)
        return state, playing, metrics | {"explained_variance": 1 - unexplained} | episodes.means()

    def best(self, saved: Any, _: None, obs: dict[str, jax.Array], __: Any) -> tuple[None, Any]:
        """Returns the most probable actions, given what `main` saves, for evaluations."""
        stats = RunningMeanStd(**saved["stats"])
        logits, _ = self.network.apply(saved["params"], stats.normalize(self.encode(obs)))
        return None, self.to_env(logits.argmax(-1))


def main(argv: Sequence[str] | None = None) -> TrainingRun:
    with training(Config, argv, program="ippo") as (config, run), run.make(info=INFO) as envs:
        names = envs.get_attr("possible_agents")[0]
        agent = Agent(config, names, envs.single_observation_space, envs.single_action_space)
        params = lambda state: {"params": state.params, "stats": vars(state.obs_stats)}  # noqa: E731
        run.train(envs, agent.begin, agent.update, params=params, act=agent.best)
    return run


if __name__ == "__main__":
    main()
