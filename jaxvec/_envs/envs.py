"""Envs as a slice uses them: their types, construction, results and child processes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, NoReturn, TypeAlias

import gymnasium
import numpy as np

from jaxvec._memory.rows import InvalidValue

# ----------------------------------------------------------------------------------------------------------
# Builds envs and closes them, and says which one failed.
# ----------------------------------------------------------------------------------------------------------

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


def build_env(env_fns: Sequence[EnvFn], first: int, size: int | None = None) -> list[Any]:
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
                close_envs(envs, first, size)
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


def close_envs(
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


# ----------------------------------------------------------------------------------------------------------
# What an env has to return: checks that name what is wrong.
# ----------------------------------------------------------------------------------------------------------


def split_reset(result: Any) -> tuple[Any, dict[str, Any]]:
    """Returns `(obs, info)`, if that is what `reset` has returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise InvalidValue(f"reset must return (obs, info), got {_outline(result)}")
    check_dict("reset", result[1])
    return result


def explain_reset(error: TypeError, env: Any) -> None:
    """Says more of what `reset` has raised, if it does not take what it is given."""
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    for layer in layers:
        try:
            inspect.signature(layer.reset).bind(seed=None, options=None)
        except (TypeError, ValueError):
            error.add_note(
                f"{type(layer).__name__}.reset has to take what Gymnasium's envs take: "
                f"reset(self, *, seed=None, options=None). {OLD_GYM}"
            )
            return


def wrong_step(result: Any) -> InvalidValue:
    """Says what `step` has returned instead of what it must."""
    return InvalidValue(
        f"step must return (obs, reward, terminated, truncated, info), got {_outline(result)}"
        + (f". {OLD_GYM}" if isinstance(result, tuple) and len(result) == 4 else "")
    )


def check_dict(operation: str, info: Any) -> None:
    """Raises unless `info` is a dict."""
    if not isinstance(info, dict):
        raise InvalidValue(f"{operation} must return info as a dict, got {type(info).__name__}")


def conform_reward(reward: Any, shape: tuple[int, ...]) -> Any:
    """Returns a reward in float64 and this shape; `()` for a number."""
    value = np.asarray(reward)
    if shape == () and value.size == 1:
        value = value.reshape(())  # Gymnasium takes shape (1,) for a scalar too
    if value.shape != shape:
        raise InvalidValue(
            f"reward: expected shape {shape}, got {value.shape}; an env with vector rewards says so in "
            "a reward_space attribute"
        )
    if value.dtype.kind not in "biuf":
        raise InvalidValue(f"reward: expected a number, got {type(reward).__name__}")
    return float(value) if shape == () else value.astype(np.float64)


def _outline(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__


# ----------------------------------------------------------------------------------------------------------
# Ends forks of a worker that come back from an env's code: their envs are copies, the rows not theirs.
# ----------------------------------------------------------------------------------------------------------

forked: list[int] = []  # not empty in a fork of a worker


def watch_forks() -> None:
    """Lets forks of this process know what they are."""
    os.register_at_fork(after_in_child=lambda: forked.append(os.getpid()))


def end_forks(env_id: int, operation: str) -> NoReturn:
    """Ends this process, which is a fork, and says so on its standard error."""
    text = (
        f"jaxvec.EnvError: env {env_id} has forked in {operation}, and the new process {os.getpid()} came "
        f"back from it, so it was ended. Let it end in {operation} by os._exit, or start it with subprocess "
        "or multiprocessing.\n"
    )
    os.write(2, text.encode())
    os._exit(1)
