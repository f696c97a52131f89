"""A save changes no global, class or function, and pickled functions keep their globals."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.scripts import run_python

from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.filterwarnings("ignore")

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
    done = run_python("-c", SCRIPT)
    assert (done.stdout, done.stderr) == ("[7, 7]\n", "")
