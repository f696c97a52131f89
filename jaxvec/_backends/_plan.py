"""What the workers of a pool are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxvec._slices._envs import EnvFn


@dataclass(frozen=True)
class Plan:
    """What a worker is made of, now and whenever it has to be made again.

    Attributes:
        env_fns: of all envs, or of all batches of envs.
        slices: `(first, stop)` of each worker's envs.
        worker_env: changes to a worker's environment variables; `None` unsets one.
        start_timeout: seconds that a worker may take to build its envs; `None` for ever.
        spare_envs: how many more envs each worker builds, to be reset in advance.
        strict: whether observations have to be members of their space.
        equal_spaces: whether observation spaces have to be equal, and not only alike.
        size: of batches; `None` for envs one by one.
        idle: whether envs idle when their episode has ended, and no autoreset begins another.
    """

    env_fns: Sequence[EnvFn]
    slices: tuple[tuple[int, int], ...]
    worker_env: Mapping[str, str | None]
    start_timeout: float | None
    spare_envs: int
    strict: bool
    equal_spaces: bool
    size: int | None
    idle: bool

    def env_fns_of(self, worker: int) -> Sequence[EnvFn]:
        """Returns those of one worker."""
        first, stop = (place // (self.size or 1) for place in self.slices[worker])
        return self.env_fns[first:stop]
