"""Batches the envs' infos as Gymnasium does: a dict of arrays, each with a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def batch(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one dict for the infos of all envs.

    Numbers and arrays are stacked, in a dtype that holds them all, and zero where an env has none; dicts
    are batched in turn; anything else, and every `final_obs`, goes into an array of objects.

    Args:
        infos: of each env.

    Returns:
        For each key an array `[num_envs, ...]`, and as `_key` the `[num_envs]` bool of envs that have it.
    """
    by_key: dict[str, dict[int, Any]] = {}
    for env_id, info in enumerate(infos):
        for key, value in info.items():
            by_key.setdefault(key, {})[env_id] = value
    batched: dict[str, Any] = {}
    for key, values in by_key.items():
        mask = np.zeros(len(infos), np.bool_)
        mask[list(values)] = True
        batched[key] = _column(key, values, len(infos))
        batched[f"_{key}"] = mask
    return batched


def _column(key: str, values: dict[int, Any], num_envs: int) -> Any:
    if key == "final_obs":
        return _objects(values, num_envs)
    if all(isinstance(value, dict) for value in values.values()):
        return batch([values.get(env_id, {}) for env_id in range(num_envs)])
    shapes = {_shape(value) for value in values.values()}
    if len(shapes) > 1 or None in shapes:
        return _objects(values, num_envs)
    (shape,) = shapes
    dtypes = {np.asarray(value).dtype for value in values.values()}  # a huge int is an object
    try:
        dtype = np.result_type(*dtypes)
    except TypeError:  # strings and numbers, and the like
        return _objects(values, num_envs)
    column = np.full((num_envs, *(shape or ())), None if dtype.kind == "O" else np.zeros((), dtype), dtype)
    for env_id, value in values.items():
        column[env_id] = value
    return column


def _shape(value: Any) -> tuple[int, ...] | None:
    """Returns the shape of what is stacked, `None` of other objects."""
    if isinstance(value, np.ndarray):
        return value.shape
    return () if type(value) in (int, float, bool) or isinstance(value, np.number) else None


def _objects(values: dict[int, Any], num_envs: int) -> NDArray[Any]:
    column = np.full(num_envs, None, object)
    for env_id, value in values.items():
        column[env_id] = value
    return column
