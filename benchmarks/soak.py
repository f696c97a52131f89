"""Steps pools while workers are killed and envs fail at random: `python -m benchmarks.soak`.

Each field of each result is compared with a prediction from the previous results. Pools with several
combinations of dispatch, transport, batch size, `retry` and spare envs run for equal times, with unlimited
restarts. Some are recycled, and some saved and restored.

`--kind leaks` steps envs that leak 1 MB per step, with `Workers(recycle=...)`, and `--kind growth` shows the
memory of jaxvec itself.
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
from jaxvec._vector_env import pool_of
from jaxvec._workers import fork
from jaxvec.testing import CountingEnv

LENGTH = 200  # steps, or pairs of `send` and `recv`, per call of the program
NUM_ENVS, NUM_WORKERS = 8, 2
EPISODE = 50  # steps per episode
SHAPE = (32, 32, 3)  # shape of an image


def images_of(counts):
    """Returns the images that envs observe with given counters.

    Each pixel depends on the counters, so that the check detects pixels of other steps.

    Args:
        counts: Array `[n, 4]` of resets, steps, steps of the episode, and the last action.

    Returns:
        Array `[n, *SHAPE]` of uint8.
    """
    resets, steps, _, action = np.asarray(counts).T[:, :, None]
    pixels = np.arange(math.prod(SHAPE)) * (steps + 1) + 7 * resets + action
    return (pixels % 256).astype(np.uint8).reshape(-1, *SHAPE)


class FaultyEnv(CountingEnv):
    """A `CountingEnv` that causes a random fault at random times.

    Args:
        record: File to which the name of each fault is appended before it happens.
        mean: Mean seconds between faults.
    """

    worker: int  # the process id; of the class, as it is no part of a state

    def __init__(self, record: Path, mean: float) -> None:
        super().__init__(episode_length=EPISODE)
        self.observation_space = spaces.Dict(
            counts=self.observation_space, image=spaces.Box(0, 255, SHAPE, np.uint8)
        )
        FaultyEnv.worker = os.getpid()
        self._record = record
        self._mean = mean
        self._next_fault = time.monotonic() + random.expovariate(1 / mean)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        # Not in the proof of its states, which repeats steps in a child of the worker.
        if time.monotonic() > self._next_fault and os.getpid() == FaultyEnv.worker:
            self._next_fault = time.monotonic() + random.expovariate(1 / self._mean)
            name = random.choice(list(FAULTS))
            with self._record.open("a") as record:
                record.write(f"{name}\n")
            obs = FAULTS[name](obs)
        return obs, reward, terminated, truncated, info

    def _observe(self, action):
        counts = super()._observe(action)
        return {"counts": counts, "image": images_of(counts[None])[0]}


class _KillingObservation(dict):
    """An observation that kills its process between the writes of its two leaves."""

    def __getitem__(self, key):
        if key == "image":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def _raise(obs):
    raise ValueError("random fault")


def _truncate_image(obs):
    return obs | {"image": obs["image"][:1]}


def _signal(number):
    return lambda obs: os.kill(os.getpid(), number)


FAULTS = {
    "exception": _raise,
    "wrong data": _truncate_image,
    "sys.exit": lambda obs: sys.exit(1),
    "os._exit": lambda obs: os._exit(1),
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGKILL while results are written": _KillingObservation,
    "SIGSEGV": lambda obs: ctypes.string_at(0),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "hang": lambda obs: signal.pause(),
}


@dataclass(frozen=True)
class PoolConfig:
    """Options of a pool."""

    dispatch: str
    transport: str
    batch_size: int
    retry: str = "rebuild"
    spare_envs: int = 0
    recycle_steps: int | None = None  # of the envs of a worker, after which a fresh process replaces it
    saves: bool = False  # whether envs are saved before each call of the program, and mostly restored after

    def __str__(self) -> str:
        extras = [f"{self.spare_envs} spare envs"] if self.spare_envs else []
        extras += [f"recycled after {self.recycle_steps}"] if self.recycle_steps else []
        extras += ["saved and restored"] if self.saves else []
        return ", ".join([self.dispatch, self.transport, str(self.batch_size), self.retry, *extras])


MODES = [("native", "ffi"), ("native", "io_callback"), ("portable", "io_callback")]
CONFIGS = [PoolConfig(*way, batch_size) for batch_size in (NUM_ENVS, NUM_ENVS // 2) for way in MODES]
CONFIGS += [replace(config, retry="reset") for config in (CONFIGS[0], CONFIGS[5])]
CONFIGS += [replace(config, spare_envs=2) for config in (CONFIGS[3], CONFIGS[6])]
CONFIGS += [replace(config, recycle_steps=300) for config in (*CONFIGS[:4], CONFIGS[5], CONFIGS[6])]
CONFIGS += [replace(config, saves=True) for config in (CONFIGS[0], CONFIGS[2], CONFIGS[-6])]


@dataclass
class Tally:
    """Counters of a run.

    Attributes:
        steps: Number of results without a fault.
        fault_rows: Number of results with a fault.
        wrong: Number of fields that differ from the prediction.
        faults: Number of caused faults by name.
        restarts: Number of restarts that the pool reports.
        recycled: Number of workers that were replaced because of their steps.
        restored: Number of times that all envs were restored to their saved states.
    """

    steps: int = 0
    fault_rows: int = 0
    wrong: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    recycled: int = 0
    restored: int = 0


class ResultModel:
    """A model of the pool that predicts the next result of each env from the last one.

    A result with a fault does not show whether the process or the env object was replaced. The counters in
    the next observation do. They also show whether a spare env started the next episode. The counters have
    to match a possible env: a new one, the previous one, or a spare one of the worker.

    Args:
        config: Options of the pool.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.spare: list[Counter[tuple[int, int]]] = [Counter() for _ in range(NUM_WORKERS)]
        self.spare_envs = config.spare_envs
        self.keeps = config.retry == "reset"  # whether an env that raised is reset instead of rebuilt
        self.counts = np.zeros((NUM_ENVS, 4), np.int64)
        self.returns = np.zeros(NUM_ENVS)
        self.lengths = np.zeros(NUM_ENVS, np.int64)
        self.resets = np.ones(NUM_ENVS, np.bool_)  # whether the next result is that of a reset

    def first_counts(self, env_id, counts, fault, reported):
        """Returns the counters of an env in the first observation of its next episode.

        These are the reported counters if a possible env has them, and otherwise those of a new env.

        Args:
            env_id: Index of the env.
            counts: Counters `[resets, steps, ...]` at the end of the last episode, including a step that a
                fault interrupted.
            fault: Whether the last episode ended with a fault.
            reported: Counters in the result.
        """
        # An env that is reset in advance, and then again with a seed, has counted one unused reset.
        new, reset_unused = (0, 0), (1, 0)
        ended = int(counts[0]), int(counts[1])
        spare = self.spare[env_id * NUM_WORKERS // NUM_ENVS]
        kept = set() if fault and not self.keeps else {ended}
        candidates = {*spare, new, reset_unused} if self.spare_envs else kept
        candidates |= {new} if fault else set()
        found = (int(reported[0]) - 1, int(reported[1]))
        if self.spare_envs:
            spare.update(kept)
            spare -= Counter({found})
        start = found if found in candidates else new
        return [start[0] + 1, start[1], 0, -1]

    def predict(self, ids, actions, fault, reported):
        """Returns all fields of the next results of some envs, and updates the model.

        Args:
            ids: Array `[n]` of the env ids.
            actions: Array `[n]` of the actions.
            fault: Array `[n]` of bool, the field `fault` of the results. It cannot be predicted.
            reported: Array `[n, 4]` of counters in the results, used for envs that start an episode.
        """
        before, reset = self.counts[ids], self.resets[ids]
        resets, steps, episode, _ = before.T
        stepped = np.stack([resets, steps + 1, episode + 1, actions], axis=1)
        plays = ~fault & ~reset
        terminated = plays & (episode + 1 == EPISODE)
        over = terminated | fault
        last = np.where(fault[:, None], before, stepped)  # final observations of finished episodes
        counts = stepped.copy()
        counts[reset] = [1, 0, 0, -1]  # the first reset of the pool
        for index in np.flatnonzero(over):
            counts[index] = self.first_counts(ids[index], stepped[index], fault[index], reported[index])
        reward = np.where(plays, episode + 1, 0)
        returns, lengths = self.returns[ids] + reward, self.lengths[ids] + plays
        self.counts[ids], self.resets[ids] = counts, False
        self.returns[ids], self.lengths[ids] = np.where(over, 0, returns), np.where(over, 0, lengths)
        hidden = np.zeros((len(ids), *SHAPE), np.uint8)
        return {
            "obs": {"counts": counts, "image": images_of(counts)},
            "reward": reward,
            "terminated": terminated,
            "truncated": fault,
            "env_id": ids,
            "episode_return": returns,
            "episode_length": lengths,
            "fault": fault,
            "final_obs": {
                "counts": np.where(over[:, None], last, 0),
                "image": np.where(over[:, None, None, None], images_of(last), hidden),
            },
            "_final_obs": over,
        }

    def copy(self):
        """Returns a copy, for `restore`."""
        return [each.copy() for each in (self.counts, self.returns, self.lengths)]

    def restore(self, copy, fault):
        """Returns to a copy, and to new envs where a fault has interrupted the restore."""
        self.counts, self.returns, self.lengths = (each.copy() for each in copy)
        self.counts[fault], self.returns[fault], self.lengths[fault] = [1, 0, 0, -1], 0, 0


def check(tally, model, actions, timestep):
    """Compares all fields of a batch with the prediction and counts the differences."""
    ids, fault = timestep.info["env_id"], timestep.info["fault"]
    found = {**timestep._asdict(), **timestep.info}
    del found["info"]
    expected = model.predict(ids, actions, fault, timestep.obs["counts"])
    assert found.keys() == expected.keys()
    tally.steps += int((~fault).sum())
    tally.fault_rows += int(fault.sum())
    tally.wrong += sum(
        int((one != other).any()) for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    )


def run(config, seconds, mean, deaths):
    """Runs one pool and returns its tally.

    Args:
        config: Options of the pool.
        seconds: Duration of the run.
        mean: Mean seconds between faults of an env.
        deaths: Mean seconds between kills of a worker by this process.
    """
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "faults")
        record.touch()
        with jaxvec.config.override(dispatch=config.dispatch, transport=config.transport):
            envs = jaxvec.make(
                FaultyEnv,
                NUM_ENVS,
                num_workers=NUM_WORKERS,
                workers=jaxvec.Workers(
                    recycle=config.recycle_steps and jaxvec.Recycle(steps=config.recycle_steps)
                ),
                batch_size=None if config.batch_size == NUM_ENVS else config.batch_size,
                states=2 * NUM_ENVS if config.saves else 0,
                spare_envs=config.spare_envs,
                on_fault=jaxvec.Restart(retry=config.retry, max_restarts=None, rate=None),
                timeouts=jaxvec.Timeouts(step=1.0),
                record=record,
                mean=mean,
            )
        stop = threading.Event()

        def kill_from_outside():
            while not stop.wait(random.expovariate(1 / deaths)):
                # A worker that dies in a restore breaks the pool: there, only faults of envs kill workers.
                if config.saves:
                    continue
                tally.faults["SIGKILL from outside"] += 1
                workers = pool_of(envs).workers.supervisor.connections.processes
                with suppress(ProcessLookupError):  # the worker has exited already
                    os.kill(random.choice(workers).pid, signal.SIGKILL)

        def turn(carry, action):
            handle, ids = carry
            actions = (action + ids) % 1000
            if config.batch_size == NUM_ENVS:
                handle, timestep = jaxvec.step(handle, actions)
            else:
                handle, timestep = jaxvec.recv(jaxvec.send(handle, actions, ids))
            return (handle, timestep.info["env_id"]), (ids, actions, timestep)

        program = jax.jit(lambda carry, actions: jax.lax.scan(turn, carry, actions))
        killer = threading.Thread(target=kill_from_outside)
        with envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            model = ResultModel(config)
            check(tally, model, np.zeros(len(timestep.reward), int), jax.tree.map(np.asarray, timestep))
            sent = np.zeros(NUM_ENVS, int)
            killer.start()
            end = time.monotonic() + seconds
            carry, start = (handle, timestep.info["env_id"]), 0
            try:
                while time.monotonic() < end:
                    states = None
                    if config.saves:
                        with suppress(jaxvec.EnvTimeoutError):  # the worker is replaced, and no state is kept
                            handle, states = jaxvec.save(carry[0])
                            carry, saved = (handle, carry[1]), model.copy()
                    carry, rows = program(carry, jnp.arange(start, start + LENGTH))
                    start += LENGTH
                    rows = jax.tree.map(np.asarray, rows)
                    for index in range(LENGTH):
                        ids, actions, timestep = jax.tree.map(lambda leaf, index=index: leaf[index], rows)
                        sent[ids] = actions
                        check(tally, model, sent[timestep.info["env_id"]], timestep)
                    if states is not None and random.random() < 0.7:
                        with suppress(jaxvec.StaleStateError):  # a worker was replaced
                            handle, timestep = jaxvec.restore(carry[0], states)
                            carry = handle, carry[1]
                            model.restore(saved, np.asarray(timestep.info["fault"]))
                            counts = np.asarray(timestep.obs["counts"])
                            tally.restored += 1
                            tally.wrong += int((counts != model.counts).any(1).sum())
            finally:
                stop.set()
                killer.join()
            total = envs.stats().total
            tally.restarts, tally.recycled = total.restarts, total.recycled
        tally.faults.update(record.read_text().split("\n")[:-1])
    return tally


