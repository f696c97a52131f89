"""Examines programs with envs on a device: `python -m benchmarks.accelerator.programs QUESTION FILE`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import jaxvec
from jaxvec._vector_env import pool_of

NUM_ENVS = 4
FAILS, HANGS = 99, 98  # actions of `ScriptedEnv`


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """An env that counts its steps, and that fails or hangs on request of an action."""

    observation_space = spaces.Box(-1, 1e6, (4,), np.float32)
    action_space = spaces.Discrete(100)

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        if action == FAILS:
            raise RuntimeError("failure requested by the action")
        if action == HANGS:
            os.write(1, b"hangs\n")  # to standard output of the program
            threading.Event().wait()
        if self._seconds:
            time.sleep(self._seconds)
        self._steps += 1
        return np.full(4, self._steps, np.float32), 1.0, False, False, {}


def make(
    seconds: float = 0.0, num_envs: int = NUM_ENVS, transport: str = "auto", **kwargs: Any
) -> jaxvec.VectorEnv:
    """Makes a pool of `ScriptedEnv`s with four workers.

    Args:
        seconds: Duration of a step.
        num_envs: Number of envs.
        transport: Transport of the pool.
        kwargs: Further options of `jaxvec.make`.
    """
    with jaxvec.config.override(transport=transport):
        return jaxvec.make(lambda: ScriptedEnv(seconds), num_envs, num_workers=4, final_obs=False, **kwargs)


def rollout(
    length: int, num_envs: int = NUM_ENVS, kept: Callable[[Any], Any] = lambda timestep: timestep
) -> Callable[[Any], Any]:
    """Returns a jitted program that steps all envs `length` times, and stacks what `kept` returns."""

    @jax.jit
    def run(handle: Any) -> Any:
        def body(handle: Any, _: None) -> tuple[Any, Any]:
            handle, timestep = jaxvec.step(handle, jnp.zeros(num_envs, int))
            return handle, kept(timestep)

        return jax.lax.scan(body, handle, length=length)

    return run


class Answers:
    """Results by question, in a JSON file.

    The file is rewritten after each question, because a later question may crash or hang the process.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._answers: dict[str, Any] = {"jax": jax.__version__}

    def keep(self, question: str, answer: Callable[[], Any]) -> None:
        """Calls `answer` and stores its result, or its exception, and the duration in seconds."""
        start = time.perf_counter()
        try:
            result = answer()
        except Exception as error:  # the exception is a result, too
            result = f"{type(error).__name__}: {error}"[:800]
        seconds = round(time.perf_counter() - start, 3)
        self._answers[question] = {"answer": result, "seconds": seconds}
        self._file.write_text(json.dumps(self._answers, indent=1))
        print(question, result, flush=True)


def calling(answers: Answers, device: jax.Device, short: bool) -> None:
    """Examines how calls start, end and fail, and measures their cost."""
    answers.keep("is the segment page-locked", page_locked)
    answers.keep("a program returns when its steps are done", returns)
    answers.keep("an error of an env", error_of_an_env)
    answers.keep("an error of a call without a wait", unseen_error)
    answers.keep("us per step", lambda: costs(device, 20 if short else 1500))


def page_locked() -> bool:
    """Returns whether the segment is page-locked after a reset inside a jitted program."""
    with make() as envs:
        jax.block_until_ready(jax.jit(lambda: jaxvec.reset(envs))())
        return pool_of(envs).finalizer.pinned is not None


def returns() -> dict[str, Any]:
    """Examines whether a call waits for its envs, and whether the next host step follows all its steps."""
    with make(seconds=0.05) as envs:
        run = rollout(4)
        handle, _ = jax.block_until_ready(run(jaxvec.reset(envs)[0]))
        start = time.perf_counter()
        handle, timesteps = run(handle)
        returned = time.perf_counter() - start
        jax.block_until_ready(timesteps)
        whole = time.perf_counter() - start
        seen = envs.step(np.zeros(NUM_ENVS, int)).obs[:, 0].tolist()
        return {
            "returned, s": returned,
            "whole, s": whole,
            "the host step is the 9th": seen == [9.0] * NUM_ENVS,
        }


def error_of_an_env() -> dict[str, Any]:
    """Examines where an env's error is raised, and whether the device and a new pool work afterwards."""
    found: dict[str, Any] = {}
    try:
        with make() as envs:
            handle, _ = jaxvec.reset(envs)
            result = jax.jit(jaxvec.step)(handle, jnp.array([0, FAILS, 0, 0]))
            found["raised by"] = "the wait"
            jax.block_until_ready(result)
            found["raised by"] = "the end of the block"
    except jaxvec.EnvError as error:
        found["error"] = str(error)[:200]
    found["the device still works"] = float(jnp.ones(3).sum()) == 3
    with make() as envs:
        _, timesteps = jax.block_until_ready(rollout(3)(jaxvec.reset(envs)[0]))
        found["a new pool works"] = np.asarray(timesteps.obs[:, 0, 0]).tolist() == [1.0, 2.0, 3.0]
    return found


def unseen_error() -> str:
    """Returns the text of an error that the end of `with envs:` raises, since no call waits for it."""
    try:
        with make() as envs:
            jax.jit(jaxvec.step)(jaxvec.reset(envs)[0], jnp.full(NUM_ENVS, FAILS))
    except jaxvec.EnvError as error:
        return str(error)[:200]
    return "nothing was raised"


