"""Gymnasium's spaces."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import gymnasium

from jaxvec._slices._snapshots._core import Node, Putter, TakesParts

_MOST = 1000  # spaces that one is known to be equal to; some envs make one in each reset


class Space(Node):
    """A space, which never changes, but for the random numbers that `sample` draws.

    Attributes:
        generators: of those, of the space and all that are in it; `None` if it is a simple one that has none.
    """

    __slots__ = ("alike", "generators", "space")

    def __init__(self, space: Any, generators: list[Any] | None) -> None:
        self.space = space
        self.alike = {id(space): space}  # and others that were found to be equal, which takes long
        self.generators = generators

    def __reduce__(self) -> Any:
        return Space, (self.space, self.generators)

    def put(self, putter: Putter, old: Any) -> Any:
        if id(old) not in self.alike:
            if type(old) is not type(self.space) or old != self.space:
                old = copy.deepcopy(self.space)
            if len(self.alike) >= _MOST:
                self.alike = {id(self.space): self.space}
            self.alike[id(old)] = old
        if self.generators is None:
            old._np_random = None
            return old
        for space, generator in zip(_spaces_in(old), self.generators, strict=True):
            space._np_random = putter.value(generator, space._np_random)
        return old

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.generators, other.generators


def take_space(taker: TakesParts, value: Any) -> Any:
    if type(value) in _SIMPLE_SPACES and value._np_random is None:
        known = taker.shared.get(id(value))  # which keeps the space, so the number is its own
        if known is None:
            known = taker.shared[id(value)] = value, Space(value, None)
        return known[1]
    node = Space(value, [taker.value(space._np_random) for space in _spaces_in(value)])
    taker.remember(value, node)
    return node


def _spaces_in(space: Any) -> list[Any]:
    found = [space]
    if type(space) not in _SIMPLE_SPACES:
        for held in vars(space).values():
            if isinstance(held, gymnasium.Space):
                found += _spaces_in(held)
            elif isinstance(held, (dict, list, tuple)):
                for one in held.values() if isinstance(held, dict) else held:
                    if isinstance(one, gymnasium.Space):
                        found += _spaces_in(one)
    return found


_SIMPLE_SPACES = {
    getattr(gymnasium.spaces, name) for name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
}
