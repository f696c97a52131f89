"""How a pool's process and an actor talk: by a TCP connection of their own, or by Ray's calls and stream.

Ray takes some milliseconds of Python for a call and its answer, and a connection does not. But it needs no
port, which a firewall may close.
"""

from __future__ import annotations

import errno
import logging
import pickle
import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import numpy as np

from jaxvec import _pickling
from jaxvec._backends._ray import _connection
from jaxvec._backends._ray._actor_host import ActorHost
from jaxvec._backends._ray._connection import MESSAGE, Connection, Listener
from jaxvec._backends._ray._nodes import ActorLostError, TooManyFilesError
from jaxvec._backends._ray._wire_format import HostFailure, Payload, WorkerMessage
from jaxvec._handoff._move import Verb

_EXPLAINED = 2.0  # seconds in which Ray may find out why an actor's connection ended
_ROWS = 1  # the kind of frames that come back; a request's kind is this and its verb

_logger = logging.getLogger("jaxvec")

Came: TypeAlias = Payload | WorkerMessage | HostFailure


class Wire(Protocol):
    """The end of the pool's process. Any thread may send, and one receives."""

    def do(self, name: str, *args: Any) -> None:
        """Has the actor's host call a method, after all that it was asked for before."""
        ...

    def move(self, verb: Verb, request: Payload) -> None:
        """Has it move slots; `request` is the caller's again."""
        ...

    def receive(self) -> Iterator[Came]:
        """Yields what comes back; rows are good until the next.

        Raises:
            ActorLostError, RayError: the actor is lost; says why.
        """
        ...

    def break_off(self) -> None:
        """Ends it; from any thread."""
        ...

    def close(self) -> None:
        """Gives back what it holds; whoever receives does so in the end."""
        ...


class RayWire:
    """Calls of the actor, and a stream that Ray brings here; see `Wire`."""

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

    def break_off(self) -> None:
        pass  # it ends with the actor

    def close(self) -> None:
        pass


class TcpWire:
    """A connection to the actor; see `Wire`."""

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
            self._connection.send(MESSAGE, _pickling.dumps((name, args)))

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
        if self._ray.wait([self._serving], timeout=_EXPLAINED)[0]:
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
    key = secrets.token_bytes(_connection.KEY_BYTES)
    where = "a port of its own"
    try:
        address = ray.get(actor.listen.remote(key))
        where = f"{address[0]}:{address[1]}"
        serving = actor.serve.remote()
        return TcpWire(ray, _connection.connect(address, key), serving)
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
                connection.send(MESSAGE, _pickling.dumps(each))
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
