"""Code of the commands `check` and `bench` that runs in workers. It must not import JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_USUAL_KEY = "action_mask"


def find_mask(space: Any, key: str | None, obs: Any, info: Any) -> Any:
    """Returns the mask of legal actions in an info or a dict of observations; `None` without one.

    It is at `key`, by default at `action_mask`. It has an entry for each action of a `Discrete` space, or for
    each value of each number of a `MultiDiscrete` one, one number after the other; the result is flat.
    """
    for place in (info, obs):
        mask: Any = place.get(key or _USUAL_KEY) if isinstance(place, Mapping) else None
        if mask is not None:
            parts: Any = mask if isinstance(mask, tuple) else (mask,)  # `MultiDiscrete.sample` takes a tuple
            flat = np.concatenate([np.ravel(part) for part in parts])
            if len(flat) == sum(_sizes(space)) > 0:
                return flat
    return None


def _sizes(space: Any) -> list[int]:
    """Returns how many values each number of an action has; an empty list for other spaces."""
    if isinstance(space, spaces.MultiDiscrete):
        return [int(size) for size in space.nvec.ravel()]
    return [int(space.n)] if isinstance(space, spaces.Discrete) else []


class LegalUse(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Replaces each action that the mask of the last step forbids by a legal one, and adds reset options."""

    def __init__(self, env_fn: Callable[[], Any], key: str | None, options: dict[str, Any]) -> None:
        super().__init__(env_fn())
        self._key = key
        self._options = options
        self._mask: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = self.env.reset(seed=seed, options=options or self._options or None)
        self._mask = find_mask(self.env.action_space, self._key, obs, info)
        return obs, info

    def step(self, action: Any) -> Any:
        space: Any = self.env.action_space
        if self._mask is not None:
            action = self._legal(space, action)
        result = self.env.step(action)
        self._mask = find_mask(space, self._key, result[0], result[4])
        return result

    def _legal(self, space: Any, action: Any) -> Any:
        numbers = np.ravel(action - space.start)
        for place, mask in enumerate(np.split(self._mask, np.cumsum(_sizes(space))[:-1])):
            if not mask[numbers[place]] and mask.any():
                legal = np.flatnonzero(mask)
                numbers[place] = legal[numbers[place] % len(legal)]
        return (numbers.reshape(np.shape(action)) + space.start)[()].astype(space.dtype)


def imports_jax(env: Any) -> bool:
    """Returns True if this process, a worker with this env, has imported JAX."""
    return "jax" in sys.modules
