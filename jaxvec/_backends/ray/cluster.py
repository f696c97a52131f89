"""The connection of this process to a Ray cluster. Ray is imported only when `connect` is called."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import Any

from jaxvec.adapters._packages import install_command, optional_imports


def connect() -> Any:
    """Returns the module `ray`, after a call of `ray.init` if this process is not connected to a cluster."""
    with optional_imports("a Ray cluster", "ray"):
        _version()
        ray: Any = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init()
    return ray


def _version() -> str:
    """Returns Ray's version. Unlike `import ray`, this fails for a mere folder with the name `ray`."""
    return importlib.metadata.version("ray")


def describe() -> str:
    """Describes Ray for `jaxvec doctor`; starts nothing."""
    try:
        where = os.environ.get("RAY_ADDRESS", "found on this machine, or started there")
        return f"ready: Ray {_version()}; cluster: {where}"
    except ImportError:
        return f"off: Ray is not installed: {install_command('ray')}"
