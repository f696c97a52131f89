"""The nodes of Python's, NumPy's and Gymnasium's types, and the functions that save them."""

from __future__ import annotations

import copy
import copyreg
import gc
import logging
import marshal
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import gymnasium
import numpy as np

from jaxvec import _native
from jaxvec._extensions.states.snapshots.nodes import (
    ATOMS,
    NOTHING,
    CannotCopy,
    Fields,
    Node,
    Restorer,
    Saver,
    dict_of,
    has_attributes,
    holds_more,
    is_global,
    slots_of,
)

# --- Large containers that rarely change, such as tables of transitions ----------------------------------
# A container of atoms is one node, if no container in it is also reached in another way. All snapshots of an
# env share one copy of it while it is unchanged. `Saver.inside` lists the containers in it. If one of them is
# found elsewhere, the snapshot is taken again, with the items of the outer container saved one by one.

LARGE = 8  # entries
_MAX_DEPTH = 32  # deeper containers, such as cyclic ones, are saved item by item
_PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})  # distinct in marshal


class Plain(Node):
    """A set, or a large container, of atoms in lists, dicts and tuples.

    Attributes:
        copy: The container's values. It keeps the atoms themselves alive.
        identity: Hash of all addresses in the container; `None` without C++.
        members: Ids of the containers in it.
    """

    __slots__ = ("bytes", "copy", "identity", "members")

    def __init__(self, copy: Any, identity: int | None = None, parts: frozenset[int] = frozenset()) -> None:
        self.copy = copy
        self.identity = identity
        self.members = parts
        self.bytes = _bytes(copy)

    def __reduce__(self) -> tuple[Any, ...]:
        """Omits the addresses, which are valid in this process only."""
        return Plain, (self.copy,)

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.copy, other.copy

    def restore(self, restorer: Restorer, old: Any) -> Any:
        if type(old) is type(self.copy):
            parts = self._parts_if_same(old)
            if parts is not None and restorer.reuse_all(parts):
                return old
        return _copy_plain(self.copy)

    def _parts_if_same(self, old: Any) -> frozenset[int] | None:
        if self.identity is not None and _native.ext is not None:
            found = _native.ext.plain_identity(old, ATOMS, self.identity)
            if found is True:
                return self.members
            if found is None or not self.is_equal(old):
                return None
            return frozenset(found[1])
        parts = _parts_of(old)
        return parts if parts is not None and self.is_equal(old) else None

    def is_equal(self, value: Any) -> bool:
        """Returns whether a value is equal bit for bit: 1 equals 1.0, and so do dicts in different orders."""
        return self.bytes is not None and _bytes(value) == self.bytes and value == self.copy


def save_plain(saver: Saver, value: Any) -> Plain | None:
    """Takes a container of atoms; `None` if it has to be walked through."""
    if not saver.can_take(value):
        return None
    # Perhaps of an earlier container at this address. It then serves this one, if the values are the same.
    known = saver.shared.get(id(value))
    node = known if type(known) is Plain else None
    identity: int | None = None
    if _native.ext is not None:
        found = _native.ext.plain_identity(value, ATOMS, node.identity if node is not None else None)
        if found is None:
            return None
        if found is True:
            assert node is not None
            parts = node.members
        else:
            identity, parts, node = found[0], frozenset(found[1]), None
    else:
        parts = _parts_of(value)
        if parts is None:
            return None
        if node is not None and not node.is_equal(value):
            node = None
    if not parts.isdisjoint(saver.memo) or not parts.isdisjoint(saver.owners):
        return None
    saver.check_not_inside(parts)
    if node is None:
        node = Plain(_copy_plain(value), identity, parts)
        saver.shared[id(value)] = node
    saver.inside.append((parts, value))
    return node


def _bytes(value: Any) -> bytes | None:
    """Returns bytes that differ for values that differ; `None` if there are none."""
    try:
        # Version 2, since later ones depend on aliases. `marshal` writes NumPy's scalars without their type.
        return marshal.dumps(value, 2) if _parts_of(value) is not None else None
    except ValueError:
        return None


