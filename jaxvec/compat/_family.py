"""The functional interface to a single env, for `compat.gymnax` and `compat.brax`.

`vmap` determines the number of envs, which is known only after tracing. So a pool of *n* envs starts when a
reset of *n* envs runs for the first time, and is kept for later resets.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Self

import jax

from jaxvec._errors import PoolClosedError, SpaceMismatchError
from jaxvec._pool import registry
from jaxvec._pool.pool import Pool
from jaxvec._results import TimeStep
from jaxvec._settings import check_count
from jaxvec._vector_env import VectorEnv, pool_of
from jaxvec.callbacks import _functions
from jaxvec.callbacks._handle import Handle
from jaxvec.callbacks._make import make
from jaxvec.callbacks._operands import as_array

# Options that users cannot set.
_FIXED_OPTIONS = {
    "num_envs": "vmap determines the number of envs",
    "batch_size": "asynchronous batches can't be split over vmapped instances",
    "recv_order": "asynchronous batches can't be split over vmapped instances",
    "autoreset_mode": "these envs reset themselves in the same step",
}


class PooledEnv:
    """A single env, and the pools that run it: one per number of envs that a program has reset. Abstract.

    The first pool has one env; it provides the spaces and serves programs without `vmap`. A reset of *n* envs
    makes the handles of earlier resets of *n* envs stale. The pools are closed by `close`, by `with`, or when
    the env is garbage-collected. A compiled function keeps a reference to the env.
    """

    def __init__(
        self,
        env: Any,
        *,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Starts the first pool. The arguments are those of `jaxvec.make`, except for `_FIXED_OPTIONS`.

        `env` must not be a list. Each pool has at most one worker per env.
        """
        for name in kwargs.keys() & _FIXED_OPTIONS:
            raise TypeError(f"{name} can't be set here: {_FIXED_OPTIONS[name]}")
        if not isinstance(env, str) and hasattr(env, "__len__"):
            raise TypeError("env must be one env, not a list: vmap determines the number of envs")

        most = None if num_workers is None else check_count("num_workers", num_workers, 1)
        # As it is in this thread. Later pools start in a thread of XLA, and need equal dtypes.
        x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

        def start(num_envs: int) -> VectorEnv:
            with _enable_x64(x64):
                return make(env, num_envs, num_workers=most and min(most, num_envs), **kwargs)

        self._start: Callable[[int], VectorEnv] = start
        self._first: VectorEnv = start(1)
        self._pools = {1: self._first}  # grows under `_starting`; other threads read copies
        self._starting = threading.Lock()  # held while a pool starts; `close` does not take it
        self._closed = False
        registry.publish_family(pool_of(self._first).id, self._pool)

    @property
    def pools(self) -> Mapping[int, VectorEnv]:
        """The pools started so far, by their number of envs. They offer `stats`, `infos`, `call` and more."""
        return MappingProxyType(self._pools)

    def _pool(self, num_envs: int) -> Pool:
        """Returns the pool of `num_envs` envs, and starts it if necessary.

        Programs call this at run time, so it must not start JAX programs. Raises `PoolClosedError`,
        `SpaceMismatchError`, and the errors of `jaxvec.make`.
        """
        with self._starting:
            if num_envs not in self._pools:
                self._check_open()
                envs = self._start(num_envs)
                if envs.spec.fingerprint != self._first.spec.fingerprint:
                    envs.close()
                    raise SpaceMismatchError(
                        f"the spaces or info of {num_envs} envs differ from those of the first env"
                    )
                self._pools[num_envs] = envs
                if self._closed:  # by another thread, while the pool started
                    envs.close()
                    self._check_open()
        return pool_of(self._pools[num_envs])

    def _reset(self, seed: Any, options: dict[str, Any] | None = None) -> tuple[Handle, TimeStep]:
        """Resets one env, or under `vmap`, however nested, one env per instance with a single dispatch.

        `seed` is an integer, a JAX key, or `None`; `options` are fixed at trace time, unless the pool
        declares them. Returns a handle with a token `[1, 3]`, and the time step without an env axis.
        """
        handle = _functions.fresh_handle(self._first, 1)
        handle, timestep = _functions.bind_reset(handle, seed, None, options, fresh=True, elastic=True)
        return handle, _first(timestep)

    def _step(self, handle: Handle, action: Any, reset_options: Any = None) -> tuple[Handle, TimeStep]:
        """Steps one env, or under `vmap` one env per instance, with a single dispatch; see `jaxvec.step`."""
        batch = jax.tree.map(lambda leaf: as_array(leaf)[None], action)
        handle, timestep = _functions.step(handle, batch, reset_options=reset_options)
        return handle, _first(timestep)

    def raise_if_failed(self) -> None:
        """Raises the typed error behind a failure of a compiled program, if there was one."""
        for envs in [*self._pools.values()]:
            envs.raise_if_failed()

    def close(self) -> None:
        """Closes all pools. May be called more than once."""
        self._closed = True
        for envs in [*self._pools.values()]:
            envs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Closes all pools. Raises a pool's typed error if a program failed because of that pool."""
        self._closed = True
        stack = ExitStack()
        for envs in [*self._pools.values()]:
            stack.push(envs)
        stack.__exit__(kind, error, trace)

    def _check_open(self) -> None:
        process = pool_of(self._first).finalizer.process
        if os.getpid() != process:
            raise PoolClosedError(
                f"the env belongs to process {process}, and this process is a fork of it; make a new env"
            )
        if self._closed:
            raise PoolClosedError("the env is closed; make a new env")


# Older versions of JAX have it in another module.
_place: Any = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
_enable_x64: Any = _place.enable_x64


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)
