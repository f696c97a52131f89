"""What a process has from the one that starts it, for workers that are forked from another one."""

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from jaxvec._dispatch.channel import Channel, adopt_channel
from jaxvec._workers import lifeline as _lifeline
from jaxvec._workers import worker as _worker

_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


@dataclass(frozen=True)
class ProcessContext:
    """Of a process at one moment. What else there is, descriptors, comes with a message of its own."""

    environ: dict[str, str]
    umask: int
    limits: list[tuple[int, int]]  # soft and hard, of each of `_LIMITS`
    cores: set[int]
    nice: int
    ignored: set[int]  # signals
    blocked: set[int]  # signals

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> ProcessContext:
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


def process_identity() -> tuple[object, ...]:
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


# ----------------------------------------------------------------------------------------------------------
# The fork server: a process that has imported what every worker imports, and forks into workers.
#
# It is an interpreter of its own, so it has neither JAX nor its threads; nor has it code of the user, but
# for the modules that `preload` names. It has one thread, always: it looks, after its imports. So a fork of
# it is as good as a new interpreter, and takes a few milliseconds where that takes half a second.
#
# The program asks it, over a socket that keeps messages apart (`SOCK_SEQPACKET`), so a request is one
# system call and can't be cut in two by Ctrl-C. Each answer says to what: if Ctrl-C keeps somebody from
# reading it, it is not taken for another.
#
# - The first message: a pickled `Imports`.
# - `FORK`, with the worker's end of its control socket, its standard output and error, and its folder. The
#   answer comes on the control socket, where the program waits: `Started` with a pidfd, or `Refused`. Then
#   the worker, which begins here, reads its `ProcessContext` there.
# - `REAP` and the pid of a worker that has ended. The answer, `ANSWER`, is the pid and the exit code. Until
#   then the worker is a zombie; so its pid, and that of its group, can't have become another's.
#
# What a worker's envs have started is ended with the worker, even if it has a session of its own: a worker
# is the parent of what its children leave, and the server of what a worker leaves. So what is the server's
# child, and no worker, has nobody any more.
#
# It ends at the program's end, after all its workers: it looks for the end of its lifeline and, since a
# process that C code has forked may have inherited that, of the program itself.
# ----------------------------------------------------------------------------------------------------------

FORK, REAP = b"f", b"r"
PID = struct.Struct("!i")
ANSWER = struct.Struct("!ii")
_LONGEST = 1 << 18  # bytes of a message; more than the kernel passes on
_POLL_INTERVAL = 100  # milliseconds


@dataclass(frozen=True)
class Imports:
    """What to import."""

    modules: tuple[str, ...]
    sys_path: list[str]  # of the program


@dataclass(frozen=True)
class Started:
    """Server: the worker runs; its pidfd comes with this message."""

    pid: int


@dataclass(frozen=True)
class Refused:
    """Server: there is no worker."""

    error: Exception


class ThreadsError(RuntimeError):
    """What was imported has started threads, so a fork would not be safe."""


def main(lifeline: int, requests: int, program: int) -> None:
    """Serves until the program's end; returns in each worker, at its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's business
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a worker gets the program's own
    server = _Server(lifeline, socket.socket(fileno=requests), program)
    worker = server.serve()
    if worker is not None:
        _worker.work(worker)


class _Server:
    def __init__(self, lifeline: int, requests: socket.socket, program: int) -> None:
        self._lifeline = lifeline
        self._requests = requests
        requests.set_inheritable(False)
        self._program = os.pidfd_open(program)  # it lives, or its lifeline had ended us
        self._workers: set[int] = set()
        self._refusal = self._import(pickle.loads(requests.recv(_LONGEST)))
        self._helpers = _children()  # of what was imported, if it has any
        _adopt_orphans()
        _lifeline.let_go(lifeline)  # we look ourselves from now on, and outlive the workers

    def serve(self) -> Channel | None:
        """Forks when asked to. Returns in each worker its control socket, ready to work, and here never."""
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        poll.register(self._program, select.POLLIN)
        poll.register(self._lifeline, 0)  # its end comes unasked for
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._program in ready or self._lifeline in ready:
                self._end(kill=True)
            request, descriptors, _, _ = socket.recv_fds(self._requests, _LONGEST, 4)
            if request == FORK:
                worker = self._fork(descriptors)
                if worker is not None:
                    return worker
            elif request[:1] == REAP:
                self._reap(*PID.unpack(request[1:]))
            else:
                self._see_off(poll)

    def _import(self, imports: Imports) -> Exception | None:
        """Imports what workers have in common; returns why there can be none."""
        ours = list(sys.path)
        sys.path[:] = imports.sys_path
        for module in imports.modules:
            try:
                importlib.import_module(module)
            except BaseException as error:
                return ImportError(f"preload: {module!r} can't be imported: {type(error).__name__}: {error}")
        sys.path[:] = ours
        os.chdir("/")  # to hold on to no folder
        gc.collect()
        gc.freeze()  # a collection in a worker would copy the memory that all share
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            return ThreadsError(f"its imports started {threads - 1} threads")
        return None

    def _fork(self, descriptors: list[int]) -> Channel | None:
        """Forks, and says so; returns the control socket in the worker only."""
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
            self._workers.add(pid)
            with suppress(OSError):  # it may be quicker; but who hears of it may want to end its group
                os.setpgid(pid, pid)
            pidfds.append(os.pidfd_open(pid))
            answer = Started(pid)
        with suppress(EOFError):  # nobody waits for it any more
            channel.send(answer, descriptors=pidfds)
        channel.close()
        for descriptor in (*others, *pidfds):
            os.close(descriptor)
        return None

    def _become_worker(self, channel: Channel, output: int, error: int, folder: int) -> None:
        """Leaves what is the server's, and takes what a new interpreter would have from the program."""
        os.setpgid(0, 0)
        _lifeline.hold(self._lifeline)  # from here on it ends with the program
        _adopt_orphans()
        self._requests.close()
        os.close(self._program)
        os.dup2(output, 1)
        os.dup2(error, 2)
        os.fchdir(folder)
        for descriptor in (output, error, folder):
            os.close(descriptor)
        try:
            surroundings: ProcessContext = channel.receive_message()
        except EOFError:  # the program has changed its mind
            sys.exit()
        surroundings.enter()
        importlib.invalidate_caches()  # there may be other modules by now
        np.random.seed()  # `random` has seen to itself; the system's own is nobody's
        multiprocessing.current_process().authkey = os.urandom(32)

    def _reap(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        self._workers.remove(pid)
        self._end_orphans()
        self._requests.send(ANSWER.pack(pid, os.waitstatus_to_exitcode(status)))

    def _see_off(self, poll: select.poll) -> NoReturn:
        """Waits for the end of the workers, of which the program wants to know nothing more."""
        poll.unregister(self._requests)
        while self._workers:
            if poll.poll(_POLL_INTERVAL):
                self._end(kill=True)
            for pid in list(self._workers):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._workers.remove(pid)
                    self._end_orphans()
        self._end(kill=False)

    def _end(self, *, kill: bool) -> NoReturn:
        for pid in self._workers if kill else ():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        if kill:
            self._workers.clear()
            self._end_orphans()
        os._exit(0)

    def _end_orphans(self) -> None:
        """Ends what workers that have ended have left, and what that leaves in turn."""
        while orphans := _children() - self._workers - self._helpers:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _children() -> set[int]:
    """Returns the children of this process, of which it is the one thread."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def _adopt_orphans() -> None:
    """Makes what our children leave behind our children, and not those of the system's first process."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)
