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
from jaxvec._spaces import Leaf
from jaxvec._spec import PoolSpec

TOKEN = np.dtype((np.uint32, (2,)))  # of a handle


def array_type(spec: PoolSpec, leaf: Leaf) -> np.dtype[Any]:
    """Returns the dtype and, as a part of it, the shape of a leaf's `[num_envs, ...]` array."""
    return np.dtype((leaf.stored, spec.batch_shape(leaf)))


def results(spec: PoolSpec) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of a call's results: the next token, and the leaves of the time step."""
    types = [TOKEN, *(array_type(spec, leaf) for leaf in spec.timestep_leaves)]
    return [jax.ShapeDtypeStruct(dtype.shape, dtype.base) for dtype in types]


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
