"""TLS for the connections of hosts.

A pool sends and receives in different threads, but only one thread at a time may use a TLS connection. So a
thread of its own has that connection, and exchanges plain data with the others by a pair of sockets.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

_CHUNK = 1 << 18  # bytes
_CHECK_INTERVAL = 5.0  # seconds between checks that a relay without data is still needed


def encrypt(
    sock: socket.socket, context: ssl.SSLContext, *, deadline: float, server_hostname: str
) -> tuple[socket.socket, socket.socket]:
    """Makes a TLS connection of a TCP connection; returns it, and a socket for plain data. Raises `OSError`.

    The certificate of the other end must name `server_hostname`.
    """
    secure = context.wrap_socket(sock, server_hostname=server_hostname, do_handshake_on_connect=False)
    secure.settimeout(max(deadline - time.monotonic(), 0.001))  # of the whole handshake
    try:
        secure.do_handshake()
        return secure, relay(secure)
    except OSError:
        secure.close()
        raise


def relay(secure: ssl.SSLSocket) -> socket.socket:
    """Returns a socket for the plain data of a TLS connection, which a thread relays from then on."""
    secure.setblocking(False)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    threading.Thread(target=_relay, args=(secure, theirs), daemon=True).start()
    return ours


@dataclass
class _Direction:
    """One direction of a relay."""

    source: socket.socket
    target: socket.socket
    waiting: bytes | memoryview = b""  # received, but not yet sent

    def move(self) -> dict[socket.socket, int]:
        """Carries data once. Returns the socket and the events to wait for; none if there may be more.

        Raises `EOFError` if the source has ended, and all of its data is sent.
        """
        current, events = self.source, select.POLLIN
        try:
            if not self.waiting:
                self.waiting = memoryview(self.source.recv(_CHUNK))
                if not self.waiting:
                    raise EOFError
            current, events = self.target, select.POLLOUT
            self.waiting = self.waiting[self.target.send(self.waiting) :]
            return {}
        except ssl.SSLWantReadError:
            return {current: select.POLLIN}
        except ssl.SSLWantWriteError:
            return {current: select.POLLOUT}
        except BlockingIOError:
            return {current: events}


def _relay(secure: ssl.SSLSocket, plain: socket.socket) -> None:
    """Carries data in both directions until one end has closed."""
    directions = _Direction(plain, secure), _Direction(secure, plain)
    with secure, plain, suppress(EOFError, OSError):
        while True:
            one, other = (each.move() for each in directions)
            if not one or not other:
                continue
            wanted = {each: one.get(each, 0) | other.get(each, 0) for each in (*one, *other)}
            # If the network is stuck, data for it may wait forever, so that the end of `plain` is not read.
            if not _poll(wanted, _CHECK_INTERVAL) and _poll({plain: 0}, 0):
                return


def _poll(wanted: dict[socket.socket, int], seconds: float) -> bool:
    """Waits for events; an end is always one of a socket in `wanted`."""
    poll = select.poll()
    for sock, events in wanted.items():
        poll.register(sock, events)
    return bool(poll.poll(seconds * 1000))
