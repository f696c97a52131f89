"""Measures envs behind a server, all in one worker: `python -m benchmarks.servers`.

The batched env is that of `jaxvec.examples.server_envs`, in a jitted scan. The ideal rate is that of envs
that only wait: their number over the seconds of a step. The server of the example takes about as much CPU
time per env step as the worker. `delay_server.cc`, which this program compiles, takes less, as a server on
another machine would.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium
import jax

import jaxvec
from benchmarks.__main__ import machine
from jaxvec.examples.server_envs import LineClient, ServerEnvs, launch, start_server

HERE = Path(__file__).parent

Start = Callable[[], tuple["subprocess.Popen[str]", int]]  # returns the process and its port


def start_compiled(folder: str, latency: float) -> tuple[subprocess.Popen[str], int]:
    """Compiles and starts `delay_server.cc`. Returns the process and its port."""
    program = Path(folder, "delay_server")
    subprocess.run(
        ["c++", "-std=c++17", "-O2", "-o", str(program), str(HERE / "delay_server.cc")], check=True
    )
    return launch([str(program), str(latency)])


def rates(start: Start, num_envs: int, num_steps: int, num_turns: int) -> list[float]:
    """Returns the env steps per second of each turn, in a scan of `num_steps`."""
    server, port = start()
    env = gymnasium.make("CartPole-v1")  # for its spaces
    connect = partial(LineClient.connect, port)
    make_envs = partial(ServerEnvs, connect, env.observation_space, env.action_space, num_envs)
    found: list[float] = []
    try:
        with jaxvec.make(make_envs, num_envs, envs_per_instance=num_envs, num_workers=1) as envs:
            rollout = jax.jit(partial(jax.lax.scan, jaxvec.step))
            actions = jax.random.randint(jax.random.key(0), (num_steps, num_envs), 0, 2)
            handle, _ = jaxvec.reset(envs, seed=0)
            for _ in range(1 + num_turns):  # the first one compiles
                began = time.perf_counter()
                handle, _ = jax.block_until_ready(rollout(handle, actions))
                found.append(num_envs * num_steps / (time.perf_counter() - began))
    finally:
        server.kill()
        server.wait()
    return found[1:]


def main() -> None:
    """Parses the command line and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=__doc__)
    parser.add_argument("--num-envs", type=int, default=256, help="number of envs")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds of a step on the server")
    parser.add_argument("--steps", type=int, default=40, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each server")
    args = parser.parse_args()
    ideal = args.num_envs / args.latency
    print(f"on {machine()}; {args.num_envs} envs of {1e3 * args.latency:.0f} ms, ideal {ideal:,.0f} steps/s")
    with tempfile.TemporaryDirectory() as folder:
        servers: dict[str, Start] = {
            "server of the example": partial(start_server, latency=args.latency),
            "delay_server.cc": partial(start_compiled, folder, args.latency),
        }
        for name, start in servers.items():
            found = rates(start, args.num_envs, args.steps, args.turns)
            median = statistics.median(found)
            spread = f"{min(found) / ideal:.2f} to {max(found) / ideal:.2f}"
            print(f"{name}: {median:,.0f} steps/s, {median / ideal:.2f} of ideal ({spread})", flush=True)


if __name__ == "__main__":
    main()
