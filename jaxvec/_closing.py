"""The end of a pool, apart from the pool itself.

A pool that broke keeps the error, whose traceback has frames that hold the pool's `VectorEnv`. Who waits
for that to be dropped, to close the pool, must not hold the error.
"""

from __future__ import annotations

import os

from jaxvec._backends._backend import Workers
from jaxvec._handoff._engine import Engine
from jaxvec._memory._pinned import Pinned

_HURRY = 1.0  # seconds for the envs of a broken pool
_PATIENCE = 1.0  # seconds for others to be done with a pool whose workers are gone


class Closing:
    """Closes a pool once.

    Attributes:
        process: whose pool it is; no fork of it may use or close the pool.
        closed: whether it is, or is about to be.
        ended: whether nothing is left of it.
        hurry: whether its envs get little time, because it is broken.
        pinned: the segment, if it is page-locked; it must not be while it is unmapped.
    """

    def __init__(self, workers: Workers, engine: Engine) -> None:
        self._workers = workers
        self._engine = engine
        self.process: int = os.getpid()
        self.closed: bool = False
        self.ended: bool = False
        self._closing = False
        self.hurry = False
        self.pinned: Pinned | None = None

    def close(self, timeout: float | None = 5.0) -> None:
        """Closes, see `Pool.close`; goes on where Ctrl-C ended another call, and returns if one is at it."""
        if self.ended or self._closing or os.getpid() != self.process:
            return
        self.closed = self._closing = True
        try:
            self._engine.bar()
            with self._engine.exclusive(if_busy=self._workers.kill, patience=_PATIENCE):
                self._end(min(_HURRY if timeout is None else timeout, _HURRY) if self.hurry else timeout)
        finally:
            self._closing = False

    def _end(self, timeout: float | None) -> None:
        try:
            self._workers.close(timeout, tell=not self.hurry)  # whose envs fail or hang was told
        finally:  # Ctrl-C ends their time, and nothing else
            self._engine.wait_for_copies()
            if self.pinned is not None:
                self.pinned.close()
            self._engine.close()
            self.ended = True  # last: who sees it may drop the memory
