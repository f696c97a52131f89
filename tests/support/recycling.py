"""Envs and models for tests of `Workers(recycle=...)`."""

from __future__ import annotations

import os

import jax
import numpy as np
from support import probe
from support.probe import _stats

import jaxvec
from jaxvec.testing import CountingEnv

NUM_ENVS, NUM_STEPS = 4, 60
OFTEN = jaxvec.Recycle(steps=20)  # about every tenth step, as a worker has two envs


class Opened(CountingEnv):
    """An env without exact states, as it has an open file. Its info contains its process id."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.file = open(os.devnull)  # noqa: SIM115 - it stays open
        self.difficulty = 0

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"pid": os.getpid(), "difficulty": self.difficulty}

    def close(self):
        self.file.close()


def recycled(envs):
    return probe.array(envs, "stats")[:, _stats.RECYCLED].tolist()


def actions(seed=0, high=3):
    return np.random.default_rng(seed).integers(0, high, (NUM_STEPS, NUM_ENVS))


def is_marked(value):
    return isinstance(value, dict) and "fault" in value


def unmarked(info):
    """Returns an info without the flags of faults, after checking that none is set."""
    if not is_marked(info):
        return info
    assert not np.any(info["fault"])
    return {key: value for key, value in info.items() if key not in ("fault", "_fault")}


def assert_equal(found, expected):
    """Compares the results of a pool with recycling with those of a pool without."""
    found = jax.tree.map(unmarked, found, is_leaf=is_marked)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def scan(envs, chosen):
    handle, first = jaxvec.reset(envs, seed=3)
    _, rows = _steps(handle, chosen)
    return jax.tree.map(np.asarray, (first, rows))


@jax.jit
def _steps(handle, chosen):
    return jax.lax.scan(jaxvec.step, handle, chosen)


def rows_of_counting(chosen, faults, length):
    """Yields the fields of each row of a `CountingEnv` that ends after `length` steps or at a fault."""
    total, steps = 0.0, 0
    for action, fault in zip(chosen, faults, strict=True):
        if fault:
            yield (-1, 0, 0.0, total, steps, False, True)
            total, steps = 0.0, 0
            continue
        steps += 1
        total += steps
        over = steps == length
        yield (-1 if over else action, 0 if over else steps, float(steps), total, steps, over, False)
        if over:
            total, steps = 0.0, 0


def check_rows(rows, chosen, faults, length=7):
    for env_id in range(NUM_ENVS):
        columns = (
            rows.obs[..., 3],
            rows.obs[..., 2],
            rows.reward,
            rows.info["episode_return"],
            rows.info["episode_length"],
            rows.terminated,
            rows.truncated,
        )
        expected = rows_of_counting(chosen[:, env_id], faults[:, env_id], length)
        assert [*zip(*(column[:, env_id].tolist() for column in columns), strict=True)] == [*expected]