# --- Leaks of envs, and memory of jaxvec itself ---------------------------------------------------------

_hoard = []  # of a worker process, whichever of its envs leaks


def _leak_c():
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    ctypes.memset(malloc(MEGABYTE), 1, MEGABYTE)


def _leak_descriptor():
    descriptor = os.memfd_create("leak")
    os.write(descriptor, bytes(MEGABYTE))


MEGABYTE = 1_000_000
LEAKS = {
    "C memory": (_leak_c, {"memory": 300 * MEGABYTE}),
    "Python": (lambda: _hoard.append(b"x" * MEGABYTE), {"memory": 300 * MEGABYTE}),
    "descriptors": (_leak_descriptor, {"descriptors": 250}),
}


class LeakingEnv(CountingEnv):
    """A `CountingEnv` that leaks 1 MB in each step, which takes at least a millisecond.

    Args:
        leak: Key of `LEAKS`.
    """

    def __init__(self, leak: str) -> None:
        super().__init__(episode_length=EPISODE)
        self._leak = leak

    def step(self, action):
        time.sleep(0.001)
        LEAKS[self._leak][0]()
        return super().step(action)


class LeakModel:
    """The counters of each `LeakingEnv`, which predict the next result of each env. A fault means a new env.

    Args:
        num_envs: Number of envs.
    """

    def __init__(self, num_envs: int) -> None:
        self.resets = np.ones(num_envs, np.int64)
        self.steps = np.zeros(num_envs, np.int64)
        self.episode = np.zeros(num_envs, np.int64)
        self.returns = np.zeros(num_envs)
        self.obs = np.stack([self.resets, self.steps, self.episode, self.resets - 2], axis=1)

    def predict(self, actions, fault):
        """Returns all fields of the next result of all envs, and updates the model.

        Args:
            actions: Array `[num_envs]` of the actions.
            fault: Array `[num_envs]` of bool, the field `fault` of the result, which marks a cut episode.
        """
        self.steps = np.where(fault, 0, self.steps + 1)
        self.episode = np.where(fault, self.episode, self.episode + 1)
        reward = np.where(fault, 0, self.episode)
        self.returns = self.returns + reward
        terminated = ~fault & (self.episode == EPISODE)
        over = terminated | fault
        stepped = np.stack([self.resets, self.steps, self.episode, actions], axis=1)
        last_obs = np.where(fault[:, None], self.obs, stepped)
        row = {"reward": reward, "terminated": terminated, "truncated": fault, "fault": fault}
        row |= {"episode_return": self.returns, "episode_length": self.episode}
        row |= {"_final_obs": over, "final_obs": np.where(over[:, None], last_obs, 0), "last_obs": last_obs}
        self.resets = np.where(fault, 1, self.resets + over)
        self.episode = np.where(over, 0, self.episode)
        self.returns = np.where(over, 0, self.returns)
        first_obs = np.stack([self.resets, self.steps, self.episode, np.full(len(fault), -1)], axis=1)
        self.obs = np.where(over[:, None], first_obs, stepped)
        return {**row, "obs": self.obs, "env_id": np.arange(len(fault))}


