"""Who owns a slot now: an inbox for each worker, an outbox back, and a way to wake each other.

A slot (an env's row of the segment) belongs to the parent until `ParentEnd.send` puts its id into
its worker's inbox, and to the worker until `WorkerEnd.post` puts it into the outbox. Each ring has
one writer and one reader, and room for every slot of the worker, which has at most one request
each; so a ring is never full. Counters only grow; 64 bits don't run out.

The portable implementation is here: rings in the segment, one byte over the control socket to wake.
The native one, in `_native/handoff.py`, sleeps and wakes on futexes in the segment.

Both sides write their entries, then the counter, then the byte; the other reads them in the
opposite order. The system calls order memory between the processes, so no fences are needed.

A slot's `asked` counts requests and `done` is the count that was current when its worker finished.
They are equal only for a row that answers the latest request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxvec._channel import WAKE, Channel
from jaxvec._segment import Arrays

RESET, STEP = range(2)
LOOK_AROUND = 0.2  # seconds between looks at processes that died without closing their socket


class Work(NamedTuple):
    """Slots of one worker that want the same operation."""

    operation: int
    slots: NDArray[Any]


class Supervision(Protocol):
    """What watches the workers while the parent waits for slots."""

    @property
    def deadline(self) -> float | None:
        """In seconds of `time.monotonic()`; `None` for never."""
        ...

    def look(self, seconds: float) -> Sequence[tuple[int, Any]]:
        """Waits for at most `seconds`; returns workers with what they sent, raises if one failed."""
        ...

    def expire(self) -> NoReturn:
        """Raises the error of a deadline that has passed."""
        ...


class ParentHandoff(Protocol):
    """The parent's end, to all workers."""

    def send(self, operation: int, slots: NDArray[Any]) -> None:
        """Hands `slots`, ascending, to their workers. The parent must own them."""
        ...

    def receive(self, count: int, supervision: Supervision) -> None:
        """Waits until `count` of the slots sent are the parent's again."""
        ...

    def knock(self, worker: int) -> None:
        """Tells a worker that a message, or the end, is on its control socket."""
        ...

    def unfinished(self) -> NDArray[Any]:
        """Returns the ids of slots whose latest request is not finished."""
        ...


class WorkerHandoff(Protocol):
    """A worker's end."""

    def receive(self) -> Iterator[Any]:
        """Waits for the parent, then yields `Work`, or the one message that came instead.

        Raises:
            EOFError: the parent closed the pool, or is dead.
        """
        ...

    def post(self, slots: NDArray[Any]) -> None:
        """Hands finished `slots` back."""
        ...

    def alarm(self) -> None:
        """Makes the parent look at its control sockets at once."""
        ...


class Shares:
    """Says which part of some slots is whose, by the range of env ids that each worker holds."""

    def __init__(self, slices: tuple[tuple[int, int], ...]) -> None:
        self._starts = np.array([first for first, _ in slices])
        self._stops = np.array([stop for _, stop in slices])

    def of(self, slots: NDArray[Any]) -> Iterator[tuple[int, int, int]]:
        """Yields each worker that has a share of `slots`, ascending: `slots[start:stop]`."""
        starts = slots.searchsorted(self._starts).tolist()
        stops = slots.searchsorted(self._stops).tolist()
        for worker, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            if start != stop:
                yield worker, start, stop


class ParentEnd:
    """The portable `ParentHandoff`."""

    def __init__(self, arrays: Arrays, slices: tuple[tuple[int, int], ...], channels: list[Channel]) -> None:
        self._asked, self._done = arrays["asked",], arrays["done",]
        self._inbox, self._inbox_count = arrays["inbox",], arrays["inbox_count",]
        self._outbox, self._outbox_count = arrays["outbox",], arrays["outbox_count",]
        self._shares = Shares(slices)
        self._channels = channels
        self._taken = [0] * len(slices)  # of each outbox

    def send(self, operation: int, slots: NDArray[Any]) -> None:
        self._asked[slots] += np.uint32(1)
        for worker, start, stop in self._shares.of(slots):
            _push(self._inbox, self._inbox_count, worker, slots[start:stop] * 2 + operation)
            self._channels[worker].wake()

    def receive(self, count: int, supervision: Supervision) -> None:
        while count:
            for worker, _ in listen(supervision):
                taken = self._taken[worker]
                slots = _pending(self._outbox, self._outbox_count, worker, taken)
                self._taken[worker] = taken + len(slots)
                if not np.array_equal(self._done[slots], self._asked[slots]):
                    raise AssertionError(f"worker {worker} posted rows of an earlier request")
                count -= len(slots)

    def knock(self, worker: int) -> None:
        pass  # the worker waits at its socket

    def unfinished(self) -> NDArray[Any]:
        return np.flatnonzero(self._asked != self._done)


class WorkerEnd:
    """The portable `WorkerHandoff`."""

    def __init__(self, arrays: Arrays, worker: int, channel: Channel) -> None:
        self._asked, self._done = arrays["asked",], arrays["done",]
        self._inbox, self._inbox_count = arrays["inbox",], arrays["inbox_count",]
        self._outbox, self._outbox_count = arrays["outbox",], arrays["outbox_count",]
        self._worker = worker
        self._channel = channel
        self._taken = 0

    def receive(self) -> Iterator[Any]:
        message = self._channel.receive()
        if message is not WAKE:
            yield message
            return
        entries = _pending(self._inbox, self._inbox_count, self._worker, self._taken)
        self._taken += len(entries)
        operations = entries % 2
        for run in np.split(entries, np.flatnonzero(np.diff(operations)) + 1):
            if run.size:
                yield Work(int(run[0] % 2), run // 2)

    def post(self, slots: NDArray[Any]) -> None:
        self._done[slots] = self._asked[slots]
        _push(self._outbox, self._outbox_count, self._worker, slots)
        self._channel.wake()

    def alarm(self) -> None:
        pass  # the parent waits at its sockets


def listen(supervision: Supervision) -> Sequence[tuple[int, Any]]:
    """Waits for wakes or messages, at least one, and returns them with their workers."""
    while True:
        left = time_left(supervision.deadline)
        heard = supervision.look(min(left, LOOK_AROUND))
        if heard:
            return heard
        if left <= 0:
            supervision.expire()


def time_left(deadline: float | None) -> float:
    """Returns the seconds until `deadline`, at least 0; infinite for `None`."""
    return math.inf if deadline is None else max(deadline - time.monotonic(), 0.0)


def _push(ring: NDArray[Any], counts: NDArray[Any], worker: int, entries: NDArray[Any]) -> None:
    count = int(counts[worker])
    ring[worker, (count + np.arange(len(entries))) % ring.shape[1]] = entries
    counts[worker] = count + len(entries)


def _pending(ring: NDArray[Any], counts: NDArray[Any], worker: int, taken: int) -> NDArray[Any]:
    count = int(counts[worker]) - taken
    return ring[worker, (taken + np.arange(count)) % ring.shape[1]].astype(np.intp)
