"""For users' tests: toy envs whose every answer can be foretold, and `check_env`, our contract.

Importing this module doesn't import jax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from jaxvec._config import PoolConfig
from jaxvec._envs.constructors import describe
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.envs import EnvFailure, build_env, close_envs
from jaxvec._envs.failures import report, to_error
from jaxvec._memory import rows, segment
from jaxvec._memory.segment import make_layout
from jaxvec._spec import Autoreset, as_jax, make_spec

__all__ = ["CountingEnv", "NestedEnv", "check_env"]


class CountingEnv(gymnasium.Env[NDArray[np.int32], Any]):
    """Counts its own steps: what was really done to it can be read from its observation.

    The observation is `[resets, steps, steps in this episode, last action]`, int32; the reward is
    the number of steps in this episode.

    Args:
        episode_length: steps until `terminated`; `None` for never.
        truncate: end episodes by `truncated` instead.

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
        """Starts an episode.

        Returns:
            The observation, whose last action is -1, and info: `seed`, -1 for none, and `options`.
        """
        super().reset(seed=seed)
        self.resets += 1
        self._episode_steps = 0
        return self._observe(-1), {"seed": -1 if seed is None else seed, "options": options}

    def step(self, action: Any) -> tuple[NDArray[np.int32], float, bool, bool, dict[str, Any]]:
        """Counts.

        Args:
            action: is only repeated in the observation.

        Returns:
            The observation, the reward, the flags, and info: `steps` since the env was made.
        """
        self.steps += 1
        self._episode_steps += 1
        over = self._length is not None and self._episode_steps >= self._length
        return (
            self._observe(int(action)),
            float(self._episode_steps),
            over and not self._truncate,
            over and self._truncate,
            {"steps": self.steps},
        )

    def _observe(self, action: int) -> NDArray[np.int32]:
        return np.array([self.resets, self.steps, self._episode_steps, action], np.int32)


class NestedEnv(gymnasium.Env[Any, Any]):
    """Has nested observations and actions of many kinds; echoes the action in its observation.

    Keys are deliberately not in sorted order, as Gymnasium keeps a `Dict`'s order and JAX sorts it.

    Args:
        episode_length: steps until `terminated`.

    Example:
        ```python
        with jaxvec.make(jaxvec.testing.NestedEnv, 2) as envs:
            timestep = envs.reset(seed=0)
            print(timestep.obs["image"].shape, timestep.obs["last"]["turn"].dtype)  # (2, 4, 4, 3) int32
        ```
    """

    def __init__(self, episode_length: int = 7) -> None:
        echoed: dict[str, Any] = {
            "turn": spaces.Discrete(5, start=-2),
            "arm": spaces.Tuple(
                (
                    spaces.Box(-1, 1, (2, 3), np.float64),
                    spaces.MultiBinary(4),
                    spaces.Box(-1, 1, (), np.float32),
                )
            ),
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
        """Starts an episode.

        Args:
            seed: of the noise in the observations, and of the action that the first one echoes.
            options: are ignored.

        Returns:
            The observation, and an empty info.
        """
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(self._random_action()), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Echoes the action.

        Args:
            action: of the action space.

        Returns:
            The observation, with the action under `last`; the sum over the action as the reward; the flags;
            an empty info.
        """
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
        return {
            "turn": int(rng.integers(-2, 3)),
            "arm": (
                rng.uniform(-1, 1, (2, 3)),
                rng.integers(0, 2, 4, np.int8),
                np.float32(rng.uniform(-1, 1)),
            ),
            "keys": rng.integers([1, -1], [4, 3]),
        }


def check_env(
    env_fn: Callable[[], Any], *, num_steps: int = 100, seed: int = 0, check: str = "strict"
) -> None:
    """Steps an env as a worker would and raises the first breach of the contract.

    The contract: a `gymnasium.Env` whose spaces have fixed shapes; `reset` and `step` return observations
    that are members of their space, and a number as reward; the same seed and actions give the same data.

    Args:
        env_fn: makes the env; called twice.
        num_steps: to take, with random actions.
        seed: of the env and of the actions.
        check: as of `jaxvec.make`: `"structure"` takes observations of the right structure, shape and kind
            of dtype, also those outside of their space.

    Raises:
        EnvError: the env raised.
        EnvDataError: it returned other data than its spaces say; names the leaf.
        UnsupportedSpaceError: a space has a leaf without fixed shape and dtype.
        AssertionError: the same seed and actions gave different data.

    Example:
        ```python
        jaxvec.testing.check_env(lambda: gymnasium.make("CartPole-v1"), num_steps=20)
        ```
    """
    first, second = (_trace(env_fn, num_steps, seed, PoolConfig(check=check).strict) for _ in range(2))
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        for path, array in a.items():
            if array.tobytes() != b[path].tobytes():
                call = f"step {number}" if number else "reset"
                raise AssertionError(
                    f"{path}: the same seed and actions gave {array} and {b[path]} at {call}; draw random "
                    "numbers only from self.np_random, which reset(seed=...) seeds"
                )


def _trace(
    env_fn: Callable[[], Any], num_steps: int, seed: int, strict: bool
) -> list[dict[str, NDArray[Any]]]:
    """Returns copies of every leaf after the reset and each step."""
    envs: list[Any] = []
    try:
        envs = build_env([env_fn], 0)
        spaces_ = describe(envs, first=0, learn_info=False, equal_spaces=True).spaces
        mode = Autoreset.SAME_STEP
        spec = make_spec(spaces_, num_envs=1, autoreset=mode, final_obs=True, declared={}, policy=as_jax)
        arrays = segment.private_segment(make_layout(spec, 1))
        env_slice = EnvSlice(envs, [env_fn], first=0, worker=0, spec=spec, arrays=arrays, strict=strict)
        spaces_.action.seed(seed)
        write_action = rows.writer(spec.action, arrays)
        arrays["seed",][:] = seed
        slots = np.arange(1)
        env_slice.reset(slots)
        trace = [{str(leaf): arrays[leaf.path].copy() for leaf in spec.timestep_leaves}]
        for _ in range(num_steps):
            write_action(0, spaces_.action.sample())
            env_slice.step(slots)
            trace.append({str(leaf): arrays[leaf.path].copy() for leaf in spec.timestep_leaves})
        return trace
    except EnvFailure as failure:
        raise to_error(report(failure), worker=None) from failure.__cause__
    finally:
        close_envs(envs, 0)
