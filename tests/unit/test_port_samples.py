"""Two-sample tests of `jaxvec.ports`: values that lie close together, rounding, NaN, and conditions."""

import numpy as np
import pytest

from jaxvec._ports.distributions import compare_samples

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("number", [1024, 16384])
def test_close_values_differ_and_rounded_ones_do_not(number):
    step = np.float32(RNG.integers(0, 9, number) * 0.1)
    other = np.float32(0.1) * np.float32(RNG.integers(0, 9, number))
    original = np.stack([RNG.uniform(0, 0.001, number), RNG.uniform(0, 200, number)], 1)
    port = original[::-1] * [0.5, 1]
    assert compare_samples(port, original).p_value < 1e-20
    assert compare_samples(original[::-1], original).p_value == 1
    assert compare_samples(step, other).p_value > 0.01


def test_integers_are_not_rounded_and_groups_respect_rounding():
    large = np.array([1_000_000, 1_000_001] * 64)
    assert compare_samples(large + 1, large).p_value < 1e-5
    tenths = RNG.choice(np.append(np.arange(59), 59 * [31]), 512)
    port, original = np.float32(tenths) * np.float32(0.1), np.float32(0.1 * tenths)  # one ulp apart
    assert compare_samples(port, original, conditions=[(port, original)]).p_value > 0.01


def test_nan_on_one_side_and_other_dependences_differ():
    values = RNG.normal(size=1024)
    for odd, other in [(np.nan, 0.0), (np.inf, 0.0), (np.inf, -np.inf), (np.inf, np.nan)]:
        assert compare_samples(np.append(values, odd), np.append(values, other)).p_value == 0
        assert compare_samples(np.append(values, odd), np.append(values, odd)).p_value == 1
    action = RNG.integers(0, 2, 1024)
    effects = values + (2 * action - 1), values - (2 * action - 1)
    assert compare_samples(*effects).p_value > 1e-3
    assert compare_samples(*effects, conditions=[(action, action)]).p_value < 1e-20
