"""The shared memory of a pool: its layout, its mapping and views of its rows."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec import _stats
from jaxvec._spec import KeyPath, PoolSpec

# ----------------------------------------------------------------------------------------------------------
# What an env's raw info says, as far as the segment tells it: the parent asks for the others alone.
# ----------------------------------------------------------------------------------------------------------


class InfoKind(IntEnum):
    """What the raw info of an env's last reset or step says; in the segment."""

    EMPTY = 0
    EMPTY_AT_END = 1  # nothing, neither of an episode's last step nor of the reset that came with it
    FULL = 2  # something, which the worker keeps


def kind_of(info: dict[str, Any]) -> InfoKind:
    """Says what an info is."""
    if not info:
        return InfoKind.EMPTY
    final = info.get("final_info") if len(info) == 1 else None
    return InfoKind.EMPTY_AT_END if type(final) is dict and not final else InfoKind.FULL


def known(kinds: bytes) -> list[dict[str, Any]]:
    """Returns new infos of these kinds; those in the places of `FULL` ones are none."""
    return [{"final_info": {}} if kind else {} for kind in kinds]


# ----------------------------------------------------------------------------------------------------------
# The words in a segment by which parent and workers hand slots to each other; see `dispatch.py`.
# ----------------------------------------------------------------------------------------------------------

_LINE = (16,)  # uint32: one word that has a cache line to itself


@dataclass(frozen=True)
class Marks:
    """Each word has one writer, or is only added to. A slot is an env's row.

    Attributes:
        running: `[num_workers, 16]`; worker writes: 1 + the slot whose env runs, or 0; then whether it waits
            for its turn, see `max_running`.
        requested: `[num_slots]` int64; parent writes: the latest request, as `requests` of move.py.
        completed: `[num_slots]` int64; worker writes: the request it completed last.
        completed_at: `[num_slots]` int64; worker writes: when, in ns of the monotonic clock.
        doorbell, worker_notices, asleep, finished, target, sleepers, parent_notices: of the native hand-off;
            handoff.h says who writes.
    """

    running: NDArray[np.uint32]
    requested: NDArray[np.int64]
    completed: NDArray[np.int64]
    completed_at: NDArray[np.int64]
    doorbell: NDArray[np.uint32]
    worker_notices: NDArray[np.uint32]
    asleep: NDArray[np.uint32]
    finished: NDArray[np.uint32]
    target: NDArray[np.uint32]
    sleepers: NDArray[np.uint32]
    parent_notices: NDArray[np.uint32]

    @classmethod
    def of(cls, arrays: Mapping[KeyPath, NDArray[Any]]) -> Marks:
        """Returns those among the arrays of a segment."""
        return cls(*(arrays[field.name,] for field in fields(cls)))


def mark_shapes(num_slots: int, num_workers: int) -> Iterator[tuple[KeyPath, tuple[int, ...], np.dtype[Any]]]:
    """Yields the path, shape and dtype of each."""
    for name in ("requested", "completed", "completed_at"):
        yield (name,), (num_slots,), np.dtype(np.int64)
    for name in ("running", "doorbell", "worker_notices", "asleep"):
        yield (name,), (num_workers, *_LINE), np.dtype(np.uint32)
    for name in ("finished", "target", "sleepers", "parent_notices"):
        yield (name,), _LINE, np.dtype(np.uint32)


# ----------------------------------------------------------------------------------------------------------
# Pure arithmetic: where each array of a pool lies in its segment.
# ----------------------------------------------------------------------------------------------------------

ALIGNMENT = 64  # bytes: a cache line, what XLA asks of an array it may alias, and SIMD's best


@dataclass(frozen=True)
class Field:
    """One C-contiguous array in the segment, `offset` bytes from its start."""

    path: KeyPath
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """All arrays of a pool.

    Attributes:
        fields: none overlaps another; each starts on a multiple of `ALIGNMENT`.
        nbytes: size of the segment.
        num_envs: of the pool.
        objects: of arrays of Python objects, `[num_envs]`, which each process has for itself.
    """

    fields: tuple[Field, ...]
    nbytes: int
    num_envs: int
    objects: tuple[KeyPath, ...]


def make_layout(spec: PoolSpec, num_workers: int) -> Layout:
    """Lays out the segment of a pool of so many workers."""
    fields: list[Field] = []
    offset = 0
    for path, shape, dtype in _arrays(spec, num_workers):
        field = Field(path, shape, dtype, offset)
        fields.append(field)
        offset = align(offset + field.nbytes)
    objects = tuple(leaf.path for leaf in spec.object_leaves)
    return Layout(tuple(fields), max(offset, ALIGNMENT), spec.num_envs, objects)


