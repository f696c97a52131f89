"""The interface of a slice of envs (`Slice`), and what comes to it from outside.

`SliceExtension` is the door for subsystems that work beside the steps. `EnvSettings` are re-applied when an
env is rebuilt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from jaxvec._arguments import Options
from jaxvec._engine.move import Verb
from jaxvec._envs.env_access import EnvAccess
from jaxvec._envs.envs import EnvFailure
from jaxvec._tracing import SpanRecorder, Trace

# --- Settings of rebuilt envs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotSettings:
    """Settings that are re-applied to a new env in a slot."""

    options: dict[str, Any] | None  # of its first reset, unless the program requests it with other options
    attributes: Mapping[str, Any]  # by name; each value is cloudpickled on the way to a worker


class EnvSettings:
    """The latest settings of all envs of a pool, by slot."""

    def __init__(self, pack: Callable[[Any], Any]) -> None:
        self._pack = pack  # copies or pickles a value, so that later changes by its owner have no effect
        self.options: Options = {}  # of the envs' latest resets
        self._attributes: dict[int, dict[str, Any]] = {}
        self._called: set[int] = set()

    def set_attr(self, slots: NDArray[Any], values: Sequence[Any], name: str) -> None:
        packed: dict[int, Any] = {}  # by identity: often all envs share one large value
        for slot, value in zip(slots.tolist(), values, strict=True):
            if id(value) not in packed:
                packed[id(value)] = self._pack(value)
            self._attributes.setdefault(slot, {})[name] = packed[id(value)]

    def call(self, slots: NDArray[Any]) -> None:
        """Records that user code may have changed the envs of `slots` in unknown ways."""
        self._called.update(slots.tolist())

    def of(self, slot: int) -> SlotSettings | None:
        """Returns the settings of a new env in a slot; `None` if it needs none."""
        options = self.options.get(slot)
        attributes = self._attributes.get(slot)
        if options is None and attributes is None:
            return None
        return SlotSettings(options, attributes or {})

    def forget_calls(self, slots: Iterable[int]) -> list[int]:
        """Forgets changes by user code, which new envs lack; returns those of `slots` that had any."""
        lost = sorted(self._called.intersection(slots))
        self._called.difference_update(lost)
        return lost


# --- The door for subsystems in a worker ----------------------------------------------------------------


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


# --- The interface between a worker, or the serial backend, and its envs ---------------------------------

# Called with the first of some neighbouring slots, and their number, when their rows are complete.
Done = Callable[[int, int], None]

# Returns the arguments of a request for the slice of slots `first` to `stop - 1`; `None` to skip the slice.
Arguments: TypeAlias = Callable[[int, int], tuple[Any, ...] | None]


class MethodName(NamedTuple):
    """The name of a method, which finds it also in a class that was pickled by value."""

    module: str
    owner: str  # the qualified name of the class
    name: str

    @classmethod
    def of(cls, method: Callable[..., Any]) -> MethodName:
        """Returns the name of `Class.method`."""
        owner, _, name = method.__qualname__.rpartition(".")
        return cls(method.__module__, owner, name)


class Slice(ABC):
    """The envs of neighbouring slots, which fill the rows of these slots in the segment.

    `EnvSlice` is the usual one, and documents the arguments of the constructor. `_extension.slices` chooses
    others.
    """

    first: int  # the first slot
    access: EnvAccess
    in_program: bool = False  # whether the envs are in the program's process, whose forks lack its threads
    extensions: Sequence[SliceExtension] = ()
    verbs: Mapping[Verb, Callable[[NDArray[Any]], None]] = {}  # of the extensions
    # Of the last extension that has one, see there.
    prepare: Callable[[], bool] | None = None
    find_retirement: Callable[[], Retirement | None] | None = None
    recorder: SpanRecorder | None = None  # `None` while no trace is recorded
    _trace: Trace | None = None  # of the last trace
    _options: Options = {}  # noqa: RUF012 - of resets that the program requests, by index; never changed

    def answer(self, method: MethodName, *args: Any) -> Any:
        """Returns the result of a request: a method of the slice, of its `access`, or of an extension.

        A pool makes requests while none of the slice's envs is pending.
        """
        for owner in (self, self.access, *self.extensions):
            for base in type(owner).__mro__:
                if (base.__module__, base.__qualname__) == (method.module, method.owner):
                    return getattr(owner, method.name)(*args)
        raise NotImplementedError(f"no extension of the pool has the method {method.owner}.{method.name}")

    def perform(self, verb: Verb, slots: NDArray[Any]) -> None:
        """Performs an extension's operation, which does not raise."""
        if verb not in self.verbs:
            raise NotImplementedError(f"no extension of the pool performs {verb.word}")
        self.verbs[verb](slots)

    @abstractmethod
    def reset(self, slots: NDArray[Any], done: Done | None = None) -> None:
        """Resets envs with the seeds in the segment and the options of `set_options`; calls `done` for each.

        A slice of batched envs gets no `done`: no pool of them receives some envs before the others.

        Raises:
            EnvFailure: An env raised or returned wrong data. It lists the slots that are complete.
        """

    @abstractmethod
    def step(self, slots: NDArray[Any], done: Done | None = None) -> None:
        """Steps envs with the actions in the segment. Arguments and errors are those of `reset`."""

    def recover(self, failure: EnvFailure, *, rebuild: bool, settings: SlotSettings | None = None) -> None:
        """Prepares for another request of the slots that are not complete after `failure`.

        With `rebuild`, closes the env, builds a new one and applies `settings` to it. A failed step is not
        repeated: its row will show that a fault truncated the episode.

        Raises:
            EnvFailure: The constructor or a setting failed; or `failure` itself, if the slice can't recover.
        """
        raise failure

    def reapply_settings(self, slot: int, settings: SlotSettings) -> None:
        """Applies settings to a new env. Only a slice that can recover gets some."""
        raise NotImplementedError

    def start_trace(self, capacity: int) -> None:
        """Starts to record the latest `capacity` steps and resets."""
        self.recorder = SpanRecorder(capacity)
        self._trace = None
        self._record_calls(self.recorder)

    def stop_trace(self) -> Trace | None:
        """Stops recording, and returns the trace.

        Further calls return it again, because the death of another worker may interrupt the first request.
        """
        recorder = self.recorder
        self.recorder = None
        self._record_calls(None)
        if recorder is not None:
            self._trace = recorder.take()
        return self._trace

    @abstractmethod
    def _record_calls(self, recorder: SpanRecorder | None) -> None: ...

    def set_options(self, options: Options) -> None:
        """Sets the options of all later resets that the program requests, by index."""
        self._options = {index: self.access.copied(env_options) for index, env_options in options.items()}

    def close(self) -> None:
        """Closes envs that the extensions built. The caller closes those that it passed in."""
        for extension in self.extensions:
            extension.close()
