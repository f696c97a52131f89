"""Locks over several resources, which threads get in the order of their arrival."""

from __future__ import annotations

import threading
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from itertools import takewhile


class FairLocks:
    """Locks over several resources, granted in order of arrival.

    A thread acquires all resources that it needs at once, and waits only for earlier threads that need one
    of them. So threads neither deadlock nor starve.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # In order of arrival: a thread and the resources that it holds or waits for. Guarded by `_changed`.
        self._queue: list[tuple[int, frozenset[Hashable]]] = []

    @contextmanager
    def acquire(self, *resources: Hashable) -> Generator[None]:
        """Waits for the resources and holds them in the block."""
        me = threading.get_ident()
        entry = me, frozenset(resources)

        def is_next() -> bool:
            earlier = takewhile(lambda queued: queued is not entry, self._queue)
            # Not blocked by its own entries: a signal handler may run while its thread holds a resource.
            return all(thread == me or others.isdisjoint(entry[1]) for thread, others in earlier)

        # `try` comes first: Ctrl-C right after the append must not leave the entry in the queue.
        try:
            with self._changed:
                self._queue.append(entry)
                while not is_next():
                    self._changed.wait()
            yield
        finally:
            with self._changed:
                self._queue = [queued for queued in self._queue if queued is not entry]
                if self._queue:
                    self._changed.notify_all()