def run_leak(leak, seconds):
    """Steps leaking envs, and returns a row of the table and the number of wrong fields.

    Each recycled worker has two envs, and so marks two results. The last ones may still be to come.
    """
    workers = jaxvec.Workers(recycle=jaxvec.Recycle(**LEAKS[leak][1]))
    peaks, stop = [0, 0], threading.Event()
    with jaxvec.make(LeakingEnv, 4, num_workers=2, workers=workers, leak=leak) as envs:

        def watch():
            while not stop.wait(0.1):
                processes = [worker.process for worker in envs.stats().workers if worker.process]
                peaks[0] = max([peaks[0], *(process.memory for process in processes)])
                peaks[1] = max([peaks[1], *(process.descriptors for process in processes)])

        watcher = threading.Thread(target=watch)
        handle, _ = jaxvec.reset(envs, seed=0)
        program = jax.jit(lambda handle, actions: jax.lax.scan(jaxvec.step, handle, actions))
        model = LeakModel(4)
        watcher.start()
        end = time.monotonic() + seconds
        count = wrong = marked = 0
        try:
            while time.monotonic() < end:
                actions = (count + np.arange(LENGTH)[:, None] + np.arange(4)) % 1000
                handle, rows = program(handle, jnp.asarray(actions))
                rows = jax.tree.map(np.asarray, rows)
                fields = {**rows._asdict(), **rows.info, "last_obs": rows.last_obs}
                del fields["info"]
                for number in range(LENGTH):
                    expected = model.predict(actions[number], fields["fault"][number])
                    assert fields.keys() == expected.keys()
                    wrong += sum(int((fields[name][number] != expected[name]).sum()) for name in expected)
                marked += int(fields["fault"].sum())
                count += LENGTH
        finally:
            stop.set()
            watcher.join()
        recycled = envs.stats().total.recycled
    wrong += not 0 <= 2 * recycled - marked <= 4
    row = f"| {leak} | {4 * count:,} | {recycled} | {marked} | {peaks[0] / 1e6:.0f} | {peaks[1]} | {wrong} |"
    return row, wrong


