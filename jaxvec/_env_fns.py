"""Turns what the user calls an env into one constructor for each env of the pool."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import (
    EnvSpec,
    find_highest_version,
    get_env_id,
    load_env_creator,
    parse_env_id,
)

from jaxvec._envs import EnvFn


def resolve(
    env: str | EnvSpec | Callable[..., Any] | Sequence[Callable[..., Any]],
    num_envs: int | None,
    env_kwargs: dict[str, Any],
) -> list[EnvFn]:
    """Returns one constructor without arguments for each env.

    Args:
        env: a Gymnasium id, an `EnvSpec`, a callable, or a list of callables. A callable with one
            required positional parameter gets the env's index.
        num_envs: how many; may be `None` for a list.
        env_kwargs: for `gymnasium.make`, or the callables.

    Raises:
        TypeError: `env` is none of these, or a callable can't be called so.
        ValueError: `num_envs` is below 1, missing, or not the list's length.
        gymnasium.error.Error: there is no env of this id.
    """
    if isinstance(env, Sequence) and not isinstance(env, str):
        env_fns = list(env)
        if num_envs is not None and num_envs != len(env_fns):
            raise ValueError(f"num_envs is {num_envs}, but the list has {len(env_fns)} callables")
        num_envs = len(env_fns)
    elif num_envs is None:
        raise ValueError("num_envs is missing; only a list of callables says how many envs there are")
    else:
        env_fns = None
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"num_envs must be an integer of at least 1, not {num_envs!r}")

    if env_fns is None:
        match env:
            case str() | EnvSpec():
                # Resolved here, so that an env registered only in this process works in a worker.
                spec = _portable(_find_spec(env) if isinstance(env, str) else env)
                return [partial(gymnasium.make, spec, **env_kwargs)] * num_envs
            case _:
                env_fns = [env] * num_envs
    return [_bind(env_fn, index, env_kwargs) for index, env_fn in enumerate(env_fns)]


def _bind(env_fn: Any, index: int, env_kwargs: dict[str, Any]) -> EnvFn:
    if not callable(env_fn):
        raise TypeError(
            f"env must be a Gymnasium id, an EnvSpec, a callable or a list of callables; got "
            f"{type(env_fn).__name__} for env {index}"
            + (
                "; pass a function that makes the env, not the env"
                if isinstance(env_fn, gymnasium.Env)
                else ""
            )
        )
    index_or_not = [index] if _takes_index(env_fn, env_kwargs) else []
    return cast(EnvFn, partial(env_fn, *index_or_not, **env_kwargs))


def _takes_index(env_fn: Callable[..., Any], env_kwargs: dict[str, Any]) -> bool:
    try:
        parameters = inspect.signature(env_fn).parameters.values()
    except (TypeError, ValueError):  # builtins and the like have no signature
        return False
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in env_kwargs
    ]
    if len(required) > 1:
        raise TypeError(
            f"{env_fn!r} requires the arguments {required}; jaxvec.make passes the env's index to one "
            "required argument, and its own keyword arguments to the others"
        )
    return bool(required)


def _portable(spec: EnvSpec) -> EnvSpec:
    """Replaces an entry point by name in `__main__`, which is another module in a worker."""
    if isinstance(spec.entry_point, str) and spec.entry_point.startswith("__main__:"):
        return dataclasses.replace(spec, entry_point=load_env_creator(spec.entry_point))
    return spec


def _find_spec(env_id: str) -> EnvSpec:
    """Finds the `EnvSpec` of an id, as `gymnasium.make` would: `module:id`, and bare names, too."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    if name not in gymnasium.registry:
        namespace, bare, version = parse_env_id(name)
        if version is None:
            newest = find_highest_version(namespace, bare)
            if newest is not None:
                name = get_env_id(namespace, bare, newest)
    return gymnasium.spec(name)
