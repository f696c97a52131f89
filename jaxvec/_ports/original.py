"""The env that `jaxvec.ports` steps in workers: an original that is set to the states of its port. No JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import Autoreset, TimeLimit

SetState = Callable[[Any, Any], object]


class Original(gymnasium.Env[Any, Any]):
    """An env whose actions also say in which state it is, and at which step of an episode.

    Its episodes have no end: `terminated` and `truncated` are parts of its observations, and the program
    decides when the next episode starts. So a wrong port and its original can disagree about an end.

    Args:
        env_fn: Function that makes the original.
        set_state: Function of the original and of a state, which sets the original to it; `None` if there is
            none.
        state_space: Space of the states.
        each_step: Whether to set the state before each step, not only when an episode starts.
    """

    def __init__(
        self, env_fn: Callable[[], Any], set_state: SetState | None, state_space: Any, *, each_step: bool
    ) -> None:
        self._env = env_fn()
        self._set_state = set_state
        self._each_step = each_step
        # A replay steps a new env, which may refuse a step without a reset.
        self._ended = True
        self._time_limit = _find_wrapper(self._env, TimeLimit)
        mode = "NEXT_STEP" if _find_wrapper(self._env, Autoreset) else None
        declared = (getattr(self._env, "metadata", None) or {}).get("autoreset_mode", mode)
        self.described = {
            "observation space": self._env.observation_space,
            "action space": self._env.action_space,
            "time limit": getattr(self._time_limit, "_max_episode_steps", None),
            "autoreset": getattr(declared, "name", declared),
        }
        flag = spaces.Box(0, 1, (), np.bool_)  # pyright: ignore[reportCallIssue, reportArgumentType]
        self.observation_space: spaces.Space[Any] = spaces.Dict(
            {"obs": self._env.observation_space, "terminated": flag, "truncated": flag}
        )
        self.action_space: spaces.Space[Any] = spaces.Dict(
            {
                "action": self._env.action_space,
                "step": spaces.Box(1, 2**31 - 1, (), np.int32),
                "seed": spaces.Box(0, 2**31 - 1, (), np.int32),
                "state": state_space,
            }
        )
        if hasattr(self._env, "reward_space"):
            self.reward_space = self._env.reward_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Resets the original. Programs begin episodes by `step`."""
        obs, info = self._env.reset(seed=seed, options=options)
        self._ended = False
        return {"obs": obs, "terminated": False, "truncated": False}, info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Starts an episode or sets the state, as the action says, and steps the original."""
        start = int(action["step"]) == 1
        # An env that has ended may refuse to continue, or count steps after its end, until it is reset.
        if start or self._ended:
            self._env.reset(seed=int(action["seed"]) if start else None)
        if self._each_step and self._time_limit is not None:
            self._time_limit._elapsed_steps = int(action["step"]) - 1
        if self._set_state is not None and (start or self._each_step):
            try:
                self._set_state(self._env, action["state"])
            except Exception as error:
                raise RuntimeError(
                    "set_state could not set the original to a state of the port, see the error above. If "
                    "the original has no such state, leave set_state out and pass mode='free_running'"
                ) from error
        obs, reward, terminated, truncated, info = self._env.step(action["action"])
        self._ended = bool(terminated or truncated)
        return {"obs": obs, "terminated": terminated, "truncated": truncated}, reward, False, False, info

    def close(self) -> None:
        """Closes the original."""
        self._env.close()


def _find_wrapper(env: Any, wrapper: type) -> Any:
    """Returns the outermost wrapper of a class; `None` without."""
    while isinstance(env, gymnasium.Wrapper) and not isinstance(env, wrapper):
        env = env.env
    return env if isinstance(env, wrapper) else None


def constructor(original: Any) -> Callable[[], Any]:
    """Returns the function that makes the original, without Gymnasium's checks in each step."""
    if isinstance(original, (str, EnvSpec)):
        return partial(gymnasium.make, original, disable_env_checker=True)
    if not callable(original):
        raise TypeError(
            f"original must be a Gymnasium id, an EnvSpec or a function that makes an env, not {original!r}"
        )
    return original


def space_like(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    """Returns the space of all arrays of a shape and dtype."""
    dtype = np.dtype(dtype)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    low, high = (limits.min, limits.max) if limits else (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)
    return spaces.Box(low, high, shape, dtype.type)  # pyright: ignore[reportCallIssue, reportArgumentType]
