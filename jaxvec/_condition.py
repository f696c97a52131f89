"""The one state machine of a pool: OPEN, then BROKEN by a cause, or CLOSED. Each call begins and ends here.

A call's handle is checked before it changes anything; what it holds is released when it ends; and what cuts
it off while envs are moved breaks the pool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._closing import Closing
from jaxvec._errors import NotPicklableError, NotReadyError, PoolBrokenError, PoolClosedError
from jaxvec._handoff._admission import Admission
from jaxvec._handoff._engine import Engine, Status
from jaxvec._handoff._move import Move, name_caller
from jaxvec._native import interrupts
from jaxvec._refusals import refusal
from jaxvec._tracing._recorder import Recorder


@dataclass(frozen=True)
class Pending:
    """A move under way; `interrupt` raises if Ctrl-C came since it began."""

    move: Move
    interrupt: Callable[[], None]


class Condition:
    """Says whether a pool can be used, and by whom.

    Attributes:
        broken_by: what broke the pool, if anything did.
        errors_late: whether a program's error may be one that its caller never hears.
        recorder: of calls, while they are recorded.
    """

    def __init__(self, pool_id: int, engine: Engine, admission: Admission, closing: Closing) -> None:
        """Begins OPEN; all arguments are the pool's."""
        self._pool_id = pool_id
        self._engine = engine
        self._admission = admission
        self._closing = closing
        self._program_error: tuple[int, BaseException] | None = None  # and what the engine had served
        self.broken_by: BaseException | None = None
        self.errors_late: bool = False
        self.recorder: Recorder | None = None

    def check(self) -> None:
        """Raises unless the pool is OPEN, and ours."""
        if os.getpid() != self._closing.process:
            raise PoolClosedError(
                f"pool {self._pool_id} belongs to process {self._closing.process}; this process is a fork of "
                "it and can't use the pool. Make another one here"
            )
        if self._closing.closed:
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
            self._closing.hurry = True
            self._engine.bar()

    # --- a call: only who is inside the engine, or holds slots there, changes anything ------------------

    @contextmanager
    def pending(self, move: Move) -> Generator[Pending]:
        """Releases what its block holds when the move that it makes has ended.

        Once envs are moved or asked, Ctrl-C breaks the pool wherever it comes, also between the parts that
        break it by themselves: envs may be on their way of which nobody knows any more.
        """
        pending = Pending(move, interrupts.since_now())  # before an env can hang
        try:
            yield pending
        except (Exception, GeneratorExit):
            raise  # nothing was moved or a part broke the pool; or the block ended, and then came Ctrl-C
        except BaseException as error:
            if self._engine.holds():
                self.break_by(error)
            raise
        finally:
            self._engine.release()

    def recording(self, move: Move) -> AbstractContextManager[None]:
        """Records the move under the name by which it was called or, of faces that count none, the verb's."""
        if self.recorder is None:
            return nullcontext()
        return self.recorder.span(move.verb.word if move.caller is None else name_caller(move.caller_code))

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
            raise refusal(
                status,
                env_ids,
                generation,
                engine=self._engine,
                admission=self._admission,
                pool_id=self._pool_id,
            )

    def advance(self, move: Move) -> None:
        """Has other handles to the move's envs go stale."""
        if move.caller is not None:
            self._engine.advance(move)

    @contextmanager
    def breaking(self) -> Generator[None]:
        """Whatever else ends the block, also Ctrl-C, leaves rows in doubt: the pool is broken by it."""
        try:
            yield
        except (NotReadyError, NotPicklableError, GeneratorExit):
            raise  # the envs are as they were; or the block ended, and then came Ctrl-C
        except BaseException as error:
            if self._closing.closed:
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
        if under_way and not self._closing.closed:
            self.break_by(error)
        self._program_error = self._engine.served, error

    def served(self) -> None:
        """Counts a program's call that succeeded; it makes an earlier error old news."""
        self._engine.serve()

    def take_error(self) -> BaseException | None:
        """Returns the error of the last program that failed in this pool, once."""
        failure, self._program_error = self._program_error, None
        if failure is None or failure[0] != self._engine.served:  # another has succeeded since
            return None
        return failure[1]
