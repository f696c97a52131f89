"""The engine of a pool: decides which thread may move which envs now, and makes the moves.

The data flow of one `Engine.move`:

    _enter                    wait until no other thread is inside or holds the slots
    check_handle, check_envs  compare the call with the state of the envs; nothing has changed yet
    write_actions, dispatch   write the actions to the segment, and send the envs to their workers
    note_sent, advance        record the pending envs, and make older handles stale
    _leave                    let other threads in; this one still holds its slots
    take, release             copy the results once the workers have completed the slots, and release these

The answer is a `Status`, which `_pool/state.py` turns into an error. `CEngine` in `_engine/native_engine.py`
makes ordinary moves by one call of C++, and inherits the rest from `Engine`.
"""

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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxvec._engine.move import Move, Verb
from jaxvec._memory.segment import Deliver, Rows, Views, copies
from jaxvec._tracing import SpanRecorder, Trace, span

# --- The state of the envs, which both engines share -----------------------------------------------------

FOREVER_NS = 1 << 60  # 36 years: an infinite timeout that can be added to a time without overflow


class PendingEnvs:
    """Record of the pending envs, and of the envs that must be reset.

    Only a thread inside the engine reads or changes it, in Python or in C++. The exception is `needs_reset`:
    an entry belongs to the thread that holds its slot.
    """

    def __init__(self, num_envs: int, batch_size: int) -> None:
        # Ids of all envs. A call on all envs passes this very array, so that `is` replaces a comparison.
        self.all: NDArray[np.int_] = np.arange(num_envs)
        self.all.flags.writeable = False
        self.queue: NDArray[np.int_] = np.array([num_envs])  # pseudo slot for the queue of pending envs
        # Envs that must be reset before a step: never reset or, without autoreset, after their episode.
        self.needs_reset: NDArray[np.bool_] = np.ones(num_envs, np.bool_)
        # Pending envs: sent by `send`, and not yet returned by `recv`.
        self.in_flight: NDArray[np.bool_] = np.zeros(num_envs, np.bool_)
        # Ids of the pending envs in sending order, of which the first `num_sent[0]` count.
        self.sent_words: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.num_sent: NDArray[np.uint32] = np.zeros(1, np.uint32)
        # When each pending env is late, in ns of the monotonic clock.
        self.due: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.batch_size: int = batch_size  # envs that `recv` returns
        # The order in which a reset sends all envs. A worker has neighbouring envs, so a batch of neighbours
        # would give work to few workers. Of k batches, batch i has the envs i, i+k, ...
        batches = -(-num_envs // batch_size)
        self.spread: NDArray[np.int_] = np.concatenate([self.all[first::batches] for first in range(batches)])

    @property
    def sent(self) -> NDArray[Any]:
        """Ids `[num_sent]` of the pending envs in sending order."""
        return self.sent_words[: self.num_sent[0]].copy()

    def rows(self, slots: NDArray[Any]) -> slice | NDArray[Any]:
        """Returns the index of the rows of `slots`: a slice, which is faster, if these are all slots."""
        return slice(None) if slots is self.all else slots

    def note_sent(self, slots: NDArray[Any], timeout: float | None) -> None:
        """Records that `slots` were sent, and are late after `timeout` seconds."""
        self.in_flight[slots] = True
        self.due[slots] = time.monotonic_ns() + (FOREVER_NS if timeout is None else int(timeout * 1e9))
        first = int(self.num_sent[0])
        self.sent_words[first : first + len(slots)] = slots
        self.num_sent[0] += len(slots)

    def overdue(self) -> NDArray[Any]:
        """Returns the pending envs that are late. Some may be completed by now."""
        sent = self.sent
        return sent[self.due[sent] < time.monotonic_ns()]

    def note_received(self, slots: NDArray[Any]) -> None:
        self.in_flight[slots] = False
        sent = self.sent
        left = sent[self.in_flight[sent]]
        self.sent_words[: len(left)] = left
        self.num_sent[0] = len(left)


# --- The engine. Its lock is a readers-writer lock on each slot, and on the queue of pending envs --------
# One thread at a time is inside, for a short while: it checks, writes actions, dispatches, and leaves. After
# that it holds its slots while it waits for the workers. So calls on different envs overlap.
# - A move with a handle enters `shared`. It need not wait for another holder of the same envs, because one of
#   the two handles is stale. It does wait for a call that holds these slots exclusively (`alone`).
# - A call without a handle enters `exclusive`: it waits until no other thread holds its slots.
# - A request to workers holds all their slots exclusively until they have answered. Otherwise new moves could
#   keep a worker from the request for ever. Moves that were dispatched earlier finish first.
# - A `recv` holds the queue, so one runs at a time; other threads may send meanwhile. It also holds the
#   received slots until it has read their rows.


class Status(IntEnum):
    """The outcome of a move, with the numbers of engine.h. Only the first two have changed anything."""

    DONE = 0
    UNDER_WAY = 1  # started, not finished; the caller holds its slots
    ELSEWHERE = 2  # C++ does not implement this move
    REFUSED = 3  # the pool is closed or broken
    BUSY = 4  # other threads are inside, or hold slots that the caller needs
    COPYING = 5  # a GPU still copies from the segment
    NO_SUCH_ENV = 6
    DUPLICATE = 7
    STALE = 8  # the envs were moved since the caller received its handle
    PENDING = 9  # an env is pending
    NEEDS_RESET = 10
    TOO_FEW_PENDING = 11  # a `recv` would wait for more envs than are pending
    LATE = 12  # a pending env is overdue; envs that are ready first must not hide that


@dataclass(frozen=True)
class EngineConfig:
    """The parts of a pool that its engine uses."""

    pool_id: int
    pending_envs: PendingEnvs
    views: Views  # rows of the segment
    dispatch: Callable[[Verb, NDArray[Any]], None]  # `WorkerGroup.send`, which sends slots to their workers
    in_order: bool  # `recv` returns envs in the order in which they were sent
    all_at_once: bool  # the envs are batched: a step or a send has all of them
    ends_need_reset: bool  # without autoreset, an env must be reset after each episode
    timeout: float | None  # seconds that a step may take; when C++ has waited that long, Python takes over
    first_generation: int = 0  # of all envs


class MoveResult(NamedTuple):  # a frozen dataclass would cost half a microsecond of each step
    """The outcome of `Engine.move`."""

    status: Status
    rows: Rows = ()  # delivered rows of the time step, if `status` is `DONE`
    waited: float = 0  # seconds spent waiting so far, if `status` is `UNDER_WAY`
    recorded: bool = False  # C++ has recorded the span of the call


# Fields of `State` in engine.h, which says who writes what.
_LAST_CALLER, _OPEN, _NUM_SERVED, _DEVICES, STEPS_NS = range(5)

_NO_SLOTS: NDArray[np.int_] = np.zeros(0, np.int_)  # for a caller that only has to be inside


class Engine(ABC):
    """Moves the envs of a pool, for one thread at a time."""

    done_at_once: bool = False  # `dispatch` steps the envs in this thread
    # Time `[1]` of all steps of all envs by workers, from dispatch to completion. Only C++ counts it.
    steps_ns: NDArray[np.uint64] = np.zeros(1, np.uint64)

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._pending_envs = config.pending_envs
        self.first_generation: np.uint32 = np.uint32(config.first_generation)
        # First generation plus the moves of each env so far, `[num_envs]`; a fresh handle has equal numbers.
        self.generation: NDArray[np.uint32] = np.full(
            len(self._pending_envs.needs_reset), self.first_generation
        )
        self._num_served_here = 0  # successful calls of compiled programs that came through Python
        self._state: Any = [0, 1, 0, 0]  # the fields; `CEngine` shares them with C++
        self._process = os.getpid()  # a fork must not move envs
        self.recorder: SpanRecorder | None = None  # for Python's spans, while the pool is traced

    # --- Moves ---------------------------------------------------------------------------------------------

    def move(
        self,
        move: Move,
        actions: Rows = (),
        env_ids: NDArray[Any] | None = None,
        *,
        deliver: Deliver | None = copies,
        at_least: int | None = None,
    ) -> MoveResult:
        """Makes a step, a send or a recv if all checks pass; otherwise changes nothing.

        It does not wait for other threads (`BUSY`). In Python it does not wait for workers (`UNDER_WAY`).

        Args:
            move: The move. A send or a recv has all envs.
            actions: An array `[n, ...]` for each leaf of the action; of a send, `[k, ...]`.
            env_ids: Ids `[k]` of the envs of a send.
            deliver: Function that copies the rows, if C++ finishes the move; `None` to not finish it.
            at_least: Number of envs that must be pending for a recv, instead of `batch_size`.
        """
        pending_envs = self._pending_envs
        slots = move.slots if env_ids is None else env_ids
        with self._entering() as enter:
            if not enter(*self._slots_needed(move, env_ids), 0):
                return MoveResult(Status.BUSY)
            if not self._state[_OPEN] or os.getpid() != self._process:
                return MoveResult(Status.REFUSED)
            status = self.check_handle(move)
            if status is Status.DONE and move.verb is not Verb.RECV:
                status = self.check_envs(slots, stepped=True)
            elif status is Status.DONE:
                enough = pending_envs.batch_size if at_least is None else at_least
                status = Status.DONE if pending_envs.num_sent[0] >= enough else Status.TOO_FEW_PENDING
            if status is not Status.DONE:
                return MoveResult(status)
            if move.generation is None:
                # A caller with a fresh handle has waited for earlier GPU copies; other callers have not.
                self.wait_for_copies()
            if move.verb is Verb.RECV:
                self.hold(pending_envs.queue)
            else:
                with span(self.recorder, "write actions"):
                    self._config.views.write_actions(slots, actions)
                self.dispatch(Verb.STEP, slots)
            if move.verb is Verb.SEND:
                pending_envs.note_sent(slots, self._config.timeout)
            self.advance(move)
        return MoveResult(Status.DONE if move.verb is Verb.SEND else Status.UNDER_WAY)

    def dispatch(self, verb: Verb, slots: NDArray[Any], held: NDArray[Any] | None = None) -> None:
        """Sends slots to their workers. The caller, which is inside, then holds them, or `held`."""
        self.hold(slots if held is None else held)  # first, because from here on Ctrl-C must break the pool
        with span(self.recorder, "dispatch"):
            self._config.dispatch(verb, slots)

    def take(self, slots: NDArray[Any], deliver: Deliver) -> Any:
        """Delivers the rows of completed steps. The caller holds the slots."""
        if self._config.ends_need_reset:
            terminated, truncated = self._config.views.over
            self._pending_envs.needs_reset[slots] = terminated[slots] | truncated[slots]
        with span(self.recorder, "copy results"):
            return self._config.views.read(slots, deliver)

    # --- The lock ------------------------------------------------------------------------------------------

    def inside(self, move: Move, env_ids: NDArray[Any] | None) -> AbstractContextManager[None]:
        """Enters `shared` or `exclusive`, as the move requires."""
        slots, alone = self._slots_needed(move, env_ids)
        return self.exclusive(slots) if slots is None or alone else self.shared(slots)

    def _slots_needed(self, move: Move, env_ids: NDArray[Any] | None) -> tuple[NDArray[Any] | None, bool]:
        """Returns the slots that a move needs (`None` for all and the queue), and if it needs them alone."""
        if move.verb is Verb.RECV:
            return self._pending_envs.queue, True  # one recv at a time
        if env_ids is not None:
            return env_ids, move.generation is None
        return (None, True) if move.generation is None else (move.slots, False)

    @contextmanager
    def shared(self, slots: NDArray[Any] = _NO_SLOTS) -> Generator[None]:
        """Waits until no other thread is inside, or holds some of `slots` alone.

        A thread never waits for itself, because it may be inside already: it was interrupted before it could
        leave, or it runs a signal handler.
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
        """Waits until no other thread is inside, or holds some of `slots` (`None` for all and the queue).

        `if_busy` is called before the wait, if another thread is in the way. After `patience` seconds, the
        block runs in any case.
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
        """Yields `_enter`, and leaves when the block ends.

        Ctrl-C may arrive when the thread is inside but `_enter` has not returned. So `_enter` is called
        within the `try`, and leaving twice is harmless.
        """
        try:
            yield self._enter
        finally:
            self._leave()

    @abstractmethod
    def _enter(self, slots: NDArray[Any] | None, exclusive: bool, seconds: float) -> bool:
        """Waits for at most `seconds` to get inside, see `shared` and `exclusive`. Returns True if it is."""

    @abstractmethod
    def _leave(self) -> None:
        """Leaves, if this thread is inside."""

    @abstractmethod
    def hold(self, slots: NDArray[Any], *, alone: bool = False) -> None:
        """Adds `slots` to those that this thread, which is inside, holds after it leaves."""

    @abstractmethod
    def holds(self) -> bool:
        """Returns True if this thread holds slots."""

    @abstractmethod
    def release(self) -> None:
        """Releases all slots that this thread holds."""

    # --- Checks and handles. The caller is inside. ---------------------------------------------------------

    @property
    def last_caller(self) -> int:
        """`Move.caller_code` of the latest move."""
        return self._state[_LAST_CALLER]

    @last_caller.setter
    def last_caller(self, code: int) -> None:
        self._state[_LAST_CALLER] = code

    @property
    def num_served(self) -> int:
        """Number of successful calls of compiled programs, modulo 2**32."""
        return (self._state[_NUM_SERVED] + self._num_served_here) % 2**32

    def count_success(self) -> None:
        """Counts a call of a program that came through Python and succeeded."""
        self._num_served_here += 1

    @abstractmethod
    def check_handle(self, move: Move) -> Status:
        """Returns `DONE` if the env ids are valid, and the handle, if there is one, is fresh."""

    @abstractmethod
    def check_envs(self, env_ids: NDArray[Any], *, stepped: bool) -> Status:
        """Returns `DONE` if these envs can be moved and, if `stepped`, need no reset first."""

    def advance(self, move: Move) -> None:
        """Makes older handles to the move's envs stale, unless the move has no caller."""
        if move.caller is not None:
            self.generation[self._pending_envs.rows(move.slots)] += np.uint32(1)
            self.last_caller = move.caller_code

    def retract(self, move: Move, last_caller: int) -> None:
        """Undoes `advance` after a call that changed nothing. `last_caller` is the value before it."""
        if move.caller is not None:
            self.generation[self._pending_envs.rows(move.slots)] -= np.uint32(1)
            if self.last_caller == move.caller_code:
                self.last_caller = last_caller

    # --- Programs that call C++ directly: nothing to do without them ---------------------------------------

    def wait_for_copies(self) -> None:  # noqa: B027 - a default
        """Waits until no GPU copies from the segment; cuda.cc lists the callers that need not."""

    def allow_gpu(self) -> None:
        """Allows programs on a GPU to move envs without Python."""
        self._state[_DEVICES] = 1

    def close_fast_path(self) -> None:
        """Makes every later move return `REFUSED`, because the pool is closed or broken."""
        self._state[_OPEN] = 0

    def start_trace(self, capacity: int) -> None:  # noqa: B027 - a default
        """Starts to record the latest `capacity` spans of C++."""

    def stop_trace(self) -> Trace:
        return Trace([])

    def close(self) -> None:
        """Drops all views of the segment."""
        self.close_fast_path()
        del self._config


_SIGNALS_INTERVAL = 0.2  # seconds of waiting in C++, after which Python's signal handlers can run


@dataclass(frozen=True, slots=True)
class _Hold:
    """Slots `[n]` that a thread holds, `alone` if no other thread may share them."""

    thread: int
    slots: NDArray[Any]
    alone: bool


class PyEngine(Engine):
    """The engine of a pool with the portable dispatch, or with leaves that are Python objects."""

    def __init__(self, config: EngineConfig, *, done_at_once: bool = False) -> None:
        super().__init__(config)
        self.done_at_once = done_at_once
        # `_lock` guards `_inside` and `_holds`. An interrupt never leaves it locked: `with` releases it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inside: int | None = None  # id of the thread that is inside
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

    def check_handle(self, move: Move) -> Status:
        status = self._check_ids(move.slots)
        if status is not Status.DONE or move.generation is None:
            return status
        fresh = np.array_equal(self.generation[move.slots], move.generation)
        return Status.DONE if fresh else Status.STALE

    def check_envs(self, env_ids: NDArray[Any], *, stepped: bool) -> Status:
        status = self._check_ids(env_ids)
        if status is not Status.DONE:
            return status
        rows = self._pending_envs.rows(env_ids)
        if self._pending_envs.num_sent[0] and self._pending_envs.in_flight[rows].any():
            return Status.PENDING
        return Status.NEEDS_RESET if stepped and self._pending_envs.needs_reset[rows].any() else Status.DONE

    def _check_ids(self, env_ids: NDArray[Any]) -> Status:
        """Returns `DONE` if the ids are in range and distinct."""
        if env_ids is self._pending_envs.all:
            return Status.DONE
        if ((env_ids < 0) | (env_ids >= len(self.generation))).any():
            return Status.NO_SUCH_ENV
        return Status.DUPLICATE if np.bincount(env_ids, minlength=1).max() > 1 else Status.DONE
