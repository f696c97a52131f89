"""The kinds of objects from which `graph_env.py` builds random graphs."""

from __future__ import annotations

import array
import collections
import ctypes
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
import threading
import types
import uuid
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

try:
    import pygame
except ImportError:
    pygame = None  # type: ignore[assignment]

# ----------------------------------------------------------------------------------------------------------
# The user's classes and functions
# ----------------------------------------------------------------------------------------------------------


class Thing:
    marks: tuple[int, ...] = ()

    def __init__(self, child: Any, n: int) -> None:
        self.child, self.n = child, n

    def bump(self, n: int) -> Any:
        self.n += n
        return self.n


class Slotted:
    __slots__ = ("child", "hidden", "late")

    def __init__(self, child: Any, n: int) -> None:
        self.child, self.hidden = child, [n]

    def bump(self, n: int) -> Any:
        self.hidden.append(n)
        self.late = n
        return sum(self.hidden)


class Half(Slotted):
    """A class with slots and a dict."""

    def bump(self, n: int) -> Any:
        self.extra = n
        return super().bump(n)


class Guarded(Thing):
    """A class that overrides how attributes are set and read."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        object.__setattr__(self, "num_set", getattr(self, "num_set", 0) + 1)

    def __getattr__(self, name: str) -> Any:
        if name == "num_set":
            raise AttributeError(name)
        return len(name)


class Equal(Thing):
    """A class whose objects are all equal."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Equal

    def __hash__(self) -> int:
        return 7


class Reset(Thing):
    """A class whose copies lose their state, like envs with `EzPickle`."""

    def __getstate__(self) -> Any:
        return {}

    def __setstate__(self, state: Any) -> None:
        self.__init__(None, 0)


@dataclass
class Data:
    child: Any
    n: int
    items: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DataSlots:
    child: Any
    n: int


@dataclass(frozen=True)
class Frozen:
    child: Any
    n: int


class Pair(NamedTuple):
    child: Any
    n: int


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Number(int):
    pass


class Text(str):
    __slots__ = ()


class Ordered(collections.OrderedDict[Any, Any]):
    pass


def plain(n: int) -> int:
    return 3 * n


def counter(child: Any, n: int) -> Any:
    total = n

    def add(n: int) -> int:
        nonlocal total
        total += n
        return total

    def read(n: int) -> Any:
        return total + n, child

    return [add, read]


def defaults(child: Any, n: int) -> Any:
    def call(n: int, seen: list[Any] = [child], *, more: dict[Any, Any] = {}) -> int:  # noqa: B006
        seen.append(n)
        more[n] = child
        return len(seen)

    return call


def with_attributes(child: Any, n: int) -> Any:
    def call(n: int) -> int:
        call.num_calls += n  # type: ignore[attr-defined]
        return call.num_calls  # type: ignore[attr-defined]

    call.num_calls, call.child = n, child  # type: ignore[attr-defined]
    return call


def late_attributes(child: Any, n: int) -> Any:
    """Returns a function without free variables that changes its attributes and keyword defaults."""

    def call(n: int, *, more: int = 1) -> int:
        return n + more

    def change(n: int) -> Any:
        call.__kwdefaults__["more"] += n
        if n % 3 == 0:
            call.late = child  # type: ignore[attr-defined]
        return call(n)

    return [call, change] if n % 2 else [change, call]


def recursive(child: Any, n: int) -> Any:
    def call(n: int) -> Any:
        return n + call(n - 1) if n > 0 else late

    if n % 2:
        late = child
    return call


def rebinds(child: Any, n: int) -> Any:
    def call(n: int) -> Any:
        nonlocal child
        child = [child] if n % 3 else None
        return n

    return call


# ----------------------------------------------------------------------------------------------------------
# Kinds of objects: each function builds one around `child`, a part of the graph, and the number `n`.
# ----------------------------------------------------------------------------------------------------------


def _self_list(child: Any, n: int) -> Any:
    made: list[Any] = [child, n]
    made.append(made)
    return made


def _view(child: Any, n: int) -> Any:
    """Returns a view of `child` if it is an array, else of a new array."""
    base = child if isinstance(child, np.ndarray) else np.arange(12.0).reshape(3, 4)
    cuts: list[Any] = [
        lambda: base[..., n % 3 : n % 3 + 2] if base.ndim else base[...],
        lambda: base.T,
        lambda: base[::-1] if base.ndim else base[None],
        lambda: base[:, -1] if base.ndim > 1 and base.shape[1] else base[...],
        lambda: base.reshape(-1) if base.size else base[...],
        lambda: base[None],
        lambda: np.broadcast_to(base, (2, *base.shape)),
        lambda: base.view(np.uint8) if base.flags.c_contiguous and base.ndim else base[...],
        lambda: base.real if base.dtype.kind == "c" else base[...],
        lambda: np.lib.stride_tricks.as_strided(base),
    ]
    return cuts[n % len(cuts)]()


