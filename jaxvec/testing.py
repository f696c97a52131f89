"""Tools for users' tests: deterministic toy envs, and `check_env`.

This module does not import JAX, so that workers with one of its envs do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from jaxvec._options import CheckMode

if TYPE_CHECKING:  # these import JAX
    from jaxvec._results import TimeStep
    from jaxvec._vector_env import VectorEnv

__all__ = ["CountingEnv", "NestedEnv", "check_env"]

Timesteps: TypeAlias = list[dict[str, Any]]  # the leaves of each time step, by name


class CountingEnv(gymnasium.Env[NDArray[np.int32], Any]):
    """An env that counts its own steps, so that tests can verify exactly which steps were executed.

    The observation is `[resets, steps, steps in this episode, last action]`, int32, with action -1 after a
    reset. The reward is the number of steps in this episode. The info of a reset has `seed` (-1 for none) and
    `options`, the info of a step `steps`.

    Args:
        episode_length: Number of steps until an episode ends; `None` for no end.
        truncate: Whether episodes end with `truncated` in place of `terminated`.

    Example:
        ```python
        with jaxvec.make(jaxvec.testing.CountingEnv, 2, episode_length=3) as envs:
            envs.reset(seed=0)
            timestep = envs.step([5, 6])
            print(timestep.obs[1], timestep.reward)  # [1 1 1 6] [1. 1.]
        ```
    """

    def __init__(self, episode_length: int | None = None, *, truncate: bool = False) -> None:
        self.observation_space: gymnasium.Space[Any] = spaces.Box(-1, 2**31 - 1, (4,), np.int32)
        self.action_space: gymnasium.Space[Any] = spaces.Discrete(1_000)
        self.resets: int = 0
        self.steps: int = 0
        self._length = episode_length
        self._truncate = truncate
        self._episode_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.int32], dict[str, Any]]:
        """Starts an episode."""
        super().reset(seed=seed)
        self.resets += 1
        self._episode_steps = 0
        return self._observe(-1), {"seed": -1 if seed is None else seed, "options": options}

    def step(self, action: Any) -> tuple[NDArray[np.int32], float, bool, bool, dict[str, Any]]:
        """Counts a step, and repeats the action in the observation."""
        self.steps += 1
        self._episode_steps += 1
        over = self._length is not None and self._episode_steps >= self._length
        terminated = over and not self._truncate
        truncated = over and self._truncate
        reward = float(self._episode_steps)
        return self._observe(int(action)), reward, terminated, truncated, {"steps": self.steps}

    def _observe(self, action: int) -> NDArray[np.int32]:
        return np.array([self.resets, self.steps, self._episode_steps, action], np.int32)


class NestedEnv(gymnasium.Env[Any, Any]):
    """An env with nested observations and actions of many kinds, which returns the action in its observation.

    The reward is the sum over the action. The keys are unsorted on purpose, because JAX sorts them.

    Args:
        episode_length: Number of steps until `terminated`.

    Example:
        ```python
        with jaxvec.make(jaxvec.testing.NestedEnv, 2) as envs:
            timestep = envs.reset(seed=0)
            print(timestep.obs["image"].shape, timestep.obs["last"]["turn"].dtype)  # (2, 4, 4, 3) int32
        ```
    """

    def __init__(self, episode_length: int = 7) -> None:
        matrix = spaces.Box(-1, 1, (2, 3), np.float64)
        arm = (matrix, spaces.MultiBinary(4), spaces.Box(-1, 1, (), np.float32))
        echoed: dict[str, Any] = {
            "turn": spaces.Discrete(5, start=-2),
            "arm": spaces.Tuple(arm),
            "keys": spaces.MultiDiscrete([3, 4], start=[1, -1]),
        }
        self.action_space: gymnasium.Space[Any] = spaces.Dict(echoed)
        self.observation_space: gymnasium.Space[Any] = spaces.Dict(
            {
                "last": spaces.Dict(echoed),
                "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
                "half": spaces.Box(-10, 10, (3,), np.float16),
                "flag": spaces.Box(0, 1, (2,), np.bool_),  # pyright: ignore[reportCallIssue, reportArgumentType]
                "empty": spaces.Box(-1, 1, (0, 2), np.float32),
                "clock": spaces.Tuple((spaces.Discrete(1_000), spaces.Box(0, 1, (), np.float64))),
            }
        )
        self._length = episode_length
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Starts an episode. `seed` also determines the action in the first observation."""
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(self._random_action()), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Returns the action as `last` in the observation."""
        self._steps += 1
        arm = action["arm"]
        reward = float(action["turn"] + arm[0].sum() + arm[1].sum() + arm[2] + action["keys"].sum())
        return self._observe(action), reward, self._steps >= self._length, False, {}

    def _observe(self, action: Any) -> dict[str, Any]:
        rng = self.np_random
        return {
            "last": action,
            "image": rng.integers(0, 256, (4, 4, 3), np.uint8),
            "half": rng.normal(size=3).astype(np.float16),
            "flag": rng.random(2) < 0.5,
            "empty": np.zeros((0, 2), np.float32),
            "clock": (self._steps, rng.random()),
        }

    def _random_action(self) -> dict[str, Any]:
        rng = self.np_random
        turn = int(rng.integers(-2, 3))
        arm = (rng.uniform(-1, 1, (2, 3)), rng.integers(0, 2, 4, np.int8), np.float32(rng.uniform(-1, 1)))
        return {"turn": turn, "arm": arm, "keys": rng.integers([1, -1], [4, 3])}


def check_env(
    env_fn: Callable[[], Any],
    *,
    num_steps: int = 100,
    seed: int = 0,
    check: CheckMode = "strict",
    max_sizes: Mapping[str, Any] | None = None,
) -> None:
    """Steps an env as a worker would, and raises at the first violation of the requirements for envs.

    The env must be a `gymnasium.Env`. `reset` and `step` must return observations
    in their space, and a number as reward. The same seed and actions must give the same data.

    Args:
        env_fn: Function that makes the env; called twice.
        num_steps: Number of steps, with random actions.
        seed: Seed of the env and of the actions.
        check: Validation of observations, as in `jaxvec.make`.
        max_sizes: Maximum sizes of sequences and graphs, as in `jaxvec.make`.

    Raises:
        EnvError: The env raised an exception.
        EnvDataError: A value does not match its space. The message names the leaf.
        UnsupportedSpaceError: A space is unknown, or has no maximum size.
        AssertionError: The same seed and actions gave different data.

    Example:
        ```python
        jaxvec.testing.check_env(lambda: gymnasium.make("CartPole-v1"), num_steps=20)
        ```
    """
    first, second = (_play(env_fn, num_steps, seed, check=check, max_sizes=max_sizes) for _ in range(2))
    if (difference := find_difference(first, second)) is not None:
        name, _, call, value, other = difference
        raise AssertionError(
            f"{name}: the same seed and actions gave {value} and {other} at {call}; draw random numbers only "
            "from self.np_random, which reset(seed=...) seeds"
        )


def _play(
    env_fn: Callable[[], Any],
    num_steps: int,
    seed: int,
    *,
    max_sizes: Mapping[str, Any] | None,
    **options: Any,
) -> Timesteps:
    """Steps an env in this process, in a pool whose time steps have all that the env returns."""
    from jaxvec.callbacks import _make  # imports JAX

    options |= {"backend": "serial", "autoreset_mode": "SAME_STEP"}
    with _make.make(env_fn, 1, max_sizes=max_sizes, **options) as envs:
        return step_randomly(envs, envs.reset(seed=seed), num_steps, seed=seed, max_sizes=max_sizes)


def step_randomly(
    envs: VectorEnv,
    timestep: TimeStep[Any],
    num_steps: int,
    *,
    seed: int = 0,
    max_sizes: Mapping[str, Any] | None = None,
) -> Timesteps:
    """Steps all envs after `timestep` with random actions, which are equal for equal seeds."""
    from jax.tree_util import keystr, tree_leaves_with_path

    from jaxvec.spaces import pad

    space = envs.single_action_space
    space.seed(seed)
    actions = ([space.sample() for _ in range(envs.num_envs)] for _ in range(num_steps))
    timesteps = [timestep, *(envs.step(pad(space, action, max_sizes)) for action in actions)]
    return [
        {keystr(path).lstrip("."): leaf for path, leaf in tree_leaves_with_path(part)} for part in timesteps
    ]


def find_difference(first: Timesteps, second: Timesteps) -> tuple[str, int, str, Any, Any] | None:
    """Returns name, env, call and both values of the first difference between two runs of a pool."""
    for number, (leaves, other) in enumerate(zip(first, second, strict=True)):
        for name, rows in leaves.items():
            for env_id, (row, another) in enumerate(zip(rows, other[name], strict=True)):
                if row.tobytes() != another.tobytes():
                    return name, env_id, f"step {number}" if number else "reset", row, another
    return None
