"""What users pass to the verbs of the face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def split(action: Any, env_id: Any) -> tuple[Any, Any]:
    """Takes apart an action that is a dict of `action` and `env_id`, as EnvPool allows."""
    if isinstance(action, Mapping) and set(action) == {"action", "env_id"} and env_id is None:
        return action["action"], action["env_id"]
    return action, env_id
