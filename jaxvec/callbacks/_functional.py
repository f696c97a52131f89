"""`reset` and `step`: the verbs of the JAX face, inside `jit` and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from jaxvec import _actions, _pool, _seeds
from jaxvec._errors import ActionError
from jaxvec._gate import RESET, STEP
from jaxvec._spaces import Leaf
from jaxvec._spec import PoolSpec
from jaxvec._timestep import TimeStep
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _transports
from jaxvec.callbacks._handle import Handle


def reset(
    envs: VectorEnv | Handle,
    *,
    seed: Any = None,
    mask: Any = None,
    options: dict[str, Any] | None = None,
) -> tuple[Handle, TimeStep]:
    """Resets all envs, or those of `mask`, whose rows alone change.

    Works inside `jit`, `scan` and the like, and eagerly. In a program that has stepped the pool
    already, pass the latest handle rather than the `VectorEnv`: it puts the reset after that step.

    Args:
        envs: the pool, or its latest handle.
        seed: `None`; an int (env *i* gets `seed + i`); `[num_envs]` integers; or a JAX key, from
            which each env gets a seed of its own. Arrays and keys may be traced.
        mask: `[num_envs]` bool, may be traced; `None` for all.
        options: passed to every env's `reset`; fixed when the program is traced.

    Returns:
        The handle for the next step, and the time step: reward 0 and flags false for envs reset.

    Raises:
        StaleHandleError: the handle is not the latest.
        EnvError, WorkerDiedError, EnvTimeoutError: an env failed; the pool is broken by it.
        PoolBrokenError, PoolClosedError: it was already.
        ValueError, TypeError: a bad argument; nothing was reset.

        A compiled program raises them as `jax.errors.JaxRuntimeError` with the same text; inside
        `with envs:`, or by `envs.raise_if_failed()`, they come typed.
    """
    if isinstance(envs, Handle):
        handle, sequenced = envs, True
    else:
        token = np.array([envs.pool.id, 0], np.uint32)
        handle, sequenced = Handle(token, envs.spec, envs.transport), False  # pyright: ignore[reportArgumentType]
    spec = handle.spec
    _require_same_precision(spec)
    if _is_key(seed, spec.num_envs):
        # 31 bits: some simulators take their seed as a C int.
        seed = jax.random.bits(seed, (spec.num_envs,), np.uint32) >> 1
    if not _staged(handle.token, seed, mask):
        pool, count = _pool_of(handle)
        count, rows = pool.reset(
            seeds=_seeds.expand(_to_host(seed), spec.num_envs),
            mask=_seeds.check_mask(_to_host(mask), spec.num_envs),
            options=options,
            count=count if sequenced else None,
            caller=RESET,
        )
        return _eager(handle, count, rows)
    token, rows = _transports.reset(
        handle.transport,
        spec,
        jnp.asarray(handle.token),
        _seed_words(seed, spec.num_envs),
        _mask(mask, spec.num_envs),
        sequenced=sequenced,
        options=options,
    )
    return _result(handle, token, rows)


def step(handle: Handle, action: Any) -> tuple[Handle, TimeStep]:
    """Steps every env of the handle's pool once, whether or not the result is used.

    Works inside `jit`, `scan`, `while_loop`, `fori_loop` and `cond`, and eagerly.

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
        EnvError, WorkerDiedError, EnvTimeoutError: an env failed; the pool is broken by it.
        PoolBrokenError, PoolClosedError: it was already.

        A compiled program raises them as `jax.errors.JaxRuntimeError` with the same text; inside
        `with envs:`, or by `envs.raise_if_failed()`, they come typed.
    """
    if not isinstance(handle, Handle):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"step takes the handle that jaxvec.reset or jaxvec.step returned, got {type(handle).__name__}"
        )
    spec = handle.spec
    _require_same_precision(spec)
    # To a derivative, what the env returns is a constant.
    actions = [jax.lax.stop_gradient(leaf) for leaf in _check_action(spec, action)]
    if not _staged(handle.token, *actions):
        pool, count = _pool_of(handle)
        count, rows = pool.step([np.asarray(leaf) for leaf in actions], count=count, caller=STEP)
        return _eager(handle, count, rows)
    token, rows = _transports.step(handle.transport, spec, jnp.asarray(handle.token), actions)
    return _result(handle, token, rows)


def _pool_of(handle: Handle) -> tuple[_pool.Pool, int]:
    """Returns the pool of a concrete handle, and the step count that the handle says."""
    pool_id, count = np.asarray(handle.token).tolist()
    pool = _pool.find(pool_id)
    pool.require_spec(handle.spec.fingerprint)
    return pool, count


def _check_action(spec: PoolSpec, action: Any) -> list[jax.Array]:
    """Returns the action's leaves in the order and dtypes of the spec."""

    def check(leaf: Leaf, value: Any) -> jax.Array:
        try:
            array = jnp.asarray(value)
        except (TypeError, ValueError) as error:
            raise ActionError(f"{leaf}: expected an array, got {type(value).__name__}: {error}") from error
        try:
            chex.assert_shape(array, spec.batch_shape(leaf), custom_message="env axis first")
        except AssertionError as error:
            raise ActionError(f"{leaf}: {error}") from error
        if not _actions.castable(array.dtype, leaf):
            raise ActionError(f"{leaf}: expected {leaf.stored}, got {array.dtype}")
        return array.astype(leaf.stored)

    return _actions.flatten(spec.action, action, check)


def _require_same_precision(spec: PoolSpec) -> None:
    for leaf in (*spec.action_leaves, *spec.timestep_leaves):
        if jax.dtypes.canonicalize_dtype(leaf.stored) != leaf.stored:
            raise TypeError(
                f"{leaf}: the pool was made while jax_enable_x64 was on and stores {leaf.stored}; it is off "
                "now. Set it once, before jaxvec.make"
            )


def _staged(*values: Any) -> bool:
    """Says whether the call is being traced, even if no argument is."""
    probe = jax.lax.full((), 0, np.uint32)  # a tracer wherever operations are staged out
    return any(isinstance(value, Tracer) for value in (probe, *values))


def _eager(handle: Handle, count: int, rows: Sequence[NDArray[Any]]) -> tuple[Handle, TimeStep]:
    # The rows are copies that nobody else holds, so jax may alias them.
    token, *arrays = jax.device_put([np.array([np.asarray(handle.token)[0], count], np.uint32), *rows])
    return _result(handle, token, arrays)


def _result(handle: Handle, token: jax.Array, rows: Sequence[jax.Array]) -> tuple[Handle, TimeStep]:
    return Handle(token, handle.spec, handle.transport), handle.spec.build_timestep(rows)


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


def _seed_words(seed: Any, num_envs: int) -> jax.Array:
    """Returns `[num_envs, 2]` uint32: low and high word of each seed, as `_seeds.expand`."""
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


def _mask(mask: Any, num_envs: int) -> jax.Array:
    if mask is None:
        return jnp.ones(num_envs, np.bool_)
    if not isinstance(mask, Tracer):
        return jnp.asarray(_seeds.check_mask(_to_host(mask), num_envs))
    if mask.dtype != np.bool_ or mask.shape != (num_envs,):
        raise ValueError(f"mask must be bool of shape ({num_envs},), got {mask.dtype} of shape {mask.shape}")
    return mask
