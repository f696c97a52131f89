"""The nodes of Python's, NumPy's, Gymnasium's and pygame's types, and the functions that save them."""

from __future__ import annotations

import copy
import enum
import importlib
import marshal
import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from jaxvec._snapshots.nodes import (
    ATOMS,
    KEPT,
    NOTHING,
    CannotCopy,
    Fields,
    Node,
    Putter,
    Taker,
    compare_fields,
    slots_of,
)

# ----------------------------------------------------------------------------------------------------------
# Containers of atoms only: sets, and large containers that rarely change, such as tables of transitions.
# ----------------------------------------------------------------------------------------------------------

LARGE = 8  # entries
_MAX_DEPTH = 32  # deeper containers, such as cyclic ones, are saved item by item


class Plain(Node):
    """A set, or a large container, of atoms only."""

    __slots__ = ("bytes", "copy")

    def __init__(self, copy: Any) -> None:
        self.copy = copy
        self.bytes = _bytes(copy)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plain, (self.copy,)  # without the bytes, which are as long as the copy

    def put(self, putter: Putter, old: Any) -> Any:
        return old if self.is_same(old) and putter.reuse(old) else _copy_plain(self.copy)

    def is_same(self, value: Any) -> bool:
        # Equality is not enough: 1 equals 1.0, and a dict equals one in another order.
        return self.bytes is not None and value == self.copy and _bytes(value) == self.bytes


def take_plain(taker: Taker, value: Any) -> Plain | None:
    """Saves a container of atoms; `None` if it has others. Snapshots share the copy while it is unchanged."""
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
    """Returns bytes that differ for different values; `None` if marshal can't encode them."""
    try:
        return marshal.dumps(value, 2)  # later versions also encode aliases
    except ValueError:
        return None


def _copy_plain(value: Any, depth: int = 0) -> Any:
    kind, below = type(value), depth + 1
    if kind in ATOMS:
        return value
    if depth > _MAX_DEPTH:
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


# ----------------------------------------------------------------------------------------------------------
# NumPy's arrays.
# ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Array(Node):
    """An array that owns its memory. states.cc makes such nodes, too."""

    array: Any

    def put(self, putter: Putter, old: Any) -> Any:
        return _copy(self.array)


@dataclass(slots=True, eq=False)
class _Constant(Node):
    """An array in immutable memory, such as a bytes object."""

    array: Any

    def put(self, putter: Putter, old: Any) -> Any:
        return self.array


@dataclass(slots=True, eq=False)
class _View(Node):
    """A view of another array, which is saved as a whole."""

    whole: Array
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def put(self, putter: Putter, old: Any) -> Any:
        whole = putter.value(self.whole, None)
        flat = whole.reshape(-1, order="A").view(np.uint8)
        return np.ndarray(self.shape, self.dtype, flat, self.offset, self.strides)


@dataclass(slots=True, eq=False)
class _Objects(Node):
    shape: tuple[int, ...]
    items: list[Any] = field(default_factory=list)

    def put(self, putter: Putter, old: Any) -> Any:
        array = np.empty(len(self.items), object)
        same = isinstance(old, np.ndarray) and old.shape == self.shape
        olds = old.ravel().tolist() if same else [None] * len(self.items)
        for number, item in enumerate(self.items):
            array[number] = putter.value(item, olds[number])
        return array.reshape(self.shape)


@dataclass(slots=True, eq=False)
class _Elsewhere(Node):
    """An array in foreign memory, such as a C library's: restored in place."""

    array: Any

    def put(self, putter: Putter, old: Any) -> Any:
        fits = _is_elsewhere(old) and (old.shape, old.dtype) == (self.array.shape, self.array.dtype)
        if fits and putter.reuse(old):
            if old.flags.writeable:
                np.copyto(old, self.array)
            return old
        memory = bytearray(self.array.tobytes())  # foreign memory, too, so it is saved in this way again
        return np.ndarray(self.array.shape, self.array.dtype, memory)


