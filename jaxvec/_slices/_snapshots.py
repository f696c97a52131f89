"""Python objects as values: what they hold is copied out, and put back into them or into others like them.

`copy.deepcopy` makes new objects. Here those that are there keep their identity, because closures, renderers
and memory outside of Python may refer to them: only what they hold is put back.
"""

from __future__ import annotations

import copy
import enum
import importlib
import io
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import gymnasium
import numpy as np

Taking: TypeAlias = Callable[["Taker", Any], Any]


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


# What can't change, or is the same wherever it is: classes, functions and modules too, as in `copy.deepcopy`.
_ATOMS: set[type] = {
    *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, type),
    *(types.ModuleType, types.CodeType, property, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.MappingProxyType),
    *(kind for kind in vars(np).values() if isinstance(kind, type) and issubclass(kind, np.generic)),
} - {np.void, np.object_}
# Of Gymnasium's envs, what their constructors were told. It is the same for all that one function makes.
_TOLD = frozenset(
    {"spec", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs", "metadata", "_metadata"}
)

_TOLD_WRAPPERS = _TOLD | {"env"}


class Taker:
    """Takes one snapshot. Whatever is met twice is one node, so aliases stay aliases.

    Args:
        layers: an env's wrappers and the env, which stand for themselves.
        lenient: leave what is no value as it is, in place of an error.
    """

    def __init__(self, layers: list[Any], *, lenient: bool = False) -> None:
        self.memo: dict[int, Any] = dict(zip(map(id, layers), _layer_nodes(len(layers)), strict=True))
        self.lenient = lenient
        self.plains = _plains_of(layers[-1]) if layers else {}
        self._alive: list[Any] = []  # or another object may get the `id` of one that is gone

    def value(self, value: Any) -> Any:
        """Returns an atom as it is, and a node for all else."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        node = self.memo.get(id(value))
        if node is not None:
            return node
        taking = _TAKINGS.get(kind)
        if taking is None:
            taking = _TAKINGS[kind] = _find(kind, value)
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

    def layer(self, layer: Any) -> Fields:
        """Takes the attributes of an env or a wrapper."""
        if type(layer) is gymnasium.wrappers.PassiveEnvChecker:
            return NOTHING  # it warns once, and changes nothing
        return self.fields(layer, _TOLD_WRAPPERS if isinstance(layer, gymnasium.Wrapper) else _TOLD)

    def fields(self, owner: Any, without: frozenset[str] = frozenset()) -> Fields:
        """Takes the attributes of an object."""
        held = _attributes(owner)
        atoms: dict[str, Any] = {}
        nodes: dict[str, Any] = {}
        name = ""
        try:
            for name, value in held.items():
                if type(value) in _ATOMS:
                    atoms[name] = value
                elif name not in without:
                    node = self.value(value)
                    nodes[name] = KEPT if type(node) is _Picture and name in _CANVASES else node
        except CannotCopy as error:
            error.path.insert(0, name)
            raise
        return atoms, nodes, len(held)

    def items(self, values: Any) -> list[Any]:
        """Takes the items of a list or the like."""
        taken: list[Any] = []
        for number, value in enumerate(values):
            if type(value) in _ATOMS:
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


# Attributes that are atoms, those that are not, and how many there were, with those that are not taken; -1
# where others are nobody's concern.
Fields: TypeAlias = tuple[dict[str, Any], dict[str, Any], int]
NOTHING: Fields = {}, {}, -1


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
        done = self._done
        if id(node) in done:
            return done[id(node)]
        value = node.put(self, old)
        done[id(node)] = value
        return value

    def begin(self, node: Node, value: Any) -> None:
        """Notes what a node stands for, before that has all that it holds, which may refer to it."""
        self._done[id(node)] = value

    def reuse(self, old: Any) -> bool:
        """Says whether what is there may be what a node stands for, which is so once."""
        if id(old) in self._used:
            return False
        self._used.add(id(old))
        return True

    def layer(self, layer: Any, fields: Fields) -> None:
        """Gives an env or a wrapper its attributes."""
        self.fields(layer, fields, _TOLD_WRAPPERS)

    def fields(self, owner: Any, fields: Fields, without: frozenset[str] = frozenset()) -> None:
        """Gives an object its attributes, and takes away what it had not."""
        atoms, nodes, count = fields
        held = _attributes(owner)
        value, get = self.value, held.get
        fresh = {name: value(node, get(name)) for name, node in nodes.items()} if nodes else nodes
        if _slots(type(owner)):
            for name, one in (atoms | fresh).items():
                object.__setattr__(owner, name, one)
            held = _attributes(owner)
        else:
            held.update(atoms)
            held.update(fresh)
        if len(held) != count >= 0:
            for name in held.keys() - atoms.keys() - nodes.keys() - without:
                object.__delattr__(owner, name)


def _attributes(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object: its own `dict`, where it has no slots."""
    slots = _slots(type(owner))
    if not slots:
        return owner.__dict__
    held = dict(getattr(owner, "__dict__", {}))
    for name in slots:
        if hasattr(owner, name):
            held[name] = getattr(owner, name)
    return held


def compare_fields(one: Fields, other: Fields) -> Iterator[tuple[str, Any, Any]]:
    """Yields attributes of two objects with their names."""
    one_held, other_held = one[0] | one[1], other[0] | other[1]
    for name in {**one_held, **other_held}:
        yield f".{name}", one_held.get(name, ABSENT), other_held.get(name, ABSENT)


class _Absent:
    pass


ABSENT = _Absent()


def _slots(kind: type, known: dict[type, tuple[str, ...]] = {}) -> tuple[str, ...]:  # noqa: B006
    found = known.get(kind)
    if found is None:
        names: list[str] = []
        for base in kind.__mro__:
            own = vars(base).get("__slots__", ())
            for name in (own,) if isinstance(own, str) else own:
                if name not in ("__dict__", "__weakref__"):
                    hidden = name.startswith("__") and not name.endswith("__")
                    names.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
        found = known[kind] = tuple(names)
    return found


# --- the kinds of nodes -----------------------------------------------------------------------


class _Layer(Node):
    """The env, or one of its wrappers."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def put(self, putter: Putter, old: Any) -> Any:
        return putter.layers[self.number]


def _layer_nodes(count: int, known: list[_Layer] = []) -> list[_Layer]:  # noqa: B006
    while len(known) < count:
        known.append(_Layer(len(known)))
    return known[:count]


class _Kept(Node):
    """What belongs to its env and holds nothing of its state: a window, a clock, a lock that nobody holds."""

    __slots__ = ()

    def put(self, putter: Putter, old: Any) -> Any:
        return old

    def __reduce__(self) -> str:
        return "KEPT"


KEPT = _Kept()


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


class _Array(Node):
    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def put(self, putter: Putter, old: Any) -> Any:
        return self.array.copy("K")


class _View(Node):
    """An array in the memory of another one."""

    __slots__ = ("dtype", "offset", "shape", "strides", "whole")

    whole: _Array
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
        if _is_elsewhere(old) and (old.shape, old.dtype) == (self.array.shape, self.array.dtype):
            if old.flags.writeable:
                np.copyto(old, self.array)
            return old
        return self.array.copy()


class _List(Node):
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, putter: Putter, old: Any) -> Any:
        target: list[Any] = []
        putter.begin(self, target)
        target.extend(_put_items(putter, self.items, old if type(old) is list else ()))
        return target


class _Deque(Node):
    __slots__ = ("items", "maxlen")

    def __init__(self, maxlen: int | None) -> None:
        self.items: list[Any] = []
        self.maxlen = maxlen

    def put(self, putter: Putter, old: Any) -> Any:
        target: deque[Any] = deque(maxlen=self.maxlen)
        putter.begin(self, target)
        target.extend(_put_items(putter, self.items, old if type(old) is deque else ()))
        return target


class _Tuple(Node):
    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def put(self, putter: Putter, old: Any) -> Any:
        return tuple(_put_items(putter, self.items, old if type(old) is tuple else ()))


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


class _Plain(Node):
    """A set, or a large container, of atoms only."""

    __slots__ = ("copy",)

    def __init__(self, copy: Any) -> None:
        self.copy = copy

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is type(self.copy) and old == self.copy and putter.reuse(old):
            return old
        return _copy_plain(self.copy)


# What is drawn on anew for each picture, by the names that envs use.
_CANVASES = frozenset({"canvas", "screen", "surf", "surface", "window", "window_surface"})


class _Picture(Node):
    """A surface of pygame, such as a sprite's, which is shared: envs replace it, and don't draw on it."""

    __slots__ = ("surface",)

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


def _picture(pixels: bytes, size: tuple[int, int], flags: int) -> _Picture:
    pygame: Any = importlib.import_module("pygame")
    surface = pygame.Surface(size, flags, 32)
    surface.blit(pygame.image.frombytes(pixels, size, "RGBA"), (0, 0))
    return _Picture(surface)


def _take_picture(taker: Taker, value: Any) -> Any:
    pygame: Any = importlib.import_module("pygame")
    if pygame.display.get_init() and value is pygame.display.get_surface():
        return KEPT
    node = _Picture(value)
    taker.remember(value, node)
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
        target = self.function(*_put_items(putter, self.arguments, ()))
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
        for item in _put_items(putter, self.items, ()):
            target.append(item)
        for key, value in self.pairs:
            target[putter.value(key, None)] = putter.value(value, None)
        return target


def _put_items(putter: Putter, items: list[Any], olds: Any) -> list[Any]:
    if len(olds) != len(items):
        olds = [None] * len(items)
    return [
        putter.value(item, old) if isinstance(item, Node) else item
        for item, old in zip(items, olds, strict=True)
    ]


# --- random numbers ---------------------------------------------------------------------------


class _BitGenerator(Node):
    __slots__ = ("kind", "sequence", "state")

    def __init__(self, bits: Any) -> None:
        self.kind = type(bits)
        self.state = bits.state
        self.sequence = _sequence(bits)

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is self.kind and _sequence(old) == self.sequence and putter.reuse(old):
            old.state = self.state
            return old
        if self.sequence is None:
            bits = self.kind()
        else:
            entropy, key, size, spawned = self.sequence
            bits = self.kind(
                np.random.SeedSequence(entropy, spawn_key=key, pool_size=size, n_children_spawned=spawned)
            )
        bits.state = self.state
        return bits


def _sequence(bits: Any) -> Any:
    """Returns what a bit generator's children depend on."""
    sequence = bits.seed_seq
    if type(sequence) is not np.random.SeedSequence:
        return None
    return sequence.entropy, sequence.spawn_key, sequence.pool_size, sequence.n_children_spawned


class _Generator(Node):
    __slots__ = ("bits", "kind")

    def __init__(self, kind: type, bits: Any) -> None:
        self.kind = kind
        self.bits = bits

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is self.kind:
            bits = putter.value(self.bits, old.bit_generator)
            if bits is old.bit_generator and putter.reuse(old):
                return old
        else:
            bits = putter.value(self.bits, None)
        return self.kind(bits)


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


# --- spaces -----------------------------------------------------------------------------------


class _Space(Node):
    """A space, which never changes, but for the random numbers that `sample` draws."""

    __slots__ = ("alike", "generators", "space")

    def __init__(self, space: Any, generators: list[Any]) -> None:
        self.space = self.alike = space  # and another env's, that was found to be equal: that costs 0.1 ms
        self.generators = generators

    def __reduce__(self) -> Any:
        return _Space, (self.space, self.generators)

    def put(self, putter: Putter, old: Any) -> Any:
        if old is not self.space and old is not self.alike:
            if type(old) is not type(self.space) or old != self.space:
                old = copy.deepcopy(self.space)
            else:
                self.alike = old
        if self.generators is _NO_GENERATORS:
            old._np_random = None
            return old
        for space, generator in zip(_spaces_in(old), self.generators, strict=True):
            space._np_random = putter.value(generator, space._np_random)
        return old

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.generators, other.generators


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


_NO_GENERATORS: list[Any] = [None]
_SIMPLE_SPACES = {
    getattr(gymnasium.spaces, name) for name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
}


# --- how each kind is taken -------------------------------------------------------------------


def _take_atom(taker: Taker, value: Any) -> Any:
    return value


def _take_kept(taker: Taker, value: Any) -> Any:
    return KEPT


def _take_array(taker: Taker, value: Any) -> Any:
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
        node = _Array(value.copy("K")) if value.flags.writeable else None
        if node is None:
            return _Constant(value)
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
        return _Array(value.copy("K"))  # such as one number of a table
    node = _View()
    node.whole = taker.value(owner)
    node.dtype, node.shape, node.strides = value.dtype, value.shape, value.strides
    node.offset = value.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return node


def _owner(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not _owner(value).flags.owndata


class _Constant(Node):
    """An array that nobody can write to."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def put(self, putter: Putter, old: Any) -> Any:
        return self.array


def _take_list(taker: Taker, value: list[Any]) -> Any:
    if len(value) > _LARGE and (plain := _take_plain(taker, value)) is not None:
        taker.remember(value, plain)
        return plain
    node = _List()
    taker.remember(value, node)
    node.items = taker.items(value)
    return node


def _take_dict(taker: Taker, value: dict[Any, Any]) -> Any:
    if len(value) > _LARGE and (plain := _take_plain(taker, value)) is not None:
        taker.remember(value, plain)
        return plain
    node = _Dict()
    taker.remember(value, node)
    node.pairs = taker.pairs(value)
    return node


def _take_tuple(taker: Taker, value: tuple[Any, ...]) -> Any:
    items = taker.items(value)
    if all(item is one for item, one in zip(items, value, strict=True)):
        return value
    node = _Tuple(items)
    taker.remember(value, node)
    return node


def _take_deque(taker: Taker, value: deque[Any]) -> Any:
    node = _Deque(value.maxlen)
    taker.remember(value, node)
    node.items = taker.items(value)
    return node


def _take_set(taker: Taker, value: Any) -> Any:
    if all(type(item) in _ATOMS for item in value):
        node: Any = _Plain(value.copy())
    else:
        node = _Set(type(value), taker.items(value))
    taker.remember(value, node)
    return node


def _take_method(taker: Taker, value: Any) -> Any:
    owner = value.__self__
    if owner is None or isinstance(owner, (type, types.ModuleType)):
        return value
    function = getattr(value, "__func__", value.__name__)
    node = _Method(function, taker.value(owner))
    taker.remember(value, node)
    return node


def _take_function(taker: Taker, value: Any) -> Any:
    if value.__closure__ is None:
        return value
    node = _Function(_full_name(value), value)
    taker.remember(value, node)
    lenient, taker.lenient = taker.lenient, True  # what it closes over may be anybody's
    node.cells = [taker.value(_contents(cell)) for cell in value.__closure__]
    taker.lenient = lenient
    return node


def _take_weak(taker: Taker, value: Any) -> Any:
    target = value()
    return value if target is None else _Weak(taker.value(target))


def _take_generator(taker: Taker, value: Any) -> Any:
    node = _Generator(type(value), taker.value(value.bit_generator))
    taker.memo[id(value)] = node
    return node


def _take_bits(taker: Taker, value: Any) -> Any:
    node = _BitGenerator(value)
    taker.memo[id(value)] = node
    return node


def _take_random(taker: Taker, value: Any) -> Any:
    state = value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else value.getstate()
    node = _Random(type(value), state)
    taker.remember(value, node)
    return node


def _take_space(taker: Taker, value: Any) -> Any:
    if type(value) in _SIMPLE_SPACES and value._np_random is None:
        known = taker.plains.get(id(value))  # which keeps the space, so the number is its own
        if known is None:
            known = taker.plains[id(value)] = value, _Space(value, _NO_GENERATORS)
        return known[1]
    node = _Space(value, [taker.value(space._np_random) for space in _spaces_in(value)])
    taker.remember(value, node)
    return node


def _take_object(taker: Taker, value: Any) -> Any:
    node = _Object()
    taker.remember(value, node)
    node.kind = type(value)
    node.fields = taker.fields(value)
    return node


def _take_reduced(taker: Taker, value: Any) -> Any:
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:
        raise CannotCopy(f"{_name(type(value))} can't be copied ({error})") from error
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


def _refuse(what: str) -> Taking:
    def refuse(taker: Taker, value: Any) -> Any:
        raise CannotCopy(f"it is {what}")

    return refuse


def _name(kind: type) -> str:
    module = getattr(kind, "__module__", "builtins")  # which some of SWIG's lack
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


# --- large containers that hardly ever change, such as tables of transitions -------------------

_LARGE = 8  # entries
_plains: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def _plains_of(env: Any) -> dict[int, tuple[Any, Any]]:
    try:
        found = _plains.get(env)
        if found is None:
            found = _plains[env] = {}
    except TypeError:  # it has no hash
        found = {}
    return found


def _take_plain(taker: Taker, value: Any) -> _Plain | None:
    """Takes a container of atoms. While it stays equal, all snapshots of an env share one copy."""
    known = taker.plains.get(id(value))
    if known is not None and known[0] is value and known[1].copy == value:
        return known[1]
    try:
        node = _Plain(_copy_plain(value))
    except _NotPlain:
        return None
    taker.plains[id(value)] = value, node
    return node


def _copy_plain(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is list:
        return [one if type(one) in _ATOMS else _copy_plain(one) for one in value]
    if kind is dict:
        return {
            key if type(key) in _ATOMS else _copy_plain(key): _copy_plain(one) for key, one in value.items()
        }
    if kind is tuple:
        if all(type(one) in _ATOMS for one in value):
            return value
        return tuple(_copy_plain(one) for one in value)
    if kind in (set, frozenset) and all(type(one) in _ATOMS for one in value):
        return value.copy()
    raise _NotPlain


class _NotPlain(Exception):
    pass


# --- which kind is taken how ------------------------------------------------------------------

NAMED: dict[str, Taking] = {}
"""Of classes in other libraries, and so of their subclasses, by module and name."""

_KEPT_NAMES = (
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer",
    "mujoco.renderer.Renderer",
    "pygame.font.Font",
    "pygame.freetype.Font",
    "pygame.time.Clock",
)
NAMED.update(dict.fromkeys(_KEPT_NAMES, _take_kept))
NAMED["gymnasium.envs.registration.EnvSpec"] = _take_atom
NAMED["pygame.surface.Surface"] = _take_picture
NAMED["_thread.lock"] = NAMED["_thread.RLock"] = _take_kept
NAMED["_io._IOBase"] = NAMED["io.IOBase"] = _refuse("an open file")
NAMED["mmap.mmap"] = NAMED["numpy.memmap"] = NAMED["numpy.core.memmap.memmap"] = _refuse("a mapped file")
NAMED["_socket.socket"] = _refuse("a socket")
NAMED["threading.Thread"] = _refuse("a thread")
NAMED["subprocess.Popen"] = NAMED["multiprocessing.process.BaseProcess"] = _refuse("a process")
NAMED["builtins.generator"] = _refuse("a generator in the middle of its work")

_TAKINGS: dict[type, Taking] = {
    np.ndarray: _take_array,
    list: _take_list,
    dict: _take_dict,
    tuple: _take_tuple,
    deque: _take_deque,
    set: _take_set,
    frozenset: _take_set,
    types.FunctionType: _take_function,
    types.MethodType: _take_method,
    types.BuiltinMethodType: _take_method,
    types.MethodWrapperType: _take_method,
    weakref.ref: _take_weak,
    io.BytesIO: _take_reduced,
    io.StringIO: _take_reduced,
}


def _find(kind: type, value: Any) -> Taking:
    """Returns how values of a class are taken that was not seen yet."""
    for base in kind.__mro__:
        named = NAMED.get(f"builtins.{_name(base)}") or NAMED.get(_name(base))
        if named is not None:
            return named
    if kind is object or issubclass(kind, (type, enum.Enum, np.dtype, np.ufunc)):
        return _take_atom
    if issubclass(kind, gymnasium.Space):
        return _take_space
    if issubclass(kind, np.random.Generator):
        return _take_generator
    if issubclass(kind, np.random.BitGenerator):
        return _take_bits
    if kind in (random.Random, np.random.RandomState):
        return _take_random
    return _take_object if _is_ordinary(kind, value) else _take_reduced


def _is_ordinary(kind: type, value: Any) -> bool:
    """Says whether all that an object holds is in its attributes.

    Those of `EzPickle` say that they are made anew from their constructor's arguments, without their state.
    """
    for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__"):
        method = getattr(kind, name, None)
        if method is not getattr(object, name, None) and _qualname(method) != f"EzPickle.{name}":
            return False
    if kind.__new__ is not object.__new__ or not (hasattr(value, "__dict__") or _slots(kind)):
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
