"""Writes the tables and the plot of `python -m benchmarks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import pictures
from benchmarks.measure import Result

_DRAWN = ("CartPole x 8", "CartPole x 64", "CartPole x 256", "nested Dict x 64")
_MARKS = ("o", "s", "D", "^")  # one marker per drawn load

Results = Mapping[str, Mapping[str, Result]]  # by load and system


def tables(results: Results) -> Iterator[str]:
    """Yields Markdown lines: tables of rates, CPU times and start times, and exclusions with reasons."""
    systems = list(next(iter(results.values())))
    limit = systems[0]
    yield "Env steps per second; in parentheses the ratio to the first line.\n"
    yield from _table(
        results, lambda result, best: f"{result.rate:,.0f} ({_ratio(result.rate, best)})", limit
    )
    yield "\nMicroseconds of CPU time per env step, summed over all processes.\n"
    yield from _table(results, lambda result, _: f"{result.cpu * 1e6:,.1f}", limit)
    yield "\nSeconds from start to the first reset, measured once.\n"
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
    """Draws the rates of the systems that ran, relative to the bare loops, for a few loads."""
    systems = list(next(iter(results.values())))
    figure = Figure(figsize=(4.4, 1.2 + 0.36 * len(systems)), layout="constrained")  # fits a phone
    axes = figure.subplots()
    for place, load in enumerate([load for load in _DRAWN if load in results] or results):
        by_system = results[load]
        shown = [system for system in systems if not by_system[system].not_run]
        rates = [by_system[system].rate / (by_system[systems[0]].rate or 1) for system in shown]
        axes.plot(rates, [systems.index(system) for system in shown], _MARKS[place % len(_MARKS)], label=load)
    axes.set(
        xscale="log", ylim=(len(systems) - 0.5, -0.5), xlabel="env steps per second relative to bare loops"
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(systems)), [""] * len(systems))
    for place, system in enumerate(systems):  # labels are above the marks, so they need no margin
        axes.text(0.01, place - 0.28, system, fontsize=9, va="center", transform=axes.get_yaxis_transform())
    axes.grid(alpha=0.3)
    axes.axvline(1, color="black", linewidth=0.8)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    pictures.save(figure, path)
