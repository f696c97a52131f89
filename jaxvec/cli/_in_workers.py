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

    It is at `key`, by default at `action_mask`, and has an entry for each action of a `Discrete` space.
    """
    for place in (info, obs):
        mask = place.get(key or _USUAL_KEY) if isinstance(place, Mapping) else None
        if mask is not None and isinstance(space, spaces.Discrete) and np.shape(mask) == (space.n,):
            return np.asarray(mask)
    return None


class LegalActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Replaces each action that the mask of the last step forbids by a legal one."""

    def __init__(self, env: gymnasium.Env[Any, Any], key: str | None) -> None:
        super().__init__(env)
        self._key = key
        self._mask: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = self.env.reset(seed=seed, options=options)
        self._mask = find_mask(self.env.action_space, self._key, obs, info)
        return obs, info

    def step(self, action: Any) -> Any:
        space: Any = self.env.action_space
        if self._mask is not None and not self._mask[action - space.start] and self._mask.any():
            legal = np.flatnonzero(self._mask)
            action = space.start + legal[(action - space.start) % len(legal)]
        result = self.env.step(action)
        self._mask = find_mask(space, self._key, result[0], result[4])
        return result


def build(env_fn: Callable[[], Any], key: str | None) -> Any:
    """Builds an env whose random actions are legal."""
    return LegalActions(env_fn(), key)


def imports_jax(env: Any) -> bool:
    """Returns True if this process, a worker with this env, has imported JAX."""
    return "jax" in sys.modules
