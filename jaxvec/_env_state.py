"""`EnvState`: what stands for the states of envs, in programs and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class EnvState:
    """Saved states of envs: a pytree of one small array, whose first axes are those of the envs.

    It names the states, which stay in the workers. So it is indexed, reshaped, gathered, stacked and chosen
    from like an observation, also by `jax.tree.map`; `state[i]` indexes the axes before the last. It stays
    good until newer states have taken its place (`jaxvec.make(states=...)`).

    Attributes:
        ids: `[num_envs, 3]` uint32: the pool, and the low and high word of the state's number in it. Zeros
            name no state.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 4, states=10) as envs:
            envs.reset(seed=0)
            state = envs.save()
            timestep = envs.restore(state[[0, 0, 2, 2]])  # env 1 goes on as env 0, and env 3 as env 2
            print((timestep.obs[0] == timestep.obs[1]).all())  # True
        ```
    """

    ids: Any

    def __getitem__(self, index: Any) -> EnvState:
        """Returns some of the states, or each with more axes, as NumPy and JAX index arrays."""
        return EnvState(self.ids[index])


def check(state: Any, num_envs: int | None) -> NDArray[np.uint32]:
    """Returns the `[num_envs, 3]` ids of a state on the host; raises if it is something else.

    `None` stands for any number.
    """
    ids = np.asarray(ids_of(state))
    check_type(ids.shape, ids.dtype, num_envs if num_envs is not None else len(ids) if ids.ndim else 0)
    return ids


def ids_of(state: Any) -> Any:
    """Returns the ids of a state, which may be traced; raises `TypeError` if it is something else."""
    if not isinstance(state, EnvState):
        raise TypeError(f"state must be what save or simulate returned, not {type(state).__name__}")
    return state.ids


def check_type(shape: tuple[int, ...], dtype: Any, num_envs: int) -> None:
    """Raises `ValueError` unless ids of this type name a state for each env."""
    if shape != (num_envs, 3) or dtype != np.uint32:
        raise ValueError(
            f"state: expected one for each of {num_envs} envs, uint32 ids of shape ({num_envs}, 3); got "
            f"{dtype} of shape {shape}"
        )
