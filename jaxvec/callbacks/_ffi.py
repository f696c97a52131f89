"""The FFI transport: compiled programs call into C++ on the CPU and on CUDA; see `_native/ffi.cc`.

C++ handles ordinary steps, sends and receives without Python. Envs in this process are the exception: C++
steps them with the GIL, and leaves sends and receives to Python. `_serve` handles the other verbs, pools with
the portable dispatch, and every call that ends in an error.
"""

from __future__ import annotations

import atexit
import math
import pickle
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray

from jaxvec import _native
from jaxvec._engine.engine import Status
from jaxvec._engine.move import VERBS
from jaxvec._memory import pinned
from jaxvec._native.interrupts import raise_since
from jaxvec._pool import registry
from jaxvec._tracing import span
from jaxvec.callbacks import _call
from jaxvec.callbacks._handle import pool_id_of
from jaxvec.callbacks._packing import Packing

_MIN_VERSION = 1  # oldest FFI version that runtimes accept: 1000 * major + minor
_TARGET = "jaxvec_call"
_PACKED = ("cuda",)  # platforms where the handler returns packed results


def call(call: _call.Call, *operands: jax.Array, platform: str | None) -> Sequence[jax.Array]:
    """Adds a call to the program that is being traced; returns the results that the program reads."""
    reason = reason_unavailable()
    if reason is not None:
        raise _native.NativeUnavailableError(reason)
    if platform == "cpu" and jax.config.read("jax_cpu_enable_async_dispatch"):
        _make_synchronous(operands[0])
    attributes: dict[str, Any] = {
        "fingerprint": np.int64(call.spec.fingerprint),
        "verb": np.uint32(call.verb),
        "fresh": np.bool_(call.fresh),
        "extra": np.frombuffer(call.pickled, np.uint8),
    }
    types = call.results(operands[0].shape[0])
    has_side_effect = not call.verb.traits.is_pure
    if platform not in _PACKED:
        bound = jax.ffi.ffi_call(_TARGET, types, has_side_effect=has_side_effect)
        return call.read(bound(*operands, **attributes))
    packing = Packing.of(types)
    bound = jax.ffi.ffi_call(_TARGET, packing.transfers, has_side_effect=has_side_effect)
    return call.read(packing.split(bound(*operands, **attributes, layout=packing.layout)))


def prepare(call: _call.Call, operands: Sequence[Any], *, platform: str | None, copies: int) -> None:
    """Page-locks, at lowering, the memory that a call needs on GPUs.

    `copies` is the number of devices that each run the whole program. During the call, page-locking could
    wait for a GPU that in turn waits for this one at a collective.
    """
    if platform not in _PACKED or reason_unavailable() is not None:
        return
    try:
        devices = len(jax.local_devices(backend=platform))
    except RuntimeError:
        return  # no such device here: the program will run elsewhere
    for pool in registry.of_spec(call.spec.fingerprint):
        pool.pin()
    arrays = [*operands, *Packing.of(call.results(operands[0].shape[0])).transfers]
    sizes = np.array([math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays], np.uint64)
    # On each device, one call may start while the copies of the previous one are still running.
    calls = 2 * min(copies, devices)
    with suppress(pinned.PinningError), pinned.context():
        _native.load().prepare_cuda(calls, sizes)


@cache
def reason_unavailable() -> str | None:
    """Registers the handlers with XLA, once. Returns the reason if they are unavailable, else `None`."""
    native = _native.ext
    if native is None:
        return _native.reason_unavailable()
    # A handler built for a newer FFI than the runtime's can take down the whole CPU backend.
    built_for = native.FFI_VERSION
    runtime = _runtime_version()
    if not _MIN_VERSION <= built_for <= runtime:
        return (
            f"the native library was built for XLA FFI {_format(built_for)}, but this jaxlib supports "
            f"{_format(_MIN_VERSION)} to {_format(runtime)}; reinstall jaxvec"
        )
    try:
        # JAX keeps the handlers of a platform that is not initialised yet.
        for platform, handler in (("cpu", native.FFI_CALL), ("CUDA", native.FFI_CUDA_CALL)):
            jax.ffi.register_ffi_target(_TARGET, handler, platform=platform)
    except Exception as error:
        return f"jax rejected the FFI handlers: {type(error).__name__}: {error}"
    native.set_python(_serve, _fail)
    atexit.register(native.set_python, None, None)  # a program may outlive Python
    return None


