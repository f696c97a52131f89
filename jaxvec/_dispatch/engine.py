"""The engine of a pool: which thread may move which envs now, and the moves themselves."""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.move import Move, Verb
from jaxvec._memory.segment import Deliver, Rows, Views, copies
from jaxvec._tracing import Record, Recorder, span

# ----------------------------------------------------------------------------------------------------------
# Which envs are in flight, and which must be reset: the state of a pool that both engines share.
#
# It is read and changed by who is inside the engine, but for `needs_reset`, whose rows belong to who has
# moved their envs.
# ----------------------------------------------------------------------------------------------------------

FOREVER_NS = 1 << 60  # ns, 36 years: a timeout that never comes, and can be added to a time


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
        batch_size: how many envs `recv` returns.
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
        self.batch_size: int = batch_size
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
        self.due[slots] = time.monotonic_ns() + (FOREVER_NS if timeout is None else int(timeout * 1e9))
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
# Engine: which thread may move which envs now, and the moves themselves.
#
# The lock is a readers-writer lock on each slot, and on the queue of pending envs. Threads get in one after
# the other and stay for a short while: a step is inside while it checks its handle, writes its actions and
# dispatches its envs; then it leaves, holds their slots, and waits for them. So calls for different envs, of
# several devices or threads, overlap.
#
# - A move by handle enters `shared`: it need not wait for another of the same envs, since one of the two
#   handles is stale. It waits for a call that holds these slots alone.
# - A caller without a handle enters `exclusive`: it waits until no other thread holds its slots.
# - A call that asks workers holds all slots of these alone until they have answered. So a worker that is
#   asked gets nothing new to do, which might keep it from the question for ever. Earlier work comes first.
# - A `recv` holds the queue, so there is one at a time. Other threads may send meanwhile, and ask. It holds
#   what it has received until it has read the rows.
#
# An engine answers with a `Status`; the pool makes an error of it. `Engine.move` makes a whole move in
# Python. `CEngine` (_native/native_engine.py) makes ordinary ones by one call of C++, and inherits the rest.
# ----------------------------------------------------------------------------------------------------------


class Status(IntEnum):
    """The outcome of a move. pool.h has the same numbers. Only the first two have changed anything."""

    DONE = 0
    UNDER_WAY = 1  # begun, not finished; the caller holds its slots
    ELSEWHERE = 2  # no move that C++ makes
    BARRED = 3  # the pool is closed or broken
    BUSY = 4  # other threads are inside, or hold slots that the caller needs
    COPYING = 5  # a GPU still copies from the segment
    NO_SUCH_ENV = 6
    NAMED_TWICE = 7
    STALE = 8  # the envs were moved since the caller got its handle
    IN_FLIGHT = 9  # an env was sent, and not received
    NEEDS_RESET = 10
    TOO_FEW = 11  # envs are in flight for a `recv`
    LATE = 12  # an env in flight is overdue, which other envs that are ready would hide
    PART = 13  # of a batched env, which moves as a whole


@dataclass(frozen=True)
class Rules:
    """What an engine needs of its pool.

    Attributes:
        pool_id: the number by which a program's call names the pool.
        admission: the pool's.
        views: the segment's rows, as calls read and write them.
        dispatch: hands slots to their workers, `Workers.send`.
        in_order: whether `recv` returns envs in the order in which they were sent.
        ends_need_reset: whether an env whose episode has ended must be reset before it is stepped.
        timeout: seconds of a step, `None` for ever; a program that waits so long asks Python.
    """

    pool_id: int
    admission: Admission
    views: Views
    dispatch: Callable[[Verb, NDArray[Any]], None]
    in_order: bool
    ends_need_reset: bool
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Made:
    """The outcome of `Engine.move`.

    Attributes:
        status: its status.
        rows: the delivered rows of the time step, if it is `DONE`.
        waited: seconds of waiting so far, if it is `UNDER_WAY`.
        recorded: whether C++ has recorded its span.
    """

    status: Status
    rows: Rows = ()
    waited: float = 0
    recorded: bool = False


NOTHING: NDArray[np.int_] = np.zeros(0, np.int_)  # slots of a caller that only has to be inside


