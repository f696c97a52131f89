"""A worker process in a Ray actor, as the pool's supervisor sees it."""

from __future__ import annotations

import threading
from typing import Protocol

from jaxvec._backends._ray._stream import Ended
from jaxvec._handoff._channel import Channel


class Owner(Protocol):
    """Whose actor it is in."""

    @property
    def node(self) -> str:
        """Where that is, in words."""
        ...

    @property
    def ahead(self) -> int:
        """How far its monotonic clock is ahead of ours, in ns."""
        ...

    def end(self, remote: RemoteWorker) -> None:
        """Ends the process, or loses the actor, and has it `note` that."""
        ...


class RemoteWorker:
    """See `Process`."""

    def __init__(self, owner: Owner, worker: int, life: int, channel: Channel) -> None:
        """Names a process that its owner is about to start.

        Args:
            owner: of the actor.
            worker: in whose place it is.
            life: how many were there before.
            channel: the worker's end of its control socket.
        """
        self.worker = worker
        self.life = life
        self.channel = channel
        self._owner = owner
        self._gone = threading.Event()
        self._ended = Ended(None, "")

    @property
    def place(self) -> str:
        return f"on {self._owner.node}"

    @property
    def ahead(self) -> int:
        return self._owner.ahead

    def ended(self) -> bool:
        return self._gone.is_set()

    def wait(self, timeout: float) -> bool:
        return self._gone.wait(timeout)

    def end(self) -> None:
        if not self._gone.is_set():
            self._owner.end(self)

    def ending(self) -> tuple[int | None, str]:
        self._gone.wait(timeout=1)
        return self._ended.exitcode, f"{self.place} {self._ended.ending or 'ended'}"

    def note(self, ended: Ended) -> None:
        """Notes its end, the first that is heard of; the supervisor hears by an end of file."""
        if not self._gone.is_set():
            self._ended = ended
            self._gone.set()
        self.channel.break_off()
