"""Compares published JAX ports with their Python originals: `python -m benchmarks.ports`.

It writes `docs/ports.json`, and prints it as tables. Ports whose packages are not installed keep their
earlier entries. `--print` only prints the tables, and `--only NAME` makes one row. A summary is in
`docs/how-to/port_an_env.md`; `benchmarks/port_reports.md` shows some differences without jaxvec.

Errors up to 1e-5 count as equal; they are relative for values above 1. Values in brackets are those of the
port and of the original, in the step with the largest error. "Free running" means here that each episode
starts from the resets of both sides. Seeds give other random levels on each side, so these are compared by
two-sample tests: one finds a difference if its p-value is at most the threshold, 1 % divided by the number
of tests. Means have 95 % intervals, and are those of the element with the smallest p-value, counted in the
flat array. A policy is trained on the port by PPO, and then plays on both sides.

    pip install "gymnax>=1.0" six minatar navix minigrid pgx open-spiel jumanji lbforaging scipy flax optax
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import jaxvec
from jaxvec import Timeouts
from jaxvec.ports import Port, as_port, compare_distributions, compare_port

RESULTS = Path(__file__).resolve().parents[1] / "docs/ports.json"


@dataclass(frozen=True)
class Pair:
    """A port and its original.

    Attributes:
        name: Name in the table.
        packages: Distributions of the port and of the original.
        port: Function that makes the port.
        original: What `compare_port` takes.
        options: Further arguments of `compare_port`.
    """

    name: str
    packages: tuple[str, str]
    port: Callable[[], Any]
    original: Any
    options: dict[str, Any] = field(default_factory=dict)


def _gymnax(name: str) -> Callable[[], Port]:
    def make() -> Port:
        import gymnax

        return as_port(*gymnax.make(name))

    return make


def _sets(*names: str, array: bool = False) -> Callable[[Any, Any], None]:
    """Returns a `set_state` that sets `env.unwrapped.state` to these leaves."""

    def set_state(env: Any, state: Any) -> None:
        values = [float(state[name]) for name in names]
        env.unwrapped.state = np.array(values) if array else values

    return set_state


def _phys2d_cart_pole() -> Port:
    """Returns Gymnasium's own JAX CartPole."""
    from gymnasium.envs.phys2d.cartpole import CartPoleFunctional

    env: Any = CartPoleFunctional()

    def reset(key: Any) -> Any:
        state = env.initial(key)
        return state, env.observation(state, key)

    def step(key: Any, state: Any, action: Any) -> Any:
        after = env.transition(state, action)
        results = {"obs": env.observation(after, key), "reward": env.reward(state, action, after, key)}
        return after, {**results, "terminated": env.terminal(after, key), "truncated": False}

    return Port(reset, step, env.observation_space, env.action_space)


def _set_cart_pole(env: Any, state: Any) -> None:
    env.unwrapped.state = state["state"].astype(float)


# --- MinAtar: the original holds its state in attributes of `env.game.env` ------------------------------


def _minatar(game: str) -> Callable[[], Any]:
    def make() -> Any:
        from minatar.gym import BaseEnv

        return BaseEnv(game, use_minimal_action_set=True, sticky_action_prob=0.0)

    return make


def _set_breakout(env: Any, state: Any) -> None:
    game = env.game.env
    for name in ("ball_y", "ball_x", "ball_dir", "pos", "last_y", "last_x"):
        setattr(game, name, int(state[name]))
    game.brick_map = np.array(state["brick_map"], float)
    game.strike, game.terminal = bool(state["strike"]), bool(state["terminal"])


def _set_space_invaders(env: Any, state: Any) -> None:
    game = env.game.env
    same = ("pos", "alien_dir", "enemy_move_interval", "alien_move_timer", "alien_shot_timer", "ramp_index")
    for name in (*same, "shot_timer"):
        setattr(game, name, int(state[name]))
    for name in ("f_bullet_map", "e_bullet_map", "alien_map"):
        setattr(game, name, np.array(state[name], float))
    game.terminal = bool(state["terminal"])


