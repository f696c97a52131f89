"""Recycling: the limits of `Workers(recycle=...)`, beyond which a fresh process replaces a worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING

from jaxvec._envs.slice import Retirement, SliceExtension
from jaxvec._extension import Extension
from jaxvec._options import Recycle
from jaxvec._stats import STEPS, family_of, memory_of

if TYPE_CHECKING:
    from jaxvec._envs.env_slice import EnvSlice

_LOOK_INTERVAL_NS = 100_000_000  # between reads of /proc, which take about 50 µs


@dataclass(frozen=True)
class Recycling(Extension):
    """The limits of a pool's worker processes."""

    limits: Recycle
    retires_workers = True

    def on_slice(self, env_slice: EnvSlice) -> Usage:
        return Usage(self.limits, env_slice.stats)


class Usage(SliceExtension):
    """The steps, memory and descriptors of this process, compared with the limits."""

    def __init__(self, limits: Recycle, stats: memoryview) -> None:
        self._limits = limits
        self._stats = stats
        self._first_step = stats[STEPS]
        self._next_look_ns = 0
        self.find_retirement = self._find_retirement

    def _find_retirement(self) -> Retirement | None:
        steps = self._stats[STEPS] - self._first_step
        if not steps:  # limits that are too low must not stop all progress
            return None
        limits = self._limits
        if limits.steps is not None and steps >= limits.steps:
            return Retirement(f"it has reached steps={limits.steps:,}")
        now_ns = monotonic_ns()
        if now_ns < self._next_look_ns:
            return None
        is_first_look = not self._next_look_ns
        self._next_look_ns = now_ns + _LOOK_INTERVAL_NS
        if limits.memory is not None and memory_of(family_of(os.getpid())) >= limits.memory:
            too_low = (
                "exceeds Recycle(memory=...) in the first step of a new process, so every second result of "
                "its envs is truncated. Raise the limit"
            )
            return Retirement(f"it has reached memory={limits.memory:,}", too_low if is_first_look else "")
        if limits.descriptors is not None and len(os.listdir("/proc/self/fd")) >= limits.descriptors:
            return Retirement(f"it has reached descriptors={limits.descriptors:,}")
        return None
