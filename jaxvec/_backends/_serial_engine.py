"""The engine of the serial backend: a step of all envs in one go, which is most of what such a pool does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._handoff._engine import ELSEWHERE, Made, PyEngine, Rules, Status
from jaxvec._handoff._move import Move, Verb
from jaxvec._tracing._recorder import Record


class SerialEngine(PyEngine):
    """See `Engine`. Whatever is not ordinary is left to the pool, before anything was done."""

    def __init__(
        self,
        rules: Rules,
        *,
        step: Callable[[NDArray[np.int_]], bool],
        actions: Sequence[NDArray[Any]],
        results: Sequence[NDArray[Any]],
    ) -> None:
        """Opens the engine.

        Args:
            rules: of the pool.
            step: steps the envs of slots; returns whether all is done, and leaves the rest to `Workers.wait`.
            actions, results: `[num_envs, ...]` arrays in the segment, in the order of moves.
        """
        super().__init__(rules.admission)
        self._over = rules.over
        self._step = step
        self._actions = actions
        self._results = results
        self._process = os.getpid()
        self._barred = False
        self._traced = False

    def move(self, move: Move, actions: Sequence[NDArray[Any]], env_ids: NDArray[Any] | None = None) -> Made:
        # Also what a signal handler asks of a thread that is inside: leaving here, it would end that, too.
        if move.verb is not Verb.STEP or move.generation is not None or self._inside is not None:
            return ELSEWHERE
        try:  # first: an interrupt may come between entering and our knowing of it
            if not self._enter_at_once():
                return ELSEWHERE
            for stored, action in zip(self._actions, actions, strict=True):
                stored[...] = action
            self.hold(move.slots)  # Ctrl-C breaks the pool from here on
            if move.caller is not None:
                self.advance(move)
            done = self._step(move.slots)
            if self._over is not None and done:
                np.logical_or(*self._over, out=self._admission.needs_reset)
            rows = [leaf.copy() for leaf in self._results]
            if not done:
                return Made(Status.UNDER_WAY, rows)
            self.release()
            return Made(Status.DONE, rows)
        finally:
            self._leave()

    def bar(self) -> None:
        self._barred = True

    def start_trace(self, capacity: int) -> None:
        self._traced = True

    def stop_trace(self) -> Record:
        self._traced = False
        return super().stop_trace()

    def close(self) -> None:
        self.bar()
        self._actions = self._results = ()

    def _enter_at_once(self) -> bool:
        """Gets inside if nobody is, and nothing stands against a step of all envs."""
        admission = self._admission
        with self._lock:
            usual = not (
                self._inside is not None
                or self._holds
                or self._barred
                or self._traced
                or admission.num_sent[0]
                or admission.needs_reset.any()
                or os.getpid() != self._process
            )
            if usual:
                self._inside = threading.get_ident()
            return usual
