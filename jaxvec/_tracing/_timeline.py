"""A timeline as a file: Chrome's trace events, in JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from jaxvec._tracing._recorder import Loss, Record, Span

Timeline = dict[str, Any]

_FIRST_PID = 1_000_000  # beyond those in jax.profiler's traces


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
) -> Timeline:
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


def write(timeline: Timeline, path: Path) -> None:
    """Writes a timeline, an event a line; compressed if the name ends in `.gz`."""
    *head, (key, events) = timeline.items()
    start = json.dumps(dict(head), indent=1)[:-2]
    with _open(path, "wt") as file:
        file.write(f"{start},\n {json.dumps(key)}: [\n")
        file.write(",\n".join(map(json.dumps, events)))
        file.write("\n]}\n")


def read(path: Path) -> Timeline:
    """Reads a timeline, or another file of Chrome's trace events."""
    with _open(path, "rt") as file:
        return json.load(file)


def _open(path: Path, mode: str) -> Any:
    return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)


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
        dropped = 0  # nobody knows of which thread they were


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
