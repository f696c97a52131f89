"""The base class of nodes, the two walks that save and restore them, and the attributes of objects."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
from gymnasium import Wrapper
from gymnasium.wrappers import PassiveEnvChecker

_T = TypeVar("_T")

# --- The attributes of an object in a snapshot -----------------------------------------------------------

# Attributes that are atoms; nodes of the others, including attributes that were not atoms at an earlier
# snapshot; and the names of all attributes in their order, including excluded ones. With `None` in place of
# the names, `Restorer` deletes none.
Fields: TypeAlias = tuple[dict[str, Any], dict[str, Any], tuple[str, ...] | None]
NOTHING: Fields = {}, {}, None


def attributes_of(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object: its own `__dict__` if it has no slots, else a new dict."""
    slots = slots_of(type(owner))
    if not slots:
        return dict_of(owner)
    attributes = dict(dict_of(owner) or {})
    for name, slot in slots.items():
        with suppress(AttributeError):  # not `getattr`, as a class may hide a slot of its base class
            attributes[name] = slot.__get__(owner)
    return attributes


def dict_of(owner: Any) -> Any:
    """Returns the `__dict__` of an object, or `None`, whatever its class answers for other attributes."""
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None


@cache
def slots_of(kind: type) -> dict[str, Any]:
    """Returns the descriptors of a class's slots by name; that of a hidden slot starts with its class."""
    slots: dict[str, Any] = {}
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            for name, slot in vars(base).items():
                if type(slot) is types.MemberDescriptorType:
                    slots[f"{base.__qualname__}.{name}" if name in slots else name] = slot
    return slots


@cache
def has_attributes(kind: type) -> bool:
    """Returns whether objects of a class have a `__dict__` or slots."""
    return kind.__dictoffset__ != 0 or bool(slots_of(kind))


_ABSENT = object()


def compare_fields(first: Fields, second: Fields) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name of each attribute with its two values."""
    first_values = first[0] | first[1]
    second_values = second[0] | second[1]
    for name in {**first_values, **second_values}:
        yield f".{name}", first_values.get(name, _ABSENT), second_values.get(name, _ABSENT)


# --- Nodes, and how they are restored --------------------------------------------------------------------


class CannotCopy(Exception):
    """An object can't be saved or restored.

    Attributes:
        what: The reason, as a clause.
        advice: A sentence on what to do; empty for the general advice.
        path: Names of the attributes and keys that lead to the object, innermost last.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice
        self.path: list[str] = []


class SaveAgain(Exception):
    """A part of the snapshot has to be saved differently, as `Saver.walked` now says."""


def save_again(walk: Callable[[], _T]) -> _T:
    """Calls `walk` until no part of the snapshot has to be saved differently."""
    while True:
        try:
            return walk()
        except SaveAgain:
            continue


class Node:
    """A mutable object's place in a snapshot. Nodes never change, so snapshots may share them."""

    __slots__ = ()

    def restore(self, restorer: Restorer, old: Any) -> Any:
        """Returns the saved object: the present object `old` with its contents restored, or a new one."""
        raise NotImplementedError

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields pairs to compare with another node of this class, each after a suffix of the path."""
        for name in type(self).__slots__:
            if name == "fields":
                yield from compare_fields(getattr(self, name), getattr(other, name))
            else:
                yield "", getattr(self, name), getattr(other, name)


class _Kept(Node):
    """An object without state that stays with its env: a window, a clock, an unused lock."""

    __slots__ = ()

    def restore(self, restorer: Restorer, old: Any) -> Any:
        return old

    def __reduce__(self) -> str:
        return "KEPT"


KEPT = _Kept()


class Restorer:
    """Restores one snapshot to `layers`, an env's wrappers and the env.

    With `reorders`, sets get another order of iteration than that of their originals.
    """

    def __init__(self, layers: list[Any], *, reorders: bool = False) -> None:
        self.layers = layers
        self.reorders = reorders
        self._done: dict[int, Any] = {}
        self._used: set[int] = set()

    def value(self, node: Any, old: Any) -> Any:
        """Returns the object of a node or an atom; `old` is the present object in its place."""
        if not isinstance(node, Node):
            return node
        if node is KEPT:
            return old
        done = self._done
        number = id(node)
        if number in done:
            return done[number]
        # A node that refers back to itself has been restored by now.
        return done.setdefault(number, node.restore(self, old))

    def begin(self, node: Node, value: Any) -> None:
        """Records a node's object before its contents are restored, as these may refer to it."""
        self._done[id(node)] = value

    def made(self, node: Node) -> Any:
        """Returns the object of a node that was restored before, or `None`."""
        return self._done.get(id(node))

    def reuse(self, old: Any) -> bool:
        """Returns whether a node may use the present object; only the first node may.

        Two objects of a snapshot can have become aliases of one object since.
        """
        if id(old) in self._used:
            return False
        self._used.add(id(old))
        return True

    def reuse_all(self, numbers: frozenset[int]) -> bool:
        """Returns whether no object with one of these ids was used yet, and marks all as used."""
        if not self._used.isdisjoint(numbers):
            return False
        self._used |= numbers
        return True

    def items(self, items: list[Any], olds: Any) -> list[Any]:
        """Returns the objects of a sequence's nodes; `olds` are the present items."""
        if len(olds) != len(items):
            olds = [None] * len(items)
        return [
            self.value(item, old) if isinstance(item, Node) else item
            for item, old in zip(items, olds, strict=True)
        ]

    def fields(self, owner: Any, fields: Fields, without: frozenset[str] = frozenset()) -> None:
        """Restores an object's attributes in their order, and deletes those that it did not have."""
        atoms, nodes, names = fields
        present = attributes_of(owner)
        fresh = nodes
        if nodes:
            fresh = {name: self.value(node, present.get(name)) for name, node in nodes.items()}
        if slots := slots_of(type(owner)):
            rest = atoms | fresh
            for name, slot in slots.items():
                if name in rest:
                    slot.__set__(owner, rest.pop(name))
                elif name in present and names is not None:
                    slot.__delete__(owner)
            present = dict_of(owner)
            if present is None:
                return
            atoms = rest
            fresh = {}
            names = None if names is None else tuple(name for name in names if name not in slots)
        present.update(atoms)
        present.update(fresh)
        if names is not None and tuple(present) != names:
            kept_names = (*names, *(without & present.keys()))
            kept = {name: present[name] for name in kept_names if name in present}
            present.clear()
            present.update(kept)


