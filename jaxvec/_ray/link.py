"""The driver's side of a Ray actor that runs some of a pool's workers.

Data flow, in both directions:

    supervisor -> RemoteWorker -> ActorLink -> Wire -> ActorHost (actor.py) -> worker process
    dispatch   -> Shipper      ----------------^

To the supervisor, a `RemoteWorker` is an ordinary worker: a process and a control socket. A `Shipper` is the
workers' end of the dispatch: it packs requested slots for the actor and writes the results into the segment.
An `ActorLink` owns one actor, its wire and its workers. The formats on the wire are in `wire.py`.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import queue
import secrets
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from jaxvec._config import PoolConfig, Ray
from jaxvec._dispatch.channel import WAKE, ParentChannel, WorkerChannel
from jaxvec._dispatch.move import Verb, verbs_of
from jaxvec._envs.failures import Report
from jaxvec._memory.segment import Arrays, Layout, Marks
from jaxvec._ray import nodes
from jaxvec._ray.actor import ActorHost
from jaxvec._ray.wire import (
    KEY_BYTES,
    MESSAGE,
    Connection,
    HostFailure,
    Listener,
    Payload,
    ProcessEnd,
    WireFormat,
    WorkerMessage,
    connect_to_actor,
)
from jaxvec._util import dumps
from jaxvec._workers.base import Process, Slices, worker_end
from jaxvec._workers.worker import Attach, Reply

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
    """A worker process in an actor, and the pool's channel to it."""

    def __init__(self, link: ActorLink, worker: int, incarnation: int, wake_pipe: WakePipe) -> None:
        self.worker = worker
        self.incarnation = incarnation  # 1 for the first process of this worker
        self._link = link
        self._wake_pipe = wake_pipe
        self.sending = threading.RLock()
        # Messages for the pool; `None` is the end of file. The link appends under its lock, and the one
        # thread that receives pops without it.
        self._inbox: deque[Any] = deque()
        self._has_ended = threading.Event()
        self._end = ProcessEnd(None, "ended")

    # --- Process -----------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        return f"on {self._link.node}"

    @property
    def ahead(self) -> int:
        return self._link.ahead

    def ended(self) -> bool:
        return self._has_ended.is_set()

    def wait(self, timeout: float) -> bool:
        return self._has_ended.wait(timeout)

    def end(self) -> None:
        if not self.ended():
            self._link.end(self)

    def ending(self) -> tuple[int | None, str]:
        # The pool may read the end of file before `mark_ended` has set the event.
        self._has_ended.wait(timeout=1)
        return self._end.exitcode, f"{self.place} {self._end.ending}"

    # --- ParentChannel -----------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._wake_pipe.fileno()

    def wake(self) -> None:
        self._link.wake()

    def send(
        self,
        message: Any,
        *,
        deadline: float | None = None,
        descriptors: Sequence[int] = (),
        notify: Callable[[], None] = lambda: None,
    ) -> None:
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

    def mark_ended(self, end: ProcessEnd) -> None:
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
        message = self._messages.get()
        if message is None:
            raise EOFError
        return message


