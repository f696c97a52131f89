"""Starts workers as forks of a fork server; see `forkserver.py`, which is the other end."""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxvec._config import PoolConfig
from jaxvec._dispatch.channel import Channel, channel_pair
from jaxvec._workers.base import Launcher, Process, tell_ending
from jaxvec._workers.forkserver import (
    ANSWER,
    FORK,
    PID,
    REAP,
    Imports,
    ProcessContext,
    Refused,
    Started,
    process_identity,
)
from jaxvec._workers.spawn import environ, is_open, start

# Beginnings of the names of variables that an interpreter reads as it starts, or NumPy as it is imported:
# a fork can't take them on later.
_READ_EARLY = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_"),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "NPY_", "NUMPY_"),
)
_ANSWER_TIMEOUT = 1.0  # seconds for an answer that comes at once
_IDLE = 2  # how many servers without workers are kept, in case there is another pool


class ForkedWorker(Process):
    """A worker of this machine, forked, the first of a process group of its own."""

    def __init__(self, pid: int, pidfd: int, reap: Callable[[int], int | None]) -> None:
        """Takes over a worker.

        Args:
            pid: of the worker; its own until it is reaped.
            pidfd: of the worker, which is ours from now on.
            reap: reaps it, once it has ended, and returns its exit code if that can be known.
        """
        self.pid = pid
        self._pidfd = pidfd
        self._close = weakref.finalize(self, os.close, pidfd)  # also if nobody sees it end
        self._close.atexit = False  # a pool that is closed at the program's end sees its workers off by it
        self._reap = reap
        self._lock = threading.Lock()
        self._reaped = False
        self._exitcode: int | None = None

    def ended(self) -> bool:
        return self.wait(0)

    def wait(self, timeout: float) -> bool:
        if not self._reaped and _readable(self._pidfd, timeout):
            with self._lock:
                if not self._reaped:
                    self._kill()  # what its envs have started
                    try:
                        self._exitcode = self._reap(self.pid)
                    finally:
                        self._reaped = True
                        self._close()
        return self._reaped

    def end(self) -> None:
        with self._lock:
            if not self._reaped:
                self._kill()

    def ending(self) -> tuple[int | None, str]:
        return tell_ending(self.wait(timeout=1), self._exitcode)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            # If the server has ended, another may have reaped it, and its pid be another's: this asks.
            signal.pidfd_send_signal(self._pidfd, 0)
            os.killpg(self.pid, signal.SIGKILL)


