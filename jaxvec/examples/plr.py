"""Prioritised level replay against uniformly drawn levels, with all of training in one `jax.jit`.

    python -m jaxvec.examples.plr

Each update of PPO starts with a choice of levels: new ones, levels from a buffer that the agent can still
learn from, and mutations of those. The levels are arrays of the program, which `jaxvec.reset(options=...)`
gives to mazes in plain Python (`maze.py`). After the update, each level gets a score, and the buffer keeps
the best. `jax.vmap` maps training over seeds and over both ways to choose levels. Each run has a folder in
`runs`. Ctrl-C saves, and ends the run. The methods are those of Jiang et al. (2021), "Prioritized Level
Replay", and Parker-Holder et al. (2022), "Evolving Curricula with Regret-Based Environment Design".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxvec
from jaxvec.examples.maze import CELLS, LEVEL, SIZE, TIME_LIMIT, perfect_mazes
from jaxvec.logging import Episodes, Options, TrainingRun, training

Level = dict[str, jax.Array]  # leaves [...] of LEVEL


def random_levels(key: jax.Array, count: int) -> Level:
    """Draws levels with up to about 50 walls, with leaves `[count, ...]`."""
    density_key, wall_key, start_key, goal_key = jax.random.split(key, 4)
    density = jax.random.uniform(density_key, (count, 1, 1), maxval=50 / CELLS)
    start = jax.random.randint(start_key, (count,), 0, CELLS)
    return {
        "walls": jax.random.bernoulli(wall_key, density, (count, SIZE, SIZE)).astype(jnp.uint8),
        "start": start,
        "goal": (start + jax.random.randint(goal_key, (count,), 1, CELLS)) % CELLS,
    }


def mutate(key: jax.Array, level: Level) -> Level:
    """Flips about five cells of each level, and moves the goal of each second level."""
    wall_key, goal_key, move_key = jax.random.split(key, 3)
    flips = jax.random.bernoulli(wall_key, 5 / CELLS, level["walls"].shape)
    goal = jax.random.randint(goal_key, level["goal"].shape, 0, CELLS)
    return {
        "walls": level["walls"] ^ flips.astype(jnp.uint8),
        "start": level["start"],
        "goal": jnp.where(jax.random.bernoulli(move_key, shape=goal.shape), goal, level["goal"]),
    }


@dataclass(frozen=True)
class Config(Options):
    """Compares prioritised level replay with uniformly drawn levels."""

    env: str = "jaxvec.examples.maze:Maze"  # env whose reset options are levels
    num_seeds: int = 3  # number of agents with each way to choose levels
    num_envs: int = 32  # number of envs of each agent
    total_steps: int = 1_152_000  # env steps of each agent, rounded up to whole updates
    num_steps: int = TIME_LIMIT  # steps of each env in an update, at least those of an episode
    num_batches: int = 4  # batches of num-envs held-out mazes in a test
    buffer_size: int = 512  # number of levels in the buffer
    replay: float = 0.8  # probability that an env gets a level of the buffer, or a mutation of one
    mutation: float = 0.5  # probability that it is a mutation
    temperature: float = 1.0  # the lower, the more replays of the levels with the highest scores
    staleness: float = 0.3  # share of replays by the age of scores
    num_epochs: int = 2  # passes over the steps of an update
    num_minibatches: int = 4  # gradient steps per pass
    lr: float = 1e-3  # learning rate, falling linearly to 0
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95  # decay of the advantage estimate per step
    clip: float = 0.2  # PPO clip range
    entropy_weight: float = 0.01  # weight of the entropy bonus
    video: int = 0  # number of envs of the first agent with replay to film; needs moviepy

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_seeds, self.num_batches) < 1:
            raise ValueError("the numbers of seeds and batches must be at least 1")
        if min(self.num_epochs, self.num_minibatches) < 1 or self.steps_per_update % self.num_minibatches:
            raise ValueError("--num-envs times --num-steps must be a multiple of --num-minibatches")
        if self.buffer_size < self.num_envs:
            raise ValueError("--buffer-size must be at least --num-envs")


class ActorCritic(nn.Module):
    """Networks for policy and value, with two hidden layers each."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[..., obs_size]` to logits `[..., 4]` and values `[...]`."""

        def network(size: int) -> nn.Sequential:
            return nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(size)])

        obs = obs.astype(jnp.float32) / 2
        return network(4)(obs), network(1)(obs)[..., 0]


