"""Each env is an object of its own."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import gymnasium
import pytest
from gymnasium.vector import SyncVectorEnv

import jaxvec
from jaxvec.compat import gymnasium as compat
from jaxvec.testing import CountingEnv

# --- One object is one slot --------------------------------------------------------------------------------


def same_env():
    env = CountingEnv()
    return lambda: env


class Bare(CountingEnv):
    """An env whose `unwrapped` raises, and that does not want to be asked for parts of other envs."""

    unwrapped = property(lambda self: 1 / 0)

    def __getattr__(self, name):
        raise {"env": KeyError, "envs": KeyError, "adapted": KeyError}.get(name, AttributeError)(name)


class Everywhere(CountingEnv):
    """An env with an `unwrapped` that is the same for all."""

    unwrapped = CountingEnv


def wrapped(env):
    return gymnasium.wrappers.TimeLimit(gymnasium.wrappers.OrderEnforcing(env), 9)


@pytest.mark.parametrize("wrap", [lambda env: env, wrapped])
def test_make_refuses_one_env_in_two_slots(backend, wrap):
    env, text = CountingEnv(), "the same env for env 0 and env 1; .*not lambda: env"
    with pytest.raises(jaxvec.EnvError, match=text) as caught:
        jaxvec.make(lambda: wrap(env), 3, num_workers=1, backend=backend)
    assert (caught.value.env_id, caught.value.operation) == (1, "constructor")


def test_make_finds_one_env_among_different_ones(make):
    env = CountingEnv()
    with pytest.raises(jaxvec.EnvError, match="the same env for env 3 and env 5;"):
        make([CountingEnv] * 3 + [lambda: env, CountingEnv, lambda: env], num_workers=2)
    # Each worker unpickles an env of its own.
    envs = make(lambda: env, 2, num_workers=2)
    assert envs.reset().obs[:, 0].tolist() == [1, 1]


@pytest.mark.parametrize("env", [Bare, Everywhere])
def test_make_accepts_envs_with_a_strange_unwrapped(make, env):
    class Sane(env):
        observation_space = CountingEnv().observation_space

    envs = make([env, Sane], backend="serial")
    assert envs.reset().obs[:, 0].tolist() == [1, 1]


def test_make_refuses_one_batched_env_in_two_places(backend):
    batched = SyncVectorEnv([CountingEnv] * 2, autoreset_mode="SameStep")
    start = partial(jaxvec.make, num_envs=4, envs_per_instance=2, num_workers=1, backend=backend)
    with pytest.raises(jaxvec.EnvError, match="the same env for env 0 and env 2;"):
        start(lambda: batched)
    env = CountingEnv()
    with pytest.raises(jaxvec.EnvError, match="the same env for env 1 and env 3;"):
        start(lambda: SyncVectorEnv([CountingEnv, lambda: env]))
    with pytest.raises(jaxvec.EnvError, match="the same env for env 0 and env 1;"):
        jaxvec.make(SyncVectorEnv([lambda: env] * 2))


@pytest.mark.parametrize("vector_env", [compat.SyncVectorEnv, partial(compat.AsyncVectorEnv, num_workers=1)])
def test_gymnasium_api_refuses_one_env_in_two_slots(vector_env):
    logged = pytest.warns(match="Worker-1|the same env|Raising")
    with (
        pytest.raises(ValueError, match="the same env for env 0 and env 1;"),
        nullcontext() if vector_env is compat.SyncVectorEnv else logged,
    ):
        vector_env([same_env()] * 2)


def test_a_spare_env_is_no_env_of_a_slot(make):
    with pytest.raises(jaxvec.EnvError, match="the same env for env 0 and a spare env;"):
        make(same_env(), 1, spare_envs=1)
    built = []

    def third_is_second():
        built.append(CountingEnv() if len(built) < 2 else built[1])
        return built[-1]

    with pytest.raises(jaxvec.EnvError, match="the same env for a spare env and a spare env;"):
        make(third_is_second, 1, spare_envs=2)


def test_simulate_steps_no_env_of_the_pool(make, backend):
    envs = make(same_env(), 1, states=4, backend=backend)
    envs.reset(seed=0)
    state = envs.save()
    with pytest.raises(jaxvec.EnvError, match="the same env for env 0 and simulate;"):
        envs.simulate(state, [3])
    assert envs.get_attr("steps") == (0,)


def test_a_rebuilt_env_is_not_the_env_of_another_slot(make, backend):
    class Failing(CountingEnv):
        def step(self, action):
            assert action != 13
            return super().step(action)

    built = []

    def third_is_first():
        built.append(Failing() if len(built) < 2 else built[0])
        return built[-1]

    policy = jaxvec.Restart(retry="rebuild", max_restarts=1, rate=None)
    envs = make(third_is_first, 2, num_workers=1, on_fault=policy, backend=backend)
    envs.reset()
    with pytest.raises(jaxvec.EnvError, match="the same env for env 0 and env 1;"):
        envs.step([1, 13])
