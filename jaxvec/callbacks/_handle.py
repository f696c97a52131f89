"""The handle: what a program carries from step to step in place of the pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from jaxvec._env_state import EnvState
from jaxvec._spec import PoolSpec

jax.tree_util.register_dataclass(EnvState, data_fields=["ids"], meta_fields=[])


@partial(jax.tree_util.register_dataclass, data_fields=["token"], meta_fields=["spec", "transport"])
@dataclass(frozen=True)
class Handle:
    """Envs of a pool, and the right to move them next, once.

    A pytree with one array, so it goes through `jit`, `scan`, `cond` and donation like any other, and
    its first axis is that of the envs: split it as you split observations, by indexing, reshaping,
    sharding or `vmap`, and each part is a handle to its envs.

    Each reset and step returns a new handle; the old one is stale. The data dependence from handle
    to handle is what orders the steps of a program.

    Attributes:
        token: `[num_envs, 3]` uint32: for each env the pool's id, its own, and how often it was moved.
            The pool is looked up when the program runs, so a compiled program serves every pool of
            an equal `spec`.
        spec: the shapes and dtypes of the pool's data; static, compared by value.
        transport: how a compiled program reaches the pool; static.

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
        """How many envs this is a handle to."""
        return self.token.shape[0]

    def next(self, token: jax.Array) -> Handle:
        """Returns the handle to the same envs that a call returned."""
        return Handle(token, self.spec, self.transport)
