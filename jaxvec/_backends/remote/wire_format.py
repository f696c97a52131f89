"""Rows packed into one buffer, for hosts, which cannot map the segment, and the rows that travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.move import Verb
from jaxvec._leaves import KeyPath
from jaxvec._memory.segment import Arrays, align, index_of
from jaxvec._spec import PoolSpec

Payload: TypeAlias = NDArray[np.uint8]  # rows in one buffer, see `RowPacker`

_WORKER_ROWS = ("raw_info", "last_seed", "rebuilds")  # written by workers besides the time step
_INTEGER = np.dtype(np.int64)
_SLOTS_OFFSET = align(_INTEGER.itemsize)


class _Batch:
    """A buffer for the rows of some slots, and views of its parts except sparse rows."""

    def __init__(
        self,
        slots: NDArray[np.int64],
        buffer: NDArray[np.uint8] | None,
        whole: Sequence[NDArray[Any]],
        dense: Sequence[NDArray[Any]],
    ) -> None:
        shapes = [*(array.shape for array in whole), *((len(slots), *array.shape[1:]) for array in dense)]
        dtypes = [array.dtype for array in (*whole, *dense)]
        sizes = [align(prod(shape) * dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)]
        starts = [*accumulate(sizes, initial=_SLOTS_OFFSET + align(slots.nbytes))]
        self.stop = starts.pop()  # offset of the sparse rows
        self.slots = slots
        self.index = index_of(slots)
        if buffer is None:
            buffer = np.zeros(self.stop, np.uint8)
            _view(buffer, 0, (1,), _INTEGER)[0] = len(slots)
            _view(buffer, _SLOTS_OFFSET, slots.shape, _INTEGER)[:] = slots
        self.buffer = buffer
        parts = [_view(buffer, *each) for each in zip(starts, shapes, dtypes, strict=True)]
        self.whole, self.dense = parts[: len(whole)], parts[len(whole) :]
        self._head = buffer[: _SLOTS_OFFSET + slots.nbytes]
        self._head_bytes = self._head.tobytes()

    def matches(self, buffer: NDArray[np.uint8]) -> bool:
        """Returns whether `buffer` is the same object and still holds rows of the same slots."""
        return buffer is self.buffer and self._head.tobytes() == self._head_bytes


class RowPacker:
    """Packs rows of some arrays, and unpacks them into equal arrays of another segment.

    A buffer holds the number of slots `n`, int64; the slots, int64 `[n]`; the arrays that are sent whole; and
    the rows `[n, ...]` of each path. Each part starts at a multiple of `ALIGNMENT`. Sparse rows come last:
    only those with a set flag are in the buffer, and the others are zeros.

    Args:
        arrays: Arrays of the segment.
        paths: Paths of the arrays `[num_envs, ...]` with the rows to send.
        whole: Further arrays, which are sent whole with every buffer.
        sparse: Path of the flags of each sparse path. The flags must be among `paths`.
    """

    def __init__(
        self,
        arrays: Arrays,
        paths: Sequence[KeyPath],
        *,
        whole: Sequence[NDArray[Any]] = (),
        sparse: Mapping[KeyPath, KeyPath] | None = None,
    ) -> None:
        self._whole = whole
        sparse = sparse or {}
        self._dense = [arrays[path] for path in paths if path not in sparse]
        self._sparse = [(arrays[path], arrays[sparse[path]]) for path in paths if path in sparse]
        # The latest batches. A synchronous pool always sends the same slots, and creating the views costs
        # more than copying the rows.
        self._packed: _Batch | None = None
        self._unpacked: _Batch | None = None

    @property
    def max_bytes(self) -> int:
        """The length of a buffer with the rows of all slots."""
        parts = [*self._whole, *self._dense, *(array for array, _ in self._sparse)]
        slots = len(self._dense[0]) * _INTEGER.itemsize
        return _SLOTS_OFFSET + align(slots) + sum(align(part.nbytes) for part in parts)

    def pack(self, slots: NDArray[Any]) -> NDArray[np.uint8]:
        """Packs the rows of `slots`, ascending `[n]`. The buffer is valid until the next call."""
        batch = self._packed
        if batch is None or batch.slots.tobytes() != slots.tobytes():
            batch = self._packed = _Batch(slots.copy(), None, self._whole, self._dense)
        for array, part in zip(self._whole, batch.whole, strict=True):
            part[...] = array
        for array, part in zip(self._dense, batch.dense, strict=True):
            part[...] = array[batch.index]
        sparse = [array[index_of(slots[flags[batch.index]])] for array, flags in self._sparse]
        if not any(len(part) for part in sparse):
            return batch.buffer
        starts = [*accumulate((align(part.nbytes) for part in sparse), initial=batch.stop)]
        buffer = np.empty(starts.pop(), np.uint8)
        buffer[: batch.stop] = batch.buffer
        for part, start in zip(sparse, starts, strict=True):
            _view(buffer, start, part.shape, part.dtype)[...] = part
        return buffer

    def unpack(self, buffer: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Writes the rows of a buffer to the arrays, and returns their slots.

        It is fastest if the same buffer object holds rows of the same slots each time.
        """
        batch = self._unpacked
        if batch is None or not batch.matches(buffer):
            count = int(_view(buffer, 0, (1,), _INTEGER)[0])
            slots = _view(buffer, _SLOTS_OFFSET, (count,), _INTEGER).copy()
            batch = self._unpacked = _Batch(slots, buffer, self._whole, self._dense)
        index, slots, start = batch.index, batch.slots, batch.stop
        before = [flags[index].copy() for _, flags in self._sparse]
        for array, part in zip(self._whole, batch.whole, strict=True):
            array[...] = part
        for array, part in zip(self._dense, batch.dense, strict=True):
            array[index] = part
        for (array, flags), old in zip(self._sparse, before, strict=True):
            new = flags[index]
            array[slots[old & ~new]] = 0  # rows that are no longer sent
            flagged = slots[new]
            part = _view(buffer, start, (len(flagged), *array.shape[1:]), array.dtype)
            array[index_of(flagged)] = part
            start += align(part.nbytes)
        return slots


