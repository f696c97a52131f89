"""Checks what users pass to the verbs, traced or not, and makes operands of it."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxvec import _actions, _seeds
from jaxvec._errors import ActionError
from jaxvec._spaces import Leaf
from jaxvec._spec import PoolSpec
from jaxvec.callbacks._handle import Handle


def check_is_handle(handle: Any, verb: str) -> PoolSpec:
    """Returns the handle's spec; raises `TypeError` if it is no handle, or can't be used now."""
    if not isinstance(handle, Handle):
        raise TypeError(
            f"{verb} takes the handle that jaxvec.reset or jaxvec.step returned, got {type(handle).__name__}"
        )
    _check_same_precision(handle.spec)
    return handle.spec


def _check_same_precision(spec: PoolSpec) -> None:
    for leaf in (*spec.action_leaves, *spec.timestep_leaves):
        if leaf.is_object:
            raise TypeError(
                f"{leaf}: its space has no fixed shape, so the pool keeps it as Python objects, which a "
                "compiled program can't take; wrap the env so that this leaf is an array, or step the pool "
                "from Python"
            )
        if jax.dtypes.canonicalize_dtype(leaf.stored) != leaf.stored:
            raise TypeError(
                f"{leaf}: the pool stores {leaf.stored}, but jax_enable_x64 is off; turn it on, or make the "
                "pool with jaxvec.make while it is off"
            )


def check_action(spec: PoolSpec, action: Any, num_envs: int) -> list[jax.Array]:
    """Returns the action's leaves, `[num_envs, ...]`, in the order and dtypes of the spec."""

    def check(leaf: Leaf, value: Any) -> jax.Array:
        try:
            array = jnp.asarray(value)
        except (TypeError, ValueError) as error:
            raise ActionError(f"{leaf}: expected an array, got {type(value).__name__}: {error}") from error
        shape = (num_envs, *leaf.shape)
        try:
            chex.assert_shape(array, shape)
        except AssertionError:
            raise ActionError(
                f"{leaf}: got shape {array.shape}, expected {shape}, env axis first; under vmap and "
                "shard_map, split the handle like the action"
            ) from None
        if not _actions.castable(array.dtype, leaf):
            raise ActionError(f"{leaf}: expected {leaf.stored}, got {array.dtype}")
        return array.astype(leaf.stored)

    return _actions.flatten(spec.action, action, check)


def seed_words(seed: Any, num_envs: int) -> jax.Array:
    """Returns `[num_envs, 2]` uint32: low and high word of each seed, as `_seeds.expand`.

    Args:
        seed: what `_seeds.expand` takes, also traced; or a JAX key, for a seed of each env's own.
        num_envs: how many.
    """
    if _is_key(seed, num_envs):
        # 31 bits: some simulators take their seed as a C int.
        seed = jax.random.bits(seed, (num_envs,), np.uint32) >> 1
    if not isinstance(seed, Tracer):
        seeds = _seeds.expand(_to_host(seed), num_envs)
        seeds = np.full(num_envs, _seeds.NONE) if seeds is None else seeds
        return jnp.asarray(seeds.astype("<i8").view("<u4").reshape(num_envs, 2))
    if not jnp.issubdtype(seed.dtype, np.integer) or seed.shape not in ((), (num_envs,)):
        raise TypeError(
            f"seed must be an integer or {num_envs} of them, or a key; got {seed.dtype} of shape {seed.shape}"
        )
    low = seed.astype(np.uint32)
    if seed.dtype.itemsize == 8:
        high = (seed >> 32).astype(np.uint32)
    else:  # sign-extended, so that a negative seed is refused by its own name
        high = jnp.where(seed < 0, ~np.uint32(0), np.uint32(0))
    if seed.ndim == 0:
        first, low = low, low + jnp.arange(num_envs, dtype=np.uint32)
        high = high + (low < first)  # the carry
    return jnp.stack([low, high], axis=-1)


def check_mask(mask: Any, num_envs: int) -> jax.Array:
    """Returns `mask` as `[num_envs]` bool; raises `ValueError` if it is anything else."""
    if mask is None:
        return jnp.ones(num_envs, np.bool_)
    if not isinstance(mask, Tracer):
        return jnp.asarray(_seeds.check_mask(_to_host(mask), num_envs))
    if mask.dtype != np.bool_ or mask.shape != (num_envs,):
        raise ValueError(f"mask must be bool of shape ({num_envs},), got {mask.dtype} of shape {mask.shape}")
    return mask


def _is_key(seed: Any, num_envs: int) -> bool:
    if not isinstance(seed, jax.Array):
        return False
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return True
    raw = seed.dtype == np.uint32 and seed.shape == (2,)
    if raw and num_envs == 2:
        raise TypeError(
            "seed: a uint32 array of shape (2,) is either an old-style key or two seeds; pass "
            "jax.random.key(...) or int32 seeds"
        )
    return raw


def _to_host(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, jax.Array) else value
