"""Connections to an actor, and what travels on them."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.move import Verb
from jaxvec._memory.rows import RowPacker
from jaxvec._memory.segment import Arrays
from jaxvec._spec import PoolSpec

# ----------------------------------------------------------------------------------------------------------
# A TCP connection between two processes that share a key, at both ends: frames of bytes, in order.
#
# The key is new for each connection, and came to both ends by Ray. Each proves that it has the key before
# the other reads a frame, so nobody else can have anything unpickled here. What follows is not encrypted.
#
# The standard library's `multiprocessing.connection` does as much. It reads by pieces into a buffer of its
# own and copies that: an answer of 2 MB took it 3.3 ms of CPU time, in place of 0.5, and one of 1 kB 87 us,
# in place of 23. Its proof waits without end, and is HMAC-MD5 on Python 3.11.
#
# A peer whose process ends is missed at once. One whose machine freezes, or is cut off, is asked for an
# acknowledgement by keepalive while nothing is under way, and else by the data. `TCP_USER_TIMEOUT` would be
# wrong for these: it also ends a connection whose peer is there, but has no time to read.
# ----------------------------------------------------------------------------------------------------------

KEY_BYTES = 32
MESSAGE = 0  # the kind of frames that their receiver may keep

_HEADER = struct.Struct("<BQ")  # kind, and length in bytes
_TIMEVAL = struct.Struct("ll")  # seconds and microseconds
_NONCE_BYTES = _PROOF_BYTES = 32
_CONNECT_TIMEOUT = 3.0  # seconds within which a machine that is there lets us in
_HANDSHAKE_TIMEOUT = 30.0  # seconds for the proofs; more, as a busy machine may be slow
_UNAUTHENTICATED_TIMEOUT = (
    5.0  # seconds that somebody may take who does not prove anything, while others wait
)
_ACK_CHECK_INTERVAL = 3.0  # seconds between looks whether what was sent is acknowledged
_ACK_TIMEOUT = 14.0  # seconds without, after which the other machine is lost
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}  # 14 s in all; not of every system
# Of Linux: probes without an answer, segments not acknowledged, milliseconds since the last that was.
_TCP_INFO = struct.Struct("<3xB20xI28xI")


class Connection:
    """One end. Any thread may send; one receives, and closes."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        # The kernel's own timeout: Python's takes a system call more for each.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(_ACK_CHECK_INTERVAL), 0))
        self._socket = sock
        self._sending = threading.Lock()
        self._header = memoryview(bytearray(_HEADER.size))
        self._buffer = self._rows = np.empty(0, np.uint8)

    def send(self, kind: int, data: bytes | memoryview) -> None:
        """Sends a frame; waits while the other end has more to read than fits in between.

        Raises:
            OSError: the connection has ended.
        """
        parts = [memoryview(_HEADER.pack(kind, len(data))), memoryview(data)]
        with self._sending:
            while parts:
                sent = self._socket.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][sent:]

    def receive(self) -> tuple[int, NDArray[np.uint8]]:
        """Waits for a frame. Its data are good until the next call, except of a `MESSAGE`.

        Raises:
            EOFError: the other end has closed, or this one has broken off.
            OSError: the connection has ended in another way.
        """
        self._fill(self._header)
        kind, length = _HEADER.unpack(self._header)
        if kind == MESSAGE:
            data = np.empty(length, np.uint8)
        else:
            if length > len(self._buffer):  # a new one each time costs more than to fill it
                self._buffer = np.empty(length, np.uint8)
            if length != len(self._rows):  # the same object, if it can be: see `RowPacker.unpack`
                self._rows = self._buffer[:length]
            data = self._rows
        self._fill(data.data)
        return kind, data

    def break_off(self) -> None:
        """Lets both ends see an end of file; from any thread, also while others send and receive."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection."""
        self.break_off()
        with self._sending:
            self._socket.close()

    def _fill(self, view: memoryview) -> None:
        while len(view):
            try:
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:  # the kernel's timeout
                if self._is_silent():
                    raise TimeoutError(f"nothing was acknowledged for {_ACK_TIMEOUT:g} s") from None
                continue
            if not count:
                raise EOFError("the other end closed it")
            view = view[count:]

    def _is_silent(self) -> bool:
        """Says whether the other machine acknowledges nothing any more of what was sent."""
        if sys.platform != "linux":
            return False
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        probes, unacknowledged, since = _TCP_INFO.unpack(info)
        return (unacknowledged > 0 or probes > 1) and since > _ACK_TIMEOUT * 1000


class Listener:
    """Where an actor waits for its one connection.

    Attributes:
        address: host and port.
    """

    def __init__(self, host: str, key: bytes) -> None:
        """Listens at a free port; raises `OSError` if there is none.

        Args:
            host: the IP address of this machine by which others reach it.
            key: that whoever connects has to know.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._key = key
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self) -> Connection:
        """Waits for the one who knows the key, as long as it may take to connect, and listens no more.

        Raises:
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + _CONNECT_TIMEOUT + _HANDSHAKE_TIMEOUT
        with self._socket:
            while True:
                self._socket.settimeout(_time_left(deadline))
                sock, _ = self._socket.accept()
                try:
                    _authenticate(
                        sock, self._key, deadline=time.monotonic() + _UNAUTHENTICATED_TIMEOUT, connects=False
                    )
                except OSError:  # a stranger; ours may be behind it
                    sock.close()
                else:
                    return Connection(sock)


