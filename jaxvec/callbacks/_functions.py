"""The functions for JAX programs, such as `jaxvec.reset` and `jaxvec.step`.

Each checks its arguments, describes itself as a `Call`, and binds the primitive of `_primitive.py`. So all of
them work while a program is traced and also eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxvec._arguments import check_action, check_ids, check_name, check_options, find_first
from jaxvec._engine.move import Verb
from jaxvec._results import EnvState, TimeStep, check_states
from jaxvec._util import dumps
from jaxvec._vector_env import VectorEnv, pool_of
from jaxvec.callbacks import _primitive
from jaxvec.callbacks._call import Call, Operand
from jaxvec.callbacks._handle import Handle, check_handle
from jaxvec.callbacks._operands import PROGRAM, as_array, mask_array, row_name, seed_words, types_of

if TYPE_CHECKING:
    import chex  # only for types: its import fails where no folder for temporary files is writable

_MAX_ID = np.iinfo(np.int32).max


def reset(
    envs: VectorEnv | Handle,
    *,
    num_envs: int | None = None,
    seed: int | Sequence[int] | chex.Array | chex.PRNGKey | None = None,
    mask: Any = None,
    options: Any = None,
) -> tuple[Handle, TimeStep]:
    """Resets all envs, or those of `mask`. The results of the other envs stay unchanged.

    Without a mask, it waits for pending envs and discards their results.

    Works inside `jit`, `scan`, `vmap` and similar transformations, and eagerly. If the program has stepped
    the pool before, pass the latest handle, not the `VectorEnv`, to order the reset after that step.

    Args:
        envs: The pool, or the latest handle to some of its envs.
        num_envs: Number of envs per instance, for a `VectorEnv` under `vmap`: the pool's number divided by
            the number of instances. Pass one seed (or mask) per instance; an unbatched reset would run only
            once.
        seed: `None`, an int (env *i* gets `seed + i`), an integer array `[num_envs]`, or a JAX key from which
            a seed for each env is drawn. Arrays and keys may be traced.
        mask: Bool array `[num_envs]` of envs to reset, none of them pending; may be traced. `None` for all.
        options: A dict for every env's `reset`, or a list with one dict per env, fixed at trace time. With
            `make(reset_options=...)`, a pytree of that space with leaves `[num_envs, ...]`, or `[...]` for
            all envs, which may be traced. Envs keep the latest ones for later resets.

    Returns:
        The handle for the next step, and the time step. Reset envs have reward 0 and false flags. With
        `batch_size`, the time step holds the envs that are ready first, as from `recv`; with a mask, these
        can be envs that were already pending.

    Raises:
        PendingEnvError: An env of `mask` is pending, or fewer than `batch_size` envs would be.
        EnvIdError: `num_envs` times the number of instances is not the number of envs of the pool.
        ValueError, TypeError: An argument is invalid.
        JaxvecError: Any error of `step`.

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
        handle = envs
        if num_envs is not None:
            raise TypeError(
                f"num_envs={num_envs} needs a VectorEnv; this handle already refers to {handle.num_envs} envs"
            )
    elif not isinstance(envs, VectorEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _not_a_pool("reset", envs)
    else:
        handle = fresh_handle(envs, envs.num_envs if num_envs is None else num_envs)
    return bind_reset(handle, seed, mask, options, fresh=handle is not envs)


def step(handle: Handle, action: Any, *others: Any, reset_options: Any = None) -> tuple[Handle, TimeStep]:
    """Steps every env of the handle once, even if the result is unused.

    Works inside `jit`, `scan`, `while_loop`, `fori_loop`, `cond`, `vmap`, `grad` and `shard_map`, and
    eagerly. The results have no gradient.

    Args:
        handle: The handle returned by the latest reset or step.
        action: Pytree of the action space with leaves `[num_envs, ...]`. Bools may stand for integers, and
            integers for floats. Integers may have any dtype, if their values fit the space's.
        *others: None; envs have random numbers of their own, and need no key.
        reset_options: Options for the envs that reset themselves in this step, a pytree of the space of
            `make(reset_options=...)` with leaves `[num_envs, ...]`, or `[...]` for all envs. Envs keep the
            latest ones for later resets, so `None` changes nothing.

    Returns:
        The handle for the next step, and the time step.

    Raises:
        ActionError: The action has the wrong structure, shape or dtype, raised at trace time; or an integer
            does not fit, and nothing was stepped.
        ValueError, TypeError: So for the reset options, or the pool does not declare any.
        StaleHandleError: The handle is not the latest. Nothing was stepped.
        ResetNeededError: Without autoreset, the episode of an env has ended. Nothing was stepped.
        EnvIdError: The handle contains a duplicate env, for example if vmapped instances share it, or only
            some envs of a pool of batched envs. Nothing was stepped.
        PendingEnvError: An env is pending.
        EnvError, WorkerDiedError, EnvTimeoutError: An env failed; this breaks the pool.
        PoolBrokenError, PoolClosedError: The pool is broken or closed.

    Compiled programs raise `jax.errors.JaxRuntimeError` with the same message. `with envs:` and
    `envs.raise_if_failed()` raise the typed error.

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
    if others:
        raise TypeError(
            "write jaxvec.step(handle, action): a handle takes the place of gymnax's key and state"
        )
    spec = check_handle(handle, "step")
    rows: Any = handle.num_envs, row_name(handle.token), PROGRAM
    operands = [*check_action(spec, action, *rows), *check_options(spec, reset_options, *rows)]
    token, *leaves = _bind(Verb.STEP, handle, *operands, arguments=types_of(operands))
    return handle.next(token), spec.build_timestep(leaves)


# --- Asynchronous steps: send and recv -------------------------------------------------------------------


def send(handle: Handle, action: Any, env_id: Any = None, *, reset_options: Any = None) -> Handle:
    """Starts a step of some envs without waiting for it. They are pending until `recv` returns them.

    Works inside `jit`, `scan` and similar transformations, and eagerly; not under `vmap` or `shard_map`.

    Args:
        handle: The handle returned by the latest call, to all envs of the pool.
        action: Pytree of the action space with leaves `[k, ...]`.
        env_id: Integer array `[k]` of the envs to step, such as `timestep.info["env_id"]`; `None` for all.
        reset_options: Options for the envs that reset themselves, as in `step`, with leaves `[k, ...]`.

    Returns:
        The handle for the next call.

    Raises:
        EnvIdError, PendingEnvError: An id is duplicated or out of range, or its env is pending.
        JaxvecError: Any error of `step`.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 4, batch_size=2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)  # the two envs that are ready first
            handle = jaxvec.send(handle, jnp.array([0, 1]), timestep.info["env_id"])
            handle, timestep = jaxvec.recv(handle)
            print(timestep.obs.shape)  # (2, 4)
        ```
    """
    spec = check_handle(handle, "send")
    ids: Any = np.arange(spec.num_envs) if env_id is None else as_array(env_id)
    check_ids(ids.dtype, ids.shape)
    if not np.can_cast(ids.dtype, np.int32):  # an id out of range must not wrap to another env's
        low = -1 if ids.dtype.kind == "i" else 0
        ids = (jnp if isinstance(ids, jax.Array) else np).clip(ids, low, _MAX_ID)
    rows: Any = ids.size, row_name(ids), PROGRAM
    operands = [*check_action(spec, action, *rows), *check_options(spec, reset_options, *rows)]
    (token,) = _bind(Verb.SEND, handle, *operands, ids.astype(np.int32), arguments=types_of(operands))
    return handle.next(token)


def recv(handle: Handle) -> tuple[Handle, TimeStep]:
    """Waits for `batch_size` of the pending envs and returns their time step.

    `timestep.info["env_id"]` identifies them. They are the envs that finished first or, with
    `recv_order="sent"`, that were sent first, in that order. If these are all envs and the order is
    `"ready"`, they are returned in env order. After a reset with k batches, batch i holds envs i, i+k, …, so
    each batch has envs of every worker.

    Args:
        handle: The handle returned by the latest call, to all envs of the pool.

    Returns:
        The handle for the next call, and the time step with leaves `[batch_size, ...]`.

    Raises:
        PendingEnvError: Fewer than `batch_size` envs are pending. The pool is unchanged.
        JaxvecError: Any error of `step`.

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
    spec = check_handle(handle, "recv")
    token, *rows = _bind(Verb.RECV, handle)
    return handle.next(token), spec.build_timestep(rows)


# --- Attributes and methods of the envs ------------------------------------------------------------------


def get_attr(handle: Handle, name: str, result_shape_dtypes: Any) -> Any:
    """Returns an attribute of every env or its wrappers; for a method, returns its result.

    This is a pure read, which JAX may drop, repeat or reorder. Use `call` for methods that change the env, or
    that must run before a step that does not use their result.

    Args:
        handle: The handle returned by the latest call. It stays valid.
        name: Name of the attribute.
        result_shape_dtypes: Type of one env's value: a pytree of dtypes, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        A pytree like `result_shape_dtypes` with leaves `[num_envs, ...]`.

    Raises:
        StaleHandleError: An env has been stepped or reset since. Make the next step depend on the result.
        EnvAttributeError: An env has no such attribute. The pool stays usable.
        EnvDataError: A value does not match `result_shape_dtypes`. The pool stays usable.

    Example:
        ```python
        with jaxvec.make("Pendulum-v1", 2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            print(jaxvec.get_attr(handle, "g", float))  # [10. 10.]
        ```
    """
    check_handle(handle, "get_attr")
    answers, tree = _answers(result_shape_dtypes)
    values = _bind(Verb.GET_ATTR, handle, extra=_extra(name, (), tree), answers=answers)
    return jax.tree.unflatten(tree, values)


def call(handle: Handle, method: str, *args: Any, result_shape_dtypes: Any = None) -> tuple[Handle, Any]:
    """Calls a method of every env of the handle, exactly once and in program order.

    Args:
        handle: The handle returned by the latest call.
        method: Name of the method, which may be one of a wrapper.
        *args: Pytrees. Arrays have one entry per env, `[num_envs, ...]`. Scalars and other objects go to
            every env.
        result_shape_dtypes: Type of one env's result: a pytree of dtypes, arrays or `jax.ShapeDtypeStruct`s.
            `None` discards the result.

    Returns:
        The handle for the next call, and a pytree like `result_shape_dtypes` with leaves `[num_envs, ...]`.

    Raises:
        EnvError, EnvAttributeError: An env raised, or has no such method. The handle stays valid.
        EnvDataError: A result does not match `result_shape_dtypes`.
        ValueError: The first axis of an array is not `num_envs`.
        JaxvecError: Any error of `step`.

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
    check_handle(handle, "call")
    answers, tree = _answers(result_shape_dtypes)
    operands: list[jax.Array] = []

    def operand(leaf: Any) -> Any:
        if not isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic, jax.Array)):
            return leaf
        array = jnp.asarray(leaf)
        _check_dtype(f"call of {method}: an argument", array.dtype)
        if isinstance(leaf, (np.ndarray, np.generic)) and array.dtype.kind in "iu":
            exact = np.asarray(leaf)
            if (place := find_first(exact.astype(array.dtype) != exact)) is not None:
                raise ValueError(
                    f"call of {method}: {exact.flat[place]} in an argument doesn't fit into "
                    f"{array.dtype}, in which JAX stores {leaf.dtype} while jax_enable_x64 is off"
                )
        if array.ndim == 0:
            array = jnp.broadcast_to(array, (handle.num_envs,))
        if array.shape[0] != handle.num_envs:
            raise ValueError(
                f"call of {method}: an argument has shape {array.shape}, but its first axis must have one "
                f"entry for each of the {handle.num_envs} envs"
            )
        operands.append(array)
        return Operand(len(operands) - 1)

    placed = jax.tree.map(operand, args)
    extra = _extra(method, placed, tree)
    fields = {"extra": extra, "arguments": types_of(operands), "answers": answers}
    token, *values = _bind(Verb.CALL, handle, *operands, **fields)
    return handle.next(token), jax.tree.unflatten(tree, values)


def _extra(name: str, args: Any, tree: Any) -> bytes:
    """Returns `Call.extra` of a method or attribute, with equal bytes for equal calls."""
    check_name(name)
    skeleton = jax.tree.unflatten(tree, range(tree.num_leaves))
    return dumps((name, args, skeleton))


def _check_dtype(name: str, dtype: Any) -> None:
    """Raises `TypeError` for dtypes that are not NumPy's own, such as bfloat16, and those of keys."""
    if jnp.issubdtype(dtype, jax.dtypes.extended) or np.dtype(dtype).kind == "V":
        raise TypeError(
            f"{name} is {dtype}, which envs can't exchange with programs: cast it, as by "
            ".astype(jnp.float32), or convert a key by jax.random.key_data"
        )


def _answers(struct: Any) -> tuple[tuple[tuple[tuple[int, ...], np.dtype[Any]], ...], Any]:
    """Returns `Call.answers` for `result_shape_dtypes`, with JAX's canonical dtypes, and the tree."""

    def answer(value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
        is_dtype = isinstance(value, (type, str, np.dtype))
        dtype = value if is_dtype else value.dtype
        _check_dtype("result_shape_dtypes: a leaf", dtype)
        canonical = np.dtype(jax.dtypes.canonicalize_dtype(np.dtype(dtype)))
        return () if is_dtype else tuple(value.shape), canonical

    leaves, tree = jax.tree.flatten(struct)
    return tuple(map(answer, leaves)), tree


# --- Saved states of envs --------------------------------------------------------------------------------


def save(handle: Handle) -> tuple[Handle, EnvState]:
    """Saves the state of every env of the handle, including its wrappers, episode and latest time step.

    Works inside `jit`, `scan`, `while_loop`, `cond`, `vmap` and `shard_map`, and eagerly. The first save in
    each worker verifies that restored envs behave exactly like the original ones.

    Args:
        handle: The handle returned by the latest call.

    Returns:
        The handle for the next call, and the states `[num_envs]`.

    Raises:
        EnvStateError: The state of an env cannot be saved or not be restored exactly. The pool stays usable.
        ValueError: The pool keeps fewer states than that; see `jaxvec.make(states=...)`.
        JaxvecError: Any error of `step`.

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
    check_handle(handle, "save")
    token, ids = _bind(Verb.SAVE, handle)
    return handle.next(token), EnvState(ids)


def restore(handle: Handle, state: EnvState, *, mask: Any = None) -> tuple[Handle, TimeStep]:
    """Restores the envs of the handle to saved states: env *i* to `state[i]`.

    The same actions then give the same data, bit for bit, as after the save. A state may come from another
    env of the pool that was made by the same function. It is then sent to that env's worker, if it is in
    another one. `pack_states` moves states to another pool.

    Args:
        handle: The handle returned by the latest call.
        state: States `[num_envs]`.
        mask: Bool array `[num_envs]` of envs to restore; may be traced. `None` for all. The states of the
            others are not read.

    Returns:
        The handle for the next call, and the time step of the save, except `info["env_id"]`, which is the
        restored env. The rows of envs that are not in `mask` are those of their last time step.

    Raises:
        StaleStateError: A state was evicted by newer ones. Nothing was restored.
        EnvStateError: A state cannot be restored, or cannot be sent to another worker.
        JaxvecError: Any error of `step`. Errors after the first env was restored break the pool.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2, states=10) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            handle, state = jaxvec.save(handle)
            handle, timestep = jaxvec.restore(handle, state[jnp.array([0, 0])])  # both from env 0's
            print((timestep.obs[0] == timestep.obs[1]).all())  # True
        ```
    """
    spec = check_handle(handle, "restore")
    ids = check_states(state, handle.num_envs, jnp.asarray)
    token, *rows = _bind(Verb.RESTORE, handle, ids, mask_array(mask, handle.num_envs))
    return handle.next(token), spec.build_timestep(rows)


def simulate(envs: VectorEnv | Handle, state: EnvState, action: Any) -> tuple[EnvState, TimeStep]:
    """Steps copies of envs from saved states; the envs themselves stay unchanged.

    This is a pure function of state and action, so calls may run in any order, and JAX may drop or repeat
    them. Works inside all transformations of JAX, even a vmapped `cond` with different predicates.

    Args:
        envs: The pool of the states, or a handle to some of its envs, which stays valid.
        state: States `[n]`, for any `n`.
        action: Pytree of the action space with leaves `[n, ...]`.

    Returns:
        The states after the step, `[n]`, and the time step. Its `info["env_id"]` is the saved env.

    Raises:
        StaleStateError: A state was evicted by newer ones.
        ValueError: The pool keeps fewer than `n` states.
        EnvError: An env raised an exception. The pool stays usable.
        JaxvecError: Any other error of `step`.

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
    ids = check_states(state, as_array=jnp.asarray)
    # Only the pool's id in the token is read: the states name their envs.
    if isinstance(envs, Handle):
        token = jnp.zeros(ids.shape, np.uint32).at[:, 0].set(jax.lax.stop_gradient(envs.token)[:, 0].max())
        handle = envs.next(token)
    elif isinstance(envs, VectorEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
        handle = fresh_handle(envs, len(ids))
    else:
        raise _not_a_pool("simulate", envs)
    spec = check_handle(handle, "simulate")
    actions = check_action(spec, action, len(ids), "state {}".format, PROGRAM)
    ids, *rows = _bind(Verb.SIMULATE, handle, ids, *actions, arguments=types_of(actions))
    return EnvState(ids), spec.build_timestep(rows)


# --- Parts of these functions, and of `PooledEnv` ---------------------------------------------------------


def fresh_handle(envs: VectorEnv, num_envs: int) -> Handle:
    """Returns a handle for a call that does not follow an earlier one."""
    # The pool fills in the generations at run time, as a compiled reset may run any number of times.
    token: Any = np.zeros((num_envs, 3), np.uint32)
    token[:, 0] = pool_of(envs).id
    token[:, 1] = np.arange(num_envs)
    return Handle(token, envs.spec, _primitive.choose_transport(envs.transport))


def bind_reset(handle: Handle, seed: Any, mask: Any, options: Any, **fields: Any) -> tuple[Handle, TimeStep]:
    """Makes a reset, see `reset`; `fields` are further ones of the `Call`."""
    spec = check_handle(handle, "reset")
    num_envs = handle.num_envs
    option_columns: list[Any] = []
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(options))
    if is_traced or spec.reset_options is not None:  # traced ones need a declaration
        option_columns = check_options(spec, options, num_envs, row_name(handle.token), PROGRAM)
        options = None
    words = seed_words(seed, num_envs)
    masked = mask is not None
    operands = words, mask_array(mask, num_envs), *option_columns
    fields |= {"extra": dumps((options, masked)), "arguments": types_of(option_columns)}
    token, *rows = _bind(Verb.RESET, handle, *operands, **fields)
    return handle.next(token), spec.build_timestep(rows)


def _bind(verb: Verb, handle: Handle, *operands: Any, **fields: Any) -> list[jax.Array]:
    call = Call(verb, handle.spec, handle.transport, **fields)
    return _primitive.bind(call, handle.token, *operands)


def _not_a_pool(function: str, envs: Any) -> TypeError:
    hint = f"; make the pool first: jaxvec.make({envs!r}, num_envs)" if isinstance(envs, str) else ""
    return TypeError(
        f"{function} takes the pool that jaxvec.make returned, or a handle to its envs, not "
        f"{type(envs).__name__}{hint}"
    )
