"""Measures the time per step on a GPU by payload size: `python -m benchmarks.gpu`.

For each payload, the systems alternate. The first figure is the time per step, and the second is the
difference from a program on the CPU. The host loop copies nothing, so the difference from it is the time of
the transfer to the device. The bandwidth in the third column is the payload divided by that time.
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
PAYLOADS = {"1 kB": 1 << 10, "1 MB": 1 << 20, "30 MB": 30 << 20}  # bytes per step of all envs

Turn = Callable[[int], None]  # steps all envs that many times


class StillEnv(gymnasium.Env[Any, Any]):
    """An env with a constant observation of `size` bytes."""

    def __init__(self, size: int) -> None:
        self.observation_space = spaces.Box(0, 255, (size,), np.uint8)
        self.action_space = spaces.Discrete(2)
        self._observation = np.ones(size, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._observation, {}

    def step(self, action: Any) -> Any:
        return self._observation, 0.0, False, False, {}


def make(size: int, transport: str = "auto") -> jaxvec.VectorEnv:
    """Makes a pool with observations of `size` bytes in total."""
    with jaxvec.config.override(transport=transport):
        return jaxvec.make(lambda: StillEnv(size // NUM_ENVS), NUM_ENVS, final_obs=False)


def host(envs: jaxvec.VectorEnv, device: jax.Device) -> Turn:
    """Returns a Python loop that receives results without a copy."""
    envs.reset()
    action = np.zeros(NUM_ENVS, np.int32)

    def turn(steps: int) -> None:
        for _ in range(steps):
            envs.send(action)
            envs.recv(copy=False)

    return turn


def program(envs: jaxvec.VectorEnv, device: jax.Device) -> Turn:
    """Returns a jitted loop on the device."""
    state = [jaxvec.reset(envs)[0]]

    # With a dynamic length, XLA would evaluate the loop condition on the host in each step.
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
    """Disables page-locking of pools inside the block."""
    name, pinned._LIBRARY = pinned._LIBRARY, "none"
    try:
        yield
    finally:
        pinned._LIBRARY = name


def plain_copy(size: int, rounds: int = 20) -> float:
    """Returns the seconds that CUDA's driver takes for a copy from page-locked memory to the device."""
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
    """Returns the median seconds per step of each system."""
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
            turn(1)  # a pool is page-locked in the first call of a program
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
    """Parses the command line and prints a table per payload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default="cuda", help="JAX platform; cpu runs the script without a GPU")
    parser.add_argument(
        "--payloads", nargs="+", choices=PAYLOADS, default=list(PAYLOADS), help="bytes per step"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each system")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of a measurement")
    parser.add_argument("--json", type=Path, help="JSON file for the results, in microseconds and GB/s")
    arguments = parser.parse_args()
    device = jax.devices(arguments.platform)[0]
    print(f"jax {jax.__version__}, {device.device_kind}")
    figures: dict[str, Any] = {"device": device.device_kind}
    for label in arguments.payloads:
        size = PAYLOADS[label]
        results = measure(size, device, arguments.rounds, arguments.seconds)
        bare = results["host loop, no copy"]
        rows = figures[f"{label} per step"] = {}
        print(f"\n{label} per step")
        if arguments.platform == "cuda":
            copy = plain_copy(size)
            rows["plain copy"] = {"us": copy * 1e6, "GB/s": size / copy / 1e9}
            print(f"  {'plain copy':32} {copy * 1e6:10.1f} µs {size / copy / 1e9:8.2f} GB/s")
        for name, taken in results.items():
            added, copying = taken - results["program on the CPU, ffi"], taken - bare
            rate = size / copying / 1e9 if copying > 0 else None
            rows[name] = {"us": taken * 1e6, "GB/s": rate}
            bandwidth = "" if rate is None else f"{rate:8.2f} GB/s"
            print(f"  {name:32} {taken * 1e6:10.1f} µs {added * 1e6:+10.1f} µs {bandwidth}")
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
