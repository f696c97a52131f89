"""Records what the processes of a pool do.

Each process records spans in a `SpanRecorder`. The spans of several processes can be compared, because all
read the monotonic clock of the system, also in C++ (`_native/trace.h`). `_extensions/timeline.py` writes them
to a file. Workers import this module, so it must not import JAX.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_native_id
from time import monotonic_ns
from typing import Any, NamedTuple

_NO_SPAN = nullcontext()


class Span(NamedTuple):
    """An activity of a thread, with times in ns of the monotonic clock."""

    what: str
    began: int
    ended: int
    thread: int  # the system's id


@dataclass(frozen=True)
class Trace:
    """The spans of one process."""

    spans: list[Span]  # in the order in which they ended
    dropped: int = 0  # number of spans before these that exceeded the capacity


class SpanRecorder:
    """A ring buffer of the latest `capacity` spans of any thread, which counts the dropped ones."""

    def __init__(self, capacity: int) -> None:
        self._since = monotonic_ns()
        self._spans: deque[tuple[str, int, int, int]] = deque(maxlen=capacity)
        self._number = itertools.count()  # of spans; `next` is atomic, unlike `+= 1`

    def add(self, what: str, began: int) -> None:
        """Adds a span that ends now, without the part before the recorder was made."""
        self._spans.append((what, max(began, self._since), monotonic_ns(), get_native_id()))
        next(self._number)

    @contextmanager
    def span(self, what: str) -> Generator[None]:
        began = monotonic_ns()
        try:
            yield
        finally:
            self.add(what, began)

    def take(self) -> Trace:
        """Returns the trace. No spans may be added afterwards."""
        spans = [Span(*fields) for fields in self._spans.copy()]
        return Trace(spans, max(next(self._number) - len(spans), 0))


def span(recorder: SpanRecorder | None, what: str) -> AbstractContextManager[None]:
    """Records the block as a span, if there is a recorder."""
    return _NO_SPAN if recorder is None else recorder.span(what)


class RecordedEnv:
    """Wraps an env of a slice while it is traced, so that the stepping loop needs no check for tracing."""

    def __init__(self, envs: Sequence[Any], place: int, name: str, recorder: SpanRecorder) -> None:
        # A fault may replace the env, so each call looks it up in `envs`.
        self._envs = envs
        self._place = place
        self._recorder = recorder
        self._step = f"step {name}"
        self._reset = f"reset {name}"

    def step(self, action: Any) -> Any:
        with self._recorder.span(self._step):
            return self._envs[self._place].step(action)

    def reset(self, **kwargs: Any) -> Any:
        with self._recorder.span(self._reset):
            return self._envs[self._place].reset(**kwargs)
