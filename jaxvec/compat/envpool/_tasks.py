"""What EnvPool calls a task: an env with its options, Atari's among them."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

import jaxvec
from jaxvec import _extras
from jaxvec._handoff._move import Move, Verb
from jaxvec._vector_env import VectorEnv
from jaxvec.compat import _atari

TaskId: TypeAlias = str | EnvSpec | Callable[..., Any]

_NO_LIMIT = 2**31 - 1  # EnvPool's word for no `max_episode_steps`


@dataclass(frozen=True)
class Task:
    """What `jaxvec.make` needs to know of a task, and what EnvPool says of it.

    Attributes:
        env, env_kwargs: as of `jaxvec.make`.
        info: keys of the envs' info that are declared.
        atari: the options, of an Atari task.
        reset_options: for the envs' `reset` when it is called from outside.
    """

    env: Any
    env_kwargs: dict[str, Any]
    info: Mapping[str, Any]
    atari: _atari.AtariOptions | None = None
    reset_options: dict[str, Any] | None = None

    def start(
        self,
        num_envs: int,
        *,
        autoreset_mode: str,
        info: Mapping[str, Any] | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> VectorEnv:
        """Starts a pool.

        Args:
            num_envs: how many envs.
            autoreset_mode: as of `jaxvec.make`.
            info: more keys of the envs' info, as of `jaxvec.make`.
            **kwargs: of `jaxvec.make`.
        """
        if isinstance(info, Iterable) and not isinstance(info, (str, Mapping)):
            info = dict.fromkeys(info)
        if self.info and isinstance(info, Mapping | None):
            info = {**self.info, **(info or {})}
        try:
            return jaxvec.make(
                self.env, num_envs, info=info, autoreset_mode=autoreset_mode, **kwargs, **self.env_kwargs
            )
        except gymnasium.error.Error as error:
            if str(self.env).endswith("-v5") and importlib.util.find_spec("ale_py") is None:
                error.add_note(f"EnvPool's Atari tasks need ALE: {_extras.command('atari')}")
            raise

    def options(self, envs: VectorEnv) -> dict[str, Any]:
        """Returns the options of the task, as EnvPool's `spec.config` has them."""
        if self.atari is not None:
            return asdict(self.atari)
        threshold, limit = None, None
        if isinstance(self.env, str | EnvSpec):  # gymnasium.make made it, and knows all that was asked of it
            (spec,) = envs.pool.questions.call(Move(Verb.CALL, np.arange(1)), "spec", [()], {})
            threshold, limit = spec.reward_threshold, spec.max_episode_steps
        return {**self.env_kwargs, "reward_threshold": threshold, "max_episode_steps": limit or _NO_LIMIT}


def resolve(task_id: TaskId, kwargs: Mapping[str, Any]) -> tuple[Task, dict[str, Any]]:
    """Returns the task of this id, and those of `kwargs` that are `jaxvec.make`'s; the others are the task's.

    Raises:
        TypeError: an Atari task has no such option.
    """
    ours = inspect.signature(jaxvec.make).parameters
    pool_options = {key: value for key, value in kwargs.items() if key in ours}
    options = {key: value for key, value in kwargs.items() if key not in ours}
    ale_id = _atari.find(task_id)
    if ale_id is None:
        return Task(task_id, options, {}), pool_options
    atari = _atari.parse(str(task_id), options)
    task = Task(partial(_atari.build, ale_id, atari), {}, _atari.INFO, atari, _atari.NEW_GAME)
    return task, pool_options


def list_all_envs() -> list[str]:
    """Returns the ids of all tasks: Gymnasium's, and EnvPool's Atari ones if ALE is installed.

    Example:
        ```python
        from jaxvec.compat import envpool

        print("CartPole-v1" in envpool.list_all_envs())  # True
        ```
    """
    return sorted({*gymnasium.registry, *_atari.tasks()})
