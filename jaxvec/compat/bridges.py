"""The env classes of gxm, Jaxnasium and EvoRL over a Python env: `make("CartPole-v1", "gxm")`.

Those of gxm and Jaxnasium wrap an env of `compat.gymnax`: a state can be stepped once, and there is one pool
per number of vmapped instances. EvoRL's has a batch of envs and wraps a `VectorEnv`. rejax and memorax use
`compat.gymnax` itself.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector.utils import create_empty_array

from jaxvec._results import TimeStep, select
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _functions, _make
from jaxvec.callbacks._handle import Handle
from jaxvec.compat import _spaces, gymnax

__all__ = ["make"]


def make(
    env: Any, library: Literal["gxm", "jaxnasium", "evorl"], num_envs: int | None = None, **kwargs: Any
) -> Any:
    """Starts a pool and returns an env of a library.

    Args:
        env: A Gymnasium id, an `EnvSpec`, or a callable that makes an env; see `jaxvec.make`.
        library: Name of the library.
        num_envs: Number of envs, for EvoRL only. The envs of the other libraries are single, to be vmapped.
        **kwargs: Other arguments of `jaxvec.make`. Only EvoRL's env takes `autoreset_mode`.

    Returns:
        The env, which resets itself. Its attribute `env` is the `jaxvec.compat.gymnax.Environment`, which has
        `pools` and `close`, or for EvoRL the `VectorEnv`. Wrappers that choose between a step and a reset,
        such as gxm's `TimeLimit`, can't be used: wrap the Python env instead.

    Raises:
        ImportError: The library, or gymnax for its spaces, is not installed.
        ValueError: The library is unknown, or `num_envs` is missing or not EvoRL's.
        JaxvecError: See `jaxvec.make`.

    Example:
        ```python
        from jaxvec.compat import bridges

        env = bridges.make("CartPole-v1", "gxm")
        state, timestep = jax.jit(jax.vmap(env.init))(jax.random.split(jax.random.key(0), 2))
        print(timestep.next_obs.shape, env.action_space.n)  # (2, 4) 2
        env.env.close()
        ```
    """
    if library not in _CLASSES:
        raise ValueError(f"library must be one of {[*_CLASSES]}, not {library!r}")
    try:
        env_class = _CLASSES[library]()
    except ImportError as error:
        raise ImportError(
            f"jaxvec.compat.bridges needs {error.name}: pip install {_PACKAGES[library]}"
        ) from error
    if (library == "evorl") != (num_envs is not None):
        raise ValueError("num_envs: pass the number of envs for EvoRL, and only for EvoRL")
    if num_envs is not None:
        return env_class(_make.make(env, num_envs, **kwargs))
    return env_class(gymnax.make(env, num_returns=6, final_obs=True, **kwargs)[0])


@cache
def _gxm_class() -> Any:
    gxm: Any = importlib.import_module("gxm")
    to_space: Any = importlib.import_module("gxm.adapters.gymnax")._gymnax_to_gxm_space

    class Env(gxm.Environment):
        def __init__(self, env: gymnax.Environment) -> None:
            self.env = env
            self.id = f"jaxvec/{env.name}"

        action_space = property(lambda self: to_space(self.env.action_space()))
        observation_space = property(lambda self: to_space(self.env.observation_space()))

        def init(self, key: jax.Array) -> tuple[gymnax.EnvState, Any]:
            obs, state = self.env.reset(key)
            space = self.env.pools[1].single_action_space
            action = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), create_empty_array(space, 1, np.zeros))
            return state, gxm.Timestep(obs, action, {}, jnp.float32(0), jnp.bool_(0), jnp.bool_(0), obs)

        def reset(self, key: jax.Array, state: gymnax.EnvState) -> tuple[gymnax.EnvState, Any]:
            return self.init(key)

        def step(self, key: jax.Array, state: gymnax.EnvState, action: Any) -> tuple[gymnax.EnvState, Any]:
            obs, state, reward, terminated, truncated, info = self.env.step(key, state, action)
            last = select(truncated, info.pop("final_observation"), obs, "obs")
            action = jax.tree.map(jnp.asarray, action)
            return state, gxm.Timestep(obs, action, info, reward, terminated, truncated, last)

    return Env


@cache
def _jaxnasium_class() -> Any:
    jaxnasium: Any = importlib.import_module("jaxnasium")
    last_obs: str = importlib.import_module("jaxnasium._environment").ORIGINAL_OBSERVATION_KEY
    to_space: Any = importlib.import_module("jaxnasium.wrappers").gymnasium_to_jaxnasium_space
    static: Any = importlib.import_module("equinox").field(static=True)

    class Env(jaxnasium.Environment):
        env: gymnax.Environment = static

        action_space = property(lambda self: to_space(self.env.action_space()))
        observation_space = property(lambda self: to_space(self.env.observation_space()))

        def reset(self, key: jax.Array) -> tuple[Any, gymnax.EnvState]:
            return self.env.reset(key)

        def step(self, key: jax.Array, state: gymnax.EnvState, action: Any) -> tuple[Any, gymnax.EnvState]:
            obs, state, *step, info = self.env.step(key, state, action)
            info[last_obs] = info.pop("final_observation")
            return jaxnasium.TimeStep(obs, *step, info), state

        reset_env, step_env = reset, step

    return Env


@cache
def _evorl_class() -> Any:
    importlib.import_module("evorl")  # an error names it, and not a module of it
    evorl: Any = importlib.import_module("evorl.envs")
    to_space: Any = importlib.import_module("evorl.envs.gymnax").gymnax_space_to_evorl_space
    info_class: Any = importlib.import_module("evorl.types").PyTreeDict

    class Env(evorl.Env):
        """A batch of envs, with the infos that EvoRL's wrappers for training would add."""

        def __init__(self, envs: VectorEnv) -> None:
            self.env, self.num_envs = envs, envs.num_envs
            single = envs.single_action_space, envs.single_observation_space
            self._spaces = [
                to_space(_spaces.to_gymnax_space(space, name))
                for space, name in zip(single, ("action", "obs"), strict=True)
            ]

        action_space = property(lambda self: self._spaces[0])
        obs_space = property(lambda self: self._spaces[1])

        def reset(self, key: jax.Array) -> Any:
            return self._state(*_functions.reset(self.env, seed=key), jnp.zeros(self.num_envs))

        def step(self, state: Any, action: Any) -> Any:
            return self._state(*_functions.step(state.env_state, action), state.done)

        def _state(self, handle: Handle, timestep: TimeStep[Any], autoreset: jax.Array) -> Any:
            obs, reward, terminated, truncated, info = timestep
            fields = info_class(
                steps=info["episode_length"],
                termination=terminated.astype(np.float32),
                truncation=(truncated & ~terminated).astype(np.float32),
                autoreset=autoreset,  # whether the last step ended an episode
                episode_return=info["episode_return"].astype(np.float32),
                ori_obs=timestep.last_obs,
            )
            done, reward = timestep.done.astype(np.float32), reward.astype(np.float32)
            return evorl.EnvState(env_state=handle, obs=obs, reward=reward, done=done, info=fields)

    return Env


_CLASSES = {"gxm": _gxm_class, "jaxnasium": _jaxnasium_class, "evorl": _evorl_class}
_PACKAGES = {
    "gxm": '"gxm>=0.4"',
    "jaxnasium": '"jaxnasium>=0.1.1"',
    "evorl": '"evorl-jax>=0.1.1" "gymnax>=0.0.9" six',  # the package evorl is another library
}
