"""Names a worker's process, so that `ps` tells whose it is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_LONGEST = 15  # characters, of which the kernel keeps no more


def show(first: int, count: int) -> None:
    """Names this process `jaxvec 4-7`, after its envs, where the system lets it; its command line stays.

    Args:
        first: id of its first env.
        count: how many it has.
    """
    envs = f"{first}-{first + count - 1}" if count > 1 else f"{first}"
    with suppress(OSError):  # not Linux, or no /proc: a name is a convenience
        Path("/proc/self/comm").write_text(f"jaxvec {envs}"[:_LONGEST])
