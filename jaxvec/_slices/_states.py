"""The states that a slice keeps, by number: what decides what an env does next."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxvec import _pickling, _stats
from jaxvec._errors import EnvStateError
from jaxvec._spaces import KeyPath

_MOST = 1024  # states kept, at most, between two that are measured


class SlotState(NamedTuple):
    """Of a slot: all that decides what its env does next, but the row of the segment, which the parent keeps.

    Attributes:
        slot: whose env it was; a function that made it makes others that can go on from here.
        env: of env and wrappers, as `StatefulEnv.take` returned it.
        episode: how far it is, as `Episodes.take` returned it.
        seed: the last one that the env was given.
        new_seed, options: for its next reset.
        info: the raw info of its last reset or step.
        is_final: whether the row tells of an episode's last step.
        objects: what of the row are Python objects.
        obs: of the row, where the parent does not keep that; else `None`.
    """

    slot: int
    env: Any
    episode: tuple[int, Any, int]
    seed: int
    new_seed: int | None
    options: dict[str, Any] | None
    info: dict[str, Any]
    is_final: bool
    objects: dict[KeyPath, Any]
    obs: Any = None


@dataclass(frozen=True)
class Gone:
    """In place of an answer: nothing was done, since these states are not here; they went with a worker."""

    numbers: list[int]


class States:
    """Each has a number, which no other ever has."""

    def __init__(self, stats: memoryview) -> None:
        """Begins with none; `stats` is the worker's row, which tells of their bytes."""
        self._states: dict[int, SlotState] = {}
        self._in_order: deque[int] = deque()  # their numbers
        self._stats = stats
        self._size, self._until_measured, self._between = 0, 0, 1

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Returns those of some numbers that are not kept."""
        return [number for number in numbers if number not in self._states]

    def __getitem__(self, number: int) -> SlotState:
        return self._states[number]

    def keep(self, numbers: Sequence[int], states: Sequence[SlotState]) -> None:
        """Keeps states. Now and then one is measured, which costs more than to keep it."""
        self._states.update(zip(numbers, states, strict=True))
        self._in_order.extend(numbers)
        self._until_measured -= len(states)
        if self._until_measured < 0:
            self._size = _size_of(states[-1])
            self._until_measured = self._between = min(2 * self._between, _MOST)

    @contextmanager
    def keeping(self, oldest: int) -> Generator[None]:
        """Keeps states from this number on after the block, however it ends, and counts their bytes."""
        try:
            yield
        finally:
            numbers = self._in_order
            while numbers and numbers[0] < oldest:
                del self._states[numbers.popleft()]
            self._stats[_stats.STATE_BYTES] = len(self._states) * self._size


def pack(states: Iterable[SlotState]) -> list[bytes]:
    """Returns bytes that another process can read; raises `EnvStateError` for a state that can't leave."""
    packed: list[bytes] = []
    for state in states:
        try:
            packed.append(_pickling.dumps(state))
        except Exception as error:
            raise EnvStateError(
                f"the state of env {state.slot} can't be pickled, so it can't leave its process: {error}; "
                "give make(state_functions=(get_state, set_state)) whose states can be pickled"
            ) from error
    return packed


def unpack(packed: bytes) -> SlotState:
    """Returns the state in these bytes.

    Raises:
        EnvStateError: they can't be unpickled here.
    """
    try:
        state: SlotState = pickle.loads(packed)
    except Exception as error:
        raise EnvStateError(
            f"the state can't be unpickled, so it can't enter this process: {type(error).__name__}: {error}; "
            "give make(state_functions=(get_state, set_state)) whose states can be unpickled"
        ) from error
    return state


def _size_of(state: SlotState) -> int:
    """Returns about how many bytes a state takes: as many as it has when it is pickled."""
    try:
        return len(_pickling.dumps(state))
    except Exception:  # one that can't be pickled; it may be kept all the same
        return 0
