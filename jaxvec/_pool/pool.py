"""A pool of envs: decides who may move which envs now, and keeps rows whole.

Whether it can be used at all is its `PoolState`'s affair, which processes do the work its workers', and what
the data means its callers'.

A caller says by a `Move` what it asks for, and of which envs. Where there is C++ for it, the engine makes the
whole move at once; what is here is for all that is not ordinary, and for where there is none.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec import _stats
from jaxvec._arguments import NO_SEED, Options, expand_options, merge_options
from jaxvec._config import Timeouts
from jaxvec._dispatch.engine import Admission, Made, Rules, Status, whole
from jaxvec._dispatch.move import Caller, Move, Verb
from jaxvec._errors import JaxvecError, PoolClosedError, StaleHandleError
from jaxvec._memory import pinned
from jaxvec._memory.segment import Deliver, Rows, Views, copies, into, make_layout, whole_segment
from jaxvec._pool.env_calls import EnvCalls
from jaxvec._pool.pool_states import PackedStates, SavedStates
from jaxvec._pool.state import ActiveMove, PoolFinalizer, PoolState, too_few_pending
from jaxvec._spec import Autoreset, PoolSpec
from jaxvec._stats import Stats
from jaxvec._tracing import Record, Recorder, span
from jaxvec._workers.base import Patience, WorkerGroup

_logger = logging.getLogger("jaxvec")

_ids = itertools.count(1)  # handles name their pool by number, see _pool/registry.py


class Pool:
    """The envs, their memory, and who may step them now.

    Attributes:
        spec: of the envs.
        all: `[num_envs]`, their ids.
        id: by which handles name the pool.
        state: whether it is open, broken or closed.
        env_calls: by which envs are asked, and not moved.
        finalizer: its end.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        spec: PoolSpec,
        *,
        slices: tuple[tuple[int, int], ...],
        together: int,
        in_order: bool,
        timeouts: Timeouts,
        resets_required: bool,
        states: int = 0,
    ) -> None:
        """Makes the pool of these workers.

        Args:
            workers: with their envs.
            spec: of the envs.
            slices: `(first, stop)` of each worker's envs.
            together: how many neighbours are one batched env, which moves as a whole; 1 for none.
            in_order: whether `recv` returns envs in the order in which they were sent.
            timeouts: of the operations.
            resets_required: whether envs that were never reset, or have ended their episode without
                autoreset, refuse to step.
            states: how many states of envs are kept.
        """
        self.spec = spec
        self._workers = workers
        self._in_order = in_order
        self._timeouts = timeouts
        layout = make_layout(spec, len(slices))
        arrays = workers.attach(layout, spec)
        self._admission = Admission(spec.num_envs, spec.batch_size, together)
        self.all: NDArray[np.int_] = self._admission.all
        self._moves: dict[tuple[Verb, Caller | None], Move] = {}  # of all envs
        self._views = Views(spec, arrays, self._admission.rows)
        self._segment = whole_segment(arrays, layout)
        self._pinning_tried = False
        self.id: int = next(_ids)
        self._options: Options = None  # that the workers hold
        if not resets_required:
            self._admission.needs_reset[:] = False

        self._engine = workers.open_engine(
            Rules(
                self.id,
                self._admission,
                self._views,
                workers.send,
                in_order,
                resets_required and spec.autoreset is Autoreset.DISABLED,
                timeouts.step,
            )
        )
        self.finalizer: PoolFinalizer = PoolFinalizer(workers, self._engine)
        self.state: PoolState = PoolState(self.id, self._engine, self._admission, self.finalizer)
        self.env_calls: EnvCalls = EnvCalls(
            workers,
            self.state,
            self._engine,
            slices=slices,
            raw_info=self._views.raw_info,
            timeout=timeouts.step,
        )
        self._saved = SavedStates(
            spec,
            workers,
            self.env_calls,
            capacity=states,
            pool_id=self.id,
            resets_required=resets_required,
        )

    @property
    def closed(self) -> bool:
        return self.finalizer.closed

    def stats(self) -> Stats:
        """Returns what the workers have done so far; also of a broken pool."""
        with self._engine.shared():
            if self.closed:
                raise PoolClosedError(f"pool {self.id} is closed; read its stats before you close it")
            return _stats.read(
                self._views.stats,
                self._workers.restarts,
                states=self._saved.table.count,
                state_row_bytes=self._saved.table.row_bytes,
            )

    def generation(self, slots: NDArray[Any]) -> NDArray[np.uint32]:
        """Returns what a fresh handle to `slots` says."""
        return self._engine.generation[slots]

    def move_all(self, verb: Verb, caller: Caller | None = None) -> Move:
        """Returns a move of all envs, by a caller who has no handle."""
        move = self._moves.get((verb, caller))
        if move is None:
            move = self._moves[verb, caller] = Move(verb, self.all, caller=caller)
        return move

    def check_spec(self, fingerprint: int) -> None:
        """Raises `StaleHandleError` if a handle made for a spec of this fingerprint can't be ours."""
        if fingerprint != self.spec.fingerprint:
            raise StaleHandleError(
                f"foreign handle: it was made for a pool of other spaces or options than pool {self.id}; use "
                "the handle that jaxvec.reset returned for this pool"
            )

    def pin(self) -> None:
        """Page-locks the segment for GPUs, once; a log says why if it can't be.

        From then on programs on a GPU move envs without asking us.
        """
        if self._pinning_tried:
            return
        with self._engine.shared():
            if self._pinning_tried or self.closed:
                return
            self._pinning_tried = True
            try:
                self.finalizer.pinned = pinned.pin(self._segment)
            except pinned.PinningError as error:
                _logger.info("pool %s: its memory is not page-locked: %s", self.id, error)
            self._engine.allow_gpu()

    def reset(
        self,
        move: Move,
        *,
        seeds: NDArray[Any] | None,
        mask: NDArray[Any] | None,
        options: Any,
        deliver: Deliver = copies,
    ) -> Rows:
        """Resets envs; without a mask, what was in flight of all envs is lost.

        Args:
            move: whose envs.
            seeds: `[n]` int64, `NONE` where an env gets none.
            mask: `[n]` bool, which envs to reset, of those that are not in flight; the others' rows stay as
                they are. `None` for all.
            options: for the envs' `reset`, as `expand_options`.
            deliver: what becomes of the leaves of the time step, `[n, ...]` in the segment.

        Returns:
            What `deliver` made of them. Of a first-ready pool, as `recv`.
        """
        options = expand_options(options, move.slots, self.spec.num_envs)
        first_ready = self.spec.first_ready  # then it ends by a recv, and there is one at a time
        alone = move.generation is None or first_ready or self._sets_options(options, move.slots)
        moved = move.slots if mask is None else move.slots[mask]
        with self.state.track(move) as active:
            with self._engine.exclusive() if alone else self._engine.shared(moved):
                self.state.enter(move)
                chosen = self._choose(active, mask)
                if first_ready and mask is not None:
                    self._check_enough(resetting=len(chosen))
                self._send_reset(active, chosen, seeds, options, in_flight=first_ready)
            if first_ready:
                return self._receive(active, deliver)
            self._wait(active, chosen, len(chosen), Verb.RESET)
            return self._read(move.slots, deliver)

    def reset_async(
        self, move: Move, *, seeds: NDArray[Any] | None, mask: NDArray[Any] | None, options: Any
    ) -> None:
        """Starts a reset of envs, which are in flight until `recv` returns them; see `reset`."""
        options = expand_options(options, move.slots, self.spec.num_envs)
        with self._alone(move) as active:
            self._send_reset(active, self._choose(active, mask), seeds, options, in_flight=True)

    def step(self, move: Move, actions: Rows, *, deliver: Deliver = copies) -> Rows:
        """Steps envs once.

        Args:
            move: whose envs.
            actions: an array `[n, ...]` for each leaf of the action, of the stored dtype.
            deliver: as in `reset`.
        """
        with self.state.track(move) as active:
            made = self._make(active, actions, deliver=deliver)
            return self._finish(active, made, deliver)

    def end(self, move: Move, *, waited: float, interrupt: Callable[[], None], out: Rows) -> None:
        """Waits for a step or a `recv` that was begun, and ends it. The caller holds its slots.

        A compiled program's call that was begun without Python comes here when its wait meets with
        anything unusual.

        Args:
            move: that was begun.
            waited: seconds so far.
            interrupt: raises if Ctrl-C came since the call began.
            out: where to copy the leaves of the time step.
        """
        begun = Made(Status.UNDER_WAY, waited=waited, recorded=True)
        self._finish(ActiveMove(move, interrupt), begun, into(out))

    def send(self, move: Move, env_ids: NDArray[Any], actions: Rows, *, as_they_are: bool = False) -> None:
        """Starts a step of envs, which are in flight until `recv` returns them.

        Args:
            move: of all envs.
            env_ids: `[k]`, whom to send.
            actions: `[k, ...]`, as of `step`.
            as_they_are: whether `actions` are `[k]` objects instead, which the envs get as they are.
        """
        with self.state.track(move) as active:
            if not as_they_are:
                self._make(active, actions, env_ids)
                return
            with self._engine.exclusive(self.env_calls.of_workers(env_ids)):
                self.state.enter(move)
                self.state.check_status(self._engine.check_envs(env_ids, stepped=True), env_ids)
                self.env_calls.request_each("give_actions", env_ids, actions)
                with self.state.breaking():
                    self._engine.dispatch(Verb.STEP, env_ids)
                self._admission.note_sent(env_ids, self._timeouts.step)
                self._engine.advance(move)

    def recv(
        self,
        move: Move,
        *,
        deliver: Deliver = copies,
        timeout: float | None = None,
        at_least: int | None = None,
        everything: bool = False,
    ) -> Rows:
        """Waits until `batch_size` of the envs in flight are completed, and receives them.

        Args:
            move: of all envs.
            deliver: as of `reset`; the leaves are `[batch_size, ...]`.
            timeout: seconds after which to raise `NotReadyError`, and leave the envs in flight.
            at_least: how many to wait for, in place of `batch_size`; all that are completed by then are
                received.
            everything: whether to wait for all envs in flight, and to return the rows of all envs.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        enough = 0 if everything else at_least
        with self.state.track(move) as active:
            if timeout is None and enough is None:
                made = self._make(active, deliver=deliver)
                return self._finish(active, made, deliver)
            self._make(active, deliver=None, at_least=enough)
            return self._receive(active, deliver, give_up=give_up, at_least=at_least, everything=everything)

    def save(self, move: Move) -> NDArray[np.uint32]:
        """Saves the states of envs; one that can't be saved doesn't break us.

        Args:
            move: whose envs; a caller without handle leaves those of others fresh.

        Returns:
            `[n, 3]`, what names each state.
        """
        slots = move.slots
        with self._alone(move) as active:
            self.state.check_status(self._engine.check_envs(slots, stepped=False), slots)
            needs_reset, send = self._admission.needs_reset[slots], partial(self._send_states, active)
            ids = self._saved.save(send, slots, needs_reset, self._read)
            self._engine.advance(move)
            return ids

    def restore(
        self,
        move: Move,
        states: NDArray[np.uint32],
        packed: PackedStates | None = None,
        *,
        deliver: Deliver = copies,
    ) -> Rows:
        """Has envs go on from states; if one can't, the pool is broken by it.

        Args:
            move: whose envs.
            states: `[n, 3]`, what names the state of each.
            packed: the states of each, in place of `states`: of another pool.
            deliver: as in `reset`.

        Returns:
            What `deliver` made of the time steps that were current when the states were saved.
        """
        slots = move.slots
        with self._alone(move) as active:
            self.state.check_status(self._engine.check_envs(slots, stepped=False), slots)
            self._engine.wait_for_copies()
            sources, rows, needs_reset = self._saved.find(slots, states, packed)
            with self.state.breaking():
                send = partial(self._send_states, active)
                self._saved.put(send, slots, sources, rows)
            self._views.write(slots, rows)
            self._admission.needs_reset[slots] = needs_reset
            self._engine.advance(move)
            return self._read(slots, deliver)

    def simulate(
        self, states: NDArray[np.uint32], actions: Rows, *, deliver: Deliver = copies
    ) -> tuple[NDArray[np.uint32], Rows]:
        """Steps copies of envs from their states, and leaves the envs alone; what fails doesn't break us.

        Args:
            states: `[n, 3]`, what names the state of each.
            actions: as of `step`.
            deliver: as in `reset`.

        Returns:
            `[n, 3]`, what names the states after the steps; and what `deliver` made of the time steps.
        """
        with self.state.track(Move(Verb.SIMULATE, self.all)), self._engine.exclusive():
            self.state.check()
            return self._saved.simulate(states, actions, deliver)

    def export_states(self, states: NDArray[np.uint32]) -> PackedStates:
        """Returns states by which envs of other pools can go on, `[n]`."""
        with self._engine.exclusive():
            self.state.check()
            return self._saved.pack(states)

    def import_states(self, packed: PackedStates) -> NDArray[np.uint32]:
        """Keeps states of another pool; returns what names them, `[n, 3]`."""
        with self._engine.exclusive():
            self.state.check()
            return self._saved.unpack(packed)

    def start_trace(self, capacity: int) -> None:
        """Records what is done from now on, for each worker and each way in the latest `capacity` spans."""
        with self._engine.exclusive():
            self.state.check()
            if self.state.recorder is not None:
                raise RuntimeError(f"pool {self.id} is being traced already; end that trace first")
            with self.state.breaking():
                self._workers.start_trace(capacity)
            self._engine.start_trace(capacity)
            self._engine.recorder = self.state.recorder = Recorder(capacity)

    def stop_trace(self) -> tuple[list[Record], list[Record]]:
        """Records no more; also if the pool is broken or closed by now.

        Returns:
            The records of the programs, by Python and without it, and those of the workers; of a closed
            pool, none.
        """
        assert self.state.recorder is not None
        hurry = self.closed or self.state.broken_by is not None
        with self._engine.exclusive(patience=1.0 if hurry else None):
            programs = [self.state.recorder.take(), self._engine.stop_trace()]
            self._engine.recorder = self.state.recorder = None
            if self.closed:
                return programs, []
            try:
                with self.state.breaking():
                    return programs, self._workers.stop_trace(hurry=self.state.broken_by is not None)
            except JaxvecError:  # the pool is broken by now, and the next call says so; or another closed it
                return programs, [] if self.closed else self._workers.stop_trace(hurry=True)

    def close(self, timeout: float | None = 5.0) -> None:
        """Closes the envs and ends the workers, by force after `timeout` seconds; `None` waits for ever.

        Legal at any time, from any thread, and twice: a step that is under way is ended by force,
        and raises `PoolClosedError`. Ctrl-C ends the wait for envs, and so their workers.
        """
        try:
            self.finalizer.close(timeout)
        finally:
            if self.finalizer.ended:
                for name in ("_views", "_segment"):  # and with them the memory: nobody else has views of it
                    vars(self).pop(name, None)
                self.env_calls.forget()

    # --- what the calls are made of; only who is inside the engine, or holds slots there, changes anything --

    @contextmanager
    def _alone(self, move: Move) -> Generator[ActiveMove]:
        """Makes a move in a block that is inside the engine, alone."""
        with self.state.track(move) as active, self._engine.exclusive():
            self.state.enter(move)
            yield active

    def _check(self, active: ActiveMove) -> None:
        """Raises what has to end a wait early."""
        active.interrupt()
        self.state.check()  # another thread may have closed or broken us

    def _sets_options(self, options: Options, slots: NDArray[Any]) -> bool:
        """Says whether the workers hold other options than these for some of `slots`."""
        held = self._options
        return options is not None or (held is not None and any(held[slot] is not None for slot in slots))

    def _choose(self, active: ActiveMove, mask: NDArray[Any] | None) -> NDArray[Any]:
        """Returns those of the move's envs that a reset is for, in the order in which it sends them.

        With a mask, `[n]`, none may be in flight. A reset of all waits for those that are, and drops what
        they return.
        """
        slots, sent = active.move.slots, self._admission.sent
        if mask is None and len(slots) == self.spec.num_envs and len(sent):
            self._wait(active, sent, len(sent), self._doing(sent))
            self._admission.note_received(sent)
        chosen = slots if mask is None else slots[mask]
        self.state.check_status(self._engine.check_envs(chosen, stepped=False), chosen)
        if not self.spec.first_ready:
            return chosen
        spread = self._admission.spread
        return spread[np.isin(spread, chosen)]

    def _send_reset(
        self,
        active: ActiveMove,
        chosen: NDArray[Any],
        seeds: NDArray[Any] | None,
        options: Options,
        *,
        in_flight: bool,
    ) -> None:
        """Sends those `chosen` of the move's envs, `[n]`, to be reset with `seeds`, `[n]`."""
        self._engine.wait_for_copies()  # batched envs write rows of others, too, which our handle may lack
        slots = active.move.slots
        idle = ~self._admission.in_flight[slots]  # workers may have yet to read the seeds of others
        self._views.seeds[slots[idle]] = NO_SEED if seeds is None else seeds[idle]
        if self._sets_options(options, chosen):
            held = merge_options(self._options, options, chosen, self.spec.num_envs)
            with self.state.breaking():
                self._workers.set_options(held, self._timeouts.step)
            self._options = held
        if self._workers.env_settings is not None:
            self._workers.env_settings.reset(chosen, options)
        with self.state.breaking():
            self._engine.dispatch(Verb.RESET, chosen, self._admission.queue if in_flight else chosen)
        self._admission.needs_reset[chosen] = False
        if in_flight:
            self._admission.note_sent(chosen, self._timeouts.reset)
        self._engine.advance(active.move)

    def _send_states(
        self, active: ActiveMove, verb: Verb, slots: NDArray[Any], numbers: NDArray[np.int64]
    ) -> NDArray[np.int_]:
        """Has states of these numbers saved, or restored; returns the places of those that are left."""
        self._views.states[slots] = numbers
        self._views.oldest_state[0] = self._saved.table.oldest
        with self.state.breaking():
            self._engine.dispatch(verb, slots)
        self._wait(active, slots, len(slots), verb)
        return np.flatnonzero(self._views.states[slots])

    def _wait(
        self,
        active: ActiveMove,
        slots: NDArray[Any],
        count: int,
        verb: Verb,
        *,
        waited: float = 0,
        give_up: float | None = None,
    ) -> None:
        timeout = self._timeouts.reset if verb is Verb.RESET else self._timeouts.step
        with span(self.state.recorder, "wait for workers"), self.state.breaking():
            check = partial(self._check, active)
            check()
            self._workers.wait(slots, count, Patience(verb.word, timeout, check, waited, give_up))

    def _doing(self, slots: NDArray[Any]) -> Verb:
        """Says what those in flight are at: the rest of a reset has a reset's time."""
        return Verb.RESET if self._workers.any_resetting(slots) else Verb.STEP

    def _make(
        self,
        active: ActiveMove,
        actions: Rows = (),
        env_ids: NDArray[Any] | None = None,
        *,
        deliver: Deliver | None = copies,
        at_least: int | None = None,
    ) -> Made:
        """Has the engine make the move; where that can't be at once, waits until it can, or raises why not.

        Args:
            active: a step, a send or a recv.
            actions, env_ids, at_least: as of `Engine.move`.
            deliver: as of `Engine.move`; `None` if the caller itself waits for the rows.
        """
        move, engine = active.move, self._engine
        attempt = partial(engine.move, move, actions, env_ids, deliver=deliver, at_least=at_least)
        try:
            made = attempt()
            if made.status not in (Status.DONE, Status.UNDER_WAY):
                with engine.inside(move, env_ids):
                    self.state.enter(move)
                    if move.verb is Verb.RECV:
                        self._check_enough(at_least)
                    else:
                        slots = move.slots if env_ids is None else env_ids
                        self.state.check_status(engine.check_envs(slots, stepped=True), slots)
                    made = attempt()  # nothing stands against it while this thread is inside
                    assert made.status in (Status.DONE, Status.UNDER_WAY), made.status
        except Exception:
            if not engine.holds():
                raise  # before any env was moved
            with self.state.breaking():
                raise
        active.recorded = made.recorded
        return made

    def _finish(self, active: ActiveMove, made: Made, deliver: Deliver) -> Any:
        """Waits for what the engine has begun, and returns the rows of a step or a recv."""
        if made.status is Status.DONE:
            active.interrupt()  # the steps of a program may all be so quick that no wait notices Ctrl-C
            return made.rows
        slots = active.move.slots
        with span(self.state.recorder if made.recorded else None, "go on"):
            if active.move.verb is Verb.RECV:
                return self._receive(active, deliver, waited=made.waited)
            if not self._engine.done_at_once:
                self._wait(active, slots, len(slots), Verb.STEP, waited=made.waited)
            return self._engine.take(slots, deliver)

    def _read(self, slots: NDArray[Any], deliver: Deliver) -> Rows:
        """Delivers the rows of `slots`. The caller holds them, so nobody has them stepped meanwhile."""
        return self._views.read(slots, deliver)

    def _receive(
        self,
        active: ActiveMove,
        deliver: Deliver,
        *,
        waited: float = 0,
        give_up: float | None = None,
        at_least: int | None = None,
        everything: bool = False,
    ) -> Rows:
        """Waits for a batch of the slots in flight. No other thread does so now, but some may send."""
        overdue = self._admission.overdue()
        if len(overdue):  # others may have been ready first ever since
            self._wait(active, overdue, len(overdue), self._doing(overdue), waited=math.inf)
        sent = self._admission.sent
        if at_least is not None:
            slots = self._wait_for_some(active, sent, at_least, waited=waited, give_up=give_up)
        elif self._admission.together > 1 and self.spec.first_ready and not (self._in_order or everything):
            size = self.spec.batch_size
            slots = self._wait_for_some(active, sent, size, waited=waited, give_up=give_up)[:size]
        else:
            count = len(sent) if everything else self.spec.batch_size
            sent = sent[: count if self._in_order else None]
            self._wait(active, sent, count, self._doing(sent), waited=waited, give_up=give_up)
            slots = sent if self._in_order else self._workers.first_completed(sent, count)
            slots = self.all if everything or not self.spec.first_ready else slots
        with self._engine.shared():
            self._admission.note_received(slots)
            self._engine.hold(slots)  # until their rows are read
        return self._engine.take(slots, deliver)

    def _wait_for_some(
        self, active: ActiveMove, sent: NDArray[Any], at_least: int, *, waited: float, give_up: float | None
    ) -> NDArray[Any]:
        """Waits for `at_least` of `sent`, and returns all that are completed then, in the order of `recv`.

        A worker marks the slots of a batched env one after the other. We may look in the middle of that, so
        we wait for one more until enough of them are whole; single envs are at the first look.
        """
        slots = sent[:0]
        for count in range(at_least, len(sent) + 1):
            first = sent[: count if self._in_order else None]
            self._wait(active, first, count, self._doing(first), waited=waited, give_up=give_up)
            slots = self._all_completed(sent)
            if len(slots) >= at_least:
                break
        return slots

    def _all_completed(self, sent: NDArray[Any]) -> NDArray[Any]:
        """Returns all of `sent` that are completed, in the order of `recv`; of batched envs, whole ones."""
        slots = self._workers.first_completed(sent, len(sent))
        if self._in_order:  # none before one that was sent earlier
            slots = sent[np.logical_and.accumulate(np.isin(sent, slots))]
        together = self._admission.together
        return slots if together == 1 else whole(slots, sent, together)

    def _check_enough(self, at_least: int | None = None, *, resetting: int | None = None) -> None:
        """Raises the error of a `recv` that waits for more envs than are in flight; see `too_few_pending`."""
        in_flight = int(self._admission.num_sent[0])
        count = self.spec.batch_size if at_least is None else at_least
        if in_flight + (resetting or 0) < count:
            returned = str(count) if at_least is None else f"at least {count}"
            raise too_few_pending(returned, in_flight, resetting=resetting)
