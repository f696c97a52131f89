"""The choice between the native engine and dispatch, in C++, and the portable ones, in Python."""

from __future__ import annotations

from collections.abc import Sequence

from jaxvec._engine.channel import Channel
from jaxvec._engine.dispatch import (
    ParentDispatch,
    PortableParentDispatch,
    PortableWorkerDispatch,
    WorkerDispatch,
)
from jaxvec._engine.engine import Engine, EngineConfig, PyEngine
from jaxvec._engine.native_dispatch import NativeParentDispatch, NativeWorkerDispatch
from jaxvec._engine.native_engine import CEngine, StepHere
from jaxvec._leaves import Leaf
from jaxvec._memory.segment import Arrays, Marks
from jaxvec._native import load, reason_unavailable
from jaxvec._spec import PoolSpec
from jaxvec._util import logger

# Bytes of a row of `final_obs`. Smaller rows are all copied, as it is not worth selecting the final ones.
_MIN_SELECTED_ROW = 1024


def choose_dispatch(kind: str) -> str:
    """Returns `"native"` or `"portable"`. Raises `NativeUnavailableError` for an unavailable `"native"`."""
    if kind == "auto":
        reason = reason_unavailable()
        if reason is None:
            return "native"
        logger.info("using the portable dispatch: %s", reason)
        return "portable"
    if kind == "native":
        load()
    return kind


def parent_end(
    kind: str,
    marks: Marks,
    *,
    slices: tuple[tuple[int, int], ...],
    channels: Sequence[Channel],
    spin_ns: int,
) -> ParentDispatch:
    if kind == "native":
        return NativeParentDispatch(marks, slices, channels, spin_ns=spin_ns)
    return PortableParentDispatch(marks, slices, channels)


def worker_end(
    kind: str,
    marks: Marks,
    *,
    worker: int,
    slots: tuple[int, int],
    channel: Channel,
    spin_ns: int,
    notices: int = 0,
    keeps_core: bool = False,
) -> WorkerDispatch:
    # `notices` continues the count of a replaced worker, which the parent does not reset.
    if kind == "native":
        return NativeWorkerDispatch(
            marks, worker, slots, channel, spin_ns=spin_ns, notices=notices, keeps_core=keeps_core
        )
    return PortableWorkerDispatch(marks, slots, channel)


def open_engine(
    end: ParentDispatch,
    spec: PoolSpec,
    arrays: Arrays,
    *,
    config: EngineConfig,
    step_here: StepHere | None = None,
) -> Engine:
    """Makes the C++ engine, or the Python one if the dispatch is portable or leaves are Python objects.

    `step_here` steps slots, if the envs are in this process.
    """
    if end.native_end is None or spec.object_leaves:
        return PyEngine(config, done_at_once=step_here is not None)

    def is_large(leaf: Leaf) -> bool:
        return leaf.path[:2] == ("info", "final_obs") and leaf.nbytes >= _MIN_SELECTED_ROW

    return CEngine(
        end,
        config,
        fingerprint=spec.fingerprint,
        actions=[arrays[leaf.path] for leaf in (*spec.action_leaves, *spec.option_leaves)],
        num_options=len(spec.option_leaves),
        results=[arrays[leaf.path] for leaf in spec.timestep_leaves],
        nonzero=[arrays["info", "_final_obs"] if is_large(leaf) else None for leaf in spec.timestep_leaves],
        batch_size=spec.batch_size,
        step_here=step_here,
    )
