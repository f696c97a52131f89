"""Saves figures as SVG whose ink follows the reader's light or dark scheme."""

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
    """Saves a figure; what is black in it becomes the ink, and its background is transparent.

    Its other colours should be readable on white and on black.
    """
    buffer = io.StringIO()
    # Text stays text, and a figure of the same data is the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxvec"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue().replace("#000000", "currentColor")
    path.write_text(drawn.replace("<defs>", _STYLE + " <defs>", 1))
