"""Ties processes to the program that started them: its end, however it comes, is theirs.

The program holds the write end of a pipe, the lifeline, and nobody else does; so its death closes the pipe.
On Linux the kernel then kills each process group that holds on to it: even while code of an env holds the
GIL, and with all processes that the envs have started. (PR_SET_PDEATHSIG would fire when the *thread* ends
that started us.) Elsewhere a thread watches.

Run as a program, `python _lifeline.py DESCRIPTOR MODULE ARGUMENT...`, it takes hold before it imports
anything that takes time, and then calls the module's `main` with what `hold` returns and the arguments,
which are integers. So it imports the standard library only.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import sys
import threading

_pipe: tuple[int, int] | None = None  # of this process
_lock = threading.Lock()


def read_end() -> int:
    """Returns the descriptor that processes which are to end with this one get from it."""
    global _pipe
    with _lock:
        if _pipe is None:
            _pipe = os.pipe()
        return _pipe[0]


def hold(lifeline: int) -> int:
    """Makes the end of the program the end of this process group; returns what to keep open for it.

    Each group opens the pipe anew, because a signal's owner belongs to the open file description.

    Args:
        lifeline: a descriptor of the pipe's read end, which is closed.
    """
    if sys.platform != "linux":
        _watch(lifeline)
        return lifeline
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    os.close(lifeline)
    if _closed(own):  # the program died before we asked for the signal
        os._exit(1)
    return own


def let_go(lifeline: int) -> None:
    """Undoes what `hold` did, which returned `lifeline`: its end is to be looked for."""
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) & ~os.O_ASYNC)


def _watch(lifeline: int) -> None:
    os.set_inheritable(lifeline, False)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _closed(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


def _let_go() -> None:
    """In a fork of the program: what it holds on to would outlive the program."""
    global _pipe, _lock
    _lock = threading.Lock()  # another thread may have held it
    if _pipe is not None:
        for descriptor in _pipe:
            os.close(descriptor)
        _pipe = None


os.register_at_fork(after_in_child=_let_go)


if __name__ == "__main__":
    own = hold(int(sys.argv[1]))
    importlib.import_module(sys.argv[2]).main(own, *map(int, sys.argv[3:]))
