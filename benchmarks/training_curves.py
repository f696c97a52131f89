"""Draws the learning curves of `docs/programs.md`, from what the programs' `--log` kept.

    mkdir curves
    for program in ppo ppo_recurrent dqn sac impala; do
        python -m jaxvec.examples.$program --log curves/$program.csv
    done
    python -m benchmarks.beside_cleanrl ...  # twice, into the same folder: see there
    python -m benchmarks.training_curves curves --out docs/images/training_curves.svg

A program whose file is not in the folder is left out. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import pictures

# What stands above a panel, our file, and CleanRL's.
_PANELS = [
    ("ppo\nCartPole", "ppo", None),
    ("ppo_recurrent\nmasked CartPole", "ppo_recurrent", None),
    ("dqn\nCartPole", "dqn", None),
    ("sac\nPendulum", "sac", None),
    ("impala\nCartPole", "impala", None),
    ("ppo_mujoco\nHalfCheetah", "ppo_mujoco", "cleanrl_ppo_continuous_action"),
    ("ppo_atari\nBreakout", "ppo_atari", "cleanrl_ppo_atari"),
]


def draw(axes: Axes, title: str, ours: Path, theirs: Path | None) -> None:
    """Draws a panel: over the env steps, or over time where there are two programs."""
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=9)
    column = 0 if theirs is None else 1
    for path, label in ((ours, "jaxvec"), (theirs, "CleanRL")):
        if path is not None:
            rows = np.loadtxt(path, delimiter=",", ndmin=2)
            axes.plot(rows[:, column] / (1000 if column == 0 else 60), rows[:, 2], label=label)
    axes.set_xlabel("minutes" if theirs else "thousand env steps", fontsize=9)


def main() -> None:
    """Draws what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("curves", type=Path, help="folder with the files")
    parser.add_argument("--out", required=True, type=Path, help="file for the picture, .svg")
    args = parser.parse_args()
    panels = [panel for panel in _PANELS if (args.curves / f"{panel[1]}.csv").exists()]
    num_rows = -(-len(panels) // 2)
    figure = Figure(figsize=(4.2, 1.9 * num_rows), layout="constrained")  # as wide as a telephone
    grid = figure.subplots(num_rows, 2, squeeze=False).flat
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, ours, theirs) in zip(grid, panels, strict=False):
        draw(axes, title, args.curves / f"{ours}.csv", args.curves / f"{theirs}.csv" if theirs else None)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    grid[-1].legend(
        lines.values(), lines.keys(), loc="center", frameon=False
    )  # a free place, if panels are odd
    pictures.save(figure, args.out)


if __name__ == "__main__":
    main()
