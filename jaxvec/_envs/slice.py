"""The interface of a slice of envs, and the settings that are applied again to a new env."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from numpy.typing import NDArray

from jaxvec._arguments import Options
from jaxvec._config import Restart
from jaxvec._envs.env_states import Gone
from jaxvec._envs.envs import EnvFailure
from jaxvec._spec import KeyPath
from jaxvec._tracing import Record, Recorder

# ----------------------------------------------------------------------------------------------------------
# What the program has told envs, and a new env in the place of another has to be told again.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotSettings:
    """What a new env is told.

    Attributes:
        options: for its first reset, if that is not one from outside, which has its own.
        attributes: to be set before, by name; on their way to a worker, each a cloudpickled value.
        state: to go on from after a step that is lost, in place of that reset; see `env_states.pack`.
    """

    options: dict[str, Any] | None
    attributes: Mapping[str, Any]
    state: bytes | None = None


class EnvSettings:
    """Of all envs of a pool, what they were told last, and the states that were saved last.

    Attributes:
        keeps_states: whether to take note of saved states.
    """

    def __init__(self, policy: Restart, pack: Callable[[Any], Any]) -> None:
        """Begins with nothing, and takes note of what `policy` wants to be kept.

        `pack` keeps a value from being changed by who has set it.
        """
        self._pack = pack
        self._keeps_options = policy.keep_options
        self.keeps_states: bool = policy.retry == "restore"
        self._states: dict[int, bytes] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self._attributes: dict[int, dict[str, Any]] = {}
        self._called: set[int] = set()

    def reset(self, slots: NDArray[Any], options: Options) -> None:
        """Takes note of a reset of `slots` with the options that each env of the pool has."""
        if not self._keeps_options or (options is None and not self._options):
            return
        for slot in slots.tolist():
            one = None if options is None else options[slot]
            if one is None:
                self._options.pop(slot, None)
            else:
                self._options[slot] = one

    def set_attr(self, slots: NDArray[Any], values: Sequence[Any], name: str) -> None:
        """Takes note of an attribute that is set, of each of `slots`."""
        if not self._keeps_options:
            return
        packed: dict[int, Any] = {}  # values may be large, and one for all
        for slot, value in zip(slots.tolist(), values, strict=True):
            if id(value) not in packed:
                packed[id(value)] = self._pack(value)
            self._attributes.setdefault(slot, {})[name] = packed[id(value)]

    def call(self, slots: NDArray[Any]) -> None:
        """Takes note that somebody's code may have changed the envs of `slots`; who knows how."""
        if self._keeps_options:
            self._called.update(slots.tolist())

    def save(self, slots: NDArray[Any], states: Sequence[bytes]) -> None:
        """Takes note of the states of `slots`, the latest that are saved."""
        self._states.update(zip(slots.tolist(), states, strict=True))

    def saved(self, slots: Iterable[int]) -> list[int]:
        """Returns those of `slots` of which there is a saved state."""
        return sorted(self._states.keys() & set(slots))

    def of(self, slot: int) -> SlotSettings | None:
        """Returns what a new env in this slot has to be told, if anything."""
        options, attributes = self._options.get(slot), self._attributes.get(slot)
        state = self._states.get(slot)
        if options is None and attributes is None and state is None:
            return None
        return SlotSettings(options, attributes or {}, state)

    def forget_calls(self, slots: Iterable[int]) -> list[int]:
        """Returns those of `slots` that may have been changed by calls, which new envs in them have not."""
        lost = sorted(self._called.intersection(slots))
        self._called.difference_update(lost)
        return lost


# ----------------------------------------------------------------------------------------------------------
# What a worker, or the serial backend, asks of the envs that it holds.
# ----------------------------------------------------------------------------------------------------------

# Is told the first of some neighbouring slots, and how many: their rows are complete.
Done = Callable[[int, int], None]

# Of a request to the slice of envs `first` to `stop - 1`; `None` where it is not to be asked.
Arguments: TypeAlias = Callable[[int, int], tuple[Any, ...] | None]

# What a pool asks of all slices by name, while none of their envs is in flight.
RequestName: TypeAlias = Literal[
    "infos_of",
    "call",
    "get_attr",
    "map",
    "set_attr",
    "set_options",
    "start_trace",
    "stop_trace",
    "give_actions",
    "put_objects",
    "get_objects",
    "save_states",
    "restore_states",
    "simulate_states",
    "export_states",
    "import_states",
]


