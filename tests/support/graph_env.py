"""An env whose attributes are a random graph of objects, and whose steps change it through any path.

`GraphEnv` interprets a program: tuples of small ints that build, link, drop and change objects. Its
observation is a number that stands for all that can be seen in the graph: the values, which objects are
identical, and which arrays share memory. It is equal in all processes.
"""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import io
import itertools
import operator
import pathlib
import random
import re
import types
import uuid
import weakref
from functools import partial
from typing import Any
from zlib import crc32

import gymnasium
import numpy as np
from gymnasium import spaces
from support.graphs import KINDS, Data, DataSlots, Guarded, Number, Slotted, Thing, pygame

# ----------------------------------------------------------------------------------------------------------
# Description, parts and changes of an object
# ----------------------------------------------------------------------------------------------------------


_MISSING = object()


def attributes(value: Any) -> dict[str, Any]:
    held = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") else name
            if base.__module__ != "numpy" and (found := getattr(value, mangled, _MISSING)) is not _MISSING:
                held[mangled] = found
    return held


ATOMS = {int, bool, float, complex, str, bytes, type(None)}
_ITERATORS = (
    "list_iterator",
    "tuple_iterator",
    "dict_keyiterator",
    "list_reverseiterator",
    "_deque_iterator",
    "repeat",
)


def parts(value: Any) -> list[Any]:
    """Returns the objects that an object refers to, in an order that is equal in all processes."""
    if isinstance(value, type | types.ModuleType | enum.Enum | pathlib.PurePath | fractions.Fraction):
        return []
    if isinstance(value, weakref.ref):
        return []
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if not is_empty(cell)]
        return [
            *cells,
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *vars(value).values(),
        ]
    if isinstance(value, types.MethodType | types.BuiltinMethodType | types.MethodWrapperType):
        return [value.__self__]
    found: list[Any] = []
    if isinstance(value, dict | collections.UserDict):
        found = [each for pair in value.items() for each in pair]
    elif isinstance(value, set | frozenset):
        found = sorted((each for each in value if not hasattr(each, "__dict__")), key=repr)
    elif isinstance(value, list | tuple | collections.deque | type({}.values()) | type({}.items())):
        found = list(value)
    elif isinstance(value, np.ndarray):
        owner = owner_of(value)
        found += [owner] if isinstance(owner, bytearray | array.array) else []
    elif isinstance(value, partial):
        found = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, np.random.Generator):
        found = [value.bit_generator]
    elif isinstance(value, np.random.RandomState):
        found = [value._bit_generator]  # type: ignore[attr-defined]
    elif type(value).__name__ in _ITERATORS:
        found = [each for each in value.__reduce__()[1] if not callable(each)]
    elif isinstance(value, spaces.Space):
        return [] if value._np_random is None else [value._np_random]
    if isinstance(value, collections.defaultdict):
        found.append(value.default_factory)
    held = attributes(value)
    return [
        *found,
        *(held[name] for name in sorted(held) if not isinstance(value, random.Random) or name == "draws"),
    ]


def is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def shown(value: Any) -> str:
    """Returns a description of an object itself, without its parts."""
    kind = type(value)
    text = kind.__name__
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, np.ndarray):
        values = "objects" if value.dtype.hasobject else repr(value.tobytes())
        return f"{text} {value.dtype} {value.shape} {value.strides} {value.flags.writeable} {values}"
    if isinstance(value, np.generic):
        return f"{text} {value.dtype} {value.tobytes()!r}"
    if isinstance(value, bytearray | array.array):
        return f"{text} {value!r}"
    if isinstance(value, float | complex | int | str | bytes | range | slice | None | decimal.Decimal):
        own: Any = (
            int if isinstance(value, int) and kind is not bool else str if isinstance(value, str) else kind
        )
        return f"{text} {own.__repr__(value)}"
    if isinstance(value, np.random.BitGenerator):
        spawned = getattr(value.seed_seq, "n_children_spawned", None)
        return f"{text} {value.state} {spawned}"
    if isinstance(value, np.random.RandomState):
        return f"{text} {value.get_state()}"
    if isinstance(value, random.Random):
        return f"{text} {value.getstate()}"
    if pygame is not None and isinstance(value, pygame.Surface):
        pixels = pygame.image.tobytes(value, "RGBA")
        return f"{text} {value.get_size()} {value.get_bitsize()} {pixels!r}"
    if isinstance(value, io.BytesIO | io.StringIO):
        return f"{text} {value.getvalue()!r} {value.tell()}"
    if isinstance(value, types.FunctionType):
        empty = [is_empty(cell) for cell in value.__closure__ or ()]
        names = [*vars(value), *(value.__kwdefaults__ or {})]
        return f"{value.__qualname__} {value.__module__} {value.__globals__['__name__']} {empty} {names}"
    if isinstance(value, types.MethodType | types.BuiltinMethodType | types.MethodWrapperType):
        return f"{text} {value.__name__}"
    if isinstance(value, itertools.count | enum.Enum | uuid.UUID | datetime.date | pathlib.PurePath):
        return repr(value)
    if isinstance(
        value, fractions.Fraction | datetime.timedelta | re.Pattern | np.dtype | operator.itemgetter
    ):
        return repr(value)
    if isinstance(value, collections.deque):
        text += f" {value.maxlen}"
    if isinstance(value, list | tuple | dict | set | frozenset | collections.deque):
        text += f" {len(value)}"
    if type(value).__name__ in _ITERATORS:
        text += f" {operator.length_hint(value)}"
    return f"{text} {sorted(attributes(value))}"


