"""Trains with a program of `jaxvec.examples` and with CleanRL's for the same time, and keeps both curves.

    python -m benchmarks.beside_cleanrl ppo_mujoco ppo_continuous_action --cleanrl CHECKOUT --python PYTHON \
        --options "--total-steps 6000000" --cleanrl-options "--total-timesteps 600000" --out curves

Two cores are not enough for both at once, and a machine that does other work is slower at one time than at
another. So they take turns of a few seconds: one is stopped while the other runs. Only its own turns count
as a program's time, which begins with the start of its interpreter. CleanRL pins its packages, so it takes
an interpreter of its own. A curve is a file of lines: env steps, seconds, mean return of 100 episodes.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

Point = tuple[float, float]  # env steps, mean return
_RETURN = re.compile(r"global_step=(\d+), episodic_return=\[?(-?[\d.]+)")


def read_ours(line: str) -> Point | None:
    """Reads a line that `--log` writes."""
    words = line.split(",")
    return (int(words[0]), float(words[2])) if len(words) == 3 and words[0].isdecimal() else None


def reads_theirs() -> Callable[[str], Point | None]:
    """Returns what reads CleanRL's lines, each of an episode."""
    returns: deque[float] = deque(maxlen=100)

    def read(line: str) -> Point | None:
        if (found := _RETURN.match(line)) is None:
            return None
        returns.append(float(found[2]))
        return int(found[1]), statistics.mean(returns)

    return read


class Program:
    """A training program that runs only in its turns."""

    def __init__(self, command: Sequence[str], folder: str, read: Callable[[str], Point | None]) -> None:
        """Starts it, stopped."""
        self.lines: list[str] = []
        self._read = read
        self._ran = 0.0
        self._turn_began: float | None = None
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        self._command = command
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
        )
        self._process.send_signal(signal.SIGSTOP)
        self._reader = threading.Thread(target=self._keep, daemon=True)
        self._reader.start()

    @property
    def seconds(self) -> float:
        """Those of its turns so far."""
        return self._ran + (0 if self._turn_began is None else time.perf_counter() - self._turn_began)

    def run(self, seconds: float) -> bool:
        """Lets it run for a turn; returns whether it goes on."""
        self._turn_began = time.perf_counter()
        self._process.send_signal(signal.SIGCONT)
        try:
            if code := self._process.wait(seconds):
                raise RuntimeError(f"{shlex.join(self._command)} failed with exit code {code}")
            return False
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGSTOP)
            return True
        finally:
            self._ran, self._turn_began = self.seconds, None

    def end(self) -> None:
        """Ends it, wherever it is."""
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=10)

    def _keep(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (point := self._read(line)) is not None:
                self.lines.append(f"{point[0]},{self.seconds:.2f},{point[1]:.2f}")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ours", help="module in jaxvec.examples")
    parser.add_argument("theirs", help="file in CleanRL's folder cleanrl, without .py")
    parser.add_argument("--cleanrl", type=Path, required=True, help="its checkout")
    parser.add_argument("--python", required=True, help="interpreter with CleanRL's packages")
    parser.add_argument("--options", default="", help="of our program")
    parser.add_argument("--cleanrl-options", default="", help="of CleanRL's")
    parser.add_argument("--seconds", type=float, default=600, help="of each")
    parser.add_argument("--turn", type=float, default=10, help="seconds")
    parser.add_argument("--out", type=Path, required=True, help="folder for the curves")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    script = args.cleanrl.resolve() / "cleanrl" / f"{args.theirs}.py"
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), str(args.cleanrl.resolve())])
    ours = [sys.executable, "-m", f"jaxvec.examples.{args.ours}", "--log", "/dev/stdout"]
    theirs = [args.python, str(script), *shlex.split(args.cleanrl_options)]
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            args.ours: Program([*ours, *shlex.split(args.options)], folder, read_ours),
            f"cleanrl_{args.theirs}": Program(theirs, folder, reads_theirs()),
        }
        try:
            going = dict(programs)
            while going:
                for name, program in list(going.items()):
                    turn = min(args.turn, args.seconds - program.seconds)
                    if turn <= 0 or not program.run(turn):
                        del going[name]
                for name, program in programs.items():
                    (args.out / f"{name}.csv").write_text("\n".join(program.lines) + "\n")
        finally:
            for program in programs.values():
                program.end()
        for name, program in programs.items():
            last = program.lines[-1] if program.lines else "no episode ended"
            print(f"{name}: {last} (env steps, seconds, mean return) after {program.seconds:.0f} s")


if __name__ == "__main__":
    main()
