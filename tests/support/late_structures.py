"""Objects that an env makes within an episode, and what must stay the same when the env moves.

A kind is a function of the env. It returns the objects, and a function that changes them by one reference,
reads them by another one, and returns a number.
"""

from __future__ import annotations

import array
import collections
import ctypes
import enum
import functools
import itertools
import logging
import os
import random
import sys
import threading
import types
import weakref
from dataclasses import dataclass, field

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

START = 59  # steps of an episode before the objects are made: more than the first replacement verifies


class AttrDict(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Thing:
    n = 0

    def add(self):
        self.n += 1
        return self.n


class Slotted:
    __slots__ = ("n",)


@dataclass(frozen=True)
class Frozen:
    items: list = field(default_factory=list)


class Colour(enum.Enum):
    RED = 1


class RaisingSetState(Thing):
    def __setstate__(self, state):
        raise RuntimeError("never unpickled")


class LossyReduce(Thing):
    def __reduce__(self):
        return LossyReduce, ()


class LossyGetState(Thing):
    def __getstate__(self):
        return {}


class Counted(np.random.Generator):
    count = 0


class Named(str):
    pass


class ElsewhereUnhashable:
    """A class whose objects have a hash only in the process that made them."""

    def __init__(self):
        self.pid = os.getpid()

    def __hash__(self):
        if getattr(self, "pid", 0) not in (0, os.getpid()):
            self.fail()
        return 1

    def fail(self):
        raise RuntimeError("made in another process")


class ElsewhereDeadly(ElsewhereUnhashable):
    def fail(self):
        os._exit(3)


Pair = collections.namedtuple("Pair", "left right")
SENTINEL, SINGLETON, TABLE, KNOWN = object(), Thing(), [3, [4]], {}


def lookup(name):
    return KNOWN.setdefault(name, Thing())


def counter():
    n = 0

    def add():
        nonlocal n
        n += 1
        return n

    return add, lambda: n


KINDS = {}


def kind(make):
    KINDS[make.__name__] = make
    return make


def add_to(holder):
    holder.n += 1
    return holder.n


@kind
def attr_dict(env):
    return AttrDict(n=0), lambda it: [add_to(it), it["n"]][1]


@kind
def attr_dicts_in_a_list(env):
    def step(it):
        it.append(AttrDict(n=len(it)))
        return sum([add_to(one), one["n"]][1] for one in it)

    return [], step


@kind
def closure(env):
    return counter(), lambda it: it[0]() + 10 * it[1]()


@kind
def function_of_the_env(env):
    return (lambda: env.count), lambda it: it()


@kind
def default_that_changes(env):
    return (lambda x, seen=[]: seen.append(x) or len(seen)), lambda it: it(1)


@kind
def keyword_default_that_changes(env):
    def late(*, seen=[]):  # noqa: B006
        seen.append(1)
        return len(seen)

    return late, lambda it: it()


@kind
def attribute_of_a_function(env):
    def late():
        late.calls += 1
        return late.calls

    late.calls = 0
    return late, lambda it: it()


@kind
def held_vars(env):
    thing = Thing()
    thing.n = 0
    return (thing, vars(thing)), lambda it: [add_to(it[0]), it[1]["n"]][1]


@kind
def own_vars(env):
    return vars(env), lambda it: it["count"]


@kind
def one_generator_twice(env):
    bits = np.random.default_rng(3)
    return [bits, bits], lambda it: it[0].integers(9) + 10 * it[1].integers(9)


@kind
def two_generators_on_one(env):
    bits = np.random.PCG64(5)
    return [np.random.Generator(bits) for _ in range(2)], lambda it: [it[0].random(), it[1].integers(99)][1]


@kind
def random_state_and_generator(env):
    bits = np.random.MT19937(5)
    both = np.random.RandomState(bits), np.random.Generator(bits)
    return both, lambda it: [it[0].rand(), it[1].integers(99)][1]


@kind
def subclass_of_generator(env):
    def step(it):
        it.count += 1
        return it.count + it.integers(99)

    return Counted(np.random.PCG64(1)), step


@kind
def generators_of_python(env):
    return [random.Random(4)] * 2, lambda it: it[0].randrange(9) + 10 * it[1].randrange(9)


@kind
def spawned_seeds(env):
    return np.random.SeedSequence(3), lambda it: it.spawn(1)[0].generate_state(1)[0] % 1000


@kind
def weak_reference(env):
    thing = Thing()
    return (thing, weakref.ref(thing)), lambda it: [it[0].add(), it[1]().n][1]


@kind
def weak_proxy(env):
    thing = Thing()
    return (weakref.proxy(thing), thing), lambda it: [it[0].add(), it[1].n][1]


@kind
def named_tuple_of_lists(env):
    items = [0]
    return [Pair(items, {"same": items}), items], lambda it: [it[1].append(1), len(it[0].right["same"])][1]


@kind
def list_in_itself(env):
    items = [0]
    items.append(items)

    def step(it):
        it[1][1][0] += 1
        return it[0]

    return items, step


@kind
def bound_method(env):
    thing = Thing()
    return (thing.add, thing), lambda it: [it[0](), it[1].n][1]


@kind
def bound_method_of_the_env(env):
    return env.number_of_steps, lambda it: it()


@kind
def views_of_an_array(env):
    own = np.zeros((2, 3))

    def step(it):
        it[1][...] += 1
        it[2][1] += 1
        return it[0].sum()

    return (own, own[:, ::2], own.T), step


@kind
def memory_of_a_bytearray(env):
    def step(it):
        it[1][0] = (it[1][0] + 1) % 100
        return it[0][0] + it[2][0]

    own = bytearray(8)
    return (own, memoryview(own), np.frombuffer(own, np.uint8)), step


@kind
def array_of_objects(env):
    shared = [0]
    own = np.array([shared, None], object)
    return (own, shared), lambda it: [it[1].append(1), len(it[0][0])][1]


@kind
def records(env):
    own = np.zeros(2, [("a", "i4"), ("b", "f8")])

    def step(it):
        it[1]["a"] += 1
        return it[0][0]["a"]

    return (own, own[0]), step


@kind
def buffers_of_python(env):
    def step(it):
        it[0][0] += 1
        it[1][1] += 1
        return it[0][0] + it[1][1]

    return (array.array("i", [0]), (ctypes.c_int * 2)()), step


@kind
def attribute_of_an_enum(env):
    Colour.RED.n = 0
    return Colour.RED, add_to


@kind
def lossy_reduce(env):
    return LossyReduce(), lambda it: it.add()


@kind
def lossy_getstate(env):
    return LossyGetState(), lambda it: it.add()


@kind
def raising_setstate(env):
    return RaisingSetState(), lambda it: it.add()


@kind
def class_of_a_function(env):
    class Local:
        def step(self):
            self.n = getattr(self, "n", 0) + 1
            return self.n

    return Local(), lambda it: it.step()


@kind
def class_that_refers_to_the_env(env):
    class Local:
        def step(self):
            return env.count

    return Local(), lambda it: it.step()


@kind
def class_with_a_list(env):
    class Local:
        seen = []

    return Local(), lambda it: [it.seen.append(1), len(it.seen)][1]


@kind
def singleton(env):
    return SINGLETON, lambda it: int(it is SINGLETON)


@kind
def sentinel(env):
    return [SENTINEL, object()], lambda it: int(it[0] is SENTINEL)


@kind
def object_of_a_global_table(env):
    return lookup("a"), lambda it: int(it is lookup("a"))


@kind
def global_table(env):
    return TABLE, lambda it: it[0] + it[1][0]


@kind
def attribute_of_a_logger(env):
    logger = logging.getLogger("late")
    logger.n = 0
    return logger, add_to


@kind
def spec(env):
    def step(it):
        it.kwargs["n"] += 1
        return it.kwargs["n"]

    return EnvSpec("Late-v0", kwargs={"n": 0}), step


@kind
def containers_of_collections(env):
    shared = [0]

    def step(it):
        recent, ordered, default, counted, _ = it
        recent.append(len(counted))
        ordered.move_to_end(next(iter(ordered)))
        default[sum(recent)].append(1)
        counted[len(default) % 5] += 1
        shared_too = ordered["a"]
        shared_too.append(1)
        return len(it[4]) + sum(recent) + len(default)

    ordered = collections.OrderedDict(a=shared, b=[])
    return (
        collections.deque(maxlen=3),
        ordered,
        collections.defaultdict(list),
        collections.Counter(),
        shared,
    ), step


@kind
def iterators(env):
    items = [1, 2]

    def step(it):
        it[1].append(len(it[1]))
        return next(it[0]) + next(it[2])

    return (iter(items), items, itertools.count(5)), step


@kind
def partial_function(env):
    items = []
    return (functools.partial(items.append, 1), items), lambda it: [it[0](), len(it[1])][1]


@kind
def mapping_proxy(env):
    own = {"n": 0}

    def step(it):
        it[0]["n"] += 1
        return it[1]["n"]

    return (own, types.MappingProxyType(own)), step


@kind
def set_of_numbers(env):
    def step(it):
        first = it.pop()
        it.add((first * 37 + env.count) % 1009)
        return first

    return {*range(0, 160, 16)}, step


@kind
def set_of_texts(env):
    return {*"abcdefgh"}, lambda it: [it.add(str(len(it))), len(it)][1]


@kind
def set_of_objects(env):
    things = [Thing() for _ in range(4)]
    return (things, {*things}), lambda it: [it[0][0].add(), sum(one.n for one in it[1])][1]


@kind
def dict_by_objects(env):
    things = [Thing(), Thing()]

    def step(it):
        it[1][it[0][0]] += 1
        return it[1][it[0][0]]

    return (things, dict.fromkeys(things, 0)), step


@kind
def slots(env):
    thing = Slotted()
    thing.n = 0
    return [thing, thing], lambda it: [add_to(it[0]), it[1].n][1]


@kind
def frozen_dataclass(env):
    return Frozen(), lambda it: [it.items.append(1), len(it.items)][1]


@kind
def special_floats(env):
    values = [float("nan"), -0.0, complex(0, -0.0), np.float32("nan"), np.array([np.nan, -0.0])]
    return values, lambda it: int(np.signbit(it[1])) + int(np.isnan(it[4][0]))


@kind
def text_with_an_attribute(env):
    text = Named("a")
    text.n = 0
    return text, add_to


@kind
def space_with_a_generator(env):
    space = gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(99))
    space.seed(3)
    return (space, space["a"]), lambda it: it[0].sample()["a"] + it[1].sample()


