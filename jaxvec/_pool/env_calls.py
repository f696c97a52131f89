"""Calls of env methods, reads and writes of attributes, and reads of raw infos.

They travel over the workers' control sockets, beside the moves of envs of other workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._engine.engine import Engine
from jaxvec._engine.move import Move, Verb
from jaxvec._envs.env_access import EnvAccess
from jaxvec._envs.slice import Arguments
from jaxvec._memory.segment import InfoKind, known
from jaxvec._pool.state import PoolState
from jaxvec._workers.base import WorkerGroup, for_slots
from jaxvec._workers.diagnosis import check_all


class EnvCalls:
    """Requests to the envs of a pool.

    A request waits for earlier moves of all envs of the workers concerned; other workers continue meanwhile.
    An env that raises in a request does not break the pool.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        state: PoolState,
        engine: Engine,
        *,
        slices: Sequence[tuple[int, int]],
        raw_info: NDArray[Any],
    ) -> None:
        self._workers = workers
        self._state = state
        self._engine = engine
        # The `InfoKind` of each env's latest info, `[num_envs]`, in the segment; `None` in a closed pool.
        self._raw_info: NDArray[Any] | None = raw_info
        self._all = np.arange(slices[-1][1])
        self._starts: NDArray[np.int_] = np.array([first for first, _ in slices])
        # Index of each env's worker, `[num_envs]`.
        self.worker_of: NDArray[np.int_] = self._starts.searchsorted(self._all, side="right") - 1

    def infos(self, slots: NDArray[Any]) -> list[dict[str, Any]]:
        """Returns the raw info of each env's latest reset or step. Requests only those with entries."""
        with self._holding_workers(Move(Verb.CALL, slots), name="infos"):
            assert self._raw_info is not None
            kinds = self._raw_info[slots]
            infos = dict(zip(slots.tolist(), known(kinds.tobytes()), strict=True))
            full = np.sort(slots[kinds == InfoKind.FULL])
            if full.size:
                answers = self.request(
                    EnvAccess.infos_of, for_slots(full, lambda slots_here: (slots_here.tolist(),))
                )
                infos.update(zip(full.tolist(), _flatten(answers), strict=True))
            return list(infos.values())

    def known_infos(self) -> list[dict[str, Any]] | None:
        """Returns new infos of all envs without a request; `None` if one has entries, or the pool is closed.

        The caller must be the only thread that moves envs.
        """
        raw_info = self._raw_info  # another thread may close the pool meanwhile
        if raw_info is None:
            return None
        kinds = raw_info.tobytes()
        return None if InfoKind.FULL in kinds else known(kinds)

    def call(
        self,
        move: Move,
        name: str,
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any],
        *,
        on_started: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Calls a method of each env, or reads an attribute; both are looked up through wrappers.

        `args`, `[n]`, are the positional arguments of each env's call. `on_started` is called once no other
        call can overtake this one.
        """
        return self._call_envs(move, EnvAccess.call, args, name, kwargs, on_started=on_started)

    def map(self, slots: NDArray[Any], function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        """Returns `function(env, *args)` for each env, `[n]`, called in the workers."""
        return self._call_envs(Move(Verb.CALL, slots), EnvAccess.map, [args] * len(slots), function)

    def set_attr(self, slots: NDArray[Any], name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of each env to one of `values`, `[n]`."""
        with self._holding_workers(Move(Verb.CALL, slots), name="set_attr"):
            self.request_each(EnvAccess.set_attr, slots, values, name)
            if self._workers.env_settings is not None:
                self._workers.env_settings.set_attr(slots, values, name)

    def of_workers(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Returns all slots of the workers that have some of `slots`, which may be out of range."""
        concerned = np.zeros(len(self._starts) + 1, np.bool_)  # the first entry is for slots below 0
        concerned[self._starts.searchsorted(slots, side="right")] = True
        return self._all[concerned[1:][self.worker_of]]

    def request(self, method: Callable[..., Any], arguments: Arguments) -> list[Any]:
        """Calls a method of the workers' slices, or of their extensions.

        `arguments` maps a worker's range of slots to the arguments; `None` skips the worker.
        """
        with self._state.breaking():
            answers = self._workers.request(method, arguments, check=self._state.check)
        return check_all(answers)

    def request_each(
        self, method: Callable[..., Any], slots: NDArray[Any], values: Sequence[Any], *more: Any
    ) -> list[Any]:
        """Calls `method`, with `(slots, values, *more)`, in the workers that have some of `slots`.

        Each worker receives its own slots and values. `slots`, `[n]`, are distinct.
        """
        by_slot = dict(zip(slots.tolist(), values, strict=True))
        arguments = for_slots(
            np.sort(slots), lambda some: (some.tolist(), [by_slot[slot] for slot in some.tolist()], *more)
        )
        return self.request(method, arguments)

    def forget(self) -> None:
        """Drops the view of the segment. Called when the pool is closed."""
        self._raw_info = None

    def _call_envs(
        self,
        move: Move,
        method: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        *more: Any,
        on_started: Callable[[], None] | None = None,
    ) -> list[Any]:
        slots = move.slots
        with self._holding_workers(move, on_started):
            if move.verb is Verb.CALL and self._workers.env_settings is not None:
                self._workers.env_settings.call(slots)
            slices = self.request_each(method, slots, args, *more)
        # The workers answer in the order of the env ids; the caller expects the order of `slots`.
        results = dict(zip(np.sort(slots).tolist(), _flatten(slices), strict=True))
        return [results[slot] for slot in slots.tolist()]

    @contextmanager
    def _holding_workers(
        self, move: Move, on_started: Callable[[], None] | None = None, *, name: str | None = None
    ) -> Generator[None]:
        """Holds all envs of the workers concerned for a block that makes a request.

        The caller's handle becomes stale at once, and fresh again if the block fails. Otherwise a `send` or
        `recv` with this handle could start meanwhile: it names all envs, but waits only for those it needs.
        """
        concerned = self.of_workers(move.slots)
        with self._state.track(move, name):
            with self._engine.exclusive(concerned):
                if on_started is not None:
                    on_started()
                self._state.enter(move)
                self._engine.hold(concerned, alone=True)
                last_caller = self._engine.last_caller
                self._engine.advance(move)
            try:
                yield
            except Exception:
                with self._engine.shared():
                    self._engine.retract(move, last_caller)
                raise


def _flatten(answers: list[Any]) -> Iterator[Any]:
    """Yields the answers for single envs. The answer of a skipped worker is `None`."""
    return itertools.chain.from_iterable(answer for answer in answers if answer is not None)
