"""Access to the envs of a slice between their steps: calls, attributes, infos and Python objects.

`EnvAccess` is the interface, `SlotAccess` the access to envs that each have a slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from jaxvec._envs.copies import copied
from jaxvec._envs.env_rows import EnvRows
from jaxvec._envs.envs import AttributeErrorContext, Env, EnvErrorContext, find_attr, put_attr
from jaxvec._envs.slot_envs import SlotEnvs
from jaxvec._leaves import KeyPath


class EnvAccess(ABC):
    """The requests of the program to the envs of one slice, which `Slice` steps and resets.

    Attributes:
        copied: Copies a value that several envs get, or that an env may change later.
    """

    copied: Callable[[Any], Any] = staticmethod(copied)

    @abstractmethod
    def infos_of(self, slots: Iterable[int]) -> list[dict[str, Any]]:
        """Returns copies of the raw info of each env's last step or reset: the env may change its own."""

    @abstractmethod
    def call(self, slots: Iterable[int], args: Sequence[Any], name: str, kwargs: Any) -> list[Any]:
        """Returns attribute `name` of each env, called with its entry of `args` if it is callable."""

    @abstractmethod
    def set_attr(self, slots: Iterable[int], values: Sequence[Any], name: str) -> None:
        """Sets attribute `name` of each env to its entry of `values`."""

    @abstractmethod
    def map(self, slots: Iterable[int], args: Sequence[Any], function: Callable[..., Any]) -> list[Any]:
        """Returns `function(env, *arguments)` for each env, with its entry of `args`."""


class SlotAccess(EnvAccess):
    """The requests to envs that each have a slot, from `first` on."""

    def __init__(self, slots: SlotEnvs, rows: EnvRows, first: int) -> None:
        self._slots = slots
        self._rows = rows
        self._first = first

    def infos_of(self, slots: Iterable[int]) -> list[dict[str, Any]]:
        return [self.copied(self._rows.infos[slot - self._first]) for slot in slots]

    def give_actions(self, slots: Iterable[int], actions: Sequence[Any]) -> None:
        self._rows.given = {slot - self._first: action for slot, action in zip(slots, actions, strict=True)}

    def put_objects(self, slots: NDArray[Any], columns: Mapping[KeyPath, NDArray[Any]]) -> None:
        for path, column in columns.items():
            self._rows.objects[path][slots - self._first] = column

    def get_objects(self, slots: NDArray[Any], paths: Iterable[KeyPath]) -> dict[KeyPath, NDArray[Any]]:
        return {path: self._rows.objects[path][slots - self._first] for path in paths}

    def call(self, slots: Iterable[int], args: Sequence[Any], name: str, kwargs: Any) -> list[Any]:
        results: list[Any] = []
        for slot, env, (arguments, keywords) in self._accessed(
            slots, [(positional, kwargs) for positional in args]
        ):
            with AttributeErrorContext(slot, name):
                attribute = find_attr(env, name)
            with EnvErrorContext(slot, name):
                results.append(attribute(*arguments, **keywords) if callable(attribute) else attribute)
        return results

    def map(self, slots: Iterable[int], args: Sequence[Any], function: Callable[..., Any]) -> list[Any]:
        results: list[Any] = []
        for slot, env, arguments in self._accessed(slots, args):
            with EnvErrorContext(slot, "map"):
                results.append(function(env, *arguments))
        return results

    def set_attr(self, slots: Iterable[int], values: Sequence[Any], name: str) -> None:
        for slot, env, value in self._accessed(slots, values):
            with AttributeErrorContext(slot, f"set_attr({name!r})"):
                put_attr(env, name, value)

    def _accessed(self, slots: Iterable[int], args: Sequence[Any]) -> Iterator[tuple[int, Env, Any]]:
        """Yields each slot with its env and a copy of its arguments. User code may then change the env."""
        for slot, arguments in zip(slots, args, strict=True):
            self._slots.changed(slot - self._first)  # before the access, which may fail half-way
            with EnvErrorContext(slot, "the copy of its arguments"):
                own = self.copied(arguments)
            yield slot, self._slots.envs[slot - self._first], own
