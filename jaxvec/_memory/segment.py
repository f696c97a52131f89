"""The shared memory of a pool: its layout, its mapping, and the parent's views of it.

`make_layout` assigns each array of a `PoolSpec` an offset, `create_segment` allocates the memory, and
`attach_segment` maps it in each process. `rows.py` converts between env values and rows of these arrays.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec import _stats
from jaxvec._arguments import SEED_WORDS
from jaxvec._leaves import KeyPath, format_path
from jaxvec._spec import PoolSpec
from jaxvec._util import free_memory

# --- Raw infos: the segment holds only their kind, and the parent requests the `FULL` ones from workers


class InfoKind(IntEnum):
    """Content of the raw info of an env's latest reset or step."""

    EMPTY = 0
    EMPTY_AT_END = 1  # empty infos of an episode's last step and of the reset in the same move
    FULL = 2  # any other info; the worker keeps it


def kind_of(info: dict[str, Any]) -> InfoKind:
    if not info:
        return InfoKind.EMPTY
    final = info.get("final_info") if len(info) == 1 else None
    return InfoKind.EMPTY_AT_END if type(final) is dict and not final else InfoKind.FULL


def known(kinds: bytes) -> list[dict[str, Any]]:
    """Returns new infos of these kinds; the caller replaces those of kind `FULL`."""
    return [{"final_info": {}} if kind else {} for kind in kinds]


# --- Marks: the words in a segment that the dispatch uses; see `dispatch.py` -----------------------------

_LINE = (16,)  # shape of a uint32 word with a cache line (64 bytes) to itself, against false sharing


@dataclass(frozen=True)
class Marks:
    """Arrays of words, each of which has one writer, or is only incremented. A slot is the row of an env.

    Attributes:
        running: uint32 `[num_workers, 16]`, written by workers. Word 0 is 1 + the slot of the running env,
            or 0.
        requested: int64 `[num_slots]`, written by the parent: the latest request, as `requests` of move.py.
        completed: int64 `[num_slots]`, written by workers: the request completed last.
        completed_at: int64 `[num_slots]`, written by workers: monotonic time of the completion, in ns.
        doorbell, common_bell, worker_notices, asleep, finished, target, sleepers, parent_notices: Words of
            the native dispatch; `_native/dispatch.h` documents their writers.
    """

    running: NDArray[np.uint32]
    requested: NDArray[np.int64]
    completed: NDArray[np.int64]
    completed_at: NDArray[np.int64]
    doorbell: NDArray[np.uint32]
    common_bell: NDArray[np.uint32]
    worker_notices: NDArray[np.uint32]
    asleep: NDArray[np.uint32]
    finished: NDArray[np.uint32]
    target: NDArray[np.uint32]
    sleepers: NDArray[np.uint32]
    parent_notices: NDArray[np.uint32]

    @classmethod
    def of(cls, arrays: Mapping[KeyPath, NDArray[Any]]) -> Marks:
        return cls(*(arrays[field.name,] for field in fields(cls)))

    def read_requested(self, slots: slice) -> NDArray[np.int64]:
        """Returns a copy of the requests of `slots`, with all or none of each send: see `Board::target`."""
        while True:
            version = self.target[1]  # odd while the parent writes requests
            fence()
            requested = self.requested[slots].copy()
            fence()  # before the look at the version, and before the caller reads the rows of the requests
            if version % 2 == 0 and self.target[1] == version:
                return requested


def fence() -> None:
    """Keeps the accesses to memory before this call before those after it, as other processes see them.

    x86 does so by itself, for writes and for reads. ARM does not, and Python has no fence. But no access
    moves below an unlock, no access above a lock, and no lock above an earlier unlock.
    """
    lock = threading.Lock()  # a new one, since a signal handler may interrupt this call and make another
    lock.acquire()
    lock.release()
    lock.acquire()


# --- Layout: the offset of each array in the segment -----------------------------------------------------

