"""From dm_env's specs to Gymnasium's spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from dm_env import specs
from gymnasium import spaces

from jaxvec._errors import UnsupportedSpaceError
from jaxvec._spaces import KeyPath, format_path


def to_space(spec: Any, root: KeyPath) -> spaces.Space[Any]:
    """Returns the space of a spec, of the same structure, shapes, dtypes and bounds.

    Args:
        spec: an `Array` or a subclass, or nested dicts, tuples and lists of them; a list becomes a `Tuple`.
        root: what the spec is called in errors.

    Raises:
        UnsupportedSpaceError: a spec is of strings, of objects, or none at all; names its path.
    """
    match spec:
        case specs.Array() if spec.dtype.kind not in "biuf":
            raise UnsupportedSpaceError(
                f"{format_path(root)}: {spec!r} has no fixed size, so it can't be an array inside jax.jit; "
                "leave it out, or encode it as a fixed-length array of numbers, in a dm_env.Environment "
                "around the env"
            )
        case specs.DiscreteArray():
            return spaces.Discrete(spec.num_values, dtype=spec.dtype)
        case specs.BoundedArray():
            low, high = (np.broadcast_to(bound, spec.shape) for bound in (spec.minimum, spec.maximum))
            return spaces.Box(low, high, spec.shape, spec.dtype)
        case specs.Array():
            return spaces.Box(*_limits(spec.dtype), spec.shape, spec.dtype)
        case Mapping():
            # Pairs keep their order, which a dict would not.
            return spaces.Dict([(key, to_space(child, (*root, key))) for key, child in spec.items()])
        case tuple() | list():
            return spaces.Tuple([to_space(child, (*root, index)) for index, child in enumerate(spec)])
        case _:
            raise UnsupportedSpaceError(
                f"{format_path(root)}: expected a spec of dm_env, or nested dicts, tuples and lists of them; "
                f"got {type(spec).__name__}"
            )


def to_observation(spec: Any, value: Any) -> Any:
    """Returns an observation with arrays in place of numbers, which dm_env allows and Gymnasium does not."""
    return _map(spec, value, _as_array)


def to_action(spec: Any, value: Any) -> Any:
    """Returns an element of the spec's space with lists where the spec has them."""
    return _map(spec, value, lambda _, value: value)


def _map(spec: Any, value: Any, function: Callable[[specs.Array, Any], Any]) -> Any:
    """Applies `function` to leaves; what has another structure than the spec stays, for others to refuse."""
    match spec:
        case specs.Array():
            return function(spec, value)
        case Mapping() if isinstance(value, Mapping) and value.keys() == spec.keys():
            return {key: _map(child, value[key], function) for key, child in spec.items()}
        case tuple() | list() if isinstance(value, (tuple, list)) and len(value) == len(spec):
            children = [_map(child, one, function) for child, one in zip(spec, value, strict=True)]
            return children if isinstance(spec, list) else tuple(children)
        case _:
            return value


def _as_array(spec: specs.Array, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    array = np.asarray(value)
    return array.astype(spec.dtype) if np.can_cast(array.dtype, spec.dtype, "same_kind") else array


def _limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    match dtype.kind:
        case "f":
            return -np.inf, np.inf
        case "b":
            return 0, 1
        case _:
            return np.iinfo(dtype).min, np.iinfo(dtype).max
