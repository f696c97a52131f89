"""Each env is an object of its own, and has its own copy of each value that is given once."""

from __future__ import annotations

import threading
from collections import UserList
from contextlib import nullcontext
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from support.disasters import RaisingEnv

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
    built = []

    def third_is_first():
        built.append(RaisingEnv() if len(built) < 2 else built[0])
        return built[-1]

    policy = jaxvec.Restart(retry="rebuild", max_restarts=1, rate=None)
    envs = make(third_is_first, 2, num_workers=1, on_fault=policy, backend=backend)
    envs.reset()
    with pytest.raises(jaxvec.EnvError, match="the same env for env 0 and env 1;"):
        envs.step([1, 7])


# --- A value that is given once is one per env -------------------------------------------------------------


class Logging(CountingEnv):
    """Adds to its log in each reset, and observes its length."""

    def __init__(self, log, more=()):
        super().__init__(2)
        self.log, self.more = log, more

    def reset(self, *, seed=None, options=None):
        given = [] if options is None else options["nested"]["log"]
        for log in (self.log, *self.more, given):
            log.append(seed)
        return super().reset(seed=seed)[0], {"log": len(self.log), "options": len(given)}

    def add(self, log, *, key=None):
        log.append(0)
        key = [] if key is None else key
        key.append(0)
        self.same = log is key
        return len(log), len(key)


POOLS = [{"num_workers": 1}, {"num_workers": 4}, {"backend": "serial"}]


@pytest.fixture(params=POOLS, ids=str)
def pool(request, make):
    """Yields a function that makes a pool of four envs: with one worker, with four, and without any."""
    return lambda *args, **kwargs: make(*args, 4, **request.param, **kwargs)


def test_a_keyword_of_make_is_one_object_per_env(pool):
    log = []
    envs = pool(Logging, log=log, env_configs=[{"more": [log, []]}] * 4, info={"log": int})
    log.append("after make")
    timestep = envs.reset(seed=0)
    assert timestep.info["log"].tolist() == [2] * 4  # `log` and `more[0]` are one object
    assert envs.get_attr("log") == ([0, 0], [1, 1], [2, 2], [3, 3])
    assert log == ["after make"]


def test_gymnasium_ids_get_their_own_keyword_objects(pool):
    gymnasium.register("Logging-v0", Logging)
    try:
        envs = pool("Logging-v0", log=[], disable_env_checker=True, info={"log": int})
        assert envs.reset(seed=0).info["log"].tolist() == [1] * 4
    finally:
        del gymnasium.registry["Logging-v0"]


def test_a_rebuilt_env_gets_a_new_copy_of_a_keyword(make, backend):
    class Failing(Logging):
        def step(self, action):
            assert action != 13
            return super().step(action)

    policy = jaxvec.Restart(retry="rebuild", max_restarts=None, rate=None)
    log, attribute = [], []
    envs = make(Failing, 2, num_workers=1, log=log, on_fault=policy, backend=backend)
    envs.set_attr("kept", [attribute] * 2)
    envs.reset()
    log.append("later")
    attribute.append("later")
    envs.step([13, 1])
    assert [len(each) for each in envs.get_attr("log")] == [1, 1]
    assert envs.get_attr("kept") == ([], [])


def test_set_attr_gives_each_env_its_own_value(pool):
    envs = pool("CartPole-v1")
    envs.reset(seed=0)
    generator = np.random.default_rng(0)
    envs.set_attr("np_random", generator)
    expected = np.random.default_rng(0).uniform(-0.05, 0.05, 4).astype(np.float32)
    np.testing.assert_array_equal(envs.reset().obs, [expected] * 4)
    assert generator.integers(100) == np.random.default_rng(0).integers(100)  # ours was not used
    envs.set_attr("steps_beyond", [[1, 2]] * 4)
    envs.map(lambda env: env.steps_beyond.append(3))
    assert envs.get_attr("steps_beyond") == ([1, 2, 3],) * 4


def test_calls_give_each_env_its_own_arguments(pool):
    envs = pool(Logging, log=[])
    log = []
    assert envs.call("add", log) == ((1, 1),) * 4
    assert envs.call_async("add", log, key=[]).result(timeout=60) == ((1, 1),) * 4
    assert envs.call("add", log, key=log) == ((2, 2),) * 4  # one object in the call is one in the env
    assert envs.get_attr("same") == (True,) * 4
    assert envs.map(lambda env, log: env.unwrapped.add(log), log) == ((1, 1),) * 4
    assert log == []


def test_program_calls_give_each_env_its_own_array(pool):
    class Doubling(CountingEnv):
        kept = ()

        def double(self, x):
            self.kept = *self.kept, x
            x *= 2
            return x.sum()

    envs = pool(Doubling)
    handle, _ = jaxvec.reset(envs)
    result = jax.ShapeDtypeStruct((), jnp.float32)
    _, first = jaxvec.call(handle, "double", jnp.ones((4, 3)), result_shape_dtypes=result)
    assert first.tolist() == [6.0] * 4
    assert [each[0].tolist() for each in envs.get_attr("kept")] == [[2.0] * 3] * 4


