"""`python -m benchmarks.soak`: steps pools while workers are killed and envs fail, at random.

Every field of every row that comes back is foretold from the rows before it, and compared. A pool of each
kind (hand-off, transport, synchronous or first-ready, `retry`, spare envs; with `--ray`, on a cluster of its
own) runs for its share of the time, with `on_fault="restart"` and no limits.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from gymnasium import spaces

import jaxvec
from jaxvec._workers import fork
from jaxvec.testing import CountingEnv

LENGTH = 200  # steps, or turns, of one program
NUM_ENVS, NUM_WORKERS = 8, 2
EPISODE = 50  # steps
SHAPE = (32, 32, 3)  # of an image


def picture(counts):
    """Returns the images of envs that have counted so, `[n, 4]`; each pixel tells of when it is."""
    resets, steps, _, action = np.asarray(counts).T[:, :, None]
    pixels = np.arange(math.prod(SHAPE)) * (steps + 1) + 7 * resets + action
    return (pixels % 256).astype(np.uint8).reshape(-1, *SHAPE)


class CursedEnv(CountingEnv):
    """Counts, and at random times meets with a fault, which it first notes in a file."""

    def __init__(self, record: Path, mean: float) -> None:
        super().__init__(episode_length=EPISODE)
        self.observation_space = spaces.Dict(
            counts=self.observation_space, image=spaces.Box(0, 255, SHAPE, np.uint8)
        )
        self._record = record
        self._mean = mean
        self._doom = time.monotonic() + random.expovariate(1 / mean)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if time.monotonic() > self._doom:
            self._doom = time.monotonic() + random.expovariate(1 / self._mean)
            name = random.choice(list(FAULTS))
            with self._record.open("a") as record:
                record.write(f"{name}\n")
            obs = FAULTS[name](obs)
        return obs, reward, terminated, truncated, info

    def _observe(self, action):
        counts = super()._observe(action)
        return {"counts": counts, "image": picture(counts[None])[0]}


class _Deadly(dict):
    """An observation that kills its process when half of it has been written."""

    def __getitem__(self, key):
        if key == "image":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def _raise(obs):
    raise ValueError("bad luck")


def _spoil(obs):
    return obs | {"image": obs["image"][:1]}


def _signal(number):
    return lambda obs: os.kill(os.getpid(), number)


FAULTS = {
    "exception": _raise,
    "wrong data": _spoil,
    "sys.exit": lambda obs: sys.exit(1),
    "os._exit": lambda obs: os._exit(1),
    "SIGKILL": _signal(signal.SIGKILL),
    "killed in the middle of a row": _Deadly,
    "SIGSEGV": lambda obs: ctypes.string_at(0),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "hang": lambda obs: signal.pause(),
}


@dataclass(frozen=True)
class Kind:
    """What a pool is made with."""

    dispatch: str
    transport: str
    batch_size: int
    retry: str = "rebuild"
    spare_envs: int = 0
    backend: str = "process"

    def __str__(self) -> str:
        extras = [f"{self.spare_envs} spare envs"] if self.spare_envs else []
        extras += ["Ray"] if self.backend == "ray" else []
        return ", ".join([self.dispatch, self.transport, str(self.batch_size), self.retry, *extras])


WAYS = [("native", "ffi"), ("native", "io_callback"), ("portable", "io_callback")]
KINDS = [Kind(*way, batch_size) for batch_size in (NUM_ENVS, NUM_ENVS // 2) for way in WAYS]
KINDS += [replace(kind, retry="reset") for kind in (KINDS[0], KINDS[5])]
KINDS += [replace(kind, spare_envs=2) for kind in (KINDS[3], KINDS[6])]
ON_RAY = [replace(kind, backend="ray") for kind in (KINDS[0], KINDS[3], KINDS[7])]


@dataclass
class Tally:
    """What a pool went through."""

    steps: int = 0
    fault_rows: int = 0
    wrong: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0


class Last:
    """What was delivered of each env last, from which its next row follows.

    A row does not tell whether its fault took the env's process, or its object, along; the first observation
    after it does. So does that of an episode which a spare env begins. Either has to be of one that there may
    be: new, the one that played, or one of the worker's spare ones.
    """

    def __init__(self, kind: Kind) -> None:
        self.spare: list[Counter[tuple[int, int]]] = [Counter() for _ in range(NUM_WORKERS)]
        self.spare_envs = kind.spare_envs
        self.keeps = kind.retry == "reset"  # the object that raised
        self.counts = np.zeros((NUM_ENVS, 4), np.int64)
        self.returns = np.zeros(NUM_ENVS)
        self.lengths = np.zeros(NUM_ENVS, np.int64)
        self.resets = np.ones(NUM_ENVS, np.bool_)  # whose next row is that of a reset

    def begin(self, env_id, counts, fault, told):
        """Returns what an env counts as its next episode begins: what it has told, if that may be.

        Args:
            env_id: whose.
            counts: `[resets, steps, ...]` as its last episode ended, with the step that a fault took.
            fault: whether it ended by one.
            told: what it counts by the row.
        """
        new, reset_in_vain = (0, 0), (1, 0)  # all are reset in advance before they are with a seed
        ended = int(counts[0]), int(counts[1])
        spare = self.spare[env_id * NUM_WORKERS // NUM_ENVS]
        kept = set() if fault and not self.keeps else {ended}
        candidates = {*spare, new, reset_in_vain} if self.spare_envs else kept
        candidates |= {new} if fault else set()
        found = (int(told[0]) - 1, int(told[1]))
        if self.spare_envs:
            spare.update(kept)
            spare -= Counter({found})
        began = found if found in candidates else new
        return [began[0] + 1, began[1], 0, -1]

    def foretell(self, ids, actions, fault, told):
        """Returns all fields of the next rows of these envs; takes them for delivered.

        Args:
            ids: of the envs.
            actions: of each.
            fault: whether the row says so; all else follows.
            told: what the rows count, for those of episodes that begin.
        """
        before, reset = self.counts[ids], self.resets[ids]
        resets, steps, episode, _ = before.T
        stepped = np.stack([resets, steps + 1, episode + 1, actions], axis=1)
        plays = ~fault & ~reset
        terminated = plays & (episode + 1 == EPISODE)
        over = terminated | fault
        last = np.where(fault[:, None], before, stepped)  # of the episodes that are over
        counts = stepped.copy()
        counts[reset] = [1, 0, 0, -1]  # for the first time
        for place in np.flatnonzero(over):
            counts[place] = self.begin(ids[place], stepped[place], fault[place], told[place])
        reward = np.where(plays, episode + 1, 0)
        returns, lengths = self.returns[ids] + reward, self.lengths[ids] + plays
        self.counts[ids], self.resets[ids] = counts, False
        self.returns[ids], self.lengths[ids] = np.where(over, 0, returns), np.where(over, 0, lengths)
        hidden = np.zeros((len(ids), *SHAPE), np.uint8)
        return {
            "obs": {"counts": counts, "image": picture(counts)},
            "reward": reward,
            "terminated": terminated,
            "truncated": fault,
            "env_id": ids,
            "episode_return": returns,
            "episode_length": lengths,
            "fault": fault,
            "final_obs": {
                "counts": np.where(over[:, None], last, 0),
                "image": np.where(over[:, None, None, None], picture(last), hidden),
            },
            "_final_obs": over,
        }


def check(tally, last, actions, timestep):
    """Checks all fields of the rows of one turn, and counts those that were not foretold."""
    ids, fault = timestep.info["env_id"], timestep.info["fault"]
    found = {**timestep._asdict(), **timestep.info}
    del found["info"]
    expected = last.foretell(ids, actions, fault, timestep.obs["counts"])
    assert found.keys() == expected.keys()
    tally.steps += int((~fault).sum())
    tally.fault_rows += int(fault.sum())
    tally.wrong += sum(
        int((one != other).any()) for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    )


def run(kind, seconds, mean, deaths):
    """Runs one pool for so long; returns its tally."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "faults")
        record.touch()
        with jaxvec.config.override(dispatch=kind.dispatch, transport=kind.transport):
            envs = jaxvec.make(
                CursedEnv,
                NUM_ENVS,
                num_workers=NUM_WORKERS,
                batch_size=None if kind.batch_size == NUM_ENVS else kind.batch_size,
                backend=kind.backend,
                spare_envs=kind.spare_envs,
                on_fault=jaxvec.Restart(retry=kind.retry, max_restarts=None, rate=None),
                timeouts=jaxvec.Timeouts(step=1.0),
                record=record,
                mean=mean,
            )
        stop = threading.Event()

        def kill_from_outside():
            while not stop.wait(random.expovariate(1 / deaths)):
                if kind.backend == "ray":  # whose processes are elsewhere; envs kill theirs
                    continue
                workers = envs.pool._workers.supervisor._processes
                tally.faults["killed from outside"] += 1
                with suppress(ProcessLookupError):  # it has gone by itself
                    os.kill(random.choice(workers).pid, signal.SIGKILL)

        def turn(carry, action):
            handle, ids = carry
            actions = (action + ids) % 1000
            if kind.batch_size == NUM_ENVS:
                handle, timestep = jaxvec.step(handle, actions)
            else:
                handle, timestep = jaxvec.recv(jaxvec.send(handle, actions, ids))
            return (handle, timestep.info["env_id"]), (ids, actions, timestep)

        program = jax.jit(lambda carry, actions: jax.lax.scan(turn, carry, actions))
        killer = threading.Thread(target=kill_from_outside)
        with envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            last = Last(kind)
            check(tally, last, np.zeros(len(timestep.reward), int), jax.tree.map(np.asarray, timestep))
            sent = np.zeros(NUM_ENVS, int)
            killer.start()
            end = time.monotonic() + seconds
            carry, start = (handle, timestep.info["env_id"]), 0
            try:
                while time.monotonic() < end:
                    carry, rows = program(carry, jnp.arange(start, start + LENGTH))
                    start += LENGTH
                    rows = jax.tree.map(np.asarray, rows)
                    for place in range(LENGTH):
                        ids, actions, timestep = jax.tree.map(lambda leaf, place=place: leaf[place], rows)
                        sent[ids] = actions
                        check(tally, last, sent[timestep.info["env_id"]], timestep)
            finally:
                stop.set()
                killer.join()
            tally.restarts = envs.stats().total.restarts
        tally.faults.update(record.read_text().split("\n")[:-1])
    return tally


