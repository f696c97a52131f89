"""Draws a part of a trace of `envs.trace`, with one row for the program and one per worker.

Run `python -m benchmarks.timeline TRACE PICTURE [--first 50] [--count 3]`. Perfetto shows the whole trace.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks import pictures

# Label and colour of a span, by the prefix of its name. Later entries are drawn over earlier ones.
KINDS = {
    "jaxvec.": ("dispatch to the pool", "#4f81ad"),
    "VectorEnv.": ("dispatch to the pool", "#4f81ad"),
    "write actions": ("write actions, wake workers", "#f8b195"),
    "dispatch": ("write actions, wake workers", "#f8b195"),
    "copy results": ("copy results", "#c06c84"),
    "wait": ("wait", "#aeb7c1"),
    "step": ("step of an env", "#6aa84f"),
    "reset": ("reset of an env", "#e69138"),
}


def draw(timeline: dict[str, Any], picture: Path, *, first: int, count: int) -> None:
    """Draws a part of a trace.

    Args:
        timeline: Parsed JSON of the trace.
        picture: Path of the SVG file.
        first: Index of the first dispatch to draw.
        count: Number of dispatches to draw.
    """
    rows = {e["tid"]: e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "thread_name"}
    spans = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    dispatches = sorted(span["ts"] for span in spans if span["name"].startswith(("jaxvec.", "VectorEnv.")))
    if len(dispatches) <= first + count:
        raise SystemExit(f"the trace has {len(dispatches)} dispatches, too few for these --first and --count")
    start, stop = dispatches[first], dispatches[first + count]
    margin = (stop - start) / 40
    start, stop = start - margin, stop + margin
    figure = Figure(figsize=(10, 0.9 + 0.55 * len(rows)))
    axes = figure.subplots()
    for kind, (_, colour) in KINDS.items():
        for place, tid in enumerate(rows):
            matching = [span for span in spans if span["tid"] == tid and span["name"].startswith(kind)]
            shown = [
                (s["ts"] - start, s["dur"]) for s in matching if start < s["ts"] + s["dur"] and s["ts"] < stop
            ]
            axes.broken_barh(shown, (place - 0.36, 0.72), color=colour, linewidth=0)
    axes.set_xlim(0, stop - start)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), rows.values())
    axes.set_xlabel("µs")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    patches = [Patch(color=colour, label=label) for label, colour in dict(KINDS.values()).items()]
    figure.legend(handles=patches, loc="upper center", ncols=len(patches), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    pictures.save(figure, picture)


def main() -> None:
    """Parses the command line and draws the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("trace", type=Path, help="file of `envs.trace`, .json or .json.gz")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--first", type=int, default=50, help="index of the first dispatch to draw")
    parser.add_argument("--count", type=int, default=3, help="number of dispatches to draw")
    options = parser.parse_args()
    read = gzip.open if options.trace.suffix == ".gz" else Path.open
    with read(options.trace) as file:
        timeline = json.load(file)
    draw(timeline, options.picture, first=options.first, count=options.count)


if __name__ == "__main__":
    main()
