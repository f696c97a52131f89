"""Parts that several compatibility APIs share: the base class of single envs, and conversions of info."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self, TypeVar

import numpy as np

from jaxvec._errors import EnvError
from jaxvec._results import TimeStep, select
from jaxvec._spec import STATISTICS
from jaxvec._vector_env import VectorEnv
from jaxvec.compat._family import EnvFamily


class PooledEnv:
    """Base class of the APIs of single envs. Owns the pools of its `EnvFamily`.

    The pools are closed by `close`, by `with`, or when the env is garbage-collected. A compiled function
    keeps a reference to the env.
    """

    def __init__(self, family: EnvFamily) -> None:
        self._family = family

    @property
    def pools(self) -> Mapping[int, VectorEnv]:
        """The pools started so far, by their number of envs. They offer `stats`, `infos`, `call` and more."""
        return self._family.pools

    def raise_if_failed(self) -> None:
        """Raises the typed error behind a failure of a compiled program, if there was one."""
        self._family.raise_if_failed()

    def close(self) -> None:
        """Closes all pools. May be called more than once."""
        self._family.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Closes all pools. Raises a pool's typed error if a program failed because of that pool."""
        self._family.__exit__(*error)


def max_episode_steps(envs: VectorEnv) -> int | None:
    """Returns the time limit in the envs' Gymnasium spec, if there is one."""
    with suppress(EnvError):  # not a Gymnasium env, so it has no `spec`
        return getattr(envs.get_attr("spec")[0], "max_episode_steps", None)
    return None


# With same-step autoreset, `timestep.obs` and `timestep.info` belong to the next episode where one has ended,
# so these functions need the final observations and infos to return the step's own.
def pop_final_obs(timestep: TimeStep[Any]) -> tuple[dict[str, Any], Any]:
    """Returns the info without final observations, and `last_obs`; `None` for a pool without `final_obs`."""
    info = dict(timestep.info)
    if "final_obs" not in info:
        return info, None
    del info["final_obs"], info["_final_obs"]
    return info, timestep.last_obs


def merge_final_info(timestep: TimeStep[Any]) -> TimeStep[Any]:
    """Replaces the declared keys of info by those of `final_info` where an episode has ended."""
    info = dict(timestep.info)
    final = info.pop("final_info", {})
    new = {key: info[key] for key in final}
    info |= select(timestep.done, final, new, "info")
    return timestep._replace(info=info)


T = TypeVar("T")

# Keys of EnvPool's own tasks. Every env always has them, so their masks carry no information.
_UNMASKED = ("lives", "reward", "terminated", "elapsed_step", "ram")


def info_extras(info: Mapping[str, T]) -> dict[str, T]:
    """Returns the declared keys of jaxvec's info, with their masks."""
    hidden = {*STATISTICS, *(f"_{key}" for key in _UNMASKED)}
    return {key: value for key, value in info.items() if key not in hidden}


def convert_info(timestep: TimeStep[Any]) -> dict[str, Any]:
    """Returns EnvPool's info of a time step of NumPy or JAX arrays, which may be traced."""
    return {
        "env_id": timestep.info["env_id"],
        "elapsed_step": timestep.info["episode_length"],
        "reward": timestep.reward.copy(),
        "terminated": timestep.terminated.astype(np.int32),
        "TimeLimit.truncated": timestep.truncated.copy(),
        # Last, because an Atari task declares `elapsed_step`, `reward` (unclipped) and `terminated` (game
        # over) itself.
        **info_extras(timestep.info),
    }
