"""Builds envs and closes them, and says which one failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, TypeAlias

import gymnasium

Env: TypeAlias = gymnasium.Env[Any, Any]
BatchedEnv: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]  # fills several neighbouring slots
EnvFn: TypeAlias = Callable[[], Any]


OLD_GYM = (
    "An env of old Gym goes into shimmy.GymV21CompatibilityV0(env=...) if its step returns four values, or "
    "into shimmy.GymV26CompatibilityV0(env=...)"
)


class EnvFailure(Exception):
    """An env failed; `__cause__` is its own exception, or `InvalidValue` for wrong data.

    Attributes:
        env_id, operation, action: what failed.
        completed: the ids of the envs that did what was requested of them and of the one that failed.
    """

    def __init__(self, env_id: int, operation: str, action: Any = None) -> None:
        super().__init__(env_id, operation)
        self.env_id = env_id
        self.operation = operation
        self.action = action
        self.completed: list[int] = []


class AttributeFailure(EnvFailure):
    """An env lacks an attribute, or it can't be set."""


class Failing:
    """Makes of what ends the block the failure of an env."""

    def __init__(self, env_id: int, operation: str, action: Any = None) -> None:
        self._what = env_id, operation, action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            raise EnvFailure(*self._what) from error


class FailingAttribute(Failing):
    """Does the same where the block looks up an attribute of an env, or sets one."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, AttributeError):
            raise AttributeFailure(*self._what) from error
        super().__exit__(kind, error, trace)


def is_wrapped(env: Any, wrapper_class: type) -> bool:
    """Says whether one of the wrappers around an env is of this class."""
    while isinstance(env, (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)):
        if isinstance(env, wrapper_class):
            return True
        env = env.env
    return False


def find_attr(env: Env, name: str) -> Any:
    """Returns an attribute of an env or a wrapper, or what a dotted name finds from there on."""
    first, *rest = name.split(".")
    return reduce(getattr, rest, env.get_wrapper_attr(first))


def put_attr(env: Env, name: str, value: Any) -> None:
    """Sets an attribute of an env or a wrapper, or of what a dotted name finds there."""
    owner, _, last = name.rpartition(".")
    if owner:
        setattr(find_attr(env, owner), last, value)
    else:
        env.set_wrapper_attr(name, value)


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
            _check_kind(env, size)
            envs.append(env)
        except BaseException as error:
            with suppress(EnvFailure):
                close(envs, first, size)
            raise EnvFailure(env_id, "constructor") from error
    return envs


def _check_kind(env: Any, size: int | None) -> None:
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
            "jaxvec.adapters.dm_env.DmEnv, a PettingZoo env in jaxvec.adapters.pettingzoo.PettingZooEnv. "
            + OLD_GYM
        )


def close(
    envs: Sequence[Any],
    first: int,
    size: int | None = None,
    tell: Callable[[range], None] = lambda env_ids: None,
) -> None:
    """Closes every env, then raises an `EnvFailure` of the first whose `close` raised.

    Args:
        envs: as built by `build`, perhaps with spare ones after them.
        first, size: as of `build`.
        tell: is called with the ids of what is closed.
    """
    failure: EnvFailure | None = None
    for number, env in enumerate(envs):
        env_id = first + number * (size or 1)
        try:
            env.close()
        except BaseException as error:
            if failure is None:
                failure = EnvFailure(env_id, "close")
                failure.__cause__ = error
        tell(range(env_id, env_id + (size or 1)))
    if failure is not None:
        raise failure
