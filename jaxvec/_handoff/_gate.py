"""Lets one thread at a time change a pool, and counts the calls that moved its envs.

A call is inside the gate while it checks its handle and sends its envs, and outside, in flight, while
it waits for them. So calls for different envs, of several devices or threads, overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxvec._handoff._move import Move
from jaxvec._tracing._recorder import Record


@dataclass(frozen=True, slots=True)
class Made:
    """What a gate has made of a move.

    Attributes:
        rows: of the time step.
        waited: seconds so far, if the envs are not done: then `rows` are empty yet, and the caller in flight.
    """

    rows: Sequence[NDArray[Any]]
    waited: float | None = None


class Gate(Protocol):
    """What the pool asks of its gate."""

    counts: NDArray[np.uint32]  # [num_envs] how often each env was moved, modulo 2**32, as fresh handles say

    @property
    def mover(self) -> int:
        """Who moved envs last, `Move.mover`."""
        ...

    @property
    def served(self) -> int:
        """Calls of compiled programs that succeeded, modulo 2**32."""
        ...

    def inside(
        self,
        *,
        alone: bool = False,
        if_busy: Callable[[], None] | None = None,
        patience: float | None = None,
    ) -> AbstractContextManager[None]:
        """Waits until nobody else is inside and, if `alone`, nobody else in flight.

        A thread does not wait for itself: it was interrupted, and has left without saying so, or is asked
        from a signal handler.

        Args:
            alone: whether to wait for calls in flight, too.
            if_busy: is called first if there is somebody to wait for.
            patience: seconds after which to go in all the same; `None` for never.
        """
        ...

    def move(
        self, move: Move, actions: Sequence[NDArray[Any]], env_ids: NDArray[Any] | None = None
    ) -> Made | None:
        """Makes a whole step, send or recv, if it meets with nothing unusual; else does nothing.

        Args:
            move: a step of some envs or, of all envs, a send or a recv.
            actions: `[n, ...]` or, of a send, `[k, ...]`.
            env_ids: `[k]`, whom to send.
        """
        ...

    def in_flight(self) -> bool:
        """Says whether this thread has taken off, and not landed."""
        ...

    def take_off(self) -> None:
        """Says that this thread, which is inside, is about to move envs, and may wait for them."""
        ...

    def land(self) -> None:
        """Says that this thread waits no more, if it had taken off."""
        ...

    def moved(self, move: Move) -> None:
        """Counts a move. The caller is inside."""
        ...

    def serve(self) -> None:
        """Counts a program's call that succeeded."""
        ...

    def settle(self) -> None:
        """Waits until no GPU copies from the segment any more; see cuda.cc for who need not."""
        ...

    def admit_devices(self) -> None:
        """Lets programs on a GPU move envs without asking the pool."""
        ...

    def bar(self) -> None:
        """Makes every program ask the pool from now on: it is closed or broken. For good."""
        ...

    def start_trace(self, capacity: int) -> None:
        """Records what compiled programs do without Python, the latest `capacity` spans of it."""
        ...

    def stop_trace(self) -> Record:
        """Records no more, and returns what was."""
        ...

    def close(self) -> None:
        """Forgets the pool's memory."""
        ...


class PortableGate:
    """The gate of a pool that all callers reach through Python."""

    def __init__(self, num_envs: int) -> None:
        self.counts = np.zeros(num_envs, np.uint32)
        self.mover = 0
        self.served = 0
        self._lock = threading.Lock()  # of what follows; no interrupt can leave it locked
        self._changed = threading.Condition(self._lock)
        self._inside: int | None = None  # the thread
        self._in_flight: set[int] = set()  # the threads

    @contextmanager
    def inside(
        self,
        *,
        alone: bool = False,
        if_busy: Callable[[], None] | None = None,
        patience: float | None = None,
    ) -> Generator[None]:
        me = threading.get_ident()

        def vacant() -> bool:
            return self._inside in (None, me) and not (alone and self._in_flight - {me})

        try:  # first: an interrupt may come between entering and our knowing of it
            if if_busy is not None and not vacant():
                if_busy()
            with self._lock:
                self._changed.wait_for(vacant, patience)
                self._inside = me
            yield
        finally:
            with self._lock:
                if self._inside == me:
                    self._inside = None
                    self._changed.notify_all()

    def move(self, move: Move, actions: Sequence[NDArray[Any]], env_ids: NDArray[Any] | None = None) -> None:
        return None

    def in_flight(self) -> bool:
        return threading.get_ident() in self._in_flight

    def take_off(self) -> None:
        with self._lock:
            self._in_flight.add(threading.get_ident())

    def land(self) -> None:
        with self._lock:
            self._in_flight.discard(threading.get_ident())
            self._changed.notify_all()

    def moved(self, move: Move) -> None:
        self.counts[move.slots] += np.uint32(1)
        self.mover = move.mover

    def serve(self) -> None:
        self.served = (self.served + 1) % 2**32

    def settle(self) -> None:
        pass  # rows leave the segment as copies

    def admit_devices(self) -> None:
        pass

    def bar(self) -> None:
        pass

    def start_trace(self, capacity: int) -> None:
        pass  # all come to Python

    def stop_trace(self) -> Record:
        return Record([])

    def close(self) -> None:
        pass
