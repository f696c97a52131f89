"""Adapters of other kinds of envs to Gymnasium, and wrappers of single envs. None imports JAX."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxvec.adapters import dm_env, mlagents, pettingzoo, recording, replay

__all__ = ["dm_env", "mlagents", "pettingzoo", "recording", "replay"]


def __getattr__(name: str) -> ModuleType:
    # Imported on first use, because each module needs the library that it adapts.
    if name not in __all__:
        raise AttributeError(f"module 'jaxvec.adapters' has no attribute {name!r}")
    return importlib.import_module(f"jaxvec.adapters.{name}")
