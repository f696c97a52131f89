"""Which envs are in flight, and which must be reset: the state of a pool that both engines share.

It is read and changed by who is inside the engine, but for `needs_reset`, whose rows belong to who has moved
their envs.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOREVER = 1 << 60  # ns, 36 years: a timeout that never comes, and can be added to a time


class Admission:
    """The state of a pool's envs as callers see it.

    Attributes:
        all: `[num_envs]` the ids of all envs. A call for all of them names them by this very array: then
            there is nothing to check of them, and their rows are whole arrays.
        queue: `[1]` what stands for the queue of those in flight among the slots that a thread holds.
        needs_reset: `[num_envs]` bool: never reset or, without autoreset, at the end of an episode.
        in_flight: `[num_envs]` bool: sent by `send`, and not yet returned by `recv`.
        sent_words, num_sent: `[num_envs]` int64, of which the first `num_sent`, `[1]` uint32, are those in
            flight, in the order in which they were sent. C++ changes them, too.
        due: `[num_envs]` int64, when those in flight are late, in ns of the monotonic clock. C++, too.
        together: how many neighbours are one batched env, which moves as a whole; 1 for none.
        spread: the order in which a reset sends all envs, so that each batch has envs of all workers, as
            far as it goes: a worker holds neighbours, and if a batch were neighbours, too, few workers
            would have work while the caller is at it. Those that move together stay together.
    """

    def __init__(self, num_envs: int, batch_size: int, together: int) -> None:
        self.all: NDArray[np.int_] = np.arange(num_envs)
        self.all.flags.writeable = False
        self.queue: NDArray[np.int_] = np.array([num_envs])
        self.needs_reset: NDArray[np.bool_] = np.ones(num_envs, np.bool_)
        self.in_flight: NDArray[np.bool_] = np.zeros(num_envs, np.bool_)
        self.sent_words: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.num_sent: NDArray[np.uint32] = np.zeros(1, np.uint32)
        self.due: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.together: int = together
        batches = -(-num_envs // batch_size)
        groups = np.arange(num_envs).reshape(-1, together)
        spread = np.concatenate([groups[first::batches] for first in range(batches)])
        self.spread: NDArray[np.int_] = spread.reshape(-1)

    @property
    def sent(self) -> NDArray[Any]:
        """The ids of those in flight, in the order in which they were sent; of a batched env side by side."""
        sent = self.sent_words[: self.num_sent[0]].copy()
        return sent if self.together == 1 else neighbours(sent, self.together)

    def rows(self, slots: NDArray[Any]) -> slice | NDArray[Any]:
        """Returns what selects the rows of `slots`: a slice, if they are all."""
        return slice(None) if slots is self.all else slots

    def part(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Returns those of `slots` whose batched envs have others, too, that are not among them."""
        envs = slots // self.together
        return slots[np.bincount(envs, minlength=1)[envs] < self.together]

    def note_sent(self, slots: NDArray[Any], timeout: float | None) -> None:
        """Notes that `slots` were sent, and are late after `timeout` seconds."""
        self.in_flight[slots] = True
        self.due[slots] = time.monotonic_ns() + (FOREVER if timeout is None else int(timeout * 1e9))
        first = int(self.num_sent[0])
        self.sent_words[first : first + len(slots)] = slots
        self.num_sent[0] += len(slots)

    def overdue(self) -> NDArray[Any]:
        """Returns those in flight that are late, unless they are completed by now."""
        sent = self.sent
        return sent[self.due[sent] < time.monotonic_ns()]

    def note_received(self, slots: NDArray[Any]) -> None:
        """Notes that `slots` were received."""
        self.in_flight[slots] = False
        sent = self.sent
        left = sent[self.in_flight[sent]]
        self.sent_words[: len(left)] = left
        self.num_sent[0] = len(left)


def neighbours(slots: NDArray[Any], together: int, *, last: bool = False) -> NDArray[Any]:
    """Returns `slots` with those of a batched env side by side, at the place of its first or its last."""
    envs = (slots // together).tolist()
    places: dict[int, int] = {}
    for place, env in enumerate(envs):
        places[env] = place if last else places.get(env, place)
    return slots[np.argsort([places[env] for env in envs], kind="stable")]


def whole(slots: NDArray[Any], sent: NDArray[Any], together: int) -> NDArray[Any]:
    """Returns those of `slots` whose batched envs are done, those of each one after the other.

    Args:
        slots: that are completed, in that order; a batched env is when its last one is.
        sent: all that were sent.
        together: how many neighbours are one batched env.
    """
    done = ~np.isin(slots // together, np.setdiff1d(sent, slots) // together)
    return neighbours(slots[done], together, last=True)
