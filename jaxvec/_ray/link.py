"""The driver's side of an actor: remote workers, rows that travel, and the link that carries both."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from jaxvec._config import PoolConfig
from jaxvec._dispatch.channel import WAKE, ParentChannel, WorkerChannel
from jaxvec._dispatch.move import Verb, verbs_of
from jaxvec._envs.failures import Report
from jaxvec._memory.segment import Arrays, Layout, Marks
from jaxvec._ray.actor import ActorHost
from jaxvec._ray.nodes import (
    ActorLostError,
    Placement,
    TooManyFilesError,
    check_alike,
    check_descriptors,
    clock_offset,
    describe_loss,
    find_dead_nodes,
    on_node,
)
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

# ----------------------------------------------------------------------------------------------------------
# A worker process in a Ray actor, as the pool's supervisor sees it: a process and a channel in one.
#
# It has no socket here. What it is told goes with its number through its actor's link; what it says waits
# in memory until the pool hears it. One pipe wakes the pool for all its workers.
# ----------------------------------------------------------------------------------------------------------


class WakePipe:
    """Is readable while workers of the pool have said something that it has not heard: a byte for each."""

    def __init__(self) -> None:
        """Makes the pipe; raises `OSError` if no descriptors are left."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)

    def fileno(self) -> int:
        return self._reader

    def put(self) -> None:
        os.write(self._writer, b"\0")

    def take(self) -> None:
        with suppress(BlockingIOError):  # Ctrl-C came between this and the message once
            os.read(self._reader, 1)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class RemoteWorker(Process, ParentChannel):
    """A worker process in an actor, and the pool's channel to it."""

    def __init__(self, link: ActorLink, worker: int, incarnation: int, wake_pipe: WakePipe) -> None:
        """Names a process that is about to start.

        Args:
            link: to the actor.
            worker: in whose place it is.
            incarnation: how many were there before.
            wake_pipe: of the pool.
        """
        self.worker = worker
        self.incarnation = incarnation
        self._link = link
        self._wake_pipe = wake_pipe
        self.sending = threading.RLock()
        self._said: deque[Any] = deque()  # what the pool has not heard; `None` is the end of file
        self._gone = threading.Event()
        self._ended = ProcessEnd(None, "ended")

    # --- the process -------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        return f"on {self._link.node}"

    @property
    def ahead(self) -> int:
        return self._link.ahead

    def ended(self) -> bool:
        return self._gone.is_set()

    def wait(self, timeout: float) -> bool:
        return self._gone.wait(timeout)

    def end(self) -> None:
        if not self._gone.is_set():
            self._link.end(self)

    def ending(self) -> tuple[int | None, str]:
        self._gone.wait(timeout=1)
        return self._ended.exitcode, f"{self.place} {self._ended.ending}"

    # --- the channel -------------------------------------------------------------------------------

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
            self._link.tell(self, message, descriptors)

    def readable(self) -> bool:
        return bool(self._said)

    def receive(self, deadline: float | None = None) -> Any:
        if not self._said:  # it is on its way
            return WAKE
        self._wake_pipe.take()
        message = self._said.popleft()
        if message is None:
            raise EOFError
        return message

    def shut(self) -> None:
        with suppress(EOFError):
            self._link.tell(self, None, ())

    def replace(self, other: RemoteWorker) -> RemoteWorker:
        while self._said:  # nobody hears it any more
            with suppress(EOFError):
                self.receive()
        return other

    # --- what the link says for it, under its lock -------------------------------------------------

    def say(self, message: Any) -> None:
        """Lets the pool hear a message, or `WAKE`, which is said by whatever else it has yet to hear."""
        if not self._gone.is_set() and not (message is WAKE and self._said):
            self._wake_pipe.put()  # first: who finds the message takes a byte
            self._said.append(message)

    def mark_ended(self, ended: ProcessEnd) -> None:
        """Notes its end, the first that is heard of, which the pool hears as an end of file."""
        if not self._gone.is_set():
            self._ended = ended
            self.say(None)
            self._gone.set()


