"""Interfaces of workers and of their launchers, and the choice of the dispatch."""

from __future__ import annotations

import logging
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._arguments import Options
from jaxvec._dispatch.channel import ParentChannel, WorkerChannel
from jaxvec._dispatch.dispatch import (
    ParentDispatch,
    PortableParentDispatch,
    PortableWorkerDispatch,
    WorkerDispatch,
)
from jaxvec._dispatch.engine import Engine, PyEngine, Rules
from jaxvec._dispatch.move import Verb
from jaxvec._envs.constructors import Description
from jaxvec._envs.slice import Arguments, EnvSettings, RequestName
from jaxvec._errors import JaxvecError
from jaxvec._memory.segment import Arrays, Layout, Marks
from jaxvec._native import load, reason_unavailable
from jaxvec._native.native_dispatch import NativeParentDispatch, NativeWorkerDispatch
from jaxvec._native.native_engine import CEngine
from jaxvec._spec import Leaf, PoolSpec
from jaxvec._tracing import Record

# ----------------------------------------------------------------------------------------------------------
# What a supervisor asks of those who start its workers: processes here, or actors of a cluster.
# ----------------------------------------------------------------------------------------------------------

Slices: TypeAlias = tuple[tuple[int, int], ...]


class Process(ABC):
    """A worker, as far as it can be told from outside.

    Attributes:
        place: where it is, in words, if that is not this machine.
        ahead: how far its monotonic clock is ahead of ours, in ns.
    """

    @property
    def place(self) -> str:
        return ""

    @property
    def ahead(self) -> int:
        return 0

    @abstractmethod
    def ended(self) -> bool:
        """Tells whether it has ended."""

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Waits for its end, for at most `timeout` seconds; returns whether it has ended."""

    @abstractmethod
    def end(self) -> None:
        """Ends it at once, and whatever its envs have started; from any thread, and twice."""

    @abstractmethod
    def ending(self) -> tuple[int | None, str]:
        """Returns the exit code, if there is one, and how it ended, in words."""


class Launcher(ABC):
    """Starts workers, each with a control socket, on which it waits for what to build.

    Attributes:
        at_sockets: whether workers that serve listen at their sockets all the same, and need no notice.
    """

    at_sockets: ClassVar[bool] = False

    def partition(self, slices: Slices) -> Slices:
        """Returns for which slots each worker's doorbell is rung, of the slots that each holds."""
        return slices

    @abstractmethod
    def launch(self, worker: int) -> tuple[Process, ParentChannel]:
        """Starts a worker, or another in its place; returns it, and our end of its control socket.

        Raises:
            ConnectionError: what starts workers can't be reached any more.
            TimeoutError: it was not started in time.
            OSError: there is no room for it: no memory, descriptor or process is left.
        """

    def close(self) -> None:  # noqa: B027 - a default
        """Lets go of what workers share. They have ended."""


def tell_ending(ended: bool, exitcode: int | None) -> tuple[int | None, str]:
    """Says how a process of this machine ended; see `Process.ending`."""
    if not ended:
        return None, "closed its control socket"  # but lives; it will be killed
    if exitcode is None:
        return None, "ended, after the fork server that knew its exit code"
    if exitcode >= 0:
        return exitcode, f"exited with code {exitcode}"
    name = signal.Signals(-exitcode).name
    hint = " (perhaps by the kernel, for want of memory)" if name == "SIGKILL" else ""
    return exitcode, f"was killed by {name}{hint}"


# ----------------------------------------------------------------------------------------------------------
# What a pool asks of those who do its work: worker processes, or this one.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patience:
    """How long an operation may take, and what ends its wait.

    Attributes:
        name: of the operation, for errors.
        timeout: seconds that it may take; `None` for ever.
        check: called now and then; raises what should end the wait.
        waited: seconds of `timeout` that were gone when it began.
        give_up: when the caller has waited long enough, of `time.monotonic()`; `None` for never.
        began: when the wait began, of `time.monotonic()`.
    """

    name: str
    timeout: float | None
    check: Callable[[], None]
    waited: float = 0
    give_up: float | None = None
    began: float = field(default_factory=time.monotonic)

    def late(self, grace: float) -> float | None:
        """Returns when the operation is late: not before it had all its time since `grace`."""
        if self.timeout is None:
            return None
        return max(self.began + max(self.timeout - self.waited, 0), grace + self.timeout)


