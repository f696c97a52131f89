"""Builds envs and closes them, and says which one failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import gymnasium

Env: TypeAlias = gymnasium.Env[Any, Any]
BatchedEnv: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]  # fills several neighbouring slots
EnvFn: TypeAlias = Callable[[], Any]


class EnvFailure(Exception):
    """An env failed; `__cause__` is its own exception, or `InvalidValue` for wrong data.

    Attributes:
        env_id, operation, action: what failed.
        done: the ids of the envs that did what was asked of them and of the one that failed.
    """

    def __init__(self, env_id: int, operation: str, action: Any = None) -> None:
        super().__init__(env_id, operation)
        self.env_id = env_id
        self.operation = operation
        self.action = action
        self.done: list[int] = []


class Failing:
    """Makes of what ends the block the failure of an env."""

    def __init__(self, env_id: int, operation: str, action: Any = None) -> None:
        self._what = env_id, operation, action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            raise EnvFailure(*self._what) from error


def build(env_fns: Sequence[EnvFn], first: int, size: int | None = None) -> list[Any]:
    """Builds the envs `first`, `first + 1`, …; closes those built if one fails.

    Args:
        env_fns: a constructor for each env, or for each batch of `size` envs.
        first: id of the first env.
        size: of batches; `None` for envs one by one.

    Raises:
        EnvFailure: a constructor raised, or returned something else than such an env.
    """
    envs: list[Any] = []
    for number, env_fn in enumerate(env_fns):
        env_id = first + number * (size or 1)
        try:
            env = env_fn()
            _require_kind(env, size)
            envs.append(env)
        except BaseException as error:
            with suppress(EnvFailure):
                close(envs, first)
            raise EnvFailure(env_id, "constructor") from error
    return envs


def _require_kind(env: Any, size: int | None) -> None:
    if size is not None:
        if not isinstance(env, gymnasium.vector.VectorEnv):
            raise TypeError(
                f"expected a gymnasium.vector.VectorEnv of {size} envs, got {type(env).__name__}; leave out "
                "envs_per_instance for envs one by one"
            )
        if env.num_envs != size:
            raise ValueError(f"envs_per_instance is {size}, but the VectorEnv has {env.num_envs} envs")
    elif isinstance(env, gymnasium.vector.VectorEnv):
        raise TypeError(
            f"expected a gymnasium.Env, got a VectorEnv of {env.num_envs} envs; pass "
            f"envs_per_instance={env.num_envs}"
        )
    elif not isinstance(env, gymnasium.Env):
        raise TypeError(
            f"expected a gymnasium.Env, got {type(env).__name__}; wrap a dm_env.Environment in "
            "jaxvec.adapters.dm_env.DmEnv, a PettingZoo env in jaxvec.adapters.pettingzoo.PettingZooEnv, an "
            "old gym.Env in shimmy.GymV21CompatibilityV0(env=...) or GymV26CompatibilityV0(env=...)"
        )


def close(envs: Sequence[Any], first: int) -> None:
    """Closes every env, then raises an `EnvFailure` of the first whose `close` raised."""
    failure: EnvFailure | None = None
    for env_id, env in enumerate(envs, first):
        try:
            env.close()
        except BaseException as error:
            if failure is None:
                failure = EnvFailure(env_id, "close")
                failure.__cause__ = error
    if failure is not None:
        raise failure