ArrayType: TypeAlias = tuple[KeyPath, tuple[int, ...], np.dtype[Any]]  # of an array: name, shape and dtype
ALIGNMENT = 64  # bytes: a cache line, and the alignment that XLA requires of arrays it may alias


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
    """All arrays of a pool."""

    fields: tuple[Field, ...]  # in the segment, without overlap, each at a multiple of `ALIGNMENT`
    nbytes: int  # size of the segment
    present: int  # size of its first part; the second, of extensions, takes memory when it is touched
    num_envs: int
    objects: tuple[KeyPath, ...]  # arrays `[num_envs]` of Python objects, private to each process


def make_layout(spec: PoolSpec, num_workers: int, *, extended: Iterable[ArrayType] = ()) -> Layout:
    """Returns the layout of a pool with the arrays of its extensions."""
    fields: list[Field] = []
    offset = present = 0
    for part in (_arrays(spec, num_workers), extended):
        present = max(offset, ALIGNMENT)
        for path, shape, dtype in part:
            field = Field(path, shape, dtype, offset)
            fields.append(field)
            offset = align(offset + field.nbytes)
    objects = tuple(leaf.path for leaf in spec.object_leaves)
    return Layout(tuple(fields), max(offset, ALIGNMENT), present, spec.num_envs, objects)


Slices: TypeAlias = tuple[tuple[int, int], ...]  # `(first, stop)` of each worker's envs