def test_reset_options_are_one_object_per_env(pool):
    envs = pool(Logging, log=[], info={"options": int})
    options = {"nested": {"log": []}}
    for count in (1, 1):
        assert envs.reset(options=options).info["options"].tolist() == [count] * 4
    assert options == {"nested": {"log": []}}
    assert envs.reset(options=[options] * 4).info["options"].tolist() == [1] * 4


def test_batched_envs_get_their_own_values(make, backend):
    def batched(log):
        return SyncVectorEnv([lambda: Logging(log)] * 2, autoreset_mode="SameStep")

    envs = make(batched, 4, envs_per_instance=2, num_workers=1, log=[], info={"log": int}, backend=backend)
    assert envs.reset(seed=0).info["log"].tolist() == [1, 2, 1, 2]  # a closure of the user's own function
    envs.set_attr("log", [[]] * 4)
    assert envs.reset(seed=0).info["log"].tolist() == [1, 1, 1, 1]


def test_read_only_arrays_functions_and_locks_are_shared(make, backend):
    terrain, writable = np.zeros(1000), np.zeros(1000)
    terrain.flags.writeable = False
    objects = np.array([[]], object)
    objects.flags.writeable = False
    given = {"terrain": terrain, "nested": [{"terrain": terrain}], "function": same_env}
    given |= {"writable": writable, "view": np.broadcast_to(np.zeros(1), 3), "objects": objects}

    class Keeping(CountingEnv):
        def __init__(self, **given):
            super().__init__()
            self.given = given

        def __call__(self):
            nested = self.given["nested"][0]["terrain"]
            return {name: id(each) for name, each in {**self.given, "nested": nested}.items()}

    envs = make(Keeping, 2, num_workers=1, backend=backend, **given)
    first, second = envs.map(lambda env: env.unwrapped())
    assert {name for name in first if first[name] == second[name]} == {"terrain", "nested", "function"}
    assert first["terrain"] == first["nested"]


def test_serial_envs_share_what_cannot_be_copied(make):
    lock = threading.Lock()
    envs = make(Logging, 2, backend="serial", log=[], more=UserList([lock]))

    def add(env, lock, log):
        log.append(0)
        return env.unwrapped.more[0] is lock, len(log)

    assert envs.map(add, lock, []) == ((True, 1),) * 2
    envs.set_attr("lock", {"lock": lock, "log": []})
    first, second = envs.get_attr("lock")
    assert first["lock"] is second["lock"] is lock
    assert first["log"] is not second["log"]


@pytest.mark.parametrize("vector_env", [SyncVectorEnv, compat.SyncVectorEnv])
def test_gymnasium_envs_without_processes_share_values(vector_env):
    log: list[int] = []
    envs = vector_env([partial(Logging, []), partial(Logging, [])])
    try:
        assert envs.call("add", log) == ((1, 1), (2, 1))
        envs.set_attr("log", [log, log])
        assert all(env.unwrapped.log is log for env in envs.envs)
    finally:
        envs.close()


class OnlyOne(CountingEnv):
    """A simulator that a process can have once, until it is closed."""

    exists = False

    def __init__(self):
        if OnlyOne.exists:
            raise RuntimeError("cannot create multiple emulator instances per process")
        super().__init__()
        OnlyOne.exists = True

    def close(self):
        OnlyOne.exists = False


def test_a_second_instance_in_a_process_names_num_workers(make):
    with pytest.raises(jaxvec.EnvError, match=r"(?s)env 1 .*multiple emulator.*num_workers=num_envs"):
        make(OnlyOne, 2, num_workers=1)
    assert make(OnlyOne, 2, num_workers=2).reset(seed=0).obs.shape == (2, 4)


def test_an_instance_beside_that_of_a_slot_names_its_use(make):
    with pytest.raises(jaxvec.EnvError, match=r"(?s)multiple emulator.*a spare env.*without spare_envs"):
        make(OnlyOne, 1, num_workers=1, spare_envs=1)
    envs = make(OnlyOne, 1, num_workers=1, states=2)
    envs.reset(seed=0)
    with pytest.raises(jaxvec.EnvError, match=r"(?s)multiple emulator.*for simulate.*save and restore"):
        envs.simulate(envs.save(), [0])


def test_first_env_that_fails_is_no_question_of_instances(make):
    class Failing(CountingEnv):
        def __init__(self):
            raise RuntimeError("no licence")

    with pytest.raises(jaxvec.EnvError, match="no licence") as caught:
        make(Failing, 1, num_workers=1)
    assert "num_workers" not in str(caught.value)
