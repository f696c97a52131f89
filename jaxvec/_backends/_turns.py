"""Who comes first, is first: for what one thread at a time may do, while others go on with other things."""

from __future__ import annotations

import threading
from collections.abc import Generator, Hashable
from contextlib import contextmanager


class Turns:
    """Lets threads have things for a while, each in the order in which they asked for it.

    Who needs several gets them at once, and whoever came later waits for those alone that it needs, too: so
    nobody has one thing and waits for another, and nobody is overtaken for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[int, frozenset[Hashable]]] = []  # threads, and what each has or waits for

    @contextmanager
    def at(self, *things: Hashable) -> Generator[None]:
        """Waits until nobody who came before needs any of the things, which are this thread's in the block.

        A thread does not wait for itself: it is asked from a signal handler.
        """
        me = threading.get_ident()
        entry = me, frozenset(things)

        def is_next() -> bool:
            for each in self._queue:
                if each is entry:
                    break
                thread, others = each
                if thread != me and not others.isdisjoint(entry[1]):
                    return False
            return True

        try:  # first: an interrupt may come between entering and our knowing of it
            with self._changed:
                self._queue.append(entry)
                while not is_next():
                    self._changed.wait()
            yield
        finally:
            with self._changed:
                self._queue = [each for each in self._queue if each is not entry]
                if self._queue:
                    self._changed.notify_all()
