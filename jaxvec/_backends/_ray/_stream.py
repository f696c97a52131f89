"""What comes back from a Ray actor, in order: rows, and what was said after these."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = NDArray[np.uint8]  # rows, see `RowPacker`


class Ended(NamedTuple):
    """How a worker process ended."""

    exitcode: int | None
    ending: str


class Said(NamedTuple):
    """What a worker said, or its end."""

    worker: int
    life: int  # which of the processes in the worker's place it was
    message: Any


class Failed(NamedTuple):
    """What went wrong with the actor itself."""

    why: str