# ----------------------------------------------------------------------------------------------------------
# Ships slots that the pool asks for to their Ray actor, and writes the rows that come back.
#
# A slot belongs to its worker while `completed` differs from `requested`, see `dispatch.py`. To know what
# is shipped already, there is another `completed` here, in which that counts as completed: so several
# requests can be on their way.
# ----------------------------------------------------------------------------------------------------------


class _WorkersEnd(WorkerChannel):
    """The queue that a hand-off of all the actor's workers has for a control socket."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._come: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake, self.put = wake, self._come.put

    def wake(self) -> None:
        self._wake()

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
            worker_end(
                attach.dispatch,
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


# ----------------------------------------------------------------------------------------------------------
# How a pool's process and an actor talk: by a TCP connection of their own, or by Ray's calls and stream.
#
# Ray takes some milliseconds of Python for a call and its answer, and a connection does not. But it needs
# no port, which a firewall may close.
# ----------------------------------------------------------------------------------------------------------

_CAUSE_TIMEOUT = 2.0  # seconds in which Ray may find out why an actor's connection ended
_ROWS = 1  # the kind of frames that come back; a request's kind is this and its verb

_logger = logging.getLogger("jaxvec")

Came: TypeAlias = Payload | WorkerMessage | HostFailure


class Wire(ABC):
    """The end of the pool's process. Any thread may send, and one receives."""

    @abstractmethod
    def do(self, name: str, *args: Any) -> None:
        """Has the actor's host call a method, after all that it was asked for before."""

    @abstractmethod
    def move(self, verb: Verb, request: Payload) -> None:
        """Has it move slots; `request` is the caller's again."""

    @abstractmethod
    def receive(self) -> Iterator[Came]:
        """Yields what comes back; rows are good until the next.

        Raises:
            ActorLostError, RayError: the actor is lost; says why.
        """

    def break_off(self) -> None:  # noqa: B027 - a default
        """Ends it, unless the end of the actor does; from any thread."""

    def close(self) -> None:  # noqa: B027 - a default
        """Gives back what it holds; the thread that receives does so in the end."""


class RayWire(Wire):
    """Calls of the actor, and a stream that Ray brings here."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def do(self, name: str, *args: Any) -> None:
        self._actor.do.remote(name, *args)

    def move(self, verb: Verb, request: Payload) -> None:
        self.do("move", verb, request)

    def receive(self) -> Iterator[Came]:
        for reference in self._actor.run.options(num_returns="streaming").remote():
            yield self._ray.get(reference)


class TcpWire(Wire):
    """A connection to the actor."""

    def __init__(self, ray: Any, connection: Connection, serving: Any) -> None:
        """Takes over a connection.

        Args:
            ray: the module.
            connection: to the actor.
            serving: the actor's call that serves it, which Ray lets fail if the actor is lost.
        """
        self._ray = ray
        self._connection = connection
        self._serving = serving
        self._broken_off = False

    def do(self, name: str, *args: Any) -> None:
        with suppress(OSError):  # who receives hears of it, too, and asks why
            self._connection.send(MESSAGE, dumps((name, args)))

    def move(self, verb: Verb, request: Payload) -> None:
        with suppress(OSError):
            self._connection.send(_ROWS + verb, request.data)

    def receive(self) -> Iterator[Came]:
        while True:
            try:
                kind, data = self._connection.receive()
            except (EOFError, OSError) as error:
                self._explain()
                raise ActorLostError(f"was lost: its connection ended: {error}") from error
            yield pickle.loads(data.data) if kind == MESSAGE else data

    def break_off(self) -> None:
        self._broken_off = True
        self._connection.break_off()

    def close(self) -> None:
        self._connection.close()

    def _explain(self) -> None:
        """Raises what Ray knows about the end of the actor, if it hears of it in time."""
        if self._broken_off or not self._ray.is_initialized():  # which would start another cluster
            return
        if self._ray.wait([self._serving], timeout=_CAUSE_TIMEOUT)[0]:
            self._ray.get(self._serving)


def open_wire(ray: Any, actor: Any, data: str) -> Wire:
    """Connects to an actor.

    Args:
        ray: the module.
        actor: that has a host.
        data: `"tcp"`, `"ray"`, or `"auto"` for the first of these that is possible.

    Raises:
        ActorLostError: it can't be reached by `"tcp"`, or for want of descriptors.
        RayError: the actor is lost.
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
            raise TooManyFilesError from error
        why = f"can't be reached at {where}: {error}"
    if data == "tcp":
        raise ActorLostError(
            f'{why}; jaxvec.Ray(data="tcp") needs TCP connections from here to free ports of the nodes; have '
            'firewalls let them pass, or use data="ray"'
        )
    _logger.info("data of an actor travel through Ray, as it %s", why)
    return RayWire(ray, actor)


