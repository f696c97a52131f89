"""The engine of a pool that compiled programs step without Python. Wraps `engine.cc`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._engine.dispatch import ParentDispatch
from jaxvec._engine.engine import FOREVER_NS, STEPS_NS, Engine, EngineConfig, MoveResult, Status
from jaxvec._engine.move import VERBS, Caller, Move, name_caller
from jaxvec._memory.segment import Copies, Deliver, Rows, copies
from jaxvec._native import load
from jaxvec._tracing import Span, Trace

_WAIT = 200_000_000  # ns; the longest wait in C++, during which no Python signal handler can run

_STATUSES = tuple(Status)
# `Span` in trace.h
_SPAN = np.dtype([("start", np.int64), ("end", np.int64), ("thread", np.uint32), ("what", np.uint32)])
_PARTS = ("write actions", "dispatch", "wait for workers", "copy results")
_CALLER_CODES = [verb + caller for verb in VERBS for caller in Caller]
_NAMES = {code: name_caller(code) for code in _CALLER_CODES} | dict(enumerate(_PARTS, start=32))


StepHere: TypeAlias = Callable[[NDArray[Any]], None]  # steps the envs of slots `[n]`


class CEngine(Engine):
    """An engine that makes ordinary moves in C++. Compiled programs find it by the pool's id."""

    def __init__(
        self,
        dispatch: ParentDispatch,
        config: EngineConfig,
        *,
        fingerprint: int,
        actions: Sequence[NDArray[Any]],
        num_options: int,
        results: Sequence[NDArray[Any]],
        nonzero: Sequence[NDArray[np.bool_] | None],
        batch_size: int,
        step_here: StepHere | None,
    ) -> None:
        """Creates an engine and registers it under the pool's id.

        The arrays in `actions` and `results` are those of the segment, `[num_envs, ...]`, in the order of a
        program's operands and results. The last `num_options` actions are reset options; a move has all or
        none of them. `nonzero` has flags `[num_envs]` for each result, False for rows of zeros, or `None`.
        Programs must contain the `fingerprint` of the pool's specification, too. `step_here` steps envs of
        this process; with `None`, workers do.
        """
        super().__init__(config)
        pending_envs = config.pending_envs
        terminated, truncated = config.views.over if config.ends_need_reset else (None, None)
        timeout_ns = FOREVER_NS if config.timeout is None else int(config.timeout * 1e9)
        self._native, state = load().engine(
            {
                "pool_id": config.pool_id,
                "parent": dispatch.native_end,
                "fingerprint": fingerprint,
                "batch_size": batch_size,
                "in_order": config.in_order,
                "all_at_once": config.all_at_once,
                "wait_ns": min(_WAIT, timeout_ns),
                "step_ns": timeout_ns,
                "generation": self.generation,
                "actions": actions,
                "num_options": num_options,
                "results": results,
                "nonzero": nonzero,
                "in_flight": pending_envs.in_flight,
                "sent": pending_envs.sent_words,
                "num_sent": pending_envs.num_sent,
                "due": pending_envs.due,
                "needs_reset": pending_envs.needs_reset,
                "terminated": terminated,
                "truncated": truncated,
                "step_here": step_here,
            }
        )
        self._state = state.data
        self.steps_ns = state[STEPS_NS:].view(np.uint64)

    def _enter(self, slots: NDArray[Any] | None, exclusive: bool, seconds: float) -> bool:
        return self._native.enter(slots, exclusive, int(seconds * 1e9))

    def _leave(self) -> None:
        self._native.leave()

    def move(
        self,
        move: Move,
        actions: Rows = (),
        env_ids: NDArray[Any] | None = None,
        *,
        deliver: Deliver | None = copies,
        at_least: int | None = None,
    ) -> MoveResult:
        if at_least is None and isinstance(deliver, Copies):
            number, rows, waited_ns = self._native.move(
                move.verb,
                move.caller_code,
                move.caller is not None,
                None if move.generation is None else move.slots,
                move.generation,
                env_ids,
                actions,
                deliver.unread,
            )
            status = _STATUSES[number]
            if status not in (Status.ELSEWHERE, Status.COPYING, Status.LATE):
                return MoveResult(status, rows, waited_ns / 1e9, recorded=True)
        return super().move(move, actions, env_ids, deliver=deliver, at_least=at_least)

    def check_handle(self, move: Move) -> Status:
        return _STATUSES[self._native.check_handle(move.slots, move.generation)]

    def check_envs(self, env_ids: NDArray[Any], *, stepped: bool) -> Status:
        return _STATUSES[self._native.check_envs(env_ids, stepped)]

    def hold(self, slots: NDArray[Any], *, alone: bool = False) -> None:
        self._native.hold(slots, alone)

    def holds(self) -> bool:
        return self._native.holds()

    def release(self) -> None:
        self._native.release()

    def wait_for_copies(self) -> None:
        self._native.wait_for_copies()

    def start_trace(self, capacity: int) -> None:
        self._native.start_trace(capacity)

    def stop_trace(self) -> Trace:
        memory, count = self._native.stop_trace()
        ring = np.frombuffer(memory, _SPAN)
        kept = min(count, len(ring))
        spans = np.roll(ring, -count)[len(ring) - kept :].tolist()  # oldest first
        named = [Span(_NAMES[what], start, end, thread) for start, end, thread, what in spans]
        return Trace(named, count - kept)

    def close(self) -> None:
        super().close()
        self._native.close()
