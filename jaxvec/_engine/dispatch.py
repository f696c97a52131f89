"""The dispatch: how a slot passes from the parent process to a worker and back.

A slot is the place of one env in the segment. Two marks of a slot define which process owns it:

    requested   written by the parent: the number and operation of the latest request
    completed   written by the worker: a copy of `requested`, once the request is done

    parent                                worker
    write actions to the rows
    send: set `requested`, wake worker -> next_work: find slots with requested != completed
                                          step the envs, write their rows
    wait: see completed == requested   <- post: set `completed`, wake parent

While the marks are equal, the parent owns the slot. Each request has a new number, so a late result of an
earlier request can't pass for a new one. Numbers only grow; 60 bits never run out. A worker serves its slots
in the order of the numbers. A worker that replaces a dead one finds its work in the marks.

This file has the portable dispatch, which wakes the other side by one byte over the control socket. The
native one in `_engine/native_dispatch.py` sleeps and wakes on futexes in the segment. Each side writes the
rows, then the mark, then wakes the other, and reads in the opposite order. The socket orders only what was
written before a byte was sent and is read after that byte was received. But both sides also look at the marks
without having received a byte, so there is a `fence` between rows and marks, on both sides.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxvec._engine.channel import WAKE, Channel
from jaxvec._engine.move import VERBS, Verb, requests, verbs_of
from jaxvec._memory.segment import Marks, fence

DEATH_CHECK_INTERVAL = 0.05  # seconds between checks for dead workers, because a dead worker wakes no waiter


class Work(NamedTuple):
    """Slots `[n]` of one worker with the same requested operation."""

    verb: Verb
    slots: NDArray[Any]


class Slots:
    """Ownership of the slots, as their marks in the segment record it."""

    def __init__(self, marks: Marks) -> None:
        self._marks: Any = marks
        self._requested = marks.requested  # the parent writes it
        self._completed = marks.completed  # workers write these two, each its own slots
        self._completed_at = marks.completed_at  # ns of the monotonic clock

    def next_work(self, slots: slice) -> Work | None:
        """Returns the oldest work among the worker's slots, or `None` if the parent owns them all."""
        requested = self._marks.read_requested(slots)
        unfinished = np.flatnonzero(requested != self._completed[slots])
        if not unfinished.size:
            return None
        unfinished = unfinished[requested[unfinished].argsort()]
        verbs = verbs_of(requested[unfinished])
        same = np.logical_and.accumulate(verbs == verbs[0])
        return Work(VERBS[verbs[0]], slots.start + unfinished[same])

    def are_completed(self, slots: NDArray[Any]) -> NDArray[np.bool_]:
        """Returns for each of `slots` if the parent owns it, and may read its rows."""
        completed = self._completed[slots] == self._requested[slots]
        fence()
        return completed

    def enough_completed(self, slots: NDArray[Any], count: int) -> bool:
        """Returns True if the parent owns `count` of `slots`."""
        return bool(np.count_nonzero(self.are_completed(slots)) >= count)

    def first_completed(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        """Returns the completed ones of `slots` in order of completion, at most `count` of them."""
        completed = slots[self.are_completed(slots)]
        return completed[self._completed_at[completed].argsort(kind="stable")[:count]]

    def any_resetting(self, slots: NDArray[Any]) -> bool:
        """Returns True if one of `slots` has an unfinished reset."""
        unfinished = slots[~self.are_completed(slots)]
        return bool((verbs_of(self._requested[unfinished]) == int(Verb.RESET)).any())

    def unfinished(self) -> NDArray[Any]:
        """Returns the ids of all slots that workers own."""
        return np.flatnonzero(self._requested != self._completed)

    def close(self) -> None:
        """Drops the views of the segment, which the traceback of an error could otherwise keep mapped."""
        self._requested = self._completed = self._completed_at = np.zeros(0, np.int64)
        self._marks = None


class ParentDispatch(Slots, ABC):
    """The parent's end of the dispatch, to all workers."""

    native_end: Any = None  # the C++ object of the native dispatch

    @abstractmethod
    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        """Sends `slots`, which the parent owns, to their workers. One thread at a time may call it."""

    @abstractmethod
    def wait(self, slots: NDArray[Any], count: int, seconds: float) -> bool:
        """Waits for `count` of `slots`, for at most `seconds`. Any number of threads may wait.

        Returns True if they are completed and nothing else needs attention. After False, the caller polls the
        control sockets, one thread at a time, and waits again.
        """

    @abstractmethod
    def start_poll(self, slots: NDArray[Any], count: int, seconds: float) -> float:
        """Prepares a poll of the control sockets by a thread that waits for `count` of `slots`.

        Returns the time in seconds that the poll may block, at most `seconds`.
        """

    def notify_worker(self, worker: int) -> None:
        """Wakes a worker to read its control socket, if it does not wait there."""


class WorkerDispatch(Slots, ABC):
    """A worker's end of the dispatch."""

    @abstractmethod
    def idle(self) -> bool:
        """Returns True if `receive` would have to wait."""

    @abstractmethod
    def receive(self) -> Any:
        """Waits for the parent. Returns `Work`, or a message from the control socket.

        Raises:
            EOFError: The parent closed the pool, or is dead.
        """

    @abstractmethod
    def post(self, slots: NDArray[Any]) -> None:
        """Returns finished `slots` to the parent."""

    def post_some(self, first: int, count: int) -> None:
        """Returns `count` slots, from `first` on, to the parent, with the same completion time."""
        self.post(np.arange(first, first + count))

    def notify_parent(self) -> None:
        """Wakes the parent to read its control sockets, if it does not wait there."""

    @abstractmethod
    def receive_message(self) -> Any:
        """Waits for a message, such as the answer to a report, and leaves work for later."""


class PortableParentDispatch(ParentDispatch):
    """The parent's end of the portable dispatch. It waits at the control sockets and needs no `notify_*`."""

    def __init__(
        self, marks: Marks, slices: tuple[tuple[int, int], ...], channels: Sequence[Channel]
    ) -> None:
        super().__init__(marks)
        self._request_number = 0  # the latest; written by the thread inside the engine
        self._stops = np.array([stop for _, stop in slices])
        self._channels = channels
        # Seconds of the monotonic clock. Any waiting thread writes it; an extra check does no harm.
        self._last_death_check = -math.inf

    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        numbers = self._request_number + np.arange(1, len(slots) + 1)
        self._request_number += len(slots)
        self._marks.target[1] += 1
        try:
            fence()  # after the rows, and after the version became odd
            self._requested[slots] = requests(numbers, verb)  # from now on the workers own the slots
            fence()
        finally:  # also after Ctrl-C, as workers wait for it
            self._marks.target[1] += 1
        for worker in np.unique(self._stops.searchsorted(slots, side="right")).tolist():
            self._channels[worker].wake()

    def wait(self, slots: NDArray[Any], count: int, seconds: float) -> bool:
        # Checked first: a program that never has to wait must notice a dead worker, too.
        if time.monotonic() - self._last_death_check > DEATH_CHECK_INTERVAL:
            self._last_death_check = time.monotonic()
            return False
        return self.enough_completed(slots, count)

    def start_poll(self, slots: NDArray[Any], count: int, seconds: float) -> float:
        # Another thread's poll may have taken the wake bytes for these slots, so check them before blocking.
        return 0 if self.enough_completed(slots, count) else seconds


class PortableWorkerDispatch(WorkerDispatch):
    """A worker's end of the portable dispatch. It waits at its control socket."""

    def __init__(self, marks: Marks, slots: tuple[int, int], channel: Channel) -> None:
        super().__init__(marks)
        self._own = slice(*slots)
        self._channel = channel
        self._message: Any = None  # received by `idle`, and not yet returned by `receive`

    def idle(self) -> bool:
        while self._message is None and self.next_work(self._own) is None:
            if not self._channel.ready():
                return True
            message = self._channel.receive()
            self._message = None if message is WAKE else message  # the work of a wake may be done already
        return False

    def receive(self) -> Any:
        while True:
            work = self.next_work(self._own)
            if work is not None:
                return work
            message = self._message or self._channel.receive()
            self._message = None
            if message is not WAKE:
                return message

    def post(self, slots: NDArray[Any]) -> None:
        self._completed_at[slots] = time.monotonic_ns()
        fence()  # after the rows
        self._completed[slots] = self._requested[slots]
        self._channel.wake()

    def receive_message(self) -> Any:
        message = self._message or self._channel.receive_message()
        self._message = None
        return message


def time_left(deadline: float | None) -> float:
    """Returns the seconds until `deadline`, at least 0; infinite for `None`."""
    return math.inf if deadline is None else max(deadline - time.monotonic(), 0.0)
