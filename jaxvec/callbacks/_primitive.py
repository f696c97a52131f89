"""The JAX primitive behind all calls: tracing, batching, dead code elimination, lowering and eager execution.

`_functions.py` binds the primitive with a `Call`; `_ffi.py` and `_io_callback.py` are the transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from jaxvec._engine.move import Verb
from jaxvec._errors import EnvIdError
from jaxvec._native import NativeUnavailableError
from jaxvec._pool import registry
from jaxvec._util import logger
from jaxvec.callbacks import _ffi, _io_callback
from jaxvec.callbacks._call import Call, answer
from jaxvec.callbacks._effects import EFFECT, PURE_EFFECT
from jaxvec.callbacks._handle import pool_id_of


def choose_transport(name: str) -> Any:
    """Returns the transport for handles, where `"auto"` becomes `"io_callback"` if FFI is not available."""
    if name == "io_callback":
        return name
    reason = _ffi.reason_unavailable()
    if reason is None:
        return name
    if name == "ffi":
        raise NativeUnavailableError(reason)
    logger.info("io_callback transport: %s", reason)
    return "io_callback"


_FFI_PLATFORMS = ("cpu", "cuda")  # the native library has handlers for these

# All operands and results have the env axis first, so batching turns a call into one call for more envs.
# Derivatives treat the results of envs as constants: `bind` stops the gradients of the operands.
_call_p = Primitive("jaxvec_call")
_call_p.multiple_results = True


# Takes nothing, so it is evaluated at once, without a backend, unless all of the program is traced.
_probe_p = Primitive("jaxvec_probe")
_probe_p.def_impl(lambda: np.zeros(()))
_probe_p.def_abstract_eval(lambda: jax.core.ShapedArray((), np.dtype(np.float32)))


def in_program() -> bool:
    """Returns True while JAX traces a program, as in `jit` and `scan`, but not in `grad` or `vmap` alone."""
    return isinstance(_probe_p.bind(), jax.core.Tracer)


def bind(call: Call, *operands: Any) -> list[jax.Array]:
    """Runs a call, or adds it to the program that is being traced; see `Call` for the operands."""
    arrays = [jax.lax.stop_gradient(jnp.asarray(operand)) for operand in operands]
    traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    shardings = [jax.typeof(array).sharding for array in arrays] if traced else []
    mesh = next(
        (sharding.mesh for sharding in shardings if AxisType.Explicit in sharding.mesh.axis_types), None
    )
    if mesh is None:
        return _call_p.bind(*arrays, call=call)
    # One device runs the call. The results are sharded like the handle, or like the states of a simulation.
    like = shardings[1 if call.verb is Verb.SIMULATE else 0]
    rows = len(arrays[0])
    whole, split = (NamedSharding(mesh, PartitionSpec(axis)) for axis in (None, like.spec[0]))
    results = _call_p.bind(*(reshard(array, whole) for array in arrays), call=call)
    on_mesh = [len(result) == rows and jax.typeof(result).sharding.mesh == mesh for result in results]
    return [reshard(result, split) if on else result for result, on in zip(results, on_mesh, strict=True)]


@_call_p.def_impl
def _run_eagerly(*operands: jax.Array, call: Call) -> list[jax.Array]:
    arrays = [np.asarray(operand) for operand in operands]
    fresh = len(arrays[0]) if call.fresh else None
    pool = registry.find(pool_id_of(arrays[0]), call.spec.fingerprint, fresh)
    # The results are copies without another reference, so jax may alias them.
    with jax.profiler.TraceAnnotation(f"{call.verb.function} (eager)"):
        results = jax.device_put(call.read(answer(call, pool, arrays)))
    if call.verb is Verb.RESET and _on_gpu(results[0]):
        # Programs on the GPU will follow. Page-locking inside a program can deadlock with another GPU that
        # waits for this one at a collective, so it is done now.
        pool.pin()
    return results


def _on_gpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "gpu"


@_call_p.def_effectful_abstract_eval
def _trace(*operands: Any, call: Call) -> tuple[list[Any], set[Any]]:
    token = operands[0]
    # Under shard_map each device has its own handle, and the results vary over the same mesh axes.
    varying = {name: getattr(token, name) for name in ("vma", "manual_axis_type") if hasattr(token, name)}

    def result(struct: jax.ShapeDtypeStruct) -> Any:
        sharding = NamedSharding(token.sharding.mesh, PartitionSpec(*[None] * len(struct.shape)))
        return jax.core.ShapedArray(struct.shape, np.dtype(struct.dtype), sharding=sharding, **varying)

    results = [result(struct) for struct in call.read(call.results(token.shape[0]))]
    return results, {PURE_EFFECT if call.verb.traits.is_pure else EFFECT}


def _batch(operands: Sequence[Any], axes: Sequence[int | None], *, call: Call) -> tuple[list[Any], list[int]]:
    if call.whole:
        raise NotImplementedError(
            f"vmap of {call.verb.function}: a pool with batch_size can't be split over vmapped instances; "
            "make the pool without batch_size"
        )
    instances = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)

    def flatten(operand: Any, axis: int | None) -> Any:
        if axis is None:
            operand = jnp.broadcast_to(operand, (instances, *operand.shape))
        else:
            operand = jnp.moveaxis(operand, axis, 0)
        return operand.reshape(instances * operand.shape[1], *operand.shape[2:])

    token, *rest = (flatten(operand, axis) for operand, axis in zip(operands, axes, strict=True))
    if call.fresh:  # distribute the pool's envs over the instances
        token = token.at[:, 1].set(jnp.arange(token.shape[0], dtype=token.dtype))
    results = _call_p.bind(token, *rest, call=call)
    rows = token.shape[0] // instances
    return [result.reshape(instances, rows, *result.shape[1:]) for result in results], [0] * len(results)


batching.primitive_batchers[_call_p] = _batch


def _drop_unread(used: list[bool], *liveness_and_eqn: Any) -> tuple[list[bool], Any]:
    """Removes unread results, such as images of `final_obs`, so that they are not copied.

    JAX applies this rule at compile time, also to the bodies of `scan` and the branches of `cond`, but not to
    `while_loop`. Since 0.12 it passes the liveness of the inputs, too.
    """
    eqn = liveness_and_eqn[-1]
    call: Call = eqn.params["call"]
    if call.verb.traits.is_pure and not any(used):
        return [False] * len(eqn.invars), None
    if all(used) or not call.verb.traits.returns_timestep:
        return [True] * len(eqn.invars), eqn
    numbers = call.read(range(1 + len(call.spec.timestep_leaves)))
    unread = call.unread | {number for number, is_used in zip(numbers, used, strict=True) if not is_used}
    outputs = [var for var, is_used in zip(eqn.outvars, used, strict=True) if is_used]
    params = {"call": replace(call, unread=unread)}
    return [True] * len(eqn.invars), eqn.replace(outvars=outputs, params=params)


partial_eval.dce_rules[_call_p] = _drop_unread


def _lower(ctx: Any, *operands: Any, call: Call, platform: str | None) -> Any:
    platforms = ctx.module_context.platforms
    if platform == "cpu" and "cpu" not in platforms:
        # XLA for another platform does not know the CPU's handlers, and for CUDA it aborts the process.
        raise NotImplementedError(
            f"compute_on around {call.verb.function} in a program for {platforms[0]}: XLA's host "
            f"computations can't reach the pool. Call {call.verb.function} outside of compute_on, or move "
            "the inputs with jax.device_put and run a program on the CPU"
        )
    rows = ctx.avals_in[0].shape[0]
    call.check_rows(rows, rows if call.elastic else call.spec.num_envs)
    devices = ctx.module_context.axis_context
    if hasattr(devices, "manual_axes") and (automatic := {*devices.mesh.axis_names} - {*devices.manual_axes}):
        raise NotImplementedError(
            f"leave out axis_names in jax.shard_map: {call.verb.function} needs all axes of the mesh to be "
            f"manual, but JAX shards {sorted(map(str, automatic))} by itself"
        )
    if call.fresh and _copies(devices) > 1:
        raise EnvIdError(
            "jaxvec.reset(envs) in a program that several devices run would reset all envs on each device. "
            "Reset outside, and pass each device a handle to its own envs: jaxvec.reset(handle)"
        )
    # In a program that XLA shards by itself, a callback runs once for all shards; an FFI call crashes XLA.
    shards = getattr(devices, "num_devices", None) or 1
    if shards > 1 and jax.process_count() > 1:
        raise NotImplementedError(
            "XLA shards this program over the devices of several processes, but each process has its own "
            "pools; use jax.shard_map, where each device steps its own envs"
        )
    transport = call.transport
    if transport == "auto":
        transport = "ffi" if platform in _FFI_PLATFORMS and shards == 1 else "io_callback"
    if transport == "ffi" and platform not in _FFI_PLATFORMS:
        raise NativeUnavailableError('transport="ffi" is for programs on the CPU or on CUDA; use "auto"')
    if transport == "ffi" and shards > 1:
        raise NotImplementedError(
            f'transport="ffi" can\'t serve a program over {shards} devices; use jax.shard_map, where each '
            'device steps its own envs, or transport="auto", where one device steps all envs'
        )
    if ctx.module_context.lowering_parameters.for_export and (transport, platform) != ("ffi", "cuda"):
        raise NotImplementedError(
            f"jax.export can't store {call.verb.function}, which calls the pool of this process: export the "
            "function of the policy alone, and step the envs around it"
        )
    if transport == "ffi":
        _ffi.prepare(call, ctx.avals_in, platform=platform, copies=_copies(devices))
        fun = partial(_ffi.call, call, platform=platform)
    else:
        fun = partial(_io_callback.call, call, platform=platform, native=_ffi.reason_unavailable() is None)
    return mlir.lower_fun(fun, multiple_results=True)(ctx, *operands)


def _copies(devices: Any) -> int:
    """Returns the number of devices that each run the whole program, as under shard_map and pmap."""
    if hasattr(devices, "num_devices"):
        return 1
    return devices.mesh.size if hasattr(devices, "mesh") else devices.axis_env.nreps


# Not cacheable: a TPU needs separate channels for each callback of a program, even for equal ones.
_register = partial(mlir.register_lowering, _call_p, cacheable=False)
for _platform in _FFI_PLATFORMS:
    _register(partial(_lower, platform=_platform), platform=_platform)
_register(partial(_lower, platform=None))
