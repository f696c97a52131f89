"""Nodes of ALE (Atari): its own state, and the last action, which that state lacks."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._extensions.states.snapshots.nodes import CannotCopy, Node, Restorer, Saver

# n and m of MT19937, ALE's random generator.
_PERIOD = 624
_SHIFT = 397
_NUMBERS = re.compile(rb"(?:\d+ ){%d}\d+" % _PERIOD)
_STICKY = "repeat_action_probability"


class WatchedALE:
    """An `ALEInterface` that records the last actions.

    ALE repeats the previous effective action with some probability, but neither it nor its state exposes that
    action. It follows from the recorded actions and the previous random numbers, which its state determines.
    """

    def __init__(self, ale: Any) -> None:
        self.ale = ale
        self.actions: deque[tuple[Any, ...]] = deque(maxlen=128)
        self.before: Any = _UNKNOWN  # action that could be repeated before the recorded ones
        self.act_itself = ale.act

    def act(self, *action: Any) -> Any:
        actions = self.actions
        if len(actions) == 128:
            self.before = _UNKNOWN
        actions.append(action)
        return self.act_itself(*action)

    def forget(self, before: Any) -> None:
        self.actions.clear()
        self.before = before

    def reset_game(self) -> None:
        self.ale.reset_game()
        self.forget(None)

    def loadROM(self, *args: Any) -> None:  # noqa: N802
        self.ale.loadROM(*args)
        self.forget(None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.ale, name)

    def repeated(self, probability: float, random: _Twister) -> Any:
        """Returns the action that ALE would repeat next; `None` for none."""
        # ALE draws two numbers per action; the second is for a second player.
        kept = random.last(2 * len(self.actions))[-2::-2] / 2**32
        for action, number in zip(reversed(self.actions), kept[: len(self.actions)], strict=False):
            if number >= probability:
                return action
        return self.before


_UNKNOWN = object()


class _Twister:
    """The random generator in an ALE state, with its next and its previous numbers."""

    def __init__(self, state: Any) -> None:
        text = state.serialize()
        *_, match = _NUMBERS.finditer(text)
        size = int.from_bytes(text[match.start() - 4 : match.start()], "little")
        *words, self.place = map(int, text[match.start() : match.start() + size].split())
        self.words = np.array(words, np.uint32)

    def last(self, count: int) -> NDArray[np.uint32]:
        """Returns the previous numbers, at most `count`, as far as the state determines them."""
        words = self.words
        first = _PERIOD - _SHIFT + 1
        # Invert the recurrence to get words of the previous period.
        mixed = words[first - 1 :] ^ words[first - 1 - (_PERIOD - _SHIFT) : _SHIFT]
        high = mixed >> np.uint32(31)
        mixed = ((mixed ^ (high * np.uint32(0x9908B0DF))) << np.uint32(1)) | high
        earlier = (mixed[1:] & np.uint32(0x80000000)) | (mixed[:-1] & np.uint32(0x7FFFFFFF))
        return _temper(np.concatenate([earlier, words[: self.place]]))[-count or _PERIOD * 2 :]

    def next(self, count: int) -> NDArray[np.uint64]:
        bits = np.random.MT19937()
        bits.state = {"bit_generator": "MT19937", "state": {"key": self.words, "pos": self.place}}
        return bits.random_raw(count)


def _temper(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    words = words ^ (words >> np.uint32(11))
    words = words ^ ((words << np.uint32(7)) & np.uint32(0x9D2C5680))
    words = words ^ ((words << np.uint32(15)) & np.uint32(0xEFC60000))
    return words ^ (words >> np.uint32(18))


def watch_ale(base: Any) -> None:
    """Starts to record the actions of an env's ALE if it has sticky actions."""
    ale = vars(base).get("ale")
    if _is_ale(ale) and ale.getFloat(_STICKY) > 0:
        base.ale = WatchedALE(ale)
        if ale.getEpisodeFrameNumber() == 0:
            base.ale.forget(None)


def _is_ale(value: Any) -> bool:
    return f"{type(value).__module__}.{type(value).__qualname__}" == "ale_py._ale_py.ALEInterface"


@dataclass(slots=True, eq=False)
class _ALE(Node):
    """ALE's own state, the action that it may repeat, and the number of calls until ALE accepts it."""

    state: Any
    action: Any
    times: int

    def restore(self, restorer: Restorer, old: Any) -> Any:
        watched = isinstance(old, WatchedALE)
        ale = old.ale if watched else old
        if not _is_ale(ale):
            raise CannotCopy("the env has no ALEInterface in this place")
        ale.restoreState(self.state)
        if self.times:
            for _ in range(self.times):
                ale.act(*self.action)
            ale.restoreState(self.state)
        if watched:
            old.forget(self.action)
        return old

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.state.serialize(), other.state.serialize()


def save_ale(saver: Saver, value: Any) -> Any:
    watched = isinstance(value, WatchedALE)
    ale = value.ale if watched else value
    state = ale.cloneState(include_rng=True)
    action = None
    times = 0
    probability = ale.getFloat(_STICKY)
    if probability > 0:
        random = _Twister(state)
        action = value.repeated(probability, random) if watched else _UNKNOWN
        if action is _UNKNOWN:
            raise CannotCopy(
                "the action that ALE may repeat is unknown",
                f"Lower {_STICKY}" if watched else "Save the env's first state right after a reset",
            )
        if action is None:
            action = (0,)  # NOOP, as after a reset
        takes = random.next(1000)[::2] / 2**32 >= probability
        times = int(takes.argmax()) + 1
        if not takes.any():
            times = 0  # ALE would never accept it
    return saver.remember(value, _ALE(state, action, times))
