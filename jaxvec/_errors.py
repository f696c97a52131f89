"""Every error that jaxvec raises: who failed, and whether the pool survives it."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ActionError",
    "EnvAttributeError",
    "EnvDataError",
    "EnvError",
    "EnvIdError",
    "EnvStateError",
    "EnvTimeoutError",
    "InFlightError",
    "JaxvecError",
    "NotPicklableError",
    "NotReadyError",
    "PoolBrokenError",
    "PoolClosedError",
    "ResetNeededError",
    "SpaceMismatchError",
    "StaleHandleError",
    "StaleStateError",
    "StateFileError",
    "UnsupportedSpaceError",
    "WorkerDiedError",
]


class JaxvecError(Exception):
    """Base of all errors that jaxvec raises on purpose.

    Attributes:
        others: what failed at the same time, where several envs or workers did: an error of each.
    """

    others: tuple[JaxvecError, ...] = ()

    def __reduce__(self) -> Any:
        # Programs run in others' processes, too, such as trials of Ray's Tune, and their errors travel: by
        # default `__init__` would be called with `args`, which is not all that it takes.
        return _make_again, (type(self), self.args, self.__dict__)


def _make_again(kind: type[JaxvecError], args: tuple[Any, ...], attributes: dict[str, Any]) -> JaxvecError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


# --- the caller's mistakes: nothing was stepped, the pool stays usable -----------------------


class UnsupportedSpaceError(JaxvecError, TypeError):
    """A space has a leaf that cannot become a fixed-shape array; names the leaf's path."""


class SpaceMismatchError(JaxvecError, ValueError):
    """Envs of one pool have different spaces; names the env."""


class ActionError(JaxvecError, ValueError):
    """An action has the wrong structure, shape or dtype; names the leaf."""


class ResetNeededError(JaxvecError, RuntimeError):
    """An env was stepped before its first reset or, without autoreset, after its episode's end."""


class EnvIdError(JaxvecError, ValueError):
    """A call names an env twice, or an env that the pool does not have."""


class NotPicklableError(JaxvecError, TypeError):
    """A function, value or option that is for the envs can't be pickled, and so not sent to their workers."""


class InFlightError(JaxvecError, RuntimeError):
    """A call names an env that was sent and not received yet, or `recv` needs more such envs."""


class NotReadyError(JaxvecError, TimeoutError):
    """A caller's own `timeout` passed; the envs are still in flight, and can be waited for again."""


class StaleHandleError(JaxvecError, ValueError):
    """A handle was used twice, after a step on the host, or with a foreign pool."""


class StaleStateError(JaxvecError, ValueError):
    """A saved state is gone: newer ones took its place, or its pool or worker ended; nothing was done."""


class StateFileError(JaxvecError, ValueError):
    """A file or an array holds no saved states, damaged ones, or those of other envs; names it."""


class PoolClosedError(JaxvecError, RuntimeError):
    """The pool was closed, or its `VectorEnv` was garbage collected."""


# --- failures of envs and workers: in `make`, `reset` and `step` they break the pool ----------


class EnvError(JaxvecError, RuntimeError):
    """An env's own code raised an exception.

    `__cause__` is the original exception wherever that could be pickled and built again.

    Attributes:
        env_id: index of the env in the pool.
        worker: index of the worker process, `None` for the serial backend.
        operation: `"constructor"`, `"reset"`, `"step"`, `"close"` or the name of the method called; for
            `"worker_init"`, `env_id` is the worker's first env.
        action: `repr` of the action that the env was given, shortened; `None` outside `step`.
        remote_traceback: the traceback's text as the worker saw it.
    """

    def __init__(
        self,
        message: str,
        *,
        env_id: int,
        worker: int | None,
        operation: str,
        action: str | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.worker = worker
        self.operation = operation
        self.action = action
        self.remote_traceback = remote_traceback


class EnvDataError(EnvError):
    """An env returned data of the wrong structure, shape or dtype; names env and leaf."""


class EnvAttributeError(EnvError, AttributeError):
    """An env has no attribute of the name that was asked for, or it can't be set."""


class EnvStateError(JaxvecError, RuntimeError):
    """The state of an env can't be saved, or is not put back as it was; says what to do.

    Attributes:
        env_id: index of the env in the pool; `None` where no env is named.
        worker: index of its worker process, `None` for the serial backend.
    """

    def __init__(self, message: str, *, env_id: int | None = None, worker: int | None = None) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.worker = worker


class WorkerDiedError(JaxvecError, RuntimeError):
    """A worker process ended by itself.

    Attributes:
        worker: index of the worker process.
        env_ids: the envs that it held.
        exitcode: its exit code, negative for a signal's number; `None` if it could not be read.
    """

    def __init__(self, message: str, *, worker: int, env_ids: tuple[int, ...], exitcode: int | None) -> None:
        super().__init__(message)
        self.worker = worker
        self.env_ids = env_ids
        self.exitcode = exitcode


class EnvTimeoutError(JaxvecError, TimeoutError):
    """Envs did not finish in time.

    Attributes:
        env_ids: the late workers' envs that were running, or waiting behind a running one, when time was up.
    """

    def __init__(self, message: str, *, env_ids: tuple[int, ...]) -> None:
        super().__init__(message)
        self.env_ids = env_ids


class PoolBrokenError(JaxvecError, RuntimeError):
    """The pool failed earlier; `__cause__` is the first failure. Close the pool and make another."""
