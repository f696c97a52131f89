"""Measures the seconds until `jaxvec.examples.ppo` and CleanRL's `ppo.py` solve CartPole.

    python -m benchmarks.time_to_solve --cleanrl ppo.py --python PYTHON

The programs alternate, one seed at a time, each with its default options. CartPole is solved when the mean
return of the last 100 episodes is at least 475, as the program reports it: jaxvec's in `metrics.csv`,
CleanRL's on its standard output. The time counts from the start of the process, so it includes imports, the
start of envs and compilation. CleanRL pins its dependencies (gymnasium 0.29), so it needs a separate
interpreter.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SOLVED = 475.0
_LIMIT = 1800  # seconds per run
_POLL = 0.05  # seconds between two looks at the output, which take CPU time from the program
_RETURN = re.compile(r"episodic_return=\[?([\d.]+)")


def jaxvec_seconds(seed: int) -> float:
    """Returns the seconds until jaxvec's program solves CartPole, or infinity if it ends earlier."""

    def solved(folder: Path) -> bool:
        rows = csv.DictReader(_lines(folder / "runs/run/metrics.csv"))
        return any(float(row["episode_return"] or "nan") >= SOLVED for row in rows)

    module = "jaxvec.examples.ppo"
    return _seconds_until(solved, [sys.executable, "-m", module, "--name", "run", "--seed", str(seed)])


def cleanrl_seconds(python: str, script: Path, seed: int) -> float:
    """Returns the seconds until CleanRL's program solves CartPole, or infinity if it ends earlier.

    Args:
        python: Path of an interpreter with the dependencies of CleanRL.
        script: Path of `ppo.py`.
        seed: Seed of the run.
    """
    returns: list[float] = []

    def solved(folder: Path) -> bool:
        returns[:] = [float(each) for line in _lines(folder / "output") for each in _RETURN.findall(line)]
        return len(returns) >= 100 and statistics.fmean(returns[-100:]) >= SOLVED

    seconds = _seconds_until(solved, [python, "-u", str(script.resolve()), "--seed", str(seed)])
    if not returns:
        raise RuntimeError("CleanRL's program printed no episodic return; see its standard error")
    return seconds


def _lines(file: Path) -> list[str]:
    """Returns the complete lines of a file, which the program may still be writing."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def _seconds_until(solved: Callable[[Path], bool], command: Sequence[str]) -> float:
    """Runs a program in an empty folder and returns the seconds from its start until `solved`.

    `solved` takes the folder, where `output` is the program's standard output. The result is infinity if it
    does not become true within `_LIMIT` or before the program ends.

    Raises:
        CalledProcessError: The program failed.
    """
    with tempfile.TemporaryDirectory() as name, Path(name, "output").open("w") as output:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=output, cwd=name) as program:
            try:
                while (seconds := time.perf_counter() - start) < _LIMIT:
                    code = program.poll()
                    if solved(Path(name)):
                        return seconds
                    if code is not None:
                        break
                    time.sleep(_POLL)
            finally:
                program.terminate()
        if code:
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
