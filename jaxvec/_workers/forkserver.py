"""The fork server: a process with the imports of every worker, which forks into workers.

A worker has the environment variables, CPU affinity, working directory and streams that the program has at
`make`. Everything else that processes inherit, such as the umask and resource limits, is that of the program
when it started the server. The program's end is in fork.py.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import numpy as np

from jaxvec._engine.channel import Channel, adopt_channel
from jaxvec._util import affinity
from jaxvec._workers import lifeline as _lifeline
from jaxvec._workers import worker as _worker
from jaxvec._workers.spawn import kill_group

# --- The fork server -------------------------------------------------------------------------------------
# It is a new interpreter with one thread, without JAX, and without the user's code except for `preload`. So
# a fork is as good as a new interpreter, and takes a few milliseconds instead of half a second.
# Requests come over a SOCK_SEQPACKET socket, so each is one system call that Ctrl-C can't split. An answer
# names its request, so that one left by an interrupted call is not taken for another:
# - First message: the pickled arguments of `_Server._import`.
# - FORK and a number for the worker, with four descriptors: the worker's end of its control socket, stdout,
#   stderr and working directory. The answer comes on the control socket: a process id, with a pidfd, or the
#   error for which there is no worker. The worker then reads there what a new interpreter
#   would inherit from the program at `make`: the environment variables, and the cores (empty if unknown).
# - REAP and the number of a worker, which is killed if it has not ended. The answer is the number and its
#   exit code. Until then the worker is a zombie, so its pid and process group can't belong to another
#   process. The program does not wait for the answer if the worker's start was interrupted, or its handle is
#   gone.
# Processes that envs have started end with their worker, even in sessions of their own. Each worker adopts
# the orphans among its descendants, and the server those of a dead worker.
# When the program closes the socket, as at its own end, the server ends after its last worker. Workers that
# have not closed their envs by `CLOSE_TIMEOUT` after the program's end are killed. Until then, the server
# keeps the lifeline open. It watches the program, too, since a process forked by C code may have inherited
# the socket and the lifeline.

FORK = b"f"
REAP = b"r"
NUMBER = struct.Struct("!I")
ANSWER = struct.Struct("!Ii")
_MAX_MESSAGE = 1 << 18  # bytes; above the kernel's limit
_POLL_INTERVAL = 0.02  # seconds


class ThreadsError(RuntimeError):
    """Error of a server with several threads, which can't be forked safely."""


