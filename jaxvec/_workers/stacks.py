"""Access to workers of another program: their Python stacks, also if they hang, and a prompt of pdb.

A worker lets `faulthandler` write its stack into unnamed memory when it gets one of two real-time signals,
which envs rarely use. Any process of the user can send the signal, and read the memory through /proc. After
`DUMP`, the worker continues, and Python repeats an interrupted system call. `DUMP_AND_END` also ends it, so
that no env continues that is about to be replaced. `ATTACH` requests a prompt (debugger.py); the memory then
has the paths of a terminal and of a pipe.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from jaxvec._stats import family_of

_IS_SUPPORTED = sys.platform == "linux"
DUMP, DUMP_AND_END, ATTACH = (signal.SIGRTMAX - n if _IS_SUPPORTED else 0 for n in (8, 9, 10))
_NAME = "/memfd:jaxvec stack "
_TIMEOUT = 0.5  # seconds for a dump; a stopped process makes none
_POLL_INTERVAL = 0.01  # seconds; a dump is complete if it does not grow for as long
_CURRENT = "Current thread"
_MAX_BYTES = 1 << 20


def publish(worker: int, first: int, last: int, attach: Callable[[int, int], None]) -> None:
    """Prepares this process, a worker with the envs `first` to `last`, for the signals.

    `attach` gets descriptors of a terminal, and of a pipe that it closes at the end of the prompt.
    """
    if not _IS_SUPPORTED:
        return
    memory = os.memfd_create(f"{_NAME.partition(':')[2]}{worker} {first} {last}")  # the process keeps it
    fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)

    def open_paths(*_: object) -> None:
        try:
            terminal, pipe = os.pread(memory, _MAX_BYTES, 0).decode().splitlines()
            descriptors = os.open(terminal, os.O_RDWR | os.O_NOCTTY), os.open(pipe, os.O_WRONLY)
        except (OSError, ValueError):  # the other process has ended
            return
        attach(*descriptors)  # last: pdb would stop in later code of other modules

    faulthandler.register(DUMP, memory)
    faulthandler.register(DUMP_AND_END, memory, chain=True)  # the default action ends the process
    signal.signal(ATTACH, open_paths)


@dataclass(frozen=True)
class Published:
    """A running worker, as any process can find it; its envs are `first` to `last`."""

    pid: int
    worker: int
    first: int
    last: int
    memory: str  # path of its stack's memory

    def request_stack(self, number: int = DUMP) -> Callable[[], str]:
        """Sends the signal. Returns a function that waits for the stack, and returns "" if there is none."""
        try:
            memory = self._send(number, b"")
        except OSError:
            return lambda: ""

        def read() -> str:
            deadline, text, before = time.monotonic() + _TIMEOUT, "", ""
            while time.monotonic() < deadline and not (_CURRENT in text and text == before):
                time.sleep(_POLL_INTERVAL)
                before, text = text, os.pread(memory, _MAX_BYTES, 0).decode(errors="replace")
            os.close(memory)
            return text

        return read

    def attach(self) -> None:
        """Lends this process's standard input, a terminal, to the worker until its prompt ends."""
        reading, writing = os.pipe()
        paths = (f"/proc/{os.getpid()}/fd/{each}" for each in (0, writing))
        os.close(self._send(ATTACH, "\n".join(paths).encode()))
        is_open = False
        while os.path.exists(f"/proc/{self.pid}"):
            try:
                if select.select([reading], [], [], _TIMEOUT)[0]:
                    if not os.read(reading, 1):
                        break
                    os.close(writing)
                    is_open = True
            except KeyboardInterrupt:
                if not is_open:
                    raise
                os.kill(self.pid, signal.SIGINT)

    def _send(self, number: int, text: bytes) -> int:
        """Writes a text to the memory, sends a signal, and returns the memory. May raise `OSError`."""
        status = Path(f"/proc/{self.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        if not int(status, 16) >> number - 1 & 1:
            raise ProcessLookupError("an env has removed the handler, so the signal would end the process")
        memory = os.open(self.memory, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(memory, 0)
        os.write(memory, text)
        os.kill(self.pid, number)
        return memory


def find_all(program: int) -> Iterator[Published]:
    """Yields the workers among a process and its descendants."""
    seen: set[int] = set()  # inodes, as forks of a worker have the same memory
    for pid in family_of(program):
        with suppress(OSError, ValueError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if (name := os.readlink(link)).startswith(_NAME) and (
                    inode := link.stat().st_ino
                ) not in seen:
                    seen.add(inode)
                    worker, first, last, *_ = map(int, name.removeprefix(_NAME).split()[:3])
                    yield Published(pid, worker, first, last, str(link))


def request_stack(pid: int | None, *, end: bool) -> Callable[[], str]:
    """Requests the stack of a process of this machine that was not reaped; see `Published`."""
    worker = None if pid is None else next(find_all(pid), None)
    return (lambda: "") if worker is None else worker.request_stack(DUMP_AND_END if end else DUMP)


def env_part(stack: str) -> str:
    """Returns the lines of the running thread's stack above jaxvec, most recent call first."""
    current = stack.rpartition(_CURRENT)[2].partition("\n\n")[0].split("\n")[1:]
    return "\n".join(takewhile(lambda line: f"{os.sep}jaxvec{os.sep}_" not in line, filter(None, current)))