def describe(roots: list[Any], last: Any) -> str:
    """Returns a text that describes all objects of a graph, and the result of the last change."""
    numbers: dict[int, int] = {}
    alive: list[Any] = []  # keeps the ids from being used again
    owners: dict[int, tuple[int, int]] = {}
    lines: list[str] = []
    pending: collections.deque[Any] = collections.deque([*roots, last])
    while pending:
        value = pending.popleft()
        if type(value) in ATOMS:
            lines.append(shown(value))
            continue
        if issubclass(type(value), tuple | frozenset | np.generic):
            lines.append(shown(value))  # without a number, as a copy is as good
            pending.extend(parts(value))
            continue
        if id(value) in numbers:
            lines.append(f"#{numbers[id(value)]}")
            continue
        numbers[id(value)] = len(numbers)
        alive.append(value)
        lines.append(shown(value) + place(value, owners, alive))
        pending.extend(parts(value))
    return "\n".join(lines)


def place(value: Any, owners: dict[int, tuple[int, int]], alive: list[Any]) -> str:
    """Returns an array's memory, and its offset from the first array in the same memory."""
    if not isinstance(value, np.ndarray):
        return ""
    owner = owner_of(value)
    alive.append(owner)
    address = value.__array_interface__["data"][0] if value.nbytes else 0
    number, first = owners.setdefault(id(owner), (len(owners), address))
    return f" in memory {number} at {address - first if value.nbytes else 0}"


def owner_of(value: Any) -> Any:
    """Returns the object at the end of a chain of views."""
    while True:
        base = getattr(value, "base", None)
        base = base.base if type(base).__name__ == "DummyArray" else base
        base = base.obj if isinstance(base, memoryview) else base
        if base is None:
            return value
        value = base


def changed(value: Any, n: int, other: Any) -> Any:
    """Changes an object and returns the method's result; `other` is another part of the graph."""
    if isinstance(value, np.ndarray):
        return _change_array(value, n, other)
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinMethodType | partial):
        return _call(value, n)
    if isinstance(value, Thing | Slotted):
        if n % 3 == 0:
            value.child = other
        elif n % 7 == 1 and isinstance(value, Thing) and type(value) is not Guarded:
            value.added = other
        return value.bump(n)
    if isinstance(value, Data | DataSlots | types.SimpleNamespace):
        value.n += n
        value.child = other if n % 2 else value.child
    elif isinstance(value, dict):
        if isinstance(value, collections.OrderedDict) and n % 3 == 1 and value:
            value.move_to_end(next(iter(value)))
        elif n % 5 == 2 and value:
            return value.pop(next(iter(value)))
        elif isinstance(value, collections.defaultdict) and n % 4 == 1:
            return value[n % 8]
        else:
            value[n % 6] = n if isinstance(value, collections.Counter) else other
    elif isinstance(value, list):
        if n % 5 == 2 and value:
            return value.pop(n % len(value))
        if n % 5 == 3:
            value.reverse()
        elif n % 5 == 4 and value:
            value[n % len(value)] = n
        else:
            value.append(other if n % 2 else n)
    elif isinstance(value, collections.deque):
        value.append(other) if n % 2 else value.rotate(1)
    elif isinstance(value, set):
        value.add(n)
    elif isinstance(value, bytearray):
        if value:
            value[n % len(value)] = n % 200
    elif isinstance(value, array.array):
        value[n % len(value)] = n % 100
    elif isinstance(value, np.random.Generator):
        if n % 4 == 1 and isinstance(value.bit_generator.seed_seq, np.random.SeedSequence):
            return value.spawn(1)[0] if hasattr(value, "spawn") else None
        return value.integers(1000, size=3, dtype=np.int32).tolist() if n % 2 else value.normal()
    elif isinstance(value, np.random.BitGenerator):
        return int(value.random_raw())
    elif isinstance(value, np.random.RandomState):
        return value.normal()
    elif isinstance(value, random.Random):
        return value.gauss(0, 1) if n % 2 else value.random()
    elif isinstance(value, io.BytesIO):
        return value.write(b"xy") if n % 2 else value.read(1)
    elif isinstance(value, io.StringIO):
        return value.write("xy") if n % 2 else value.read(1)
    elif pygame is not None and isinstance(value, pygame.Surface):
        value.fill((n, n, 2 * n), (n % 3, n % 2, 1, 1))
    elif isinstance(value, spaces.Space):
        return repr(value.sample())
    elif isinstance(value, Number):
        value.mark = n  # type: ignore[attr-defined]
    elif hasattr(value, "__next__"):
        return next(value, None)
    return None


