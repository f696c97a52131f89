"""What runs in a Ray actor: worker processes of its node, over a segment of their own.

It is their parent, as the pool is that of local workers, and knows as little of envs. What the pool says to
a worker it passes on, and what workers say goes back, in order, in one stream with the rows. Its segment has
the pool's layout, of which only its workers' rows are ever touched, so only these take memory.
"""

from __future__ import annotations

import os
import pickle
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

from jaxvec._config import PoolConfig
from jaxvec._dispatch.channel import WAKE, Channel, adopt_channel, channel_pair, dead_socket
from jaxvec._dispatch.dispatch import ParentDispatch, time_left
from jaxvec._dispatch.move import Verb
from jaxvec._memory.segment import Arrays, Marks, attach_segment, create_segment
from jaxvec._ray.wire import HostFailure, Payload, ProcessEnd, WireFormat, WorkerMessage
from jaxvec._workers.base import Process, Slices, choose_dispatch, parent_end
from jaxvec._workers.process import LocalLauncher
from jaxvec._workers.worker import Attach, Setup

_BATCH_TIMEOUT = 0.2  # seconds for a request, after which what is completed of it is sent


class _Interrupted(Exception):
    """There is something else to do than to wait for slots."""


@dataclass
class _WorkerSlot:
    """A worker's place. Its channel keeps its descriptor, whichever process is at the other end."""

    channel: Channel
    dead_socket: socket.socket | None  # the other end, while there is no process
    process: Process | None = None
    incarnation: int = -1
    ended: int = -1  # the latest incarnation that was to be ended


