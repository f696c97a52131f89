"""Programs on macOS, in an emulation (`support/macos/sitecustomize.py`), as the tests have no Mac."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.disasters import PATIENCE
from support.scripts import gone, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS is emulated on Linux")

TESTS = Path(__file__).parents[1]
FOLDERS = [str(TESTS / "support" / "macos"), os.environ.get("PYTHONPATH", "")]
MACOS = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, FOLDERS))}

ENV = """
import os, sys, threading
import jax, jax.numpy as jnp, numpy as np
import jaxvec
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    def __init__(self, table=None):
        super().__init__(episode_length=50)
        self.table = table

    def step(self, action):
        if action == 13:
            os._exit(3)
        if action == 14:
            print("hello from", "env", flush=True)
        if action == 15:
            self.table[0] += 1
        return super().step(action)

    def looks_like_macos(self):
        return not hasattr(os, "memfd_create") and os.getpid() != os.getppid()

    def first(self):
        return float(self.table[0])
"""


def run(source, log=""):
    """Runs a program on macOS to its end, with warnings as errors; returns the lines that it prints."""
    done = run_python("-W", "error", "-c", ENV + source, env=MACOS)
    assert done.returncode == 0, done.stderr
    assert re.match(log or "$", done.stderr), done.stderr
    return done.stdout.splitlines()


def test_the_emulation_reaches_workers():
    source = """
envs = jaxvec.make(Env, 2, num_workers=2)
print(hasattr(os, "memfd_create"), envs.call("looks_like_macos"), envs.stats().workers[0].process)
"""
    assert run(source) == ["False (True, True) None"]


def test_a_compiled_rollout_steps_each_env_once():
    source = """
envs = jaxvec.make(Env, 4, num_workers=2)
handle, timestep = jaxvec.reset(envs, seed=0)

@jax.jit
def rollout(handle):
    return jax.lax.scan(lambda handle, i: jaxvec.step(handle, jnp.full(4, i)), handle, jnp.arange(10))

handle, steps = rollout(handle)
print(steps.obs[:, 2, 1].tolist(), steps.obs[:, 2, 3].tolist(), steps.reward.sum().item())
envs.close()
"""
    counts = list(range(1, 11))
    assert run(source) == [f"{counts} {[*range(10)]} {4 * sum(counts)}.0"]


def test_asynchronous_mode():
    source = """
envs = jaxvec.make(Env, 6, num_workers=2, batch_size=2)
handle, timestep = jaxvec.reset(envs, seed=0)
handle = jaxvec.send(handle, jnp.zeros(2, int), timestep.info["env_id"])

@jax.jit
def loop(handle):
    def body(handle, _):
        handle, timestep = jaxvec.recv(handle)
        env_ids = timestep.info["env_id"]
        return jaxvec.send(handle, jnp.zeros(2, int), env_ids), (env_ids, timestep.obs[:, 1])
    return jax.lax.scan(body, handle, None, 60)

handle, (env_ids, counts) = loop(handle)
for env_id in range(6):
    own = counts[env_ids == env_id].tolist()
    assert own == list(range(own[0], own[0] + len(own))), own  # from 0, or from 1 for the first batch
print(counts.size)
envs.close()
"""
    assert run(source) == ["120"]


def test_a_worker_that_exits_is_replaced():
    source = """
envs = jaxvec.make(Env, 4, num_workers=2, on_fault="restart")
envs.reset(seed=0)
print(envs.step([0, 0, 0, 13]).info["fault"].tolist())
print(envs.step([0] * 4).obs[:, 2].tolist())
envs.close()
"""
    lines = run(source, log="worker 1 recovers from fault 1: .* exited with code 3")
    assert lines == ["[False, False, True, True]", "[2, 2, 1, 1]"]


def test_states_are_saved_and_restored_in_a_program():
    source = """
envs = jaxvec.make(Env, 4, num_workers=2, states=4)
handle, _ = jaxvec.reset(envs, seed=0)

