"""Comparison of envs that are restored from saved states with envs that are only stepped."""

import copy
import pickle

import jax
import numpy as np
from support.probe import SlotState, StatefulEnv, pack, prove, unpack


def copied(state):
    """Returns a copy of the state, as another process receives it."""
    return unpack(pack(SlotState(0, state, (0, 0, 0), (0, None, None), {}, False, {}))).env


def assert_goes_on(env_fn, *, num_steps=600, ends=1, pickled=True):
    """Compares an env that is only stepped with two that take turns and exchange states.

    Before a state is put, the env goes elsewhere for some steps, through a reset with another seed at times.
    """
    rng = np.random.default_rng(0)
    straight = env_fn()
    mine, other = (StatefulEnv(env_fn()) for _ in range(2))
    actions = copy.deepcopy(straight.action_space)
    actions.seed(1)

    def wander(env):
        if rng.random() < 0.3:
            env.reset(seed=int(rng.integers(99)))
        for _ in range(rng.integers(1, 5)):
            result = env.step(actions.sample())
            if result[2] or result[3]:
                env.reset()

    prove(mine, fresh=True)
    other.env.reset(seed=5)
    wander(other.env)
    assert_equal(mine.env.reset(seed=3), straight.reset(seed=3))
    count = 0
    for step in range(num_steps):
        if step % 6 == 0:
            state = mine.save()
            if pickled and rng.random() < 0.1:
                state = pickle.loads(pickle.dumps(state))
            wander(mine.env)
            if rng.random() < 0.5:
                mine, other = other, mine
                mine.restore(state)
                wander(mine.env)
            mine.restore(state)
        action = actions.sample()
        expected, seen = straight.step(action), mine.env.step(action)
        assert_equal(seen, expected, step)
        if expected[2] or expected[3]:
            count += 1
            assert_equal(mine.env.reset(), straight.reset(), step)
    assert count >= ends
    prove(mine)
    for env in (straight, mine.env, other.env):
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


WAYS = ("saved", "restored", "anew", "elsewhere", "pickled")


def play(env, actions):
    return [float(env.step(action)[0][0]) for action in actions]


def assert_exact(env_fn, how):
    """Compares an env that is only stepped with one that is saved, and restored, before each step.

    Before a state is restored, the env goes elsewhere for two steps. With `anew`, it also loses its own
    attributes, so that all objects are made anew.
    """
    actions = [2, 0, 4, 1, 3, 3, 0, 2, 1, 4]
    expected = play(env_fn(), actions)
    mine, other = StatefulEnv(env_fn()), StatefulEnv(env_fn())
    play(other.env, [1, 1])
    seen = []
    for action in actions:
        state = mine.save()
        if how == "pickled":
            state = copied(state)
        if how != "saved":
            play(mine.env, [4, 2])
            if how == "elsewhere":
                mine, other = other, mine
            if how == "anew":
                vars(mine.env).clear()
            mine.restore(state)
        seen.extend(play(mine.env, [action]))
    assert seen == expected
