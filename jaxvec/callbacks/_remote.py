"""`get_attr` and `call`: what else the envs know and can do, inside `jit` and out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvec import _pickling
from jaxvec._handoff._move import Verb
from jaxvec.callbacks import _arguments, _primitive
from jaxvec.callbacks._handle import Handle
from jaxvec.callbacks._program import Call, Operand


def get_attr(handle: Handle, name: str, struct: Any) -> Any:
    """Returns an attribute of every env of the handle; wrappers are looked through.

    It reads, and JAX may drop, repeat or move what reads: for what changes the env, or must come before
    a step that does not use the result, there is `call`. A method without arguments is called.

    Args:
        handle: that the latest call returned; it stays fresh.
        name: of the attribute.
        struct: what it is for one env: a pytree of dtypes, arrays, or `jax.ShapeDtypeStruct`s.

    Returns:
        A pytree like `struct`, leaves `[num_envs, ...]`.

    Raises:
        StaleHandleError: envs have been moved since; let the next step depend on the result.
        EnvAttributeError: an env has no such attribute; the pool stays usable.
        EnvDataError: it is not what `struct` says; the pool stays usable.
        PoolBrokenError, PoolClosedError: the pool is broken, or closed.

    A compiled program raises them as `jax.errors.JaxRuntimeError` with the same text, like `step`.

    Example:
        ```python
        with jaxvec.make("Pendulum-v1", 2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            print(jaxvec.get_attr(handle, "g", float))  # [10. 10.]
        ```
    """
    spec = _arguments.check_is_handle(handle, "get_attr")
    leaves, tree = _structs(struct)
    answers = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
    call = Call(Verb.GET_ATTR, spec, handle.transport, extra=_extra(name, (), tree), answers=answers)
    return jax.tree.unflatten(tree, _primitive.bind(call, handle.token))


def call(handle: Handle, method: str, *args: Any, result: Any = None) -> tuple[Handle, Any]:
    """Calls a method of every env of the handle, once, and in the order of the handles.

    Args:
        handle: that the latest call returned.
        method: its name; wrappers are looked through.
        *args: pytrees. An array has an entry for each env, `[num_envs, ...]`; a scalar is for all, and so is
            what is no array.
        result: what it returns for one env: a pytree of dtypes, arrays, or `jax.ShapeDtypeStruct`s;
            `None` to drop it.

    Returns:
        The handle for the next call, and a pytree like `result`, leaves `[num_envs, ...]`.

    Raises:
        EnvError: an env raised; the pool stays usable and the handle fresh.
        EnvAttributeError: an env has no such method; likewise.
        EnvDataError: an env returned something else than `result`.
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
    spec = _arguments.check_is_handle(handle, "call")
    leaves, tree = _structs(result)
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
    """Returns what `_program.ask_envs` has to know, equal for equal calls."""
    skeleton = jax.tree.unflatten(tree, range(tree.num_leaves))
    return _pickling.dumps((name, args, skeleton))


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
