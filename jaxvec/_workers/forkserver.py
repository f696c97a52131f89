"""The fork server: a process with the imports of every worker, which forks into workers.

A forked worker also needs what a new interpreter would inherit from the program: `ProcessContext`, and file
descriptors. The program's end is in fork.py.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from jaxvec._dispatch.channel import Channel, adopt_channel
from jaxvec._util import affinity
from jaxvec._workers import lifeline as _lifeline
from jaxvec._workers import worker as _worker

_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


@dataclass(frozen=True)
class ProcessContext:
    """The attributes, other than file descriptors, that a process passes on to a new one."""

    environ: dict[str, str]
    umask: int
    limits: list[tuple[int, int]]  # soft and hard limit, for each of `_LIMITS`
    cores: set[int]  # empty if unknown
    nice: int
    ignored: set[int]  # signal numbers
    blocked: set[int]  # signal numbers

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> ProcessContext:
        """Returns the context of this process and thread, with other environment variables."""
        # `os.umask` returns the value only by setting it, which other threads would see.
        with open("/proc/self/status") as status:
            umask = next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
        return cls(
            environ=dict(environ),
            umask=umask,
            limits=[resource.getrlimit(limit) for limit in _LIMITS],
            cores=affinity(),
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            ignored=_ignored(),
            blocked=set(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        )

    def enter(self) -> None:
        """Applies the context to this process; raises `OSError` if the kernel refuses."""
        os.environ.clear()
        os.environ.update(self.environ)
        time.tzset()
        os.umask(self.umask)
        for number in self.ignored ^ _ignored():
            signal.signal(number, signal.SIG_IGN if number in self.ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        if self.cores != affinity():
            os.sched_setaffinity(0, self.cores)
        if self.nice != os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        for limit, pair in zip(_LIMITS, self.limits, strict=True):
            if pair != resource.getrlimit(limit):
                resource.setrlimit(limit, pair)


def process_identity() -> tuple[object, ...]:
    """Returns the inherited attributes of a process that it can't change later, for comparison."""
    return (
        os.getresuid(),
        os.getresgid(),
        tuple(os.getgroups()),
        os.getsid(0),
        Path("/proc/self/cgroup").read_text(),
        *sorted(os.readlink(namespace) for namespace in Path("/proc/self/ns").iterdir()),
        tuple(os.stat("/")[:3]),  # chroot
    )


def _ignored() -> set[int]:
    return {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}


# --- The fork server -------------------------------------------------------------------------------------
# It is a new interpreter with one thread, without JAX, and without the user's code except for `preload`. So
# a fork is as good as a new interpreter, and takes a few milliseconds instead of half a second.
# Requests come over a SOCK_SEQPACKET socket, so each is one system call that Ctrl-C can't split. An answer
# names its request, so that one left by an interrupted call is not taken for another:
# - First message: a pickled `Imports`.
# - FORK and a number for the worker, with four descriptors: the worker's end of its control socket, stdout,
#   stderr and working directory. The answer comes on the control socket: `Started` with a pidfd, or
#   `Refused`. The worker then reads its `ProcessContext` there.
# - REAP and the number of a worker that has ended. The answer is the number and its exit code. Until then the
#   worker is a zombie, so its pid and process group can't belong to another process.
# - ABANDON and the number of a worker that the program will not reap: its start was interrupted, or its
#   handle is gone. The server kills it, and reaps it whenever it has ended. There is no answer.
# Processes that envs have started end with their worker, even in sessions of their own. Each worker adopts
# the orphans among its descendants, and the server those of a dead worker.
# When the program closes the socket, the server ends after its last worker; when the program ends, it kills
# them. It watches the program, too, since a process forked by C code may have inherited the lifeline.

FORK, REAP, ABANDON = b"f", b"r", b"a"
NUMBER = struct.Struct("!I")
ANSWER = struct.Struct("!Ii")
_MAX_MESSAGE = 1 << 18  # bytes; above the kernel's limit
_POLL_INTERVAL_MS = 100


@dataclass(frozen=True)
class Imports:
    """Modules to import, with the program's `sys.path`."""

    modules: tuple[str, ...]
    sys_path: list[str]
    own_path: bool  # whether the server's own `sys.path` comes first


@dataclass(frozen=True)
class Started:
    """Answer of the server: the worker runs. Its pidfd comes with this message."""

    pid: int


@dataclass(frozen=True)
class Refused:
    """Answer of the server: there is no worker, because of this error."""

    error: Exception


class ThreadsError(RuntimeError):
    """Error of a server with several threads, which can't be forked safely."""


