"""The pool's side of a host that runs some of its workers on another machine.

Data flow, in both directions:

    supervisor -> RemoteWorker -> HostLink -> Connection -> WorkerHost (host.py) -> worker process
    dispatch   -> Shipper      ---------------^

To the supervisor, a `RemoteWorker` is an ordinary worker: a process and a control socket. A `Shipper` is the
workers' end of the dispatch: it packs requested slots for the host and writes the results into the segment.
A `HostLink` owns one host, its connection and its workers; a `HostSource` provides the host. The pool and its
supervisor know nothing of hosts: a lost host is a group of dead workers, which are replaced as such.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxvec._backends.remote import wire
from jaxvec._backends.remote.wire_format import Payload, WireFormat
from jaxvec._dispatch.channel import WAKE, ParentChannel, WorkerChannel
from jaxvec._dispatch.move import verbs_of
from jaxvec._envs.failures import Report
from jaxvec._envs.slice_extension import Retirement
from jaxvec._memory.segment import Arrays, Layout, Marks, attach_segment
from jaxvec._options import PoolConfig
from jaxvec._util import dumps
from jaxvec._workers.base import Launcher, Process, Slices, worker_end
from jaxvec._workers.protocol import Attach, Reply

# --- Remote workers --------------------------------------------------------------------------------------
# They have no sockets in this process. All workers of a pool share one pipe, so that their number is not
# limited by file descriptors.


class WakePipe:
    """Pipe that holds one byte per unread message of a pool's remote workers."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)

    def fileno(self) -> int:
        return self._reader

    def put(self) -> None:
        os.write(self._writer, b"\0")

    def take(self) -> None:
        # The pipe can be empty: Ctrl-C may have interrupted `RemoteWorker.receive` after it took the byte
        # and before it took the message.
        with suppress(BlockingIOError):
            os.read(self._reader, 1)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class RemoteWorker(Process, ParentChannel):
    """A worker process at a host, and the pool's channel to it."""

    def __init__(self, link: HostLink, worker: int, incarnation: int, wake_pipe: WakePipe) -> None:
        self.worker = worker
        self.incarnation = incarnation  # 1 for the first process of this worker
        self._link = link
        self._wake_pipe = wake_pipe
        self.sending = threading.RLock()
        # Messages for the pool; `None` is the end of file. The link appends under its lock, and the one
        # thread that receives pops without it.
        self._inbox: deque[Any] = deque()
        self._has_ended = threading.Event()
        self._end = wire.ProcessEnd(None, "ended")

    # --- Process -----------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        return self._link.node and f"on {self._link.node}"

    @property
    def missing(self) -> str:
        return self._link.missing

    @property
    def ahead(self) -> int:
        return self._link.ahead

    def wait(self, timeout: float) -> bool:
        return self._has_ended.wait(timeout)

    def end(self) -> None:
        if not self.ended():
            self._link.end(self)

    def ending(self) -> tuple[int | None, str]:
        # The pool may read the end of file before `mark_ended` has set the event.
        self._has_ended.wait(timeout=1)
        return self._end.exitcode, f"{self.place} {self._end.ending}".lstrip()

    # --- ParentChannel -----------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._wake_pipe.fileno()

    def wake(self) -> None:
        self._link.wake()

    def send(self, message: Any, *, descriptors: Sequence[int] = (), **_: Any) -> None:
        with self.sending:
            self._link.send(self, message, descriptors)

    def readable(self) -> bool:
        return bool(self._inbox)

    def receive(self, deadline: float | None = None) -> Any:
        if not self._inbox:  # `deliver` has written the byte, but not yet appended the message
            return WAKE
        self._wake_pipe.take()
        message = self._inbox.popleft()
        if message is None:
            raise EOFError
        return message

    def shut(self) -> None:
        with suppress(EOFError):
            self._link.send(self, None, ())

    def replace(self, other: RemoteWorker) -> RemoteWorker:
        while self._inbox:  # discard unread messages together with their bytes in the pipe
            with suppress(EOFError):
                self.receive()
        return other

    # --- Called by the link, under its lock --------------------------------------------------------

    def deliver(self, message: Any) -> None:
        """Queues a message for the pool. `WAKE` is dropped if an unread message wakes the pool anyway."""
        if not self.ended() and not (message is WAKE and self._inbox):
            # Byte before message: a receiver that finds the message can always take a byte.
            self._wake_pipe.put()
            self._inbox.append(message)

    def mark_ended(self, end: wire.ProcessEnd) -> None:
        """Records the end of the process, once, and queues the end of file."""
        if not self.ended():
            self._end = end
            self.deliver(None)
            self._has_ended.set()


