"""What a process has from the one that starts it, for workers that are forked from another one."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


@dataclass(frozen=True)
class Surroundings:
    """Of a process at one moment. What else there is, descriptors, comes with a message of its own."""

    environ: dict[str, str]
    umask: int
    limits: list[tuple[int, int]]  # soft and hard, of each of `_LIMITS`
    cores: set[int]
    nice: int
    ignored: set[int]  # signals
    blocked: set[int]  # signals

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Surroundings:
        """Returns those of this process and thread, but for the environment variables."""
        return cls(
            environ=dict(environ),
            umask=_umask(),
            limits=[resource.getrlimit(limit) for limit in _LIMITS],
            cores=os.sched_getaffinity(0),
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            ignored=_ignored(),
            blocked=set(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        )

    def enter(self) -> None:
        """Makes them those of this process.

        Raises:
            OSError: the kernel does not let us.
        """
        os.environ.clear()
        os.environ.update(self.environ)
        time.tzset()
        os.umask(self.umask)
        for number in self.ignored ^ _ignored():
            signal.signal(number, signal.SIG_IGN if number in self.ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        if self.cores != os.sched_getaffinity(0):
            os.sched_setaffinity(0, self.cores)
        if self.nice != os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        for limit, pair in zip(_LIMITS, self.limits, strict=True):
            if pair != resource.getrlimit(limit):
                resource.setrlimit(limit, pair)


def identity() -> tuple[object, ...]:
    """Returns what a process has from the one that starts it and can't take on later, to be compared."""
    return (
        os.getresuid(),
        os.getresgid(),
        tuple(os.getgroups()),
        os.getsid(0),
        Path("/proc/self/cgroup").read_text(),
        *sorted(os.readlink(namespace) for namespace in Path("/proc/self/ns").iterdir()),
        tuple(os.stat("/")[:3]),  # chroot
    )


def _umask() -> int:
    """Reads it where it can be read; to set it and set it back would be seen by other threads."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


def _ignored() -> set[int]:
    return {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
