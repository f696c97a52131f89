"""What a task is, and how its pool was made: EnvPool's `spec`."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, final

from gymnasium import Space

from jaxvec._spec import PoolSpec
from jaxvec.compat.envpool import _dm


@lru_cache
def _config_type(names: tuple[str, ...]) -> Any:
    return namedtuple("Config", names, rename=True)  # pyright: ignore[reportUntypedNamedTuple]


def make_config(options: dict[str, Any]) -> Any:
    """Returns a namedtuple of what a pool was made with."""
    return _config_type(tuple(options))(*options.values())


@final
@dataclass(frozen=True)
class EnvSpec:
    """Of a task and its pool.

    Attributes:
        config: namedtuple: `num_envs`, `batch_size`, `num_threads`, `seed`, `gym_reset_return_info`,
            `max_episode_steps`, and the task's own options.
        observation_space: of one env; of the old `gym` with `env_type="gym"`, if that is installed.
        action_space: likewise.
        gymnasium_observation_space: of one env.
        gymnasium_action_space: of one env.
        data: the shapes and dtypes of the pool's data.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", num_envs=2) as envs:
            print(envs.spec.config.num_envs, envs.spec.action_space.n)  # 2 2
        ```
    """

    config: Any
    observation_space: Any
    action_space: Any
    gymnasium_observation_space: Space[Any]
    gymnasium_action_space: Space[Any]
    data: PoolSpec = field(repr=False)

    @property
    def reward_threshold(self) -> float | None:
        """The reward at which the task counts as solved, if it says so."""
        return getattr(self.config, "reward_threshold", None)

    def observation_spec(self) -> Any:
        """Returns dm_env's specs of `TimeStep.observation`, of one env, in a namedtuple.

        Raises:
            ImportError: dm_env is not installed.
        """
        return _dm.observation_spec(self.gymnasium_observation_space, self.data)

    def action_spec(self) -> Any:
        """Returns dm_env's spec of one env's action, nested in dicts and tuples as its space is.

        Raises:
            ImportError: dm_env is not installed.
        """
        return _dm.spec_of(self.gymnasium_action_space, self.data.action, "action")
