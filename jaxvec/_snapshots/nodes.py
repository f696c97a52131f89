"""Nodes of a snapshot: the base of all kinds, and the attributes of objects."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Wrapper
from gymnasium.wrappers import PassiveEnvChecker

# ----------------------------------------------------------------------------------------------------------
# The attributes of an object, as a snapshot has them.
# ----------------------------------------------------------------------------------------------------------

# Attributes that are atoms, those that are not or once were not, and how many there were, with those that are
# not taken; -1 where others are nobody's concern.
Fields: TypeAlias = tuple[dict[str, Any], dict[str, Any], int]
NOTHING: Fields = {}, {}, -1


def attributes_of(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object: its own `dict`, where it has no slots."""
    slots = _slots.get(type(owner))
    if slots is None:
        slots = slots_of(type(owner))
    if not slots:
        return owner.__dict__
    held = dict(getattr(owner, "__dict__", {}))
    for name in slots:
        if hasattr(owner, name):
            held[name] = getattr(owner, name)
    return held


_slots: dict[type, tuple[str, ...]] = {}


def slots_of(kind: type) -> tuple[str, ...]:
    found = _slots.get(kind)
    if found is None:
        names: list[str] = []
        for base in kind.__mro__:
            own = vars(base).get("__slots__", ())
            for name in (own,) if isinstance(own, str) else own:
                if name not in ("__dict__", "__weakref__"):
                    hidden = name.startswith("__") and not name.endswith("__")
                    names.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
        found = _slots[kind] = tuple(names)
    return found


class _Absent:
    pass


_ABSENT = _Absent()


def compare_fields(one: Fields, other: Fields) -> Iterator[tuple[str, Any, Any]]:
    """Yields attributes of two objects with their names."""
    one_held, other_held = one[0] | one[1], other[0] | other[1]
    for name in {**one_held, **other_held}:
        yield f".{name}", one_held.get(name, _ABSENT), other_held.get(name, _ABSENT)


# ----------------------------------------------------------------------------------------------------------
# What all kinds share: nodes, which stand for things in a snapshot, and how these are taken and put back.
# ----------------------------------------------------------------------------------------------------------


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
    is_drawn = False  # whether it is a picture, which an env may draw anew

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


# ----------------------------------------------------------------------------------------------------------
# What a snapshot holds as it is, because it can't change.
# ----------------------------------------------------------------------------------------------------------

# What can't change, or is the same wherever it is: classes, functions and modules too, as in `copy.deepcopy`.
ATOMS: set[type] = {
    *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, type),
    *(types.ModuleType, types.CodeType, property, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.MappingProxyType),
    *(kind for kind in vars(np).values() if isinstance(kind, type) and issubclass(kind, np.generic)),
} - {np.void, np.object_}


def take_atom(taker: Taker, value: Any) -> Any:
    return value


# ----------------------------------------------------------------------------------------------------------
# Takes snapshots of envs. How each kind of thing is taken stands in `snapshot.py`.
# ----------------------------------------------------------------------------------------------------------

# What is drawn on anew for each picture, by the names that envs use.
_CANVASES = frozenset({"canvas", "screen", "surf", "surface", "window", "window_surface"})

# By class, the attributes that were no atoms when one was last taken: a guess, which is checked each time. So
# all others are looked at in one go.
_others: dict[type, tuple[str, ...]] = {}

# How values are taken, by class. `snapshot.py` fills it, and `Taker` adds the classes that it meets.
Taking: TypeAlias = Callable[["Taker", Any], Any]
TAKINGS: dict[type, Taking] = {}


class Taker:
    """Takes one snapshot. Whatever is met twice is one node, so aliases stay aliases.

    Attributes:
        memo: nodes by the `id` of what they stand for; first those of an env's wrappers and the env.
        shared: what all snapshots of the env share.
        lenient: leave what is no value as it is, in place of an error.
    """

    def __init__(
        self,
        find: Callable[[type, Any], Taking],
        memo: dict[int, Any],
        shared: Shared,
        *,
        lenient: bool = False,
    ) -> None:
        """Starts a snapshot; `find` tells how values of a class are taken that `TAKINGS` lacks."""
        self._find = find
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
            taking = TAKINGS[kind] = self._find(kind, value)
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
                    drawn = name in _CANVASES and isinstance(node, Node) and node.is_drawn
                    nodes[name] = KEPT if drawn else node
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


# ----------------------------------------------------------------------------------------------------------
# An env and its wrappers, which stand for themselves: only their attributes are taken and put back.
# ----------------------------------------------------------------------------------------------------------

# Of Gymnasium's envs, what their constructors were told. It is the same for all that one function makes.
_TOLD = frozenset(
    {"spec", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs", "metadata", "_metadata"}
)
_TOLD_WRAPPERS = _TOLD | {"env"}


class _Layer(Node):
    """The env, or one of its wrappers."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def put(self, putter: Putter, old: Any) -> Any:
        return putter.layers[self.number]


def layer_nodes(count: int, known: list[_Layer] = []) -> list[_Layer]:  # noqa: B006
    while len(known) < count:
        known.append(_Layer(len(known)))
    return known[:count]


def told(layer: Any) -> frozenset[str] | None:
    """Returns the attributes of an env or a wrapper that are not taken; `None` if none is."""
    kind = type(layer)
    if kind is PassiveEnvChecker:
        return None  # it warns once, and changes nothing
    return _TOLD_WRAPPERS if issubclass(kind, Wrapper) else _TOLD


def take_layer(taker: Taker, layer: Any) -> Fields:
    """Takes the attributes of an env or a wrapper."""
    without = told(layer)
    return NOTHING if without is None else taker.fields(layer, without)


def put_layer(putter: Putter, layer: Any, fields: Fields) -> None:
    """Gives an env or a wrapper its attributes."""
    if type(layer) is not PassiveEnvChecker:
        putter.fields(layer, fields, _TOLD_WRAPPERS)