class Shipper:
    """The workers' end of the dispatch, for all workers of one actor.

    Its own thread ships requests over the link's wire, which must be open. Only the link's receiving thread
    calls `post`; the other methods are thread-safe.
    """

    def __init__(self, link: ActorLink, attach: Attach, arrays: Arrays) -> None:
        self._link = link
        first = link.workers[0]  # its doorbell is rung for all workers; see `RayLauncher.partition`
        self._marks = Marks.of(arrays)
        self._answered = np.zeros_like(self._marks.completed)  # the request that each received row answers
        self._format = WireFormat(
            attach.spec, arrays, link.workers, requested=self._marks.requested, answered=self._answered
        )
        # `_order` guards the next two arrays, and keeps requests in the order in which they were packed.
        self._order = threading.Lock()
        self._attached = np.zeros(len(self._answered), np.bool_)  # slots of workers that are attached
        self._shipped = self._marks.completed.copy()  # the latest request shipped for each slot
        self._slots = slice(link.slices[0][0], link.slices[-1][1])
        self._channel = _ShipperChannel(link.wake_pool)
        self._requests, self._results = (
            worker_end(
                attach.dispatch,
                marks,
                worker=first,
                slots=(self._slots.start, self._slots.stop),
                channel=self._channel,
                spin_ns=0,
                notices=int(marks.worker_notices[first, 0]),
            )
            for marks in (replace(self._marks, completed=self._shipped), self._marks)
        )
        self._thread = _start_thread(self._run)

    def attach(self, worker: int, send: Callable[[Payload | None], Any], *, replaces: bool) -> None:
        """Sends `Attach` to a worker with `send`, and from then on ships the worker's slots.

        If the worker replaces one that was lost with its actor, `send` gets the rows that the new one
        inherits.
        """
        slots = np.arange(*self._link.slices[worker - self._link.workers[0]])
        with self._order:
            if self._attached[slots].all():  # its predecessor ran in this actor, which has all its rows
                send(None)
                return
            send(self._format.inheritance(worker).pack(slots) if replaces else None)
            self._attached[slots] = True
            self._shipped[slots] = self._marks.completed[slots]
        self._channel.put("attached")  # wakes the thread, which looks for requests of these slots
        self._requests.notify_worker()

    def ship(self) -> None:
        """Ships all requests made so far, so that none arrives after a later message to its worker."""
        with self._order:
            requested = self._marks.requested[self._slots].copy()  # other threads may add requests meanwhile
            due = np.flatnonzero(requested != self._shipped[self._slots])
            if not due.size:
                return
            requested, due = requested[due], self._slots.start + due
            self._shipped[due] = requested
            attached = self._attached[due]  # `attach` resets `_shipped` of the others
            assert self._link.wire is not None
            for verb, packer in self._format.requests.items():
                slots = due[attached & (verbs_of(requested) == int(verb))]
                if slots.size:
                    self._link.wire.move(verb, packer.pack(slots))

    def wake(self) -> None:
        self._channel.put(WAKE)

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
        self._channel.put(None)
        self._requests.notify_worker()
        self._thread.join()

    def _run(self) -> None:
        try:
            with suppress(EOFError):  # `close`
                while True:
                    self._requests.receive()
                    self.ship()
        except BaseException as error:
            self._link.fail(error)


# --- Wires: a TCP connection, or Ray's calls and streams -------------------------------------------------
# A Ray call and its answer cost a few milliseconds of Python, which a TCP connection avoids. Ray needs no
# extra port, which a firewall might block.

_CAUSE_TIMEOUT = 2.0  # seconds in which Ray may find out why an actor's connection ended
_ROWS = 1  # frame type of results; the type of a request is `_ROWS + verb`

_logger = logging.getLogger("jaxvec")

Received: TypeAlias = Payload | WorkerMessage | HostFailure


class Wire(ABC):
    """The driver's end of a wire. Any thread may send; one thread receives."""

    @abstractmethod
    def call(self, name: str, *args: Any) -> None:
        """Calls a method of the actor's host, after all earlier calls and requests."""

    @abstractmethod
    def move(self, verb: Verb, request: Payload) -> None:
        """Sends a request for slots. The caller may reuse the buffer afterwards."""

    @abstractmethod
    def receive(self) -> Iterator[Received]:
        """Yields results and messages; rows are valid until the next item. Raises the loss of the actor."""

    def break_off(self) -> None:  # noqa: B027 - a default
        """Ends `receive`, from any thread, on a wire where something other than the actor's end can do so."""

    def close(self) -> None:  # noqa: B027 - a default
        """Releases resources. Called by the receiving thread at its end."""


class RayWire(Wire):
    """Calls of the actor's methods, and a streaming generator for results."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def call(self, name: str, *args: Any) -> None:
        self._actor.call.remote(name, *args)

    def move(self, verb: Verb, request: Payload) -> None:
        self.call("move", verb, request)

    def receive(self) -> Iterator[Received]:
        for reference in self._actor.run.options(num_returns="streaming").remote():
            yield self._ray.get(reference)


class TcpWire(Wire):
    """A TCP connection to the actor."""

    def __init__(self, ray: Any, connection: Connection, serving: Any) -> None:
        self._ray = ray
        self._connection = connection
        self._serving = serving  # the actor's pending call of `serve`, which fails if the actor is lost
        self._broken_off = False

    # A send that fails is no error: the receiving thread sees the end, too, and asks Ray for the cause.
    def call(self, name: str, *args: Any) -> None:
        with suppress(OSError):
            self._connection.send(MESSAGE, dumps((name, args)))

    def move(self, verb: Verb, request: Payload) -> None:
        with suppress(OSError):
            self._connection.send(_ROWS + verb, request.data)

    def receive(self) -> Iterator[Received]:
        while True:
            try:
                frame_type, data = self._connection.receive()
            except (EOFError, OSError) as error:
                self._raise_cause()
                raise nodes.ActorLostError(f"was lost: its connection ended: {error}") from error
            yield pickle.loads(data.data) if frame_type == MESSAGE else data

    def break_off(self) -> None:
        self._broken_off = True
        self._connection.break_off()

    def close(self) -> None:
        self._connection.close()

    def _raise_cause(self) -> None:
        """Raises Ray's error for the end of the actor, if Ray learns of it in time."""
        if self._broken_off or not self._ray.is_initialized():  # `ray.wait` would start another cluster
            return
        if self._ray.wait([self._serving], timeout=_CAUSE_TIMEOUT)[0]:
            self._ray.get(self._serving)


