"""Prioritised level replay against uniformly drawn levels, with all of training in one `jax.jit`.

    python -m jaxvec.examples.plr

Each update of PPO starts with a choice of levels: new ones, levels from a buffer that the agent can still
learn from, and mutations of those. The levels are arrays of the program, which `jaxvec.reset(options=...)`
gives to mazes in plain Python. After the update, each level gets a score, and the buffer keeps the best.

All agents are one program: `jax.vmap` maps training over seeds and over both ways to choose levels. In tests,
agents play held-out mazes of a kind that training never shows. Each run has a folder in `runs`. Ctrl-C ends a
run after the current update, and `--resume runs/NAME` continues it. The methods are those of Jiang et al.
(2021), "Prioritized Level Replay", and Parker-Holder et al. (2022), "Evolving Curricula with Regret-Based
Environment Design".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from gymnasium import spaces
from numpy.typing import NDArray

import jaxvec
from jaxvec.logging import Episodes, Run, option, training

SIZE, VIEW, TIME_LIMIT = 13, 5, 120  # cells of a maze and of the agent's view along an axis, and steps
CELLS = SIZE * SIZE
MARGIN = VIEW // 2
MAX_VISITS = 8  # to a cell, as the agent sees them
MOVES = (-1, 0), (1, 0), (0, -1), (0, 1)

LEVEL = spaces.Dict(
    {
        "walls": spaces.Box(0, 1, (SIZE, SIZE), np.uint8),
        "start": spaces.Discrete(CELLS),
        "goal": spaces.Discrete(CELLS),
    }
)
Level = dict[str, jax.Array]  # leaves [...] of LEVEL


class Maze(gymnasium.Env[NDArray[np.int8], Any]):
    """A maze with the walls, start and goal of the reset options.

    The agent sees the walls around it, the cells that it has visited, and in which direction the goal is.
    """

    observation_space: spaces.Space[Any] = spaces.Box(-1, MAX_VISITS, (2 * VIEW * VIEW + 2,), np.int8)
    action_space: spaces.Space[Any] = spaces.Discrete(4)
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode: str | None = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.int8], Any]:
        super().reset(seed=seed)
        level = options or {"walls": 0, "start": 0, "goal": CELLS - 1}
        self._y, self._x = divmod(int(level["start"]), SIZE)
        self._goal = divmod(int(level["goal"]), SIZE)
        self._time = 0
        # Two planes: walls, and visited cells. The margin is wall, so that each view is a slice.
        self._planes = np.zeros((2, SIZE + 2 * MARGIN, SIZE + 2 * MARGIN), np.int8)
        self._planes[0] = 1
        self._planes[0, MARGIN:-MARGIN, MARGIN:-MARGIN] = level["walls"]
        for y, x in ((self._y, self._x), self._goal):
            self._planes[0, y + MARGIN, x + MARGIN] = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[NDArray[np.int8], float, bool, bool, dict[str, Any]]:
        down, right = MOVES[action]
        y, x = self._y + down, self._x + right
        if not self._planes[0, y + MARGIN, x + MARGIN]:
            self._y, self._x = y, x
        self._time += 1
        solved = (self._y, self._x) == self._goal
        reward = 1 - 0.9 * self._time / TIME_LIMIT if solved else 0.0
        return self._observe(), reward, solved, self._time == TIME_LIMIT, {}

    def render(self) -> Any:
        """Returns an image with black walls, the goal in green and the agent in red."""
        free = self._planes[0, MARGIN:-MARGIN, MARGIN:-MARGIN, None] == 0
        image = np.where(free, 255, 0).astype(np.uint8).repeat(3, axis=2)
        image[self._goal], image[self._y, self._x] = (0, 160, 0), (220, 0, 0)
        return image.repeat(16, axis=0).repeat(16, axis=1)

    def _observe(self) -> NDArray[np.int8]:
        y, x = self._y, self._x
        visits = self._planes[1]
        visits[y + MARGIN, x + MARGIN] = min(visits[y + MARGIN, x + MARGIN] + 1, MAX_VISITS)
        obs = np.empty(2 * VIEW * VIEW + 2, np.int8)
        obs[:-2] = self._planes[:, y : y + VIEW, x : x + VIEW].reshape(-1)
        goal_y, goal_x = self._goal
        obs[-2] = (goal_y > y) - (goal_y < y)
        obs[-1] = (goal_x > x) - (goal_x < x)
        return obs


# Workers would otherwise import this module for `Maze`, and so JAX.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


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


def perfect_mazes(count: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Returns held-out levels `[count, ...]`, mazes with exactly one way between any two cells."""
    rng = np.random.default_rng(seed)
    walls = np.ones((count, SIZE, SIZE), np.uint8)
    for maze in walls:
        stack = [(0, 0)]
        maze[0, 0] = 0
        while stack:
            y, x = stack[-1]
            steps = [(y + 2 * down, x + 2 * right, y + down, x + right) for down, right in MOVES]
            steps = [at for at in steps if 0 <= at[0] < SIZE and 0 <= at[1] < SIZE and maze[at[:2]]]
            if not steps:
                stack.pop()
                continue
            y, x, wall_y, wall_x = steps[rng.integers(len(steps))]
            maze[wall_y, wall_x] = maze[y, x] = 0
            stack.append((y, x))
    ends = [rng.choice(np.flatnonzero(maze.ravel() == 0), 2, replace=False) for maze in walls]
    start, goal = np.array(ends, np.int32).T
    return {"walls": walls, "start": start, "goal": goal}


