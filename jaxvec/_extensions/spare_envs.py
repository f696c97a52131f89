"""Resets in advance, for `make(spare_envs=...)`: a worker resets envs without a slot in idle time.

The spare envs form a queue. When an episode ends, its slot gets the first env, and its own env becomes the
last. So the env of an episode depends only on the order in which episodes end. It does not depend on whether
there was time for a reset in advance.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxvec._arguments import derive_seeds
from jaxvec._envs.slice import SliceExtension
from jaxvec._extension import Extension
from jaxvec._tracing import span

if TYPE_CHECKING:
    from jaxvec._envs.env_slice import EnvSlice


@dataclass(frozen=True)
class SpareEnvs(Extension):
    """The spare envs of a pool's workers.

    Attributes:
        spares: Number of them per worker.
    """

    spares: int

    def on_slice(self, env_slice: EnvSlice) -> SliceExtension:
        return SliceSpares(env_slice)


@dataclass
class Spare:
    """The next reset of a spare env."""

    seed: int | None = None
    options: dict[str, Any] | None = None
    result: Any = None  # `None` if it was not made in advance
    failed: bool = False  # True if that raised; it is tried again when the env gets a slot


class SliceSpares(SliceExtension):
    """The queue of a worker's spare envs."""

    def __init__(self, env_slice: EnvSlice) -> None:
        self._slice = env_slice
        self._slots = env_slice.slots
        self._envs = env_slice.slots.spares  # in the order of the queue; the worker closes those that it has
        self._resets = deque(Spare() for _ in self._envs)
        self._used = False  # True after the first reset of an env in a slot; no seed is known earlier
        self.autoreset = self._swap
        self.prepare = self._prepare
        if self._slots.rebuilt:
            self.env_reset(0, self._slots.new_seeds.get(0))

    def env_reset(self, index: int, seed: int | None) -> None:
        """Derives new seeds from that of the first env, and discards the results of resets in advance."""
        if index == 0 and seed is not None:
            for place, spare in enumerate(self._resets):
                spare.seed = derive_seeds(seed, 1, place)
                spare.result = None
                spare.failed = False
        self._used = True

    def _prepare(self) -> bool:
        """Resets the next env in advance."""
        for env, spare in zip(self._envs, self._resets, strict=True):
            if self._used and spare.result is None and not spare.failed:
                with span(self._slice.recorder, "reset a spare env"):
                    try:
                        spare.result = self._slots.call_reset(env, 0, seed=spare.seed, options=spare.options)
                    except BaseException:
                        spare.failed = True
                return True
        return False

    def _swap(self, index: int) -> Any:
        """Puts the first spare env into a slot, and returns the result of its reset."""
        env = self._envs.pop(0)
        spare = self._resets.popleft()
        retired, seed, options = self._slots.replace(index, env)
        self._envs.append(retired)
        self._resets.append(Spare(seed, options))
        if spare.result is None:
            called = self._slots.called[index]
            return self._slots.call_reset(called, index, seed=spare.seed, options=spare.options)
        return spare.result
