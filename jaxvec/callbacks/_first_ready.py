"""`send` and `recv`: a step in two halves, and batches of the envs that are ready first."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxvec import _actions
from jaxvec._handoff._move import Verb
from jaxvec._timestep import TimeStep
from jaxvec.callbacks import _arguments, _primitive
from jaxvec.callbacks._handle import Handle
from jaxvec.callbacks._program import Call


def send(handle: Handle, action: Any, env_id: Any = None) -> Handle:
    """Starts a step of some envs, and does not wait for it. They are pending until `recv` returns them.

    Works inside `jit`, `scan` and the like, and eagerly; not under `vmap` or `shard_map`.

    Args:
        handle: that the latest call returned, to all envs of the pool.
        action: pytree of the action space, leaves `[k, ...]`.
        env_id: `[k]` integers, whose actions they are: `timestep.info["env_id"]`. `None` for all.

    Returns:
        The handle for the next call.

    Raises:
        ActionError: wrong structure, shape or dtype, when the program is traced.
        EnvIdError: an id comes twice, or is none of the pool's; nothing was sent.
        InFlightError: an env is pending already; nothing was sent.
        JaxvecError: and all that `step` raises.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 4, batch_size=2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)  # of the two envs that are ready first
            handle = jaxvec.send(handle, jnp.array([0, 1]), timestep.info["env_id"])
            handle, timestep = jaxvec.recv(handle)
            print(timestep.obs.shape)  # (2, 4)
        ```
    """
    spec = _arguments.check_is_handle(handle, "send")
    ids = jnp.arange(spec.num_envs) if env_id is None else jnp.asarray(env_id)
    _actions.check_ids(ids.dtype, ids.shape)
    actions = _arguments.check_action(spec, action, ids.size)
    (token,) = _primitive.bind(
        Call(Verb.SEND, spec, handle.transport), handle.token, *actions, ids.astype(np.int32)
    )
    return handle.next(token)


def recv(handle: Handle, *, at_least: int | None = None) -> tuple[Handle, TimeStep]:
    """Waits for the first `batch_size` of the pending envs, and returns their time step.

    Which they are says `timestep.info["env_id"]`. With `recv_order="sent"` they are those that were sent
    first, in that order; else those that were done first, in that order. Of a pool without `batch_size`
    they are all, in env order. A reset sends every second env first, of a pool with two batches, and so
    on: so that each batch has envs of all workers.

    Args:
        handle: that the latest call returned, to all envs of the pool.
        at_least: is not for programs, whose arrays have fixed shapes, but for `VectorEnv.recv`, which may
            return any number of envs.

    Returns:
        The handle for the next call, and the time step, leaves `[batch_size, ...]`.

    Raises:
        TypeError: `at_least` was given.
        InFlightError: fewer envs than that are pending; the pool is as it was.
        JaxvecError: and all that `step` raises.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 4, batch_size=2, recv_order="sent") as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            print(timestep.info["env_id"])  # [0 2]
            handle = jaxvec.send(handle, jnp.array([0, 1]), timestep.info["env_id"])
            handle, timestep = jaxvec.recv(handle)
            print(timestep.info["env_id"])  # [1 3]
        ```
    """
    spec = _arguments.check_is_handle(handle, "recv")
    if at_least is not None:
        raise TypeError(
            f"at_least={at_least!r}: how many envs are ready differs from call to call, but arrays of a "
            "program have fixed shapes. Make the pool with the batch_size that recv should wait for, such as "
            "1, or use VectorEnv.recv in a Python loop"
        )
    token, *rows = _primitive.bind(Call(Verb.RECV, spec, handle.transport), handle.token)
    return handle.next(token), spec.build_timestep(rows)
