"""`python -m benchmarks.soak`: steps pools while workers are killed and envs fail, at random.

Every row that comes back is checked. A pool of each kind (hand-off, transport, synchronous or
first-ready) runs for its share of the time, with `on_fault="restart"` and no limits.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import jaxvec
from jaxvec._backends import _fork
from jaxvec.testing import CountingEnv

LENGTH = 200  # steps, or turns, of one program
NUM_ENVS, NUM_WORKERS = 8, 2
FOR_EVER = jaxvec.Restart(retry="rebuild", max_restarts=None, interval=0)


class CursedEnv(CountingEnv):
    """Counts, and at random times meets with a fault, which it first notes in a file."""

    def __init__(self, record: Path, mean: float) -> None:
        super().__init__(episode_length=50)
        self._record = record
        self._mean = mean
        self._doom = time.monotonic() + random.expovariate(1 / mean)

    def step(self, action):
        if time.monotonic() > self._doom:
            self._doom = time.monotonic() + random.expovariate(1 / self._mean)
            name = random.choice(list(FAULTS))
            with self._record.open("a") as record:
                record.write(f"{name}\n")
            FAULTS[name]()
        return super().step(action)


def _raise():
    raise ValueError("bad luck")


def _signal(number):
    return lambda: os.kill(os.getpid(), number)


FAULTS = {
    "exception": _raise,
    "sys.exit": lambda: sys.exit(1),
    "os._exit": lambda: os._exit(1),
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "hang": signal.pause,
}


@dataclass
class Tally:
    """What a pool went through."""

    steps: int = 0
    fault_rows: int = 0
    wrong: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0


def check(tally, ids, obs, truncated, fault, actions, last):
    """Checks the rows of one turn against the last of the same envs.

    An observation is [resets, steps, steps in this episode, last action]: whatever is lost, repeated or
    stale shows there.
    """
    before = last[ids]
    clean = ~fault
    goes_on = obs[:, 2] == before[:, 2] + 1
    begins = (before[:, 2] == 49) & (obs[:, 2] == 0)  # the 50th step ended the episode
    anew = (obs[:, 2] == 0) & (obs[:, 3] == -1)
    right = np.where(clean, (goes_on & (obs[:, 3] == actions)) | (begins & anew), anew)
    tally.steps += int(clean.sum())
    tally.fault_rows += int(fault.sum())
    tally.wrong += int((~right | (truncated != fault)).sum())
    last[ids] = obs


def run(handoff, transport, batch_size, seconds, mean, deaths):
    """Runs one pool for so long; returns its tally."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "faults")
        record.touch()
        envs = jaxvec.make(
            CursedEnv,
            NUM_ENVS,
            num_workers=NUM_WORKERS,
            batch_size=batch_size,
            handoff=handoff,
            transport=transport,
            on_fault=FOR_EVER,
            step_timeout=1.0,
            record=record,
            mean=mean,
        )
        stop = threading.Event()

        def kill_from_outside():
            while not stop.wait(random.expovariate(1 / deaths)):
                workers = envs.pool._workers.supervisor._processes
                tally.faults["killed from outside"] += 1
                os.kill(random.choice(workers).pid, signal.SIGKILL)

        def turn(carry, action):
            handle, ids = carry
            actions = (action + ids) % 1000
            if batch_size is None:
                handle, timestep = jaxvec.step(handle, actions)
            else:
                handle, timestep = jaxvec.recv(jaxvec.send(handle, actions, ids))
            seen = (timestep.obs, timestep.truncated, timestep.info["fault"], ids, actions)
            return (handle, timestep.info["env_id"]), (*seen, timestep.info["env_id"])

        program = jax.jit(lambda carry, actions: jax.lax.scan(turn, carry, actions))
        killer = threading.Thread(target=kill_from_outside)
        with envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            last = np.tile(np.array([0, 0, 49, -1]), (NUM_ENVS, 1))  # what is received next is a reset
            last[timestep.info["env_id"]] = timestep.obs
            sent = np.zeros(NUM_ENVS, int)
            killer.start()
            end = time.monotonic() + seconds
            carry, start = (handle, timestep.info["env_id"]), 0
            try:
                while time.monotonic() < end:
                    carry, rows = program(carry, jnp.arange(start, start + LENGTH))
                    start += LENGTH
                    for obs, truncated, fault, ids, actions, received in zip(
                        *map(np.asarray, rows), strict=True
                    ):
                        sent[ids] = actions
                        check(tally, received, obs, truncated, fault, sent[received], last)
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
    options = parser.parse_args()
    logging.getLogger("jaxvec").setLevel(logging.ERROR)
    kinds = [
        (handoff, transport, batch_size)
        for batch_size in (None, NUM_ENVS // 2)
        for handoff, transport in (("native", "ffi"), ("native", "io_callback"), ("portable", "io_callback"))
    ]
    process = psutil.Process()
    print(f"`python -m benchmarks.soak {' '.join(sys.argv[1:])}`\n")
    print(
        "| hand-off, transport, envs a turn | steps | faults | gone on from | fault rows | wrong | RSS, MB |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    wrong = 0
    seconds = 60 * options.minutes / len(kinds)
    for handoff, transport, batch_size in kinds:
        tally = run(handoff, transport, batch_size, seconds, options.mean, options.deaths)
        wrong += tally.wrong
        megabytes = process.memory_info().rss / 1e6
        print(
            f"| {handoff}, {transport}, {batch_size or NUM_ENVS} | {tally.steps:,} | {tally.faults.total()} "
            f"| {tally.restarts} | {tally.fault_rows} | {tally.wrong} | {megabytes:.0f} |",
            flush=True,
        )
        print(f"  {dict(tally.faults)}", file=sys.stderr, flush=True)
    _fork.end_all()
    print(f"\nLeft behind: {len(process.children(recursive=True))} processes.")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