def _seaquest_draws(key: Any) -> Any:
    """Returns what a step of gymnax's Seaquest draws for a new enemy and a new diver."""
    enemy_key, diver_key = jax.random.split(key)
    kind_key, row_key = jax.random.split(enemy_key)
    kind, row = jax.random.uniform(kind_key, (2,)), jax.random.randint(row_key, (), 1, 9)
    side_key, diver_row_key = jax.random.split(diver_key)
    side, diver_row = jax.random.bernoulli(side_key), jax.random.randint(diver_row_key, (), 1, 9)
    return {"enemy": jnp.array([*kind, row]), "diver": jnp.array([1.0 - side, diver_row])}


class _Draws:
    """The random numbers of a step of the original."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = iter(values)

    def rand(self) -> float:
        return next(self._values)

    def randint(self, low: int, high: int) -> int:
        return int(next(self._values))


def _set_seaquest(env: Any, state: Any) -> None:
    game = env.game.env
    numbers = ("oxygen", "diver_count", "sub_x", "sub_y", "move_speed", "ramp_index", "shot_timer")
    for name in (*numbers, "e_spawn_speed", "e_spawn_timer", "d_spawn_timer"):
        setattr(game, name, int(state[name]))
    for name in ("sub_or", "surface", "terminal"):
        setattr(game, name, bool(state[name]))
    counts = {"f_bullets": "f_bullet_count", "e_bullets": "e_bullet_count", "divers": "divers_count"}
    for name, count in (counts | {"e_fish": "e_fish_count", "e_subs": "e_subs_count"}).items():
        setattr(game, name, state[name][: int(state[count])].tolist())
    enemy = state["draws/enemy"].tolist() if game.e_spawn_timer == 0 else []
    game.random = _Draws([*enemy, *state["draws/diver"].tolist()])


def _dive(key: Any, obs: Any, state: Any) -> Any:
    """Plays at random, but rarely moves up without a diver, which ends the episode at the surface."""
    action_key, up_key = jax.random.split(key)
    action, up = jax.random.randint(action_key, (), 0, 6), jax.random.bernoulli(up_key, 0.1)
    return jnp.where((action == 2) & (state.diver_count < 1) & ~up, 4, action)


# --- MiniGrid: the whole grid, with rows and columns exchanged as in Navix ------------------------------


def _navix(name: str) -> Callable[[], Port]:
    def make() -> Port:
        import navix

        observe = navix.observations.symbolic
        return as_port(navix.make(name, observation_fn=observe))

    return make


class _Grid(gymnasium.ObservationWrapper):
    """The whole grid of a MiniGrid env, with the axes of Navix."""

    def __init__(self, name: str) -> None:
        from minigrid.wrappers import FullyObsWrapper

        super().__init__(FullyObsWrapper(gymnasium.make(name, disable_env_checker=True)))
        game: Any = self.unwrapped
        game.gen_obs = dict  # the agent's view, which is slow and not used
        image = self.env.observation_space["image"]
        self.observation_space = spaces.Box(0, 255, (image.shape[1], image.shape[0], 3), np.uint8)

    def observation(self, observation: Any) -> Any:
        return observation["image"].transpose(1, 0, 2)


def _door_key_state(timestep: Any) -> Any:
    return {"time": timestep.t, "grid": timestep.state.grid, **timestep.state.entities}


def _set_door_key(env: Any, state: Any) -> None:
    from minigrid.core.grid import Grid
    from minigrid.core.world_object import Door, Goal, Key, Wall

    game, (height, width) = env.unwrapped, state["grid"].shape
    game.grid = Grid(width, height)
    has_key, opened = int(state["player/pocket"][0]) == int(state["key/id"][0]), bool(state["door/open"][0])
    wall = Wall()
    for row, column in (*np.argwhere(state["grid"] == -1), *state["wall/position"]):
        game.grid.set(int(column), int(row), wall)
    locked = int(state["door/requires"][0]) != -1
    things = {"door": Door("yellow", is_open=opened, is_locked=locked), "goal": Goal(), "key": Key("yellow")}
    for name, thing in things.items():
        row, column = state[f"{name}/position"][0].tolist()
        if column >= 0:  # else it is not on the grid; a key that was dropped also remains in the pocket
            game.grid.set(column, row, thing)
    row, column = state["player/position"][0].tolist()
    game.agent_pos, game.agent_dir = (column, row), int(state["player/direction"][0])
    game.carrying = Key("yellow") if has_key else None
    game.step_count = int(state["time"])


def _set_go_to_door(env: Any, state: Any) -> None:
    from minigrid.core.constants import IDX_TO_COLOR
    from minigrid.core.grid import Grid
    from minigrid.core.world_object import Door, Wall

    game, (height, width) = env.unwrapped, state["grid"].shape
    game.grid = Grid(width, height)
    wall = Wall()
    for row, column in np.argwhere(state["grid"] == -1):
        game.grid.set(int(column), int(row), wall)
    for place, colour, opened in zip(
        state["door/position"].tolist(), state["door/colour"], state["door/open"], strict=True
    ):
        game.grid.set(place[1], place[0], Door(IDX_TO_COLOR[int(colour)], is_open=bool(opened)))
    game.target_pos = tuple(state["target"].ravel().tolist()[::-1])
    row, column = state["player/position"][0].tolist()
    game.agent_pos, game.agent_dir = (column, row), int(state["player/direction"][0])
    game.carrying, game.step_count = None, int(state["time"])


def _go_to_door_state(timestep: Any) -> Any:
    return _door_key_state(timestep) | {"target": timestep.state.mission.position}


# --- Level-based foraging: where the agents are, and the food that is left ------------------------------


def _foraging() -> Port:
    from jumanji.environments import LevelBasedForaging

    env = LevelBasedForaging(time_limit=50)  # 8x8, two agents, two foods, as the original's id says

    def observe(state: Any) -> Any:
        food = state.food_items
        levels = jnp.where(food.eaten, 0, food.level)
        field = jnp.zeros((8, 8), jnp.int32).at[tuple(food.position.T)].add(levels)
        return {"agents": state.agents.position, "field": field}

    def reset(key: Any) -> Any:
        state, _ = env.reset(key)
        return state, observe(state)

    def step(key: Any, state: Any, action: Any) -> Any:
        after, timestep = env.step(state, action)
        goes_on = timestep.discount.max() > 0
        ends = {"terminated": timestep.last() & ~goes_on, "truncated": timestep.last() & goes_on}
        return after, {"obs": observe(after), "reward": timestep.reward.sum(), **ends}

    return Port(reset, step, None, spaces.MultiDiscrete([6, 6]))


class _Foraging(gymnasium.Wrapper):
    """The original with the observations of `_foraging`, and the sum of the agents' rewards."""

    def __init__(self) -> None:
        import lbforaging  # registers the envs  # noqa: F401

        name = "Foraging-8x8-2p-2f-coop-v3"
        super().__init__(gymnasium.make(name, disable_env_checker=True).unwrapped)
        agents, field = spaces.Box(0, 7, (2, 2), np.int32), spaces.Box(0, 12, (8, 8), np.int32)
        self.observation_space = spaces.Dict({"agents": agents, "field": field})
        self.action_space = spaces.MultiDiscrete([6, 6])

    def reset(self, **options: Any) -> Any:
        self.env.reset(**options)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        _, rewards, done, truncated, info = self.env.step(action.tolist())
        return self._observe(), sum(rewards), done, truncated, info

    def _observe(self) -> Any:
        game: Any = self.unwrapped
        positions = [player.position for player in game.players]
        return {"agents": np.array(positions, np.int32), "field": game.field.astype(np.int32)}


