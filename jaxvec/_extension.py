"""The door for subsystems beside the core (`Extension`), and tables of what other packages add to the core.

`jaxvec/__init__.py` fills the tables. The core reads them, and imports nothing that is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from jaxvec._options import PoolConfig
from jaxvec._spec import PoolSpec

if TYPE_CHECKING:  # each process imports its own half only
    from jaxvec._envs.env_slice import EnvSlice
    from jaxvec._envs.slice import Slice, SliceExtension
    from jaxvec._memory.segment import Arrays, ArrayType
    from jaxvec._pool.pool import Pool
    from jaxvec._pool.pool_extension import PoolExtension
    from jaxvec._workers.interpreter import Interpreter


class Extension:
    """A subsystem of a pool beside the core.

    Attributes:
        spares: Number of envs without a slot that each worker builds, and closes, for the extension.
        retires_workers: Whether it has `SliceExtension.find_retirement`, by which episodes may be cut.
    """

    spares: int = 0
    retires_workers: bool = False

    def arrays(self, spec: PoolSpec) -> Iterable[ArrayType]:
        """Returns arrays that it needs in the segment, whose memory is taken when it is touched."""
        return ()

    def on_slice(self, env_slice: EnvSlice) -> SliceExtension | None:
        """Returns its half in a worker, if it has one, for a slice with envs that were never reset."""

    def on_pool(self, pool: Pool, arrays: Arrays) -> PoolExtension | None:
        """Returns its half in the program, if it has one, given the arrays of the segment."""


# Each returns the extension that the options of a pool need, or `None`.
extensions: list[Callable[[PoolConfig], Extension | None]] = []

# Each returns the constructor of the slices that the options need, or `None` for `EnvSlice`.
slices: list[Callable[[PoolConfig], Callable[..., Slice] | None]] = []

# Each returns the interpreter of the workers that the options name, or `None` for this one.
interpreters: list[Callable[[PoolConfig], Interpreter | None]] = []

# Traces a block and writes its timeline, for `VectorEnv.trace`: the pool, the env ids `(first, stop)` of each
# worker, the path of the file, and the number of events to keep.
tracer: Callable[[Pool, tuple[tuple[int, int], ...], str | Path, int], AbstractContextManager[Path]]
