"""What an env has to return: checks that name what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxvec._memory._rows import InvalidValue


def split_reset(result: Any) -> tuple[Any, dict[str, Any]]:
    """Returns `(obs, info)`, if that is what `reset` has returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise InvalidValue(f"reset must return (obs, info), got {_outline(result)}")
    check_dict("reset", result[1])
    return result


def wrong_step(result: Any) -> InvalidValue:
    """Says what `step` has returned instead of what it must."""
    return InvalidValue(
        f"step must return (obs, reward, terminated, truncated, info), got {_outline(result)}"
    )


def check_dict(operation: str, info: Any) -> None:
    """Raises unless `info` is a dict."""
    if not isinstance(info, dict):
        raise InvalidValue(f"{operation} must return info as a dict, got {type(info).__name__}")


def conform_reward(reward: Any, shape: tuple[int, ...]) -> Any:
    """Returns a reward in float64 and this shape; `()` for a number."""
    value = np.asarray(reward)
    if shape == () and value.size == 1:
        value = value.reshape(())  # Gymnasium takes shape (1,) for a scalar too
    if value.shape != shape:
        raise InvalidValue(
            f"reward: expected shape {shape}, got {value.shape}; an env with vector rewards says so in "
            "a reward_space attribute"
        )
    if value.dtype.kind not in "biuf":
        raise InvalidValue(f"reward: expected a number, got {type(reward).__name__}")
    return float(value) if shape == () else value.astype(np.float64)


def _outline(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
