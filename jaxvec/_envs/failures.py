"""Failures of envs as reports that any process can read, and the typed errors that are made from them.

Exceptions can't be sent reliably: some can't be pickled or unpickled, some raise in `__str__`. So a worker
sends their text in a `Report`, with the pickled original as an optional cause.
"""

from __future__ import annotations

import difflib
import pickle
import reprlib
import traceback
from dataclasses import dataclass

from jaxvec._envs.envs import AttributeFailure, EnvFailure
from jaxvec._errors import ActionError, EnvAttributeError, EnvDataError, EnvError, EnvStateError
from jaxvec._memory.rows import InvalidValue
from jaxvec._script import lacks
from jaxvec._util import dumps

_MAX_MESSAGE = 4_000  # characters
_MAX_TRACEBACK = 20_000  # characters
_MAX_ACTION = 200  # characters
_MAX_PICKLE = 1 << 20  # bytes

_MISSING_ADVICE = (
    "In a worker, __main__ has only those objects of the script or notebook that the code of its envs names. "
    "If the missing one is defined there, move it to a module of its own, and import that"
)


@dataclass(frozen=True)
class Report:
    """The report of a failed env, which pickles in any case."""

    env_id: int
    operation: str  # or the name of a missing attribute
    action: str | None  # the `repr` of a failed step's action
    kind: str  # the type of the exception
    message: str  # its text; for an `EnvAttributeError`, the end of the message
    traceback: str
    pickled: bytes | None  # the exception; `None` if it can't be pickled or is too large
    error: type[EnvError] | type[EnvStateError]  # the class of the error that the user gets
    is_action: bool = False  # True if the env was not called, because its action is invalid
    advice: str = ""  # for the end of the error's text


def report(failure: EnvFailure) -> Report:
    """Makes a report of `failure` and its cause; never raises."""
    error = failure.__cause__ or failure
    kind = type(error)
    message = _text(error)
    error_type = EnvError
    if isinstance(error, InvalidValue):
        error_type = EnvDataError
    elif isinstance(error, EnvStateError):
        error_type = EnvStateError
    if isinstance(failure, AttributeFailure):
        message = _explain_attribute(error, failure.operation)
        error_type = EnvAttributeError
    return Report(
        env_id=failure.env_id,
        operation=failure.operation,
        action=None if failure.action is None else describe_action(failure.action),
        kind=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        message=_shorten(message, _MAX_MESSAGE),
        traceback=_shorten(_traceback(error), _MAX_TRACEBACK),
        pickled=_pickle(error),
        error=error_type,
        is_action=isinstance(error, ActionError) and failure.operation == "step",
        advice=failure.advice or _missing_advice(error),
    )


def to_error(report: Report, *, worker: int | None) -> EnvError | EnvStateError:
    """Makes the error that the user gets. Its cause is the original exception if that could be pickled."""
    operation = report.operation
    place = "" if worker is None else f"worker {worker}"
    where = f"env {report.env_id}" + (place and f" ({place})")
    if operation == "worker_init":
        where = place
    if issubclass(report.error, EnvStateError):
        return report.error(f"{operation} of {where}: {report.message}", env_id=report.env_id, worker=worker)
    with_action = "" if report.action is None else f" with action {report.action}"
    if report.error is EnvDataError:
        message = f"{where} returned wrong data from {operation}{with_action}: {report.message}"
    elif report.is_action:
        message = f"{where} was not stepped: {report.message}"
    elif report.error is EnvAttributeError:
        what = (
            f"{operation} failed" if operation.startswith("set_attr(") else f"no env attribute {operation!r}"
        )
        message = f"{what} (env {report.env_id}{place and f', {place}'}){report.message}"
    else:
        message = (
            f"{where} raised {report.kind} in {operation}{with_action}: {report.message}\n\n"
            f"The env's own traceback:\n{report.traceback}"
        )
    error = report.error(
        "\n".join(filter(None, (message, report.advice))),
        env_id=report.env_id,
        worker=worker,
        operation=operation,
        action=report.action,
        remote_traceback=report.traceback,
    )
    error.__cause__ = _unpickle(report.pickled)
    return error


def describe_action(action: object) -> str:
    try:
        return _shorten(repr(action), _MAX_ACTION)
    except Exception:
        return _shorten(reprlib.repr(action), _MAX_ACTION)


def _explain_attribute(error: BaseException, name: str) -> str:
    """Returns the end of the message for a missing attribute, with a suggestion if a similar name exists."""
    # Gymnasium's wrappers raise an error of their own for each layer; the env's own error comes first.
    while isinstance(error.__cause__, AttributeError):
        error = error.__cause__
    missing = getattr(error, "name", None)
    try:
        similar = difflib.get_close_matches(missing, dir(error.obj), 1) if missing else []  # pyright: ignore
    except Exception:  # `dir` calls the env's code
        similar = []
    if missing in similar:  # the attribute exists: its property raised
        return f": {_text(error)}"
    # The first words of the message name the attribute already, unless it is a part of a dotted name.
    text = "" if missing == name else f": {_text(error)}"
    return f"{text}. Did you mean {similar[0]!r}?" if similar else text


def _missing_advice(error: BaseException) -> str:
    try:
        return _MISSING_ADVICE if lacks(error) else ""
    except BaseException:  # of its `__str__`
        return ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:
        return f"<its __str__ raised {type(second).__name__}>"


def _traceback(error: BaseException) -> str:
    """Formats the traceback without jaxvec's outer frames, but the last one."""
    inner = error.__traceback__
    while inner is not None and inner.tb_next is not None:
        if not inner.tb_frame.f_globals.get("__name__", "").startswith("jaxvec._"):
            break
        inner = inner.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, inner))
    except BaseException as second:
        return f"<formatting the traceback raised {type(second).__name__}>"


def _shorten(text: str, limit: int) -> str:
    # XLA would cut an error at a NUL, and half of a surrogate pair would end the process (jax 0.7.2 to
    # 0.12.0.1).
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
    try:
        error = None if data is None else pickle.loads(data)
    except BaseException:
        return None
    return error if isinstance(error, BaseException) else None
