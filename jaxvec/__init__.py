"""jaxvec steps any Python RL environment from inside `jax.jit`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxvec._env_state import EnvState
from jaxvec._errors import (
    ActionError,
    ActorDiedError,
    EnvAttributeError,
    EnvDataError,
    EnvError,
    EnvIdError,
    EnvStateError,
    EnvTimeoutError,
    InFlightError,
    JaxvecError,
    NotPicklableError,
    NotReadyError,
    PoolBrokenError,
    PoolClosedError,
    ResetNeededError,
    RolloutError,
    SpaceMismatchError,
    StaleHandleError,
    StaleStateError,
    StateFileError,
    UnsupportedSpaceError,
    WorkerDiedError,
)
from jaxvec._ray import Ray
from jaxvec._restart import Restart
from jaxvec._stats import Stats, WorkerStats
from jaxvec._timestep import TimeStep

if TYPE_CHECKING:
    from jaxvec import adapters, normalize, testing
    from jaxvec._rollouts._rollouts import Rollout, Rollouts, RolloutStats
    from jaxvec._tile_images import tile_images
    from jaxvec._vector_env import VectorEnv
    from jaxvec.callbacks._first_ready import recv, send
    from jaxvec.callbacks._functional import reset, step
    from jaxvec.callbacks._handle import Handle
    from jaxvec.callbacks._make import make
    from jaxvec.callbacks._profile import merge_traces
    from jaxvec.callbacks._remote import call, get_attr
    from jaxvec.callbacks._saved import restore, save, simulate

__version__ = "0.1.0"

__all__ = [
    "ActionError",
    "ActorDiedError",
    "EnvAttributeError",
    "EnvDataError",
    "EnvError",
    "EnvIdError",
    "EnvState",
    "EnvStateError",
    "EnvTimeoutError",
    "Handle",
    "InFlightError",
    "JaxvecError",
    "NotPicklableError",
    "NotReadyError",
    "PoolBrokenError",
    "PoolClosedError",
    "Ray",
    "ResetNeededError",
    "Restart",
    "Rollout",
    "RolloutError",
    "RolloutStats",
    "Rollouts",
    "SpaceMismatchError",
    "StaleHandleError",
    "StaleStateError",
    "StateFileError",
    "Stats",
    "TimeStep",
    "UnsupportedSpaceError",
    "VectorEnv",
    "WorkerDiedError",
    "WorkerStats",
    "adapters",
    "call",
    "get_attr",
    "make",
    "merge_traces",
    "normalize",
    "recv",
    "reset",
    "restore",
    "save",
    "send",
    "simulate",
    "step",
    "testing",
    "tile_images",
]

# Loaded on first use: workers import this package too, and must never import jax.
_LAZY = {
    "Handle": "jaxvec.callbacks._handle",
    "Rollout": "jaxvec._rollouts._rollouts",
    "RolloutStats": "jaxvec._rollouts._rollouts",
    "Rollouts": "jaxvec._rollouts._rollouts",
    "VectorEnv": "jaxvec._vector_env",
    "call": "jaxvec.callbacks._remote",
    "get_attr": "jaxvec.callbacks._remote",
    "make": "jaxvec.callbacks._make",
    "merge_traces": "jaxvec.callbacks._profile",
    "recv": "jaxvec.callbacks._first_ready",
    "reset": "jaxvec.callbacks._functional",
    "restore": "jaxvec.callbacks._saved",
    "save": "jaxvec.callbacks._saved",
    "send": "jaxvec.callbacks._first_ready",
    "simulate": "jaxvec.callbacks._saved",
    "step": "jaxvec.callbacks._functional",
    "tile_images": "jaxvec._tile_images",
}


def __getattr__(name: str) -> Any:
    if name in ("adapters", "normalize", "testing"):
        return importlib.import_module(f"jaxvec.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxvec' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
