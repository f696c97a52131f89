"""The nodes of Python's, NumPy's and Gymnasium's types, and the functions that save them."""

from __future__ import annotations

import copy
import copyreg
import operator
import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
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
)

# --- Large containers that rarely change, such as tables of transitions ----------------------------------
# A container of atoms is one node, if no container in it is also reached in another way. All snapshots of an
# env share one copy of it while it is unchanged. `Saver.inside` lists the containers in it. If one of them is
# found elsewhere, the snapshot is taken again, with the items of the outer container saved one by one.

LARGE = 8  # entries


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
        if restorer.reorders and isinstance(self.copy, (set, frozenset)):
            return reordered(self.copy)
        if type(old) is type(self.copy):
            parts = self._parts_if_same(old)
            if parts is not None and restorer.reuse_all(parts):
                return old
        return _copy_plain(self.copy)

    def _parts_if_same(self, old: Any) -> frozenset[int] | None:
        if _native.ext is None:
            return None
        seen = _native.ext.plain_identity(old, ATOMS, self.identity)
        if seen is True:
            return self.members
        return frozenset(seen[1]) if seen is not None and self.is_equal(old) else None

    def is_equal(self, value: Any) -> bool:
        """Returns whether a value is equal bit for bit: 1 equals 1.0, and so do dicts in different orders."""
        return self.bytes is not None and _bytes(value) == self.bytes


def save_plain(saver: Saver, value: Any) -> Plain | None:
    """Takes a container of atoms; `None` if it has to be walked through, as always without C++."""
    if _native.ext is None or not saver.can_take(value):
        return None
    # Perhaps of an earlier container at this address. It then serves this one, if the values are the same.
    known = saver.shared.get(id(value))
    node = known if type(known) is Plain else None
    seen: Any = _native.ext.plain_identity(value, ATOMS, node.identity if node is not None else None)
    if seen is None:
        return None
    if seen is not True:
        identity, members = seen
        node = Plain(_copy_plain(value), identity, frozenset(members))
    assert node is not None  # `seen` is only True if it was compared with the identity of a node
    parts = node.members
    if not parts.isdisjoint(saver.memo) or not parts.isdisjoint(saver.owners):
        return None
    saver.check_not_inside(parts)
    saver.shared[id(value)] = node
    saver.inside.append((parts, value))
    return node


def _bytes(value: Any) -> bytes | None:
    """Returns bytes that differ for values that differ; `None` if there are none."""
    try:
        return pickle.dumps(value, 5)
    except Exception:  # for a class that is not found by its name
        return None


def _is_leaf(value: Any) -> bool:
    kind = type(value)
    return kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, value)))


