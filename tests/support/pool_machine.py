"""A state machine of Hypothesis that compares a pool with a model of every field, also after faults.

The model is told nothing but what the pool is told. So rows that a fault has cut are foretold from the rows
before them alone: that is what they promise.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import disasters, probe
from support.disasters import wait_until_dead
from support.probe import pool_of, split_evenly

import jaxvec

LENGTH = 3  # steps of an episode

# Actions from here on cause a fault.
RAISE = 5  # raises before anything is counted
SPOIL = 6  # steps, and returns an image of a wrong shape
DIE = 7  # kills its process
DIE_LATE = 8  # kills its process when half of its observation is written
DIE_TWICE = 9  # kills its process, and the replacement at its first reset
END_BADLY = 10  # ends the episode, and raises in the next reset


def observe(counts):
    """Returns an observation whose parts identify the env and the time."""
    pixels = np.arange(48, dtype=np.int64) * (counts[1] + 1) + 7 * counts[0] + counts[3]
    return {"counts": np.array(counts, np.int32), "image": (pixels % 256).astype(np.uint8).reshape(4, 4, 3)}


def info_of(steps):
    """Returns an info with varying keys."""
    return {"lives": steps} if steps % 2 else {}


class _Deadly(dict):
    """A dict that kills its process when its second item is read."""

    def __getitem__(self, key):
        if key == "image":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


class HarmfulEnv(gymnasium.Env):
    """An env whose actions cause faults. It counts its calls, and has orders for replacements in a folder."""

    action_space = spaces.Discrete(11)
    observation_space = spaces.Dict(
        counts=spaces.Box(-1, 2**31 - 1, (4,), np.int32), image=spaces.Box(0, 255, (4, 4, 3), np.uint8)
    )

    def __init__(self, folder, worker_id):
        self._die, self._raise = (Path(folder, f"{what} {worker_id}") for what in ("die", "raise"))
        self.resets = self.steps = self.episode_steps = 0

    def reset(self, *, seed=None, options=None):
        for note, harm in ((self._die, _die), (self._raise, _raise)):
            if note.exists():
                note.unlink()
                harm()
        self.resets, self.episode_steps = self.resets + 1, 0
        return self._observe(-1), info_of(self.resets)

    def step(self, action):
        if action == RAISE:
            _raise()
        if action == DIE_TWICE:
            self._die.touch()
        if action in (DIE, DIE_TWICE):
            _die()
        if action == END_BADLY:
            self._raise.touch()
        self.steps, self.episode_steps = self.steps + 1, self.episode_steps + 1
        obs = self._observe(int(action))
        if action == SPOIL:
            obs["image"] = obs["image"][:1]
        if action == DIE_LATE:
            obs = _Deadly(obs)
        over = self.episode_steps == LENGTH or action == END_BADLY
        truncates = self.steps % 2 == 0
        reward = 0.5 * int(action) + self.steps
        return obs, reward, over and not truncates, over and truncates, info_of(self.steps)

    def _observe(self, action):
        return observe([self.resets, self.steps, self.episode_steps, action])


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _raise():
    raise ValueError("bad luck")


@dataclass
class ModelEnv:
    """The counters of a `HarmfulEnv`."""

    resets: int = 0
    steps: int = 0
    episode_steps: int = 0

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.resets, self.episode_steps = self.resets + 1, 0
        return observe([self.resets, self.steps, 0, -1]), info_of(self.resets)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps, self.episode_steps = self.steps + 1, self.episode_steps + 1
        over = self.episode_steps == LENGTH or action == END_BADLY
        truncates = self.steps % 2 == 0
        obs = observe([self.resets, self.steps, self.episode_steps, action])
        return obs, 0.5 * action + self.steps, over and not truncates, over and truncates, info_of(self.steps)


@dataclass
class Slot:
    """The state of an env in the program, and whether its next step is lost."""

    obs: Any = None  # the last delivered observation
    over: bool = False  # whether the last delivered row ended an episode
    episode: tuple[float, int] = (0.0, 0)  # delivered return and length of the running episode
    lost: bool = False


@dataclass
class Row:
    """All fields of one env's row of a time step, except `env_id`."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    episode: tuple[float, int]
    fault: bool = False
    final_obs: Any = None
    info: dict[str, Any] = field(default_factory=dict)
    final_info: dict[str, Any] = field(default_factory=dict)


