"""Other kinds of env as Gymnasium envs, or with a state, in a module each; none of them imports jax."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxvec.adapters import dm_env, mlagents, pettingzoo, replay

__all__ = ["dm_env", "mlagents", "pettingzoo", "replay"]


def __getattr__(name: str) -> ModuleType:
    # Loaded on first use: each needs the library that it adapts.
    if name not in __all__:
        raise AttributeError(f"module 'jaxvec.adapters' has no attribute {name!r}")
    return importlib.import_module(f"jaxvec.adapters.{name}")
