"""The env classes of gxm and Jaxnasium over a Python env: `make("CartPole-v1", "gxm")`.

They wrap an env of `compat.gymnax`: a state can be stepped once, and there is one pool per number of vmapped
instances. rejax and memorax use `compat.gymnax` itself.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector.utils import create_empty_array

from jaxvec._util import optional_imports
from jaxvec.compat import gymnax
from jaxvec.compat._base import select

__all__ = ["make"]


def make(env: Any, library: Literal["gxm", "jaxnasium"], **kwargs: Any) -> Any:
    """Starts a pool of one env and returns an `Environment` of a library.

    Args:
        env: A Gymnasium id, an `EnvSpec`, or a callable that makes an env; see `jaxvec.make`.
        library: Name of the library.
        **kwargs: Arguments of `jaxvec.make`, except those that set the number of envs.

    Returns:
        The env, which resets itself. Its attribute `env` is the `jaxvec.compat.gymnax.Environment`, which has
        `pools` and `close`. Wrappers that choose between a step and a reset, such as gxm's `TimeLimit`, can't
        be used: wrap the Python env instead.

    Raises:
        ImportError: The library, or gymnax for its spaces, is not installed.
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
    with optional_imports("jaxvec.compat.bridges", library):
        env_class = _CLASSES[library]()
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
            last = select(truncated, info.pop("final_observation"), obs, jnp)
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


_CLASSES = {"gxm": _gxm_class, "jaxnasium": _jaxnasium_class}
