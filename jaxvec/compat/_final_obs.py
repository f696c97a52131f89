"""What the envs returned in a step, where same-step autoreset has put what a new episode begins with."""

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
    return info, _choose(ended, final, timestep.obs, numpy)


def take_info(timestep: TimeStep, numpy: Any) -> TimeStep:
    """Puts the ending step's declared keys of info in the place of the new episode's.

    Args:
        timestep: of one env or a batch.
        numpy: the module whose arrays these are.

    Returns:
        The time step, whose info has no `final_info`.
    """
    info = dict(timestep.info)
    final = info.pop("final_info", {})
    new = {key: info[key] for key in final}
    info |= _choose(timestep.terminated | timestep.truncated, final, new, numpy)
    return timestep._replace(info=info)


def _choose(ended: Any, final: Any, new: Any, numpy: Any) -> Any:
    """Returns the leaves of `final` where an episode has ended, else those of `new`."""

    def choose(last: Any, new: Any) -> Any:
        return numpy.where(ended.reshape(*ended.shape, *[1] * (last.ndim - ended.ndim)), last, new)

    return jax.tree.map(choose, final, new)
