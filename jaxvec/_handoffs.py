"""Chooses between the hand-offs, by name."""

from __future__ import annotations

import logging

from jaxvec._channel import Channel
from jaxvec._handoff import ParentEnd, ParentHandoff, WorkerEnd, WorkerHandoff
from jaxvec._native import library
from jaxvec._native.handoff import NativeParentEnd, NativeWorkerEnd
from jaxvec._segment import Arrays

KINDS = ("auto", "native", "portable")

_logger = logging.getLogger("jaxvec")


def choose(kind: str) -> str:
    """Returns `"native"` or `"portable"`.

    Raises:
        NativeUnavailableError: `"native"` was asked for and can't be had; says why.
        ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"handoff must be one of {', '.join(KINDS)}, not {kind!r}")
    if kind == "auto":
        reason = library.reason_unavailable()
        if reason is None:
            return "native"
        _logger.info("portable hand-off: %s", reason)
        return "portable"
    if kind == "native":
        library.load()
    return kind


def parent_end(
    kind: str, arrays: Arrays, *, slices: tuple[tuple[int, int], ...], channels: list[Channel], spin: int
) -> ParentHandoff:
    """Makes the parent's end."""
    if kind == "native":
        return NativeParentEnd(arrays, slices, channels, spin=spin)
    return ParentEnd(arrays, slices, channels)


def worker_end(kind: str, arrays: Arrays, *, worker: int, channel: Channel, spin: int) -> WorkerHandoff:
    """Makes a worker's end."""
    if kind == "native":
        return NativeWorkerEnd(arrays, worker, channel, spin=spin)
    return WorkerEnd(arrays, worker, channel)
