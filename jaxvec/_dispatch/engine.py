"""The engine of a pool: which thread may move which envs now, and the moves that it makes itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.move import Move, Verb
from jaxvec._tracing import Record

# ----------------------------------------------------------------------------------------------------------
#
# Which envs are in flight, and which must be reset: the state of a pool that both engines share.
#
# It is read and changed by who is inside the engine, but for `needs_reset`, whose rows belong to who has
# moved their envs.
# ----------------------------------------------------------------------------------------------------------

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


# ----------------------------------------------------------------------------------------------------------
#
# Decides which calls may move which envs, lets one thread at a time do so, and counts the moves.
#
# Its lock is a readers-writer lock on each slot, and on the queue of those in flight. Threads get in one
# after the other, and stay for a short while: a step is inside while it checks its handle and sends its
# envs; then it leaves, holds their slots, and waits for them. So calls for different envs, of several
# devices or threads, overlap.
#
# - A move by handle gets in `shared`: it need not wait for another of the same envs, as one of the two
#   handles is stale. It waits for a call that holds them alone.
# - Who has no handle gets in `exclusive`: it waits until nobody else holds its slots.
# - A call that asks workers holds all slots of these alone, until they have answered. So a worker that is
#   asked is not sent anything new, which might keep it from the question for ever. What it was sent comes
#   first.
# - A `recv` holds the queue, so there is one at a time. Others may send meanwhile, and ask. What it has
#   received it holds until it has read the rows.
#
# An engine answers with a `Status`; what error that is, and what it says, is the pool's affair. There are
# two: `PyEngine`, which all callers reach through Python, and `CEngine` of `_native/engine.py`. The serial
# backend's (`_dispatch/engine.py`) is a `PyEngine` that makes ordinary steps itself.
# ----------------------------------------------------------------------------------------------------------


class Status(IntEnum):
    """What came of a move, or would; pool.h has the same. But for the first two, nothing was done."""

    DONE = 0
    UNDER_WAY = 1  # begun, not finished; the caller holds its slots
    ELSEWHERE = 2  # not a move that the engine makes as a whole
    BARRED = 3  # the pool is closed or broken
    BUSY = 4  # others are inside, or hold slots that the caller needs
    COPYING = 5  # a GPU copies from the segment yet
    NO_SUCH_ENV = 6
    NAMED_TWICE = 7
    STALE = 8  # the envs were moved since the caller got its handle
    IN_FLIGHT = 9  # an env was sent, and not received
    NEEDS_RESET = 10
    TOO_FEW = 11  # envs are in flight for a `recv`
    LATE = 12  # is an env in flight, which others' being ready hides
    PART = 13  # of a batched env, which moves as a whole


@dataclass(frozen=True)
class Rules:
    """What a pool's engine goes by.

    Attributes:
        pool_id: what a program's call must name.
        admission: of the pool.
        in_order: whether `recv` returns envs in the order in which they were sent.
        over: terminated and truncated, if a step sets `needs_reset` by them.
        timeout: seconds of a step, `None` for ever; a program that waits so long asks Python.
    """

    pool_id: int
    admission: Admission
    in_order: bool
    over: Sequence[NDArray[np.bool_]] | None
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Made:
    """What an engine has made of a move.

    Attributes:
        status: what came of it.
        rows: of the time step; empty yet if it is `UNDER_WAY`.
        waited: seconds so far, in that case.
    """

    status: Status
    rows: Sequence[NDArray[Any]] = ()
    waited: float = 0


ELSEWHERE = Made(Status.ELSEWHERE)


NOTHING: NDArray[np.int_] = np.zeros(0, np.int_)  # slots: who needs none of them waits for those inside


class Engine(Protocol):
    """What the pool asks of its engine."""

    generation: NDArray[np.uint32]  # [num_envs] how often each was moved, modulo 2**32, as fresh handles say

    @property
    def last_caller(self) -> int:
        """Who moved envs last, `Move.caller_code`."""
        ...

    @property
    def served(self) -> int:
        """Calls of compiled programs that succeeded, modulo 2**32."""
        ...

    def shared(self, slots: NDArray[Any] = NOTHING) -> AbstractContextManager[None]:
        """Waits until nobody else is inside or holds some of `slots` alone; of none, if they are left out.

        A thread does not wait for itself: it was interrupted, and has left without saying so, or is asked
        from a signal handler.
        """
        ...

    def exclusive(
        self,
        slots: NDArray[Any] | None = None,
        *,
        if_busy: Callable[[], None] | None = None,
        patience: float | None = None,
    ) -> AbstractContextManager[None]:
        """Waits until nobody else is inside or holds some of `slots`; else as `shared`.

        Args:
            slots: which may have the queue among them; `None` for all, and the queue.
            if_busy: is called first if there is somebody to wait for.
            patience: seconds after which to go in all the same; `None` for never.
        """
        ...

    def move(self, move: Move, actions: Sequence[NDArray[Any]], env_ids: NDArray[Any] | None = None) -> Made:
        """Makes a whole step, send or recv, if it meets with nothing unusual; else does nothing.

        Args:
            move: a step of some envs or, of all envs, a send or a recv.
            actions: `[n, ...]` or, of a send, `[k, ...]`.
            env_ids: `[k]`, whom to send.
        """
        ...

    def check_handle(self, move: Move) -> Status:
        """Says whether a caller may ask for these envs, with the handle it has: `DONE` if so; inside."""
        ...

    def check_envs(self, env_ids: NDArray[Any], *, stepped: bool) -> Status:
        """Says whether these envs can be moved, and stepped if they are to be; inside, too."""
        ...

    def hold(self, slots: NDArray[Any], *, alone: bool = False) -> None:
        """Lets this thread, which is inside, hold `slots`, too, when it leaves; others share them or not."""
        ...

    def holds(self) -> bool:
        """Says whether this thread holds slots."""
        ...

    def release(self) -> None:
        """Releases all that this thread holds; nothing, if it holds nothing."""
        ...

    def advance(self, move: Move) -> None:
        """Makes the handles to the move's envs stale: they have a new generation. The caller is inside."""
        ...

    def retract(self, move: Move, last_caller: int) -> None:
        """Undoes `advance` of a call that came to nothing, before which `last_caller` moved envs; inside."""
        ...

    def serve(self) -> None:
        """Counts a program's call that succeeded."""
        ...

    def wait_for_copies(self) -> None:
        """Waits until no GPU copies from the segment any more; see cuda.cc for who need not."""
        ...

    def admit_devices(self) -> None:
        """Lets programs on a GPU move envs without asking the pool."""
        ...

    def bar(self) -> None:
        """Makes every program ask the pool from now on: it is closed or broken. For good."""
        ...

    def start_trace(self, capacity: int) -> None:
        """Records what compiled programs do without Python, the latest `capacity` spans of it."""
        ...

    def stop_trace(self) -> Record:
        """Records no more, and returns what was."""
        ...

    def close(self) -> None:
        """Forgets the pool's memory."""
        ...


