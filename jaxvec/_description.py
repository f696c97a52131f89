"""What built envs say of themselves: all that the parent needs to lay out a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxvec._env_slice import Env, EnvFailure
from jaxvec._errors import SpaceMismatchError
from jaxvec._spec import EnvSpaces


@dataclass(frozen=True)
class Description:
    """Of one slice.

    Attributes:
        spaces: those of all its envs.
        metadata, render_mode: those of its first env.
        info: of the first env's first reset, if that was asked for.
    """

    spaces: EnvSpaces
    metadata: dict[str, Any]
    render_mode: str | None
    info: dict[str, Any] | None


def describe(envs: Sequence[Env], *, first: int, learn_info: bool) -> Description:
    """Describes the envs `first`, `first + 1`, …; resets the first one once if `learn_info`.

    Raises:
        EnvFailure: the reset raised, or the spaces differ (its cause is a `SpaceMismatchError`).
    """
    try:
        info = dict(envs[0].reset()[1]) if learn_info else None
    except BaseException as error:
        raise EnvFailure(first, "reset") from error
    all_spaces = [_spaces(env) for env in envs]
    for env_id, spaces in enumerate(all_spaces, first):
        try:
            require_equal(all_spaces[0], spaces, first, env_id)
        except SpaceMismatchError as error:
            raise EnvFailure(env_id, "constructor") from error
    return Description(all_spaces[0], dict(envs[0].metadata), envs[0].render_mode, info)


def require_equal(expected: EnvSpaces, actual: EnvSpaces, first: int, env_id: int) -> None:
    """Raises `SpaceMismatchError` if env `env_id` has other spaces than env `first`."""
    for name in ("observation", "action", "reward"):
        a, b = getattr(expected, name), getattr(actual, name)
        if a != b:
            raise SpaceMismatchError(
                f"env {env_id} has {name} space {b}, but env {first} has {a}; all envs of a pool need "
                "the same spaces"
            )


def _spaces(env: Env) -> EnvSpaces:
    try:
        reward = env.get_wrapper_attr("reward_space")  # MO-Gymnasium's convention
    except AttributeError:
        reward = None
    return EnvSpaces(env.observation_space, env.action_space, reward)
