"""Turns jaxvec's errors into those that Gymnasium's vector envs raise."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

from gymnasium import logger
from gymnasium.error import ClosedEnvironmentError

from jaxvec._errors import EnvDataError, EnvError, PoolClosedError


@contextmanager
def as_gymnasium(name: str) -> Generator[None]:
    """Raises an env's own exception, as Gymnasium does; `name` is that of the class."""
    try:
        yield
    except PoolClosedError as error:
        raise ClosedEnvironmentError(f"Trying to operate on `{name}`, after a call to `close()`.") from error
    except EnvDataError:
        raise  # wrong data has no exception of the env's own
    except EnvError as error:
        raise_original(error)


def raise_original(error: EnvError) -> NoReturn:
    """Logs where an env failed, and raises its exception; ours, if that did not travel."""
    if error.worker is not None:
        logger.error(f"Received the following error from Worker-{error.env_id} - Shutting it down")
        logger.error(error.remote_traceback)
        logger.error("Raising the last exception back to the main process.")
    if error.__cause__ is None:
        raise error
    raise error.__cause__ from error
