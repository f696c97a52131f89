"""Trains with each program, and CleanRL's for the same task, with several seeds and the same env steps.

    python -m benchmarks.over_seeds runs --cleanrl CHECKOUT --python PYTHON --out docs/images/over_seeds.svg

It prints a table of mean returns, with their deviation over the seeds, and draws the curves. The folder
`runs` keeps the curve of each run, and a run that it has is not repeated. Without `--cleanrl`, only jaxvec's
programs run. CleanRL pins its dependencies, so it needs a separate interpreter. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks import pictures
from benchmarks.beside_cleanrl import cleanrl_reader, command_of


@dataclass(frozen=True)
class Task:
    """A program of jaxvec, a program of CleanRL for the same task, and their budget of env steps."""

    program: str
    env: str
    env_steps: int
    cleanrl: str
    cleanrl_env: str
    options: str = ""  # of jaxvec's program


TASKS = [
    Task("ppo", "CartPole", 262_144, "ppo", "CartPole-v1", "--no-scale-by-return"),
    Task("dqn", "CartPole", 160_000, "dqn", "CartPole-v1"),
    Task("sac", "Pendulum", 24_000, "sac_continuous_action", "Pendulum-v1"),
    Task(
        "ppo_mujoco",
        "InvertedPendulum",
        204_800,
        "ppo_continuous_action",
        "InvertedPendulum-v4",
        "--env InvertedPendulum-v5",
    ),
]


def train(task: Task, seed: int, file: Path) -> None:
    """Trains with jaxvec's program, and writes env steps and mean returns of the last 100 episodes."""
    options = f"--seed {seed} --total-steps {task.env_steps} --name run {task.options}"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command_of(task.program), *shlex.split(options)], cwd=folder, check=True)
        with Path(folder, "runs", "run", "metrics.csv").open() as metrics:
            rows = [(row["env_steps"], row["episode_return"]) for row in csv.DictReader(metrics)]
    write(file, [(steps, mean) for steps, mean in rows if mean])


def train_cleanrl(task: Task, seed: int, file: Path, *, checkout: Path, python: str) -> None:
    """Trains with CleanRL's program, and writes its curve as `train` does."""
    script = checkout / "cleanrl" / f"{task.cleanrl}.py"
    options = f"--seed {seed} --total-timesteps {task.env_steps} --env-id {task.cleanrl_env}"
    read, points = cleanrl_reader(), []
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [python, str(script), *shlex.split(options)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(checkout), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        points = [point for line in process.stdout if (point := read(line)) is not None]
    if process.returncode:
        raise RuntimeError(f"{script} failed with exit code {process.returncode}")
    write(file, points)


def write(file: Path, points: Sequence[tuple[object, object]]) -> None:
    """Writes a whole curve, so that a run that was ended leaves no file."""
    part = file.with_suffix(".part")
    part.write_text("".join(f"{steps},{mean}\n" for steps, mean in points))
    part.replace(file)


def read(files: Sequence[Path], env_steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns 200 env steps `[200]`, and the mean returns there of each run, `[num_runs, 200]`."""
    grid = np.linspace(0, env_steps, 201)[1:]
    curves = [np.loadtxt(file, delimiter=",", ndmin=2).T for file in files]
    return grid, np.stack([np.interp(grid, steps, mean) for steps, mean in curves])


def draw(axes: Axes, task: Task, files: dict[str, list[Path]]) -> None:
    """Draws one panel: the mean over the seeds, and a band of one standard deviation on both sides."""
    axes.set_title(f"{task.program}\n{task.env}", fontsize=10)
    for name, group in files.items():
        grid, curves = read(group, task.env_steps)
        mean, deviation = curves.mean(0), curves.std(0)
        (line,) = axes.plot(grid / 1000, mean, label=name)
        axes.fill_between(
            grid / 1000, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.25, linewidth=0
        )
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=9)
    axes.set_xlabel("thousand env steps", fontsize=9)


def main() -> None:
    """Parses the command line, trains, prints the table and draws the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, help="folder for the curves of the runs")
    parser.add_argument("--cleanrl", type=Path, help="path of a checkout of CleanRL")
    parser.add_argument("--python", help="interpreter with the dependencies of CleanRL")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, starting with 1")
    parser.add_argument(
        "--tasks", nargs="+", default=[task.program for task in TASKS], help="programs to run"
    )
    parser.add_argument("--out", type=Path, help="SVG file to write")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    tasks = [task for task in TASKS if task.program in args.tasks]
    figure = Figure(figsize=(4.2, 2.1 * -(-len(tasks) // 2)), layout="constrained")  # fits a phone
    panels = figure.subplots(-(-len(tasks) // 2), 2, squeeze=False).flat
    print("| program | env | env steps | jaxvec | CleanRL |\n| --- | --- | ---: | ---: | ---: |")
    for axes, task in zip(panels, tasks, strict=False):
        files: dict[str, list[Path]] = {"jaxvec": []}
        if args.cleanrl:
            files["CleanRL"] = []
        for name, group in files.items():
            for seed in range(1, args.seeds + 1):
                group.append(args.runs / f"{name}-{task.program}-{seed}.csv")
                if group[-1].exists():
                    continue
                if name == "jaxvec":
                    train(task, seed, group[-1])
                else:
                    checkout = args.cleanrl.resolve()
                    train_cleanrl(task, seed, group[-1], checkout=checkout, python=args.python)
        last = {name: read(group, task.env_steps)[1][:, -1] for name, group in files.items()}
        cells = {name: f"{each.mean():.0f} ± {each.std():.0f}" for name, each in last.items()}
        print(f"| `{task.program}` | {task.env} | {task.env_steps:,} | {cells['jaxvec']} ", end="")
        print(f"| {cells.get('CleanRL', '')} |", flush=True)
        draw(axes, task, files)
    if args.out:
        figure.axes[0].legend(frameon=False, fontsize=9)
        pictures.save(figure, args.out)


if __name__ == "__main__":
    main()
