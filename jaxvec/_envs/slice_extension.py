"""The door for subsystems in a worker: `SliceExtension`, which works beside the steps of an `EnvSlice`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from jaxvec._engine.move import Verb


@dataclass(frozen=True)
class Retirement:
    """Request of an extension to replace the worker's process by a new one."""

    reason: str  # for the log, as a clause: "it has reached steps=100"
    warning: str = ""  # for the log, once per worker


class SliceExtension:
    """One subsystem's half in a worker. `EnvSlice` calls its methods, which do nothing by default.

    It may use the public attributes and methods of `EnvSlice`. An extension of `PoolExtension` is its half in
    the program, and reaches it by requests and verbs. Each public method can be requested, as `Class.method`,
    while none of the slice's envs is pending; it raises `EnvFailure`.

    Attributes:
        verbs: Functions that a dispatch calls with its slots. They do not raise: what they could not do, the
            program requests again.
        autoreset: Resets the env at an index when its episode has ended, and returns the result. It may
            replace the env before.
        prepare: Does a piece of work for later, in idle time. Returns False if there is none.
        find_retirement: Called by a worker process between requests; returns a `Retirement` if a new process
            should replace this one. Then running episodes are cut, as after a fault. It needs
            `Extension.retires_workers`.
    """

    verbs: Mapping[Verb, Callable[[NDArray[Any]], None]] = {}
    autoreset: Callable[[int], Any] | None = None
    prepare: Callable[[], bool] | None = None
    find_retirement: Callable[[], Retirement | None] | None = None

    def env_built(self, index: int) -> None:
        """Notes that the env at `index` was built, now or before the slice; it was never reset."""

    def env_reset(self, index: int, seed: int | None) -> None:
        """Notes that the program has reset the env at `index`, with this seed."""

    def close(self) -> None:
        """Closes envs that the extension has built for itself."""
