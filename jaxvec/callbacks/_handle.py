"""Handles: the permission of a JAX program to operate on some envs of a pool, as a pytree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxvec._errors import StaleHandleError
from jaxvec._results import EnvState
from jaxvec._spec import PoolSpec

jax.tree_util.register_dataclass(EnvState, data_fields=["ids"], meta_fields=[])


@partial(jax.tree_util.register_dataclass, data_fields=["token"], meta_fields=["spec", "transport"])
@dataclass(frozen=True)
class Handle:
    """Permission to reset or step some envs of a pool, once.

    A pytree with one array, so it works with `jit`, `scan`, `cond` and donation. Its first axis is the env
    axis: split it like observations, by indexing, reshaping, sharding or `vmap`. Each part is a handle:
    `handle[:4]` is that of the first four envs.

    Each reset and step returns a new handle and makes the old one stale. This orders the steps of a program.

    Attributes:
        token: Array `[num_envs, 3]` of uint32. For each env it stores the pool id, the env id, and a counter
            that increases with every reset or step. The pool is looked up at run time, so a compiled program
            works with every pool that has an equal `spec`.
        spec: Shapes and dtypes of the pool's data. Static, compared by value.
        transport: Transport of compiled programs to the pool. Static.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 4) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            halves = jax.tree.map(lambda leaf: leaf.reshape(2, 2, 3), handle)
            halves, timestep = jax.vmap(jaxvec.step)(halves, jnp.zeros((2, 2), int))
            print(halves.token.shape, timestep.obs.shape)  # (2, 2, 3) (2, 2, 4)
        ```
    """

    token: jax.Array
    spec: PoolSpec
    transport: str

    @property
    def num_envs(self) -> int:
        return self.token.shape[0]

    def __getitem__(self, index: Any) -> Handle:
        """Returns the handle of some of the envs, by a slice or an array of indices."""
        return self.next(self.token[index])

    __iter__ = None  # a handle is not a sequence: `handle, timestep = ...` must not unpack it

    def next(self, token: jax.Array) -> Handle:
        """Returns a handle to the same envs with a new token."""
        return Handle(token, self.spec, self.transport)


def check_handle(handle: Any, verb: str) -> PoolSpec:
    """Returns the handle's spec; raises `TypeError` for other objects and for pools that JAX can't use."""
    if not isinstance(handle, Handle):
        raise TypeError(
            f"{verb} takes the handle that jaxvec.reset or jaxvec.step returned, got {type(handle).__name__}"
        )
    token = jax.typeof(handle.token)
    if token.shape[1:] != (3,) or token.dtype != np.uint32:
        raise TypeError(
            f"{verb} got a handle with a token of {token.str_short()} instead of uint32[num_envs,3]. Under "
            "vmap, pass the split handle as a mapped argument; the handle of one env is handle[i : i + 1]"
        )
    for leaf in (*handle.spec.action_leaves, *handle.spec.timestep_leaves):
        if leaf.is_object:
            raise TypeError(
                f"{leaf}: its space has no fixed shape, so the pool stores Python objects, which compiled "
                "programs can't use; wrap the env so that this leaf is an array, or step the pool in Python"
            )
        if jax.dtypes.canonicalize_dtype(leaf.stored) != leaf.stored:
            raise TypeError(
                f"{leaf}: the pool stores {leaf.stored}, but jax_enable_x64 is off; turn it on, or make the "
                "pool with jaxvec.make while it is off"
            )
    return handle.spec


def pool_id_of(token: NDArray[Any]) -> int:
    pools = token[:, 0]
    if not len(pools) or (pools != pools[0]).any():
        raise StaleHandleError(
            f"the handle refers to several pools ({np.unique(pools).tolist()}); use one handle per pool"
        )
    return int(pools[0])
