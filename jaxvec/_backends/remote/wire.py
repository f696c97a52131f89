"""TCP connections between a pool and its hosts, and the format of rows and messages; used by both ends."""

from __future__ import annotations

import hmac
import importlib
import json
import logging
import pickle
import platform
import secrets
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._backends.remote.tls import encrypt
from jaxvec._dispatch.move import Verb
from jaxvec._memory.rows import RowPacker
from jaxvec._memory.segment import Arrays
from jaxvec._spec import PoolSpec

# --- TCP connections between two processes that share a key ----------------------------------------------
# Each end proves that it has the key before the other reads a frame, so no stranger's bytes are unpickled.
# The frames are encrypted if the listener has an `SSLContext`.
# Not `multiprocessing.connection`: it copies what it reads, so 2 MB took 3.3 ms of CPU time instead of 0.5,
# and 1 kB took 87 us instead of 23. Its handshake has no timeout, and uses HMAC-MD5 on Python 3.11.
# The end of a peer process closes the connection at once. A machine that freezes or is cut off is detected
# by keepalive probes on an idle connection, and by missing acknowledgements otherwise. `TCP_USER_TIMEOUT`
# would not do: it also ends the connection to a live peer that is slow to read.

MESSAGE = 0  # frame type of messages, which the receiver may keep; all other types are rows
ROWS = 1  # frame type of results; the type of a request is `ROWS + verb`

_HEADER = struct.Struct("<BQ")  # frame type, and length in bytes
_TIMEVAL = struct.Struct("ll")  # seconds and microseconds
_NONCE_BYTES = _PROOF_BYTES = 32
_CONNECT_TIMEOUT = 3.0  # seconds for a reachable machine to accept a connection
_HANDSHAKE_TIMEOUT = 30.0  # seconds for the proofs; longer, as the processes of a busy machine may be slow
_UNAUTHENTICATED_TIMEOUT = 5.0  # seconds that a listener spends on one stranger
_MAX_STRANGERS = 64  # that a listener examines at the same time
_ACCEPT_RETRY_INTERVAL = 0.2  # seconds after an error, such as no descriptor for another connection
_MAX_MESSAGE = 1 << 36  # bytes
_ACK_CHECK_INTERVAL = 3.0  # seconds between checks that sent data are acknowledged
_ACK_TIMEOUT = 14.0  # seconds without an acknowledgement, after which the other machine is lost
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}  # 14 s in all; not on every system
# Fields of Linux's `tcp_info`: tcpi_probes, tcpi_unacked, and tcpi_last_ack_recv in milliseconds.
_TCP_INFO = struct.Struct("<3xB20xI28xI")

_logger = logging.getLogger("jaxvec")


class Connection:
    """One end of a connection. Any thread may send; one thread receives and closes.

    Args:
        tcp: The connection.
        sock: Socket for its data: `tcp` itself, or one that encrypts them, see `tls.py`.

    Attributes:
        max_rows: Largest length in bytes of a frame of rows, by the layout of the pool.
    """

    max_rows = 0

    def __init__(self, tcp: socket.socket, sock: socket.socket) -> None:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:
                tcp.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.settimeout(None)
        # The kernel's timeout: `settimeout` costs a further system call per receive.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(_ACK_CHECK_INTERVAL), 0))
        self._tcp, self._socket = tcp, sock
        self._sending = threading.Lock()  # keeps the frames of several threads apart
        self._header = memoryview(bytearray(_HEADER.size))
        self._buffer = self._rows = np.empty(0, np.uint8)

    def send(self, frame_type: int, data: bytes | memoryview) -> None:
        """Sends a frame; blocks while buffers are full. Raises `OSError` if the connection has ended."""
        parts = [memoryview(_HEADER.pack(frame_type, len(data))), memoryview(data)]
        with self._sending:
            while parts:
                sent = self._socket.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][sent:]

    def receive(self) -> tuple[int, NDArray[np.uint8]]:
        """Waits for a frame; returns its type and data. Rows are valid until the next call.

        Raises:
            EOFError: The other end has closed the connection, or `break_off` was called.
            OSError: The connection has ended in another way, or a frame is longer than the layout allows.
        """
        self._fill(self._header)
        frame_type, length = _HEADER.unpack(self._header)
        if length > (_MAX_MESSAGE if frame_type == MESSAGE else self.max_rows):
            raise ConnectionError(f"the other end announced a frame of {length} bytes, which none can have")
        if frame_type == MESSAGE:
            data = np.empty(length, np.uint8)
        else:
            if length > len(self._buffer):  # allocating a buffer costs more than filling it
                self._buffer = np.empty(length, np.uint8)
            if length != len(self._rows):  # keep the same object: `RowPacker.unpack` is then faster
                self._rows = self._buffer[:length]
            data = self._rows
        self._fill(data.data)
        return frame_type, data

    def break_off(self) -> None:
        """Causes an end of file at both ends; from any thread, also while others send or receive."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def is_open(self) -> bool:
        """Returns whether the other end, which sends nothing now, has not closed the connection."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def say_goodbye(self) -> None:
        """Reports to a host that its pool has closed, and breaks off the connection."""
        with suppress(OSError):
            self.send(MESSAGE, pickle.dumps(("close", ())))
        self.break_off()

    def close(self) -> None:
        self.break_off()
        with self._sending:  # no thread may send to a descriptor number that is reused
            self._socket.close()

    def _fill(self, view: memoryview) -> None:
        while len(view):
            try:
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:  # SO_RCVTIMEO has passed
                if self._is_silent():
                    raise TimeoutError(
                        f"the other machine has not acknowledged any data for {_ACK_TIMEOUT:g} s"
                    ) from None
                continue
            if not count:
                raise EOFError("the other end closed the connection")
            view = view[count:]

    def _is_silent(self) -> bool:
        """Returns whether the other machine has stopped acknowledging data and probes."""
        if sys.platform != "linux":
            return False
        info = self._tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        probes, unacknowledged, since_ms = _TCP_INFO.unpack(info)
        return (unacknowledged > 0 or probes > 1) and since_ms > _ACK_TIMEOUT * 1000