def _locked(child: Any, n: int) -> Any:
    made = np.arange(n % 7 + 2)
    part = made[1:]
    made.flags.writeable = False
    return [made, part] if n % 2 else made


def _array(child: Any, n: int) -> Any:
    dtypes: list[Any] = [
        *("f8", "f4", "i4", "u1", "?", "c16", "U3", "S3", "M8[s]", "f2", ">i4"),
    ]
    shape = [(3,), (2, 3), (), (0,), (40,), (2, 2, 2)][n % 6]
    order = "F" if n % 4 == 1 else "C"
    return np.zeros(shape, dtypes[n % len(dtypes)], order)


def _generators(child: Any, n: int) -> Any:
    kinds: list[Any] = [
        np.random.PCG64,
        np.random.Philox,
        np.random.MT19937,
        np.random.SFC64,
        np.random.PCG64DXSM,
    ]
    bits = kinds[n % 5](n)
    one = np.random.Generator(bits)
    return (
        [one, one, bits, np.random.Generator(bits), one.random][n % 5]
        if n % 3
        else [one, np.random.Generator(bits)]
    )


def _shared_bits(child: Any, n: int) -> Any:
    bits = (np.random.MT19937, np.random.PCG64, np.random.Philox)[n % 3](n)
    users = [np.random.RandomState(bits), np.random.Generator(bits), bits]
    return users[n % 3 :] + users[: n % 3]


def _surface(child: Any, n: int) -> Any:
    if pygame is None:
        return None
    depths: list[Any] = [(0, 32), (pygame.SRCALPHA, 32), (0, 24), (0, 8)]
    return pygame.Surface((3, 2), *depths[n % 4])


def _spawned(child: Any, n: int) -> Any:
    return np.random.default_rng(np.random.SeedSequence(n).spawn(2)[1])


def _method(child: Any, n: int) -> Any:
    if isinstance(child, (Thing, Slotted)):
        return child.bump
    if isinstance(child, list):
        return child.append
    if isinstance(child, dict):
        return partial(child.__setitem__, n) if n % 2 else child.setdefault
    if isinstance(child, set):
        return child.add
    return Thing(child, n).bump


def _partial(child: Any, n: int) -> Any:
    made = partial(counter(child, n)[0])
    if n % 3 == 0:
        made.child = child
    return partial(made) if n % 2 else made


def _iterator(child: Any, n: int) -> Any:
    source: Any = child if isinstance(child, (list, tuple)) else [n, 2, 3, 4]
    kinds: list[Any] = [
        lambda: iter(source),
        lambda: itertools.count(n, n % 3 + 1),
        lambda: itertools.cycle([n, 2, 3]),
        lambda: itertools.cycle(source),
        lambda: itertools.repeat(child, n),
        lambda: iter(range(n)),
        lambda: iter("abcdef"),
        lambda: iter((1, 2, child)),
        lambda: reversed(source) if isinstance(source, list) else iter(source),
        lambda: enumerate(source),
        lambda: zip(source, itertools.count(), strict=False),
        lambda: map(plain, [1, 2, n]),
        lambda: itertools.chain([1, 2], source),
        lambda: iter({n: 1, 2: 2}),
        lambda: iter(deque_of(source)),
        lambda: itertools.islice(itertools.count(), n),
    ]
    return kinds[n % len(kinds)]()


def deque_of(values: Any) -> Any:
    return collections.deque(values, maxlen=4)


def _immutable(child: Any, n: int) -> Any:
    made: list[Any] = [
        *(
            decimal.Decimal(n),
            fractions.Fraction(n, 3),
            datetime.datetime(2020, 1, 1 + n % 9),
            uuid.UUID(int=n),
        ),
        *(pathlib.PurePosixPath("a") / str(n), slice(0, n), range(n), re.compile("a+"), Color.RED, Number),
        *(
            datetime.timedelta(n),
            b"abc",
            np.float32(n),
            np.int8(n % 100),
            np.bool_(n % 2),
            np.datetime64(n, "s"),
        ),
        *(
            operator.itemgetter(n),
            frozenset({n, "a"}),
            plain,
            Text("abc"),
            np.dtype("f4"),
            10**30 + n,
            -0.0,
            1j,
        ),
    ]
    return made[n % len(made)]


def _space(child: Any, n: int) -> Any:
    made: list[Any] = [
        spaces.Discrete(5),
        spaces.Box(0, 1, (2,)),
        spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1)}),
        spaces.Tuple([spaces.MultiBinary(3)]),
    ]
    space = made[n % 4]
    space.seed(n)
    return space


def _number_subclass(child: Any, n: int) -> Any:
    made = Number(n)
    made.child = child  # type: ignore[attr-defined]
    return made


