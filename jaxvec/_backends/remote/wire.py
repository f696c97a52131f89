"""TCP connections between a pool and its hosts, and their messages; used by both ends."""

from __future__ import annotations

import hmac
import importlib
import json
import logging
import pickle
import platform
import secrets
import selectors
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxvec._backends.remote.tls import encrypt, relay
from jaxvec._options import check_count

# --- TCP connections between two processes that share a key ----------------------------------------------
# Each end proves that it has the key before the other reads a frame, so no process without it sends pickles.
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
_HANDSHAKE_TIMEOUT = 30.0  # seconds for a host to be admitted, as the processes of a busy machine may be slow
_REDIAL_INTERVAL = 0.2  # seconds after which a host connects again if the listener did not wait for its proof
_UNAUTHENTICATED_TIMEOUT = 0.5  # seconds that a listener waits for the proof of one connection
_MAX_UNAUTHENTICATED = 512  # connections that have this time at once; a further one takes that of the oldest
# Accepted before the proofs that have arrived are checked again. With one, two processes that connect all
# the time delayed a host by 2 s (median, 2 cores); with 32, by 16 ms.
_MAX_ACCEPTS = 32
_ACCEPT_RETRY_INTERVAL = 0.2  # seconds after an error, such as no descriptor for another connection
_REFUSAL_LOG_INTERVAL = 1.0  # seconds between log records of connections with another key
_REFUSAL = b"jaxvec: refused".ljust(_PROOF_BYTES)  # a listener's answer to a wrong proof
_MAX_HELLO = 1 << 12  # bytes
_MAX_MESSAGE = 1 << 36  # bytes
_ACK_CHECK_INTERVAL = 3.0  # seconds between checks that sent data are acknowledged
_ACK_TIMEOUT = 14.0  # seconds without an acknowledgement, after which the other machine is lost
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}  # 14 s in all; not on every system
# Fields of Linux's `tcp_info`: tcpi_probes, tcpi_unacked, and tcpi_last_ack_recv in milliseconds.
_TCP_INFO = struct.Struct("<3xB20xI28xI")

_logger = logging.getLogger("jaxvec")
T = TypeVar("T")


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
    token: str  # of the place that it was started for; empty if it may have any


class Peer:
    """A connection to a listener that has not yet proved that it has the key."""

    def __init__(self, sock: socket.socket, address: str, key: bytes, context: ssl.SSLContext | None) -> None:
        self.address = address
        self.deadline: float = time.monotonic() + _UNAUTHENTICATED_TIMEOUT
        self.sock = sock
        if context is not None:
            self.sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self.sock.setblocking(False)
        self.proving: Generator[int] = self._prove(key)

    def _prove(self, key: bytes) -> Generator[int]:
        """Checks the proof, and then proves the same; yields an event to wait for. Raises `OSError`."""
        if isinstance(self.sock, ssl.SSLSocket):
            yield from _attempt(self.sock.do_handshake)
        listener = secrets.token_bytes(_NONCE_BYTES)
        self.sock.send(listener)  # does not block, as the buffer has room for all that is sent here
        answer = b""
        while len(answer) < _NONCE_BYTES + _PROOF_BYTES:
            part = yield from _attempt(self.sock.recv, _NONCE_BYTES + _PROOF_BYTES - len(answer))
            if not part:
                raise EOFError
            answer += part
        connector, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(key, b"connector", listener, connector)):
            self.sock.send(_REFUSAL)
            raise PermissionError("it does not have the key")
        self.sock.send(_proof(key, b"listener", listener, connector))


def _attempt(operation: Callable[..., T], *args: Any) -> Generator[int, None, T]:
    """Calls an operation of a non-blocking socket until it succeeds; yields an event to wait for."""
    while True:
        try:
            return operation(*args)
        except (BlockingIOError, ssl.SSLWantReadError):
            yield selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            yield selectors.EVENT_WRITE


