"""What all kinds share: nodes, which stand for things in a snapshot, and how these are taken and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from jaxvec._slices._snapshots._fields import Fields, attributes_of, slots_of


class CannotCopy(Exception):
    """Something is no value.

    Attributes:
        what: a sentence about it.
        advice: what to do; empty for what is always advised.
        path: names of attributes and keys that lead to it, inmost last.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice
        self.path: list[str] = []


class Node:
    """Stands in a snapshot for something mutable. It never changes, so many snapshots may share it."""

    __slots__ = ()

    def put(self, putter: Putter, old: Any) -> Any:
        """Returns what it stands for: `old`, which is in its place now, if that fits, or another."""
        raise NotImplementedError

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields what is to be compared with another node of the same class, each with a name to append."""
        for name in type(self).__slots__:
            yield "", getattr(self, name), getattr(other, name)


class _Kept(Node):
    """What belongs to its env and holds nothing of its state: a window, a clock, a lock that nobody holds."""

    __slots__ = ()

    def put(self, putter: Putter, old: Any) -> Any:
        return old

    def __reduce__(self) -> str:
        return "KEPT"


KEPT = _Kept()


class Putter:
    """Puts one snapshot back.

    Args:
        layers: the env's wrappers and the env, which are to go on from it.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self._done: dict[int, Any] = {}
        self._used: set[int] = set()

    def value(self, node: Any, old: Any) -> Any:
        """Returns what a node, or an atom, stands for; `old` is what is in its place now."""
        if not isinstance(node, Node):
            return node
        if node is KEPT:
            return old
        done, number = self._done, id(node)
        if number in done:
            return done[number]
        value = done[number] = node.put(self, old)
        return value

    def begin(self, node: Node, value: Any) -> None:
        """Notes what a node stands for, before that has all that it holds, which may refer to it."""
        self._done[id(node)] = value

    def reuse(self, old: Any) -> bool:
        """Says whether what is there may be what a node stands for, which is so once."""
        used, number = self._used, id(old)
        if number in used:
            return False
        used.add(number)
        return True

    def items(self, items: list[Any], olds: Any) -> list[Any]:
        """Returns what the items of a list or the like stand for; `olds` are those in their place now."""
        if len(olds) != len(items):
            olds = [None] * len(items)
        return [
            self.value(item, old) if isinstance(item, Node) else item
            for item, old in zip(items, olds, strict=True)
        ]

    def fields(self, owner: Any, fields: Fields, without: frozenset[str] = frozenset()) -> None:
        """Gives an object its attributes, and takes away what it had not."""
        atoms, nodes, count = fields
        held = attributes_of(owner)
        fresh = nodes
        if nodes:
            value, get = self.value, held.get
            fresh = {name: value(node, get(name)) for name, node in nodes.items()}
        held.update(atoms)
        held.update(fresh)
        if slots_of(type(owner)):
            for name in *atoms, *fresh:
                object.__setattr__(owner, name, held[name])
        if len(held) != count >= 0:
            for name in held.keys() - atoms.keys() - nodes.keys() - without:
                object.__delattr__(owner, name)


# By its `id`, what hardly ever changes, and its node.
Shared: TypeAlias = dict[int, tuple[Any, Any]]


class TakesParts(Protocol):
    """Takes what something holds: all that a kind knows of `Taker`, which knows all kinds.

    Attributes:
        memo: nodes by the `id` of what they stand for.
        lenient: leave what is no value as it is, in place of an error.
        shared: what all snapshots of an env share.
    """

    memo: dict[int, Any]
    lenient: bool
    shared: Shared

    def value(self, value: Any) -> Any:
        """Returns an atom as it is, and a node for all else."""
        ...

    def remember(self, value: Any, node: Any) -> None:
        """Notes that a node stands for a value, which lives as long as this."""
        ...

    def fields(self, owner: Any, without: frozenset[str] = frozenset()) -> Fields:
        """Takes the attributes of an object."""
        ...

    def items(self, values: Any) -> list[Any]:
        """Takes the items of a list or the like."""
        ...

    def pairs(self, values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        """Takes keys and values of a dict."""
        ...


Taking: TypeAlias = Callable[[TakesParts, Any], Any]
