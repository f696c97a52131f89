"""What built envs say of themselves: all that the parent needs to lay out a pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import VectorEnv

from jaxvec._slices._envs import BatchedEnv, Env, Failing
from jaxvec._slices._info_rows import one_of
from jaxvec._spec import EnvSpaces


@dataclass(frozen=True)
class Description:
    """Of one slice.

    Attributes:
        spaces: those of all its envs.
        metadata, render_mode: those of its first env.
        info: of the first env's first reset, if that was asked for.
        mismatch: says which env of the slice has other spaces than the first, if one has.
    """

    spaces: EnvSpaces
    metadata: dict[str, Any]
    render_mode: str | None
    info: dict[str, Any] | None
    mismatch: str | None


def describe(envs: Sequence[Any], *, first: int, learn_info: bool, equal_spaces: bool) -> Description:
    """Describes the envs `first`, `first + 1`, …; resets the first one once if `learn_info`.

    Raises:
        EnvFailure: the reset raised.
    """
    with Failing(first, "reset"):
        info = _first_info(envs[0]) if learn_info else None
    spaces = _spaces(envs[0])
    mismatches = (
        compare(spaces, first, _spaces(env), env_id, equal=equal_spaces)
        for env_id, env in _numbered(envs, first)
    )
    return Description(
        spaces, dict(envs[0].metadata), envs[0].render_mode, info, next(filter(None, mismatches), None)
    )


def compare(a: EnvSpaces, a_id: int, b: EnvSpaces, b_id: int, *, equal: bool) -> str | None:
    """Says how the spaces of env `b_id` differ from those of env `a_id`; `None` if they don't.

    Unless they have to be `equal`, observation spaces may differ in all but structure, shapes and dtypes.
    """
    for name in ("observation", "action", "reward"):
        expected, actual = getattr(a, name), getattr(b, name)
        if expected is actual:  # an attribute of their class; to compare large boxes takes long
            continue
        if name == "observation" and not equal and is_space_dtype_shape_equiv(expected, actual):
            continue
        if expected != actual:
            return (
                f"env {b_id} has {name} space {actual}, but env {a_id} has {expected}; all envs of a pool "
                "need the same spaces"
            )
    return None


def _numbered(envs: Sequence[Env | BatchedEnv], first: int) -> Iterator[tuple[int, Env | BatchedEnv]]:
    for env in envs:
        yield first, env
        first += env.num_envs if isinstance(env, VectorEnv) else 1


def _first_info(env: Env | BatchedEnv) -> dict[str, Any]:
    info = env.reset()[1]
    return one_of(info, 0, env.num_envs) if isinstance(env, VectorEnv) else dict(info)


def _spaces(env: Env | BatchedEnv) -> EnvSpaces:
    if isinstance(env, VectorEnv):
        return EnvSpaces(env.single_observation_space, env.single_action_space, None)
    try:
        reward = env.get_wrapper_attr("reward_space")  # MO-Gymnasium's convention
    except AttributeError:
        reward = None
    return EnvSpaces(env.observation_space, env.action_space, reward)
