"""Seconds until CartPole is solved: `jaxvec.examples.ppo` beside CleanRL's `ppo.py`, each with its defaults.

    python -m benchmarks.time_to_solve --cleanrl ppo.py --python PYTHON

takes turns, a seed each. Solved is a mean return of the last 100 episodes of at least 475. Each turn is a
program of its own and is timed from its start until it says so, so importing, starting envs and compiling
count. CleanRL pins its packages (gymnasium 0.29), so it takes an interpreter of its own, and a checkout.
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
_LIMIT = 1800  # seconds of a turn
_RETURN = re.compile(r"episodic_return=\[?([\d.]+)")


def jaxvec_seconds(seed: int) -> float:
    """Returns the seconds until our program solved it; infinite if it ended before."""

    def solved(line: str) -> bool:
        reached = re.match(r"mean return ([\d.]+)", line)
        return reached is not None and float(reached[1]) >= SOLVED

    module = "jaxvec.examples.ppo"
    command = [sys.executable, "-u", "-m", module, "--stop-at", str(SOLVED), "--seed", str(seed)]
    return _seconds_until(solved, command)


def cleanrl_seconds(python: str, script: Path, seed: int) -> float:
    """Returns the seconds until CleanRL's program solved it; infinite if it ended before."""
    returns: deque[float] = deque(maxlen=100)

    def solved(line: str) -> bool:
        returns.extend(map(float, _RETURN.findall(line)))
        return len(returns) == 100 and statistics.mean(returns) >= SOLVED

    seconds = _seconds_until(solved, [python, "-u", str(script.resolve()), "--seed", str(seed)])
    if not returns:
        raise RuntimeError("CleanRL's program told no return; its standard error says why")
    return seconds


def _seconds_until(solved: Callable[[str], bool], command: Sequence[str]) -> float:
    """Returns the seconds from a program's start until a line of its output says that it is solved.

    Infinite if none does, within a limit. Raises `CalledProcessError` if the program failed.
    """
    with tempfile.TemporaryDirectory() as folder:  # for what it writes
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as program:
            assert program.stdout is not None
            limit = threading.Timer(_LIMIT, program.kill)  # it may be silent
            limit.start()
            try:
                for line in program.stdout:
                    if solved(line):
                        return time.perf_counter() - start
                code = program.wait()
            finally:
                limit.cancel()
                program.kill()
        if code > 0:  # not by the limit
            raise subprocess.CalledProcessError(code, command)
    return float("inf")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cleanrl", type=Path, required=True, help="its ppo.py")
    parser.add_argument(
        "--python", required=True, help="interpreter of an environment with CleanRL's packages"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 1 on")
    args = parser.parse_args()
    pairs: list[tuple[float, float]] = []
    for seed in range(1, args.seeds + 1):
        pairs.append((jaxvec_seconds(seed), cleanrl_seconds(args.python, args.cleanrl, seed)))
        print(f"seed {seed}: jaxvec {pairs[-1][0]:.1f} s, CleanRL {pairs[-1][1]:.1f} s", flush=True)
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"medians: jaxvec {ours:.1f} s, CleanRL {theirs:.1f} s, {theirs / ours:.1f} times sooner")


if __name__ == "__main__":
    main()