# Nodes of objects that rarely change, by `id`. It must not keep a container alive: the program may have
# discarded it, and weak references to what it holds show that.
Shared: TypeAlias = dict[int, Any]


# --- Atoms: values that a snapshot holds directly --------------------------------------------------------

# Classes of immutable values, and of values that `copy.deepcopy` shares, too, such as classes and modules.
ATOMS: set[type] = {
    *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, type),
    *(types.ModuleType, types.CodeType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(kind for kind in vars(np).values() if isinstance(kind, type) and issubclass(kind, np.generic)),
} - {np.void, np.record, np.object_}  # records are views


def save_atom(saver: Saver, value: Any) -> Any:
    return value


def is_global(value: Any) -> bool:
    """Returns whether a function is found by its name in its module."""
    # In its own globals: those of a function that was pickled by value are not those of a module.
    first, *rest = value.__qualname__.split(".")
    target = value.__globals__.get(first)
    for part in rest:
        target = getattr(target, part, None)
    return target is value


# --- The walk that saves. `snapshot.py` has the rules for each type --------------------------------------

# By class, the attributes that were not atoms at the latest snapshot of an object. This is a guess that each
# snapshot checks, so that the types of all other attributes are tested by one call.
_others: dict[type, tuple[str, ...]] = {}

# Functions that save a value, by class. `snapshot.py` fills it, and `Saver` adds the classes that it meets.
SaveFunction: TypeAlias = Callable[["Saver", Any], Any]
SAVE_FUNCTIONS: dict[type, SaveFunction] = {}