def _owner(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _copy(array: Any) -> Any:
    """Returns a copy with the same writeable flag, as an env may lock its array between changes."""
    copy = array.copy("K")
    if not array.flags.writeable:
        copy.flags.writeable = False
    return copy


def _is_constant(value: Any) -> bool:
    memory = _owner(value).base
    return isinstance(memory.obj if isinstance(memory, memoryview) else memory, bytes)


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not _owner(value).flags.owndata


def take_array(taker: Taker, value: Any) -> Any:
    if value.dtype.hasobject:
        if value.dtype != object:
            raise CannotCopy("it is a structured array with Python objects, which can't be copied")
        node = _Objects(value.shape)
        taker.remember(value, node)
        node.items = taker.items(value.ravel().tolist())
        return node
    if value.base is None:
        return taker.remember(value, Array(_copy(value)))
    if _is_constant(value):
        return taker.remember(value, _Constant(value))
    if _is_elsewhere(value):
        return taker.remember(value, _Elsewhere(value.copy()))
    return taker.remember(value, _take_view(taker, value, _owner(value)))


def _take_view(taker: Taker, value: Any, owner: Any) -> Any:
    flags = owner.flags
    is_large = owner.nbytes > 64 * max(value.nbytes, 64)  # e.g. one number of a table: save no more than that
    if not (flags.forc and owner.size and flags.writeable) or is_large or owner.dtype.hasobject:
        return Array(value.copy("K"))
    offset = value.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return _View(taker.value(owner), value.dtype, value.shape, value.strides, offset)


# ----------------------------------------------------------------------------------------------------------
# Python's containers.
# ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _List(Node):
    items: list[Any] = field(default_factory=list)

    def put(self, putter: Putter, old: Any) -> Any:
        target: list[Any] = []
        putter.begin(self, target)
        target.extend(putter.items(self.items, old if type(old) is list else ()))
        return target


def take_list(taker: Taker, value: list[Any]) -> Any:
    if len(value) > LARGE and (plain := take_plain(taker, value)) is not None:
        return taker.remember(value, plain)
    node = _List()
    taker.remember(value, node)
    node.items = taker.items(value)
    return node


@dataclass(slots=True, eq=False)
class _Deque(Node):
    maxlen: int | None
    items: list[Any] = field(default_factory=list)

    def put(self, putter: Putter, old: Any) -> Any:
        target: deque[Any] = deque(maxlen=self.maxlen)
        putter.begin(self, target)
        target.extend(putter.items(self.items, old if type(old) is deque else ()))
        return target


def take_deque(taker: Taker, value: deque[Any]) -> Any:
    node = _Deque(value.maxlen)
    taker.remember(value, node)
    node.items = taker.items(value)
    return node


@dataclass(slots=True, eq=False)
class _Tuple(Node):
    items: list[Any]

    def put(self, putter: Putter, old: Any) -> Any:
        return tuple(putter.items(self.items, old if type(old) is tuple else ()))


def take_tuple(taker: Taker, value: tuple[Any, ...]) -> Any:
    items = taker.items(value)
    if all(item is one for item, one in zip(items, value, strict=True)):
        return value
    return taker.remember(value, _Tuple(items))


@dataclass(slots=True, eq=False)
class _Dict(Node):
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def put(self, putter: Putter, old: Any) -> Any:
        target: dict[Any, Any] = {}
        putter.begin(self, target)
        olds: dict[Any, Any] = old if type(old) is dict else {}
        for key, item in self.pairs:
            if isinstance(key, Node):
                target[putter.value(key, None)] = putter.value(item, None)
            else:
                target[key] = putter.value(item, olds.get(key)) if isinstance(item, Node) else item
        return target


def take_dict(taker: Taker, value: dict[Any, Any]) -> Any:
    if len(value) > LARGE and (plain := take_plain(taker, value)) is not None:
        return taker.remember(value, plain)
    node = _Dict()
    taker.remember(value, node)
    node.pairs = taker.pairs(value)
    return node


@dataclass(slots=True, eq=False)
class _Set(Node):
    cls: type
    items: list[Any]

    def put(self, putter: Putter, old: Any) -> Any:
        return self.cls(putter.value(item, None) for item in self.items)

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", len(self.items), len(other.items)  # items have no order to compare in


def take_set(taker: Taker, value: Any) -> Any:
    if all(type(item) in ATOMS for item in value):
        return taker.remember(value, Plain(value.copy()))
    return taker.remember(value, _Set(type(value), taker.items(value)))


# ----------------------------------------------------------------------------------------------------------
# Functions, methods and weak references.
# ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Method(Node):
    """A method bound to a saved object."""

    function: Any
    owner: Any

    def put(self, putter: Putter, old: Any) -> Any:
        owner = putter.value(self.owner, getattr(old, "__self__", None))
        if isinstance(self.function, str):
            return getattr(owner, self.function)
        return types.MethodType(self.function, owner)


def take_method(taker: Taker, value: Any) -> Any:
    owner = value.__self__
    if owner is None or isinstance(owner, (type, types.ModuleType)):
        return value
    function = getattr(value, "__func__", value.__name__)
    return taker.remember(value, _Method(function, taker.value(owner)))


@dataclass(slots=True, eq=False)
class _Function(Node):
    """A closure. Its variables are a part of the state, and its code is not."""

    name: str
    function: Any
    cells: list[Any] = field(default_factory=list)

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is types.FunctionType and _full_name(old) == self.name and putter.reuse(old):
            target = old
        elif self.function is None:
            raise CannotCopy(f"the function {self.name} of the state no longer exists in the env")
        else:
            old, cells = self.function, tuple(types.CellType() for _ in self.cells)
            target = types.FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__, cells)
            target.__kwdefaults__ = old.__kwdefaults__
        putter.begin(self, target)
        for cell, node in zip(target.__closure__ or (), self.cells, strict=True):
            value = putter.value(node, None if node is None else _contents(cell))
            if value is not EMPTY:
                cell.cell_contents = value
        return target

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield f" ({self.name})", self.cells, other.cells

    def __reduce__(self) -> Any:
        return _Function, (self.name, None), (None, {"cells": self.cells})


