"""Whose turn it is: which envs a call may move, and which of them are in flight.

What is here is read and changed by who is inside the pool's gate, but for `needs_reset`, whose rows
belong to who has moved their envs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._errors import EnvIdError, InFlightError, ResetNeededError, StaleHandleError
from jaxvec._handoff._gate import Gate
from jaxvec._handoff._move import name_mover

NEVER = 2**63 - 1  # ns


class Turns:
    """The state of a pool's envs as callers see it.

    Attributes:
        needs_reset: `[num_envs]` bool: never reset or, without autoreset, at the end of an episode.
        in_flight: `[num_envs]` bool: sent by `send`, and not yet returned by `recv`.
        sent_words, num_sent: `[num_envs]` int64, of which the first `num_sent`, `[1]` uint32, are those in
            flight, in the order in which they were sent. C++ changes them, too.
        due: `[num_envs]` int64, when those in flight are late, in ns of the monotonic clock. C++, too.
        spread: the order in which a reset sends all envs, so that each batch has envs of all workers, as
            far as it goes: a worker holds neighbours, and if a batch were neighbours, too, few workers
            would have work while the caller is at it. Those that move together stay together.
    """

    def __init__(self, pool_id: int, num_envs: int, batch_size: int, together: int) -> None:
        self._pool_id = pool_id
        self._num_envs = num_envs
        self._batch_size = batch_size
        self.needs_reset: NDArray[np.bool_] = np.ones(num_envs, np.bool_)
        self.in_flight: NDArray[np.bool_] = np.zeros(num_envs, np.bool_)
        self.sent_words: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.num_sent: NDArray[np.uint32] = np.zeros(1, np.uint32)
        self.due: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        batches = -(-num_envs // batch_size)
        groups = np.arange(num_envs).reshape(-1, together)
        spread = np.concatenate([groups[first::batches] for first in range(batches)])
        self.spread: NDArray[np.int_] = spread.reshape(-1)

    @property
    def sent(self) -> NDArray[Any]:
        """A copy of the ids of those in flight, in the order in which they were sent."""
        return self.sent_words[: self.num_sent[0]].copy()

    def take_off(self, slots: NDArray[Any], timeout: float | None) -> None:
        """Notes that `slots` were sent, and are late after `timeout` seconds."""
        self.in_flight[slots] = True
        self.due[slots] = NEVER if timeout is None else time.monotonic_ns() + int(timeout * 1e9)
        first = int(self.num_sent[0])
        self.sent_words[first : first + len(slots)] = slots
        self.num_sent[0] += len(slots)

    def overdue(self) -> NDArray[Any]:
        """Returns those in flight that are late, unless they are done by now."""
        sent = self.sent
        return sent[self.due[sent] < time.monotonic_ns()]

    def land(self, slots: NDArray[Any]) -> None:
        """Notes that `slots` were received."""
        self.in_flight[slots] = False
        sent = self.sent
        left = sent[self.in_flight[sent]]
        self.sent_words[: len(left)] = left
        self.num_sent[0] = len(left)

    def require_distinct(self, slots: NDArray[Any]) -> None:
        """Raises `EnvIdError` if one of `slots` is not the pool's, or there twice."""
        num_envs = self._num_envs
        foreign = slots[(slots < 0) | (slots >= num_envs)]
        if foreign.size:
            raise EnvIdError(
                f"env_id {foreign[0]} is out of range for pool {self._pool_id} of {num_envs} envs "
                f"(0 to {num_envs - 1}); nothing was stepped"
            )
        times = np.bincount(slots, minlength=1)
        if times.max() > 1:
            raise EnvIdError(
                f"env_id {times.argmax()} is named twice; nothing was stepped. Under vmap, give each "
                "instance a handle to envs of its own"
            )

    def require_fresh(self, slots: NDArray[Any], counts: NDArray[Any], gate: Gate) -> None:
        """Raises `StaleHandleError` if `slots` were moved since a handle to them said `counts`."""
        now = gate.counts[slots]
        if np.array_equal(now, counts):
            return
        stale = int(np.flatnonzero(now != counts)[0])
        raise StaleHandleError(
            f"stale handle: it is from call {counts[stale]} to env {slots[stale]} of pool {self._pool_id}, "
            f"but the latest is call {now[stale]}, by {name_mover(gate.mover)}. A handle is used once, like "
            "a donated buffer: pass on the one that the latest call returned. After a call on the host, "
            "begin with jaxvec.reset(envs); to reset in a program that steps, use jaxvec.reset(handle)"
        )

    def require_landed(self, slots: NDArray[Any]) -> None:
        """Raises `InFlightError` if one of `slots` is in flight."""
        if self.in_flight[slots].any():
            raise InFlightError(
                f"envs {slots[self.in_flight[slots]].tolist()} are in flight: they were sent, and recv has "
                "not returned them yet; call recv first. Nothing was stepped"
            )

    def require_reset(self, slots: NDArray[Any], gate: Gate) -> None:
        """Raises `ResetNeededError` if one of `slots` has to be reset before it can step."""
        if not self.needs_reset[slots].any():
            return
        waiting = slots[self.needs_reset[slots]].tolist()
        fresh = not gate.counts.any()
        why = "have not been reset" if fresh else "have ended their episode or never been reset"
        raise ResetNeededError(
            f"envs {waiting} {why}; reset them first (with autoreset_mode DISABLED: "
            "reset(..., mask=terminated | truncated)). Nothing was stepped"
        )

    def require_batch(self) -> None:
        """Raises `InFlightError` if fewer envs are in flight than `recv` returns."""
        num_sent = int(self.num_sent[0])
        if num_sent < self._batch_size:
            raise InFlightError(
                f"recv returns {self._batch_size} envs, but only {num_sent} are in flight; send more first"
            )


@dataclass(frozen=True)
class Rules:
    """What a pool's gate goes by.

    Attributes:
        pool_id: what a program's call must name.
        turns: of the pool.
        in_order: whether `recv` returns envs in the order in which they were sent.
        over: terminated and truncated, if a step sets `needs_reset` by them.
        timeout: seconds of a step, `None` for ever; a program that waits so long asks Python.
    """

    pool_id: int
    turns: Turns
    in_order: bool
    over: Sequence[NDArray[np.bool_]] | None
    timeout: float | None
