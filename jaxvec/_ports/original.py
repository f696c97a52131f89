"""The env that `jaxvec.ports` steps in workers: an original that is set to the states of its port. No JAX."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import Autoreset, TimeLimit

from jaxvec._envs.envs import layers_of

SetState = Callable[[Any, Any], object]
GetState = Callable[[Any], Mapping[str, Any]]

_REPETITIONS = 8  # of steps from one state, per env


class Original(gymnasium.Env[Any, Any]):
    """An env whose actions also say in which state it is, and at which step of an episode.

    Its episodes have no end: `terminated`, `truncated` and the state are parts of its observations, and the
    program decides when the next episode starts. So a wrong port and its original can disagree about an end.
    The observations also have those of the last reset, before the state was set.

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
                f"the original must be a Gymnasium env of one agent with spaces, not {self._env!r}"
            )
        self._set_state = set_state
        self._get_state = get_state
        self._state_space = state_space
        self._each_step = each_step
        self._time_limit = _find_wrapper(self._env, TimeLimit)
        self._kept: list[Any] = []  # actions of steps that are repeated after the comparison
        if get_state is not None:
            self._env.reset(seed=0)
        flag = spaces.Box(0, 1, (), np.bool_)  # pyright: ignore[reportCallIssue, reportArgumentType]
        first: dict[str, spaces.Space[Any]] = {
            "obs": self._env.observation_space,
            "state": spaces.Dict({path: state_space[path] for path in self._read_state()}),
        }
        self.observation_space: spaces.Space[Any] = spaces.Dict(
            {**first, "terminated": flag, "truncated": flag, "reset": spaces.Dict(first)}
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

    def describe(self) -> tuple[dict[str, Any], bool]:
        """Returns the properties to compare, and whether the original accepts actions beyond its bounds."""
        mode = "NEXT_STEP" if _find_wrapper(self._env, Autoreset) else None
        declared = (getattr(self._env, "metadata", None) or {}).get("autoreset_mode", mode)
        space: Any = self._env.action_space
        accepts_beyond = False
        if isinstance(space, spaces.Box) and space.is_bounded() and space.dtype.kind == "f":
            self._env.reset(seed=0)
            with suppress(Exception):
                self._env.step(space.high + (space.high - space.low) / 4)
                accepts_beyond = True
        properties = {
            "observation space": self._env.observation_space,
            "action space": space,
            "time limit": getattr(self._time_limit, "_max_episode_steps", None),
            "autoreset": getattr(declared, "name", declared),
        }
        return properties, accepts_beyond

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Resets the original. Programs begin episodes by `step`."""
        obs, info = self._env.reset(seed=seed, options=options)
        self._ended = False
        self._first = {"obs": deepcopy(obs), "state": self._read_state()}
        return self._results(obs, False, False), info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Starts an episode or sets the state, as the action says, and steps the original."""
        number = int(action["step"])
        is_power_of_two = number & (number - 1) == 0
        if is_power_of_two and self._sets(number) and len(self._kept) < _REPETITIONS:
            self._kept.append(deepcopy(action))  # its arrays are reused
        return self._move(action, int(action["seed"]) if number == 1 else None)

    def is_repeatable(self) -> bool:
        """Returns whether steps from some of the states have equal results after different resets."""
        return all(self._repeat(action, 0) == self._repeat(action, 1) for action in self._kept)

    def _repeat(self, action: Any, seed: int) -> bytes:
        """Returns the results of a step after a reset, at once as a pickle: an env may reuse its arrays."""
        results, reward, *_ = self._move(action, seed)
        return pickle.dumps((results | {"reset": None}, reward))

    def close(self) -> None:
        """Closes the original."""
        self._env.close()

    def _sets(self, number: int) -> bool:
        return self._set_state is not None and (number == 1 or self._each_step)

    def _move(self, action: Any, seed: int | None) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        number = int(action["step"])
        # An env that has ended may refuse to continue, or count steps after its end, until it is reset.
        if seed is not None or self._ended:
            self.reset(seed=seed)
        if self._sets(number):
            if self._time_limit is not None:
                self._time_limit._elapsed_steps = number - 1
            try:
                # A copy, which the env may keep and change.
                self._set_state(self._env, deepcopy(action["state"]))  # pyright: ignore[reportOptionalCall]
                for path, value in self._read_state().items() if number == 1 else ():
                    np.testing.assert_allclose(
                        value, action["state"][path], 1e-5, 1e-5, err_msg=f"get_state after set_state: {path}"
                    )
            except Exception as error:
                raise RuntimeError(
                    "set_state could not set the original to a state of the port, see the error above. If "
                    "the original has no such state, leave set_state out and pass mode='free_running'"
                ) from error
        obs, reward, terminated, truncated, info = self._env.step(action["action"])
        self._ended = bool(terminated or truncated)
        return self._results(obs, terminated, truncated), reward, False, False, info

    def _results(self, obs: Any, terminated: Any, truncated: Any) -> dict[str, Any]:
        return {
            "obs": obs,
            "state": self._read_state(),
            "terminated": terminated,
            "truncated": truncated,
            "reset": self._first,
        }

    def _read_state(self) -> dict[str, Any]:
        """Returns the state of the original, with the dtypes of the port's."""
        state: dict[str, Any] = {}
        for path, value in self._get_state(self._env).items() if self._get_state is not None else ():
            space = self._state_space.spaces.get(path)
            state[path] = np.asarray(value, space and space.dtype)
            if space is None or (state[path].dtype.kind != "f" and np.any(state[path] != value)):
                raise ValueError(
                    f"get_state returned {path!r} {value!r}, which does not fit the port's state: "
                    f"{self._state_space}"
                )
        return state


def _find_wrapper(env: Any, wrapper: type) -> Any:
    """Returns the outermost wrapper of a class; `None` without."""
    return next((layer for layer in layers_of(env) if isinstance(layer, wrapper)), None)


def constructor(original: Any) -> Callable[[], Any]:
    """Returns the function that makes the original, without Gymnasium's checks in each step."""
    if isinstance(original, (str, EnvSpec)):
        return partial(gymnasium.make, original, disable_env_checker=True)
    if not callable(original):
        raise TypeError(
            f"original must be a Gymnasium id, an EnvSpec or a function that makes an env, not {original!r}"
        )
    return original
