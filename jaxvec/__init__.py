"""Run any Gymnasium (Python) environment inside `jax.jit`: a vectorised env pool for JAX agents."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxvec import _backends, _errors, _extension, _extensions
from jaxvec._errors import *  # noqa: F403 - its `__all__` has the public errors
from jaxvec._options import Recycle, Restart, States, Timeouts, Workers
from jaxvec._results import EnvState, TimeStep
from jaxvec._settings import config
from jaxvec._stats import Stats

# What the core does not import itself.
_extension.extensions += [
    _extensions.make_states,
    _extensions.make_spare_envs,
    _extensions.make_recycling,
    _extensions.make_module_values,
]
_extension.slices.append(_extensions.choose_batch_slice)
_extension.tracer = _extensions.trace_pool
_extension.interpreters.append(_backends.make_other_python)

if TYPE_CHECKING:
    from jaxvec import adapters as adapters
    from jaxvec import backends as backends
    from jaxvec import logging as logging
    from jaxvec import normalize as normalize
    from jaxvec import ports as ports
    from jaxvec import spaces as spaces
    from jaxvec import testing as testing
    from jaxvec._backends.ray.rollouts import Rollout, Rollouts
    from jaxvec._vector_env import VectorEnv
    from jaxvec._workers.base import Backend
    from jaxvec.callbacks._functions import call, get_attr, recv, reset, restore, save, send, simulate, step
    from jaxvec.callbacks._handle import Handle
    from jaxvec.callbacks._make import make

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "EnvState",
    "Handle",
    "Recycle",
    "Restart",
    "Rollout",
    "Rollouts",
    "States",
    "Stats",
    "TimeStep",
    "Timeouts",
    "VectorEnv",
    "Workers",
    "call",
    "config",
    "get_attr",
    "make",
    "recv",
    "reset",
    "restore",
    "save",
    "send",
    "simulate",
    "step",
]
__all__ += _errors.__all__

_MODULES = (
    "adapters",
    "backends",
    "compat",
    "datasets",
    "logging",
    "normalize",
    "ports",
    "spaces",
    "testing",
)

# Imported on first use, because workers import this package, too, and must never import jax.
_LAZY = {
    "Backend": "_workers.base",
    "Handle": "callbacks._handle",
    "Rollout": "_backends.ray.rollouts",
    "Rollouts": "_backends.ray.rollouts",
    "VectorEnv": "_vector_env",
    "make": "callbacks._make",
    **dict.fromkeys(("call", "get_attr", "recv", "reset", "restore"), "callbacks._functions"),
    **dict.fromkeys(("save", "send", "simulate", "step"), "callbacks._functions"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"jaxvec.{name}")
    if name not in _LAZY:
        hint = "; use jaxvec.make(env, num_envs)" if name.startswith("make") or "VectorEnv" in name else ""
        raise AttributeError(f"module 'jaxvec' has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(f"jaxvec.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
