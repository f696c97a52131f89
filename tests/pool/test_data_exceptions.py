"""Exceptions to equal data for every backend and number of workers, as the contract page lists them."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

import jaxvec
from jaxvec.testing import CountingEnv

PATIENCE = 100


class SharingEnv(CountingEnv):
    """Counts the steps of all envs of its process in its reward."""

    total = 0

    def step(self, action):
        obs, _, *others = super().step(action)
        SharingEnv.total += 1
        return obs, float(SharingEnv.total), *others


class DrawingEnv(CountingEnv):
    """Observes a number that its generator drew at the reset."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        self.number = int(self.np_random.integers(2**30))
        return obs * 0 + self.number, info

    def step(self, action):
        obs, *others = super().step(action)
        return obs * 0 + self.number, *others


class ThreadEnv(gymnasium.Env):
    """Observes whether it is in the thread that made it, by a value of that thread."""

    observation_space = spaces.Box(0, 1, (), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.local = threading.local()
        self.local.is_set = True

    def reset(self, *, seed=None, options=None):
        return np.float32(0), {}

    def step(self, action):
        return np.float32(hasattr(self.local, "is_set")), 0.0, False, False, {}


def test_envs_of_a_process_share_a_class_attribute(make, monkeypatch):
    monkeypatch.setattr(SharingEnv, "total", 0)

    def rewards(**options):
        envs = make(SharingEnv, 2, **options)
        envs.reset(seed=0)
        return envs.step([0, 0]).reward.tolist()

    assert rewards(num_workers=2) == [1, 1]
    assert rewards(num_workers=1) == [1, 2]
    assert rewards(backend="serial") == [1, 2]


def test_seeds_of_spare_envs_depend_on_the_number_of_workers(make):
    def numbers(num_workers, spare_envs):
        envs = make(DrawingEnv, 2, num_workers=num_workers, spare_envs=spare_envs, episode_length=2)
        rows = [envs.reset(seed=0), *(envs.step([0, 0]) for _ in range(9))]
        return [row.obs.tolist() for row in rows]

    assert numbers(1, spare_envs=0) == numbers(2, spare_envs=0)
    assert numbers(1, spare_envs=1) == numbers(1, spare_envs=1)
    assert numbers(1, spare_envs=1) != numbers(2, spare_envs=1)


def test_serial_envs_lack_thread_locals_in_programs(make):
    def rows(**options):
        envs = make(ThreadEnv, 1, **options)
        handle, _ = jaxvec.reset(envs)
        with ThreadPoolExecutor() as threads:  # as XLA's threads, never the one that made the pool
            program = jax.jit(lambda handle: jaxvec.step(handle, np.zeros(1, int)))
            _, timestep = threads.submit(lambda: jax.block_until_ready(program(handle))).result(PATIENCE)
        return [float(timestep.obs[0]), float(envs.step([0]).obs[0])]

    assert rows(num_workers=1) == [1, 1]
    assert rows(backend="serial") == [0, 1]


def test_the_page_names_tests_that_exist():
    root = Path(__file__).parents[2]
    section = (root / "docs/developers/decisions.md").read_text().partition("## Tests of the guarantees")[2]
    files = {path.name: path.read_text() for path in (root / "tests").rglob("test_*.py")}
    known = {*files, *re.findall(r"^def (test_\w+)", "\n".join(files.values()), re.MULTILINE)}
    named = set(re.findall(r"`(test_[\w.]+)`", section))
    assert len(named) > 20
    assert named <= known
