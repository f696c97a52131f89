"""The tables and the plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.measure import Result

Results = Mapping[str, Mapping[str, Result]]  # by load and system


def tables(results: Results) -> Iterator[str]:
    """Yields Markdown: rates, what did not run and why, CPU time."""
    systems = list(next(iter(results.values())))
    limit = systems[0]
    yield "Env steps a second; in brackets the ratio to the first line.\n"
    yield from _table(
        results, lambda result, best: f"{result.rate:,.0f} ({_ratio(result.rate, best)})", limit
    )
    yield "\nMicroseconds of CPU an env step, of all processes together.\n"
    yield from _table(results, lambda result, _: f"{result.cpu * 1e6:,.1f}", limit)
    yield "\nSeconds from nothing until the envs are reset, once.\n"
    yield from _table(results, lambda result, _: f"{result.start:,.2f}", limit)
    yield "\nNot run:\n"
    for system in systems:
        reasons: dict[str, list[str]] = {}
        for load, by_system in results.items():
            if by_system[system].not_run:
                reasons.setdefault(by_system[system].not_run, []).append(load)
        for reason, loads in reasons.items():
            yield f"- {system} ({', '.join(loads)}): {reason}"


def _table(results: Results, cell: Callable[[Result, float], str], limit: str) -> Iterator[str]:
    yield "| system | " + " | ".join(results) + " |"
    yield "| --- |" + " ---: |" * len(results)
    for system in next(iter(results.values())):
        cells = [
            "not run" if by_system[system].not_run else cell(by_system[system], by_system[limit].rate)
            for by_system in results.values()
        ]
        yield f"| {system} | " + " | ".join(cells) + " |"


def _ratio(rate: float, best: float) -> str:
    return f"{rate / best:.2f}" if best else "-"


def plot(results: Results, path: Path) -> None:
    """Draws each load's rates as bars, relative to the bare loops."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    columns = 4
    rows = -(-len(results) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(16, 3.2 * rows), sharey=True, squeeze=False)
    for axis, (load, by_system) in zip(axes.flat, results.items(), strict=False):
        names = list(by_system)
        best = by_system[names[0]].rate or 1
        colours = ["tab:grey", *("tab:orange" if "jaxvec" in name else "tab:blue" for name in names[1:])]
        axis.barh(names, [by_system[name].rate / best for name in names], color=colours)
        axis.set_title(load)
        axis.set_xlim(0, 1.2)  # EnvPool's C++ goes beyond
        axis.invert_yaxis()
    for axis in axes.flat[len(results) :]:
        axis.remove()
    figure.supxlabel("env steps a second, relative to bare env.step loops on all cores")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
