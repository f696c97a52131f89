"""What the program has told envs, and a new env in the place of another has to be told again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from jaxvec._options import Options
from jaxvec._restart import Restart


@dataclass(frozen=True)
class Parameters:
    """What a new env is told.

    Attributes:
        options: for its first reset, if that is not one from outside, which has its own.
        attributes: to be set before, by name; on their way to a worker, each a cloudpickled value.
        state: to go on from after a step that is lost, in place of that reset; see `_states.pack`.
    """

    options: dict[str, Any] | None
    attributes: Mapping[str, Any]
    state: bytes | None = None


class Told:
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

    def of(self, slot: int) -> Parameters | None:
        """Returns what a new env in this slot has to be told, if anything."""
        options, attributes = self._options.get(slot), self._attributes.get(slot)
        state = self._states.get(slot)
        if options is None and attributes is None and state is None:
            return None
        return Parameters(options, attributes or {}, state)

    def forget_calls(self, slots: Iterable[int]) -> list[int]:
        """Returns those of `slots` that may have been changed by calls, which new envs in them have not."""
        lost = sorted(self._called.intersection(slots))
        self._called.difference_update(lost)
        return lost
