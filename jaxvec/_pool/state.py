"""The state of a pool (open, broken or closed), its errors and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.engine import Admission, Engine, Status
from jaxvec._dispatch.move import Move, name_caller
from jaxvec._errors import (
    EnvIdError,
    JaxvecError,
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
from jaxvec._tracing import Recorder
from jaxvec._workers.base import WorkerGroup

# ----------------------------------------------------------------------------------------------------------
# What an engine refuses, in the errors' words.
# ----------------------------------------------------------------------------------------------------------


def status_error(
    status: Status,
    env_ids: NDArray[Any],
    generation: NDArray[np.uint32] | None,
    *,
    engine: Engine,
    admission: Admission,
    pool_id: int,
) -> JaxvecError:
    """Returns the error of a call that the engine refused. The caller is inside, so nothing changes.

    Args:
        status: that the engine answered with.
        env_ids: `[n]` that it was asked about.
        generation: `[n]` of the caller's handle to them, if it was asked about that.
        engine: of the pool.
        admission, pool_id: of the pool, too.
    """
    num_envs = len(engine.generation)
    match status:
        case Status.NO_SUCH_ENV:
            foreign = env_ids[(env_ids < 0) | (env_ids >= num_envs)]
            return EnvIdError(
                f"env_id {foreign[0]} is out of range for pool {pool_id} of {num_envs} envs "
                f"(0 to {num_envs - 1}); nothing was stepped"
            )
        case Status.NAMED_TWICE:
            return EnvIdError(
                f"env_id {np.bincount(env_ids).argmax()} is named twice; nothing was stepped. Under vmap, "
                "give each instance a handle to envs of its own"
            )
        case Status.STALE:
            now = engine.generation[env_ids]
            stale = int(np.flatnonzero(now != generation)[0])
            assert generation is not None
            return StaleHandleError(
                f"stale handle: it is from call {generation[stale]} to env {env_ids[stale]} of pool "
                f"{pool_id}, but the latest is call {now[stale]}, by {name_caller(engine.last_caller)}. A "
                "handle is used once, like a donated buffer: pass on the one that the latest call returned. "
                "After a call on the host, begin with jaxvec.reset(envs); to reset in a program that steps, "
                "use jaxvec.reset(handle)"
            )
        case Status.PART:
            some, together = admission.part(env_ids), admission.together
            first = int(some[0]) // together * together
            named = np.sort(some[some // together == first // together]).tolist()
            return EnvIdError(
                f"envs {first} to {first + together - 1} are one batched env, which moves as a whole, and "
                f"only {named} of them are named; name all or none of them. Nothing was stepped"
            )
        case Status.IN_FLIGHT:
            return PendingEnvError(
                f"envs {env_ids[admission.in_flight[env_ids]].tolist()} are in flight: they were sent, and "
                "recv has not returned them yet; call recv first. Nothing was stepped"
            )
        case Status.NEEDS_RESET:
            waiting = env_ids[admission.needs_reset[env_ids]].tolist()
            fresh = not engine.generation.any()
            why = "have not been reset" if fresh else "have ended their episode or never been reset"
            return ResetNeededError(
                f"envs {waiting} {why}; reset them first (with autoreset_mode DISABLED: "
                "reset(..., mask=terminated | truncated)). Nothing was stepped"
            )
        case _:
            raise AssertionError(f"{status!r} is nothing that a caller is told here")


def too_few_pending(returned: str, in_flight: int, *, resetting: int | None = None) -> PendingEnvError:
    """Returns the error of a `recv` for which too few envs are in flight, `Status.TOO_FEW`.

    Args:
        returned: how many it returns.
        in_flight: how many are.
        resetting: how many more a reset by mask would send, which ends by a `recv`.
    """
    if resetting is None:
        return PendingEnvError(
            f"recv returns {returned} envs, but only {in_flight} are in flight; send more first"
        )
    return PendingEnvError(
        f"reset returns {returned} envs, as recv does, but with the {resetting} of mask only "
        f"{in_flight + resetting} would be in flight; send more first, or start the reset by "
        "VectorEnv.reset_async. Nothing was reset"
    )


# ----------------------------------------------------------------------------------------------------------
# The end of a pool, apart from the pool itself.
#
# A pool that broke keeps the error, whose traceback has frames that hold the pool's `VectorEnv`. Who waits
# for that to be dropped, to close the pool, must not hold the error.
# ----------------------------------------------------------------------------------------------------------

_BROKEN_CLOSE_TIMEOUT = 1.0  # seconds for the envs of a broken pool
_RELEASE_TIMEOUT = 1.0  # seconds for others to be done with a pool whose workers are gone


class PoolFinalizer:
    """Closes a pool once.

    Attributes:
        process: whose pool it is; no fork of it may use or close the pool.
        closed: whether it is, or is about to be.
        ended: whether nothing is left of it.
        hurry: whether its envs get little time, because it is broken.
        pinned: the segment, if it is page-locked; it must not be while it is unmapped.
    """

    def __init__(self, workers: WorkerGroup, engine: Engine) -> None:
        self._workers = workers
        self._engine = engine
        self.process: int = os.getpid()
        self.closed: bool = False
        self.ended: bool = False
        self._closing = False
        self.hurry = False
        self.pinned: Pinned | None = None

    def close(self, timeout: float | None = 5.0) -> None:
        """Closes, see `Pool.close`; goes on where Ctrl-C ended another call, and returns if one is at it."""
        if self.ended or self._closing or os.getpid() != self.process:
            return
        self.closed = self._closing = True
        try:
            self._engine.close_fast_path()
            with self._engine.exclusive(if_busy=self._workers.kill, patience=_RELEASE_TIMEOUT):
                self._end(
                    min(_BROKEN_CLOSE_TIMEOUT if timeout is None else timeout, _BROKEN_CLOSE_TIMEOUT)
                    if self.hurry
                    else timeout
                )
        finally:
            self._closing = False

    def _end(self, timeout: float | None) -> None:
        try:
            self._workers.close(timeout, tell=not self.hurry)  # whose envs fail or hang was told
        finally:  # Ctrl-C ends their time, and nothing else
            self._engine.wait_for_copies()
            if self.pinned is not None:
                self.pinned.close()
            self._engine.close()
            self.ended = True  # last: who sees it may drop the memory


# ----------------------------------------------------------------------------------------------------------
# The one state machine of a pool: OPEN, then BROKEN by a cause, or CLOSED. Each call begins and ends here.
#
# A call's handle is checked before it changes anything; what it holds is released when it ends; and what
# cuts it off while envs are moved breaks the pool.
# ----------------------------------------------------------------------------------------------------------


@dataclass
class ActiveMove:
    """A move under way.

    Attributes:
        move: the move.
        interrupt: raises if Ctrl-C came since it began.
        recorded: whether C++ has recorded its span.
    """

    move: Move
    interrupt: Callable[[], None]
    recorded: bool = False


class PoolState:
    """Says whether a pool can be used, and by whom.

    Attributes:
        broken_by: what broke the pool, if anything did.
        errors_late: whether a program's error may be one that its caller never hears.
        recorder: of calls, while they are recorded.
    """

    def __init__(self, pool_id: int, engine: Engine, admission: Admission, finalizer: PoolFinalizer) -> None:
        """Begins OPEN; all arguments are the pool's."""
        self._pool_id = pool_id
        self._engine = engine
        self._admission = admission
        self._finalizer = finalizer
        self._program_error: tuple[int, BaseException] | None = None  # and what the engine had served
        self.broken_by: BaseException | None = None
        self.errors_late: bool = False
        self.recorder: Recorder | None = None

    def check(self) -> None:
        """Raises unless the pool is OPEN, and ours."""
        if os.getpid() != self._finalizer.process:
            raise PoolClosedError(
                f"pool {self._pool_id} belongs to process {self._finalizer.process}; this process is a "
                "fork of it and can't use the pool. Make another one here"
            )
        if self._finalizer.closed:
            raise PoolClosedError(f"pool {self._pool_id} is closed; make another")
        if self.broken_by is not None:
            raise PoolBrokenError(
                f"pool {self._pool_id} is broken since an earlier failure; close it and make another. It "
                f"failed with {type(self.broken_by).__name__}: {self.broken_by}"
            ) from self.broken_by

    def break_by(self, error: BaseException) -> None:
        """Breaks the pool, unless it is broken."""
        if self.broken_by is None:
            self.broken_by = error
            self._finalizer.hurry = True
            self._engine.close_fast_path()

    # --- a call: only who is inside the engine, or holds slots there, changes anything ------------------

    @contextmanager
    def track(self, move: Move, name: str | None = None) -> Generator[ActiveMove]:
        """Releases what its block holds when the move that it makes has ended, and records it.

        Once envs are moved or asked, Ctrl-C breaks the pool wherever it comes, also between the parts that
        break it by themselves: envs may be on their way of which nobody knows any more.
        """
        active = ActiveMove(move, interrupts.since_now())  # before an env can hang
        recorder, began = self.recorder, time.monotonic_ns()
        try:
            yield active
        except (Exception, GeneratorExit):
            raise  # nothing was moved or a part broke the pool; or the block ended, and then came Ctrl-C
        except BaseException as error:
            if self._engine.holds():
                self.break_by(error)
            raise
        finally:
            if recorder is not None and not active.recorded:
                recorder.add(name or move.name, began)
            self._engine.release()

    def enter(self, move: Move) -> None:
        """Checks a move before it changes anything."""
        self.check()
        self.check_status(self._engine.check_handle(move), move.slots, move.generation)
        if move.generation is None:
            self._engine.wait_for_copies()  # who has a fresh handle has waited for the rows before it

    def check_status(
        self, status: Status, env_ids: NDArray[Any], generation: NDArray[np.uint32] | None = None
    ) -> None:
        """Raises the error of what the engine refuses, asked about these envs, or a handle to them."""
        if status is not Status.DONE:
            raise status_error(
                status,
                env_ids,
                generation,
                engine=self._engine,
                admission=self._admission,
                pool_id=self._pool_id,
            )

    @contextmanager
    def breaking(self) -> Generator[None]:
        """Whatever else ends the block, also Ctrl-C, leaves rows in doubt: the pool is broken by it."""
        try:
            yield
        except (NotReadyError, NotPicklableError, GeneratorExit):
            raise  # the envs are as they were; or the block ended, and then came Ctrl-C
        except BaseException as error:
            if self._finalizer.closed:
                raise PoolClosedError(f"pool {self._pool_id} was closed during a call") from error
            self.break_by(error)
            raise

    # --- errors of programs, of which JAX passes only the text on ---------------------------------------

    def keep_error(self, error: BaseException, *, under_way: bool) -> None:
        """Keeps the error of a program's call for `take_error`.

        Args:
            error: which ended the call.
            under_way: whether its envs had been moved, so that the error breaks the pool.
        """
        if under_way and not self._finalizer.closed:
            self.break_by(error)
        self._program_error = self._engine.num_served, error

    def count_success(self) -> None:
        """Counts a program's call that succeeded; it makes an earlier error old news."""
        self._engine.count_success()

    def take_error(self) -> BaseException | None:
        """Returns the error of the last program that failed in this pool, once."""
        failure, self._program_error = self._program_error, None
        if failure is None or failure[0] != self._engine.num_served:  # another has succeeded since
            return None
        return failure[1]
