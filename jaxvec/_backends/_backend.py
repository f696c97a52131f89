"""What a pool asks of those who do its work: worker processes, or this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from jaxvec._errors import JaxvecError
from jaxvec._handoff._engine import Engine, Rules
from jaxvec._handoff._move import Verb
from jaxvec._memory._layout import Layout
from jaxvec._memory._segment import Arrays
from jaxvec._options import Options
from jaxvec._slices._description import Description
from jaxvec._slices._parameters import Told
from jaxvec._slices._slice import Arguments, Asked
from jaxvec._spec import PoolSpec
from jaxvec._tracing._recorder import Record


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


class Workers(Protocol):
    """The envs, wherever they live.

    One call at a time, but for `wait`, `close`, `kill`, and requests of slices whose slots the caller holds.
    """

    description: Description

    @property
    def restarts(self) -> Sequence[int]:
        """How many faults of each worker were gone on from."""
        ...

    @property
    def lives(self) -> Sequence[int]:
        """How often each worker was replaced by another."""
        ...

    @property
    def ends(self) -> Sequence[JaxvecError | None]:
        """By what error each worker was replaced last."""
        ...

    @property
    def maps_segment(self) -> bool:
        """Whether the envs see what the pool writes into the segment."""
        ...

    @property
    def moves_states(self) -> bool:
        """Whether `send` can be asked for saves and restores, of states whose numbers are in the segment."""
        ...

    @property
    def told(self) -> Told | None:
        """Takes note of what envs are told, if the pool goes on after faults."""
        ...

    def attach(self, layout: Layout, spec: PoolSpec) -> Arrays:
        """Creates the segment, lets the envs write there, and returns its arrays."""
        ...

    def open_engine(self, rules: Rules) -> Engine:
        """Returns the engine, which decides who may move the envs."""
        ...

    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        """Hands `slots` to their envs."""
        ...

    def any_resetting(self, slots: NDArray[Any]) -> bool:
        """Says whether one of `slots` is being reset."""
        ...

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
        ...

    def first_completed(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        """Returns those of `slots` that were done first, in that order.

        Args:
            slots: that were sent, in that order.
            count: how many of them, at most; as many as are done, if these are fewer.
        """
        ...

    def set_options(self, options: Options, timeout: float | None) -> None:
        """Sets what every `reset` from now on passes to its envs; raises as `wait` and `request`."""
        ...

    def request(
        self,
        name: Asked,
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
        ...

    def start_trace(self, capacity: int) -> None:
        """Lets each slice record the latest `capacity` spans from now on; raises as `request`."""
        ...

    def stop_trace(self, *, hurry: bool) -> list[Record]:
        """Ends that, and returns the record of each slice.

        Args:
            hurry: whether to wait for short only, and for nobody who may be replaced: the pool is broken.

        Raises:
            As `request`, unless in a hurry.
        """
        ...

    def close(self, timeout: float | None, *, tell: bool = True) -> None:
        """Closes the envs, by force after `timeout` seconds; `None` waits for them for ever.

        `tell` says whether to log which of them were cut off.
        """
        ...

    def kill(self) -> None:
        """Ends the envs at once, from any thread; whoever waits for them gets an error."""
        ...
