"""Sets, and large containers that hardly ever change, such as tables of transitions, of atoms only."""

from __future__ import annotations

import marshal
from typing import Any

from jaxvec._slices._snapshots._atoms import ATOMS
from jaxvec._slices._snapshots._core import Node, Putter, TakesParts

LARGE = 8  # entries
_DEEPEST = 32  # no table is as deep; what holds itself is, and is taken part by part


class Plain(Node):
    """A set, or a large container, of atoms only."""

    __slots__ = ("bytes", "copy")

    def __init__(self, copy: Any) -> None:
        self.copy = copy
        self.bytes = _bytes(copy)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves the bytes out: they are as long as the copy."""
        return Plain, (self.copy,)

    def put(self, putter: Putter, old: Any) -> Any:
        return old if self.is_same(old) and putter.reuse(old) else _copy_plain(self.copy)

    def is_same(self, value: Any) -> bool:
        """Says whether a value is the same bit for bit: 1 equals 1.0, and two dicts in other orders."""
        return self.bytes is not None and value == self.copy and _bytes(value) == self.bytes


def take_plain(taker: TakesParts, value: Any) -> Plain | None:
    """Takes a container of atoms. While it stays equal, all snapshots of an env share one copy."""
    known = taker.shared.get(id(value))
    if known is not None and known[0] is value and known[1].is_same(value):
        return known[1]
    try:
        node = Plain(_copy_plain(value))
    except _NotPlain:
        return None
    taker.shared[id(value)] = value, node
    return node


def _bytes(value: Any) -> bytes | None:
    """Returns what differs for values that differ, if there is such a thing."""
    try:
        return marshal.dumps(value, 2)  # later versions tell of aliases, too
    except ValueError:
        return None


def _copy_plain(value: Any, depth: int = 0) -> Any:
    kind, below = type(value), depth + 1
    if kind in ATOMS:
        return value
    if depth > _DEEPEST:
        raise _NotPlain
    if kind is list:
        return [one if type(one) in ATOMS else _copy_plain(one, below) for one in value]
    if kind is dict:
        return {
            key if type(key) in ATOMS else _copy_plain(key, below): _copy_plain(one, below)
            for key, one in value.items()
        }
    if kind is tuple:
        if all(type(one) in ATOMS for one in value):
            return value
        return tuple(_copy_plain(one, below) for one in value)
    if kind in (set, frozenset) and all(type(one) in ATOMS for one in value):
        return value.copy()
    raise _NotPlain


class _NotPlain(Exception):
    pass