def main(lifeline: int, requests: int, program: int) -> None:
    """Serves until the program's end. Returns only in workers, at their end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the program ignores it, `waitpid` would fail
    server = _Server(lifeline, socket.socket(fileno=requests), program)
    _worker.run_worker(server.serve())


class _Server:
    def __init__(self, lifeline: int, requests: socket.socket, program: int) -> None:
        self._lifeline = lifeline
        self._requests = requests
        requests.set_inheritable(False)
        self._program = os.pidfd_open(program)  # alive, or the lifeline would have killed this process
        self._workers: dict[int, int] = {}  # process ids, by the program's numbers
        self._files: dict[str, int | None] = {}  # written when, of preloaded modules that are not installed
        self._refusal = self._import(*pickle.loads(requests.recv(_MAX_MESSAGE)))
        self._helpers = _children()  # processes that the imports have started
        _adopt_orphans()
        self._held_lifeline = _lifeline.release(lifeline)  # after the imports, which may have forked

    def serve(self) -> Channel:
        """Answers requests until the program ends. Returns only in workers: their control socket."""
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        poll.register(self._program, select.POLLIN)
        while True:
            if self._program in dict(poll.poll()):
                self._drain(poll)
            try:
                request, descriptors, _, _ = socket.recv_fds(self._requests, _MAX_MESSAGE, 4)
            except ConnectionResetError:  # the program has left answers unread
                request = b""
                descriptors = []
            if not request:
                self._drain(poll)
            (number,) = NUMBER.unpack(request[1:])
            if request[:1] == FORK:
                worker = self._fork(number, descriptors)
                if worker is not None:
                    return worker
            elif number in self._workers:  # the server may have refused to fork it
                self._reap(number)

    def _import(self, modules: Sequence[str], sys_path: list[str], keeps_path: bool) -> Exception | None:
        """Imports the preloaded modules, with the program's `sys.path`, after the server's if it keeps that.

        Returns the error with which every fork is refused, if any.
        """
        own_path = list(sys.path)
        own_modules = {*sys.modules}
        sys.path[:] = [*(own_path if keeps_path else ()), *sys_path]
        for module in modules:
            try:
                importlib.import_module(module)
            except BaseException as error:
                return ImportError(f"preload: {module!r} can't be imported: {type(error).__name__}: {error}")
        sys.path[:] = own_path
        self._files = _written_times(sys.modules.keys() - own_modules)
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
        answer: int | Exception
        pidfds: list[int] = []
        try:
            if self._refusal is not None:
                raise self._refusal
            if any(_written_at(file) != written for file, written in self._files.items()):
                raise ConnectionError("a preloaded module was edited")  # the program starts a new server
            pid = os.fork()
        except Exception as error:
            answer = error
        else:
            if pid == 0:
                self._become_worker(channel, *others)
                return channel
            self._workers[number] = pid
            # The worker does this, too, but the program may kill its group before the worker first runs.
            with suppress(OSError):
                os.setpgid(pid, pid)
            pidfds.append(os.pidfd_open(pid))
            answer = pid
        with suppress(EOFError):  # the program no longer waits for it, and will have it reaped
            channel.send(answer, descriptors=pidfds)
        channel.close()
        for descriptor in (*others, *pidfds):
            os.close(descriptor)
        return None

    def _become_worker(self, channel: Channel, output: int, error: int, folder: int) -> None:
        """Closes the server's descriptors, and makes the process as the program would have started it."""
        os.setpgid(0, 0)
        _lifeline.hold(self._lifeline)  # from now on, this process ends with the program
        self._held_lifeline.close()
        _adopt_orphans()
        self._requests.close()
        os.close(self._program)
        os.dup2(output, 1)
        os.dup2(error, 2)
        os.fchdir(folder)
        for descriptor in (output, error, folder):
            os.close(descriptor)
        try:
            environ, cores = channel.receive_message()
        except EOFError:  # the program has given up on the worker
            sys.exit()
        os.environ.clear()
        os.environ.update(environ)
        time.tzset()
        if cores != affinity():
            os.sched_setaffinity(0, cores)
        importlib.invalidate_caches()  # modules may have been installed since the server's start
        _reseed()

    def _reap(self, number: int) -> None:
        pid = self._workers.pop(number)
        kill_group(pid)
        _, status = os.waitpid(pid, 0)
        self._end_orphans()
        with suppress(OSError):  # the program reads no answers any more
            answer = ANSWER.pack(number, os.waitstatus_to_exitcode(status))
            self._requests.send(answer, socket.MSG_DONTWAIT)

    def _drain(self, poll: select.poll) -> NoReturn:
        """Waits for the workers to close their envs, and exits; after the program's end, not for long."""
        poll.unregister(self._requests)
        deadline = time.monotonic() + _lifeline.CLOSE_TIMEOUT
        while self._workers:
            time.sleep(_POLL_INTERVAL)
            has_ended = bool(poll.poll(0))
            if time.monotonic() > deadline:
                self._held_lifeline.close()  # the kernel kills them if the program became another by `exec`
                if has_ended:
                    break
            for number, pid in [*self._workers.items()]:
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    kill_group(pid)  # what its envs have started
                    os.waitpid(pid, 0)
                    del self._workers[number]
        for pid in self._workers.values():
            kill_group(pid)
        self._workers.clear()
        self._end_orphans()
        os._exit(0)

    def _end_orphans(self) -> None:
        # A child that is neither a worker nor a helper is an orphan, and may leave orphans of its own.
        while orphans := _children() - {*self._workers.values()} - self._helpers:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _written_times(modules: Iterable[str]) -> dict[str, int | None]:
    """Returns when the files of modules were written, in ns, except those of installed packages."""
    paths = sysconfig.get_paths()
    installed = (paths["stdlib"], paths["purelib"], paths["platlib"])
    files = [getattr(sys.modules[module], "__file__", None) for module in modules]
    return {file: _written_at(file) for file in files if file and not file.startswith(installed)}


def _written_at(file: str) -> int | None:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None


def _reseed() -> None:
    """Gives this fork random numbers of its own; `random` reseeds itself after a fork."""
    np.random.seed()
    if (torch := sys.modules.get("torch")) is not None:  # preloaded
        torch.default_generator.seed()


def _children() -> set[int]:
    # Of the main thread, which is the only one.
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def _adopt_orphans() -> None:
    """Makes this process, in place of init, the new parent of orphans among its descendants."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
