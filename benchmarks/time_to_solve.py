"""Measures the seconds until `jaxvec.examples.ppo` and CleanRL's `ppo.py` solve CartPole.

    python -m benchmarks.time_to_solve --cleanrl ppo.py --python PYTHON

The programs alternate, one seed at a time, each with its default options. CartPole is solved when the mean
return of the last 100 episodes is at least 475. The time counts from the start of the process, so it includes
imports, the start of envs and compilation. CleanRL pins its dependencies (gymnasium 0.29), so it needs a
separate interpreter.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

SOLVED = 475.0
_LIMIT = 1800  # seconds per run
_RETURN = re.compile(r"episodic_return=\[?([\d.]+)")


def jaxvec_seconds(seed: int) -> float:
    """Returns the seconds until jaxvec's program solves CartPole, or infinity if it ends earlier."""

    def solved(line: str) -> bool:
        reached = re.search(r"mean return ([\d.]+)", line)
        return reached is not None and float(reached[1]) >= SOLVED

    module = "jaxvec.examples.ppo"
    command = [sys.executable, "-u", "-m", module, "--stop-at", str(SOLVED), "--seed", str(seed)]
    return _seconds_until(solved, command)


def cleanrl_seconds(python: str, script: Path, seed: int) -> float:
    """Returns the seconds until CleanRL's program solves CartPole, or infinity if it ends earlier.

    Args:
        python: Path of an interpreter with the dependencies of CleanRL.
        script: Path of `ppo.py`.
        seed: Seed of the run.
    """
    returns: deque[float] = deque(maxlen=100)

    def solved(line: str) -> bool:
        returns.extend(map(float, _RETURN.findall(line)))
        return len(returns) == 100 and statistics.mean(returns) >= SOLVED

    seconds = _seconds_until(solved, [python, "-u", str(script.resolve()), "--seed", str(seed)])
    if not returns:
        raise RuntimeError("CleanRL's program printed no episodic return; see its standard error")
    return seconds


def _seconds_until(solved: Callable[[str], bool], command: Sequence[str]) -> float:
    """Runs a program and returns the seconds from its start until `solved` accepts a line of its output.

    The result is infinity if no line is accepted within `_LIMIT` or before the program ends.

    Raises:
        CalledProcessError: The program failed.
    """
    with tempfile.TemporaryDirectory() as folder:  # for files that the program writes
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as program:
            assert program.stdout is not None
            limit = threading.Timer(_LIMIT, program.kill)  # reading blocks while the program prints nothing
            limit.start()
            try:
                for line in program.stdout:
                    if solved(line):
                        return time.perf_counter() - start
                code = program.wait()
            finally:
                limit.cancel()
                program.kill()
        if code > 0:  # negative if `limit` killed the program
            raise subprocess.CalledProcessError(code, command)
    return float("inf")


def main() -> None:
    """Parses the command line, runs all seeds and prints the times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cleanrl", type=Path, required=True, help="path of CleanRL's ppo.py")
    parser.add_argument("--python", required=True, help="interpreter with the dependencies of CleanRL")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, starting with 1")
    args = parser.parse_args()
    pairs: list[tuple[float, float]] = []
    for seed in range(1, args.seeds + 1):
        pairs.append((jaxvec_seconds(seed), cleanrl_seconds(args.python, args.cleanrl, seed)))
        print(f"seed {seed}: jaxvec {pairs[-1][0]:.1f} s, CleanRL {pairs[-1][1]:.1f} s", flush=True)
    jaxvec, cleanrl = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"medians: jaxvec {jaxvec:.1f} s, CleanRL {cleanrl:.1f} s, ratio {cleanrl / jaxvec:.1f}")


if __name__ == "__main__":
    main()
