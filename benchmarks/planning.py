"""Measures steps from saved states: `python -m benchmarks.planning`.

Each system makes the next states and time steps of 64 states, as a tree search does:

- `simulate`: `jaxvec.simulate` in a jitted scan, on two workers.
- `deepcopy`: a Python loop that copies each env and steps the copy. It can't copy an `EzPickle` env.
- `restore`: a Python loop that restores each state in one env, steps it, and saves its state.

The systems alternate, so only the ratios within one run are meaningful.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import gymnasium
import jax
from gymnasium.utils import EzPickle

import jaxvec
from benchmarks.__main__ import machine
from jaxvec._extensions.states.env_states import StatefulEnv

_ENVS = "CartPole-v1", "minigrid:MiniGrid-DoorKey-8x8-v0", "HalfCheetah-v5", "ale_py:ALE/Breakout-v5"

_SYSTEMS = "deepcopy", "restore", "simulate"
_STATES = 64
_STEPS = 32  # levels of the search that one turn of a system makes

Turn: TypeAlias = Callable[[], None]  # makes `_STEPS` levels


class _NoCopyError(Exception):
    """`copy.deepcopy` makes a new env, which is not in the state of the original."""


def _make(name: str) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make(name)
    if name.startswith("minigrid:"):  # a text has no fixed shape
        env = importlib.import_module("minigrid.wrappers").ImgObsWrapper(env)
    return env


def _actions(env: gymnasium.Env[Any, Any]) -> list[Any]:
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    return [space.sample() for _ in range(_STATES)]


def _simulate(envs: jaxvec.VectorEnv) -> Turn:
    actions = envs.action_space.sample()
    envs.reset(seed=0)

    @jax.jit
    def expand(root: Any) -> Any:
        def level(state: Any, _: None) -> tuple[Any, Any]:
            state, timestep = jaxvec.simulate(envs, state, actions)
            return state, timestep.reward.sum()

        return jax.lax.scan(level, root, length=_STEPS)[1]

    return lambda: jax.block_until_ready(expand(envs.save()))  # newer states replace older ones


def _deepcopy(env: gymnasium.Env[Any, Any]) -> Turn:
    if isinstance(env.unwrapped, EzPickle):  # its "copy" is a new env in another state
        raise _NoCopyError
    actions = _actions(env)
    env.reset(seed=0)

    def expand() -> None:
        envs = [env] * _STATES
        for _ in range(_STEPS):
            envs = [copy.deepcopy(each) for each in envs]
            for each, action in zip(envs, actions, strict=True):
                each.step(action)

    return expand


def _restore(env: gymnasium.Env[Any, Any]) -> Turn:
    actions, stateful = _actions(env), StatefulEnv(env)
    env.reset(seed=0)
    root = stateful.save()

    def expand() -> None:
        states = [root] * _STATES
        for _ in range(_STEPS):
            for number, action in enumerate(actions):
                stateful.restore(states[number])
                env.step(action)
                states[number] = stateful.save()

    return expand


def _rates(name: str, rounds: int) -> dict[str, Any]:
    """Returns the states per second of each system, or `"no copy"`."""
    make = partial(_make, name)
    found: dict[str, Any] = {}
    states = jaxvec.States(max=_STATES * (_STEPS + 2))
    with jaxvec.make(make, _STATES, num_workers=2, states=states) as envs:
        turns: dict[str, Turn] = {}
        prepare = [lambda: _deepcopy(make()), lambda: _restore(make()), lambda: _simulate(envs)]
        for system, prepare_turn in zip(_SYSTEMS, prepare, strict=True):
            try:
                turns[system] = prepare_turn()
            except _NoCopyError:
                found[system] = "no copy"
                continue
            turns[system]()  # compiles, and fills caches
        seconds: dict[str, list[float]] = {system: [] for system in turns}
        for _ in range(rounds):
            for system, turn in turns.items():
                start = time.perf_counter()
                turn()
                seconds[system].append(time.perf_counter() - start)
    for system, times in seconds.items():
        found[system] = _STATES * _STEPS / statistics.median(times)
    return found


def main() -> None:
    """Prints a table of envs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each system")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("MUJOCO_GL", "disabled")
    print(
        f"on {machine()}; states x steps per second, medians of {options.rounds} turns of {_STATES} states\n"
    )
    print("| env | deepcopy | restore | simulate | simulate / deepcopy | simulate / restore |")
    print(f"| --- |{' ---: |' * 5}")
    for name in _ENVS:
        try:
            found = _rates(name, options.rounds)
        except Exception as error:
            reason, *_ = str(error).splitlines()
            print(f"| {name} | not run: {reason} |", flush=True)
            continue
        simulated = found["simulate"]
        cells = [f"{rate:,.0f}" if isinstance(rate, float) else rate for rate in map(found.get, _SYSTEMS)]
        for other in _SYSTEMS[:-1]:
            rate = found[other]
            cells.append(f"{simulated / rate:.1f}" if isinstance(rate, float) else "")
        print(f"| {name.rpartition(':')[2]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
