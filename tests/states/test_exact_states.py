"""States of all kinds of object graphs that can be saved are exact.

Each case is an env whose `act` changes one of its attributes and reads another. It is stepped beside envs
that save and restore at every step, and has to give the same results or be refused.
"""

from __future__ import annotations

import collections
import copy
import itertools
import re
import subprocess
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.env_states import WAYS, assert_exact, play
from support.probe import StatefulEnv

from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.filterwarnings("ignore")

CASES: dict[str, type] = {}


class Case(gymnasium.Env):
    """An env whose state is what `build` makes; `act` changes and reads it."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(5)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        CASES[cls.__name__] = cls

    def __init__(self):
        self.count = 0
        self.build()

    def build(self):
        raise NotImplementedError

    def act(self, action):
        raise NotImplementedError

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1), {}

    def step(self, action):
        self.count += 1
        value = float(self.act(int(action) + self.count))
        return np.array([value]), 0.0, False, False, {}


class SmallView(Case):
    def build(self):
        self.map = np.zeros((64, 64))
        self.door = self.map[3, 4:5]

    def act(self, n):
        self.door += n
        return self.map[3, 4]


class SmallViewFirst(Case):
    def build(self):
        whole = np.zeros((64, 64))
        self.door, self.map = whole[3, 4:5], whole

    def act(self, n):
        self.map[3, 4] += n
        return self.door[0]


class Permuted(Case):
    def build(self):
        self.map = np.zeros((3, 4, 5)).transpose(1, 0, 2).copy("K")
        self.row = self.map[1]

    def act(self, n):
        self.row[2, 3] += n
        return self.map.sum()


class Locked(Case):
    def build(self):
        self.map = np.zeros(10)
        self.part = self.map[2:5]
        self.map.flags.writeable = False

    def act(self, n):
        self.part += n
        return self.map.sum()


class Strided(Case):
    def build(self):
        self.map = np.zeros(20)
        self.windows = np.lib.stride_tricks.sliding_window_view(self.map, 4)

    def act(self, n):
        self.map[n % 20] += n
        return self.windows.sum()


class Backwards(Case):
    def build(self):
        self.map = np.zeros(20)
        self.back = self.map[::-2]

    def act(self, n):
        self.back[n % 10] += n
        return self.map @ np.arange(20)


class TwoClosures(Case):
    def build(self):
        total = 0

        def add(n):
            nonlocal total
            total += n

        def read():
            return total

        self.add, self.read = add, read

    def act(self, n):
        self.add(n)
        return self.read()


class InnerList(Case):
    def build(self):
        self.grid = [[0] * 3 for _ in range(20)]
        self.row = self.grid[7]

    def act(self, n):
        self.row[n % 3] += n
        return sum(map(sum, self.grid))


class SameRowTwice(Case):
    def build(self):
        self.grid = [[0] * 3] * 20

    def act(self, n):
        self.grid[n % 20][0] += n
        return sum(map(sum, self.grid))


class InnerDict(Case):
    def build(self):
        self.table = {n: {"x": 0} for n in range(20)}
        self.one = self.table[5]

    def act(self, n):
        self.one["x"] += n
        return sum(each["x"] for each in self.table.values())


class FunctionAttribute(Case):
    def build(self):
        def count(n, seen=[]):  # noqa: B006
            seen.append(n)
            count.calls = getattr(count, "calls", 0) + 1
            return len(seen) + count.calls

        self.function = count

    def act(self, n):
        return self.function(n)


class MutableDefault(Case):
    def build(self):
        def count(n, seen=[]):  # noqa: B006
            seen.append(n)
            return sum(seen)

        self.function = count

    def act(self, n):
        return self.function(n)


class TwoGenerators(Case):
    def build(self):
        bits = np.random.PCG64(5)
        self.one, self.other = np.random.Generator(bits), np.random.Generator(bits)

    def act(self, n):
        return self.one.random() + 10 * self.other.random()


class OwnMetadata(Case):
    def build(self):
        self.metadata = {"played": 0}

    def act(self, n):
        self.metadata["played"] += n
        return self.metadata["played"]


class NumpyScalars(Case):
    def build(self):
        self.numbers = [np.int8(0)] * 12

    def act(self, n):
        self.numbers[n % 12] = np.int8(n % 2) if n % 3 else np.bool_(n % 2)
        return sum(each.dtype.num * (i + 1) for i, each in enumerate(self.numbers))


class Counter(Case):
    def build(self):
        self.counter, self.default = collections.Counter(), collections.defaultdict(list)
        self.ordered, self.steps = collections.OrderedDict(), itertools.count(3)
        self.add = partial(self.default[1].append)

    def act(self, n):
        self.counter[n % 3] += n
        self.add(n)
        self.ordered[n % 4] = n
        self.ordered.move_to_end(next(iter(self.ordered)))
        return sum(self.counter.values()) + sum(self.default[1]) + next(self.steps) + next(iter(self.ordered))


class Recursive(Case):
    def build(self):
        total = 0

        def add(n):
            nonlocal total
            total += n
            return total if n < 3 else add(n - 3)

        self.add, self.kept = add, None

    def act(self, n):
        self.kept, self.add = self.add, None  # it is not in its place when it is restored
        self.add = [self.kept] if n % 2 else self.kept
        value = self.kept(n)
        self.add, self.kept = self.kept, None
        return value


class TwoLambdas(Case):
    """Holds one of two functions of the same name and line."""

    def build(self):
        self.held, self.both = None, [(lambda n, x=[1]: n + x[0]), (lambda n, x=[2]: n * x[0])]

    def act(self, n):
        self.held = self.both[n % 2]
        return self.held(n)


class LateClosure(Case):
    """Has functions in other places when it is restored."""

    def build(self):
        self.draws = []

    def act(self, n):
        self.draws.insert(0, partial(closure(n), n))
        return sum(draw() for draw in self.draws[:3])


def closure(total):
    def add(n):
        nonlocal total
        total += n
        return total

    return add


class Pattern(Case):
    def build(self):
        self.pattern = re.compile("a+")

    def act(self, n):
        self.pattern = re.compile("a" * (n % 4 + 1))
        return len(self.pattern.match("aaaa").group())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", WAYS)
def test_graphs_are_exact(name, how):
    assert_exact(CASES[name], how)


TOTAL = 0


class Meter:
    """Changes a global, and an attribute of its class."""

    marks: list[int] = []

    def bump(self):
        global TOTAL
        TOTAL += 1
        self.marks.append(TOTAL)
        return TOTAL


def bump_by_five():
    global TOTAL
    TOTAL += 5
    return TOTAL


class WithGlobals(gymnasium.Env):
    """Reports a global in a method, which its results do not depend on."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.counter, self.function, self.steps = Meter(), bump_by_five, 0
        return np.zeros(1), {}

    def step(self, action):
        self.steps += 1
        self.counter.bump()
        self.function()
        return np.full(1, self.steps), 0.0, False, False, {}

    def report(self):
        return TOTAL, len(Meter.marks), Meter.bump.__globals__["TOTAL"], self.function()


