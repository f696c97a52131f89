"""No compatibility API or adapter makes a worker import JAX, which takes seconds and memory in each."""

import importlib

import gymnasium
import pytest
from support.scripts import run_python

from jaxvec.compat import envpool, gymnax
from jaxvec.compat.gymnasium import AsyncVectorEnv, vector_entry_point

CARTPOLE, ATARI = "CartPole-v1", "Breakout-v5"


def cartpole():
    return [lambda: gymnasium.make(CARTPOLE)]


def stable_baselines3(_):
    envs = importlib.import_module("jaxvec.compat.stable_baselines3").SubprocVecEnv(cartpole())
    return envs, envs.pool


def gymnasium_class(_):
    envs = AsyncVectorEnv(cartpole())
    return envs, envs.pool


def gymnasium_entry_point(task):
    envs = vector_entry_point(gymnasium.spec(task).entry_point)(num_envs=1, max_episode_steps=9)
    return envs, envs.pool


def gymnasium_spec(task):
    envs = vector_entry_point(gymnasium.spec(task))(num_envs=1)
    return envs, envs.pool


def envpool_api(task):
    envs = envpool.make(task)
    return envs, envs.vector_env


def stoix_api(task):
    pytest.importorskip("stoa", reason="stoa-env is not installed")
    envs = importlib.import_module("jaxvec.compat.stoix").EnvFactory(task)(1)
    return envs, envs.env


def gymnax_api(task):
    env, _ = gymnax.make(task)
    return env, env.pools[1]


def brax_api(task):
    pytest.importorskip("brax.envs", reason="brax is not installed", exc_type=ImportError)
    env = importlib.import_module("jaxvec.compat.brax").make(task, scale_actions=False)
    return env, env.pools[1]


CASES = [
    *[(start, ATARI) for start in (envpool_api, stoix_api)],
    *[(start, CARTPOLE) for start in (envpool_api, stoix_api, gymnax_api, brax_api)],
    *[(start, CARTPOLE) for start in (gymnasium_class, gymnasium_entry_point, gymnasium_spec)],
    (stable_baselines3, CARTPOLE),
]


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("adapters.dm_env", "dm_env"),
        ("adapters.mlagents", "numpy"),
        ("adapters.pettingzoo", "pettingzoo"),
        ("cli._bench", "numpy"),
    ],
)
def test_what_workers_import_imports_no_jax(module, package):
    pytest.importorskip(package)
    done = run_python("-c", f"import sys, jaxvec.{module}; print('jax' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.filterwarnings("ignore")  # of Brax's imports
@pytest.mark.parametrize(("start", "task"), CASES)
def test_workers_of_compat_apis_do_not_import_jax(start, task):
    if task == ATARI:
        pytest.importorskip("ale_py", reason="ale_py is not installed")
    if start is stable_baselines3:
        pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    envs, pool = start(task)
    try:
        # A lambda is sent by value: by name, it would make the worker import this file, which imports JAX.
        assert pool.map(lambda env: "jax" in __import__("sys").modules) == (False,)
    finally:
        envs.close()