def _change_array(value: Any, n: int, other: Any) -> Any:
    if not value.flags.writeable:
        if n % 3 == 0 and value.base is None:
            value.flags.writeable = True
    elif not value.size:
        pass
    elif value.dtype.kind in "fiuc?":
        value.flat[n % value.size] = n % 100
    elif value.dtype.kind in "US":
        value.flat[n % value.size] = str(n)
    if n % 11 == 5 and value.base is None:
        value.flags.writeable = False
    return None


def _call(function: Any, n: int) -> Any:
    try:
        return function(n % 10)
    except Exception as error:
        return type(error).__name__


# ----------------------------------------------------------------------------------------------------------
# The env
# ----------------------------------------------------------------------------------------------------------

NUM_ROOTS = 5


class GraphEnv(gymnasium.Env[Any, Any]):
    """An env that interprets a program.

    A program is a pair: operations that `reset` carries out, and one or more per step. An operation has the
    name of a kind of object to build, or of a change, a path to an object, a path to another, and a number.
    """

    observation_space = spaces.Box(-1, 2**31 - 1, (2,), np.int32)
    action_space = spaces.Discrete(1000)

    def __init__(self, *, observes: bool = True) -> None:
        self.observes = observes  # else the test calls `describe`
        self.program: Any = ((), ((),), 0)
        self.text = ""
        self.count = 0
        self.last: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=5)
        for name in [name for name in vars(self) if name.startswith("root")]:
            delattr(self, name)
        if options:
            self.program = options["program"]
        self.count, self.last, self.numbers = 0, None, np.zeros(2)
        for operation in self.program[0]:
            self._carry_out(*operation)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        _, steps, quiet = self.program
        self.count += 1
        self.numbers[1] += self.np_random.random()
        if self.count > quiet:
            for what, one, other, n in steps[(self.count - quiet - 1) % len(steps)]:
                self._carry_out(what, one, other, n + int(action))
        return self._observe(), 0.0, False, False, {}

    def describe(self) -> str:
        held = vars(self)
        names = sorted(name for name in held if name.startswith("root"))
        seen = describe([self.numbers, self.np_random, *(held[name] for name in names)], self.last)
        return f"{self.count} {names}\n{seen}"

    def _observe(self) -> Any:
        seen = self.describe() if self.observes and self.count >= self.program[2] else ""
        return np.array([self.count, crc32(seen.encode()) >> 1], np.int32)

    def _carry_out(self, what: str, path: tuple[int, ...], other: tuple[int, ...], n: int) -> None:
        root = f"root{path[0] % NUM_ROOTS}"
        if what == "drop":
            vars(self).pop(root, None)
        elif what == "alias":
            setattr(self, root, self._at(other))
        elif what == "change":
            try:
                self.last = changed(self._at(path), n, self._at(other))
            except Exception as error:
                self.last = type(error).__name__
        elif what == "wrap":
            setattr(self, root, [getattr(self, root, None), self._at(other)])
        else:
            setattr(self, root, KINDS[what](self._at(other), n))

    def _at(self, path: tuple[int, ...]) -> Any:
        """Returns the object at a path: the number of an attribute, then of a part of each object."""
        value = getattr(self, f"root{path[0] % NUM_ROOTS}", None)
        for number in path[1:]:
            inside = [part for part in parts(value) if type(part) not in ATOMS]
            if not inside:
                break
            value = inside[number % len(inside)]
        return value
