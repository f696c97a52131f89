"""Our env factory against Stoix's own, over a checkout of https://github.com/EdanToledo/Stoix.

The checkout is named by `JAXVEC_STOIX`; stoa-env and colorama have to be installed. Stoix's wrapper of
Gymnasium envs is the reference, but that it says MID for a reset, and TERMINATED for a truncation.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import warnings

import numpy as np
import pytest

from jaxvec.compat.stoix import EnvFactory

CHECKOUT = os.environ.get("JAXVEC_STOIX")
pytestmark = pytest.mark.skipif(
    CHECKOUT is None, reason="JAXVEC_STOIX does not name a checkout of EdanToledo/Stoix"
)


@pytest.fixture
def theirs(monkeypatch):
    """Yields Stoix's module of env factories."""
    monkeypatch.syspath_prepend(CHECKOUT)
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