def _parts_of(container: Any) -> frozenset[int] | None:
    """Returns the `id`s of the containers in a container, itself among them.

    It is `None` if the container holds one of them twice, or anything else than `_PLAIN_TYPES`.
    """
    found: list[int] = []
    level = [container]
    for _ in range(_MAX_DEPTH):
        found += map(id, level)
        level = [one for one in gc.get_referents(*level) if not _is_leaf(one)]
        if not level:
            parts = frozenset(found)
            return parts if len(parts) == len(found) else None
        if not _CONTAINERS.issuperset(map(type, level)) or len(set(map(id, level))) < len(level):
            return None
    return None


_CONTAINERS = frozenset({list, dict, tuple, set, frozenset})


def _is_leaf(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN_TYPES or (kind is tuple and _PLAIN_TYPES.issuperset(map(type, value)))


def _copy_plain(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        return [one if type(one) in ATOMS else _copy_plain(one) for one in value]
    if kind is dict:
        return {key: one if type(one) in ATOMS else _copy_plain(one) for key, one in value.items()}
    if kind is tuple:
        if ATOMS.issuperset(map(type, value)):
            return value
        return tuple(one if type(one) in ATOMS else _copy_plain(one) for one in value)
    return value.copy() if kind is set else value


# --- Python's containers ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _List(Node):
    """A list, or a deque of at most `maxlen` items."""

    cls: type = list
    maxlen: int | None = None
    items: list[Any] = field(default_factory=list)

    def restore(self, restorer: Restorer, old: Any) -> Any:
        target: Any = [] if self.cls is list else deque(maxlen=self.maxlen)
        restorer.begin(self, target)
        target.extend(restorer.items(self.items, old if type(old) is self.cls else ()))
        return target


def save_list(saver: Saver, value: list[Any]) -> Any:
    if saver.inside:
        saver.check_not_inside((id(value),))
    if len(value) > LARGE and (plain := save_plain(saver, value)) is not None:
        return saver.remember(value, plain)
    node = _List()
    saver.remember(value, node)
    node.items = saver.items(value)
    return node


def save_deque(saver: Saver, value: deque[Any]) -> Any:
    node = _List(deque, value.maxlen)
    saver.remember(value, node)
    node.items = saver.items(value)
    return node


@dataclass(slots=True, eq=False)
class _Tuple(Node):
    items: list[Any]

    def restore(self, restorer: Restorer, old: Any) -> Any:
        return tuple(restorer.items(self.items, old if type(old) is tuple else ()))


def save_tuple(saver: Saver, value: tuple[Any, ...]) -> Any:
    if id(value) in saver.open:
        raise CannotCopy("it is a tuple that contains itself")
    saver.open.add(id(value))
    try:
        items = saver.items(value)
    finally:
        saver.open.discard(id(value))
    if all(item is one for item, one in zip(items, value, strict=True)):
        return value
    return saver.remember(value, _Tuple(items))


@dataclass(slots=True, eq=False)
class Dict(Node):
    """A dict. states.cc reads such nodes."""

    pairs: list[tuple[Any, Any]]
    has_nodes: bool

    def restore(self, restorer: Restorer, old: Any) -> Any:
        if not self.has_nodes:
            return dict(self.pairs)
        target: dict[Any, Any] = {}
        restorer.begin(self, target)
        olds: dict[Any, Any] = old if type(old) is dict else {}
        for key, item in self.pairs:
            if isinstance(key, Node):
                target[restorer.value(key, None)] = restorer.value(item, None)
            else:
                target[key] = restorer.value(item, olds.get(key)) if isinstance(item, Node) else item
        return target


@dataclass(slots=True, eq=False)
class _Attributes(Node):
    """The `__dict__` of a saved object or of a module, found elsewhere."""

    owner: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        return restorer.value(self.owner, None).__dict__


def save_dict(saver: Saver, value: dict[Any, Any]) -> Any:
    number = id(value)
    if saver.inside:
        saver.check_not_inside((number,))
    if number in saver.first:
        saver.value(saver.first[number])
        if (node := saver.memo.get(number)) is not None:
            return node
    owner = saver.owners.get(number)
    if owner is None and "__name__" in value:
        module = sys.modules.get(value["__name__"]) if type(value["__name__"]) is str else None
        owner = module if module is not None and vars(module) is value else None
    if owner is not None:
        return saver.remember(value, _Attributes(owner))
    if number in saver.scopes:
        raise CannotCopy("a function that the env holds has it as its global variables")
    if len(value) > LARGE and (plain := save_plain(saver, value)) is not None:
        return saver.remember(value, plain)
    if ATOMS.issuperset(map(type, value)) and ATOMS.issuperset(map(type, value.values())):
        return saver.remember(value, Dict([*value.items()], False))
    node = Dict([], True)
    saver.remember(value, node)
    node.pairs = saver.pairs(value)
    return node


@dataclass(slots=True, eq=False)
class Set(Node):
    cls: type
    items: list[Any]

    def restore(self, restorer: Restorer, old: Any) -> Any:
        return self.cls(restorer.value(item, None) for item in self.items)

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", len(self.items), len(other.items)  # items have no order to compare in


def save_set(saver: Saver, value: Any) -> Any:
    if saver.inside:
        saver.check_not_inside((id(value),))
    if saver.can_take(value) and all(map(_is_leaf, value)):
        return saver.remember(value, Plain(value.copy()))
    return saver.remember(value, Set(type(value), saver.items(value)))


@dataclass(slots=True, eq=False)
class _Subclass(Node):
    """A list, dict, set or deque of a Python class: its content and its attributes.

    A dict may be its own `__dict__`; the attributes are then its content.
    """

    cls: Any
    maxlen: int | None = None
    is_own_dict: bool = False
    content: Any = None
    fields: Fields = NOTHING

    def restore(self, restorer: Restorer, old: Any) -> Any:
        fits = type(old) is self.cls and _is_own_dict(old) == self.is_own_dict and restorer.reuse(old)
        target = old if fits else self.cls.__new__(self.cls)
        if self.is_own_dict and not fits:
            object.__setattr__(target, "__dict__", target)
        restorer.begin(self, target)
        # The base class's methods: those of the class may have side effects.
        if isinstance(target, dict):
            dict.clear(target)
            for key, value in self.content:
                dict.__setitem__(target, restorer.value(key, None), restorer.value(value, None))
        elif isinstance(target, list):
            list.clear(target)
            list.extend(target, restorer.items(self.content, ()))
        elif isinstance(target, deque):
            deque.__init__(target, restorer.items(self.content, ()), self.maxlen)
        else:
            set.clear(target)
            set.update(target, restorer.value(self.content, None))
        if has_attributes(self.cls):
            restorer.fields(target, self.fields)
        return target


def _is_own_dict(value: Any) -> bool:
    return isinstance(value, dict) and dict_of(value) is value


_BASES: tuple[Any, ...] = (dict, list, set, deque)


def is_subclass_of_container(kind: type) -> bool:
    """Returns whether a class extends a container and does not define how it is copied."""
    base = next((base for base in _BASES if issubclass(kind, base)), None)
    if base is None or kind.__new__ is not base.__new__:
        return False
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in _COPYING)


def save_subclass(saver: Saver, value: Any) -> Any:
    is_own_dict = _is_own_dict(value)
    node = _Subclass(type(value), value.maxlen if isinstance(value, deque) else None, is_own_dict)
    saver.remember(value, node)
    if isinstance(value, dict):
        node.content = [(saver.value(key), saver.value(one)) for key, one in dict.items(value)]
    else:
        base = next(base for base in _BASES if isinstance(value, base))
        items = saver.items(base.__iter__(value))
        node.content = Set(set, items) if base is set else items
    if has_attributes(type(value)) and not is_own_dict:
        node.fields = saver.fields(value, node)
    return node


# --- Generators of random numbers: NumPy's and Python's --------------------------------------------------


@dataclass(slots=True, eq=False)
class Generator(Node):
    """A `numpy.random.Generator`, with the node of its bit generator. states.cc makes such nodes, too."""

    cls: Any
    bits: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        before = old.bit_generator if type(old) is self.cls else None
        bits = restorer.value(self.bits, before)
        if bits is before and restorer.reuse(old):
            return old
        target = self.cls.__new__(self.cls)
        np.random.Generator.__init__(target, bits)  # not that of a subclass, which takes its own arguments
        return target


def save_generator(saver: Saver, value: Any) -> Any:
    return _with_fields(saver, value, Generator(type(value), saver.value(value.bit_generator)))


@dataclass(slots=True, eq=False)
class _WithFields(Node):
    """An object of a subclass: what the node of its base class restores, and its attributes."""

    base: Node
    fields: Fields = NOTHING

    def restore(self, restorer: Restorer, old: Any) -> Any:
        target = self.base.restore(restorer, old)
        restorer.begin(self, target)
        restorer.fields(target, self.fields)
        return target


def _with_fields(saver: Saver, value: Any, node: Node) -> Any:
    """Returns the node of a generator, with its attributes if its class has any."""
    if not has_attributes(type(value)):
        return saver.remember(value, node)
    whole = _WithFields(node)
    saver.remember(value, whole)
    whole.fields = saver.fields(value, whole)
    return whole


@dataclass(slots=True, eq=False)
class BitGenerator(Node):
    """A bit generator. Its seed sequence is shared, as only the number of spawned children changes.

    states.cc makes such nodes, too, and calls `apply_to`.
    """

    cls: Any
    state: Any
    sequence: Any
    num_spawned: int

    def restore(self, restorer: Restorer, old: Any) -> Any:
        if type(old) is not self.cls or not restorer.reuse(old):
            old = self.cls.__new__(self.cls)
            base: Any = next(
                base for base in self.cls.__mro__ if not slots_of(base) and base.__dictoffset__ == 0
            )
            base.__init__(old)  # not that of a subclass, which takes its own arguments
        self.apply_to(old)
        return old

    def apply_to(self, old: Any) -> None:
        """Restores the state of a bit generator of this class."""
        present, sequence = old.seed_seq, self.sequence
        if sequence is None:  # as in a legacy generator
            fits = type(present) is not np.random.SeedSequence
        else:
            is_equal = present is sequence or _seed(present) == _seed(sequence)
            fits = is_equal and present.n_children_spawned == self.num_spawned
        if fits:
            old.state = self.state
        else:  # unpickling does the same; a new bit generator would take much longer
            sequence = None if sequence is None else _sequence_for(old, sequence, self.num_spawned)
            old.__setstate__((self.state, sequence))

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.cls, other.cls
        yield "", self.state, other.state
        yield "", (_seed(self.sequence), self.num_spawned), (_seed(other.sequence), other.num_spawned)


# Copies of seed sequences, each for one bit generator, as spawning changes them. An entry contains both, so
# that their ids are not reused. A copy is also its own entry, for later states of that generator.
_copies: dict[tuple[int, int], tuple[Any, Any]] = {}
_MAX_COPIES = 4096


def _sequence_for(bits: Any, sequence: Any, num_spawned: int) -> Any:
    """Returns a copy of a seed sequence for a bit generator, with this number of spawned children."""
    _, found = _copies.get((id(bits), id(sequence)), (None, None))
    if found is None or found.n_children_spawned != num_spawned:
        found = _make_sequence(_seed(sequence), num_spawned)
        if len(_copies) >= _MAX_COPIES:
            _copies.clear()
        for each in (sequence, found):
            _copies[id(bits), id(each)] = each, found
    return found


def _seed(sequence: Any) -> Any:
    """Returns the arguments of a seed sequence; `None` for sequences of other libraries."""
    if type(sequence) is not np.random.SeedSequence:
        return None
    return sequence.entropy, sequence.spawn_key, sequence.pool_size


def _make_sequence(seed: Any, num_spawned: int) -> Any:
    entropy, key, size = seed
    return np.random.SeedSequence(entropy, spawn_key=key, pool_size=size, n_children_spawned=num_spawned)


def save_bits(saver: Saver, value: Any) -> Any:
    sequence = value.seed_seq
    kind = type(sequence)
    if kind is np.random.SeedSequence:
        if id(sequence) in saver.sequences:
            raise CannotCopy("its SeedSequence is that of another generator, too", _SPAWN)
        if isinstance(saver.memo.get(id(sequence)), _Seeds):
            raise CannotCopy("its SeedSequence is an attribute, too", _SPAWN)
        saver.sequences.add(id(sequence))
        num_spawned = sequence.n_children_spawned
    elif sequence is None or kind is np.random.bit_generator.SeedlessSeedSequence:
        sequence, num_spawned = None, 0
    else:
        raise CannotCopy(f"its seeds are a {name_of(kind)}, which may hold more than NumPy's SeedSequence")
    return _with_fields(saver, value, BitGenerator(type(value), value.state, sequence, num_spawned))


_SPAWN = "Give each its own, such as one of SeedSequence.spawn(2)"


@dataclass(slots=True, eq=False)
class _Random(Node):
    """A `random.Random`."""

    cls: Any
    state: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        target: Any = old if type(old) is self.cls and restorer.reuse(old) else self.cls.__new__(self.cls)
        random.Random.setstate(target, self.state)
        return target


def save_random(saver: Saver, value: Any) -> Any:
    return _with_fields(saver, value, _Random(type(value), random.Random.getstate(value)))


@dataclass(slots=True, eq=False)
class _OldRandom(Node):
    """A `numpy.random.RandomState`: its bit generator and its own state."""

    cls: Any
    bits: Any
    state: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        before = old._bit_generator if type(old) is self.cls else None
        bits = restorer.value(self.bits, before)
        target: Any = old
        if bits is not before or not restorer.reuse(old):
            target = self.cls.__new__(self.cls)
            np.random.RandomState.__init__(target, bits)
        target.set_state(self.state)
        return target


def save_old_random(saver: Saver, value: Any) -> Any:
    node = _OldRandom(type(value), saver.value(value._bit_generator), value.get_state(legacy=False))
    return _with_fields(saver, value, node)


@dataclass(slots=True, eq=False)
class _Seeds(Node):
    """A sequence of seeds that an attribute holds."""

    seed: Any
    num_spawned: int

    def restore(self, restorer: Restorer, old: Any) -> Any:
        return _make_sequence(self.seed, self.num_spawned)


def save_seeds(saver: Saver, value: Any) -> Any:
    """Takes a sequence of seeds, which no generator of the env may have: a generator makes its own anew."""
    if id(value) in saver.sequences:
        raise CannotCopy("it is a SeedSequence that a generator uses, too", _SPAWN)
    return saver.remember(value, _Seeds(_seed(value), value.n_children_spawned))


# --- Objects of Python classes, and objects with pickle support ------------------------------------------


@dataclass(slots=True, eq=False)
class Object(Node):
    """An object of a Python class: all that it holds is in its attributes. states.cc reads such nodes.

    Attributes:
        kept: The object itself if there is only one, such as a member of an enum.
    """

    cls: Any
    kept: Any = None
    fields: Fields = NOTHING

    def restore(self, restorer: Restorer, old: Any) -> Any:
        target = self.kept
        if target is None:
            fits = type(old) is self.cls and restorer.reuse(old)
            target = old if fits else self.cls.__new__(self.cls)
        restorer.begin(self, target)
        restorer.fields(target, self.fields, _own_names(self.cls) if self.kept is not None else frozenset())
        return target


def save_object(saver: Saver, value: Any) -> Any:
    node = Object(type(value))
    saver.remember(value, node)
    node.fields = saver.fields(value, node)
    return node


def save_single(saver: Saver, value: Any) -> Any:
    """Takes an object that is the only one of its name, with the attributes that its class does not set."""
    node = Object(type(value), value)
    saver.remember(value, node)
    node.fields = saver.fields(value, node, _own_names(type(value)))
    return node


@cache
def _own_names(kind: Any) -> frozenset[str]:
    """Returns names of attributes that belong to a class or to global settings, and not to a state."""
    if issubclass(kind, logging.Logger):
        return frozenset(vars(logging.Logger("")))
    return frozenset({"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_", "_hashable_values_"})


def save_logger(saver: Saver, value: Any) -> Any:
    is_global = logging.Logger.manager.loggerDict.get(value.name) is value or value is logging.root
    return save_single(saver, value) if is_global else save_object(saver, value)


_COPYING = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__")


def is_ordinary(kind: type) -> bool:
    """Returns whether all that an object holds is in its attributes.

    The attributes are exact even if the class defines how it is copied, as `EzPickle` does. A class with its
    own `__reduce__` is not ordinary: wrappers of C libraries have it, for memory that is in no attribute.
    """
    if kind.__new__ is not object.__new__ or not has_attributes(kind):
        return False
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False
    return not holds_more(kind)


@dataclass(slots=True, eq=False)
class _Reduced(Node):
    """An object that is rebuilt as by pickle, from the result of `__reduce_ex__`."""

    function: Any
    setter: Any
    arguments: list[Any] = field(default_factory=list)
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def restore(self, restorer: Restorer, old: Any) -> Any:
        target = self.function(*restorer.items(self.arguments, ()))
        restorer.begin(self, target)
        state = restorer.value(self.state, None)
        if state is not None:
            if self.setter is not None:
                self.setter(target, state)
            elif hasattr(target, "__setstate__"):
                target.__setstate__(state)
            else:
                held, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
                vars(target).update(held or {})
                for name, value in (slots or {}).items():
                    setattr(target, name, value)
        for item in restorer.items(self.items, ()):
            target.append(item)
        for key, value in self.pairs:
            target[restorer.value(key, None)] = restorer.value(value, None)
        return target


def save_reduced(saver: Saver, value: Any) -> Any:
    held = dict_of(value)  # first: some protocols differ if nothing has read the `__dict__` yet
    try:
        registered = copyreg.dispatch_table.get(type(value))
        reduced: Any = value.__reduce_ex__(4) if registered is None else registered(value)
    except Exception as error:
        raise CannotCopy(f"{name_of(type(value))} can't be copied ({error})") from error
    if isinstance(reduced, str):
        if is_global(value, reduced):
            return value
        raise CannotCopy(f"{name_of(type(value))} can't be copied (no module has it as {reduced})")
    if held is not None:
        saver.check_not_saved(held, value)
    node = _save_parts(saver, value, reduced)
    if type(held) is dict:
        saver.memo[id(held)] = _Attributes(node)
    return node


def _save_parts(saver: Saver, value: Any, reduced: tuple[Any, ...]) -> Any:
    """Takes the result of `__reduce_ex__`."""
    function, arguments, state, items, pairs, setter = (*reduced, *[None] * (6 - len(reduced)))
    if id(value) in saver.open:
        raise CannotCopy("it contains itself: it is made of an object that refers to it")
    node = _Reduced(function, setter)
    saver.remember(reduced, node)  # keeps the temporary state alive, and so its id
    saver.open.add(id(value))
    try:
        node.arguments = saver.items(arguments)
    finally:
        saver.open.discard(id(value))
    saver.remember(value, node)
    node.state = saver.value(state)
    node.items = saver.items(items or ())
    node.pairs = saver.pairs(dict(pairs or ()))
    return node


def save_game_state(saver: Saver, value: Any) -> Any:
    """Takes a state of an OpenSpiel game as OpenSpiel writes it. The game itself is immutable."""
    game = value.get_game()
    kind = game.get_type()
    # Such games have random numbers or distributions that are not in the text.
    if kind.chance_mode.name == "SAMPLED_STOCHASTIC" or kind.dynamics.name == "MEAN_FIELD":
        raise CannotCopy(f"it is of the game {kind.short_name}, whose states OpenSpiel can't write in full")
    return _save_parts(saver, value, (_read_game_state, (game, value.serialize())))


def _read_game_state(game: Any, text: str) -> Any:
    return game.deserialize_state(text)


def save_exception(saver: Saver, value: BaseException) -> Any:
    if value.__traceback__ is not None or value.__cause__ is not None or value.__context__ is not None:
        raise CannotCopy("it is an exception with a traceback or a cause", "Keep repr(error) in its place")
    return save_reduced(saver, value)


def save_trusted(saver: Saver, value: Any) -> Any:
    """Takes something that is on no list by its own copy protocol, if the user trusts that."""
    kind = type(value)
    if not isinstance(value, saver.trust):
        name = global_name(value)
        if name is not None and is_global(value, name):
            return value
        raise CannotCopy(
            f"it is a {name_of(kind)}, which jaxvec can't copy exactly",
            f"If copy.deepcopy copies it exactly, pass States(trust=[{kind.__qualname__}]). Otherwise give"
            " the env methods get_state() and set_state(state), or use jaxvec.adapters.replay.ReplayEnv",
        )
    return save_reduced(saver, value)


def global_name(value: Any) -> str | None:
    """Returns the name that an object's own copy protocol has for it; `None` without one."""
    if type(value).__reduce__ is object.__reduce__:  # which aborts the process for classes of pybind11
        return None
    try:
        name = value.__reduce__()
    except Exception:
        return None
    return name if isinstance(name, str) else None


def name_of(kind: type) -> str:
    module = getattr(kind, "__module__", "builtins")  # some classes of SWIG lack it
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


# --- Gymnasium's spaces ----------------------------------------------------------------------------------

_MAX_EQUAL_SPACES = 1000  # equal spaces to remember; some envs make a new space in each reset


class Space(Node):
    """A space, which is immutable except for the random generators of `sample`.

    Attributes:
        equal: Spaces known to be equal to this one, by `id`; states.cc reads it.
        generators: Nodes of the generators of the space and its subspaces; `None` for a simple space
            without one.
    """

    __slots__ = ("equal", "generators", "space")

    def __init__(self, space: Any, generators: list[Any] | None) -> None:
        self.space = space
        self.equal = {id(space): space}  # comparing spaces is slow
        self.generators = generators

    def __reduce__(self) -> Any:
        return Space, (self.space, self.generators)

    def restore(self, restorer: Restorer, old: Any) -> Any:
        if id(old) not in self.equal:
            if type(old) is not type(self.space) or old != self.space:
                old = copy.deepcopy(self.space)
            if len(self.equal) >= _MAX_EQUAL_SPACES:
                self.equal = {id(self.space): self.space}
            self.equal[id(old)] = old
        if self.generators is None:
            old._np_random = None
            return old
        for space, generator in zip(_spaces_in(old), self.generators, strict=True):
            space._np_random = restorer.value(generator, space._np_random)
        return old

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.generators, other.generators


def save_space(saver: Saver, value: Any) -> Any:
    if type(value) in _SIMPLE_SPACES and value._np_random is None:
        known = saver.shared.get(id(value))
        if type(known) is not Space or known.space is not value:
            known = saver.shared[id(value)] = Space(value, None)
        return known
    return saver.remember(value, Space(value, [saver.value(space._np_random) for space in _spaces_in(value)]))


def _spaces_in(space: Any) -> list[Any]:
    found = [space]
    if type(space) not in _SIMPLE_SPACES:
        for held in vars(space).values():
            if isinstance(held, gymnasium.Space):
                found += _spaces_in(held)
            elif isinstance(held, (dict, list, tuple)):
                for one in held.values() if isinstance(held, dict) else held:
                    if isinstance(one, gymnasium.Space):
                        found += _spaces_in(one)
    return found


_SIMPLE_SPACES = {
    getattr(gymnasium.spaces, name) for name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
}
