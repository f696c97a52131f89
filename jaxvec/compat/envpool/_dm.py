"""What `env_type="dm"` returns and says of itself, in dm_env's words."""

from __future__ import annotations

import importlib
from collections import namedtuple
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

import jaxvec
from jaxvec._spaces import DictNode, Leaf, Node, TupleNode
from jaxvec._spec import PoolSpec
from jaxvec.compat.envpool import _info

FIRST, MID, LAST = 0, 1, 2  # dm_env.StepType


class _TimeStep(NamedTuple):
    """Stands in for `dm_env.TimeStep`."""

    step_type: Any
    reward: Any
    discount: Any
    observation: Any


try:
    from dm_env import TimeStep  # pyright: ignore[reportMissingImports, reportAssignmentType]
except ImportError:
    TimeStep = _TimeStep


@lru_cache
def _record(name: str, fields: tuple[str, ...]) -> Any:
    """Returns a namedtuple, the same one for the same fields: as pytrees they are to be of one type."""
    return namedtuple(name, fields, rename=True)  # pyright: ignore[reportUntypedNamedTuple]


def record(name: str, values: Mapping[str, Any]) -> Any:
    """Returns nested dicts as nested namedtuples."""
    fields = tuple(str(key) for key in values)
    parts = (record(str(key), part) if isinstance(part, dict) else part for key, part in values.items())
    return _record(name, fields)(*parts)


def convert(timestep: jaxvec.TimeStep) -> Any:
    """Returns dm_env's `TimeStep` of a batch, whose observation is a namedtuple of `obs` and the info."""
    over = timestep.terminated | timestep.truncated
    first = timestep.info["episode_length"] == 0
    return TimeStep(
        step_type=(MID + over * (LAST - MID) - first * (MID - FIRST)).astype(np.int32),
        reward=timestep.reward,
        discount=1 - over.astype(np.float32),
        observation=record("State", _state(timestep.info, timestep.obs)),
    )


def observation_spec(space: Space[Any], data: PoolSpec) -> Any:
    """Returns dm_env's specs of a `TimeStep.observation`, of one env; see `spec_of`."""
    leaves = zip(data.info.keys, data.info.children, strict=True)
    specs = importlib.import_module("dm_env.specs")
    info = {key: specs.Array(leaf.shape, leaf.stored, key) for key, leaf in leaves if isinstance(leaf, Leaf)}
    return record("State", _state(info, spec_of(space, data.obs, "obs")))


def _state(info: dict[str, Any], obs: Any) -> dict[str, Any]:
    own = {key: value for key, value in _info.extras(info).items() if key != "elapsed_step" and key[0] != "_"}
    return {"env_id": info["env_id"], **own, "obs": obs}


def spec_of(space: Space[Any], node: Node, name: str) -> Any:
    """Returns dm_env's spec of a leaf; nested ones in dicts and tuples, as the space is.

    Args:
        space: of one env.
        node: the same, with the dtypes that are stored.
        name: of the spec.

    Raises:
        ImportError: dm_env is not installed.
    """
    specs = importlib.import_module("dm_env.specs")
    match space, node:
        case spaces.Dict(), DictNode():
            pairs = zip(node.keys, node.children, strict=True)
            return {key: spec_of(space[key], child, str(key)) for key, child in pairs}
        case spaces.Tuple(), TupleNode():
            pairs = enumerate(zip(space.spaces, node.children, strict=True))
            return tuple(spec_of(one, child, f"{name}_{index}") for index, (one, child) in pairs)
        case spaces.Discrete(start=0), Leaf():
            return specs.DiscreteArray(int(space.n), node.stored, name)
        case _, Leaf():
            low, high = _bounds(space)
            return specs.BoundedArray(node.shape, node.stored, low, high, name)
        case _:
            raise TypeError(f"{name}: {space} and {node} differ")


def _bounds(space: Space[Any]) -> tuple[Any, Any]:
    match space:
        case spaces.Box():
            return space.low, space.high
        case spaces.Discrete():
            return space.start, space.start + space.n - 1
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case _:  # MultiBinary
            return 0, 1
