"""States of envs with objects whose state is easily missed: exact, or refused with an error.

Each case is a pair of functions: `build` gives an env its attributes, and `act` changes one and returns a
number that depends on what it changed.
"""

from __future__ import annotations

import array
import collections
import contextlib
import enum
import functools
import itertools
import logging
import random
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.env_states import WAYS, assert_exact_or_refused

pytestmark = pytest.mark.filterwarnings("ignore")


class Holder(gymnasium.Env):
    """An env with the attributes of a case."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(5)

    def __init__(self, name):
        self.name, self.count = name, 0
        CASES[name][0](self)

    def step(self, action):
        self.count += 1
        value = CASES[self.name][1](self, int(action) + self.count)
        return np.array([float(value)]), 0.0, False, False, {}


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class AttrDict(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class Base:
    __slots__ = ("x",)


class Redeclared(Base):
    __slots__ = ("x",)


class Listed:
    """Names its slots by an iterator, which is used up when the class exists."""

    __slots__ = iter(("one", "other"))


class Stub:
    """Answers for every attribute."""

    __slots__ = ("x",)

    def __getattr__(self, name):
        return 5


@dataclass(slots=True)
class Slots:
    held: Any
    n: int = 0


class Pair(NamedTuple):
    one: Any
    other: Any


class Generator(np.random.Generator):
    def __init__(self, bits, label):
        super().__init__(bits)
        self.drawn, self.label = 0, label

    def draw(self):
        self.drawn += 1
        return self.random() + self.drawn


class SlottedGenerator(np.random.Generator):
    __slots__ = ("drawn",)


class Bits(np.random.PCG64):
    drawn = 0


class Seeds(np.random.SeedSequence):
    drawn = 0


def _act_with_old_generators(env, n):
    """Has a generator in every other step; those of an integer have no sequence of seeds."""
    if env.old is None:
        env.old = np.random.RandomState(n)
        return 0
    value = env.old.normal() + (env.old._bit_generator.seed_seq is None)
    env.old = None if n % 2 else env.old
    return value


class OldRandom(np.random.RandomState):
    __slots__ = ("drawn",)


class Planet(enum.Enum):
    EARTH = (1, 2.0)

    def __init__(self, number, mass):
        self.number, self.mass = number, mass


def helper(n):
    return n


def doubled(n, by=2, *, more=1):
    return n * by + more


class OwnDict(dict):
    pass


class ListEnv(list):
    pass


def added(owner, name, n):
    """Adds to an attribute, which may not exist yet, and returns it."""
    setattr(owner, name, getattr(owner, name, 0) + n)
    return getattr(owner, name)


def build(**makers):
    """Returns a function that gives an env the attributes that these functions make, in this order."""

    def apply(env):
        for name, make in makers.items():
            setattr(env, name, make(env))

    return apply


def bumped(mapping, n, key="x"):
    mapping[key] = mapping.get(key, 0) + n
    return mapping[key]


def spawn(sequence):
    return sequence.spawn(1)[0].generate_state(1)[0] % 1000


def run_code(source):
    held = {}
    exec(source, held)
    return held


def with_defaults():
    def call(n, by=2, *, more=1):
        return n * by + more

    return call


def set_or_delete(env, n):
    """Sets a slot or deletes it, and returns what the object answers for it."""
    if n % 2:
        env.thing.x = n
    else:
        with contextlib.suppress(AttributeError):
            del env.thing.x
    return env.thing.x


def method_of_closure(env):
    total = 0

    def add(self, n):
        nonlocal total
        total += n
        return total

    return types.MethodType(add, env)


NUMBERS = itertools.count()

CASES: dict[str, Any] = {
    # Attributes that are reached in another way as well.
    "vars of an object": (
        build(thing=lambda env: Thing(x=0), held=lambda env: [vars(env.thing)]),
        lambda env, n: bumped(env.held[0], n) + 10 * env.thing.x,
    ),
    "vars before the object": (
        build(held=lambda env: [{}], thing=lambda env: Thing()),
        lambda env, n: (
            (
                vars(env.thing).update(x=n)
                or env.held.__setitem__(0, vars(env.thing))
                or bumped(env.held[0], n)
            )
            + 10 * env.thing.x
        ),
    ),
    "vars first": (
        lambda env: setattr(env, "held", vars(thing := Thing(x=0))) or setattr(env, "thing", thing),
        lambda env, n: bumped(env.held, n) + 10 * env.thing.x,
    ),
    "vars in a list of lists": (
        lambda env: (
            setattr(env, "held", [*range(9), vars(thing := Thing(x=0))]) or setattr(env, "thing", thing)
        ),
        lambda env, n: bumped(env.held[9], n) + 10 * env.thing.x,
    ),
    "vars of the env": (
        build(x=lambda env: 0, held=lambda env: vars(env)),
        lambda env, n: bumped(env.held, n) + 10 * env.x,
    ),
    "vars of a namespace": (
        build(thing=lambda env: types.SimpleNamespace(x=0), held=lambda env: vars(env.thing)),
        lambda env, n: bumped(env.held, n) + 10 * env.thing.x,
    ),
    "vars of a function": (
        build(
            function=lambda env: lambda n: n + env.count,
            held=lambda env: vars(env.function),
        ),
        lambda env, n: bumped(env.held, n) + 10 * env.function.x,
    ),
    "vars of a dict": (
        build(thing=lambda env: OwnDict(), held=lambda env: vars(env.thing)),
        lambda env, n: bumped(env.held, n) + 10 * env.thing.x,
    ),
    "vars of a partial": (
        build(thing=lambda env: functools.partial(helper), held=lambda env: vars(env.thing)),
        lambda env, n: bumped(env.held, n) + 10 * env.thing.x,
    ),
    "one dict of two objects": (
        lambda env: (
            vars(env).update(one=(one := Thing(x=0)), other=(other := Thing()))
            or setattr(other, "__dict__", vars(one))
        ),
        lambda env, n: added(env.one, "x", n) + 10 * env.other.x,
    ),
    "order of attributes": (
        build(thing=lambda env: Thing(x=1, y=2)),
        lambda env, n: (
            delattr(env.thing, "xy"[n % 2])
            or added(env.thing, "xy"[n % 2], n) + 10 * next(iter(vars(env.thing).values()))
        ),
    ),
    "order of the env's attributes": (
        build(x=lambda env: 1, y=lambda env: 2),
        lambda env, n: (
            delattr(env, "xy"[n % 2])
            or added(env, "xy"[n % 2], n)
            + 10 * next(value for key, value in vars(env).items() if key in "xy")
        ),
    ),
    "attributes in an ordered dict": (
        lambda env: (
            setattr(env, "thing", Thing()) or setattr(env.thing, "__dict__", collections.OrderedDict(x=0))
        ),
        lambda env, n: added(env.thing, "x", n) + 1000 * isinstance(vars(env.thing), collections.OrderedDict),
    ),
    "attribute dict": (
        build(held=lambda env: AttrDict(x=0)),
        lambda env, n: bumped(env.held, n) + 10 * env.held.x,
    ),
    "late attribute dicts": (
        build(held=lambda env: []),
        lambda env, n: (
            (env.held.append(AttrDict(x=n)) or added(env.held[n % len(env.held)], "x", n))
            + 10 * sum(each["x"] for each in env.held)
        ),
    ),
    "globals": (
        build(held=lambda env: logging.__dict__),
        lambda env, n: n + 1000 * (env.held is vars(logging)),
    ),
    "globals of run code": (
        lambda env: setattr(
            env, "held", run_code("x = 0\ndef add(n):\n    global x\n    x += n\n    return x")
        ),
        lambda env, n: env.held["add"](n) + 10 * env.held["x"],
    ),
    # Slots.
    "redeclared slot": (
        lambda env: (
            setattr(env, "thing", Redeclared()) or Base.x.__set__(env.thing, 0) or setattr(env.thing, "x", 0)
        ),
        lambda env, n: (
            added(env.thing, "x", n)
            + 10 * (Base.x.__set__(env.thing, Base.x.__get__(env.thing) + n) or Base.x.__get__(env.thing))
        ),
    ),
    "slots of an iterator": (
        build(thing=lambda env: Listed()),
        lambda env, n: added(env.thing, "one", n),
    ),
    "slot that a stub answers for": (build(thing=lambda env: Stub()), set_or_delete),
    "data with slots": (
        build(thing=lambda env: Slots([0])),
        lambda env, n: env.thing.held.append(n) or added(env.thing, "n", sum(env.thing.held)),
    ),
    # Generators.
    "two generators on one": (
        build(
            bits=lambda env: np.random.MT19937(5),
            old=lambda env: np.random.RandomState(env.bits),
            new=lambda env: np.random.Generator(env.bits),
        ),
        lambda env, n: env.old.normal() + 10 * env.new.random() + 100 * env.bits.random_raw() % 1000,
    ),
    "old generator and its bits": (
        build(old=lambda env: np.random.RandomState(3), bits=lambda env: env.old._bit_generator),
        lambda env, n: env.old.normal() + env.bits.random_raw() % 1000,
    ),
    "old generator that comes and goes": (build(old=lambda env: None), _act_with_old_generators),
    "old generator of other bits": (
        build(old=lambda env: np.random.RandomState(np.random.PCG64(3))),
        lambda env, n: env.old.normal(),
    ),
    "subclass of a generator": (
        build(rng=lambda env: Generator(np.random.PCG64(3), [0])),
        lambda env, n: env.rng.label.append(n) or env.rng.draw() + sum(env.rng.label),
    ),
    "generator with a slot": (
        build(rng=lambda env: SlottedGenerator(np.random.PCG64(3))),
        lambda env, n: added(env.rng, "drawn", n) + env.rng.random(),
    ),
    "subclass of bits": (
        build(rng=lambda env: np.random.Generator(Bits(3))),
        lambda env, n: added(env.rng.bit_generator, "drawn", n) + env.rng.random(),
    ),
    "subclass of old": (
        build(rng=lambda env: OldRandom(3)),
        lambda env, n: added(env.rng, "drawn", n) + env.rng.normal(),
    ),
    "subclass of seeds": (
        build(rng=lambda env: np.random.Generator(np.random.PCG64(Seeds(3)))),
        lambda env, n: (
            added(env.rng.bit_generator.seed_seq, "drawn", n) + spawn(env.rng.bit_generator.seed_seq)
        ),
    ),
    "subclass of seeds as an attribute": (
        build(seeds=lambda env: Seeds(3)),
        lambda env, n: added(env.seeds, "drawn", n) + spawn(env.seeds),
    ),
    "seeds of two generators": (
        lambda env: (
            setattr(env, "one", np.random.PCG64(seeds := np.random.SeedSequence(3)))
            or setattr(env, "other", np.random.PCG64(seeds))
        ),
        lambda env, n: spawn(env.one.seed_seq) + env.other.seed_seq.n_children_spawned,
    ),
    "seeds of two ordinary generators": (
        lambda env: (
            setattr(env, "one", np.random.default_rng(seeds := np.random.SeedSequence(3)))
            or setattr(env, "other", np.random.default_rng(seeds))
        ),
        lambda env, n: (
            spawn(env.one.bit_generator.seed_seq) + env.other.bit_generator.seed_seq.n_children_spawned
        ),
    ),
    "pool of generators": (
        build(pool=lambda env: np.random.default_rng(3).spawn(3)),
        lambda env, n: (
            env.pool.append(env.pool[n % 3].spawn(1)[0]) or sum(each.random() for each in env.pool)
        ),
    ),
    # Records of constructor arguments, and objects that many envs share.
    "spec": (
        lambda env: setattr(env, "spec", gymnasium.spec("CartPole-v1").__class__("A-v0")),
        lambda env, n: added(env.spec, "max_episode_steps_so_far", n) + bumped(env.spec.kwargs, n),
    ),
    "saved arguments": (
        build(_saved_kwargs=lambda env: {"x": 0}, _ezpickle_args=lambda env: ([0],)),
        lambda env, n: (
            bumped(env._saved_kwargs, n) + (env._ezpickle_args[0].append(n) or sum(env._ezpickle_args[0]))
        ),
    ),
    "cached spec": (
        build(_cached_spec=lambda env: [0]),
        lambda env, n: env._cached_spec.append(n) or sum(env._cached_spec),
    ),
    "own logger": (
        build(log=lambda env: logging.Logger("mine")),
        lambda env, n: added(env.log, "messages", n),
    ),
    "logger": (
        build(log=lambda env: logging.getLogger(f"jaxvec.{next(NUMBERS)}")),
        lambda env, n: added(env.log, "messages", n),
    ),
    "enum member": (
        build(color=lambda env: enum.Enum("Color", "RED BLUE").RED),
        lambda env, n: added(env.color, "count", n),
    ),
    "enum member with attributes": (
        build(planet=lambda env: Planet.EARTH),
        lambda env, n: env.planet.number * n + env.planet.mass,
    ),
    # Functions and methods.
    "keyword defaults": (
        build(call=lambda env: with_defaults()),
        lambda env, n: (
            setattr(env.call, "__kwdefaults__", {"more": n + env.call.__kwdefaults__["more"]}) or env.call(n)
        ),
    ),
    "keyword defaults in place": (
        build(call=lambda env: with_defaults()),
        lambda env, n: bumped(env.call.__kwdefaults__, n, "more") + env.call(n),
    ),
    "defaults": (
        build(call=lambda env: with_defaults()),
        lambda env, n: setattr(env.call, "__defaults__", (env.call.__defaults__[0] + n,)) or env.call(n),
    ),
    "late attribute of a function": (
        build(call=lambda env: with_defaults()),
        lambda env, n: added(env.call, "calls", n),
    ),
    "method of a closure": (
        build(method=method_of_closure),
        lambda env, n: env.method(n),
    ),
    "partial": (
        build(call=lambda env: functools.partial(doubled, more=1), held=lambda env: env.call.keywords),
        lambda env, n: bumped(env.held, n, "more") + env.call(n),
    ),
    "cache": (
        build(
            call=lambda env: functools.lru_cache(lambda key: next(env.steps)),
            steps=lambda env: itertools.count(),
        ),
        lambda env, n: env.call(n % 4),
    ),
    "global cache": (
        build(call=lambda env: cached_square),
        lambda env, n: env.call(n),
    ),
    "property": (
        build(held=lambda env: property(method_of_closure(env))),
        lambda env, n: env.held.fget(n),
    ),
    "vectorised closure": (
        build(call=lambda env: np.frompyfunc(method_of_closure(env), 1, 1)),
        lambda env, n: env.call(n),
    ),
    # Containers and memory.
    "view of bytes": (
        build(view=lambda env: memoryview(b"abc")),
        lambda env, n: env.view[n % 3],
    ),
    "bounded deque": (
        build(held=lambda env: collections.deque([0], 3)),
        lambda env, n: env.held.append(n) or sum(env.held) + env.held.maxlen,
    ),
    "factory": (
        build(table=lambda env: collections.defaultdict(env_counter(env))),
        lambda env, n: env.table[n],
    ),
    "ordered": (
        build(table=lambda env: collections.OrderedDict(a=1, b=2, c=3)),
        lambda env, n: env.table.move_to_end("abc"[n % 3]) or ord(next(iter(env.table))),
    ),
    "objects as keys": (
        build(table=lambda env: {Thing(x=0): 0}),
        lambda env, n: bumped(env.table, n, next(iter(env.table))),
    ),
    "named tuple": (
        build(pair=lambda env: Pair([0], {}), held=lambda env: env.pair.one),
        lambda env, n: env.held.append(n) or sum(env.pair.one) + bumped(env.pair.other, n),
    ),
    "mapping proxy": (
        build(proxy=lambda env: types.MappingProxyType(vars(env))),
        lambda env, n: env.proxy["count"] + n,
    ),
    "array.array": (
        build(held=lambda env: array.array("d", [0]), view=lambda env: [env.held]),
        lambda env, n: env.view[0].append(n) or sum(env.held),
    ),
    "masked array": (
        build(held=lambda env: np.ma.zeros(3)),
        lambda env, n: env.held.__setitem__(n % 3, np.ma.masked if n % 2 else n) or env.held.count(),
    ),
    "structured array": (
        build(table=lambda env: np.zeros(3, [("x", float), ("y", int)]), view=lambda env: env.table["x"]),
        lambda env, n: env.view.__setitem__(n % 3, n) or env.table["x"].sum(),
    ),
    "names of a dtype": (
        build(held=lambda env: np.dtype([("x", int), ("y", int)])),
        lambda env, n: (
            setattr(env.held, "names", (f"x{n}", f"y{n + len(env.held.names[0])}"))
            or int(env.held.names[1][1:])
        ),
    ),
    "weak method": (
        build(thing=lambda env: Thing(x=0), method=lambda env: weakref.WeakMethod(env.thing.__init__)),
        lambda env, n: env.method()(x=n) or env.thing.x,
    ),
    "local": (
        build(held=lambda env: threading.local()),
        lambda env, n: added(env.held, "x", n),
    ),
    "user dict": (
        build(held=lambda env: collections.UserDict(x=0)),
        lambda env, n: env.held.update(x=env.held["x"] + n) or env.held["x"],
    ),
    "random with a slot": (
        build(rng=lambda env: SlottedRandom(3)),
        lambda env, n: added(env.rng, "drawn", n) + env.rng.random(),
    ),
    "exit stack": (
        build(held=lambda env: contextlib.ExitStack()),
        lambda env, n: env.held.callback(helper, n) and len(env.held._exit_callbacks),
    ),
    "cycle of a list": (
        build(held=lambda env: [1, 2], cycle=lambda env: itertools.cycle(env.held)),
        lambda env, n: env.held.append(n) or next(env.cycle),
    ),
}


class SlottedRandom(random.Random):
    __slots__ = ("drawn",)


@functools.lru_cache
def cached_square(n):
    return n * n


def env_counter(env):
    total = 0

    def make():
        nonlocal total
        total += 1
        return total + env.count

    return make


# What may be refused, since no copy of it can be exact.
REFUSED = {
    *("one dict of two objects", "attributes in an ordered dict", "globals of run code"),
    *("subclass of seeds", "subclass of seeds as an attribute"),
    *("seeds of two generators", "seeds of two ordinary generators"),
    *("cache", "property", "vectorised closure", "masked array", "weak method", "local"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", WAYS)
def test_objects_are_exact_or_refused(name, how):
    assert_exact_or_refused(functools.partial(Holder, name), how, refused=name in REFUSED)
