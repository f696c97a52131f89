"""The program's end of the fork server (forkserver.py): starts and reaps workers that are its forks.

Pools with equal start-up variables, `Workers(env=...)`, preloaded modules and user share a server.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from jaxvec._engine.channel import Channel, channel_pair
from jaxvec._options import PoolConfig
from jaxvec._util import affinity
from jaxvec._workers import lifeline
from jaxvec._workers.base import Process, describe_exit
from jaxvec._workers.forkserver import (
    ANSWER,
    FORK,
    NUMBER,
    REAP,
)
from jaxvec._workers.interpreter import Interpreter
from jaxvec._workers.output import Output
from jaxvec._workers.spawn import environ, start

# Prefixes of variables that an interpreter reads when it starts, or NumPy when it is imported. A fork can't
# apply them later, so each set of values has its own server.
_STARTUP_VARIABLES = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_"),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "NPY_", "NUMPY_"),
)
_ANSWER_TIMEOUT = 5.0  # seconds for an answer that needs no work of the server, beside busy programs
_MAX_IDLE = 2  # servers without a pool that are kept for the next pools


class ForkedWorker(Process):
    """A worker on this machine, forked by a server, and the leader of its own process group."""

    def __init__(self, pid: int, pidfd: int, server: _ForkServer, number: int) -> None:
        """Takes ownership of `pidfd`, and of the worker that `server` has forked under `number`."""
        self.pid = pid
        self._pidfd = pidfd  # closed under `_lock`, once the worker is reaped
        # A handle may be dropped before it was waited for: after Ctrl-C, or if the process needs long to end.
        self._dropped = weakref.finalize(self, _drop, pidfd, server, number)
        self._dropped.atexit = False  # pools that are closed at the program's end still wait with it
        self._reap: Callable[[], int | None] | None = partial(server.reap, number)  # once
        # Guards `_reap` and `_reaped`: once reaped, the pid may belong to another process, so no signal may
        # be sent. Reentrant, because a signal handler may close the pool while its thread holds it.
        self._lock = threading.RLock()
        self._reaped = False
        self._exitcode: int | None = None  # written under `_lock`, before `_reaped` becomes True

    def ended(self) -> bool:
        return self._reaped or bool(wait([self._pidfd], 0))

    def wait(self, timeout: float) -> bool:
        if not self._reaped and wait([self._pidfd], timeout):
            with self._lock:
                reap = self._reap
                self._reap = None
                if reap is not None:
                    self._kill()  # the processes that its envs have started
                    try:
                        self._exitcode = reap()
                    finally:
                        self._reaped = True
                        self._dropped.detach()
                        os.close(self._pidfd)
        return self._reaped

    def end(self) -> None:
        with self._lock:
            if not self._reaped:
                self._kill()

    def ending(self) -> tuple[int | None, str]:
        return describe_exit(self.wait(timeout=1), self._exitcode)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            # Raises if init has reaped it, after the server ended: its pid may belong to another process now.
            signal.pidfd_send_signal(self._pidfd, 0)
            os.killpg(self.pid, signal.SIGKILL)


def _drop(pidfd: int, server: _ForkServer, number: int) -> None:
    # The garbage collector calls this in any thread, which may hold any lock.
    os.close(pidfd)
    server.drop(number)


class _ForkServer:
    """The program's end of a fork server."""

    def __init__(self, env: Mapping[str, str], modules: tuple[str, ...], interpreter: Interpreter) -> None:
        self.users = 0  # number of pools; guarded by the module's `_lock`
        self.numbers = itertools.count()  # of the workers; any thread takes the next one, which is atomic
        self._program = os.getpid()
        # Guards the answers on `_requests`, and `_exitcodes`. Reentrant, as `ForkedWorker._lock`.
        self._lock = threading.RLock()
        self._exitcodes: dict[int, int] = {}  # by number, of answers that another `reap` or `drop` left
        # Seconds for an answer; 0 after a timeout, so that a stopped server delays `close` only once.
        # Guarded by `_lock`.
        self._patience = _ANSWER_TIMEOUT
        # Any thread sends, since each request is one system call; only a thread with `_lock` receives.
        self._requests, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setblocking(True)  # also with a `socket.setdefaulttimeout`
        server_end.setblocking(True)
        try:
            with server_end, Output().streams(0) as streams:
                self._process = start(
                    "jaxvec._workers.forkserver",
                    lifeline.read_end(),
                    server_end.fileno(),
                    os.getpid(),
                    env=env,
                    interpreter=interpreter,
                    streams=streams,
                )
            self.pid = self._process.pid
            with suppress(ConnectionError):  # it has ended; `fork` will raise
                imports = modules, interpreter.sys_path(), not interpreter.is_own
                self._requests.send(pickle.dumps(imports))
        except BaseException:
            self._requests.close()
            raise

    def fork(self, number: int, control: int, streams: Sequence[int]) -> None:
        """Requests a worker with this end of a control socket, where the server then answers."""
        if self._requests.fileno() < 0:  # another pool noticed its end, and closed it
            raise ConnectionError
        folder = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            socket.send_fds(self._requests, [FORK + NUMBER.pack(number)], [control, *streams, folder])
        finally:
            os.close(folder)

    def drop(self, number: int) -> None:
        """Tells the server to kill and reap a worker, which may be yet to be forked; does not wait."""
        # A fork of the program may share the socket for a moment, and drops its copies of the handles.
        if os.getpid() == self._program:
            with suppress(OSError):  # the server has ended, or will after its workers
                self._requests.send(REAP + NUMBER.pack(number), socket.MSG_DONTWAIT)

    def reap(self, number: int) -> int | None:
        """Reaps a worker that has ended. Returns its exit code, or `None` if the server has ended, too."""
        with self._lock, suppress(OSError):
            self._requests.send(REAP + NUMBER.pack(number))
            # The answer to an interrupted call, or to `drop`, may come first.
            while number not in self._exitcodes:
                if not wait([self._requests], self._patience):
                    self._patience = 0
                    break
                self._patience = _ANSWER_TIMEOUT
                # Without waiting: a signal handler may have taken the answer in between.
                answer = self._requests.recv(ANSWER.size, socket.MSG_DONTWAIT)
                if not answer:
                    break
                reaped, exitcode = ANSWER.unpack(answer)
                self._exitcodes[reaped] = exitcode
        return self._exitcodes.pop(number, None)

    def close(self) -> str:
        """Ends the server, if it has not ended, but not its workers. Returns how it ended."""
        self._requests.close()
        try:
            exitcode = self._process.wait(timeout=_ANSWER_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            exitcode = self._process.wait()
        return describe_exit(True, exitcode)[1]

    def forget(self) -> None:
        """Releases the server without waiting for its end, which a fork of the program could not."""
        self._requests.close()
        self._process.returncode = 0  # keeps Popen from warning that it still runs


# By the properties that a fork can't change later; least recently used first. Guarded by `_lock`, which is
# reentrant because a signal handler may close a pool while its thread holds it.
_servers: dict[tuple[Any, ...], _ForkServer] = {}
_lock = threading.RLock()


class Forker:
    """Starts workers on this machine as forks of a server. `Timeouts.start` includes the server's start."""

    def __init__(self, config: PoolConfig, interpreter: Interpreter) -> None:
        self._workers = config.workers
        self._timeout = config.timeouts.start
        self._interpreter = interpreter
        # Guarded by the module's `_lock`, since a thread may launch a replacement while another one closes.
        self._server: _ForkServer | None = None  # from the first launch to `close`, or until it is discarded
        self._closed = False

    def launch(self, streams: Sequence[int]) -> tuple[ForkedWorker, Channel]:
        env = environ(self._workers.env)
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            return self._launch(env, deadline, streams)
        except (EOFError, ConnectionError):  # the server has ended, perhaps long ago: try a new one
            self._discard_server()
        try:
            return self._launch(env, deadline, streams)
        except (EOFError, ConnectionError) as error:
            ending = self._discard_server()
            raise ChildProcessError(f"the fork server {ending}; look at its output on stderr") from error

    def close(self) -> None:
        """Releases the server. A few idle ones are kept for later pools."""
        with _lock:
            self._closed = True  # a thread that is in `launch` may not acquire a server from now on
            server = self._server
            self._server = None
            if server is not None:
                server.users -= 1
            idle = [key for key, other in _servers.items() if not other.users]
            for key in idle[:-_MAX_IDLE]:
                _servers.pop(key).close()

    def _launch(
        self, env: dict[str, str], deadline: float | None, streams: Sequence[int]
    ) -> tuple[ForkedWorker, Channel]:
        server = self._acquire_server(env)
        number = next(server.numbers)
        channel, worker_end = channel_pair()
        try:
            try:
                server.fork(number, worker_end, streams)
            finally:
                os.close(worker_end)
            with suppress(EOFError):  # the server may have refused, and closed its end
                channel.send((env, affinity()), deadline=deadline)
            if not channel.ready(deadline):
                raise TimeoutError(
                    "the fork server did not answer in time. If a module in preload is slow to import, "
                    "remove it, or pass a larger Timeouts(start=...)"
                )
            answer: int | Exception = channel.receive(deadline)
            if isinstance(answer, Exception):
                if not isinstance(answer, OSError):  # of its imports: it will refuse every fork
                    self._discard_server()
                raise answer
            return ForkedWorker(answer, channel.descriptors.pop(), server, number), channel
        except BaseException:  # also a timeout, after which the server may still fork the worker
            server.drop(number)
            channel.close()
            raise

    def _acquire_server(self, env: dict[str, str]) -> _ForkServer:
        """Returns the server of this pool, and starts it if necessary."""
        with _lock:
            if self._closed:
                raise ChildProcessError("the pool was closed meanwhile")
            if self._server is not None:
                return self._server
            early = {name: value for name, value in env.items() if name.startswith(_STARTUP_VARIABLES)}
            changes = tuple(sorted(self._workers.env.items()))
            modules = tuple(self._workers.preload)
            interpreter = self._interpreter
            # A program that gives up rights must not get workers that have them.
            user = (os.getresuid(), os.getresgid(), *os.getgroups())
            key = (*sorted(early.items()), changes, modules, interpreter.path, user)
            server = _servers.pop(key, None) or _ForkServer(env, modules, interpreter)
            _servers[key] = server
            server.users += 1
            self._server = server
            return server

    def _discard_server(self) -> str:
        """Ends the server, if it has not ended, so that no pool uses it. Returns how it ended."""
        with _lock:
            server = self._server
            self._server = None
            if server is None:  # the pool was closed meanwhile
                return "was released"
            for key in [key for key, other in _servers.items() if other is server]:
                del _servers[key]
            return server.close()


@atexit.register
def end_all() -> None:
    """Ends the servers. A pool that needs one starts a new one."""
    with _lock:
        while _servers:
            _, server = _servers.popitem()
            if server.users:
                server.forget()  # it ends after its workers, or with the program
            else:
                server.close()


def _forget_all() -> None:
    # In a fork of the program, which has no servers of its own. Another thread may have held the lock.
    global _lock
    _lock = threading.RLock()
    while _servers:
        _servers.popitem()[1].forget()


os.register_at_fork(after_in_child=_forget_all)


def reason_unavailable() -> str | None:
    """Returns the reason why workers can't be forked on this machine, or `None` if they can."""
    if sys.platform != "linux":
        return f"a fork is not safe on {sys.platform}"
    if (os.fork.__module__ or "").startswith("_pydev"):
        return "a debugger attaches to new processes and starts threads in them"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"the system has no pidfds: {error}"
    if (reason := lifeline.reason_for_thread()) is not None:  # a fork is not safe beside a thread
        return reason
    children = f"/proc/self/task/{os.getpid()}/children"
    if not Path(children).exists():
        return f"the system does not list the children of a process: {children} does not exist"
    return None
