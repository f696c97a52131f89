"""An env whose steps take longer. Workers import this file, and so no JAX."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np


class Delayed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes each step take longer, by a time drawn from an exponential distribution."""

    def __init__(self, env: gymnasium.Env[Any, Any], mean: float) -> None:
        """Takes the mean in seconds."""
        super().__init__(env)
        self._mean = mean
        self._random = np.random.default_rng()

    def step(self, action: Any) -> Any:
        """Sleeps, and steps the env."""
        time.sleep(self._random.exponential(self._mean))
        return super().step(action)


def make(env: str, mean: float) -> gymnasium.Env[Any, Any]:
    """Makes an env from its Gymnasium id, which takes longer by `mean` seconds a step."""
    return Delayed(gymnasium.make(env), mean)