class Slice(ABC):
    """The envs of some neighbouring slots, and the rows of the segment that they fill.

    Methods that only some kinds of envs have refuse by default: a pool does not ask for them.
    """

    first: int
    recorder: Recorder | None  # while steps and resets are recorded

    @abstractmethod
    def infos_of(self, slots: Iterable[int]) -> list[dict[str, Any]]:
        """Returns the raw info of each env's last call."""

    @property
    def can_prepare(self) -> bool:
        """Whether `prepare` would reset an env."""
        return False

    def prepare(self) -> None:  # noqa: B027 - a default
        """Resets a spare env in advance, in idle time."""

    @abstractmethod
    def reset(self, slots: NDArray[Any], done: Done | None = None) -> None:
        """Resets the envs of `slots` with the seeds in the segment and the options set last.

        Args:
            slots: of the envs.
            done: called for each env that is reset, if it is given.

        Raises:
            EnvFailure: an env raised or returned wrong data; lists the slots that are done all the same.
        """

    @abstractmethod
    def step(self, slots: NDArray[Any], done: Done | None = None) -> None:
        """Steps the envs of `slots` with the actions in the segment; otherwise as `reset`."""

    def recover(self, failure: EnvFailure, *, rebuild: bool, settings: SlotSettings | None = None) -> None:
        """Makes ready for another try at what `failure` left: slots that are not done are to be asked again.

        A step that failed is not taken again: its row then says that a fault has cut the episode.

        Args:
            failure: that was raised.
            rebuild: whether its env is closed, and another is built in its place.
            settings: settings of that one.

        Raises:
            EnvFailure: the constructor raised, or an attribute can't be set; `failure`, if it ends the pool.
        """
        raise failure

    def reapply_settings(self, slot: int, settings: SlotSettings) -> None:
        """Gives an env, built in the place of another, the settings of that; raises `EnvFailure`."""
        raise self._refusal("restart")

    @abstractmethod
    def start_trace(self, capacity: int) -> None:
        """Records steps and resets from now on, the latest `capacity` of them."""

    @abstractmethod
    def stop_trace(self) -> Record | None:
        """Records no more, and returns the record; again, if it is asked again.

        The first to ask may have been cut off by the end of another worker.
        """

    @abstractmethod
    def set_options(self, options: Options) -> None:
        """Sets the options that resets from outside pass to each env from now on."""

    def give_actions(self, slots: Iterable[int], actions: Sequence[Any]) -> None:
        """Takes the actions of the next step, one for each of `slots`, that are not in the segment."""
        raise self._refusal("take Python objects as actions")

    def put_objects(self, slots: NDArray[Any], columns: Mapping[KeyPath, NDArray[Any]]) -> None:
        """Takes over leaves of Python objects, rows of `slots` each, which are not in the segment."""
        raise self._refusal("have leaves of Python objects")

    def get_objects(self, slots: NDArray[Any], paths: Iterable[KeyPath]) -> dict[KeyPath, NDArray[Any]]:
        """Returns leaves of Python objects, rows of `slots` each."""
        raise self._refusal("have leaves of Python objects")

    @abstractmethod
    def call(self, slots: Iterable[int], args: Sequence[Any], name: str, kwargs: Any) -> list[Any]:
        """Returns attribute `name` of the envs of `slots`, called if it can be, with `args` of each."""

    @abstractmethod
    def get_attr(self, slots: Iterable[int], args: Sequence[Any], name: str) -> list[Any]:
        """Returns attribute `name` of the envs of `slots` as it is; `args` are empty."""

    @abstractmethod
    def set_attr(self, slots: Iterable[int], values: Sequence[Any], name: str) -> None:
        """Sets attribute `name` of the envs of `slots` to one of `values` each."""

    @abstractmethod
    def map(self, slots: Iterable[int], args: Sequence[Any], function: Callable[..., Any]) -> list[Any]:
        """Returns the results of `function` for the envs of `slots`, with `args` of each."""

    def try_save(self, slots: NDArray[Any]) -> None:
        """Saves the states of the envs of `slots` under the numbers in the segment, and writes 0 there.

        Where a number is left, nothing was done, and `save_states` will do it, or say why it can't.
        """
        raise self._refusal("keep states")

    def try_restore(self, slots: NDArray[Any]) -> None:
        """Has the envs of `slots` go on from the states of these numbers in the segment; as `try_save`.

        Where a number is left, the env may have its state all the same; `restore_states` gives it again.
        """
        raise self._refusal("keep states")

    def save_states(
        self, slots: Sequence[int], numbers: Sequence[int], oldest: int, packed: bool
    ) -> list[bytes] | None:
        """Keeps the states of envs under these numbers, and none whose number is before `oldest`.

        Envs whose states are saved for the first time have to prove that they can be put back.

        Returns:
            The states with their observations as bytes, for `restore`, if they are to be `packed`.

        Raises:
            EnvFailure: of an env whose state can't be saved, or is not put back exactly.
        """
        raise self._refusal("keep states")

    def restore_states(
        self,
        slots: Sequence[int],
        sources: Sequence[int | bytes],
        oldest: int,
        rows: Sequence[NDArray[Any]] | None,
    ) -> Gone | None:
        """Has envs go on from states.

        Args:
            slots: `[n]`, whose envs.
            sources: `[n]`, the number of a state, or its bytes.
            oldest: as of `save_states`.
            rows: the time steps that were current then, `[n, ...]`, if the parent can't write them here.

        Raises:
            EnvFailure: a state could not be put back; envs before it have theirs.
        """
        raise self._refusal("keep states")

    def simulate_states(
        self,
        sources: Sequence[int],
        numbers: Sequence[int],
        actions: Sequence[NDArray[Any]],
        oldest: int,
    ) -> list[NDArray[Any]] | Gone:
        """Steps copies of envs from their states, and keeps the states after that.

        Args:
            sources: `[k]` numbers of the states before.
            numbers: `[k]` of those after.
            actions: a leaf each, `[k, ...]`.
            oldest: as of `save_states`; sources may be before it.

        Returns:
            A leaf of the time step each, `[k, ...]`; but for `env_id`.

        Raises:
            EnvFailure: an env raised; it is called by the slot whose state was the first of this line.
        """
        raise self._refusal("keep states")

    def export_states(self, numbers: Sequence[int]) -> list[bytes] | Gone:
        """Returns states as bytes; raises `EnvFailure` of one that can't be pickled."""
        raise self._refusal("keep states")

    def import_states(
        self, slots: Sequence[int], numbers: Sequence[int], packed: Sequence[bytes], oldest: int
    ) -> None:
        """Keeps states that come as bytes, as those of the envs of `slots`."""
        raise self._refusal("keep states")

    def close(self) -> None:  # noqa: B027 - a default
        """Closes what it has built itself; the envs that it was given are others' to close."""

    def _refusal(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"the envs of a {type(self).__name__} do not {what}")
