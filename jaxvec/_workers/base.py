"""Interfaces of the workers of a pool and of their launchers.

A pool uses a `WorkerGroup`: `ProcessWorkers` (process.py) or `SerialWorkers` (serial.py). The former starts
its workers by a `Launcher` (fork.py, spawn.py). A `Backend` makes the group: it is the door for other places
where workers run.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from numpy.typing import NDArray

from jaxvec._arguments import Options
from jaxvec._engine.channel import Channel
from jaxvec._engine.engine import Engine, EngineConfig
from jaxvec._engine.move import Verb
from jaxvec._envs.constructors import Description
from jaxvec._envs.slice import Arguments, EnvSettings
from jaxvec._errors import JaxvecError
from jaxvec._memory.segment import Arrays, Layout
from jaxvec._options import LimitName, PoolConfig, Timeouts
from jaxvec._spec import PoolSpec
from jaxvec._stats import ProcessStats
from jaxvec._tracing import Trace
from jaxvec._workers.protocol import WorkerRecipe

# --- Processes and launchers -----------------------------------------------------------------------------


class Process(ABC):
    """A worker process of this machine."""

    pid: Any = None
    # Returns the end of an error message about its death.
    output_advice: Callable[[], str] = staticmethod(lambda: "Look at the worker's output on stderr.")

    @abstractmethod
    def ended(self) -> bool:
        """Returns whether the process has ended, without reaping it."""

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Waits for at most `timeout` seconds for the end, and reaps the process. Returns if it has ended."""

    @abstractmethod
    def end(self) -> None:
        """Kills the process and all processes of its envs. Any thread may call it, repeatedly."""

    @abstractmethod
    def ending(self) -> tuple[int | None, str]:
        """Returns the exit code, or `None` if unknown, and a phrase such as "was killed by SIGKILL"."""


class Launcher(ABC):
    """A starter of worker processes, each of which then waits on its control socket for `Setup`."""

    @abstractmethod
    def launch(self, worker: int) -> tuple[Process, Channel]:
        """Starts a worker or its replacement, and returns it with the parent's end of its control socket.

        Raises:
            TimeoutError: It was not started in time.
            OSError: Memory, descriptors or processes are exhausted.
        """

    def close(self) -> None:  # noqa: B027 - a default
        """Releases resources that the workers shared, after their end."""


def describe_exit(ended: bool, exitcode: int | None) -> tuple[int | None, str]:
    """Returns `Process.ending`, from whether the process has ended and its exit code."""
    if not ended:
        return None, "closed its control socket"  # still alive; the supervisor kills it
    if exitcode is None:
        return (
            None,
            "ended with an unknown exit code, since the fork server had ended before or did not answer",
        )
    if exitcode >= 0:
        return exitcode, f"exited with code {exitcode}"
    name = signal.Signals(-exitcode).name
    hint = " (possibly by the kernel, because memory ran out)" if name == "SIGKILL" else ""
    return exitcode, f"was killed by {name}{hint}"


# --- Worker groups ---------------------------------------------------------------------------------------

Check: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class WaitLimits:
    """The limits of a wait."""

    name: str  # of the operation, for errors
    timeouts: Timeouts
    limit: LimitName  # the field of `timeouts` that limits the operation
    check: Check  # called about 20 times a second; raises to end the wait
    waited: float = 0  # seconds of `timeout` that had passed before the wait
    give_up: float | None = None  # time.monotonic() at which the caller gives up, without a fault
    start: float = field(default_factory=time.monotonic)

    @property
    def timeout(self) -> float | None:
        """Seconds that the operation may take; `None` for no limit."""
        return getattr(self.timeouts, self.limit)

    def late(self, grace: float) -> float | None:
        """Returns the time of the timeout, which is at least `timeout` after `grace`, the latest recovery."""
        if self.timeout is None:
            return None
        return max(self.start + max(self.timeout - self.waited, 0), grace + self.timeout)


def for_slots(slots: NDArray[Any], arguments: Callable[[NDArray[Any]], tuple[Any, ...]]) -> Arguments:
    """Returns the arguments of a request to the slices that have some of `slots`.

    `arguments` gets those of a slice, in the order of `slots`.
    """

    def of_slice(first: int, stop: int) -> tuple[Any, ...] | None:
        slots_here = slots[(first <= slots) & (slots < stop)]
        return arguments(slots_here) if slots_here.size else None

    return of_slice


