"""Checks the nodes of a Ray cluster: that the head answers, and that an actor's node is like this one."""

from __future__ import annotations

import errno
import importlib
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxvec._slices._failures import Report

_EVERY = 1.0  # seconds between looks at the head
_FRACTION = 2 / 3  # of the time that Ray waits for a head to come back


class ActorLostError(Exception):
    """An actor can't serve, or no longer; says why."""


class TooManyFilesError(ActorLostError):
    """An actor can't be reached, for want of descriptors."""

    def __init__(self) -> None:
        super().__init__(
            "can't be reached: this program has too many open files, and each actor needs some; raise its "
            "limit (ulimit -n), or take more workers_per_actor"
        )


class HeadMonitor:
    """Looks whether the cluster's head can be reached, until it is closed.

    Steps don't need the head, so one that comes back in time, as Ray's fault-tolerant ones do, is not
    missed. One that does not is fatal: Ray exits the process, by `RAY_gcs_rpc_server_reconnect_timeout_s`
    (60 s by default). After two thirds of that the pool gets its error, while there is time to save.

    Attributes:
        lost: what is wrong, if it is.
    """

    def __init__(self, address: str, tell: Callable[[str], None]) -> None:
        """Begins to watch.

        Args:
            address: of the head, `host:port`.
            tell: is called once, in another thread, when the head is lost.
        """
        self._address = address
        self._tell = tell
        self.lost = ""
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()

    def _watch(self) -> None:
        patience = _FRACTION * float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112
        seen = time.monotonic()
        while not self._closed.wait(_EVERY):
            if self._answers():
                seen = time.monotonic()
            elif time.monotonic() - seen > patience:
                self.lost = f"was lost: the Ray cluster's head at {self._address} does not answer"
                self._tell(self.lost)
                return

    def _answers(self) -> bool:
        try:
            _connect(self._address, _EVERY)
        except OSError as error:
            return error.errno == errno.EMFILE  # which says nothing of the head
        return True


def check_reachable(address: str, timeout: float) -> None:
    """Checks that somebody listens where a cluster's head should be, for which Ray would wait for minutes.

    Args:
        address: as `ray.init` takes it; only one with a port is checked.
        timeout: seconds.

    Raises:
        ConnectionError: nobody does.
    """
    address = address.rpartition("://")[2]
    if not address.rpartition(":")[2].isdigit():  # such as "auto", for which Ray looks
        return
    try:
        _connect(address, timeout)
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster can be reached at {address}: {error}; check Ray(address=...) or RAY_ADDRESS, "
            "and whether a firewall is between"
        ) from error


def _connect(address: str, timeout: float) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout).close()


def identity() -> dict[str, str]:
    """Returns what a node has to have as this one has it."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "jaxvec": importlib.import_module("jaxvec").__version__,
    }


def check_alike(said: Mapping[str, str]) -> None:
    """Checks what an actor's `identify` has said; raises `ActorLostError` if it can't work with us."""
    if "error" in said:
        raise ActorLostError(
            f"can't import jaxvec ({said['error']}); install it there, or have Ray do so: "
            'backend=jaxvec.Ray(runtime_env={"pip": ["jaxvec"]})'
        )
    for what, ours in identity().items():
        if said[what] != ours:
            raise ActorLostError(
                f"has {what} {said[what]}, but this process has {ours}; they must be the same"
            )


def dead_nodes(ray: Any) -> set[str]:
    """Returns the nodes that the cluster has had and lost."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def check_descriptors() -> None:
    """Raises `TooManyFilesError` if none is left: Ray would try to connect to an actor without end."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise TooManyFilesError from error


def clock_offset(read_clock: Callable[[], int]) -> int:
    """Returns how many ns an actor's monotonic clock is ahead of ours, to half of the way there and back."""
    found: list[tuple[int, int]] = []
    for _ in range(5):  # the quickest answer counts
        asked = time.monotonic_ns()
        theirs = read_clock()
        answered = time.monotonic_ns()
        found.append((answered - asked, theirs - (asked + answered) // 2))
    return min(found)[1]


def on_node(report: Report, node: str) -> Report:
    """Returns a report that says where it comes from."""
    hint = ""
    if report.kind in ("ModuleNotFoundError", "ImportError"):
        hint = '; install it there, or have Ray do so: backend=jaxvec.Ray(runtime_env={"pip": [...]})'
    return replace(report, message=f"{report.message} (on {node}{hint})")


def describe_loss(error: BaseException) -> str:
    """Says in a line or a few what Ray says in many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"was lost: {type(error).__name__}: {' '.join(lines)[:2000]}"