class Engine(ABC):
    """Moves the envs of a pool, for one thread at a time.

    Attributes:
        generation: `[num_envs]` uint32, how often each env was moved, as fresh handles say.
        last_caller: `Move.caller_code` of the latest move.
        num_served: number of calls of compiled programs that succeeded, modulo 2**32.
        recorder: the pool's, while it records what Python does.
        done_at_once: whether a dispatch returns when the envs are done.
    """

    generation: NDArray[np.uint32]
    last_caller: int
    num_served: int
    done_at_once: bool = False

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._admission = rules.admission
        self._barred = False
        self._process = os.getpid()
        self.recorder: Recorder | None = None

    # --- moves ---------------------------------------------------------------------------------------------

    def move(
        self,
        move: Move,
        actions: Rows = (),
        env_ids: NDArray[Any] | None = None,
        *,
        deliver: Deliver | None = copies,
        at_least: int | None = None,
    ) -> Made:
        """Makes a step, a send or a recv; does nothing if anything stands against it.

        It waits neither for other threads (`BUSY`) nor, here in Python, for workers (`UNDER_WAY`).

        Args:
            move: a step of some envs or, of all envs, a send or a recv.
            actions: `[n, ...]` or, of a send, `[k, ...]`.
            env_ids: `[k]`, the envs of a send.
            deliver: takes the rows, if the move can be finished here; `None` if it is not to be.
            at_least: how many envs have to be in flight for a recv, in place of `batch_size`.
        """
        admission = self._admission
        slots = move.slots if env_ids is None else env_ids
        with self._entering() as enter:
            if not enter(*self._needs(move, env_ids), 0):
                return Made(Status.BUSY)
            if self._barred or os.getpid() != self._process:
                return Made(Status.BARRED)
            status = self.check_handle(move)
            if status is Status.DONE and move.verb is not Verb.RECV:
                status = self.check_envs(slots, stepped=True)
            elif status is Status.DONE:
                enough = admission.batch_size if at_least is None else at_least
                status = Status.DONE if admission.num_sent[0] >= enough else Status.TOO_FEW
            if status is not Status.DONE:
                return Made(status)
            if move.generation is None:
                self.wait_for_copies()  # the owner of a fresh handle has waited for the rows before it
            if move.verb is Verb.RECV:
                self.hold(admission.queue)
            else:
                with span(self.recorder, "write actions"):
                    self._rules.views.write_actions(slots, actions)
                self.dispatch(Verb.STEP, slots)
            if move.verb is Verb.SEND:
                admission.note_sent(slots, self._rules.timeout)
            self.advance(move)
        return Made(Status.DONE if move.verb is Verb.SEND else Status.UNDER_WAY)

    def dispatch(self, verb: Verb, slots: NDArray[Any], held: NDArray[Any] | None = None) -> None:
        """Hands slots to their workers; the caller, who is inside, then holds them, or `held`."""
        self.hold(slots if held is None else held)  # first: from here on an interrupt breaks the pool
        with span(self.recorder, "hand over"):
            self._rules.dispatch(verb, slots)

    def take(self, slots: NDArray[Any], deliver: Deliver) -> Any:
        """Delivers the rows of a step that is completed; the caller holds the slots."""
        if self._rules.ends_need_reset:
            terminated, truncated = self._rules.views.over
            self._admission.needs_reset[slots] = terminated[slots] | truncated[slots]
        with span(self.recorder, "copy results"):
            return self._rules.views.read(slots, deliver)

    # --- the lock ------------------------------------------------------------------------------------------

    def inside(self, move: Move, env_ids: NDArray[Any] | None) -> AbstractContextManager[None]:
        """Waits until `move` finds no other thread in its way, in `shared` or `exclusive`."""
        slots, alone = self._needs(move, env_ids)
        return self.exclusive(slots) if slots is None or alone else self.shared(slots)

    def _needs(self, move: Move, env_ids: NDArray[Any] | None) -> tuple[NDArray[Any] | None, bool]:
        """Returns the slots that a move needs (`None` for all, and the queue), and whether alone."""
        if move.verb is Verb.RECV:
            return self._admission.queue, True  # one recv at a time
        if env_ids is not None:
            return env_ids, move.generation is None
        return (None, True) if move.generation is None else (move.slots, False)

    @contextmanager
    def shared(self, slots: NDArray[Any] = NOTHING) -> Generator[None]:
        """Waits until no other thread is inside or holds some of `slots` alone; of none, if left out.

        A thread does not wait for itself: it was interrupted, and has left without saying so, or is asked
        from a signal handler.
        """
        with self._entering() as enter:
            while not enter(slots, False, _SIGNALS_INTERVAL):
                pass
            yield

    @contextmanager
    def exclusive(
        self,
        slots: NDArray[Any] | None = None,
        *,
        if_busy: Callable[[], None] | None = None,
        patience: float | None = None,
    ) -> Generator[None]:
        """Waits until no other thread is inside or holds some of `slots`; else as `shared`.

        Args:
            slots: which may have the queue among them; `None` for all, and the queue.
            if_busy: is called first if there is another thread to wait for.
            patience: seconds after which to go on all the same; `None` for never.
        """
        with self._entering() as enter:
            if not enter(slots, True, 0):
                if if_busy is not None:
                    if_busy()
                deadline = math.inf if patience is None else time.monotonic() + patience
                while not enter(slots, True, _SIGNALS_INTERVAL) and time.monotonic() <= deadline:
                    pass
            yield

    @contextmanager
    def _entering(self) -> Generator[Callable[[NDArray[Any] | None, bool, float], bool]]:
        """Lends `_enter` to a block, at whose end the thread leaves.

        An interrupt may come when the thread has entered and does not know it yet. So the thread enters
        inside the `try`, and to leave twice does no harm.
        """
        try:
            yield self._enter
        finally:
            self._leave()

    @abstractmethod
    def _enter(self, slots: NDArray[Any] | None, exclusive: bool, seconds: float) -> bool:
        """Waits for at most `seconds` to get inside; returns whether it is. See `shared`, `exclusive`."""

    @abstractmethod
    def _leave(self) -> None:
        """Leaves, if this thread is inside."""

    @abstractmethod
    def hold(self, slots: NDArray[Any], *, alone: bool = False) -> None:
        """Lets this thread, which is inside, hold `slots`, too, when it leaves; others share them or not."""

    @abstractmethod
    def holds(self) -> bool:
        """Returns whether this thread holds slots."""

    @abstractmethod
    def release(self) -> None:
        """Releases all slots that this thread holds, if it holds any."""

    # --- handles, and what stands against a move; the caller is inside -------------------------------------

    @abstractmethod
    def count_success(self) -> None:
        """Counts a program's call that succeeded."""

    @abstractmethod
    def check_handle(self, move: Move) -> Status:
        """Returns `DONE` if a caller with this handle, or none, may ask for these envs."""

    @abstractmethod
    def check_envs(self, env_ids: NDArray[Any], *, stepped: bool) -> Status:
        """Returns `DONE` if these envs can be moved, and stepped if they are to be."""

    @abstractmethod
    def advance(self, move: Move) -> None:
        """Makes the handles to the move's envs stale, unless the caller counts no moves."""

    @abstractmethod
    def retract(self, move: Move, last_caller: int) -> None:
        """Undoes `advance` of a call that came to nothing, before which `last_caller` moved envs."""

    # --- programs without Python: nothing to do where there are none ---------------------------------------

    def wait_for_copies(self) -> None:  # noqa: B027 - a default
        """Waits until no GPU copies from the segment; see cuda.cc for the callers that need not."""

    def allow_gpu(self) -> None:  # noqa: B027 - a default
        """Lets programs on a GPU move envs without asking the pool."""

    def close_fast_path(self) -> None:
        """Makes every program ask the pool from now on: it is closed or broken. For good."""
        self._barred = True

    def start_trace(self, capacity: int) -> None:  # noqa: B027 - a default
        """Records what compiled programs do without Python, the latest `capacity` spans of it."""

    def stop_trace(self) -> Record:
        """Ends the recording, and returns it."""
        return Record([])

    def close(self) -> None:
        """Forgets the pool's memory."""
        self.close_fast_path()
        del self._rules


