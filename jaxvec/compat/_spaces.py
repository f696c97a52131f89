"""Conversion of Gymnasium's spaces to those of gymnax and old Gym, and to dm_env's specs and time steps."""

from __future__ import annotations

import importlib
import importlib.util
from collections import namedtuple
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import Space, spaces

import jaxvec
from jaxvec._errors import UnsupportedSpaceError
from jaxvec._spec import KeyPath, Leaf, Node, PoolSpec, fold_space, format_path, map_leaves
from jaxvec.compat._base import info_extras

# ----------------------------------------------------------------------------------------------------------
# gymnax's spaces: these classes replace its own where it is not installed.
# ----------------------------------------------------------------------------------------------------------


class Discrete:
    """The integers from 0 to `n - 1`."""

    def __init__(self, num_categories: int) -> None:
        self.n = num_categories
        self.shape: tuple[int, ...] = ()
        self.dtype = np.dtype(np.int32)

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns a random element."""
        return jax.random.randint(key, (), 0, self.n, self.dtype)

    def contains(self, x: Any) -> jax.Array:
        """Says whether an integer is an element; may be traced."""
        x = jnp.asarray(x)
        return (x >= 0) & (x < self.n)


class Box:
    """Arrays of a shape, with bounds."""

    def __init__(self, low: Any, high: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> None:
        self.low = low
        self.high = high
        self.shape = shape
        self.dtype = dtype

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns a random element; the bounds have to be finite."""
        return jax.random.uniform(key, self.shape, minval=self.low, maxval=self.high).astype(self.dtype)

    def contains(self, x: Any) -> jax.Array:
        """Says whether an array is within the bounds; may be traced."""
        return jnp.all((x >= self.low) & (x <= self.high))


class Dict:
    """A dict of spaces."""

    def __init__(self, spaces: Mapping[str, Any]) -> None:
        self.spaces = spaces
        self.num_spaces = len(spaces)

    def sample(self, key: jax.Array) -> dict[str, Any]:
        """Returns a random element."""
        keys = jax.random.split(key, self.num_spaces)
        pairs = zip(self.spaces.items(), keys, strict=True)
        return {name: space.sample(key) for (name, space), key in pairs}

    def contains(self, x: Mapping[str, Any]) -> jax.Array:
        """Says whether every value is in its space; may be traced."""
        return _all([space.contains(x[name]) for name, space in self.spaces.items()])


class Tuple:
    """A tuple of spaces."""

    def __init__(self, spaces: Sequence[Any]) -> None:
        self.spaces = spaces
        self.num_spaces = len(spaces)

    def sample(self, key: jax.Array) -> tuple[Any, ...]:
        """Returns a random element."""
        keys = jax.random.split(key, self.num_spaces)
        return tuple(space.sample(key) for space, key in zip(self.spaces, keys, strict=True))

    def contains(self, x: Sequence[Any]) -> jax.Array:
        """Says whether every value is in its space; may be traced."""
        return _all([space.contains(part) for space, part in zip(self.spaces, x, strict=True)])


def to_gymnax_space(space: Space[Any], root: str) -> Any:
    """Returns the gymnax space of a Gymnasium space; `MultiDiscrete` and `MultiBinary` become a `Box`.

    Args:
        space: Space of one env.
        root: Name of the space in errors.

    Raises:
        UnsupportedSpaceError: gymnax has no such space.
    """
    try:
        module = importlib.import_module("gymnax.environments.spaces")
    except ImportError:
        module = importlib.import_module(__name__)

    def leaf(space: Space[Any], path: KeyPath) -> Any:
        match space:
            case spaces.Discrete(start=0):
                return module.Discrete(int(space.n))
            case spaces.Discrete():
                raise UnsupportedSpaceError(
                    f"{format_path(path)}: this Discrete space starts at {space.start}, gymnax's do at 0; "
                    "wrap the env"
                )
            case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
                dtype = jax.dtypes.canonicalize_dtype(space.dtype)
                low, high = (_simplest(np.asarray(bound).astype(dtype)) for bound in _bounds(space))
                return module.Box(low, high, shape=tuple(space.shape), dtype=dtype)
            case _:
                raise UnsupportedSpaceError(f"{format_path(path)}: gymnax has no space like {space}")

    return fold_space(
        space,
        leaf,
        root=(root,),
        make_dict=lambda children, _: module.Dict(children),
        make_tuple=lambda children, _: module.Tuple(children),
    )


