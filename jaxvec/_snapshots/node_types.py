"""The kinds of objects that snapshots copy."""

from __future__ import annotations

import copy
import enum
import importlib
import marshal
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

from jaxvec._snapshots.nodes import (
    ATOMS,
    KEPT,
    CannotCopy,
    Fields,
    Node,
    Putter,
    Taker,
    compare_fields,
    slots_of,
)

# ----------------------------------------------------------------------------------------------------------
# Sets, and large containers that hardly ever change, such as tables of transitions, of atoms only.
# ----------------------------------------------------------------------------------------------------------

LARGE = 8  # entries
_MAX_DEPTH = 32  # no table is as deep; what holds itself is, and is taken part by part


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


def take_plain(taker: Taker, value: Any) -> Plain | None:
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


class Array(Node):
    """An array that has its memory."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def put(self, putter: Putter, old: Any) -> Any:
        return _copy(self.array)


class _Constant(Node):
    """An array in memory that nobody can write to."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def put(self, putter: Putter, old: Any) -> Any:
        return self.array


class _View(Node):
    """An array in the memory of another one."""

    __slots__ = ("dtype", "offset", "shape", "strides", "whole")

    whole: Array
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def put(self, putter: Putter, old: Any) -> Any:
        whole = putter.value(self.whole, None)
        flat = whole.reshape(-1, order="A").view(np.uint8)
        return np.ndarray(self.shape, self.dtype, flat, self.offset, self.strides)


class _Objects(Node):
    """An array of Python objects."""

    __slots__ = ("items", "shape")

    shape: tuple[int, ...]
    items: list[Any]

    def put(self, putter: Putter, old: Any) -> Any:
        array = np.empty(len(self.items), object)
        same = isinstance(old, np.ndarray) and old.shape == self.shape
        olds = old.ravel().tolist() if same else [None] * len(self.items)
        for number, item in enumerate(self.items):
            array[number] = putter.value(item, olds[number])
        return array.reshape(self.shape)