def _copy_plain(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        return [item if type(item) in ATOMS else _copy_plain(item) for item in value]
    if kind is dict:
        return {key: item if type(item) in ATOMS else _copy_plain(item) for key, item in value.items()}
    if kind is tuple:
        if ATOMS.issuperset(map(type, value)):
            return value
        return tuple(item if type(item) in ATOMS else _copy_plain(item) for item in value)
    return set(iter(value)) if kind is set else value  # in most cases in the same order, unlike `copy`


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
    if all(map(operator.is_, items, value)):
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


def save_dict(saver: Saver, value: dict[Any, Any]) -> Any:
    if saver.inside:
        saver.check_not_inside((id(value),))
    if id(value) in saver.owners:
        raise CannotCopy("it is the __dict__ of an object", "Keep the object instead")
    if "__builtins__" in value:
        raise CannotCopy("it is the global variables of a module or of code")
    if len(value) > LARGE and (plain := save_plain(saver, value)) is not None:
        return saver.remember(value, plain)
    if ATOMS.issuperset(map(type, value)) and ATOMS.issuperset(map(type, value.values())):
        return saver.remember(value, Dict([*value.items()], False))
    node = Dict([], True)
    saver.remember(value, node)
    node.pairs = saver.pairs(value)
    return node


@dataclass(slots=True, eq=False)
class _Set(Node):
    cls: type
    items: list[Any]

    def restore(self, restorer: Restorer, old: Any) -> Any:
        made = self.cls([restorer.value(item, None) for item in self.items])
        return reordered(made) if restorer.reorders else made

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", len(self.items), len(other.items)  # items have no order to compare in


def save_set(saver: Saver, value: Any) -> Any:
    if saver.inside:
        saver.check_not_inside((id(value),))
    if saver.can_take(value) and all(map(_is_leaf, value)):
        return saver.remember(value, Plain(_copy_plain(value)))
    return saver.remember(value, _Set(type(value), saver.items(value)))


def reordered(value: Any) -> Any:
    """Returns an equal set with another order of iteration, if there is one.

    That order depends on the history of a set, which no copy repeats. The proof restores sets in another
    order, so that it fails for an env that depends on it.
    """
    made = value
    for growth in (2, 4, 6):
        # CPython gives a copy of `n` items, a power of two, `4 * n` slots, and keeps these while items are
        # removed. With other numbers, it may make the table small again.
        size = 1 << (len(value).bit_length() + growth)
        others = [object() for _ in range(size - len(value))]
        made = type(value)({*others, *reversed([*value])}).difference(iter(others))
        if type(made) is not type(value):
            made = type(value)(made)
        if [*map(id, made)] != [*map(id, value)]:
            break
    return made


# --- Generators of random numbers: NumPy's and Python's --------------------------------------------------


@dataclass(slots=True, eq=False)
class Generator(Node):
    """A `numpy.random.Generator`, with the node of its bit generator. states.cc makes such nodes, too."""

    cls: Any
    bits: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        before = old.bit_generator if type(old) is self.cls else None
        bits = restorer.value(self.bits, before)
        return old if bits is before and restorer.reuse(old) else self.cls(bits)


def save_generator(saver: Saver, value: Any) -> Any:
    _check_own_class(value)
    return saver.remember(value, Generator(type(value), saver.value(value.bit_generator)))


def _check_own_class(value: Any) -> None:
    if has_attributes(type(value)):
        raise CannotCopy(f"it is a {name_of(type(value))}, which extends a generator of NumPy")


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
        target = old if type(old) is self.cls and restorer.reuse(old) else self.cls()
        self.apply_to(target)
        return target

    def apply_to(self, old: Any) -> None:
        """Restores the state of a bit generator of this class."""
        present = old.seed_seq
        sequence = self.sequence
        if sequence is None:  # as in a legacy generator
            fits = type(present) is not np.random.SeedSequence
        else:
            is_equal = present is sequence or _seed(present) == _seed(sequence)
            fits = is_equal and present.n_children_spawned == self.num_spawned
        if fits:
            old.state = self.state
        else:  # unpickling does the same; a new bit generator would take much longer
            if sequence is not None:  # a new one, since spawning changes it
                entropy, key, size = _seed(sequence)
                sequence = np.random.SeedSequence(
                    entropy, spawn_key=key, pool_size=size, n_children_spawned=self.num_spawned
                )
            old.__setstate__((self.state, sequence))

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.cls, other.cls
        yield "", self.state, other.state
        yield "", (_seed(self.sequence), self.num_spawned), (_seed(other.sequence), other.num_spawned)


def _seed(sequence: Any) -> Any:
    """Returns the arguments of a seed sequence; `None` for sequences of other libraries."""
    if type(sequence) is not np.random.SeedSequence:
        return None
    return sequence.entropy, sequence.spawn_key, sequence.pool_size


def save_bits(saver: Saver, value: Any) -> Any:
    _check_own_class(value)
    sequence = value.seed_seq
    kind = type(sequence)
    num_spawned = 0
    if kind is np.random.SeedSequence:
        if id(sequence) in saver.sequences:
            raise CannotCopy(
                "its SeedSequence is that of another generator, too",
                "Give each its own, such as one of SeedSequence.spawn(2)",
            )
        saver.sequences.add(id(sequence))
        num_spawned = sequence.n_children_spawned
    elif sequence is None or kind is np.random.bit_generator.SeedlessSeedSequence:
        sequence = None
    else:
        raise CannotCopy(f"its seeds are a {name_of(kind)}, which may hold more than NumPy's SeedSequence")
    return saver.remember(value, BitGenerator(type(value), value.state, sequence, num_spawned))


@dataclass(slots=True, eq=False)
class _OldRandom(Node):
    """A `numpy.random.RandomState`: its bit generator and its own state."""

    bits: Any
    state: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        before = old._bit_generator if type(old) is np.random.RandomState else None
        bits = restorer.value(self.bits, before)
        target: Any = old if bits is before and restorer.reuse(old) else np.random.RandomState(bits)
        target.set_state(self.state)
        return target


def save_old_random(saver: Saver, value: Any) -> Any:
    _check_own_class(value)
    node = _OldRandom(saver.value(value._bit_generator), value.get_state(legacy=False))
    return saver.remember(value, node)


# --- Objects of Python classes, and objects with pickle support ------------------------------------------


@dataclass(slots=True, eq=False)
class Object(Node):
    """An object of a Python class: all that it holds is in its attributes. states.cc reads such nodes."""

    cls: Any
    fields: Fields = NOTHING

    def restore(self, restorer: Restorer, old: Any) -> Any:
        target = old if type(old) is self.cls and restorer.reuse(old) else self.cls.__new__(self.cls)
        restorer.begin(self, target)
        restorer.fields(target, self.fields)
        return target


def save_object(saver: Saver, value: Any) -> Any:
    node = Object(type(value))
    saver.remember(value, node)
    node.fields = saver.fields(value, node)
    return node


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
                attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
                vars(target).update(attributes or {})
                for name, value in (slots or {}).items():
                    setattr(target, name, value)
        for item in restorer.items(self.items, ()):
            target.append(item)
        for key, value in self.pairs:
            target[restorer.value(key, None)] = restorer.value(value, None)
        return target


def save_reduced(saver: Saver, value: Any) -> Any:
    attributes = dict_of(value)  # first: some protocols differ if nothing has read the `__dict__` yet
    try:
        registered = copyreg.dispatch_table.get(type(value))
        reduced: Any = value.__reduce_ex__(4) if registered is None else registered(value)
    except Exception as error:
        raise CannotCopy(f"{name_of(type(value))} can't be copied ({error})") from error
    if isinstance(reduced, str):  # the name of a global object
        return value
    if attributes is None:
        return _save_parts(saver, value, reduced)
    if id(attributes) in saver.memo:
        raise CannotCopy("its __dict__ is found elsewhere, too")
    node = _save_parts(saver, value, reduced)
    saver.memo.pop(id(attributes), None)  # a later alias is refused
    saver.owners[id(attributes)] = node
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
    return _save_parts(saver, value, (game.deserialize_state, (value.serialize(),)))


def save_trusted(saver: Saver, value: Any) -> Any:
    """Takes something that is on no list by its own copy protocol, if the user trusts that."""
    kind = type(value)
    is_jitted = kind.__name__ == "PjitFunction"  # its copies hold objects that can't be copied
    if is_jitted or not isinstance(value, saver.trust):
        advice = f"If copy.deepcopy copies it exactly, pass States(trust=[{kind.__qualname__}])."
        if name_of(kind).startswith("jaxlib."):
            advice = "Keep a function or device of JAX in a variable of the module, not in the env."
        raise CannotCopy(
            f"it is a {name_of(kind)}, which jaxvec can't copy exactly",
            f"{advice} Otherwise give the env methods get_state() and set_state(state), or use "
            "jaxvec.adapters.replay.ReplayEnv",
        )
    return save_reduced(saver, value)


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
    spaces = [space]
    if type(space) in _SIMPLE_SPACES:
        return spaces
    for value in vars(space).values():
        values = value.values() if isinstance(value, dict) else value
        for part in values if isinstance(value, (dict, list, tuple)) else [value]:
            if isinstance(part, gymnasium.Space):
                spaces += _spaces_in(part)
    return spaces


_SIMPLE_SPACES = {
    getattr(gymnasium.spaces, name) for name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
}
