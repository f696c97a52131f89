"""Pools where the kernel denies system calls, as in gVisor or a hardened container."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import sandbox
from support.disasters import PATIENCE
from support.scripts import gone

import jaxvec

pytestmark = pytest.mark.skipif(
    not sandbox.CALLS, reason="the numbers of system calls are of Linux on x86-64"
)

# The name of the line of `doctor` for each call.
CALLS = {
    "memfd_create": "memfd_create",
    "fallocate": "fallocate",
    "F_ADD_SEALS": "F_ADD_SEALS",
    "F_SETSIG": "F_SETSIG",
    "sched_getaffinity": "getaffinity",
    "sched_setaffinity": "pin_workers",
    "pidfd_open": "start method",
}

POOL = """
import os, signal
import jaxvec
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    def step(self, action):
        if action == 13:
            signal.pause()
        return super().step(action)
    def pid(self):
        return os.getpid()

envs = jaxvec.make(Env, 2, num_workers=2, states=2, timeouts=jaxvec.Timeouts(step=1))
envs.reset(seed=0)
print(*envs.step([0, 1]).obs[:, 0])
print(*envs.call("pid"), flush=True)
try:
    envs.step([0, 13])
except jaxvec.EnvTimeoutError as error:
    print("in step" in str(error), flush=True)
envs.close()
envs = jaxvec.make(Env, 2, num_workers=2)
print(*envs.call("pid"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(calls, number, *arguments):
    command = [sys.executable, sandbox.__file__, calls, number, *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=Path(jaxvec.__file__).parents[1],
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def filters():
    probe = run("pidfd_open", "ENOSYS", "-c", "")
    if probe.returncode:
        pytest.skip(f"system calls can't be denied here: {probe.stderr.splitlines()[-1]}")


# Without memfd_create, the other calls for a segment are not made, so they are also denied without it.
ALL, ALL_BUT_ONE = ",".join(CALLS), ",".join(call for call in CALLS if call != "memfd_create")


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        (ALL, "ENOSYS"),
        (ALL_BUT_ONE, "EPERM"),
        *(pytest.param(call, "EPERM", marks=pytest.mark.slow) for call in CALLS),
    ],
)
def test_a_pool_works_where_system_calls_are_denied(calls, number):
    done = run(calls, number, "-c", POOL)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    expected = jaxvec.make(jaxvec.testing.CountingEnv, 2, backend="serial")
    expected.reset(seed=0)
    assert lines[0] == " ".join(map(str, expected.step([0, 1]).obs[:, 0]))
    expected.close()
    assert lines[2] == "True", "the error has the stack of the env"
    assert gone(int(pid) for line in (lines[1], lines[3]) for pid in line.split())
    assert not any("jaxvec" in name.name for name in Path("/dev/shm").iterdir())


def test_doctor_shows_denied_system_calls():
    done = run(ALL, "EPERM", "-m", "jaxvec", "doctor")
    lines = done.stdout.splitlines()
    for name in CALLS.values():
        line = next(line for line in lines if line.startswith(name))
        assert "off: " in line or "no pidfds" in line, done.stdout


def test_pin_is_refused_where_processes_cannot_be_bound():
    code = "import jaxvec; jaxvec.Workers(pin=True)"
    done = run("sched_setaffinity", "EPERM", "-c", code)
    assert "ValueError: Workers(pin=True) can't bind processes to cores here" in done.stderr
