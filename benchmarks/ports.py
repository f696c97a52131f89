"""Compares published JAX ports with their Python originals: `python -m benchmarks.ports`.

It writes `docs/ports.json`, and the table `docs/ports.md`. Ports whose packages are not
installed keep their earlier entries. `--page` only writes the table, and `--only NAME` compares one port.

    pip install gymnax six minatar navix minigrid pgx open-spiel
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jaxvec import Timeouts
from jaxvec.ports import Port, as_port, compare_port

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS, PAGE = DOCS / "ports.json", DOCS / "ports.md"
_HEADING = """# Ports that were compared

After this page you know how some JAX envs differ from the Python envs of which they are ports.
`python -m benchmarks.ports` makes it anew. [Port an env to JAX](how-to/port_an_env.md) explains the modes.

- Errors up to 1e-5 count as equal. They are relative for values above 1.
- "Free running" means here that each episode starts from the resets of both sides.
- A difference is counted in steps of single envs. Values in brackets are those of the port and of the
  original, in the step with the largest error.

"""


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
        image = self.env.observation_space["image"]
        self.observation_space = spaces.Box(0, 255, (image.shape[1], image.shape[0], 3), np.uint8)

    def observation(self, observation: Any) -> Any:
        return observation["image"].transpose(1, 0, 2)


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
            "values": worst and [_text(worst.port), _text(worst.original)],
            "step": worst and worst.step,
        }
    return {
        "mode": result.mode,
        "steps": num_envs * num_steps,
        "envs": num_envs,
        "episodes": result.episodes,
        "parted": result.parted,
        "versions": [f"{name} {importlib.metadata.version(name)}" for name in pair.packages],
        "leaves": leaves,
        "properties": {
            name: [each.port, each.original] for name, each in result.spaces.items() if not each.equal
        },
        "seconds": round(time.perf_counter() - start, 1),
    }


def _text(value: Any) -> str:
    array = np.asarray(value)
    return (
        f"{array.item():.7g}" if array.ndim == 0 else np.array2string(array.ravel(), threshold=8, precision=7)
    )


def table(results: dict[str, Any]) -> str:
    """Returns the table as Markdown."""
    lines = [
        "| env | port · original | mode | steps | results that differ | properties that differ |",
        "| --- | --- | --- | ---: | --- | --- |",
    ]
    for name, each in results.items():
        found = [
            f"`{path}`: {leaf['different']:,} steps, from step {leaf['first_step']} of an episode"
            + (f" ({' · '.join(leaf['values'])})" if len("".join(leaf["values"])) < 40 else "")
            for path, leaf in each["leaves"].items()
            if leaf["different"]
        ]
        largest = max(leaf["max_error"] for leaf in each["leaves"].values() if not leaf["different"])
        equal = "none" if largest == 0 else f"none (largest error {largest:.2g})"
        properties = [f"{part}: {ours} · {theirs}" for part, (ours, theirs) in each["properties"].items()]
        mode = each["mode"].replace("_", " ")
        cells = name, " · ".join(each["versions"]), mode, f"{each['steps']:,}"
        lines.append(f"| {' | '.join(cells)} | {'<br>'.join(found) or equal} | {'<br>'.join(properties)} |")
    return "\n".join(lines) + "\n"


def _read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def main() -> None:
    """Compares the ports and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", help="compare only this port")
    parser.add_argument("--page", action="store_true", help="only write the table")
    parser.add_argument("--num-envs", type=int, default=100)
    parser.add_argument("--num-steps", type=int, default=10_000)
    args = parser.parse_args()
    for pair in [] if args.page else PAIRS:
        if args.only in (None, pair.name):
            try:
                entry = compare(pair, args.num_envs, args.num_steps)
            except ImportError as error:
                print(f"{pair.name}: {error}")
                continue
            RESULTS.write_text(json.dumps(_read() | {pair.name: entry}, indent=1) + "\n")
    old = _read()
    PAGE.write_text(_HEADING + table({pair.name: old[pair.name] for pair in PAIRS if pair.name in old}))


if __name__ == "__main__":
    main()
