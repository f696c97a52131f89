"""Draws the chart of speeds of the README and of the site from the tables of `benchmarks/README.md`.

python -m benchmarks.speed_chart --out docs/images/speed.svg

It measures nothing: the figures are those of the last run of `python -m benchmarks`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import pictures

RESULTS = Path(__file__).with_name("README.md")
SYSTEMS = {  # a line of the table: its name in the chart
    "bare env.step loops, one per core": "limit: only env.step, on both cores",
    "jaxvec in scan: ffi, native": "jaxvec, inside a compiled scan",
    "Gymnasium SyncVectorEnv": "Gymnasium SyncVectorEnv",
    "Stable-Baselines3 DummyVecEnv": "Stable-Baselines3 DummyVecEnv",
    "Gymnasium AsyncVectorEnv (spawn)": "Gymnasium AsyncVectorEnv",
    "EnvPool xla(), its C++ CartPole": "EnvPool, with a CartPole in C++",
}


def speeds(text: str, load: str = "CartPole x 64") -> dict[str, int]:
    """Returns env steps per second by name in the chart, from the first table of the results."""
    table = text.partition("| system |")[2].partition("\n\n")[0].splitlines()
    heads, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    column = heads.index(load) + 1
    found = {
        SYSTEMS[line[0]]: int(line[column].split()[0].replace(",", ""))
        for line in lines
        if line[0] in SYSTEMS
    }
    return {name: found[name] for name in SYSTEMS.values()}


def plot(rates: dict[str, int], path: Path) -> None:
    """Draws a bar for each system.

    Args:
        rates: Env steps per second by system.
        path: Path of the SVG file.
    """
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    axes = figure.subplots()
    names = [*rates][::-1]
    colors = ["C0" if name.startswith("jaxvec") else "#8a94a0" for name in names]
    bars = axes.barh(names, [rates[name] for name in names], color=colors, height=0.65)
    axes.bar_label(bars, [f"{rates[name]:,}" for name in names], padding=4)
    axes.set(title="steps of CartPole per second: 64 envs, two cores", xlim=(0, 1.15 * max(rates.values())))
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    pictures.save(figure, path)


def main() -> None:
    """Parses the command line and draws the chart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="SVG file to write")
    plot(speeds(RESULTS.read_text()), parser.parse_args().out)


if __name__ == "__main__":
    main()