def open_wire(ray: Any, actor: Any, data: str) -> Wire:
    """Opens a wire to an actor after its `init`; `data` is the option of `jaxvec.Ray`.

    Raises:
        ActorLostError: `"tcp"` can't reach the actor, or no file descriptors are left.
        RayError: The actor is lost.
    """
    if data == "ray":
        return RayWire(ray, actor)
    key = secrets.token_bytes(KEY_BYTES)
    where = "a port of its own"
    try:
        address = ray.get(actor.listen.remote(key))
        where = f"{address[0]}:{address[1]}"
        serving = actor.serve.remote()
        return TcpWire(ray, connect_to_actor(address, key), serving)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise nodes.TooManyFilesError from error
        why = f"can't be reached at {where}: {error}"
    if data == "tcp":
        raise nodes.ActorLostError(
            f'{why}; jaxvec.Ray(data="tcp") needs TCP connections from this machine to free ports of the '
            'nodes; allow them in the firewall, or use data="ray"'
        )
    _logger.info("using Ray instead of TCP for the data of one actor: it %s", why)
    return RayWire(ray, actor)


def serve(host: ActorHost, listener: Listener) -> None:
    """Serves a host in its actor until the connection ends, or returns if no pool connects in time."""
    try:
        connection = listener.accept()
    except TimeoutError:
        return  # the pool uses Ray's stream instead
    receiver = threading.Thread(target=_serve_requests, args=(host, connection), daemon=True)
    receiver.start()
    with suppress(OSError):  # the pool has ended, or is lost
        for each in host.run():
            if isinstance(each, np.ndarray):
                connection.send(_ROWS, each.data)
            else:
                connection.send(MESSAGE, dumps(each))
    connection.break_off()
    receiver.join()


def _serve_requests(host: ActorHost, connection: Connection) -> None:
    try:
        while True:
            frame_type, data = connection.receive()
            if frame_type == MESSAGE:
                name, args = pickle.loads(data.data)
                host.call(name, *args)
            else:
                host.call("move", Verb(frame_type - _ROWS), data)
    except (EOFError, OSError) as error:
        connection.break_off()
        # `host.run` waits for workers, not for the connection. `fail` wakes it; the next send then fails.
        host.fail(f"lost its connection: {error}")
    finally:
        connection.close()


# --- Links to actors -------------------------------------------------------------------------------------
# Three threads serve an actor: one starts it and then relays messages to its workers, one ships requests
# (`Shipper`), and one receives. None of them holds the GIL while it waits.

_PLACE_CHECK_INTERVAL = 1.0  # seconds between checks that an actor can still be placed
_END_TIMEOUT = 3.0  # seconds for an actor to end one of its processes, before it counts as lost


