"""Lets one thread at a time change a pool, and counts the calls that moved its envs.

A call is inside the gate while it checks its handle and sends its envs, and outside, in flight, while
it waits for them. So calls for different envs, of several devices or threads, overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# Who can move a pool. The native gate keeps an index of these.
MOVERS = (
    "jaxvec.reset",
    "jaxvec.step",
    "jaxvec.send",
    "jaxvec.recv",
    "jaxvec.call",
    "VectorEnv.reset on the host",
    "VectorEnv.step on the host",
    "VectorEnv.send on the host",
    "VectorEnv.recv on the host",
)
RESET, STEP, SEND, RECV, CALL, HOST_RESET, HOST_STEP, HOST_SEND, HOST_RECV = MOVERS


class Gate(Protocol):
    """What the pool asks of its gate."""

    counts: NDArray[np.uint32]  # [num_envs] how often each env was moved, modulo 2**32, as fresh handles say

    @property
    def mover(self) -> str:
        """Who moved envs last, of `MOVERS`."""
        ...

    @property
    def served(self) -> int:
        """Calls of compiled programs that succeeded, modulo 2**32."""
        ...

    def inside(
        self, *, alone: bool = False, if_busy: Callable[[], None] | None = None
    ) -> AbstractContextManager[None]:
        """Waits until nobody else is inside and, if `alone`, nobody in flight.

        Args:
            alone: whether to wait for calls in flight, too.
            if_busy: is called first if there is somebody to wait for.
        """
        ...

    def flight(self) -> AbstractContextManager[None]:
        """Lands this thread in the end, if it has taken off."""
        ...

    def take_off(self) -> None:
        """Says that this thread, which is inside, is going to wait for envs."""
        ...

    def moved(self, slots: NDArray[Any], mover: str) -> None:
        """Counts a call that moves the envs of `slots`. The caller is inside."""
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

    def __init__(self, num_envs: int) -> None:
        self.counts = np.zeros(num_envs, np.uint32)
        self.mover = ""
        self.served = 0
        self._lock = threading.Lock()
        self._landed = threading.Condition()
        self._in_flight: list[int] = []  # threads; changed under `_landed`

    @contextmanager
    def inside(self, *, alone: bool = False, if_busy: Callable[[], None] | None = None) -> Generator[None]:
        if if_busy is not None and (self._lock.locked() or (alone and self._in_flight)):
            if_busy()
        while True:
            with self._lock:  # which no interrupt can leave locked
                if not (alone and self._in_flight):
                    yield
                    return
            with self._landed:
                self._landed.wait_for(lambda: not self._in_flight)

    @contextmanager
    def flight(self) -> Generator[None]:
        try:
            yield
        finally:
            with self._landed:
                if threading.get_ident() in self._in_flight:
                    self._in_flight.remove(threading.get_ident())
                    self._landed.notify_all()

    def take_off(self) -> None:
        with self._landed:
            self._in_flight.append(threading.get_ident())

    def moved(self, slots: NDArray[Any], mover: str) -> None:
        self.counts[slots] += np.uint32(1)
        self.mover = mover

    def serve(self) -> None:
        self.served = (self.served + 1) % 2**32

    def bar(self) -> None:
        pass

    def close(self) -> None:
        pass
