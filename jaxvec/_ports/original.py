"""The env that `jaxvec.ports` steps in workers: an original that is set to the states of its port. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.wrappers import Autoreset, TimeLimit

SetState = Callable[[Any, Any], object]
GetState = Callable[[Any], Mapping[str, Any]]


_REPETITIONS = 8  # per env, of steps from one state after resets with different seeds
_REPEATED = (
    "equal results from one state",
    ("other results after another reset: random, see compare_distributions, or set_state leaves a part"),
)


class Original(gymnasium.Env[Any, Any]):
    """An env whose actions also say in which state it is, and at which step of an episode.

    Its episodes have no end: `terminated`, `truncated` and the state are parts of its observations, and the
    program decides when the next episode starts. So a wrong port and its original can disagree about an end.

    Args:
        env_fn: Function that makes the original.
        set_state: Function of the original and of a state, which sets the original to it; `None` if there is
            none.
        get_state: Function of the original that returns its state; `None` if there is none.
        state_space: Space of the port's states.
        each_step: Whether to set the state before each step, not only when an episode starts.
    """

    def __init__(
        self,
        env_fn: Callable[[], Any],
        set_state: SetState | None,
        get_state: GetState | None,
        state_space: spaces.Dict,
        *,
        each_step: bool,
    ) -> None:
        self._env = env_fn()
        if not isinstance(getattr(self._env, "action_space", None), spaces.Space):
            raise TypeError(
                f"the original must be a Gymnasium env of one agent, with spaces, not {self._env!r}"
            )
        self._set_state = set_state
        self._get_state = get_state
        # What makes a comparison unfair, by name, as texts of what was asked for and of what was found.
        self.problems: dict[str, tuple[str, str]] = {}
        self._repetitions = _REPETITIONS if each_step else 0
        self._last: Any = None
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
            "accepts actions beyond": is_bounded(self._env.action_space) and self._accepts_beyond(),
        }
        self._state_space = state_space
        if get_state is not None:
            self._env.reset(seed=0)
        state_spaces = {path: state_space[path] for path in self._read_state()}
        flag = spaces.Box(0, 1, (), np.bool_)  # pyright: ignore[reportCallIssue, reportArgumentType]
        self.observation_space: spaces.Space[Any] = spaces.Dict(
            {
                "obs": self._env.observation_space,
                "terminated": flag,
                "truncated": flag,
                "state": spaces.Dict(state_spaces),
            }
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
        return self._results(obs, False, False), info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Starts an episode or sets the state, as the action says, and steps the original."""
        start = int(action["step"]) == 1
        if self._repetitions:
            if start and self._last is not None:
                self._repetitions -= 1
                first, second = (self._move(self._last, seed, sets=True)[:2] for seed in range(2))
                if not data_equivalence(first, second):
                    self.problems["transitions"] = _REPEATED
            self._last = deepcopy(action)  # whose arrays are reused
        seed = int(action["seed"]) if start else None
        results, reward, info = self._move(action, seed, sets=start or self._each_step)
        return results, reward, False, False, info

    def _move(
        self, action: Any, seed: int | None, *, sets: bool
    ) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        # An env that has ended may refuse to continue, or count steps after its end, until it is reset.
        if seed is not None or self._ended:
            self._env.reset(seed=seed)
        if sets and self._set_state is not None:
            if self._time_limit is not None:
                self._time_limit._elapsed_steps = int(action["step"]) - 1
            try:
                self._set_state(self._env, action["state"])
            except Exception as error:
                raise RuntimeError(
                    "set_state could not set the original to a state of the port, see the error above. If "
                    "the original has no such state, leave set_state out and pass mode='free_running'"
                ) from error
            for path, value in self._read_state().items():
                asked = action["state"][path]
                if not np.allclose(value, asked, rtol=1e-5, atol=1e-5, equal_nan=True):
                    self.problems.setdefault(f"set_state {path}", (str(asked), str(value)))
        obs, reward, terminated, truncated, info = self._env.step(action["action"])
        self._ended = bool(terminated or truncated)
        return self._results(obs, terminated, truncated), reward, info

    def _accepts_beyond(self) -> bool:
        """Returns whether the original can be stepped by an action beyond the bounds of its space."""
        space = self._env.action_space
        try:
            self._env.reset(seed=0)
            self._env.step(space.high + (space.high - space.low) / 4)
        except Exception:
            return False
        return True

    def _results(self, obs: Any, terminated: Any, truncated: Any) -> dict[str, Any]:
        return {"obs": obs, "terminated": terminated, "truncated": truncated, "state": self._read_state()}

    def _read_state(self) -> dict[str, Any]:
        """Returns the state of the original, with the dtypes of the port's."""
        state: dict[str, Any] = {}
        for path, value in self._get_state(self._env).items() if self._get_state is not None else ():
            if path not in self._state_space.spaces:
                paths = ", ".join(self._state_space)
                raise ValueError(f"get_state returned {path!r}; the paths of the port's state are {paths}")
            array = np.asarray(value)
            dtype: Any = self._state_space[path].dtype
            state[path] = array.astype(dtype)
            if dtype.kind != "f" and (state[path] != array).any():
                raise ValueError(
                    f"get_state: {path} is {array}, and the port has {dtype}, which cannot hold it"
                )
        return state

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


def is_bounded(space: Any) -> bool:
    """Returns whether an action space has floats within bounds, of which there are random actions."""
    return isinstance(space, spaces.Box) and space.is_bounded() and space.dtype.kind == "f"


def space_like(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    """Returns the space of all arrays of a shape and dtype."""
    dtype = np.dtype(dtype)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    low, high = (limits.min, limits.max) if limits else (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)
    return spaces.Box(low, high, shape, dtype.type)  # pyright: ignore[reportCallIssue, reportArgumentType]