def take_function(taker: Taker, value: Any) -> Any:
    if value.__closure__ is None:
        return value
    node = _Function(_full_name(value), value)
    taker.remember(value, node)
    lenient, taker.lenient = taker.lenient, True  # its variables need not belong to the env
    node.cells = [taker.value(_contents(cell)) for cell in value.__closure__]
    taker.lenient = lenient
    return node


def _full_name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}"


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


class _Empty(enum.Enum):
    EMPTY = "a variable that has no value yet"


EMPTY = _Empty.EMPTY


@dataclass(slots=True, eq=False)
class _Weak(Node):
    target: Any

    def put(self, putter: Putter, old: Any) -> Any:
        target = putter.value(self.target, old() if isinstance(old, weakref.ref) else None)
        return weakref.ref(target)


def take_weak(taker: Taker, value: Any) -> Any:
    target = value()
    return value if target is None else _Weak(taker.value(target))


# ----------------------------------------------------------------------------------------------------------
# Generators of random numbers: NumPy's and Python's.
# ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Generator(Node):
    """A `numpy.random.Generator`, with the node of its bit generator. states.cc makes such nodes, too."""

    cls: type
    bits: Any

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is not self.cls:
            return self.cls(putter.value(self.bits, None))
        before = old.bit_generator
        bits = putter.value(self.bits, before)
        return old if bits is before and putter.reuse(old) else self.cls(bits)


def take_generator(taker: Taker, value: Any) -> Any:
    bits = value.bit_generator
    node = Generator(type(value), taker.memo.get(id(bits)) or take_bits(taker, bits))
    taker.memo[id(value)] = node
    return node


@dataclass(slots=True, eq=False)
class BitGenerator(Node):
    """A bit generator. Its seed sequence is shared, as only the number of spawned children changes.

    states.cc makes such nodes, too, and calls `apply_to`.
    """

    cls: type
    state: Any
    sequence: Any
    num_spawned: int

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is not self.cls or not putter.reuse(old):
            old = self.cls()
        self.apply_to(old)
        return old

    def apply_to(self, old: Any) -> None:
        """Restores the state of a bit generator of this class."""
        present, sequence = old.seed_seq, self.sequence
        if sequence is None or (
            (present is sequence or _seed(present) == _seed(sequence))
            and present.n_children_spawned == self.num_spawned
        ):
            old.state = self.state
        else:  # unpickling does the same; a new bit generator would take much longer
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


def take_bits(taker: Taker, value: Any) -> Any:
    sequence = value.seed_seq
    if type(sequence) is np.random.SeedSequence:
        node = BitGenerator(type(value), value.state, sequence, sequence.n_children_spawned)
    else:
        node = BitGenerator(type(value), value.state, None, 0)
    taker.memo[id(value)] = node
    return node


@dataclass(slots=True, eq=False)
class _Random(Node):
    """A `random.Random` or `numpy.random.RandomState`."""

    cls: type
    state: Any

    def put(self, putter: Putter, old: Any) -> Any:
        target = old if type(old) is self.cls and putter.reuse(old) else self.cls()
        if isinstance(target, np.random.RandomState):
            target.set_state(self.state)
        else:
            target.setstate(self.state)
        return target


def take_random(taker: Taker, value: Any) -> Any:
    state = value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else value.getstate()
    return taker.remember(value, _Random(type(value), state))