@dataclass(frozen=True, slots=True)
class _Hold:
    """What a thread holds: slots, `[n]`, of which one may be the queue."""

    thread: int
    slots: NDArray[Any]
    alone: bool


class PyEngine:
    """See `Engine`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.generation = np.zeros(len(admission.needs_reset), np.uint32)
        self.last_caller = 0
        self.served = 0
        self._lock = threading.Lock()  # of what follows; no interrupt can leave it locked
        self._changed = threading.Condition(self._lock)
        self._inside: int | None = None  # the thread
        self._holds: list[_Hold] = []

    def shared(self, slots: NDArray[Any] = NOTHING) -> AbstractContextManager[None]:
        return self._locked(slots, exclusive=False)

    def exclusive(
        self,
        slots: NDArray[Any] | None = None,
        *,
        if_busy: Callable[[], None] | None = None,
        patience: float | None = None,
    ) -> AbstractContextManager[None]:
        return self._locked(slots, exclusive=True, if_busy=if_busy, patience=patience)

    @contextmanager
    def _locked(
        self,
        slots: NDArray[Any] | None,
        *,
        exclusive: bool,
        if_busy: Callable[[], None] | None = None,
        patience: float | None = None,
    ) -> Generator[None]:
        me = threading.get_ident()

        def vacant() -> bool:
            return self._inside in (None, me) and not any(
                hold.thread != me
                and (exclusive or hold.alone)
                and (slots is None or bool(np.isin(hold.slots, slots).any()))
                for hold in self._holds
            )

        try:  # first: an interrupt may come between entering and our knowing of it
            if if_busy is not None and not vacant():
                if_busy()
            with self._lock:
                self._changed.wait_for(vacant, patience)
                self._inside = me
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            if self._inside == threading.get_ident():
                self._inside = None
                self._changed.notify_all()

    def move(self, move: Move, actions: Sequence[NDArray[Any]], env_ids: NDArray[Any] | None = None) -> Made:
        return ELSEWHERE  # the pool makes it, step by step

    def check_handle(self, move: Move) -> Status:
        met = self._meet(move.slots)
        if met is not Status.DONE or move.generation is None:
            return met
        fresh = np.array_equal(self.generation[move.slots], move.generation)
        return Status.DONE if fresh else Status.STALE

    def check_envs(self, env_ids: NDArray[Any], *, stepped: bool) -> Status:
        met = self._meet(env_ids)
        if met is not Status.DONE:
            return met
        rows = self._admission.rows(env_ids)
        if stepped and self._admission.together > 1 and len(self._admission.part(env_ids)):
            return Status.PART
        if self._admission.num_sent[0] and self._admission.in_flight[rows].any():
            return Status.IN_FLIGHT
        return Status.NEEDS_RESET if stepped and self._admission.needs_reset[rows].any() else Status.DONE

    def _meet(self, env_ids: NDArray[Any]) -> Status:
        """Says whether there are such envs, and none is named twice."""
        if env_ids is self._admission.all:
            return Status.DONE
        if ((env_ids < 0) | (env_ids >= len(self.generation))).any():
            return Status.NO_SUCH_ENV
        return Status.NAMED_TWICE if np.bincount(env_ids, minlength=1).max() > 1 else Status.DONE

    def hold(self, slots: NDArray[Any], *, alone: bool = False) -> None:
        with self._lock:
            self._holds.append(_Hold(threading.get_ident(), slots, alone))

    def holds(self) -> bool:
        return any(hold.thread == threading.get_ident() for hold in self._holds)

    def release(self) -> None:
        with self._lock:
            self._holds = [hold for hold in self._holds if hold.thread != threading.get_ident()]
            self._changed.notify_all()

    def advance(self, move: Move) -> None:
        self.generation[self._admission.rows(move.slots)] += np.uint32(1)
        self.last_caller = move.caller_code

    def retract(self, move: Move, last_caller: int) -> None:
        self.generation[self._admission.rows(move.slots)] -= np.uint32(1)
        if self.last_caller == move.caller_code:
            self.last_caller = last_caller

    def serve(self) -> None:
        self.served = (self.served + 1) % 2**32

    def wait_for_copies(self) -> None:
        pass  # rows leave the segment as copies

    def admit_devices(self) -> None:
        pass

    def bar(self) -> None:
        pass

    def start_trace(self, capacity: int) -> None:
        pass  # all come to Python

    def stop_trace(self) -> Record:
        return Record([])

    def close(self) -> None:
        pass


# ----------------------------------------------------------------------------------------------------------
# The engine of the serial backend: a step of all envs in one go, which is most of what such a pool does.
# ----------------------------------------------------------------------------------------------------------


class SerialEngine(PyEngine):
    """See `Engine`. Whatever is not ordinary is left to the pool, before anything was done."""

    def __init__(
        self,
        rules: Rules,
        *,
        step: Callable[[NDArray[np.int_]], bool],
        actions: Sequence[NDArray[Any]],
        results: Sequence[NDArray[Any]],
    ) -> None:
        """Opens the engine.

        Args:
            rules: of the pool.
            step: steps the envs of slots; returns whether all is done, and leaves the rest to `Workers.wait`.
            actions, results: `[num_envs, ...]` arrays in the segment, in the order of moves.
        """
        super().__init__(rules.admission)
        self._over = rules.over
        self._step = step
        self._actions = actions
        self._results = results
        self._process = os.getpid()
        self._barred = False
        self._traced = False

    def move(self, move: Move, actions: Sequence[NDArray[Any]], env_ids: NDArray[Any] | None = None) -> Made:
        # Also what a signal handler asks of a thread that is inside: leaving here, it would end that, too.
        if move.verb is not Verb.STEP or move.generation is not None or self._inside is not None:
            return ELSEWHERE
        try:  # first: an interrupt may come between entering and our knowing of it
            if not self._enter_at_once():
                return ELSEWHERE
            for stored, action in zip(self._actions, actions, strict=True):
                stored[...] = action
            self.hold(move.slots)  # Ctrl-C breaks the pool from here on
            if move.caller is not None:
                self.advance(move)
            done = self._step(move.slots)
            if self._over is not None and done:
                np.logical_or(*self._over, out=self._admission.needs_reset)
            rows = [leaf.copy() for leaf in self._results]
            if not done:
                return Made(Status.UNDER_WAY, rows)
            self.release()
            return Made(Status.DONE, rows)
        finally:
            self._leave()

    def bar(self) -> None:
        self._barred = True

    def start_trace(self, capacity: int) -> None:
        self._traced = True

    def stop_trace(self) -> Record:
        self._traced = False
        return super().stop_trace()

    def close(self) -> None:
        self.bar()
        self._actions = self._results = ()

    def _enter_at_once(self) -> bool:
        """Gets inside if nobody is, and nothing stands against a step of all envs."""
        admission = self._admission
        with self._lock:
            usual = not (
                self._inside is not None
                or self._holds
                or self._barred
                or self._traced
                or admission.num_sent[0]
                or admission.needs_reset.any()
                or os.getpid() != self._process
            )
            if usual:
                self._inside = threading.get_ident()
            return usual