def test_a_save_in_a_worker_changes_no_global_and_no_class(make):
    seen = []
    for saves in (False, True):
        envs = make(WithGlobals, 2, num_workers=2, states=4)
        envs.reset(seed=0)
        envs.step([0, 0])
        if saves:
            envs.restore(envs.save())
            envs.restore(envs.unpack_states(envs.pack_states(envs.save())))
        envs.step([0, 0])
        seen.append(envs.call("report"))
        envs.close()
    assert seen[0] == seen[1] == ((12, 2, 12, 17),) * 2


def test_a_save_in_this_process_leaves_classes_and_functions(make):
    methods = dict(vars(Meter)), dict(vars(WithGlobals))
    envs = make(WithGlobals, 2, backend="serial", states=4)
    envs.reset(seed=0)
    envs.step([0, 0])
    envs.restore(envs.unpack_states(envs.pack_states(envs.save())))
    assert (dict(vars(Meter)), dict(vars(WithGlobals))) == methods
    before = TOTAL
    envs.step([0, 0])
    assert before + 12 == TOTAL


class Host(CountingEnv):
    """An env, not a wrapper, with an attribute `env` that comes and goes."""

    def step(self, action):
        if action == 1:
            self.env = {"door": np.arange(3)}
        elif action == 2:
            del self.env
        elif action == 3:
            self.env["door"] += 1
        obs, *rest = super().step(action)
        obs[3] = self.env["door"].sum() if hasattr(self, "env") else -5
        return obs, *rest


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_an_attribute_named_env_comes_and_goes(make, backend):
    envs = make(Host, 1, states=9, backend=backend)
    envs.reset(seed=0)
    without = envs.save()
    envs.step([1])
    present = envs.save()
    assert envs.step([3]).obs[0, 3] == 6
    envs.restore(present)
    assert envs.step([0]).obs[0, 3] == 3
    envs.restore(without)
    assert envs.step([0]).obs[0, 3] == -5
    envs.restore(present)
    assert envs.step([3]).obs[0, 3] == 6
    envs.step([2])
    assert envs.restore(present).obs[0, 3] == 3
    assert envs.step([3]).obs[0, 3] == 6


SCRIPT = """
import gymnasium, jaxvec, numpy as np

BONUS = 5

class Env(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.score = 0, lambda steps: steps + BONUS
        return 0, {}

    def step(self, action):
        self.steps += 1
        return self.score(self.steps), 0.0, False, False, {}

with jaxvec.make(Env, 2, num_workers=2, states=8) as envs:
    envs.reset(seed=0)
    envs.step([0, 0])
    envs.restore(envs.unpack_states(envs.pack_states(envs.save())))
    print(envs.step([0, 0]).obs.tolist())
"""


def test_pickled_lambdas_of_a_script_keep_its_globals():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.stdout, done.stderr) == ("[7, 7]\n", "")


def test_a_state_can_be_restored_twice():
    env = StatefulEnv(SmallView())
    state = env.save()
    first = play(env.env, [1, 2, 3])
    env.restore(state)
    second = play(env.env, [1, 2, 3])
    env.restore(copy.copy(state))
    assert first == second == play(env.env, [1, 2, 3])