def _view(
    buffer: NDArray[np.uint8], start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    return buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


class WireFormat:
    """The packers of rows between a pool and a host; both ends have equal ones.

    Args:
        requested: Latest request of each slot `[num_envs]`, sent to the host.
        answered: Request that each slot's row answers `[num_envs]`, sent to the pool.
    """

    def __init__(
        self,
        spec: PoolSpec,
        arrays: Arrays,
        workers: range,
        *,
        requested: NDArray[np.int64],
        answered: NDArray[np.int64],
    ) -> None:
        actions = [leaf.path for leaf in spec.action_leaves if not leaf.is_object]
        options = [leaf.path for leaf in spec.option_leaves]
        results = [leaf.path for leaf in spec.timestep_leaves if not leaf.is_object]
        final = [path for path in results if path[:2] == ("info", "final_obs")]
        self._arrays = arrays
        self._rows = [*results, *((name,) for name in _WORKER_ROWS), ("completed",)]
        sent = arrays | {("requested",): requested}
        self.requests = {  # packers of each verb's inputs, for the host
            Verb.STEP: RowPacker(sent, [("requested",), *actions, *options]),
            Verb.RESET: RowPacker(sent, [("requested",), ("seed",), *options]),
        }
        self.results = RowPacker(  # for the pool
            arrays | {("completed",): answered},
            self._rows,
            whole=[arrays[name,][workers.start : workers.stop] for name in ("stats", "running")],
            sparse=dict.fromkeys(final, ("info", "_final_obs")),
        )

    def inheritance(self, worker: int) -> RowPacker:
        """Returns the packer of the rows that a worker inherits if its predecessor's host was lost."""
        return RowPacker(self._arrays, self._rows, whole=[self._arrays["stats",][worker : worker + 1]])
