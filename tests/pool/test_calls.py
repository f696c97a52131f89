"""What else the host asks of envs: functions run on them, attributes, wrappers; of which, and what fails."""

import os
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from support.disasters import TwoArguments

import jaxvec
from jaxvec.testing import CountingEnv


class Leveled(CountingEnv):
    """Has attributes, one of them a function, and one that can't be set."""

    def __init__(self, index):
        super().__init__()
        self.index = index
        self.level = 0
        self.scale = abs

    def twice(self):
        return 2 * self.index

    @property
    def fixed(self):
        return 1


class Shield(gymnasium.Wrapper):
    """A wrapper of the user's own."""

    shield = "up"


def wrapped(index):
    return TimeLimit(Shield(Leveled(index)), 9)


# --- Functions ---------------------------------------------------------------------------------


def test_a_function_runs_on_envs_where_they_live(make, backend):
    envs = make(wrapped, 3, backend=backend, num_workers=1 if backend == "serial" else 2)
    envs.reset()
    envs.step([5, 5, 5])
    offset = 10  # travels with the function

    def change(env, by, *, times=2):
        env.unwrapped.level += by * times + offset
        return env.unwrapped.index, env.get_wrapper_attr("_elapsed_steps"), os.getpid()

    answers = envs.map(change, 1, indices=[2, 0])
    assert [answer[:2] for answer in answers] == [(2, 1), (0, 1)]
    assert envs.get_attr("level") == (12, 0, 12)
    pids = {pid for *_, pid in envs.map(change, 0)}
    assert (len(pids), os.getpid() in pids) == ((1, True) if backend == "serial" else (2, False))


def test_map_that_replaces_an_env_part_is_seen_by_the_next_step(make, backend):
    """The compiled loop passes `TimeLimit` by, after its first steps."""
    envs = make(wrapped, 2, backend=backend)
    envs.reset()
    for _ in range(3):
        envs.step([0, 0])
    envs.map(lambda env: setattr(env, "_max_episode_steps", 4), indices=1)
    assert envs.step([0, 0]).truncated.tolist() == [False, True]


def test_a_function_runs_once_on_each_batched_env(make):
    def new():
        return SyncVectorEnv([CountingEnv] * 2)

    envs = make(new, 4, envs_per_instance=2, num_workers=1)
    envs.reset()
    assert envs.map(lambda env: env.num_envs) == (2, 2, 2, 2)
    assert envs.map(lambda env: [id(env), id(env)], indices=[0, 3])[0] != envs.map(id, indices=3)[0]
    assert envs.map(lambda env: env.get_attr("resets"), indices=[1, 2]) == (1, 1)
    envs.set_attr("steps", 5, indices=[2])
    assert envs.get_attr("steps") == (0, 0, 5, 0)
    with pytest.raises(jaxvec.EnvAttributeError, match=r"no env attribute 'nothing' \(env 2, worker 0\)"):
        envs.get_attr("nothing", indices=[2])


def test_map_error_names_the_env_and_the_pool_stays_usable(make, backend):
    def fail(env):
        if env.unwrapped.index == 1:
            raise LookupError("there is no door")
        return env.unwrapped.index

    envs = make(wrapped, 2, backend=backend)
    with pytest.raises(jaxvec.EnvError, match="env 1.* raised LookupError in map: there is no door") as info:
        envs.map(fail)
    assert (info.value.env_id, info.value.operation) == (1, "map")
    assert isinstance(info.value.__cause__, LookupError)
    assert envs.map(fail, indices=[0]) == (0,)


def test_what_a_worker_can_not_open_is_an_error_of_the_call(make):
    class Closed:
        def __reduce__(self):
            return int, ("no number",)

    envs = make(wrapped, 2)
    with pytest.raises(jaxvec.EnvError, match=r"env 0 \(worker 0\) raised ValueError in map: .*no number"):
        envs.map(lambda env, _: None, Closed())
    assert envs.get_attr("index") == (0, 1)


