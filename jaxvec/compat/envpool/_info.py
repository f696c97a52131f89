"""EnvPool's info, from jaxvec's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from jaxvec._spec import STATISTICS
from jaxvec._timestep import TimeStep

T = TypeVar("T")

# Keys that EnvPool's own tasks have: they are always there, so their masks would say nothing.
_UNMASKED = ("lives", "reward", "terminated", "elapsed_step", "ram")


def extras(info: Mapping[str, T]) -> dict[str, T]:
    """Returns the part of jaxvec's info that is the task's or the user's own, with masks."""
    hidden = {*STATISTICS, *(f"_{key}" for key in _UNMASKED)}
    return {key: value for key, value in info.items() if key not in hidden}


def convert(timestep: TimeStep) -> dict[str, Any]:
    """Returns the info of a time step, on NumPy or in JAX, traced or not.

    A task that knows better, as the Atari ones do, says itself what `elapsed_step`, `reward` (before
    clipping) and `terminated` (whether the game is over) are.
    """
    return {
        "env_id": timestep.info["env_id"],
        "elapsed_step": timestep.info["episode_length"],
        "reward": timestep.reward.copy(),
        "terminated": timestep.terminated.astype(np.int32),
        "TimeLimit.truncated": timestep.truncated.copy(),
        **extras(timestep.info),
    }
