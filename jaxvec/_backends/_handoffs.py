"""Chooses between the hand-offs, by name, and the engine that goes with each."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxvec._handoff._channel import ParentChannel, WorkerChannel
from jaxvec._handoff._engine import Engine, PyEngine, Rules
from jaxvec._handoff._handoff import ParentEnd, ParentHandoff, WorkerEnd, WorkerHandoff
from jaxvec._memory._marks import Marks
from jaxvec._memory._segment import Arrays
from jaxvec._native import load, reason_unavailable
from jaxvec._native.engine import CEngine
from jaxvec._native.handoff import NativeParentEnd, NativeWorkerEnd
from jaxvec._spaces import Leaf
from jaxvec._spec import PoolSpec

_LARGE = 1024  # bytes of a row

_logger = logging.getLogger("jaxvec")


def choose(kind: str) -> str:
    """Returns `"native"` or `"portable"`.

    Raises:
        NativeUnavailableError: `"native"` was asked for and can't be had; says why.
    """
    if kind == "auto":
        reason = reason_unavailable()
        if reason is None:
            return "native"
        _logger.info("portable hand-off: %s", reason)
        return "portable"
    if kind == "native":
        load()
    return kind


def parent_end(
    kind: str,
    marks: Marks,
    *,
    slices: tuple[tuple[int, int], ...],
    channels: Sequence[ParentChannel],
    spin_ns: int,
) -> ParentHandoff:
    """Makes the parent's end."""
    if kind == "native":
        return NativeParentEnd(marks, slices, channels, spin_ns=spin_ns)
    return ParentEnd(marks, slices, channels)


def worker_end(
    kind: str,
    marks: Marks,
    *,
    worker: int,
    slots: tuple[int, int],
    channel: WorkerChannel,
    spin_ns: int,
    notices: int = 0,
) -> WorkerHandoff:
    """Makes the end of a worker.

    Args:
        kind: `"native"` or `"portable"`.
        marks: in the segment.
        worker: its index.
        slots: `(first, stop)`, its slots.
        channel: its control socket.
        spin_ns: how long it looks again before it sleeps.
        notices: how often the worker in whose place it is was notified of messages.
    """
    if kind == "native":
        return NativeWorkerEnd(marks, worker, slots, channel, spin_ns=spin_ns, notices=notices)
    return WorkerEnd(marks, slots, channel)


def engine(
    end: ParentHandoff,
    spec: PoolSpec,
    arrays: Arrays,
    *,
    slices: tuple[tuple[int, int], ...],
    rules: Rules,
) -> Engine:
    """Makes the engine of a pool with this hand-off."""
    if end.native_end is None or spec.object_leaves:
        return PyEngine(rules.admission)
    return CEngine(
        end,
        rules,
        fingerprint=spec.fingerprint,
        slices=slices,
        actions=[arrays[leaf.path] for leaf in spec.action_leaves],
        results=[arrays[leaf.path] for leaf in spec.timestep_leaves],
        nonzero=[_nonzero(leaf, arrays) for leaf in spec.timestep_leaves],
        batch_size=spec.batch_size,
    )


def _nonzero(leaf: Leaf, arrays: Arrays) -> NDArray[np.bool_] | None:
    """Returns the flags of the rows that final observations fill; small leaves are copied anyhow."""
    final = leaf.path[:2] == ("info", "final_obs") and leaf.nbytes >= _LARGE
    return arrays["info", "_final_obs"] if final else None
