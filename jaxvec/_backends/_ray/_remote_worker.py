"""A worker process in a Ray actor, as the pool's supervisor sees it: a process and a channel in one.

It has no socket here. What it is told goes with its number through its actor's link; what it says
waits in memory until the pool hears it. One pipe wakes the pool for all its workers.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from jaxvec._backends._ray._wire_format import ProcessEnd
from jaxvec._handoff._channel import WAKE


class WakePipe:
    """Is readable while workers of the pool have said something that it has not heard: a byte for each."""

    def __init__(self) -> None:
        """Makes the pipe; raises `OSError` if no descriptors are left."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)

    def fileno(self) -> int:
        return self._reader

    def put(self) -> None:
        os.write(self._writer, b"\0")

    def take(self) -> None:
        with suppress(BlockingIOError):  # Ctrl-C came between this and the message once
            os.read(self._reader, 1)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Link(Protocol):
    """What a worker has to do with its actor's link."""

    node: str
    ahead: int

    def end(self, remote: RemoteWorker) -> None:
        """Ends a worker process."""
        ...

    def tell(self, remote: RemoteWorker, message: Any, descriptors: Sequence[int]) -> None:
        """Passes a message on, or the end of file for `None`; raises `EOFError` if the worker has ended."""
        ...

    def wake(self) -> None:
        """Looks at the slots of the actor's workers."""
        ...


class RemoteWorker:
    """A worker process in an actor, and the pool's channel to it; see `Process` and `ParentChannel`."""

    def __init__(self, link: Link, worker: int, incarnation: int, wake_pipe: WakePipe) -> None:
        """Names a process that is about to start.

        Args:
            link: to the actor.
            worker: in whose place it is.
            incarnation: how many were there before.
            wake_pipe: of the pool.
        """
        self.worker = worker
        self.incarnation = incarnation
        self._link = link
        self._wake_pipe = wake_pipe
        self.sending = threading.RLock()
        self._said: deque[Any] = deque()  # what the pool has not heard; `None` is the end of file
        self._gone = threading.Event()
        self._ended = ProcessEnd(None, "ended")

    # --- the process -------------------------------------------------------------------------------

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

    # --- the channel -------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._wake_pipe.fileno()

    def wake(self) -> None:
        self._link.wake()

    def send(
        self,
        message: Any,
        *,
        deadline: float | None = None,
        descriptors: Sequence[int] = (),
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        with self.sending:
            self._link.tell(self, message, descriptors)

    def readable(self) -> bool:
        return bool(self._said)

    def receive(self, deadline: float | None = None) -> Any:
        if not self._said:  # it is on its way
            return WAKE
        self._wake_pipe.take()
        message = self._said.popleft()
        if message is None:
            raise EOFError
        return message

    def shut(self) -> None:
        with suppress(EOFError):
            self._link.tell(self, None, ())

    def break_off(self) -> None:
        pass  # who sends does not wait

    def replace(self, other: RemoteWorker) -> RemoteWorker:
        while self._said:  # nobody hears it any more
            with suppress(EOFError):
                self.receive()
        return other

    def close(self) -> None:
        pass  # the pipe is the whole pool's

    # --- what the link says for it, under its lock -------------------------------------------------

    def say(self, message: Any) -> None:
        """Lets the pool hear a message, or `WAKE`, which is said by whatever else it has yet to hear."""
        if not self._gone.is_set() and not (message is WAKE and self._said):
            self._wake_pipe.put()  # first: who finds the message takes a byte
            self._said.append(message)

    def mark_ended(self, ended: ProcessEnd) -> None:
        """Notes its end, the first that is heard of, which the pool hears as an end of file."""
        if not self._gone.is_set():
            self._ended = ended
            self.say(None)
            self._gone.set()
