"""Comparison of pools on other machines with local pools."""

import jax
import numpy as np


def assert_equal(one, other):
    """Compares two pytrees bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)
