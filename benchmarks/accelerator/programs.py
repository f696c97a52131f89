"""What JAX does with our programs on a device: `python -m benchmarks.accelerator.programs QUESTION FILE`."""

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

NUM_ENVS = 4
FAILS, HANGS = 99, 98  # actions


class ObedientEnv(gymnasium.Env[Any, Any]):
    """Counts its steps, and fails or hangs when it is told to."""

    observation_space = spaces.Box(-1, 1e6, (4,), np.float32)
    action_space = spaces.Discrete(100)

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Starts over."""
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        """Takes its time."""
        if action == FAILS:
            raise RuntimeError("told to fail")
        if action == HANGS:
            os.write(1, b"hangs\n")  # to the program's own output
            threading.Event().wait()
        if self._seconds:
            time.sleep(self._seconds)
        self._steps += 1
        return np.full(4, self._steps, np.float32), 1.0, False, False, {}


def make(
    seconds: float = 0.0, num_envs: int = NUM_ENVS, transport: str = "auto", **kwargs: Any
) -> jaxvec.VectorEnv:
    """Makes a pool of these envs, a worker each."""
    with jaxvec.config.override(transport=transport):
        return jaxvec.make(lambda: ObedientEnv(seconds), num_envs, num_workers=4, final_obs=False, **kwargs)


def rollout(length: int, num_envs: int = NUM_ENVS) -> Callable[[Any], Any]:
    """Returns a program of so many steps."""

    @jax.jit
    def run(handle: Any) -> Any:
        return jax.lax.scan(
            lambda handle, _: jaxvec.step(handle, jnp.zeros(num_envs, int)), handle, length=length
        )

    return run


class Answers:
    """What is known, in the file at once: a question may be the last one that the process asks."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._answers: dict[str, Any] = {"jax": jax.__version__}

    def keep(self, question: str, answer: Callable[[], Any]) -> None:
        """Asks; an error is an answer, too."""
        start = time.perf_counter()
        try:
            known = answer()
        except Exception as error:  # its text is what we want to know
            known = f"{type(error).__name__}: {error}"[:800]
        seconds = round(time.perf_counter() - start, 3)
        self._answers[question] = {"answer": known, "seconds": seconds}
        self._file.write_text(json.dumps(self._answers, indent=1))
        print(question, known, flush=True)


def calling(answers: Answers, device: jax.Device, short: bool) -> None:
    """How calls begin, end and fail, and what they cost."""
    answers.keep("is the segment page-locked", page_locked)
    answers.keep("a program returns when its steps are done", returns)
    answers.keep("an error of an env", error_of_an_env)
    answers.keep("an error that nobody waits for", unseen_error)
    answers.keep("us a step", lambda: costs(device, 20 if short else 1500))


def page_locked() -> bool:
    """After a reset inside a program."""
    with make() as envs:
        jax.block_until_ready(jax.jit(lambda: jaxvec.reset(envs))())
        return envs.pool.finalizer.pinned is not None


def returns() -> dict[str, Any]:
    """Whether a call waits for its envs, and whether a step of the host's comes after its own."""
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
            "the host's step is the 9th": seen == [9.0] * NUM_ENVS,
        }


def error_of_an_env() -> dict[str, Any]:
    """Where it is raised, and whether the device and a new pool go on."""
    told: dict[str, Any] = {}
    try:
        with make() as envs:
            handle, _ = jaxvec.reset(envs)
            result = jax.jit(jaxvec.step)(handle, jnp.array([0, FAILS, 0, 0]))
            told["raised by"] = "the wait"
            jax.block_until_ready(result)
            told["raised by"] = "the end of the block"
    except jaxvec.EnvError as error:
        told["error"] = str(error)[:200]
    told["the device goes on"] = float(jnp.ones(3).sum()) == 3
    with make() as envs:
        _, timesteps = jax.block_until_ready(rollout(3)(jaxvec.reset(envs)[0]))
        told["a new pool goes on"] = np.asarray(timesteps.obs[:, 0, 0]).tolist() == [1.0, 2.0, 3.0]
    return told


def unseen_error() -> str:
    """The end of `with envs:` raises it."""
    try:
        with make() as envs:
            jax.jit(jaxvec.step)(jaxvec.reset(envs)[0], jnp.full(NUM_ENVS, FAILS))
    except jaxvec.EnvError as error:
        return str(error)[:200]
    return "nothing was raised"


def costs(device: jax.Device, steps: int) -> dict[str, float]:
    """The least of three turns, of eight envs that do nothing."""

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
    for where, transport, count in (
        (jax.devices("cpu")[0], "ffi", steps),
        (device, "ffi", steps),
        (device, "io_callback", slow),
    ):
        with jax.default_device(where), make(num_envs=8, transport=transport) as envs:
            run = rollout(count, 8)
            handle = jax.device_put(jaxvec.reset(envs)[0], where)
            found[f"{where.platform}, {transport}"] = least(
                lambda handle, run=run: run(handle)[0], handle, count
            )
    with jax.default_device(device):
        run = jax.jit(lambda x: jax.lax.scan(lambda x, _: (x + 1, None), x, length=steps)[0])
        found[f"{device.platform}, a scan without envs"] = least(run, jnp.ones(8), steps)
        with make(num_envs=8, transport="ffi") as envs:
            # The host reads its condition at each step, as it does not for a scan.
            turn = jax.jit(
                lambda handle, n: jax.lax.fori_loop(
                    0, n, lambda _, handle: jaxvec.step(handle, jnp.zeros(8, int))[0], handle
                )
            )
            handle = jax.device_put(jaxvec.reset(envs)[0], device)
            name = f"{device.platform}, ffi, a loop whose length is an argument"
            found[name] = least(lambda handle: turn(handle, steps), handle, steps)
    return found


def threads(answers: Answers, device: jax.Device, short: bool) -> None:
    """Compiling, with autotuning, and a small program, while another thread's program waits for its envs."""
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
    """Ctrl-C while an env hangs, in a process of its own."""

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
        first = child.stdout.readline() + child.stdout.readline()  # so the program waits, or is about to
        start = time.perf_counter()
        child.send_signal(signal.SIGINT)
        try:
            told, _ = child.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return {"first": first, "then": "20 s after the signal it has not ended"}
        return {"first": first, "then": told, "s": time.perf_counter() - start, "exit": child.returncode}

    answers.keep("Ctrl-C", ctrl_c)


def hang(answers: Answers, device: jax.Device, short: bool) -> None:
    """What `interrupt` interrupts."""
    envs = make(timeouts=jaxvec.Timeouts(step=None))
    handle, _ = jax.block_until_ready(rollout(1)(jaxvec.reset(envs)[0]))
    print("ready", flush=True)
    try:
        with envs:
            jax.block_until_ready(jax.jit(jaxvec.step)(handle, jnp.full(NUM_ENVS, HANGS)))
    except BaseException as error:  # KeyboardInterrupt, or what JAX makes of it
        print(type(error).__name__, str(error)[:200], flush=True)


def main() -> None:
    """Runs the command line."""
    questions = {each.__name__: each for each in (calling, threads, interrupt, hang)}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator.programs", description=__doc__)
    parser.add_argument("question", choices=questions)
    parser.add_argument("file", type=Path)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    device = jax.devices(options.platform)[0]
    with jax.default_device(device):
        questions[options.question](Answers(options.file), device, options.short)


if __name__ == "__main__":
    main()
