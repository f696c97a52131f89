"""Spaces of the old `gym` package, for code that looks for them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from gymnasium import spaces


def convert(space: spaces.Space[Any]) -> Any:
    """Returns the old package's like of `space`; `space` itself where the old package isn't installed."""
    if importlib.util.find_spec("gym") is None:
        return space
    return _convert(importlib.import_module("gym.spaces"), space)


def _convert(old: Any, space: spaces.Space[Any]) -> Any:
    match space:
        case spaces.Box():
            return old.Box(space.low, space.high, space.shape, space.dtype)
        case spaces.Discrete():  # the oldest have no start
            return old.Discrete(int(space.n), **({"start": int(space.start)} if space.start else {}))
        case spaces.MultiDiscrete() if not space.start.any():
            return old.MultiDiscrete(space.nvec)
        case spaces.MultiBinary():
            return old.MultiBinary(space.n)
        case spaces.Dict():
            return old.Dict({key: _convert(old, child) for key, child in space.spaces.items()})
        case spaces.Tuple():
            return old.Tuple([_convert(old, child) for child in space.spaces])
        case _:
            raise TypeError(f'gym has no space like {space}; use env_type="gymnasium"')