class _Elsewhere(Node):
    """An array in memory that is not NumPy's: what was there is written there again."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def put(self, putter: Putter, old: Any) -> Any:
        fits = _is_elsewhere(old) and (old.shape, old.dtype) == (self.array.shape, self.array.dtype)
        if fits and putter.reuse(old):  # what were several may be one array now
            if old.flags.writeable:
                np.copyto(old, self.array)
            return old
        memory = bytearray(self.array.tobytes())  # not NumPy's either, so it is taken the same way again
        return np.ndarray(self.array.shape, self.array.dtype, memory)


def _owner(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _copy(array: Any) -> Any:
    """Returns a copy that is as writeable; an env may lock its own array and unlock it for a change."""
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
    node: Any
    if value.dtype.hasobject:
        if value.dtype != object:
            raise CannotCopy("it is an array of records with Python objects in them")
        node = _Objects()
        taker.remember(value, node)
        node.shape = value.shape
        node.items = taker.items(value.ravel().tolist())
        return node
    base = value.base
    if base is None:
        node = Array(_copy(value))
    elif _is_constant(value):
        node = _Constant(value)
    elif _is_elsewhere(value):
        node = _Elsewhere(value.copy())
    else:
        node = _take_view(taker, value, _owner(value))
    taker.remember(value, node)
    return node


def _take_view(taker: Taker, value: Any, owner: Any) -> Any:
    dense = owner.flags.forc and owner.size
    if (
        not dense
        or not owner.flags.writeable
        or owner.nbytes > 64 * max(value.nbytes, 64)
        or owner.dtype.hasobject
    ):
        return Array(value.copy("K"))  # such as one number of a table
    node = _View()
    node.whole = taker.value(owner)
    node.dtype, node.shape, node.strides = value.dtype, value.shape, value.strides
    node.offset = value.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return node


# ----------------------------------------------------------------------------------------------------------
# Python's containers.
# ----------------------------------------------------------------------------------------------------------


class _List(Node):
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, putter: Putter, old: Any) -> Any:
        target: list[Any] = []
        putter.begin(self, target)
        target.extend(putter.items(self.items, old if type(old) is list else ()))
        return target


def take_list(taker: Taker, value: list[Any]) -> Any:
    if len(value) > LARGE and (plain := take_plain(taker, value)) is not None:
        taker.remember(value, plain)
        return plain
    node = _List()
    taker.remember(value, node)
    node.items = taker.items(value)
    return node


class _Deque(Node):
    __slots__ = ("items", "maxlen")

    def __init__(self, maxlen: int | None) -> None:
        self.items: list[Any] = []
        self.maxlen = maxlen

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


class _Tuple(Node):
    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def put(self, putter: Putter, old: Any) -> Any:
        return tuple(putter.items(self.items, old if type(old) is tuple else ()))


def take_tuple(taker: Taker, value: tuple[Any, ...]) -> Any:
    items = taker.items(value)
    if all(item is one for item, one in zip(items, value, strict=True)):
        return value
    node = _Tuple(items)
    taker.remember(value, node)
    return node


class _Dict(Node):
    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

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
        taker.remember(value, plain)
        return plain
    node = _Dict()
    taker.remember(value, node)
    node.pairs = taker.pairs(value)
    return node


class _Set(Node):
    __slots__ = ("items", "kind")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind = kind
        self.items = items

    def put(self, putter: Putter, old: Any) -> Any:
        return self.kind(putter.value(item, None) for item in self.items)

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", len(self.items), len(other.items)  # which have no order


def take_set(taker: Taker, value: Any) -> Any:
    if all(type(item) in ATOMS for item in value):
        node: Any = Plain(value.copy())
    else:
        node = _Set(type(value), taker.items(value))
    taker.remember(value, node)
    return node


# ----------------------------------------------------------------------------------------------------------
# Functions, methods and weak references.
# ----------------------------------------------------------------------------------------------------------


class _Method(Node):
    """A method bound to something that a snapshot holds."""

    __slots__ = ("function", "owner")

    def __init__(self, function: Any, owner: Any) -> None:
        self.function = function
        self.owner = owner

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
    node = _Method(function, taker.value(owner))
    taker.remember(value, node)
    return node


class _Function(Node):
    """A function that closes over variables: these are a part of the state, and its code is not."""

    __slots__ = ("cells", "function", "name")

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self.function = function
        self.cells: list[Any] = []

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is types.FunctionType and _full_name(old) == self.name and putter.reuse(old):
            target = old
        elif self.function is None:
            raise CannotCopy(f"the function {self.name} was there, and is not now")
        else:
            target = self.function
            target = types.FunctionType(
                target.__code__,
                target.__globals__,
                target.__name__,
                target.__defaults__,
                tuple(types.CellType() for _ in self.cells),
            )
            target.__kwdefaults__ = self.function.__kwdefaults__
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
    lenient, taker.lenient = taker.lenient, True  # what it closes over may be anybody's
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


class _Weak(Node):
    __slots__ = ("target",)

    def __init__(self, target: Any) -> None:
        self.target = target

    def put(self, putter: Putter, old: Any) -> Any:
        target = putter.value(self.target, old() if isinstance(old, weakref.ref) else None)
        return weakref.ref(target)


def take_weak(taker: Taker, value: Any) -> Any:
    target = value()
    return value if target is None else _Weak(taker.value(target))


# ----------------------------------------------------------------------------------------------------------
# Generators of random numbers: NumPy's and Python's.
# ----------------------------------------------------------------------------------------------------------


class Generator(Node):
    """NumPy's generator, and the node of its `bits`."""

    __slots__ = ("bits", "kind")

    def __init__(self, kind: type, bits: Any) -> None:
        self.kind = kind
        self.bits = bits

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is not self.kind:
            return self.kind(putter.value(self.bits, None))
        before = old.bit_generator
        bits = putter.value(self.bits, before)
        return old if bits is before and putter.reuse(old) else self.kind(bits)


def take_generator(taker: Taker, value: Any) -> Any:
    bits = value.bit_generator
    node = Generator(type(value), taker.memo.get(id(bits)) or take_bits(taker, bits))
    taker.memo[id(value)] = node
    return node


class BitGenerator(Node):
    """Has the sequence of seeds itself, of which nothing changes but how many children it has."""

    __slots__ = ("children", "kind", "sequence", "state")

    def __init__(self, kind: type, state: Any, sequence: Any, children: int) -> None:
        self.kind = kind
        self.state = state
        self.sequence = sequence
        self.children = children

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is not self.kind or not putter.reuse(old):
            old = self.kind()
        self.give(old)
        return old

    def give(self, old: Any) -> None:
        """Gives one of this kind its state."""
        there, sequence = old.seed_seq, self.sequence
        if sequence is None or (
            (there is sequence or _seed(there) == _seed(sequence))
            and there.n_children_spawned == self.children
        ):
            old.state = self.state
        else:  # as unpickling does it; to make another generator takes much longer
            entropy, key, size = _seed(sequence)
            sequence = np.random.SeedSequence(
                entropy, spawn_key=key, pool_size=size, n_children_spawned=self.children
            )
            old.__setstate__((self.state, sequence))

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.kind, other.kind
        yield "", self.state, other.state
        yield "", (_seed(self.sequence), self.children), (_seed(other.sequence), other.children)


