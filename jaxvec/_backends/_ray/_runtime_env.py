"""What nodes have to provide: some of it Ray takes when this process connects, the rest with each actor."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping
from typing import Any


def check(runtime_env: Mapping[str, Any]) -> None:
    """Checks a runtime environment as Ray does, and that Ray knows all of it, which it does not check.

    Raises:
        ValueError, TypeError: Ray can't provide that; says why.
    """
    known_to: Any = importlib.import_module("ray.runtime_env").RuntimeEnv
    known = {*inspect.signature(known_to).parameters, *known_to.known_fields}
    unknown = sorted(set(runtime_env) - known)
    if unknown and "RAY_RUNTIME_ENV_PLUGINS" not in os.environ:  # these know more
        names = ", ".join(sorted(name for name in known - {"kwargs"} if not name.startswith("_")))
        raise ValueError(f"runtime_env has no {', '.join(map(repr, unknown))}; Ray knows {names}")
    try:
        known_to(**runtime_env)
    except (ValueError, TypeError) as error:
        raise type(error)(f"runtime_env: {error}") from error


def split(runtime_env: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what Ray takes when a process connects, which are directories here, and the rest."""
    here: dict[str, Any] = {}
    if _is_path(runtime_env.get("working_dir")):
        here["working_dir"] = os.path.abspath(runtime_env["working_dir"])
        if "excludes" in runtime_env:
            here["excludes"] = runtime_env["excludes"]
    modules = runtime_env.get("py_modules") or ()
    if any(map(_is_path, modules)):
        here["py_modules"] = [os.path.abspath(each) if _is_path(each) else each for each in modules]
    return here, {name: value for name, value in runtime_env.items() if name not in here}


def _is_path(place: Any) -> bool:
    return isinstance(place, str) and "://" not in place
