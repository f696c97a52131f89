"""The one state machine of a pool: OPEN, then BROKEN by a cause, or CLOSED.

Counts steps, keeps rows whole, and decides what each caller may do. Which processes do the work is
its workers' affair, and what the data means is its callers'.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec._backend import Workers
from jaxvec._errors import (
    EnvError,
    PoolBrokenError,
    PoolClosedError,
    ResetNeededError,
    StaleHandleError,
)
from jaxvec._handoff import RESET, STEP
from jaxvec._layout import make_layout
from jaxvec._native import interrupts
from jaxvec._seeds import NONE
from jaxvec._spec import PoolSpec

# Handles name their pool by number, so that a compiled program holds no pointer and serves every
# pool of its specification.
_ids = itertools.count(1)
_pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()


def find(pool_id: int) -> Pool:
    """Returns the pool with this id, or raises `PoolClosedError`."""
    pool = _pools.get(pool_id)
    if pool is None:
        raise PoolClosedError(
            f"there is no pool {pool_id}: its VectorEnv was garbage collected, or belongs to another "
            "process; keep the VectorEnv alive for as long as its handles are used"
        )
    return pool


@contextmanager
def serving(pool_id: int, fingerprint: int) -> Generator[Pool]:
    """Yields the pool that a compiled program's call names.

    The pool keeps an error of the block, because JAX passes only its text on to the user.

    Args:
        pool_id: of the program's handle.
        fingerprint: of the spec that the program was made for.
    """
    pool = find(pool_id)
    try:
        pool.require_spec(fingerprint)
        yield pool
    except BaseException as error:
        pool.keep(error)
        raise
    pool.served()


@dataclass(frozen=True)
class Timeouts:
    """Seconds; `None` waits for ever."""

    start: float | None
    reset: float | None
    step: float | None


@dataclass(frozen=True)
class _Rows:
    """The pool's views of its segment; all `[num_envs, ...]`."""

    seeds: NDArray[np.int64]
    actions: list[NDArray[Any]]
    results: list[NDArray[Any]]
    over: tuple[NDArray[np.bool_], NDArray[np.bool_]]  # terminated, truncated


