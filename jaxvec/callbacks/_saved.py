"""`save`, `restore` and `simulate`: the states of envs as values, inside `jit` and out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvec import _env_state
from jaxvec._env_state import EnvState
from jaxvec._handoff._move import Verb
from jaxvec._timestep import TimeStep
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _arguments, _primitive, _transports
from jaxvec.callbacks._handle import Handle
from jaxvec.callbacks._program import Call


def save(handle: Handle) -> tuple[Handle, EnvState]:
    """Saves the state of every env of the handle, with its wrappers, its episode and its latest time step.

    Works inside `jit`, `scan`, `while_loop`, `cond`, `vmap` and `shard_map`, and eagerly, as `step` does. The
    first save in each worker proves that its envs go on from their states exactly as they would have.

    Args:
        handle: that the latest call returned.

    Returns:
        The handle for the next call, and the states, `[num_envs]`.

    Raises:
        EnvStateError: the state of an env can't be saved, or is not put back exactly; the pool stays usable.
        ValueError: the pool keeps fewer states than that: `jaxvec.make(states=...)`.
        InFlightError: an env was sent, and not received.
        JaxvecError: and all that `step` raises.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2, states=10) as envs:
            handle, before = jaxvec.reset(envs, seed=0)
            handle, state = jaxvec.save(handle)
            handle, timestep = jaxvec.step(handle, jnp.array([0, 1]))
            handle, after = jaxvec.restore(handle, state)
            print((before.obs == after.obs).all())  # True
        ```
    """
    spec = _arguments.check_is_handle(handle, "save")
    token, ids = _primitive.bind(Call(Verb.SAVE, spec, handle.transport), handle.token)
    return handle.next(token), EnvState(ids)


def restore(handle: Handle, state: EnvState) -> tuple[Handle, TimeStep]:
    """Has every env of the handle go on from a state: env *i* from `state[i]`.

    From there the same actions give the same data, bit for bit, as they did after the state was saved. A
    state may be that of another env that was made by the same function, also of another pool of equal
    specification; then it is sent from one worker to another.

    Args:
        handle: that the latest call returned.
        state: `[num_envs]`.

    Returns:
        The handle for the next call, and the time step that was current when the state was saved; but for
        `info["env_id"]`, which says who goes on from it.

    Raises:
        StaleStateError: a state is gone, since newer ones took its place; nothing was restored.
        EnvStateError: a state can't be put back, or not be sent to another worker.
        JaxvecError: and all that `step` raises. What fails once the first env was restored breaks the pool.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2, states=10) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            handle, state = jaxvec.save(handle)
            handle, timestep = jaxvec.restore(handle, state[jnp.array([0, 0])])  # both envs go on as env 0
            print((timestep.obs[0] == timestep.obs[1]).all())  # True
        ```
    """
    spec = _arguments.check_is_handle(handle, "restore")
    ids = _ids(state, handle.num_envs)
    token, *rows = _primitive.bind(Call(Verb.RESTORE, spec, handle.transport), handle.token, ids)
    return handle.next(token), spec.build_timestep(rows)


def simulate(envs: VectorEnv | Handle, state: EnvState, action: Any) -> tuple[EnvState, TimeStep]:
    """Steps copies of envs from their states, and leaves the envs themselves as they are.

    From outside it is a pure function of state and action. It takes no handle, and may be called in any
    order; JAX may drop a call whose results are not used, or repeat it. Works inside all of JAX's
    transformations, also in a `cond` or `while_loop` under `vmap` whose predicates differ.

    Args:
        envs: the pool of the states, or a handle to envs of it, which stays fresh.
        state: `[n]`, any number of them.
        action: pytree of the action space, leaves `[n, ...]`.

    Returns:
        The states after the step, `[n]`, and the time step, whose `info["env_id"]` says which env was saved
        at first.

    Raises:
        ActionError: wrong structure, shape or dtype, when the program is traced.
        StaleStateError: a state is gone, since newer ones took its place.
        ValueError: the pool keeps fewer states than `n`.
        ResetNeededError: without autoreset, an episode was over.
        EnvError: an env raised; the pool stays usable.
        EnvTimeoutError, WorkerDiedError, PoolBrokenError, PoolClosedError: as of `step`.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2, states=10) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            handle, state = jaxvec.save(handle)
            _, left = jaxvec.simulate(envs, state, jnp.array([0, 0]))
            _, right = jaxvec.simulate(envs, state, jnp.array([1, 1]))
            print(left.obs[:, 1] < right.obs[:, 1])  # [ True  True]
        ```
    """
    ids = _env_state.ids_of(state)
    count = np.shape(ids)[0] if np.ndim(ids) else 0
    token: Any = np.zeros((count, 3), np.uint32)
    if isinstance(envs, Handle):
        spec, transport = _arguments.check_is_handle(envs, "simulate"), envs.transport
        token = jnp.asarray(token).at[:, 0].set(jax.lax.stop_gradient(envs.token)[0, 0])
    elif isinstance(envs, VectorEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
        handle = Handle(token, envs.spec, _transports.choose(envs.transport))
        spec, transport = _arguments.check_is_handle(handle, "simulate"), handle.transport
        token[:, 0] = envs.pool.id
    else:
        raise TypeError(
            f"simulate takes the pool that jaxvec.make returned, or a handle to envs of it, not "
            f"{type(envs).__name__}"
        )
    ids = _ids(state, count)
    actions = _arguments.check_action(spec, action, count)
    ids, *rows = _primitive.bind(Call(Verb.SIMULATE, spec, transport), token, ids, *actions)
    return EnvState(ids), spec.build_timestep(rows)


def _ids(state: EnvState, num_envs: int) -> jax.Array:
    ids = jnp.asarray(_env_state.ids_of(state))
    _env_state.check_type(ids.shape, ids.dtype, num_envs)
    return ids
