"""Finds the pool that a handle names.

Handles name their pool by number, so that a compiled program holds no pointer and serves every pool of
its specification.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager

from jaxvec._errors import PoolClosedError
from jaxvec._pool import Pool

_pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()


def publish(pool: Pool) -> None:
    """Lets handles to the pool be used for as long as it lives."""
    _pools[pool.id] = pool


def find(pool_id: int, fingerprint: int) -> Pool:
    """Returns the pool with this id.

    Args:
        pool_id: of a handle.
        fingerprint: of the spec that the handle was made for.

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
    pool.require_spec(fingerprint)
    return pool


@contextmanager
def serving(pool_id: int, fingerprint: int) -> Generator[Pool]:
    """Yields the pool that a compiled program's call names; see `find`.

    The pool keeps an error of the block, because JAX passes only its text on to the user.
    """
    try:
        pool = find(pool_id, fingerprint)
        yield pool
    except BaseException as error:
        if pool_id in _pools:
            _pools[pool_id].keep(error)
        raise
    pool.served()
