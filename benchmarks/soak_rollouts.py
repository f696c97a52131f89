"""Runs `Rollouts` while actors, nodes and the learner are killed: `python -m benchmarks.soak_rollouts`.

A learner on a cluster that Ray simulates on this machine takes rollouts and pushes weights. It writes a
checkpoint after each of them, and is started again from it when it was killed. A model predicts each field of
each row, and knows the next index of each actor: a gap, a double, or a wrong value or label ends the run.
"""

from __future__ import annotations

import argparse
import logging
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster

import jaxvec
from jaxvec.testing import CountingEnv

SEED, NUM_ACTORS, NUM_ENVS, NUM_STEPS, EPISODE = 3, 3, 4, 64, 7
NUM_WEIGHTS = 20_000  # float32, so that they travel through Ray's object store
START_LIMIT = 300.0  # seconds
ALLOWED_SILENCE = 300.0  # seconds without a rollout, after which the run has failed


def weights(version: int) -> Any:
    return np.full(NUM_WEIGHTS, version, np.float32)


def choose(key: Any, version: Any) -> Any:
    """Returns the actions of a rollout, which depend on its key and on its weights."""
    return (jax.random.randint(key, (NUM_STEPS, NUM_ENVS), 0, 500) + version) % 500


def rollout(params: Any, handle: Any, timestep: Any, key: Any) -> Any:
    def step(carry: Any, action: Any) -> Any:
        handle, timestep = jaxvec.step(carry[0], action)
        return (handle, timestep), timestep

    actions = choose(key, params[0].astype(jnp.int32))
    (handle, timestep), steps = jax.lax.scan(step, (handle, timestep), actions)
    return handle, timestep, {"steps": steps, "least": params.min(), "most": params.max()}


class Model:
    """Predicts the rollouts of one actor, whose envs are `CountingEnv`s."""

    def __init__(self) -> None:
        self.index = 0
        self.forget()

    def forget(self) -> None:
        """Expects envs that were reset, as those of an actor that is lost again and again in one rollout."""
        self.resets, self.steps, self.length, self.sum = 1, 0, 0, 0.0

    def predict(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        rows = [self._predict_row(row) for row in actions]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _predict_row(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        self.steps += 1
        self.length += 1
        self.sum += self.length
        over = self.length == EPISODE
        n = len(actions)
        seen = np.stack([np.array([self.resets, self.steps, self.length, a]) for a in actions])
        row = {
            "reward": np.full(n, self.length),
            "terminated": np.full(n, over),
            "truncated": np.zeros(n, bool),
            "env_id": np.arange(n),
            "episode_return": np.full(n, self.sum),
            "episode_length": np.full(n, self.length),
            "fault": np.zeros(n),
            "_final_obs": np.full(n, over),
            "final_obs": seen if over else np.zeros_like(seen),
        }
        if over:
            self.resets, self.length, self.sum = self.resets + 1, 0, 0.0
            seen = np.tile(np.array([self.resets, self.steps, 0, -1]), (n, 1))
        return row | {"obs": seen}


def flatten(timestep: Any) -> dict[str, np.ndarray]:
    fields = timestep._asdict()
    return {name: np.asarray(value) for name, value in (fields | fields.pop("info")).items()}


@dataclass
class Progress:
    """What the learner keeps on the disk."""

    checkpoint: bytes | None = None
    models: list[Model] = field(default_factory=lambda: [Model() for _ in range(NUM_ACTORS)])
    tally: Counter[str] = field(default_factory=Counter)
    memory: list[float] = field(default_factory=list)  # of each learner, in MB after its first 100 rollouts


def check(done: jaxvec.Rollout, model: Model, tally: Counter[str]) -> None:
    """Compares a rollout with the model's prediction.

    Raises:
        AssertionError: Something differs.
    """
    assert done.index == model.index, f"actor {done.actor}: rollout {done.index} in place of {model.index}"
    found = done.trajectory
    assert found["least"] == found["most"] == done.version, f"weights {found['most']}, label {done.version}"
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), done.actor), done.index)
    actions = np.asarray(choose(key, done.version))
    steps = flatten(found["steps"])
    if model.steps and steps["obs"][0, 0, 1] == 1:
        tally["envs reset after several losses"] += 1
        model.forget()
    expected = model.predict(actions)
    assert steps.keys() == expected.keys(), f"{sorted(steps)} in place of {sorted(expected)}"
    for name, value in expected.items():
        np.testing.assert_array_equal(steps[name], value, f"actor {done.actor}, {done.index}: {name}")
    model.index += 1
    tally["rollouts"] += 1


