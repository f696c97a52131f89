"""Stacks of worker processes, also of those that hang in C code with the GIL.

A worker lets `faulthandler` write its stack into unnamed memory when it gets one of two real-time signals,
which envs rarely use. Any process of the user can send the signal, and read the memory through /proc. After
`DUMP`, the worker continues, and Python repeats an interrupted system call. `DUMP_AND_END` also ends it, so
that no env continues that is about to be replaced. The kernel delivers the signals to the main thread, which
runs the envs, unless it blocks them.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from jaxvec._memory.segment import create_memory
from jaxvec._stats import family_of

_IS_SUPPORTED = sys.platform == "linux"
DUMP, DUMP_AND_END = (signal.SIGRTMAX - n if _IS_SUPPORTED else 0 for n in (8, 9))
# The name of the memory for a stack, with its numbers, as /proc shows it.
_NAME = re.compile(r"/(?:memfd:|dev/shm/)jaxvec stack (\d+) (\d+) (\d+)\b")
_TIMEOUT = 0.5  # seconds for a dump; a stopped process makes none
_POLL_INTERVAL = 0.01  # seconds; a dump is complete if it does not grow for as long
_CURRENT = "Current thread"


def publish(worker: int, first: int, last: int) -> None:
    """Prepares this process, a worker with the envs `first` to `last`, for the signals."""
    if _IS_SUPPORTED:
        # The process keeps the descriptor.
        memory = create_memory(f"jaxvec stack {worker} {first} {last}")
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(DUMP, memory)
        faulthandler.register(DUMP_AND_END, memory, chain=True)  # the default action ends the process


@dataclass(frozen=True)
class Published:
    """A running worker, as any process can find it; its envs are `first` to `last`."""

    pid: int
    worker: int
    first: int
    last: int
    memory: str  # path of its stack's memory

    def send(self, number: int) -> int:
        """Sends a signal. Returns a descriptor of the memory; raises `OSError` if the worker can't get it."""
        status = Path(f"/proc/{self.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        if not int(status, 16) >> number - 1 & 1:  # the default action would end the process
            raise ProcessLookupError(f"process {self.pid} has no handler of signal {number}")
        memory = os.open(self.memory, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(memory, 0)
        os.kill(self.pid, number)
        return memory

    def request_stack(self, number: int = DUMP) -> Callable[[], str]:
        """Sends the signal. Returns a function that waits for the stack, and returns "" if there is none."""
        try:
            memory = self.send(number)
        except OSError:
            return lambda: ""

        def read() -> str:
            deadline = time.monotonic() + _TIMEOUT
            text = ""
            is_complete = False
            while time.monotonic() < deadline and not is_complete:
                time.sleep(_POLL_INTERVAL)
                previous = text
                text = os.pread(memory, 1 << 20, 0).decode(errors="replace")
                is_complete = _CURRENT in text and text == previous
            os.close(memory)
            return text

        return read


def find_all(program: int) -> Iterator[Published]:
    """Yields the workers among a process and its descendants."""
    seen: set[int] = set()  # inodes, as forks of a worker have the same memory
    for pid in family_of(program):
        with suppress(OSError, ValueError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if (name := _NAME.match(os.readlink(link))) and (inode := link.stat().st_ino) not in seen:
                    seen.add(inode)
                    worker, first, last = map(int, name.groups())
                    yield Published(pid, worker, first, last, str(link))


def request_stack(pid: int | None, *, end: bool) -> Callable[[], str]:
    """Requests the stack of a process of this machine that was not reaped; see `Published`."""
    worker = None if pid is None else next(find_all(pid), None)
    return (lambda: "") if worker is None else worker.request_stack(DUMP_AND_END if end else DUMP)


def env_part(stack: str) -> str:
    """Returns the lines of the running thread's stack above jaxvec, most recent call first."""
    current = stack.rpartition(_CURRENT)[2].partition("\n\n")[0].split("\n")[1:]
    return "\n".join(takewhile(lambda line: f"{os.sep}jaxvec{os.sep}_" not in line, filter(None, current)))
