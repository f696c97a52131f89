"""The env classes of gxm and Jaxnasium over a Python env: `make_gxm("CartPole-v1")`, `make_jaxnasium(...)`.

Both describe a single env, to be vmapped. As in `compat.gymnax`, there is one pool per number of vmapped
instances, and a state can be stepped once. rejax and memorax use `compat.gymnax` itself.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector.utils import create_empty_array

from jaxvec._spec import TimeStep
from jaxvec._util import optional_imports
from jaxvec.callbacks._call import Handle
from jaxvec.callbacks._family import EnvFamily
from jaxvec.compat._base import PooledEnv, pop_final_obs, select
from jaxvec.compat._spaces import to_jax_space

__all__ = ["make_gxm", "make_jaxnasium"]


class _Env(PooledEnv):
    """A Python env with the spaces of another library. Abstract."""

    _types: ClassVar[Any]  # the library's classes `Discrete`, `Box`, `Dict` and `Tuple`
    _library: ClassVar[str]

    @property
    def action_space(self) -> Any:
        space = self._family.first.single_action_space
        return to_jax_space(space, "action", self._types, self._library)

    @property
    def observation_space(self) -> Any:
        space = self._family.first.single_observation_space
        return to_jax_space(space, "obs", self._types, self._library)


def make_gxm(env: Any, **kwargs: Any) -> Any:
    """Starts a pool of one env and returns a `gxm.Environment`, also with `pools` and `close`.

    `gxm.register("jaxvec", make_gxm)` makes `gxm.make("jaxvec/CartPole-v1")` use it.

    Args:
        env: A Gymnasium id, an `EnvSpec`, or a callable that makes an env; see `jaxvec.make`.
        **kwargs: Arguments of `jaxvec.make`, except those that set the number of envs.

    Returns:
        The env. `info` of its time steps is that of `jaxvec.TimeStep`. Wrappers that choose between a step
        and a reset, such as `TimeLimit`, can't be used: wrap the Python env instead.

    Raises:
        ImportError: gxm is not installed.
        JaxvecError: see `jaxvec.make`.

    Example:
        ```python
        from jaxvec.compat.bridges import make_gxm

        with make_gxm("CartPole-v1") as env:
            state, timestep = jax.jit(jax.vmap(env.init))(jax.random.split(jax.random.key(0), 2))
            print(timestep.next_obs.shape, env.action_space.n)  # (2, 4) 2
        ```
    """
    with optional_imports("jaxvec.compat.bridges.make_gxm", "gxm"):
        gxm = importlib.import_module("gxm")
        theirs: Any = importlib.import_module("gxm.spaces")

    def box(low: Any, high: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return theirs.Box(low, high, shape)  # gxm's has no dtype

    class Env(_Env, gxm.Environment):
        id = f"jaxvec/{env}"
        _types = SimpleNamespace(Discrete=theirs.Discrete, Box=box, Dict=theirs.Tree, Tuple=theirs.Tree)
        _library = "gxm"

        def init(self, key: jax.Array) -> tuple[Handle, Any]:
            no_action = create_empty_array(self._family.first.single_action_space, 1, np.zeros)
            return self._convert(*self._family.reset(key), jax.tree.map(lambda leaf: leaf[0], no_action))

        def reset(self, key: jax.Array, state: Handle) -> tuple[Handle, Any]:
            return self.init(key)

        def step(self, key: jax.Array, state: Handle, action: Any) -> tuple[Handle, Any]:
            return self._convert(*self._family.step(state, action), action)

        def _convert(self, handle: Handle, timestep: TimeStep, action: Any) -> tuple[Handle, Any]:
            obs, reward, terminated, truncated, _ = timestep
            info, last = pop_final_obs(timestep, jnp)
            return handle, gxm.Timestep(
                next_obs=obs,
                true_next_obs=obs if last is None else select(truncated, last, obs, jnp),
                action=jax.tree.map(jnp.asarray, action),
                reward=reward.astype(np.float32),
                terminated=terminated,
                truncated=truncated,
                info=info,
            )

    return Env(EnvFamily(env, **kwargs))


def make_jaxnasium(env: Any, **kwargs: Any) -> Any:
    """Starts a pool of one env and returns a `jaxnasium.Environment`, also with `pools` and `close`.

    Args:
        env: A Gymnasium id, an `EnvSpec`, or a callable that makes an env; see `jaxvec.make`.
        **kwargs: Arguments of `jaxvec.make`, except those that set the number of envs.

    Returns:
        The env, which resets itself. `info` of its time steps is that of `jaxvec.TimeStep`, with Jaxnasium's
        own key for the observation before a reset.

    Raises:
        ImportError: Jaxnasium is not installed.
        JaxvecError: see `jaxvec.make`.

    Example:
        ```python
        from jaxvec.compat.bridges import make_jaxnasium

        with make_jaxnasium("CartPole-v1") as env:
            obs, state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 2))
            print(obs.shape, env.action_space.n)  # (2, 4) 2
        ```
    """
    with optional_imports("jaxvec.compat.bridges.make_jaxnasium", "jaxnasium"):
        jaxnasium = importlib.import_module("jaxnasium")
        original: str = importlib.import_module("jaxnasium._environment").ORIGINAL_OBSERVATION_KEY
        static: Any = importlib.import_module("equinox").field(static=True)

    class Env(_Env, jaxnasium.Environment):
        _family: EnvFamily = static
        # Its nested spaces are pytrees.
        _types = SimpleNamespace(Discrete=jaxnasium.Discrete, Box=jaxnasium.Box, Dict=dict, Tuple=tuple)
        _library = "Jaxnasium"

        def reset(self, key: jax.Array) -> tuple[Any, Handle]:
            handle, timestep = self._family.reset(key)
            return timestep.obs, handle

        def step(self, key: jax.Array, state: Handle, action: Any) -> tuple[Any, Handle]:
            handle, timestep = self._family.step(state, action)
            info, last = pop_final_obs(timestep, jnp)
            info[original] = timestep.obs if last is None else last
            return jaxnasium.TimeStep(*timestep[:4], info), handle

        reset_env, step_env = reset, step

    return Env(EnvFamily(env, **kwargs))
