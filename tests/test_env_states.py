"""The state of one env as a value: an env that is put back, time and again, does what one does that never was."""

from __future__ import annotations

import copy
import pickle
import random
from functools import partial
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest

from jaxvec._slices._env_states import put, take, watch

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_goes_on(env_fn, *, num_steps=2000, ends=1, pickled=True, every=7):
    """Compares an env that is stepped with two that take turns, between which states go to and fro.

    Before a state is put, the env goes elsewhere for some steps, through a reset with another seed at times.
    """
    rng = np.random.default_rng(0)
    straight, *others = (env_fn() for _ in range(3))
    for env in (straight, *others):
        watch(env)
    space = straight.action_space
    space.seed(1)

    def wander(env):
        if rng.random() < 0.3:
            env.reset(seed=int(rng.integers(99)))
        for _ in range(rng.integers(1, 12)):
            result = env.step(space.sample())
            if result[2] or result[3]:
                env.reset()

    wander_from = copy.deepcopy(space)  # so that each env's own space is not drawn from
    space = wander_from
    for env in others:
        env.reset(seed=5)
        wander(env)
    expected = straight.reset(seed=3)
    seen = others[0].reset(seed=3)
    assert_equal(seen, expected)
    count = 0
    for step in range(num_steps):
        if step % every == 0:
            state = take(others[0])
            if pickled and rng.random() < 0.1:
                state = pickle.loads(pickle.dumps(state))
            wander(others[0])
            if rng.random() < 0.5:
                others.reverse()
                put(others[0], state)
                wander(others[0])
            assert put(others[0], state) is others[0]
        action = space.sample()
        expected, seen = straight.step(action), others[0].step(action)
        assert_equal(seen, expected, step)
        if expected[2] or expected[3]:
            count += 1
            assert_equal(others[0].reset(), straight.reset(), step)
    assert count >= ends
    for env in (straight, *others):
        env.close()


def assert_equal(seen, expected, step=-1):
    seen, expected = (jax.tree_util.tree_flatten_with_path(result)[0] for result in (seen, expected))
    assert len(seen) == len(expected)
    for (path, one), (other_path, other) in zip(seen, expected, strict=True):
        assert path == other_path
        assert type(one) is type(other), (step, path)
        if isinstance(one, (np.ndarray, np.generic)):
            assert one.dtype == other.dtype, (step, path)
            assert one.shape == other.shape, (step, path)
            assert one.tobytes() == other.tobytes(), (step, path)
        else:
            assert one == other or (one != one and other != other), (step, path)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("Acrobot-v1", 1),
        ("CartPole-v1", 50),
        ("MountainCar-v0", 9),
        ("MountainCarContinuous-v0", 2),
        ("Pendulum-v1", 9),
        ("Blackjack-v1", 900),
        ("CliffWalking-v1", 0),
        ("FrozenLake-v1", 100),
        ("Taxi-v4", 9),
    ],
)
def test_gymnasiums_own(name, ends):
    assert_goes_on(partial(gymnasium.make, name), ends=ends)
