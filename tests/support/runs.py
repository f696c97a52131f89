"""Reads what training programs write."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp


def load_params(folder):
    """Returns the newest parameters of a run folder, without knowing their structure."""
    with ocp.CheckpointManager((Path(folder) / "params").absolute()) as manager:
        return manager.restore(None, args=ocp.args.StandardRestore())


def assert_same_params(one, other):
    jax.tree.map(np.testing.assert_array_equal, load_params(one), load_params(other))
