"""A `vector_entry_point` for `gymnasium.register`, and for envs that are registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.wrappers import TimeLimit

from jaxvec.compat.gymnasium._async import AsyncVectorEnv


def vector_entry_point(
    entry_point: str | EnvSpec | Callable[..., Any], **options: Any
) -> Callable[..., AsyncVectorEnv]:
    """Returns what makes an `AsyncVectorEnv` of one kind of env, for Gymnasium's registry.

    `gymnasium.register(id, entry_point=MyEnv, vector_entry_point=vector_entry_point(MyEnv))` lets
    `gymnasium.make_vec(id, num_envs, vectorization_mode="vector_entry_point")` make a pool. For an id that is
    registered, `gymnasium.spec(id).vector_entry_point = vector_entry_point(gymnasium.spec(id))` does.

    Args:
        entry_point: of the env, as `gymnasium.register` takes it: a callable or `"module:name"`; or a spec,
            whose env is made as by `gymnasium.make`, with its wrappers.
        **options: of `AsyncVectorEnv`.

    Example:
        ```python
        from jaxvec.compat.gymnasium import vector_entry_point

        spec = gymnasium.spec("MountainCar-v0")
        spec.vector_entry_point = vector_entry_point(spec, num_workers=1)
        envs = gymnasium.make_vec("MountainCar-v0", num_envs=2)
        print(type(envs).__name__, envs.num_envs)  # AsyncVectorEnv 2
        envs.close()
        ```
    """
    if isinstance(entry_point, EnvSpec):
        # Not with what may be this very function, and with kwargs of its own: make_vec adds to the spec's.
        spec = dataclasses.replace(entry_point, vector_entry_point=None, kwargs={**entry_point.kwargs})
        return partial(_make_registered, partial(gymnasium.make, spec), options)
    return partial(_make_vec, entry_point, options)


def _make_registered(
    make: Callable[..., Any], options: dict[str, Any], *, num_envs: int, **kwargs: Any
) -> AsyncVectorEnv:
    return AsyncVectorEnv([partial(make, **kwargs)] * num_envs, **options)


def _make_vec(
    entry_point: str | Callable[..., Any],
    options: dict[str, Any],
    *,
    num_envs: int,
    max_episode_steps: int | None = None,
    **env_kwargs: Any,
) -> AsyncVectorEnv:
    make = partial(_make, entry_point, max_episode_steps, env_kwargs)
    return AsyncVectorEnv([make] * num_envs, **options)


def _make(
    entry_point: str | Callable[..., Any], max_episode_steps: int | None, env_kwargs: dict[str, Any]
) -> gymnasium.Env[Any, Any]:
    env: Any = (entry_point if callable(entry_point) else load_env_creator(entry_point))(**env_kwargs)
    return env if max_episode_steps is None else TimeLimit(env, max_episode_steps)
