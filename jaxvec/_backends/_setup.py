"""Makes the message that tells a worker what to build."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from jaxvec._backends._messages import Setup, pickle_given
from jaxvec._backends._recipe import WorkerRecipe
from jaxvec._slices import _env_fns


def make_setup(recipe: WorkerRecipe, worker: int, *, learn_info: bool) -> Setup:
    """Makes the first message to a worker; raises `TypeError` if a function of the user can't be pickled."""
    first, _ = recipe.slices[worker]
    init = recipe.worker_init
    return Setup(
        sys_path=list(sys.path),
        python_path=os.environ.get("PYTHONPATH"),
        first=first,
        worker_init=init and _pickle(_env_fns.of_worker(init, worker), "worker_init"),
        env_fns=_pickle(
            (list(recipe.env_fns_of(worker)), recipe.slice_config.state_functions),
            f"the constructor of env {first}",
            ', or use backend="serial"',
        ),
        slice_config=replace(recipe.slice_config, state_functions=None),
        learn_info=learn_info and first == 0,
        core=worker if recipe.pin_workers else None,
    )


def _pickle(function: Any, name: str, otherwise: str = "") -> bytes:
    return pickle_given(
        function,
        lambda error: TypeError(
            f"{name} can't be pickled, so it can't be sent to a worker: {error}; make what it needs inside it"
            + otherwise
        ),
    )
