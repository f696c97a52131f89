"""The table of all pools of this process, by id.

A handle contains the id of its pool. So a compiled program holds no pointer, and works for every pool with
the same specification.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeAlias

from jaxvec._errors import PoolClosedError, StaleHandleError
from jaxvec._pool.pool import Pool

_pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()

PoolOf: TypeAlias = Callable[[int], Pool]  # finds or starts the pool with a number of envs
_families: dict[int, weakref.WeakMethod[PoolOf]] = {}


def publish(pool: Pool) -> None:
    """Makes the pool known to `find`, until it is garbage-collected."""
    _pools[pool.id] = pool


def publish_family(pool_id: int, pool_of: PoolOf) -> None:
    """Redirects resets of the pool to the pool of their size, until the method's object is garbage-collected.

    Running programs call the method, so it must not use JAX.
    """
    _families[pool_id] = weakref.WeakMethod(pool_of, lambda _: _families.pop(pool_id, None))


def get(pool_id: int) -> Pool | None:
    """Returns the pool with this id, if it exists."""
    return _pools.get(pool_id)


def find(pool_id: int, fingerprint: int, fresh: int | None = None) -> Pool:
    """Returns the pool with this id, for a handle to a specification with this fingerprint.

    A reset that starts from a pool passes the number `fresh` of its envs, and gets the pool of that size from
    the family of the pool.

    Raises:
        PoolClosedError: No such pool exists.
        StaleHandleError: The pool has another specification.
    """
    pool = _pools.get(pool_id)
    if pool is None:
        raise PoolClosedError(
            f"there is no pool {pool_id}: its VectorEnv was garbage collected, or belongs to another "
            "process; keep the VectorEnv alive for as long as its handles are used. In checkpoints, keep the "
            "bytes of envs.pack_states() instead of a handle"
        )
    if fingerprint != pool.spec.fingerprint:
        raise StaleHandleError(
            f"foreign handle: it was made for a pool with other spaces or options than pool {pool_id}; use "
            "the handle that jaxvec.reset returned for this pool"
        )
    family = None if fresh is None else _families.get(pool_id)
    pool_of = family and family()
    return pool if pool_of is None or fresh is None else pool_of(fresh)


def of_spec(fingerprint: int) -> list[Pool]:
    return [pool for pool in list(_pools.values()) if pool.spec.fingerprint == fingerprint]


@contextmanager
def serving(pool_id: int, fingerprint: int, fresh: int | None = None) -> Generator[Pool]:
    """Yields the pool that a compiled program calls, see `find`.

    If the block raises, the pool keeps the error, because JAX passes on only its text.
    """
    pool = _pools.get(pool_id)
    try:
        pool = find(pool_id, fingerprint, fresh)
        yield pool
    except BaseException as error:
        if pool is not None:
            pool.state.keep_error(error, under_way=False)
        raise
    pool.engine.count_success()  # which makes earlier errors obsolete
