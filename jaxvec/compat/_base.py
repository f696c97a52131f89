"""Parts that several compatibility APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
import numpy as np

from jaxvec._errors import EnvError
from jaxvec._spec import STATISTICS, TimeStep
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks._family import EnvFamily

# ----------------------------------------------------------------------------------------------------------
# Base class of the APIs of single envs.
# ----------------------------------------------------------------------------------------------------------


class Face:
    """Owns the pools of an env. Closed by `close`, `with` or its end; a compiled function may keep it."""

    def __init__(self, family: EnvFamily) -> None:
        self._family = family

    @property
    def pools(self) -> Mapping[int, VectorEnv]:
        """The pools so far, by their number of envs: for `stats`, `infos`, `call` and the like."""
        return self._family.pools

    def raise_if_failed(self) -> None:
        """Raises the typed error behind a failure of a compiled program, if there was one."""
        self._family.raise_if_failed()

    def close(self) -> None:
        """Closes all pools. Twice is fine."""
        self._family.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes; where a program failed because of a pool, raises the pool's own, typed error."""
        self._family.__exit__(kind, error, trace)


def max_episode_steps(envs: VectorEnv) -> int | None:
    """Returns the time limit in the envs' Gymnasium spec; `None` if there is none."""
    with suppress(EnvError):  # the env has no `spec`, as it is not a Gymnasium env
        return getattr(envs.get_attr("spec")[0], "max_episode_steps", None)
    return None


# ----------------------------------------------------------------------------------------------------------
# The last observation and info of an episode, which same-step autoreset has replaced by the next one's first.
# ----------------------------------------------------------------------------------------------------------


def take_final_obs(timestep: TimeStep, numpy: Any) -> tuple[dict[str, Any], Any]:
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


def take_final_info(timestep: TimeStep, numpy: Any) -> TimeStep:
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


# ----------------------------------------------------------------------------------------------------------
# Conversion of jaxvec's info to EnvPool's.
# ----------------------------------------------------------------------------------------------------------

T = TypeVar("T")

# Keys that EnvPool's own tasks have: they are always there, so their masks would say nothing.
_UNMASKED = ("lives", "reward", "terminated", "elapsed_step", "ram")


def info_extras(info: Mapping[str, T]) -> dict[str, T]:
    """Returns the part of jaxvec's info that is the task's or the user's own, with masks."""
    hidden = {*STATISTICS, *(f"_{key}" for key in _UNMASKED)}
    return {key: value for key, value in info.items() if key not in hidden}


def convert_info(timestep: TimeStep) -> dict[str, Any]:
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
        **info_extras(timestep.info),
    }
