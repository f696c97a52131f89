"""Checks seeds and masks, and expands a seed over the envs."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LARGEST = 2**63 - 1
NONE = -(2**63)  # in place of a seed: no seed


def expand(seed: Any, num_envs: int) -> NDArray[np.int64] | None:
    """Returns `[num_envs]` int64 seeds, `NONE` where an env gets none.

    Args:
        seed: `None`, an int (env *i* gets `seed + i`), or one seed, perhaps `None`, for each env.

    Raises:
        ValueError: a seed is negative or too large, or their number is not `num_envs`.
        TypeError: a seed is no integer.
    """
    if seed is None:
        return None
    if np.ndim(seed) == 0:
        first = _index(seed)
        seeds: list[int | None] = [first + i for i in range(num_envs)]
    else:
        seeds = [None if one is None else _index(one) for one in seed]
        if len(seeds) != num_envs:
            raise ValueError(
                f"seed: got {len(seeds)} seeds for {num_envs} envs; pass one integer, or one for each env"
            )
    for env_id, one in enumerate(seeds):
        if one is not None and not 0 <= one <= _LARGEST:
            raise ValueError(_out_of_range(one, env_id))
    return np.array([NONE if one is None else one for one in seeds], np.int64)


def derive(seed: int, *numbers: int) -> int:
    """Returns another seed, made from `seed` and what tells it from others made from the same."""
    return int(np.random.SeedSequence([seed, *numbers]).generate_state(1)[0])


def check(seeds: NDArray[np.int64]) -> None:
    """Raises `ValueError` if one of `[num_envs]` expanded seeds is out of range."""
    wrong = np.flatnonzero((seeds < 0) & (seeds != NONE))
    if wrong.size:
        raise ValueError(_out_of_range(int(seeds[wrong[0]]), int(wrong[0])))


def check_mask(mask: Any, num_envs: int) -> NDArray[np.bool_] | None:
    """Returns `mask` as `[num_envs]` bool; raises `ValueError` if it is anything else."""
    if mask is None:
        return None
    array = np.asarray(mask)
    if array.dtype != np.bool_ or array.shape != (num_envs,):
        raise ValueError(
            f"mask must be bool of shape ({num_envs},), got {array.dtype} of shape {array.shape}"
        )
    return array


def _out_of_range(seed: int, env_id: int) -> str:
    return f"seed {seed} of env {env_id} is not between 0 and 2**63 - 1"


def _index(seed: Any) -> int:
    try:
        return operator.index(seed)
    except TypeError as error:
        raise TypeError(f"a seed must be an integer, got {seed!r}") from error