class Buffer(NamedTuple):
    """The levels with the highest scores so far."""

    level: Level  # leaves [buffer_size, ...]
    best: jax.Array  # [buffer_size] float32, the highest return of an episode
    score: jax.Array  # [buffer_size] float32
    scored_at: jax.Array  # [buffer_size] int32, the update that gave the score

    def sample(self, config: Config, key: jax.Array, now: jax.Array) -> jax.Array:
        """Draws different places, `[num_envs]` int32, by the rank of the score and by its age."""
        rank = jnp.argsort(jnp.argsort(-self.score)) + 1
        by_score = rank ** (-1 / config.temperature)
        age = (now - self.scored_at).astype(jnp.float32) + 1e-3
        share = (1 - config.staleness) * by_score / by_score.sum() + config.staleness * age / age.sum()
        # With Gumbel noise, the highest entries are draws without replacement.
        return jax.lax.top_k(jnp.log(share) + jax.random.gumbel(key, share.shape), config.num_envs)[1]

    def add(self, seen: Buffer, place: jax.Array) -> Buffer:
        """Keeps the levels with the highest scores, of the buffer and of `seen` by an update, `[num_envs]`.

        `place` is the place of a replayed level, to replace its scores, and out of range for new levels.
        """
        is_new = place >= self.score.size
        old = self._replace(
            best=self.best.at[place].set(seen.best, mode="drop"),
            score=self.score.at[place].set(seen.score, mode="drop"),
            scored_at=self.scored_at.at[place].set(seen.scored_at, mode="drop"),
        )
        new = seen._replace(score=jnp.where(is_new, seen.score, -jnp.inf))
        both: Buffer = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), old, new)
        kept = jax.lax.top_k(both.score, self.score.size)[1]
        return jax.tree.map(lambda leaf: leaf[kept], both)


