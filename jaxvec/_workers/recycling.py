"""Recycling: the limits of `Workers(recycle=...)`, beyond which a fresh process replaces a worker."""

from __future__ import annotations

import os
from typing import Any

from jaxvec._options import Recycle
from jaxvec._stats import STEPS, family_of, memory_of
from jaxvec._workers.protocol import Retire

_LOOK_INTERVAL_NS = 100_000_000  # between reads of /proc, which take about 50 µs

_TOO_LOW = (
    "exceeds Recycle(memory=...) in the first step of a new process, so every second result of its envs is "
    "truncated. Raise the limit"
)


class Usage:
    """The memory, descriptors and steps of this process, compared with the limits."""

    def __init__(self, limits: Recycle, stats: memoryview) -> None:
        self._limits, self._stats = limits, stats
        self._first_step, self._next_look_ns = stats[STEPS], 0

    def exceeded(self, now_ns: int) -> Retire | None:
        """Returns a report of a limit that is exceeded, if any."""
        limits, steps = self._limits, self._stats[STEPS] - self._first_step
        if not steps:  # limits that are too low must not stop all progress
            return None
        usage: dict[str, Any] = {"steps": steps}
        first_look = not self._next_look_ns
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + _LOOK_INTERVAL_NS
            usage["memory"] = limits.memory and memory_of(family_of(os.getpid()))
            usage["descriptors"] = limits.descriptors and len(os.listdir("/proc/self/fd"))
        for name, value in usage.items():
            if (limit := getattr(limits, name)) is not None and value >= limit:
                too_low = first_look and name == "memory"
                return Retire(f"it has reached {name}={limit:,}", _TOO_LOW if too_low else "")
        return None
