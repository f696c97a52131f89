"""`xla`: EnvPool's three functions for compiled programs, made of jaxvec's verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
) -> tuple[Handle, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Makes a fresh handle, `recv`, `send` and `step`; see `EnvPool.xla`.

    Args:
        envs: the pool.
        convert: from a time step to what users get.
    """
    handle = Handle(
        jnp.asarray(token_of(envs.pool, envs.pool.move_all(Verb.RECV))), envs.spec, envs.transport
    )

    def recv(handle: Handle) -> tuple[Handle, Any]:
        """Waits for `batch_size` envs of those in flight; see `jaxvec.recv`."""
        handle, timestep = _first_ready.recv(handle)
        return handle, convert(timestep)

    def send(handle: Handle, action: Any, env_id: Any = None) -> Handle:
        """Starts a step of some envs, and does not wait for it; see `jaxvec.send`."""
        action, env_id = split(action, env_id)
        return _first_ready.send(handle, action, None if env_id is None else jnp.atleast_1d(env_id))

    def step(handle: Handle, action: Any, env_id: Any = None) -> tuple[Handle, Any]:
        """Steps all envs once, or those of `env_id`; with `batch_size` sends and receives."""
        action, env_id = split(action, env_id)
        if envs.spec.first_ready:
            return recv(send(handle, action, env_id))
        if env_id is None:
            handle, timestep = _functional.step(handle, action)
        else:
            handle, timestep = _step_some(handle, action, jnp.atleast_1d(env_id))
        return handle, convert(timestep)

    return handle, recv, send, step


def _step_some(handle: Handle, action: Any, env_id: Any) -> tuple[Handle, TimeStep]:
    _actions.require_ids(env_id.dtype, env_id.shape)
    ids = env_id.astype(np.uint32)
    # Not taken out of the token: an id that the pool doesn't have would be taken for one that it has.
    part = jnp.stack([jnp.broadcast_to(handle.token[0, 0], ids.shape), ids, handle.token[ids, 2]], axis=1)
    moved, timestep = _functional.step(handle.next(part), action)
    return handle.next(handle.token.at[ids].set(moved.token)), timestep
