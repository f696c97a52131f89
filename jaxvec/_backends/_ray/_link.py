"""The pool's link to a Ray actor, from its start to its end, and what is said between them.

To the pool's supervisor each worker there is a process with a control socket, as local ones are. Three
threads serve an actor: one relays what workers are told; one takes slots and ships them (`_dispatch.py`);
one hears what comes back. None holds the GIL while it waits.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jaxvec._backends._messages import Attach, Reply
from jaxvec._backends._ray import _node
from jaxvec._backends._ray._dispatch import Dispatch
from jaxvec._backends._ray._node import Lost
from jaxvec._backends._ray._stream import Buffer, Ended, Failed, Said
from jaxvec._backends._ray._worker import RemoteWorker
from jaxvec._backends._start_method import StartMethod
from jaxvec._handoff import _channel
from jaxvec._handoff._channel import WAKE, Channel
from jaxvec._slices._failures import Report

_ACKNOWLEDGED = 3.0  # seconds within which an actor has to end one of its processes, or is lost


class Link:
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
        workers: range,
        method: StartMethod,
        predecessor: Link | None,
    ) -> None:
        """Begins to serve.

        Args:
            ray: the module.
            make_actor: starts the actor.
            workers: that it has room for.
            method: how the actor starts them.
            predecessor: whose place this one takes, and which is lost.
        """
        self.node = "no node yet, for which the Ray cluster has to have room,"
        self.lost = False
        self.ahead = 0
        self._ray = ray
        self._make_actor = make_actor
        self._workers = workers
        self._method = method
        self._predecessor = predecessor
        self._actor: Any = None
        self._dispatch: Dispatch | None = None  # once a worker attaches
        self._remotes: list[RemoteWorker] = []
        self._newcomers: queue.SimpleQueue[RemoteWorker] = queue.SimpleQueue()
        self._call, ear = _channel.pair()  # wakes the thread that relays
        self._ear = _channel.adopt(ear)
        self._losing = threading.Lock()  # who has it may write rows, unless we are lost
        self._taker: threading.Thread | None = None
        self._hearer: threading.Thread | None = None
        self._relayer = _start(self._run)

    # --- what supervisor and launcher do with it, from any thread -----------------------------------

    def seat(self, worker: int, life: int, channel: Channel) -> RemoteWorker:
        """Starts a worker process; see `RemoteWorker`."""
        remote = RemoteWorker(self, worker, life, channel)
        with self._losing:
            self._remotes.append(remote)
            if self.lost:
                remote.note(Ended(None, "ended"))
                channel.close()
                return remote
        self._newcomers.put(remote)
        self._call.wake()
        return remote

    def end(self, remote: RemoteWorker) -> None:
        """Ends a worker process; the actor with all others, if it does not do so in time."""
        acknowledged = False
        if self._actor is not None and not self.lost:
            with suppress(Exception):
                asked = self._do("end", remote.worker, remote.life)
                done, _ = self._ray.wait([asked], timeout=_ACKNOWLEDGED)
                acknowledged = bool(done)
        if acknowledged:
            remote.note(Ended(None, "was ended"))
        else:
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
            for remote in self._remotes:
                remote.note(Ended(None, why))
        self._call.break_off()
        # Without a head this would wait for it, and with Ray shut down start another.
        if self._actor is not None and reachable and self._ray.is_initialized():
            _start(self._kill).join(timeout=1)  # the head may be gone, and we not know of it yet

    def close(self, timeout: float) -> None:
        """Ends all there is, within about so many seconds; a lost node may hold up the last of it."""
        self.lose("was ended")
        for thread in (self._relayer, self._hearer):
            if thread is not None:
                thread.join(timeout)

    # --- the thread that relays what workers are told ----------------------------------------------

    def _run(self) -> None:
        try:
            if self._predecessor is not None:  # it must not take what is ours
                self._predecessor._relayer.join()
                self._predecessor = None
            self._find_place()
            self.ahead = _node.ahead(lambda: self._ray.get(self._actor.clock.remote()))
            self._ray.get(self._actor.settle.remote(self._workers, self._method))
            self._hearer = _start(self._hear_all)
            self._relay()
        except BaseException as error:  # whatever it is, the pool is to hear of it
            self._fail(error)
        finally:
            if self._dispatch is not None and self._taker is not None:
                self._dispatch.stop()
                self._taker.join()
                self._dispatch.close()
            with self._losing:
                for channel in (self._call, self._ear, *(remote.channel for remote in self._remotes)):
                    channel.close()

    def _find_place(self) -> None:
        """Starts the actor; another, if the node dies before it is there.

        Ray gives out a dead node until it misses it, seconds later. What was to be replaced because of that
        node would fail once more then, and nothing new has happened to it.
        """
        while True:
            dead = _node.dead(self._ray)
            self._actor = self._make_actor()
            if self.lost:  # nobody could end it before
                self._kill()
                raise Lost("was ended")
            try:  # retried: until Ray knows that it is dead, it says "unavailable", and misses no node
                said = self._ray.get(self._actor.identify.options(max_task_retries=-1).remote())
            except self._ray.exceptions.RayActorError:
                if self.lost or not _node.dead(self._ray) - dead:
                    raise
            else:
                break
        self.node = said["node"]
        _node.require_alike(said)

    def _relay(self) -> None:
        poll = select.poll()
        poll.register(self._ear, select.POLLIN)
        telling: dict[int, RemoteWorker] = {}
        while not self.lost:
            for fd, _ in poll.poll():
                if fd in telling:
                    if not self._pass_on(telling[fd]):
                        poll.unregister(fd)
                        del telling[fd]
                    continue
                with suppress(EOFError):
                    self._ear.receive()
                while not self._newcomers.empty():
                    remote = self._newcomers.get()
                    telling[remote.channel.fileno()] = remote
                    poll.register(remote.channel, select.POLLIN)
                    self._do("launch", remote.worker, remote.life)

    def _pass_on(self, remote: RemoteWorker) -> bool:
        """Passes on what a worker is told; says whether more may come."""
        try:
            message = remote.channel.receive()
        except EOFError:  # the pool closes, or another takes the place
            message = None
        tell = partial(self._do, "tell", remote.worker, remote.life, message)
        if isinstance(message, Attach):
            segment = remote.channel.descriptors.pop()
            if self._dispatch is None:
                self._dispatch = Dispatch(message, segment, self._workers, partial(self._do, "move"))
                self._taker = _start(self._take)
            os.close(segment)
            self._dispatch.serve(remote.worker, remote.channel, tell, replaces=message.replaces is not None)
        elif message is not WAKE:
            if self._dispatch is not None:
                self._dispatch.ship()
            tell()
        elif self._dispatch is not None:
            self._dispatch.wake()
        return message is not None

    def _take(self) -> None:
        assert self._dispatch is not None
        try:
            self._dispatch.take()
        except BaseException as error:
            self._fail(error)

    # --- the thread that hears what comes back -----------------------------------------------------

    def _hear_all(self) -> None:
        try:
            stream = self._actor.run.options(concurrency_group="stream", num_returns="streaming").remote()
            for reference in stream:
                came: Buffer | Said | Failed = self._ray.get(reference)
                if isinstance(came, Failed):
                    raise Lost(came.why)
                if isinstance(came, Said):
                    self._hear(came)
                    continue
                assert self._dispatch is not None
                with self._losing:
                    if not self.lost:
                        self._dispatch.post(came)
        except BaseException as error:
            self._fail(error)

    def _hear(self, said: Said) -> None:
        remote = next(r for r in self._remotes if (r.worker, r.life) == (said.worker, said.life))
        message = said.message
        if isinstance(message, Ended):
            remote.note(message)
            return
        if isinstance(message, Report):
            message = _node.on_node(message, self.node)
        elif isinstance(message, Reply) and message.failure is not None:
            message = replace(message, failure=_node.on_node(message.failure, self.node))
        with suppress(EOFError, OSError):  # the supervisor has done with it
            remote.channel.send(message)
        if isinstance(message, Report) and self._dispatch is not None:
            self._dispatch.alarm(remote.worker)

    # --- all threads' ------------------------------------------------------------------------------

    def _do(self, name: str, *args: Any) -> Any:
        return self._actor.do.remote(name, *args)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Lost):
            self.lose(str(error))
        elif isinstance(error, self._ray.exceptions.RayError):
            self.lose(_node.describe(error))
        else:
            self.lose(f"failed: {type(error).__name__}: {error}")

    def _kill(self) -> None:
        with suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread
