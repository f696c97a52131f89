"""States that move to another process are exact there, or refused by name, and then nothing has changed."""

from __future__ import annotations

import functools
import http
import plistlib
import signal
import socket
import ssl

import gymnasium
import jax
import numpy as np
import pytest
from support.late_structures import START, Late
from support.probe import StatefulEnv, name_of

import jaxvec

KINDS = ["class_that_refers_to_the_env", "closure"] * 2  # the first can't move
REFUSED = r"cannot move a Late to another process: Late\.late would not be as in the original"
FUNCTIONS = [functools.partial(Late, kind) for kind in KINDS]
CROSSWISE = [2, 3, 0, 1]  # two workers have two envs each


class Followed:
    """A pool whose steps are compared with those of envs in this process."""

    def __init__(self, envs):
        self.envs, self.models = envs, [Late(kind) for kind in KINDS]
        self.reset()
        envs.save()  # verifies, before the env has what can't move

    def reset(self):
        handle, _ = jaxvec.reset(self.envs, seed=0)
        for model in self.models:
            model.reset()
        return handle

    def step(self, count):
        for _ in range(count):
            timestep = self.envs.step([0] * 4)
            expected = [model.step(0)[0] for model in self.models]
            np.testing.assert_array_equal(timestep.obs, expected)


def test_a_state_that_would_differ_elsewhere_is_refused(make):
    here, there = (Followed(make(FUNCTIONS, states=30, num_workers=2)) for _ in range(2))
    here.step(START + 2)
    there.step(3)
    states = here.envs.save()
    packed = here.envs.pack_states(states)
    handle = here.reset()
    crosswise = jaxvec.EnvState(states.ids[CROSSWISE])
    attempts = [
        lambda: jax.block_until_ready(jax.jit(jaxvec.restore)(handle, crosswise)[1].obs),
        lambda: here.envs.restore(crosswise),
        lambda: there.envs.unpack_states(packed),
        lambda: there.envs.restore(states),
    ]
    for attempt in attempts:
        errors = jaxvec.EnvStateError, jaxvec.StateFileError, jax.errors.JaxRuntimeError
        with pytest.raises(errors, match=REFUSED):
            attempt()
        here.step(2)
        there.step(2)
    moved = jaxvec.EnvState(states.ids[[1, 1, 1, 1]])
    assert there.envs.restore(moved).obs[:, 0].tolist() == [START + 2] * 4
    assert there.envs.step([0] * 4).obs.tolist() == [[START + 3, 44]] * 4


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"backend": "serial"}])
def test_a_state_that_is_packed_leaves_its_env_as_it_is(make, options):
    pool = Followed(make([functools.partial(Late, "singleton")] * 4, states=30, **options))
    pool.models = [Late("singleton") for _ in pool.models]
    pool.reset()
    pool.step(START - 5)
    before = pool.envs.save()
    pool.step(7)
    pool.envs.pack_states(before)
    pool.step(3)


class Enums(gymnasium.Env):
    """An env that refers to members of many enums, which are attributes of their classes."""

    observation_space = gymnasium.spaces.Box(0, 1000, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        kinds = http.HTTPStatus, http.HTTPMethod, signal.Signals, socket.AddressFamily, socket.SocketKind
        more = ssl.VerifyMode, ssl.TLSVersion, ssl.AlertDescription, plistlib.PlistFormat
        self.members = [[*kind] for kind in (*kinds, *more)]

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action):
        self.members.append(self.members.pop(0))
        return np.array([float(len(self.members[0]))]), 0.0, False, False, {}


def test_each_member_of_an_enum_is_known_by_name():
    """So it is found again in another process. All classes count, wherever Python shows their variables."""
    env = Enums()
    named = set().union(*StatefulEnv(env).digest().named.values())
    members = [member for kind in env.members for member in kind]
    assert {f"{name_of(type(member))}._member_map_[{member.name}]" for member in members} <= named


def aliased(place):
    lists = [1, 2], [1, 2]
    return [*lists, lists[place]]


def adding(number):
    return (lambda x: x + 1) if number == 1 else (lambda x: x + 2)


def counting(start):
    count = start

    def step():
        nonlocal count
        count += 1
        return count

    return step


def of_class(bonus):
    class Local:
        extra = bonus

    return Local()


def of_method(bonus):
    class Local:
        def step(self):
            return 1 if bonus == 1 else 2

    class Other:
        def step(self):
            return 2

    Other.__name__, Other.__qualname__ = Local.__name__, Local.__qualname__
    return Local() if bonus == 1 else Other()


def viewing(start):
    memory = np.arange(9.0)
    return [memory, memory[start : start + 3] if start else np.arange(3.0)]


def generator(draws):
    rng = np.random.default_rng(3)
    rng.random(draws)
    return rng


def locked(is_locked):
    array = np.arange(4)
    array.flags.writeable = not is_locked
    return array


# A function of a value, and two values of it with which envs differ, by kind.
DIFFERENT = {
    "number": (lambda value: value, 1, 2),
    "type of a number": (lambda value: value, 1, True),
    "zero": (lambda value: value, 0.0, -0.0),
    "order of a dict": (lambda keys: dict.fromkeys(keys), "ab", "ba"),
    "members of a set": (set, [1, 2], [1, 3]),
    "aliases": (aliased, 0, 1),
    "code": (adding, 1, 2),
    "closure": (counting, 1, 2),
    "class variable": (of_class, 1, 2),
    "code of a local class": (of_method, 1, 2),
    "array": (np.array, [1, 2], [1, 3]),
    "dtype": (lambda dtype: np.zeros(2, dtype), np.float32, np.int32),
    "shape": (lambda shape: np.zeros(shape), (2, 3), (3, 2)),
    "lock of an array": (locked, True, False),
    "view": (viewing, 0, 1),
    "place of a view": (viewing, 1, 2),
    "content of a memoryview": (lambda data: memoryview(data), b"ab", b"ac"),
    "generator": (generator, 1, 2),
    "default of a partial": (lambda number: functools.partial(divmod, number), 1, 2),
    "bound of a space": (lambda high: gymnasium.spaces.Box(0, high, (2,)), 1, 2),
    "text": (lambda text: [text], "a", "b"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_a_digest_tells_envs_that_differ(kind):
    make, *values = DIFFERENT[kind]
    envs = [Enums() for _ in range(3)]
    for env, value in zip(envs, [values[0], *values], strict=True):
        env.held = make(value)
        env.reset(seed=0)
    one, twin, other = (StatefulEnv(env).digest().attributes for env in envs)
    assert one == twin
    assert next(name for name in one if one[name] != other[name]) == "0 Enums.held"


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"backend": "serial"}])
def test_members_of_enums_move(make, options):
    here, there = (make([Enums] * 4, states=4, **options) for _ in range(2))
    jaxvec.reset(here, seed=0)
    here.step([0] * 4)
    there.restore(there.unpack_states(here.pack_states(here.save())))
    for _ in range(12):
        np.testing.assert_array_equal(here.step([0] * 4).obs, there.step([0] * 4).obs)