# --- Requested slots and results -------------------------------------------------------------------------
# A slot belongs to its worker while `completed` differs from `requested`; see `dispatch.py`. The shipper
# keeps a second `completed` array, in which a shipped request counts as completed. So it finds new requests
# while earlier ones are still running.


class _ShipperChannel(WorkerChannel):
    """Queue that replaces the control socket of the dispatch's worker end."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake, self.put = wake, self._messages.put

    def wake(self) -> None:
        self._wake()

    def readable(self) -> bool:
        return not self._messages.empty()

    def receive(self, deadline: float | None = None) -> Any:
        return self._messages.get()


class Shipper:
    """The workers' end of the dispatch, for all workers of one host.

    Its own thread ships requests over the link's connection, which must be open. Only the link's receiving
    thread calls `post`; the other methods are thread-safe.

    Attributes:
        max_rows: Length in bytes of the longest results, by the layout.
    """

    def __init__(self, link: HostLink, attach: Attach, arrays: Arrays) -> None:
        self._link = link
        first = link.workers[0]  # its doorbell is rung for all workers; see `HostLauncher.partition`
        self._marks = Marks.of(arrays)
        self._answered = np.zeros_like(self._marks.completed)  # the request that each received row answers
        self._format = WireFormat(
            attach.spec, arrays, link.workers, requested=self._marks.requested, answered=self._answered
        )
        self.max_rows = self._format.results.max_bytes
        # `_order` guards the next two arrays, and keeps requests in the order in which they were packed.
        self._order = threading.Lock()
        self._attached = np.zeros(len(self._answered), np.bool_)  # slots of workers that are attached
        self._shipped = self._marks.completed.copy()  # the latest request shipped for each slot
        slots = link.slices[0][0], link.slices[-1][1]
        self._slots = slice(*slots)
        self._channel = _ShipperChannel(link.wake_pool)
        end = partial(worker_end, attach.dispatch, worker=first, slots=slots, channel=self._channel)
        notices = int(self._marks.worker_notices[first, 0])
        self._requests = end(replace(self._marks, completed=self._shipped), spin_ns=0, notices=notices)
        self._results = end(self._marks, spin_ns=0, notices=notices)
        self._thread = _start_thread(self._run)

    def attach(self, worker: int, send: Callable[[Payload | None], Any], *, replaces: bool) -> None:
        """Sends `Attach` to a worker with `send`, and from then on ships the worker's slots.

        If the worker replaces one that was lost with its host, `send` gets the rows that the new one
        inherits.
        """
        slots = np.arange(*self._link.slices[worker - self._link.workers[0]])
        with self._order:
            if self._attached[slots].all():  # its predecessor ran at this host, which has all its rows
                send(None)
                return
            send(self._format.inheritance(worker).pack(slots) if replaces else None)
            self._attached[slots] = True
            self._shipped[slots] = self._marks.completed[slots]
        self.wake()

    def ship(self) -> None:
        """Ships all requests made so far, so that none arrives after a later message to its worker."""
        with self._order:
            requested = self._marks.read_requested(self._slots)  # other threads may add requests meanwhile
            due = np.flatnonzero(requested != self._shipped[self._slots])
            if not due.size:
                return
            requested, due = requested[due], self._slots.start + due
            self._shipped[due] = requested
            attached = self._attached[due]  # `attach` resets `_shipped` of the others
            for verb, packer in self._format.requests.items():
                slots = due[attached & (verbs_of(requested) == int(verb))]
                if slots.size:
                    self._link.ship(wire.ROWS + verb, packer.pack(slots).data)

    def wake(self, message: Any = WAKE) -> None:
        """Wakes the thread, which looks for requests, or ends if the message is `None`."""
        self._channel.put(message)
        self._requests.notify_worker()

    def post(self, rows: Payload) -> None:
        """Writes received rows. Completes each slot if its row answers the slot's latest request."""
        slots = self._format.results.unpack(rows)
        requested, completed = self._marks.requested[slots], self._marks.completed[slots]
        # All rows of a batched env arrive together, also those of its slots that may still be busy.
        finished = slots[(self._answered[slots] == requested) & (completed != requested)]
        if finished.size:
            self._results.post(finished)

    def notify_parent(self) -> None:
        """Makes the pool poll its control sockets at once."""
        self._results.notify_parent()

    def close(self) -> None:
        self.wake(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._requests.receive() is not None:
                self.ship()
        except BaseException as error:
            self._link.fail(error)


# --- Links to hosts --------------------------------------------------------------------------------------
# Three threads serve a host: one waits for it and then relays messages to its workers, one ships requests
# (`Shipper`), and one receives. None of them holds the GIL while it waits.

CHECK_INTERVAL = 0.2  # seconds between checks of a `HostSource` that a host is still needed
_END_TIMEOUT = 3.0  # seconds for a host to end one of its processes, before it counts as lost


class HostSource:
    """The provider of the host of some workers: one that dials in by itself.

    Args:
        owner: Object that keeps the listener open.

    Attributes:
        node: Name of the host's machine, if it is known before the host has dialled in.
        missing: Reason why no host has dialled in yet, with a remedy.
    """

    node = ""

    def __init__(self, listener: wire.Listener, missing: str, owner: object = None) -> None:
        self.listener, self.missing, self._owner = listener, missing, owner

    def start(self, check: Callable[[], None]) -> wire.Host:
        """Waits for a host, and calls `check` meanwhile, which raises if it is not needed any more.

        Raises `wire.HostLostError` or another error if there can be none.
        """
        while (host := self.listener.take("", CHECK_INTERVAL)) is None:
            check()
        return host


class HostLink:
    """A host that runs some neighbouring workers of a pool, from its start to its end.

    Args:
        predecessor: Lost link that this one replaces.

    Attributes:
        workers: Indices of the host's workers.
        slices: Slots `(first, stop)` of each of these workers.
        lost: Whether the host can't be used any more. It changes once, under `_lock`.
        ahead: Offset of the host's monotonic clock from this process's clock, in ns.
    """

    def __init__(
        self, launcher: HostLauncher, source: HostSource, workers: range, predecessor: HostLink | None
    ) -> None:
        self.lost = False
        self.ahead = 0
        self.workers = workers
        self.slices = launcher.slices[workers.start : workers.stop]
        self._launcher = launcher
        self._source = source
        self._node = ""  # once the host has dialled in
        self._connection: wire.Connection | None = None
        self._shipper: Shipper | None = None  # once a worker attaches
        self._remotes: dict[tuple[int, int], RemoteWorker] = {}  # by worker and incarnation
        self._to_relay: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Held while rows are written, messages are delivered, and remote workers are marked as ended. A
        # thread that holds it and finds `lost` unset may write: `lose` waits for the lock, and the link that
        # replaces this one starts only after `lose`.
        self._lock = threading.Lock()
        self._receiver: threading.Thread | None = None
        after = None if predecessor is None else predecessor._relayer
        self._relayer = _start_thread(partial(self._run, after))

    @property
    def node(self) -> str:
        """Name of the host's machine; empty until it is known."""
        return self._node or self._source.node

    @property
    def missing(self) -> str:
        """Reason why no host has dialled in yet, with a remedy."""
        return "" if self._node else self._source.missing

    # --- Called by the supervisor and the launcher, from any thread --------------------------------

    def launch(self, worker: int, incarnation: int) -> RemoteWorker:
        remote = RemoteWorker(self, worker, incarnation, self._launcher.wake_pipe)
        with self._lock:
            self._remotes[worker, incarnation] = remote
            if self.lost:
                remote.mark_ended(wire.ProcessEnd(None, "ended"))
        self._to_relay.put(lambda: self._call("launch", worker, incarnation))
        return remote

    def send(self, remote: RemoteWorker, message: Any, descriptors: Sequence[int]) -> None:
        """Relays a message; `None` closes the control socket. Raises `EOFError` if the process has ended."""
        pickled = None if message is None else dumps(message)  # now: the caller may change it later
        with self._lock:
            if remote.ended():
                raise EOFError
            if isinstance(message, Attach) and self._shipper is None:
                arrays = self._launcher.map_segment(descriptors[0], message.layout)
                self._shipper = Shipper(self, message, arrays)
                assert self._connection is not None
                self._connection.max_rows = self._shipper.max_rows
        self._to_relay.put(partial(self._relay, remote, message, pickled))

    def wake(self) -> None:
        """Ships requested slots soon."""
        if self._shipper is not None:
            self._shipper.wake()

    def ship(self, frame_type: int, data: bytes | memoryview) -> None:
        """Sends a frame. A failure is no error: the receiving thread finds the end of the host, too."""
        assert self._connection is not None
        with suppress(OSError):
            self._connection.send(frame_type, data)

    def end(self, remote: RemoteWorker) -> None:
        """Ends a worker process. If that takes too long, ends the whole host."""
        if self._receiver is not None and not self.lost:  # without a receiver, the host can't answer yet
            # In a thread: it may have to wait behind a long message.
            _start_thread(partial(self._call, "end", remote.worker, remote.incarnation))
            if remote.wait(_END_TIMEOUT):
                return
        self.lose(f"did not end its process within {_END_TIMEOUT:g} s")

    def lose(self, why: str, *, closes: bool = False) -> None:
        """Ends the host and all its workers. Once this returns, the link writes no more rows.

        `why` continues a sentence that starts with the workers' names. With `closes`, the host learns that
        its pool closes.
        """
        with self._lock:
            if self.lost:
                return
            self.lost = True
            for remote in self._remotes.values():
                remote.mark_ended(wire.ProcessEnd(None, why))
        self._to_relay.put(lambda: None)  # wakes the relaying thread, which sees `lost`
        if self._connection is not None:
            if closes:  # in a thread, as the host may read nothing
                _start_thread(self._connection.say_goodbye).join(timeout=1)
            self._connection.break_off()

    def close(self, timeout: float) -> None:
        """Ends the host and waits up to `timeout` seconds for each thread. A lost machine can block them."""
        self.lose("was ended", closes=True)
        for thread in (self._relayer, self._receiver):
            if thread is not None:
                thread.join(timeout)

    # --- The thread that waits for the host and relays messages ------------------------------------

    def _run(self, after: threading.Thread | None) -> None:
        try:
            if after is not None:  # the predecessor might still start a host, on our resources
                after.join()
            host = self._source.start(self._check_needed)
            with self._lock:
                self._node, self._connection = host.node, host.connection
                if self.lost:  # `lose` ran before there was a connection to break off
                    host.connection.break_off()
            self.ahead = _measure_clock_offset(host.connection)
            self._call("init", self.workers, self.slices, self._launcher.config)
            self._receiver = _start_thread(partial(self._receive_all, host.connection))
            while True:
                relay = self._to_relay.get()
                if self.lost:
                    return
                relay()
        except BaseException as error:  # any error must reach the pool
            self.fail(error)
        finally:
            if self._shipper is not None:
                self._shipper.close()
            if self._receiver is None and self._connection is not None:
                self._connection.close()

    def _check_needed(self) -> None:
        if self.lost:
            raise wire.HostLostError("was ended")

    def _call(self, name: str, *args: Any) -> None:
        """Calls a method of the `WorkerHost`, after all earlier calls and requests."""
        self.ship(wire.MESSAGE, dumps((name, args)))

    def _relay(self, remote: RemoteWorker, message: Any, pickled: bytes | None) -> None:
        send = partial(self._call, "send", remote.worker, remote.incarnation, pickled)
        if isinstance(message, Attach):
            assert self._shipper is not None
            self._shipper.attach(remote.worker, send, replaces=message.replaces is not None)
            return
        if self._shipper is not None:
            self._shipper.ship()
        send()

    # --- The thread that receives ------------------------------------------------------------------

    def _receive_all(self, connection: wire.Connection) -> None:
        try:
            while True:
                frame_type, data = connection.receive()
                item = pickle.loads(data.data) if frame_type == wire.MESSAGE else data
                if isinstance(item, wire.HostLostError):
                    raise item
                with self._lock:
                    if self.lost:
                        continue
                    if isinstance(item, wire.WorkerMessage):
                        self._receive(item)
                    else:
                        assert self._shipper is not None
                        self._shipper.post(item)
        except BaseException as error:
            self.fail(error)
        finally:
            connection.close()

    def _receive(self, received: wire.WorkerMessage) -> None:
        """Delivers a worker's message; under the lock."""
        remote = self._remotes[received.worker, received.incarnation]
        message = received.message
        if isinstance(message, wire.ProcessEnd):
            remote.mark_ended(message)
            return
        if isinstance(message, Report):
            message = self._name_node(message)
        elif isinstance(message, Reply) and message.failure is not None:
            message = replace(message, failure=self._name_node(message.failure))
        remote.deliver(message)
        if isinstance(message, Report | Retirement) and self._shipper is not None:
            self._shipper.notify_parent()

    def _name_node(self, report: Report) -> Report:
        hint = "; install it there" if report.kind in ("ModuleNotFoundError", "ImportError") else ""
        return replace(report, message=f"{report.message} (on {self.node}{hint})")

    def wake_pool(self) -> None:
        """Wakes the pool through the channel of any live worker; under the lock."""
        for remote in self._remotes.values():
            if not remote.ended():
                remote.deliver(WAKE)
                break

    # --- Any thread --------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        if isinstance(error, EOFError | OSError) and not self.lost:
            error = wire.HostLostError(f"was lost: its connection ended: {error}")
        if isinstance(error, wire.HostLostError):
            self.lose(str(error))
        else:
            self.lose(f"failed: {type(error).__name__}: {error}")


def _measure_clock_offset(connection: wire.Connection) -> int:
    """Returns a host's monotonic clock minus this process's, in ns, to within half a round trip."""
    measured: list[tuple[int, int]] = []
    for _ in range(5):  # the fastest round trip gives the smallest error
        start = time.monotonic_ns()
        connection.send(wire.MESSAGE, pickle.dumps(("clock", ())))
        remote = pickle.loads(connection.receive()[1].data)
        stop = time.monotonic_ns()
        measured.append((stop - start, remote - (start + stop) // 2))
    return min(measured)[1]


def _start_thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


# --- The launcher of workers at hosts --------------------------------------------------------------------


@dataclass(eq=False)
class HostLauncher(Launcher):
    """The launcher of the workers of a pool at hosts."""

    at_sockets = True

    groups: Sequence[range]  # workers of each host
    slices: Slices
    config: PoolConfig
    sources: Sequence[HostSource]  # one for each host
    on_close: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.config = self.config.for_workers()
        self.wake_pipe: WakePipe = WakePipe()
        self._arrays: Arrays | None = None  # of the pool's segment, once a worker attaches
        self._links: dict[int, HostLink] = {}  # latest link of each host, by number
        self._incarnations: Counter[int] = Counter()  # by worker
        self._closed = False

    def partition(self, slices: Slices) -> Slices:
        # Ring only the first worker's doorbell for all slots of a host: its `Shipper` waits for that one.
        parts: list[tuple[int, int]] = []
        for group in self.groups:
            stop = slices[group[-1]][1]
            parts += [(slices[group[0]][0], stop), *[(stop, stop)] * (len(group) - 1)]
        return tuple(parts)

    def launch(self, worker: int) -> tuple[RemoteWorker, RemoteWorker]:
        if self._closed:  # by another thread
            raise ConnectionError("the pool is closed")
        self._incarnations[worker] += 1
        number, group = next(each for each in enumerate(self.groups) if worker in each[1])
        link = self._links.get(number)
        if link is None or link.lost:
            link = self._links[number] = HostLink(self, self.sources[number], group, link)
        remote = link.launch(worker, self._incarnations[worker])
        return remote, remote

    def close(self) -> None:
        self._closed = True
        for link in [*self._links.values()]:
            link.close(timeout=1)
        self._links.clear()
        self._arrays = None
        self.wake_pipe.close()
        self.on_close()

    def map_segment(self, descriptor: int, layout: Layout) -> Arrays:
        """Maps the pool's segment, once for all links, because each mapping holds a descriptor."""
        if self._arrays is None:
            self._arrays = attach_segment(descriptor, layout)
        return self._arrays
