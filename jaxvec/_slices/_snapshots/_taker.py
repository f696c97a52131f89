"""Takes snapshots of envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvec._slices._snapshots._atoms import ATOMS
from jaxvec._slices._snapshots._core import KEPT, CannotCopy
from jaxvec._slices._snapshots._fields import Fields, attributes_of
from jaxvec._slices._snapshots._kinds import TAKINGS, find
from jaxvec._slices._snapshots._layers import layer_nodes
from jaxvec._slices._snapshots._pictures import CANVASES, Picture
from jaxvec._slices._snapshots._plain import plains_of


class Taker:
    """Takes one snapshot. Whatever is met twice is one node, so aliases stay aliases.

    Args:
        layers: an env's wrappers and the env, which stand for themselves.
        lenient: leave what is no value as it is, in place of an error.
    """

    def __init__(self, layers: list[Any], *, lenient: bool = False) -> None:
        self.memo: dict[int, Any] = dict(zip(map(id, layers), layer_nodes(len(layers)), strict=True))
        self.lenient = lenient
        self.plains = plains_of(layers[-1]) if layers else {}
        self._alive: list[Any] = []  # or another object may get the `id` of one that is gone

    def value(self, value: Any) -> Any:
        """Returns an atom as it is, and a node for all else."""
        kind = type(value)
        if kind in ATOMS:
            return value
        node = self.memo.get(id(value))
        if node is not None:
            return node
        taking = TAKINGS.get(kind)
        if taking is None:
            taking = TAKINGS[kind] = find(kind, value)
        if not self.lenient:
            return taking(self, value)
        try:
            return taking(self, value)
        except CannotCopy:
            return KEPT

    def remember(self, value: Any, node: Any) -> None:
        """Notes that a node stands for a value, which lives as long as this."""
        self.memo[id(value)] = node
        self._alive.append(value)

    def fields(self, owner: Any, without: frozenset[str] = frozenset()) -> Fields:
        """Takes the attributes of an object."""
        held = attributes_of(owner)
        atoms: dict[str, Any] = {}
        nodes: dict[str, Any] = {}
        name = ""
        try:
            for name, value in held.items():
                if type(value) in ATOMS:
                    atoms[name] = value
                elif name not in without:
                    node = self.value(value)
                    nodes[name] = KEPT if type(node) is Picture and name in CANVASES else node
        except CannotCopy as error:
            error.path.insert(0, name)
            raise
        return atoms, nodes, len(held)

    def items(self, values: Any) -> list[Any]:
        """Takes the items of a list or the like."""
        taken: list[Any] = []
        for number, value in enumerate(values):
            if type(value) in ATOMS:
                taken.append(value)
                continue
            try:
                taken.append(self.value(value))
            except CannotCopy as error:
                error.path.insert(0, f"[{number}]")
                raise
        return taken

    def pairs(self, values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        """Takes keys and values of a dict."""
        taken: list[tuple[Any, Any]] = []
        for key, value in values.items():
            try:
                taken.append((self.value(key), self.value(value)))
            except CannotCopy as error:
                error.path.insert(0, f"[{key!r}]")
                raise
        return taken