_SIGNALS_INTERVAL = 0.2  # seconds without Python, whose signal handlers then get to run


@dataclass(frozen=True, slots=True)
class _Hold:
    """Slots, `[n]`, that a thread holds; one may be the queue."""

    thread: int
    slots: NDArray[Any]
    alone: bool


class PyEngine(Engine):
    """An engine whose callers all come through Python."""

    last_caller = 0
    num_served = 0

    def __init__(self, rules: Rules, *, done_at_once: bool = False) -> None:
        super().__init__(rules)
        self.done_at_once = done_at_once
        self.generation = np.zeros(len(self._admission.needs_reset), np.uint32)
        self._lock = threading.Lock()  # guards the next three; no interrupt can leave it locked
        self._changed = threading.Condition(self._lock)
        self._inside: int | None = None  # the thread
        self._holds: list[_Hold] = []

    def _enter(self, slots: NDArray[Any] | None, exclusive: bool, seconds: float) -> bool:
        me = threading.get_ident()

        def vacant() -> bool:
            return self._inside in (None, me) and not any(
                hold.thread != me
                and (exclusive or hold.alone)
                and (slots is None or bool(np.isin(hold.slots, slots).any()))
                for hold in self._holds
            )

        with self._lock:
            if not (vacant() or (seconds and self._changed.wait_for(vacant, seconds))):
                return False
            self._inside = me
            return True

    def _leave(self) -> None:
        with self._lock:
            if self._inside == threading.get_ident():
                self._inside = None
                self._changed.notify_all()

    def hold(self, slots: NDArray[Any], *, alone: bool = False) -> None:
        with self._lock:
            self._holds.append(_Hold(threading.get_ident(), slots, alone))

    def holds(self) -> bool:
        return any(hold.thread == threading.get_ident() for hold in self._holds)

    def release(self) -> None:
        with self._lock:
            self._holds = [hold for hold in self._holds if hold.thread != threading.get_ident()]
            self._changed.notify_all()

    def count_success(self) -> None:
        self.num_served = (self.num_served + 1) % 2**32

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
        """Returns `DONE` if there are such envs, and none is named twice."""
        if env_ids is self._admission.all:
            return Status.DONE
        if ((env_ids < 0) | (env_ids >= len(self.generation))).any():
            return Status.NO_SUCH_ENV
        return Status.NAMED_TWICE if np.bincount(env_ids, minlength=1).max() > 1 else Status.DONE

    def advance(self, move: Move) -> None:
        if move.caller is not None:
            self.generation[self._admission.rows(move.slots)] += np.uint32(1)
            self.last_caller = move.caller_code

    def retract(self, move: Move, last_caller: int) -> None:
        if move.caller is not None:
            self.generation[self._admission.rows(move.slots)] -= np.uint32(1)
            if self.last_caller == move.caller_code:
                self.last_caller = last_caller