def _simplest(bound: np.ndarray[Any, Any]) -> Any:
    """One number will do where all are equal: images have many."""
    equal = bound.size > 0 and bool((bound == bound.flat[0]).all())
    return bound.flat[0].item() if equal else jnp.asarray(bound)


def _all(parts: Sequence[Any]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.asarray(part) for part in parts]))


# ----------------------------------------------------------------------------------------------------------
# Spaces of the old `gym` package.
# ----------------------------------------------------------------------------------------------------------


def to_old_gym(space: Space[Any]) -> Any:
    """Returns the space of the old package for `space`; `space` itself where that isn't installed."""
    if importlib.util.find_spec("gym") is None:
        return space
    old = importlib.import_module("gym.spaces")

    def leaf(space: Space[Any], _: KeyPath) -> Any:
        match space:
            case spaces.Box():
                return old.Box(space.low, space.high, space.shape, space.dtype)
            case spaces.Discrete():  # the oldest have no start
                return old.Discrete(int(space.n), **({"start": int(space.start)} if space.start else {}))
            case spaces.MultiDiscrete() if not space.start.any():
                return old.MultiDiscrete(space.nvec)
            case spaces.MultiBinary():
                return old.MultiBinary(space.n)
            case _:
                raise TypeError(f'gym has no space like {space}; use env_type="gymnasium"')

    return fold_space(
        space,
        leaf,
        root=(),
        make_dict=lambda children, _: old.Dict(children),
        make_tuple=lambda children, _: old.Tuple(children),
    )


# ----------------------------------------------------------------------------------------------------------
# Time steps and specs of `env_type="dm"`.
# ----------------------------------------------------------------------------------------------------------

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
def record_type(name: str, fields: tuple[str, ...]) -> Any:
    """Returns the one namedtuple type of these fields, so that its pytrees have equal structure."""
    return namedtuple(name, fields, rename=True)  # pyright: ignore[reportUntypedNamedTuple]


def record(name: str, values: Mapping[str, Any]) -> Any:
    """Returns nested dicts as nested namedtuples."""
    fields = tuple(str(key) for key in values)
    parts = (record(str(key), part) if isinstance(part, dict) else part for key, part in values.items())
    return record_type(name, fields)(*parts)


def to_dm_timestep(timestep: jaxvec.TimeStep) -> Any:
    """Returns dm_env's `TimeStep` of a batch, whose observation is a namedtuple of `obs` and the info."""
    over = timestep.terminated | timestep.truncated
    first = timestep.info["episode_length"] == 0
    return TimeStep(
        step_type=(MID + over * (LAST - MID) - first * (MID - FIRST)).astype(np.int32),
        reward=timestep.reward,
        discount=1 - over.astype(np.float32),
        observation=record("State", _state(timestep.info, timestep.obs)),
    )


def dm_observation_spec(space: Space[Any], data: PoolSpec) -> Any:
    """Returns dm_env's specs of a `TimeStep.observation`, of one env; see `spec_of`."""
    leaves = zip(data.info.keys, data.info.children, strict=True)
    specs = importlib.import_module("dm_env.specs")
    info = {key: specs.Array(leaf.shape, leaf.stored, key) for key, leaf in leaves if isinstance(leaf, Leaf)}
    return record("State", _state(info, dm_spec(space, data.obs)))


def _state(info: dict[str, Any], obs: Any) -> dict[str, Any]:
    own = {key: value for key, value in info_extras(info).items() if key != "elapsed_step" and key[0] != "_"}
    return {"env_id": info["env_id"], **own, "obs": obs}


def dm_spec(space: Space[Any], node: Node) -> Any:
    """Returns dm_env's spec of a space; nested ones in dicts and tuples, as the space is.

    Args:
        space: Space of one env.
        node: The same space as a node, with the dtypes that are stored.

    Raises:
        ImportError: dm_env is not installed.
    """
    specs = importlib.import_module("dm_env.specs")

    def convert(leaf: Leaf, space: Any) -> Any:
        name, *rest = leaf.path
        for part in rest:
            name = f"{name}_{part}" if isinstance(part, int) else str(part)
        if isinstance(space, spaces.Discrete) and space.start == 0:
            return specs.DiscreteArray(int(space.n), leaf.stored, name)
        return specs.BoundedArray(leaf.shape, leaf.stored, *_bounds(space), name)

    return map_leaves(node, space, convert)


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
