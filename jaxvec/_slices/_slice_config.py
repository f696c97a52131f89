"""What kind of slice the envs of a pool make up, wherever they are stepped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxvec._slices._batch_slice import BatchSlice
from jaxvec._slices._env_slice import EnvSlice
from jaxvec._slices._env_states import StateFunctions
from jaxvec._slices._envs import EnvFn
from jaxvec._slices._slice import Slice
from jaxvec._slices._spares import Spares


@dataclass(frozen=True)
class SliceConfig:
    """The same for all slices of a pool.

    Attributes:
        size: how many envs a batched env has; `None` for envs one by one.
        spare_envs: how many more envs each worker builds, to be reset in advance.
        strict: whether observations have to be members of their space.
        see_through: whether steps may pass Gymnasium's own wrappers by.
        equal_spaces: whether observation spaces have to be equal, and not only alike.
        keeps_states: whether states of envs are saved.
        state_functions: the user's, by which states of envs are taken and put back; `None` for our own way.
    """

    size: int | None
    spare_envs: int
    strict: bool
    see_through: bool
    equal_spaces: bool
    keeps_states: bool = False
    state_functions: StateFunctions | None = None

    def slice_of(
        self, envs: list[Any], env_fns: Sequence[EnvFn], spares: Spares | None = None
    ) -> Callable[..., Slice]:
        """Returns what makes the slice of these envs, once its place in a pool is known."""
        if self.size is not None:
            return partial(BatchSlice, envs, size=self.size)
        return partial(
            EnvSlice,
            envs,
            env_fns,
            spares=spares,
            strict=self.strict,
            see_through=self.see_through,
            keeps_states=self.keeps_states,
            state_functions=self.state_functions,
        )
