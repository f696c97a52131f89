"""Writes what the processes of a pool did as a timeline, for `VectorEnv.trace`.

`trace_pool` collects the traces of a block (`_tracing.py`), and writes Chrome's trace event format in JSON,
for Perfetto and chrome://tracing.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from time import monotonic_ns
from typing import Any

from jaxvec._pool.pool import Pool
from jaxvec._settings import check_count
from jaxvec._tracing import Loss, Span, Trace

_FIRST_PID = 1_000_000  # above the process ids in traces of jax.profiler, so that both can be shown together


@contextmanager
def trace_pool(
    pool: Pool, slices: tuple[tuple[int, int], ...], path: str | Path, max_events: int
) -> Generator[Path]:
    """Traces the block, see `VectorEnv.trace`. `slices` has the env ids `(first, stop)` of each worker."""
    path = Path(path)
    # Checked now, because otherwise the error would come after the whole run.
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it, such as {path / 'pool.json'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"can't write {path}: there is no folder {path.parent}; make it first")
    max_events = check_count("max_events", max_events, 1)
    epoch_ns, began_ns = _now()
    pool.start_trace(max_events)
    try:
        yield path
    finally:
        programs, workers = pool.stop_trace()
        ended_ns = monotonic_ns()
        if not workers:
            closed = Loss("the pool was closed within the block", ended_ns)
            workers = [Trace([], losses=(closed,))] * len(slices)
        times = {"epoch_ns": epoch_ns, "began_ns": began_ns, "ended_ns": ended_ns}
        _write(build(programs, workers, slices, pool_id=pool.id, **times), path)


def _now() -> tuple[int, int]:
    """Returns the times of the clock since 1970 and of the monotonic clock at the same moment, in ns."""
    # Of five tries, the one with the least time between the readings of the monotonic clock.
    tries = [(monotonic_ns(), time.time_ns(), monotonic_ns()) for _ in range(5)]
    before, epoch, after = min(tries, key=lambda readings: readings[2] - readings[0])
    return epoch, (before + after) // 2


def build(
    programs: Sequence[Trace],
    workers: Sequence[Trace],
    slices: Sequence[tuple[int, int]],
    *,
    pool_id: int,
    epoch_ns: int,
    began_ns: int,
    ended_ns: int,
) -> dict[str, Any]:
    """Returns the timeline of a block in Chrome's trace event format.

    `programs` are the traces of this process. `epoch_ns` is the start of the block since 1970; `began_ns`
    and `ended_ns` are its start and end by the monotonic clock.
    """
    tracks = [*_threads(programs), *map(_worker, range(len(slices)), slices, workers)]
    pid = _FIRST_PID + pool_id
    events = [_label(pid, 0, "process_name", name=f"jaxvec pool {pool_id}")]
    for tid, (name, trace) in enumerate(tracks, start=1):
        events.append(_label(pid, tid, "thread_name", name=name))
        events.append(_label(pid, tid, "thread_sort_index", sort_index=tid))
        events += _events(trace, pid, tid, began_ns)
    return {
        "displayTimeUnit": "ns",
        "otherData": {
            "made_by": "jaxvec",
            "epoch_ns": epoch_ns,
            "monotonic_ns": began_ns,
            "duration_ns": ended_ns - began_ns,
            "dropped": {name: trace.dropped for name, trace in tracks if trace.dropped},
            "lost": {name: [loss.why for loss in trace.losses] for name, trace in tracks if trace.losses},
        },
        "traceEvents": events,
    }


def _write(timeline: dict[str, Any], path: Path) -> None:
    """Writes a timeline with one event per line, compressed if the name ends in `.gz`."""
    *head, (key, events) = timeline.items()
    start = json.dumps(dict(head), indent=1)[:-2]
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(f"{start},\n {json.dumps(key)}: [\n")
        file.write(",\n".join(map(json.dumps, events)))
        file.write("\n]}\n")


def _worker(worker: int, slots: tuple[int, int], trace: Trace) -> tuple[str, Trace]:
    first, stop = slots
    envs = f"env {first}" if stop - first == 1 else f"envs {first}-{stop - 1}"
    return f"worker {worker} ({envs})", trace


def _threads(programs: Sequence[Trace]) -> Iterator[tuple[str, Trace]]:
    """Yields the name and the trace of each thread of this process, or an empty trace if there is none."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    by_thread: dict[int, list[Span]] = {}
    for trace in programs:
        for span in trace.spans:
            by_thread.setdefault(span.thread, []).append(span)
    dropped = sum(trace.dropped for trace in programs)
    for thread, spans in by_thread.items() or [(threading.get_native_id(), [])]:
        name = names.get(thread, f"thread {thread}")
        yield f"program ({name})", Trace(sorted(spans, key=attrgetter("ended")), dropped)
        dropped = 0  # reported once, because the threads of dropped spans are unknown


def _events(trace: Trace, pid: int, tid: int, began_ns: int) -> Iterator[dict[str, Any]]:
    at = {"pid": pid, "tid": tid}
    for span in trace.spans:
        start = (span.began - began_ns) / 1e3
        duration = (span.ended - span.began) / 1e3
        yield {"ph": "X", **at, "ts": start, "dur": duration, "name": span.what}
    remarks = [(loss.at, f"events are lost: {loss.why}") for loss in trace.losses]
    if trace.dropped:
        since = min((span.began for span in trace.spans), default=began_ns)
        remarks.append((since, f"{trace.dropped} earlier events were dropped; max_events= keeps more"))
    for when, text in remarks:
        yield {"ph": "i", "s": "t", **at, "ts": (when - began_ns) / 1e3, "name": text}


def _label(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}