def learn(path: Path, address: str) -> None:
    """Takes rollouts from where the last learner was killed, until this one is killed."""
    logging.getLogger("jaxvec").setLevel(logging.ERROR)
    progress = pickle.loads(path.read_bytes()) if path.exists() else Progress()
    ray.init(address=address, log_to_driver=False)
    version = pickle.loads(progress.checkpoint)["version"] if progress.checkpoint else 0
    rollouts = jaxvec.Rollouts(
        rollout,
        partial(CountingEnv, episode_length=EPISODE),
        NUM_ENVS,
        num_actors=(1, NUM_ACTORS),
        params=weights(version),
        seed=SEED,
        save_states=True,
        on_fault=jaxvec.Restart(max_restarts=None, rate=None),
        timeouts=jaxvec.Timeouts(start=START_LIMIT, reset=None, step=None),
        resume=progress.checkpoint,
    )
    process, kept, faults = psutil.Process(), 0, 0
    while True:
        done = rollouts.get(timeout=ALLOWED_SILENCE)
        check(done, progress.models[done.actor], progress.tally)
        version += 1
        rollouts.push(weights(version))
        progress.checkpoint = rollouts.checkpoint()
        now = sum(actor.faults for actor in rollouts.stats().actors)
        progress.tally["faults of actors"] += now - faults
        faults, kept = now, kept + 1
        if kept % 100 == 0:
            # Not `uss`: it counts the libraries of JAX, 40 MB, while no actor here shares them.
            memory = process.memory_info()
            megabytes = (memory.rss - memory.shared) / 1e6
            progress.memory = [megabytes, *progress.memory] if kept == 100 else progress.memory
            progress.tally["most growth of a learner after 100 rollouts, MB"] = max(
                progress.tally["most growth of a learner after 100 rollouts, MB"],
                round(megabytes - progress.memory[0]),
            )
        partly = path.with_suffix(".new")
        partly.write_bytes(pickle.dumps(progress))
        partly.replace(path)


def actors() -> list[psutil.Process]:
    """Returns the processes of actors on this cluster, whose nodes this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "".join(process.cmdline()[:1]).startswith("ray::RolloutActor"):
                found.append(process)
    return found


def _started(add: Callable[..., Any]) -> Any:
    """Starts a node; on a busy machine, Ray's start times out at times."""
    for attempt in range(5):
        try:
            return add(num_cpus=2)
        except Exception as error:
            print(f"start {attempt} of a node failed: {error}", flush=True)
    raise RuntimeError("Ray starts no node")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs Rollouts while parts of the cluster are killed.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--actors", type=float, default=15, help="mean seconds between kills of an actor")
    parser.add_argument("--nodes", type=float, default=90, help="mean seconds between losses of a node")
    parser.add_argument(
        "--learner", type=float, default=150, help="mean seconds between kills of the learner"
    )
    parser.add_argument("--learn", nargs=2, metavar=("PATH", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learn:
        learn(Path(options.learn[0]), options.learn[1])
        return

    means = {"actor": options.actors, "node": options.nodes, "learner": options.learner}
    due = {name: time.monotonic() + random.expovariate(1 / mean) for name, mean in means.items()}
    kills: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "progress"
        cluster = Cluster()
        add = partial(cluster.add_node, object_store_memory=100 << 20)
        add(num_cpus=0)
        nodes = [add(num_cpus=2) for _ in range(2)]
        cluster.wait_for_nodes()
        command = [sys.executable, "-m", "benchmarks.soak_rollouts", "--learn", str(path), cluster.address]
        learner = subprocess.Popen(command)
        end = time.monotonic() + 60 * options.minutes
        try:
            while time.monotonic() < end:
                time.sleep(0.5)
                # It ends itself if no rollout arrives within `ALLOWED_SILENCE`.
                if (code := learner.poll()) is not None:
                    sys.exit(f"the learner ended with code {code}, after {dict(kills)}")
                name = min(due, key=due.__getitem__)
                if time.monotonic() < due[name]:
                    continue
                due[name] = time.monotonic() + random.expovariate(1 / means[name])
                kills[name] += 1
                if name == "actor":
                    with suppress(IndexError, psutil.NoSuchProcess):  # all may be on their way
                        random.choice(actors()).kill()
                elif name == "node":
                    nodes.append(_started(add))
                    cluster.remove_node(nodes.pop(random.randrange(2)), allow_graceful=False)
                else:
                    learner.kill()
                    learner.wait()
                    learner = subprocess.Popen(command)
        finally:
            learner.kill()
            learner.wait()
            cluster.shutdown()
        if not path.exists():
            sys.exit("no rollout was finished; give it more minutes")
        progress = pickle.loads(path.read_bytes())
    print(f"kills: {dict(kills)}")
    for name, value in progress.tally.items():
        print(f"{name}: {value}")
    print(f"rollouts of each actor: {[model.index for model in progress.models]}")


if __name__ == "__main__":
    # By its name, as the file of the progress and the actors import it.
    from benchmarks import soak_rollouts

    sys.exit(soak_rollouts.main())
