"""The native hand-off: futexes in the segment, waits without the GIL. Twin of `handoff.cc`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.channel import ParentChannel, WorkerChannel
from jaxvec._dispatch.dispatch import LOOK_AROUND, ParentHandoff, Partition, Work, WorkerHandoff
from jaxvec._dispatch.move import VERBS, Verb
from jaxvec._memory.segment import Marks
from jaxvec._native import library

_DONE = 0


class _Board(ctypes.Structure):
    """`Board` of handoff.h."""

    _numbers = ("num_slots", "num_workers", "spin_ns", "look_around_ns")
    _words = (
        "requested",
        "completed",
        "completed_at",
        "doorbell",
        "worker_notices",
        "asleep",
        "finished",
        "target",
        "sleepers",
        "parent_notices",
    )
    _fields_ = [(name, ctypes.c_uint32) for name in _numbers] + [(name, ctypes.c_void_p) for name in _words]

    def __init__(self, marks: Marks, spin_ns: int) -> None:
        super().__init__()
        self._marks: Marks | None = marks  # keeps the segment mapped for as long as C++ has its addresses
        self.num_slots = marks.requested.size
        self.num_workers = len(marks.doorbell)
        self.spin_ns = spin_ns
        self.look_around_ns = int(LOOK_AROUND * 1e9)
        for word in self._words:
            setattr(self, word, getattr(marks, word).ctypes.data)

    def forget(self) -> None:
        """Lets the segment go; nobody may use the words any more."""
        self._marks = None


class _Parent(ctypes.Structure):
    _fields_ = [
        ("board", _Board),
        ("sockets", ctypes.POINTER(ctypes.c_int32)),
        ("num_sockets", ctypes.c_uint32),
        ("request_number", ctypes.c_int64),
        ("waiters", ctypes.c_uint32),
        ("seen_notices", ctypes.c_uint32),
        ("looked_ns", ctypes.c_int64),
    ]


class _Worker(ctypes.Structure):
    _fields_ = [
        ("board", _Board),
        ("index", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
        ("seen_notices", ctypes.c_uint32),
    ]


class NativeParentEnd(ParentHandoff):
    """The native end of the parent."""

    def __init__(
        self,
        marks: Marks,
        slices: tuple[tuple[int, int], ...],
        channels: Sequence[ParentChannel],
        *,
        spin_ns: int,
    ) -> None:
        super().__init__(marks)
        self._library = _declared()
        self._board = _Board(marks, spin_ns)
        sockets = {channel.fileno() for channel in channels}
        self._sockets = (ctypes.c_int32 * len(sockets))(*sockets)
        self._parent = _Parent(self._board, self._sockets, len(sockets))
        self._reference = ctypes.byref(self._parent)
        self._partition = Partition(slices)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._parent)

    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        for worker, part in self._partition.of(slots):
            self._library.jaxvec_send(self._reference, worker, verb, part.ctypes.data, len(part))

    def pass_on(self, requests: NDArray[Any], slots: NDArray[Any]) -> None:
        for worker, part in self._partition.of(slots):
            theirs = np.ascontiguousarray(requests[part])
            self._library.jaxvec_pass_on(
                self._reference, worker, theirs.ctypes.data, part.ctypes.data, len(part)
            )

    def wait(self, slots: NDArray[Any], count: int, seconds: float) -> bool:
        # After an interrupt, Python's signal handlers run once this returns.
        outcome: int = self._library.jaxvec_wait(
            self._reference, slots.ctypes.data, len(slots), count, int(seconds * 1e9)
        )
        return outcome == _DONE

    def begin_look(self, slots: NDArray[Any], count: int, seconds: float) -> float:
        self._library.jaxvec_mark_notices_seen(self._reference)  # before: another may come meanwhile
        return 0  # it sleeps in `wait`

    def notify_worker(self, worker: int) -> None:
        self._library.jaxvec_notify_worker(self._reference, worker)

    def notify_parent(self) -> None:
        self._library.jaxvec_notify_parent(ctypes.byref(self._board))

    def close(self) -> None:
        super().close()
        self._board.forget()


class NativeWorkerEnd(WorkerHandoff):
    """The native end of a worker."""

    def __init__(
        self,
        marks: Marks,
        worker: int,
        slots: tuple[int, int],
        channel: WorkerChannel,
        *,
        spin_ns: int,
        notices: int,
    ) -> None:
        super().__init__(marks)
        self._library = _declared()
        self._board = _Board(marks, spin_ns)
        self._worker = _Worker(self._board, worker, *slots, notices)
        self._reference = ctypes.byref(self._worker)
        self._channel = channel
        self._operation, self._count = ctypes.c_uint32(), ctypes.c_uint32()
        self._own = slice(*slots)
        self._slots = np.empty(slots[1] - slots[0], np.int64)
        self._address = self._slots.ctypes.data  # slow to ask for
        self._out = ctypes.byref(self._operation), self._address, ctypes.byref(self._count)
        self._taken = self._slots  # as many as there were last
        self._all = np.arange(*slots, dtype=np.int64)
        self._slot_0 = self._all.ctypes.data - 8 * slots[0]  # where slot 0 would be, among all of ours

    def idle(self) -> bool:
        return self.next_work(self._own) is None and not self._channel.readable()

    def receive(self) -> Any:
        self._library.jaxvec_take(self._reference, *self._out)
        count = self._count.value
        if not count:
            return self._channel.receive()
        if count != len(self._taken):
            self._taken = self._slots[:count]
        return Work(VERBS[self._operation.value], self._taken)

    def post(self, slots: NDArray[Any]) -> None:
        address = self._address if slots is self._taken else slots.ctypes.data
        self._library.jaxvec_post(self._reference, address, len(slots))

    def post_some(self, first: int, count: int) -> None:
        self._library.jaxvec_post(self._reference, self._slot_0 + 8 * first, count)

    def receive_message(self) -> Any:
        message = self._channel.receive()
        self._worker.seen_notices += 1  # the one that came with it
        return message

    def notify_worker(self) -> None:
        self._library.jaxvec_notify_worker(ctypes.byref(_Parent(self._board)), self._worker.index)

    def notify_parent(self) -> None:
        self._library.jaxvec_notify_parent(ctypes.byref(self._board))


@cache
def _declared() -> ctypes.CDLL:
    u32, i64, pointer = ctypes.c_uint32, ctypes.c_int64, ctypes.c_void_p
    declared = library.declare(
        jaxvec_send=(None, [pointer, u32, u32, pointer, u32]),
        jaxvec_pass_on=(None, [pointer, u32, pointer, pointer, u32]),
        jaxvec_notify_worker=(None, [pointer, u32]),
        jaxvec_wait=(ctypes.c_int32, [pointer, pointer, u32, u32, i64]),
        jaxvec_take=(None, [pointer, pointer, pointer, pointer]),
        jaxvec_post=(None, [pointer, pointer, u32]),
        jaxvec_mark_notices_seen=(None, [pointer]),
        jaxvec_notify_parent=(None, [pointer]),
    )
    library.check_records(_Board, _Parent, _Worker)
    return declared
