"""Lets one call at a time into a pool, and counts the calls that moved it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

_COUNTS = 2**32  # a handle's step count is a uint32

# Who can move a pool. The native gate keeps an index of these.
RESET, STEP, HOST_RESET, HOST_STEP = MOVERS = (
    "jaxvec.reset",
    "jaxvec.step",
    "VectorEnv.reset on the host",
    "VectorEnv.step on the host",
)


class Gate(Protocol):
    """What the pool asks of its gate. Only who is inside reads and writes, but for `served`."""

    @property
    def count(self) -> int:
        """Resets and steps so far, modulo 2**32: what a fresh handle must say."""
        ...

    @property
    def mover(self) -> str:
        """Who made the last of them, of `MOVERS`."""
        ...

    @property
    def served(self) -> int:
        """Calls of compiled programs that succeeded, modulo 2**32."""
        ...

    def inside(self, *, if_busy: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Waits until nobody else is inside; calls `if_busy` first if somebody is."""
        ...

    def moved(self, mover: str) -> None:
        """Counts a reset or step."""
        ...

    def serve(self) -> None:
        """Counts a program's call that succeeded."""
        ...

    def bar(self) -> None:
        """Makes every program ask the pool from now on: it is closed or broken. For good."""
        ...

    def close(self) -> None:
        """Forgets the pool's memory."""
        ...


class PortableGate:
    """The gate of a pool that all callers reach through Python."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.mover = ""
        self.served = 0

    @contextmanager
    def inside(self, *, if_busy: Callable[[], None] | None = None) -> Generator[None]:
        if if_busy is not None and self._lock.locked():
            if_busy()
        with self._lock:  # which no interrupt can leave locked
            yield

    def moved(self, mover: str) -> None:
        self.count = (self.count + 1) % _COUNTS
        self.mover = mover

    def serve(self) -> None:
        self.served = (self.served + 1) % _COUNTS

    def bar(self) -> None:
        pass

    def close(self) -> None:
        pass
