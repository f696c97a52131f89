"""Who owns a slot now: an inbox for each worker, a mark on each slot, and a way to wake each other.

A slot (an env's row of the segment) has two counters: `asked`, of requests, and `done`, what `asked`
was when its worker finished last. The slot belongs to the parent while they are equal: `send` counts
`asked` up and puts the slot's id into its worker's inbox; the worker's `post` sets `done`. So a row
that answers an earlier request can't pass for new, several threads of the parent can each wait for
slots of their own, and `done_at` tells which were finished first.

An inbox is a ring with one writer and one reader, and room for every slot of the worker, which has
at most one request each; so it is never full. Counters only grow; 64 bits don't run out.

The portable implementation is here: one byte over the control socket wakes. The native one, in
`_native/handoff.py`, sleeps and wakes on futexes in the segment. Both sides write what they have,
then the counter, then the byte; the other reads them in the opposite order. The system calls order
memory between the processes, so no fences are needed.
"""

from __future__ import annotations

import math
import threading
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
        """Hands `slots` to their workers. The parent must own them. One thread at a time."""
        ...

    def wait(self, slots: NDArray[Any], count: int, supervision: Supervision) -> None:
        """Waits until `count` of `slots` are the parent's. Any number of threads at a time."""
        ...

    def first_done(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        """Returns those of `slots` that were finished first, in that order; `count` must be."""
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
    """Says which of some slots are whose, by the range of env ids that each worker holds."""

    def __init__(self, slices: tuple[tuple[int, int], ...]) -> None:
        self._stops = np.array([stop for _, stop in slices])

    def of(self, slots: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields each worker that has some of `slots`, with those, in the order given."""
        owners = self._stops.searchsorted(slots, side="right")
        if (owners[:-1] > owners[1:]).any():
            order = owners.argsort(kind="stable")
            owners, slots = owners[order], slots[order]
        cuts = np.flatnonzero(np.diff(owners)) + 1
        for share, start in zip(np.split(slots, cuts), [0, *cuts.tolist()], strict=True):
            if share.size:
                yield int(owners[start]), share


class Slots:
    """Who owns which slot, by the words that both hand-offs share."""

    def __init__(self, arrays: Arrays) -> None:
        self._asked, self._done, self._done_at = arrays["asked",], arrays["done",], arrays["done_at",]

    def ask(self, slots: NDArray[Any]) -> None:
        """Counts a request to each of `slots`, which are the workers' from now on."""
        self._asked[slots] += np.uint32(1)

    def finish(self, slots: NDArray[Any]) -> None:
        """Gives `slots` back to the parent."""
        self._done_at[slots] = time.monotonic_ns()
        self._done[slots] = self._asked[slots]

    def done(self, slots: NDArray[Any]) -> NDArray[np.bool_]:
        """Says which of `slots` are the parent's."""
        return self._done[slots] == self._asked[slots]

    def first_done(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        """See `ParentHandoff`."""
        done = slots[self.done(slots)]
        return done[self._done_at[done].argsort(kind="stable")[:count]]

    def unfinished(self) -> NDArray[Any]:
        """See `ParentHandoff`."""
        return np.flatnonzero(self._asked != self._done)


class ParentEnd:
    """The portable `ParentHandoff`."""

    def __init__(self, arrays: Arrays, slices: tuple[tuple[int, int], ...], channels: list[Channel]) -> None:
        self._slots = Slots(arrays)
        self._inbox, self._inbox_count = arrays["inbox",], arrays["inbox_count",]
        self._shares = Shares(slices)
        self._channels = channels
        self._listening = threading.Lock()
        self.first_done, self.unfinished = self._slots.first_done, self._slots.unfinished

    def send(self, operation: int, slots: NDArray[Any]) -> None:
        self._slots.ask(slots)
        for worker, share in self._shares.of(slots):
            ring, count = self._inbox[worker], int(self._inbox_count[worker])
            ring[(count + np.arange(len(share))) % len(ring)] = share * 2 + operation
            self._inbox_count[worker] = count + len(share)
            self._channels[worker].wake()

    def wait(self, slots: NDArray[Any], count: int, supervision: Supervision) -> None:
        while np.count_nonzero(self._slots.done(slots)) < count:
            with self._listening:  # who listens takes the wakes of all, so the others look again after it
                if np.count_nonzero(self._slots.done(slots)) < count:
                    listen(supervision)

    def knock(self, worker: int) -> None:
        pass  # the worker waits at its socket


class WorkerEnd:
    """The portable `WorkerHandoff`."""

    def __init__(self, arrays: Arrays, worker: int, channel: Channel) -> None:
        self._slots = Slots(arrays)
        self._inbox, self._inbox_count = arrays["inbox",][worker], arrays["inbox_count",][worker : worker + 1]
        self._channel = channel
        self._taken = 0

    def receive(self) -> Iterator[Any]:
        message = self._channel.receive()
        if message is not WAKE:
            yield message
            return
        count = int(self._inbox_count[0]) - self._taken
        places = (self._taken + np.arange(count)) % len(self._inbox)
        entries = self._inbox[places].astype(np.intp)
        self._taken += count
        operations = entries % 2
        for run in np.split(entries, np.flatnonzero(np.diff(operations)) + 1):
            if run.size:
                yield Work(int(run[0] % 2), run // 2)

    def post(self, slots: NDArray[Any]) -> None:
        self._slots.finish(slots)
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
