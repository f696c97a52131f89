"""Programs for comparing pools on other machines with local pools."""

from __future__ import annotations

import jax
import numpy as np

import jaxvec


def assert_equal(one, other):
    """Compares two pytrees bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def play_in_order(envs):
    """Returns the time steps of a `recv` loop over a pool with `recv_order="sent"`."""

    @jax.jit
    def rollout(handle):
        def body(handle, _):
            handle, timestep = jaxvec.recv(handle)
            ids = timestep.info["env_id"]
            return jaxvec.send(handle, ids % 2, ids), timestep

        return jax.lax.scan(body, handle, length=40)

    handle, first = jaxvec.reset(envs, seed=5)
    ids = first.info["env_id"]
    return first, rollout(jaxvec.send(handle, ids % 2, ids))[1]
