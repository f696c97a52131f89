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


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"backend": "serial"}])
def test_members_of_enums_move(make, options):
    here, there = (make([Enums] * 4, states=4, **options) for _ in range(2))
    jaxvec.reset(here, seed=0)
    here.step([0] * 4)
    there.restore(there.unpack_states(here.pack_states(here.save())))
    for _ in range(12):
        np.testing.assert_array_equal(here.step([0] * 4).obs, there.step([0] * 4).obs)
