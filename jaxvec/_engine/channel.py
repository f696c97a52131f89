"""The control socket of a worker: a stream of wake bytes and framed messages, in order.

A wake byte means that slots of the segment have changed. A frame has a pickled message and, if needed, file
descriptors. The end of file means that the other end is dead or closed, in both directions.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

from jaxvec._util import dumps

_WAKE_BYTE = b"\0"
_FRAME_BYTE = b"\1"
_HEADER = struct.Struct("!Q")  # length of the frame in bytes
_CHUNK = 1 << 20


WAKE: Final = object()  # the result of `receive` for wake bytes


class Channel:
    """One end of a control socket, the pool's or a worker's.

    One thread at a time may receive; any thread may send.
    """

    def __init__(self, sock: socket.socket) -> None:
        # Any thread sends, with `sending`; one thread at a time receives, in a pool with `polling`.
        self._socket = sock
        sock.setblocking(True)  # also with a `socket.setdefaulttimeout`
        # Held while sending, or to keep other threads from sending. Reentrant, because a signal handler may
        # send, too.
        self.sending: AbstractContextManager[Any] = threading.RLock()
        self.descriptors: list[int] = []  # received descriptors, which the receiver removes
        self._is_replacing = False  # these two guarded by `sending`
        self._closed = False

    def fileno(self) -> int:
        """Returns a descriptor that is readable if `receive` would not wait."""
        return self._socket.fileno()

    def leave_open(self) -> None:
        """Gives the socket up without closing it: it stays open until the process has ended."""
        self._socket.detach()

    def wake(self) -> None:
        """Sends a wake byte. A dead peer is no error here, because `receive` reports it."""
        with suppress(BrokenPipeError, ConnectionResetError), self.sending:
            self._socket.send(_WAKE_BYTE)

    def send(
        self,
        message: Any,
        *,
        deadline: float | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Sends a message.

        Args:
            message: The message, which is pickled by cloudpickle. Bytes are taken as a finished pickle.
            deadline: Latest time to wait for the peer, in seconds of the monotonic clock.
            descriptors: File descriptors to send with it.

        Raises:
            TimeoutError: The peer did not read the message by `deadline`.
            EOFError: The peer is dead.
        """
        payload = message if isinstance(message, bytes) else dumps(message)
        frame = _FRAME_BYTE + _HEADER.pack(len(payload)) + payload
        with self.sending:
            self._send_all(frame, deadline, descriptors)  # in one piece, so that the peer wakes once

    def ready(self, deadline: float | None = 0, event: int = select.POLLIN) -> bool:
        """Returns True if `receive`, or a send for `POLLOUT`, would not wait, at `deadline` at the latest."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if deadline is None else max(deadline - time.monotonic(), 0) * 1000))

    def has_ended(self) -> bool:
        """Returns True if the peer is dead, or has closed its end."""
        return self.ready(event=0)  # POLLHUP is reported in any case

    def receive(self, deadline: float | None = None) -> Any:
        """Waits for a message, or for `WAKE`.

        Raises:
            TimeoutError: A message arrived in part, but not whole by `deadline` (`time.monotonic()` seconds).
            EOFError: The peer is dead, or has closed its end.
        """
        if self._read(1, None) == _WAKE_BYTE:
            self._skip_wakes()
            return WAKE
        (length,) = _HEADER.unpack(self._read(_HEADER.size, deadline))
        return pickle.loads(self._read(length, deadline))

    def receive_message(self) -> Any:
        """Waits for a message, and skips wake bytes. Raises `EOFError` as `receive` does."""
        while (message := self.receive()) is WAKE:
            pass
        return message

    def shut(self, *, both: bool = False) -> None:
        """Ends the stream to the peer, which then sees an end of file.

        With `both`, this end sees one, too, also a thread that is in a system call on this socket.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR if both else socket.SHUT_WR)

    def replace(self, other: Channel) -> Channel:
        """Returns the channel of another worker under this one's descriptor number, which pollers keep."""
        # `close` in another thread waits for the lock: the number would be free, or that of another file. In
        # a signal handler of this thread, it leaves the socket to this call.
        with self.sending:
            self._is_replacing = True
            try:
                if not self._closed:
                    os.dup2(other.fileno(), self.fileno(), inheritable=False)
            finally:
                self._is_replacing = False
                if self._closed:
                    self._socket.close()
        other.close()
        return self

    def close(self) -> None:
        with self.sending:
            self._closed = True
            if not self._is_replacing:
                self._socket.close()

    def _send_all(self, data: bytes, deadline: float | None, descriptors: Sequence[int] = ()) -> None:
        """Sends `data`. A timeout of the socket would also apply to the receiving thread, so this polls."""
        left = memoryview(data)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        while left:
            try:
                sent = self._socket.sendmsg([left], rights, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not self.ready(deadline, select.POLLOUT):
                    raise TimeoutError from None
            except (BrokenPipeError, ConnectionResetError) as error:
                raise EOFError from error
            else:
                left = left[sent:]
                rights = []

    def _skip_wakes(self) -> None:
        """Reads the wake bytes that have arrived so far, so that they do not pile up before a message."""
        # Polls first: a BlockingIOError caught here would be the context of a Ctrl-C that arrives meanwhile.
        if not self.ready():
            return
        with suppress(ConnectionResetError):
            arrived = self._socket.recv(_CHUNK, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            wakes = len(arrived) - len(arrived.lstrip(_WAKE_BYTE))
            if wakes:
                self._socket.recv(wakes)

    def _read(self, count: int, deadline: float | None) -> bytes:
        """Reads `count` bytes, and keeps the descriptors that come with the first byte of a frame."""
        parts: list[bytes] = []
        while count:
            if deadline is not None and not self.ready(deadline):
                raise TimeoutError
            try:
                part, descriptors, _, _ = socket.recv_fds(self._socket, min(count, _CHUNK), 1)
                self.descriptors += descriptors
            except ConnectionResetError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def channel_pair() -> tuple[Channel, int]:
    """Makes a control socket. Returns the parent's end, and the descriptor of the worker's end."""
    parent_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(parent_end), worker_end.detach()


def adopt_channel(descriptor: int) -> Channel:
    """Makes the worker's end from an inherited descriptor, which child processes then don't inherit."""
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))