@dataclass(slots=True, eq=False)
class Saver:
    """Saves one snapshot. Each object has one node, so aliases stay aliases.

    Attributes:
        find: Returns the function that saves a class that `SAVE_FUNCTIONS` lacks.
        memo: Nodes by the `id` of their objects; at first those of an env's wrappers and the env.
        shared: Nodes that all snapshots of the env share.
        walked: Ids of containers that must not be saved as a whole; `None` for all.
        trust: Classes to copy by their own protocol.
        lenient: Whether objects that can't be copied become `KEPT` instead of an error.
        by_value: Whether arrays are compared by their values alone, whatever memory they are in.
        inside: Containers that were saved as a whole, each with the ids of the containers in it.
        open: Ids of the tuples that are being saved.
        sequences: Ids of the seed sequences of generators.
        owners: Nodes of objects by the id of their `__dict__`.
    """

    find: Callable[[type], SaveFunction]
    memo: dict[int, Any]
    shared: Shared
    walked: set[int] | None
    trust: tuple[type, ...] = ()
    lenient: bool = False
    by_value: bool = False
    inside: list[tuple[frozenset[int], Any]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    sequences: set[int] = field(default_factory=set)
    owners: dict[int, Any] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)  # keeps the ids in `memo` from being reused

    def value(self, value: Any) -> Any:
        """Returns an atom unchanged, and the node of any other value."""
        kind = type(value)
        if kind in ATOMS:
            return value
        node = self.memo.get(id(value))
        if node is not None:
            return node
        taking = SAVE_FUNCTIONS.get(kind)
        if taking is None:
            taking = SAVE_FUNCTIONS[kind] = self.find(kind)
        if not self.lenient:
            return taking(self, value)
        try:
            return taking(self, value)
        except CannotCopy:
            return KEPT

    def remember(self, value: Any, node: Any) -> Any:
        """Records and returns the node of a value, or returns an earlier one. It keeps the value alive."""
        self._alive.append(value)
        return self.memo.setdefault(id(value), node)

    def claim(self, attributes: Any, node: Any) -> None:
        """Records that a `__dict__` belongs to the object with this node, and is found nowhere else."""
        if type(attributes) is not dict:
            raise CannotCopy(f"its __dict__ is a {type(attributes).__qualname__}")
        if id(attributes) in self.owners or id(attributes) in self.memo:
            raise CannotCopy("its __dict__ is found elsewhere, too")
        if self.inside:
            self.check_not_inside((id(attributes),))
        self.owners[id(attributes)] = node

    def can_take(self, container: Any) -> bool:
        """Returns whether a container may be saved as a whole."""
        return self.walked is not None and id(container) not in self.walked

    def check_not_inside(self, numbers: Iterable[int]) -> None:
        """Starts the snapshot anew if one of these ids is of an object in a container taken as a whole."""
        for parts, container in self.inside:
            if self.walked is not None and not parts.isdisjoint(numbers):
                self.walked.add(id(container))
                raise SaveAgain

    def fields(self, owner: Any, node: Any, without: frozenset[str] = frozenset()) -> Fields:
        """Returns the attributes of an object with this node."""
        own = dict_of(owner)
        if own is not None and self.owners.get(id(own)) is not node:
            self.claim(own, node)
        attributes: Any = attributes_of(owner) if slots_of(type(owner)) else own
        absent = self  # a value that no attribute has
        while True:
            atoms = attributes.copy()
            nodes: dict[str, Any] = {}
            name = ""
            for name in without:
                atoms.pop(name, None)
            try:
                for name in _others.get(type(owner), ()):
                    value = atoms.pop(name, absent)
                    if value is not absent:
                        nodes[name] = self.value(value)
            except CannotCopy as error:
                error.path.insert(0, name)
                raise
            if ATOMS.issuperset(map(type, atoms.values())):
                return atoms, nodes, tuple(attributes)
            _others[type(owner)] = tuple(
                name for name, value in attributes.items() if type(value) not in ATOMS and name not in without
            )

    def items(self, values: Any) -> list[Any]:
        saved: list[Any] = []
        for number, value in enumerate(values):
            if type(value) in ATOMS:
                saved.append(value)
                continue
            try:
                saved.append(self.value(value))
            except CannotCopy as error:
                error.path.insert(0, f"[{number}]")
                raise
        return saved

    def pairs(self, values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        saved: list[tuple[Any, Any]] = []
        for key, value in values.items():
            try:
                saved.append((self.value(key), self.value(value)))
            except CannotCopy as error:
                error.path.insert(0, f"[{key!r}]")
                raise
        return saved


# --- Layers: an env and its wrappers. They are never replaced; only their attributes are saved and restored

# The attributes that stay with a layer: which env a wrapper wraps, and which checks of it are done.
_NONE = frozenset[str]()
_ENV = frozenset({"env"})
_CHECKS = _ENV | {
    *("checked_reset", "checked_step", "checked_render", "close_called"),
    *("checked_data_reuse", "_previous_data"),
}


@dataclass(slots=True, eq=False)
class Layer(Node):
    """A reference to the env or to one of its wrappers, by index."""

    number: int

    def restore(self, restorer: Restorer, old: Any) -> Any:
        return restorer.layers[self.number]


def excluded_fields(layer: Any) -> frozenset[str]:
    """Returns the names of the attributes of an env or a wrapper that are not saved."""
    if type(layer) is PassiveEnvChecker:
        return _CHECKS
    return _ENV if isinstance(layer, Wrapper) else _NONE


def save_layer(saver: Saver, layer: Any) -> Fields:
    if holds_more(type(layer)):
        raise CannotCopy("the class extends one with memory in C, which can't be copied")
    return saver.fields(layer, saver.memo[id(layer)], excluded_fields(layer))


@cache
def holds_more(kind: type) -> bool:
    """Returns whether objects of a class may hold more than can be read from their slots and `__dict__`."""
    if any(type(vars(base).get("__dict__")) not in _DICTS for base in kind.__mro__):
        return True
    pointers = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + 8 * (
        len(slots_of(kind)) + pointers
    )


_DICTS = (type(None), types.GetSetDescriptorType)  # what classes have as `__dict__`, but for properties


def restore_layer(restorer: Restorer, layer: Any, fields: Fields) -> None:
    restorer.fields(layer, fields, excluded_fields(layer))
