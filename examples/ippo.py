"""Independent PPO (IPPO) on PettingZoo's multi-agent envs, with all of training in one `jax.jit`.

    python examples/ippo.py
    python examples/ippo.py --env pettingzoo.butterfly.knights_archers_zombies_v11

The agents share one network, and each learns from its own rewards. Agents may leave before the episode ends:
the masks of the adapter mark the agents that act, and rows of others have no weight in the loss. The shared
parts of PPO are in `shared_ppo.py`.
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
import shared_ppo
import shared_training
from gymnasium import spaces
from shared_ppo import ActorCritic, Batch, Categorical
from shared_training import Report, Result, Returns, Trained, finish, option, parse, repeat

import jaxvec
from jaxvec.normalize import RunningMeanStd


@dataclass(frozen=True)
class Config(shared_ppo.Config):
    env: str = option(
        "mpe2.simple_spread_v3", "module with a function parallel_env, of equal Discrete agents"
    )
    num_envs: int = option(16, "number of envs")
    num_steps: int = option(50, "steps of each env per update")
    total_steps: int = option(100_000, "env steps, rounded up to a multiple of num-envs x num-steps")
    num_minibatches: int = option(4, "gradient steps per pass")
    gamma: float = option(0.95, "discount per step")
    entropy_weight: float = option(0.01, "weight of the entropy bonus")


@dataclass(frozen=True)
class Team:
    """The parts that do not change during training."""

    config: Config
    names: tuple[str, ...]  # of the agents, in the order of the rewards
    policy: Categorical
    network: Any  # an ActorCritic; Any because flax annotates no result type for `apply`
    optimizer: optax.GradientTransformation

    def encode(self, obs: dict[str, jax.Array]) -> jax.Array:
        """Stacks the agents' observations to `[num_envs, num_agents, obs_size + num_agents]` float32.

        The last entries are the agent's number, one-hot, so that agents can take different roles.
        """
        rows = [obs[name].reshape(len(obs[name]), -1).astype(jnp.float32) for name in self.names]
        numbers = jnp.broadcast_to(jnp.eye(len(rows)), (len(rows[0]), len(rows), len(rows)))
        return jnp.concatenate([jnp.stack(rows, 1), numbers], axis=-1)

    def to_env(self, action: jax.Array) -> dict[str, jax.Array]:
        """Converts actions `[num_envs, num_agents]` to a dict with `[num_envs]` for each agent."""
        action = self.policy.to_env(action)
        return {name: action[:, number] for number, name in enumerate(self.names)}


def make_team(config: Config, envs: jaxvec.VectorEnv) -> Team:
    names = tuple(envs.get_attr("possible_agents")[0])
    obs_spaces, action_spaces = envs.single_observation_space, envs.single_action_space
    assert isinstance(obs_spaces, spaces.Dict)
    assert isinstance(action_spaces, spaces.Dict)
    action_space, shapes = action_spaces[names[0]], {obs_spaces[name].shape for name in names}
    equal = all(action_spaces[name] == action_space for name in names)
    if not isinstance(action_space, spaces.Discrete) or not equal or len(shapes) > 1 or None in shapes:
        raise SystemExit(
            f"{config.env}: this IPPO takes agents with observations of one shape and the same Discrete "
            f"actions, not {obs_spaces} and {action_spaces}"
        )
    network = ActorCritic(int(action_space.n))
    return Team(config, names, Categorical(action_space), network, shared_ppo.make_optimizer(config))


class State(NamedTuple):
    """State of training between two updates."""

    params: Any
    opt_state: Any
    obs_stats: RunningMeanStd  # [obs_size + num_agents]
    handle: jaxvec.Handle
    obs: jax.Array  # [num_envs, num_agents, obs_size + num_agents] float32
    alive: jax.Array  # [num_envs, num_agents] bool
    returns: Returns


class Steps(NamedTuple):
    """Data of one step of all envs. `collect` stacks them to `[num_steps, num_envs, num_agents, ...]`."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    next_value: jax.Array  # of the same episode
    reward: jax.Array
    terminated: jax.Array  # of the agent
    done: jax.Array  # whether the step was the agent's last
    acted: jax.Array  # whether the agent took part in the step