def serve(host: ActorHost, listener: Listener) -> None:
    """Serves a host in its actor, as long as the connection lasts; ends if nobody connects."""
    try:
        connection = listener.accept()
    except TimeoutError:
        return  # Ray's stream takes its place
    receiver = threading.Thread(target=_receive_all, args=(host, connection), daemon=True)
    receiver.start()
    with suppress(OSError):  # the pool has ended, or is lost
        for each in host.run():
            if isinstance(each, np.ndarray):
                connection.send(_ROWS, each.data)
            else:
                connection.send(MESSAGE, dumps(each))
    connection.break_off()
    receiver.join()


def _receive_all(host: ActorHost, connection: Connection) -> None:
    try:
        while True:
            kind, data = connection.receive()
            if kind == MESSAGE:
                name, args = pickle.loads(data.data)
                host.do(name, *args)
            else:
                host.do("move", Verb(kind - _ROWS), data)
    except (EOFError, OSError) as error:
        connection.break_off()
        host.fail(f"lost its connection: {error}")  # so that `run` looks up, and can't send it
    finally:
        connection.close()


# ----------------------------------------------------------------------------------------------------------
# This process's end of a Ray actor, from its start to its end, and of the workers in it.
#
# To the pool's supervisor each of these workers is a process with a channel, as local ones are. Three
# threads serve an actor: one relays what workers are told; one ships slots (`_shipper.py`); one receives
# what comes back. None holds the GIL while it waits.
# ----------------------------------------------------------------------------------------------------------

_PLACE_CHECK_INTERVAL = 1.0  # seconds between looks whether an actor can still find a place
_END_TIMEOUT = 3.0  # seconds within which an actor has to end one of its processes, or is lost