class Listener:
    """A port at which hosts dial in.

    One thread accepts connections, asks each at once for a proof that it has the key, and waits for the
    proofs of all at the same time. So a connection without the key delays no host. Those with the key are
    admitted in threads of their own.

    Attributes:
        address: Host and port.
        key: Key of the hosts.
    """

    def __init__(self, host: str, port: int, key: bytes, context: ssl.SSLContext | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=4096)  # or the system's most
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.key, self._context = key, context
        self._changed = threading.Condition()
        self._hosts: list[Host] = []  # that no pool has taken; guarded by `_changed`, as is `_closed`
        self._closed = False
        # Used by the thread only.
        self._selector = selectors.DefaultSelector()
        self._peers: dict[Peer, None] = {}  # from the oldest to the newest
        self._next_log = 0.0  # earliest time of another record of a refusal, of `time.monotonic()`
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, count: int, timeout: float | None) -> list[Host]:
        """Returns the waiting hosts once there are `count`, or fewer after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._live_hosts()) >= count, timeout)
            return list(self._hosts)

    def take(self, token: str, timeout: float) -> Host | None:
        """Removes and returns the first waiting host with a token, or `None` after `timeout` seconds."""

        def find() -> Host | None:
            return next((host for host in self._live_hosts() if host.token == token), None)

        with self._changed:
            if (host := self._changed.wait_for(find, timeout)) is not None:
                self._hosts.remove(host)
            return host

    def close(self) -> None:
        """Closes the port, and the connections of hosts that no pool has taken."""
        with self._changed:
            self._closed, hosts, self._hosts = True, self._hosts, []
        for host in hosts:
            host.connection.say_goodbye()
            host.connection.close()
        with suppress(OSError):  # wakes the thread, which closes the socket; closed before
            self._socket.shutdown(socket.SHUT_RDWR)

    def _live_hosts(self) -> list[Host]:
        """Returns the waiting hosts, after those that were lost are dropped."""
        for host in list(self._hosts):
            if not host.connection.is_open():
                host.connection.close()
                self._hosts.remove(host)
        return self._hosts

    # --- The thread that accepts connections ---------------------------------------------------------

    def _run(self) -> None:
        with self._socket, self._selector:
            self._selector.register(self._socket, selectors.EVENT_READ)
            while not self._closed:
                oldest = next(iter(self._peers), None)
                ready = self._selector.select(oldest and max(oldest.deadline - time.monotonic(), 0))
                peers = [key.data for key, _ in ready if key.data is not None]
                for peer in peers:
                    self._advance(peer)
                if len(peers) < len(ready):
                    self._accept()
                while (oldest := next(iter(self._peers), None)) and oldest.deadline <= time.monotonic():
                    self._drop(oldest)
            for peer in [*self._peers]:
                self._drop(peer)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # the listener was closed, or an error of the network or of too few descriptors
                if self._peers:
                    self._drop(next(iter(self._peers)))
                elif not self._closed:
                    time.sleep(_ACCEPT_RETRY_INTERVAL)
                return
            try:
                peer = Peer(sock, f"{address[0]}:{address[1]}", self.key, self._context)
                self._selector.register(peer.sock, selectors.EVENT_READ, peer)
            except Exception:  # such as the connection's end
                sock.close()
                continue
            if len(self._peers) >= _MAX_UNAUTHENTICATED:
                self._drop(next(iter(self._peers)))
            self._peers[peer] = None
            self._advance(peer)

    def _advance(self, peer: Peer) -> None:
        try:
            if event := next(peer.proving, 0):
                self._selector.modify(peer.sock, event, peer)
                return
            self._forget(peer)
            threading.Thread(target=self._admit, args=(peer,), daemon=True).start()
        except Exception as error:  # any: a connection must not end the listener
            self._drop(peer)
            if isinstance(error, PermissionError) and time.monotonic() >= self._next_log:
                self._next_log = time.monotonic() + _REFUSAL_LOG_INTERVAL
                _logger.warning("refused a connection from %s: %s", peer.address, error)

    def _drop(self, peer: Peer) -> None:
        self._forget(peer)
        peer.sock.close()

    def _forget(self, peer: Peer) -> None:
        if peer in self._peers:
            del self._peers[peer]
            self._selector.unregister(peer.sock)

    # --- A thread for each connection with the key ---------------------------------------------------

    def _admit(self, peer: Peer) -> None:
        """Reads a host's description of itself and queues the host."""
        tcp = sock = peer.sock
        try:
            if isinstance(tcp, ssl.SSLSocket):
                sock = relay(tcp)
            try:
                hello = _read_hello(sock)
            except Exception as error:
                is_phrase = isinstance(error, HostLostError)
                why = str(error) if is_phrase else f"sent no valid description: {error!r}"
                _logger.warning("rejected a worker host at %s: it %s", peer.address, why)
                Connection(tcp, sock).send(MESSAGE, pickle.dumps(("reject", (why,))))
                raise
            with self._changed:
                host = Host(Connection(tcp, sock), *hello)
                if self._closed:
                    host.connection.say_goodbye()
                    raise ConnectionError("the listener was closed")
                self._hosts.append(host)
                self._changed.notify_all()
        except Exception:  # any: a host must not end with a traceback of this process
            sock.close()


