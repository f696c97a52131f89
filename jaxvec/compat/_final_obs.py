"""What the envs returned in a step, where same-step autoreset has put a new episode's first observation."""

from __future__ import annotations

from typing import Any

import jax

from jaxvec._timestep import TimeStep


def take(timestep: TimeStep, numpy: Any) -> tuple[dict[str, Any], Any]:
    """Takes the last observations out of the time step's info.

    Args:
        timestep: of one env or a batch.
        numpy: the module whose arrays these are.

    Returns:
        The rest of the info, and what each env returned before its reset, if any; `None` of a pool without
        `final_obs`.
    """
    info = dict(timestep.info)
    if "final_obs" not in info:
        return info, None
    ended, final = info.pop("_final_obs"), info.pop("final_obs")

    def choose(last: Any, new: Any) -> Any:
        return numpy.where(ended.reshape(*ended.shape, *[1] * (last.ndim - ended.ndim)), last, new)

    return info, jax.tree.map(choose, final, timestep.obs)