class _Died(Exception):
    """The worker would have."""


class _Failed(Exception):
    """The env would have."""


@dataclass
class ModelWorker:
    """A model of the envs of one worker.

    Attributes:
        slots: of its envs.
        mode: of autoreset.
        rebuild: whether an env that raised is built anew.
        posts_each: whether each row counts as soon as it is whole; else those of a request together.
    """

    slots: dict[int, Slot]
    spares: int
    mode: str
    rebuild: bool
    posts_each: bool
    faults: int = 0

    def __post_init__(self):
        self._build()

    def die(self) -> None:
        """Ends the process; its replacement builds all envs again."""
        self._build()
        for slot in self.slots.values():
            slot.lost = True

    def reset(self, env_id: int) -> Row:
        slot = self.slots[env_id]
        obs, info = self._envs[env_id].reset()
        slot.obs, slot.over, slot.episode, slot.lost = obs, False, (0.0, 0), False
        return Row(obs, 0.0, False, False, (0.0, 0), info=info)

    def step(self, requests: list[tuple[int, int]]) -> dict[int, Row]:
        """Returns the rows of these envs, stepped in this order with these actions."""
        rows: dict[int, Row] = {}
        left, dies_again = list(requests), False
        while left:
            made: list[tuple[int, Row, Slot]] = []  # not delivered yet
            try:
                for env_id, action in left:
                    if action == END_BADLY and not self.slots[env_id].lost:
                        self._deliver(made, rows)  # its reset fails, so the earlier rows are delivered
                    row, after = self._step(env_id, action)
                    if dies_again:
                        dies_again = False
                        raise _Died
                    made.append((env_id, row, after))
                    if self.posts_each:
                        self._deliver(made, rows)
            except _Died:
                dies_again = not self.slots[env_id].lost and action == DIE_TWICE
                self.die()  # with the rows that it has not delivered
                made = []
            except _Failed:
                pass  # it delivers the earlier rows, and continues with this env
            self._deliver(made, rows)
            left = [(env_id, action) for env_id, action in left if env_id not in rows]
        return rows

    def _build(self) -> None:
        self._envs = {env_id: ModelEnv() for env_id in self.slots}
        self._ring = deque(ModelEnv() for _ in range(self.spares))

    def _deliver(self, made: list[tuple[int, Row, Slot]], rows: dict[int, Row]) -> None:
        for env_id, row, after in made:
            rows[env_id] = row
            vars(self.slots[env_id]).update(vars(after))
            self.faults += row.fault
        made.clear()

    def _step(self, env_id: int, action: int) -> tuple[Row, Slot]:
        """Returns the row of one step, and the program's state after it."""
        slot = self.slots[env_id]
        if slot.over and self.mode == "NEXT_STEP":
            obs, info = self._autoreset(env_id)
            return Row(obs, 0.0, False, False, (0.0, 0), info=info), Slot(obs)
        if slot.lost:
            return self._end(env_id, Row(slot.obs, 0.0, False, True, slot.episode, fault=True))
        if action in (DIE, DIE_LATE, DIE_TWICE):
            raise _Died
        if action != RAISE:
            obs, reward, terminated, truncated, info = self._envs[env_id].step(action)
        if action in (RAISE, SPOIL):
            slot.lost = True
            self._mend(env_id)
            raise _Failed
        if action == END_BADLY:
            self._mend(env_id)
        episode = (slot.episode[0] + reward, slot.episode[1] + 1)
        row = Row(obs, reward, terminated, truncated, episode, info=info)
        if terminated or truncated:
            return self._end(env_id, row)
        return row, Slot(obs, False, episode)

    def _end(self, env_id: int, row: Row) -> tuple[Row, Slot]:
        if self.mode != "SAME_STEP":
            return row, Slot(row.obs, True)
        row.final_obs, row.final_info = row.obs, row.info
        row.obs, row.info = self._autoreset(env_id)
        return row, Slot(row.obs, True)

    def _autoreset(self, env_id: int) -> tuple[Any, dict[str, Any]]:
        self._ring.append(self._envs[env_id])
        self._envs[env_id] = self._ring.popleft()
        return self._envs[env_id].reset()

    def _mend(self, env_id: int) -> None:
        if self.rebuild:
            self._envs[env_id] = ModelEnv()


