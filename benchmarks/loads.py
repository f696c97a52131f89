"""The loads: each is a number of envs of one type, or of a mixture, that all systems step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from jaxvec.testing import NestedEnv


class BusyEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """An env that keeps a core busy for `microseconds` per step. With 0, a step returns at once."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, microseconds: float) -> None:
        self._ns = int(microseconds * 1000)
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._obs, {}

    def step(self, action: Any) -> Any:
        if self._ns:
            until = time.perf_counter_ns() + self._ns
            while time.perf_counter_ns() < until:
                pass
        return self._obs, 1.0, False, False, {}


class ImageEnv(BusyEnv):
    """An env with observations of 84 x 84 x 4 bytes. One byte changes per step."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        super().__init__(0)
        self._obs = np.zeros((84, 84, 4), np.uint8)  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, action: Any) -> Any:
        self._obs[0, 0, 0] ^= 1
        return super().step(action)


EnvFn = Callable[[], gymnasium.Env[Any, Any]]


@dataclass(frozen=True)
class Load:
    """A number of envs, made by a registered id or by functions.

    Attributes:
        name: Name of the load in the report.
        num_envs: Number of envs.
        env_id: Registered id of the envs, or None. Some systems need an id.
        make: Function from the index of an env to the function that makes it, used instead of `env_id`.
    """

    name: str
    num_envs: int
    env_id: str | None = None
    make: Callable[[int], EnvFn] | None = None

    def env_fns(self, num_envs: int | None = None) -> list[EnvFn]:
        """Returns one picklable function per env that makes it, for `self.num_envs` envs by default."""
        number = self.num_envs if num_envs is None else num_envs
        if self.make is not None:
            return [self.make(i) for i in range(number)]
        return [partial(gymnasium.make, self.env_id)] * number  # pyright: ignore[reportReturnType]


_CLASSIC = {"Acrobot": "Acrobot-v1", "MountainCar": "MountainCar-v0"}


def _mixed(index: int) -> EnvFn:
    return partial(BusyEnv, 1000 if index % 8 == 0 else 100)


LOADS = {
    load.name: load
    for load in (
        *(Load(f"no-op x {n}", n, make=lambda _: partial(BusyEnv, 0)) for n in (8, 64, 512)),
        *(Load(f"CartPole x {n}", n, env_id="CartPole-v1") for n in (4, 8, 64, 256, 1024)),
        *(Load(f"{name} x 256", 256, env_id=env_id) for name, env_id in _CLASSIC.items()),
        Load("image x 64", 64, make=lambda _: ImageEnv),
        Load("nested Dict x 64", 64, make=lambda _: NestedEnv),
        Load("busy 100 us x 64", 64, make=lambda _: partial(BusyEnv, 100)),
        Load("mixed x 64", 64, make=_mixed),
    )
}