def dial(
    address: tuple[str, int], key: bytes, hello: Mapping[str, Any], context: ssl.SSLContext | None = None
) -> Connection:
    """Connects to a `Listener` and describes this host; raises `OSError` without an answer or the key.

    A listener that has too little time for a slow host closes the connection without a refusal. Then the
    host connects again.
    """
    deadline = time.monotonic() + _HANDSHAKE_TIMEOUT
    while True:
        tcp = sock = socket.create_connection(address, _CONNECT_TIMEOUT)
        answered = context is not None  # without TLS, a listener at once sends its random bytes
        try:
            if context is not None:
                tcp, sock = encrypt(sock, context, deadline=deadline, server_hostname=address[0])
            listener, connector = _read(sock, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
            answered = True
            sock.sendall(connector + _proof(key, b"connector", listener, connector))
            proof = _read(sock, _PROOF_BYTES, deadline)
            if proof == _REFUSAL:
                raise PermissionError("the process at the other end has another key; compare the key files")
            if not hmac.compare_digest(proof, _proof(key, b"listener", listener, connector)):
                raise ConnectionError("the process at the other end does not know the key")
            connection = Connection(tcp, sock)
            connection.send(MESSAGE, json.dumps(hello).encode())
            return connection
        except OSError as error:
            sock.close()
            closed = isinstance(error, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)
            if not (closed and answered) or time.monotonic() >= deadline:
                raise
        time.sleep(_REDIAL_INTERVAL)


def _proof(key: bytes, role: bytes, listener: bytes, connector: bytes) -> bytes:
    """Returns the proof of one end that it has the key.

    It depends on random bytes of both ends and on the role, so it can't be replayed or reflected. The
    listener sends its proof only after it has checked the connector's.
    """
    return hmac.digest(key, role + listener + connector, "sha256")


def _read(sock: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))  # 0 would make it non-blocking
        part = sock.recv(count - len(received))
        if not part:
            raise ConnectionResetError(
                "the process at the other end closed the connection: compare keys, and whether both use TLS"
            )
        received += part
    return received


def _read_hello(sock: socket.socket) -> tuple[str, int, str]:
    """Returns a host's description, as for `Host`; raises `HostLostError` if it has other versions."""
    deadline = time.monotonic() + _HANDSHAKE_TIMEOUT
    _, length = _HEADER.unpack(_read(sock, _HEADER.size, deadline))
    if length > _MAX_HELLO:
        raise ValueError(f"it has {length} bytes")
    hello = json.loads(_read(sock, length, deadline))
    for name, version in versions().items():
        if hello[name] != version:
            raise HostLostError(
                f"has {name} {hello[name]}, but the pool's process has {version}; install the same version"
            )
    node, cores, token = hello["node"], hello["cores"], hello["token"]
    for text in (node, token):
        if not (isinstance(text, str) and text.isprintable()):
            raise TypeError(f"not a printable string: {text!r:.100}")
    check_count("cores", cores, 1)
    return node, cores, token


def versions() -> dict[str, str]:
    """Returns the versions that must be equal in a pool's process and at its hosts."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "jaxvec": importlib.import_module("jaxvec").__version__,
    }


# --- Messages --------------------------------------------------------------------------------------------


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