def main(lifeline: int, requests: int, program: int) -> None:
    """Serves until the program's end. Returns only in workers, at their end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the program ignores it, `waitpid` would fail
    # The server holds descriptors of all its workers. Each worker applies the program's own limits.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    server = _Server(lifeline, socket.socket(fileno=requests), program)
    worker = server.serve()
    if worker is not None:
        _worker.run_worker(worker)


class _Server:
    def __init__(self, lifeline: int, requests: socket.socket, program: int) -> None:
        self._lifeline = lifeline
        self._requests = requests
        requests.set_inheritable(False)
        self._program = os.pidfd_open(program)  # alive, or the lifeline would have killed this process
        self._workers: dict[int, int] = {}  # process ids, by the program's numbers
        self._abandoned: set[int] = set()  # numbers
        self._refusal = self._import(pickle.loads(requests.recv(_MAX_MESSAGE)))
        self._helpers = _children()  # processes that the imports have started
        _adopt_orphans()
        _lifeline.release(lifeline)  # `serve` polls it, to outlive the workers

    def serve(self) -> Channel | None:
        """Answers requests until the program ends. Returns only in workers: their control socket."""
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        poll.register(self._program, select.POLLIN)
        poll.register(self._lifeline, 0)  # POLLHUP is reported in any case
        while True:
            ready = [fd for fd, _ in poll.poll(_POLL_INTERVAL_MS if self._abandoned else None)]
            if self._program in ready or self._lifeline in ready:
                self._end()
            self._abandoned = self._reap_ended(self._abandoned)
            if not ready:
                continue
            try:
                request, descriptors, _, _ = socket.recv_fds(self._requests, _MAX_MESSAGE, 4)
            except ConnectionResetError:  # the program has left answers unread
                request, descriptors = b"", []
            if not request:
                self._drain(poll)
            (number,) = NUMBER.unpack(request[1:])
            if request[:1] == FORK:
                worker = self._fork(number, descriptors)
                if worker is not None:
                    return worker
            elif request[:1] == REAP:
                self._reap(number)
            elif number in self._workers:  # the server may have refused to fork it
                self._kill(number)
                self._abandoned.add(number)

    def _import(self, imports: Imports) -> Exception | None:
        """Imports the preloaded modules. Returns the error with which every fork is refused, if any."""
        own_path = list(sys.path)
        sys.path[:] = [*(own_path if imports.own_path else ()), *imports.sys_path]
        for module in imports.modules:
            try:
                importlib.import_module(module)
            except BaseException as error:
                return ImportError(f"preload: {module!r} can't be imported: {type(error).__name__}: {error}")
        sys.path[:] = own_path
        os.chdir("/")  # so that the current directory can be unmounted
        gc.collect()
        gc.freeze()  # otherwise a collection in a worker writes to, and so copies, the shared memory pages
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            return ThreadsError(f"its imports started {threads - 1} threads")
        return None

    def _fork(self, number: int, descriptors: list[int]) -> Channel | None:
        """Forks and answers. Returns the control socket in the worker, and `None` in the server."""
        control, *others = descriptors
        channel = adopt_channel(control)
        answer: Started | Refused
        pidfds: list[int] = []
        try:
            if self._refusal is not None:
                raise self._refusal
            pid = os.fork()
        except Exception as error:
            answer = Refused(error)
        else:
            if pid == 0:
                self._become_worker(channel, *others)
                return channel
            self._workers[number] = pid
            # The worker does this, too, but the program may kill its group before the worker first runs.
            with suppress(OSError):
                os.setpgid(pid, pid)
            pidfds.append(os.pidfd_open(pid))
            answer = Started(pid)
        with suppress(EOFError):  # the program no longer waits for it, and will abandon it
            channel.send(answer, descriptors=pidfds)
        channel.close()
        for descriptor in (*others, *pidfds):
            os.close(descriptor)
        return None

    def _become_worker(self, channel: Channel, output: int, error: int, folder: int) -> None:
        """Closes the server's descriptors, and applies the program's context."""
        os.setpgid(0, 0)
        _lifeline.hold(self._lifeline)  # from now on, this process ends with the program
        _adopt_orphans()
        self._requests.close()
        os.close(self._program)
        os.dup2(output, 1)
        os.dup2(error, 2)
        os.fchdir(folder)
        for descriptor in (output, error, folder):
            os.close(descriptor)
        try:
            context: ProcessContext = channel.receive_message()
        except EOFError:  # the program has given up on the worker
            sys.exit()
        context.enter()
        importlib.invalidate_caches()  # modules may have been installed since the server's start
        np.random.seed()  # every fork has the server's state; `random` reseeds itself after a fork
        multiprocessing.current_process().authkey = os.urandom(32)

    def _reap(self, number: int) -> None:
        _, status = os.waitpid(self._workers[number], 0)
        del self._workers[number]
        self._end_orphans()
        self._requests.send(ANSWER.pack(number, os.waitstatus_to_exitcode(status)))

    def _reap_ended(self, numbers: Collection[int]) -> set[int]:
        """Reaps those of the workers that have ended, and returns the others."""
        ended = {number for number in numbers if os.waitpid(self._workers[number], os.WNOHANG)[0]}
        for number in ended:
            del self._workers[number]
        if ended:
            self._end_orphans()
        return {*numbers} - ended

    def _kill(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._workers[number], signal.SIGKILL)

    def _drain(self, poll: select.poll) -> NoReturn:
        """Waits for the end of the workers after the program has closed the socket, and exits."""
        poll.unregister(self._requests)
        while self._workers:
            if poll.poll(_POLL_INTERVAL_MS):
                self._end()
            self._reap_ended(self._workers)
        self._end()

    def _end(self) -> NoReturn:
        for number in self._workers:
            self._kill(number)
        self._workers.clear()
        self._end_orphans()
        os._exit(0)

    def _end_orphans(self) -> None:
        # A child that is neither a worker nor a helper is an orphan, and may leave orphans of its own.
        while orphans := _children() - {*self._workers.values()} - self._helpers:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _children() -> set[int]:
    # Of the main thread, which is the only one.
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def _adopt_orphans() -> None:
    """Makes this process, in place of init, the new parent of orphans among its descendants."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
