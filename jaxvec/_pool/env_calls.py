"""EnvCalls to envs: calls of their methods, their attributes, their raw infos.

They are asked of the workers over control sockets, beside the moves of envs of other workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.engine import Engine
from jaxvec._dispatch.move import Move, Verb
from jaxvec._envs.slice import Arguments, RequestName
from jaxvec._memory.segment import InfoKind, known
from jaxvec._pool.state import PoolState
from jaxvec._workers.base import WorkerGroup
from jaxvec._workers.supervisor import check_all


class EnvCalls:
    """Asks the workers of a pool.

    Attributes:
        worker_of: `[num_envs]`, which worker has each env.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        state: PoolState,
        engine: Engine,
        *,
        slices: Sequence[tuple[int, int]],
        raw_info: NDArray[Any],
        timeout: float | None,
    ) -> None:
        """Begins.

        Args:
            workers: who are asked.
            state, engine: of the pool.
            slices: `(first, stop)` of each worker's envs.
            raw_info: `[num_envs]` in the segment, what is known of each env's info.
            timeout: seconds that an answer may take; `None` for any time.
        """
        self._workers = workers
        self._state = state
        self._engine = engine
        self._raw_info: NDArray[Any] | None = raw_info
        self._timeout = timeout
        self._all = np.arange(slices[-1][1])
        self._starts: NDArray[np.int_] = np.array([first for first, _ in slices])
        self.worker_of: NDArray[np.int_] = self._starts.searchsorted(self._all, side="right") - 1

    def infos(self, slots: NDArray[Any]) -> list[dict[str, Any]]:
        """Returns the raw info of each env's last reset or step; asks only for those that we can't know."""
        with self._holding_workers(Move(Verb.CALL, slots), name="infos"):
            assert self._raw_info is not None
            kinds = self._raw_info[slots]
            infos = dict(zip(slots.tolist(), known(kinds.tobytes()), strict=True))
            full = np.sort(slots[kinds == InfoKind.FULL])
            if full.size:
                asked = self.request("infos_of", partial(_those_within, full))
                infos.update(zip(full.tolist(), _joined(asked), strict=True))
            return list(infos.values())

    def known_infos(self) -> list[dict[str, Any]] | None:
        """Returns `infos` of all envs, new ones, to whom alone moves them; `None` if we have to ask."""
        raw_info = self._raw_info
        if raw_info is None:  # another thread has closed the pool since they were moved
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
        begun: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Calls a method of envs, or reads an attribute; an env's error doesn't break the pool.

        Other calls go on meanwhile, but those for envs of the same workers.

        Args:
            move: whose envs.
            name: of the method; wrappers are looked through.
            args: for each of them.
            kwargs: for all.
            begun: is called when nobody can overtake the call any more.

        Returns:
            One result for each env.
        """
        return self._call_envs(move, "call", args, name, kwargs, begun=begun)

    def get_attr(self, slots: NDArray[Any], name: str) -> list[Any]:
        """Returns an attribute of envs, `slots` `[n]`, which is not called; otherwise as `call`."""
        return self._call_envs(Move(Verb.CALL, slots), "get_attr", [()] * len(slots), name)

    def map(self, slots: NDArray[Any], function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        """Returns what `function` returns of envs, `slots` `[n]`, and `args`; otherwise as `call`."""
        return self._call_envs(Move(Verb.CALL, slots), "map", [args] * len(slots), function)

    def set_attr(self, slots: NDArray[Any], name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of envs, `slots` `[n]`, to one of `values` each."""
        with self._holding_workers(Move(Verb.CALL, slots), name="set_attr"):
            self.request_each("set_attr", slots, values, name)
            if self._workers.env_settings is not None:
                self._workers.env_settings.set_attr(slots, values, name)

    def of_workers(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Returns all slots of the workers that have some of `slots`, which nobody has checked yet."""
        asked = np.zeros(len(self._starts) + 1, np.bool_)  # the first is for slots below 0
        asked[self._starts.searchsorted(slots, side="right")] = True
        return self._all[asked[1:][self.worker_of]]

    def request(self, name: RequestName, arguments: Arguments) -> list[Any]:
        """Makes a request; an env that fails in it, unlike one that fails in flight, does not break the pool.

        Args:
            name: of a method of `Slice`.
            arguments: of each worker.
        """
        with self._state.breaking():
            answers = self._workers.request(name, arguments, timeout=self._timeout, check=self._state.check)
        return check_all(answers)

    def request_each(
        self, name: RequestName, slots: NDArray[Any], values: Sequence[Any], *more: Any
    ) -> list[Any]:
        """Makes a request of some envs; workers that have none of them go on with what they do.

        Args:
            name: of a method of `Slice` that takes slots, a value for each of them, and `more`.
            slots: `[n]`, distinct.
            values: for each of `slots`.
            *more: for all.
        """
        by_slot = dict(zip(slots.tolist(), values, strict=True))

        def arguments(first: int, stop: int) -> tuple[Any, ...] | None:
            mine = [slot for slot in range(first, stop) if slot in by_slot]
            return (mine, [by_slot[slot] for slot in mine], *more) if mine else None

        return self.request(name, arguments)

    def forget(self) -> None:
        """Lets the segment go; the pool is closed."""
        self._raw_info = None

    def _call_envs(
        self,
        move: Move,
        name: RequestName,
        args: Sequence[Sequence[Any]],
        *more: Any,
        begun: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Asks envs, and returns an answer of each; see `call` and `request_each`."""
        slots = move.slots
        with self._holding_workers(move, begun):
            if move.verb is Verb.CALL and name != "get_attr" and self._workers.env_settings is not None:
                self._workers.env_settings.call(slots)
            slices = self.request_each(name, slots, args, *more)
        results = dict(zip(np.sort(slots).tolist(), _joined(slices), strict=True))
        return [results[slot] for slot in slots.tolist()]

    @contextmanager
    def _holding_workers(
        self, move: Move, begun: Callable[[], None] | None = None, *, name: str | None = None
    ) -> Generator[None]:
        """Holds the move's envs, and all others of their workers, for a block that asks these.

        The handle is stale from the beginning on, lest another call gets in with it: a `send` or `recv` names
        all envs by its handle, and needs other ones alone. If the block fails, it is fresh again.
        """
        held = self.of_workers(move.slots)
        with self._state.track(move, name):
            with self._engine.exclusive(held):
                if begun is not None:
                    begun()
                self._state.enter(move)
                self._engine.hold(held, alone=True)
                last_caller = self._engine.last_caller
                self._engine.advance(move)
            try:
                yield
            except Exception:
                with self._engine.shared():
                    self._engine.retract(move, last_caller)
                raise


def _joined(answers: list[Any]) -> Iterator[Any]:
    """Yields what the slices that were asked have answered of each of their envs."""
    return itertools.chain.from_iterable(each for each in answers if each is not None)


def _those_within(slots: NDArray[Any], first: int, stop: int) -> tuple[list[int]] | None:
    """Returns a worker's part of `slots` as the arguments of a request; `None` if it has none of them."""
    mine = slots[(first <= slots) & (slots < stop)].tolist()
    return (mine,) if mine else None
