"""What the workers of a pool are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxvec._slices._envs import EnvFn
from jaxvec._slices._kind import Kind


@dataclass(frozen=True)
class Plan:
    """What a worker is made of, now and whenever it has to be made again.

    Attributes:
        env_fns: of all envs, or of all batches of envs.
        slices: `(first, stop)` of each worker's envs.
        start_timeout: seconds that a worker may take to build its envs; `None` for ever.
        kind: of each worker's slice.
    """

    env_fns: Sequence[EnvFn]
    slices: tuple[tuple[int, int], ...]
    start_timeout: float | None
    kind: Kind

    def env_fns_of(self, worker: int) -> Sequence[EnvFn]:
        """Returns those of one worker."""
        first, stop = (place // (self.kind.size or 1) for place in self.slices[worker])
        return self.env_fns[first:stop]