def costs(device: jax.Device, steps: int) -> dict[str, float]:
    """Measures microseconds per step of eight no-op envs by device and transport, as minima of three."""

    def least(turn: Callable[[Any], Any], carry: Any, count: int) -> float:
        carry = jax.block_until_ready(turn(carry))
        times = []
        for _ in range(3):
            start = time.perf_counter()
            carry = jax.block_until_ready(turn(carry))
            times.append(time.perf_counter() - start)
        return round(min(times) / count * 1e6, 1)

    found: dict[str, float] = {}
    slow = max(steps // 5, 2)
    # A GPU stacks each leaf by a kernel of its own.
    kept: dict[str, Callable[[Any], Any]] = {
        "": lambda timestep: timestep,
        ", only rewards stacked": lambda timestep: timestep.reward,
        ", nothing stacked": lambda timestep: None,
    }
    for where, transport, stacked, count in (
        (jax.devices("cpu")[0], "ffi", "", steps),
        *((device, "ffi", stacked, steps) for stacked in kept),
        (device, "io_callback", "", slow),
    ):
        with jax.default_device(where), make(num_envs=8, transport=transport) as envs:
            run = rollout(count, 8, kept[stacked])
            handle = jax.device_put(jaxvec.reset(envs)[0], where)
            found[f"{where.platform}, {transport}{stacked}"] = least(
                lambda handle, run=run: run(handle)[0], handle, count
            )
    with jax.default_device(device):
        run = jax.jit(lambda x: jax.lax.scan(lambda x, _: (x + 1, None), x, length=steps)[0])
        found[f"{device.platform}, a scan without envs"] = least(run, jnp.ones(8), steps)
        with make(num_envs=8, transport="ffi") as envs:
            # In contrast to a scan, the host evaluates the loop condition in each step.
            turn = jax.jit(
                lambda handle, n: jax.lax.fori_loop(
                    0, n, lambda _, handle: jaxvec.step(handle, jnp.zeros(8, int))[0], handle
                )
            )
            handle = jax.device_put(jaxvec.reset(envs)[0], device)
            name = f"{device.platform}, ffi, a loop with a dynamic length"
            found[name] = least(lambda handle: turn(handle, steps), handle, steps)
    return found


def threads(answers: Answers, device: jax.Device, short: bool) -> None:
    """Measures compilation and a small program while a program in another thread waits for its envs."""
    small = jax.jit(lambda x: x + 1)
    one = jnp.ones(3)

    def run_small() -> float:
        start = time.perf_counter()
        jax.block_until_ready(small(one))
        return time.perf_counter() - start

    def compile_new(rows: int) -> float:
        start = time.perf_counter()
        x = jnp.ones((rows, 512))
        jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x @ x.T) @ x)(x))
        return time.perf_counter() - start

    run_small()
    compile_new(512)
    answers.keep("alone, s", lambda: {"a small program": run_small(), "compiling": compile_new(576)})

    def beside() -> dict[str, Any]:
        with make(seconds=0.04) as envs:
            run = rollout(10 if short else 150)
            handle, _ = jaxvec.reset(envs)
            run.lower(handle).compile()  # type: ignore[attr-defined]
            start = time.perf_counter()
            thread = threading.Thread(target=lambda: jax.block_until_ready(run(handle)))
            thread.start()
            while envs.stats().total.steps == 0 and thread.is_alive():
                time.sleep(0.01)
            found = {
                "a small program": run_small(),
                "compiling": compile_new(640),
                "still running": thread.is_alive(),
            }
            thread.join()
            return found | {"the program took": time.perf_counter() - start}

    answers.keep("beside a program that waits for its envs, s", beside)


def interrupt(answers: Answers, device: jax.Device, short: bool) -> None:
    """Sends SIGINT to a child process that runs `hang`, and records its output."""

    def ctrl_c() -> dict[str, Any]:
        command = [
            sys.executable,
            "-m",
            "benchmarks.accelerator.programs",
            "hang",
            "-",
            "--platform",
            device.platform,
        ]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        first = (
            child.stdout.readline() + child.stdout.readline()
        )  # after the second line, the program waits or is about to wait
        start = time.perf_counter()
        child.send_signal(signal.SIGINT)
        try:
            output, _ = child.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return {"first": first, "then": "the process did not exit within 20 s after the signal"}
        return {"first": first, "then": output, "s": time.perf_counter() - start, "exit": child.returncode}

    answers.keep("Ctrl-C", ctrl_c)


def hang(answers: Answers, device: jax.Device, short: bool) -> None:
    """Runs a program with an env that hangs, for `interrupt`."""
    envs = make(timeouts=jaxvec.Timeouts(step=None))
    handle, _ = jax.block_until_ready(rollout(1)(jaxvec.reset(envs)[0]))
    print("ready", flush=True)
    try:
        with envs:
            jax.block_until_ready(jax.jit(jaxvec.step)(handle, jnp.full(NUM_ENVS, HANGS)))
    except BaseException as error:  # KeyboardInterrupt, or an error of JAX that replaces it
        print(type(error).__name__, str(error)[:200], flush=True)


def main(*questions: Callable[[Answers, jax.Device, bool], None]) -> None:
    """Parses the command line and examines one of the questions."""
    named = {each.__name__: each for each in questions}
    parser = argparse.ArgumentParser()
    parser.add_argument("question", choices=named, help="function to run")
    parser.add_argument("file", type=Path, help="JSON file for the results")
    parser.add_argument("--platform", default="cuda", help="JAX platform")
    parser.add_argument("--short", action="store_true", help="run fewer steps")
    options = parser.parse_args()
    device = jax.devices(options.platform)[0]
    with jax.default_device(device):
        named[options.question](Answers(options.file), device, options.short)


if __name__ == "__main__":
    main(calling, threads, interrupt, hang)
