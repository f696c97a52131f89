"""Measures the overhead and the scaling of pools on a Ray cluster: `python -m benchmarks.ray`.

Ray simulates the nodes on this machine. So there is no network between them, and the envs sleep instead of
computing. The figures show the overhead of jaxvec and Ray.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import ray
from gymnasium import spaces
from ray.cluster_utils import Cluster

import jaxvec
from benchmarks.__main__ import machine
from jaxvec._vector_env import pool_of

BATCHES = {"1 kB": 1 << 10, "100 kB": 100 << 10, "2 MB": 2 << 20}
NUM_ENVS = 8
PARTS = ("start", "descriptors", "overhead", "grouping", "scaling", "recovery", "rollouts", "actors")
STAGE = "stage"  # custom resource of the simulated worker nodes
ENVS_PER_NODE = 4
STORE = 100 << 20  # bytes per object store of a node
PARAMS = np.zeros(1000, np.float32)  # weights of the actors


class Busy(gymnasium.Env[Any, Any]):
    """An env with observations of `nbytes` bytes that sleeps for `seconds` per step."""

    def __init__(self, nbytes: int, seconds: float = 0.0) -> None:
        self.observation_space = spaces.Box(0, 255, (nbytes,), np.uint8)
        self.action_space = spaces.Discrete(2)
        self._obs = np.zeros(nbytes, np.uint8)
        self._seconds = seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._obs, {}

    def step(self, action: Any) -> Any:
        if self._seconds:
            time.sleep(self._seconds)
        return self._obs, 0.0, False, False, {}


@contextmanager
def cluster(num_nodes: int) -> Iterator[Cluster]:
    """Starts a cluster with a head and `num_nodes` worker nodes, each with resources for one actor."""
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=4, object_store_memory=STORE)
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=1, resources={STAGE: ENVS_PER_NODE}, object_store_memory=STORE)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@partial(jax.jit, static_argnames="times")
def _step(handle: Any, times: int) -> Any:
    """Steps all envs `times` times and returns the handle and a sum that depends on every observation."""

    def body(_: Any, carry: Any) -> Any:
        handle, total = carry
        handle, timestep = jaxvec.step(handle, jnp.zeros(handle.spec.num_envs, jnp.int32))
        return handle, total + timestep.obs[:, 0].sum()

    return jax.lax.fori_loop(0, times, body, (handle, jnp.uint32(0)))


@partial(jax.jit, static_argnames="times")
def _receive(handle: Any, times: int) -> Any:
    """Receives `times` batches and sends new actions to the envs of each batch."""

    def body(_: Any, carry: Any) -> Any:
        handle, total = carry
        handle, timestep = jaxvec.recv(handle)
        ids = timestep.info["env_id"]
        return jaxvec.send(handle, jnp.zeros_like(ids), ids), total + timestep.obs[:, 0].sum()

    return jax.lax.fori_loop(0, times, body, (handle, jnp.uint32(0)))


@ray.remote
class Echo:
    """An actor that returns `nbytes` bytes, the least work of an actor of a pool."""

    def answer(self, name: str, operation: int, request: Any, nbytes: int) -> Any:
        return np.zeros(nbytes, np.uint8)


class Bare:
    """A benchmark of Ray without jaxvec: requests to two actors, which return `nbytes` bytes in total."""

    def __init__(self, nbytes: int) -> None:
        self._actors = [Echo.remote() for _ in range(2)]
        self._nbytes = nbytes // 2

    def __call__(self, times: int) -> float:
        """Returns seconds a batch."""
        request = np.zeros(256, np.uint8)
        start_time = time.perf_counter()
        for _ in range(times):
            for answer in [actor.answer.remote("move", 1, request, self._nbytes) for actor in self._actors]:
                ray.get(answer)
        return (time.perf_counter() - start_time) / times


class Run:
    """A benchmark of a pool: jitted steps, or batches of a first-ready pool."""

    def __init__(self, envs: jaxvec.VectorEnv) -> None:
        self._handle, timestep = jaxvec.reset(envs)
        self._advance = _step
        if self._handle.spec.first_ready:
            ids = timestep.info["env_id"]
            self._handle = jaxvec.send(self._handle, jnp.zeros_like(ids), ids)
            self._advance = _receive

    def __call__(self, times: int) -> float:
        """Returns seconds a batch."""
        start_time = time.perf_counter()
        self._handle, total = self._advance(self._handle, times)
        jax.block_until_ready(total)
        return (time.perf_counter() - start_time) / times


def alternate(runs: dict[Any, Callable[[int], float]], rounds: int, times: int) -> dict[Any, str]:
    """Runs the benchmarks alternately and returns microseconds per batch as text.

    The text contains the median time, and in brackets the median CPU time of this process.
    """
    found: dict[Any, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        run(times)  # compiles the program
    for _ in range(rounds):
        for name, run in runs.items():
            start_time = time.process_time()
            wall = run(times)
            found[name].append((wall * 1e6, (time.process_time() - start_time) / times * 1e6))
    medians = {
        name: [statistics.median(column) for column in zip(*found[name], strict=True)] for name in runs
    }
    return {name: f"{wall:,.0f} ({cpu:,.0f})" for name, (wall, cpu) in medians.items()}


def overhead(rounds: int, times: int) -> Iterator[str]:
    """Compares batches of the process backend, the Ray backend and Ray alone."""
    yield (
        f"\nMicroseconds per batch of {NUM_ENVS} no-op envs in two workers, in a jitted loop; in brackets, "
        "CPU time of the driver.\n"
    )
    yield "| batch | local workers | on Ray | Ray alone |"
    yield "| --- | ---: | ---: | ---: |"
    for name, nbytes in BATCHES.items():
        with ExitStack() as stack:
            runs: dict[str, Callable[[int], float]] = {}
            for label, backend in (("process", "process"), ("ray", jaxvec.Ray(hosts=2))):
                env = partial(Busy, nbytes // NUM_ENVS)
                made = jaxvec.make(env, NUM_ENVS, num_workers=2, backend=backend, final_obs=False)
                runs[label] = Run(stack.enter_context(made))
            runs["bare"] = Bare(nbytes)
            yield f"| {name} | {' | '.join(alternate(runs, rounds, times).values())} |"


def start(rounds: int, _: int) -> Iterator[str]:
    """Measures the start of pools with 1 to 8 actors on the machine of the driver."""
    yield "\nMedian seconds of `make`, and median CPU time of the driver in milliseconds.\n"
    yield "| actors | seconds | CPU time of the driver |\n| ---: | ---: | ---: |"
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in (1, 2, 4, 8)}
    for turn in range(rounds + 1):  # Ray starts processes in the first round, which is not counted
        for count, each in found.items():
            backend = jaxvec.Ray(count, {"num_cpus": 0.05})
            start_time, cpu = time.perf_counter(), time.process_time()
            with jaxvec.make(partial(Busy, 128), count, num_workers=count, backend=backend):
                if turn:
                    each.append((time.perf_counter() - start_time, time.process_time() - cpu))
    for count, each in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*each, strict=True))
        yield f"| {count} | {wall:.1f} | {cpu * 1e3:.0f} |"


def descriptors(rounds: int, _: int) -> Iterator[str]:
    """Counts the file descriptors that pools keep open in this process."""
    yield "\nMedian number of file descriptors that a pool opens in the driver.\n"
    yield "| actors | workers per actor | descriptors |\n| ---: | ---: | ---: |"
    for actors, workers in ((1, 1), (1, 8), (1, 32), (4, 8), (8, 1)):
        backend = jaxvec.Ray(hosts=actors, options={"num_cpus": 0.01})
        count = actors * workers
        found: list[int] = []
        for _ in range(rounds):
            before = len(os.listdir("/proc/self/fd"))
            with jaxvec.make(partial(Busy, 128), count, num_workers=count, backend=backend) as envs:
                envs.reset()
                found.append(len(os.listdir("/proc/self/fd")) - before)
        yield f"| {actors} | {workers} | {statistics.median(found):g} |"


def on_stage(hosts: int) -> jaxvec.Ray:
    """Returns a backend that places each host on a separate worker node."""
    return jaxvec.Ray(hosts, {"num_cpus": 0, "resources": {STAGE: ENVS_PER_NODE}})


def scaling(counts: list[int], rounds: int, times: int) -> Iterator[str]:
    """Measures pools on clusters of several sizes, with four envs per node and steps of 5 ms."""
    yield (
        f"\nEnv steps per second of envs with steps of 5 ms, {ENVS_PER_NODE} per simulated node: in one "
        "worker, which steps them sequentially (limit: 200 per node), and in four (limit: 800 "
        "per node).\n"
    )
    yield "| nodes | one worker | asynchronous | four workers | asynchronous | fractions of the limits |"
    yield "| ---: | ---: | ---: | ---: | ---: | --- |"
    for count in counts:
        rates, shares = [], []
        with cluster(count):
            for workers in (1, ENVS_PER_NODE):
                for batch_size in (None, ENVS_PER_NODE // 2 * count):
                    found: list[float] = []
                    for _ in range(rounds):
                        with jaxvec.make(  # sequentially, because each pool needs all nodes
                            partial(Busy, 1024, 0.005),
                            ENVS_PER_NODE * count,
                            num_workers=workers * count,
                            backend=on_stage(count),
                            batch_size=batch_size,
                        ) as envs:
                            run = Run(envs)
                            run(times)
                            found.append((batch_size or ENVS_PER_NODE * count) / run(times))
                    rate = statistics.median(found)
                    rates.append(f"{rate:,.0f}")
                    shares.append(f"{rate / (200 * count * workers):.0%}")
        yield f"| {count} | {' | '.join(rates)} | {', '.join(shares)} |"


def grouping(rounds: int, times: int) -> Iterator[str]:
    """Compares batches of the same workers, grouped into several actors or into one."""
    yield (
        f"\nMicroseconds per batch of {NUM_ENVS} no-op envs in {NUM_ENVS} workers; in brackets, CPU time of "
        "the driver.\n"
    )
    yield "| batch | actors | workers per actor | time |"
    yield "| --- | ---: | ---: | ---: |"
    for name in ("1 kB", "2 MB"):
        with ExitStack() as stack:
            runs: dict[int, Run] = {}
            for size in (NUM_ENVS, NUM_ENVS // 2, 1):
                backend = jaxvec.Ray(NUM_ENVS // size, {"num_cpus": 0.05})
                env = partial(Busy, BATCHES[name] // NUM_ENVS)
                made = jaxvec.make(env, NUM_ENVS, num_workers=NUM_ENVS, backend=backend, final_obs=False)
                runs[size] = Run(stack.enter_context(made))
            found = alternate(runs, rounds, times)
        for size in (NUM_ENVS, NUM_ENVS // 2, 1):
            yield f"| {name} | {NUM_ENVS // size} | {size} | {found[size]} |"


def rollouts(rounds: int, times: int) -> Iterator[str]:
    """Compares steps from the driver with actors that run whole rollouts."""
    num_steps, num_actors, num_envs = 64, 2, 8
    times = max(times // num_steps, 1)
    backend = jaxvec.Ray(hosts=num_actors)
    env = partial(Busy, 1024)
    yield (
        f"\nMicroseconds of CPU time of the driver per env step, and env steps per second: {num_actors} "
        f"actors with {num_envs} no-op envs each, observations of 1 kB, and rollouts of {num_steps} steps.\n"
    )
    yield "| | CPU time of the driver | steps/s |\n| --- | ---: | ---: |"

    play = play_steps(num_steps)
    options = {"final_obs": False}
    with (
        jaxvec.make(env, num_actors * num_envs, num_workers=num_actors, backend=backend, **options) as envs,
        jaxvec.Rollouts(play, env, num_envs, num_actors=num_actors, params=PARAMS, **options) as actors,
    ):
        handle, timestep = jaxvec.reset(envs)
        program = jax.jit(play)

        def from_driver() -> None:
            nonlocal handle
            for _ in range(times):
                handle, _, trajectory = program(None, handle, timestep, None)
                jax.block_until_ready(trajectory)

        def from_actors() -> None:
            for _ in range(times * num_actors):
                jax.block_until_ready(actors.get().trajectory)
                actors.push(PARAMS)

        runs = {"`make(backend=jaxvec.Ray())`": from_driver, "`jaxvec.Rollouts`": from_actors}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for turn in range(rounds + 1):  # the first round compiles and is not counted
            for name, run in runs.items():
                cpu, wall = time.process_time(), time.perf_counter()
                run()
                steps = times * num_steps * num_actors * num_envs
                each = (time.process_time() - cpu) / steps * 1e6, steps / (time.perf_counter() - wall)
                if turn:
                    found[name].append(each)
    median = {
        name: [statistics.median(column) for column in zip(*each, strict=True)]
        for name, each in found.items()
    }
    for name, (cpu, rate) in median.items():
        yield f"| {name} | {cpu:,.1f} | {rate:,.0f} |"
    driver, actor = (cpu for cpu, _ in median.values())
    yield f"\nRatio of CPU time: {driver / actor:.1f}"


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


def recovery(rounds: int) -> Iterator[str]:
    """Measures how long a pool takes to recover from the death of a node, with a spare node."""
    yield "\nSeconds from the death of one of two nodes to the next batch, with a third node idle.\n"
    yield "| round | seconds |\n| ---: | ---: |"
    for number in range(rounds):
        with (
            cluster(3) as nodes,
            jaxvec.make(
                partial(Busy, 1024, 0.005), 8, num_workers=2, backend=on_stage(2), on_fault="restart"
            ) as envs,
        ):
            envs.reset()
            busy = {remote.place for remote in pool_of(envs).workers.supervisor._processes}
            envs.step(np.zeros(8, int))
            victim = next(
                node for node in nodes.worker_nodes if any(node.node_id[:12] in place for place in busy)
            )
            killer = threading.Thread(target=nodes.remove_node, args=(victim, False))
            start_time = time.perf_counter()
            killer.start()
            while not envs.step(np.zeros(8, int)).info["fault"].any():
                pass
            yield f"| {number + 1} | {time.perf_counter() - start_time:.1f} |"
            killer.join()


def main() -> None:
    """Parses the command line and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each system")
    parser.add_argument("--times", type=int, default=200, help="batches per measurement")
    parser.add_argument(
        "--nodes", type=int, nargs="*", default=[1, 2, 4, 8], help="numbers of simulated nodes"
    )
    parser.add_argument("--deaths", type=int, default=3, help="number of nodes to kill, one per round")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="benchmarks to run")
    options = parser.parse_args()
    print(f"`python -m benchmarks.ray {' '.join(sys.argv[1:])}`".replace(" `", "`"))
    print(f"on {machine()}, ray {ray.__version__}; nodes are simulated on this machine.")
    with cluster(0):
        for part in (start, descriptors, overhead, grouping, rollouts, actors):
            if part.__name__ in options.parts:
                print(*part(options.rounds, options.times), sep="\n", flush=True)
    if "scaling" in options.parts:
        print(*scaling(options.nodes, 1, options.times), sep="\n", flush=True)
    if "recovery" in options.parts:
        print(*recovery(options.deaths), sep="\n", flush=True)


if __name__ == "__main__":
    main()
