"""IMPALA on a Ray cluster: each actor has its own pool, and the learner takes the first finished rollout.

    python examples/impala_ray.py --address auto --num-actors 16
    python examples/impala_ray.py --simulate-nodes 3 --kill-one --stop-at 475

The network, the loss and V-trace are imported from `impala.py`; `jaxvec.Rollouts` replaces the threads. The
second command simulates a cluster of three nodes on this machine, with an actor on each. It kills one node
after a tenth of the steps, and the actor restarts on another node. On two cores that also did other work,
two runs reached 476 in 124,160 env steps and 62 s, and 477 in 136,640 env steps and 80 s.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle
import impala
import jax
import jax.numpy as jnp
import numpy as np
import shared_ppo
import shared_training
from impala import Agent, Learner, make_agent
from shared_training import Result, encode, finish, option, parse, progress

import jaxvec

# Actors on other machines do not have these files.
for _module in (sys.modules[__name__], impala, shared_ppo, shared_training):
    cloudpickle.register_pickle_by_value(_module)

_MEMORY = 200 << 20  # bytes of each simulated node's object store


def _flag(text: str) -> Any:
    return field(default=False, metadata={"help": text, "action": "store_true"})


@dataclass(frozen=True)
class Config(impala.Config):
    num_actors: int = option(3, "number of actors; --num-workers is the number of worker processes of each")
    max_lag: int = option(8, "maximum number of updates between the weights of a rollout and the newest ones")
    address: str | None = option(
        None, "address of the Ray cluster; by default the one of this machine, or a new one", str
    )
    simulate_nodes: int = option(0, "simulate a cluster with this number of nodes on this machine")
    kill_one: bool = _flag("kill one of the simulated nodes during training")


def rollout(
    agent: Agent, learner: Learner, handle: jaxvec.Handle, timestep: jaxvec.TimeStep, key: jax.Array
) -> tuple[jaxvec.Handle, jaxvec.TimeStep, impala.Rollout]:
    """Plays `num_steps` steps in every env of an actor, with the signature of `jaxvec.Rollouts`."""
    handle, obs, played = impala.play(agent, learner, handle, encode(timestep.obs), key)
    return handle, timestep._replace(obs=obs), played


def weights(learner: Learner) -> Learner:
    """Returns only the parts that actors need."""
    return learner._replace(opt_state=None, returns=None)


def run(config: Config, kill_one: Callable[[], None]) -> Result:
    """Starts the actors, trains, and ends them. With `--kill-one`, calls `kill_one` during training."""
    with jaxvec.make(config.env, 1, num_workers=1) as envs:
        agent = make_agent(config, envs)
        learner = impala.init(agent, encode(jaxvec.reset(envs, seed=0)[1].obs))
    start = time.perf_counter()
    step: Callable[..., tuple[Learner, jax.Array]] = jax.jit(partial(impala.learn, agent))
    goal = np.inf if config.stop_at is None else config.stop_at
    curve = [np.nan]  # NaN >= goal is false
    actors = jaxvec.Rollouts(
        partial(rollout, agent),
        config.env,
        config.num_envs,
        num_actors=config.num_actors,
        params=weights(learner),
        seed=config.seed,
        backend=jaxvec.Ray(config.address, workers_per_actor=config.num_workers or 1),
        max_lag=config.max_lag,
        on_fault="restart",
        timeouts=jaxvec.Timeouts(start=300),
    )
    with actors, progress(config) as report:
        while len(curve) <= config.num_updates and not curve[-1] >= goal:
            learner, mean_return = step(learner, actors.get(timeout=300).trajectory)
            actors.push(weights(learner))
            curve.append(float(mean_return))
            report(curve[-1])
            if config.kill_one and len(curve) == max(config.num_updates // 10, 2):
                kill_one()
        stats = actors.stats()
    seconds = time.perf_counter() - start
    faults = sum(actor.faults for actor in stats.actors)
    print(f"faults of actors: {faults}; rollouts dropped because of --max-lag: {stats.dropped}")
    num_episodes = int(jnp.isfinite(learner.returns.last).sum())
    env_steps = (len(curve) - 1) * config.steps_per_update
    return Result(curve[-1], num_episodes, env_steps, seconds, np.array(curve[1:], np.float32))


@contextmanager
def simulated(config: Config) -> Generator[Callable[[], None]]:
    """Starts a simulated cluster, if requested. Yields a function that kills one of its nodes."""
    if not config.simulate_nodes:
        yield lambda: None
        return
    ray: Any = importlib.import_module("ray")
    cluster: Any = importlib.import_module("ray.cluster_utils").Cluster()
    try:
        cluster.add_node(num_cpus=0, object_store_memory=_MEMORY)  # for the head and the learner
        left = max(config.simulate_nodes - 1, 1)  # these have resources for all actors
        room = (config.num_workers or 1) * math.ceil(config.num_actors / left)
        nodes = [
            cluster.add_node(num_cpus=room, object_store_memory=_MEMORY) for _ in range(config.simulate_nodes)
        ]
        ray.init(address=cluster.address, log_to_driver=False)
        yield lambda: cluster.remove_node(nodes[0], allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(argv: Sequence[str] | None = None) -> Result:
    about = "Train IMPALA on a Ray cluster, on a Gymnasium env with Box observations and Discrete actions."
    config = parse(Config, "impala_ray", about, argv)
    with simulated(config) as kill_one:
        result = run(config, kill_one)
    return finish(config, "IMPALA", "impala_ray", result)


if __name__ == "__main__":
    main()
