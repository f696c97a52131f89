"""PureJaxQL's programs, as they are but for where they get their envs, with their own settings, but smaller.

They run on today's JAX, though PureJaxQL itself asks for 0.4.38 at most.
"""

from __future__ import annotations

import importlib.metadata
import sys
import warnings

import jax
import numpy as np
import pytest
from checkouts import PUREJAXQL

from jaxvec.compat import envpool
from jaxvec.compat import gymnax as face

pytestmark = pytest.mark.skipif(bool(PUREJAXQL.missing), reason=PUREJAXQL.missing)

NUM_ENVS, NUM_STEPS, NUM_UPDATES = 4, 8, 3
SMALL = {
    "NUM_ENVS": NUM_ENVS,
    "NUM_STEPS": NUM_STEPS,
    "TOTAL_TIMESTEPS": NUM_ENVS * NUM_STEPS * NUM_UPDATES,
    "TOTAL_TIMESTEPS_DECAY": NUM_ENVS * NUM_STEPS * NUM_UPDATES,
    "NUM_MINIBATCHES": 2,
}


@pytest.fixture
def load(monkeypatch):
    """Yields `load(program, **settings)`, which returns a program's module and its settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the versions of others
        for name in ("gym", "hydra", "omegaconf", "wandb", "safetensors", "flax", "optax"):
            pytest.importorskip(name, reason=f"PureJaxQL needs {name}", exc_type=ImportError)
    monkeypatch.syspath_prepend(str(PUREJAXQL.folder))

    def load(program, **settings):
        from omegaconf import OmegaConf

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(f"purejaxql.{program}")
        config = OmegaConf.load(PUREJAXQL.folder / "purejaxql/config/config.yaml")
        defaults = OmegaConf.load(PUREJAXQL.folder / f"purejaxql/config/alg/{settings.pop('alg')}.yaml")
        return module, {**OmegaConf.to_container(config), **OmegaConf.to_container(defaults), **settings}

    yield load
    for name in [name for name in sys.modules if name.partition(".")[0] == "purejaxql"]:
        del sys.modules[name]


def test_pqn_atari_trains(load, monkeypatch):
    if not importlib.metadata.version("gym").startswith("0.23."):
        pytest.skip("PureJaxQL's wrapper of EnvPool's envs needs gym==0.23.1")
    monkeypatch.setitem(sys.modules, "envpool", envpool)
    made = []
    make = envpool.make
    monkeypatch.setattr(
        envpool, "make", lambda *args, **kwargs: made.append(make(*args, **kwargs)) or made[-1]
    )
    module, config = load("pqn_atari", alg="pqn_atari", TEST_ENVS=2, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = jax.jit(module.make_train(config))(jax.random.PRNGKey(0))["metrics"]
    (envs,) = made
    try:
        steps = NUM_STEPS * NUM_UPDATES
        # One more, by its wrapper, to see whether there are lives; then it resets.
        assert envs.vector_env.stats().total.steps == (NUM_ENVS + 2) * (steps + 1)
        assert metrics["env_step"].tolist() == [NUM_ENVS * NUM_STEPS * (i + 1) for i in range(NUM_UPDATES)]
        mean = (np.arange(steps) + 1).reshape(NUM_UPDATES, NUM_STEPS).mean(axis=1)
        assert metrics["elapsed_step"].tolist() == metrics["test/elapsed_step"].tolist() == mean.tolist()
        assert np.isfinite(metrics["td_loss"]).all()
    finally:
        envs.close()


@pytest.mark.parametrize("seeds", [1, 2])
def test_pqn_gymnax_trains_over_seeds_and_evaluates_now_and_then(load, monkeypatch, seeds):
    gymnax = pytest.importorskip("gymnax", reason="PureJaxQL needs gymnax", exc_type=ImportError)
    made = []
    monkeypatch.setattr(gymnax, "make", lambda name: made.append(face.make(name)) or made[-1])
    evaluations = 2  # and one before the training
    settings = {**SMALL, "TEST_INTERVAL": 0.5, "TEST_NUM_ENVS": 3, "TEST_NUM_STEPS": 20}
    settings["TOTAL_TIMESTEPS"] = settings["TOTAL_TIMESTEPS_DECAY"] = NUM_ENVS * NUM_STEPS * 2 * evaluations
    module, config = load("pqn_gymnax", alg="pqn_cartpole", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train = jax.jit(jax.vmap(module.make_train(config)))
        metrics = train(jax.random.split(jax.random.PRNGKey(0), seeds))["metrics"]
    ((env, _),) = made
    try:
        assert sorted(env.pools) == sorted({1, NUM_ENVS * seeds, 3 * seeds})
        assert (
            env.pools[NUM_ENVS * seeds].stats().total.steps == seeds * NUM_ENVS * NUM_STEPS * 2 * evaluations
        )
        assert env.pools[3 * seeds].stats().total.steps == seeds * 3 * 20 * (1 + evaluations)
        evaluated = np.asarray(metrics["test/returned_episode_returns"])
        assert evaluated.shape == (seeds, 2 * evaluations)
        assert (evaluated[:, 1] == evaluated[:, 2]).all()  # an evaluation stands until the next
        assert np.isfinite(metrics["td_loss"]).all()
    finally:
        env.close()
