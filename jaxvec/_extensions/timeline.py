"""Writes what the processes of a pool did as a timeline, for `VectorEnv.trace`.

`trace_pool` collects the traces of a block (`_tracing.py`), and writes Chrome's trace event format in JSON,
for Perfetto and chrome://tracing.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from time import monotonic_ns
from types import MappingProxyType
from typing import Any

from jaxvec._errors import JaxvecError
from jaxvec._pool.pool import Pool
from jaxvec._settings import check_count
from jaxvec._tracing import Span, SpanRecorder, Trace

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
    replacements = [*pool.workers.incarnations]
    errors = [*pool.workers.last_errors]
    recorder = _start(pool, max_events)
    try:
        yield path
    finally:
        programs, answers = _stop(pool, recorder)
        workers = [answer if isinstance(answer, Trace) else Trace([]) for answer in answers]
        lost: dict[int, str] = {}
        for worker in range(len(slices)):
            error = pool.workers.last_errors[worker]
            if not answers:
                lost[worker] = "the pool was closed within the block"
            elif isinstance(answer := answers[worker], JaxvecError):
                lost[worker] = str(answer)
            elif answer is None:
                lost[worker] = "the worker did not send its trace after the pool broke"
            elif pool.workers.incarnations[worker] != replacements[worker]:
                lost[worker] = "the worker was recycled" if error is errors[worker] else str(error)
        times = {"epoch_ns": epoch_ns, "began_ns": began_ns, "ended_ns": monotonic_ns()}
        workers = workers or [Trace([])] * len(slices)
        _write(build(programs, workers, slices, lost=lost, pool_id=pool.id, **times), path)


def _start(pool: Pool, capacity: int) -> SpanRecorder:
    """Starts to record spans: the latest `capacity` of each worker, of Python, and of C++."""
    engine = pool.engine
    with engine.exclusive():
        pool.state.check()
        if engine.recorder is not None:
            raise RuntimeError(f"pool {pool.id} is being traced already; end that trace first")
        with pool.state.breaking():
            pool.workers.start_trace(capacity)
        engine.start_trace(capacity)
        engine.recorder = SpanRecorder(capacity)
        return engine.recorder


def _stop(pool: Pool, recorder: SpanRecorder) -> tuple[list[Trace], Sequence[Trace | JaxvecError | None]]:
    """Stops recording. Returns the traces of Python and C++, and of the workers (none if closed)."""
    hurry = pool.closed or pool.state.broken_by is not None
    with pool.engine.exclusive(patience=1.0 if hurry else None):
        programs = [recorder.take(), pool.engine.stop_trace()]
        pool.engine.recorder = None
        try:
            with pool.state.breaking():
                answers = [] if pool.closed else pool.workers.stop_trace(hurry=hurry)
        except JaxvecError:  # broken by this, which the next call reports; or closed by another thread
            answers = [] if pool.closed else pool.workers.stop_trace(hurry=True)
        return programs, answers


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
    lost: Mapping[int, str] = MappingProxyType({}),
    pool_id: int,
    epoch_ns: int,
    began_ns: int,
    ended_ns: int,
) -> dict[str, Any]:
    """Returns the timeline of a block in Chrome's trace event format.

    `programs` are the traces of this process, and `lost` says of some workers why they lack earlier spans.
    `epoch_ns` is the start of the block since 1970; `began_ns` and `ended_ns` are its start and end by the
    monotonic clock.
    """
    tracks = [*_threads(programs), *map(_worker, range(len(slices)), slices, workers)]
    reasons = {tracks[worker - len(slices)][0]: why for worker, why in lost.items()}
    pid = _FIRST_PID + pool_id
    events = [_label(pid, 0, "process_name", name=f"jaxvec pool {pool_id}")]
    for tid, (name, trace) in enumerate(tracks, start=1):
        events.append(_label(pid, tid, "thread_name", name=name))
        events.append(_label(pid, tid, "thread_sort_index", sort_index=tid))
        events += _events(trace, reasons.get(name), pid, tid, began_ns)
    return {
        "displayTimeUnit": "ns",
        "otherData": {
            "made_by": "jaxvec",
            "epoch_ns": epoch_ns,
            "monotonic_ns": began_ns,
            "duration_ns": ended_ns - began_ns,
            "dropped": {name: trace.dropped for name, trace in tracks if trace.dropped},
            "lost": {name: [why] for name, why in reasons.items()},
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


def _events(trace: Trace, lost: str | None, pid: int, tid: int, began_ns: int) -> Iterator[dict[str, Any]]:
    at = {"pid": pid, "tid": tid}
    for span in trace.spans:
        start = (span.began - began_ns) / 1e3
        duration = (span.ended - span.began) / 1e3
        yield {"ph": "X", **at, "ts": start, "dur": duration, "name": span.what}
    remarks = [] if lost is None else [f"events are lost: {lost}"]
    if trace.dropped:
        remarks.append(f"{trace.dropped} earlier events were dropped; max_events= keeps more")
    since = min((span.began for span in trace.spans), default=began_ns)
    for text in remarks:
        yield {"ph": "i", "s": "t", **at, "ts": (since - began_ns) / 1e3, "name": text}


def _label(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}
