"""The toy envs and check_env."""

import numpy as np
import pytest
from gymnasium import spaces

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv, check_env


@pytest.mark.parametrize("env_fn", [CountingEnv, NestedEnv, lambda: CountingEnv(3, truncate=True)])
def test_toy_envs_keep_the_contract(env_fn):
    check_env(env_fn)


def test_check_env_names_the_leaf_of_wrong_data():
    class Wrong(NestedEnv):
        def _observe(self, action):
            return super()._observe(action) | {"half": np.zeros(4, np.float16)}

    with pytest.raises(
        jaxvec.EnvDataError, match=r"env 0 .*obs\['half'\]: expected shape \(3,\), got \(4,\)"
    ):
        check_env(Wrong)


def test_check_env_finds_unseeded_randomness():
    class Unseeded(CountingEnv):
        def step(self, action):
            _, _, terminated, truncated, info = super().step(action)
            return np.random.default_rng().integers(0, 2**31, 4, np.int32), 0.0, terminated, truncated, info

    with pytest.raises(AssertionError, match="np_random"):
        check_env(Unseeded)


def test_check_env_names_an_unsupported_space():
    class Texty(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict({"mission": spaces.Text(10)})

    with pytest.raises(jaxvec.UnsupportedSpaceError, match=r"obs\['mission'\]: Text .* wrapper"):
        check_env(Texty)


def test_check_env_passes_on_what_the_env_raises():
    class Raising(CountingEnv):
        def step(self, action):
            raise KeyError("no such thing")

    with pytest.raises(jaxvec.EnvError, match="KeyError") as caught:
        check_env(Raising)
    assert isinstance(caught.value.__cause__, KeyError)
