"""The `io_callback` transport: unordered calls into Python, on every platform.

Inside the callbacks there is nothing but NumPy: a jax call there can deadlock. `io_callback` puts
its inputs on a device, about 15 µs each, so everything goes in as one array of bytes. From 100 KiB
on, reading such an input deadlocks up to jax 0.10 if its value was not ready at dispatch and other
threads dispatch work; so larger inputs go in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray

from jaxvec import _pool
from jaxvec._gate import STEP
from jaxvec._spec import PoolSpec
from jaxvec.callbacks import _program

_PIECE = 64 * 1024  # bytes; well below the 100 KiB at which reading an input can deadlock


def step(
    spec: PoolSpec, token: jax.Array, actions: Sequence[jax.Array]
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Steps the token's pool when the program runs; see `_transports.step`."""
    return _call(_Step(spec), spec, [token, *actions])


def reset(
    spec: PoolSpec,
    token: jax.Array,
    seeds: jax.Array,
    mask: jax.Array,
    *,
    sequenced: bool,
    options: dict[str, Any] | None,
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Resets envs of the token's pool when the program runs; see `_transports.reset`."""
    return _call(_Reset(spec, sequenced, _program.pickled(options)), spec, [token, seeds, mask])


# JAX caches a callback by its hash and equality, hence records and not closures.


@dataclass(frozen=True)
class _Step:
    spec: PoolSpec

    def __call__(self, *pieces: Any) -> list[NDArray[Any]]:
        spec = self.spec
        (pool_id, count), *actions = _unpack(
            pieces,
            [_program.TOKEN, *(_program.array_type(spec, leaf) for leaf in spec.action_leaves)],
        )
        with _pool.serving(int(pool_id), spec.fingerprint) as pool:
            count, rows = pool.step(actions, count=int(count), caller=STEP)
        return [np.array([pool_id, count], np.uint32), *rows]


@dataclass(frozen=True)
class _Reset:
    spec: PoolSpec
    sequenced: bool
    options: bytes

    def __call__(self, *pieces: Any) -> list[NDArray[Any]]:
        num_envs = self.spec.num_envs
        (pool_id, count), seeds, mask = _unpack(
            pieces, [_program.TOKEN, np.dtype((np.int64, num_envs)), np.dtype((np.bool_, num_envs))]
        )
        with _pool.serving(int(pool_id), self.spec.fingerprint) as pool:
            count, rows = _program.reset(
                pool, int(count), seeds, mask, sequenced=self.sequenced, options=self.options
            )
        return [np.array([pool_id, count], np.uint32), *rows]


def _call(
    callback: Any, spec: PoolSpec, arrays: Sequence[jax.Array]
) -> tuple[jax.Array, Sequence[jax.Array]]:
    token, *rows = io_callback(callback, _program.results(spec), *_pack(arrays), ordered=False)
    return token, rows


def _pack(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the bytes of `arrays`, one after the other, in pieces of `[n]` uint8."""
    packed = jnp.concatenate([_as_bytes(array) for array in arrays])
    return [packed[start : start + _PIECE] for start in range(0, packed.size, _PIECE)]


def _as_bytes(array: jax.Array) -> jax.Array:
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    return jax.lax.bitcast_convert_type(array, np.uint8).reshape(-1)


def _unpack(pieces: Sequence[Any], dtypes: Sequence[np.dtype[Any]]) -> list[NDArray[Any]]:
    """Undoes `_pack`: returns an array for each of `dtypes`, whose shapes are part of them."""
    arrays = [np.asarray(piece) for piece in pieces]
    packed = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    unpacked: list[NDArray[Any]] = []
    start = 0
    for dtype in dtypes:
        base, shape = dtype.subdtype or (dtype, ())
        stop = start + prod(shape) * base.itemsize
        unpacked.append(packed[start:stop].view(base).reshape(shape))
        start = stop
    return unpacked
