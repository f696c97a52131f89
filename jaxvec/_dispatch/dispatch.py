"""Who owns a slot now: two marks on each slot, and a way to wake each other.

A slot (an env's row of the segment) has two marks: `requested`, its latest request, and `completed`, the
request that its worker completed last. The slot belongs to the parent while they are equal: `send` sets
`requested` to a new request number and the verb; the worker's `post` copies it to `completed`. So a
row that answers an earlier request can't pass for new, several threads of the parent can each wait for
slots of their own, and `completed_at` tells which were completed first.

A worker looks for work among its own slots, and serves it in the order of its numbers. What is left to
be done is in the marks alone: a worker that replaces a dead one finds it there, whoever sends meanwhile.
Request numbers only grow; 60 bits don't run out.

The portable implementation is here: one byte over the control socket wakes. The native one, in
`_native/native_dispatch.py`, sleeps and wakes on futexes in the segment. Both sides write what they have,
then the mark, then the byte; the other reads them in the opposite order. The system calls order
memory between the processes, so no fences are needed.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.channel import WAKE, ParentChannel, WorkerChannel
from jaxvec._dispatch.move import VERBS, Verb, requests, verbs_of
from jaxvec._memory.segment import Marks

DEATH_CHECK_INTERVAL = 0.05  # seconds between looks for workers that died, which wake nobody


class Work(NamedTuple):
    """Slots of one worker that are asked for the same."""

    verb: Verb
    slots: NDArray[Any]


class Slots:
    """Who owns which slot, by the marks in the segment."""

    def __init__(self, marks: Marks) -> None:
        self._requested, self._completed, self._completed_at = (
            marks.requested,
            marks.completed,
            marks.completed_at,
        )

    def next_work(self, slots: slice) -> Work | None:
        """Returns the oldest work among the worker's slots, or `None` if all are the parent's."""
        requested = self._requested[slots].copy()  # others' requests may come meanwhile
        mine = np.flatnonzero(requested != self._completed[slots])
        if not mine.size:
            return None
        mine = mine[requested[mine].argsort()]
        verbs = verbs_of(requested[mine])
        same = np.logical_and.accumulate(verbs == verbs[0])
        return Work(VERBS[verbs[0]], slots.start + mine[same])

    def are_completed(self, slots: NDArray[Any]) -> NDArray[np.bool_]:
        """Tells which of `slots` are the parent's."""
        return self._completed[slots] == self._requested[slots]

    def enough_completed(self, slots: NDArray[Any], count: int) -> bool:
        """Tells whether `count` of `slots` are the parent's."""
        return bool(np.count_nonzero(self.are_completed(slots)) >= count)

    def first_completed(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        """Returns those of `slots` that were completed first, in that order, and `count` of them at most."""
        completed = slots[self.are_completed(slots)]
        return completed[self._completed_at[completed].argsort(kind="stable")[:count]]

    def any_resetting(self, slots: NDArray[Any]) -> bool:
        """Tells whether one of `slots` has not finished a reset."""
        requested = self._requested[slots]
        unfinished = requested != self._completed[slots]
        return bool((unfinished & (verbs_of(requested) == int(Verb.RESET))).any())

    def unfinished(self) -> NDArray[Any]:
        """Returns the ids of slots whose latest request is not finished."""
        return np.flatnonzero(self._requested != self._completed)

    def close(self) -> None:
        """Forgets the segment, which an error's frames may else keep mapped."""
        self._requested = self._completed = self._completed_at = np.zeros(0, np.int64)


class ParentDispatch(Slots, ABC):
    """The parent's end, to all workers."""

    @property
    def native_end(self) -> Any:
        """C++'s part; `None` if there is none."""
        return None

    @abstractmethod
    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        """Hands `slots` to their workers. The parent must own them. One thread at a time."""

    @abstractmethod
    def pass_on(self, requests: NDArray[Any], slots: NDArray[Any]) -> None:
        """Hands `slots` to their workers with requests that another hand-off made, `[num_envs]`."""

    @abstractmethod
    def wait(self, slots: NDArray[Any], count: int, seconds: float) -> bool:
        """Waits for `count` of `slots`, for at most `seconds`. Any number of threads at a time.

        Returns:
            Whether they are the parent's, and nothing else is to be seen to. If not, the caller looks at
            the control sockets, as only one thread does at a time, and waits again.
        """

    @abstractmethod
    def begin_look(self, slots: NDArray[Any], count: int, seconds: float) -> float:
        """Announces that a thread is about to look at the control sockets, and waits for `count` of `slots`.

        Returns:
            How long it may sleep there, of `seconds`.
        """

    def notify_worker(self, worker: int) -> None:
        """Tells a worker that a message, or the end, is on its control socket, if it does not wait there."""

    def notify_parent(self) -> None:
        """Makes `wait`, in another thread, look around at once, if it does not wait at the sockets."""


class WorkerDispatch(Slots, ABC):
    """A worker's end."""

    @abstractmethod
    def idle(self) -> bool:
        """Tells whether `receive` would have to wait."""

    @abstractmethod
    def receive(self) -> Any:
        """Waits for the parent, then returns `Work`, or the message that came instead.

        Raises:
            EOFError: the parent closed the pool, or is dead.
        """

    @abstractmethod
    def post(self, slots: NDArray[Any]) -> None:
        """Hands finished `slots` back."""

    def post_some(self, first: int, count: int) -> None:
        """Hands finished neighbours back, which are then completed at the same time."""
        self.post(np.arange(first, first + count))

    def notify_parent(self) -> None:
        """Makes the parent look at its control sockets at once, if it does not wait there."""

    def notify_worker(self) -> None:
        """Makes `receive`, in another thread, look at the control socket, if it does not wait there."""

    @abstractmethod
    def receive_message(self) -> Any:
        """Waits for a message, whatever else there is to do: what answers a report, in the end."""


class Partition:
    """Says which of some slots are whose, by the range of env ids that each worker holds."""

    def __init__(self, slices: tuple[tuple[int, int], ...]) -> None:
        self._stops = np.array([stop for _, stop in slices])
        self._all = np.arange(slices[0][0], slices[-1][1])
        self._of_all = list(self._find(self._all))

    def of(self, slots: NDArray[Any]) -> Iterable[tuple[int, NDArray[Any]]]:
        """Returns each worker that has some of `slots`, with those, in the order given."""
        if len(slots) == len(self._all) and (slots == self._all).all():  # lock step: nothing to look for
            return self._of_all
        return self._find(slots)

    def _find(self, slots: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
        owners = self._stops.searchsorted(slots, side="right")
        if (owners[:-1] > owners[1:]).any():
            order = owners.argsort(kind="stable")
            owners, slots = owners[order], slots[order]
        cuts = (np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist()
        for start, stop in itertools.pairwise([0, *cuts, len(slots)] if len(slots) else []):
            yield int(owners[start]), slots[start:stop]


class PortableParentDispatch(ParentDispatch):
    """The portable end of the parent. It waits at the control sockets, so it needs no notice."""

    def __init__(
        self, marks: Marks, slices: tuple[tuple[int, int], ...], channels: Sequence[ParentChannel]
    ) -> None:
        super().__init__(marks)
        self._request_number = 0
        self._partition = Partition(slices)
        self._channels = channels
        self._looked = -math.inf

    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        numbers = self._request_number + np.arange(1, len(slots) + 1)
        self._request_number += len(slots)
        self._request(requests(numbers, verb), slots)

    def pass_on(self, requests: NDArray[Any], slots: NDArray[Any]) -> None:
        self._request(requests[slots], slots)

    def wait(self, slots: NDArray[Any], count: int, seconds: float) -> bool:
        if time.monotonic() - self._looked > DEATH_CHECK_INTERVAL:  # also where nobody ever has to wait
            self._looked = time.monotonic()
            return False
        return self.enough_completed(slots, count)

    def begin_look(self, slots: NDArray[Any], count: int, seconds: float) -> float:
        # Who looks takes the wakes of all, so the others look at their slots again after it.
        return 0 if self.enough_completed(slots, count) else seconds

    def _request(self, requests: NDArray[Any], slots: NDArray[Any]) -> None:
        """Makes these requests, `[n]`, to `slots`, which are the workers' from now on."""
        self._requested[slots] = requests
        for worker, _ in self._partition.of(slots):
            self._channels[worker].wake()


class PortableWorkerDispatch(WorkerDispatch):
    """The portable end of a worker. It waits at its control socket, as the parent does."""

    def __init__(self, marks: Marks, slots: tuple[int, int], channel: WorkerChannel) -> None:
        super().__init__(marks)
        self._own = slice(*slots)
        self._channel = channel
        self._heard: Any = None  # a message, on the way to `receive`

    def idle(self) -> bool:
        while self._heard is None and self.next_work(self._own) is None:
            if not self._channel.readable():
                return True
            message = self._channel.receive()
            self._heard = None if message is WAKE else message  # a wake may be for what we have found already
        return False

    def receive(self) -> Any:
        while True:
            work = self.next_work(self._own)
            if work is not None:
                return work
            message, self._heard = self._heard or self._channel.receive(), None
            if message is not WAKE:
                return message

    def post(self, slots: NDArray[Any]) -> None:
        self._completed_at[slots] = time.monotonic_ns()
        self._completed[slots] = self._requested[slots]
        self._channel.wake()

    def receive_message(self) -> Any:
        message, self._heard = self._heard or WAKE, None
        while message is WAKE:
            message = self._channel.receive()
        return message


def time_left(deadline: float | None) -> float:
    """Returns the seconds until `deadline`, at least 0; infinite for `None`."""
    return math.inf if deadline is None else max(deadline - time.monotonic(), 0.0)