@dataclass(frozen=True)
class Config:
    num_seeds: int = option(3, "number of agents with each way to choose levels")
    num_envs: int = option(32, "number of envs of each agent")
    num_workers: int | None = option(None, "number of worker processes; by default, one per usable core", int)
    total_steps: int = option(1_152_000, "env steps of each agent, rounded up to whole updates")
    num_batches: int = option(4, "batches of num-envs held-out mazes in a test")
    buffer_size: int = option(512, "number of levels in the buffer")
    replay: float = option(0.8, "probability that an env gets a level of the buffer, or a mutation of one")
    mutation: float = option(0.5, "probability that it is a mutation")
    temperature: float = option(1.0, "the lower, the more replays of the levels with the highest scores")
    staleness: float = option(0.3, "share of replays by the age of scores")
    num_epochs: int = option(2, "passes over the steps of an update")
    num_minibatches: int = option(4, "gradient steps per pass")
    lr: float = option(1e-3, "learning rate, falling linearly to 0")
    gamma: float = option(0.99, "discount per step")
    gae_lambda: float = option(0.95, "decay of the advantage estimate per step")
    clip: float = option(0.2, "PPO clip range")
    entropy_weight: float = option(0.01, "weight of the entropy bonus")
    save_every: int = option(50, "updates between two saves, each with a test on held-out mazes")
    seed: int = option(0, "random seed")
    name: str | None = option(None, "name of the folder in runs; by default program, seed and time", str)
    video: int = option(0, "number of envs of the first agent with replay to film; needs moviepy")
    tensorboard: bool = option(False, "write event files for TensorBoard, too; needs tensorboardX")
    wandb: bool = option(False, "log to Weights & Biases, too; needs wandb")

    def __post_init__(self) -> None:
        if min(self.num_seeds, self.num_envs, self.total_steps, self.num_batches, self.save_every) < 1:
            raise ValueError("the numbers of seeds, envs, steps, batches and updates must be at least 1")
        if self.num_envs * TIME_LIMIT % self.num_minibatches:
            raise ValueError(f"{TIME_LIMIT} x --num-envs must be a multiple of --num-minibatches")
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