# ----------------------------------------------------------------------------------------------------------
# Objects of Python classes, and objects with pickle support.
# ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Object(Node):
    cls: type
    fields: Fields = NOTHING

    def put(self, putter: Putter, old: Any) -> Any:
        fits = type(old) is self.cls and putter.reuse(old)
        target = old if fits else object.__new__(self.cls)
        putter.begin(self, target)
        putter.fields(target, self.fields)
        return target

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.cls, other.cls
        yield from compare_fields(self.fields, other.fields)


def take_object(taker: Taker, value: Any) -> Any:
    node = _Object(type(value))
    taker.remember(value, node)
    node.fields = taker.fields(value)
    return node


def is_ordinary(kind: type, value: Any) -> bool:
    """Returns whether an object's attributes are its whole state.

    Gymnasium's `EzPickle` is ignored: it rebuilds objects from constructor arguments, without their state.
    """
    for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__"):
        method = getattr(kind, name, None)
        is_own = method is not getattr(object, name, None)
        if is_own and getattr(method, "__qualname__", "") != f"EzPickle.{name}":
            return False
    if kind.__new__ is not object.__new__ or not (hasattr(value, "__dict__") or slots_of(kind)):
        return False
    try:
        object.__reduce_ex__(value, 2)  # raises TypeError for objects with state in C
    except TypeError:
        return False
    except Exception:
        return True  # an `EzPickle` without recorded arguments
    return True


class _Reduced(Node):
    """An object that is rebuilt as by pickle, from the result of `__reduce_ex__`."""

    __slots__ = ("arguments", "function", "items", "pairs", "setter", "state")

    function: Any
    arguments: list[Any]
    state: Any
    items: list[Any]
    pairs: list[tuple[Any, Any]]
    setter: Any

    def put(self, putter: Putter, old: Any) -> Any:
        target = self.function(*putter.items(self.arguments, ()))
        putter.begin(self, target)
        state = putter.value(self.state, None)
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
        for item in putter.items(self.items, ()):
            target.append(item)
        for key, value in self.pairs:
            target[putter.value(key, None)] = putter.value(value, None)
        return target


def take_reduced(taker: Taker, value: Any) -> Any:
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:
        raise CannotCopy(f"{name_of(type(value))} can't be copied ({error})") from error
    if isinstance(reduced, str):
        return value  # the name of a global
    function, arguments, state, items, pairs, setter = (*reduced, *[None] * (6 - len(reduced)))
    node = _Reduced()
    taker.remember(value, node)
    taker.remember(reduced, node)  # keeps the temporary state alive, and so its id
    node.function, node.setter = function, setter
    node.arguments = taker.items(arguments)
    node.state = taker.value(state)
    node.items = taker.items(items or ())
    node.pairs = taker.pairs(dict(pairs or ()))
    return node


def name_of(kind: type) -> str:
    module = getattr(kind, "__module__", "builtins")  # some classes of SWIG lack it
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


# ----------------------------------------------------------------------------------------------------------
# Gymnasium's spaces.
# ----------------------------------------------------------------------------------------------------------

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

    def put(self, putter: Putter, old: Any) -> Any:
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
            space._np_random = putter.value(generator, space._np_random)
        return old

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.generators, other.generators


def take_space(taker: Taker, value: Any) -> Any:
    if type(value) in _SIMPLE_SPACES and value._np_random is None:
        known = taker.shared.get(id(value))
        if known is None:
            known = taker.shared[id(value)] = value, Space(value, None)
        return known[1]
    return taker.remember(value, Space(value, [taker.value(space._np_random) for space in _spaces_in(value)]))


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


# ----------------------------------------------------------------------------------------------------------
# pygame's surfaces.
# ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Picture(Node):
    """A pygame surface, such as a sprite. It is shared, as envs replace surfaces and do not draw on them."""

    surface: Any
    is_drawn = True

    def put(self, putter: Putter, old: Any) -> Any:
        return self.surface

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.surface.get_size(), other.surface.get_size()

    def __reduce__(self) -> Any:
        pygame: Any = importlib.import_module("pygame")
        pixels = pygame.image.tobytes(self.surface, "RGBA")
        return _picture, (pixels, self.surface.get_size(), self.surface.get_flags())


def _picture(pixels: bytes, size: tuple[int, int], flags: int) -> Picture:
    pygame: Any = importlib.import_module("pygame")
    surface = pygame.Surface(size, flags, 32)
    surface.blit(pygame.image.frombytes(pixels, size, "RGBA"), (0, 0))
    return Picture(surface)


def take_picture(taker: Taker, value: Any) -> Any:
    pygame: Any = importlib.import_module("pygame")
    if pygame.display.get_init() and value is pygame.display.get_surface():
        return KEPT
    return taker.remember(value, Picture(value))