class Pool:
    """The envs, their memory, and who may step them now."""

    def __init__(
        self,
        workers: Workers,
        spec: PoolSpec,
        *,
        num_workers: int,
        autoreset_mode: AutoresetMode,
        timeouts: Timeouts,
    ) -> None:
        self.spec = spec
        self._workers = workers
        self._autoreset_mode = autoreset_mode
        self._timeouts = timeouts
        layout = make_layout(spec, num_workers=num_workers)
        arrays = workers.attach(layout, spec, autoreset_mode, timeouts.start)
        self._rows = _Rows(
            seeds=arrays["seed",],
            actions=[arrays[leaf.path] for leaf in spec.action_leaves],
            results=[arrays[leaf.path] for leaf in spec.timestep_leaves],
            over=(arrays["terminated",], arrays["truncated",]),
        )
        self._all = np.arange(spec.num_envs)
        self._needs_reset = np.ones(spec.num_envs, np.bool_)
        self._options: dict[str, Any] | None = None  # that the workers hold

        self._broken_by: BaseException | None = None
        self._closed = False
        self._program_error: tuple[int, BaseException] | None = None  # and what the gate had served
        self._process = os.getpid()
        self.id = next(_ids)
        disabled = autoreset_mode is AutoresetMode.DISABLED
        # Whoever resets, steps or requests is inside for the whole of it.
        self._gate = workers.open_gate(
            self.id, self._needs_reset, self._rows.over if disabled else None, timeouts.step
        )
        _pools[self.id] = self

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def broken_by(self) -> BaseException | None:
        """What broke the pool, if anything did."""
        return self._broken_by

    def require_spec(self, fingerprint: int) -> None:
        """Raises `StaleHandleError` if a handle made for a spec of this fingerprint can't be ours."""
        if fingerprint != self.spec.fingerprint:
            raise StaleHandleError(
                f"foreign handle: pool {self.id} has another specification than the pool that the handle "
                "was made for"
            )

    def keep(self, error: BaseException) -> None:
        """Keeps the error of a program's call for `take_program_error`."""
        self._program_error = self._gate.served, error

    def served(self) -> None:
        """Counts a program's call that succeeded; it makes an earlier error old news."""
        self._gate.serve()

    def take_program_error(self) -> BaseException | None:
        """Returns the error of the last program that failed in this pool, once."""
        failure, self._program_error = self._program_error, None
        if failure is None or failure[0] != self._gate.served:  # another has succeeded since
            return None
        return failure[1]

    def reset(
        self,
        *,
        seeds: NDArray[Any] | None,
        mask: NDArray[Any] | None,
        options: dict[str, Any] | None,
        count: int | None,
        caller: str,
        out: Sequence[NDArray[Any]] | None = None,
    ) -> tuple[int, Sequence[NDArray[Any]]]:
        """Resets the envs of `mask`; other rows stay as they are.

        Args:
            seeds: `[num_envs]` int64, `NONE` where an env gets none.
            mask: `[num_envs]` bool; `None` for all.
            options: for every env's `reset`.
            count: that of the caller's handle; `None` if it has none.
            caller: who is to be named when the handles of others go stale; of `_gate.MOVERS`.
            out: where to copy the leaves of the time step.

        Returns:
            The new step count, and a copy of each leaf of the time step, `out` if that was given.
        """
        with self._gate.inside():
            interrupt = interrupts.since_now()  # before an env can hang
            self._require_usable()
            self._require_fresh(count)
            slots = self._all if mask is None else np.flatnonzero(mask)
            self._rows.seeds[:] = NONE if seeds is None else seeds
            with self._breaking():
                self._send_options(options)
                self._workers.send(RESET, slots)
                self._workers.wait(
                    slots, len(slots), name="reset", timeout=self._timeouts.reset, waited=0, check=interrupt
                )
            self._needs_reset[slots] = False
            return self._finish(caller, out)

    def step(
        self,
        actions: Sequence[NDArray[Any]],
        *,
        count: int | None,
        caller: str,
        out: Sequence[NDArray[Any]] | None = None,
    ) -> tuple[int, Sequence[NDArray[Any]]]:
        """Steps every env once.

        Args:
            actions: a `[num_envs, ...]` array for each leaf of the action, of the stored dtype.
            count, caller, out: as in `reset`.

        Returns:
            The new step count, and a copy of each leaf of the time step.
        """
        with self._gate.inside():
            interrupt = interrupts.since_now()  # before an env can hang
            self._require_usable()
            self._require_fresh(count)
            self._require_reset()
            for stored, action in zip(self._rows.actions, actions, strict=True):
                np.copyto(stored, action)
            with self._breaking():
                self._workers.send(STEP, self._all)
                return self._end_step(caller, waited=0, interrupt=interrupt, out=out)

    def end_step(
        self,
        *,
        caller: str,
        waited: float,
        interrupt: Callable[[], None],
        out: Sequence[NDArray[Any]] | None,
    ) -> tuple[int, Sequence[NDArray[Any]]]:
        """Waits for a step that was sent, and ends it. The caller is inside the gate.

        A compiled program's step that was sent without Python comes here when its wait meets with
        anything unusual.

        Args:
            waited: seconds so far.
            interrupt: raises if Ctrl-C came since the step began.
            caller, out: as in `step`.
        """
        with self._breaking():
            interrupt()
            return self._end_step(caller, waited=waited, interrupt=interrupt, out=out)

    def request(self, name: str, arguments: Callable[[int, int], tuple[Any, ...]]) -> list[Any]:
        """Calls a method of every `EnvSlice`, or reads an attribute; an env's error doesn't break us.

        Args:
            name: of the method.
            arguments: of the slice of envs `first` to `stop - 1`.

        Returns:
            One result for each slice, in env order.
        """
        with self._gate.inside():
            self._require_usable()
            with self._breaking(survives=EnvError):
                return self._workers.request(name, arguments, timeout=self._timeouts.step)

    def close(self, timeout: float = 5.0) -> None:
        """Closes the envs and ends the workers, by force after `timeout` seconds.

        Legal at any time, from any thread, and twice: a step that is under way is ended by force,
        and raises `PoolClosedError`.
        """
        if self._closed or os.getpid() != self._process:  # a fork's exit must not close our pool
            return
        self._closed = True
        self._gate.bar()
        with self._gate.inside(if_busy=self._workers.kill):
            self._workers.close(timeout if self._broken_by is None else min(timeout, 1.0))
            self._gate.close()
            del self._rows  # and with it the segment: nobody else has views of it

    def _require_usable(self) -> None:
        if os.getpid() != self._process:
            raise PoolClosedError(
                f"pool {self.id} belongs to process {self._process}, from which this one was forked; make "
                "a pool of its own here"
            )
        if self._closed:
            raise PoolClosedError(f"pool {self.id} is closed")
        if self._broken_by is not None:
            raise PoolBrokenError(
                f"pool {self.id} is broken since an earlier failure; close it and make another. It "
                f"failed with {type(self._broken_by).__name__}: {self._broken_by}"
            ) from self._broken_by

    def _require_fresh(self, count: int | None) -> None:
        if count is None or count == self._gate.count:
            return
        raise StaleHandleError(
            f"stale handle: it says step {count}, but pool {self.id} is at step {self._gate.count}, last "
            f"moved by {self._gate.mover}. Each handle can be used once: pass on the one that the latest "
            "jaxvec.reset or jaxvec.step returned. After stepping on the host, call jaxvec.reset; to reset "
            "within a program that steps, use reset(handle). vmap over step is not supported"
        )

    def _require_reset(self) -> None:
        if not self._needs_reset.any():
            return
        waiting = np.flatnonzero(self._needs_reset).tolist()
        why = (
            "have not been reset" if self._gate.count == 0 else "have ended their episode or never been reset"
        )
        raise ResetNeededError(
            f"envs {waiting} {why}; reset them first (with autoreset_mode DISABLED: "
            "reset(..., mask=terminated | truncated)). Nothing was stepped"
        )

    def _send_options(self, options: dict[str, Any] | None) -> None:
        if options is not None or self._options is not None:
            self._options = options
            self._workers.request(
                "set_options", lambda _first, _stop: (options,), timeout=self._timeouts.reset
            )

    def _end_step(
        self,
        caller: str,
        *,
        waited: float,
        interrupt: Callable[[], None],
        out: Sequence[NDArray[Any]] | None,
    ) -> tuple[int, Sequence[NDArray[Any]]]:
        self._workers.wait(
            self._all,
            len(self._all),
            name="step",
            timeout=self._timeouts.step,
            waited=waited,
            check=interrupt,
        )
        if self._autoreset_mode is AutoresetMode.DISABLED:
            np.logical_or(*self._rows.over, out=self._needs_reset)
        return self._finish(caller, out)

    def _finish(self, caller: str, out: Sequence[NDArray[Any]] | None) -> tuple[int, Sequence[NDArray[Any]]]:
        self._gate.moved(caller)
        if out is None:
            return self._gate.count, [array.copy() for array in self._rows.results]
        for copy, array in zip(out, self._rows.results, strict=True):
            np.copyto(copy, array)
        return self._gate.count, out

    @contextmanager
    def _breaking(self, *, survives: type[BaseException] | tuple[()] = ()) -> Generator[None]:
        """Whatever else ends the block, also Ctrl-C, leaves rows in doubt: the pool is broken by it."""
        try:
            yield
        except BaseException as error:
            if self._closed:
                raise PoolClosedError(f"pool {self.id} was closed during a call") from error
            if not isinstance(error, survives):
                self._broken_by = error
                self._gate.bar()
            raise
