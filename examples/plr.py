"""Prioritised level replay against uniformly drawn levels, with all of training in one `jax.jit`.

    python examples/plr.py

Each update of PPO starts with a choice of levels: new ones, levels from a buffer that the agent can still
learn from, and mutations of those. The levels are arrays of the program, which `jaxvec.reset(options=...)`
gives to mazes in plain Python. After the update, each level gets a score, and the buffer keeps the best.

All runs are one program: `jax.vmap` maps training over seeds and over both ways to choose levels. At the end,
agents play held-out mazes of a kind that training never shows. The methods are those of Jiang et al. (2021),
"Prioritized Level Replay", and Parker-Holder et al. (2022), "Evolving Curricula with Regret-Based Environment
Design".
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from gymnasium import spaces
from numpy.typing import NDArray

import jaxvec

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
    """Options of the program. Each is a flag of the command line."""

    num_seeds: int = 3
    num_envs: int = 32  # of each run
    num_workers: int = 2
    num_updates: int = 300
    num_tests: int = 6  # evaluations on held-out mazes during training
    num_batches: int = 4  # of num_envs held-out mazes
    buffer_size: int = 512
    replay: float = 0.8  # probability that an env gets a level of the buffer, or a mutation of one
    mutation: float = 0.5  # probability that it is a mutation
    temperature: float = 1.0  # the lower, the more often the levels with the highest scores are replayed
    staleness: float = 0.3  # share of replays by the age of scores
    num_epochs: int = 2
    num_minibatches: int = 4
    lr: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_weight: float = 0.01
    seed: int = 0


class ActorCritic(nn.Module):
    """Networks for policy and value, with two hidden layers each."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[..., obs_size]` to logits `[..., 4]` and values `[...]`."""

        def network(num_outputs: int) -> jax.Array:
            hidden = obs.astype(jnp.float32) / 2
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64)(hidden))
            return nn.Dense(num_outputs)(hidden)

        return network(4), network(1)[..., 0]


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
    solved: jax.Array


class Trained(NamedTuple):
    """Result of a run at each test, `[num_tests]` float32."""

    held_out: jax.Array  # share of the held-out mazes that the agent solved
    walls: jax.Array  # share of walls in the levels of training since the test before


