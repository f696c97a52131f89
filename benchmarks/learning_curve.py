"""Trains `jaxvec.examples.ppo` with several seeds and draws the learning curve of the README.

    python -m benchmarks.learning_curve --out docs/images/learning_curve.svg

It needs the extra `demo`. The seeds run one after another. Under one `vmap`, the batched QR decomposition of
jaxlib 0.10.2, which initialises the weights, was seen to deadlock on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks import pictures
from jaxvec.examples import ppo
from jaxvec.logging import Run


def plot(config: ppo.Config, curves: NDArray[np.float32], path: Path) -> None:
    """Draws the curve of each seed and their median.

    Args:
        config: Config of the runs.
        curves: Array `[num_seeds, num_updates]` of mean returns.
        path: Path of the SVG file.
    """
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    env_steps = np.arange(1, config.num_updates + 1) * config.steps_per_update
    axes.plot(env_steps, curves.T, color="C0", alpha=0.7, linewidth=1)
    axes.plot(
        env_steps, np.median(curves, axis=0), color="C0", linewidth=2, label=f"median of {len(curves)} seeds"
    )
    axes.set(title=f"PPO on {config.env}", xlabel="env steps", ylabel="mean return of the last 100 episodes")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    pictures.save(figure, path)


def main() -> None:
    """Parses the command line, trains, prints a line per seed and draws the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--env", default="CartPole-v1", help="id of the env")
    parser.add_argument("--total-steps", type=int, default=262_144, help="env steps of each seed")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, starting with 0")
    parser.add_argument("--out", required=True, type=Path, help="SVG file to write")
    args = parser.parse_args()
    config = replace(ppo.Config(), env=args.env, total_steps=args.total_steps)
    curves: list[NDArray[np.float32]] = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            with Run(folder, total_steps=config.total_steps) as run:
                ppo.train(replace(config, seed=seed), run)
            columns = run.metrics()
        sys.stdout.write(
            f"seed {seed}: mean return {run.latest('episode_return'):.1f} of the last 100 episodes, "
            f"{run.env_steps:,} env steps in {run.latest('seconds')} s\n"
        )
        known = np.isnan(columns["evaluation"])  # the lines of updates
        curves.append(columns["episode_return"][known].astype(np.float32))
    plot(config, np.stack(curves), args.out)


if __name__ == "__main__":
    main()
