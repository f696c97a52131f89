"""An env's failure as plain text and bytes that always travel, and the typed error made of it.

Exceptions don't travel well: some can't be pickled, some not unpickled, some fail in `__str__`. So
the worker sends their text, and the pickled original only as a cause that may be missing.
"""

from __future__ import annotations

import pickle
import reprlib
import traceback
from dataclasses import dataclass
from types import TracebackType

from jaxvec._envs.envs import AttributeFailure, EnvFailure
from jaxvec._errors import EnvAttributeError, EnvDataError, EnvError, EnvStateError
from jaxvec._memory.rows import InvalidValue
from jaxvec._util import dumps

_MAX_MESSAGE = 4_000  # characters
_MAX_TRACEBACK = 20_000
_MAX_PICKLE = 1 << 20  # bytes


@dataclass(frozen=True)
class Report:
    """What a worker says of a failed env."""

    env_id: int
    operation: str
    action: str | None
    kind: str  # the exception's type
    message: str
    traceback: str
    pickled: bytes | None
    error: type[EnvError] | type[EnvStateError]


def report(failure: EnvFailure) -> Report:
    """Makes a report of `failure` and its cause; never raises."""
    error = failure.__cause__ or failure
    kind = type(error)
    told_as = EnvDataError if isinstance(error, InvalidValue) else EnvError
    if isinstance(error, EnvStateError):
        told_as = EnvStateError
    return Report(
        env_id=failure.env_id,
        operation=failure.operation,
        action=None if failure.action is None else _shorten(_describe(failure.action), 200),
        kind=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        message=_shorten(_text(error), _MAX_MESSAGE),
        traceback=_shorten(_traceback(error), _MAX_TRACEBACK),
        pickled=_pickle(error),
        error=EnvAttributeError if isinstance(failure, AttributeFailure) else told_as,
    )


def to_error(said: Report, *, worker: int | None) -> EnvError | EnvStateError:
    """Makes the error that the user gets, with the original exception as its cause if it travelled."""
    where = f"env {said.env_id}" + ("" if worker is None else f" (worker {worker})")
    if said.operation == "worker_init":
        where = f"worker {worker}"
    if issubclass(said.error, EnvStateError):
        return said.error(f"{said.operation} of {where}: {said.message}", env_id=said.env_id, worker=worker)
    given = "" if said.action is None else f" with action {said.action}"
    if said.error is EnvDataError:
        message = f"{where} returned wrong data from {said.operation}{given}: {said.message}"
    else:
        message = (
            f"{where} raised {said.kind} in {said.operation}{given}: {said.message}\n\n"
            f"The env's own traceback:\n{said.traceback}"
        )
    error = said.error(
        message,
        env_id=said.env_id,
        worker=worker,
        operation=said.operation,
        action=said.action,
        remote_traceback=said.traceback,
    )
    error.__cause__ = _unpickle(said.pickled)
    return error


def describe_action(action: object) -> str:
    """Returns a short `repr` of an action."""
    return _shorten(_describe(action), 200)


def _describe(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return reprlib.repr(value)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:
        return f"<its __str__ raised {type(second).__name__}>"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, _in_env(error.__traceback__)))
    except BaseException as second:
        return f"<formatting the traceback raised {type(second).__name__}>"


def _in_env(trace: TracebackType | None) -> TracebackType | None:
    """Skips our own frames, down to where the env's code begins."""
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__name__", "").startswith("jaxvec._"):
        inner = inner.tb_next
    return inner or trace


def _shorten(text: str, limit: int) -> str:
    # On its way through a program's error, a NUL would end the text, and half a surrogate pair the process.
    text = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters left out … {text[-half:]}"


def _pickle(error: BaseException) -> bytes | None:
    if isinstance(error, InvalidValue):
        return None
    try:
        data: bytes = dumps(error)
    except BaseException:
        return None
    return data if len(data) <= _MAX_PICKLE else None


def _unpickle(data: bytes | None) -> BaseException | None:
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except BaseException:
        return None
    return error if isinstance(error, BaseException) else None