class WorkerGroup(ABC):
    """The workers that hold the envs of one pool.

    One thread calls it at a time, except for `wait`, `close`, `kill`, and `request` with the slots locked.
    """

    description: Description
    restarts: Sequence[int]  # number of recovered faults, per worker
    incarnations: Sequence[int]  # number of replacements, per worker
    last_errors: Sequence[JaxvecError | None]  # of the latest replacement, per worker
    env_settings: EnvSettings | None  # for rebuilt envs; None if the pool does not recover from faults
    takes_verbs: bool = False  # whether `send` takes the verbs of extensions

    @abstractmethod
    def attach(self, layout: Layout, spec: PoolSpec) -> Arrays:
        """Creates the segment, maps it into the workers, and returns its arrays."""

    @abstractmethod
    def open_engine(self, config: EngineConfig) -> Engine:
        """Returns the engine that moves the envs."""

    @abstractmethod
    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        """Dispatches `slots` to their workers."""

    def any_resetting(self, slots: NDArray[Any]) -> bool:
        return False

    @abstractmethod
    def wait(self, slots: NDArray[Any], count: int, limits: WaitLimits) -> None:
        """Waits until `count` of the dispatched `slots` are completed.

        Raises:
            EnvError: An env raised or returned wrong data.
            WorkerDiedError: A worker died.
            EnvTimeoutError: The envs did not finish in time.
            NotReadyError: The caller gave up; nothing has failed.
        """

    @abstractmethod
    def first_completed(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        """Returns the first `count` of `slots` that were completed, or fewer, in the order of completion."""

    @abstractmethod
    def set_options(self, options: Options) -> None:
        """Sets the options of future resets; raises as `wait` and `request`."""

    @abstractmethod
    def request(
        self,
        method: Callable[..., Any],
        arguments: Arguments,
        *,
        limit: LimitName = "step",
        check: Check = lambda: None,
    ) -> list[Any]:
        """Requests a call of `method` from each slice (`Slice.answer`), and returns the result of each.

        `arguments` returns a slice's arguments for `(first, stop)`, or `None` to skip it. `limit` and `check`
        are as in `WaitLimits`. A result is an error if an env raised there, or if the slice's worker was
        replaced.

        Raises:
            NotPicklableError: The arguments can't be pickled; no worker received a request.
            JaxvecError: Pending envs failed meanwhile, as in `wait`.
        """

    @abstractmethod
    def start_trace(self, capacity: int) -> None:
        """Starts recording the latest `capacity` spans in each slice; raises as `request`."""

    @abstractmethod
    def stop_trace(self, *, hurry: bool) -> Sequence[Trace | JaxvecError | None]:
        """Ends recording. Returns the trace of each slice, an error, or `None`; raises as `request`.

        With `hurry`, for a broken pool, it waits for about a second, replaces no worker, and does not raise.
        """

    @abstractmethod
    def close(self, timeout: float | None, *, tell: bool = True) -> None:
        """Closes the envs, and kills their workers after `timeout` seconds; `None` waits without limit.

        With `tell`, it logs each `close` of an env that was cut off.
        """

    def processes(self) -> list[ProcessStats | None]:
        """Returns the memory, descriptors and age of each worker's process, if it is on this machine."""
        return [None] * len(self.restarts)

    def kill(self) -> None:  # noqa: B027 - a default
        """Kills worker processes at once, so that waits for them raise. Any thread may call it."""


# --- Backends --------------------------------------------------------------------------------------------


class Backend(ABC):
    """A place where the workers of a pool run, for `make(backend=...)`.

    `make` calls `check`, then `num_workers` unless the user gave a number, and then `start`. An instance may
    serve several pools. Backends with worker processes start a `ProcessWorkers` with a `Launcher` of their
    own, which is all that differs between them.

    Example:
        ```python
        class TwoProcesses(jaxvec.Backend):
            def num_workers(self, num_instances, timeout):
                return min(num_instances, 2)

            def start(self, recipe, *, learn_info):
                launcher = jaxvec.backends.LocalLauncher(recipe)
                return jaxvec.backends.ProcessWorkers(recipe, launcher, learn_info=learn_info)

        with jaxvec.make("CartPole-v1", 4, backend=TwoProcesses()) as envs:
            print(envs.num_workers)  # 2
        ```
    """

    def check(self, config: PoolConfig) -> None:  # noqa: B027 - a default
        """Raises `ValueError` for an option that this backend does not support."""

    @abstractmethod
    def num_workers(self, num_instances: int, timeout: float | None) -> int:
        """Returns the number of workers for a pool of that many envs, or batched envs.

        Raises:
            TimeoutError: The place was not known within `timeout` seconds.
        """

    @abstractmethod
    def start(self, recipe: WorkerRecipe, *, learn_info: bool) -> WorkerGroup:
        """Starts the workers, and waits until they have built their envs.

        With `learn_info`, the description of the envs contains an info of env 0.
        """
