"""Programs in separate processes, for tests of signals, exits and resource limits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
from support.disasters import PATIENCE, Way
from support.probe import fork_servers

SCRIPT = """
import os, signal, sys, threading, time
import numpy as np, gymnasium, jaxvec
from gymnasium import spaces

class Env(gymnasium.Env):  # defined in __main__, which has no main guard
    observation_space = spaces.Box(0, 1, (2,))
    action_space = spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {{}}
    def pid(self):
        return os.getpid()
    def step(self, action):
        {step}
        return np.zeros(2, np.float32), 1.0, False, False, {{}}

{make}
print(*envs.call("pid"), flush=True)
{then}
"""

PLAIN = """
jaxvec.config.dispatch = {dispatch!r}
envs = jaxvec.make(Env, num_envs=2, num_workers=2, timeouts=jaxvec.Timeouts(start={patience}))
envs.reset()
"""

DRIVEN = """
sys.path.insert(0, {tests!r})
import cloudpickle
from support import disasters
cloudpickle.register_pickle_by_value(disasters)
driver = disasters.Driver(disasters.{way!r}, Env, 2, step_timeout=None)
envs = driver.envs
driver.reset()
"""

# The source of an env's `step`.
STEPPING = r'os.write(1, b"stepping\n"); signal.pause()'


@contextmanager
def run_script(
    step: str = "pass", then: str = "pass", way: Way | None = None, dispatch: str = "auto", **kwargs: object
) -> Iterator[subprocess.Popen[str]]:
    """Yields a script that makes a pool, prints its workers' pids, and does `then`; kills it in the end.

    Args:
        step: what an env does in `step`.
        then: with `envs`, and `driver` if there is a `way`.
        way: to drive the pool; on the host, as a user would write it, if there is none.
        dispatch: of a pool without a way.
        **kwargs: of `Popen`.
    """
    if way is None:
        make = PLAIN.format(dispatch=dispatch, patience=PATIENCE)
    else:
        make = DRIVEN.format(tests=str(Path(__file__).parents[1]), way=way)
    source = textwrap.dedent(SCRIPT).format(step=step, make=make, then=then)
    script = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )
    try:
        yield script
    finally:
        end(script)


def run_python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a Python program to its end; `options` are of `subprocess.run`."""
    options = {"capture_output": True, "text": True, "timeout": PATIENCE, "check": False} | options
    return subprocess.run([sys.executable, *map(str, words)], **options)


def read_line(stream: IO[str]) -> str:
    """Reads a line and nothing beyond it: `communicate` would lose what `readline` reads ahead."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(stream.fileno(), 1)):
        line += byte
    return line.decode()


def read_pids(script: subprocess.Popen[str]) -> list[int]:
    """Waits for the script's pool, and returns the pids of its two workers."""
    line = read_line(script.stdout)
    pids = [int(word) for word in line.split()]
    assert len(pids) == 2, line + script.stderr.read()
    return pids


def workers() -> list[psutil.Process]:
    """Returns the existing workers of this process, and the processes that their envs started."""
    kept = fork_servers()
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in kept]


def shared_names() -> set[str]:
    """Returns the names in /dev/shm that jaxvec may have made."""
    return {name for name in os.listdir("/dev/shm") if "jaxvec" in name}


def gone(pids: object, timeout: float = PATIENCE) -> bool:
    """Returns True once all these processes have ended, or False after a time limit."""
    alive = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            alive.append(psutil.Process(pid))
    return psutil.wait_procs(alive, timeout=timeout)[1] == []


def end(script: subprocess.Popen[str]) -> None:
    """Ends a script, whatever its state."""
    script.kill()
    script.wait(timeout=200)
    script.stdout.close()
    script.stderr.close()


def leftovers() -> dict[str, int]:
    """Counts the resources of this process and machine that a pool could leave behind."""
    found = {"children": len(workers())}
    if sys.platform != "linux":
        return found
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith(("pipe:", "socket:", "anon_inode:", "/memfd:jaxvec")):
            kind = target.partition(":")[0]
            found[kind] = found.get(kind, 0) + 1
    found["shm"] = len(shared_names())
    found["segment maps"] = Path("/proc/self/maps").read_text().count("memfd:jaxvec")
    return found