@jax.jit
def program(handle):
    handle, _ = jaxvec.step(handle, jnp.zeros(4, int))
    handle, state = jaxvec.save(handle)
    handle, first = jaxvec.step(handle, jnp.full(4, 5))
    handle, _ = jaxvec.restore(handle, state)
    handle, second = jaxvec.step(handle, jnp.full(4, 5))
    return handle, first, second

handle, first, second = program(handle)
print(first.obs.tolist() == second.obs.tolist(), second.obs[0].tolist())
envs.close()
"""
    assert run(source) == ["True [1, 2, 2, 5]"]


def test_large_arrays_are_shared_and_copied_when_written():
    source = """
table = np.arange(1 << 19, dtype=np.float64)  # 4 MB
other = np.arange(1 << 18, dtype=np.float64)
envs = jaxvec.make([lambda: Env(table), lambda: Env(other)] * 2, num_workers=2)
envs.reset(seed=0)
envs.step([15, 0, 0, 0])
print(envs.call("first"), table[0])
envs.close()
envs = jaxvec.make(Env, 2, table=table, num_workers=1)
envs.reset(seed=0)
envs.step([15, 0])
print(envs.call("first"), table[0])
envs.close()
"""
    assert run(source) == ["(1.0, 0.0, 0.0, 0.0) 0.0", "(1.0, 0.0) 0.0"]


def test_output_of_workers_goes_to_the_log():
    source = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
envs = jaxvec.make(Env, 2, num_workers=2, workers=jaxvec.Workers(output="log"))
envs.reset(seed=0)
envs.step([0, 14])
envs.close()
"""
    assert "worker 1 (env 1): hello from env" in run(source)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_close_their_envs_and_end_with_the_program(number):
    source = f"""
Env.close = lambda env: os.write(1, b"closed\\n")
envs = jaxvec.make(Env, 2, num_workers=2)
envs.reset(seed=0)
print(*envs.map(lambda env: os.getpid()), flush=True)
os.kill(os.getpid(), {number:d})
"""
    done = run_python("-c", ENV + source, env=MACOS)
    assert done.returncode == -number, done.stderr
    pids, *closed = done.stdout.splitlines()
    assert closed == ["closed"] * 2
    assert gone(map(int, pids.split()))


def test_a_step_that_takes_too_long_raises_and_close_ends_the_worker():
    source = """
class Slow(Env):
    def step(self, action):
        if action == 1:
            threading.Event().wait()
        return super().step(action)

envs = jaxvec.make(Slow, 2, num_workers=2, timeouts=jaxvec.Timeouts(step=0.5))
envs.reset(seed=0)
print(*envs.map(lambda env: os.getpid()), flush=True)
try:
    envs.step([0, 1])
except jaxvec.EnvTimeoutError as error:
    print(error.env_ids)
"""
    pids, env_ids = run(source)
    assert env_ids == "(1,)"
    assert gone(map(int, pids.split()))


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "jaxvec", *words],
        env=MACOS,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_doctor_names_what_is_off():
    done = command("doctor")
    assert done.returncode == 0, done.stderr
    lines = dict(re.findall(r"^(\S+(?: \S+)*) {2,}(.*)$", done.stdout, re.MULTILINE))
    assert lines["start method"] == "spawn: a fork is not safe on darwin"
    assert lines["native library"] == "off: the native library needs Linux's futexes, not darwin"
    assert lines["dispatch"] == "portable"
    assert lines["transport"] == "io_callback"
    assert "memfd_create" not in lines


@pytest.mark.parametrize("name", ["top", "stack"])
def test_commands_that_read_proc_say_so(name):
    done = command(name, str(os.getpid()))
    assert done.returncode == 2
    assert done.stderr.startswith(f"jaxvec {name}: ")
    assert "no /proc" in done.stderr


def test_the_first_program_of_the_readme():
    readme = (TESTS.parent / "README.md").read_text()
    source = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    assert run(source) == ["(128, 64, 4) 8192.0"]