class _Server:
    """The program's end of a fork server."""

    def __init__(self, env: Mapping[str, str], modules: tuple[str, ...]) -> None:
        self.users = 0  # pools
        self._lock = threading.Lock()  # for its answers
        self._exitcodes: dict[int, int] = {}  # that it has told, and nobody has taken
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = start("jaxvec._workers.forkserver", theirs.fileno(), os.getpid(), env=env)
            self.pid = self._process.pid
            with suppress(ConnectionError):  # it has ended, as who asks for a fork will see
                self._requests.send(pickle.dumps(Imports(modules, list(sys.path))))
        except BaseException:
            self._requests.close()
            raise

    def fork(self, control: int) -> None:
        """Asks for a worker, which answers at its end of the control socket; raises `ConnectionError`."""
        if self._requests.fileno() < 0:  # another pool found it ended
            raise ConnectionError
        borrowed = [1, 2]
        opened: list[int] = []
        try:
            for standard in (1, 2):
                if not is_open(standard):
                    opened.append(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
                    borrowed[standard - 1] = opened[-1]
            opened.append(os.open(".", os.O_PATH | os.O_CLOEXEC))
            socket.send_fds(self._requests, [FORK], [control, *borrowed, opened[-1]])
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def reap(self, pid: int) -> int | None:
        """Reaps a worker that has ended; returns its exit code, or `None` if the server has ended, too."""
        with self._lock, suppress(OSError):
            self._requests.send(REAP + PID.pack(pid))
            # Who was interrupted here has left an answer, which comes first.
            while pid not in self._exitcodes and _readable(self._requests.fileno(), _ANSWER_TIMEOUT):
                answer = self._requests.recv(ANSWER.size)
                if not answer:
                    break
                whose, exitcode = ANSWER.unpack(answer)
                self._exitcodes[whose] = exitcode
        return self._exitcodes.pop(pid, None)

    def close(self) -> str:
        """Ends it, if it has not ended, and says how it did. Its workers live on."""
        self._requests.close()
        try:
            exitcode = self._process.wait(timeout=_ANSWER_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            exitcode = self._process.wait()
        return tell_ending(True, exitcode)[1]

    def forget(self) -> None:
        """Lets go of it, and does not wait for its end; a fork of the program could not."""
        self._requests.close()
        self._process.returncode = 0  # or Popen would warn


_servers: dict[tuple[Any, ...], _Server] = {}  # by what they have that a fork can't take on; the latest last
_lock = threading.RLock()  # Ctrl-C may come while it is held


class Forker(Launcher):
    """Starts workers on this machine, as forks of a server."""

    def __init__(self, config: PoolConfig) -> None:
        """Prepares to start workers; `Timeouts(start=...)` includes the start of the server."""
        self._changes = config.workers.env
        self._modules = tuple(config.workers.preload)
        self._timeout = config.timeouts.start
        self._server: _Server | None = None

    def launch(self, worker: int) -> tuple[ForkedWorker, Channel]:
        env = environ(self._changes)
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            return self._launch(env, deadline)
        except (EOFError, ConnectionError):  # the server has ended, who knows when
            self._give_up()
        try:
            return self._launch(env, deadline)
        except (EOFError, ConnectionError) as error:
            raise ChildProcessError(
                f"the fork server {self._give_up()}; its standard error may tell more"
            ) from error

    def close(self) -> None:
        self._leave()

    def _launch(self, env: dict[str, str], deadline: float | None) -> tuple[ForkedWorker, Channel]:
        ours, theirs = channel_pair()
        try:
            try:
                server = self._join(env)
                server.fork(theirs)
            finally:
                os.close(theirs)
            with suppress(EOFError):  # it may have refused by now
                ours.send(ProcessContext.here(env), deadline=deadline)
            if not ours.readable(deadline):
                raise TimeoutError("the fork server did not answer; what `preload` names may take long")
            answer: Started | Refused = ours.receive(deadline)
            if isinstance(answer, Refused):
                if not isinstance(answer.error, OSError):  # it will say so to all
                    self._give_up()
                raise answer.error
            return ForkedWorker(answer.pid, ours.descriptors.pop(), server.reap), ours
        except BaseException:
            ours.close()
            raise

    def _join(self, env: dict[str, str]) -> _Server:
        """Returns the server of this pool; starts it, if there is none."""
        with _lock:
            if self._server is not None:
                return self._server
            early = {name: value for name, value in env.items() if name.startswith(_READ_EARLY)}
            asked = tuple(sorted(self._changes.items()))
            key = (*sorted(early.items()), asked, self._modules, sys.executable, process_identity())
            server = _servers.pop(key, None) or _Server(env, self._modules)
            _servers[key] = server
            server.users += 1
            self._server = server
            return server

    def _leave(self) -> None:
        """Lets go of the server; some that nobody uses are kept for other pools."""
        with _lock:
            server, self._server = self._server, None
            if server is not None:
                server.users -= 1
            idle = [key for key, each in _servers.items() if not each.users]
            for key in idle[:-_IDLE]:
                _servers.pop(key).close()

    def _give_up(self) -> str:
        """Ends the server, if it has not ended, and says how it did; nobody gets it any more."""
        with _lock:
            server, self._server = self._server, None
            assert server is not None
            for key in [key for key, each in _servers.items() if each is server]:
                del _servers[key]
            return server.close()


def server_pids() -> set[int]:
    """Returns the processes that are there to be forked."""
    return {server.pid for server in _servers.values()}


@atexit.register
def end_all() -> None:
    """Ends the servers. A pool that needs one starts another."""
    with _lock:
        while _servers:
            _, server = _servers.popitem()
            if server.users:
                server.forget()  # it ends with its workers, or the program
            else:
                server.close()


def _forget_all() -> None:
    """In a fork of the program: it has none."""
    global _lock
    _lock = threading.RLock()  # another thread may have held it
    while _servers:
        _servers.popitem()[1].forget()


os.register_at_fork(after_in_child=_forget_all)


def reason_unavailable() -> str | None:
    """Says why workers can't be forked here; `None` if they can."""
    if sys.platform != "linux":
        return f"a fork is not safe on {sys.platform}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"the system has no pidfds: {error}"
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return "the system does not tell a process's children: /proc has no such file"
    return None


def _readable(descriptor: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
