"""Draws the charts of speeds of the README and of the site, without measuring anything.

python -m benchmarks.speed_chart --out docs/images

`speed.svg` shows the last run of `python -m benchmarks`, by the tables of `benchmarks/README.md`, and
`speed_gpu.svg` that of `python -m benchmarks.accelerator` in `benchmarks/results/h200.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import pictures

RESULTS = Path(__file__).with_name("README.md")
GPU_RESULTS = Path(__file__).with_name("results") / "h200.json"
SYSTEMS = {  # a line of the table: its name in the chart
    "bare env.step loops, one per core": "limit: only env.step, on both cores",
    "jaxvec in scan: ffi, native": "jaxvec, inside a compiled scan",
    "Gymnasium SyncVectorEnv": "Gymnasium SyncVectorEnv",
    "Stable-Baselines3 DummyVecEnv": "Stable-Baselines3 DummyVecEnv",
    "Gymnasium AsyncVectorEnv (spawn)": "Gymnasium AsyncVectorEnv",
    "EnvPool xla(), its C++ CartPole": "EnvPool, with a CartPole in C++",
}
GPU_SYSTEMS = {  # a system of the results: its name in the chart
    "scan, ffi": "jaxvec, inside a compiled scan",
    "scan, io_callback": "jaxvec, scan over io_callback",
    "host loop of jaxvec, device_put": "jaxvec, Python loop",
    "SyncVectorEnv, device_put": "Gymnasium SyncVectorEnv",
    "EnvPool, xla()": "EnvPool, with a CartPole in C++",
}


def speeds(load: str = "CartPole x 64") -> dict[str, int]:
    """Returns env steps per second by name in the chart, from the first table of the results."""
    table = RESULTS.read_text().partition("| system |")[2].partition("\n\n")[0].splitlines()
    heads, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    column = heads.index(load) + 1
    found = {
        SYSTEMS[line[0]]: int(line[column].split()[0].replace(",", ""))
        for line in lines
        if line[0] in SYSTEMS
    }
    return {name: found[name] for name in SYSTEMS.values()}


def gpu_speeds(load: str = "CartPole x 64") -> dict[str, int]:
    """Returns env steps per second by name in the chart, of programs and loops with results on the GPU."""
    rates = json.loads(GPU_RESULTS.read_text())["on the GPU"][load]
    return {name: rates[system] for system, name in GPU_SYSTEMS.items()}


CHARTS = {  # a file: the machine in its title, and its figures
    "speed.svg": ("two cores", speeds),
    "speed_gpu.svg": ("NVIDIA H200", gpu_speeds),
}


def plot(rates: dict[str, int], machine: str, path: Path) -> None:
    """Draws a bar for each system.

    Args:
        rates: Env steps per second by system.
        machine: Machine for the title.
        path: Path of the SVG file.
    """
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    axes = figure.subplots()
    names = [*rates][::-1]
    colors = ["C0" if name.startswith("jaxvec") else "#8a94a0" for name in names]
    bars = axes.barh(names, [rates[name] for name in names], color=colors, height=0.65)
    axes.bar_label(bars, [f"{rates[name]:,}" for name in names], padding=4)
    axes.set(title=f"steps of CartPole per second: 64 envs, {machine}", xlim=(0, 1.15 * max(rates.values())))
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    pictures.save(figure, path)


def main() -> None:
    """Parses the command line and draws the charts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="folder of the SVG files to write")
    folder = parser.parse_args().out
    for name, (machine, rates) in CHARTS.items():
        plot(rates(), machine, folder / name)


if __name__ == "__main__":
    main()