def _foraging_state(state: Any) -> Any:
    return {
        "agents": vars(state.agents),
        "food_items": vars(state.food_items),
        "step_count": state.step_count,
    }


def _set_foraging(env: Any, state: Any) -> None:
    game = env.unwrapped
    levels = np.where(state["food_items/eaten"], 0, state["food_items/level"])
    game.field[:] = 0
    game.field[tuple(state["food_items/position"].T)] = levels
    game._food_spawned = state["food_items/level"].sum()
    places, levels = state["agents/position"].tolist(), state["agents/level"].tolist()
    for player, place, level in zip(game.players, places, levels, strict=True):
        player.position, player.level = tuple(place), level
    game.current_step = int(state["step_count"])
    game._gen_valid_moves()


def _forage(key: Any, obs: Any, state: Any) -> Any:
    """Moves to the first food that is left, and loads it, in most steps."""
    random_key, action_key = jax.random.split(key)
    gaps = state.food_items.position[jnp.argmin(state.food_items.eaten)] - state.agents.position
    rows, columns = gaps.T
    moves = jnp.where(jnp.abs(rows) > jnp.abs(columns), 1 + (rows > 0), 3 + (columns > 0))
    actions = jnp.where(jnp.abs(gaps).sum(-1) == 1, 5, moves)
    random = jax.random.bernoulli(random_key, 0.4, (2,))
    return jnp.where(random, jax.random.randint(action_key, (2,), 0, 6), actions)


