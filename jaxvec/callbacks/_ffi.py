"""The FFI transport: compiled programs call into C++, on the CPU. Twin of `_native/ffi.cc`.

A step that meets with nothing unusual never comes to Python. Everything else does: `_answer` serves
resets, the pools without the native hand-off, and every call that ends in an error.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import re
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray

from jaxvec import _gate, _pool
from jaxvec._handoff import STEP
from jaxvec._native import interrupts, library
from jaxvec._native.gate import Array
from jaxvec._spec import PoolSpec
from jaxvec.callbacks import _program

_OLDEST = 1  # version of the FFI that runtimes still take: 1000 * major + minor
_TARGETS = {"jaxvec_step": "jaxvec_ffi_step", "jaxvec_reset": "jaxvec_ffi_reset"}


def step(
    spec: PoolSpec, token: jax.Array, actions: Sequence[jax.Array]
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Steps the token's pool when the program runs; see `_transports.step`."""
    return _call("jaxvec_step", spec, [token, *actions])


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
    return _call(
        "jaxvec_reset",
        spec,
        [token, seeds, mask],
        sequenced=np.bool_(sequenced),
        options=np.frombuffer(_program.pickled(options), np.uint8),
    )


@cache
def reason_unavailable() -> str | None:
    """Registers the handlers with XLA, once; says why they can't be used, or `None`.

    A handler made for a newer FFI than the runtime's may take the whole CPU backend down, so the
    version is compared before anything is registered.
    """
    try:
        native = library.declare(
            jaxvec_ffi_version=(ctypes.c_uint32, []),
            jaxvec_sizeof_call=(ctypes.c_uint32, []),
            jaxvec_sizeof_python=(ctypes.c_uint32, []),
            jaxvec_set_python=(None, [ctypes.c_void_p]),
            jaxvec_fail=(None, [ctypes.c_void_p, ctypes.c_char_p]),
        )
        library.require_size(_Call, native.jaxvec_sizeof_call())
        library.require_size(_Python, native.jaxvec_sizeof_python())
    except library.NativeUnavailableError as error:
        return str(error)
    ours, theirs = native.jaxvec_ffi_version(), _runtime_version()
    if not _OLDEST <= ours <= theirs:
        return (
            f"the native library was built for XLA FFI {_format(ours)}, but this jaxlib speaks "
            f"{_format(_OLDEST)} to {_format(theirs)}; reinstall jaxvec"
        )
    try:
        for target, symbol in _TARGETS.items():
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(native, symbol)), platform="cpu")
    except Exception as error:
        return f"jax refused the FFI handlers: {type(error).__name__}: {error}"
    native.jaxvec_set_python(ctypes.byref(_PYTHON))
    atexit.register(native.jaxvec_set_python, None)  # no Python for a program that runs on
    return None


def _call(
    target: str, spec: PoolSpec, operands: Sequence[jax.Array], **attributes: Any
) -> tuple[jax.Array, Sequence[jax.Array]]:
    reason = reason_unavailable()
    if reason is not None:
        raise library.NativeUnavailableError(reason)
    _make_synchronous(operands[0])
    call = jax.ffi.ffi_call(target, _program.results(spec), has_side_effect=True)
    token, *rows = call(*operands, fingerprint=np.int64(spec.fingerprint), **attributes)
    return token, rows


def _make_synchronous(token: jax.Array) -> None:
    """Puts a host callback into the program, in a branch that is never taken.

    On the CPU, JAX returns from a program with host callbacks when it is done, but may dispatch any
    other to a thread of its own. There Ctrl-C would not reach the wait for a hanging env, an error
    would come up at some later line, and closing a pool after the call would cut off its steps.
    """
    never = token[0] == 0  # pools are counted from 1
    jax.lax.cond(never, lambda: io_callback(_nothing, None), lambda: None)


def _nothing() -> None:
    pass


