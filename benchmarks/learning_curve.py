"""Trains `jaxvec.examples.ppo` with several seeds and draws the learning curve of the README.

    python -m benchmarks.learning_curve --out docs/images/learning_curve.svg

It needs the extra `demo`. The seeds run one after another. Under one `vmap`, the batched QR decomposition of
jaxlib 0.10.2, which initialises the weights, was seen to deadlock on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks import pictures
from jaxvec.examples import ppo


def plot(env: str, env_steps: NDArray[np.float64], curves: NDArray[np.float64], path: Path) -> None:
    """Draws the curve of each seed and their median.

    Args:
        env: Id of the env.
        env_steps: Array `[num_updates]` of the env steps after each update.
        curves: Array `[num_seeds, num_updates]` of mean returns.
        path: Path of the SVG file.
    """
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(env_steps, curves.T, color="C0", alpha=0.7, linewidth=1)
    axes.plot(
        env_steps, np.median(curves, axis=0), color="C0", linewidth=2, label=f"median of {len(curves)} seeds"
    )
    axes.set(title=f"PPO on {env}", xlabel="env steps", ylabel="mean return of the last 100 episodes")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    pictures.save(figure, path)


def main() -> None:
    """Parses the command line, trains, prints a line per seed and draws the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--env", default="CartPole-v1", help="id of the env")
    parser.add_argument("--total-steps", type=int, default=524_288, help="env steps of each seed")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, starting with 0")
    parser.add_argument("--out", required=True, type=Path, help="SVG file to write")
    args = parser.parse_args()
    env_steps, curves = np.zeros(0), []
    for seed in range(args.seeds):
        words = ["--env", args.env, "--total-steps", str(args.total_steps), "--seed", str(seed)]
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            run = ppo.main([*words, "--name", f"seed_{seed}"])
        columns = run.metrics()
        sys.stdout.write(f"seed {seed}: {run.latest('seconds')} s\n")
        of_updates = np.isnan(columns["evaluation"])
        env_steps = columns["env_steps"][of_updates]
        curves.append(columns["episode_return"][of_updates])
    plot(args.env, env_steps, np.stack(curves), args.out.absolute())


if __name__ == "__main__":
    main()
