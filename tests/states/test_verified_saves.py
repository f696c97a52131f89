"""`States(verify=...)`: saved states are verified with the actions that the program takes after the save."""

from __future__ import annotations

import os

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.filterwarnings("ignore")

ALWAYS = jaxvec.States(max=20, verify=1)
RARE = 777  # an action that the first proof does not take
NUM_RECORDED = 40


class Leaky(gymnasium.Env):
    """Keeps a part of its state, which only a rare action changes, where no snapshot finds it."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(1000)
    total = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1), {}

    def step(self, action):
        self.steps += 1
        if action == RARE:
            type(self).total += 1
        return np.array([self.steps + 1000.0 * self.total]), 0.0, False, False, {}


class Exits(gymnasium.Env):
    observation_space = action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        if action == 1:
            os._exit(3)
        return 0, 0.0, False, False, {}


class ExitsAndLeaks(Exits):
    steps = 0

    def step(self, action):
        type(self).steps += 1
        return super().step(action)[0] + self.steps % 2, 0.0, False, False, {}


def test_a_wrong_state_is_found_at_the_next_restore(make, backend):
    envs = make(Leaky, 1, states=ALWAYS, backend=backend)
    envs.reset(seed=0)
    state = envs.save()
    assert envs.step([RARE]).obs[0, 0] % 1000 == 1
    with pytest.raises(jaxvec.EnvStateError, match="env 0.*Restoring Leaky.*after 1 identical actions, obs"):
        envs.restore(state)


def test_a_wrong_state_is_found_at_a_later_save(make, backend):
    envs = make(Leaky, 2, num_workers=1, states=ALWAYS, backend=backend)
    envs.reset(seed=0)
    for number in range(NUM_RECORDED + 1):
        if number % 7 == 0:
            envs.save()  # the recording goes on
        envs.step([RARE if number == 20 else 0, 0])
    with pytest.raises(jaxvec.EnvStateError, match="env 0.*Restoring Leaky.*identical actions, obs differs"):
        envs.save()
    assert envs.step([0, 0]).obs[0, 0] % 1000 == 42  # the env goes on as if nothing had happened


def test_no_verification_without_the_option(make):
    envs = make(Leaky, 1, states=20)
    envs.reset(seed=0)
    state = envs.save()
    envs.step([RARE])
    assert envs.restore(state).obs[0, 0] == 0


class Generates(CountingEnv):
    """Has an attribute that can't be saved after an action of 1."""

    rows: object = None

    def step(self, action):
        self.rows = (number for number in range(3)) if action == 1 else None
        return super().step(action)


def test_an_env_that_can_no_longer_be_saved_is_restored(make, backend):
    envs = make(Generates, 2, num_workers=1, states=ALWAYS, backend=backend)
    envs.reset(seed=0)
    state, first = envs.save(), envs.step([0, 0])
    envs.step([1, 0])
    envs.restore(state)
    second = envs.step([0, 0])
    assert second.obs.tolist() == first.obs.tolist()
    envs.step([1, 0])
    with pytest.raises(jaxvec.EnvStateError, match=r"env 0.*attribute Generates\.rows"):
        envs.save()


@pytest.mark.parametrize("share", [0.3, 1])
def test_exact_states_pass_and_change_nothing(make, backend, share):
    results = []
    for options in (jaxvec.States(max=40), jaxvec.States(max=40, verify=share)):
        envs = make(CountingEnv, 2, episode_length=15, states=options, backend=backend, num_workers=1)
        envs.reset(seed=0)
        seen = []
        for number in range(100):
            if number % 9 == 0:
                state = envs.save()
            if number % 31 == 30:
                seen.append(envs.restore(state[::-1]).obs.tolist())
            if number == 50:
                envs.set_attr("steps", 1000, indices=[1])
            timestep = envs.step([number, 2 * number])
            seen.append((timestep.obs.tolist(), timestep.reward.tolist(), timestep.terminated.tolist()))
        results.append(seen)
    assert results[0] == results[1]


class Lent(CountingEnv):
    """Writes its observations into the memory of the pool."""

    row = None

    def set_observation_buffer(self, row):
        self.row = row

    def step(self, action):
        obs, *rest = super().step(action)
        if self.row is None:
            return obs, *rest
        self.row[...] = obs
        return self.row, *rest


def test_an_env_in_the_pools_memory_is_verified(make):
    envs = make(Lent, 1, states=ALWAYS)
    envs.reset(seed=0)
    for number in range(100):
        if number % 10 == 0:
            state = envs.save()
        assert envs.step([number]).obs[0, 3] == number
    assert envs.restore(state).obs[0, 3] == 89
    assert envs.step([5]).obs.tolist() == [[1, 91, 91, 5]]


def test_an_env_that_exits_is_verified_with_real_actions(make):
    envs = make(Exits, 1, states=20)
    envs.reset(seed=0)
    state = envs.save()
    envs.step([0])
    envs.restore(state)
    leaky = make(ExitsAndLeaks, 1, states=20)
    leaky.reset(seed=0)
    state = leaky.save()
    leaky.step([0])
    with pytest.raises(jaxvec.EnvStateError, match="after 1 identical actions, obs differs"):
        leaky.restore(state)


def test_a_rebuilt_env_is_not_compared_with_the_old_one(make):
    envs = make(Exits, 1, states=ALWAYS, on_fault=jaxvec.Restart())
    envs.reset(seed=0)
    envs.save()
    envs.step([1])
    envs.save()
    envs.step([0])
    envs.restore(envs.save())


class Trusted:
    """Has a copy protocol that jaxvec does not take unless the user trusts it."""

    def __init__(self, count):
        self.count = count

    def __reduce__(self):
        return Trusted, (self.count,)


class WithTrusted(CountingEnv):
    def step(self, action):
        self.trusted = Trusted(getattr(self, "trusted", Trusted(0)).count + 1)
        obs, *rest = super().step(action)
        obs[3] = self.trusted.count
        return obs, *rest


def test_trusted_classes_are_saved_in_workers(make, backend):
    envs = make(WithTrusted, 1, states=jaxvec.States(max=9, trust=[Trusted]), backend=backend)
    envs.reset(seed=0)
    envs.step([0])
    state = envs.save()
    assert envs.step([0]).obs[0, 3] == 2
    envs.restore(state)
    assert envs.step([0]).obs[0, 3] == 2


@pytest.mark.parametrize("share", [-0.1, 1.5, "all", True, float("nan")])
def test_bad_shares_are_refused(share):
    with pytest.raises(ValueError, match=r"States\(verify=...\) must be a share of the saves"):
        jaxvec.States(max=1, verify=share)
