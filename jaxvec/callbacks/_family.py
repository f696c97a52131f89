"""One env at a time, as libraries of JAX envs have it: `vmap` says how many envs there are.

That is known only when a program has been put together, so the pool of so many envs is started when a
reset of so many runs, and kept for the next.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxvec import _util
from jaxvec._config import PoolConfig, Workers
from jaxvec._dispatch.move import Verb
from jaxvec._errors import PoolClosedError, SpaceMismatchError
from jaxvec._pool import registry
from jaxvec._pool.pool import Pool
from jaxvec._spec import TimeStep
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _call, _functions, _primitive
from jaxvec.callbacks._call import Call, Handle
from jaxvec.callbacks._make import make

# What a family decides by itself.
_OURS = {
    "num_envs": "vmap says how many envs there are",
    "batch_size": "asynchronous batches can't be split over vmapped instances",
    "recv_order": "asynchronous batches can't be split over vmapped instances",
    "autoreset_mode": "these envs reset themselves in the same step",
}


@final
class EnvFamily:
    """Pools of the same env, one for each number of envs that was asked for.

    The first has one env, tells the spaces, and serves whoever steps a single env. Handles of a reset of
    *n* envs are stale as soon as *n* envs of the family are reset again.
    """

    def __init__(
        self,
        env: Any,
        *,
        num_workers: int | None = None,
        workers: Workers = Workers(),  # noqa: B008 - it can't be changed
        **kwargs: Any,
    ) -> None:
        """Starts the first pool.

        Args:
            env: of `jaxvec.make`, but no list.
            num_workers, workers: of each pool, as far as it has envs.
            **kwargs: of `jaxvec.make`, but for `num_envs` and what goes with it.

        Raises:
            TypeError: `env` is a list, or an argument can't be given here.
            JaxvecError: as `jaxvec.make`.
        """
        for name in kwargs.keys() & _OURS:
            raise TypeError(f"{name} can't be set here: {_OURS[name]}")
        if not isinstance(env, str) and hasattr(env, "__len__"):
            raise TypeError("env must be one env, not a list of them: vmap says how many envs there are")

        options = PoolConfig(num_workers=num_workers, workers=workers).workers

        def start(num_envs: int) -> VectorEnv:
            num = options.num and min(options.num, num_envs)
            return make(env, num_envs, workers=replace(options, num=num), **kwargs)

        self._start: Callable[[int], VectorEnv] = start
        self.first: VectorEnv = start(1)
        self._pools = {1: self.first}
        self._starting = threading.Lock()  # one thread at a time; `close` does not wait for it
        self.closed: bool = False
        registry.publish_family(self.first.pool.id, self.pool)

    @property
    def pools(self) -> Mapping[int, VectorEnv]:
        """The pools so far, by their number of envs."""
        return MappingProxyType(self._pools)

    def pool(self, num_envs: int) -> Pool:
        """Returns the pool of so many envs; starts it if there is none.

        Programs call this while they run, so there is no JAX in it.

        Raises:
            PoolClosedError: the family is closed.
            SpaceMismatchError: the envs have other spaces than the first one.
            JaxvecError: as `jaxvec.make`.
        """
        with self._starting:
            if num_envs not in self._pools:
                self._check_open()
                envs = self._start(num_envs)
                if envs.spec.fingerprint != self.first.spec.fingerprint:
                    envs.close()
                    raise SpaceMismatchError(
                        f"{num_envs} envs have other spaces, or other info, than the first env"
                    )
                self._pools[num_envs] = envs
                if self.closed:  # in the meantime
                    envs.close()
                    self._check_open()
        return self._pools[num_envs].pool

    def reset(self, seed: Any, *, options: dict[str, Any] | None = None) -> tuple[Handle, TimeStep]:
        """Resets one env, or under `vmap` one for each lane, however nested, in one hand-off.

        Args:
            seed: of the env: an integer, a JAX key, or `None`.
            options: passed to the env's `reset`; fixed when the program is traced.

        Returns:
            The handle for the next step, `[1, 3]`, and the time step, without an env axis.
        """
        token = np.array([[self.first.pool.id, 0, 0]], np.uint32)
        handle = Handle(token, self.first.spec, self.first.transport)  # pyright: ignore[reportArgumentType]
        spec = _call.check_is_handle(handle, "reset")
        extra = _util.dumps((options, False))  # without a mask
        call = Call(Verb.RESET, spec, handle.transport, fresh=True, extra=extra, elastic=True)
        words, mask = _call.seed_words(seed, 1), _call.mask_array(None, 1)
        token, *rows = _primitive.bind(call, handle.token, words, mask)
        return handle.next(token), _first(spec.build_timestep(rows))

    def step(self, handle: Handle, action: Any) -> tuple[Handle, TimeStep]:
        """Steps one env, or under `vmap` those of all lanes, in one hand-off; see `jaxvec.step`."""
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], action)
        handle, timestep = _functions.step(handle, batch)
        return handle, _first(timestep)

    def raise_if_failed(self) -> None:
        """Raises the typed error behind a failure of a compiled program, if there was one."""
        for envs in [*self._pools.values()]:
            envs.raise_if_failed()

    def close(self) -> None:
        """Closes all pools. Twice is fine."""
        self.closed = True
        for envs in [*self._pools.values()]:
            envs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes; where a program failed because of a pool, raises the pool's own, typed error."""
        self.closed = True
        stack = ExitStack()
        for envs in [*self._pools.values()]:
            stack.push(envs)
        stack.__exit__(kind, error, trace)

    def _check_open(self) -> None:
        process = self.first.pool.finalizer.process
        if os.getpid() != process:
            raise PoolClosedError(
                f"the env belongs to process {process}; this process is a fork of it and can't use it. Make "
                "another one here"
            )
        if self.closed:
            raise PoolClosedError("the env is closed, and with it all of its pools")


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)
