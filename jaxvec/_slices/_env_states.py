"""How the state of one env is taken, put back, and proved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

from jaxvec._slices._envs import Env

Functions: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], None]]  # get_state, set_state


def take(env: Env, functions: Functions | None = None) -> Any:
    """Returns a value that says all of the state of an env and its wrappers; shares nothing with it."""
    return copy.deepcopy(env)


def put(env: Env, state: Any, functions: Functions | None = None) -> Env:
    """Returns an env that goes on from a state: `env` itself, or a copy out of the state."""
    return copy.deepcopy(state)


def prove(env: Env, functions: Functions | None = None) -> None:
    """Raises `EnvStateError` unless an env goes on from its state as it would itself."""
