"""Takes and puts back what was taken before, in C++, as long as only what is ordinary has changed.

From one snapshot of an env to the next hardly anything changes but numbers, arrays and random numbers. For
these there is no need to walk: all else is what it was. A snapshot that is taken so has the same dicts and
nodes as the one before, but where there is a change. At whatever else there is, C++ says so, and has done
nothing yet: then all is walked through, where the rules are.
"""

from __future__ import annotations

from typing import Any

from jaxvec import _native
from jaxvec._slices._snapshots._arrays import Array
from jaxvec._slices._snapshots._atoms import ATOMS
from jaxvec._slices._snapshots._core import Node
from jaxvec._slices._snapshots._fields import Fields, slots_of
from jaxvec._slices._snapshots._generators import BitGenerator, Generator
from jaxvec._slices._snapshots._layers import told
from jaxvec._slices._snapshots._spaces import Space

_NODES = ATOMS, Node, Array, Generator, BitGenerator, Space


class Again:
    """Of an env and its wrappers."""

    def __init__(self, layers: list[Any]) -> None:
        """Takes the wrappers, outmost first, and the env."""
        self._layers = layers
        self._told = [told(layer) for layer in layers]
        self._before: list[Fields] | None = None
        slotted = any(slots_of(type(layer)) for layer in layers)
        self._compiled = None if slotted else _native.ext

    def take(self) -> list[Fields] | None:
        """Returns the attributes of each layer; `None` if they have to be walked through."""
        compiled, before = self._compiled, self._before
        if compiled is None or before is None:
            return None
        self._before = compiled.take_again(self._layers, self._told, before, _NODES)
        return self._before

    def note(self, fields: list[Fields]) -> None:
        """Takes what the walk has taken."""
        self._before = fields

    def put(self, fields: list[Fields]) -> bool:
        """Gives each layer its attributes; says whether that could be done so."""
        compiled = self._compiled
        return compiled is not None and compiled.put_again(self._layers, self._told, fields, _NODES)