@pytest.mark.parametrize(
    "ask",
    [
        lambda envs, lock: envs.map(lambda env: lock),
        lambda envs, lock: envs.call("render", lock),
        lambda envs, lock: envs.set_attr("level", lock),
        lambda envs, lock: envs.reset(options={"lock": lock}),
    ],
)
def test_what_can_not_be_pickled_is_refused_and_the_pool_stays_usable(make, ask):
    envs = make(wrapped, 2)
    envs.reset(seed=3)
    with pytest.raises(jaxvec.NotPicklableError, match="can't be sent to the workers: .*lock") as info:
        ask(envs, threading.Lock())
    assert isinstance(info.value, TypeError)
    assert envs.get_attr("resets") == (1, 1)
    assert envs.step([0, 0]).obs[:, 1].tolist() == [1, 1]
    assert envs.reset().obs[:, 0].tolist() == [2, 2]


# --- Attributes --------------------------------------------------------------------------------


def test_an_attribute_is_set_where_it_is_as_by_gymnasium(make, backend):
    envs, alone = make(wrapped, 2, backend=backend), wrapped(0)
    names = ("level", "shield", "_max_episode_steps", "new")
    for value, name in enumerate(names):
        envs.set_attr(name, value)
        alone.set_wrapper_attr(name, value)

    def where(env):
        layers = [env, env.env, env.env.env]
        return [[vars(layer).get(name) for name in names] for layer in layers]

    assert envs.map(where) == (where(alone),) * 2


def test_an_attribute_can_be_a_list(make, backend):
    envs = make(wrapped, 3, backend=backend)
    envs.set_attr("level", [[1, 2]] * 3)
    assert envs.get_attr("level") == ([1, 2],) * 3
    envs.set_attr("level", [(3,)], indices=-1)
    assert envs.get_attr("level") == ([1, 2], [1, 2], (3,))


def test_a_callable_attribute_is_read_or_called(make, backend):
    envs = make(wrapped, 2, backend=backend)
    assert envs.map(lambda env: env.get_wrapper_attr("scale")) == (abs, abs)
    assert envs.get_attr("twice", indices=1) == (2,)
    with pytest.raises(jaxvec.EnvError, match="env 0.* raised TypeError in scale"):
        envs.get_attr("scale")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda envs: envs.get_attr("nothing"), r"(?m)^no env attribute 'nothing' \(env 0(, worker 0)?\)$"),
        (lambda envs: envs.call("nothing", 3), r"^no env attribute 'nothing' \(env 0"),
        (
            lambda envs: envs.get_attr("levle"),
            r"^no env attribute 'levle' \(env 0.*\)\. Did you mean 'level'\?",
        ),
        (lambda envs: envs.get_attr("level.reel"), r"'level.reel' \(env 0.*'reel'\. Did you mean 'real'\?"),
        (
            lambda envs: envs.set_attr("fixed", 3),
            r"^set_attr\('fixed'\) failed \(env 0.*\): property .* no setter",
        ),
    ],
)
def test_a_missing_attribute_is_an_attribute_error_too(make, backend, ask, message):
    envs = make(wrapped, 2, backend=backend)
    with pytest.raises(AttributeError, match=message) as info:
        ask(envs)
    assert "AttributeError" in info.value.remote_traceback
    assert type(info.value) is jaxvec.EnvAttributeError
    assert isinstance(info.value, jaxvec.EnvError)
    assert isinstance(info.value.__cause__, AttributeError)
    assert envs.get_attr("level") == (0, 0)


def test_attribute_error_inside_a_method_is_no_missing_method(make, backend):
    class Careless(CountingEnv):
        def lose(self):
            return self.gone

    envs = make(Careless, 1, backend=backend)
    with pytest.raises(jaxvec.EnvError, match="raised AttributeError in lose") as info:
        envs.call("lose")
    assert type(info.value) is jaxvec.EnvError


def test_attribute_error_of_a_property_keeps_its_text(make, backend):
    class Lazy(CountingEnv):
        @property
        def scene(self):
            raise AttributeError("the scene is loaded by reset")

    envs = make(Lazy, 1, backend=backend)
    for ask in (lambda: envs.get_attr("scene"), lambda: envs.call("scene")):
        with pytest.raises(
            jaxvec.EnvAttributeError, match="'scene'.*: the scene is loaded by reset$"
        ) as info:
            ask()
        assert "Did you mean" not in str(info.value)


NAMED = {
    "call": lambda envs, name: envs.call(name),
    "call_async": lambda envs, name: envs.call_async(name).result(200),
    "get_attr": lambda envs, name: envs.get_attr(name),
    "set_attr": lambda envs, name: envs.set_attr(name, 1),
    "call in a program": lambda envs, name: jaxvec.call(jaxvec.reset(envs)[0], name),
    "get_attr in a program": lambda envs, name: jaxvec.get_attr(jaxvec.reset(envs)[0], name, int),
}


@pytest.mark.parametrize("ask", NAMED.values(), ids=NAMED)
def test_a_name_that_is_no_str_is_refused(make, backend, ask):
    envs = make(wrapped, 2, backend=backend)
    for name in (None, 3, b"level", ["level"], np.array(["level"])):
        with pytest.raises(TypeError, match="the name of a method or attribute must be a str, not"):
            ask(envs, name)
    with pytest.raises(TypeError, match=r"not <function .*twice.*; to run a function, use envs\.map"):
        ask(envs, Leveled.twice)
    assert envs.get_attr("level") == (0, 0)


# --- Indices -----------------------------------------------------------------------------------

ASK = {
    "call": lambda envs, indices: envs.call("index", indices=indices),
    "call_async": lambda envs, indices: envs.call_async("index", indices=indices).result(200),
    "get_attr": lambda envs, indices: envs.get_attr("index", indices=indices),
    "map": lambda envs, indices: envs.map(lambda env: env.unwrapped.index, indices=indices),
    "infos": lambda envs, indices: tuple(info["seed"] for info in envs.infos(indices)),
}


@pytest.fixture(scope="module")
def shared():
    with jaxvec.make(wrapped, 3, num_workers=2) as envs:
        envs.reset(seed=0)
        yield envs


INDICES = [
    (None, (0, 1, 2)),
    (1, (1,)),
    (-1, (2,)),
    (np.int64(2), (2,)),
    ([-3], (0,)),
    ([2, -2], (2, 1)),
    ([2, 0, 1], (2, 0, 1)),
    (np.array([0, 2]), (0, 2)),
    (range(2), (0, 1)),
    ([], ()),
    (np.zeros(0, int), ()),
]


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_indices_are_one_or_some_and_may_count_from_the_end(shared, ask):
    assert [ask(shared, indices) for indices, _ in INDICES] == [expected for _, expected in INDICES]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (3, r"indices: 3 is out of range for 3 envs \(-3 to 2\)"),
        ([0, -4], r"indices: -4 is out of range for 3 envs \(-3 to 2\)"),
        ([0, 1, 0], "indices: env 0 is named twice; name each env once"),
        ([2, -1], "indices: env 2 is named twice; name each env once"),
        ([0.5], "indices: expected an integer or a list of them, got float64"),
        ([True, False, True], "indices: expected an integer or a list of them, got bool"),
        ([[0, 1]], r"indices: .*got int64 of shape \(1, 2\)"),
        ("all", "indices: expected an integer or a list of them, got <U3"),
        ([[0], [1, 2]], "indices: expected an integer or a list of them, got a ragged"),
    ],
)
@pytest.mark.parametrize(
    "ask", [*ASK.values(), lambda envs, indices: envs.set_attr("level", 1, indices=indices)]
)
def test_wrong_indices_are_named_as_such(shared, ask, indices, message):
    with pytest.raises(jaxvec.EnvIdError, match=message):
        ask(shared, indices)


def test_an_answer_that_does_not_travel_leaves_the_pool_usable(make):
    class Env(CountingEnv):
        def lock(self):
            return threading.Lock()

        def unpicklable_here(self):
            return TwoArguments(1, 2)

    envs = make(Env, 2)
    with pytest.raises(jaxvec.EnvError, match=r"env 0 .*cannot pickle '_thread.lock'"):
        envs.call("lock")
    with pytest.raises(jaxvec.EnvError, match="worker 0 .*can't be unpickled here: TwoArguments"):
        envs.call("unpicklable_here")
    assert envs.get_attr("resets") == (0, 0)
