"""The arguments of the functions for JAX programs as operands of a call: checked arrays, traced or not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from jaxvec._arguments import SEED_WORDS, Conversion, RowName, cast_rows, check_mask, expand_seeds
from jaxvec._leaves import Leaf


def row_name(ids: Any) -> RowName:
    """Returns a function that names the env of a row, by env ids `[k]` or a token `[k, 3]`."""

    def name(row: int) -> str:
        if isinstance(ids, Tracer):  # the ids are known when the call runs
            return f"row {row}"
        return f"env {int(ids[row, 1] if ids.ndim == 2 else ids[row])}"

    return name


def types_of(operands: Sequence[Any]) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]:
    """Returns `Call.arguments`."""
    return tuple((operand.shape[1:], np.dtype(operand.dtype)) for operand in operands)


def _cast(leaf: Leaf, array: Any, name_row: RowName) -> jax.Array:
    """Returns an array in the leaf's stored dtype; integers that may not fit are left to the call."""
    if isinstance(array, np.ndarray):
        return jnp.asarray(cast_rows(leaf, array, name_row))
    may_wrap = leaf.stored.kind in "iu" and not np.can_cast(array.dtype, leaf.stored)
    return array if may_wrap else array.astype(leaf.stored)


def as_array(value: Any) -> jax.Array | NDArray[Any]:
    """Returns a value as an array: numbers of the host as NumPy's, because JAX would wrap large integers."""
    if isinstance(value, jax.Array):
        return value
    with suppress(jax.errors.TracerArrayConversionError):  # a list with traced values
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return array
    return jnp.asarray(value)


PROGRAM = Conversion(as_array, _cast, "; under vmap and shard_map, split the handle like the action")


def seed_words(seed: Any, num_envs: int) -> jax.Array:
    """Returns the words of each env's seed, `[num_envs, 2 * SEED_WORDS]` uint32, lowest first.

    `seed` is as in `expand_seeds`, but may be traced, or a JAX key from which each env's seed is drawn.
    """
    if _is_key(seed, num_envs):
        # 31 bits: some simulators take their seed as a C int.
        seed = jax.random.bits(seed, (num_envs,), np.uint32) >> 1
    if not isinstance(seed, Tracer):
        seeds = expand_seeds(np.asarray(seed) if isinstance(seed, jax.Array) else seed, num_envs)
        return jnp.asarray(seeds.view("<u4"))
    if not jnp.issubdtype(seed.dtype, np.integer) or seed.shape not in ((), (num_envs,)):
        raise TypeError(
            f"seed must be an integer or {num_envs} of them, or a key; got {seed.dtype} of shape {seed.shape}"
        )
    low = seed.astype(np.uint32)
    is_long = seed.dtype.itemsize == 8
    high = (seed >> 32).astype(np.uint32) if is_long else jnp.where(seed < 0, ~np.uint32(0), np.uint32(0))
    if seed.ndim == 0:
        first = low
        low = low + jnp.arange(num_envs, dtype=np.uint32)
        high = high + (low < first).astype(np.uint32)  # the carry of the addition
    # Sign-extended, so that the error for a negative seed shows its value.
    higher = jnp.where(high >> 31, ~np.uint32(0), np.uint32(0))
    return jnp.stack([low, high, *[higher] * (2 * SEED_WORDS - 2)], axis=-1)


def mask_array(mask: Any, num_envs: int) -> jax.Array:
    if mask is None:
        return jnp.ones(num_envs, np.bool_)
    return check_mask(mask, num_envs, jnp.asarray)


def _old_style_shape() -> tuple[int, ...]:
    """Returns the shape of `jax.random.PRNGKey(0)`, by the default implementation: (2,), or (4,) for rbg."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape


def _is_key(seed: Any, num_envs: int) -> bool:
    if not isinstance(seed, jax.Array):
        return False
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        is_batch = seed.ndim > 0
    elif seed.dtype != np.uint32 or seed.shape[-1:] != _old_style_shape():
        return False
    else:
        is_batch = seed.ndim > 1
        if seed.shape == (num_envs,):
            raise TypeError(
                f"seed: a uint32 array of shape {seed.shape} can be an old-style key or {num_envs} seeds; "
                "pass jax.random.key(...) or int32 seeds"
            )
    if is_batch:
        raise TypeError(
            f"seed: got a batch of keys, of shape {seed.shape}; pass one key, from which a seed for each env "
            "is drawn. Under vmap, pass the keys as a mapped argument"
        )
    return True