def _seed(sequence: Any) -> Any:
    """Returns what a sequence of seeds was made of; `None` if it is another's, of which nobody knows that."""
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


class _Random(Node):
    """Python's or NumPy's older generator."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: type, state: Any) -> None:
        self.kind = kind
        self.state = state

    def put(self, putter: Putter, old: Any) -> Any:
        target = old if type(old) is self.kind and putter.reuse(old) else self.kind()
        if isinstance(target, np.random.RandomState):
            target.set_state(self.state)
        else:
            target.setstate(self.state)
        return target


def take_random(taker: Taker, value: Any) -> Any:
    state = value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else value.getstate()
    node = _Random(type(value), state)
    taker.remember(value, node)
    return node


# ----------------------------------------------------------------------------------------------------------
# Objects of classes that are written in Python, and what says itself how it is copied.
# ----------------------------------------------------------------------------------------------------------


class _Object(Node):
    __slots__ = ("fields", "kind")

    kind: type
    fields: Fields

    def put(self, putter: Putter, old: Any) -> Any:
        fits = type(old) is self.kind and putter.reuse(old)
        target = old if fits else object.__new__(self.kind)
        putter.begin(self, target)
        putter.fields(target, self.fields)
        return target

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.kind, other.kind
        yield from compare_fields(self.fields, other.fields)


def take_object(taker: Taker, value: Any) -> Any:
    node = _Object()
    taker.remember(value, node)
    node.kind = type(value)
    node.fields = taker.fields(value)
    return node


def is_ordinary(kind: type, value: Any) -> bool:
    """Says whether all that an object holds is in its attributes.

    Those of `EzPickle` say that they are made anew from their constructor's arguments, without their state.
    """
    for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__"):
        method = getattr(kind, name, None)
        if method is not getattr(object, name, None) and _qualname(method) != f"EzPickle.{name}":
            return False
    if kind.__new__ is not object.__new__ or not (hasattr(value, "__dict__") or slots_of(kind)):
        return False
    try:
        object.__reduce_ex__(value, 2)  # which refuses where C holds something
    except TypeError:
        return False
    except Exception:
        return True  # `EzPickle` was never told its arguments
    return True


def _qualname(method: Any) -> str:
    return getattr(method, "__qualname__", "")


class _Reduced(Node):
    """What says itself how it is made anew, as for pickle."""

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
        # An object's attributes may be such as stay, so what is there is handed on.
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
    taker.remember(reduced, node)  # it lives as long as what was taken of it
    node.function, node.setter = function, setter
    node.arguments = taker.items(arguments)
    node.state = taker.value(state)
    node.items = taker.items(items or ())
    node.pairs = taker.pairs(dict(pairs or ()))
    return node


def name_of(kind: type) -> str:
    module = getattr(kind, "__module__", "builtins")  # which some of SWIG's lack
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


# ----------------------------------------------------------------------------------------------------------
# Gymnasium's spaces.
# ----------------------------------------------------------------------------------------------------------

_MAX_EQUAL_SPACES = 1000  # spaces that one is known to be equal to; some envs make one in each reset


class Space(Node):
    """A space, which never changes, but for the random numbers that `sample` draws.

    Attributes:
        generators: of those, of the space and all that are in it; `None` if it is a simple one that has none.
    """

    __slots__ = ("alike", "generators", "space")

    def __init__(self, space: Any, generators: list[Any] | None) -> None:
        self.space = space
        self.alike = {id(space): space}  # and others that were found to be equal, which takes long
        self.generators = generators

    def __reduce__(self) -> Any:
        return Space, (self.space, self.generators)

    def put(self, putter: Putter, old: Any) -> Any:
        if id(old) not in self.alike:
            if type(old) is not type(self.space) or old != self.space:
                old = copy.deepcopy(self.space)
            if len(self.alike) >= _MAX_EQUAL_SPACES:
                self.alike = {id(self.space): self.space}
            self.alike[id(old)] = old
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
        known = taker.shared.get(id(value))  # which keeps the space, so the number is its own
        if known is None:
            known = taker.shared[id(value)] = value, Space(value, None)
        return known[1]
    node = Space(value, [taker.value(space._np_random) for space in _spaces_in(value)])
    taker.remember(value, node)
    return node


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


class Picture(Node):
    """A surface of pygame, such as a sprite's, which is shared: envs replace it, and don't draw on it."""

    __slots__ = ("surface",)
    is_drawn = True

    def __init__(self, surface: Any) -> None:
        self.surface = surface

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
    node = Picture(value)
    taker.remember(value, node)
    return node
