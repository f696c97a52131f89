"""The words in a segment by which parent and workers hand slots to each other; see `_handoff.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._spaces import KeyPath

_LINE = (16,)  # uint32: one word that has a cache line to itself


@dataclass(frozen=True)
class Marks:
    """Each word has one writer, or is only added to. A slot is an env's row.

    Attributes:
        running: `[num_workers, 16]`; worker writes: 1 + the slot whose env runs, or 0; then whether it waits
            for its turn, see `max_running`.
        requested: `[num_slots]` int64; parent writes: the latest request, as `requests` of _move.py.
        completed: `[num_slots]` int64; worker writes: the request it completed last.
        completed_at: `[num_slots]` int64; worker writes: when, in ns of the monotonic clock.
        doorbell, worker_notices, asleep, finished, target, sleepers, parent_notices: of the native hand-off;
            handoff.h says who writes.
    """

    running: NDArray[np.uint32]
    requested: NDArray[np.int64]
    completed: NDArray[np.int64]
    completed_at: NDArray[np.int64]
    doorbell: NDArray[np.uint32]
    worker_notices: NDArray[np.uint32]
    asleep: NDArray[np.uint32]
    finished: NDArray[np.uint32]
    target: NDArray[np.uint32]
    sleepers: NDArray[np.uint32]
    parent_notices: NDArray[np.uint32]

    @classmethod
    def of(cls, arrays: Mapping[KeyPath, NDArray[Any]]) -> Marks:
        """Returns those among the arrays of a segment."""
        return cls(*(arrays[field.name,] for field in fields(cls)))


def shapes(num_slots: int, num_workers: int) -> Iterator[tuple[KeyPath, tuple[int, ...], np.dtype[Any]]]:
    """Yields the path, shape and dtype of each."""
    for name in ("requested", "completed", "completed_at"):
        yield (name,), (num_slots,), np.dtype(np.int64)
    for name in ("running", "doorbell", "worker_notices", "asleep"):
        yield (name,), (num_workers, *_LINE), np.dtype(np.uint32)
    for name in ("finished", "target", "sleepers", "parent_notices"):
        yield (name,), _LINE, np.dtype(np.uint32)
