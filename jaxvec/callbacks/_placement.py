"""Puts time steps on devices, for loops in Python: `jaxvec.make(device=...)` and `sharding=`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from jaxvec._memory._layout import ALIGNMENT
from jaxvec._memory._views import Rows
from jaxvec._vector_env import VectorEnv


@dataclass(frozen=True)
class Placement:
    """Copies rows of a segment to devices."""

    sharding: Sharding

    @classmethod
    def of(cls, device: Any, sharding: Any) -> Placement | None:
        """Returns that of `make`'s arguments, `None` if there is neither; raises if there are both."""
        if device is None and sharding is None:
            return None
        if device is not None and sharding is not None:
            raise ValueError("device and sharding both say where time steps go; pass one of them")
        if sharding is None:
            if not isinstance(device, jax.Device):
                raise TypeError(f"device must be one of jax.devices(), not {device!r}")
            return cls(SingleDeviceSharding(device))
        if not isinstance(sharding, Sharding):
            raise TypeError(f"sharding must be a jax.sharding.Sharding, not {sharding!r}")
        if not sharding.is_fully_addressable:
            raise NotImplementedError(
                "sharding over the devices of several processes: each process has envs of its own; leave it "
                "out, and pass each array to jax.make_array_from_process_local_data(sharding, array)"
            )
        return cls(sharding)

    def prepare(self, envs: VectorEnv) -> None:
        """Page-locks the pool's memory for GPUs; raises `ValueError` if its rows can't be so sharded."""
        try:
            self.sharding.shard_shape((envs.batch_size,))
        except ValueError as error:
            raise ValueError(f"sharding: time steps of {envs.batch_size} envs: {error}") from error
        if self._platform == "gpu":
            envs.pool.pin()

    def __call__(self, rows: Rows) -> Sequence[jax.Array]:
        """Returns the rows where they should be. Whoever has the envs stepped next can't change them.

        On the CPU JAX aliases the memory that it is given, where it can, so it is given copies; to devices
        it copies from where the envs wrote them, and until it has we may not return.
        """
        if self._platform == "cpu":
            rows = [_copy(array) for array in rows]
        return jax.block_until_ready(jax.device_put(list(rows), self.sharding))

    @property
    def _platform(self) -> str:
        return next(iter(self.sharding.device_set)).platform


def _copy(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a copy that is aligned as JAX wants what it aliases."""
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