def collect(team: Team, state: State, key: jax.Array) -> tuple[State, Steps]:
    normalize = state.obs_stats.normalize

    def play(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        handle, raw, acted = carry
        obs = normalize(raw)
        logits, value = team.network.apply(state.params, obs)
        action = team.policy.sample(logits, key)
        log_prob, _ = team.policy.evaluate(logits, action)
        handle, timestep = jaxvec.step(handle, team.to_env(action))
        over = timestep.terminated | timestep.truncated
        # At the end of an episode, the observations and masks are already those of the next episode.
        final, masks = timestep.info["final_info"], timestep.info
        terminated, truncated = (
            jnp.where(over[:, None], final[name], masks[name]) for name in ("terminated", "truncated")
        )
        next_raw = team.encode(timestep.obs)
        within = jnp.where(over[:, None, None], team.encode(timestep.info["final_obs"]), next_raw)
        _, next_value = team.network.apply(state.params, normalize(within))
        done = terminated | truncated | over[:, None]
        steps = Steps(obs, action, log_prob, value, next_value, timestep.reward, terminated, done, acted)
        ends = over, timestep.info["episode_return"].mean(-1)
        return (handle, next_raw, masks["alive"]), (steps, raw, ends)

    keys = jax.random.split(key, team.config.num_steps)
    carry, (steps, raw, ends) = jax.lax.scan(play, (state.handle, state.obs, state.alive), keys)
    handle, obs, alive = carry
    state = state._replace(
        obs_stats=state.obs_stats.update(raw),
        handle=handle,
        obs=obs,
        alive=alive,
        returns=state.returns.add(*ends),
    )
    return state, steps


def loss(team: Team, params: Any, batch: Batch, acted: jax.Array) -> jax.Array:
    """Returns PPO's loss of the rows `[n, ...]` with `acted`, `[]` float32."""
    outputs, value = team.network.apply(params, batch.obs)
    rows = jax.vmap(partial(shared_ppo.objective, team.config, team.policy))(outputs, value, batch)
    return jnp.sum(jnp.where(acted, rows, 0)) / jnp.maximum(acted.sum(), 1)


def update(team: Team, state: State, key: jax.Array) -> State:
    """Collects steps and learns from them, once."""
    config = team.config
    play_key, learn_key = jax.random.split(key)
    state, steps = collect(team, state, play_key)
    reward = (1 - config.gamma) * steps.reward  # scales values to the magnitude of one reward
    advantage = shared_ppo.advantages(
        config, reward, steps.terminated, steps.done, value=steps.value, next_value=steps.next_value
    )
    target = advantage + steps.value
    mean, std = advantage.mean(where=steps.acted), advantage.std(where=steps.acted)
    batch = Batch(steps.obs, steps.action, steps.log_prob, (advantage - mean) / (std + 1e-8), target)
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), (batch, steps.acted))

    def loss_of(params: Any, chosen: jax.Array) -> jax.Array:
        return loss(team, params, *jax.tree.map(lambda leaf: leaf[chosen], rows))

    chosen = shared_ppo.shuffle(config, learn_key, rows[1].size)
    params, opt_state = shared_ppo.descend_on(loss_of, team, (state.params, state.opt_state), chosen)
    return state._replace(params=params, opt_state=opt_state)


def train(
    team: Team, report: Report, handle: jaxvec.Handle, timestep: jaxvec.TimeStep, key: jax.Array
) -> Trained[State]:
    """Trains, starting at the `handle` and `timestep` of a reset; see `repeat`."""
    init_key, train_key = jax.random.split(key)
    obs = team.encode(timestep.obs)
    params = team.network.init(init_key, obs)
    state = State(
        params=params,
        opt_state=team.optimizer.init(params),
        obs_stats=RunningMeanStd.create(obs[0, 0], count=0),
        handle=handle,
        obs=obs,
        alive=timestep.info["alive"],
        returns=Returns.create(),
    )
    return repeat(partial(update, team), state, train_key, team.config, report)


def run(config: Config) -> Result:
    from jaxvec.adapters.pettingzoo import INFO, PettingZooEnv

    module = importlib.import_module(config.env)
    with jaxvec.make(
        lambda: PettingZooEnv(module.parallel_env()),
        config.num_envs,
        num_workers=config.num_workers,
        info=INFO,
    ) as envs:
        return shared_training.run(config, envs, partial(train, make_team(config, envs)))


def main(argv: Sequence[str] | None = None) -> Result:
    config = parse(Config, "ippo", "Train IPPO on a parallel env of PettingZoo.", argv, is_id=False)
    shared_training.need("families", "pettingzoo", config.env.partition(".")[0])
    return finish(config, "IPPO", "ippo", run(config))


if __name__ == "__main__":
    main()