class Host(NamedTuple):
    """A host that has dialled in, with its own description."""

    connection: Connection
    node: str  # such as "node-7 (process 12)"
    cores: int
    max_envs: int | None
    token: str  # of the place that it was started for; empty if it may have any


class Listener:
    """A port at which hosts dial in.

    A thread accepts connections, and each proves in a thread of its own that it has the key. So a stranger
    that is silent delays no host.

    Attributes:
        address: Host and port.
    """

    def __init__(self, host: str, port: int, key: bytes, context: ssl.SSLContext | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._key, self._context = key, context
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._changed = threading.Condition()
        self._hosts: list[Host] = []  # that no pool has taken; guarded by `_changed`, as is `_closed`
        self._closed = False
        threading.Thread(target=self._accept_all, daemon=True).start()

    def wait(self, count: int, timeout: float | None) -> list[Host]:
        """Returns the waiting hosts once there are `count`, or fewer after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._live_hosts()) >= count, timeout)
            return list(self._hosts)

    def take(self, fits: Callable[[Host], bool], timeout: float) -> Host | None:
        """Removes and returns the first waiting host that fits, or `None` after `timeout` seconds."""
        with self._changed:
            host = self._changed.wait_for(lambda: next(filter(fits, self._live_hosts()), None), timeout)
            if host is not None:
                self._hosts.remove(host)
            return host

    def close(self) -> None:
        """Closes the port, and the connections of hosts that no pool has taken."""
        with self._changed:
            self._closed, hosts, self._hosts = True, self._hosts, []
        for host in hosts:
            host.connection.say_goodbye()
            host.connection.close()
        with suppress(OSError):  # wakes `accept`; not connected
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _live_hosts(self) -> list[Host]:
        """Returns the waiting hosts, after those that were lost are dropped."""
        for host in list(self._hosts):
            if not host.connection.is_open():
                host.connection.close()
                self._hosts.remove(host)
        return self._hosts

    def _accept_all(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                sock, _ = self._socket.accept()
            except OSError:  # `close` was called, or another error of the network or of too few resources
                if self._closed:
                    return
                time.sleep(_ACCEPT_RETRY_INTERVAL)
                self._strangers.release()
            else:
                threading.Thread(target=self._admit, args=(sock,), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        """Authenticates a host and queues it."""
        try:
            deadline, tcp = time.monotonic() + _UNAUTHENTICATED_TIMEOUT, sock
            if self._context is not None:
                tcp, sock = encrypt(sock, self._context, deadline=deadline)
            _authenticate(sock, self._key, deadline=deadline, connects=False)
            connection = Connection(tcp, sock)
            hello = json.loads(connection.receive()[1].tobytes())
            host = Host(connection, hello["node"], hello["cores"], hello["max_envs"], hello["token"])
            for name, version in versions().items():
                if hello[name] != version:
                    why = f"has {name} {hello[name]}, but the pool's process has {version}"
                    _logger.warning("a worker host was rejected: %s %s", host.node, why)
                    connection.send(MESSAGE, pickle.dumps(("reject", (f"{why}; install the same version",))))
                    raise ConnectionError(why)
            with self._changed:
                if self._closed:
                    connection.say_goodbye()
                    raise ConnectionError("the listener was closed")
                self._hosts.append(host)
                self._changed.notify_all()
        except (OSError, EOFError, ValueError, KeyError):  # a stranger, or a host that was lost
            sock.close()
        finally:
            self._strangers.release()


def dial(
    address: tuple[str, int], key: bytes, hello: Mapping[str, Any], context: ssl.SSLContext | None = None
) -> Connection:
    """Connects to a `Listener` and describes this host; raises `OSError` without an answer or the key."""
    tcp = sock = socket.create_connection(address, _CONNECT_TIMEOUT)
    try:
        deadline = time.monotonic() + _HANDSHAKE_TIMEOUT
        if context is not None:
            tcp, sock = encrypt(sock, context, deadline=deadline, server_hostname=address[0])
        _authenticate(sock, key, deadline=deadline, connects=True)
        connection = Connection(tcp, sock)
        connection.send(MESSAGE, json.dumps(hello).encode())
    except OSError:
        sock.close()
        raise
    return connection


def _authenticate(sock: socket.socket, key: bytes, *, deadline: float, connects: bool) -> None:
    """Proves to the other end that this one has the key, and checks the other end's proof.

    The listener sends its proof only after it has checked the connector's. A proof is an HMAC of its sender's
    role and of random bytes of both ends, so it can't be replayed or reflected. Raises `OSError`.
    """

    def proof(role: bytes) -> bytes:
        return hmac.digest(key, role + listener + connector, "sha256")

    def check(received: bytes, role: bytes) -> None:
        if not hmac.compare_digest(received, proof(role)):
            raise ConnectionError("the process at the other end does not know the key")

    if connects:
        listener, connector = _read(sock, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(connector + proof(b"connector"))
        check(_read(sock, _PROOF_BYTES, deadline), b"listener")
    else:
        listener = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(listener)  # does not block: the buffer is empty
        answer = _read(sock, _NONCE_BYTES + _PROOF_BYTES, deadline)
        connector = answer[:_NONCE_BYTES]
        check(answer[_NONCE_BYTES:], b"connector")
        sock.sendall(proof(b"listener"))


def _read(sock: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))  # 0 would make it non-blocking
        part = sock.recv(count - len(received))
        if not part:
            raise ConnectionError(
                "the process at the other end closed the connection: compare keys, and whether both use TLS"
            )
        received += part
    return received


def versions() -> dict[str, str]:
    """Returns the versions that must be equal in a pool's process and at its hosts."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "jaxvec": importlib.import_module("jaxvec").__version__,
    }


