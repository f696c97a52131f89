"""IMPALA on a Ray cluster: each actor has its own pool, and the learner takes the first finished rollout.

    python -m jaxvec.examples.impala_ray --address auto --num-actors 16
    python -m jaxvec.examples.impala_ray --simulate-nodes 3 --kill-one --stop-at 475
    python -m jaxvec.examples.impala_ray --resume runs/NAME

The network, the loss and V-trace are imported from `impala.py`; `jaxvec.Rollouts` replaces the threads. The
second command simulates a cluster of three nodes on this machine, with an actor on each. It kills one node
after a tenth of the steps, and the actor restarts on another node.

Each run has a folder in `runs`. Ctrl-C saves, and ends the run. A resumed run continues with the
parameters, the optimiser state, the number of updates and the statistics of the run. Its episodes start anew.
The order of the rollouts depends on time, so two runs with the same seed differ.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import jax
import numpy as np

import jaxvec
from jaxvec.examples import impala
from jaxvec.examples.impala import Agent
from jaxvec.logging import TrainingRun, training

# Actors on other machines do not have these files.
for _module in (sys.modules[__name__], impala):
    cloudpickle.register_pickle_by_value(_module)

_MEMORY = 200 << 20  # bytes of each simulated node's object store


@dataclass(frozen=True)
class Config(impala.Config):
    """Trains IMPALA on a Ray cluster."""

    num_actors: int = 3  # number of actors
    num_workers: int | None = 1  # number of worker processes, and of CPUs, of each actor
    max_lag: int = 8  # maximum number of updates between the weights of a rollout and the newest ones
    address: str | None = None  # address of the Ray cluster; by default the one of this machine, or a new one
    simulate_nodes: int = 0  # simulate a cluster with this number of nodes on this machine
    kill_one: bool = False  # kill one of the simulated nodes during training

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_actors, self.workers_per_actor) < 1:
            raise ValueError("the numbers of actors and workers must be at least 1")
        if self.video and not self.evaluate:
            raise ValueError("--video is not supported, as actors may run on other machines; use impala.py")
        if self.kill_one and self.simulate_nodes < 2:
            raise ValueError("--kill-one needs --simulate-nodes of at least 2")

    @property
    def workers_per_actor(self) -> int:
        return 1 if self.num_workers is None else self.num_workers


def train(config: Config, run: TrainingRun, kill_one: Callable[[], None]) -> None:
    """Trains, or continues a run, and writes its folder. With `--kill-one`, calls `kill_one` on the way."""
    env, arguments = config.env_fn(), config.env_arguments()
    with jaxvec.make(env, 1, backend="serial", **arguments) as envs:
        agent = Agent(config, envs.single_observation_space, envs.single_action_space)
    learner, _ = run.load(agent.begin())
    if config.evaluate:
        run.report(evaluation=run.play(partial(jax.jit(agent.best), learner)))
        return
    number, goal = int(learner.number), np.inf if config.stop_at is None else config.stop_at
    progress = run.folder / "actors.pickle"  # of a resumed run: the actors' next rollouts have other seeds
    rollouts = jaxvec.Rollouts(
        agent.play,
        env,
        config.num_envs,
        num_actors=config.num_actors,
        params=learner.weights,
        seed=config.seed,
        num_workers=config.workers_per_actor,
        on_fault="restart",
        resume=progress.read_bytes() if progress.exists() else None,
        timeouts=jaxvec.Timeouts(start=300, reset=None, step=None),
        **arguments,
    )
    learn, stop = jax.jit(agent.learn), number >= config.num_updates
    with rollouts, run.signals():
        run.show("compiling")
        while not stop:
            rollout = rollouts.get(timeout=300)
            if rollout.lag > config.max_lag:
                continue
            learner, metrics = learn(learner, rollout.trajectory)
            rollouts.push(learner.weights)
            number += 1
            run.log(number * config.steps_per_update, **metrics, lag=rollout.lag)
            reached = float(metrics["episode_return"]) >= goal  # false for NaN, before any episode ends
            stop = run.stopped or reached or number == config.num_updates
            if stop or run.save_due:
                learned = {"params": learner.weights.params, "stats": vars(learner.weights.obs_stats)}
                run.save(learner, params=learned)
                run.write(progress.name, rollouts.checkpoint())
            if config.kill_one and number == max(config.num_updates // 10, 1):
                kill_one()
        stats = rollouts.stats()
    faults = sum(actor.faults for actor in stats.actors)
    print(f"faults of actors: {faults}")


@contextmanager
def simulated(config: Config) -> Generator[Callable[[], None]]:
    """Starts a simulated cluster, if requested. Yields a function that kills one of its nodes."""
    ray: Any = importlib.import_module("ray")
    if not config.simulate_nodes:
        if config.address is not None:
            ray.init(config.address)
        yield lambda: None
        return
    cluster: Any = importlib.import_module("ray.cluster_utils").Cluster()
    try:
        cluster.add_node(num_cpus=0, object_store_memory=_MEMORY)  # for the head and the learner
        left = max(config.simulate_nodes - 1, 1)  # these have resources for all actors
        room = config.workers_per_actor * math.ceil(config.num_actors / left)
        nodes = [
            cluster.add_node(num_cpus=room, object_store_memory=_MEMORY) for _ in range(config.simulate_nodes)
        ]
        ray.init(address=cluster.address, log_to_driver=False)
        yield lambda: cluster.remove_node(nodes[0], allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(argv: Sequence[str] | None = None) -> TrainingRun:
    with (
        training(Config, argv, program="impala_ray") as (config, run),
        simulated(config) as kill,
    ):
        train(config, run, kill)
    return run


if __name__ == "__main__":
    main()
