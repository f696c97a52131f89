"""The native dispatch: futexes in the segment, waits without the GIL. Wraps `dispatch.cc`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._engine.channel import Channel
from jaxvec._engine.dispatch import DEATH_CHECK_INTERVAL, ParentDispatch, Work, WorkerDispatch
from jaxvec._engine.move import VERBS, Verb
from jaxvec._memory.segment import Marks
from jaxvec._native import load
from jaxvec._settings import candidates

_LONGEST_SPIN_NS = 2_000_000  # after longer waits, a wake of about 50 us matters little
_NOTHING = 16  # the operation after a long sleep or a signal, `kEnd` in dispatch.h


class NativeParentDispatch(ParentDispatch):
    def __init__(
        self,
        marks: Marks,
        slices: tuple[tuple[int, int], ...],
        channels: Sequence[Channel],
        *,
        spin_ns: int,
    ) -> None:
        super().__init__(marks)
        sockets = np.array([channel.fileno() for channel in channels], np.int32)
        words = candidates()
        self.native_end = load().parent(
            marks,
            np.array([stop for _, stop in slices]),
            sockets,
            spin_ns,
            int(DEATH_CHECK_INTERVAL * 1e9),
            _LONGEST_SPIN_NS if "spin" in words else 0,
            "line" in words,
        )

    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        self.native_end.send(verb, slots)

    def wait(self, slots: NDArray[Any], count: int, seconds: float) -> bool:
        # Returns early after a signal, so that Python's handlers can run.
        return self.native_end.wait(slots, count, int(seconds * 1e9))

    def start_poll(self, slots: NDArray[Any], count: int, seconds: float) -> float:
        self.native_end.mark_notices_seen()  # before the poll, so a later notice still ends the next wait
        return 0  # do not block: `wait` has slept already

    def notify_worker(self, worker: int) -> None:
        self.native_end.notify_worker(worker)

    def close(self) -> None:
        super().close()
        self.native_end.close()


class NativeWorkerDispatch(WorkerDispatch):
    def __init__(
        self,
        marks: Marks,
        worker: int,
        slots: tuple[int, int],
        channel: Channel,
        *,
        spin_ns: int,
        notices: int,
        keeps_core: bool,
    ) -> None:
        super().__init__(marks)
        own_slots = np.arange(*slots)
        self._worker = load().worker(marks, worker, own_slots, notices, spin_ns, keeps_core)
        self._channel = channel
        self._own = slice(*slots)
        self._slots = np.empty_like(own_slots)
        self._taken = self._slots  # view of the latest length, as most requests have equal lengths

    def idle(self) -> bool:
        return self.next_work(self._own) is None and not self._channel.ready()

    def receive(self) -> Any:
        while True:
            operation, count = self._worker.take(self._slots)
            if count:
                break
            if operation != _NOTHING:
                return self._channel.receive()
            if self._channel.has_ended():
                raise EOFError
        if count != len(self._taken):
            self._taken = self._slots[:count]
        return Work(VERBS[operation], self._taken)

    def post(self, slots: NDArray[Any]) -> None:
        self._worker.post(slots)

    def post_some(self, first: int, count: int) -> None:
        self._worker.post_some(first, count)

    def receive_message(self) -> Any:
        message = self._channel.receive()
        self._worker.mark_notice_seen()  # the notice of this message
        return message

    def notify_parent(self) -> None:
        self._worker.notify_parent()
