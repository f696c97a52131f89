"""The part of a pool that runs on another machine: worker processes there, and a segment of their own.

A `WorkerHost` is the parent of its workers, as a pool is of local ones. It relays messages to them, and
returns rows and messages as one stream, in order. `link.py` has the pool's side. The segment has the pool's
layout, but is sparse: only the rows of the host's own workers take memory. `serve_pool` dials in to a pool.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import queue
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._backends.remote import wire
from jaxvec._backends.remote.wire_format import Payload, WireFormat
from jaxvec._dispatch.channel import WAKE, Channel, adopt_channel, channel_pair, dead_socket
from jaxvec._dispatch.dispatch import time_left
from jaxvec._dispatch.move import Verb
from jaxvec._memory.segment import Arrays, Marks, attach_segment, create_segment
from jaxvec._options import PoolConfig
from jaxvec._util import dumps, usable_cores
from jaxvec._workers.base import Process, Slices, choose_dispatch, parent_end
from jaxvec._workers.interpreter import Interpreter
from jaxvec._workers.process import LocalLauncher
from jaxvec._workers.protocol import Attach, Setup

_BATCH_TIMEOUT = 0.2  # seconds for a whole request; then its completed part is sent


@dataclass
class _WorkerSlot:
    """The current process of a worker. The channel keeps its descriptor when the process is replaced."""

    channel: Channel
    dead_socket: socket.socket | None  # the channel's other end, while there is no process
    process: Process | None = None
    incarnation: int = -1
    ended: int = -1  # the latest incarnation that the pool has ended
    # Messages to the process, each with its incarnation and descriptors. They have a thread of their own,
    # since a worker that hangs reads none: calls for the other workers, and `end`, must not wait for it.
    outbox: queue.SimpleQueue[tuple[int, Any, list[int]]] = field(default_factory=queue.SimpleQueue)


class WorkerHost:
    """The workers of one host. `run` has a thread of its own; the pool's calls come in order, in another."""

    def __init__(self, workers: range, slices: Slices, config: PoolConfig) -> None:
        self._workers = workers
        self._slices = slices
        self._launcher = LocalLauncher(config, Interpreter(), dict(zip(workers, slices, strict=True)))
        # Guards `_requests`, `_messages` and changes of the worker slots, which both threads make.
        self._lock = threading.Lock()
        self._worker_slots = {worker: _WorkerSlot(*dead_socket()) for worker in workers}
        self._wake_writer, reader = channel_pair()  # wakes `run`
        self._wake_reader = adopt_channel(reader)
        self._by_fd = {each.channel.fileno(): worker for worker, each in self._worker_slots.items()}
        self._poll = select.poll()
        for fd in (self._wake_reader.fileno(), *self._by_fd):
            self._poll.register(fd, select.POLLIN)
        for worker_slot in self._worker_slots.values():
            threading.Thread(target=self._send_all, args=(worker_slot,), daemon=True).start()
        self._envs_per_instance = 1
        self.max_rows = 0  # bytes of the largest request, by the layout
        self._arrays: Arrays | None = None
        self._requests: list[NDArray[np.int64]] = []  # slots of each request that `run` has not yet yielded
        self._messages: list[wire.WorkerMessage | wire.HostLostError] = []  # for `run` to yield

    def call(self, name: str, *args: Any) -> None:
        """Calls a method by name. The pool does not wait for the call, so `run` yields its error."""
        try:
            getattr(self, name)(*args)
        except Exception as error:
            self.fail(f"failed: {type(error).__name__}: {error}")

    def launch(self, worker: int, incarnation: int) -> None:
        """Starts a process for a worker; an earlier one has been ended."""
        process, channel = self._launcher.launch(worker)
        with self._lock:
            worker_slot = self._worker_slots[worker]
            if worker_slot.process is not None:
                self._vacate(worker)
            with worker_slot.channel.sending:
                worker_slot.channel.replace(channel)
                worker_slot.process, worker_slot.incarnation = process, incarnation
            assert worker_slot.dead_socket is not None
            worker_slot.dead_socket.close()
            worker_slot.dead_socket = None
            if incarnation <= worker_slot.ended:  # `end` arrived before this call
                process.end()
        self._wake_run()

    def end(self, worker: int, incarnation: int) -> None:
        """Ends a process and its descendants at once; if it is not launched yet, `launch` ends it."""
        worker_slot = self._worker_slots[worker]
        with self._lock:
            worker_slot.ended = incarnation
            process = worker_slot.process if worker_slot.incarnation == incarnation else None
        if process is not None:
            process.end()

    def send(
        self, worker: int, incarnation: int, pickled: bytes | None, inherited: Payload | None = None
    ) -> None:
        """Relays a message to a worker's process, or closes the control socket for `None`.

        With `Attach`, `inherited` has the rows of the worker's predecessor, if that was in a lost host.
        """
        worker_slot = self._worker_slots[worker]
        if worker_slot.incarnation != incarnation:
            return
        message = None if pickled is None else pickle.loads(pickled)
        if isinstance(message, Setup):
            self._envs_per_instance = message.config.envs_per_instance or 1
            message = replace(message, sys_path=list(sys.path), python_path=os.environ.get("PYTHONPATH"))
        descriptors: list[int] = []
        if isinstance(message, Attach):
            message = self._attach(message, inherited)
            descriptors = [self._segment]
        elif self._arrays is not None:
            self._dispatch.notify_worker(worker)  # first: sending a long message needs a reader
        worker_slot.outbox.put((incarnation, message, descriptors))

    def move(self, verb: Verb, request: Payload) -> None:
        """Dispatches slots to their workers."""
        slots = self._wire.requests[verb].unpack(request)
        # Forward first: until then the slots look completed, and `run` would yield them.
        self._dispatch.forward(self._requested, slots)
        with self._lock:
            self._requests.append(slots)
        self._wake_run()

    def fail(self, why: str) -> None:
        """Reports to the pool why the host can't continue."""
        with self._lock:
            self._messages.append(wire.HostLostError(why))
        self._wake_run()

    def run(self) -> Generator[Payload | wire.WorkerMessage | wire.HostLostError]:
        """Yields rows and messages of the workers; a message follows all rows completed before it."""
        reported = np.zeros(0)  # the latest `running` marks that were yielded
        while True:
            late = self._wait()
            # Take messages before rows: the rows that precede a message are then complete.
            with self._lock:
                messages, self._messages = self._messages, []
            if self._arrays is not None:
                slots = self._take_completed(partly=late or bool(messages))
                running = self._marks.running[self._workers.start : self._workers.stop, 0]
                # The payload carries `running`, so that errors of the pool can name the envs that run.
                if slots.size or ((late or messages) and not np.array_equal(reported, running)):
                    reported = running.copy()
                    yield self._wire.results.pack(slots)
            yield from messages

    def end_all(self) -> None:
        """Ends all processes."""
        for worker, worker_slot in self._worker_slots.items():
            self.end(worker, worker_slot.incarnation)
        self._launcher.close()

    # --- A thread for each worker ------------------------------------------------------------------

    def _send_all(self, worker_slot: _WorkerSlot) -> None:
        while True:
            incarnation, message, descriptors = worker_slot.outbox.get()
            # `launch` takes this lock, too, so that no message reaches a later process.
            with worker_slot.channel.sending:
                if incarnation != worker_slot.incarnation:
                    continue
                try:
                    if message is None:
                        worker_slot.channel.shut()
                    else:
                        worker_slot.channel.send(message, descriptors=descriptors)
                except EOFError:  # the worker is dead; `run` reports that
                    pass
                except Exception as error:
                    self.fail(f"failed: {type(error).__name__}: {error}")

    # --- The thread of run -------------------------------------------------------------------------

    def _wait(self) -> bool:
        """Waits for messages, new requests or completed slots; returns True if it took `_BATCH_TIMEOUT`."""
        with self._lock:
            requests = list(self._requests)
        if self._arrays is None or not requests:
            self._poll_channels(None)
            return False
        completed = [self._dispatch.are_completed(slots) for slots in requests]
        if any(map(self._is_due, completed)):
            return False
        missing = np.concatenate(requests)[~np.concatenate(completed)]
        # One request wakes this thread once, when all its slots are completed. Of several, any may be first.
        count = missing.size if len(requests) == 1 and not self._first_ready else 1
        deadline = time.monotonic() + _BATCH_TIMEOUT
        while not self._dispatch.wait(missing, count, time_left(deadline)):
            if self._poll_channels(self._dispatch.start_poll(missing, count, time_left(deadline))):
                break
            if time_left(deadline) <= 0 and not self._dispatch.enough_completed(missing, count):
                return True
        return False

    def _poll_channels(self, seconds: float | None) -> bool:
        """Collects messages; returns True if there are any, or if `_wake_run` was called."""
        woken = False
        for fd, _ in self._poll.poll(None if seconds is None else seconds * 1000):
            if fd == self._wake_reader.fileno():
                self._wake_reader.receive()
                woken = True
                continue
            worker = self._by_fd[fd]
            with self._lock:
                worker_slot = self._worker_slots[worker]
                if not worker_slot.channel.readable():  # `launch` has replaced the process meanwhile
                    continue
                try:
                    message = worker_slot.channel.receive()
                except EOFError:
                    self._vacate(worker)
                    continue
                if message is not WAKE:
                    self._messages.append(wire.WorkerMessage(worker, worker_slot.incarnation, message))
        return woken or bool(self._messages)

    def _take_completed(self, *, partly: bool) -> NDArray[np.int64]:
        """Returns the completed slots to yield: those of due requests, or of all requests if `partly`."""
        out = [np.zeros(0, np.int64)]
        left: list[NDArray[np.int64]] = []
        with self._lock:
            for slots in self._requests:
                completed = self._dispatch.are_completed(slots)
                if partly or self._is_due(completed):
                    out.append(slots[completed])
                    slots = slots[~completed]
                if slots.size:
                    left.append(slots)
            self._requests = left
        # A batched env may have written the rows of its neighbours, too.
        instances = np.unique(np.concatenate(out) // self._envs_per_instance)
        return (instances[:, None] * self._envs_per_instance + np.arange(self._envs_per_instance)).ravel()

    def _is_due(self, completed: NDArray[np.bool_]) -> bool:
        """Returns whether to yield slots of a request; a first-ready pool may wait for any of them."""
        return bool(completed.any() if self._first_ready else completed.all())

    # --- Both threads ------------------------------------------------------------------------------

    def _wake_run(self) -> None:
        # `run` may wait in `_poll_channels`, or in the dispatch.
        self._wake_writer.wake()
        if self._arrays is not None:
            self._dispatch.notify_parent()

    def _vacate(self, worker: int) -> None:
        """Reports that a worker's process has ended, and drops it. The caller holds the lock."""
        worker_slot = self._worker_slots[worker]
        assert worker_slot.process is not None
        end = wire.ProcessEnd(*worker_slot.process.ending())
        self._messages.append(wire.WorkerMessage(worker, worker_slot.incarnation, end))
        channel, worker_slot.dead_socket = dead_socket()
        worker_slot.channel.break_off()  # wakes `_send_all`
        worker_slot.channel.replace(channel)
        worker_slot.process = None

    def _attach(self, attach: Attach, inherited: Payload | None) -> Attach:
        """Returns the message adapted to this node; creates the segment at the first call."""
        # This node may lack the native library, whatever the pool's own dispatch is.
        kind = choose_dispatch("portable" if attach.dispatch == "portable" else "auto")
        if self._arrays is None:
            self._segment = create_segment(attach.layout, sparse=True)
            arrays = attach_segment(self._segment, attach.layout)
            self._marks = Marks.of(arrays)
            self._requested = np.zeros_like(self._marks.requested)  # received requests, for `forward`
            self._wire = WireFormat(
                attach.spec, arrays, self._workers, requested=self._requested, answered=self._marks.completed
            )
            self.max_rows = max(packer.max_bytes for packer in self._wire.requests.values())
            self._first_ready = attach.spec.first_ready
            # The dispatch covers all workers of the pool; those of other hosts have no slots here.
            dead_channel, self._dead_socket = dead_socket()
            before, after = self._workers.start, len(self._marks.running) - self._workers.stop
            (first, _), (_, stop) = self._slices[0], self._slices[-1]
            slices = (*[(first, first)] * before, *self._slices, *[(stop, stop)] * after)
            own_channels = [each.channel for each in self._worker_slots.values()]
            channels = [*[dead_channel] * before, *own_channels, *[dead_channel] * after]
            self._dispatch = parent_end(kind, self._marks, slices=slices, channels=channels, spin_ns=0)
            self._arrays = arrays  # last: `run` uses the attributes above once it is set
        if inherited is not None:
            slots = self._wire.inheritance(attach.worker).unpack(inherited)
            self._marks.requested[slots] = self._marks.completed[slots]  # nothing is pending here yet
        replaces = attach.replaces
        if replaces is not None:
            replaces = replace(replaces, notices=int(self._marks.worker_notices[attach.worker, 0]))
        return replace(attach, dispatch=kind, spin_ns=0, replaces=replaces)


# --- Serving a pool --------------------------------------------------------------------------------------

_DIAL_INTERVAL = 1.0  # seconds between attempts to reach the pool

_clock = time.monotonic_ns

_logger = logging.getLogger("jaxvec")


def serve_pool(
    address: tuple[str, int],
    key: bytes,
    *,
    node: str,
    token: str = "",
    wait: float = 0,
    context: ssl.SSLContext | None = None,
) -> None:
    """Dials in to a pool, and serves its envs until it closes.

    Args:
        node: Name of this host in errors.
        token: Place that this host was started for; empty for any.
        wait: Seconds in which the pool may start to listen.
        context: Context that checks the pool's certificate; `None` for a pool without TLS.

    Raises:
        HostLostError: The pool needs other versions.
        OSError: The pool can't be reached, or lacks the key, or the connection was lost.
    """
    hello = {"node": node, "cores": usable_cores(), "token": token, **wire.versions()}
    deadline = time.monotonic() + wait
    place = f"{address[0]}:{address[1]}"
    _logger.info("connecting to %s", place)
    reported = False
    while True:
        try:
            connection = wire.dial(address, key, hello, context)
            break
        except OSError as error:  # its name and its route may appear when its machine starts
            missing = isinstance(error, (ConnectionRefusedError, TimeoutError, socket.gaierror))
            if not missing and error.errno not in (errno.EHOSTUNREACH, errno.ENETUNREACH):
                raise
            if time_left(deadline) <= 0:
                raise ConnectionError(f"no pool can be reached at {place}: {error}") from error
            if not reported:
                _logger.info("no pool can be reached yet: %s; tries go on for %g s", error, wait)
                reported = True
            time.sleep(_DIAL_INTERVAL)
    _logger.info("connected to %s; waiting until a pool needs this host", place)
    try:
        while True:
            name, args = pickle.loads(connection.receive()[1].data)
            if name == "reject":
                raise wire.HostLostError(args[0])
            if name == "close":
                _logger.info("the pool's process needs this host no more")
                return
            if name == "init":
                break
            connection.send(wire.MESSAGE, dumps(_clock()))
        _, slices, _ = args
        _logger.info("serving envs %d to %d", slices[0][0], slices[-1][1] - 1)
        serve(WorkerHost(*args), connection)
        _logger.info("the pool has closed")
    except (EOFError, OSError) as error:
        raise ConnectionError(f"the connection to {place} was lost: {error}") from error
    finally:
        connection.close()


def serve(host: WorkerHost, connection: wire.Connection) -> None:
    """Serves a host until its pool closes; raises `EOFError` or `OSError` if the connection is lost."""
    lost: list[Exception] = []
    receiver = threading.Thread(target=_serve_requests, args=(host, connection, lost), daemon=True)
    receiver.start()
    with suppress(OSError):  # the pool has closed, or is lost; the receiver knows
        for each in host.run():
            if isinstance(each, np.ndarray):
                connection.send(wire.ROWS, each.data)
            else:
                connection.send(wire.MESSAGE, dumps(each))
    connection.break_off()
    receiver.join()
    host.end_all()
    if lost:
        raise lost[0]


def _serve_requests(host: WorkerHost, connection: wire.Connection, lost: list[Exception]) -> None:
    try:
        while True:
            frame_type, data = connection.receive()
            if frame_type != wire.MESSAGE:
                host.call("move", Verb(frame_type - wire.ROWS), data)
                continue
            name, args = pickle.loads(data.data)
            if name == "close":
                break
            host.call(name, *args)
            connection.max_rows = host.max_rows
    except (EOFError, OSError) as error:
        lost.append(error)
    connection.break_off()
    # `host.run` waits for workers, not for the connection. `fail` wakes it; the next send then fails.
    host.fail("lost its connection")
