"""The `io_callback` transport: unordered calls into Python, on every platform.

Callbacks use NumPy only, because calling jax inside a callback can deadlock. `io_callback` transfers each
input separately, about 15 µs each. So all inputs travel as one array of bytes, and `_packing.py` packs the
results.
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

from jaxvec._pool import registry
from jaxvec._tracing import span
from jaxvec.callbacks._call import PURE, Call, answer, pool_id_of
from jaxvec.callbacks._packing import Packing

# Up to jax 0.10, reading an input of 100 KiB or more deadlocks if its value was not ready at dispatch and
# other threads dispatch work. So larger inputs are split.
_PIECE = 64 * 1024  # bytes


def call(call: Call, *operands: jax.Array, platform: str | None) -> list[jax.Array]:
    """Adds a call to the program that is being traced; returns the results that the program reads."""
    packing = Packing.of(call.read(call.results(len(operands[0]))))
    answer = _Answer(call, len(operands[0]), len(operands[-1]), packing, platform != "cpu")
    if call.verb in PURE:
        arrays = jax.pure_callback(answer, packing.transfers, *_pack(operands))
    else:
        arrays = io_callback(answer, packing.transfers, *_pack(operands), ordered=False)
    return packing.split(arrays)


@dataclass(frozen=True)
class _Answer:
    """The host callback of a call; not a closure, as JAX caches callbacks by hash and equality."""

    call: Call
    rows: int
    sent: int
    packing: Packing  # only of results that the program reads
    on_device: bool

    def __call__(self, *pieces: Any) -> list[NDArray[Any]]:
        operands = _unpack(pieces, self.call.operands(self.rows, self.sent))
        pool_id, fresh = pool_id_of(operands[0]), self.rows if self.call.fresh else None
        with (
            jax.profiler.TraceAnnotation(f"{self.call.verb.function} (io_callback)"),
            registry.serving(pool_id, self.call.spec.fingerprint, fresh) as pool,
            span(pool.state.recorder, "io_callback"),
        ):
            if self.on_device:
                pool.state.errors_late = True
            return self.packing.pack(self.call.read(answer(self.call, pool, operands)))


def _pack(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the bytes of all arrays, concatenated, in pieces of `[n]` uint8."""
    numbers = [array.astype(np.uint8) if array.dtype == np.bool_ else array for array in arrays]
    packed = jnp.concatenate([jax.lax.bitcast_convert_type(x, np.uint8).reshape(-1) for x in numbers])
    return [packed[start : start + _PIECE] for start in range(0, packed.size, _PIECE)]


def _unpack(pieces: Sequence[Any], types: Sequence[jax.ShapeDtypeStruct]) -> list[NDArray[Any]]:
    """Returns arrays of the given types from the pieces of `_pack`."""
    arrays = [np.asarray(piece) for piece in pieces]
    packed = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    unpacked: list[NDArray[Any]] = []
    start = 0
    for each in types:
        dtype = np.dtype(each.dtype)
        stop = start + prod(each.shape) * dtype.itemsize
        unpacked.append(packed[start:stop].view(dtype).reshape(each.shape))
        start = stop
    return unpacked
