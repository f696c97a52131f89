"""What the workers of a pool are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxvec._slices._envs import EnvFn
from jaxvec._slices._slice_config import SliceConfig


@dataclass(frozen=True)
class WorkerRecipe:
    """What a worker is made of, now and whenever it has to be made again.

    Attributes:
        env_fns: of all envs, or of all batches of envs.
        slices: `(first, stop)` of each worker's envs.
        start_timeout: seconds that a worker may take to build its envs; `None` for ever.
        slice_config: of each worker's slice.
        pin_workers: whether each worker has a core of its own.
        max_running: how many workers may run envs at once; `None` for all.
        worker_init: what each worker runs before it builds its envs.
    """

    env_fns: Sequence[EnvFn]
    slices: tuple[tuple[int, int], ...]
    start_timeout: float | None
    slice_config: SliceConfig
    pin_workers: bool = False
    max_running: int | None = None
    worker_init: Callable[..., Any] | None = None

    def env_fns_of(self, worker: int) -> Sequence[EnvFn]:
        """Returns those of one worker."""
        first, stop = (place // (self.slice_config.size or 1) for place in self.slices[worker])
        return self.env_fns[first:stop]
