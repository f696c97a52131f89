"""Chooses how a compiled program reaches its pool, by name and by platform."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from jaxvec._native.library import NativeUnavailableError
from jaxvec._spec import PoolSpec
from jaxvec.callbacks import _ffi, _io

NAMES = ("auto", "ffi", "io_callback")

_logger = logging.getLogger("jaxvec")


def choose(name: str) -> str:
    """Returns what a handle should say: `"auto"` only where there is something to choose.

    Raises:
        NativeUnavailableError: `"ffi"` was asked for and can't be had; says why.
        ValueError: there is no such transport.
    """
    if name not in NAMES:
        raise ValueError(f"transport must be one of {', '.join(NAMES)}, not {name!r}")
    if name == "io_callback":
        return name
    reason = _ffi.reason_unavailable()
    if reason is None:
        return name
    if name == "ffi":
        raise NativeUnavailableError(reason)
    _logger.info("io_callback transport: %s", reason)
    return "io_callback"


def step(
    transport: str, spec: PoolSpec, token: jax.Array, actions: Sequence[jax.Array]
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Steps the token's pool when the program runs.

    Args:
        transport: as `choose` returned it.
        spec: of the pool.
        token: see `Handle`.
        actions: `[num_envs, ...]`, in the order and stored dtypes of `spec.action_leaves`.

    Returns:
        The next token, and the leaves of the time step in the order of `spec.timestep_leaves`.
    """
    return _call(transport, partial(_ffi.step, spec), partial(_io.step, spec), token, actions)


def reset(
    transport: str,
    spec: PoolSpec,
    token: jax.Array,
    seeds: jax.Array,
    mask: jax.Array,
    *,
    sequenced: bool,
    options: dict[str, Any] | None,
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Resets envs of the token's pool when the program runs.

    Args:
        transport, spec, token: as in `step`.
        seeds: `[num_envs, 2]` uint32, low and high word of each, as `_seeds.expand`.
        mask: `[num_envs]` bool.
        sequenced: whether the token's step count must be the pool's.
        options: for the envs' `reset`, fixed when the program is traced.

    Returns:
        As `step`.
    """
    kwargs: dict[str, Any] = {"sequenced": sequenced, "options": options}
    return _call(
        transport,
        partial(_ffi.reset, spec, **kwargs),
        partial(_io.reset, spec, **kwargs),
        token,
        seeds,
        mask,
    )


def _call(transport: str, ffi: Any, io: Any, *operands: Any) -> tuple[jax.Array, Sequence[jax.Array]]:
    if transport == "auto":  # decided when the program is lowered
        return jax.lax.platform_dependent(*operands, cpu=ffi, default=io)
    return (ffi if transport == "ffi" else io)(*operands)
