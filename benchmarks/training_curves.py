"""Draws the learning curves of `docs/programs.md` from the files that the programs wrote.

    mkdir curves
    python -m jaxvec.examples.ppo --name ppo && cp runs/ppo/metrics.csv curves/ppo.csv
    for program in ppo_recurrent dqn sac impala; do
        python -m jaxvec.examples.$program --name $program && cp runs/$program/metrics.csv curves/$program.csv
    done
    python -m benchmarks.beside_cleanrl ...  # for ppo_mujoco and ppo_atari, see its docstring
    python -m benchmarks.training_curves curves --out docs/images/training_curves.svg

Programs without a file in the folder are left out. It needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks import pictures

# Title of a panel, and the file names, without `.csv`, of jaxvec's curve and of CleanRL's.
_PANELS = [
    ("ppo\nCartPole", "ppo", None),
    ("ppo_recurrent\nmasked CartPole", "ppo_recurrent", None),
    ("dqn\nCartPole", "dqn", None),
    ("sac\nPendulum", "sac", None),
    ("impala\nCartPole", "impala", None),
    ("ppo_mujoco\nHalfCheetah", "ppo_mujoco", "cleanrl_ppo_continuous_action"),
    ("ppo_atari\nBreakout", "ppo_atari", "cleanrl_ppo_atari"),
]


def read(path: Path) -> NDArray[np.float64]:
    """Returns env steps, seconds and mean return, `[num_rows, 3]`, of a curve or a `metrics.csv`."""
    with path.open() as file:
        if not file.readline().startswith("env_steps"):
            return np.loadtxt(path, delimiter=",", ndmin=2)
    with path.open() as file:
        names = ("env_steps", "seconds", "episode_return")
        rows = [[row[name] for name in names] for row in csv.DictReader(file) if row["episode_return"]]
    return np.array(rows, float)


def draw(axes: Axes, title: str, file: Path, cleanrl_file: Path | None) -> None:
    """Draws one panel, over env steps for one program or over time for two.

    Args:
        axes: Axes of the panel.
        title: Title of the panel.
        file: CSV file of jaxvec's program, with columns env steps, seconds and mean return.
        cleanrl_file: CSV file of CleanRL's program with the same columns, or None.
    """
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=9)
    column = 0 if cleanrl_file is None else 1
    for path, label in ((file, "jaxvec"), (cleanrl_file, "CleanRL")):
        if path is not None:
            rows = read(path)
            axes.plot(rows[:, column] / (1000 if column == 0 else 60), rows[:, 2], label=label)
    axes.set_xlabel("minutes" if cleanrl_file else "thousand env steps", fontsize=9)


def main() -> None:
    """Parses the command line and draws a panel per program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("curves", type=Path, help="folder with the CSV files")
    parser.add_argument("--out", required=True, type=Path, help="SVG file to write")
    args = parser.parse_args()
    panels = [panel for panel in _PANELS if (args.curves / f"{panel[1]}.csv").exists()]
    num_rows = -(-len(panels) // 2)
    figure = Figure(figsize=(4.2, 1.9 * num_rows), layout="constrained")  # fits a phone
    grid = figure.subplots(num_rows, 2, squeeze=False).flat
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, name, cleanrl) in zip(grid, panels, strict=False):
        draw(axes, title, args.curves / f"{name}.csv", args.curves / f"{cleanrl}.csv" if cleanrl else None)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    # The last place of the grid is free if the number of panels is odd.
    grid[-1].legend(lines.values(), lines.keys(), loc="center", frameon=False)
    pictures.save(figure, args.out)


if __name__ == "__main__":
    main()
