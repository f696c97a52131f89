"""Lends an env its row of the pool's memory, so that it can write its observations where they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxvec._memory._segment import Arrays
from jaxvec._slices._targets import inside
from jaxvec._spaces import Node, build, leaves

_METHOD = "set_observation_buffer"  # of an env that takes one


class Lending:
    """Of the rows of a slice, which go by their index there."""

    def __init__(self, obs: Node, rows: Arrays) -> None:
        """Prepares to lend rows, if they are as the env's observation space says."""
        self._obs, self._rows = obs, rows
        self._is_lendable = all(leaf.stored == leaf.dtype and not leaf.is_object for leaf in leaves(obs))

    def lend(self, index: int, env: Any) -> None:
        """Gives an env that takes one the memory of its observation, nested as that is."""
        take = self._taker(env)
        if take is not None:
            take(build(self._obs, lambda leaf: self._rows[leaf.path][index, ...]))

    def take_back(self, env: Any) -> None:
        """Has an env write to memory of its own again."""
        take = self._taker(env)
        if take is not None:
            take(None)

    def takes(self, env: Any) -> bool:
        """Says whether an env takes such memory."""
        return self._taker(env) is not None

    def _taker(self, env: Any) -> Callable[[Any], None] | None:
        """Returns the env's method; not one behind a wrapper that may have made another observation of it."""
        return getattr(inside(env), _METHOD, None) if self._is_lendable else None
