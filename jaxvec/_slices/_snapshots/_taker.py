"""Takes snapshots of envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvec._slices._snapshots._atoms import ATOMS
from jaxvec._slices._snapshots._core import KEPT, CannotCopy, Shared
from jaxvec._slices._snapshots._fields import Fields, attributes_of
from jaxvec._slices._snapshots._kinds import TAKINGS, find
from jaxvec._slices._snapshots._pictures import CANVASES, Picture

# By class, the attributes that were no atoms when one was last taken: a guess, which is checked each time. So
# all others are looked at in one go.
_others: dict[type, tuple[str, ...]] = {}


class Taker:
    """Takes one snapshot. Whatever is met twice is one node, so aliases stay aliases.

    Args:
        memo: nodes of an env's wrappers and the env, which stand for themselves, by their `id`.
        shared: what all snapshots of the env share.
        lenient: leave what is no value as it is, in place of an error.
    """

    def __init__(self, memo: dict[int, Any], shared: Shared, *, lenient: bool = False) -> None:
        self.memo = memo
        self.shared = shared
        self.lenient = lenient
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
        atoms, nodes = held.copy(), {}
        name, absent = "", self
        try:
            for name in _others.get(type(owner), ()):
                value = atoms.pop(name, absent)
                if value is not absent and name not in without:
                    node = self.value(value)
                    nodes[name] = KEPT if type(node) is Picture and name in CANVASES else node
        except CannotCopy as error:
            error.path.insert(0, name)
            raise
        if ATOMS.issuperset(map(type, atoms.values())):
            return atoms, nodes, len(held)
        _others[type(owner)] = tuple(name for name, value in held.items() if type(value) not in ATOMS)
        return self.fields(owner, without)

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
