"""The start of new interpreters: workers with `start_method="spawn"`, and the fork server."""

from __future__ import annotations

import _thread
import fcntl
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from jaxvec._engine.channel import Channel, channel_pair
from jaxvec._options import PoolConfig
from jaxvec._workers import lifeline
from jaxvec._workers.base import Process, describe_exit
from jaxvec._workers.interpreter import Interpreter

# Workers share the machine's cores, so each gets one thread. They never use the accelerator.
_WORKER_ENV: dict[str, str | None] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": None,
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}

# Prefixes of variables with the process's MPI rank. MPI in a worker would take the program's rank.
_MPI_PREFIXES = ("OMPI_", "PMI_", "PMIX_")

_POLL_INTERVAL = 0.002  # seconds


class SpawnedWorker(Process):
    """A worker with its own interpreter, and the leader of its own process group."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        # Any thread may reap it: `Popen` has a lock for that, and sets `returncode` once.
        self._process = process
        self.pid = process.pid
        # Pools that are closed at the program's end still wait for it.
        weakref.finalize(self, _drop, process, os.getpid()).atexit = False

    def wait(self, timeout: float) -> bool:
        # Not `Popen.wait`, which would reap it before the rest of its group is killed.
        deadline = time.monotonic() + timeout
        while not self.ended():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_INTERVAL)
        self.end()  # kills what the envs have started, before the pid can be reused
        self._process.wait()
        return True

    def end(self) -> None:
        if self._process.returncode is None:
            kill_group(self.pid)

    def ending(self) -> tuple[int | None, str]:
        return describe_exit(self.wait(timeout=1), self._process.returncode)

    def ended(self) -> bool:
        if self._process.returncode is not None:
            return True
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: only `poll` tells, and reaps the worker
            if self._process.poll() is not None:
                kill_group(self.pid)  # at once, as the number of a group without processes is free
            return self._process.returncode is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # other code has reaped it
            return True


def _drop(process: subprocess.Popen[bytes], program: int) -> None:
    """Ends and reaps the process of a handle that was dropped before it was waited for."""
    # The garbage collector calls this in any thread, which may hold any lock, also of `threading`. A fork of
    # the program drops its copies of the handles.
    if os.getpid() == program and process.returncode is None:
        kill_group(process.pid)
        _thread.start_new_thread(process.wait, ())


def kill_group(pid: int) -> None:
    """Kills the processes in the group that `pid` leads, if there are any."""
    # On macOS, it is a PermissionError if all of them have ended and are yet to be reaped.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Spawner:
    """Starts workers on this machine as new interpreters."""

    def __init__(self, config: PoolConfig, interpreter: Interpreter) -> None:
        self._changes = config.workers.env
        self._interpreter = interpreter

    def launch(self, streams: Sequence[int]) -> tuple[SpawnedWorker, Channel]:
        channel, worker_end = channel_pair()
        try:
            process = start(
                "jaxvec._workers.worker",
                lifeline.read_end(is_kept=True),
                worker_end,
                env=environ(self._changes),
                interpreter=self._interpreter,
                streams=streams,
            )
            return SpawnedWorker(process), channel
        except BaseException:
            channel.close()
            raise
        finally:
            os.close(worker_end)


def environ(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the program's environment variables, with the changes for workers."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_PREFIXES)}
    variables = {**own, **_WORKER_ENV, **changes}
    return {name: value for name, value in variables.items() if value is not None}


def start(
    module: str,
    lifeline_end: int,
    descriptor: int,
    *arguments: int,
    env: Mapping[str, str],
    interpreter: Interpreter,
    streams: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Starts an interpreter that runs `module.main(lifeline, descriptor, *arguments)`.

    It ends with the lifeline, inherits `descriptor`, and leads its own process group. `streams` become its
    stdout and stderr.
    """
    command, env = interpreter.command(dict(env))
    with ExitStack() as stack:
        lifeline_end = _above_standard(lifeline_end, stack)
        descriptor = _above_standard(descriptor, stack)
        return subprocess.Popen(
            [*command, str(lifeline_end), module, *map(str, (descriptor, *arguments))],
            env=env,
            pass_fds=[lifeline_end, descriptor],
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            process_group=0,  # a terminal sends Ctrl-C to the program's group only
        )


def _above_standard(descriptor: int, stack: ExitStack) -> int:
    # The child gets standard streams of its own under 0 to 2.
    if descriptor > 2:
        return descriptor
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    stack.callback(os.close, copy)
    return copy