def split_evenly(num_envs: int, num_workers: int, size: int = 1) -> Slices:
    """Splits `range(num_envs)` into `num_workers` ranges with lengths that are multiples of `size`."""
    cuts = [size * (num_envs // size * worker // num_workers) for worker in range(num_workers + 1)]
    return tuple(pairwise(cuts))


def _arrays(spec: PoolSpec, num_workers: int) -> Iterator[ArrayType]:
    """Yields the path, shape and dtype of every array; the comments name the writers."""
    n = spec.num_envs
    # Written by workers. It comes first, so that `jaxvec top` finds it without a layout.
    yield ("stats",), (num_workers, _stats.WIDTH), np.dtype(np.int64)
    # The parent writes actions, reset options and seeds, and workers write time steps. A worker that restores
    # a state also writes the reset options in it.
    for leaf in (*spec.action_leaves, *spec.option_leaves, *spec.timestep_leaves):
        if not leaf.is_object:
            yield leaf.path, (n, *leaf.shape), leaf.stored
    yield ("raw_info",), (n,), np.dtype(np.uint8)  # `InfoKind`, written by workers
    yield ("seed",), (n, SEED_WORDS), np.dtype(np.int64)  # of the next reset; see `_arguments.py`
    # The following outlive a worker: only it writes them, and its replacement continues with them.
    yield ("last_seed",), (n,), np.dtype(np.int64)  # latest seed of the env, modulo 2**63 - 1
    yield ("rebuilds",), (n,), np.dtype(np.uint32)  # number of times that the env was rebuilt
    if spec.has_fault:  # results that the program has received, kept during a step; see `_envs/episodes.py`
        for leaf in spec.kept_leaves:
            if not leaf.is_object:
                yield ("kept", *leaf.path), (n, *leaf.shape), leaf.stored
        yield ("kept_over",), (n,), np.dtype(np.bool_)  # whether that result ended an episode
        yield ("kept_for",), (n,), np.dtype(np.int64)  # the request that followed; see `Marks.requested`
    for name in ("requested", "completed", "completed_at"):
        yield (name,), (n,), np.dtype(np.int64)
    for name in ("running", "doorbell", "worker_notices", "asleep"):
        yield (name,), (num_workers, *_LINE), np.dtype(np.uint32)
    for name in ("common_bell", "finished", "target", "sleepers", "parent_notices"):
        yield (name,), _LINE, np.dtype(np.uint32)


def align(offset: int, multiple: int = ALIGNMENT) -> int:
    """Rounds an offset up to a multiple, by default of `ALIGNMENT`."""
    return -(-offset // multiple) * multiple


# --- Creating and mapping the memory ---------------------------------------------------------------------
# The memory has no name, so it can't collide with other pools, or leak when a process is killed. It lives
# as long as any process maps it, and any NumPy view keeps its mapping.

Arrays: TypeAlias = dict[KeyPath, NDArray[Any]]

# Errors of a system call that a sandbox or an old kernel lacks.
_DENIED = (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP)


def create_segment(layout: Layout) -> int:
    """Creates zeroed shared memory; returns its file descriptor, which is not inheritable.

    The pages of the first part are allocated now. Those of the second are allocated when they are touched,
    which can then kill the process.

    Raises:
        MemoryError: The first part is larger than the free memory.
        OSError: No memory or no file descriptor is left.
    """
    _check_fits(layout)
    fd = create_memory("jaxvec")
    try:
        with size_advice():
            # With ftruncate alone, a process would be killed if memory runs out when it touches a page.
            if sys.platform == "linux":
                _allocate(fd, layout.present)
            os.ftruncate(fd, layout.nbytes)
        # Shrinking it would kill every process that touches the lost pages.
        with suppress(OSError, AttributeError):  # not in a sandbox, on macOS, or for memory of `shm_open`
            seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_fits(layout: Layout) -> None:
    """Raises `MemoryError` if the first part does not fit the free memory; Linux would kill this process."""
    free = free_memory()
    if free is None or layout.present <= free:
        return
    fields = (field for field in layout.fields if field.offset < layout.present)
    largest = max(fields, key=lambda field: field.nbytes)
    raise MemoryError(
        f"the pool needs {layout.present / 1e9:.1f} GB of memory for {layout.num_envs} envs, but "
        f"{free / 1e9:.1f} GB are free. The largest array is {format_path(largest.path)}, "
        f"{largest.dtype}{list(largest.shape)} of {largest.nbytes / 1e9:.1f} GB; make fewer envs or smaller "
        "observations, lower max_sizes, or pass final_obs=False"
    )


def attach_segment(fd: int, layout: Layout) -> Arrays:
    """Maps a segment and returns its arrays, which keep the mapping alive, and new arrays of objects."""
    buffer = memoryview(mmap.mmap(fd, layout.nbytes))
    shared = {f.path: np.ndarray(f.shape, f.dtype, buffer, f.offset) for f in layout.fields}
    return shared | {path: np.empty(layout.num_envs, object) for path in layout.objects}


def private_segment(layout: Layout) -> Arrays:
    """Returns the arrays of a layout in memory that is private to this process."""
    try:
        return attach_segment(-1, layout)  # -1 maps anonymous memory, which is allocated when it is touched
    except OSError:
        _check_fits(layout)
        raise


def whole_segment(arrays: Arrays, layout: Layout) -> NDArray[np.uint8]:
    """Returns the first part of the segment behind `arrays`, as bytes that keep the mapping alive."""
    memory: Any = arrays[layout.fields[0].path].base
    return np.frombuffer(memory, np.uint8, layout.present)


def create_memory(name: str, *, as_file: bool = False) -> int:
    """Creates shared memory without a size; its name is shown in /proc, and need not be unique.

    `as_file` is for memory that is written to by system calls, grows or is mapped privately. macOS refuses
    that for memory of `shm_open`, so it is a temporary file there.
    """
    if sys.platform == "linux":
        try:
            return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            if error.errno not in _DENIED:
                raise
    if as_file:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    # POSIX requires a unique name. It exists only between these two calls.
    import _posixshmem  # pyright: ignore[reportMissingImports]  # CPython's, used by `shared_memory`

    name = f"/{name} {secrets.token_hex(8)}"
    fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd


@contextmanager
def size_advice() -> Generator[None]:
    """Adds a remedy to the error of shared memory above the limit of file sizes."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            error.strerror = f"{error.strerror}: raise the limit of file sizes (ulimit -f) for shared memory"
        raise


def _allocate(fd: int, size: int) -> None:
    """Allocates the first pages of new memory. Raises `OSError` if it is too small."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _DENIED:
            raise
        block = bytes(min(size, 1 << 20))
        for start in range(0, size, len(block)):
            os.pwrite(fd, block[: size - start], start)


def seal(fd: int) -> None:
    """Keeps shared memory from changing its size. Raises `OSError` if it can't."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


# --- The parent's views of a segment, and the ways to deliver rows to a caller ---------------------------

Rows = Sequence[NDArray[Any]]  # an array `[n, ...]` for each leaf
Index = slice | NDArray[Any]  # selects rows
CopyToDevice = Callable[[Rows], Sequence[Any]]  # returns when the copies are done
Deliver = Callable[[Rows, Index], Sequence[Any]]  # returns a caller's rows of the segment's leaves


class Views:
    """Views of a segment for the calls of a pool, which give their envs as `slots`, int `[n]`.

    Attributes:
        seeds: Words of the seeds of the next reset, `[num_envs, SEED_WORDS]`.
        over: The arrays `terminated` and `truncated`, `[num_envs]`.
        stats: Counters of the workers, `[num_workers, _stats.WIDTH]`.
        raw_info: `InfoKind` of each raw info, `[num_envs]`.
    """

    def __init__(self, spec: PoolSpec, arrays: Arrays, rows: Callable[[NDArray[Any]], Index]) -> None:
        self.seeds: NDArray[Any] = arrays["seed",]
        self.stats: NDArray[Any] = arrays["stats",]
        self.raw_info: NDArray[Any] = arrays["raw_info",]
        self.over: tuple[NDArray[Any], NDArray[Any]] = (arrays["terminated",], arrays["truncated",])
        self._actions = [arrays[leaf.path] for leaf in (*spec.action_leaves, *spec.option_leaves)]
        self._results = [arrays[leaf.path] for leaf in spec.timestep_leaves]
        self._rows = rows  # `PendingEnvs.rows`: converts slots to an index, a slice for all envs

    def write_actions(self, slots: NDArray[Any], actions: Rows) -> None:
        """Writes the leaves of actions, and of reset options if they follow."""
        self._write(self._actions[: len(actions)], slots, actions)

    def write_options(self, slots: NDArray[Any], options: Rows) -> None:
        """Writes the leaves of reset options; without any, the envs keep those that they have."""
        self._write(self._actions[len(self._actions) - len(options) :], slots, options)

    def write(self, slots: NDArray[Any], rows: Rows) -> None:
        """Writes the time steps of `slots`, which must belong to the parent."""
        self._write(self._results, slots, rows)

    def read(self, slots: NDArray[Any], deliver: Deliver) -> Any:
        """Delivers the time steps of `slots`, which must belong to the parent."""
        return deliver(self._results, self._index_of(slots))

    def _write(self, columns: Rows, slots: NDArray[Any], rows: Rows) -> None:
        index = self._index_of(slots)
        for column, row in zip(columns, rows, strict=True):
            column[index] = row

    def _index_of(self, slots: NDArray[Any]) -> Index:
        rows = self._rows(slots)
        return rows if isinstance(rows, slice) else index_of(rows)


@dataclass(frozen=True)
class Copies:
    """A `Deliver` that copies rows to new arrays."""

    unread: frozenset[int] = frozenset()  # indices of unread leaves; their arrays get no rows

    def __call__(self, leaves: Rows, index: Index) -> Rows:
        copy = isinstance(index, slice)  # indexing with an array copies anyway
        return [
            leaf[:0] if place in self.unread else leaf[index].copy() if copy else leaf[index]
            for place, leaf in enumerate(leaves)
        ]


copies: Copies = Copies()


def views(leaves: Rows, index: Index) -> Rows:
    """Delivers read-only views of the segment if the rows are evenly spaced, and copies otherwise."""
    rows = [leaf[index] for leaf in leaves]
    if isinstance(index, slice):
        for row in rows:
            row.flags.writeable = False
    return rows


def into(out: Rows) -> Deliver:
    """Returns a `Deliver` that copies into these arrays, and skips those without rows."""

    def deliver(leaves: Rows, index: Index) -> Rows:
        for target, leaf in zip(out, leaves, strict=True):
            if len(target):
                np.copyto(target, leaf[index])
        return out

    return deliver


def placed(place: CopyToDevice) -> Deliver:
    """Returns a `Deliver` that passes views of the rows to `place`."""
    return lambda leaves, index: place(views(leaves, index))


def index_of(slots: NDArray[Any]) -> Index:
    """Returns `slots` as a slice, if they are evenly spaced in ascending order."""
    if not len(slots):
        return slots
    first = int(slots[0])
    last = int(slots[-1])
    step = int(slots[1]) - first if len(slots) > 1 else 1
    if step < 1 or (slots[1:] - slots[:-1] != step).any():  # faster than np.diff
        return slots
    return slice(first, last + 1, step)