# --- Rows and messages -----------------------------------------------------------------------------------

Payload: TypeAlias = NDArray[np.uint8]  # rows in one buffer, see `RowPacker`

_WORKER_ROWS = ("raw_info", "last_seed", "rebuilds")  # written by workers besides the time step


class ProcessEnd(NamedTuple):
    """Exit code and description of the end of a worker process."""

    exitcode: int | None
    ending: str


class WorkerMessage(NamedTuple):
    """A message of a worker, or the end of its process. Rows that the worker completed before precede it."""

    worker: int
    incarnation: int
    message: Any


class HostLostError(Exception):
    """The reason why a host can't be used, a phrase that follows its workers' names."""


class WireFormat:
    """The packers of rows between a pool and a host; both ends have equal ones.

    Args:
        requested: Latest request of each slot `[num_envs]`, sent to the host.
        answered: Request that each slot's row answers `[num_envs]`, sent to the pool.
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
        actions = [leaf.path for leaf in spec.action_leaves if not leaf.is_object]
        options = [leaf.path for leaf in spec.option_leaves]
        results = [leaf.path for leaf in spec.timestep_leaves if not leaf.is_object]
        final = [path for path in results if path[:2] == ("info", "final_obs")]
        self._arrays = arrays
        self._rows = [*results, *((name,) for name in _WORKER_ROWS), ("completed",)]
        sent = arrays | {("requested",): requested}
        self.requests = {  # packers of each verb's inputs, for the host
            Verb.STEP: RowPacker(sent, [("requested",), *actions, *options]),
            Verb.RESET: RowPacker(sent, [("requested",), ("seed",), *options]),
        }
        self.results = RowPacker(  # for the pool
            arrays | {("completed",): answered},
            self._rows,
            whole=[arrays[name,][workers.start : workers.stop] for name in ("stats", "running")],
            sparse=dict.fromkeys(final, ("info", "_final_obs")),
        )

    def inheritance(self, worker: int) -> RowPacker:
        """Returns the packer of the rows that a worker inherits if its predecessor's host was lost."""
        return RowPacker(self._arrays, self._rows, whole=[self._arrays["stats",][worker : worker + 1]])
