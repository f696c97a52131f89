"""The states of slots: how a worker saves, restores, keeps and pickles them.

env and its wrappers --StatefulEnv.save--> EnvSnapshot --+
the rest of the slot ------------------------------------+--> SlotState --StateTable.add--> table, by number
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxvec import _stats
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.envs import Env
from jaxvec._envs.episodes import IDLE, SavedEpisode
from jaxvec._errors import EnvStateError
from jaxvec._extensions.states.env_states import EnvSnapshot, StatefulEnv
from jaxvec._extensions.states.snapshots.pickling import dumps, size_of
from jaxvec._leaves import KeyPath
from jaxvec._options import States

_EMPTY: dict[Any, Any] = {}  # shared by states, which never change
_MAX_UNMEASURED = 1024  # states between two measurements of their size


class SlotState(NamedTuple):
    """Everything that determines the future of a slot, except its row of the segment, which the parent keeps.

    It can be restored into any env that the same function built.
    """

    slot: int  # the slot that it was saved from
    env: EnvSnapshot  # of the env and its wrappers
    episode: SavedEpisode
    resets: tuple[int, int | None, Any]  # from `SlotEnvs.save`
    info: dict[str, Any]  # the raw info of the last reset or step
    is_final: bool  # True if the row contains the last step of an episode
    objects: dict[KeyPath, Any]  # the leaves of the row that are Python objects


@dataclass(frozen=True)
class LostStates:
    """Reply to a request that was not carried out, because these states were lost with an earlier worker."""

    numbers: list[int]


class StateTable:
    """The states of a slice by number. The parent assigns the numbers in increasing order, each once."""

    def __init__(self, stats: memoryview) -> None:
        self.states: dict[int, SlotState] = {}
        self._in_order: deque[int] = deque()  # the numbers
        self._stats = stats  # the worker's row of statistics
        self._size = 0
        self._until_measured = 0
        self._between = 1

    def missing(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if number not in self.states]

    def add(self, numbers: Sequence[int], states: Sequence[SlotState]) -> None:
        self.states.update(zip(numbers, states, strict=True))
        self._in_order.extend(numbers)
        # Measuring a state costs more than keeping it, so it is done less and less often.
        self._until_measured -= len(states)
        if self._until_measured < 0:
            self._until_measured = self._between = min(2 * self._between, _MAX_UNMEASURED)
            try:
                self._size = size_of(states[-1])
            except Exception:  # a state that can't be pickled can still be kept
                self._size = 0

    @contextmanager
    def evicting(self, oldest: int) -> Generator[None]:
        """After the block, even if it fails, removes states with numbers below `oldest`, and counts bytes."""
        try:
            yield
        finally:
            numbers = self._in_order
            while numbers and numbers[0] < oldest:
                del self.states[numbers.popleft()]
            self._stats[_stats.STATE_BYTES] = len(self.states) * self._size


def pack(state: SlotState) -> bytes:
    """Pickles a state for another process; raises `EnvStateError` if that fails."""
    try:
        return dumps(state)
    except Exception as error:
        raise EnvStateError(
            f"the state of env {state.slot} can't be pickled, so it can't leave its process: {error}; "
            "pass States(functions=(get_state, set_state)) with states that can be pickled"
        ) from error


def unpack(packed: bytes) -> SlotState:
    """Unpickles a state; raises `EnvStateError` if that fails."""
    try:
        state: SlotState = pickle.loads(packed)
    except Exception as error:
        raise EnvStateError(
            f"the state can't be unpickled in this process: {type(error).__name__}: {error}; "
            "pass States(functions=(get_state, set_state)) with states that can be unpickled"
        ) from error
    return state


# --- Saves and restores of slots -------------------------------------------------------------------------


class SlotStates:
    """The slots of a slice, by index: their states, and steps from these.

    Attributes:
        stateful: The object of each env that saves its state.
    """

    def __init__(self, env_slice: EnvSlice, options: States) -> None:
        self.env_slice = env_slice
        self._options = options
        envs = env_slice.slots.envs
        by_id = {id(env): self.observe(env) for env in envs}  # all slots of a simulator share one env
        self.stateful = [by_id[id(env)] for env in envs]

    def observe(self, env: Env) -> StatefulEnv:
        """Returns the object that saves the state of an env that was never reset."""
        return StatefulEnv(env, self._options.functions, tuple(self._options.trust))

    def save(self, index: int, slot: int) -> SlotState:
        """Returns the state of the env at `index`, labelled with `slot`.

        Raises:
            EnvStateError: The env waits for a reset after a fault, or its state can't be saved.
        """
        env_slice = self.env_slice
        if env_slice.episodes.state[index] > IDLE:
            raise EnvStateError("after this fault, the env has no state to save until it is stepped or reset")
        rows = env_slice.rows
        return SlotState(
            slot,
            self.stateful[index].save(),
            env_slice.episodes.save(index),
            env_slice.slots.save(index),
            deepcopy(rows.infos[index]) or _EMPTY,
            rows.final.is_written(index),
            {path: column[index] for path, column in rows.objects.items()} or _EMPTY,
        )

    def restore(self, index: int, state: SlotState) -> None:
        """Restores a state, except its row of the segment."""
        env_slice = self.env_slice
        env_slice.slots.restore(index, self._restore_env(index, state), state.resets)
        env_slice.episodes.restore(index, state.episode)
        rows = env_slice.rows
        rows.take_info(index, deepcopy(state.info))
        rows.final.note_written(index, is_written=state.is_final)
        for path, value in state.objects.items():
            rows.objects[path][index] = value

    def step_from(self, states: Sequence[SlotState], after: list[SlotState], running: memoryview) -> None:
        """Steps the envs of the first rows from `states`, and appends each next state to `after`.

        All rows share one env, so each state is restored when the step before it is saved. `running` gets the
        slot of each state in turn.
        """
        env_slice = self.env_slice
        last = len(states) - 1
        for index, state in enumerate(states):
            env_slice.episodes.restore(index, state.episode)
            env_slice.episodes.clear_marks(index)  # the row may contain flags of another state

        def restore(index: int) -> None:
            state = states[index]
            running[0] = state.slot + 1
            env_slice.slots.restore(index, self._restore_env(index, state), state.resets)

        def save_and_restore_next(index: int, count: int) -> None:
            after.append(self.save(index, states[index].slot))
            if index < last:
                env_slice.running[0] = index + 2  # an error of the restore is one of the next env
                restore(index + 1)

        restore(0)
        env_slice.step(np.arange(len(states)), save_and_restore_next)

    def _restore_env(self, index: int, state: SlotState) -> Callable[[], bool]:
        return partial(self.stateful[index].restore, state.env)