class FragileEnv(CountingEnv):
    """A `CountingEnv` that raises at action 999."""

    def step(self, action):
        if action == 999:
            raise ValueError("an error to recover from")
        return super().step(action)


def run_growth(minutes):
    """Prints the memory of this process and of a worker while episodes end, envs fail and states are saved.

    Worker 1 has an error in each round, and is killed in each 50th. Worker 0 is never replaced.
    """
    policy = jaxvec.Restart(retry="reset", max_restarts=None, rate=None)
    options = {"num_workers": 2, "states": 64, "on_fault": policy, "episode_length": EPISODE}
    program = jax.jit(lambda handle, actions: jax.lax.scan(jaxvec.step, handle, actions))
    actions = np.zeros((LENGTH, 64), int)
    actions[LENGTH // 2, 40] = 999
    process = psutil.Process()
    print("| env steps | faults | this process, MB | worker 0, MB | descriptors |\n|" + " ---: |" * 5)
    with jaxvec.make(FragileEnv, 64, info={"steps": np.int32}, **options) as envs:
        handle, _ = jaxvec.reset(envs, seed=0)
        start, rounds, lines = time.monotonic(), 0, 0
        while lines <= 12:
            rounds += 1
            handle, states = jaxvec.save(handle)
            if not rounds % 50:
                os.kill(envs.stats().workers[1].process.pid, signal.SIGKILL)
            handle, rows = program(handle, jnp.asarray(actions))
            assert rows.info["fault"].any()
            if rounds % 50:  # else the states of worker 1 are lost
                handle, _ = jaxvec.restore(handle, states)
            pool_of(envs).env_calls.infos(pool_of(envs).all)
            envs.get_attr("steps")
            if time.monotonic() - start >= 60 * minutes * lines / 12:
                lines += 1
                stats = envs.stats()
                sizes = process.memory_info().rss, stats.workers[0].process.memory
                print(
                    f"| {stats.total.steps:,} | {stats.total.faults} | {sizes[0] / 1e6:.1f} "
                    f"| {sizes[1] / 1e6:.1f} | {process.num_fds()} |",
                    flush=True,
                )


def main() -> None:
    """Parses the command line, runs all pools and prints a table.

    The exit status is 1 if a field differs from its prediction.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="duration of all runs together")
    parser.add_argument("--mean", type=float, default=20, help="mean seconds between faults of an env")
    parser.add_argument("--deaths", type=float, default=5, help="mean seconds between kills of a worker")
    text = (
        "faults: kills and errors; leaks: envs that leak 1 MB per step; growth: the memory of jaxvec itself"
    )
    parser.add_argument("--kind", choices=["faults", "leaks", "growth"], default="faults", help=text)
    options = parser.parse_args()
    logging.getLogger("jaxvec").setLevel(logging.ERROR)
    if options.kind == "growth":
        run_growth(options.minutes)
        return
    if options.kind == "leaks":
        print(
            "| leak | env results | recycled | marked results | peak of a worker, MB | of descriptors "
            "| wrong fields |"
        )
        print("| --- |" + " ---: |" * 6)
        wrong = 0
        for leak in LEAKS:
            row, more = run_leak(leak, 60 * options.minutes / len(LEAKS))
            wrong += more
            print(row, flush=True)
        sys.exit(bool(wrong))
    process = psutil.Process()
    print(f"`python -m benchmarks.soak {' '.join(sys.argv[1:])}`\n")
    print(
        "| dispatch, transport, envs per batch, retry | steps | faults | restarts | recycled | restored "
        "| fault rows | wrong fields | RSS, MB |"
    )
    print("| --- |" + " ---: |" * 8)
    wrong = 0
    seconds = 60 * options.minutes / len(CONFIGS)
    for config in CONFIGS:
        tally = run(config, seconds, options.mean, options.deaths)
        wrong += tally.wrong
        megabytes = process.memory_info().rss / 1e6
        print(
            f"| {config} | {tally.steps:,} | {tally.faults.total()} "
            f"| {tally.restarts} | {tally.recycled} | {tally.restored} | {tally.fault_rows} | {tally.wrong} "
            f"| {megabytes:.0f} |",
            flush=True,
        )
        print(f"  {dict(tally.faults)}", file=sys.stderr, flush=True)
    fork.end_all()
    print(f"\nRemaining child processes: {len(process.children(recursive=True))}.")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
