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


def test_check_env_needs_the_maximum_of_a_sequence():
    class Texty(CountingEnv):
        def __init__(self):
            super().__init__()
            bag = spaces.Sequence(spaces.Text(3))
            self.observation_space = spaces.Dict({"mission": spaces.Text(10), "bag": bag})
            self.action_space = spaces.Text(3)

        def _observe(self, action):
            return {"mission": "abc", "bag": ("d",)}

        def step(self, action):
            assert isinstance(action, str)
            return self._observe(action), 0.0, False, False, {}

    with pytest.raises(jaxvec.UnsupportedSpaceError, match=r"obs\['bag'\]: Sequence .*max_sizes"):
        check_env(Texty)
    check_env(Texty, max_sizes={"bag": 1})
    with pytest.raises(jaxvec.EnvDataError, match=r"obs\['mission'\]: .*maximum 1"):
        check_env(Texty, max_sizes={"bag": 1, "mission": 1})


def test_check_env_passes_on_what_the_env_raises():
    class Raising(CountingEnv):
        def step(self, action):
            raise KeyError("no such thing")

    with pytest.raises(jaxvec.EnvError, match="KeyError") as caught:
        check_env(Raising)
    assert isinstance(caught.value.__cause__, KeyError)
