"""Starts worker processes, and makes the message that tells one what to build."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import cloudpickle
import gymnasium

from jaxvec._backends._launcher import Slices
from jaxvec._backends._messages import Setup
from jaxvec._backends._plan import Plan
from jaxvec._handoff import _channel
from jaxvec._handoff._channel import Channel

# Workers share the machine's cores, so each gets one thread; and they never touch the accelerator.
_WORKER_ENV: dict[str, str | None] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": None,
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


class WorkerProcess(subprocess.Popen[bytes]):
    """A worker of this machine, the first of a process group of its own; see `Process`."""

    place = ""
    ahead = 0

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def ending(self) -> tuple[int | None, str]:
        try:
            exitcode = self.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return None, "closed its control socket"  # but lives; it will be killed
        if exitcode >= 0:
            return exitcode, f"exited with code {exitcode}"
        name = signal.Signals(-exitcode).name
        hint = " (perhaps by the kernel, for want of memory)" if name == "SIGKILL" else ""
        return exitcode, f"was killed by {name}{hint}"


class Spawner:
    """Starts workers on this machine; see `Launcher`."""

    at_sockets = False

    def __init__(self, worker_env: Mapping[str, str | None]) -> None:
        """Opens what all workers share.

        Args:
            worker_env: changes to their environment variables; `None` unsets one.
        """
        self._worker_env = worker_env
        self._lifeline = os.pipe()  # whose end means the parent's

    def shares(self, slices: Slices) -> Slices:
        return slices

    def launch(self, worker: int) -> tuple[WorkerProcess, Channel]:
        lifeline = self._lifeline[0]
        ours, theirs = _channel.pair()
        env = {**os.environ, **_WORKER_ENV, **self._worker_env}
        # Only to find what a worker begins with; it then takes over our sys.path and restores PYTHONPATH.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [*_roots(), os.environ.get("PYTHONPATH")]))
        try:
            process = WorkerProcess(
                [sys.executable, "-u", "-P", "-m", "jaxvec._backends._worker", str(lifeline), str(theirs)],
                env={name: value for name, value in env.items() if value is not None},
                pass_fds=[lifeline, theirs],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is for the parent alone
            )
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(theirs)
        return process, ours

    def close(self) -> None:
        for descriptor in self._lifeline:
            if descriptor >= 0:
                os.close(descriptor)
        self._lifeline = -1, -1


def _roots() -> list[str]:
    """Returns where this package is and, if it is not installed like others, the Gymnasium in use."""
    here = str(Path(__file__).resolve().parents[2])
    theirs = str(Path(gymnasium.__file__).parents[1])
    return [here] if theirs in (here, *sysconfig.get_paths().values()) else [theirs, here]


def setup(plan: Plan, worker: int, *, learn_info: bool) -> Setup:
    """Makes the first message to a worker; raises `TypeError` if a constructor can't be pickled."""
    first, _ = plan.slices[worker]
    try:
        pickled: bytes = cloudpickle.dumps(list(plan.env_fns_of(worker)))
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f"the constructor of env {first} can't be pickled, so it can't be sent to a worker: {error}; "
            'make what it needs inside it, or use backend="serial"'
        ) from error
    return Setup(
        sys_path=list(sys.path),
        python_path=os.environ.get("PYTHONPATH"),
        first=first,
        env_fns=pickled,
        kind=plan.kind,
        learn_info=learn_info and first == 0,
    )
