"""This process's end of a Ray actor, from its start to its end, and of the workers in it.

To the pool's supervisor each of these workers is a process with a channel, as local ones are. Three threads
serve an actor: one relays what workers are told; one ships slots (`_shipper.py`); one receives what comes
back. None holds the GIL while it waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jaxvec import _pickling
from jaxvec._backends._launcher import Slices
from jaxvec._backends._messages import Attach, Reply
from jaxvec._backends._ray import _nodes
from jaxvec._backends._ray._nodes import ActorLostError
from jaxvec._backends._ray._placement import Placement
from jaxvec._backends._ray._remote_worker import RemoteWorker, WakePipe
from jaxvec._backends._ray._shipper import Shipper
from jaxvec._backends._ray._wire import Wire, open_wire
from jaxvec._backends._ray._wire_format import HostFailure, ProcessEnd, WorkerMessage
from jaxvec._backends._start_method import StartMethod
from jaxvec._handoff._channel import WAKE
from jaxvec._memory._layout import Layout
from jaxvec._memory._segment import Arrays
from jaxvec._slices._failures import Report

_EVERY = 1.0  # seconds between looks whether an actor can still find a place
_ACKNOWLEDGED = 3.0  # seconds within which an actor has to end one of its processes, or is lost


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
            method: how the actor starts them.
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
        self._method = method
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
        told = None if message is None else _pickling.dumps(message)  # as it is now
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
                done, _ = self._ray.wait([asked], timeout=_ACKNOWLEDGED)
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
                known, self._dead_nodes = self._dead_nodes, _nodes.dead_nodes(self._ray)
                if self.lost or self._dead_nodes <= known:
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
            _nodes.check_descriptors()
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
            message = _nodes.on_node(message, self.node)
        elif isinstance(message, Reply) and message.failure is not None:
            message = replace(message, failure=_nodes.on_node(message.failure, self.node))
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
