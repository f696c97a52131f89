"""`xla`: EnvPool's three functions for compiled programs, made of jaxvec's verbs.

EnvPool's handle is a plain array, so its users convert it, and save it with other arrays. So is this: the
token of a `Handle`, whose static part the functions know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvec import _actions
from jaxvec._handoff._move import Verb
from jaxvec._timestep import TimeStep
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _first_ready, _functional
from jaxvec.callbacks._handle import Handle
from jaxvec.callbacks._program import token_of
from jaxvec.compat.envpool._arguments import split


def make(
    envs: VectorEnv, convert: Callable[[TimeStep], Any]
) -> tuple[jax.Array, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Makes a fresh handle, `recv`, `send` and `step`; see `EnvPool.xla`.

    Args:
        envs: the pool.
        convert: from a time step to what users get.
    """
    spec, transport = envs.spec, envs.transport

    def whole(handle: Any, verb: str) -> Handle:
        """Returns jaxvec's handle of which users have the array."""
        dtype, shape = getattr(handle, "dtype", None), getattr(handle, "shape", ())
        if dtype != np.uint32 or len(shape) != 2 or shape[1] != 3:
            what = type(handle).__name__ if dtype is None else f"{dtype} of shape {shape}"
            raise TypeError(
                f"{verb} takes the handle that xla() or the last call returned, uint32 of shape "
                f"({spec.num_envs}, 3), got {what}; under vmap, split it like the action"
            )
        return Handle(jnp.asarray(handle), spec, transport)

    def recv(handle: Any) -> tuple[jax.Array, Any]:
        """Waits for `batch_size` envs of those in flight; see `jaxvec.recv`."""
        after, timestep = _first_ready.recv(whole(handle, "recv"))
        return after.token, convert(timestep)

    def send(handle: Any, action: Any, env_id: Any = None) -> jax.Array:
        """Starts a step of some envs, and does not wait for it; see `jaxvec.send`."""
        action, env_id = split(action, env_id)
        env_id = None if env_id is None else jnp.atleast_1d(env_id)
        return _first_ready.send(whole(handle, "send"), action, env_id).token

    def step(handle: Any, action: Any, env_id: Any = None) -> tuple[jax.Array, Any]:
        """Steps all envs once, or those of `env_id`; with `batch_size` sends and receives."""
        action, env_id = split(action, env_id)
        if spec.first_ready:
            return recv(send(handle, action, env_id))
        before = whole(handle, "step")
        if env_id is None:
            after, timestep = _functional.step(before, action)
        else:
            after, timestep = _step_some(before, action, jnp.atleast_1d(env_id))
        return after.token, convert(timestep)

    return jnp.asarray(token_of(envs.pool, envs.pool.move_all(Verb.RECV))), recv, send, step


def _step_some(handle: Handle, action: Any, env_id: Any) -> tuple[Handle, TimeStep]:
    _actions.check_ids(env_id.dtype, env_id.shape)
    ids = env_id.astype(np.uint32)
    # Not taken out of the token: an id that the pool doesn't have would be taken for one that it has.
    part = jnp.stack([jnp.broadcast_to(handle.token[0, 0], ids.shape), ids, handle.token[ids, 2]], axis=1)
    moved, timestep = _functional.step(handle.next(part), action)
    return handle.next(handle.token.at[ids].set(moved.token)), timestep