@kind
def lock(env):
    return (threading.Lock(), [0]), lambda it: [it[1].append(1), len(it[1])][1]


@kind
def env_in_a_dict(env):
    return {"env": [env]}, lambda it: it["env"][0].count


@kind
def exception(env):
    return ValueError("late", [0]), lambda it: [it.args[1].append(1), len(it.args[1])][1]


@kind
def open_file(env):
    return open(os.devnull), lambda it: 1


@kind
def module_of_the_old_process(env):
    module = sys.modules["made_late"] = types.ModuleType("made_late")
    exec("class Late:\n    n = 0", vars(module))
    return module.Late(), add_to


@kind
def key_without_a_hash_elsewhere(env):
    return {ElsewhereUnhashable(): 1}, lambda it: len(it)


@kind
def key_that_kills_elsewhere(env):
    return {ElsewhereDeadly(): 1}, lambda it: len(it)


class Late(gymnasium.Env):
    """An env whose observations are the step of the episode and the state of its structure."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, kind):
        self.kind, self.late = kind, None

    def number_of_steps(self):
        return self.count

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.late, self.step_of_late = 0, None, None
        return np.array([0, 0], np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count == START:
            self.late, self.step_of_late = KINDS[self.kind](self)
        shown = 0 if self.late is None else self.step_of_late(self.late)
        return np.array([self.count, shown], np.float32), float(shown), False, False, {}

    def close(self):
        if self.kind == "open_file" and self.late is not None:
            self.late.close()
