"""Spaces: how those of a port and of its original differ, random actions, and which ones were not played."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from itertools import count
from operator import getitem
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jaxvec._leaves import as_jax, fold_space
from jaxvec._ports.comparison import SpaceResult

NOT_DECLARED = "not declared"


def compare_spaces(port: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, SpaceResult]:
    """Compares spaces by name, of Gymnasium, gymnax or Navix, and properties: numbers, texts or `None`."""
    rows: dict[str, SpaceResult] = {}
    for name, space in original.items():
        parts = [_describe(port[name]), _describe(space)]
        for part in parts[1] | parts[0] or [""]:
            texts = [described.get(part, NOT_DECLARED) for described in parts]
            # Gymnasium leaves autoreset to vector envs, and an original may count its steps by itself.
            undeclared = not parts[0] or (name in ("autoreset", "time limit") and not parts[1])
            rows[f"{name} {part}".strip()] = SpaceResult(*texts, equal=texts[0] == texts[1] or undeclared)
    return rows


def _describe(space: Any) -> dict[str, str]:
    """Returns texts of the properties of a space; none if it has no bounds."""
    if isinstance(space, int | str):
        return {"": space if isinstance(space, str) else f"{space:,} steps"}
    if isinstance(children := getattr(space, "spaces", None), Mapping):
        return {
            f"{key} {part}": text
            for key, child in children.items()
            for part, text in _describe(child).items()
        }
    limits = _limits(space)
    if limits is None:
        return {}
    dtype = as_jax(np.dtype(space.dtype))
    low, high = (_bound(limit.astype(dtype)) for limit in limits)
    if not space.shape and dtype.kind in "iu":
        return {"values": f"{low} to {high}"}
    return {"shape": str(tuple(space.shape)), "dtype": dtype.name, "low": low, "high": high}


def _bound(limits: Any) -> str:
    """Returns one number if all are equal. Seven digits, as float32 has."""
    texts = [
        f"{limit:.7g}".replace("3.402823e+38", "inf")  # some ports write the largest float32 for no bound
        for limit in limits.flat[:1000].tolist()
    ]
    return texts[0] if len({*texts}) == 1 else f"[{', '.join(texts[:8])}{', …' if len(texts) > 8 else ''}]"


def _limits(space: Any) -> tuple[Any, Any] | None:
    """Returns the least and the largest value of each element, inclusive; `None` if a space has none."""
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, np.int64), np.ones(space.shape, np.int64)
    if hasattr(space, "n") or hasattr(space, "nvec"):
        start = np.asarray(getattr(space, "start", 0), np.int64)
        return start, start + np.asarray(getattr(space, "nvec", getattr(space, "n", 0))) - 1
    low = getattr(space, "low", getattr(space, "minimum", None))  # the latter is Navix's name
    high = getattr(space, "high", getattr(space, "maximum", None))
    if low is None or high is None:
        return None
    dtype = np.dtype(space.dtype) if np.dtype(space.dtype).kind == "f" else np.dtype(np.int64)
    low, high = (np.broadcast_to(np.asarray(limit), space.shape).astype(dtype) for limit in (low, high))
    return low, high


def random_action(space: Any, key: jax.Array, *_: Any, beyond: bool = False) -> Any:
    """Returns a random action of a space; of floats, one in ten at their bounds, or also beyond them."""
    numbers = count()
    return _fold(space, lambda part, path: _draw(part, jax.random.fold_in(key, next(numbers)), beyond))


def _draw(space: Any, key: jax.Array, beyond: bool) -> jax.Array:
    limits = _limits(space)
    if limits is None or not np.isfinite(limits).all():
        raise ValueError(
            f"there are no random actions for {space}; pass policy=lambda key, obs, state: ..., or, with "
            "actions=, give the port an action_space"
        )
    low, high = limits
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    if dtype.kind != "f":
        return jax.random.randint(key, space.shape, low, high + 1).astype(dtype)
    inside = jax.random.uniform(key, space.shape, dtype, low, high)
    margin = (high - low) / 4 if beyond else 0
    edges = [low, high, low - margin, high + margin]
    draws = jax.random.randint(jax.random.fold_in(key, 0), space.shape, 0, 40)
    return jnp.choose(draws, [*jnp.array(edges, dtype), inside], mode="clip")


def find_unplayed(space: Any, actions: Any, beyond: bool) -> str:
    """Returns the kinds of actions of a space that were not among these, or `""`."""
    names: list[str] = []
    _fold(space, lambda part, path: names.extend(_unplayed(part, path, actions, beyond)))
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _unplayed(space: Any, path: Any, actions: Any, beyond: bool) -> list[str]:
    place = f" of {'/'.join(map(str, path))}" if path else ""
    played = reduce(getitem, path, actions)
    limits = _limits(space)
    if limits is None:
        return [f"those{place}, which are not counted"]
    low, high = limits
    if low.dtype.kind == "f" or np.any(np.subtract(high, low, dtype=float) > _MAX_VALUES):
        cases = {
            "the lowest": played <= low,
            "the highest": played >= high,
            "beyond the bounds": (played < low) | (played > high) | (not beyond),
        }
        return [f"{name}{place}" for name, case in cases.items() if not case.any()]
    return [
        f"{value}{place}{list(index) or ''}"
        for index in np.ndindex(low.shape)
        for value in range(low[index], high[index] + 1)
        if not np.any(played[(..., *index)] == value)
    ]


_MAX_VALUES = 1000  # of an element of an action, to be counted one by one
_MAX_NAMED = 8  # actions that are named one by one
_fold = partial(
    fold_space,
    root=(),
    make_dict=lambda children, path: children,
    make_tuple=lambda children, path: tuple(children),
)