# --- Board games: OpenSpiel's boards as in Pgx, and the legal actions -----------------------------------


def _pgx(name: str, observe: Callable[[Any], Any]) -> Callable[[], Port]:
    def make() -> Port:
        import pgx

        env = pgx.make(name)

        def reset(key: Any) -> Any:
            state = env.init(key).replace(current_player=jnp.int32(0))
            return state, observe(state)

        def step(key: Any, state: Any, action: Any) -> Any:
            after = env.step(state, action)
            ends = {"terminated": after.terminated, "truncated": after.truncated}
            info = {"legal": after.legal_action_mask | after.terminated}
            return after, {"obs": observe(after), "reward": after.rewards[0], **ends, "info": info}

        return Port(reset, step, None, spaces.Discrete(env.num_actions))

    return make


def _legal(key: Any, obs: Any, state: Any) -> Any:
    return jax.random.categorical(key, jnp.where(state.legal_action_mask, 0.0, -jnp.inf))


class _Board(gymnasium.Env):
    """A game of OpenSpiel for two players. The reward is that of player 0, who begins."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        import pyspiel

        self._game = pyspiel.load_game(name)
        self._shape = shape
        self.observation_space = spaces.Box(-1, 1, shape, np.int8)
        self.action_space = spaces.Discrete(self._game.num_distinct_actions())

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._state = self._game.new_initial_state()
        return self._board(), {}

    def step(self, action: Any) -> Any:
        self._state.apply_action(int(action))
        over = self._state.is_terminal()
        legal = np.array(self._state.legal_actions_mask() or [over] * int(self.action_space.n), bool)
        return self._board(), self._state.returns()[0], over, False, {"legal": legal | over}

    def _board(self) -> Any:
        # Planes of player 0, of player 1 and of empty fields, in an order that differs by game.
        return _PLANES[self._game.get_type().short_name](
            np.array(self._state.observation_tensor(0)).reshape(3, *self._shape)
        ).astype(np.int8)


_PLANES: dict[str, Any] = {
    "tic_tac_toe": lambda planes: planes[2] - planes[1],
    "connect_four": lambda planes: (planes[0] - planes[1])[::-1],
}


def _tic_tac_toe(state: Any) -> Any:
    board = state._x.board.reshape(3, 3)
    return jnp.where(board == 0, 1, jnp.where(board == 1, -1, 0)).astype(jnp.int8)


def _connect_four(state: Any) -> Any:
    board = state._x.board.reshape(6, 7)
    return jnp.where(board == 0, 1, jnp.where(board == 1, -1, 0)).astype(jnp.int8)


def _balance(key: Any, obs: Any, state: Any) -> Any:
    """Balances the pole in most steps, so that episodes reach the time limit."""
    random, right = jax.random.bernoulli(key, 0.15), obs[2] + 0.3 * obs[3] + 0.03 * obs[1] > 0
    return jnp.where(random, jax.random.randint(key, (), 0, 2), right.astype(jnp.int32))


def _swing(key: Any, obs: Any, state: Any) -> Any:
    """Accelerates in the direction of the speed in most steps, so that episodes reach the goal."""
    random, right = jax.random.bernoulli(key, 0.2), 2 * (obs[1] > 0)
    return jnp.where(random, jax.random.randint(key, (), 0, 3), right.astype(jnp.int32))


_CLASSIC = ("gymnax", "gymnasium")
_FREE: dict[str, Any] = {"mode": "free_running"}
PAIRS = [
    Pair(
        "CartPole",
        _CLASSIC,
        _gymnax("CartPole-v1"),
        "CartPole-v1",
        {"set_state": _sets("x", "x_dot", "theta", "theta_dot"), "policy": _balance},
    ),
    Pair(
        "CartPole of phys2d",
        ("gymnasium", "gymnasium"),
        _phys2d_cart_pole,
        lambda: (
            gymnasium.make("CartPole-v1", disable_env_checker=True).unwrapped
        ),  # no time limit, as the port
        {"set_state": _set_cart_pole, "policy": _balance},
    ),
    Pair(
        "Acrobot",
        _CLASSIC,
        _gymnax("Acrobot-v1"),
        "Acrobot-v1",
        {"set_state": _sets("joint_angle1", "joint_angle2", "velocity_1", "velocity_2", array=True)},
    ),
    Pair(
        "MountainCar",
        _CLASSIC,
        _gymnax("MountainCar-v0"),
        "MountainCar-v0",
        {"set_state": _sets("position", "velocity"), "policy": _swing},
    ),
    Pair(
        "MountainCarContinuous",
        _CLASSIC,
        _gymnax("MountainCarContinuous-v0"),
        "MountainCarContinuous-v0",
        {"set_state": _sets("position", "velocity", array=True)},
    ),
    Pair(
        "Pendulum",
        _CLASSIC,
        _gymnax("Pendulum-v1"),
        "Pendulum-v1",
        {"set_state": _sets("theta", "theta_dot", array=True)},
    ),
    Pair(
        "MinAtar Breakout",
        ("gymnax", "minatar"),
        _gymnax("Breakout-MinAtar"),
        _minatar("breakout"),
        {"set_state": _set_breakout},
    ),
    Pair(
        "MinAtar Space Invaders",
        ("gymnax", "minatar"),
        _gymnax("SpaceInvaders-MinAtar"),
        _minatar("space_invaders"),
        {"set_state": _set_space_invaders},
    ),
    Pair(
        "MinAtar Seaquest",
        ("gymnax", "minatar"),
        _gymnax("Seaquest-MinAtar"),
        _minatar("seaquest"),
        {"set_state": _set_seaquest, "draws": _seaquest_draws, "policy": _dive},
    ),
    Pair(
        "Tic-tac-toe",
        ("pgx", "open-spiel"),
        _pgx("tic_tac_toe", _tic_tac_toe),
        lambda: _Board("tic_tac_toe", (3, 3)),
        {"policy": _legal, **_FREE, "info": {"legal": (np.bool_, (9,))}},
    ),
    Pair(
        "Connect Four",
        ("pgx", "open-spiel"),
        _pgx("connect_four", _connect_four),
        lambda: _Board("connect_four", (6, 7)),
        {"policy": _legal, **_FREE, "info": {"legal": (np.bool_, (7,))}},
    ),
    Pair(
        "MiniGrid Empty 8x8",
        ("navix", "minigrid"),
        _navix("Navix-Empty-8x8-v0"),
        lambda: _Grid("MiniGrid-Empty-8x8-v0"),
        _FREE,
    ),
    Pair(
        "MiniGrid DistShift1",
        ("navix", "minigrid"),
        _navix("Navix-DistShift1-v0"),
        lambda: _Grid("MiniGrid-DistShift1-v0"),
        _FREE,
    ),
    Pair(
        "MiniGrid DoorKey 6x6",
        ("navix", "minigrid"),
        _navix("Navix-DoorKey-Random-6x6-v0"),
        lambda: _Grid("MiniGrid-DoorKey-6x6-v0"),
        {"set_state": _set_door_key, "select_state": _door_key_state},
    ),
    Pair(
        "MiniGrid GoToDoor 8x8",
        ("navix", "minigrid"),
        _navix("Navix-GoToDoor-8x8-v0"),
        lambda: _Grid("MiniGrid-GoToDoor-8x8-v0"),
        {"set_state": _set_go_to_door, "select_state": _go_to_door_state},
    ),
    Pair(
        "Level-based foraging",
        ("jumanji", "lbforaging"),
        _foraging,
        _Foraging,
        {"set_state": _set_foraging, "select_state": _foraging_state, "policy": _forage},
    ),
]
LEVELS = [
    Pair(
        "Levels of MiniGrid Empty Random 6x6",
        ("navix", "minigrid"),
        _navix("Navix-Empty-Random-6x6-v0"),
        lambda: _Grid("MiniGrid-Empty-Random-6x6-v0"),
        {"max_steps": 100},
    ),
    Pair(
        "Levels of MiniGrid DoorKey 6x6",
        ("navix", "minigrid"),
        _navix("Navix-DoorKey-Random-6x6-v0"),
        lambda: _Grid("MiniGrid-DoorKey-6x6-v0"),
        {"max_steps": 100},
    ),
    Pair(
        "Levels of MiniGrid GoToDoor 8x8",
        ("navix", "minigrid"),
        _navix("Navix-GoToDoor-8x8-v0"),
        lambda: _Grid("MiniGrid-GoToDoor-8x8-v0"),
        {"max_steps": 50},
    ),
    Pair(
        "Levels of level-based foraging",
        ("jumanji", "lbforaging"),
        _foraging,
        _Foraging,
        {"max_steps": 50},
    ),
    Pair(
        "MinAtar Asterix",
        ("gymnax", "minatar"),
        _gymnax("Asterix-MinAtar"),
        _minatar("asterix"),
        {"max_steps": 1000},
    ),
]
TRANSFERS = [
    Pair("CartPole", _CLASSIC, _gymnax("CartPole-v1"), "CartPole-v1", {"max_steps": 500}),
    Pair("Acrobot", _CLASSIC, _gymnax("Acrobot-v1"), "Acrobot-v1", {"max_steps": 500}),
    Pair(
        "MinAtar Breakout",
        ("gymnax", "minatar"),
        _gymnax("Breakout-MinAtar"),
        _minatar("breakout"),
        {"max_steps": 1000},
    ),
]


def compare(pair: Pair, num_envs: int, num_steps: int) -> dict[str, Any]:
    """Returns the entry of a pair in `RESULTS`."""
    start = time.perf_counter()
    result = compare_port(
        pair.port(),
        pair.original,
        num_envs=num_envs,
        num_steps=num_steps,
        tolerances=1e-5,
        num_workers=2,
        timeouts=Timeouts(start=300),  # some packages take long to import
        **pair.options,
    )
    print(f"== {pair.name}\n{result}", flush=True)
    if any(path in result.leaves for path in result.differences):
        print(result.replay(), flush=True)
    leaves = {}
    for path, each in result.leaves.items():
        worst = each.worst if each.different else None
        leaves[path] = {
            "different": each.different,
            "unequal": each.unequal,
            "max_error": each.max_error,
            "first_step": each.first_step,
            "ones": each.ones,
            "values": worst and _values(worst.port, worst.original),
            "step": worst and worst.step,
        }
    return {
        "mode": result.mode,
        "steps": num_envs * num_steps,
        "envs": num_envs,
        "episodes": result.episodes,
        "parted": result.parted,
        "versions": _versions(pair),
        "leaves": leaves,
        "properties": {
            name: [each.port, each.original] for name, each in result.spaces.items() if not each.equal
        },
        "seconds": round(time.perf_counter() - start, 1),
    }


def compare_levels(pair: Pair, num_episodes: int, **options: Any) -> dict[str, Any]:
    """Returns the entry of a pair whose episodes are compared by two-sample tests."""
    result = compare_distributions(
        pair.port(),
        pair.original,
        num_episodes=num_episodes,
        num_workers=2,
        timeouts=Timeouts(start=300),
        **pair.options,
        **options,
    )
    print(f"== {pair.name}\n{result}", flush=True)
    return {
        "episodes": result.num_episodes,
        "threshold": result.threshold,
        "versions": _versions(pair),
        "differences": result.differences,
        "samples": {name: asdict(each) for name, each in result.samples.items()},
    }


def compare_transfer(pair: Pair, total_steps: int, num_episodes: int) -> dict[str, Any]:
    """Returns the entry of a pair on which a policy of the port plays."""
    from benchmarks.port_policies import train
    from jaxvec.examples.ppo import Config

    env = gymnasium.make(pair.original) if isinstance(pair.original, str) else pair.original()
    policy = train(pair.port(), env.action_space, Config(total_steps=total_steps))
    entry = compare_levels(pair, num_episodes, policy=policy, probes=())
    return entry | {"trained_steps": total_steps}


def measure_speed(rounds: int = 3, num_envs: int = 256, num_steps: int = 400) -> dict[str, Any]:
    """Returns CPU times in microseconds per env step, of a comparison and of plain steps, taken in turns.

    All runs in this process. Unlike the wall time, its CPU time depends little on what else runs.
    """
    pair = PAIRS[0]
    port, options = pair.port(), pair.options | {"policy": None}
    sizes: dict[str, Any] = {"num_envs": num_envs, "backend": "serial"}

    def compared(steps: int) -> float:
        start = time.process_time()
        compare_port(port, pair.original, num_steps=steps, **options, **sizes)
        return time.process_time() - start

    def stepped() -> float:
        with jaxvec.make(pair.original, **sizes) as envs:

            def body(handle: Any, key: Any) -> Any:
                handle, timestep = jaxvec.step(handle, jax.random.randint(key, (num_envs,), 0, 2))
                return handle, timestep.reward.sum()

            handle, _ = jaxvec.reset(envs, seed=0)
            keys = jax.random.split(jax.random.key(0), num_steps)
            run = jax.jit(partial(jax.lax.scan, body)).lower(handle, keys).compile()
            start = time.process_time()
            jax.block_until_ready(run(handle, keys))
            return time.process_time() - start

    times = {"comparison": [], "plain steps": []}
    for _ in range(rounds):
        # The difference of a long and a short comparison is without imports and compilation.
        times["comparison"].append(compared(num_steps + 50) - compared(50))
        times["plain steps"].append(stepped())
        print(times, flush=True)
    count = num_envs * num_steps / 1e6
    medians = {name: float(np.median(each)) / count for name, each in times.items()}
    return {"envs": num_envs, "rounds": rounds, "versions": _versions(pair), "cpu": medians}


def _versions(pair: Pair) -> list[str]:
    return [f"{name} {importlib.metadata.version(name)}" for name in pair.packages]


def _values(port: Any, original: Any) -> list[str]:
    """Returns texts of both sides; of a large array, one of the elements with the largest error."""
    ours, theirs = np.asarray(port), np.asarray(original)
    if ours.size <= 4:
        return [_text(ours), _text(theirs)]
    place = np.unravel_index(np.argmax(np.abs(ours.astype(float) - theirs.astype(float))), ours.shape)
    return [f"{[int(each) for each in place]}: {_text(ours[place])}", _text(theirs[place])]


def _text(value: Any) -> str:
    array = np.asarray(value)
    return f"{array.item():.7g}" if array.ndim == 0 else np.array2string(array.ravel(), precision=7)


def table(results: dict[str, Any]) -> str:
    """Returns the table of steps as Markdown."""
    columns = "env", "port · original", "mode", "steps:", "results that differ", "properties that differ"
    rows = list[tuple[str, ...]]()
    for name, each in results.items():
        found = [
            f"`{path}`: {leaf['different']:,} steps, from step {leaf['first_step']} of an episode"
            + f" ({' · '.join(leaf['values'])})"
            for path, leaf in each["leaves"].items()
            if leaf["different"]
        ]
        equal = [leaf["max_error"] for leaf in each["leaves"].values() if not leaf["different"]]
        largest = max(equal, default=0)
        equal = "none" if largest == 0 else f"none (largest error {largest:.2g})"
        properties = [f"{part}: {ours} · {theirs}" for part, (ours, theirs) in each["properties"].items()]
        mode = each["mode"].replace("_", " ")
        cells = name, " · ".join(each["versions"]), mode, f"{each['steps']:,}"
        rows.append((*cells, "<br>".join(found) or equal, "<br>".join(properties)))
    return _markdown(columns, rows)


def levels_table(results: dict[str, Any]) -> str:
    """Returns the table of two-sample tests as Markdown."""
    columns = "env", "port · original", "samples per side:", "tests:", "threshold:", "smallest p:"
    rows = list[tuple[str, ...]]()
    for name, each in results.items():
        samples = each["samples"]
        found = [
            f"`{path}`, element {samples[path]['element']}: {_means(samples[path])}"
            for path in each["differences"]
        ] or ["none"]
        tests = sum(sample["tests"] for sample in samples.values())
        least = min(sample["p_value"] for sample in samples.values())
        cells = name, " · ".join(each["versions"]), f"{each['episodes']:,} episodes", str(tests)
        numbers = f"{each['threshold']:.2g}", f"{least:.2g}" if least else "< 1e-300"
        rows.append((*cells, *numbers, "<br>".join(found)))
    return _markdown((*columns, "different variables"), rows)


def transfers_table(results: dict[str, Any]) -> str:
    """Returns the table of policies as Markdown."""
    columns = "env", "port · original", "trained for:", "episodes per side:", "mean return", "p:"
    rows = list[tuple[str, ...]]()
    for name, each in results.items():
        returns = each["samples"]["return"]
        counts = f"{each['trained_steps']:,} steps", f"{each['episodes']:,}"
        numbers = f"{returns['p_value']:.2g}", f"{each['threshold']:.2g}"
        rows.append((name, " · ".join(each["versions"]), *counts, _means(returns), *numbers))
    return _markdown((*columns, "threshold:"), rows)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table. Columns whose names end in a colon are aligned to the right."""
    marks = ["---:" if name.endswith(":") else "---" for name in columns]
    lines = [[name.removesuffix(":") for name in columns], marks, *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _means(sample: dict[str, Any]) -> str:
    pairs = zip(sample["means"], sample["errors"], strict=True)
    return " · ".join(f"{mean:.4g} ± {error:.2g}" for mean, error in pairs)


def speed_text(result: dict[str, Any]) -> str:
    """Returns the times as a paragraph."""
    comparison, plain = result["cpu"]["comparison"], result["cpu"]["plain steps"]
    return (
        f"With {result['envs']} CartPoles in one process, an env step took {comparison:.0f} µs of CPU time\n"
        f"in one-step mode, and {plain:.0f} µs by `jaxvec.step` without a comparison. So a comparison has\n"
        f"{plain / comparison:.2f} of that rate (medians of {result['rounds']} rounds in turns).\n"
    )


def _read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def main() -> None:
    """Compares the ports and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    only = 'make only the row of this port, or "Speed"; may be repeated'
    parser.add_argument("--only", metavar="NAME", action="append", help=only)
    parser.add_argument("--print", action="store_true", help="only print the tables")
    parser.add_argument("--num-envs", type=int, default=100)
    parser.add_argument("--num-steps", type=int, default=10_000)
    parser.add_argument("--num-episodes", type=int, default=8192, help="of two-sample tests")
    parser.add_argument("--total-steps", type=int, default=1_000_000, help="of training on a port")
    args = parser.parse_args()
    rows: dict[str, Callable[[], Any]] = {
        **{each.name: partial(compare, each, args.num_envs, args.num_steps) for each in PAIRS},
        **{each.name: partial(compare_levels, each, args.num_episodes) for each in LEVELS},
        **{
            f"Policy on {each.name}": partial(
                compare_transfer, each, args.total_steps, args.num_episodes // 8
            )
            for each in TRANSFERS
        },
        "Speed": measure_speed,
    }
    for name, make in {} if args.print else rows.items():
        if args.only is None or name in args.only:
            try:
                entry = make()
            except ImportError as error:
                print(f"{name}: {error}")
                continue
            text = json.dumps(
                _read() | {name: entry}, indent=1, default=lambda value: np.asarray(value).tolist()
            )
            RESULTS.write_text(text + "\n")
    old = _read()
    print(table({name: old[name] for name in rows if "leaves" in old.get(name, {})}))
    print(levels_table({pair.name: old[pair.name] for pair in LEVELS if pair.name in old}))
    print(transfers_table({name[10:]: old[name] for name in rows if "trained_steps" in old.get(name, {})}))
    if "Speed" in old:
        print(speed_text(old["Speed"]))


if __name__ == "__main__":
    main()