def train(config: Config, run: Run, envs: jaxvec.VectorEnv) -> None:
    """Trains the agents, or continues a run, and writes its folder."""
    network: Any = ActorCritic()
    steps_per_update = config.num_envs * TIME_LIMIT
    num_updates = -(-config.total_steps // steps_per_update)
    num_gradients = config.num_epochs * config.num_minibatches  # of an update
    lr = optax.linear_schedule(config.lr, 0, num_updates * num_gradients)
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

        (handle, obs), played = jax.lax.scan(body, (handle, timestep.obs), jax.random.split(key, TIME_LIMIT))
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
        order = jax.vmap(jax.random.permutation, (0, None))(keys, steps_per_update)
        agent, metrics = jax.lax.scan(body, agent, order.reshape(num_gradients, -1))
        explained = 1 - jnp.var(advantage) / (jnp.var(rows[2]) + 1e-8)
        return agent, jax.tree.map(jnp.mean, metrics) | {"explained_variance": explained}

    def begin(key: jax.Array) -> tuple[Agent, jaxvec.Handle]:
        init_key, level_key = jax.random.split(key)
        level = random_levels(level_key, config.buffer_size)
        zeros = jnp.zeros(config.buffer_size)
        buffer = Buffer(level, zeros, zeros, zeros.astype(jnp.int32))
        first = jax.tree.map(lambda leaf: leaf[: config.num_envs], level)
        handle, timestep = jaxvec.reset(envs, num_envs=config.num_envs, options=first)
        params = network.init(init_key, timestep.obs)
        parts = {"params": params, "buffer": buffer, "episodes": Episodes.create()}
        return Agent.create(apply_fn=network.apply, tx=optimizer, **parts), handle

    def update(now: jax.Array, key: jax.Array, replay: Any, agent: Agent, handle: jaxvec.Handle) -> Any:
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
        # MaxMC: how much less than its best return on the level the agent expects, so that levels count that
        # were solved, but not yet learned. Rewards come only at the end of an episode.
        best = jnp.maximum(steps.reward.max(0), jnp.where(is_same, buffer.best[place], 0))
        score = (best - steps.value).mean(0)
        seen = Buffer(level, best, score, jnp.full_like(place, now))
        buffer = buffer.add(seen, jnp.where(is_same, place, config.buffer_size))
        agent, metrics = learn(agent, steps, advantage, keys[3])
        agent = agent.replace(buffer=buffer, episodes=agent.episodes.add(timesteps))
        return agent, handle, metrics | agent.episodes.means() | {"walls": level["walls"].mean()}

    def log(number: jax.Array, metrics: dict[str, jax.Array]) -> None:
        """Logs the means of metrics, `[num_agents]`, with replay and with uniform levels."""
        means = {name: leaf.reshape(2, -1).mean(1) for name, leaf in metrics.items()}
        uniform = {f"uniform_{name}": mean[1] for name, mean in means.items()}
        run.log(number * steps_per_update, **{name: mean[0] for name, mean in means.items()}, **uniform)

    def repeat(until: jax.Array, *carry: Any) -> Any:
        """Repeats `update`, and reports. The carry ends with whether to stop."""

        def body(carry: Any) -> Any:
            now, agents, handles, _ = carry
            in_axes = None, 0, 0, 0, 0
            agents, handles, metrics = jax.vmap(update, in_axes)(now, keys, replays, agents, handles)
            log(now + 1, metrics)
            return now + 1, agents, handles, run.stopping()

        return jax.lax.while_loop(lambda carry: (carry[0] < until) & ~carry[3], body, carry)

    def test(key: jax.Array, params: Any, handle: jaxvec.Handle) -> tuple[jaxvec.Handle, jax.Array]:
        """Plays the held-out mazes. Returns the share that the agent solved, `[]` float32."""

        def play(handle: jaxvec.Handle, level: Level) -> tuple[jaxvec.Handle, jax.Array]:
            handle, _, timesteps, _ = rollout(params, handle, level, key)
            return handle, timesteps.terminated.any(0).mean()

        handle, shares = jax.lax.scan(play, handle, held_out)
        return handle, shares.mean()

    (agents, handles), stop = jax.jit(jax.vmap(begin))(keys), jnp.bool_(False)
    (number, agents), _ = run.load((jnp.int32(0), agents))
    program, play = jax.jit(repeat), jax.jit(jax.vmap(test))
    with run.signals():
        run.show("compiling")
        while number < num_updates and not stop:
            until = jnp.minimum((number // config.save_every + 1) * config.save_every, num_updates)
            carry = program(until, number, agents, handles, stop)
            number, agents, handles, stop = jax.block_until_ready(carry)
            if not run.stopped:
                handles, shares = play(keys, agents.params, handles)
                seeds = {f"evaluation_{i}": shares[i :: config.num_seeds] for i in range(config.num_seeds)}
                log(number, {"evaluation": shares, **seeds})
            run.save((number, agents), params={"params": agents.params})


def main(argv: Sequence[str] | None = None) -> Run:
    about = "Compare prioritised level replay with uniformly drawn levels."
    with training(Config, argv, program="plr", about=about) as (config, run):
        num_envs, env = 2 * config.num_seeds * config.num_envs, run.film(Maze, config.video)
        with jaxvec.make(env, num_envs, num_workers=config.num_workers, reset_options=LEVEL) as envs:
            train(config, run, envs)
    return run


if __name__ == "__main__":
    main()
