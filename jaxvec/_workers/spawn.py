"""Starts interpreters of their own: workers, and the fork server that others are forked from."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import gymnasium

from jaxvec._config import PoolConfig
from jaxvec._dispatch.channel import Channel, channel_pair
from jaxvec._workers import lifeline
from jaxvec._workers.base import Launcher, Process, tell_ending

# WorkerGroup share the machine's cores, so each gets one thread; and they never touch the accelerator.
_WORKER_ENV: dict[str, str | None] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": None,
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}

# By these MPI's launchers tell a process its rank: MPI in a worker would take the program's place.
_MPI = ("OMPI_", "PMI_", "PMIX_")

_POLL_INTERVAL = 0.002  # seconds between looks for the end of a process


class SpawnedWorker(Process):
    """A worker with an interpreter of its own, the first of a process group."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def ended(self) -> bool:
        if self._process.returncode is None and _has_ended(self.pid):
            self.end()  # what its envs have started; once it is reaped, its pid may be another's
            self._process.wait()
        return self._process.returncode is not None

    def wait(self, timeout: float) -> bool:
        # Not by Popen.wait, which would reap it before the rest of its group is ended.
        deadline = time.monotonic() + timeout
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
        return self.ended()

    def end(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def ending(self) -> tuple[int | None, str]:
        return tell_ending(self.wait(timeout=1), self._process.returncode)


class Spawner(Launcher):
    """Starts workers on this machine, each an interpreter of its own."""

    def __init__(self, config: PoolConfig) -> None:
        self._changes = config.workers.env

    def launch(self, worker: int) -> tuple[SpawnedWorker, Channel]:
        ours, theirs = channel_pair()
        try:
            process = start("jaxvec._workers.worker", theirs, env=environ(self._changes))
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(theirs)
        return SpawnedWorker(process), ours


def environ(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the environment variables of a worker that is started now."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_MPI)}
    variables = {**ours, **_WORKER_ENV, **changes}
    return {name: value for name, value in variables.items() if value is not None}


def start(module: str, descriptor: int, *arguments: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts an interpreter that runs `main` of a module, in a process group of its own, and ends with us.

    Args:
        module: of this package.
        descriptor: that it inherits; an argument of `main`, after the lifeline.
        *arguments: more of these.
        env: its environment variables.
    """
    if not sys.executable:
        raise FileNotFoundError(
            "there is no Python interpreter to start: sys.executable is empty; set it to the path of one"
        )
    env = dict(env)
    # Only to find what it begins with; it then takes over our sys.path and restores PYTHONPATH.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*_roots(), os.environ.get("PYTHONPATH")]))
    with ExitStack() as stack:
        given = [_above_standard(each, stack) for each in (lifeline.read_end(), descriptor)]
        words = [given[0], module, given[1], *arguments]
        return subprocess.Popen(
            [sys.executable, "-u", "-P", str(Path(lifeline.__file__)), *map(str, words)],
            env=env,
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            stdout=None if is_open(1) else subprocess.DEVNULL,
            stderr=None if is_open(2) else subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal is for the program alone
        )


def is_open(descriptor: int) -> bool:
    """Says whether there is such a descriptor; daemons close even the standard ones."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _above_standard(descriptor: int, stack: ExitStack) -> int:
    """Returns a descriptor that is none of the standard ones, which a child has for itself."""
    if descriptor > 2:
        return descriptor
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    stack.callback(os.close, copy)
    return copy


def _has_ended(pid: int) -> bool:
    """Says whether a child has ended, without reaping it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody else has reaped it
        return True


def _roots() -> list[str]:
    """Returns where this package is and, if it is not installed like others, the Gymnasium in use."""
    here = str(Path(__file__).resolve().parents[2])
    theirs = str(Path(gymnasium.__file__).parents[1])
    return [here] if theirs in (here, *sysconfig.get_paths().values()) else [theirs, here]
