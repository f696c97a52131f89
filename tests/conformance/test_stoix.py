"""Our env factory against Stoix's own, and Stoix's Sebulba PPO over it.

Stoix's wrapper of Gymnasium envs is the reference, but that it says MID for a reset, and TERMINATED for a
truncation. Before the program runs `shims.py` of docs/porting/gymnax.md.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from checkouts import PAGES, STOIX
from gymnasium.envs.classic_control import CartPoleEnv
from support.scripts import run_python

from jaxvec.compat.stoix import EnvFactory

pytestmark = pytest.mark.skipif(bool(STOIX.missing), reason=STOIX.missing)


@pytest.fixture
def theirs(monkeypatch):
    """Yields Stoix's module of env factories."""
    monkeypatch.syspath_prepend(str(STOIX.folder))
    for name in ("stoa", "colorama"):
        pytest.importorskip(name, reason=f"Stoix's factories need {name}")
    before = set(sys.modules)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # says that EnvPool is missing
        warnings.simplefilter("ignore")
        yield importlib.import_module("stoix.utils.env_factory")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "stoix":
            del sys.modules[name]


def test_it_returns_what_stoix_s_factory_does(theirs):
    factory = EnvFactory("CartPole-v1", max_episode_steps=18)
    assert isinstance(factory, theirs.EnvFactory)
    ours, reference = factory(3), theirs.GymnasiumFactory("CartPole-v1", max_episode_steps=18)(3)
    for name in ("num_values", "shape"):
        assert getattr(ours.action_space(), name) == getattr(reference.action_space(), name)
    assert ours.observation_space().shape == reference.observation_space().shape
    actions = np.random.default_rng(0).integers(2, size=(90, 3))
    got, expected = ours.reset(seed=[3, 4, 5]), reference.reset(seed=[3, 4, 5])
    assert set(expected.extras["metrics"]) == set(got.extras["metrics"])
    truncations = ends = 0
    for action in actions:
        got, expected = ours.step(action), reference.step(action)
        for name in ("observation", "reward", "discount"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
        for name, value in expected.extras["metrics"].items():
            np.testing.assert_array_equal(got.extras["metrics"][name], value)
        np.testing.assert_array_equal(got.last(), expected.last())
        np.testing.assert_array_equal(got.truncated(), got.last() & (got.discount == 1))
        truncations += int(got.truncated().sum())
        ends += int(got.last().sum())
    assert ends > truncations > 0
    ours.close()
    reference.close()


def first_step(make, actions, **kwargs):
    envs = make("CartPole-v1", **kwargs)(2)
    envs.reset(seed=[1, 2])
    return envs.step(actions)


# Programs that end otherwise with Stoix's factory than with ours, as the page of docs/porting/ lists them.
DIFFERENT = {
    "reads `step_type` of a reset": lambda make: make("CartPole-v1")(2).reset(seed=[1, 2]).step_type,
    "reads `step_type` of a truncation": lambda make: (
        first_step(make, np.zeros(2, int), max_episode_steps=1).step_type
    ),
    "reads the dtype of rewards": lambda make: first_step(make, np.zeros(2, int)).reward.dtype,
    "reads the names in `extras`": lambda make: sorted(first_step(make, np.zeros(2, int)).extras),
    "passes an array of JAX": lambda make: first_step(make, jnp.zeros(2, int)).observation.shape,
    "passes a class as the task": lambda make: make(CartPoleEnv)(2).reset(seed=[1, 2]).observation.shape,
}


def outcome(program, make):
    try:
        return f"`{program(make)}`"
    except Exception:
        return "error"


def test_the_page_has_the_programs_that_differ(theirs):
    lines = ["| a program that | stoix | jaxvec |", "| --- | --- | --- |"]
    for name, program in DIFFERENT.items():
        reference, ours = outcome(program, theirs.GymnasiumFactory), outcome(program, EnvFactory)
        assert reference != ours, name
        lines.append(f"| {name} | {reference} | {ours} |")
    assert "\n".join(lines) in (PAGES / STOIX.page).read_text()


PROGRAM = """
import runpy, sys
import shims
from jaxvec.compat import stoix

stoix.register()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SETTINGS = [
    *("env=gymnasium/cartpole", "env.env_name=jaxvec", "network=mlp", "logger.loggers.json.enabled=False"),
    *(
        "arch.total_num_envs=8",
        "arch.total_timesteps=1024",
        "arch.num_evaluation=1",
        "arch.num_eval_episodes=4",
    ),
    *("arch.actor.actor_per_device=1", "arch.learner.device_ids=[0]", "arch.evaluator_device_id=0"),
    *("system.rollout_length=16", "system.num_minibatches=2", "system.epochs=1"),
]


def test_stoix_s_sebulba_ppo_trains_on_envs_of_a_registered_name(tmp_path):
    (tmp_path / "shims.py").write_text(STOIX.shims)
    path = [str(tmp_path), str(STOIX.folder), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "JAX_PLATFORMS": "cpu"}
    program = "stoix/systems/ppo/sebulba/ff_ppo.py"
    done = run_python("-c", PROGRAM, program, *SETTINGS, cwd=STOIX.folder, env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.search(r"final episode return of \d", done.stdout), done.stdout