def _ordered(child: Any, n: int) -> Any:
    made: Any = (Ordered if n % 3 == 0 else collections.OrderedDict)({n: child, "b": 1, "c": 2})
    if n % 4 == 0:
        made.child = child
    return made


def _default_dict(child: Any, n: int) -> Any:
    factories: list[Any] = [list, int, counter(child, n)[0].__class__, partial(list, [n])]
    made: Any = collections.defaultdict(factories[n % 4] if n % 4 != 2 else (lambda: child))
    made[n] = child
    return made


def _io(child: Any, n: int) -> Any:
    made: Any = io.BytesIO(b"abcdef") if n % 2 else io.StringIO("abcdef")
    made.seek(n % 5)
    if n % 3 == 0:
        made.child = child
    return made


def _refused(child: Any, n: int) -> Any:
    made: list[Any] = [
        lambda: (i for i in [n, 2]),
        lambda: np.ma.array([1, n], mask=[0, 1]),
        lambda: open("/dev/null"),  # noqa: SIM115
        lambda: weakref.ref(Thing(child, n)),
        lambda: threading.Event(),
        lambda: types.CellType(child),
        lambda: np.array([(1, child)], [("a", int), ("b", object)]),
        lambda: memoryview(bytearray(n + 1)),
        lambda: ctypes.pointer(ctypes.c_int(n)),
        lambda: vars(child) if isinstance(child, Thing) else {n: child}.keys(),
    ]
    return made[n % len(made)]()


def _chain_map(child: Any, n: int) -> Any:
    return collections.ChainMap({n: child}, child if isinstance(child, dict) else {})


KINDS: dict[str, Any] = {
    "list": lambda child, n: [child, n],
    "list of itself": _self_list,
    "long list": lambda child, n: [child, *range(12), n],
    "list of numbers": lambda child, n: [n, 1, 2],
    "long list of numbers": lambda child, n: [*range(n % 5, 14)],
    "grid": lambda child, n: [[n] * 3 for _ in range(10)],
    "same row": lambda child, n: [[n, child]] * 9,
    "same child": lambda child, n: [child] * 10,
    "scalars": lambda child, n: [np.int8(0)] * 10,
    "dict": lambda child, n: {n: child, "b": [n]},
    "dict of a thing": lambda child, n: {Thing(child, n): n, Equal(child, n): child},
    "dict of tuples": lambda child, n: {(n, "a"): child, frozenset({n}): 1},
    "long dict": lambda child, n: {i: {"x": i} for i in range(10)},
    "dict of itself": lambda child, n: (lambda made: made.update(me=made) or made)({n: child}),
    "tuple": lambda child, n: (child, n),
    "tuple of lists": lambda child, n: ([n], [child], (n, [n])),
    "named tuple": lambda child, n: Pair(child, n),
    "set": lambda child, n: {n, 1, 2},
    "set of things": lambda child, n: {Thing(child, n)},
    "frozenset": lambda child, n: frozenset({n, (1, 2)}),
    "deque": lambda child, n: collections.deque([child, n], maxlen=n % 4 + 1 if n % 2 else None),
    "thing": Thing,
    "slotted": Slotted,
    "half slotted": Half,
    "guarded": Guarded,
    "equal": Equal,
    "reset when copied": Reset,
    "data": Data,
    "data with slots": DataSlots,
    "frozen data": Frozen,
    "ordered": _ordered,
    "default dict": _default_dict,
    "counter": lambda child, n: collections.Counter({n: 2, "a": 1}),
    "shared bits": _shared_bits,
    "late attributes": late_attributes,
    "surface": _surface,
    "chain map": _chain_map,
    "namespace": lambda child, n: types.SimpleNamespace(child=child, n=n),
    "number": _number_subclass,
    "array": _array,
    "view": _view,
    "second view": _view,
    "locked": _locked,
    "zero strides": lambda child, n: np.broadcast_to(np.arange(3.0), (4, 3)),
    "transposed copy": lambda child, n: np.zeros((2, 3, 4)).transpose(1, 0, 2).copy("K"),
    "bytearray": lambda child, n: bytearray(20 + n % 8),
    "array.array": lambda child, n: array.array("dib"[n % 3], [1, 2, 3, 4]),
    "io": _io,
    "generators": _generators,
    "spawned": _spawned,
    "random state": lambda child, n: np.random.RandomState(n),
    "python random": lambda child, n: random.Random(n),
    "closures": counter,
    "defaults": defaults,
    "function attributes": with_attributes,
    "recursive": recursive,
    "rebinds": rebinds,
    "lambda": lambda child, n: lambda k: (child, k),
    "method": _method,
    "partial": _partial,
    "iterator": _iterator,
    "immutable": _immutable,
    "space": _space,
    "lock": lambda child, n: threading.RLock() if n % 2 else threading.Lock(),
    "object": lambda child, n: object(),
    "refused": _refused,
}
