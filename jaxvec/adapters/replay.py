"""Envs whose state can't be copied, such as Box2D's, as envs whose state is what was done since the reset."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, final

import gymnasium

__all__ = ["ReplayEnv"]


@final
class ReplayEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Notes an episode's actions, and repeats them to go on from a state.

    So a state is taken at once, and put back in the time of the episode's steps until then. That is exact if
    what the env does after a reset depends on its `np_random` and the arguments of `reset` alone, as in
    Gymnasium's `LunarLander` and `CarRacing`. In `BipedalWalker` a reset leaves traces of the last episode:
    give a function that makes it, and it is made anew for each episode.

    Example:
        ```python
        from jaxvec.adapters.replay import ReplayEnv

        with jaxvec.make(lambda: ReplayEnv(gymnasium.make("LunarLander-v3")), 2, states=10) as envs:
            envs.reset(seed=0)
            state = envs.save()
            print(envs.restore(state).obs.shape)  # (2, 8)
        ```
    """

    def __init__(self, env: gymnasium.Env[Any, Any] | Callable[[], gymnasium.Env[Any, Any]]) -> None:
        """Wraps an env.

        Args:
            env: the env, with its wrappers, or a function that makes it.
        """
        self._env_fn = None if isinstance(env, gymnasium.Env) else env
        super().__init__(env if isinstance(env, gymnasium.Env) else env())
        self._begin: tuple[Any, ...] | None = None
        self._actions: list[Any] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: for the env's `reset`.
            options: the same.

        Returns:
            What the env's `reset` returns.
        """
        # RequestName for it, an env that has none yet makes a generator.
        self._begin = seed, copy.deepcopy(options), self.env.unwrapped.np_random.bit_generator.state
        self._actions = []
        return self._reset(*self._begin)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the env.

        Args:
            action: the action.

        Returns:
            What the env's `step` returns.
        """
        self._actions.append(copy.deepcopy(action))
        return self.env.step(action)

    def get_state(self) -> Any:
        """Returns how the episode began, and its actions."""
        return self._begin, tuple(self._actions), self.env.unwrapped.np_random.bit_generator.state

    def set_state(self, state: Any) -> None:
        """Repeats an episode.

        Args:
            state: of `get_state`.
        """
        self._begin, actions, generator = state
        self._actions = list(actions)
        if self._begin is not None:
            self._reset(*self._begin)
        for action in actions:
            self.env.step(copy.deepcopy(action))
        self.env.unwrapped.np_random.bit_generator.state = generator

    def _reset(self, seed: int | None, options: dict[str, Any] | None, generator: Any) -> Any:
        if self._env_fn is not None:
            self.env.close()
            super().__init__(self._env_fn())
        self.env.unwrapped.np_random.bit_generator.state = generator
        return self.env.reset(seed=seed, options=copy.deepcopy(options))
