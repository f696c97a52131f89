"""The one state machine of a pool: OPEN, then BROKEN by a cause, or CLOSED.

Decides who may move which envs now, and keeps rows whole. Which processes do the work is its workers'
affair, and what the data means is its callers'.

A caller says by a `Move` what it asks for, and of which envs. Where there is C++ for it, the engine makes the
whole move at once; what is here is for all that is not ordinary, and for where there is none.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec import _options, _stats
from jaxvec._backends._backend import Patience, Workers
from jaxvec._closing import Closing
from jaxvec._errors import (
    EnvIdError,
    JaxvecError,
    NotReadyError,
    PoolBrokenError,
    PoolClosedError,
    StaleHandleError,
)
from jaxvec._handoff._engine import Made, Rules, Status
from jaxvec._handoff._move import Caller, Move, Verb, name_mover
from jaxvec._handoff._turns import Turns
from jaxvec._memory import _pinned, _segment
from jaxvec._memory._layout import make_layout
from jaxvec._memory._views import Deliver, Rows, Views, copies, into
from jaxvec._native import interrupts
from jaxvec._options import Options
from jaxvec._refusals import refusal
from jaxvec._seeds import NONE
from jaxvec._slices._slice import Asked
from jaxvec._spec import PoolSpec
from jaxvec._stats import Stats
from jaxvec._tracing._recorder import Record, Recorder, span

_logger = logging.getLogger("jaxvec")

_MADE = (Status.DONE, Status.UNDER_WAY)

_ids = itertools.count(1)  # handles name their pool by number, see _pools.py


@dataclass(frozen=True)
class Timeouts:
    """Seconds; `None` waits for ever."""

    start: float | None
    reset: float | None
    step: float | None


@dataclass(frozen=True)
class _Flight:
    """A move under way; `interrupt` raises if Ctrl-C came since it began."""

    move: Move
    interrupt: Callable[[], None]


class Pool:
    """The envs, their memory, and who may step them now."""

    def __init__(
        self,
        workers: Workers,
        spec: PoolSpec,
        *,
        slices: tuple[tuple[int, int], ...],
        together: int,
        autoreset_mode: AutoresetMode,
        in_order: bool,
        timeouts: Timeouts,
        resets_required: bool,
    ) -> None:
        """Makes the pool of these workers.

        Args:
            workers: with their envs.
            spec: of the envs.
            slices: `(first, stop)` of each worker's envs.
            together: how many neighbours are one batched env, which moves as a whole; 1 for none.
            autoreset_mode: of the envs.
            in_order: whether `recv` returns envs in the order in which they were sent.
            timeouts: of the operations.
            resets_required: whether envs that were never reset, or have ended their episode without
                autoreset, refuse to step.
        """
        self.spec = spec
        self._workers = workers
        self._in_order = in_order
        self._timeouts = timeouts
        layout = make_layout(spec, slices)
        arrays = workers.attach(layout, spec, autoreset_mode)
        self._views = Views(spec, arrays)
        self._segment = _segment.whole(arrays, layout)
        self._pinning_tried = False
        self.id: int = next(_ids)
        self.all: NDArray[np.int_] = np.arange(spec.num_envs)
        self._turns = Turns(spec.num_envs, spec.batch_size, together)
        self._options: Options = None  # that the workers hold
        if not resets_required:
            self._turns.needs_reset[:] = False

        self.recorder: Recorder | None = None  # of hand-offs, while they are recorded
        self._broken_by: BaseException | None = None
        self._program_error: tuple[int, BaseException] | None = None  # and what the engine had served
        disabled = autoreset_mode is AutoresetMode.DISABLED
        self._ends_need_reset = resets_required and disabled and not spec.has_idle
        over = self._views.over if self._ends_need_reset else None
        self._engine = workers.open_engine(Rules(self.id, self._turns, in_order, over, timeouts.step))
        self.closing: Closing = Closing(workers, self._engine)

    @property
    def closed(self) -> bool:
        return self.closing.closed

    @property
    def broken_by(self) -> BaseException | None:
        """What broke the pool, if anything did."""
        return self._broken_by

    def stats(self) -> Stats:
        """Returns what the workers have done so far; also of a broken pool."""
        with self._engine.inside():
            if self.closed:
                raise PoolClosedError(f"pool {self.id} is closed; read its stats before you close it")
            return _stats.read(self._views.stats, self._workers.restarts)

    def counts(self, slots: NDArray[Any]) -> NDArray[np.uint32]:
        """Returns what a fresh handle to `slots` says."""
        return self._engine.counts[slots]

    def move_all(self, verb: Verb, caller: Caller | None = None) -> Move:
        """Returns a move of all envs, by a caller who has no handle."""
        return Move(verb, self.all, caller=caller)

    def require_spec(self, fingerprint: int) -> None:
        """Raises `StaleHandleError` if a handle made for a spec of this fingerprint can't be ours."""
        if fingerprint != self.spec.fingerprint:
            raise StaleHandleError(
                f"foreign handle: it was made for a pool of other spaces or options than pool {self.id}; use "
                "the handle that jaxvec.reset returned for this pool"
            )

    def pin(self) -> None:
        """Page-locks the segment for GPUs, at the first call; a log says why if it can't be.

        From then on programs on a GPU move envs without asking us.
        """
        if self._pinning_tried:
            return
        with self._engine.inside():
            if self._pinning_tried or self.closed:
                return
            self._pinning_tried = True
            try:
                self.closing.pinned = _pinned.pin(self._segment)
            except _pinned.PinningError as error:
                _logger.info("pool %s: its memory is not page-locked: %s", self.id, error)
            self._engine.admit_devices()

    def keep(self, error: BaseException, *, under_way: bool) -> None:
        """Keeps the error of a program's call for `take_program_error`.

        Args:
            error: which ended the call.
            under_way: whether its envs had been moved, so that the error breaks the pool.
        """
        if under_way and not self.closed:
            self._break(error)
        self._program_error = self._engine.served, error

    def served(self) -> None:
        """Counts a program's call that succeeded; it makes an earlier error old news."""
        self._engine.serve()

    def take_program_error(self) -> BaseException | None:
        """Returns the error of the last program that failed in this pool, once."""
        failure, self._program_error = self._program_error, None
        if failure is None or failure[0] != self._engine.served:  # another has succeeded since
            return None
        return failure[1]

    def reset(
        self,
        move: Move,
        *,
        seeds: NDArray[Any] | None,
        mask: NDArray[Any] | None,
        options: Any,
        deliver: Deliver = copies,
    ) -> Rows:
        """Resets envs; when all are, what was in flight is lost.

        Args:
            move: whose envs.
            seeds: `[n]` int64, `NONE` where an env gets none.
            mask: `[n]` bool, which envs to reset; the others' rows stay as they are. `None` for all.
            options: for the envs' `reset`, as `_options.expand`.
            deliver: what becomes of the leaves of the time step, `[n, ...]` in the segment.

        Returns:
            What `deliver` made of them. Of a first-ready pool, as `recv`.
        """
        chosen = move.slots if mask is None else move.slots[mask]
        options = _options.expand(options, move.slots, self.spec.num_envs)
        with self._flight(move) as flight, self._recording(move):
            with self._engine.inside(alone=move.generation is None or self._sets_options(options)):
                self._enter(move)
                self._send_reset(flight, chosen, seeds, options, in_flight=self.spec.first_ready)
            if self.spec.first_ready:
                return self._receive(flight, deliver)
            self._wait(flight, chosen, len(chosen), Verb.RESET)
            return self._read(move.slots, deliver)

    def send_reset(
        self, move: Move, *, seeds: NDArray[Any] | None, mask: NDArray[Any] | None, options: Any
    ) -> None:
        """Starts a reset of envs, which are in flight until `recv` returns them; see `reset`."""
        chosen = move.slots if mask is None else move.slots[mask]
        options = _options.expand(options, move.slots, self.spec.num_envs)
        with self._flight(move) as flight, self._recording(move), self._engine.inside(alone=True):
            self._enter(move)
            self._send_reset(flight, chosen, seeds, options, in_flight=True)

    def step(self, move: Move, actions: Rows, *, deliver: Deliver = copies) -> Rows:
        """Steps envs once.

        Args:
            move: whose envs.
            actions: an array `[n, ...]` for each leaf of the action, of the stored dtype.
            deliver: as in `reset`.
        """
        with self._flight(move) as flight:
            if deliver is copies:
                made = self._engine.move(move, actions)
                if made.status in _MADE:
                    return self._finish(flight, made)
            with self._recording(move):
                with self._engine.inside(alone=move.generation is None):
                    self._enter(move)
                    self._send_step(move.slots, actions)
                    self._count(move)
                self._wait(flight, move.slots, len(move.slots), Verb.STEP)
                return self._end_step(move.slots, deliver)

    def end(self, move: Move, *, waited: float, interrupt: Callable[[], None], out: Rows) -> None:
        """Waits for a step or a `recv` that was begun, and ends it. The caller is in flight.

        A compiled program's call that was begun without Python comes here when its wait meets with
        anything unusual.

        Args:
            move: that was begun.
            waited: seconds so far.
            interrupt: raises if Ctrl-C came since the call began.
            out: where to copy the leaves of the time step.
        """
        self._end(_Flight(move, interrupt), out, waited)

    def send(self, move: Move, env_ids: NDArray[Any], actions: Rows, *, as_they_are: bool = False) -> None:
        """Starts a step of envs, which are in flight until `recv` returns them.

        Args:
            move: of all envs.
            env_ids: `[k]`, whom to send.
            actions: `[k, ...]`, as of `step`.
            as_they_are: whether `actions` are `[k]` objects instead, which the envs get as they are.
        """
        with self._flight(move):
            if not as_they_are and self._engine.move(move, actions, env_ids).status is Status.DONE:
                return
            with self._recording(move), self._engine.inside(alone=as_they_are):
                self._enter(move)
                self._send_step(env_ids, actions, as_they_are=as_they_are)
                self._turns.take_off(env_ids, self._timeouts.step)
                self._count(move)

    def recv(
        self, move: Move, *, deliver: Deliver = copies, timeout: float | None = None, everything: bool = False
    ) -> Rows:
        """Waits until `batch_size` of the envs in flight are done, and lands them.

        Args:
            move: of all envs.
            deliver: as of `reset`; the leaves are `[batch_size, ...]`.
            timeout: seconds after which to raise `NotReadyError`, and leave the envs in flight.
            everything: whether to wait for all envs in flight, and to return the rows of all envs.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        with self._flight(move) as flight:
            if deliver is copies and timeout is None and not everything:
                made = self._engine.move(move, ())
                if made.status in _MADE:
                    return self._finish(flight, made)
            with self._recording(move):
                with self._engine.inside(alone=True):  # one recv at a time
                    self._enter(move)
                    if not everything and self._turns.num_sent[0] < self.spec.batch_size:
                        self._require(Status.TOO_FEW, move.slots)
                    self._engine.take_off()
                    self._count(move)
                return self._receive(flight, deliver, give_up=give_up, everything=everything)

    def infos(self) -> list[dict[str, Any]]:
        """Returns the raw info of each env's last reset or step; asks the workers only if there are any."""
        with self._engine.inside(alone=True):
            self._require_usable()
            if not self._views.has_info.any():
                return [{} for _ in self.all]
            return [info for slice_ in self._ask("infos", lambda _first, _stop: ()) for info in slice_]

    def call(
        self,
        move: Move,
        name: str,
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any],
        *,
        begun: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Calls a method of envs, or reads an attribute; an env's error doesn't break us.

        Args:
            move: whose envs.
            name: of the method; wrappers are looked through.
            args: for each of them.
            kwargs: for all.
            begun: is called when nobody can overtake the call any more.

        Returns:
            One result for each env.
        """
        slots = move.slots
        with self._recording(move), self._engine.inside(alone=True):
            if begun is not None:
                begun()
            self._enter(move)
            slices = self._ask_each("call", slots, args, name, kwargs)
            self._count(move)
        results = dict(zip(np.sort(slots).tolist(), itertools.chain.from_iterable(slices), strict=True))
        return [results[slot] for slot in slots.tolist()]

    def set_attr(self, slots: NDArray[Any], name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of envs, `slots` `[n]`, to one of `values` each."""
        with span(self.recorder, "set_attr"), self._engine.inside(alone=True):
            self._require_usable()
            self._require(self._engine.check_handle(Move(Verb.CALL, slots)), slots)
            self._ask_each("set_attr", slots, values, name)

    def start_trace(self, capacity: int) -> None:
        """Records what is done from now on, for each worker and each way in the latest `capacity` spans."""
        with self._engine.inside(alone=True):
            self._require_usable()
            if self.recorder is not None:
                raise RuntimeError(f"pool {self.id} is being traced already; end that trace first")
            with self._breaking():
                self._workers.start_trace(capacity)
            self._engine.start_trace(capacity)
            self.recorder = Recorder(capacity)

    def stop_trace(self) -> tuple[list[Record], list[Record]]:
        """Records no more; also if the pool is broken or closed by now.

        Returns:
            The records of the programs, by Python and without it, and those of the workers; of a closed
            pool, none.
        """
        assert self.recorder is not None
        hurry = self.closed or self._broken_by is not None
        with self._engine.inside(alone=True, patience=1.0 if hurry else None):
            programs = [self.recorder.take(), self._engine.stop_trace()]
            self.recorder = None
            if self.closed:
                return programs, []
            try:
                with self._breaking():
                    return programs, self._workers.stop_trace(hurry=self._broken_by is not None)
            except JaxvecError:  # the pool is broken by now, and the next call says so; or another closed it
                return programs, [] if self.closed else self._workers.stop_trace(hurry=True)

    def close(self, timeout: float = 5.0) -> None:
        """Closes the envs and ends the workers, by force after `timeout` seconds.

        Legal at any time, from any thread, and twice: a step that is under way is ended by force,
        and raises `PoolClosedError`. Ctrl-C ends the wait for envs, and so their workers.
        """
        try:
            self.closing.close(timeout)
        finally:
            if self.closing.ended:
                for name in ("_views", "_segment"):  # and with them the memory: nobody else has views of it
                    vars(self).pop(name, None)

    # --- what the calls are made of; only who is inside the engine changes anything --------------

    @contextmanager
    def _flight(self, move: Move) -> Generator[_Flight]:
        """Lands the move that its block makes.

        Once envs are moved, Ctrl-C breaks the pool wherever it comes, also between the parts that break it
        by themselves: envs may be on their way of which nobody knows any more.
        """
        flight = _Flight(move, interrupts.since_now())  # before an env can hang
        try:
            yield flight
        except (Exception, GeneratorExit):
            raise  # nothing was moved or a part broke the pool; or the block ended, and then came Ctrl-C
        except BaseException as error:
            if self._engine.in_flight():
                self._break(error)
            raise
        finally:
            self._engine.land()

    def _enter(self, move: Move) -> None:
        """Checks a move before it changes anything."""
        self._require_usable()
        self._require(self._engine.check_handle(move), move.slots, move.generation)
        if move.generation is None:
            self._engine.settle()  # who has a fresh handle has waited for the rows that came before it

    def _check(self, flight: _Flight) -> None:
        """Raises what has to end a wait early."""
        flight.interrupt()
        self._require_usable()  # another thread may have closed or broken us

    def _recording(self, move: Move) -> AbstractContextManager[None]:
        """Records the move under the name by which it was called or, of faces that count none, the verb's."""
        if self.recorder is None:
            return nullcontext()
        return self.recorder.span(move.verb.word if move.caller is None else name_mover(move.mover))

    def _count(self, move: Move) -> None:
        if move.caller is not None:
            self._engine.moved(move)

    def _sets_options(self, options: Options) -> bool:
        """Says whether the workers hold other options than these."""
        return options is not None or self._options is not None

    def _send_reset(
        self,
        flight: _Flight,
        chosen: NDArray[Any],
        seeds: NDArray[Any] | None,
        options: Options,
        *,
        in_flight: bool,
    ) -> None:
        """Sends those `chosen` of the move's envs, `[n]`, to be reset with `seeds`, `[n]`."""
        sent = self._turns.sent
        if len(chosen) == self.spec.num_envs and len(sent):
            self._wait(flight, sent, len(sent), self._doing(sent))
            self._turns.land(sent)
        elif len(chosen) < self.spec.num_envs and self.spec.first_ready:
            raise EnvIdError(
                f"a pool with batch_size ({self.spec.batch_size} of {self.spec.num_envs} envs) is reset as a "
                f"whole, not {len(chosen)} envs of it"
            )
        if self.spec.first_ready:
            chosen = self._turns.spread
        self._require(self._engine.check_envs(chosen, stepped=False), chosen)
        self._engine.settle()  # batched envs write rows of others, too, to which the handle may not be
        self._views.seeds[flight.move.slots] = NONE if seeds is None else seeds
        if self._sets_options(options):
            self._options = options
            with self._breaking():
                self._workers.set_options(options, self._timeouts.step)
        self._hand_over(Verb.RESET, chosen)
        self._turns.needs_reset[chosen] = False
        if in_flight:
            self._turns.take_off(chosen, self._timeouts.reset)
        self._count(flight.move)

    def _send_step(self, slots: NDArray[Any], actions: Rows, *, as_they_are: bool = False) -> None:
        self._require(self._engine.check_envs(slots, stepped=True), slots)
        if as_they_are:
            self._ask_each("give_actions", slots, actions)
        else:
            with span(self.recorder, "write actions"):
                self._views.write_actions(slots, actions)
        self._hand_over(Verb.STEP, slots)

    def _hand_over(self, verb: Verb, slots: NDArray[Any]) -> None:
        self._engine.take_off()
        with span(self.recorder, "hand over"), self._breaking():
            self._workers.send(verb, slots)

    def _ask(self, name: Asked, arguments: Callable[[int, int], tuple[Any, ...]]) -> list[Any]:
        """Makes a request; an env that fails in it, unlike one that fails in flight, does not break us."""
        with self._breaking():
            answers = self._workers.request(name, arguments, timeout=self._timeouts.step)
        for answer in answers:
            if isinstance(answer, JaxvecError):
                raise answer
        return answers

    def _ask_each(self, name: Asked, slots: NDArray[Any], values: Sequence[Any], *more: Any) -> list[Any]:
        """Makes a request of some envs.

        Args:
            name: of a method of `Slice` that takes slots, a value for each of them, and `more`.
            slots: `[n]`, distinct.
            values: for each of `slots`.
            *more: for all.
        """
        by_slot = dict(zip(slots.tolist(), values, strict=True))

        def arguments(first: int, stop: int) -> tuple[Any, ...]:
            mine = [slot for slot in range(first, stop) if slot in by_slot]
            return mine, [by_slot[slot] for slot in mine], *more

        return self._ask(name, arguments)

    def _wait(
        self,
        flight: _Flight,
        slots: NDArray[Any],
        count: int,
        verb: Verb,
        *,
        waited: float = 0,
        give_up: float | None = None,
    ) -> None:
        timeout = self._timeouts.reset if verb is Verb.RESET else self._timeouts.step
        with span(self.recorder, "wait for workers"), self._breaking():
            check = partial(self._check, flight)
            check()
            self._workers.wait(slots, count, Patience(verb.word, timeout, check, waited, give_up))

    def _doing(self, slots: NDArray[Any]) -> Verb:
        """Says what those in flight are at: the rest of a reset has a reset's time."""
        return Verb.RESET if self._workers.any_resetting(slots) else Verb.STEP

    def _finish(self, flight: _Flight, made: Made) -> Rows:
        """Ends what the engine has made, if that took longer, and returns the rows."""
        if made.status is Status.UNDER_WAY:
            return self._end(flight, made.rows, made.waited)
        flight.interrupt()  # the steps of a program may all be so quick that no wait hears of it
        return made.rows

    def _end(self, flight: _Flight, out: Rows, waited: float) -> Rows:
        """See `end`."""
        slots = flight.move.slots
        with span(self.recorder, "go on"):
            if flight.move.verb is Verb.RECV:
                return self._receive(flight, into(out), waited=waited)
            self._wait(flight, slots, len(slots), Verb.STEP, waited=waited)
            return self._end_step(slots, into(out))

    def _end_step(self, slots: NDArray[Any], deliver: Deliver) -> Rows:
        if self._ends_need_reset:
            terminated, truncated = self._views.over
            self._turns.needs_reset[slots] = terminated[slots] | truncated[slots]
        with span(self.recorder, "copy results"):
            return self._read(slots, deliver)

    def _read(self, slots: NDArray[Any], deliver: Deliver) -> Rows:
        """Delivers the rows of `slots`. The caller is in flight, so nobody has them stepped meanwhile."""
        return self._views.read(slots, deliver)

    def _receive(
        self,
        flight: _Flight,
        deliver: Deliver,
        *,
        waited: float = 0,
        give_up: float | None = None,
        everything: bool = False,
    ) -> Rows:
        """Waits for a batch of the slots in flight. No other thread does so now, but some may send."""
        overdue = self._turns.overdue()
        if len(overdue):  # others may have been ready first ever since
            self._wait(flight, overdue, len(overdue), self._doing(overdue), waited=math.inf)
        sent = self._turns.sent
        count = len(sent) if everything else self.spec.batch_size
        sent = sent[: count if self._in_order else None]
        self._wait(flight, sent, count, self._doing(sent), waited=waited, give_up=give_up)
        with self._engine.inside():
            slots = sent if self._in_order else self._workers.first_done(sent, count)
            slots = self.all if everything or not self.spec.first_ready else slots
            self._turns.land(slots)
        return self._end_step(slots, deliver)

    def _require(
        self, status: Status, env_ids: NDArray[Any], generation: NDArray[np.uint32] | None = None
    ) -> None:
        """Raises the error of what the engine refuses, asked about these envs, or a handle to them."""
        if status is not Status.DONE:
            raise refusal(
                status,
                env_ids,
                generation,
                engine=self._engine,
                turns=self._turns,
                pool_id=self.id,
                batch_size=self.spec.batch_size,
            )

    def _require_usable(self) -> None:
        if os.getpid() != self.closing.process:
            raise PoolClosedError(
                f"pool {self.id} belongs to process {self.closing.process}; this process is a fork of it and "
                "can't use the pool. Make another one here"
            )
        if self.closed:
            raise PoolClosedError(f"pool {self.id} is closed; make another")
        if self._broken_by is not None:
            raise PoolBrokenError(
                f"pool {self.id} is broken since an earlier failure; close it and make another. It "
                f"failed with {type(self._broken_by).__name__}: {self._broken_by}"
            ) from self._broken_by

    @contextmanager
    def _breaking(self) -> Generator[None]:
        """Whatever else ends the block, also Ctrl-C, leaves rows in doubt: the pool is broken by it."""
        try:
            yield
        except (NotReadyError, GeneratorExit):
            raise  # the envs are as they were; or the block ended, and then came Ctrl-C
        except BaseException as error:
            if self.closed:
                raise PoolClosedError(f"pool {self.id} was closed during a call") from error
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        if self._broken_by is None:
            self._broken_by = error
            self.closing.hurry = True
            self._engine.bar()
