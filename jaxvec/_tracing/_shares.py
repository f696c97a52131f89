"""What the time of a traced pool went into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxvec._tracing._timeline import Timeline

_HAND_OFFS = ("jaxvec.", "VectorEnv.")  # how their names begin
_WAIT = "wait for workers"


@dataclass(frozen=True)
class WorkerShares:
    """Shares of the time from the program's first hand-off to the end of its last; the rest is jaxvec's own.

    Attributes:
        name: of the worker, with its envs.
        step: in its envs' steps.
        reset: in their resets.
        wait: without work.
    """

    name: str
    step: float
    reset: float
    wait: float


@dataclass(frozen=True)
class Shares:
    """What the time of a program and its workers went into.

    Attributes:
        seconds: from its first hand-off to the end of its last.
        hand_offs: how many.
        wait: share of that time that it waited for workers.
        hand_off: share of it that hand-offs took besides. What is left is the program's own.
        workers: of each.
    """

    seconds: float
    hand_offs: int
    wait: float
    hand_off: float
    workers: tuple[WorkerShares, ...]


def of(timeline: Timeline) -> Shares:
    """Adds up a timeline's spans; raises `ValueError` if there is no hand-off among them."""
    names = {e["tid"]: e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "thread_name"}
    spans: dict[int, list[dict[str, Any]]] = {tid: [] for tid in names}
    for event in timeline["traceEvents"]:
        if event["ph"] == "X":
            spans[event["tid"]].append(event)
    program = [span for tid, name in names.items() if name.startswith("program") for span in spans[tid]]
    hand_offs = [span for span in program if span["name"].startswith(_HAND_OFFS)]
    if not hand_offs:
        raise ValueError(
            "the trace has no reset or step, so there is no time to break down: call them within its block"
        )
    start = min(span["ts"] for span in hand_offs)
    stop = max(span["ts"] + span["dur"] for span in hand_offs)

    def share(spans: list[dict[str, Any]], kind: str, start: float) -> float:
        inside = (
            min(span["ts"] + span["dur"], stop) - max(span["ts"], start)
            for span in spans
            if span["name"].startswith(kind)
        )
        return sum(max(each, 0) for each in inside) / (stop - start) if start < stop else 0.0

    wait = share(program, _WAIT, start)
    workers: list[WorkerShares] = []
    for tid, name in names.items():
        if name.startswith("worker"):
            mine = spans[tid]
            since = max(
                start, min((span["ts"] for span in mine), default=start)
            )  # what was before is dropped
            parts = (share(mine, kind, since) for kind in ("step ", "reset ", "wait"))
            workers.append(WorkerShares(name, *parts))
    total = sum(share(hand_offs, kind, start) for kind in _HAND_OFFS)
    return Shares((stop - start) / 1e6, len(hand_offs), wait, total - wait, tuple(workers))
