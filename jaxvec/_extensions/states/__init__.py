"""Saved states of envs: `jaxvec.save`, `restore`, `simulate`, and files of states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxvec._envs.slice import SliceExtension
from jaxvec._extension import Extension
from jaxvec._memory.segment import Arrays, ArrayType
from jaxvec._options import States
from jaxvec._spec import PoolSpec

if TYPE_CHECKING:  # each process imports its own half only
    from jaxvec._envs.env_slice import EnvSlice
    from jaxvec._extensions.states.pool_states import PoolStates
    from jaxvec._pool.pool import Pool


@dataclass(frozen=True)
class StatesExtension(Extension):
    """The states of a pool's envs."""

    options: States

    def arrays(self, spec: PoolSpec) -> Iterator[ArrayType]:
        # The parent writes the number of the state to save or restore, and the oldest number that it keeps.
        # For a simulation, `state` is the end of the worker's part of `simulated_before`, which starts at
        # `first_simulated`. The worker writes 0 to `state` when it is done.
        n = spec.num_envs
        states = self.options.max
        try:
            np.empty((4, states), np.int64)  # as much as the table of the states
        except (MemoryError, ValueError, OverflowError) as error:
            raise ValueError(f"can't keep {states} states: {error}; keep fewer") from error
        yield ("state",), (n,), np.dtype(np.int64)
        yield ("first_simulated",), (n,), np.dtype(np.int64)
        yield ("oldest_state",), (1,), np.dtype(np.int64)
        # The parent writes the time steps of saves, and workers those of simulations, at the states' places.
        for leaf in spec.timestep_leaves:
            if not leaf.is_object:
                yield ("saved", *leaf.path), (states, *leaf.shape), leaf.stored
        # Written by the parent, in the order of the workers: numbers of the states, and action.
        for name in ("simulated_before", "simulated_after"):
            yield (name,), (states,), np.dtype(np.int64)
        for leaf in spec.action_leaves:
            if not leaf.is_object:
                yield ("simulated", *leaf.path), (states, *leaf.shape), leaf.stored

    def on_slice(self, env_slice: EnvSlice) -> SliceExtension:
        from jaxvec._extensions.states.slice_states import SliceStates

        return SliceStates(env_slice, self.options)

    def on_pool(self, pool: Pool, arrays: Arrays) -> PoolStates:
        from jaxvec._extensions.states.pool_states import PoolStates

        return PoolStates(pool, arrays, self.options.max)
