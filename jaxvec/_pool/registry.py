"""Finds the pool that a handle names.

Handles name their pool by number, so that a compiled program holds no pointer and serves every pool of
its specification.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.move import Move
from jaxvec._errors import PoolClosedError, StaleStateError
from jaxvec._memory.segment import Deliver, Rows
from jaxvec._pool.pool import Pool
from jaxvec._pool.pool_states import PackedStates

_pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()

PoolOf: TypeAlias = Callable[[int], Pool]  # finds or starts the pool of so many envs
_families: dict[int, weakref.WeakMethod[PoolOf]] = {}


def publish(pool: Pool) -> None:
    """Lets handles to the pool be used for as long as it lives."""
    _pools[pool.id] = pool


def publish_family(pool_id: int, pool_of: PoolOf) -> None:
    """Lets resets that name the pool go to the pool of their size, for as long as the method's object lives.

    Programs call the method while they run, so it must not use JAX.
    """
    _families[pool_id] = weakref.WeakMethod(pool_of, lambda _: _families.pop(pool_id, None))


def find(pool_id: int, fingerprint: int, fresh: int | None = None) -> Pool:
    """Returns the pool with this id, or of its family.

    Args:
        pool_id: of a handle.
        fingerprint: of the spec that the handle was made for.
        fresh: of a reset that starts from a pool, how many envs it is for; `None` of any other call.

    Raises:
        PoolClosedError: there is no such pool.
        StaleHandleError: it has another spec.
    """
    pool = _pools.get(pool_id)
    if pool is None:
        raise PoolClosedError(
            f"there is no pool {pool_id}: its VectorEnv was garbage collected, or belongs to another "
            "process; keep the VectorEnv alive for as long as its handles are used"
        )
    pool.check_spec(fingerprint)
    family = None if fresh is None else _families.get(pool_id)
    pool_of = family and family()
    return pool if pool_of is None or fresh is None else pool_of(fresh)


def of_spec(fingerprint: int) -> list[Pool]:
    """Returns the pools whose spec has this fingerprint."""
    return [pool for pool in list(_pools.values()) if pool.spec.fingerprint == fingerprint]


def restore(pool: Pool, move: Move, states: NDArray[np.uint32], *, deliver: Deliver) -> Rows:
    """Has envs of a pool go on from states, perhaps of other pools; see `Pool.restore`.

    Raises:
        StaleStateError: there is no such pool any more, or it has another spec.
    """
    if (states[:, 0] == pool.id).all():
        return pool.restore(move, states, deliver=deliver)
    data: list[bytes] = [b""] * len(states)
    rows = [np.empty((len(states), *leaf.shape), leaf.stored) for leaf in pool.spec.timestep_leaves]
    needs_reset = np.empty(len(states), np.bool_)
    for pool_id in np.unique(states[:, 0]).tolist():
        places = np.flatnonzero(states[:, 0] == pool_id)
        packed = _find_other(pool_id, pool).export_states(states[places])
        for place, one in zip(places.tolist(), packed.data, strict=True):
            data[place] = one
        for row, part in zip(rows, packed.rows, strict=True):
            row[places] = part
        needs_reset[places] = packed.needs_reset
    return pool.restore(move, states, PackedStates(data, rows, needs_reset), deliver=deliver)


def _find_other(pool_id: int, pool: Pool) -> Pool:
    other = _pools.get(pool_id)
    if not pool_id or other is None or other.closed:
        raise StaleStateError(
            f"states of pool {pool_id}, which is gone: its states went with it"
            if pool_id
            else "a state is all zeros, which is none that save or simulate returned"
        )
    if other.spec.fingerprint != pool.spec.fingerprint:
        raise StaleStateError(
            f"states of pool {pool_id}, which has other spaces or options than pool {pool.id}; envs go on "
            "from states of pools of equal specification"
        )
    return other


def keep(pool_id: int, error: BaseException, *, under_way: bool) -> None:
    """Has the pool, if there is one, keep the error of a program's call; see `PoolState.keep_error`."""
    pool = _pools.get(pool_id)
    if pool is not None:
        pool.state.keep_error(error, under_way=under_way)


@contextmanager
def serving(pool_id: int, fingerprint: int, fresh: int | None = None) -> Generator[Pool]:
    """Yields the pool that a compiled program's call names.

    The pool keeps an error of the block, because JAX passes only its text on to the user.

    Args:
        pool_id, fingerprint, fresh: as of `find`.
    """
    pool = _pools.get(pool_id)
    try:
        pool = find(pool_id, fingerprint, fresh)
        yield pool
    except BaseException as error:
        if pool is not None:
            pool.state.keep_error(error, under_way=False)
        raise
    pool.state.count_success()