class ActorHost:
    """The workers of one actor.

    `run` has a thread of its own. What else is asked of it comes one after the other, in order, but for
    `end`, which nothing may hold up. They share the worker slots and the requests, under a lock.
    """

    def __init__(self, workers: range, slices: Slices, config: PoolConfig) -> None:
        """Makes room for these workers, each of which holds one of the slices."""
        self._workers = workers
        self._slices = slices
        self._launcher = LocalLauncher(config)
        self._worker_slots = {worker: _WorkerSlot(*dead_socket()) for worker in workers}
        self._lock = threading.Lock()
        self._wake_writer, reader = channel_pair()  # wakes `run`
        self._wake_reader = adopt_channel(reader)
        self._by_fd = {self._worker_slots[worker].channel.fileno(): worker for worker in workers}
        self._poll = select.poll()
        for fd in (self._wake_reader.fileno(), *self._by_fd):
            self._poll.register(fd, select.POLLIN)
        self._envs_per_instance = 1
        self._arrays: Arrays | None = None
        self._requests: list[NDArray[np.int64]] = []  # whose slots have not all gone out
        self._messages: list[WorkerMessage | HostFailure] = []  # to go out

    def do(self, name: str, *args: Any) -> None:
        """Calls another of our methods; nobody waits for its errors, so they go out."""
        try:
            getattr(self, name)(*args)
        except Exception as error:
            self.fail(f"failed: {type(error).__name__}: {error}")

    def launch(self, worker: int, incarnation: int) -> None:
        """Starts a process in a worker's place; the one before it has been ended."""
        process, channel = self._launcher.launch(worker)
        with self._lock:
            worker_slot = self._worker_slots[worker]
            if worker_slot.process is not None:
                self._vacate(worker)
            worker_slot.channel.replace(channel)
            worker_slot.process, worker_slot.incarnation = process, incarnation
            assert worker_slot.dead_socket is not None
            worker_slot.dead_socket.close()
            worker_slot.dead_socket = None
            if incarnation <= worker_slot.ended:
                process.end()
        self._wake_run()

    def end(self, worker: int, incarnation: int) -> None:
        """Ends a process at once, and what its envs have started; also one whose `launch` is yet to come."""
        worker_slot = self._worker_slots[worker]
        with self._lock:
            worker_slot.ended = incarnation
            process = worker_slot.process if worker_slot.incarnation == incarnation else None
        if process is not None:
            process.end()

    def tell(
        self, worker: int, incarnation: int, told: bytes | None, inherited: Payload | None = None
    ) -> None:
        """Passes a message on, or the end of file for `None`.

        Args:
            worker: whom to tell.
            incarnation: which of the processes in its place.
            told: the message of the pool's supervisor, pickled.
            inherited: with `Attach`, what a worker left that was in another actor.
        """
        worker_slot = self._worker_slots[worker]
        if worker_slot.incarnation != incarnation:
            return
        message = None if told is None else pickle.loads(told)
        if isinstance(message, Setup):
            self._envs_per_instance = message.config.envs_per_instance or 1
            message = replace(message, sys_path=list(sys.path), python_path=os.environ.get("PYTHONPATH"))
        descriptors: list[int] = []
        if isinstance(message, Attach):
            message = self._attach(message, inherited)
            descriptors = [self._segment]
        elif self._arrays is not None:
            self._dispatch.notify_worker(worker)  # first: a long message needs its reader
        if message is None:
            worker_slot.channel.shut()
            return
        with suppress(EOFError):  # it is dead, which `run` sees
            worker_slot.channel.send(message, descriptors=descriptors)

    def move(self, verb: Verb, request: Payload) -> None:
        """Hands slots to their workers."""
        slots = self._wire.requests[verb].unpack(request)
        self._dispatch.pass_on(
            self._requested, slots
        )  # first: until then they look as if they were completed
        with self._lock:
            self._requests.append(slots)
        self._wake_run()

    def fail(self, why: str) -> None:
        """Lets the pool know what is wrong with us."""
        with self._lock:
            self._messages.append(HostFailure(why))
        self._wake_run()

    def run(self) -> Generator[Payload | WorkerMessage | HostFailure]:
        """Yields what comes of the workers: rows, and what they say after these."""
        shown = np.zeros(0)
        while True:
            late = False
            try:
                self._wait()
            except _Interrupted:
                pass
            except TimeoutError:
                late = True
            # First: what a worker says is about rows that are there by now.
            with self._lock:
                messages, self._messages = self._messages, []
            if self._arrays is not None:
                slots = self._take_finished(partly=late or bool(messages))
                running = self._marks.running[self._workers.start : self._workers.stop, 0]
                if slots.size or ((late or messages) and not np.array_equal(shown, running)):
                    shown = running.copy()
                    yield self._wire.results.pack(slots)
            # Not `yield from` the list: Ray sends values into the generator.
            while messages:
                yield messages.pop(0)

    # --- run's own ---------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Waits for something to yield; raises `_Interrupted`, or `TimeoutError` if slots are late."""
        with self._lock:
            requests = list(self._requests)
        if self._arrays is None or not requests:
            self._look(None)
            return
        completed = [self._are_completed(slots) for slots in requests]
        if any(map(self._is_due, completed)):
            return
        missing = np.concatenate(requests)[~np.concatenate(completed)]
        # Who waits for one request is woken once; among several, each may be the first to be completed.
        count = missing.size if len(requests) == 1 and not self._first_ready else 1
        deadline = time.monotonic() + _BATCH_TIMEOUT
        while not self._dispatch.wait(missing, count, time_left(deadline)):
            self._look(self._dispatch.begin_look(missing, count, time_left(deadline)))
            if time_left(deadline) <= 0 and not self._dispatch.enough_completed(missing, count):
                raise TimeoutError

    def _look(self, seconds: float | None) -> None:
        """Waits for messages and wakes. Raises `_Interrupted` if `run` has to do something."""
        woken = False
        for fd, _ in self._poll.poll(None if seconds is None else seconds * 1000):
            if fd == self._wake_reader.fileno():
                self._wake_reader.receive()
                woken = True
                continue
            worker = self._by_fd[fd]
            with self._lock:
                worker_slot = self._worker_slots[worker]
                if not worker_slot.channel.readable():  # another process has taken the place meanwhile
                    continue
                try:
                    message = worker_slot.channel.receive()
                except EOFError:
                    self._vacate(worker)
                    continue
                if message is not WAKE:
                    self._messages.append(WorkerMessage(worker, worker_slot.incarnation, message))
        if woken or self._messages:
            raise _Interrupted

    def _take_finished(self, *, partly: bool) -> NDArray[np.int64]:
        """Returns the slots that are to go out: those of whole requests, or `partly` of others, too."""
        out = [np.zeros(0, np.int64)]
        left: list[NDArray[np.int64]] = []
        with self._lock:
            for slots in self._requests:
                completed = self._are_completed(slots)
                if partly or self._is_due(completed):
                    out.append(slots[completed])
                    slots = slots[~completed]
                if slots.size:
                    left.append(slots)
            self._requests = left
        # Batched envs may have written their neighbours' rows, too.
        instances = np.unique(np.concatenate(out) // self._envs_per_instance)
        return (instances[:, None] * self._envs_per_instance + np.arange(self._envs_per_instance)).ravel()

    def _are_completed(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._marks.completed[slots] == self._marks.requested[slots]

    def _is_due(self, completed: NDArray[np.bool_]) -> bool:
        """Says whether slots of a request should go out; somebody may wait for any of a first-ready pool."""
        return bool(completed.any() if self._first_ready else completed.all())

    # --- both threads' -----------------------------------------------------------------------------

    def _wake_run(self) -> None:
        """Makes `run` look around."""
        self._wake_writer.wake()
        if self._arrays is not None:
            self._dispatch.notify_parent()

    def _vacate(self, worker: int) -> None:
        """Notes that the process in a worker's place has ended; under the lock."""
        worker_slot = self._worker_slots[worker]
        assert worker_slot.process is not None
        end = ProcessEnd(*worker_slot.process.ending())
        self._messages.append(WorkerMessage(worker, worker_slot.incarnation, end))
        channel, worker_slot.dead_socket = dead_socket()
        worker_slot.channel.replace(channel)
        worker_slot.process = None

    def _attach(self, attach: Attach, inherited: Payload | None) -> Attach:
        """Returns the message with what is different here; makes the segment, if there is none yet."""
        kind = choose_dispatch("portable" if attach.dispatch == "portable" else "auto")
        if self._arrays is None:
            self._segment = create_segment(attach.layout, sparse=True)
            arrays = attach_segment(self._segment, attach.layout)
            self._marks = Marks.of(arrays)
            self._requested = np.zeros_like(self._marks.requested)  # what the pool asked for, to be passed on
            self._wire = WireFormat(
                attach.spec, arrays, self._workers, requested=self._requested, answered=self._marks.completed
            )
            self._first_ready = attach.spec.first_ready
            elsewhere, self._elsewhere = dead_socket()
            num_workers = len(self._marks.running)
            channels = [elsewhere] * num_workers
            for worker, worker_slot in self._worker_slots.items():
                channels[worker] = worker_slot.channel
            self._dispatch: ParentDispatch = parent_end(
                kind, self._marks, slices=self._among(num_workers), channels=channels, spin_ns=0
            )
            self._arrays = arrays
        if inherited is not None:
            slots = self._wire.inheritance(attach.worker).unpack(inherited)
            self._marks.requested[slots] = self._marks.completed[slots]
        replaces = attach.replaces
        if replaces is not None:
            replaces = replace(replaces, notices=int(self._marks.worker_notices[attach.worker, 0]))
        return replace(attach, dispatch=kind, spin_ns=0, replaces=replaces)

    def _among(self, num_workers: int) -> Slices:
        """Returns our slices in their places among those of all workers; others' are empty here."""
        first, stop = self._slices[0][0], self._slices[-1][1]
        after = num_workers - self._workers.stop
        return (*[(first, first)] * self._workers.start, *self._slices, *[(stop, stop)] * after)
