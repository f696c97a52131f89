"""The engine of a pool that compiled programs step without Python. Twin of `pool.cc`."""

from __future__ import annotations

import ctypes
import itertools
import math
import weakref
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.dispatch import ParentHandoff
from jaxvec._dispatch.engine import FOREVER, Engine, Made, Rules, Status
from jaxvec._dispatch.move import VERBS, Caller, Move, Verb, name_caller
from jaxvec._memory.segment import Copies, Deliver, Rows, copies
from jaxvec._native import library
from jaxvec._tracing._recorder import Record, Span

_WAIT = 200_000_000  # ns without Python, whose signal handlers then get to run

_STATUSES = tuple(Status)
_PARTS = ("write actions", "hand over", "wait for workers", "copy results")
_CALLER_CODES = [verb + caller for verb in VERBS for caller in Caller]
_NAMES = {code: name_caller(code) for code in _CALLER_CODES} | dict(enumerate(_PARTS, start=32))

_ALIGNMENT = 64  # bytes, of the leaves of results


class Array(ctypes.Structure):
    """`Array` of pool.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("nonzero", ctypes.c_void_p),
    ]


class _State(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("last_caller", "open", "served", "devices")]


class _Plan(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint32),
        ("batch_size", ctypes.c_uint32),
        ("in_order", ctypes.c_uint32),
        ("together", ctypes.c_uint32),
        ("fingerprint", ctypes.c_int64),
        ("wait_ns", ctypes.c_int64),
        ("step_ns", ctypes.c_int64),
        ("parent", ctypes.c_void_p),
        ("stops", ctypes.c_void_p),
        ("generation", ctypes.c_void_p),
        ("actions", ctypes.POINTER(Array)),
        ("results", ctypes.POINTER(Array)),
        ("num_actions", ctypes.c_uint32),
        ("num_results", ctypes.c_uint32),
        ("in_flight", ctypes.c_void_p),
        ("sent", ctypes.c_void_p),
        ("num_sent", ctypes.c_void_p),
        ("due", ctypes.c_void_p),
        ("needs_reset", ctypes.c_void_p),
        ("terminated", ctypes.c_void_p),
        ("truncated", ctypes.c_void_p),
    ]


class _Request(ctypes.Structure):
    """`Request` of pool.h."""

    _fields_ = [
        ("verb", ctypes.c_uint32),
        ("caller_code", ctypes.c_uint32),
        ("new_generation", ctypes.c_uint32),
        ("num_slots", ctypes.c_uint32),
        ("num_sent", ctypes.c_uint32),
        ("slots", ctypes.c_void_p),
        ("generation", ctypes.c_void_p),
        ("sent", ctypes.c_void_p),
        ("actions", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
        ("waited_ns", ctypes.c_int64),
    ]


class _Span(ctypes.Structure):
    """`Span` of trace.h."""

    _fields_ = [
        ("began", ctypes.c_int64),
        ("ended", ctypes.c_int64),
        ("thread", ctypes.c_uint32),
        ("what", ctypes.c_uint32),
    ]


class _Results:
    """New memory for the rows of a time step: one piece, since what is made has its price."""

    def __init__(
        self, leaves: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], rows: int, unread: frozenset[int]
    ) -> None:
        self._shapes = [
            ((0 if place in unread else rows, *shape), dtype) for place, (shape, dtype) in enumerate(leaves)
        ]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes]
        *self._offsets, self._size = itertools.accumulate(
            (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0
        )
        self._pointers = ctypes.c_void_p * len(leaves)

    def make(self) -> tuple[list[NDArray[Any]], Any]:
        """Returns arrays for the leaves, and their addresses; none of leaves without rows."""
        memory = np.empty(self._size, np.uint8)
        address = _address(memory)
        rows = [
            np.ndarray(shape, dtype, memory, offset)
            for (shape, dtype), offset in zip(self._shapes, self._offsets, strict=True)
        ]
        pairs = zip(self._shapes, self._offsets, strict=True)
        return rows, self._pointers(*[address + offset if shape[0] else None for (shape, _), offset in pairs])


def _words(array: Any, dtype: type[np.generic]) -> NDArray[Any]:
    return np.ascontiguousarray(array, dtype)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]  # half as dear as `array.ctypes.data`
    return address


class CEngine(Engine):
    """An engine whose ordinary moves are made by C++. Compiled programs find it by the pool's id."""

    def __init__(
        self,
        handoff: ParentHandoff,
        rules: Rules,
        *,
        fingerprint: int,
        slices: Sequence[tuple[int, int]],
        actions: Sequence[NDArray[Any]],
        results: Sequence[NDArray[Any]],
        nonzero: Sequence[NDArray[np.bool_] | None],
        batch_size: int,
    ) -> None:
        """Opens the engine.

        Args:
            handoff: the pool's, with C++'s part.
            rules: of the pool.
            fingerprint: of its specification, which a program's call must name, too.
            slices: `(first, stop)` of each worker's slots.
            actions, results: `[num_envs, ...]` arrays in the segment, in a program's order.
            nonzero: for each of `results`, `[num_envs]` flags that are false for rows of zeros, if there
                are such.
            batch_size: how many envs `recv` returns.
        """
        super().__init__(rules)
        self._library = _declared()
        admission, over = rules.admission, rules.views.over if rules.ends_need_reset else None
        self.generation = np.zeros(len(admission.needs_reset), np.uint32)
        stops = np.array([stop for _, stop in slices])
        terminated, truncated = (None, None) if over is None else (flag.ctypes.data for flag in over)
        timeout_ns = FOREVER if rules.timeout is None else int(rules.timeout * 1e9)
        plan = _Plan(
            id=rules.pool_id,
            batch_size=batch_size,
            in_order=rules.in_order,
            together=admission.together,
            fingerprint=fingerprint,
            wait_ns=min(_WAIT, timeout_ns),
            step_ns=timeout_ns,
            parent=handoff.address,
            stops=stops.ctypes.data,
            generation=self.generation.ctypes.data,
            actions=_arrays(actions, [None] * len(actions)),
            results=_arrays(results, nonzero),
            num_actions=len(actions),
            num_results=len(results),
            in_flight=admission.in_flight.ctypes.data,
            sent=admission.sent_words.ctypes.data,
            num_sent=admission.num_sent.ctypes.data,
            due=admission.due.ctypes.data,
            needs_reset=admission.needs_reset.ctypes.data,
            terminated=terminated,
            truncated=truncated,
        )
        leaves = [(leaf.shape[1:], leaf.dtype) for leaf in results]
        self._new_results = cache(partial(_Results, leaves))
        self._batch_size = batch_size
        self._alive: Any = (handoff, stops, actions, results, nonzero, admission, over)
        self._pool_id = rules.pool_id
        self._pool = self._library.jaxvec_pool_open(ctypes.byref(plan))
        self._state = _State.from_address(self._library.jaxvec_pool_state(self._pool))
        self._state.open = 1
        # Not at the program's end, up to which a thread may be in a call: the closed pool refuses it.
        weakref.finalize(self, self._library.jaxvec_pool_free, self._pool).atexit = False

    @property
    def last_caller(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._state.last_caller

    @property
    def served(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._state.served

    def _enter(self, slots: NDArray[Any] | None, exclusive: bool, seconds: float) -> bool:
        words = None if slots is None else _words(slots, np.int64)
        named = (None, 0) if words is None else (_address(words), len(words))
        return bool(self._library.jaxvec_pool_enter(self._pool, *named, exclusive, int(seconds * 1e9)))

    def _leave(self) -> None:
        self._library.jaxvec_pool_leave(self._pool)

    def move(
        self,
        move: Move,
        actions: Rows = (),
        env_ids: NDArray[Any] | None = None,
        *,
        deliver: Deliver | None = copies,
        at_least: int | None = None,
    ) -> Made:
        if at_least is None and isinstance(deliver, Copies):
            made = self._move(move, actions, env_ids, deliver.unread)
            if made.status not in (Status.ELSEWHERE, Status.LATE):
                return made
        return super().move(move, actions, env_ids, deliver=deliver, at_least=at_least)

    def _move(self, move: Move, actions: Rows, env_ids: NDArray[Any] | None, unread: frozenset[int]) -> Made:
        """Makes a move by one call of C++; `ELSEWHERE` if it is none that C++ knows."""
        request = _Request(
            verb=move.verb, caller_code=move.caller_code, new_generation=move.caller is not None
        )
        num_rows = self._batch_size if move.verb is Verb.RECV else len(move.slots)
        if move.generation is not None:
            slots, generation = _words(move.slots, np.int64), _words(move.generation, np.uint32)
            request.num_slots = len(slots)
            request.slots, request.generation = _address(slots), _address(generation)
        if env_ids is not None:
            sent = _words(env_ids, np.int64)
            request.num_sent, request.sent = len(sent), _address(sent)
        actions = [np.ascontiguousarray(action) for action in actions]
        pointers = (ctypes.c_void_p * len(actions))(*map(_address, actions))
        request.actions = ctypes.addressof(pointers)
        rows: list[NDArray[Any]] = []
        if move.verb is not Verb.SEND:
            rows, addresses = self._new_results(num_rows, unread).make()
            request.results = ctypes.addressof(addresses)
        status = self._library.jaxvec_pool_move(self._pool, ctypes.byref(request))
        return Made(_STATUSES[status], rows, request.waited_ns / 1e9, recorded=True)

    def check_handle(self, move: Move) -> Status:
        slots = _words(move.slots, np.int64)
        generation = None if move.generation is None else _words(move.generation, np.uint32)
        address = None if generation is None else _address(generation)
        return _STATUSES[
            self._library.jaxvec_pool_check_handle(self._pool, _address(slots), address, len(slots))
        ]

    def check_envs(self, env_ids: NDArray[Any], *, stepped: bool) -> Status:
        slots = _words(env_ids, np.int64)
        return _STATUSES[
            self._library.jaxvec_pool_check_envs(self._pool, _address(slots), len(slots), stepped)
        ]

    def hold(self, slots: NDArray[Any], *, alone: bool = False) -> None:
        slots = _words(slots, np.int64)
        self._library.jaxvec_pool_hold(self._pool, _address(slots), len(slots), alone)

    def holds(self) -> bool:
        return bool(self._library.jaxvec_pool_holds(self._pool))

    def release(self) -> None:
        self._library.jaxvec_pool_release(self._pool)

    def advance(self, move: Move) -> None:
        if move.caller is not None:
            self.generation[move.slots] += np.uint32(1)
            self._state.last_caller = move.caller_code

    def retract(self, move: Move, last_caller: int) -> None:
        if move.caller is not None:
            self.generation[move.slots] -= np.uint32(1)
            if self._state.last_caller == move.caller_code:
                self._state.last_caller = last_caller

    def count_success(self) -> None:
        self._state.served += 1

    def wait_for_copies(self) -> None:
        self._library.jaxvec_pool_wait_for_copies(self._pool)

    def allow_gpu(self) -> None:
        self._state.devices = 1

    def close_fast_path(self) -> None:
        super().close_fast_path()
        self._state.open = 0

    def start_trace(self, capacity: int) -> None:
        self._capacity = capacity
        self._library.jaxvec_trace_start(self._pool, capacity)

    def stop_trace(self) -> Record:
        rows = np.empty(self._capacity, _Span)
        count = self._library.jaxvec_trace_stop(self._pool, rows.ctypes.data)
        began, ended, thread, what = (rows[name][:count].tolist() for name in rows.dtype.names or ())
        spans = map(Span, map(_NAMES.__getitem__, what), began, ended, thread)
        return Record(list(spans), max(count - self._capacity, 0))

    def close(self) -> None:
        super().close()
        self._library.jaxvec_pool_withdraw(self._pool_id)
        self._alive = None


def _arrays(arrays: Sequence[NDArray[Any]], nonzero: Sequence[NDArray[np.bool_] | None]) -> Any:
    return (Array * len(arrays))(
        *(
            Array(
                array.ctypes.data,
                array.ctypes.shape_as(ctypes.c_int64),
                array.ndim,
                ord(array.dtype.kind) + 256 * array.dtype.itemsize,
                None if flags is None else flags.ctypes.data,
            )
            for array, flags in zip(arrays, nonzero, strict=True)
        )
    )


@cache
def _declared() -> ctypes.CDLL:
    pointer, i64, i32, u32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32
    declared = library.declare(
        jaxvec_pool_open=(pointer, [pointer]),
        jaxvec_pool_withdraw=(None, [u32]),
        jaxvec_pool_free=(None, [pointer]),
        jaxvec_pool_state=(pointer, [pointer]),
        jaxvec_pool_enter=(i32, [pointer, pointer, u32, i32, i64]),
        jaxvec_pool_leave=(None, [pointer]),
        jaxvec_pool_hold=(None, [pointer, pointer, u32, i32]),
        jaxvec_pool_holds=(i32, [pointer]),
        jaxvec_pool_release=(None, [pointer]),
        jaxvec_pool_wait_for_copies=(None, [pointer]),
        jaxvec_pool_move=(u32, [pointer, pointer]),
        jaxvec_pool_check_handle=(u32, [pointer, pointer, pointer, u32]),
        jaxvec_pool_check_envs=(u32, [pointer, pointer, u32, i32]),
        jaxvec_trace_start=(None, [pointer, u32]),
        jaxvec_trace_stop=(ctypes.c_uint64, [pointer, pointer]),
    )
    library.check_records(Array, _State, _Plan, _Request, _Span)
    library.check_values(Status)
    library.check_values(Verb, "RESET", "STEP", "SEND", "RECV", "SAVE", "RESTORE")
    return declared
