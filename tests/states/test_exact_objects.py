"""States of envs with objects whose state is easily missed: exact. Other types are refused at the first save.

Each case is a pair of functions: `build` gives an env its attributes, and `act` changes one and returns a
number that depends on what it changed.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import enum
import functools
import gc
import io
import itertools
import logging
import random
import re
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.env_states import WAYS, assert_exact, copied
from support.probe import StatefulEnv, prove

import jaxvec

try:
    import pygame
except ImportError:
    pygame = None

pytestmark = pytest.mark.filterwarnings("ignore")
needs_pygame = pytest.mark.skipif(pygame is None, reason="pygame is not installed")


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


class Mangled:
    __slots__ = ("__moves",)

    def __init__(self):
        self.__moves = []

    def move(self, n):
        self.__moves.append(n)
        return sum(self.__moves)


@dataclass(slots=True)
class Slots:
    held: Any
    n: int = 0


class Pair(NamedTuple):
    one: Any
    other: Any


def _act_with_old_generators(env, n):
    """Has a generator in every other step; those of an integer have no sequence of seeds."""
    if env.old is None:
        env.old = np.random.RandomState(n)
        return 0
    value = env.old.normal() + (env.old._bit_generator.seed_seq is None)
    env.old = None if n % 2 else env.old
    return value


class Planet(enum.Enum):
    EARTH = (1, 2.0)

    def __init__(self, number, mass):
        self.number, self.mass = number, mass


def helper(n):
    return n


def doubled(n, by=2, *, more=1):
    return n * by + more


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


def with_defaults():
    def call(n, by=2, *, more=1):
        return n * by + more

    return call


def increased(container, index, n):
    container[index] += n
    return container[index]


def shared_total():
    total = 0

    def add(n):
        nonlocal total
        total += n

    def read():
        return total

    return {"add": add, "read": read}


def counting_function():
    def count(n, seen=[]):  # noqa: B006
        seen.append(n)
        count.calls = getattr(count, "calls", 0) + 1
        return len(seen) + count.calls

    return count


def recursive_function():
    total = 0

    def add(n):
        nonlocal total
        total += n
        return total if n < 3 else add(n - 3)

    return add


def call_from_another_place(env, n):
    env.kept, env.add = env.add, None  # it is not in its place when it is restored
    env.add = [env.kept] if n % 2 else env.kept
    value = env.kept(n)
    env.add, env.kept = env.kept, None
    return value


def adder(total):
    def add(n):
        nonlocal total
        total += n
        return total

    return add


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


def unlocked(array, n):
    array.flags.writeable = True
    array[3] += n
    array.flags.writeable = False
    return array.sum()


def rebound(env, n):
    was_writeable = env.map.flags.writeable
    env.map = np.frombuffer((env.map + n).tobytes())
    return env.map.sum() + 1000 * was_writeable


CASES: dict[str, Any] = {
    # Arrays that share memory.
    "small view": (
        build(map=lambda env: np.zeros((64, 64)), door=lambda env: env.map[3, 4:5]),
        lambda env, n: increased(env.door, 0, n) + 10 * env.map[3, 4],
    ),
    "small view before its array": (
        build(door=lambda env: np.zeros((64, 64))[3, 4:5], map=lambda env: env.door.base),
        lambda env, n: increased(env.map, (3, 4), n) + 10 * env.door[0],
    ),
    "permuted array": (
        build(map=lambda env: np.zeros((3, 4, 5)).transpose(1, 0, 2).copy("K"), row=lambda env: env.map[1]),
        lambda env, n: increased(env.row, (2, 3), n) + env.map.sum(),
    ),
    "locked array": (
        build(
            map=lambda env: np.zeros(10),
            part=lambda env: env.map[2:5],
            _=lambda env: env.map.setflags(write=False),
        ),
        lambda env, n: increased(env.part, 1, n) + env.map.sum() + 1000 * env.map.flags.writeable,
    ),
    "locked view": (
        build(
            map=lambda env: np.zeros(10),
            part=lambda env: env.map[2:5],
            _=lambda env: env.part.setflags(write=False),
        ),
        lambda env, n: increased(env.map, 3, n) + env.part.sum() + 1000 * env.part.flags.writeable,
    ),
    "array that is unlocked": (
        build(map=lambda env: np.zeros(10), _=lambda env: env.map.setflags(write=False)),
        lambda env, n: unlocked(env.map, n),
    ),
    "array in bytes": (build(map=lambda env: np.frombuffer(bytes(80))), lambda env, n: rebound(env, n)),
    "overlapping windows": (
        build(
            map=lambda env: np.zeros(20),
            windows=lambda env: np.lib.stride_tricks.sliding_window_view(env.map, 4),
        ),
        lambda env, n: increased(env.map, n % 20, n) + env.windows.sum(),
    ),
    "backward view": (
        build(map=lambda env: np.zeros(20), back=lambda env: env.map[::-2]),
        lambda env, n: increased(env.back, n % 10, n) + env.map @ np.arange(20),
    ),
    "NumPy scalars of two types": (
        build(numbers=lambda env: [np.int8(0)] * 12),
        lambda env, n: (
            env.numbers.__setitem__(n % 12, np.int8(n % 2) if n % 3 else np.bool_(n % 2))
            or sum(number.dtype.num * (i + 1) for i, number in enumerate(env.numbers))
        ),
    ),
    # Attributes that are reached in another way as well.
    "inner list": (
        build(grid=lambda env: [[0] * 3 for _ in range(20)], row=lambda env: env.grid[7]),
        lambda env, n: increased(env.row, n % 3, n) + sum(map(sum, env.grid)),
    ),
    "twenty times one row": (
        build(grid=lambda env: [[0] * 3] * 20),
        lambda env, n: increased(env.grid[n % 20], 0, n) + sum(map(sum, env.grid)),
    ),
    "row of two long lists": (
        build(one=lambda env: [*range(20), [0]], other=lambda env: [env.one[-1], *range(20)]),
        lambda env, n: increased(env.one[-1], 0, n) + env.other[0][0],
    ),
    "inner dict": (
        build(table=lambda env: {n: {"x": 0} for n in range(20)}, one=lambda env: env.table[5]),
        lambda env, n: increased(env.one, "x", n) + sum(row["x"] for row in env.table.values()),
    ),
    "metadata of its own": (
        build(metadata=lambda env: {"played": 0}),
        lambda env, n: increased(env.metadata, "played", n),
    ),
    "vars of a function": (
        build(function=lambda env: lambda n: n + env.count, held=lambda env: vars(env.function)),
        lambda env, n: bumped(env.held, n) + 10 * env.function.x,
    ),
    "set of its owner": (
        build(
            owner=lambda env: Thing(x=0),
            members=lambda env: {env.owner},
            _=lambda env: vars(env.owner).update(members=env.members, method=env.owner.__init__),
        ),
        lambda env, n: added(*env.members, "x", n) + env.owner.x + (env.owner.members is env.members),
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
    "slots of an iterator": (build(thing=lambda env: Listed()), lambda env, n: added(env.thing, "one", n)),
    "slot that a stub answers for": (build(thing=lambda env: Stub()), set_or_delete),
    "data with slots": (
        build(thing=lambda env: Slots([0])),
        lambda env, n: env.thing.held.append(n) or added(env.thing, "n", sum(env.thing.held)),
    ),
    "method of an object with a mangled slot": (
        build(move=lambda env: Mangled().move),
        lambda env, n: env.move(n),
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
    "pool of generators": (
        build(pool=lambda env: np.random.default_rng(3).spawn(3)),
        lambda env, n: (
            env.pool.append(env.pool[n % 3].spawn(1)[0]) or sum(each.random() for each in env.pool)
        ),
    ),
    "seeded space": (
        build(
            space=lambda env: spaces.Dict(a=spaces.Discrete(9), b=spaces.Box(-1, 1)),
            _=lambda env: env.space.seed(1),
        ),
        lambda env, n: env.space.sample()["b"][0] + env.space["a"].sample(),
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
    "enum member with attributes": (
        build(planet=lambda env: Planet.EARTH),
        lambda env, n: env.planet.number * n + env.planet.mass,
    ),
    # Functions and methods.
    "two closures over one variable": (
        lambda env: vars(env).update(shared_total()),
        lambda env, n: env.add(n) or env.read(),
    ),
    "attribute and default of a function": (
        build(function=lambda env: counting_function()),
        lambda env, n: env.function(n),
    ),
    "recursive closure in another place": (
        build(add=lambda env: recursive_function(), kept=lambda env: None),
        call_from_another_place,
    ),
    "two functions of one name and line": (
        build(
            held=lambda env: None, both=lambda env: [(lambda n, x=[1]: n + x[0]), (lambda n, x=[2]: n * x[0])]
        ),
        lambda env, n: setattr(env, "held", env.both[n % 2]) or env.held(n),
    ),
    "closures that are made later": (
        build(draws=lambda env: []),
        lambda env, n: (
            env.draws.insert(0, functools.partial(adder(n), n)) or sum(draw() for draw in env.draws[:3])
        ),
    ),
    "partial of a method of a list": (
        build(
            default=lambda env: collections.defaultdict(list),
            add=lambda env: functools.partial(env.default[1].append),
        ),
        lambda env, n: env.add(n) or sum(env.default[1]),
    ),
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
    "method of a closure": (build(method=method_of_closure), lambda env, n: env.method(n)),
    "partial": (
        build(call=lambda env: functools.partial(doubled, more=1), held=lambda env: env.call.keywords),
        lambda env, n: bumped(env.held, n, "more") + env.call(n),
    ),
    # Containers and memory.
    "long list of itself": (
        build(held=lambda env: [*range(9)], _=lambda env: env.held.append(env.held)),
        lambda env, n: env.held[-1][-1].__setitem__(n % 3, n) or sum(env.held[:9]),
    ),
    "dict of the env": (
        build(table=lambda env: {"env": env}),
        lambda env, n: added(env.table["env"], "x", n),
    ),
    "file in memory": (
        build(file=lambda env: io.BytesIO()),
        lambda env, n: env.file.write(bytes(n)) + env.file.tell(),
    ),
    "order of a dict from a set": (
        build(held=lambda env: dict.fromkeys({"a", "b", "c"})),
        lambda env, n: bumped(env.held, n, "abc"[n % 3] + str(n)) + len(next(reversed(env.held))),
    ),
    "visited cells": (
        build(held=lambda env: set()),
        lambda env, n: env.held.symmetric_difference_update({(n % 4, n % 3)}) or len(env.held),
    ),
    "bytearray": (
        build(held=lambda env: bytearray(3), alias=lambda env: [env.held]),
        lambda env, n: env.alias[0].append(n) or sum(env.held),
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
    "python's generator": (
        build(rng=lambda env: random.Random(3)),
        lambda env, n: env.rng.random() + env.rng.gauss(0, 1),
    ),
    "array.array": (
        build(held=lambda env: array.array("d", [0]), view=lambda env: [env.held]),
        lambda env, n: env.view[0].append(n) or sum(env.held),
    ),
    "counter and iterator": (
        build(counter=lambda env: collections.Counter(), steps=lambda env: itertools.count(3)),
        lambda env, n: increased(env.counter, n % 3, n) + sum(env.counter.values()) + next(env.steps),
    ),
    "compiled pattern": (
        build(pattern=lambda env: re.compile("a+")),
        lambda env, n: (
            setattr(env, "pattern", re.compile("a" * (n % 4 + 1))) or len(env.pattern.match("aaaa").group())
        ),
    ),
    "user dict": (
        build(held=lambda env: collections.UserDict(x=0)),
        lambda env, n: env.held.update(x=env.held["x"] + n) or env.held["x"],
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


def env_counter(env):
    total = 0

    def make():
        nonlocal total
        total += 1
        return total + env.count

    return make


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", WAYS)
def test_objects_are_exact(name, how):
    assert_exact(functools.partial(Holder, name), how)


def held_by(**attributes):
    env = gymnasium.Env()
    vars(env).update(attributes)
    return env, StatefulEnv(env)


# --- Types that are refused at the first save ------------------------------------------------------------


class AttrDict(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class Drawn(np.random.Generator):
    pass


class OwnLists(list):
    pass


class Twin:
    def __init__(self, thing):
        self.__dict__ = vars(thing)


class Seeds(np.random.SeedSequence):
    pass


def itself_in_a_tuple():
    inner = [0]
    inner.append((inner, 1))
    return inner[1]


def iterator_in_its_list():
    numbers = [1, 2, 3]
    iterator = iter(numbers)
    numbers.append(iterator)
    return iterator


def generator_in_a_closure():
    numbers = (n * n for n in range(9))
    return lambda: next(numbers)


def variable_without_a_value():
    def function():
        return late

    if function is None:
        late = 0
    return function


def held_lock():
    lock = threading.Lock()
    lock.acquire()
    return lock


def with_ordered_attributes():
    thing = Thing()
    thing.__dict__ = collections.OrderedDict(x=0)
    return thing


REFUSED: dict[str, tuple[Any, str]] = {
    "object and its vars": (lambda: [thing := Thing(x=0), vars(thing)], "is the __dict__ of an object"),
    "vars and their object": (lambda: [vars(thing := Thing(x=0)), thing], "__dict__ is found elsewhere"),
    "vars in a long list": (lambda: [[*range(9), vars(thing := Thing(x=0))], thing], "__dict__"),
    "vars of a partial": (lambda: [call := functools.partial(helper), vars(call)], "__dict__"),
    "one dict of two objects": (lambda: [thing := Thing(x=0), Twin(thing)], "__dict__ is found elsewhere"),
    "attributes in an ordered dict": (with_ordered_attributes, "__dict__ is a OrderedDict"),
    "attribute dict": (lambda: AttrDict(x=0), r"trust=\[AttrDict\]"),
    "subclass of a list": (lambda: OwnLists(), r"trust=\[OwnLists\]"),
    "globals": (lambda: vars(logging), "global variables"),
    "subclass of a generator": (lambda: Drawn(np.random.PCG64(3)), "Drawn, which extends a generator"),
    "subclass of seeds": (lambda: np.random.PCG64(Seeds(3)), "its seeds are a .*Seeds"),
    "seeds": (lambda: np.random.SeedSequence(3), "a SeedSequence"),
    "seeds of two generators": (
        lambda: [np.random.default_rng(seeds := np.random.SeedSequence(3)), np.random.default_rng(seeds)],
        "another generator, too. Give each its own",
    ),
    "cache": (lambda: functools.lru_cache(helper), "_lru_cache_wrapper"),
    "property": (lambda: property(helper), "property"),
    "vectorised function": (lambda: np.frompyfunc(helper, 1, 1), "ufunc"),
    "closure with a generator": (generator_in_a_closure, "a generator"),
    "variable without a value": (variable_without_a_value, "no value yet"),
    "tuple in itself": (itself_in_a_tuple, "a tuple that contains itself"),
    "iterator in its own list": (iterator_in_its_list, "contains itself"),
    "exception": (lambda: ValueError("x"), "an exception"),
    "weak reference": (lambda: weakref.ref(Holder), "a weak reference"),
    "weak proxy": (lambda: weakref.proxy(Holder), "a weak reference"),
    "mapping proxy": (lambda: types.MappingProxyType({}), "a view of a dict"),
    "keys of a dict": (lambda: {}.keys(), "dict_keys"),
    "local": (threading.local, "_thread._local"),
    "held lock": (held_lock, "a lock that is held"),
    "memoryview": (lambda: memoryview(bytearray(3)), "a view of memory"),
    "ctypes": (lambda: (ctypes.c_double * 4)(), "c_double_Array_4"),
    "array over a bytearray": (lambda: np.frombuffer(bytearray(8)), "in the memory of a bytearray"),
    "array over ctypes": (lambda: np.ctypeslib.as_array((ctypes.c_double * 4)()), "in the memory of a"),
    "array of objects": (lambda: np.array([[1], None], object), "an array of Python objects"),
    "masked array": (lambda: np.ma.zeros(3), "a MaskedArray"),
    "matrix": (lambda: np.zeros((2, 2)).view(np.matrix), "a matrix"),
    "structured array": (lambda: np.zeros(2, "f4,i4"), "a dtype with fields"),
    "structured dtype": (lambda: np.dtype("f4,i4"), "a dtype with fields"),
    "record": (lambda: np.zeros(2, "f4,i4")[0], "a record"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_types_are_refused_at_the_first_save(name):
    make, match = REFUSED[name]
    with pytest.raises(jaxvec.EnvStateError, match=f"cannot save Env: attribute Env.held.*{match}"):
        held_by(held=make())[1].save()


@pytest.mark.parametrize("container", [dict.fromkeys(range(20)), [None] * 20], ids=["dict", "list"])
def test_a_save_keeps_no_discarded_container_alive(container):
    env, stateful = held_by(table=container.copy())
    stateful.save()
    env.table[5] = Thing()
    reference = weakref.ref(env.table[5])
    del env.table
    gc.collect()
    assert reference() is None


class LocalClasses(gymnasium.Env):
    """Makes objects of a class that no other process can find."""

    def reset(self, *, seed=None, options=None):
        class Local:
            pass

        self.held = Local()


def test_objects_of_local_classes_do_not_leave_their_process():
    stateful = StatefulEnv(LocalClasses())
    stateful.env.reset()
    state = stateful.save()
    stateful.restore(state)
    with pytest.raises(jaxvec.EnvStateError, match="Local is not found by its name"):
        copied(state)


def test_a_free_lock_stays_with_its_env():
    env, stateful = held_by(held=(lock := threading.Lock()))
    stateful.restore(copied(stateful.save()))
    assert env.held is lock


@pytest.mark.parametrize("held", [logging.getLogger("jaxvec.states"), Planet.EARTH])
def test_loggers_and_enum_members_are_global(held):
    env, stateful = held_by(held=held)
    state = stateful.save()
    for saved in (state, copied(state)):
        env.held = None
        stateful.restore(saved)
        assert env.held is held


# --- Sets: the order of iteration depends on the history of a set, and no copy has it --------------------


class Choosing(gymnasium.Env):
    """Goes to the first of the doors that are open, in the order of a set or of the doors themselves."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(5)

    def __init__(self, order):
        self.order, self.doors, self.count = order, set(), 0

    def reset(self, *, seed=None, options=None):
        self.doors, self.count = set(), 0
        return np.zeros(1), {}

    def step(self, action):
        self.count += 1
        self.doors.add(1009 * (int(action) + self.count))
        door = next(iter(self.order(self.doors)))
        if self.count % 3 == 0:
            self.doors.discard(door)
        return np.array([float(door)]), 0.0, False, False, {}


