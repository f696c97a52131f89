"""What an env has to return: checks that name what is wrong."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium
import numpy as np

from jaxvec._memory._rows import InvalidValue
from jaxvec._slices._envs import OLD_GYM


def split_reset(result: Any) -> tuple[Any, dict[str, Any]]:
    """Returns `(obs, info)`, if that is what `reset` has returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise InvalidValue(f"reset must return (obs, info), got {_outline(result)}")
    check_dict("reset", result[1])
    return result


def explain_reset(error: TypeError, env: Any) -> None:
    """Says more of what `reset` has raised, if it does not take what it is given."""
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    for layer in layers:
        try:
            inspect.signature(layer.reset).bind(seed=None, options=None)
        except (TypeError, ValueError):
            error.add_note(
                f"{type(layer).__name__}.reset has to take what Gymnasium's envs take: "
                f"reset(self, *, seed=None, options=None). {OLD_GYM}"
            )
            return


def wrong_step(result: Any) -> InvalidValue:
    """Says what `step` has returned instead of what it must."""
    return InvalidValue(
        f"step must return (obs, reward, terminated, truncated, info), got {_outline(result)}"
        + (f". {OLD_GYM}" if isinstance(result, tuple) and len(result) == 4 else "")
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
