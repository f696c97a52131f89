"""Ships slots that the pool asks for to their Ray actor, and writes the rows that come back.

A slot belongs to its worker while `completed` differs from `requested`, see `_handoff.py`. To know what is
shipped already, there is another `completed` here, in which that counts as completed: so several requests can
be on their way.
"""

from __future__ import annotations

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
from jaxvec._handoff import _channel
from jaxvec._handoff._channel import Channel
from jaxvec._handoff._handoff import Partition, WorkerHandoff
from jaxvec._handoff._move import Verb
from jaxvec._memory import _segment
from jaxvec._memory._marks import Marks


class Shipper:
    """The workers' end of the hand-off, for those of one actor.

    A thread of its own ships; one other calls `post` and `notify_parent`, and one the rest.
    """

    def __init__(
        self,
        attach: Attach,
        segment: int,
        workers: range,
        slices: Slices,
        *,
        move: Callable[[Verb, Payload], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Maps the segment, and begins to ship.

        Args:
            attach: the first that a worker is sent.
            segment: its descriptor, which stays the caller's.
            workers: of the actor; the first one's doorbell is rung for all.
            slices: the slots of each.
            move: has the actor move slots.
            fail: is told what the thread fails of, if it does.
        """
        self._arrays = _segment.attach(segment, attach.layout)
        self._kind = attach.handoff
        self._slices = slices
        self._first = workers[0]
        self._partition = Partition(slices)
        self._move = move
        self._fail = fail
        self._marks = Marks.of(self._arrays)
        self._answered = np.zeros_like(self._marks.completed)  # the requests that rows answer
        self._wire = WireFormat(
            attach.spec, self._arrays, workers, requested=self._marks.requested, answered=self._answered
        )
        self._serving = np.zeros(len(self._answered), np.bool_)  # slots whose worker is attached
        self._shipped = self._marks.completed.copy()
        self._order = threading.Lock()  # what is packed first goes first
        self._wake_writer, reader = _channel.pair()
        self._wake_reader = _channel.adopt(reader)
        own = slices[0][0], slices[-1][1]
        shipped = replace(self._marks, completed=self._shipped)
        self._own = slice(*own)
        self._taking = self._worker_end(workers[0], own, shipped, self._wake_reader)
        self._posting: dict[int, WorkerHandoff] = {}  # by worker
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def serve(
        self, worker: int, channel: Channel, tell: Callable[[Payload | None], Any], *, replaces: bool
    ) -> None:
        """Ships a worker's slots from now on.

        Args:
            worker: its index.
            channel: the worker's end of its control socket.
            tell: lets the actor know, with what the worker inherits from one that was lost with its actor.
            replaces: whether another has served before.
        """
        own = self._slices[worker - self._first]
        self._posting[worker] = self._worker_end(worker, own, self._marks, channel)
        slots = np.arange(*own)
        with self._order:
            if self._serving[slots].all():  # the actor has its rows, and what it was asked for
                tell(None)
                return
            tell(self._wire.inheritance(worker).pack(slots) if replaces else None)
            self._serving[slots] = True
            self._shipped[slots] = self._marks.completed[slots]
        self._wake_writer.send("look again")
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
                slots = due[serving & (requested % 2 == int(verb))]
                if slots.size:
                    self._move(verb, wire.pack(slots))

    def wake(self) -> None:
        """Passes on that something was asked for."""
        self._wake_writer.wake()

    def post(self, rows: Payload) -> None:
        """Writes rows, and hands those back that answer what was asked."""
        slots = self._wire.results.unpack(rows)
        requested, completed = self._marks.requested[slots], self._marks.completed[slots]
        finished = slots[(self._answered[slots] == requested) & (completed != requested)]
        for worker, part in self._partition.of(finished):
            with suppress(OSError):  # its socket is closed; the slots are completed all the same
                self._posting[self._first + worker].post(part)

    def notify_parent(self, worker: int) -> None:
        """Makes the pool look at its control sockets at once."""
        if worker in self._posting:
            self._posting[worker].notify_parent()

    def close(self) -> None:
        """Ends the thread."""
        self._wake_writer.break_off()
        self._taking.notify_worker()
        self._thread.join()
        self._wake_writer.close()
        self._wake_reader.close()

    def _run(self) -> None:
        try:
            with suppress(EOFError):  # `close`
                while True:
                    self._taking.receive()
                    self.ship()
        except BaseException as error:
            self._fail(error)

    def _worker_end(
        self, worker: int, slots: tuple[int, int], marks: Marks, channel: Channel
    ) -> WorkerHandoff:
        notices = int(marks.worker_notices[worker, 0])
        return _handoffs.worker_end(
            self._kind, marks, worker=worker, slots=slots, channel=channel, spin_ns=0, notices=notices
        )
