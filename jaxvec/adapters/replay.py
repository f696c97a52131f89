"""States for envs that can't be copied, such as Box2D's: the actions since the last reset."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, final

import gymnasium

__all__ = ["ReplayEnv"]


@final
class ReplayEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Records an episode's actions, and repeats them to restore a state.

    Saving a state is immediate. Restoring it takes as long as the episode's steps until then. It is exact if
    everything after a reset depends only on `np_random` and the arguments of `reset`, as in Gymnasium's
    `LunarLander` and `CarRacing`. In `BipedalWalker`, a reset keeps traces of the last episode. For such envs
    pass a function, which then makes a new env for each episode.

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
        """Wraps an env. `env` is the env with its wrappers, or a function that makes it."""
        self._env_fn = None if isinstance(env, gymnasium.Env) else env
        super().__init__(env if isinstance(env, gymnasium.Env) else env())
        self._start: tuple[Any, ...] | None = None  # arguments of `_reset` for this episode
        self._actions: list[Any] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        # Reading `np_random` makes the env create a generator if it has none yet.
        self._start = seed, copy.deepcopy(options), self.env.unwrapped.np_random.bit_generator.state
        self._actions = []
        return self._reset(*self._start)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._actions.append(copy.deepcopy(action))
        return self.env.step(action)

    def get_state(self) -> Any:
        """Returns the start of the episode, its actions, and the state of the generator."""
        return self._start, tuple(self._actions), self.env.unwrapped.np_random.bit_generator.state

    def set_state(self, state: Any) -> None:
        """Repeats the episode of a state returned by `get_state`."""
        self._start, actions, generator = state
        self._actions = list(actions)
        if self._start is not None:
            self._reset(*self._start)
        for action in actions:  # copied again, because an env may keep or modify its action
            self.env.step(copy.deepcopy(action))
        self.env.unwrapped.np_random.bit_generator.state = generator

    def _reset(self, seed: int | None, options: dict[str, Any] | None, generator: Any) -> Any:
        if self._env_fn is not None:  # a new env has no traces of earlier episodes
            self.env.close()
            super().__init__(self._env_fn())
        self.env.unwrapped.np_random.bit_generator.state = generator
        return self.env.reset(seed=seed, options=copy.deepcopy(options))
