"""How many cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Counts the cores this process may use, where the platform can tell: containers often allow fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