def _make_synchronous(token: jax.Array) -> None:
    """Adds a host callback to the program, in a branch that is never taken.

    On the CPU, JAX blocks until a program with host callbacks is done. It may run any other program on one
    of its own threads: then Ctrl-C could not interrupt the wait for a hanging env, an error would surface on
    some later line, and closing a pool after the call would cut off its steps. Up to jax 0.10, JAX does not
    keep such programs in its compilation cache. Without asynchronous dispatch, no callback is needed.
    """
    never = token[0, 0] == 0  # pool ids start at 1
    jax.lax.cond(never, lambda: io_callback(_nothing, None), lambda: None)


def _nothing() -> None:
    pass


def _fail(error: BaseException, pool_id: int, under_way: bool) -> bytes:
    """Records the exception that ends a call, and returns the message for XLA. May run twice for a call."""
    if (pool := registry.get(pool_id)) is not None:
        pool.state.keep_error(error, under_way=under_way)
    return f"{type(error).__name__}: {error}".encode(errors="replace")


def _serve(
    *,
    verb: int,
    status: int,
    fresh: bool,
    extra: bytes,
    fingerprint: int,
    waited_ns: int,
    operands: Sequence[NDArray[Any]],
    results: Sequence[NDArray[Any]],
    interrupts: int,
    on_device: bool,
    failure: BaseException | None,
) -> None:
    """Runs a call of a compiled program; see `Call` in call.h. C++ passes exceptions to `_fail`.

    `failure` is the exception that has ended a step of envs in this process.
    """
    if not operands or operands[0].ndim != 2:
        raise TypeError("the operands of an FFI call must start with a handle's token; recompile the program")
    token = operands[0]
    pool_id = pool_id_of(token)
    rows = len(token) if fresh else None
    with (
        jax.profiler.TraceAnnotation(f"{VERBS[verb].function} (by Python)"),
        registry.serving(pool_id, fingerprint, rows) as pool,
        span(pool.engine.recorder, "by Python"),
    ):
        if on_device:
            pool.state.errors_late = True
            pool.pin()
        unread = frozenset(i for i, result in enumerate(results) if not len(result))
        call = _call.Call(VERBS[verb], pool.spec, "ffi", fresh, *pickle.loads(extra), unread=unread)
        _check_types(operands, call.operands(len(token), operands[-1].shape[0] if operands[-1].ndim else 0))
        _check_types(results, call.results(len(token)))
        interrupt = partial(raise_since, interrupts)
        if status == Status.DONE:  # C++ stopped only for a signal, which does not break the pool
            interrupt()
        elif failure is not None:
            with pool.state.breaking():
                raise failure
        elif status == Status.UNDER_WAY:
            move = _call.move_of(call, pool, token)
            pool.end(move, waited=waited_ns / 1e9, interrupt=interrupt, out=results[1:])
            results[0][:] = _call.token_of(pool, move)
        else:
            interrupt()
            _call.answer(call, pool, operands, results)


def _check_types(buffers: Sequence[NDArray[Any]], types: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Checks that XLA passes what the call was traced with.

    C++ checks the calls that it handles by `Engine::fits`. The other checks of operands are those of the
    functions for programs, when they are traced.
    """
    got = [(buffer.dtype, buffer.shape) for buffer in buffers]
    expected = [(result_type.dtype, result_type.shape) for result_type in types]
    if got != expected:
        raise TypeError(f"FFI buffers {got} do not match the pool's {expected}; recompile the program")


def _runtime_version() -> int:
    """Returns the FFI version of the installed jaxlib."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    versions = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return 1000 * int(versions["MAJOR"]) + int(versions["MINOR"])


def _format(version: int) -> str:
    return f"{version // 1000}.{version % 1000}"
