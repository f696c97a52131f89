"""The exceptions of jaxvec, grouped by their effect on the pool. `docs/troubleshooting.md` explains them."""

from __future__ import annotations

import copyreg
from typing import Any

__all__ = [
    "ActionError",
    "ActorDiedError",
    "EnvAttributeError",
    "EnvDataError",
    "EnvError",
    "EnvIdError",
    "EnvStateError",
    "EnvTimeoutError",
    "JaxvecError",
    "NotPicklableError",
    "NotReadyError",
    "PendingEnvError",
    "PoolBrokenError",
    "PoolClosedError",
    "ResetNeededError",
    "RolloutError",
    "SpaceMismatchError",
    "StaleHandleError",
    "StaleStateError",
    "StateFileError",
    "UnsupportedSpaceError",
    "WorkerDiedError",
]


class JaxvecError(Exception):
    """The base class of jaxvec's errors.

    Attributes:
        others: Errors of other envs or workers that failed at the same time, one each.
    """

    others: tuple[JaxvecError, ...] = ()

    def __reduce__(self) -> Any:
        # Errors are sent between processes, for example by Ray Tune. The default would call `__init__` with
        # `args` only, without its keyword arguments; `__newobj__` calls `__new__` alone, and an OSError, such
        # as TimeoutError, then takes no `args` from it.
        new: Any = vars(copyreg)["__newobj__"]
        return new, (type(self),), {"args": self.args, **self.__dict__}


# --- Errors of the caller: nothing was stepped, and the pool stays usable -----------------------


class UnsupportedSpaceError(JaxvecError, TypeError):
    """A space with a leaf that can't become arrays of fixed shape. The message has the leaf's path."""


class SpaceMismatchError(JaxvecError, ValueError):
    """Spaces within one pool that differ in more than bounds of observations. The message names the env."""


class ActionError(JaxvecError, ValueError):
    """An action of the wrong structure, shape, dtype or range. The message names the leaf."""


class ResetNeededError(JaxvecError, RuntimeError):
    """A step of an env before its first reset or, without autoreset, after the end of its episode."""


class EnvIdError(JaxvecError, ValueError):
    """An env index that is duplicated or out of range, or a step of some envs where batched envs need all."""


class NotPicklableError(JaxvecError, TypeError):
    """A function, value or option that can't be pickled, so it can't be sent to the workers."""


class PendingEnvError(JaxvecError, RuntimeError):
    """A call for a pending env, or a `recv` of more envs than are pending."""


class NotReadyError(JaxvecError, TimeoutError):
    """The end of the caller's own `timeout`. The envs are still pending; call `recv` again."""


class StaleHandleError(JaxvecError, ValueError):
    """A handle that was used twice, after a step on the host, or with another pool."""


class StaleStateError(JaxvecError, ValueError):
    """A saved state that newer states have replaced, or that was lost with its pool or worker."""


class StateFileError(JaxvecError, ValueError):
    """A file or array without saved states, with damaged ones, or with those of other envs."""


class PoolClosedError(JaxvecError, RuntimeError):
    """A call of a pool that was closed, also by the garbage collection of its `VectorEnv`."""


# --- Failures of envs and workers: in `make`, `reset` and `step` they break the pool ------------


class EnvError(JaxvecError, RuntimeError):
    """An exception in the code of an env.

    `__cause__` is the original exception if it could be pickled and rebuilt.

    Attributes:
        env_id: Index of the env in the pool; for the operation `"worker_init"`, of the worker's first env.
        worker: Index of the worker process; `None` for the serial backend.
        operation: `"constructor"`, `"worker_init"`, `"reset"`, `"step"`, `"close"` or the name of a
            method or attribute.
        action: Shortened `repr` of the env's action; `None` outside `step`.
        remote_traceback: Text of the traceback in the worker.
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
    """Data of the wrong structure, shape or dtype from an env. The message names env and leaf."""


class EnvAttributeError(EnvError, AttributeError):
    """An attribute that an env does not have, or that can't be set."""


class EnvStateError(JaxvecError, RuntimeError):
    """A state that can't be saved, or a restored env that does not reproduce the original.

    Attributes:
        env_id: Index of the env in the pool; `None` if the error names no env.
        worker: Index of its worker process; `None` for the serial backend.
    """

    def __init__(self, message: str, *, env_id: int | None = None, worker: int | None = None) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.worker = worker


class WorkerDiedError(JaxvecError, RuntimeError):
    """The unexpected end of a worker process.

    Attributes:
        worker: Index of the worker process.
        env_ids: Indices of the worker's envs.
        exitcode: Exit code of the process; negative for a signal's number, `None` if it could not be read.
    """

    def __init__(self, message: str, *, worker: int, env_ids: tuple[int, ...], exitcode: int | None) -> None:
        super().__init__(message)
        self.worker = worker
        self.env_ids = env_ids
        self.exitcode = exitcode


class EnvTimeoutError(JaxvecError, TimeoutError):
    """Envs that did not finish within the pool's timeout.

    Attributes:
        env_ids: Indices of the late workers' envs that were running, or queued behind a running one.
    """

    def __init__(self, message: str, *, env_ids: tuple[int, ...]) -> None:
        super().__init__(message)
        self.env_ids = env_ids


class PoolBrokenError(JaxvecError, RuntimeError):
    """A call of a pool that failed before; close it and make a new one. `__cause__` is the first failure."""


# --- Failures of rollout actors: they break the `Rollouts` ---------------------------------------


class RolloutError(JaxvecError, RuntimeError):
    """An exception of an actor's rollout, of its envs, or of `make` in the actor.

    `__cause__` is the original exception if it could be pickled and rebuilt.

    Attributes:
        actor: Index of the actor.
        node: Description of the actor's node.
        remote_traceback: Text of the traceback in the actor.
    """

    def __init__(self, message: str, *, actor: int, node: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.actor = actor
        self.node = node
        self.remote_traceback = remote_traceback


class ActorDiedError(JaxvecError, RuntimeError):
    """The loss of a rollout actor, alone or with its node, or an actor that was not ready in time.

    Attributes:
        actor: Index of the actor.
        node: Description of the actor's node.
    """

    def __init__(self, message: str, *, actor: int, node: str) -> None:
        super().__init__(message)
        self.actor = actor
        self.node = node
