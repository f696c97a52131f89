"""Pure arithmetic: where each array of a pool lies in its segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from jaxvec import _stats
from jaxvec._memory import _marks
from jaxvec._spaces import KeyPath
from jaxvec._spec import PoolSpec

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


def split(num_envs: int, num_workers: int, size: int = 1) -> tuple[tuple[int, int], ...]:
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
    yield ("raw_info",), (n,), np.dtype(np.uint8)  # worker writes: a RawInfo
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
    yield from _marks.shapes(n, num_workers)


def align(offset: int) -> int:
    """Returns the next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
