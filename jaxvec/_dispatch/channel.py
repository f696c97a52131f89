"""One end of a worker's control socket: single wake bytes and framed messages, in order.

A wake byte says "look at your slots in the segment". A frame carries a pickled message, and
descriptors if there are any. End of file is the death notice, in both directions. `ParentChannel` and
`WorkerChannel` say what the pool and a worker need of their ends: a worker on another machine has no socket
here, and something else stands for it.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

from jaxvec._util import dumps

_WAKE_BYTE = b"\0"
_FRAME_BYTE = b"\1"
_HEADER = struct.Struct("!Q")  # length of the frame in bytes
_CHUNK = 1 << 20


class _Wake:
    """Type of `WAKE`."""


WAKE: Final = _Wake()


class WorkerChannel(ABC):
    """A worker's end."""

    @abstractmethod
    def wake(self) -> None:
        """Makes the other end look at its slots. A dead peer is not an error here: `receive` will tell."""

    @abstractmethod
    def readable(self) -> bool:
        """Tells whether `receive` finds something at once."""

    @abstractmethod
    def receive(self, deadline: float | None = None) -> Any:
        """Waits for `WAKE` or a message; who must not wait polls the channel first.

        Raises:
            TimeoutError: it came in part, but not whole by `deadline` (`time.monotonic()` seconds).
            EOFError: the peer is dead, or has closed its end.
        """


class ParentChannel(WorkerChannel):
    """The pool's end, to one worker. One thread at a time may receive, and any number send.

    Attributes:
        sending: a lock that is held while sending, or to keep others from it.
    """

    sending: AbstractContextManager[Any]

    @abstractmethod
    def fileno(self) -> int:
        """Returns a descriptor that is readable when `receive` finds something; several can share one."""

    @abstractmethod
    def send(
        self,
        message: Any,
        *,
        deadline: float | None = None,
        descriptors: Sequence[int] = (),
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends a message.

        Args:
            message: what to send, by cloudpickle; bytes are its pickle, which others have made.
            deadline: `time.monotonic()` seconds.
            descriptors: that go with it.
            notify: tells a peer that does not look at its socket that a message is coming.

        Raises:
            TimeoutError: the peer didn't take it by `deadline`.
            EOFError: the peer is dead.
        """

    @abstractmethod
    def shut(self) -> None:
        """Tells the peer that nothing more will come; it sees an end of file."""

    def break_off(self) -> None:
        """Ends whatever is being sent, if that can take long; from any thread."""

    @abstractmethod
    def replace(self, other: Any) -> ParentChannel:
        """Returns what is to another's worker, under this one's descriptor number, which others go by."""

    def close(self) -> None:
        """Gives back what it holds."""


class Channel(ParentChannel):
    """One end of a control socket, the pool's or a worker's. Frames come whole, whoever sends.

    Attributes:
        descriptors: that came with frames; the receiver takes them from here.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.sending = threading.RLock()  # a signal handler may send, too
        self.descriptors: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def wake(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError), self.sending:
            self._socket.send(_WAKE_BYTE)

    def send(
        self,
        message: Any,
        *,
        deadline: float | None = None,
        descriptors: Sequence[int] = (),
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        payload = message if isinstance(message, bytes) else dumps(message)
        notify()  # before: a long message needs its reader, who finds a short one when it is awake
        frame = _FRAME_BYTE + _HEADER.pack(len(payload))
        with self.sending:
            if descriptors:  # they ride on the header: they would be lost on a byte that is read by recv()
                self._send_all(frame[:1], deadline)
                self._send_all(frame[1:], deadline, descriptors)
                frame = b""
            self._send_all(frame + payload, deadline)  # in one piece, or the peer would wake for each

    def readable(self, deadline: float | None = 0) -> bool:
        """Tells whether `receive` finds something by `deadline`, `time.monotonic()` seconds; `None` waits."""
        return _ready(self._socket, select.POLLIN, deadline)

    def receive(self, deadline: float | None = None) -> Any:
        try:
            kind = self._socket.recv(1)
        except ConnectionResetError as error:
            raise EOFError from error
        if not kind:
            raise EOFError
        if kind == _WAKE_BYTE:
            self._skip_wakes()
            return WAKE
        (length,) = _HEADER.unpack(self._read(_HEADER.size, deadline, self._receive_header))
        return pickle.loads(self._read(length, deadline, self._socket.recv))

    def receive_message(self) -> Any:
        """Waits for a message, past wakes; raises `EOFError` as `receive`."""
        while (message := self.receive()) is WAKE:
            pass
        return message

    def shut(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def break_off(self) -> None:
        # Both ends see an end of file, also while another thread uses this one.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def replace(self, other: Channel) -> Channel:
        os.dup2(other.fileno(), self.fileno(), inheritable=False)
        other.close()
        return self

    def close(self) -> None:
        self._socket.close()

    def _send_all(self, data: bytes, deadline: float | None, descriptors: Sequence[int] = ()) -> None:
        """Sends `data`, without a timeout of the socket, which would be that of who receives, too."""
        left = memoryview(data)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        while left:
            try:
                sent = self._socket.sendmsg([left], rights, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not _ready(self._socket, select.POLLOUT, deadline):
                    raise TimeoutError from None
            except (BrokenPipeError, ConnectionResetError) as error:
                raise EOFError from error
            else:
                left, rights = left[sent:], []

    def _skip_wakes(self) -> None:
        """Takes the wakes that have come by now for one, lest they pile up before a message."""
        # Asked before: an error caught here would stand in the traceback of a Ctrl-C that comes meanwhile.
        if not _ready(self._socket, select.POLLIN, 0.0):
            return
        with suppress(ConnectionResetError):
            come = self._socket.recv(_CHUNK, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            wakes = len(come) - len(come.lstrip(_WAKE_BYTE))
            if wakes:
                self._socket.recv(wakes)

    def _read(self, count: int, deadline: float | None, receive: Callable[[int, int], bytes]) -> bytes:
        parts: list[bytes] = []
        flags = 0 if deadline is None else socket.MSG_DONTWAIT
        while count:
            part = _come(receive, min(count, _CHUNK), flags)
            if part is None:
                if not _ready(self._socket, select.POLLIN, deadline):
                    raise TimeoutError
                continue
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _receive_header(self, count: int, flags: int) -> bytes:
        """Receives bytes of a header, and the descriptors that come with it."""
        part, descriptors, _, _ = socket.recv_fds(self._socket, count, 1, flags)
        self.descriptors += descriptors
        return part


def channel_pair() -> tuple[Channel, int]:
    """Makes a control socket: the parent's end, and the worker's as a bare descriptor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours), theirs.detach()


def dead_socket() -> tuple[Channel, socket.socket]:
    """Makes an end that hears nothing, and can't be told anything, while what comes with it is open."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.shutdown(socket.SHUT_RD)
    return Channel(ours), theirs


def adopt_channel(descriptor: int) -> Channel:
    """Makes the worker's end from an inherited descriptor, and keeps it from being inherited on."""
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))


def _come(receive: Callable[[int, int], bytes], count: int, flags: int) -> bytes | None:
    """Receives at most so many bytes; `None` if there are none yet and the flags say not to wait."""
    try:
        part = receive(count, flags)
    except BlockingIOError:
        return None
    except ConnectionResetError as error:
        raise EOFError from error
    if not part:
        raise EOFError
    return part


def _ready(sock: socket.socket, event: int, deadline: float | None) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(None if deadline is None else max(deadline - time.monotonic(), 0) * 1000))
