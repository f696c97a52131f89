"""This process's end of a Ray actor, from its start to its end, and of the workers in it.

To the pool's supervisor each of these workers is a process with a control socket, as local ones are. Three
threads serve an actor: one relays what workers are told; one ships slots (`_shipper.py`); one receives what
comes back. None holds the GIL while it waits.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jaxvec._backends._launcher import Slices
from jaxvec._backends._messages import Attach, Reply
from jaxvec._backends._ray import _nodes
from jaxvec._backends._ray._nodes import ActorLostError
from jaxvec._backends._ray._placement import Placement
from jaxvec._backends._ray._shipper import Shipper
from jaxvec._backends._ray._wire import Wire, open_wire
from jaxvec._backends._ray._wire_format import HostFailure, ProcessEnd, WorkerMessage
from jaxvec._backends._start_method import StartMethod
from jaxvec._handoff import _channel
from jaxvec._handoff._channel import WAKE, Channel
from jaxvec._slices._failures import Report

_EVERY = 1.0  # seconds between looks whether an actor can still find a place
_ACKNOWLEDGED = 3.0  # seconds within which an actor has to end one of its processes, or is lost


class RemoteWorker:
    """A worker process in an actor; see `Process`."""

    def __init__(self, link: ActorLink, worker: int, incarnation: int, channel: Channel) -> None:
        """Names a process that is about to start.

        Args:
            link: to the actor.
            worker: in whose place it is.
            incarnation: how many were there before.
            channel: the worker's end of its control socket.
        """
        self.worker = worker
        self.incarnation = incarnation
        self.channel = channel
        self._link = link
        self._gone = threading.Event()
        self._ended = ProcessEnd(None, "ended")

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

    def mark_ended(self, ended: ProcessEnd) -> None:
        """Notes its end, the first that is heard of; the supervisor hears by an end of file."""
        if not self._gone.is_set():
            self._ended = ended
            self._gone.set()
        self.channel.break_off()


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
        method: StartMethod,
        data: str,
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
            method: how the actor starts them.
            data: how they travel; see `open_wire`.
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
        self._method = method
        self._data = data
        self._predecessor = predecessor
        self._actor: Any = None
        self._wire: Wire | None = None  # once the actor is there
        self._shipper: Shipper | None = None  # once a worker attaches
        self._remotes: dict[tuple[int, int], RemoteWorker] = {}  # by worker and incarnation
        self._newcomers: queue.SimpleQueue[RemoteWorker] = queue.SimpleQueue()
        self._wake_writer, reader = _channel.pair()  # wakes the thread that relays
        self._wake_reader = _channel.adopt(reader)
        self._losing = threading.Lock()  # who has it may write rows, unless we are lost
        self._receiver: threading.Thread | None = None
        self._relayer = _start(self._run)

    # --- what supervisor and launcher do with it, from any thread -----------------------------------

    def launch(self, worker: int, incarnation: int, channel: Channel) -> RemoteWorker:
        """Starts a worker process; see `RemoteWorker`."""
        remote = RemoteWorker(self, worker, incarnation, channel)
        with self._losing:
            self._remotes[worker, incarnation] = remote
            if self.lost:
                remote.mark_ended(ProcessEnd(None, "ended"))
                channel.close()
                return remote
            self._newcomers.put(remote)
            self._wake_writer.wake()  # under the lock, too: `_run` closes it there, once we are lost
        return remote

    def end(self, remote: RemoteWorker) -> None:
        """Ends a worker process; the actor with all others, if it does not do so in time."""
        if self._receiver is not None and not self.lost:  # before that, the actor could not answer
            with suppress(Exception):
                # By Ray, so that a long message on the wire does not hold it up.
                asked = self._actor.do.remote("end", remote.worker, remote.incarnation)
                done, _ = self._ray.wait([asked], timeout=_ACKNOWLEDGED)
                if done:
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
        self._wake_writer.break_off()
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
            self.ahead = _nodes.clock_offset(lambda: self._ray.get(self._actor.clock.remote()))
            self._ray.get(self._actor.init.remote(self._workers, self._slices, self._method))
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
            with self._losing:
                self._wake_writer.close()
                self._wake_reader.close()
                for remote in self._remotes.values():
                    remote.channel.close()

    def _find_place(self) -> None:
        """Starts the actor; another, if the node dies before it is there.

        Ray gives out a dead node until it misses it, seconds later. What was to be replaced because of that
        node would fail once more then, and nothing new has happened to it.
        """
        while True:
            dead = _nodes.dead_nodes(self._ray)
            self._actor = self._make_actor()
            if self.lost:  # nobody could end it before
                self._kill()
                raise ActorLostError("was ended")
            try:  # retried: until Ray knows that it is dead, it says "unavailable", and misses no node
                said = self._wait_for(self._actor.identify.options(max_task_retries=-1).remote())
            except self._ray.exceptions.RayActorError:
                if self.lost or not _nodes.dead_nodes(self._ray) - dead:
                    raise
            else:
                break
        self.node = said["node"]
        _nodes.check_alike(said)

    def _wait_for(self, answer: Any) -> Any:
        """Waits for the first answer of the actor, as long as it can come."""
        while not self._ray.wait([answer], timeout=_EVERY)[0]:
            self.node = f"no node yet, as Ray has not started its actor, which needs {self._resources},"
            if self.lost:
                raise ActorLostError("was ended")
            if why := self._placement.lost():
                raise ActorLostError(f"was not started: {why}")
        return self._ray.get(answer)

    def _relay_all(self, wire: Wire) -> None:
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        by_fd: dict[int, RemoteWorker] = {}
        while not self.lost:
            for fd, _ in poll.poll():
                if fd in by_fd:
                    if not self._relay(by_fd[fd], wire):
                        poll.unregister(fd)
                        del by_fd[fd]
                    continue
                with suppress(EOFError):
                    self._wake_reader.receive()
                while not self._newcomers.empty():
                    remote = self._newcomers.get()
                    by_fd[remote.channel.fileno()] = remote
                    poll.register(remote.channel, select.POLLIN)
                    wire.do("launch", remote.worker, remote.incarnation)

    def _relay(self, remote: RemoteWorker, wire: Wire) -> bool:
        """Passes on what a worker is told; says whether more may come."""
        try:
            message = remote.channel.receive()
        except EOFError:  # the pool closes, or another takes the place
            message = None
        tell = partial(wire.do, "tell", remote.worker, remote.incarnation, message)
        if isinstance(message, Attach):
            segment = remote.channel.descriptors.pop()
            if self._shipper is None:
                self._shipper = Shipper(
                    message, segment, self._workers, self._slices, move=wire.move, fail=self._fail
                )
            os.close(segment)
            self._shipper.serve(remote.worker, remote.channel, tell, replaces=message.replaces is not None)
        elif message is not WAKE:
            if self._shipper is not None:
                self._shipper.ship()
            tell()
        elif self._shipper is not None:
            self._shipper.wake()
        return message is not None

    # --- the thread that receives what comes back ---------------------------------------------------

    def _receive_all(self, wire: Wire) -> None:
        try:
            for came in wire.receive():
                if isinstance(came, HostFailure):
                    raise ActorLostError(came.why)
                if isinstance(came, WorkerMessage):
                    self._receive(came)
                    continue
                assert self._shipper is not None
                with self._losing:
                    if not self.lost:
                        self._shipper.post(came)
        except BaseException as error:
            self._fail(error)
        finally:
            wire.close()

    def _receive(self, said: WorkerMessage) -> None:
        """Passes on what a worker says."""
        remote = self._remotes[said.worker, said.incarnation]
        message = said.message
        if isinstance(message, ProcessEnd):
            remote.mark_ended(message)
            return
        if isinstance(message, Report):
            message = _nodes.on_node(message, self.node)
        elif isinstance(message, Reply) and message.failure is not None:
            message = replace(message, failure=_nodes.on_node(message.failure, self.node))
        with suppress(EOFError, OSError):  # the supervisor has done with it
            remote.channel.send(message)
        if isinstance(message, Report) and self._shipper is not None:
            self._shipper.notify_parent(remote.worker)

    # --- all threads' ------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, ActorLostError):
            self.lose(str(error))
        elif isinstance(error, self._ray.exceptions.RayError):
            self.lose(_nodes.describe_loss(error))
        else:
            self.lose(f"failed: {type(error).__name__}: {error}")

    def _kill(self) -> None:
        with suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread
