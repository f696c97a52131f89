"""PureJaxRL's `ppo.py`, as it is but for `gymnax.make`, trains Python envs.

On today's versions of what it imports it needs nothing else: its wrappers import navix, which nothing here
uses, so an empty module of that name stands in where navix is not installed.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings

import jax
import numpy as np
import pytest
from checkouts import PUREJAXRL
from support import probe

import jaxvec
from jaxvec.compat import gymnax as face

pytestmark = pytest.mark.skipif(bool(PUREJAXRL.missing), reason=PUREJAXRL.missing)

NUM_ENVS, NUM_STEPS, NUM_UPDATES = 4, 8, 3
CONFIG = {
    "LR": 2.5e-4,
    "NUM_ENVS": NUM_ENVS,
    "NUM_STEPS": NUM_STEPS,
    "TOTAL_TIMESTEPS": NUM_ENVS * NUM_STEPS * NUM_UPDATES,
    "UPDATE_EPOCHS": 1,
    "NUM_MINIBATCHES": 2,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh",
    "ENV_NAME": "CartPole-v1",
    "ANNEAL_LR": True,
    "DEBUG": False,
}


@pytest.fixture
def ppo(monkeypatch):
    """Yields PureJaxRL's module `ppo`, and the envs that its `gymnax.make` has made."""
    monkeypatch.syspath_prepend(str(PUREJAXRL.folder / "purejaxrl"))
    for name in ("ppo", "wrappers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    made = []

    def make(name):
        made.append(face.make(name))
        return made[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the versions of others
        for name in ("gymnax", "distrax", "flax", "optax", "brax.envs"):
            pytest.importorskip(name, reason=f"PureJaxRL needs {name}", exc_type=ImportError)
        try:
            importlib.import_module("navix")
        except ImportError:
            monkeypatch.setitem(sys.modules, "navix", types.ModuleType("navix"))
        monkeypatch.setattr("gymnax.make", make)
        yield importlib.import_module("ppo"), made
    for name in ("ppo", "wrappers"):
        sys.modules.pop(name, None)
    for env, _ in made:
        env.close()


@pytest.mark.parametrize("seeds", [None, 3], ids=["one seed", "vmap over seeds"])
def test_it_trains_and_each_step_of_the_whole_batch_is_one_hand_off(ppo, seeds):
    module, made = ppo
    train = module.make_train(dict(CONFIG))
    key = jax.random.PRNGKey(30)
    out = jax.jit(train)(key) if seeds is None else jax.jit(jax.vmap(train))(jax.random.split(key, seeds))
    ((env, _),) = made
    lanes = NUM_ENVS * (seeds or 1)
    pool = env.pools[lanes]
    assert sorted(env.pools) == [1, lanes]
    assert probe.num_served(pool) == 1 + NUM_STEPS * NUM_UPDATES  # the reset, and the steps
    assert pool.stats().total.steps == lanes * NUM_STEPS * NUM_UPDATES
    assert env.pools[1].stats().total.steps == 0

    metrics = jax.tree.map(np.asarray, out["metrics"])
    batch = (*(() if seeds is None else (seeds,)), NUM_UPDATES, NUM_STEPS, NUM_ENVS)
    assert metrics["returned_episode_returns"].shape == batch
    ended = metrics["returned_episode"]
    assert ended.any()
    # What PureJaxRL counted is what the envs counted.
    np.testing.assert_array_equal(
        metrics["returned_episode_returns"][ended], metrics["episode_return"][ended]
    )
    np.testing.assert_array_equal(
        metrics["returned_episode_lengths"][ended], metrics["episode_length"][ended]
    )
    assert pool.stats().total.episodes == ended.sum()


def test_a_failing_env_ends_the_training_with_its_error(ppo, monkeypatch, no_jax_log):
    module, made = ppo

    class FallingEnv(jaxvec.testing.CountingEnv):
        def step(self, action):
            if self.steps == 5:
                raise OSError("fell over")
            return super().step(action)

    monkeypatch.setattr("gymnax.make", lambda _: made.append(face.make(FallingEnv)) or made[-1])
    train = jax.jit(module.make_train(dict(CONFIG)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="fell over"):
        jax.block_until_ready(train(jax.random.PRNGKey(0)))
    with pytest.raises(jaxvec.EnvError, match="fell over"):
        made[0][0].raise_if_failed()
