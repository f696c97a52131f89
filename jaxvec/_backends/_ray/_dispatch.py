"""The pool's end of the slots that workers in a Ray actor hold: ships what is asked, writes what comes back.

A slot belongs to its worker while `done` differs from `asked`, see `_handoff.py`. To know what is shipped
already, there is another `done` here, in which that counts as done: so several requests can be on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from jaxvec._backends import _handoffs
from jaxvec._backends._messages import Attach
from jaxvec._backends._ray._stream import Buffer
from jaxvec._backends._ray._waybills import Waybills
from jaxvec._handoff import _channel
from jaxvec._handoff._channel import Channel
from jaxvec._handoff._handoff import Shares, Slots, WorkerHandoff
from jaxvec._memory import _segment
from jaxvec._memory._segment import Arrays


class Dispatch:
    """One thread is in `take`, one calls `post`, and one the rest; but `stop` is for any."""

    def __init__(
        self, attach: Attach, segment: int, workers: range, move: Callable[[int, Buffer], Any]
    ) -> None:
        """Maps the segment.

        Args:
            attach: the first that a worker is sent.
            segment: its descriptor, which stays the caller's.
            workers: of the actor; the first one's bell is rung for all.
            move: has the actor move slots.
        """
        self._arrays = _segment.attach(segment, attach.layout)
        self._kind = attach.handoff
        self._slices = attach.layout.slices
        self._shares = Shares(self._slices)
        self._move = move
        self._answered = np.zeros_like(self._arrays["done",])  # the requests that rows answer
        self._waybills = Waybills(
            attach.spec, self._arrays, workers, asked=self._arrays["asked",], answered=self._answered
        )
        self._serves = np.zeros(len(self._answered), np.bool_)  # slots whose worker does
        self._shipped = self._arrays["done",].copy()
        self._shipping = threading.Lock()  # what is packed first goes first
        self._bell, ear = _channel.pair()
        self._ear = _channel.adopt(ear)
        share = self._slices[workers[0]][0], self._slices[workers[-1]][1]
        shipped = self._arrays | {("done",): self._shipped}
        self._share, self._marks = slice(*share), Slots(shipped)
        self._taking = self._end_of(workers[0], share, shipped, self._ear)
        self._posting: dict[int, WorkerHandoff] = {}  # by worker

    def serve(
        self, worker: int, channel: Channel, tell: Callable[[Buffer | None], Any], *, replaces: bool
    ) -> None:
        """Lets a worker serve; in the place of one that is gone with its actor, with the rows that it left.

        Args:
            worker: its index.
            channel: the worker's end of its control socket.
            tell: lets the actor know, with the rows that were left, if there are any.
            replaces: whether another has served before.
        """
        share = self._slices[worker]
        self._posting[worker] = self._end_of(worker, share, self._arrays, channel)
        mine = np.arange(*share)
        with self._shipping:
            if self._serves[mine].all():  # the actor has its rows, and what it was asked for
                tell(None)
                return
            tell(self._waybills.left_by(worker).pack(mine) if replaces else None)
            self._serves[mine] = True
            self._shipped[mine] = self._arrays["done",][mine]
        self._bell.send("look again")
        self._taking.stir()

    def take(self) -> None:
        """Ships slots as they are asked for, until `stop`."""
        with suppress(EOFError):
            while True:
                self._taking.receive()
                self.ship()

    def ship(self) -> None:
        """Ships what has been asked for by now, lest what a worker is told next be there first."""
        with self._shipping:
            while (work := self._marks.requested(self._share)) is not None:
                self._shipped[work.slots] = self._arrays["asked",][work.slots]
                slots = np.sort(work.slots[self._serves[work.slots]])  # `serve` sees to the others
                if slots.size:
                    self._move(work.operation, self._waybills.out[work.operation].pack(slots))

    def post(self, rows: Buffer) -> None:
        """Writes rows, and hands those back that answer what was asked."""
        slots = self._waybills.back.unpack(rows)
        asked, done = self._arrays["asked",][slots], self._arrays["done",][slots]
        finished = slots[(self._answered[slots] == asked) & (done != asked)]
        for worker, share in self._shares.of(finished):
            with suppress(OSError):  # its socket is closed; the slots are done all the same
                self._posting[worker].post(share)

    def wake(self) -> None:
        """Passes on that something was asked for."""
        self._bell.wake()

    def alarm(self, worker: int) -> None:
        """Makes the pool look at its control sockets at once."""
        if worker in self._posting:
            self._posting[worker].alarm()

    def stop(self) -> None:
        """Ends `take`; from any thread."""
        self._bell.break_off()
        self._taking.stir()

    def close(self) -> None:
        """Closes what wakes `take`, which has ended."""
        self._bell.close()
        self._ear.close()

    def _end_of(self, worker: int, share: tuple[int, int], arrays: Arrays, channel: Channel) -> WorkerHandoff:
        knocks = int(arrays["knocks",][worker, 0])
        return _handoffs.worker_end(
            self._kind, arrays, worker=worker, share=share, channel=channel, spin_ns=0, knocks=knocks
        )
