"""Conversions of Gymnasium's spaces to gymnax and old Gym, and of specs and time steps to dm_env."""

from __future__ import annotations

import importlib
import importlib.util
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from gymnasium import Space, spaces

import jaxvec
from jaxvec._errors import UnsupportedSpaceError
from jaxvec._leaves import KeyPath, Leaf, Node, fold_space, format_path, map_leaves
from jaxvec._spec import PoolSpec
from jaxvec.adapters._packages import import_optional
from jaxvec.compat._base import info_extras


def to_gymnax_space(space: Space[Any], root: str) -> Any:
    """Converts the space of one env to gymnax's. Where gymnax is not installed, returns the space itself.

    `MultiDiscrete` and `MultiBinary` become a `Box`. `root` is the name of the space in errors.
    """
    try:
        module = importlib.import_module("gymnax.environments.spaces")
    except ImportError:
        return space

    def leaf(space: Space[Any], path: KeyPath) -> Any:
        match space:
            case spaces.Discrete(start=0):
                return module.Discrete(int(space.n))
            case spaces.Discrete():
                raise UnsupportedSpaceError(
                    f"{format_path(path)}: {space} starts at {space.start}, but gymnax has only Discrete "
                    "spaces that start at 0; wrap the env"
                )
            case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
                dtype = jax.dtypes.canonicalize_dtype(space.dtype)
                low, high = (_simplify(np.asarray(bound).astype(dtype)) for bound in _bounds(space))
                return module.Box(low, high, shape=tuple(space.shape), dtype=dtype)
            case _:
                raise UnsupportedSpaceError(
                    f"{format_path(path)}: gymnax has no space like {space}; wrap the env"
                )

    return _fold(space, leaf, module, root=(root,))


def _simplify(bound: np.ndarray[Any, Any]) -> Any:
    # One number if all bounds are equal; an image's bounds would otherwise be large constants in the program.
    equal = bound.size > 0 and bool((bound == bound.flat[0]).all())
    return bound.flat[0].item() if equal else bound


def to_old_gym(space: Space[Any]) -> Any:
    """Converts a space to the old `gym` package's, or returns it unchanged if `gym` is not installed."""
    if importlib.util.find_spec("gym") is None:
        return space
    old = importlib.import_module("gym.spaces")

    def leaf(space: Space[Any], _: KeyPath) -> Any:
        match space:
            case spaces.Box():
                return old.Box(space.low, space.high, space.shape, space.dtype)
            case spaces.Discrete():  # old versions of gym have no `start`
                return old.Discrete(int(space.n), **({"start": int(space.start)} if space.start else {}))
            case spaces.MultiDiscrete() if not space.start.any():
                return old.MultiDiscrete(space.nvec)
            case spaces.MultiBinary():
                return old.MultiBinary(space.n)
            case _:
                raise TypeError(f'gym has no space like {space}; pass env_type="gymnasium"')

    return _fold(space, leaf, old)


# Time steps and specs of `env_type="dm"`.


@lru_cache
def record_type(name: str, fields: tuple[str, ...]) -> Any:
    """Returns a namedtuple type, the same for equal arguments, so that equal pytrees have equal structure."""
    return namedtuple(name, fields, rename=True)  # pyright: ignore[reportUntypedNamedTuple]


try:
    from dm_env import TimeStep  # pyright: ignore[reportMissingImports]
except ImportError:  # a stand-in
    TimeStep = record_type("TimeStep", ("step_type", "reward", "discount", "observation"))


def record(name: str, values: Mapping[str, Any]) -> Any:
    """Converts nested dicts to nested namedtuples."""
    fields = tuple(str(key) for key in values)
    parts = (record(str(key), part) if isinstance(part, dict) else part for key, part in values.items())
    return record_type(name, fields)(*parts)


def to_dm_timestep(timestep: jaxvec.TimeStep[Any]) -> Any:
    """Converts a batch to dm_env's `TimeStep`. Its observation is a namedtuple of `obs` and the info."""
    over = timestep.done
    first = timestep.info["episode_length"] == 0
    # In dm_env.StepType, FIRST is 0, MID is 1, and LAST is 2.
    return TimeStep(
        step_type=1 + over.astype(np.int32) - first.astype(np.int32),
        reward=timestep.reward,
        discount=1 - over.astype(np.float32),
        observation=record("State", _state(timestep.info, timestep.obs)),
    )


def dm_observation_spec(space: Space[Any], data: PoolSpec) -> Any:
    """Returns the dm_env specs of one env's `TimeStep.observation`."""
    leaves = zip(data.info.keys, data.info.children, strict=True)
    specs = import_optional("dm_env.specs", 'env_type="dm"', "dm-env")
    info = {key: specs.Array(leaf.shape, leaf.stored, key) for key, leaf in leaves if isinstance(leaf, Leaf)}
    return record("State", _state(info, dm_spec(space, data.obs)))


def _state(info: dict[str, Any], obs: Any) -> dict[str, Any]:
    # Without masks: namedtuple fields must not start with an underscore, so `rename` would replace them.
    own = {key: value for key, value in info_extras(info).items() if key != "elapsed_step" and key[0] != "_"}
    return {"env_id": info["env_id"], **own, "obs": obs}


def dm_spec(space: Space[Any], node: Node) -> Any:
    """Converts a space to dm_env's specs, nested in dicts and tuples like the space.

    `node` is the space's node, with the dtypes that the pool stores.
    """
    specs = import_optional("dm_env.specs", 'env_type="dm"', "dm-env")

    def convert(leaf: Leaf, space: Any) -> Any:
        name, *rest = leaf.path
        for part in rest:  # a dict's key replaces the name, a tuple's index is appended
            name = f"{name}_{part}" if isinstance(part, int) else str(part)
        if isinstance(space, spaces.Discrete) and space.start == 0:
            return specs.DiscreteArray(int(space.n), leaf.stored, name)
        return specs.BoundedArray(leaf.shape, leaf.stored, *_bounds(space), name)

    return map_leaves(node, space, convert)


def _fold(space: Space[Any], leaf: Callable[..., Any], module: Any, root: KeyPath = ()) -> Any:
    """Converts a space by `leaf(space, path)`, and nested spaces to the `Dict` and `Tuple` of `module`."""
    return fold_space(
        space,
        leaf,
        root=root,
        make_dict=lambda children, _: module.Dict(children),
        make_tuple=lambda children, _: module.Tuple(tuple(children)),
    )


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
