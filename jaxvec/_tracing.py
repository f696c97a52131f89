"""Records what the processes of a pool did and when, and writes it as a timeline.

Each process records spans of time in a `Recorder`. Their rows line up because all read the system's monotonic
clock, which is the same for all processes, also in C++ (`_native/trace.h`); those of other machines are moved
by the difference of the clocks. `tracing` collects the records and writes Chrome's trace events in JSON,
which Perfetto and chrome://tracing open. Workers import this module, so it imports no JAX.
"""

from __future__ import annotations

import gzip
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from threading import get_native_id
from time import monotonic_ns
from typing import Any, NamedTuple

_NOTHING = nullcontext()
_FIRST_PID = 1_000_000  # beyond those in jax.profiler's traces


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


@contextmanager
def tracing(
    start: Callable[[int], None],
    stop: Callable[[], tuple[list[Record], list[Record]]],
    path: str | Path,
    slices: tuple[tuple[int, int], ...],
    *,
    pool_id: int,
    max_events: int,
) -> Generator[Path]:
    """See `VectorEnv.trace`.

    Args:
        start: starts to record so many events.
        stop: returns the records of the program's threads, and of the workers.
        path: of the file.
        slices: `(first, stop)` of each worker's envs.
        pool_id: of the pool.
        max_events: how many are kept of each worker and of the program.
    """
    path = _check_file(Path(path))
    if isinstance(max_events, bool) or not isinstance(max_events, int) or max_events < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"max_events must be an integer of at least 1, not {max_events!r}")
    epoch_ns, began_ns = _now()
    start(max_events)
    try:
        yield path
    finally:
        programs, workers = stop()
        ended_ns = monotonic_ns()
        if not workers:
            workers = [Record([], losses=(Loss("the pool was closed within the block", ended_ns),))] * len(
                slices
            )
        timeline = build(
            programs,
            workers,
            slices,
            pool_id=pool_id,
            epoch_ns=epoch_ns,
            began_ns=began_ns,
            ended_ns=ended_ns,
        )
        _write(timeline, path)


def _now() -> tuple[int, int]:
    """Reads the clock since 1970 and the monotonic one at the same moment, as nearly as can be."""
    tries = [(monotonic_ns(), time.time_ns(), monotonic_ns()) for _ in range(5)]
    before, epoch, after = min(tries, key=lambda each: each[2] - each[0])
    return epoch, (before + after) // 2


def _check_file(path: Path) -> Path:
    """Returns the path, if a file can be made there; else it would be known only when all was run."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it, such as {path / 'pool.json'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it first")
    return path


@dataclass(frozen=True)
class _Track:
    """A row, on which spans lie in or beside each other."""

    name: str
    spans: list[Span]
    dropped: int = 0
    losses: tuple[Loss, ...] = ()


def build(
    programs: Sequence[Record],
    workers: Sequence[Record],
    slices: Sequence[tuple[int, int]],
    *,
    pool_id: int,
    epoch_ns: int,
    began_ns: int,
    ended_ns: int,
) -> dict[str, Any]:
    """Makes the timeline of a block.

    Args:
        programs: what the program's threads did.
        workers: what each worker did.
        slices: `(first, stop)` of each worker's envs.
        pool_id: of the pool.
        epoch_ns: when the block began, since 1970.
        began_ns, ended_ns: when it began and ended, by the monotonic clock.
    """
    tracks = [*_threads(programs), *map(_worker, range(len(slices)), slices, workers)]
    pid = _FIRST_PID + pool_id
    events = [_label(pid, 0, "process_name", name=f"jaxvec pool {pool_id}")]
    for tid, track in enumerate(tracks, start=1):
        events.append(_label(pid, tid, "thread_name", name=track.name))
        events.append(_label(pid, tid, "thread_sort_index", sort_index=tid))
        events += _events(track, pid, tid, began_ns)
    return {
        "displayTimeUnit": "ns",
        "otherData": {
            "made_by": "jaxvec",
            "epoch_ns": epoch_ns,
            "monotonic_ns": began_ns,
            "duration_ns": ended_ns - began_ns,
            "dropped": {track.name: track.dropped for track in tracks if track.dropped},
            "lost": {track.name: [loss.why for loss in track.losses] for track in tracks if track.losses},
        },
        "traceEvents": events,
    }


def _write(timeline: dict[str, Any], path: Path) -> None:
    """Writes a timeline, an event a line; compressed if the name ends in `.gz`."""
    *head, (key, events) = timeline.items()
    start = json.dumps(dict(head), indent=1)[:-2]
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(f"{start},\n {json.dumps(key)}: [\n")
        file.write(",\n".join(map(json.dumps, events)))
        file.write("\n]}\n")


def _worker(worker: int, slots: tuple[int, int], record: Record) -> _Track:
    first, stop = slots
    envs = f"env {first}" if stop - first == 1 else f"envs {first}-{stop - 1}"
    return _Track(f"worker {worker} ({envs})", record.spans, record.dropped, record.losses)


def _threads(programs: Sequence[Record]) -> Iterator[_Track]:
    """Yields a track for each thread of the program; there is one, if only to say that there is nothing."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    by_thread: dict[int, list[Span]] = {}
    for record in programs:
        for span in record.spans:
            by_thread.setdefault(span.thread, []).append(span)
    dropped = sum(record.dropped for record in programs)
    for thread, spans in by_thread.items() or [(threading.get_native_id(), [])]:
        name = names.get(thread, f"thread {thread}")
        yield _Track(f"program ({name})", sorted(spans, key=attrgetter("ended")), dropped)
        dropped = 0  # counted once: their threads are unknown


def _events(track: _Track, pid: int, tid: int, began_ns: int) -> Iterator[dict[str, Any]]:
    at = {"pid": pid, "tid": tid}
    for span in track.spans:
        start, duration = (span.began - began_ns) / 1e3, (span.ended - span.began) / 1e3
        yield {"ph": "X", **at, "ts": start, "dur": duration, "name": span.what}
    remarks = [(loss.at, f"events are lost: {loss.why}") for loss in track.losses]
    if track.dropped:
        since = min((span.began for span in track.spans), default=began_ns)
        remarks.append((since, f"{track.dropped} earlier events were dropped; max_events= keeps more"))
    for when, text in remarks:
        yield {"ph": "i", "s": "t", **at, "ts": (when - began_ns) / 1e3, "name": text}


def _label(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}