def connect_to_actor(address: tuple[str, int], key: bytes) -> Connection:
    """Connects to a `Listener`.

    Raises:
        OSError: nobody is there in time, or not the one who knows the key.
    """
    sock = socket.create_connection(address, _CONNECT_TIMEOUT)
    try:
        _authenticate(sock, key, deadline=time.monotonic() + _HANDSHAKE_TIMEOUT, connects=True)
    except OSError:
        sock.close()
        raise
    return Connection(sock)


def _authenticate(sock: socket.socket, key: bytes, *, deadline: float, connects: bool) -> None:
    """Proves to the other end that we know the key, and has it prove the same.

    The one who listens proves nothing to whom it has not seen a proof of. Both proofs are about random bytes
    of both, and say whose they are, so none can be used again.

    Raises:
        OSError: it does not know the key, or did not say so by `deadline`.
    """

    def proof(whose: bytes) -> bytes:
        return hmac.digest(key, whose + listener + connector, "sha256")

    def check(said: bytes, whose: bytes) -> None:
        if not hmac.compare_digest(said, proof(whose)):
            raise ConnectionError("somebody is there who does not know the key")

    if connects:
        listener, connector = _read(sock, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(connector + proof(b"connector"))
        check(_read(sock, _PROOF_BYTES, deadline), b"listener")
    else:
        listener = secrets.token_bytes(_NONCE_BYTES)
        sock.settimeout(_time_left(deadline))
        sock.sendall(listener)
        said = _read(sock, _NONCE_BYTES + _PROOF_BYTES, deadline)
        connector = said[:_NONCE_BYTES]
        check(said[_NONCE_BYTES:], b"connector")
        sock.sendall(proof(b"listener"))


def _read(sock: socket.socket, count: int, deadline: float) -> bytes:
    said = b""
    while len(said) < count:
        sock.settimeout(_time_left(deadline))
        part = sock.recv(count - len(said))
        if not part:
            raise ConnectionError("somebody is there who closed the connection")
        said += part
    return said


def _time_left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


# ----------------------------------------------------------------------------------------------------------
# What travels between the pool's process and a Ray actor; both ends pack and unpack alike.
# ----------------------------------------------------------------------------------------------------------

Payload: TypeAlias = NDArray[np.uint8]  # rows in one buffer, see `RowPacker`

_KEPT_BY_WORKERS = ("raw_info", "last_seed", "rebuilds")  # rows beside the results, see _layout


class ProcessEnd(NamedTuple):
    """How a worker process ended."""

    exitcode: int | None
    ending: str


class WorkerMessage(NamedTuple):
    """What a worker process said, or a `ProcessEnd`; all rows that it finished before have come before."""

    worker: int
    incarnation: int  # which of the processes in the worker's place it was
    message: Any


class HostFailure(NamedTuple):
    """What went wrong with the actor itself."""

    why: str


class WireFormat:
    """Packs rows at one end and unpacks them at the other.

    Attributes:
        requests: by verb, what workers need for it.
        results: what they answer.
    """

    def __init__(
        self,
        spec: PoolSpec,
        arrays: Arrays,
        workers: range,
        *,
        requested: NDArray[np.int64],
        answered: NDArray[np.int64],
    ) -> None:
        """Prepares for these arrays.

        Args:
            spec: of the pool.
            arrays: of the segment at this end.
            workers: of the actor.
            requested: the request of each slot, `[num_envs]`, which travels to the actor.
            answered: the request that each row answers, `[num_envs]`, which travels back.
        """
        actions = [leaf.path for leaf in spec.action_leaves if not leaf.is_object]
        results = [leaf.path for leaf in spec.timestep_leaves if not leaf.is_object]
        final = [path for path in results if path[:2] == ("info", "final_obs")]
        self._arrays = arrays
        self._rows = [*results, *((name,) for name in _KEPT_BY_WORKERS), ("completed",)]
        sent = arrays | {("requested",): requested}
        self.requests = {
            Verb.STEP: RowPacker(sent, [("requested",), *actions]),
            Verb.RESET: RowPacker(sent, [("requested",), ("seed",)]),
        }
        self.results = RowPacker(
            arrays | {("completed",): answered},
            self._rows,
            whole=[self._of(workers, name) for name in ("stats", "running")],
            sparse=dict.fromkeys(final, ("info", "_final_obs")),
        )

    def inheritance(self, worker: int) -> RowPacker:
        """Returns what packs what a worker needs in the place of one that was lost with its actor."""
        return RowPacker(self._arrays, self._rows, whole=[self._of(range(worker, worker + 1), "stats")])

    def _of(self, workers: range, name: str) -> NDArray[np.generic]:
        return self._arrays[name,][workers.start : workers.stop]
