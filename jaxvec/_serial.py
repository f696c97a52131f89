"""The serial backend: the whole pool as one slice in this process. Same stepper, no processes.

For debugging, and for envs so cheap that handing them over costs more than stepping them. It can't
interrupt an env, so timeouts don't apply.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec import _envs, _failures, _segment
from jaxvec._backend import Patience
from jaxvec._description import describe
from jaxvec._env_slice import EnvSlice
from jaxvec._envs import Env, EnvFailure, EnvFn
from jaxvec._errors import EnvError, SpaceMismatchError
from jaxvec._gate import Gate, PortableGate
from jaxvec._handoff import STEP
from jaxvec._layout import Layout
from jaxvec._segment import Arrays
from jaxvec._spec import PoolSpec
from jaxvec._turns import Turns


class SerialWorkers:
    """See `Workers`."""

    def __init__(self, env_fns: Sequence[EnvFn], *, learn_info: bool) -> None:
        self._envs: list[Env] = []
        with _typed():
            self._envs = _envs.build(env_fns, 0)
            self.description = describe(self._envs, first=0, learn_info=learn_info)
        if self.description.mismatch is not None:
            self.close(timeout=0)
            raise SpaceMismatchError(self.description.mismatch)

    def attach(
        self, layout: Layout, spec: PoolSpec, autoreset_mode: AutoresetMode, timeout: float | None
    ) -> Arrays:
        arrays = _segment.private(layout)
        self._slice = EnvSlice(
            self._envs, first=0, worker=0, spec=spec, arrays=arrays, autoreset_mode=autoreset_mode
        )
        return arrays

    def open_gate(
        self,
        pool_id: int,
        turns: Turns,
        in_order: bool,
        over: Sequence[NDArray[np.bool_]] | None,
        timeout: float | None,
    ) -> Gate:
        return PortableGate(len(turns.needs_reset))

    def send(self, operation: int, slots: NDArray[Any]) -> None:
        with _typed():
            (self._slice.step if operation == STEP else self._slice.reset)(slots)

    def wait(self, slots: NDArray[Any], count: int, patience: Patience) -> None:
        """All is done when `send` returns."""

    def first_done(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        return slots[:count]

    def request(
        self, name: str, arguments: Callable[[int, int], tuple[Any, ...]], *, timeout: float | None
    ) -> list[Any]:
        attribute = getattr(self._slice, name)
        try:
            with _typed():
                return [attribute(*arguments(0, len(self._envs))) if callable(attribute) else attribute]
        except EnvError as error:
            return [error]

    def close(self, timeout: float) -> None:
        envs, self._envs = self._envs, []
        with _typed():
            _envs.close(envs, 0)

    def kill(self) -> None:
        """There is nothing to kill."""


@contextmanager
def _typed() -> Generator[None]:
    try:
        yield
    except EnvFailure as failure:
        if isinstance(failure.__cause__, KeyboardInterrupt):
            raise failure.__cause__ from None
        raise _failures.to_error(_failures.report(failure), worker=None) from failure.__cause__