def test_an_env_that_depends_on_the_order_of_a_set_is_refused():
    prove(StatefulEnv(Choosing(sorted)), fresh=True)
    with pytest.raises(jaxvec.EnvStateError, match="obs differs.* in the order of a set"):
        prove(StatefulEnv(Choosing(iter)), fresh=True)


KEPT = {  # what keeps the items, and how the set is read from that
    "set": (set, lambda kept: kept),
    "frozenset": (frozenset, lambda kept: kept),
    "set in a list": (lambda items: [set(items)], lambda kept: kept[0]),
    "frozenset in a tuple": (lambda items: (1, frozenset(items)), lambda kept: kept[1]),
    "frozenset as a key": (lambda items: {frozenset(items): 0}, lambda kept: next(iter(kept))),
    "set with an object": (
        lambda items: {Thing(x=0), *items},
        lambda kept: [item for item in kept if isinstance(item, str)],
    ),
    "view of a dict from a set": (set, lambda kept: dict.fromkeys(kept).keys()),
}


class Walking(gymnasium.Env):
    """Observes the order of a set that it keeps, or of its sorted items."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(5)

    def __init__(self, kind, n, order):
        self.names, self.kind, self.order = [f"room {k}" for k in range(n)], kind, order
        self.kept = KEPT[kind][0](self.names)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1), {}

    def step(self, action):
        places = [self.names.index(name) for name in self.order(KEPT[self.kind][1](self.kept))]
        return np.array([float(sum(9**n * place for n, place in enumerate(places)))]), 0.0, False, False, {}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("n", [9, 13])  # of which another process has hardly ever the same order
def test_an_env_that_walks_a_set_of_texts_is_refused(kind, n):
    prove(StatefulEnv(Walking(kind, n, sorted)), fresh=True)
    with pytest.raises(jaxvec.EnvStateError, match="obs differs.* in the order of a set"):
        prove(StatefulEnv(Walking(kind, n, iter)), fresh=True)


# --- pygame's surfaces -----------------------------------------------------------------------------------


class Canvas(gymnasium.Env):
    """Draws on a surface, and observes all of its bytes."""

    def __init__(self, *arguments):
        self.count, self.board = 0, pygame.Surface(*arguments)

    def step(self, action):
        self.count += 1
        surface, n = self.board, int(action) + self.count
        surface.set_at((n % 3, n % 2), (n, 2 * n, 3 * n, 100))
        if n % 4 == 0:
            surface.set_clip((n % 2, 0, 2, 2))
            surface.set_alpha(n)
            surface.set_colorkey((n, 0, 0))
        if n % 5 == 0 and surface.get_bitsize() == 8:
            surface.set_palette_at(n % 3, (n, n, n))
        settings = surface.get_clip(), surface.get_alpha(), surface.get_colorkey()
        values = [surface.get_at((x, y)) for x in range(3) for y in range(2)]
        return np.array([hash((str(settings), str(values))) % 10**9]), 0.0, False, False, {}


@needs_pygame
@pytest.mark.parametrize("depth", [(), (0, 24), (0, 8), "alpha"])
@pytest.mark.parametrize("how", WAYS)
def test_surfaces_that_are_drawn_on_are_exact(depth, how):
    form = (pygame.SRCALPHA,) if depth == "alpha" else depth
    assert_exact(functools.partial(Canvas, (4, 3), *form), how)


@needs_pygame
def test_states_share_the_pixels_of_an_unchanged_surface():
    env, stateful = held_by(board=pygame.Surface((4, 3)))
    states = [stateful.save() for _ in range(2)]
    env.board.fill((1, 2, 3))
    states.append(stateful.save())
    first, second, third = (state.layers[0][1]["board"] for state in states)
    assert first is second is not third


@needs_pygame
def test_other_pictures_are_refused():
    sprite = type("Sprite", (pygame.Surface,), {})((2, 2))
    part = pygame.Surface((4, 3)).subsurface((1, 1, 2, 2))
    pixels = pygame.surfarray.pixels2d(pygame.Surface((2, 2)))
    for held, match in (
        (sprite, "extends pygame.Surface"),
        (part, "a part of another surface"),
        (pixels, "in the memory of a BufferProxy"),
    ):
        with pytest.raises(jaxvec.EnvStateError, match=f"attribute Env.held.*{match}"):
            held_by(held=held)[1].save()


@needs_pygame
def test_windows_and_fonts_stay_with_their_env(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame.display.init()
    pygame.font.init()
    try:
        window = pygame.display.set_mode((4, 3))
        font = pygame.font.Font(None, 20)
        env, stateful = held_by(screen=window, font=font)
        stateful.restore(stateful.save())
        assert env.screen is window
        assert env.font is font
    finally:
        pygame.display.quit()