def split_evenly(num_envs: int, num_workers: int, size: int = 1) -> tuple[tuple[int, int], ...]:
    """Splits `range(num_envs)` into `num_workers` ranges of `size` envs, or some more, each."""
    cuts = [size * (num_envs // size * worker // num_workers) for worker in range(num_workers + 1)]
    return tuple(pairwise(cuts))


def _arrays(spec: PoolSpec, num_workers: int) -> Iterator[tuple[KeyPath, tuple[int, ...], np.dtype[Any]]]:
    """Yields path, shape and dtype of every array, with its one writer."""
    n = spec.num_envs
    # Data. The parent writes actions and seeds, workers the rest.
    for leaf in (*spec.action_leaves, *spec.timestep_leaves):
        if not leaf.is_object:
            yield leaf.path, spec.batch_shape(leaf), leaf.stored
    yield ("raw_info",), (n,), np.dtype(np.uint8)  # worker writes: a InfoKind
    yield ("seed",), (n,), np.dtype(np.int64)  # see _seeds
    # The parent writes which state is asked for, by number, and which is the oldest; the worker 0 when done.
    yield ("state",), (n,), np.dtype(np.int64)
    yield ("oldest_state",), (1,), np.dtype(np.int64)
    # What outlives a worker. It alone writes them, and the one that replaces it goes on from there.
    yield ("last_seed",), (n,), np.dtype(np.int64)  # that the env was given, see _seeds
    yield ("rebuilds",), (n,), np.dtype(np.uint32)  # how often the env was built anew
    if spec.has_fault:  # what the program has of each env while it steps, see _delivered
        for leaf in spec.kept_leaves:
            if not leaf.is_object:
                yield ("kept", *leaf.path), spec.batch_shape(leaf), leaf.stored
        yield (
            ("kept_over",),
            (n,),
            np.dtype(np.uint8),
        )  # whether it ended an episode: 1, or 2 by a fault
        yield ("kept_for",), (n,), np.dtype(np.int64)  # before which request that was, see `requested`
    yield ("stats",), (num_workers, _stats.WIDTH), np.dtype(np.int64)
    yield from mark_shapes(n, num_workers)


def align(offset: int) -> int:
    """Returns the next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


# ----------------------------------------------------------------------------------------------------------
# Creates and maps a pool's memory; NumPy views of it by path.
#
# The memory has no name: nothing to collide with, nothing to leak whatever is killed. It lives for as long
# as any process or any NumPy view holds it.
# ----------------------------------------------------------------------------------------------------------

Arrays: TypeAlias = dict[KeyPath, NDArray[Any]]


def create_segment(layout: Layout, *, sparse: bool = False) -> int:
    """Creates zeroed shared memory for `layout`; returns its file descriptor, not inheritable.

    Args:
        layout: of the pool.
        sparse: whether only what is ever touched takes memory, and may then find none.

    Raises:
        OSError: no memory or no descriptor was left.
    """
    fd = _anonymous()
    try:
        # ftruncate alone would let a full machine kill a process at the first touch of a page.
        if sys.platform == "linux" and not sparse:
            os.posix_fallocate(fd, 0, layout.nbytes)
        else:
            os.ftruncate(fd, layout.nbytes)
        if sys.platform == "linux":  # who made it shorter would kill all processes that touch it
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def attach_segment(fd: int, layout: Layout) -> Arrays:
    """Maps `fd` and returns the array of each field. The views keep the mapping alive."""
    return view(memoryview(mmap.mmap(fd, layout.nbytes)), layout)


def view(buffer: memoryview, layout: Layout) -> Arrays:
    """Returns the arrays of `layout` over `buffer`, and new ones of its objects, by path."""
    shared = {f.path: np.ndarray(f.shape, f.dtype, buffer, f.offset) for f in layout.fields}
    return shared | {path: np.empty(layout.num_envs, object) for path in layout.objects}


def private_segment(layout: Layout) -> Arrays:
    """Returns the arrays of `layout` over memory of this process alone."""
    return view(memoryview(mmap.mmap(-1, layout.nbytes)), layout)


def whole_segment(arrays: Arrays, layout: Layout) -> NDArray[np.uint8]:
    """Returns all bytes of the segment behind `arrays`, which it keeps mapped."""
    first = arrays[layout.fields[0].path]
    memory: Any = first.base
    return np.frombuffer(memory, np.uint8, layout.nbytes)


def _anonymous() -> int:
    if sys.platform == "linux":
        return os.memfd_create("jaxvec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # POSIX elsewhere: a name that lives for the instant between these two calls.
    import _posixshmem  # pyright: ignore[reportMissingImports]  # CPython's own, behind shared_memory

    name = f"/jaxvec-{secrets.token_hex(8)}"
    fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd


# ----------------------------------------------------------------------------------------------------------
# The parent's views of a segment: actions and seeds go in by them, time steps come out.
# ----------------------------------------------------------------------------------------------------------

Rows = Sequence[NDArray[Any]]  # an array `[n, ...]` for each leaf
Index = slice | NDArray[Any]  # of rows
Place = Callable[[Rows], Sequence[Any]]  # copies rows to a device; when it returns, all are there
Deliver = Callable[[Rows, Index], Sequence[Any]]  # gives a caller its rows of the segment's leaves


class Views:
    """All arrays are `[num_envs, ...]`; calls name their envs by `slots`, `[n]`.

    Attributes:
        seeds: of the next reset.
        states: the numbers of those that are to be saved, or restored.
        oldest_state: `[1]`, the number of the oldest that is kept.
        over: terminated and truncated.
        stats: what the workers count.
        raw_info: what the env's raw info says, a `InfoKind`.
    """

    def __init__(self, spec: PoolSpec, arrays: Arrays, rows: Callable[[NDArray[Any]], Index]) -> None:
        """Takes the views that calls need; `rows` knows a slice for all envs, as `Admission.rows`."""
        self.seeds: NDArray[Any] = arrays["seed",]
        self.states: NDArray[Any] = arrays["state",]
        self.oldest_state: NDArray[Any] = arrays["oldest_state",]
        self.stats: NDArray[Any] = arrays["stats",]
        self.raw_info: NDArray[Any] = arrays["raw_info",]
        self.over: tuple[NDArray[Any], NDArray[Any]] = (arrays["terminated",], arrays["truncated",])
        self._actions = [arrays[leaf.path] for leaf in spec.action_leaves]
        self._results = [arrays[leaf.path] for leaf in spec.timestep_leaves]
        self._rows = rows

    def write_actions(self, slots: NDArray[Any], actions: Rows) -> None:
        """Stores the actions of `slots`."""
        index = self._index_of(slots)
        for stored, action in zip(self._actions, actions, strict=True):
            stored[index] = action

    def write(self, slots: NDArray[Any], rows: Rows) -> None:
        """Writes the time step of `slots`, which belong to the caller."""
        index = self._index_of(slots)
        for stored, row in zip(self._results, rows, strict=True):
            stored[index] = row

    def read(self, slots: NDArray[Any], deliver: Deliver) -> Any:
        """Delivers the time step of `slots`, which belong to the caller."""
        return deliver(self._results, self._index_of(slots))

    def _index_of(self, slots: NDArray[Any]) -> Index:
        rows = self._rows(slots)
        return rows if isinstance(rows, slice) else index_of(rows)


@dataclass(frozen=True)
class Copies:
    """Delivers new arrays; those of leaves that the caller does not read have no rows.

    Attributes:
        unread: the places of such leaves.
    """

    unread: frozenset[int] = frozenset()

    def __call__(self, leaves: Rows, index: Index) -> Rows:
        copy = isinstance(index, slice)  # else NumPy copies by itself
        return [
            leaf[:0] if place in self.unread else leaf[index].copy() if copy else leaf[index]
            for place, leaf in enumerate(leaves)
        ]


copies: Copies = Copies()


def views(leaves: Rows, index: Index) -> Rows:
    """Delivers rows as they are in the segment, read-only; copies of those that are not evenly spaced."""
    rows = [leaf[index] for leaf in leaves]
    if isinstance(index, slice):
        for row in rows:
            row.flags.writeable = False
    return rows


def into(out: Rows) -> Deliver:
    """Delivers into these arrays, but for those without rows."""

    def deliver(leaves: Rows, index: Index) -> Rows:
        for target, leaf in zip(out, leaves, strict=True):
            if len(target):
                np.copyto(target, leaf[index])
        return out

    return deliver


def placed(place: Place) -> Deliver:
    """Delivers what `place` makes of rows that it may read until it returns."""
    return lambda leaves, index: place(views(leaves, index))


def index_of(slots: NDArray[Any]) -> Index:
    """Returns `slots` as a slice, if they are evenly spaced in ascending order."""
    if not len(slots):
        return slots
    first, last = int(slots[0]), int(slots[-1])
    step = int(slots[1]) - first if len(slots) > 1 else 1
    if step < 1 or (slots[1:] - slots[:-1] != step).any():  # quicker than by np.diff
        return slots
    return slice(first, last + 1, step)
