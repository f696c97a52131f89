"""What runs in a Ray actor: worker processes of its node, over a segment of their own.

It is their parent, as the pool is that of local workers, and knows as little of envs. What the pool says to
a worker it passes on, and what workers say goes back, in order, in one stream with the rows. Its segment has
the pool's layout, of which only its workers' rows are ever touched, so only these take memory.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._backends import _handoffs
from jaxvec._backends._launcher import Process
from jaxvec._backends._messages import Attach, Setup
from jaxvec._backends._ray._stream import Buffer, Ended, Failed, Said
from jaxvec._backends._ray._waybills import Waybills
from jaxvec._backends._start_method import LocalLauncher, StartMethod
from jaxvec._handoff import _channel
from jaxvec._handoff._channel import WAKE, Channel
from jaxvec._handoff._handoff import LOOK_AROUND, ParentHandoff
from jaxvec._handoff._move import Verb
from jaxvec._memory import _segment
from jaxvec._memory._segment import Arrays


class _News(Exception):
    """There is something else to do than to wait for slots."""


@dataclass
class _Seat:
    """A worker's place. Its socket keeps its descriptor, whoever sits here."""

    channel: Channel
    nobody: socket.socket | None  # what keeps an empty seat's socket open
    process: Process | None = None
    life: int = -1


