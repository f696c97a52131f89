"""Kills processes when the program that started them ends, however it ends.

Only the program holds the write end of a pipe, the lifeline, so its death closes the pipe. On Linux the
kernel then sends SIGKILL to each process group that holds the read end, even while an env holds the GIL.
PR_SET_PDEATHSIG would fire when the starting *thread* ends. On other systems a thread reads the pipe.

Spawned workers hold the read end of another pipe. A process of its own, the keeper, keeps it open until they
have closed their envs, or for `CLOSE_TIMEOUT`. Forked ones have the fork server for that.

As a program, `python lifeline.py DESCRIPTOR MODULE INTEGER...`, it first holds the lifeline, and then calls
`MODULE.main(lifeline, *integers)`. It imports only the standard library, so that no time passes before.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

CLOSE_TIMEOUT = 5.0  # seconds for the workers of a program that has ended

# The keeper has the pipe of spawned workers as stdout. Python reads this from stdin to the end, which is the
# program's end, before it runs it.
_KEEPER = f"""
import select
poll = select.poll()
poll.register(1, 0)  # POLLERR, reported in any case: no worker is left
poll.poll({CLOSE_TIMEOUT * 1000})
"""

# Guarded by `_lock`. Read and write ends of this process's pipes, by what they are for.
_pipes: dict[str, tuple[int, int]] = {}
_keeper: subprocess.Popen[bytes] | None = None
_lock = threading.Lock()


def read_end(*, is_kept: bool = False) -> int:
    """Returns the read end of this process's lifeline, or of the one with a keeper, for child processes."""
    global _keeper
    with _lock:
        lifeline, _ = _pipe("workers")
        if not is_kept:
            return lifeline
        kept_lifeline, held_by_keeper = _pipe("spawned workers")
        if _keeper is None:
            stdin, source = _pipe("keeper")
            _keeper = subprocess.Popen(
                [sys.executable, "-IS", "-"],
                stdin=stdin,
                stdout=held_by_keeper,
                stderr=subprocess.DEVNULL,
                process_group=0,  # a terminal sends Ctrl-C to the program's group only
            )
            _keeper.returncode = 0  # keeps Popen from warning that it still runs
            os.write(source, _KEEPER.encode())
        return kept_lifeline


def _pipe(purpose: str) -> tuple[int, int]:
    if purpose not in _pipes:
        _pipes[purpose] = os.pipe()
    return _pipes[purpose]


def hold(lifeline: int) -> int:
    """Ties this process group to the program's end. Closes `lifeline`, and returns a descriptor to keep."""
    try:
        own = _reopen(lifeline)
    except OSError:  # not Linux, or a sandbox
        os.set_inheritable(lifeline, False)

        def watch() -> None:
            os.read(lifeline, 1)
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
        return lifeline
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    os.close(lifeline)
    with suppress(BlockingIOError):  # still open
        if os.read(own, 1) == b"":  # the program died before F_SETFL took effect
            os._exit(1)
    return own


def _reopen(lifeline: int) -> int:
    """Returns a descriptor that sends SIGKILL to this process group. Raises `OSError` if it can't."""
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no F_SETSIG")
    # Each group opens the pipe anew, because the owner of a signal belongs to the open file description.
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    except BaseException:
        os.close(own)
        raise
    return own


def reason_for_thread() -> str | None:
    """Returns the reason why `hold` starts a thread, or `None` if the kernel sends a signal."""
    try:
        os.close(_reopen(read_end()))
    except OSError as error:
        return f"the system sends no signal at the end of a pipe (F_SETSIG): {error}"
    return None


def release(lifeline: int) -> IO[bytes]:
    """Turns the signal off again, and returns a file that keeps the lifeline open for all others."""
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) & ~os.O_ASYNC)
    return open(f"/proc/self/fd/{lifeline}", "wb", buffering=0)


def _close_in_fork() -> None:
    # A fork of the program must not hold the write end, which would keep workers alive after the program.
    global _keeper, _lock
    _lock = threading.Lock()  # another thread may have held it
    for read, write in _pipes.values():
        os.close(read)
        os.close(write)
    _pipes.clear()
    _keeper = None


os.register_at_fork(after_in_child=_close_in_fork)


if __name__ == "__main__":
    # A debugger that starts this file may drop the first entry, and add this folder, whose modules would
    # hide others of the same names.
    first_entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    omitted = {*first_entries, os.path.dirname(os.path.abspath(__file__))}
    sys.path[:] = [*first_entries, *(entry for entry in sys.path if entry not in omitted)]
    own = hold(int(sys.argv[1]))
    importlib.import_module(sys.argv[2]).main(own, *map(int, sys.argv[3:]))
