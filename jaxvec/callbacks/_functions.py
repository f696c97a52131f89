"""The functions for compiled programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvec._arguments import check_ids
from jaxvec._dispatch.move import Verb
from jaxvec._spec import EnvState, TimeStep, check_states_type, state_ids
from jaxvec._util import dumps
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _primitive
from jaxvec.callbacks._call import (
    Call,
    Handle,
    Operand,
    check_action,
    check_is_handle,
    mask_array,
    seed_words,
)

# ----------------------------------------------------------------------------------------------------------
# `reset` and `step`: the verbs of the JAX face, inside `jit` and out.
# ----------------------------------------------------------------------------------------------------------


def reset(
    envs: VectorEnv | Handle,
    *,
    num_envs: int | None = None,
    seed: Any = None,
    mask: Any = None,
    options: Any = None,
) -> tuple[Handle, TimeStep]:
    """Resets all envs, or those of `mask`; the results of the others stay as they are.

    Without a mask, pending envs are waited for, and what they return is lost.

    Works inside `jit`, `scan`, `vmap` and the like, and eagerly. In a program that has stepped the pool
    already, pass the latest handle rather than the `VectorEnv`: it puts the reset after that step.

    Args:
        envs: the pool, or the latest handle to envs of it.
        num_envs: under `vmap`, how many of the pool's envs each vmapped instance gets: all of them
            divided by the instances, whose seeds or masks must then be batched: what is the same for all
            instances is made once. Not for a handle, which says itself how many it is for.
        seed: `None`; an int (env *i* gets `seed + i`); `[num_envs]` integers; or a JAX key, from
            which each env gets a seed of its own. Arrays and keys may be traced.
        mask: `[num_envs]` bool, may be traced, of envs that are not pending; `None` for all.
        options: a dict for every env's `reset`, or one for each env; fixed when the program is traced.

    Returns:
        The handle for the next step, and the time step: reward 0 and flags false for envs reset. Of a
        pool with `batch_size`, the envs that are ready first, as from `recv`: with a mask, perhaps others
        that were pending before.

    Raises:
        StaleHandleError: the handle is not the latest.
        PendingEnvError: an env of `mask` is pending; or, with `batch_size`, fewer envs than that would be.
            Nothing was reset.
        EnvIdError: the sizes don't fit: `num_envs` times the instances is not what the pool has.
        EnvError, WorkerDiedError, EnvTimeoutError: an env failed; the pool is broken by it.
        PoolBrokenError, PoolClosedError: the pool was broken, or closed, before.
        ValueError, TypeError: a bad argument; nothing was reset.

    A compiled program raises them as `jax.errors.JaxRuntimeError` with the same text; inside
    `with envs:`, or by `envs.raise_if_failed()`, they come typed.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            handle, timestep = jaxvec.step(handle, jnp.array([0, 1]))
            handle, timestep = jaxvec.reset(handle, mask=jnp.array([True, False]))
            print(timestep.info["episode_length"])  # [0 1]
        ```
    """
    if isinstance(envs, Handle):
        handle, fresh = envs, False
        if num_envs is not None:
            raise TypeError("num_envs goes with a VectorEnv; a handle says itself how many envs it is for")
    elif not isinstance(envs, VectorEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = f"; make the pool first: jaxvec.make({envs!r}, num_envs)" if isinstance(envs, str) else ""
        raise TypeError(
            "reset takes the pool that jaxvec.make returned, or a handle to envs of it, not "
            f"{type(envs).__name__}{hint}"
        )
    else:
        token = np.zeros((envs.num_envs if num_envs is None else num_envs, 3), np.uint32)
        token[:, 0], token[:, 1] = envs.pool.id, np.arange(len(token))
        handle, fresh = Handle(token, envs.spec, _primitive.choose_transport(envs.transport)), True  # pyright: ignore[reportArgumentType]
    spec = check_is_handle(handle, "reset")
    extra = dumps((options, mask is not None))
    token, *rows = _primitive.bind(
        Call(Verb.RESET, spec, handle.transport, fresh=fresh, extra=extra),
        handle.token,
        seed_words(seed, handle.num_envs),
        mask_array(mask, handle.num_envs),
    )
    return handle.next(token), spec.build_timestep(rows)


def step(handle: Handle, action: Any) -> tuple[Handle, TimeStep]:
    """Steps every env of the handle once, whether or not the result is used.

    Works inside `jit`, `scan`, `while_loop`, `fori_loop`, `cond`, `vmap`, `grad` and `shard_map`, and
    eagerly. To a derivative, what the envs return is a constant.

    Args:
        handle: that the latest reset or step returned.
        action: pytree of the action space, leaves `[num_envs, ...]`; bools stand for integers and
            integers for floats, but not the other way round.

    Returns:
        The handle for the next step, and the time step.

    Raises:
        ActionError: wrong structure, shape or dtype, when the program is traced.
        StaleHandleError: the handle is not the latest; nothing was stepped.
        ResetNeededError: without autoreset, an env has ended its episode; nothing was stepped.
        EnvIdError: the handle names an env twice, as two vmapped instances with the same handle do.
        PendingEnvError: an env was sent, and not received.
        EnvError, WorkerDiedError, EnvTimeoutError: an env failed; the pool is broken by it.
        PoolBrokenError, PoolClosedError: the pool was broken, or closed, before.

    A compiled program raises them as `jax.errors.JaxRuntimeError` with the same text; inside
    `with envs:`, or by `envs.raise_if_failed()`, they come typed.

    Example:
        ```python
        @jax.jit
        def rollout(handle):
            def body(handle, key):
                return jaxvec.step(handle, jax.random.randint(key, (2,), 0, 2))

            return jax.lax.scan(body, handle, jax.random.split(jax.random.key(0), 10))

        with jaxvec.make("CartPole-v1", 2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            handle, trajectory = rollout(handle)
            print(trajectory.obs.shape)  # (10, 2, 4)
        ```
    """
    spec = check_is_handle(handle, "step")
    actions = check_action(spec, action, handle.num_envs)
    token, *rows = _primitive.bind(Call(Verb.STEP, spec, handle.transport), handle.token, *actions)
    return handle.next(token), spec.build_timestep(rows)


# ----------------------------------------------------------------------------------------------------------
# `send` and `recv`: a step in two halves, and batches of the envs that are ready first.
# ----------------------------------------------------------------------------------------------------------


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
        PendingEnvError: an env is pending already; nothing was sent.
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
    spec = check_is_handle(handle, "send")
    ids = jnp.arange(spec.num_envs) if env_id is None else jnp.asarray(env_id)
    check_ids(ids.dtype, ids.shape)
    actions = check_action(spec, action, ids.size)
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
        PendingEnvError: fewer envs than that are pending; the pool is as it was.
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
    spec = check_is_handle(handle, "recv")
    if at_least is not None:
        raise TypeError(
            f"at_least={at_least!r}: how many envs are ready differs from call to call, but arrays of a "
            "program have fixed shapes. Make the pool with the batch_size that recv should wait for, such as "
            "1, or use VectorEnv.recv in a Python loop"
        )
    token, *rows = _primitive.bind(Call(Verb.RECV, spec, handle.transport), handle.token)
    return handle.next(token), spec.build_timestep(rows)


# ----------------------------------------------------------------------------------------------------------
# `get_attr` and `call`: what else the envs know and can do, inside `jit` and out.
# ----------------------------------------------------------------------------------------------------------


def get_attr(handle: Handle, name: str, result_shape_dtypes: Any) -> Any:
    """Returns an attribute of every env of the handle; wrappers are looked through.

    It reads, and JAX may drop, repeat or move what reads: for what changes the env, or must come before
    a step that does not use the result, there is `call`. A method without arguments is called.

    Args:
        handle: that the latest call returned; it stays fresh.
        name: of the attribute.
        result_shape_dtypes: what it is for one env: a pytree of dtypes, arrays, or `jax.ShapeDtypeStruct`s.

    Returns:
        A pytree like `result_shape_dtypes`, leaves `[num_envs, ...]`.

    Raises:
        StaleHandleError: envs have been moved since; let the next step depend on the result.
        EnvAttributeError: an env has no such attribute; the pool stays usable.
        EnvDataError: it is not what `result_shape_dtypes` says; the pool stays usable.
        PoolBrokenError, PoolClosedError: the pool is broken, or closed.

    A compiled program raises them as `jax.errors.JaxRuntimeError` with the same text, like `step`.

    Example:
        ```python
        with jaxvec.make("Pendulum-v1", 2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            print(jaxvec.get_attr(handle, "g", float))  # [10. 10.]
        ```
    """
    spec = check_is_handle(handle, "get_attr")
    leaves, tree = _structs(result_shape_dtypes)
    answers = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
    call = Call(Verb.GET_ATTR, spec, handle.transport, extra=_extra(name, (), tree), answers=answers)
    return jax.tree.unflatten(tree, _primitive.bind(call, handle.token))


def call(handle: Handle, method: str, *args: Any, result_shape_dtypes: Any = None) -> tuple[Handle, Any]:
    """Calls a method of every env of the handle, once, and in the order of the handles.

    Args:
        handle: that the latest call returned.
        method: its name; wrappers are looked through.
        *args: pytrees. An array has an entry for each env, `[num_envs, ...]`; a scalar is for all, and so is
            what is no array.
        result_shape_dtypes: result of one env: pytree of dtypes, arrays or `jax.ShapeDtypeStruct`s;
            `None` to drop the result.

    Returns:
        The handle for the next call, and a pytree like `result_shape_dtypes`, leaves `[num_envs, ...]`.

    Raises:
        EnvError: an env raised; the pool stays usable and the handle fresh.
        EnvAttributeError: an env has no such method; likewise.
        EnvDataError: an env returned something else than `result_shape_dtypes`.
        ValueError: an array has not an entry for each env.
        JaxvecError: and all that `step` raises.

    Example:
        ```python
        class Maze(jaxvec.testing.CountingEnv):
            def set_size(self, size):
                self.size = int(size)

        with jaxvec.make(Maze, 2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            handle, _ = jaxvec.call(handle, "set_size", jnp.array([5, 9]))
            print(jaxvec.get_attr(handle, "size", int))  # [5 9]
        ```
    """
    spec = check_is_handle(handle, "call")
    leaves, tree = _structs(result_shape_dtypes)
    operands: list[jax.Array] = []

    def operand(leaf: Any) -> Any:
        if not isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic, jax.Array)):
            return leaf
        array = jnp.asarray(leaf)
        if array.ndim == 0:
            array = jnp.broadcast_to(array, (handle.num_envs,))
        if array.shape[0] != handle.num_envs:
            raise ValueError(
                f"call of {method}: an argument has shape {array.shape}, but needs one entry for each of the "
                f"{handle.num_envs} envs"
            )
        operands.append(array)
        return Operand(len(operands) - 1)

    placed = jax.tree.map(operand, args)
    request = Call(
        Verb.CALL,
        spec,
        handle.transport,
        extra=_extra(method, placed, tree),
        arguments=tuple((array.shape[1:], np.dtype(array.dtype)) for array in operands),
        answers=tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves),
    )
    token, *values = _primitive.bind(request, handle.token, *operands)
    return handle.next(token), jax.tree.unflatten(tree, values)


def _extra(name: str, args: Any, tree: Any) -> bytes:
    """Returns what `ask_envs` has to know, equal for equal calls."""
    skeleton = jax.tree.unflatten(tree, range(tree.num_leaves))
    return dumps((name, args, skeleton))


def _structs(struct: Any) -> tuple[list[jax.ShapeDtypeStruct], Any]:
    """Returns the leaves of a pytree as what JAX would make of them, and its structure."""

    def leaf(value: Any) -> jax.ShapeDtypeStruct:
        if isinstance(value, (type, str, np.dtype)):
            shape, dtype = (), np.dtype(value)
        else:
            shape, dtype = value.shape, np.dtype(value.dtype)
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))

    leaves, tree = jax.tree.flatten(struct)
    return [leaf(value) for value in leaves], tree


# ----------------------------------------------------------------------------------------------------------
# `save`, `restore` and `simulate`: the states of envs as values, inside `jit` and out.
# ----------------------------------------------------------------------------------------------------------


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
        PendingEnvError: an env was sent, and not received.
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
    spec = check_is_handle(handle, "save")
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
    spec = check_is_handle(handle, "restore")
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
    ids = state_ids(state)
    count = np.shape(ids)[0] if np.ndim(ids) else 0
    token: Any = np.zeros((count, 3), np.uint32)
    if isinstance(envs, Handle):
        spec, transport = check_is_handle(envs, "simulate"), envs.transport
        token = jnp.asarray(token).at[:, 0].set(jax.lax.stop_gradient(envs.token)[0, 0])
    elif isinstance(envs, VectorEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
        handle = Handle(token, envs.spec, _primitive.choose_transport(envs.transport))
        spec, transport = check_is_handle(handle, "simulate"), handle.transport
        token[:, 0] = envs.pool.id
    else:
        raise TypeError(
            f"simulate takes the pool that jaxvec.make returned, or a handle to envs of it, not "
            f"{type(envs).__name__}"
        )
    ids = _ids(state, count)
    actions = check_action(spec, action, count)
    ids, *rows = _primitive.bind(Call(Verb.SIMULATE, spec, transport), token, ids, *actions)
    return EnvState(ids), spec.build_timestep(rows)


def _ids(state: EnvState, num_envs: int) -> jax.Array:
    ids = jnp.asarray(state_ids(state))
    check_states_type(ids.shape, ids.dtype, num_envs)
    return ids
