"""What a worker, or the serial backend, asks of the envs that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from numpy.typing import NDArray

from jaxvec._options import Options
from jaxvec._slices._envs import EnvFailure
from jaxvec._slices._parameters import Parameters
from jaxvec._slices._states import Gone
from jaxvec._spaces import KeyPath
from jaxvec._tracing._recorder import Record, Recorder

# Is told the first of some neighbouring slots, and how many: their rows are complete.
Done = Callable[[int, int], None]

# Of a request to the slice of envs `first` to `stop - 1`; `None` where it is not to be asked.
Arguments: TypeAlias = Callable[[int, int], tuple[Any, ...] | None]

# What a pool asks of all slices by name, while none of their envs is in flight.
Asked: TypeAlias = Literal[
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


class Slice(Protocol):
    """The envs of some neighbouring slots, and the rows of the segment that they fill."""

    first: int
    recorder: Recorder | None  # while steps and resets are recorded

    def infos_of(self, slots: Iterable[int]) -> list[dict[str, Any]]:
        """Returns the raw info of each env's last call."""
        ...

    @property
    def can_prepare(self) -> bool:
        """Whether `prepare` has something to do."""
        ...

    def prepare(self) -> None:
        """Does in idle time what will be needed."""
        ...

    def reset(self, slots: NDArray[Any], done: Done | None = None) -> None:
        """Resets the envs of `slots`, and tells `done` of each that is, if that is given.

        Raises:
            EnvFailure: an env raised or returned wrong data; says which slots are done all the same.
        """
        ...

    def step(self, slots: NDArray[Any], done: Done | None = None) -> None:
        """Steps the envs of `slots`; otherwise as `reset`."""
        ...

    def recover(self, failure: EnvFailure, *, rebuild: bool, parameters: Parameters | None = None) -> None:
        """Makes ready for another try at what `failure` left; a new env is told its `parameters`."""
        ...

    def restore(self, slot: int, parameters: Parameters) -> None:
        """Tells an env, built in the place of another, what that was told."""
        ...

    def start_trace(self, capacity: int) -> None:
        """Records steps and resets from now on, the latest `capacity` of them."""
        ...

    def stop_trace(self) -> Record | None:
        """Records no more, and returns what was; again, if it is asked again.

        Who asked first may have been cut off by the end of another worker.
        """
        ...

    def set_options(self, options: Options) -> None:
        """Sets the options that resets from outside pass to each env from now on."""
        ...

    def give_actions(self, slots: Iterable[int], actions: Sequence[Any]) -> None:
        """Takes the actions of the next step, in place of those in the segment."""
        ...

    def put_objects(self, slots: NDArray[Any], columns: Mapping[KeyPath, NDArray[Any]]) -> None:
        """Takes over leaves of Python objects, which are not in the segment, from the parent."""
        ...

    def get_objects(self, slots: NDArray[Any], paths: Iterable[KeyPath]) -> dict[KeyPath, NDArray[Any]]:
        """Returns leaves of Python objects."""
        ...

    def call(self, slots: Iterable[int], args: Sequence[Any], name: str, kwargs: Any) -> list[Any]:
        """Returns an attribute of each env, called if it can be."""
        ...

    def get_attr(self, slots: Iterable[int], args: Sequence[Any], name: str) -> list[Any]:
        """Returns an attribute of each env as it is; `args` are empty."""
        ...

    def map(self, slots: Iterable[int], args: Sequence[Any], function: Callable[..., Any]) -> list[Any]:
        """Returns what a function returns of each env."""
        ...

    def try_save(self, slots: NDArray[Any]) -> None:
        """Saves the states of the envs of `slots` under the numbers in the segment, and writes 0 there.

        Where a number is left, nothing was done, and `save_states` will do it, or say why it can't.
        """
        ...

    def try_restore(self, slots: NDArray[Any]) -> None:
        """Has the envs of `slots` go on from the states of these numbers in the segment; as `try_save`.

        Where a number is left, the env may have its state all the same; `restore_states` gives it again.
        """
        ...

    def save_states(
        self, slots: Sequence[int], numbers: Sequence[int], oldest: int, packed: bool
    ) -> list[bytes] | None:
        """Keeps the states of envs under these numbers, and no states before the oldest."""
        ...

    def restore_states(
        self,
        slots: Sequence[int],
        sources: Sequence[int | bytes],
        oldest: int,
        rows: Sequence[NDArray[Any]] | None,
    ) -> Gone | None:
        """Has envs go on from states."""
        ...

    def simulate_states(
        self,
        sources: Sequence[int],
        numbers: Sequence[int],
        actions: Sequence[NDArray[Any]],
        oldest: int,
    ) -> list[NDArray[Any]] | Gone:
        """Steps copies of envs from their states, and keeps the states after that."""
        ...

    def export_states(self, numbers: Sequence[int]) -> list[bytes] | Gone:
        """Returns states as bytes."""
        ...

    def import_states(
        self, slots: Sequence[int], numbers: Sequence[int], packed: Sequence[bytes], oldest: int
    ) -> None:
        """Keeps states that come as bytes."""
        ...

    def close(self) -> None:
        """Closes what it has built itself; the envs that it was given are others' to close."""
        ...

    def set_attr(self, slots: Iterable[int], values: Sequence[Any], name: str) -> None:
        """Sets an attribute of each env."""
        ...
