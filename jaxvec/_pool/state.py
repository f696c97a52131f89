"""The life cycle of a pool: OPEN, then BROKEN by an error or CLOSED.

Every call on a pool runs through `PoolState`:

    track(move)             records the call and releases its slots when it ends
      enter(move)           checks the pool, the handle and the env ids; nothing has changed yet
        breaking()          sends envs to workers or waits for them: an error here breaks the pool

`PoolFinalizer` closes the pool. It is separate because a broken pool stores its error, and the traceback of
that error refers to the user's `VectorEnv`. A finalizer of the `VectorEnv` must not keep the error alive.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._engine.engine import Engine, PendingEnvs, Status
from jaxvec._engine.move import Move, name_caller
from jaxvec._errors import (
    EnvIdError,
    NotPicklableError,
    NotReadyError,
    PendingEnvError,
    PoolBrokenError,
    PoolClosedError,
    ResetNeededError,
    StaleHandleError,
)
from jaxvec._memory.pinned import Pinned
from jaxvec._native import interrupts
from jaxvec._workers.base import WorkerGroup

_BROKEN_CLOSE_TIMEOUT = 1.0  # seconds that close() gives the envs of a broken pool
_RELEASE_TIMEOUT = 1.0  # seconds that close() waits for other threads once the workers are gone


class PoolFinalizer:
    """Closes a pool once."""

    def __init__(self, workers: WorkerGroup, engine: Engine) -> None:
        self._workers = workers
        self._engine = engine
        self.process: int = os.getpid()  # a fork of this process may neither use nor close the pool
        self.closed: bool = False  # closing has started
        self.ended: bool = False  # the workers and the memory are released
        self._closing = threading.Lock()  # of the thread that is in `close`
        self.hurry = False  # the pool is broken, so its envs get little time to close
        self.pinned: Pinned | None = None  # page lock, released before the segment is unmapped

    def close(self, timeout: float | None = 5.0) -> None:
        """Closes the pool, see `Pool.close`.

        Returns at once if another thread is closing it. A second call completes one that Ctrl-C cut short.
        """
        if os.getpid() != self.process or not self._closing.acquire(blocking=False):
            return
        try:
            if self.ended:
                return
            self.closed = True
            self._engine.close_fast_path()
            # A thread that holds slots waits for its envs. Killing the workers ends that wait with an error.
            with self._engine.exclusive(if_busy=self._workers.kill, patience=_RELEASE_TIMEOUT):
                if self.hurry:
                    timeout = min(math.inf if timeout is None else timeout, _BROKEN_CLOSE_TIMEOUT)
                try:
                    # The error of a broken pool has already named the envs that fail or hang.
                    self._workers.close(timeout, tell=not self.hurry)
                finally:  # Ctrl-C cuts the envs' time short, but not the cleanup
                    self._engine.wait_for_copies()
                    if self.pinned is not None:
                        self.pinned.close()
                    self._engine.close()
                    self.ended = True  # last, because Pool.close drops the memory once this is set
        finally:
            self._closing.release()


@dataclass
class ActiveMove:
    """A move that a call is making."""

    move: Move
    interrupt: Callable[[], None]  # raises `KeyboardInterrupt` if Ctrl-C was pressed since the call started
    recorded: bool = False  # C++ has recorded the span of the call


class PoolState:
    """The state machine of a pool: OPEN, then BROKEN or CLOSED.

    It checks each call before anything changes, and breaks the pool if a call fails after its envs were sent.
    Closing is the job of `PoolFinalizer`.
    """

    def __init__(
        self, pool_id: int, engine: Engine, pending_envs: PendingEnvs, finalizer: PoolFinalizer
    ) -> None:
        self._pool_id = pool_id
        self._engine = engine
        self._pending_envs = pending_envs
        self._finalizer = finalizer
        # The last error of a program, and the value of `engine.num_served` when it was raised.
        self._program_error: tuple[int, BaseException] | None = None
        self.broken_by: BaseException | None = None  # the error that broke the pool
        # True once a program on an accelerator has called the pool: JAX may raise its errors late.
        self.errors_late: bool = False

    def check(self) -> None:
        """Raises unless the pool is OPEN and belongs to this process."""
        if os.getpid() != self._finalizer.process:
            raise PoolClosedError(
                f"pool {self._pool_id} belongs to process {self._finalizer.process}; this process is a fork "
                "of it and can't use the pool. Make a new pool in this process"
            )
        if self._finalizer.closed:
            raise PoolClosedError(f"pool {self._pool_id} is closed; make a new one")
        if self.broken_by is not None:
            raise PoolBrokenError(
                f"pool {self._pool_id} is broken since an earlier failure; close it and make a new one. It "
                f"failed with {type(self.broken_by).__name__}: {self.broken_by}"
            ) from self.broken_by

    def break_by(self, error: BaseException) -> None:
        """Marks the pool as broken by `error`, unless it is broken already."""
        if self.broken_by is None:
            self.broken_by = error
            self._finalizer.hurry = True
            self._engine.close_fast_path()

    # --- Calls: only a thread that is inside the engine, or holds slots there, changes anything ---------

    @contextmanager
    def track(self, move: Move, name: str | None = None) -> Generator[ActiveMove]:
        """Records a span of the block, `name` or the move's name, and releases its slots when it ends.

        Once envs were sent, Ctrl-C breaks the pool wherever it arrives, also between two `breaking` blocks.
        Otherwise an env could be running that no record shows as pending.
        """
        active = ActiveMove(move, interrupts.since_now())  # before an env can hang
        recorder = self._engine.recorder
        start_ns = time.monotonic_ns()
        try:
            yield active
        except (Exception, GeneratorExit):
            # Either no env was sent, or a `breaking` block has broken the pool. A GeneratorExit means that
            # Ctrl-C arrived after the end of the block.
            raise
        except BaseException as error:
            if self._engine.holds():
                self.break_by(error)
            raise
        finally:
            if recorder is not None and not active.recorded:
                recorder.add(name or move.name, start_ns)
            self._engine.release()

    def enter(self, move: Move) -> None:
        """Checks a move before it changes anything."""
        self.check()
        self.check_status(self._engine.check_handle(move), move.slots, move.generation)
        if move.generation is None:
            # A caller with a fresh handle has waited for the GPU copies of earlier calls; others have not.
            self._engine.wait_for_copies()

    def check_status(
        self, status: Status, env_ids: NDArray[Any], generation: NDArray[np.uint32] | None = None
    ) -> None:
        """Raises the error for a status of the engine, unless it is `DONE`. The caller is inside.

        `env_ids` and, for a handle, `generation`, both `[n]`, are the values that the engine checked.
        """
        if status is Status.DONE:
            return
        engine = self._engine
        num_envs = len(engine.generation)
        match status:
            case Status.NO_SUCH_ENV:
                foreign = env_ids[(env_ids < 0) | (env_ids >= num_envs)]
                raise EnvIdError(
                    f"env_id {foreign[0]} is out of range for pool {self._pool_id} of {num_envs} envs "
                    f"(0 to {num_envs - 1}); nothing was stepped"
                )
            case Status.DUPLICATE:
                raise EnvIdError(
                    f"duplicate env_id {np.bincount(env_ids).argmax()}; nothing was stepped. Under vmap, "
                    "give each instance a handle to different envs"
                )
            case Status.STALE:
                assert generation is not None
                latest_calls = engine.generation[env_ids] - engine.first_generation
                calls = generation - engine.first_generation
                stale = int(np.flatnonzero(calls != latest_calls)[0])
                if calls[stale] > latest_calls[stale]:
                    raise StaleHandleError(
                        "the handle was made by another process, and only refers to the envs of that "
                        "process. Start with jaxvec.reset(envs). In checkpoints, keep the bytes of "
                        "envs.pack_states() instead of a handle"
                    )
                raise StaleHandleError(
                    f"stale handle: it is from call {calls[stale]} to env {env_ids[stale]} of pool "
                    f"{self._pool_id}, but the latest is call {latest_calls[stale]}, by "
                    f"{name_caller(engine.last_caller)}. A handle can be used once, like a donated buffer: "
                    "pass on the handle returned by the latest call. After a call on the host, start again "
                    "with jaxvec.reset(envs). To reset within a program that steps, use jaxvec.reset(handle)"
                    + _explain_rerun()
                )
            case Status.PENDING:
                pending = env_ids[self._pending_envs.in_flight[env_ids]].tolist()
                raise PendingEnvError(
                    f"envs {pending} are pending: they were sent and not yet received; call recv first. "
                    "Nothing was stepped"
                )
            case Status.NEEDS_RESET:
                waiting = env_ids[self._pending_envs.needs_reset[env_ids]].tolist()
                fresh = (engine.generation == engine.first_generation).all()
                why = "have not been reset" if fresh else "have ended their episode or were never reset"
                raise ResetNeededError(
                    f"envs {waiting} {why}; reset them first (with autoreset_mode DISABLED: "
                    "reset(..., mask=terminated | truncated)). Nothing was stepped"
                )
            case _:
                raise AssertionError(f"no error is defined for {status!r}")

    @contextmanager
    def breaking(self) -> Generator[None]:
        """Breaks the pool if the block fails, also by Ctrl-C: the contents of the rows are then unknown."""
        try:
            yield
        except (NotReadyError, NotPicklableError, GeneratorExit):
            # The envs are unchanged; a GeneratorExit means that Ctrl-C arrived after the end of the block.
            raise
        except BaseException as error:
            if self._finalizer.closed:
                raise PoolClosedError(
                    f"pool {self._pool_id} was closed during a call; close it after the last call"
                ) from error
            self.break_by(error)
            raise

    # --- Errors of programs, of which JAX passes on only the text ---------------------------------------

    def keep_error(self, error: BaseException, *, under_way: bool) -> None:
        """Keeps the error of a program's call for `take_error`; if it was `under_way`, breaks the pool."""
        if under_way and not self._finalizer.closed:
            self.break_by(error)
        self._program_error = self._engine.num_served, error

    def take_error(self) -> BaseException | None:
        """Returns and forgets the error of the latest call of a program; `None` if that call succeeded."""
        failure = self._program_error
        self._program_error = None
        # A call that has succeeded since may be of the same program, on another device.
        if failure is None or (failure[0] != self._engine.num_served and failure[1] is not self.broken_by):
            return None
        # Up to jax 0.11, the token of a failed program keeps the error: JAX would print it twice at exit, and
        # later waits would end too early.
        with suppress(KeyError, AttributeError):  # the names are private
            sys.modules["jax._src.dispatch"].runtime_tokens.clear()
        return failure[1]


def _explain_rerun() -> str:
    """Returns the end of the message for a stale handle if JAX may have run the program again."""
    jax: Any = sys.modules.get("jax")
    for flag, value in ("jax_debug_nans", "NaN"), ("jax_debug_infs", "infinity"):
        if jax is not None and getattr(jax.config, flag, False):
            return (
                f". {flag} is on: if JAX has found a {value} in this program, it has run it again, with the "
                f"old handle. Then the {value} is the error to look for: turn {flag} off, and use "
                "jax.experimental.checkify"
            )
    return ""