def make_train(config: Config, envs: jaxvec.VectorEnv) -> Callable[[jax.Array, jax.Array], Trained]:
    """Returns a function that trains an agent, given a key and the probability of replays."""
    network: Any = ActorCritic()
    num_gradients = config.num_updates * config.num_epochs * config.num_minibatches
    lr = optax.linear_schedule(config.lr, 0, num_gradients)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(lr))
    shape = config.num_batches, config.num_envs
    mazes = perfect_mazes(config.num_batches * config.num_envs)
    held_out = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(*shape, *leaf.shape[1:]), mazes)

    def rollout(params: Any, handle: jaxvec.Handle, level: Level, key: jax.Array) -> Any:
        """Plays one level per env. Automatic resets start it again, since envs keep their options."""
        handle, timestep = jaxvec.reset(handle, options=level)

        def body(carry: Any, key: jax.Array) -> tuple[Any, Steps]:
            handle, obs = carry
            logits, value = network.apply(params, obs)
            action = jax.random.categorical(key, logits)
            log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            handle, timestep = jaxvec.step(handle, action)
            # The time limit counts as an end without a reward, as in other implementations.
            done = timestep.terminated | timestep.truncated
            steps = Steps(obs, action, log_prob, value, timestep.reward, done, timestep.terminated)
            return (handle, timestep.obs), steps

        (handle, obs), steps = jax.lax.scan(body, (handle, timestep.obs), jax.random.split(key, TIME_LIMIT))
        return handle, steps, network.apply(params, obs)[1]

    def advantages(steps: Steps, last_value: jax.Array) -> jax.Array:
        def body(carry: Any, step: Steps) -> tuple[Any, jax.Array]:
            later, next_value = carry
            surprise = step.reward + config.gamma * jnp.where(step.done, 0, next_value) - step.value
            later = surprise + config.gamma * config.gae_lambda * jnp.where(step.done, 0, later)
            return (later, step.value), later

        return jax.lax.scan(body, (jnp.zeros_like(last_value), last_value), steps, reverse=True)[1]

    def loss(params: Any, batch: tuple[Steps, jax.Array, jax.Array]) -> jax.Array:
        steps, advantage, target = batch
        logits, value = network.apply(params, steps.obs)
        log_probs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(jnp.take_along_axis(log_probs, steps.action[:, None], 1)[:, 0] - steps.log_prob)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - config.clip, 1 + config.clip) * advantage)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        return jnp.mean(0.25 * jnp.square(value - target) - gain - config.entropy_weight * entropy)

    def learn(learner: Any, steps: Steps, advantage: jax.Array, key: jax.Array) -> Any:
        data = steps, advantage, advantage + steps.value
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), data)

        def body(learner: Any, chosen: jax.Array) -> tuple[Any, None]:
            params, opt_state = learner
            gradient = jax.grad(loss)(params, jax.tree.map(lambda leaf: leaf[chosen], rows))
            change, opt_state = optimizer.update(gradient, opt_state, params)
            return (optax.apply_updates(params, change), opt_state), None

        keys = jax.random.split(key, config.num_epochs)
        order = jax.vmap(jax.random.permutation, (0, None))(keys, TIME_LIMIT * config.num_envs)
        return jax.lax.scan(body, learner, order.reshape(config.num_epochs * config.num_minibatches, -1))[0]

    def train(key: jax.Array, replay: jax.Array) -> Trained:
        def update(carry: Any, now: jax.Array) -> tuple[Any, jax.Array]:
            learner, handle, buffer = carry
            new_key, place_key, mutate_key, *keys = jax.random.split(jax.random.fold_in(key, now), 7)
            new = random_levels(new_key, config.num_envs)
            place = buffer.sample(config, place_key, now)
            old = jax.tree.map(lambda leaf: leaf[place], buffer.level)
            is_old = jax.random.bernoulli(keys[0], replay, place.shape)
            is_same = is_old & ~jax.random.bernoulli(keys[1], config.mutation, place.shape)

            def choose(new: jax.Array, mutated: jax.Array, old: jax.Array) -> jax.Array:
                shape = -1, *[1] * (new.ndim - 1)
                return jnp.where(is_same.reshape(shape), old, jnp.where(is_old.reshape(shape), mutated, new))

            level = jax.tree.map(choose, new, mutate(mutate_key, old), old)
            handle, steps, last_value = rollout(learner[0], handle, level, keys[2])
            advantage = advantages(steps, last_value)
            # MaxMC: how much less than its best return on the level the agent expects, so that levels count
            # that were solved, but not yet learned. Rewards come only at the end of an episode.
            best = jnp.maximum(steps.reward.max(0), jnp.where(is_same, buffer.best[place], 0))
            score = (best - steps.value).mean(0)
            seen = Buffer(level, best, score, jnp.full_like(place, now))
            buffer = buffer.add(seen, jnp.where(is_same, place, config.buffer_size))
            learner = learn(learner, steps, advantage, keys[3])
            return (learner, handle, buffer), level["walls"].mean()

        def stage(carry: Any, updates: jax.Array) -> tuple[Any, Trained]:
            """Makes some updates, and then plays the held-out mazes."""
            (learner, handle, buffer), walls = jax.lax.scan(update, carry, updates)

            def play(handle: jaxvec.Handle, level: Level) -> tuple[jaxvec.Handle, jax.Array]:
                handle, steps, _ = rollout(learner[0], handle, level, key)
                return handle, steps.solved.any(0).mean()

            handle, shares = jax.lax.scan(play, handle, held_out)
            return (learner, handle, buffer), Trained(shares.mean(), walls.mean())

        init_key, level_key = jax.random.split(key)
        level = random_levels(level_key, config.buffer_size)
        zeros = jnp.zeros(config.buffer_size)
        buffer = Buffer(level, zeros, zeros, zeros.astype(jnp.int32))
        first = jax.tree.map(lambda leaf: leaf[: config.num_envs], level)
        handle, timestep = jaxvec.reset(envs, num_envs=config.num_envs, options=first)
        params = network.init(init_key, timestep.obs)
        carry = (params, optimizer.init(params)), handle, buffer
        updates = jnp.arange(config.num_updates).reshape(config.num_tests, -1)
        return jax.lax.scan(stage, carry, updates)[1]

    return train


def main(argv: Sequence[str] | None = None) -> Trained:
    about = "Compare prioritised level replay with uniformly drawn levels."
    parser = argparse.ArgumentParser(prog="python examples/plr.py", description=about)
    for each in fields(Config):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=type(each.default), default=each.default)
    config = Config(**vars(parser.parse_args(argv)))
    start = time.perf_counter()
    # Runs with each seed, first without replays: levels are then drawn uniformly.
    keys = jnp.tile(jax.random.split(jax.random.key(config.seed), config.num_seeds), 2)
    replay = jnp.repeat(jnp.array([0.0, config.replay]), config.num_seeds)
    num_envs = 2 * config.num_seeds * config.num_envs
    with jaxvec.make(Maze, num_envs, num_workers=config.num_workers, reset_options=LEVEL) as envs:
        runs = jax.jit(jax.vmap(make_train(config, envs)))(keys, replay)
        runs = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(2, config.num_seeds, -1), runs)
    print("updates, and share of the held-out mazes that were solved with uniform levels, and with replay")
    for test, both in enumerate(np.moveaxis(runs.held_out, -1, 0), 1):
        shares = [f"{one.mean():.3f} {one.round(3)}" for one in both]
        print(test * config.num_updates // config.num_tests, *shares)
    print(f"share of walls in the last levels of training: {runs.walls[:, :, -1].mean(1)}")
    seconds, steps = time.perf_counter() - start, config.num_updates * config.num_envs * TIME_LIMIT
    print(f"{steps:,} env steps per run; {seconds:.0f} s for all runs, including compilation and tests")
    return runs


if __name__ == "__main__":
    main()
