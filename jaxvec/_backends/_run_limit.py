"""`RunLimit`: at most so many of a pool's workers run their envs at once; the others wait for their turn.

A turn is a lock on one byte of the segment, which the kernel gives back whatever becomes of its holder.
Only who holds the queue's lock looks which turn is free; the others sleep until the queue is theirs.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from typing import Any

from numpy.typing import NDArray

_LOOK_AGAIN = 0.0005  # seconds; who runs for long enough to be limited is not held up by that


class RunLimit:
    """A worker's view; a context manager in which its envs run."""

    def __init__(self, segment: int, turns: int, waiting: NDArray[Any]) -> None:
        """Keeps a descriptor of its own.

        Args:
            segment: the descriptor of the memory that all workers share.
            turns: how many may run.
            waiting: our word that says that we wait for our turn.
        """
        self._fd = os.dup(segment)
        self._turns, self._queue = range(turns), turns
        self._waiting = waiting
        waiting[...] = 0  # a worker that is gone may have left it

    def __enter__(self) -> None:
        self._waiting[...] = 1
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, self._queue)
        self._turn = next(turn for turn in itertools.cycle(self._turns) if self._take(turn))
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._queue)
        self._waiting[...] = 0

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._turn)

    def _take(self, turn: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, turn)
        except BlockingIOError:
            if turn == self._turns[-1]:
                time.sleep(_LOOK_AGAIN)
            return False
        return True
