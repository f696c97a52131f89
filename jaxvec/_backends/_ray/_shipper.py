"""Ships slots that the pool asks for to their Ray actor, and writes the rows that come back.

A slot belongs to its worker while `completed` differs from `requested`, see `_handoff.py`. To know what is
shipped already, there is another `completed` here, in which that counts as completed: so several requests can
be on their way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from jaxvec._backends import _handoffs
from jaxvec._backends._launcher import Slices
from jaxvec._backends._messages import Attach
from jaxvec._backends._ray._wire_format import Payload, WireFormat
from jaxvec._handoff._channel import WAKE
from jaxvec._handoff._move import Verb, verbs_of
from jaxvec._memory._marks import Marks
from jaxvec._memory._segment import Arrays


class _WorkersEnd:
    """What a hand-off of all the actor's workers has for a control socket; see `WorkerChannel`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._come: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.wake, self.put = wake, self._come.put

    def readable(self) -> bool:
        return not self._come.empty()

    def receive(self, deadline: float | None = None) -> Any:
        message = self._come.get()
        if message is None:
            raise EOFError
        return message


class Shipper:
    """The workers' end of the hand-off, for those of one actor.

    A thread of its own ships; one other calls `post`, and any the rest.
    """

    def __init__(
        self,
        attach: Attach,
        arrays: Arrays,
        workers: range,
        slices: Slices,
        *,
        move: Callable[[Verb, Payload], None],
        wake_pool: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Begins to ship.

        Args:
            attach: the first that a worker is sent.
            arrays: of the segment.
            workers: of the actor; the first one's doorbell is rung for all.
            slices: the slots of each.
            move: has the actor move slots.
            wake_pool: makes the pool look at its slots, if it waits for that at its channels.
            fail: is told what the thread fails of, if it does.
        """
        self._slices = slices
        self._first = workers[0]
        self._move = move
        self._fail = fail
        self._marks = Marks.of(arrays)
        self._answered = np.zeros_like(self._marks.completed)  # the requests that rows answer
        self._wire = WireFormat(
            attach.spec, arrays, workers, requested=self._marks.requested, answered=self._answered
        )
        self._serving = np.zeros(len(self._answered), np.bool_)  # slots whose worker is attached
        self._shipped = self._marks.completed.copy()
        self._order = threading.Lock()  # what is packed first goes first
        self._own = slice(slices[0][0], slices[-1][1])
        self._channel = _WorkersEnd(wake_pool)
        self._taking, self._posting = (
            _handoffs.worker_end(
                attach.handoff,
                marks,
                worker=self._first,
                slots=(self._own.start, self._own.stop),
                channel=self._channel,
                spin_ns=0,
                notices=int(marks.worker_notices[self._first, 0]),
            )
            for marks in (replace(self._marks, completed=self._shipped), self._marks)
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def serve(self, worker: int, tell: Callable[[Payload | None], Any], *, replaces: bool) -> None:
        """Ships a worker's slots from now on.

        Args:
            worker: its index.
            tell: lets the actor know, with what the worker inherits from one that was lost with its actor.
            replaces: whether another has served before.
        """
        slots = np.arange(*self._slices[worker - self._first])
        with self._order:
            if self._serving[slots].all():  # the actor has its rows, and what it was asked for
                tell(None)
                return
            tell(self._wire.inheritance(worker).pack(slots) if replaces else None)
            self._serving[slots] = True
            self._shipped[slots] = self._marks.completed[slots]
        self._channel.put("look again")
        self._taking.notify_worker()

    def ship(self) -> None:
        """Ships what has been asked for by now, lest what a worker is told next be there first."""
        with self._order:
            requested = self._marks.requested[self._own].copy()  # others' requests may come meanwhile
            due = np.flatnonzero(requested != self._shipped[self._own])
            if not due.size:
                return
            requested, due = requested[due], self._own.start + due
            self._shipped[due] = requested
            serving = self._serving[due]  # `serve` sees to the others
            for verb, wire in self._wire.requests.items():
                slots = due[serving & (verbs_of(requested) == int(verb))]
                if slots.size:
                    self._move(verb, wire.pack(slots))

    def wake(self) -> None:
        """Passes on that something was asked for."""
        self._channel.put(WAKE)

    def post(self, rows: Payload) -> None:
        """Writes rows, and hands those back that answer what was asked."""
        slots = self._wire.results.unpack(rows)
        requested, completed = self._marks.requested[slots], self._marks.completed[slots]
        finished = slots[(self._answered[slots] == requested) & (completed != requested)]
        if finished.size:
            self._posting.post(finished)

    def notify_parent(self) -> None:
        """Makes the pool look at its control sockets at once."""
        self._posting.notify_parent()

    def close(self) -> None:
        """Ends the thread."""
        self._channel.put(None)
        self._taking.notify_worker()
        self._thread.join()

    def _run(self) -> None:
        try:
            with suppress(EOFError):  # `close`
                while True:
                    self._taking.receive()
                    self.ship()
        except BaseException as error:
            self._fail(error)
