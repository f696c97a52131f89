"""The `io_callback` transport: unordered calls into Python, on every platform.

The program joins its operands to one array, and splits the array of results (`_packing.py`). On the host, C++
makes the call, as for FFI (`call_packed`), so an ordinary step runs little Python.
docs/developers/decisions.md has the costs. Callbacks use NumPy only, because calling jax inside a
callback can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.core
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir
from numpy.typing import NDArray

from jaxvec import _native
from jaxvec._pool import registry
from jaxvec._tracing import span
from jaxvec.callbacks._call import Call, answer
from jaxvec.callbacks._effects import EFFECT
from jaxvec.callbacks._handle import pool_id_of
from jaxvec.callbacks._packing import WORD, Packing

# Up to jax 0.10, reading an input of 100 KiB or more of an `io_callback` deadlocks if its value was not ready
# at dispatch and other threads dispatch work. So larger inputs are split.
_PIECE = 64 * 1024  # bytes


def call(call: Call, *operands: jax.Array, platform: str | None, native: bool) -> list[jax.Array]:
    """Adds a call to the program that is being traced; returns the results that the program reads.

    With `native`, C++ answers the call, and asks Python by the functions that `_ffi.py` has set.
    """
    rows = len(operands[0])
    to_host = Packing.of(call.operands(rows, len(operands[-1])), pack_all=True)
    to_program = Packing.of(call.results(rows))  # unread results have no rows
    callback = _Callback(call, to_host, to_program, platform != "cpu", native)
    words = to_host.join(operands)
    step = _PIECE // WORD
    pieces = [words[start : start + step] for start in range(0, words.size, step)]
    return call.read(to_program.split(_callback_p.bind(*pieces, callback=callback)))


@dataclass(frozen=True)
class _Callback:
    """The host callback of a call; not a closure, as JAX caches callbacks by hash and equality."""

    call: Call
    to_host: Packing
    to_program: Packing
    on_device: bool
    native: bool

    @cached_property
    def _name(self) -> str:
        return f"{self.call.verb.function} (io_callback)"

    @cached_property
    def _answer(self) -> Callable[[Sequence[NDArray[Any]], Sequence[NDArray[Any]]], None]:
        """Function of the transferred operands and results that makes the call: C++, or Python without it."""
        call = self.call
        types = [*self.to_host.types, *self.to_program.types]
        if not self.native or any(np.dtype(struct.dtype).kind not in "biufc" for struct in types):
            return self._answer_in_python
        fields = int(call.verb), call.fresh, call.pickled, call.spec.fingerprint
        return partial(_native.load().call_packed, *fields, self.to_host.layout, self.to_program.layout)

    def __call__(self, *pieces: Any) -> list[NDArray[Any]]:
        # These arrays may be the program's memory, which is only valid during the call.
        words = np.asarray(pieces[0]) if len(pieces) == 1 else np.concatenate(pieces)
        if self.on_device and (pool := registry.get(int(words[0]))) is not None:
            pool.state.errors_late = True
        results = [np.empty(struct.shape, struct.dtype) for struct in self.to_program.transfers]
        with jax.profiler.TraceAnnotation(self._name):
            self._answer([words], results)
        return results

    def _answer_in_python(self, words: Sequence[NDArray[Any]], results: Sequence[NDArray[Any]]) -> None:
        operands = self.to_host.views(words)
        pool_id = pool_id_of(operands[0])
        fresh = len(operands[0]) if self.call.fresh else None
        with (
            registry.serving(pool_id, self.call.spec.fingerprint, fresh) as pool,
            span(pool.engine.recorder, "by Python"),
        ):
            answer(self.call, pool, operands, self.to_program.views(results))


# The primitive of a callback that takes and returns NumPy arrays. `io_callback` makes a JAX array of each
# input instead, which takes most of its time. It is used for programs on several devices, because their
# callbacks need shardings that are private to JAX, and without `emit_python_callback`, which JAX calls
# temporary.
_emit: Any = getattr(mlir, "emit_python_callback", None)
_callback_p = Primitive("jaxvec_callback")
_callback_p.multiple_results = True


@_callback_p.def_effectful_abstract_eval
def _trace(*pieces: Any, callback: _Callback) -> tuple[list[Any], set[Any]]:
    results = [jax.core.ShapedArray(struct.shape, struct.dtype) for struct in callback.to_program.transfers]
    return results, set() if callback.call.verb.traits.is_pure else {EFFECT}


def _lower(ctx: Any, *pieces: Any, callback: _Callback) -> Any:
    pure = callback.call.verb.traits.is_pure
    devices = ctx.module_context.axis_context
    if _emit is not None and getattr(devices, "num_devices", 0) in (None, 1):
        types = ctx.avals_in, ctx.avals_out
        return _emit(ctx, callback, None, list(pieces), *types, has_side_effect=not pure)[0]

    def by_jax(*pieces: jax.Array) -> Any:
        if pure:
            return jax.pure_callback(callback, callback.to_program.transfers, *pieces)
        return io_callback(callback, callback.to_program.transfers, *pieces, ordered=False)

    return mlir.lower_fun(by_jax, multiple_results=True)(ctx, *pieces)


mlir.register_lowering(_callback_p, _lower, cacheable=False)
