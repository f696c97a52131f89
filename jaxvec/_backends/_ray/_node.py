"""What a node of a Ray cluster has to have, and what is said of it."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic_ns
from typing import Any

from jaxvec._slices._failures import Report


class Lost(Exception):
    """An actor can't serve, or no longer; says why."""


def identity() -> dict[str, str]:
    """Returns what a node has to have as this one has it."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "jaxvec": importlib.import_module("jaxvec").__version__,
    }


def require_alike(said: Mapping[str, str]) -> None:
    """Checks what an actor's `identify` has said; raises `Lost` if it can't work with us."""
    if "error" in said:
        raise Lost(
            f"can't import jaxvec ({said['error']}); install it there, or have Ray do so: "
            'backend=jaxvec.Ray(runtime_env={"pip": ["jaxvec"]})'
        )
    for what, ours in identity().items():
        if said[what] != ours:
            raise Lost(f"has {what} {said[what]}, but this process has {ours}; they must be the same")


def dead(ray: Any) -> set[str]:
    """Returns the nodes that the cluster has had and lost."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def ahead(read_clock: Callable[[], int], *, times: int = 5) -> int:
    """Returns how far an actor's monotonic clock is ahead of ours, in ns, to half of the way there and back.

    Args:
        read_clock: asks for what it shows.
        times: how often; the quickest answer counts.
    """
    found: list[tuple[int, int]] = []
    for _ in range(times):
        asked = monotonic_ns()
        theirs = read_clock()
        answered = monotonic_ns()
        found.append((answered - asked, theirs - (asked + answered) // 2))
    return min(found)[1]


def on_node(report: Report, node: str) -> Report:
    """Returns a report that says where it comes from."""
    hint = ""
    if report.kind in ("ModuleNotFoundError", "ImportError"):
        hint = '; install it there, or have Ray do so: backend=jaxvec.Ray(runtime_env={"pip": [...]})'
    return replace(report, message=f"{report.message} (on {node}{hint})")


def describe(error: BaseException) -> str:
    """Says in a line or a few what Ray says in many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"was lost: {type(error).__name__}: {' '.join(lines)[:2000]}"