class Host:
    """The workers of one actor.

    Ray calls all methods but `run` one after the other, in one thread, and `run` in another. They share
    the seats and the requests, under a lock.
    """

    def __init__(self, workers: range, method: StartMethod) -> None:
        """Makes room for these workers."""
        self._workers = workers
        self._launcher = LocalLauncher(method)
        self._seats = {worker: _Seat(*_channel.nobody()) for worker in workers}
        self._lock = threading.Lock()
        self._call, ear = _channel.pair()  # wakes `run`
        self._ear = _channel.adopt(ear)
        self._poll = select.poll()
        self._poll.register(self._ear, select.POLLIN)
        self._by_fd = {seat.channel.fileno(): worker for worker, seat in self._seats.items()}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        self._size = 1
        self._arrays: Arrays | None = None
        self._requests: list[NDArray[np.int64]] = []  # whose slots have not all gone out
        self._said: list[Said | Failed] = []  # to go out
        self.deadline: float | None = None  # see `Supervision`

    def launch(self, worker: int, life: int) -> None:
        """Starts a process in a worker's place; who was there has been ended."""
        process, channel = self._launcher.launch(worker)
        with self._lock:
            seat = self._seats[worker]
            if seat.process is not None:
                self._vacate(worker)
            seat.channel.replace(channel)
            seat.process, seat.life = process, life
            assert seat.nobody is not None
            seat.nobody.close()
            seat.nobody = None
        self._stir()

    def end(self, worker: int, life: int) -> None:
        """Ends a process at once, and whatever its envs have started."""
        seat = self._seats[worker]
        if seat.life == life and seat.process is not None:
            seat.process.end()

    def tell(self, worker: int, life: int, message: Any, left: Buffer | None = None) -> None:
        """Passes a message on, or the end of file for `None`.

        Args:
            worker: whom to tell.
            life: which process in its place.
            message: of the pool's supervisor.
            left: with `Attach`, what a worker left that was not here.
        """
        seat = self._seats[worker]
        if seat.life != life:
            return
        if isinstance(message, Setup):
            self._size = message.kind.size or 1
            message = replace(message, sys_path=list(sys.path), python_path=os.environ.get("PYTHONPATH"))
        descriptors: list[int] = []
        if isinstance(message, Attach):
            message = self._attach(message, left)
            descriptors = [self._segment]
        elif self._arrays is not None:
            self._handoff.knock(worker)
        if message is None:
            seat.channel.shut()
            return
        with suppress(EOFError):  # it is dead, which `run` sees
            seat.channel.send(message, descriptors=descriptors)

    def move(self, operation: Verb, request: Buffer) -> None:
        """Hands slots to their workers."""
        slots = self._waybills.out[operation].unpack(request)
        self._handoff.pass_on(self._asked, slots)  # first: until then they look as if they were done
        with self._lock:
            self._requests.append(slots)
        self._stir()

    def fail(self, why: str) -> None:
        """Lets the pool know what is wrong with us."""
        with self._lock:
            self._said.append(Failed(why))
        self._stir()

    def run(self) -> Generator[Buffer | Said | Failed]:
        """Yields what comes of the workers: rows, and what they say after these."""
        shown = np.zeros(0)
        while True:
            late = False
            try:
                self._wait()
            except _News:
                pass
            except TimeoutError:
                late = True
            # First: what somebody says is about rows that are there by now.
            with self._lock:
                said, self._said = self._said, []
            if self._arrays is not None:
                rows = self._finished(partly=late or bool(said))
                running = self._arrays["running",][self._workers.start : self._workers.stop, 0]
                if rows.size or ((late or said) and not np.array_equal(shown, running)):
                    shown = running.copy()
                    yield self._waybills.back.pack(rows)
            # Not `yield from` the list: Ray sends values into the generator.
            while said:
                yield said.pop(0)

    # --- run's own ---------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Waits for something to yield; raises `_News`, or `TimeoutError` if slots are late."""
        with self._lock:
            requests = list(self._requests)
        if self._arrays is None or not requests:
            self.look(None)
            return
        missing = [slots[~self._done(slots)] for slots in requests]
        if any(self._is_due(slots, left) for slots, left in zip(requests, missing, strict=True)):
            return
        missing = np.concatenate(missing)
        # Who waits for one request is woken once; among several, each may be the first to be done.
        count = missing.size if len(requests) == 1 and not self._first_ready else 1
        self.deadline = time.monotonic() + LOOK_AROUND
        self._handoff.wait(missing, count, self)

    def look(self, seconds: float | None) -> list[tuple[int, Any]]:
        """See `Supervision`. Raises `_News` if there is any."""
        wakes: list[tuple[int, Any]] = []
        stirred = False
        for fd, _ in self._poll.poll(None if seconds is None else seconds * 1000):
            if fd == self._ear.fileno():
                self._ear.receive()
                stirred = True
                continue
            worker = self._by_fd[fd]
            with self._lock:
                seat = self._seats[worker]
                if not seat.channel.readable():  # another has sat down meanwhile
                    continue
                try:
                    message = seat.channel.receive()
                except EOFError:
                    self._vacate(worker)
                    continue
                if message is WAKE:
                    wakes.append((worker, WAKE))
                else:
                    self._said.append(Said(worker, seat.life, message))
        if stirred or self._said:
            raise _News
        return wakes

    def expire(self) -> None:
        """See `Supervision`."""
        raise TimeoutError

    def _finished(self, *, partly: bool) -> NDArray[np.int64]:
        """Returns the slots that are to go out: those of whole requests, or `partly` of others, too."""
        assert self._arrays is not None
        out: list[NDArray[np.int64]] = []
        left: list[NDArray[np.int64]] = []
        with self._lock:
            for slots in self._requests:
                done = self._done(slots)
                if not (partly or self._is_due(slots, slots[~done])):
                    done[:] = False
                out.append(slots[done])
                if not done.all():
                    left.append(slots[~done])
            self._requests = left
        finished = np.sort(np.concatenate([*out, np.zeros(0, np.int64)]))
        # Batched envs may have written their neighbours' rows, too.
        starts = np.unique(finished // self._size) * self._size
        return (starts[:, None] + np.arange(self._size)).ravel()

    def _done(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        assert self._arrays is not None
        return self._arrays["done",][slots] == self._arrays["asked",][slots]

    def _is_due(self, slots: NDArray[np.int64], missing: NDArray[np.int64]) -> bool:
        """Says whether slots of a request should go out; somebody may wait for any of a first-ready pool."""
        return not missing.size or (self._first_ready and missing.size < slots.size)

    # --- both threads' -----------------------------------------------------------------------------

    def _stir(self) -> None:
        """Makes `run` look around."""
        self._call.wake()
        if self._arrays is not None:
            self._handoff.stir()

    def _vacate(self, worker: int) -> None:
        """Notes the end of who sits there; under the lock."""
        seat = self._seats[worker]
        assert seat.process is not None
        exitcode, ending = seat.process.ending()
        self._said.append(Said(worker, seat.life, Ended(exitcode, ending)))
        channel, seat.nobody = _channel.nobody()
        seat.channel.replace(channel)
        seat.process = None

    def _attach(self, attach: Attach, left: Buffer | None) -> Attach:
        """Returns the message with what is different here; makes the segment, if there is none yet."""
        kind = _handoffs.choose("portable" if attach.handoff == "portable" else "auto")
        if self._arrays is None:
            self._segment = _segment.create(attach.layout, sparse=True)
            arrays = _segment.attach(self._segment, attach.layout)
            self._asked = np.zeros_like(arrays["asked",])  # what the pool asked for, to be passed on
            self._waybills = Waybills(
                attach.spec, arrays, self._workers, asked=self._asked, answered=arrays["done",]
            )
            self._first_ready = attach.spec.first_ready
            elsewhere, self._elsewhere = _channel.nobody()
            channels = [elsewhere] * len(attach.layout.slices)
            for worker, seat in self._seats.items():
                channels[worker] = seat.channel
            self._handoff: ParentHandoff = _handoffs.parent_end(
                kind, arrays, slices=attach.layout.slices, channels=channels, spin_ns=0
            )
            self._arrays = arrays
        if left is not None:
            slots = self._waybills.left_by(attach.worker).unpack(left)
            self._arrays["asked",][slots] = self._arrays["done",][slots]
        replaces = attach.replaces
        if replaces is not None:
            replaces = replace(replaces, knocks=int(self._arrays["knocks",][attach.worker, 0]))
        return replace(attach, handoff=kind, spin_ns=0, replaces=replaces)
