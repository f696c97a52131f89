"""What the transports share of a compiled program's call: its results, and how to answer it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np
from numpy.typing import NDArray

from jaxvec import _seeds
from jaxvec._gate import RESET
from jaxvec._pool import Pool
from jaxvec._spec import PoolSpec


def results(spec: PoolSpec) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of a call's results: the next token, and the leaves of the time step."""
    token = jax.ShapeDtypeStruct((2,), np.uint32)
    return [
        token,
        *(jax.ShapeDtypeStruct(spec.batch_shape(leaf), leaf.stored) for leaf in spec.timestep_leaves),
    ]


def pickled(options: dict[str, Any] | None) -> bytes:
    """Returns a reset's options as a program can hold them: fixed, and equal if they are."""
    return cloudpickle.dumps(options)


def reset(
    pool: Pool,
    count: int,
    seeds: NDArray[np.int64],
    mask: NDArray[np.bool_],
    *,
    sequenced: bool,
    options: bytes,
    out: Sequence[NDArray[Any]] | None = None,
) -> tuple[int, Sequence[NDArray[Any]]]:
    """Answers a program's reset; see `Pool.reset`.

    Args:
        count: that of the program's handle, if it is `sequenced`.
        seeds: `[num_envs]`, as `_seeds.expand`.
        options: as `pickled` returned them.
    """
    _seeds.check(seeds)
    return pool.reset(
        seeds=seeds,
        mask=mask,
        options=cloudpickle.loads(options),
        count=count if sequenced else None,
        caller=RESET,
        out=out,
    )
