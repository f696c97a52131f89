"""Starts one worker process, and makes the message that tells it what to build."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import cloudpickle
import gymnasium

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


def spawn(lifeline: int, worker_env: Mapping[str, str | None]) -> tuple[subprocess.Popen[bytes], Channel]:
    """Starts a worker, in a process group of its own.

    Args:
        lifeline: read end of the pipe whose end means the parent's.
        worker_env: changes to its environment variables; `None` unsets one.

    Returns:
        The process, and our end of its control socket.
    """
    ours, theirs = _channel.pair()
    env = {**os.environ, **_WORKER_ENV, **worker_env}
    # Only to find what a worker begins with; it then takes over our sys.path and restores PYTHONPATH.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*_roots(), os.environ.get("PYTHONPATH")]))
    try:
        process = subprocess.Popen(
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
