"""The door for subsystems in the program: `PoolExtension`, the other half of a `SliceExtension`."""

from __future__ import annotations

from collections.abc import Mapping


class PoolExtension:
    """One subsystem's half in the program, which `Pool.extension` finds by its class.

    It owns the arrays of `Extension.arrays`. Its functions take the pool as an argument: a reference to the
    pool here would be a cycle, which delays the end of the workers when the pool is garbage collected.
    """

    def stats(self) -> Mapping[str, int]:
        """Returns fields of `jaxvec.Stats`."""
        return {}

    def forget(self) -> None:
        """Drops all views of the segment. Called when the pool is closed."""
