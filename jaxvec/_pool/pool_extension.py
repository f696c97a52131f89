"""The door for subsystems in the program: `PoolExtension`, the other half of a `SliceExtension`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from jaxvec._engine.move import Move, Verb
from jaxvec._memory.segment import Deliver

# Takes the extension, the pool, a move, the operands, and how time steps are delivered; returns the results.
Operation: TypeAlias = Callable[[Any, Any, Move, Sequence[Any], Deliver], list[Any]]


class PoolExtension:
    """One subsystem's half in the program, which `Pool.extension` finds by its class.

    It owns the arrays of `Extension.arrays`. Its functions take the pool as an argument: a reference to the
    pool here would be a cycle, which delays the end of the workers when the pool is garbage collected.

    Attributes:
        verbs: Functions for operations of programs and of `VectorEnv`, which `Pool.perform` calls.
    """

    verbs: ClassVar[Mapping[Verb, Operation]] = {}

    def stats(self) -> Mapping[str, int]:
        """Returns fields of `jaxvec.Stats`."""
        return {}

    def forget(self) -> None:
        """Drops all views of the segment. Called when the pool is closed."""
