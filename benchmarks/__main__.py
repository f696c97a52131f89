"""Measures jaxvec, its peers and the upper bound in one run: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

# Functions import the other modules, because the spawned processes of all systems import this module.


def machine() -> str:
    """Returns a description of the cores, the Python version and the versions of packages."""
    from jaxvec._util import usable_cores

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions = []
    for package in ("jax", "gymnasium", "numpy", "stable-baselines3", "gxm", "envpool"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{usable_cores()} cores ({model}), Python {platform.python_version()}, {', '.join(versions)}"


def run(options: argparse.Namespace) -> Iterator[str]:
    """Runs all measurements and yields the lines of the report."""
    from benchmarks import costs, report, targets
    from benchmarks.line_up import systems
    from benchmarks.loads import LOADS
    from benchmarks.measure import measure

    yield f"`python -m benchmarks {' '.join(sys.argv[1:])}`".replace(" `", "`")
    yield f"on {machine()}; median of {options.rounds} rounds of about {options.seconds} s.\n"
    chosen = systems(options.pufferlib_python)
    unknown = [name for name in options.loads or [] if name not in LOADS]
    if unknown:
        sys.exit(f"unknown loads {unknown}; choose from {list(LOADS)}")
    results = {}
    for name in options.loads or LOADS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = measure(LOADS[name], chosen, rounds=options.rounds, seconds=options.seconds)
    yield from report.tables(results)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        report.plot(results, options.out / "results.svg")
    print("costs ...", file=sys.stderr, flush=True)
    memory = costs.memory()
    yield "\n| memory (PSS) | MB |\n| --- | ---: |"
    for name, megabytes in memory.items():
        yield f"| {name} | {megabytes:.1f} |"
    yield ""
    found = targets.targets(results, memory=memory, rounds=options.rounds, seconds=options.seconds)
    yield from targets.table(list(found))


def main() -> None:
    """Parses the command line, prints the report and writes it to `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--loads", nargs="+", metavar="LOAD", help="names of loads; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each system")
    parser.add_argument("--seconds", type=float, default=0.3, help="duration of a measurement")
    parser.add_argument("--pufferlib-python", help="interpreter of an environment with pufferlib 1.0.1")
    parser.add_argument("--out", type=Path, help="folder for results.md and results.svg")
    options = parser.parse_args()
    lines = []
    for line in run(options):
        print(line, flush=True)
        lines.append(line)
    if options.out:
        (options.out / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
