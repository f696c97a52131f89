"""The parts of a backend: a place where the workers of a pool run, for `make(backend=...)`.

`Backend` starts a `WorkerGroup`. For worker processes that is `ProcessWorkers`, with a `Launcher` that starts
them; `LocalLauncher` does so on this machine. A backend without such processes implements `WorkerGroup`.
"""

from __future__ import annotations

from jaxvec._workers.base import Backend, Launcher, Process, WorkerGroup
from jaxvec._workers.process import LocalLauncher, ProcessWorkers
from jaxvec._workers.protocol import WorkerRecipe

__all__ = [
    "Backend",
    "Launcher",
    "LocalLauncher",
    "Process",
    "ProcessWorkers",
    "WorkerGroup",
    "WorkerRecipe",
]