class ActorLink:
    """An actor that runs some neighbouring workers of a pool, from its start to its end.

    Args:
        make_actor: Starts an actor and returns its handle.
        map_segment: Maps the pool's segment, given its file descriptor and layout.
        dead_nodes: Ids of the nodes that were dead when the pool was made.
        predecessor: Lost link that this one replaces.

    Attributes:
        workers: Indices of the actor's workers.
        slices: Slots `(first, stop)` of each of these workers.
        wire: Wire to the actor, once the actor has started.
        node: Description of the actor's node.
        lost: Whether the actor can't be used any more. It changes once, under `_lock`.
        ahead: Offset of the actor's monotonic clock from this process's clock, in ns.
    """

    def __init__(
        self,
        ray: Any,
        make_actor: Callable[[], Any],
        *,
        options: Ray,
        placement: nodes.Placement,
        workers: range,
        slices: Slices,
        config: PoolConfig,
        wake_pipe: WakePipe,
        map_segment: Callable[[int, Layout], Arrays],
        dead_nodes: Set[str],
        predecessor: ActorLink | None,
    ) -> None:
        self.node = "no node yet"
        self.lost = False
        self.ahead = 0
        self._ray = ray
        self._make_actor = make_actor
        self._options = options
        self._placement = placement
        self.workers = workers
        self.slices = slices
        self._config = config
        self._wake_pipe = wake_pipe
        self._map_segment = map_segment
        self._dead_nodes = dead_nodes
        self._predecessor = predecessor
        self._actor: Any = None
        self.wire: Wire | None = None
        self._shipper: Shipper | None = None  # once a worker attaches
        self._remotes: dict[tuple[int, int], RemoteWorker] = {}  # by worker and incarnation
        self._to_relay: queue.SimpleQueue[Callable[[Wire], None]] = queue.SimpleQueue()
        # Held while rows are written, messages are delivered, and remote workers are marked as ended. A
        # thread that holds it and finds `lost` unset may write: `lose` waits for the lock, and the link that
        # replaces this one starts only after `lose`.
        self._lock = threading.Lock()
        self._receiver: threading.Thread | None = None
        self._relayer = _start_thread(self._run)

    # --- Called by the supervisor and the launcher, from any thread --------------------------------

    def launch(self, worker: int, incarnation: int) -> RemoteWorker:
        remote = RemoteWorker(self, worker, incarnation, self._wake_pipe)
        with self._lock:
            self._remotes[worker, incarnation] = remote
            if self.lost:
                remote.mark_ended(ProcessEnd(None, "ended"))
        self._to_relay.put(lambda wire: wire.call("launch", worker, incarnation))
        return remote

    def send(self, remote: RemoteWorker, message: Any, descriptors: Sequence[int]) -> None:
        """Relays a message; `None` closes the control socket. Raises `EOFError` if the process has ended."""
        pickled = None if message is None else dumps(message)  # now: the caller may change it later
        with self._lock:
            if remote.ended():
                raise EOFError
            if isinstance(message, Attach) and self._shipper is None:
                self._shipper = Shipper(self, message, self._map_segment(descriptors[0], message.layout))
        self._to_relay.put(partial(self._relay, remote, message, pickled))

    def wake(self) -> None:
        """Ships requested slots soon."""
        if self._shipper is not None:
            self._shipper.wake()

    def end(self, remote: RemoteWorker) -> None:
        """Ends a worker process. If that takes too long, ends the whole actor."""
        if self._receiver is not None and not self.lost:  # without a receiver, the actor can't answer yet
            with suppress(Exception):
                # By a Ray call: on the wire it would wait behind a long message.
                reference = self._actor.call.remote("end", remote.worker, remote.incarnation)
                done, _ = self._ray.wait([reference], timeout=_END_TIMEOUT)
                if done:
                    with self._lock:
                        remote.mark_ended(ProcessEnd(None, "was ended"))
                    return
        self.lose(f"did not end its process within {_END_TIMEOUT:g} s")

    def lose(self, why: str, *, reachable: bool = True) -> None:
        """Ends the actor and all its workers. Once this returns, the link writes no more rows.

        `why` continues a sentence that starts with the workers' names. `reachable` is False if Ray can't end
        the actor.
        """
        with self._lock:
            if self.lost:
                return
            self.lost = True
            for remote in self._remotes.values():
                remote.mark_ended(ProcessEnd(None, why))
        self._to_relay.put(lambda _: None)  # wakes the relaying thread, which sees `lost`
        if self.wire is not None:
            self.wire.break_off()
        # `ray.kill` blocks if Ray's head node is gone, and starts another cluster if Ray was shut down.
        if self._actor is not None and reachable and self._ray.is_initialized():
            _start_thread(self._kill).join(timeout=1)  # the head may be gone without our knowing

    def close(self, timeout: float) -> None:
        """Ends the actor and waits up to `timeout` seconds for each thread. A lost node can block them."""
        self.lose("was ended")
        for thread in (self._relayer, self._receiver):
            if thread is not None:
                thread.join(timeout)

    # --- The thread that starts the actor and relays messages --------------------------------------

    def _run(self) -> None:
        try:
            if self._predecessor is not None:  # it might still start an actor, on our resources
                self._predecessor._relayer.join()
                self._predecessor = None
            self._start_actor()
            self.ahead = nodes.measure_clock_offset(lambda: self._ray.get(self._actor.clock.remote()))
            self._ray.get(self._actor.init.remote(self.workers, self.slices, self._config))
            wire = open_wire(self._ray, self._actor, self._options.data)
            with self._lock:
                self.wire = wire
                if self.lost:  # `lose` ran before there was a wire to break off
                    wire.break_off()
            self._receiver = _start_thread(partial(self._receive_all, wire))
            while True:
                relay = self._to_relay.get()
                if self.lost:
                    return
                relay(wire)
        except BaseException as error:  # any error must reach the pool
            self.fail(error)
        finally:
            if self._shipper is not None:
                self._shipper.close()

    def _start_actor(self) -> None:
        """Starts the actor, and starts it again if its node dies before the actor answers.

        Ray places actors on a dead node until it notices the death, seconds later. If that counted as
        another fault, one dead node could use up all restarts.
        """
        while True:
            self._actor = self._make_actor()
            if self.lost:  # `lose` ran before there was an actor to kill
                self._kill()
                raise nodes.ActorLostError("was ended")
            try:
                # Retried, since until Ray notices the death, it reports "unavailable" and lists no dead node.
                identity = self._wait_for(self._actor.identify.options(max_task_retries=-1).remote())
            except self._ray.exceptions.RayActorError:
                known, self._dead_nodes = self._dead_nodes, nodes.find_dead_nodes(self._ray)
                if self.lost or self._dead_nodes <= known:
                    raise
            else:
                break
        self.node = identity["node"]
        nodes.check_node_identity(identity)

    def _wait_for(self, reference: Any) -> Any:
        """Waits for the actor's first answer for as long as Ray may still place the actor."""
        while not self._ray.wait([reference], timeout=_PLACE_CHECK_INTERVAL)[0]:
            needs = self._options.of_actor(len(self.workers))
            self.node = f"no node yet, as Ray has not started its actor, which needs {needs},"
            if self.lost:
                raise nodes.ActorLostError("was ended")
            if why := self._placement.loss():
                raise nodes.ActorLostError(f"was not started: {why}")
            nodes.check_descriptors()
        return self._ray.get(reference)

    def _relay(self, remote: RemoteWorker, message: Any, pickled: bytes | None, wire: Wire) -> None:
        send = partial(wire.call, "send", remote.worker, remote.incarnation, pickled)
        if isinstance(message, Attach):
            assert self._shipper is not None
            self._shipper.attach(remote.worker, send, replaces=message.replaces is not None)
            return
        if self._shipper is not None:
            self._shipper.ship()
        send()

    # --- The thread that receives ------------------------------------------------------------------

    def _receive_all(self, wire: Wire) -> None:
        try:
            for item in wire.receive():
                if isinstance(item, HostFailure):
                    raise nodes.ActorLostError(item.why)
                with self._lock:
                    if self.lost:
                        continue
                    if isinstance(item, WorkerMessage):
                        self._receive(item)
                    else:
                        assert self._shipper is not None
                        self._shipper.post(item)
        except BaseException as error:
            self.fail(error)
        finally:
            wire.close()

    def _receive(self, received: WorkerMessage) -> None:
        """Delivers a worker's message; under the lock."""
        remote = self._remotes[received.worker, received.incarnation]
        message = received.message
        if isinstance(message, ProcessEnd):
            remote.mark_ended(message)
            return
        if isinstance(message, Report):
            message = nodes.add_node_to_report(message, self.node)
        elif isinstance(message, Reply) and message.failure is not None:
            message = replace(message, failure=nodes.add_node_to_report(message.failure, self.node))
        remote.deliver(message)
        if isinstance(message, Report) and self._shipper is not None:
            self._shipper.notify_parent()

    def wake_pool(self) -> None:
        """Wakes the pool through the channel of any live worker; under the lock."""
        for remote in self._remotes.values():
            if not remote.ended():
                remote.deliver(WAKE)
                break

    # --- Any thread --------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        if isinstance(error, nodes.ActorLostError):
            self.lose(str(error))
        elif isinstance(error, self._ray.exceptions.RayError):
            self.lose(nodes.describe_loss(error))
        else:
            self.lose(f"failed: {type(error).__name__}: {error}")

    def _kill(self) -> None:
        with suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)


def _start_thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread
