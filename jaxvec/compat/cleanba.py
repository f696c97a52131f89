"""Cleanba's API over a pool: `make_env(env_id, seed, num_envs)`, as its actors call it.

The actors expect EnvPool's old Gym API. For actors that `send` and `recv`, use `compat.envpool`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, final

from gymnasium import Space

from jaxvec._spec import STATISTICS
from jaxvec._vector_env import VectorEnv
from jaxvec.compat import _atari, _base, envpool
from jaxvec.compat.envpool import Task

__all__ = ["GymVectorEnv", "make_env"]

_ATARI = {  # Cleanba's own options of Atari tasks
    "repeat_action_probability": 0.25,
    "noop_max": 1,
    "full_action_space": True,
    "reward_clip": True,
}


def make_env(env_id: Any, seed: int, num_envs: int, **kwargs: Any) -> Callable[[], GymVectorEnv]:
    """Returns a function that starts a pool, like Cleanba's `make_env`.

    Args:
        env_id: One of EnvPool's Atari tasks, such as `Breakout-v5`, which need the extra `atari`; or the
            `env` of `jaxvec.make`: a Gymnasium id, an `EnvSpec`, or a callable.
        seed: Seed of env 0 at the first reset. Env *i* gets `seed + i`.
        num_envs: Number of envs.
        **kwargs: Arguments of `jaxvec.make` except `autoreset_mode`, which is `SAME_STEP`. For an Atari task,
            also EnvPool's options, with Cleanba's defaults: sticky actions, all 18 actions, clipped rewards.

    Raises:
        TypeError: an argument can't be set here. The returned function raises the errors of `jaxvec.make`.

    Example:
        ```python
        from jaxvec.compat.cleanba import make_env

        envs = make_env("CartPole-v1", seed=1, num_envs=2)()
        print(envs.reset().shape)  # (2, 4)
        envs.close()
        ```
    """
    for name in {"autoreset_mode", "batch_size"} & kwargs.keys():
        raise TypeError(f"{name} can't be set here: every step is of all envs, with SAME_STEP autoreset")
    if _atari.find(env_id) is not None:
        kwargs = {**_ATARI, **kwargs}
    task, options = envpool.resolve_task(env_id, kwargs)
    return lambda: GymVectorEnv(task, task.start(num_envs, autoreset_mode="SAME_STEP", **options), seed=seed)


@final
class GymVectorEnv:
    """Envs with old Gym's API, on NumPy arrays `[num_envs, ...]`.

    Attributes:
        num_envs: Number of envs.
        observation_space: Space of one env's observations, as in EnvPool.
        action_space: Space of one env's actions.
        single_observation_space: Equal to `observation_space`.
        single_action_space: Equal to `action_space`.
        is_vector_env: `True`.
        spec: Namespace with `config.max_episode_steps`, the envs' time limit.

    Example:
        ```python
        from jaxvec.compat.cleanba import make_env

        envs = make_env("CartPole-v1", seed=1, num_envs=2)()
        envs.reset()
        obs, reward, done, info = envs.step(np.array([0, 1]))
        print(obs.shape, info["elapsed_step"])  # (2, 4) [1 1]
        envs.close()
        ```
    """

    def __init__(self, task: Task, envs: VectorEnv, *, seed: int) -> None:
        """Wraps the envs of a task, and takes ownership of them. `seed` is for the first reset."""
        self._envs = envs
        self._reset_options = task.reset_options
        self._seed: int | None = seed
        self.num_envs: int = envs.num_envs
        self.single_observation_space: Space[Any] = deepcopy(envs.single_observation_space)
        self.single_action_space: Space[Any] = deepcopy(envs.single_action_space)
        self.observation_space: Space[Any] = self.single_observation_space
        self.action_space: Space[Any] = self.single_action_space
        self.is_vector_env = True
        limit = _base.max_episode_steps(envs) or envpool.NO_LIMIT
        options = {"max_episode_steps": limit} if task.atari is None else asdict(task.atari)
        self.spec: SimpleNamespace = SimpleNamespace(
            config=SimpleNamespace(num_envs=envs.num_envs, seed=seed, **options)
        )

    def reset(self) -> Any:
        """Resets all envs and returns their observations. Only the first reset uses the seed."""
        seed, self._seed = self._seed, None
        return self._envs.reset(seed=seed, options=self._reset_options).obs

    def step(self, action: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Steps all envs.

        Args:
            action: Pytree of the action space with leaves `[num_envs, ...]`.

        Returns:
            `(obs, reward, done, info)`. Where an episode has ended, `obs` is the next episode's first
            observation. `info["final_observation"]` is what every env returned before its reset. `info` also
            has `env_id`, `reward` before clipping, `terminated`, `TimeLimit.truncated`, `elapsed_step` of the
            ended or running episode, and the declared keys of the step itself; for Atari tasks also `lives`
            and `ram`.
        """
        timestep = _base.merge_final_info(self._envs.step(action))
        statistics, last_obs = _base.pop_final_obs(timestep)
        obs, reward, terminated, truncated, _ = timestep
        # Old Gym's `TimeLimit.truncated` excludes episodes that were also terminated.
        info = {key: statistics[key] for key in STATISTICS}
        info |= _base.convert_info(timestep._replace(info=statistics, truncated=truncated & ~terminated))
        if last_obs is not None:
            info["final_observation"] = last_obs
        return obs, reward, timestep.done, info

    def close(self) -> None:
        """Closes the pool. May be called more than once."""
        self._envs.close()
