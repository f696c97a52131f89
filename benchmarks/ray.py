"""Compares rollouts by actors of a Ray cluster with a plain Ray actor: `python -m benchmarks.ray`."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import ray

import jaxvec
from benchmarks.__main__ import machine

PARAMS = np.zeros(1000, np.float32)  # weights of the actors


def play_steps(num_steps: int) -> Callable[..., Any]:
    """Returns a rollout function that takes `num_steps` steps."""

    def play(params: Any, handle: Any, timestep: Any, key: Any) -> Any:
        def step(handle: Any, _: Any) -> Any:
            return jaxvec.step(handle, jnp.zeros(handle.num_envs, jnp.int32))

        handle, trajectory = jax.lax.scan(step, handle, length=num_steps)
        return handle, timestep, trajectory

    return play


@ray.remote
class SyncActor:
    """An actor without JAX and jaxvec that runs rollouts of Gymnasium's `SyncVectorEnv`."""

    def __init__(self, env: Callable[[], Any], num_envs: int) -> None:
        same_step = gymnasium.vector.AutoresetMode.SAME_STEP  # as `Rollouts` does
        self._envs = gymnasium.vector.SyncVectorEnv([env] * num_envs, autoreset_mode=same_step)
        self._envs.reset(seed=0)

    def run(self, params: Any, num_steps: int) -> Any:
        action = np.zeros(self._envs.num_envs, np.int32)
        steps = [self._envs.step(action)[:4] for _ in range(num_steps)]
        return [np.stack(leaf) for leaf in zip(*steps, strict=True)]


class SyncRollouts:
    """The least that a program without jaxvec does to get rollouts from one actor."""

    def __init__(self, env: Callable[[], Any], num_envs: int, num_steps: int) -> None:
        self._actor = SyncActor.remote(env, num_envs)
        self._num_steps = num_steps
        self.push(PARAMS)

    def push(self, params: Any) -> None:
        self._pending = self._actor.run.remote(ray.put(params), self._num_steps)

    def get(self) -> Any:
        return jax.device_put(ray.get(self._pending))

    def wait(self) -> None:
        ray.wait([self._pending])


def wait_until_idle(system: Any, in_flight: int) -> None:
    """Waits until an actor has finished all rollouts that it may, so that it does not disturb others."""
    if isinstance(system, SyncRollouts):
        system.wait()
        return
    while (stats := system.stats()).actors[0].rollouts < stats.rollouts + in_flight:
        time.sleep(0.01)


def actors(rounds: int, times: int) -> Iterator[str]:
    """Compares one actor of `jaxvec.Rollouts` with a Ray actor that steps a `SyncVectorEnv`."""
    yield (
        "\nEnv steps per second of one actor, as a ratio to a Ray actor with Gymnasium's `SyncVectorEnv` and "
        "rollouts of as many steps, and the driver's CPU time in microseconds per env step; medians.\n"
    )
    yield "| CartPoles | steps per rollout | system | rollouts per call | ratio | CPU time |"
    yield "| ---: | ---: | --- | ---: | ---: | ---: |"
    env = partial(gymnasium.make, "CartPole-v1")
    for num_envs, num_steps in itertools.product((8, 32), (64, 128)):
        systems = [("`SyncVectorEnv`", 1), ("`Rollouts`", 1), ("`Rollouts`", 4)]
        with ExitStack() as stack:
            made: list[Any] = [SyncRollouts(env, num_envs, num_steps)]
            for _, per_call in systems[1:]:
                options: Any = {"rollouts_per_call": per_call, "in_flight": 2 * per_call, "final_obs": False}
                play = play_steps(num_steps)
                each = jaxvec.Rollouts(play, env, num_envs, num_actors=1, params=PARAMS, **options)
                made.append(stack.enter_context(each))
            found: list[list[tuple[float, float]]] = [[] for _ in made]
            for turn in range(rounds + 1):  # the first round compiles and is not counted
                for system, (_, per_call), results in zip(made, systems, found, strict=True):
                    for _ in range(2 * per_call):  # those that were finished during other turns
                        system.get()
                        system.push(PARAMS)
                    num_rollouts = max(times // num_steps, 1) * 24
                    cpu, wall = time.process_time(), time.perf_counter()
                    for _ in range(num_rollouts):
                        done = system.get()
                        jax.block_until_ready(getattr(done, "trajectory", done))
                        system.push(PARAMS)
                    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                    wait_until_idle(system, 2 * per_call)
                    if turn:
                        steps = num_rollouts * num_steps * num_envs
                        results.append((steps / wall, cpu / steps * 1e6))
            medians = [[statistics.median(column) for column in zip(*each, strict=True)] for each in found]
            for (name, per_call), (rate, cpu) in zip(systems, medians, strict=True):
                ratio = rate / medians[0][0]
                yield f"| {num_envs} | {num_steps} | {name} | {per_call} | {ratio:.2f} | {cpu:.1f} |"


def main() -> None:
    """Parses the command line and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each system")
    parser.add_argument("--times", type=int, default=200, help="steps per measurement")
    options = parser.parse_args()
    print(f"`python -m benchmarks.ray {' '.join(sys.argv[1:])}`".replace(" `", "`"))
    print(f"on {machine()}, ray {ray.__version__}")
    ray.init(address="local", num_cpus=4, log_to_driver=False)
    print(*actors(options.rounds, options.times), sep="\n", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