def main() -> None:
    """Runs the soak and prints its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--mean", type=float, default=20, help="seconds until an env's next fault, on average"
    )
    parser.add_argument(
        "--deaths", type=float, default=5, help="seconds between kills from outside, on average"
    )
    parser.add_argument("--ray", action="store_true", help="on Ray, too")
    options = parser.parse_args()
    logging.getLogger("jaxvec").setLevel(logging.ERROR)
    kinds = KINDS + ON_RAY if options.ray else KINDS
    if options.ray:
        import ray

        # "local" is a cluster of its own, though there be others on the machine.
        ray.init(address="local", num_cpus=2 * NUM_WORKERS, log_to_driver=False)
    process = psutil.Process()
    print(f"`python -m benchmarks.soak {' '.join(sys.argv[1:])}`\n")
    print(
        "| hand-off, transport, envs a turn, retry | steps | faults | restarts | fault rows | wrong fields "
        "| RSS, MB |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    wrong = 0
    seconds = 60 * options.minutes / len(kinds)
    for kind in kinds:
        tally = run(kind, seconds, options.mean, options.deaths)
        wrong += tally.wrong
        megabytes = process.memory_info().rss / 1e6
        print(
            f"| {kind} | {tally.steps:,} | {tally.faults.total()} "
            f"| {tally.restarts} | {tally.fault_rows} | {tally.wrong} | {megabytes:.0f} |",
            flush=True,
        )
        print(f"  {dict(tally.faults)}", file=sys.stderr, flush=True)
    fork.end_all()
    if options.ray:
        ray.shutdown()
    print(f"\nLeft behind: {len(process.children(recursive=True))} processes.")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