class Steps(NamedTuple):
    """Data of one step of all envs. A rollout stacks them to `[num_steps, num_envs, ...]`."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


class Agent(TrainState):
    """State of an agent between two updates. `jax.vmap` adds an axis for the agents."""

    buffer: Buffer
    episodes: Episodes


class State(NamedTuple):
    number: jax.Array  # [] int32, updates so far
    agents: Agent  # with a leading axis


def train(config: Config, run: TrainingRun, envs: jaxvec.VectorEnv, test_envs: jaxvec.VectorEnv) -> None:
    """Trains the agents, or continues or evaluates a run, and writes its folder."""
    network: Any = ActorCritic()
    num_gradients = config.num_epochs * config.num_minibatches  # of an update
    lr = optax.linear_schedule(config.lr, 0, config.num_updates * num_gradients)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(lr))
    mazes = perfect_mazes(config.num_batches * config.num_envs)
    held_out = jax.tree.map(lambda leaf: leaf.reshape(config.num_batches, -1, *leaf.shape[1:]), mazes)
    # The agents with replays, and then those without: their levels are drawn uniformly.
    keys = jnp.tile(jax.random.split(jax.random.key(config.seed), config.num_seeds), 2)
    replays = jnp.repeat(jnp.array([config.replay, 0.0]), config.num_seeds)

    def rollout(params: Any, handle: jaxvec.Handle, level: Level, key: jax.Array) -> Any:
        """Plays one level per env. Automatic resets start it again, since envs keep their options."""
        handle, timestep = jaxvec.reset(handle, options=level)

        def body(carry: Any, key: jax.Array) -> tuple[Any, Any]:
            handle, obs = carry
            logits, value = network.apply(params, obs)
            action = jax.random.categorical(key, logits)
            log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            handle, timestep = jaxvec.step(handle, action)
            # The time limit counts as an end without a reward, as in other implementations.
            done = timestep.done
            steps = Steps(obs, action, log_prob, value, timestep.reward, done)
            return (handle, timestep.obs), (steps, timestep)

        (handle, obs), played = jax.lax.scan(
            body, (handle, timestep.obs), jax.random.split(key, config.num_steps)
        )
        return handle, *played, network.apply(params, obs)[1]

    def advantages(steps: Steps, last_value: jax.Array) -> jax.Array:
        def body(carry: Any, step: Steps) -> tuple[Any, jax.Array]:
            later, next_value = carry
            surprise = step.reward + config.gamma * jnp.where(step.done, 0, next_value) - step.value
            later = surprise + config.gamma * config.gae_lambda * jnp.where(step.done, 0, later)
            return (later, step.value), later

        return jax.lax.scan(body, (jnp.zeros_like(last_value), last_value), steps, reverse=True)[1]

    def loss(params: Any, batch: tuple[Steps, jax.Array, jax.Array]) -> Any:
        """Returns PPO's loss, `[]` float32, and its parts."""
        steps, advantage, target = batch
        logits, value = network.apply(params, steps.obs)
        log_probs = jax.nn.log_softmax(logits)
        log_ratio = jnp.take_along_axis(log_probs, steps.action[:, None], 1)[:, 0] - steps.log_prob
        ratio = jnp.exp(log_ratio)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - config.clip, 1 + config.clip) * advantage)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        error = 0.5 * jnp.square(value - target)
        parts = {"policy_loss": -gain, "value_loss": error, "entropy": entropy, "kl": ratio - 1 - log_ratio}
        total = jnp.mean(0.5 * error - gain - config.entropy_weight * entropy)
        return total, jax.tree.map(jnp.mean, parts)

    def learn(agent: Agent, steps: Steps, advantage: jax.Array, key: jax.Array) -> Any:
        data = steps, advantage, advantage + steps.value
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), data)

        def body(agent: Agent, chosen: jax.Array) -> tuple[Agent, dict[str, jax.Array]]:
            batch = jax.tree.map(lambda leaf: leaf[chosen], rows)
            gradient, metrics = jax.grad(loss, has_aux=True)(agent.params, batch)
            return agent.apply_gradients(grads=gradient), metrics

        keys = jax.random.split(key, config.num_epochs)
        order = jax.vmap(jax.random.permutation, (0, None))(keys, config.steps_per_update)
        agent, metrics = jax.lax.scan(body, agent, order.reshape(num_gradients, -1))
        explained = 1 - jnp.var(advantage) / (jnp.var(rows[2]) + 1e-8)
        return agent, jax.tree.map(jnp.mean, metrics) | {"explained_variance": explained}

    def begin_agent(key: jax.Array) -> tuple[Agent, jaxvec.Handle]:
        init_key, level_key = jax.random.split(key)
        level = random_levels(level_key, config.buffer_size)
        zeros = jnp.zeros(config.buffer_size)
        buffer = Buffer(level, zeros, zeros, zeros.astype(jnp.int32))
        first = jax.tree.map(lambda leaf: leaf[: config.num_envs], level)
        handle, timestep = jaxvec.reset(envs, num_envs=config.num_envs, options=first)
        params = network.init(init_key, timestep.obs)
        parts = {"params": params, "buffer": buffer, "episodes": Episodes.create()}
        return Agent.create(apply_fn=network.apply, tx=optimizer, **parts), handle

    def begin(*_: Any) -> tuple[State, jaxvec.Handle]:
        """Returns the initial states of training and of the envs."""
        agents, handles = jax.vmap(begin_agent)(keys)
        return State(jnp.int32(0), agents), handles

    def update_agent(now: jax.Array, key: jax.Array, replay: Any, agent: Agent, handle: Any) -> Any:
        """Plays levels, learns from them and scores them. Also returns metrics, `[]`."""
        # The keys depend only on the number of the update, so a resumed run equals an uninterrupted one.
        new_key, place_key, mutate_key, *keys = jax.random.split(jax.random.fold_in(key, now), 7)
        buffer = agent.buffer
        new = random_levels(new_key, config.num_envs)
        place = buffer.sample(config, place_key, now)
        old = jax.tree.map(lambda leaf: leaf[place], buffer.level)
        is_old = jax.random.bernoulli(keys[0], replay, place.shape)
        is_same = is_old & ~jax.random.bernoulli(keys[1], config.mutation, place.shape)
        kind = is_old.astype(int) + is_same  # 0: new, 1: mutated, 2: as in the buffer
        choose = jax.vmap(lambda kind, *leaves: jnp.stack(leaves)[kind])
        level = jax.tree.map(partial(choose, kind), new, mutate(mutate_key, old), old)
        handle, steps, timesteps, last_value = rollout(agent.params, handle, level, keys[2])
        advantage = advantages(steps, last_value)
        # MaxMC: how much less than its best return on the level the agent expects: solved, not yet learned.
        best = jnp.maximum(steps.reward.max(0), jnp.where(is_same, buffer.best[place], 0))
        score = (best - steps.value).mean(0)
        seen = Buffer(level, best, score, jnp.full_like(place, now))
        buffer = buffer.add(seen, jnp.where(is_same, place, config.buffer_size))
        agent, metrics = learn(agent, steps, advantage, keys[3])
        agent = agent.replace(buffer=buffer, episodes=agent.episodes.add(timesteps))
        return agent, handle, metrics | agent.episodes.means() | {"walls": level["walls"].mean()}

    def update(state: State, handles: Any) -> tuple[State, Any, dict[str, jax.Array]]:
        """Updates all agents. Also returns means of metrics, with replay and with uniform levels."""
        each = jax.vmap(update_agent, (None, 0, 0, 0, 0))
        agents, handles, metrics = each(state.number, keys, replays, state.agents, handles)
        return State(state.number + 1, agents), handles, by_way(metrics)

    def by_way(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Splits metrics `[num_agents]` into means with replay and with uniform levels."""
        means = {name: leaf.reshape(2, -1).mean(1) for name, leaf in metrics.items()}
        uniform = {f"uniform_{name}": mean[1] for name, mean in means.items()}
        return {name: mean[0] for name, mean in means.items()} | uniform

    def test(key: jax.Array, params: Any) -> jax.Array:
        """Plays the held-out mazes. Returns the share that the agent solved, `[]` float32."""

        def play(handle: jaxvec.Handle, level: Level) -> tuple[jaxvec.Handle, jax.Array]:
            handle, _, timesteps, _ = rollout(params, handle, level, key)
            return handle, timesteps.terminated.any(0).mean()

        first = random_levels(key, config.num_envs)  # not shared by the agents, so each resets its own envs
        handle, _ = jaxvec.reset(test_envs, num_envs=config.num_envs, options=first)
        return jax.lax.scan(play, handle, held_out)[1].mean()

    @jax.jit
    def evaluate(state: State) -> dict[str, jax.Array]:
        """Returns the shares of held-out mazes that the agents solve, by seed."""
        shares = jax.vmap(test)(keys, state.agents.params)
        seeds = {f"evaluation_{i}": shares[i :: config.num_seeds] for i in range(config.num_seeds)}
        return by_way({"evaluation": shares, **seeds})

    params = lambda state: {"params": state.agents.params}  # noqa: E731
    run.train(envs, begin, update, params=params, evaluate=evaluate, save_envs=False)


def main(argv: Sequence[str] | None = None) -> TrainingRun:
    with training(Config, argv, program="plr") as (config, run):
        options: Any = {
            "num_envs": 2 * config.num_seeds * config.num_envs,
            "reset_options": LEVEL,
            "states": 0,
        }
        with run.make(**options) as envs, run.make(video=0, **options) as test_envs:
            train(config, run, envs, test_envs)
    return run


if __name__ == "__main__":
    main()
