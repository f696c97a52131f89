"""Measures a few envs on a machine without an idle core: `python -m benchmarks.crowded`.

Busy loops run at default priority, and the systems alternate beside them. Only the ratios within one run are
meaningful.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from benchmarks.__main__ import machine

# Functions import the other modules, because the spawned processes of all systems import this module.

BASELINE = "Gymnasium SyncVectorEnv"

_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:  # stop when the benchmark has been killed
    pass
"""


@contextmanager
def busy_loops(count: int) -> Generator[None]:
    """Runs `count` processes that each keep a core busy."""
    with ExitStack() as stack:
        for _ in range(count):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", _LOOP]))
            stack.callback(loop.kill)
        yield


def run(sizes: list[int], num_loops: int, rounds: int, seconds: float) -> Iterator[str]:
    """Measures all systems and yields the lines of the report."""
    from benchmarks import peers
    from benchmarks.loads import LOADS
    from benchmarks.measure import measure
    from benchmarks.systems import System, bare_loops, jaxvec_scan

    scan = partial(jaxvec_scan, transport="ffi", dispatch="native")
    systems: dict[str, System] = {
        BASELINE: peers.gymnasium_sync,
        "Gymnasium AsyncVectorEnv (spawn)": peers.gymnasium_async,
        "bare env.step loops, one per core": bare_loops,
        "jaxvec in scan": scan,
        "jaxvec in scan, one worker": partial(scan, num_workers=1),
        "jaxvec in scan, four workers": partial(scan, num_workers=4),
        "jaxvec in scan, serial backend": partial(scan, backend="serial"),
    }
    load = LOADS["CartPole x 64"]
    loads = [replace(load, name=f"CartPole x {size}", num_envs=size) for size in sizes]
    results = {}
    for load in loads:
        print(f"{load.name} ...", file=sys.stderr, flush=True)
        loops = busy_loops(num_loops)
        results[load.name] = measure(load, systems, rounds=rounds, seconds=seconds, beside=loops)
    yield f"on {machine()}, beside {num_loops} busy loops (load {os.getloadavg()[0]:.1f} at the end);"
    yield f"medians of {rounds} rounds of about {seconds} s; ratio to {BASELINE} (env steps per second)\n"
    yield f"| system | {' | '.join(results)} |"
    yield f"| --- |{' ---: |' * len(results)}"
    for name in systems:
        cells = []
        for found in results.values():
            ratio = found[name].rate / (found[BASELINE].rate or float("nan"))
            cells.append(found[name].not_run or f"{ratio:.2f} ({found[name].rate:,.0f})")
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Parses the command line and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crowded", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=[4, 8, 64], help="numbers of envs")
    parser.add_argument("--loops", type=int, default=4, help="number of busy loops")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each system")
    parser.add_argument("--seconds", type=float, default=0.3, help="duration of a measurement")
    options = parser.parse_args()
    for line in run(options.sizes, options.loops, options.rounds, options.seconds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