class WorkerGroup(ABC):
    """The envs, wherever they live.

    One call at a time, but for `wait`, `close`, `kill`, and requests of slices whose slots the caller holds.

    Attributes:
        description: of the envs.
        restarts: number of recovered faults, per worker.
        incarnations: number of replacements, per worker.
        last_errors: the error for which each worker was replaced last.
        env_settings: settings of the envs that new ones are told again, if the pool goes on after faults.
        maps_segment: whether the envs see what the pool writes into the segment.
        moves_states: whether `send` takes saves and restores, of states whose numbers are in the segment.
    """

    description: Description
    restarts: Sequence[int]
    incarnations: Sequence[int]
    last_errors: Sequence[JaxvecError | None]
    env_settings: EnvSettings | None
    maps_segment: bool = True
    moves_states: bool = False

    @abstractmethod
    def attach(self, layout: Layout, spec: PoolSpec) -> Arrays:
        """Creates the segment, lets the envs write there, and returns its arrays."""

    @abstractmethod
    def open_engine(self, rules: Rules) -> Engine:
        """Returns the engine, which decides who may move the envs."""

    @abstractmethod
    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        """Hands `slots` to their envs."""

    def any_resetting(self, slots: NDArray[Any]) -> bool:
        """Tells whether one of `slots` is being reset."""
        return False

    @abstractmethod
    def wait(self, slots: NDArray[Any], count: int, patience: Patience) -> None:
        """Waits until `count` of `slots` are done.

        Args:
            slots: that were sent.
            count: how many of them.
            patience: for how long, and what else ends it.

        Raises:
            EnvError: an env raised or returned wrong data.
            WorkerDiedError: a worker died.
            EnvTimeoutError: the envs did not finish in time.
            NotReadyError: the caller has waited long enough; nothing has failed.
        """

    @abstractmethod
    def first_completed(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        """Returns those of `slots` that were done first, in that order.

        Args:
            slots: that were sent, in that order.
            count: how many of them, at most; as many as are done, if these are fewer.
        """

    @abstractmethod
    def set_options(self, options: Options, timeout: float | None) -> None:
        """Sets what every `reset` from now on passes to its envs; raises as `wait` and `request`."""

    @abstractmethod
    def request(
        self,
        name: RequestName,
        arguments: Arguments,
        *,
        timeout: float | None,
        check: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Calls the method `name` of each `Slice`.

        Args:
            name: of the method.
            arguments: of the slice of envs `first` to `stop - 1`; `None` where it is not to be asked.
            timeout: seconds, `None` for ever.
            check: as of `Patience`.

        Returns:
            A result of each slice, `None` of one that was not asked, or the error that took its place: an env
            raised there, or its worker was replaced.

        Raises:
            NotPicklableError: of the arguments; nobody was asked.
            JaxvecError: as `wait`, if envs in flight fail meanwhile.
        """

    @abstractmethod
    def start_trace(self, capacity: int) -> None:
        """Lets each slice record the latest `capacity` spans from now on; raises as `request`."""

    @abstractmethod
    def stop_trace(self, *, hurry: bool) -> list[Record]:
        """Ends that, and returns the record of each slice.

        Args:
            hurry: whether to wait for short only, and for nobody who may be replaced: the pool is broken.

        Raises:
            As `request`, unless in a hurry.
        """

    @abstractmethod
    def close(self, timeout: float | None, *, tell: bool = True) -> None:
        """Closes the envs, by force after `timeout` seconds; `None` waits for them for ever.

        `tell` says whether to log which of them were cut off.
        """

    def kill(self) -> None:  # noqa: B027 - a default
        """Ends the envs at once, if they have processes; from any thread. Waits for them get an error."""


# ----------------------------------------------------------------------------------------------------------
# Chooses between the hand-offs, by name, and the engine that goes with each.
# ----------------------------------------------------------------------------------------------------------

_LARGE = 1024  # bytes of a row

_logger = logging.getLogger("jaxvec")


def choose_dispatch(kind: str) -> str:
    """Returns `"native"` or `"portable"`.

    Raises:
        NativeUnavailableError: `"native"` was asked for and can't be had; says why.
    """
    if kind == "auto":
        reason = reason_unavailable()
        if reason is None:
            return "native"
        _logger.info("portable hand-off: %s", reason)
        return "portable"
    if kind == "native":
        load()
    return kind


def parent_end(
    kind: str,
    marks: Marks,
    *,
    slices: tuple[tuple[int, int], ...],
    channels: Sequence[ParentChannel],
    spin_ns: int,
) -> ParentDispatch:
    """Makes the parent's end."""
    if kind == "native":
        return NativeParentDispatch(marks, slices, channels, spin_ns=spin_ns)
    return PortableParentDispatch(marks, slices, channels)


def worker_end(
    kind: str,
    marks: Marks,
    *,
    worker: int,
    slots: tuple[int, int],
    channel: WorkerChannel,
    spin_ns: int,
    notices: int = 0,
) -> WorkerDispatch:
    """Makes the end of a worker.

    Args:
        kind: `"native"` or `"portable"`.
        marks: in the segment.
        worker: its index.
        slots: `(first, stop)`, its slots.
        channel: its control socket.
        spin_ns: how long it looks again before it sleeps.
        notices: how often the worker in whose place it is was notified of messages.
    """
    if kind == "native":
        return NativeWorkerDispatch(marks, worker, slots, channel, spin_ns=spin_ns, notices=notices)
    return PortableWorkerDispatch(marks, slots, channel)


def open_engine(
    end: ParentDispatch,
    spec: PoolSpec,
    arrays: Arrays,
    *,
    slices: tuple[tuple[int, int], ...],
    rules: Rules,
) -> Engine:
    """Makes the engine of a pool with this hand-off."""
    if end.native_end is None or spec.object_leaves:
        return PyEngine(rules)
    return CEngine(
        end,
        rules,
        fingerprint=spec.fingerprint,
        slices=slices,
        actions=[arrays[leaf.path] for leaf in spec.action_leaves],
        results=[arrays[leaf.path] for leaf in spec.timestep_leaves],
        nonzero=[_nonzero(leaf, arrays) for leaf in spec.timestep_leaves],
        batch_size=spec.batch_size,
    )


def _nonzero(leaf: Leaf, arrays: Arrays) -> NDArray[np.bool_] | None:
    """Returns the flags of the rows that final observations fill; small leaves are copied anyhow."""
    final = leaf.path[:2] == ("info", "final_obs") and leaf.nbytes >= _LARGE
    return arrays["info", "_final_obs"] if final else None
