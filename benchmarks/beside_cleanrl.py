"""Trains with a program of `jaxvec.examples` and one of CleanRL for the same time, and saves both curves.

    python -m benchmarks.beside_cleanrl ppo_mujoco ppo_continuous_action --cleanrl CHECKOUT --python PYTHON \
        --options "--total-steps 6000000" --cleanrl-options "--total-timesteps 600000" --out curves

The programs alternate every few seconds: one is stopped while the other runs. So they do not compete for
cores, and other load on the machine affects both. The time of a program is the sum of its turns and includes
the start of its interpreter. CleanRL pins its dependencies, so it needs a separate interpreter. A curve is a
CSV file without a header and with the columns env steps, seconds, and mean return of the last 100 episodes.
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
_PROGRESS = re.compile(r" ([\d,]+) steps .* return (-?[\d.]+)$")
_RETURN = re.compile(r"global_step=(\d+), episodic_return=\[?(-?[\d.]+)")


def command_of(program: str) -> list[str]:
    """Returns the command line of a program of jaxvec, without options."""
    return [sys.executable, "-m", f"jaxvec.examples.{program}"]


def read_jaxvec(line: str) -> Point | None:
    """Parses a line of progress of jaxvec's programs, or returns None for another line."""
    found = _PROGRESS.search(line)
    return found and (int(found[1].replace(",", "")), float(found[2]))


def cleanrl_reader() -> Callable[[str], Point | None]:
    """Returns a parser for the output of CleanRL, which prints one line per episode."""
    returns: deque[float] = deque(maxlen=100)

    def read(line: str) -> Point | None:
        if (found := _RETURN.match(line)) is None:
            return None
        returns.append(float(found[2]))
        return int(found[1]), statistics.mean(returns)

    return read


class Program:
    """A training program that is stopped except during calls of `run`.

    Args:
        command: Command line of the program.
        folder: Working directory of the program.
        read: Parser for a line of its output. It returns None for lines without a point of the curve.
    """

    def __init__(self, command: Sequence[str], folder: str, read: Callable[[str], Point | None]) -> None:
        self.lines: list[str] = []
        self._read = read
        self._run_time = 0.0
        self._turn_start: float | None = None
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        self._command = command
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment
        )
        self._process.send_signal(signal.SIGSTOP)
        self._reader = threading.Thread(target=self._keep, daemon=True)
        self._reader.start()

    @property
    def seconds(self) -> float:
        """Returns the total duration of its turns so far."""
        return self._run_time + (0 if self._turn_start is None else time.perf_counter() - self._turn_start)

    def run(self, seconds: float) -> bool:
        """Resumes the program for a turn and returns whether it is still running."""
        self._turn_start = time.perf_counter()
        self._process.send_signal(signal.SIGCONT)
        try:
            if code := self._process.wait(seconds):
                raise RuntimeError(f"{shlex.join(self._command)} failed with exit code {code}")
            return False
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGSTOP)
            return True
        finally:
            self._run_time, self._turn_start = self.seconds, None

    def end(self) -> None:
        """Kills the program and waits for it."""
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=10)

    def _keep(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (point := self._read(line)) is not None:
                self.lines.append(f"{point[0]},{self.seconds:.2f},{point[1]:.2f}")


def main() -> None:
    """Parses the command line, runs both programs and writes their curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("program", help="name of a program in jaxvec/examples/")
    parser.add_argument("cleanrl_program", help="file in CleanRL's folder `cleanrl`, without .py")
    parser.add_argument("--cleanrl", type=Path, required=True, help="path of a checkout of CleanRL")
    parser.add_argument("--python", required=True, help="interpreter with the dependencies of CleanRL")
    parser.add_argument("--options", default="", help="options of jaxvec's program")
    parser.add_argument("--cleanrl-options", default="", help="options of CleanRL's program")
    parser.add_argument("--seconds", type=float, default=600, help="duration of each program")
    parser.add_argument("--turn", type=float, default=10, help="seconds per turn")
    parser.add_argument("--out", type=Path, required=True, help="folder for the curves")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    script = args.cleanrl.resolve() / "cleanrl" / f"{args.cleanrl_program}.py"
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), str(args.cleanrl.resolve())])
    jaxvec_command = [*command_of(args.program), *shlex.split(args.options)]
    cleanrl_command = [args.python, str(script), *shlex.split(args.cleanrl_options)]
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            args.program: Program(jaxvec_command, folder, read_jaxvec),
            f"cleanrl_{args.cleanrl_program}": Program(cleanrl_command, folder, cleanrl_reader()),
        }
        try:
            running = dict(programs)
            while running:
                for name, program in list(running.items()):
                    turn = min(args.turn, args.seconds - program.seconds)
                    if turn <= 0 or not program.run(turn):
                        del running[name]
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