class HostFace:
    """Drives a pool by its methods."""

    def __init__(self, envs):
        self.reset, self.step, self.send, self.recv = envs.reset, envs.step, envs.send, envs.recv


_step, _send, _recv = jax.jit(jaxvec.step), jax.jit(jaxvec.send), jax.jit(jaxvec.recv)


class ProgramFace:
    """Drives a pool by compiled programs."""

    def __init__(self, envs):
        self._envs = envs
        self._handle = None

    def reset(self, seed, mask=None):
        handle = self._envs if self._handle is None else self._handle
        self._handle, timestep = jaxvec.reset(handle, seed=seed, mask=mask)
        return timestep

    def step(self, actions):
        self._handle, timestep = _step(self._handle, np.array(actions))
        return timestep

    def send(self, actions, ids):
        self._handle = _send(self._handle, np.array(actions), np.array(ids))

    def recv(self):
        self._handle, timestep = _recv(self._handle)
        return timestep


class PoolMachine(RuleBasedStateMachine):
    """The state machine. `dead` has killed workers whose death no call can have noticed yet."""

    folder: tempfile.TemporaryDirectory[str] | None = None
    envs: jaxvec.VectorEnv | None = None
    checks = 0

    @initialize(
        num_envs=st.integers(1, 5),
        num_workers=st.integers(1, 3),
        dispatch=st.sampled_from(["auto", "portable"]),
        face=st.sampled_from(["host", "auto", "io_callback"]),
        first_ready=st.booleans(),
        mode=st.sampled_from(["SAME_STEP", "NEXT_STEP", "DISABLED"]),
        spare_envs=st.sampled_from([0, 0, 1, 2]),
        retry=st.sampled_from(["reset", "rebuild"]),
    )
    def make(self, num_envs, num_workers, dispatch, face, first_ready, mode, spare_envs, retry):
        if mode == "DISABLED":  # this mode has no autoreset
            first_ready, spare_envs = False, 0
        self.folder = tempfile.TemporaryDirectory()
        slices = split_evenly(num_envs, min(num_workers, num_envs))
        self.batch_size = max(num_envs // 2, 1) if first_ready else num_envs
        self.mode, self.spare_envs = mode, spare_envs
        self.envs = disasters.make(
            partial(HarmfulEnv, self.folder.name),
            num_envs,
            num_workers=len(slices),
            batch_size=self.batch_size,
            recv_order="sent",
            dispatch=dispatch,
            transport="auto" if face == "host" else face,
            autoreset_mode=mode,
            info={"lives": np.int32},
            spare_envs=spare_envs,
            on_fault=jaxvec.Restart(retry=retry, max_restarts=None, rate=None),
        )
        self.face = HostFace(self.envs) if face == "host" else ProgramFace(self.envs)
        self.workers = [
            ModelWorker(
                {env_id: Slot() for env_id in range(first, stop)},
                spare_envs,
                mode,
                retry == "rebuild",
                first_ready,
            )
            for first, stop in slices
        ]
        self.worker_of = {env_id: worker for worker in self.workers for env_id in worker.slots}
        self.num_envs = num_envs
        self.started = self.killed = self.closed = False
        self.checks = 0
        self.sent: dict[int, Row] = {}  # expected rows of the pending envs, in the order of their requests
        self.rows: dict[int, Row] = {}  # the last rows
        self.dead: set[int] = set()
        self.perhaps_dead: set[int] = set()

    def actions(self, count):
        """Returns the actions whose results the model can predict."""
        harm = [RAISE, SPOIL, DIE, DIE_LATE]
        if self.mode == "SAME_STEP" and not self.spare_envs:  # else others' resets meet with it, or nobody's
            harm += [DIE_TWICE, END_BADLY]
        return st.lists(st.integers(0, 4) | st.sampled_from(harm), min_size=count, max_size=count)

    def request(self, requests):
        """Predicts the rows of these envs and actions."""
        for worker in self.workers:
            mine = [(env_id, action) for env_id, action in requests if env_id in worker.slots]
            rows = worker.step(mine)
            self.sent |= {env_id: rows[env_id] for env_id, _ in mine}
        # In the order of the requests, across workers.
        order = [env_id for env_id in self.sent if env_id not in dict(requests)] + [i for i, _ in requests]
        self.sent = {env_id: self.sent[env_id] for env_id in order}

    def check(self, timestep):
        """Compares all fields of all rows with the prediction."""
        self.checks += 1
        # A call that waits may notice any of them.
        self.perhaps_dead, self.dead = self.perhaps_dead | self.dead, set()
        ids = timestep.info["env_id"].tolist()
        assert ids == list(self.sent)[: len(ids)]
        for place, env_id in enumerate(ids):
            row = self.rows[env_id] = self.sent.pop(env_id)
            same_step = self.mode == "SAME_STEP"
            zeros = jax.tree.map(np.zeros_like, row.obs)
            infos = {"": row.info} | ({"final_info": row.final_info} if same_step else {})
            expected = {
                "obs": row.obs,
                "reward": row.reward,
                "terminated": row.terminated,
                "truncated": row.truncated,
                "env_id": env_id,
                "episode_return": row.episode[0],
                "episode_length": row.episode[1],
                "fault": row.fault,
            }
            for name, info in infos.items():
                declared = {"lives": info.get("lives", 0), "_lives": "lives" in info}
                expected |= {name: declared} if name else declared
            if same_step:
                expected["final_obs"] = zeros if row.final_obs is None else row.final_obs
                expected["_final_obs"] = row.final_obs is not None
            last_info = row.info if row.final_obs is None else row.final_info
            expected["last_info"] = {"lives": last_info.get("lives", 0), "_lives": "lives" in last_info}
            found = {**timestep._asdict(), **timestep.info, "last_info": timestep.last_info}
            del found["info"]
            assert found.keys() == expected.keys()
            found = jax.tree.map(lambda leaf, place=place: np.asarray(leaf)[place], found)
            jax.tree.map(np.testing.assert_array_equal, found, expected)

    usable = precondition(lambda self: not self.closed)
    idle = precondition(lambda self: not self.closed and not self.sent)
    moving = precondition(lambda self: not self.closed and self.started)

    @usable
    @rule(seed=st.none() | st.integers(0, 9))
    def reset(self, seed):
        if self.spare_envs and (self.started or self.killed):
            seed = None  # with a seed, an unknown number of resets in advance would be void
        self.started = True
        # The pending envs are received first, as predicted when they were sent.
        self.sent = {env_id: self.worker_of[env_id].reset(env_id) for env_id in self.spread()}
        self.check(self.face.reset(seed=seed))

    def spread(self):
        """Returns the order in which a reset sends envs."""
        turns = -(-self.num_envs // self.batch_size)
        return [i for first in range(turns) for i in range(first, self.num_envs, turns)]

    @idle
    @precondition(lambda self: self.started and self.batch_size == self.num_envs)
    @rule(data=st.data())
    def reset_some(self, data):
        self.reset_those(data.draw(st.lists(st.booleans(), min_size=self.num_envs, max_size=self.num_envs)))

    def reset_those(self, mask):
        self.sent = dict(self.rows)  # rows that are not replaced keep all fields
        self.sent |= {
            env_id: self.worker_of[env_id].reset(env_id) for env_id in np.flatnonzero(mask).tolist()
        }
        self.check(self.face.reset(seed=None, mask=np.array(mask)))

    @moving
    @precondition(lambda self: self.batch_size < self.num_envs)
    @rule(data=st.data())
    def reset_some_while_others_are_in_flight(self, data):
        free = [env_id for env_id in range(self.num_envs) if env_id not in self.sent]
        ids = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        mask = np.isin(np.arange(self.num_envs), ids)
        if len(self.sent) + len(ids) < self.batch_size:
            with pytest.raises(jaxvec.PendingEnvError):
                self.envs.reset(mask=mask)
            return
        order = [env_id for env_id in self.spread() if env_id in ids]
        self.sent |= {env_id: self.worker_of[env_id].reset(env_id) for env_id in order}
        self.check(self.face.reset(seed=None, mask=mask))

    @moving
    @precondition(lambda self: self.batch_size < self.num_envs)
    @rule(data=st.data())
    def send(self, data):
        free = [env_id for env_id in range(self.num_envs) if env_id not in self.sent]
        if not free:
            with pytest.raises(jaxvec.PendingEnvError):
                self.envs.send([0], [0])
            return
        ids = data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
        actions = data.draw(self.actions(len(ids)))
        self.request(list(zip(ids, actions, strict=True)))
        self.face.send(actions, ids)

    @moving
    @precondition(lambda self: self.batch_size < self.num_envs)
    @rule()
    def recv(self):
        if len(self.sent) < self.batch_size:
            with pytest.raises(jaxvec.PendingEnvError):
                self.envs.recv()
            return
        self.check(self.face.recv())

    @idle
    @precondition(lambda self: self.started and self.batch_size == self.num_envs)
    @rule(data=st.data())
    def step(self, data):
        for _ in range(data.draw(st.integers(1, 4))):
            actions = data.draw(self.actions(self.num_envs))
            over = [self.worker_of[env_id].slots[env_id].over for env_id in range(self.num_envs)]
            if self.mode == "DISABLED" and any(over):
                with pytest.raises(jaxvec.ResetNeededError):
                    self.envs.step(actions)
                self.reset_those(over)
            self.request(list(enumerate(actions)))
            self.check(self.face.step(actions))

    @idle
    @rule(data=st.data())
    def kill(self, data):
        number = data.draw(st.integers(0, len(self.workers) - 1))
        if number in self.dead | self.perhaps_dead:
            return
        worker = probe.processes(self.envs)[number]
        worker.kill()
        wait_until_dead(worker)  # on a busy machine it may run a moment longer
        self.workers[number].die()
        self.killed = True
        self.dead.add(number)

    @idle
    @rule()
    def call(self):
        if self.dead:
            with pytest.raises(jaxvec.WorkerDiedError, match="was killed by SIGKILL"):
                self.envs.get_attr("steps")
        elif self.perhaps_dead:
            with suppress(jaxvec.WorkerDiedError):
                self.envs.get_attr("steps")
        self.dead, self.perhaps_dead = set(), set()
        steps = tuple(self.worker_of[env_id]._envs[env_id].steps for env_id in range(self.num_envs))
        assert self.envs.get_attr("steps") == steps

    @precondition(lambda self: self.checks > 10)  # after a while
    @rule()
    def close(self):
        self.envs.close()
        self.closed = True

    @precondition(lambda self: self.closed)
    @rule()
    def use_after_close(self):
        for use in (self.envs.reset, self.envs.recv, self.envs.stats, lambda: self.envs.call("steps")):
            with pytest.raises(jaxvec.PoolClosedError):
                use()

    @invariant()
    def the_pool_is_whole(self):
        if self.envs is not None and not self.closed:
            assert pool_of(self.envs).state.broken_by is None
            delivered = sum(worker.faults for worker in self.workers)
            under_way = sum(row.fault for row in self.sent.values())
            assert self.envs.stats().total.faults >= delivered - under_way

    def teardown(self):
        traceback.print_exc()  # Hypothesis does not print a failure that is not reproducible
        if self.envs is not None:
            self.envs.close()
        if self.folder is not None:
            self.folder.cleanup()