class ActorLink:
    """An actor with some neighbouring workers.

    Attributes:
        node: where it is, in words.
        lost: whether it can't be used any more.
        ahead: how far its monotonic clock is ahead of ours, in ns.
    """

    def __init__(
        self,
        ray: Any,
        make_actor: Callable[[], Any],
        *,
        placement: Placement,
        workers: range,
        slices: Slices,
        resources: Mapping[str, float],
        config: PoolConfig,
        data: str,
        wake_pipe: WakePipe,
        map_segment: Callable[[int, Layout], Arrays],
        dead_nodes: Set[str],
        predecessor: ActorLink | None,
    ) -> None:
        """Begins to serve.

        Args:
            ray: the module.
            make_actor: starts the actor.
            placement: where it is put.
            workers: that it has room for.
            slices: the slots of each.
            resources: that it needs.
            config: options of the pool.
            data: how they travel; see `open_wire`.
            wake_pipe: of the pool.
            map_segment: returns the arrays of the pool's segment, by its descriptor.
            dead_nodes: that are known.
            predecessor: whose place this one takes, and which is lost.
        """
        self.node = "no node yet"
        self.lost = False
        self.ahead = 0
        self._ray = ray
        self._make_actor = make_actor
        self._placement = placement
        self._workers = workers
        self._slices = slices
        self._resources = resources
        self._config = config
        self._data = data
        self._wake_pipe = wake_pipe
        self._map_segment = map_segment
        self._dead_nodes = dead_nodes
        self._predecessor = predecessor
        self._actor: Any = None
        self._wire: Wire | None = None  # once the actor is there
        self._shipper: Shipper | None = None  # once a worker attaches
        self._remotes: dict[tuple[int, int], RemoteWorker] = {}  # by worker and incarnation
        self._to_relay: queue.SimpleQueue[Callable[[Wire], None]] = queue.SimpleQueue()
        self._losing = threading.Lock()  # who has it may write rows and speak for workers, unless we are lost
        self._receiver: threading.Thread | None = None
        self._relayer = _start(self._run)

    # --- what supervisor and launcher do with it, from any thread -----------------------------------

    def launch(self, worker: int, incarnation: int) -> RemoteWorker:
        """Starts a worker process; see `RemoteWorker`."""
        remote = RemoteWorker(self, worker, incarnation, self._wake_pipe)
        with self._losing:
            self._remotes[worker, incarnation] = remote
            if self.lost:
                remote.mark_ended(ProcessEnd(None, "ended"))
        self._to_relay.put(lambda wire: wire.do("launch", worker, incarnation))
        return remote

    def tell(self, remote: RemoteWorker, message: Any, descriptors: Sequence[int]) -> None:
        """Passes a message on, or the end of file for `None`; raises `EOFError` if the worker has ended."""
        told = None if message is None else dumps(message)  # as it is now
        with self._losing:
            if remote.ended():
                raise EOFError
            if isinstance(message, Attach) and self._shipper is None:
                assert self._wire is not None
                self._shipper = Shipper(
                    message,
                    self._map_segment(descriptors[0], message.layout),
                    self._workers,
                    self._slices,
                    move=self._wire.move,
                    wake_pool=self._wake_pool,
                    fail=self._fail,
                )
        self._to_relay.put(partial(self._relay, remote, message, told))

    def wake(self) -> None:
        """Looks at the slots of the actor's workers."""
        if self._shipper is not None:
            self._shipper.wake()

    def end(self, remote: RemoteWorker) -> None:
        """Ends a worker process; the actor with all others, if it does not do so in time."""
        if self._receiver is not None and not self.lost:  # before that, the actor could not answer
            with suppress(Exception):
                # By Ray, so that a long message on the wire does not hold it up.
                asked = self._actor.do.remote("end", remote.worker, remote.incarnation)
                done, _ = self._ray.wait([asked], timeout=_END_TIMEOUT)
                if done:
                    with self._losing:
                        remote.mark_ended(ProcessEnd(None, "was ended"))
                    return
        self.lose("did not answer")

    def lose(self, why: str, *, reachable: bool = True) -> None:
        """Ends the actor and all its workers. Whoever takes their place finds no row written by us then.

        Args:
            why: in words.
            reachable: whether Ray can be asked to end it.
        """
        with self._losing:
            if self.lost:
                return
            self.lost = True
            for remote in self._remotes.values():
                remote.mark_ended(ProcessEnd(None, why))
        self._to_relay.put(lambda _: None)  # its thread looks up
        if self._wire is not None:
            self._wire.break_off()
        # Without a head this would wait for it, and with Ray shut down start another.
        if self._actor is not None and reachable and self._ray.is_initialized():
            _start(self._kill).join(timeout=1)  # the head may be gone, and we not know of it yet

    def close(self, timeout: float) -> None:
        """Ends all there is, within about so many seconds; a lost node may hold up the last of it."""
        self.lose("was ended")
        for thread in (self._relayer, self._receiver):
            if thread is not None:
                thread.join(timeout)

    # --- the thread that relays what workers are told ----------------------------------------------

    def _run(self) -> None:
        try:
            if self._predecessor is not None:  # it must not take what is ours
                self._predecessor._relayer.join()
                self._predecessor = None
            self._find_place()
            self.ahead = clock_offset(lambda: self._ray.get(self._actor.clock.remote()))
            self._ray.get(self._actor.init.remote(self._workers, self._slices, self._config))
            wire = open_wire(self._ray, self._actor, self._data)
            with self._losing:
                self._wire = wire
                if self.lost:
                    wire.break_off()
            self._receiver = _start(partial(self._receive_all, wire))
            self._relay_all(wire)
        except BaseException as error:  # whatever it is, the pool is to hear of it
            self._fail(error)
        finally:
            if self._shipper is not None:
                self._shipper.close()

    def _find_place(self) -> None:
        """Starts the actor; another, if the node dies before it is there.

        Ray gives out a dead node until it misses it, seconds later. What was to be replaced because of that
        node would fail once more then, and nothing new has happened to it.
        """
        while True:
            self._actor = self._make_actor()
            if self.lost:  # nobody could end it before
                self._kill()
                raise ActorLostError("was ended")
            try:  # retried: until Ray knows that it is dead, it says "unavailable", and misses no node
                said = self._wait_for(self._actor.identify.options(max_task_retries=-1).remote())
            except self._ray.exceptions.RayActorError:
                known, self._dead_nodes = self._dead_nodes, find_dead_nodes(self._ray)
                if self.lost or self._dead_nodes <= known:
                    raise
            else:
                break
        self.node = said["node"]
        check_alike(said)

    def _wait_for(self, answer: Any) -> Any:
        """Waits for the first answer of the actor, as long as it can come."""
        while not self._ray.wait([answer], timeout=_PLACE_CHECK_INTERVAL)[0]:
            self.node = f"no node yet, as Ray has not started its actor, which needs {self._resources},"
            if self.lost:
                raise ActorLostError("was ended")
            if why := self._placement.lost():
                raise ActorLostError(f"was not started: {why}")
            check_descriptors()
        return self._ray.get(answer)

    def _relay_all(self, wire: Wire) -> None:
        while True:
            relay = self._to_relay.get()
            if self.lost:
                return
            relay(wire)

    def _relay(self, remote: RemoteWorker, message: Any, told: bytes | None, wire: Wire) -> None:
        """Passes on what a worker is told."""
        tell = partial(wire.do, "tell", remote.worker, remote.incarnation, told)
        if isinstance(message, Attach):
            assert self._shipper is not None
            self._shipper.serve(remote.worker, tell, replaces=message.replaces is not None)
            return
        if self._shipper is not None:
            self._shipper.ship()
        tell()

    # --- the thread that receives what comes back ---------------------------------------------------

    def _receive_all(self, wire: Wire) -> None:
        try:
            for came in wire.receive():
                if isinstance(came, HostFailure):
                    raise ActorLostError(came.why)
                with self._losing:
                    if self.lost:
                        continue
                    if isinstance(came, WorkerMessage):
                        self._receive(came)
                    else:
                        assert self._shipper is not None
                        self._shipper.post(came)
        except BaseException as error:
            self._fail(error)
        finally:
            wire.close()

    def _receive(self, said: WorkerMessage) -> None:
        """Passes on what a worker says; under the lock."""
        remote = self._remotes[said.worker, said.incarnation]
        message = said.message
        if isinstance(message, ProcessEnd):
            remote.mark_ended(message)
            return
        if isinstance(message, Report):
            message = on_node(message, self.node)
        elif isinstance(message, Reply) and message.failure is not None:
            message = replace(message, failure=on_node(message.failure, self.node))
        remote.say(message)
        if isinstance(message, Report) and self._shipper is not None:
            self._shipper.notify_parent()

    def _wake_pool(self) -> None:
        """Lets it look at its slots, by a worker whose channel it has; under the lock."""
        for remote in self._remotes.values():
            if not remote.ended():
                remote.say(WAKE)
                break

    # --- all threads' ------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, ActorLostError):
            self.lose(str(error))
        elif isinstance(error, self._ray.exceptions.RayError):
            self.lose(describe_loss(error))
        else:
            self.lose(f"failed: {type(error).__name__}: {error}")

    def _kill(self) -> None:
        with suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread
