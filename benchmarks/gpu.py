"""What a step costs on a GPU, by its size: `python -m benchmarks.gpu`. Written without one; not run yet.

Each payload's systems take turns. The second figure is what a system takes longer than a program on the CPU.
The host's loop has no copy at all, so what a system takes longer than that is the way to the device, and the
payload over that time is its bandwidth.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import jaxvec
from benchmarks.accelerator.driver import Driver, timed
from jaxvec._memory import pinned

NUM_ENVS = 8
PAYLOADS = {"1 kB": 1 << 10, "1 MB": 1 << 20, "30 MB": 30 << 20}  # of a step of all envs

Turn = Callable[[int], None]  # steps so often


class StillEnv(gymnasium.Env[Any, Any]):
    """Observes `size` bytes, always the same."""

    def __init__(self, size: int) -> None:
        self.observation_space = spaces.Box(0, 255, (size,), np.uint8)
        self.action_space = spaces.Discrete(2)
        self._observation = np.ones(size, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Starts over."""
        return self._observation, {}

    def step(self, action: Any) -> Any:
        """Does nothing."""
        return self._observation, 0.0, False, False, {}


def make(size: int, **kwargs: Any) -> jaxvec.VectorEnv:
    """Makes a pool whose steps have so many bytes."""
    return jaxvec.make(lambda: StillEnv(size // NUM_ENVS), NUM_ENVS, final_obs=False, **kwargs)


def host(envs: jaxvec.VectorEnv, device: jax.Device) -> Turn:
    """A loop in Python that looks at the rows where they are."""
    envs.reset()
    action = np.zeros(NUM_ENVS, np.int32)

    def turn(steps: int) -> None:
        for _ in range(steps):
            envs.send(action)
            envs.recv(copy=False)

    return turn


def program(envs: jaxvec.VectorEnv, device: jax.Device) -> Turn:
    """A scan on the device."""
    state = [jaxvec.reset(envs)[0]]

    # Of a length that is not known, XLA would have the host look at each step whether there is another one.
    @partial(jax.jit, static_argnums=1)
    def run(handle: Any, steps: int) -> Any:
        def body(_: Any, carry: Any) -> Any:
            handle, seen = carry
            handle, timestep = jaxvec.step(handle, jnp.broadcast_to(seen > 1 << 30, (NUM_ENVS,)).astype(int))
            return handle, seen + timestep.obs[0, 0]

        return jax.lax.fori_loop(0, steps, body, (handle, jnp.int32(0)))

    def turn(steps: int) -> None:
        with jax.default_device(device):
            state[0] = jax.block_until_ready(run(state[0], steps))[0]

    return turn


@contextmanager
def unpinned() -> Any:
    """Lets no pool be page-locked."""
    name, pinned._LIBRARY = pinned._LIBRARY, "none"
    try:
        yield
    finally:
        pinned._LIBRARY = name


def plain_copy(size: int, rounds: int = 20) -> float:
    """Returns the seconds of a bare copy from page-locked memory to the device."""
    driver = Driver()
    here, there = driver.allocate_host(size), driver.allocate(size)

    def copy() -> None:
        driver.to_device(there, here, size)
        driver.wait()

    taken = timed(copy, rounds) / 1e6
    driver("cuMemFree_v2", ctypes.c_uint64(there))
    driver("cuMemFreeHost", ctypes.c_void_p(here))
    return taken


def measure(size: int, device: jax.Device, rounds: int, seconds: float) -> dict[str, float]:
    """Returns the seconds of a step in each system, medians over the rounds."""
    with ExitStack() as stack, jax.default_device(device):
        with jax.default_device(jax.devices("cpu")[0]):
            on_cpu = program(stack.enter_context(make(size, transport="ffi")), jax.devices("cpu")[0])
        turns = {
            "host loop, no copy": host(stack.enter_context(make(size)), device),
            "program on the CPU, ffi": on_cpu,
            "program, ffi": program(stack.enter_context(make(size, transport="ffi")), device),
            "program, io_callback": program(stack.enter_context(make(size, transport="io_callback")), device),
        }
        with unpinned():
            turn = program(stack.enter_context(make(size, transport="ffi")), device)
            turn(1)  # the first call of a program is when it would be
        turns["program, ffi, not page-locked"] = turn
        times: dict[str, list[float]] = {name: [] for name in turns}
        counts: dict[str, int] = {}
        for name, turn in turns.items():
            turn(5)
            start = time.perf_counter()
            turn(5)
            counts[name] = max(int(5 * seconds / (time.perf_counter() - start)), 5)
            turn(counts[name])  # compiles
        for _ in range(rounds):
            for name, turn in turns.items():
                start = time.perf_counter()
                turn(counts[name])
                times[name].append((time.perf_counter() - start) / counts[name])
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Prints a table for each payload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default="cuda", help="cpu tries the script where there is no GPU")
    parser.add_argument("--payloads", nargs="+", choices=PAYLOADS, default=list(PAYLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="a file for the figures, in microseconds and GB/s")
    arguments = parser.parse_args()
    device = jax.devices(arguments.platform)[0]
    print(f"jax {jax.__version__}, {device.device_kind}")
    figures: dict[str, Any] = {"device": device.device_kind}
    for label in arguments.payloads:
        size = PAYLOADS[label]
        results = measure(size, device, arguments.rounds, arguments.seconds)
        bare = results["host loop, no copy"]
        rows = figures[f"{label} a step"] = {}
        print(f"\n{label} a step")
        if arguments.platform == "cuda":
            copy = plain_copy(size)
            rows["plain copy"] = {"us": copy * 1e6, "GB/s": size / copy / 1e9}
            print(f"  {'plain copy':32} {copy * 1e6:10.1f} µs {size / copy / 1e9:8.2f} GB/s")
        for name, taken in results.items():
            added, copying = taken - results["program on the CPU, ffi"], taken - bare
            rate = size / copying / 1e9 if copying > 0 else None
            rows[name] = {"us": taken * 1e6, "GB/s": rate}
            said = "" if rate is None else f"{rate:8.2f} GB/s"
            print(f"  {name:32} {taken * 1e6:10.1f} µs {added * 1e6:+10.1f} µs {said}")
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
