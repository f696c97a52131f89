"""Saves figures as SVG files that adapt to the light or dark colour scheme of the browser."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

_STYLE = """<style>
  svg { color: #1f2933 }
  text { fill: currentColor }
  @media (prefers-color-scheme: dark) { svg { color: #e4e9ef } }
 </style>
"""


def save(figure: Figure, path: Path) -> None:
    """Saves a figure as SVG with a transparent background.

    Black becomes the text colour of the scheme. Other colours should be readable on white and on black.

    Args:
        figure: The figure.
        path: Path of the SVG file.
    """
    buffer = io.StringIO()
    # Text is not converted to paths, and equal data produce an identical file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxvec"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue().replace("#000000", "currentColor")
    path.write_text(drawn.replace("<defs>", _STYLE + " <defs>", 1))
