"""Operations on the envs of a pool: reset, step, send and recv.

The data flow of a step:

    compiled program or VectorEnv
      -> Pool.step(Move, actions)      a `Move` is an operation, the env ids, and the caller's handle
      -> Engine.move                   checks the handle, writes the actions, sends the envs to their workers
      -> WorkerGroup.wait              waits until the workers have stepped them
      -> Engine.take                   copies observations, rewards and flags to the caller

The native engine makes an ordinary move in C++, from the check to the copy. This file handles everything
else: moves that must wait for other threads, timeouts, errors, resets with options, and pools without C++.

Neighbours: `state.py` decides whether the pool is usable, `env_calls.py` calls methods of envs,
`registry.py` finds the pool that a handle names, and `pool_extension.py` is the door for further operations.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxvec import _stats
from jaxvec._arguments import Options, check_options, expand_options, merge_options
from jaxvec._engine.engine import Engine, EngineConfig, MoveResult, PendingEnvs, Status
from jaxvec._engine.move import Caller, Move, Verb, merge
from jaxvec._envs.env_access import SlotAccess
from jaxvec._errors import EnvIdError, PendingEnvError, PoolClosedError
from jaxvec._memory import pinned
from jaxvec._memory.segment import (
    Arrays,
    ArrayType,
    Deliver,
    Rows,
    Views,
    copies,
    into,
    make_layout,
    whole_segment,
)
from jaxvec._options import LimitName, Timeouts
from jaxvec._pool.env_calls import EnvCalls
from jaxvec._pool.pool_extension import PoolExtension
from jaxvec._pool.state import ActiveMove, PoolFinalizer, PoolState
from jaxvec._spec import Autoreset, PoolSpec
from jaxvec._stats import Stats, WorkerStats
from jaxvec._tracing import span
from jaxvec._util import logger
from jaxvec._workers.base import WaitLimits, WorkerGroup

_Kind = TypeVar("_Kind", bound=PoolExtension)

_ids = itertools.count(1)  # a handle contains the id of its pool, see registry.py


class Pool:
    """The envs of one `make`, with their workers and their shared memory.

    It coordinates concurrent operations on these envs. The meaning of the data is left to the callers.
    Arguments that several methods share:

    - move: The operation, its envs `[n]`, and the caller's handle.
    - actions: An array `[n, ...]` for each leaf of the action, of the stored dtype; then those of the reset
      options, if they are given (`option_leaves`).
    - deliver: Function that copies the leaves `[n, ...]` of the time step out of the segment. Methods return
      the delivered leaves.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        spec: PoolSpec,
        *,
        slices: tuple[tuple[int, int], ...],
        in_order: bool,
        all_at_once: bool,
        timeouts: Timeouts,
        resets_required: bool,
        extended: Sequence[ArrayType] = (),
        on_pool: Sequence[Callable[[Pool, Arrays], PoolExtension | None]] = (),
    ) -> None:
        """Attaches the workers to a new segment.

        `slices` has the range of env ids `(first, stop)` of each worker. With `in_order`, `recv` returns envs
        in sending order. With `all_at_once`, each step, send and recv must have all envs, because they are
        batched. With `resets_required`, an env must be reset before its first step and, without autoreset,
        after each episode. `on_pool` makes the extensions, whose arrays `extended` are in the segment, too.
        """
        self.spec = spec
        self.workers: WorkerGroup = workers
        self._in_order = in_order
        self._all_at_once = all_at_once
        self._timeouts = timeouts
        self.id: int = next(_ids)  # in the handles and states of this pool
        layout = make_layout(spec, len(slices), extended=extended)
        arrays = workers.attach(layout, spec)
        self.pending_envs: PendingEnvs = PendingEnvs(spec.num_envs, spec.batch_size)
        self.all: NDArray[np.int_] = self.pending_envs.all  # ids of all envs
        self._moves: dict[tuple[Verb, Caller | None], Move] = {}  # cache of `move_all`
        self.views: Views = Views(spec, arrays, self.pending_envs.rows)
        self._segment = whole_segment(arrays, layout)
        self._pinning_tried = False
        self._options: Options = {}  # the reset options that the workers hold
        self.resets_required: bool = resets_required
        if not resets_required:
            self.pending_envs.needs_reset[:] = False
        self.engine: Engine = workers.open_engine(
            EngineConfig(
                pool_id=self.id,
                pending_envs=self.pending_envs,
                views=self.views,
                dispatch=workers.send,
                in_order=in_order,
                all_at_once=all_at_once,
                ends_need_reset=resets_required and spec.autoreset is Autoreset.DISABLED,
                timeout=timeouts.step,
                # So a handle from a checkpoint of another process is stale, even after equally many calls. A
                # random pool id would do as well, but it is a constant in the programs that JAX caches.
                first_generation=secrets.randbits(31),
            )
        )
        self.finalizer: PoolFinalizer = PoolFinalizer(workers, self.engine)
        self.state: PoolState = PoolState(self.id, self.engine, self.pending_envs, self.finalizer)
        self.env_calls: EnvCalls = EnvCalls(
            workers, self.state, self.engine, slices=slices, raw_info=self.views.raw_info
        )
        self._extensions = [half for extend in on_pool if (half := extend(self, arrays)) is not None]
        self._operations = merge(
            {verb: partial(operation, extension) for verb, operation in extension.verbs.items()}
            for extension in self._extensions
        )

    @property
    def closed(self) -> bool:
        return self.finalizer.closed

    def stats(self, *, processes: bool = True) -> Stats:
        """Returns the statistics of the workers. Works for a broken pool, but not for a closed one.

        The statistics of processes take about a millisecond per worker.
        """
        with self.engine.shared():
            if self.closed:
                raise PoolClosedError(f"pool {self.id} is closed; call stats() before close()")
            processes_read = self.workers.processes() if processes else [None] * len(self.workers.restarts)
            workers = _stats.read(self.views.stats, self.workers.restarts, processes_read)
            more = dict(
                itertools.chain.from_iterable(extension.stats().items() for extension in self._extensions)
            )
            return Stats(workers, sum(workers, WorkerStats()), **more)

    def perform(self, move: Move, operands: Sequence[Any], deliver: Deliver = copies) -> list[Any]:
        """Performs an operation of an extension, see `PoolExtension.verbs`, and returns its results."""
        if (operation := self._operations.get(move.verb)) is not None:
            return operation(self, move, operands, deliver)
        self.state.check()
        raise ValueError(f"{move.verb.word}: pool {self.id} {move.verb.traits.without}")

    def extension(self, kind: type[_Kind]) -> _Kind | None:
        """Returns the pool's extension of a class, if it has one."""
        return next((extension for extension in self._extensions if isinstance(extension, kind)), None)

    def move_all(self, verb: Verb, caller: Caller | None = None) -> Move:
        """Returns a move of all envs by a caller without a handle."""
        move = self._moves.get((verb, caller))
        if move is None:
            move = self._moves[verb, caller] = Move(verb, self.all, caller=caller)
        return move

    def pin(self) -> None:
        """Page-locks the segment for GPUs, and lets programs on a GPU move envs without Python.

        Only the first call does this. A failure is logged; copies are then slower.
        """
        if self._pinning_tried:
            return
        with self.engine.shared():
            if self._pinning_tried or self.closed:  # another thread was faster
                return
            self._pinning_tried = True
            try:
                self.finalizer.pinned = pinned.Pinned(self._segment)
            except pinned.PinningError as error:
                logger.info(
                    "pool %s: its memory is not page-locked: %s; GPU copies are slower", self.id, error
                )
            self.engine.allow_gpu()

    def reset(
        self,
        move: Move,
        *,
        seeds: NDArray[Any],
        mask: NDArray[Any] | None,
        options: Any,
        deliver: Deliver = copies,
    ) -> Rows:
        """Resets envs. In a first-ready pool, it returns the batch of a `recv`.

        Args:
            seeds: Words of the seeds `[n, SEED_WORDS]`, see `expand_seeds`.
            mask: Array `[n]` bool, True for the envs to reset, which must not be pending. `None` resets all
                envs, and drops the results of pending ones.
            options: Options for the envs' `reset`, see `expand_options`, or `check_options` if they are
                declared.
        """
        options, declared = self._parse_options(options, move.slots)
        first_ready = self.spec.first_ready  # the reset then ends with a recv, one of which runs at a time
        alone = move.generation is None or first_ready or self._changes_options(options, move.slots)
        moved = move.slots if mask is None else move.slots[mask]
        with self.state.track(move) as active:
            with self.engine.exclusive() if alone else self.engine.shared(moved):
                self.state.enter(move)
                chosen = self._envs_to_reset(active, mask)
                if first_ready and mask is not None:
                    self._check_enough(resetting=len(chosen))
                self._send_reset(active, chosen, seeds, options, declared, pending=first_ready)
            if first_ready:
                return self._receive(active, deliver)
            self.wait(active, chosen, len(chosen), Verb.RESET)
            return self.views.read(move.slots, deliver)

    def reset_async(
        self, move: Move, *, seeds: NDArray[Any], mask: NDArray[Any] | None, options: Any
    ) -> None:
        """Starts a reset of envs, which are pending until `recv` returns them; see `reset`."""
        options, declared = self._parse_options(options, move.slots)
        with self.exclusive_move(move) as active:
            chosen = self._envs_to_reset(active, mask)
            self._send_reset(active, chosen, seeds, options, declared, pending=True)

    def step(self, move: Move, actions: Rows, *, deliver: Deliver = copies) -> Rows:
        self._check_complete("step", len(move.slots))
        with self.state.track(move) as active:
            return self._finish(active, self._start(active, actions, deliver=deliver), deliver)

    def end(self, move: Move, *, waited: float, interrupt: Callable[[], None], out: Rows) -> None:
        """Finishes a step or a `recv` that C++ has started, and copies the time step to `out`.

        A compiled program calls this if its wait in C++, `waited` seconds so far, is unusually long, or if a
        worker has a report. `interrupt` raises if Ctrl-C was pressed since the call started. The caller
        holds the slots.
        """
        started = MoveResult(Status.UNDER_WAY, waited=waited, recorded=True)
        self._finish(ActiveMove(move, interrupt), started, into(out))

    def send(self, move: Move, env_ids: NDArray[Any], actions: Rows, *, as_objects: bool = False) -> None:
        """Starts a step of the envs `env_ids`, `[k]`, which are pending until `recv` returns them.

        With `as_objects`, `actions` are `k` Python objects, which the envs receive unconverted. They travel
        over the control sockets, which is slower.
        """
        self._check_complete("send", len(env_ids))
        with self.state.track(move) as active:
            if not as_objects:
                self._start(active, actions, env_ids)
                return
            with self.engine.exclusive(self.env_calls.of_workers(env_ids)):
                self.state.enter(move)
                self.state.check_status(self.engine.check_envs(env_ids, stepped=True), env_ids)
                self.env_calls.request_each(SlotAccess.give_actions, env_ids, actions)
                with self.state.breaking():
                    self.engine.dispatch(Verb.STEP, env_ids)
                self.pending_envs.note_sent(env_ids, self._timeouts.step)
                self.engine.advance(move)

    def recv(
        self,
        move: Move,
        *,
        deliver: Deliver = copies,
        timeout: float | None = None,
        at_least: int | None = None,
        wait_for_all: bool = False,
    ) -> Rows:
        """Waits until `batch_size` of the pending envs are completed, and receives their time steps.

        Args:
            move: A move of all envs.
            deliver: See the class. The leaves have the shape `[batch_size, ...]`.
            timeout: Seconds after which `NotReadyError` is raised. The envs are still pending then.
            at_least: Number of envs to wait for, instead of `batch_size`. All completed envs are received.
            wait_for_all: True to wait for all pending envs, and to return the rows of all envs of the pool.
        """
        if at_least is not None:
            self._check_complete("recv", at_least)
        give_up = None if timeout is None else time.monotonic() + timeout
        enough = 0 if wait_for_all else at_least
        with self.state.track(move) as active:
            if timeout is None and enough is None:
                return self._finish(active, self._start(active, deliver=deliver), deliver)
            self._start(active, deliver=None, at_least=enough)
            return self._receive(
                active, deliver, give_up=give_up, at_least=at_least, wait_for_all=wait_for_all
            )

    def close(self, timeout: float | None = 5.0) -> None:
        """Closes the envs and ends the workers, by force after `timeout` seconds; `None` waits for ever.

        Any thread may call it, at any time and repeatedly. A running step raises `PoolClosedError`. Ctrl-C
        ends the wait for the envs; their workers are then killed.
        """
        try:
            self.finalizer.close(timeout)
        finally:
            if self.finalizer.ended:
                for name in ("views", "_segment"):  # views of the memory, which is now unmapped
                    vars(self).pop(name, None)
                self.env_calls.forget()
                for extension in self._extensions:
                    extension.forget()

    # --- For extensions, too. Only threads that are inside the engine, or hold slots, change anything ------

    @contextmanager
    def exclusive_move(self, move: Move) -> Generator[ActiveMove]:
        """Makes a move in a block that no other thread's move overlaps."""
        with self.state.track(move) as active, self.engine.exclusive():
            self.state.enter(move)
            yield active

    def dispatch(self, active: ActiveMove, verb: Verb, slots: NDArray[Any]) -> None:
        """Dispatches an extension's verb to the workers of `slots`, and waits for them."""
        with self.state.breaking():
            self.engine.dispatch(verb, slots)
        self.wait(active, slots, len(slots), verb)

    def wait(
        self,
        active: ActiveMove,
        slots: NDArray[Any],
        count: int,
        verb: Verb | None = None,
        *,
        waited: float = 0,
        give_up: float | None = None,
    ) -> None:
        """Waits until `count` of `slots` are completed. Without `verb`, they are pending steps or resets."""

        def check_wait() -> None:
            active.interrupt()
            self.state.check()  # another thread may have closed or broken the pool

        if verb is None:  # the envs share the longer timeout if any of them still resets
            verb = Verb.RESET if self.workers.any_resetting(slots) else Verb.STEP
        limit: LimitName = "reset" if verb is Verb.RESET else "step"
        limits = WaitLimits(verb.word, self._timeouts, limit, check_wait, waited, give_up)
        with span(self.engine.recorder, "wait for workers"), self.state.breaking():
            check_wait()
            self.workers.wait(slots, count, limits)

    # --- Parts of the operations ------------------------------------------------------------------

    def _parse_options(self, options: Any, slots: NDArray[Any]) -> tuple[Options, Rows]:
        """Returns the options for the control sockets, and those for the segment if they are declared."""
        if self.spec.reset_options is None:
            return expand_options(options, slots), ()
        return {}, check_options(self.spec, options, len(slots), name_row=lambda row: f"env {slots[row]}")

    def _changes_options(self, options: Options, slots: NDArray[Any]) -> bool:
        """Returns True if the workers may hold other reset options than these for some of `slots`."""
        return bool(options) or not self._options.keys().isdisjoint(slots.tolist())

    def _envs_to_reset(self, active: ActiveMove, mask: NDArray[Any] | None) -> NDArray[Any]:
        """Returns the envs that a reset sends, in sending order. They are not pending any more."""
        slots = active.move.slots
        sent = self.pending_envs.sent
        if mask is None and len(slots) == self.spec.num_envs and len(sent):
            self.wait(active, sent, len(sent))
            self.pending_envs.note_received(sent)
        chosen = slots if mask is None else slots[mask]
        self.state.check_status(self.engine.check_envs(chosen, stepped=False), chosen)
        spread = self.pending_envs.spread
        return spread[np.isin(spread, chosen)] if self.spec.first_ready else chosen

    def _send_reset(
        self,
        active: ActiveMove,
        chosen: NDArray[Any],
        seeds: NDArray[Any],
        options: Options,
        declared: Rows,
        *,
        pending: bool,
    ) -> None:
        """Dispatches resets of `chosen`; `seeds` and `declared`, `[n]`, are for all envs of the move."""
        # A batched env also writes rows of envs that the caller's handle does not contain.
        self.engine.wait_for_copies()
        slots = active.move.slots
        idle = ~self.pending_envs.in_flight[slots]  # the workers of pending envs may still read their seeds
        self.views.seeds[slots[idle]] = seeds[idle]
        if declared:
            is_chosen = np.isin(slots, chosen)  # the workers of pending envs may be reading the others
            self.views.write_options(slots[is_chosen], [rows[is_chosen] for rows in declared])
        if self._changes_options(options, chosen):
            merged = merge_options(self._options, options, chosen)
            with self.state.breaking():
                self.workers.set_options(merged)
            self._options = merged
            if self.workers.env_settings is not None:
                self.workers.env_settings.options = merged
        with self.state.breaking():
            self.engine.dispatch(Verb.RESET, chosen, self.pending_envs.queue if pending else chosen)
        self.pending_envs.needs_reset[chosen] = False
        if pending:
            self.pending_envs.note_sent(chosen, self._timeouts.reset)
        self.engine.advance(active.move)

    def _start(
        self,
        active: ActiveMove,
        actions: Rows = (),
        env_ids: NDArray[Any] | None = None,
        *,
        deliver: Deliver | None = copies,
        at_least: int | None = None,
    ) -> MoveResult:
        """Starts a step, a send or a recv; waits for other threads if it must. See `Engine.move`."""
        move = active.move
        engine = self.engine

        def attempt() -> MoveResult:
            return engine.move(move, actions, env_ids, deliver=deliver, at_least=at_least)

        try:
            result = attempt()
            if result.status not in (Status.DONE, Status.UNDER_WAY):
                with engine.inside(move, env_ids):
                    self.state.enter(move)
                    if move.verb is Verb.RECV:
                        self._check_enough(at_least)
                    else:
                        slots = move.slots if env_ids is None else env_ids
                        self.state.check_status(engine.check_envs(slots, stepped=True), slots)
                    result = attempt()  # succeeds, because the checks passed and this thread is inside
                    assert result.status in (Status.DONE, Status.UNDER_WAY), result.status
        except Exception:
            if not engine.holds():
                raise  # no env was moved
            with self.state.breaking():
                raise
        active.recorded = result.recorded
        return result

    def _finish(self, active: ActiveMove, result: MoveResult, deliver: Deliver) -> Any:
        """Waits for a started move, and returns the rows of a step or a recv."""
        if result.status is Status.DONE:
            # The steps of a program may all be so short that no wait notices Ctrl-C.
            active.interrupt()
            return result.rows
        slots = active.move.slots
        with span(self.engine.recorder if result.recorded else None, "finish in Python"):
            if active.move.verb is Verb.RECV:
                return self._receive(active, deliver, waited=result.waited)
            if self.engine.done_at_once:
                self.state.check()  # another thread may have closed the pool during the step
            else:
                self.wait(active, slots, len(slots), Verb.STEP, waited=result.waited)
            return self.engine.take(slots, deliver)

    def _receive(
        self,
        active: ActiveMove,
        deliver: Deliver,
        *,
        waited: float = 0,
        give_up: float | None = None,
        at_least: int | None = None,
        wait_for_all: bool = False,
    ) -> Rows:
        """Receives a batch of pending envs, see `recv`. The caller holds the queue, but others may send."""
        overdue = self.pending_envs.overdue()
        if len(overdue):
            # Other envs may be ready first every time. Without this, an env that hangs would never time out.
            self.wait(active, overdue, len(overdue), waited=math.inf)
        sent = self.pending_envs.sent
        if at_least is not None:
            slots = self._wait_for_some(active, sent, at_least, waited=waited, give_up=give_up)
        else:
            count = len(sent) if wait_for_all else self.spec.batch_size
            sent = sent[: count if self._in_order else None]
            self.wait(active, sent, count, waited=waited, give_up=give_up)
            slots = sent if self._in_order else self.workers.first_completed(sent, count)
            slots = self.all if wait_for_all or not (self._in_order or self.spec.first_ready) else slots
        with self.engine.shared():
            self.pending_envs.note_received(slots)
            self.engine.hold(slots)  # until their rows are read
        return self.engine.take(slots, deliver)

    def _wait_for_some(
        self, active: ActiveMove, sent: NDArray[Any], at_least: int, *, waited: float, give_up: float | None
    ) -> NDArray[Any]:
        """Waits for `at_least` of `sent`. Returns all that are completed by then, in the order of `recv`."""
        first = sent[: at_least if self._in_order else None]
        self.wait(active, first, at_least, waited=waited, give_up=give_up)
        slots = self.workers.first_completed(sent, len(sent))
        if self._in_order:  # no env before one that was sent earlier
            slots = sent[np.logical_and.accumulate(np.isin(sent, slots))]
        return slots

    def _check_complete(self, operation: str, count: int) -> None:
        """Raises if an operation has fewer envs than batched envs need, which step all at once."""
        if self._all_at_once and count < self.spec.num_envs:
            raise EnvIdError(
                f"{operation} of {count} of {self.spec.num_envs} envs: the envs of this pool are batched "
                "(envs_per_instance) and step all at once. Pass all of them, or make the envs one by one. "
                "Nothing was stepped"
            )

    def _check_enough(self, at_least: int | None = None, *, resetting: int | None = None) -> None:
        """Raises if a `recv`, after a reset of `resetting` envs by mask, would wait for too many envs."""
        pending = int(self.pending_envs.num_sent[0])
        count = self.spec.batch_size if at_least is None else at_least
        if pending + (resetting or 0) >= count:
            return
        if resetting is None:
            wanted = str(count) if at_least is None else f"at least {count}"
            raise PendingEnvError(
                f"recv returns {wanted} envs, but only {pending} are pending; send more envs first"
            )
        raise PendingEnvError(
            f"reset returns {count} envs, as recv does, but with the {resetting} of mask only "
            f"{pending + resetting} would be pending; send more envs first, or start the reset with "
            "VectorEnv.reset_async. Nothing was reset"
        )
