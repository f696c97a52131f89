"""Makes the message that tells a worker what to build."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import cloudpickle

from jaxvec._backends._messages import Setup
from jaxvec._backends._recipe import WorkerRecipe


def make_setup(recipe: WorkerRecipe, worker: int, *, learn_info: bool) -> Setup:
    """Makes the first message to a worker; raises `TypeError` if a constructor can't be pickled."""
    first, _ = recipe.slices[worker]
    functions = recipe.slice_config.state_functions
    try:
        pickled: bytes = cloudpickle.dumps((list(recipe.env_fns_of(worker)), functions))
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f"the constructor of env {first} can't be pickled, so it can't be sent to a worker: {error}; "
            'make what it needs inside it, or use backend="serial"'
        ) from error
    return Setup(
        sys_path=list(sys.path),
        python_path=os.environ.get("PYTHONPATH"),
        first=first,
        env_fns=pickled,
        slice_config=replace(recipe.slice_config, state_functions=None),
        learn_info=learn_info and first == 0,
        core=worker if recipe.pin_workers else None,
    )
