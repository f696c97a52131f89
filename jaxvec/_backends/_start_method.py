"""How workers of this machine are started: as forks of a fork server, or as interpreters of their own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from jaxvec._backends import _fork
from jaxvec._backends._fork import Forker
from jaxvec._backends._forkserver import ThreadsError
from jaxvec._backends._launcher import Process, Slices
from jaxvec._backends._spawn import Spawner
from jaxvec._handoff._channel import Channel

_logger = logging.getLogger("jaxvec")


@dataclass(frozen=True)
class StartMethod:
    """Of the workers of a pool.

    Attributes:
        name: `"forkserver"`, `"spawn"`, or `"auto"` for the first that works here.
        worker_env: changes to their environment variables; `None` unsets one.
        preload: modules that the fork server imports.
        timeout: seconds that the start of one may take; `None` for ever.
    """

    name: str
    worker_env: Mapping[str, str | None]
    preload: tuple[str, ...]
    timeout: float | None


def choose(name: str) -> str:
    """Returns `"forkserver"` or `"spawn"`.

    Raises:
        RuntimeError: `"forkserver"` was asked for and can't be had; says why.
    """
    reason = _fork.reason_unavailable()
    if name == "forkserver" and reason is not None:
        raise RuntimeError(f'start_method="forkserver" is not possible here: {reason}')
    if name == "auto":
        return "forkserver" if reason is None else "spawn"
    return name


class LocalLauncher:
    """Starts workers on this machine; see `Launcher`."""

    at_sockets = False

    def __init__(self, method: StartMethod) -> None:
        """Prepares to start workers; raises as `choose`."""
        self._method = method
        self._launcher: Spawner | Forker = Spawner(method.worker_env)
        if choose(method.name) == "forkserver":
            self._launcher = Forker(method.worker_env, method.preload, method.timeout)

    def partition(self, slices: Slices) -> Slices:
        return slices

    def launch(self, worker: int) -> tuple[Process, Channel]:
        try:
            return self._launcher.launch(worker)
        except ThreadsError as error:
            if self._method.name != "auto" or self._method.preload:
                raise ThreadsError(
                    f"the fork server can't be used: {error}, and forking threads is not safe; use "
                    'start_method="spawn", or leave the module that starts them out of preload'
                ) from error
            _logger.info("workers are started as interpreters of their own: %s", error)
            self._launcher = Spawner(self._method.worker_env)
            return self._launcher.launch(worker)

    def close(self) -> None:
        self._launcher.close()
