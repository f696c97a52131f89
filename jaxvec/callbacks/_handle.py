"""The handle: what a program carries from step to step in place of the pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from jaxvec._spec import PoolSpec


@partial(jax.tree_util.register_dataclass, data_fields=["token"], meta_fields=["spec", "transport"])
@dataclass(frozen=True)
class Handle:
    """A pool, and the right to take its next step, once.

    A pytree with one array, so it goes through `jit`, `scan`, `cond` and donation like any other.
    Each reset and step returns a new handle; the old one is stale. The data dependence from handle
    to handle is what orders the steps of a program.

    Attributes:
        token: `[2]` uint32: the pool's id and its step count. The pool is looked up when the
            program runs, so a compiled program serves every pool of an equal `spec`.
        spec: the shapes and dtypes of the pool's data; static, compared by value.
        transport: how a compiled program reaches the pool; static.
    """

    token: jax.Array
    spec: PoolSpec
    transport: str