class _Call(ctypes.Structure):
    """`Call` of ffi.h."""

    _fields_ = [
        ("operation", ctypes.c_uint32),
        ("under_way", ctypes.c_uint32),
        ("sequenced", ctypes.c_uint32),
        ("num_options", ctypes.c_uint32),
        ("fingerprint", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
        ("options", ctypes.c_void_p),
        ("operands", ctypes.POINTER(Array)),
        ("results", ctypes.POINTER(Array)),
        ("num_operands", ctypes.c_uint32),
        ("num_results", ctypes.c_uint32),
        ("interrupts", ctypes.c_uint32),
        ("error", ctypes.c_void_p),
        ("exception", ctypes.c_void_p),
    ]


class _Python(ctypes.Structure):
    """`Python` of ffi.h."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "answer",
            "ensure_gil",
            "release_gil",
            "run_signal_handlers",
            "take_exception",
            "keyboard_interrupt",
        )
    ]


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
def _answer(address: int) -> int:
    """Answers the call at `address`; returns 1, or 0 if it failed, and says why."""
    try:
        _serve(_Call.from_address(address))
    except BaseException as error:  # also Ctrl-C: the program must end, and the pool keeps the cause
        library.load().jaxvec_fail(address, f"{type(error).__name__}: {error}".encode(errors="replace"))
        return 0
    return 1


_PYTHON = _Python(
    *(
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (
            _answer,
            ctypes.pythonapi.PyGILState_Ensure,
            ctypes.pythonapi.PyGILState_Release,
            ctypes.pythonapi.PyErr_CheckSignals,
            ctypes.pythonapi.PyErr_Fetch,
        )
    ),
    id(KeyboardInterrupt),
)


def _interrupt(call: _Call) -> None:
    """Raises what a signal handler raised before we were asked, or would have raised here."""
    if call.exception:
        raise ctypes.cast(call.exception, ctypes.py_object).value
    interrupts.raise_since(call.interrupts)


def _serve(call: _Call) -> None:
    operands = [_view(call.operands[i]) for i in range(call.num_operands)]
    out = [_view(call.results[i]) for i in range(call.num_results)]
    _require_types([*operands[:1], *out[:1]], [_program.TOKEN, _program.TOKEN])
    token, next_token = operands.pop(0), out.pop(0)
    pool_id, count = token.tolist()
    with _pool.serving(pool_id, call.fingerprint) as pool:
        spec = pool.spec
        _require_types(out, [_program.array_type(spec, leaf) for leaf in spec.timestep_leaves])
        if call.operation == STEP:
            _require_types(operands, [_program.array_type(spec, leaf) for leaf in spec.action_leaves])
            if call.under_way:
                interrupt = partial(_interrupt, call)
                count, _ = pool.end_step(
                    caller=_gate.STEP, waited=call.waited_ns / 1e9, interrupt=interrupt, out=out
                )
            else:
                _interrupt(call)
                count, _ = pool.step(operands, count=count, caller=_gate.STEP, out=out)
        else:
            num_envs = spec.num_envs
            _require_types(operands, [np.dtype((np.uint32, (num_envs, 2))), np.dtype((np.bool_, num_envs))])
            _interrupt(call)
            words, mask = operands
            count, _ = _program.reset(
                pool,
                count,
                words.view(np.int64).reshape(num_envs),
                mask,
                sequenced=bool(call.sequenced),
                options=ctypes.string_at(call.options, call.num_options),
                out=out,
            )
    next_token[:] = pool_id, count


def _view(array: Array) -> NDArray[Any]:
    """Returns the memory of a program's operand or result; it is there as long as the call lasts."""
    if not array.dtype:
        raise TypeError("a buffer has a dtype that NumPy does not have")
    dtype = np.dtype(f"{chr(array.dtype % 256)}{array.dtype // 256}")
    shape = tuple(array.dims[axis] for axis in range(array.rank))
    memory: Any = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(array.data or 0)
    return np.ndarray(shape, dtype, memory)


def _require_types(buffers: Sequence[NDArray[Any]], types: Sequence[np.dtype[Any]]) -> None:
    """Checks what `Pool::step` has checked of the calls that it took on itself."""
    theirs = [(buffer.dtype, buffer.shape) for buffer in buffers]
    ours = [(dtype.base, dtype.shape) for dtype in types]
    if theirs != ours:
        raise TypeError(f"a call with buffers of {theirs} can't be right for the pool, whose are {ours}")


def _runtime_version() -> int:
    """Returns the version of the FFI that the jaxlib in use speaks."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return 1000 * int(found["MAJOR"]) + int(found["MINOR"])


def _format(version: int) -> str:
    return f"{version // 1000}.{version % 1000}"
