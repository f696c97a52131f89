"""Measures the cost of saving and restoring the state of an env: `python -m benchmarks.env_states`.

`python -m benchmarks.env_states families` verifies states of many envs, and counts those that are exact.

Figures are minima of many calls, in microseconds. Envs that are not installed are skipped. The last line
measures a pool of 64 CartPoles in two workers, including the communication with the workers.
"""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import sys
import time
import timeit
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np

import jaxvec
from jaxvec._extensions.states.env_states import StatefulEnv
from jaxvec._extensions.states.proof import prove
from jaxvec.adapters.replay import ReplayEnv

_ACTIONS = np.arange(64) % 2


def _preprocessed() -> Any:
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    return FrameStackObservation(AtariPreprocessing(gymnasium.make("ALE/Breakout-v5", frameskip=1)), 4)


def _dm_control() -> Any:
    from dm_control import suite

    return importlib.import_module("jaxvec.adapters.dm_env").DmEnv(suite.load("cheetah", "run"))


def _pettingzoo(name: str = "simple_tag") -> Any:
    env = importlib.import_module(f"mpe2.{name}_v3").parallel_env()
    return importlib.import_module("jaxvec.adapters.pettingzoo").PettingZooEnv(env)


def _envs() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4", "MiniGrid-DoorKey-8x8-v0"):
        yield name, lambda name=name: gymnasium.make(name)
    for name in ("HalfCheetah-v5", "Humanoid-v5", "ALE/Breakout-v5"):
        yield name, lambda name=name: gymnasium.make(name)
    yield (
        "ALE/Breakout-v5, no sticky actions",
        lambda: gymnasium.make("ALE/Breakout-v5", repeat_action_probability=0.0),
    )
    yield "ALE/Breakout-v5, preprocessed", _preprocessed
    yield "dm_control cheetah run", _dm_control
    yield "PettingZoo simple_tag_v3", _pettingzoo
    yield "LunarLander-v3 in ReplayEnv, after 20 steps", lambda: ReplayEnv(gymnasium.make("LunarLander-v3"))


def _families() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields envs with the names of their families."""
    modules = {
        "classic_control": "Gymnasium classic control",
        "toy_text": "Gymnasium toy text",
        "box2d": "Gymnasium Box2D",
        "mujoco": "Gymnasium MuJoCo",
        "minigrid": "MiniGrid",
        "ale_py": "ALE, 10 games",
    }
    latest = {spec.name: spec for spec in gymnasium.registry.values() if spec.namespace in (None, "ALE")}
    games = 0
    for spec in latest.values():
        point = str(spec.entry_point)
        family = next((name for part, name in modules.items() if part in point), None)
        games += "ale_py" in point
        if family is not None and not ("ale_py" in point and games > 10):
            yield family, lambda spec=spec: gymnasium.make(spec)
    with suppress(ImportError):
        from dm_control import suite

        adapter = importlib.import_module("jaxvec.adapters.dm_env").DmEnv
        for domain, task in suite.BENCHMARKING:
            yield "dm_control suite", lambda domain=domain, task=task: adapter(suite.load(domain, task))
    for name in ("simple", "simple_adversary", "simple_push", "simple_spread", "simple_tag"):
        yield "PettingZoo MPE", lambda name=name: _pettingzoo(name)


def _verify_families() -> None:
    counts: dict[str, Counter[str]] = {}
    for family, make in _families():
        try:
            env = make()
        except Exception as error:
            print(f"{family}: not made: {error}"[:150])
            continue
        result = "exact"
        try:
            stateful = StatefulEnv(env)
            env.reset(seed=0)
            prove(stateful)
        except jaxvec.EnvStateError as error:
            result = "refused" if "cannot save" in str(error) else "not reproduced"
            print(f"{family}: {getattr(env.unwrapped.spec, 'id', env)}: {error}"[:250], flush=True)
        counts.setdefault(family, Counter())[result] += 1
        env.close()
    print("| family | envs | exact | refused | not reproduced |\n| --- | --- | --- | --- | --- |")
    for family, found in counts.items():
        numbers = found.total(), found["exact"], found["refused"], found["not reproduced"]
        print(f"| {family} | {' | '.join(map(str, numbers))} |")


def _min_us(call: Callable[[], Any]) -> float:
    once = timeit.timeit(call, number=1)
    number = max(1, int(1e-3 / once))
    repeat = max(5, min(400, int(0.6 / (once * number))))
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6


def main() -> None:
    """Prints a table of envs, and a line about a pool."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("MUJOCO_GL", "disabled")
    for module in ("ale_py", "minigrid"):
        try:
            gymnasium.register_envs(importlib.import_module(module))
        except ImportError:
            continue
    if "families" in sys.argv:
        _verify_families()
        return
    print("| env | save, µs | restore, µs | step, µs | pickled bytes |\n| --- | --- | --- | --- | --- |")
    for name, make in _envs():
        try:
            env = make()
        except Exception as error:
            print(f"{name}: {error}")
            continue
        print(f"| {name} | {' | '.join(_costs(env))} |", flush=True)
        env.close()
    print(_pool_costs())


def _pool_costs() -> str:
    costs: list[list[float]] = []
    with jaxvec.make("CartPole-v1", 64, states=640, num_workers=2) as envs:
        envs.reset(seed=0)
        state = envs.save()

        def step() -> None:
            envs.step(_ACTIONS)

        for _ in range(400):
            start = time.perf_counter()
            state = envs.save()
            saved = time.perf_counter()
            step()  # not measured, because the first step after a restore is slower
            costs.append([saved - start, timeit.timeit(step, number=1)])
            costs[-1].append(timeit.timeit(lambda state=state: envs.restore(state), number=1))
    save, usual, restore = np.min(costs, axis=0) * 1e6
    return (
        f"64 CartPoles in two workers: save {save:.0f}, restore {restore:.0f}, step {usual:.0f} µs; "
        f"save and restore take as long as {(save + restore) / usual:.1f} steps"
    )


def _costs(env: Any) -> list[str]:
    stateful = StatefulEnv(env)
    env.reset(seed=0)
    actions = copy.deepcopy(env.action_space)  # sampling from the original would change the state
    actions.seed(0)
    for _ in range(20):
        env.step(actions.sample())
    state, action = stateful.save(), actions.sample()
    size = len(pickle.dumps(state))

    def step() -> None:
        *_, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()

    costs = (_min_us(call) for call in (stateful.save, lambda: stateful.restore(state), step))
    return [*(f"{cost:.0f}" for cost in costs), f"{size:,}"]


if __name__ == "__main__":
    main()
