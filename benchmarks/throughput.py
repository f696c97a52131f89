"""`python -m benchmarks.throughput`: env steps a second of jaxvec, Gymnasium and bare loops, in one run.

Every system steps the same env with random actions drawn in advance. Systems take turns, several
rounds long, so that a machine that slows down slows all of them; the table has each one's median,
and its ratio to the bare loops: one `env.step` loop per core, the most that Python can do here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import jaxvec
from jaxvec._cores import usable_cores

Run = Callable[[int], None]  # takes that many steps of every env


@contextmanager
def jaxvec_scan(env_id: str, num_envs: int, *, handoff: str) -> Iterator[Run]:
    """Steps by `jaxvec.step` in a jitted scan."""
    with jaxvec.make(env_id, num_envs, handoff=handoff) as envs:
        actions = jnp.asarray(draw(envs.action_space, 64))
        state = [jaxvec.reset(envs, seed=0)[0]]

        @partial(jax.jit, static_argnums=1)
        def rollout(handle: jaxvec.Handle, num_steps: int) -> tuple[jaxvec.Handle, jax.Array]:
            def body(carry: tuple[jaxvec.Handle, jax.Array], i: jax.Array) -> Any:
                handle, total = carry
                handle, timestep = jaxvec.step(handle, actions[i % 64])
                return (handle, total + timestep.reward.sum()), None

            return jax.lax.scan(body, (handle, jnp.float32(0)), jnp.arange(num_steps))[0]

        def run(num_steps: int) -> None:
            state[0], _ = jax.block_until_ready(rollout(state[0], num_steps))

        yield run


@contextmanager
def jaxvec_host(env_id: str, num_envs: int) -> Iterator[Run]:
    """Steps by `VectorEnv.step` in a Python loop."""
    with jaxvec.make(env_id, num_envs) as envs:
        envs.reset(seed=0)
        yield partial(loop, envs, draw(envs.action_space, 64))


@contextmanager
def gymnasium_vector(env_id: str, num_envs: int, *, mode: str) -> Iterator[Run]:
    """Steps Gymnasium's own vector env. Its default mode would pick a NumPy rewrite of CartPole."""
    # Its own default would fork a process that has JAX's threads.
    kwargs = {"context": "spawn"} if mode == "async" else {}
    envs = gymnasium.make_vec(env_id, num_envs, vectorization_mode=mode, vector_kwargs=kwargs)
    try:
        envs.reset(seed=0)
        yield partial(loop, envs, draw(envs.action_space, 64))
    finally:
        envs.close()


@contextmanager
def bare_loops(env_id: str, num_envs: int) -> Iterator[Run]:
    """Steps an equal share of the envs in a process per core, with nothing between env and loop."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(usable_cores()):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_bare_loop, args=(env_id, max(num_envs // usable_cores(), 1), theirs), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)

    def run(num_steps: int) -> None:
        for pipe in pipes:
            pipe.send(num_steps)
        for pipe in pipes:
            if not pipe.poll(120):
                raise TimeoutError("a bare loop did not answer")
            pipe.recv()

    run(1)  # waits for the envs
    try:
        yield run
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(10)


def _bare_loop(env_id: str, num_envs: int, pipe: Any) -> None:
    envs = [gymnasium.make(env_id) for _ in range(num_envs)]
    for i, env in enumerate(envs):
        env.reset(seed=i)
        env.action_space.seed(i)
    actions = [[env.action_space.sample() for env in envs] for _ in range(64)]
    while True:
        try:
            num_steps = pipe.recv()
        except EOFError:
            return
        for i in range(num_steps):
            for env, action in zip(envs, actions[i % 64], strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        pipe.send(None)


def loop(envs: Any, actions: NDArray[Any], num_steps: int) -> None:
    """Steps in a Python loop."""
    for i in range(num_steps):
        envs.step(actions[i % 64])


def draw(space: Any, number: int) -> NDArray[Any]:
    """Draws actions, `[number, num_envs, ...]`."""
    space.seed(0)
    return np.stack([space.sample() for _ in range(number)])


SYSTEMS: dict[str, Callable[[str, int], Any]] = {
    "bare loops, one per core": bare_loops,
    "jaxvec in scan, native hand-off": partial(jaxvec_scan, handoff="native"),
    "jaxvec in scan, portable hand-off": partial(jaxvec_scan, handoff="portable"),
    "jaxvec on the host": jaxvec_host,
    "Gymnasium SyncVectorEnv": partial(gymnasium_vector, mode="sync"),
    "Gymnasium AsyncVectorEnv": partial(gymnasium_vector, mode="async"),
}


def measure(env_id: str, num_envs: int, rounds: int, seconds: float) -> dict[str, float]:
    """Returns each system's median of env steps a second."""
    rates: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    with ExitStack() as stack:
        runs = {name: stack.enter_context(make(env_id, num_envs)) for name, make in SYSTEMS.items()}
        steps = {name: _steps_in(run, seconds) for name, run in runs.items()}
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run(steps[name])
                rates[name].append(steps[name] * num_envs / (time.perf_counter() - start))
    return {name: statistics.median(all_rates) for name, all_rates in rates.items()}


def _steps_in(run: Run, seconds: float) -> int:
    """Finds how many steps take about so many seconds, and warms the run up with them."""
    run(20)
    start = time.perf_counter()
    run(20)
    steps = max(int(20 * seconds / (time.perf_counter() - start)), 20)
    run(steps)  # compiles this length
    return steps


def main() -> None:
    """Runs the command line and prints a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one system in one round")
    options = parser.parse_args()
    print(
        f"{options.env}, env steps a second; {usable_cores()} cores, Python {platform.python_version()}, "
        f"jax {jax.__version__}, gymnasium {gymnasium.__version__}; median of {options.rounds} rounds\n"
    )
    columns = [measure(options.env, n, options.rounds, options.seconds) for n in options.num_envs]
    print("| system | " + " | ".join(f"{n} envs" for n in options.num_envs) + " |")
    print("| --- |" + " ---: |" * len(columns))
    limit = next(iter(SYSTEMS))
    for name in SYSTEMS:
        cells = [f"{column[name]:,.0f} ({column[name] / column[limit]:.2f})" for column in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
