"""`SyncVectorEnv`: Gymnasium's class over a pool in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from jaxvec.compat.gymnasium._errors import as_gymnasium
from jaxvec.compat.gymnasium._pooled import PooledVectorEnv


class SyncVectorEnv(PooledVectorEnv):
    """`gymnasium.vector.SyncVectorEnv`, over jaxvec's serial backend.

    Attributes:
        envs: the envs themselves.

    Example:
        ```python
        from jaxvec.compat.gymnasium import SyncVectorEnv

        envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
        obs, info = envs.reset(seed=0)
        print(obs.shape, len(envs.envs))  # (2, 4) 2
        envs.close()
        ```
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        copy: bool = True,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **options: Any,
    ) -> None:
        """Builds the envs; see `AsyncVectorEnv` for the arguments."""
        self.envs: list[gymnasium.Env[Any, Any]] = [env_fn() for env_fn in env_fns]
        super().__init__(
            [partial(_the_same, env) for env in self.envs],
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
            shared_memory=False,
            backend="serial",
            **options,
        )
        self.env_fns = env_fns

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, or those of `options["reset_mask"]`; see `AsyncVectorEnv.reset`."""
        with as_gymnasium(type(self).__name__):
            mask = self._send_reset(seed, options)
            return self._after_reset(self._recv(), mask)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all envs; see `AsyncVectorEnv.step`."""
        with as_gymnasium(type(self).__name__):
            return self._after_step(self._step(actions))


def _the_same(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    return env
