"""The three forms in which pools return what they do: Gymnasium's, old Gym's and dm_env's."""

from __future__ import annotations

from typing import Any, final

import gymnasium
import numpy as np

from jaxvec import _seeds
from jaxvec._timestep import TimeStep
from jaxvec._vector_env import VectorEnv
from jaxvec.compat.envpool import _dm, _info
from jaxvec.compat.envpool._env_pool import EnvPool
from jaxvec.compat.envpool._spec import EnvSpec


@final
class GymEnvPool(EnvPool):
    """Returns what old Gym did: `reset` the observations, `step` `(obs, reward, done, info)`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", "gym", num_envs=2) as envs:
            obs = envs.reset()
            obs, reward, done, info = envs.step(np.array([0, 1]))
            print(obs.shape)  # (2, 4)
        ```
    """

    def _convert(self, timestep: TimeStep, *, reset: bool = False, return_info: bool = True) -> Any:
        info = _info.convert(timestep)
        if reset:
            return (timestep.obs, info) if return_info else timestep.obs
        return timestep.obs, timestep.reward, timestep.terminated | timestep.truncated, info


@final
class GymnasiumEnvPool(EnvPool, gymnasium.vector.VectorEnv[Any, Any, Any]):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """Returns what Gymnasium does: `reset` `(obs, info)`, `step` five values; and is a `VectorEnv` of its.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", "gymnasium", num_envs=2) as envs:
            handle, recv, send, step = envs.xla()
            obs, info = envs.reset()
            handle, (obs, reward, terminated, truncated, info) = jax.jit(step)(handle, jnp.array([0, 1]))
            print(obs.shape)  # (2, 4)
        ```
    """

    def __init__(self, vector_env: VectorEnv, spec: EnvSpec, **kwargs: Any) -> None:
        """Makes the face of a pool; see `EnvPool`."""
        super().__init__(vector_env, spec, **kwargs)
        self.metadata: dict[str, Any] = vector_env.metadata
        self.render_mode: str | None = vector_env.render_mode

    def reset(
        self,
        env_id: Any = None,
        *,
        seed: Any = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Resets all envs, or those of `env_id` or of `options["reset_mask"]`; see `EnvPool.reset`.

        Args:
            env_id: `[k]` integers.
            seed: takes the place of the pool's; an int (env *i* gets `seed + i`) or one for each env.
            options: may have a `reset_mask`, `[num_envs]` bool.
        """
        unknown = sorted(set(options or {}) - {"reset_mask"})
        if unknown:
            raise ValueError(f"options: a pool knows reset_mask, not {unknown}")
        mask = _seeds.check_mask((options or {}).get("reset_mask"), len(self))
        if mask is not None:
            if env_id is not None:
                raise ValueError('give env_id or options["reset_mask"], not both')
            env_id = np.flatnonzero(mask)
        if seed is not None:
            self._seeds = self._expand(seed)
        return super().reset(env_id)

    def _convert(self, timestep: TimeStep, *, reset: bool = False, return_info: bool = True) -> Any:
        info = _info.convert(timestep)
        if reset:
            return timestep.obs, info
        return timestep.obs, timestep.reward, timestep.terminated, timestep.truncated, info


@final
class DMEnvPool(EnvPool):
    """Returns batches of dm_env's `TimeStep`: its own class if it is installed, else one like it.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", "dm", num_envs=2) as envs:
            timestep = envs.reset()
            timestep = envs.step(np.array([0, 1]))
            print(timestep.observation.obs.shape, timestep.reward)  # (2, 4) [1. 1.]
        ```
    """

    def observation_spec(self) -> Any:
        """Returns dm_env's specs of one env's `TimeStep.observation`; see `EnvSpec`."""
        return self.spec.observation_spec()

    def action_spec(self) -> Any:
        """Returns dm_env's spec of one env's action; see `EnvSpec`."""
        return self.spec.action_spec()

    def _convert(self, timestep: TimeStep, *, reset: bool = False, return_info: bool = True) -> Any:
        return _dm.convert(timestep)
