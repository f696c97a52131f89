"""Records what happened when: spans of time, the latest so many.

Each process keeps its own. Their rows line up because all read the system's monotonic clock, which is one
for all processes; so does C++, in `_native/trace.h`. Those of other machines are moved by what their clocks
are ahead.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import get_native_id
from time import monotonic_ns
from typing import Any, NamedTuple

_NOTHING = nullcontext()


class Span(NamedTuple):
    """What a thread did, and when, in ns of the monotonic clock."""

    what: str
    began: int
    ended: int
    thread: int  # the system's number


class Loss(NamedTuple):
    """Why spans are missing, and when, in ns of the monotonic clock, that was noticed."""

    why: str
    at: int


@dataclass(frozen=True)
class Record:
    """What was recorded.

    Attributes:
        spans: in the order in which they ended.
        dropped: how many came before them.
        losses: of others, that may have been anywhere.
    """

    spans: list[Span]
    dropped: int = 0
    losses: tuple[Loss, ...] = ()

    def earlier(self, ns: int) -> Record:
        """Returns the same, but so many nanoseconds earlier."""
        spans = [span._replace(began=span.began - ns, ended=span.ended - ns) for span in self.spans]
        return replace(self, spans=spans)


class Recorder:
    """Keeps the latest `capacity` spans, from any thread; earlier ones are dropped, and counted."""

    def __init__(self, capacity: int) -> None:
        self._since = monotonic_ns()
        self._spans: deque[tuple[str, int, int, int]] = deque(maxlen=capacity)
        self._number = itertools.count()  # whose `next` no other thread can interrupt

    def add(self, what: str, began: int) -> None:
        """Adds a span that ends now; what was before we record is cut off."""
        self._spans.append((what, max(began, self._since), monotonic_ns(), get_native_id()))
        next(self._number)

    @contextmanager
    def span(self, what: str) -> Generator[None]:
        """Adds the time that the block takes."""
        began = monotonic_ns()
        try:
            yield
        finally:
            self.add(what, began)

    def take(self) -> Record:
        """Returns what was recorded; the end of it."""
        spans = [Span(*each) for each in self._spans.copy()]
        return Record(spans, max(next(self._number) - len(spans), 0))


def span(recorder: Recorder | None, what: str) -> AbstractContextManager[None]:
    """Records the time that the block takes, if there is a recorder."""
    return _NOTHING if recorder is None else recorder.span(what)


class RecordedEnv:
    """Stands for one of a slice's envs while its steps are recorded.

    So the loop that steps does not ask whether they are. It goes by its place, where another env may be by
    the next step.
    """

    def __init__(self, envs: Sequence[Any], place: int, name: str, recorder: Recorder) -> None:
        self._envs, self._place, self._add = envs, place, recorder.add
        self._step, self._reset = f"step {name}", f"reset {name}"

    def step(self, action: Any) -> Any:
        """Steps the env."""
        began = monotonic_ns()
        try:
            return self._envs[self._place].step(action)
        finally:
            self._add(self._step, began)

    def reset(self, **kwargs: Any) -> Any:
        """Resets the env."""
        began = monotonic_ns()
        try:
            return self._envs[self._place].reset(**kwargs)
        finally:
            self._add(self._reset, began)
