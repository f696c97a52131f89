"""Parts that several compatibility APIs share: the start of a pool, and conversions of info."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from gymnasium.vector import AutoresetMode

from jaxvec import _start
from jaxvec._errors import EnvDataError, EnvError
from jaxvec._leaves import Leaf, Node, as_is, map_leaves
from jaxvec._options import AutoresetName, PoolConfig, Timeouts
from jaxvec._results import STATISTICS, TimeStep
from jaxvec._vector_env import VectorEnv


def start_pool(
    env_fns: Sequence[Callable[[], Any]],
    *,
    autoreset_mode: AutoresetName | AutoresetMode,
    equal_spaces: bool = False,
    shares_values: bool = False,
    **options: Any,
) -> VectorEnv:
    """Starts a pool for the class of another library, which it serves as the library's own class does.

    Observations keep the envs' dtypes, and are cast as NumPy does. Those without a fixed shape are Python
    objects. No env has to be reset before its first step, and there are no time limits.

    Args:
        env_fns: Constructor of each env.
        autoreset_mode: Autoreset mode of the pool.
        equal_spaces: True if bounds of observations and rewards must be equal in all envs.
        shares_values: True if envs in this process get the caller's objects in calls, attributes and reset
            options, not copies.
        **options: Further options of `jaxvec.make`, which take precedence over the above.

    Returns:
        The pool. `_vector_env.pool_of` returns its `Pool`, whose methods take arrays as they are.

    Raises:
        TypeError: An option is not one of `jaxvec.make`.
        JaxvecError: Any error of `jaxvec.make`.
    """
    if unknown := options.keys() - {field.name for field in dataclasses.fields(PoolConfig)}:
        raise TypeError(f"unknown options {sorted(unknown)}; the options are those of jaxvec.make")
    defaults: dict[str, Any] = {"timeouts": Timeouts(None, None, None), "check": "cast"}
    config = PoolConfig(autoreset_mode=autoreset_mode, **defaults | options)
    return _start.start(
        list(env_fns),
        None,
        config,
        _start.choose_interpreter(config),
        env_kwargs={},
        policy=as_is,
        objects=True,
        equal_spaces=equal_spaces,
        resets_required=False,
        shares_values=shares_values,
    )


# No generator: that would turn `StopIteration` into `RuntimeError`, and cost a microsecond of each step.
class AsRaised:
    """Raises an env's own exception instead of `EnvError`, unless it could not be pickled."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # For `EnvDataError`, jaxvec found wrong data, so there is no exception of the env.
        if isinstance(error, EnvError) and not isinstance(error, EnvDataError) and error.__cause__:
            raise error.__cause__ from error


def row_of(node: Node, batch: Any, index: int) -> Any:
    """Returns one env's value of a batch. It is a copy, because a view would keep the whole batch alive."""

    # Integers become Python's, because most envs return them as observations of `Discrete` spaces.
    def pick(leaf: Leaf, part: Any) -> Any:
        if leaf.is_object:
            return part[index]
        return int(part[index]) if leaf.shape == () and leaf.dtype.kind in "iu" else part[index].copy()

    return map_leaves(node, batch, pick)


def spec_of(envs: VectorEnv) -> Any:
    """Returns the Gymnasium spec of env 0, with its time limit; `None` if there is none."""
    with suppress(EnvError):  # not a Gymnasium env, or its spec can't be pickled
        return envs.get_attr("spec", indices=[0])[0]
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
    """Replaces the declared keys of info by those of `last_info`."""
    info = timestep.info | timestep.last_info
    info.pop("final_info", None)
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
