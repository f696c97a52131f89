"""The FFI transport: compiled programs call into C++, on the CPU and on CUDA. Twin of `_native/ffi.cc`.

A step, send or recv that meets with nothing unusual never comes to Python. Everything else does:
`_serve` answers other verbs, the pools without the native hand-off, and every call that ends in an error.
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
from jaxvec._dispatch.engine import Status
from jaxvec._dispatch.move import VERBS
from jaxvec._memory import pinned
from jaxvec._native.interrupts import raise_since
from jaxvec._pool import registry
from jaxvec._tracing import span
from jaxvec.callbacks import _call
from jaxvec.callbacks._call import PURE, Call, annotate
from jaxvec.callbacks._packing import WORD, Packing

_OLDEST = 1  # version of the FFI that runtimes still take: 1000 * major + minor
_TARGET = "jaxvec_call"
_PACKED = ("cuda",)  # platforms whose handler has results packed


def call(call: Call, *operands: jax.Array, platform: str | None) -> Sequence[jax.Array]:
    """Puts a call into the program that is being traced; see `Call` for operands and results.

    Returns:
        The results that the program reads.
    """
    reason = reason_unavailable()
    if reason is not None:
        raise _native.NativeUnavailableError(reason)
    if platform == "cpu":
        _make_synchronous(operands[0])
    attributes: dict[str, Any] = {
        "fingerprint": np.int64(call.spec.fingerprint),
        "verb": np.uint32(call.verb),
        "fresh": np.bool_(call.fresh),
        "extra": np.frombuffer(pickle.dumps((call.extra, call.arguments, call.answers)), np.uint8),
    }
    types = call.results(operands[0].shape[0])
    if platform not in _PACKED:
        return call.read(_bind(call, types, operands, attributes))
    packing = Packing.of(types)
    arrays = _bind(call, packing.transfers, operands, {**attributes, "layout": _layout(packing)})
    return call.read(packing.split(arrays))


def prepare(call: Call, operands: Sequence[Any], *, platform: str | None, copies: int) -> None:
    """Page-locks what a call of a program takes on GPUs, when the program is lowered.

    Within the call, that could wait for a GPU that waits for this one, at a collective.

    Args:
        call: that the program makes.
        operands: their types.
        platform: that the program is for.
        copies: how many devices run it, each for itself.
    """
    if platform not in _PACKED or reason_unavailable() is not None:
        return
    try:
        devices = len(jax.local_devices(backend=platform))
    except RuntimeError:
        return  # it will run elsewhere
    for pool in registry.of_spec(call.spec.fingerprint):
        pool.pin()
    arrays = [*operands, *Packing.of(call.results(operands[0].shape[0])).transfers]
    sizes = np.array([math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in arrays], np.uint64)
    # On each device, one call begins while the copies of the one before are still under way.
    calls = 2 * min(copies, devices)
    with suppress(pinned.PinningError), pinned.context():
        _native.load().prepare_cuda(calls, sizes)


def _bind(
    call: Call,
    types: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    attributes: dict[str, Any],
) -> Sequence[jax.Array]:
    has_side_effect = call.verb not in PURE
    return jax.ffi.ffi_call(_TARGET, types, has_side_effect=has_side_effect)(*operands, **attributes)


def _layout(packing: Packing) -> NDArray[np.int64]:
    """Tells C++, for each result: where it begins in the packed array or -1, dtype, rank, and dimensions."""
    layout: list[int] = []
    for each, place in zip(packing.types, packing.places, strict=True):
        dtype = np.dtype(each.dtype)
        start = -1 if place is None else place * WORD
        layout += [start, ord(dtype.kind) + 256 * dtype.itemsize, len(each.shape), *each.shape]
    return np.array(layout, np.int64)


@cache
def reason_unavailable() -> str | None:
    """Registers the handlers with XLA, once; says why they can't be used, or `None`.

    A handler made for a newer FFI than the runtime's may take the whole CPU backend down, so the
    version is compared before anything is registered.
    """
    native = _native.ext
    if native is None:
        return _native.reason_unavailable()
    ours, theirs = native.FFI_VERSION, _runtime_version()
    if not _OLDEST <= ours <= theirs:
        return (
            f"the native library was built for XLA FFI {_format(ours)}, but this jaxlib speaks "
            f"{_format(_OLDEST)} to {_format(theirs)}; reinstall jaxvec"
        )
    try:
        # JAX keeps those of a platform that is not there, so it does not matter when it comes.
        for platform, handler in (("cpu", native.FFI_CALL), ("CUDA", native.FFI_CUDA_CALL)):
            jax.ffi.register_ffi_target(_TARGET, handler, platform=platform)
    except Exception as error:
        return f"jax refused the FFI handlers: {type(error).__name__}: {error}"
    native.set_python(_serve, _fail)
    atexit.register(native.set_python, None, None)  # no Python for a program that runs on
    return None


def _make_synchronous(token: jax.Array) -> None:
    """Puts a host callback into the program, in a branch that is never taken.

    On the CPU, JAX returns from a program with host callbacks when it is done, but may dispatch any
    other to a thread of its own. There Ctrl-C would not reach the wait for a hanging env, an error
    would come up at some later line, and closing a pool after the call would cut off its steps.
    """
    never = token[0, 0] == 0  # pools are counted from 1
    jax.lax.cond(never, lambda: io_callback(_nothing, None), lambda: None)


def _nothing() -> None:
    pass


def _fail(error: BaseException, pool_id: int, under_way: bool) -> bytes:
    """Notes why a call ends, be it Ctrl-C or `sys.exit` of a signal's handler, and returns what XLA is told.

    It may be called twice for one call.
    """
    registry.keep(pool_id, error, under_way=under_way)
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
) -> None:
    """Answers a call of a compiled program; see `Call` of call.h. What it raises comes to `_fail`."""
    if not operands or not operands[0].ndim:
        raise TypeError("a call without operands, or whose first is no token")
    token = operands[0]
    _check_types([token], [jax.ShapeDtypeStruct((len(token), 3), np.uint32)])
    pool_id, rows = _call.pool_id_of(token), len(token) if fresh else None
    with (
        annotate(VERBS[verb].function, "FFI by Python"),
        registry.serving(pool_id, fingerprint, rows) as pool,
        span(pool.state.recorder, "FFI by Python"),
    ):
        if on_device:
            pool.state.errors_late = True
            pool.pin()
        unread = frozenset(i for i, each in enumerate(results) if not len(each))
        call = Call(VERBS[verb], pool.spec, "ffi", fresh, *pickle.loads(extra), unread=unread)
        _check_types(operands, call.operands(len(token), operands[-1].shape[0] if operands[-1].ndim else 0))
        _check_types(results, call.results(len(token)))
        interrupt = partial(raise_since, interrupts)
        if status == Status.DONE:  # asked because of a signal only; the pool is not broken by it
            interrupt()
        elif status == Status.UNDER_WAY:
            move = _call.move_of(call, pool, token)
            pool.end(move, waited=waited_ns / 1e9, interrupt=interrupt, out=results[1:])
            results[0][:] = _call.token_of(pool, move)
        else:
            interrupt()
            _call.answer(call, pool, operands, results)


def _check_types(buffers: Sequence[NDArray[Any]], types: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Checks what `Pool::step` has checked of the calls that it took on itself."""
    theirs = [(buffer.dtype, buffer.shape) for buffer in buffers]
    ours = [(each.dtype, each.shape) for each in types]
    if theirs != ours:
        raise TypeError(f"a call with buffers of {theirs} can't be right for the pool, whose are {ours}")


def _runtime_version() -> int:
    """Returns the version of the FFI that the jaxlib in use speaks."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return 1000 * int(found["MAJOR"]) + int(found["MINOR"])


def _format(version: int) -> str:
    return f"{version // 1000}.{version % 1000}"
