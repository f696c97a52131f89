"""Compares the spaces of a port, which may be those of Gymnasium, gymnax or Navix, with the original's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxvec._leaves import as_jax
from jaxvec._ports.comparison import SpaceResult

NOT_DECLARED = "not declared"


def compare_spaces(port: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, SpaceResult]:
    """Compares spaces by name, and further properties, which are numbers, texts or `None`."""
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
    if hasattr(space, "n") and not space.shape:
        start = int(getattr(space, "start", 0))
        return {"values": f"{start} to {start + int(space.n) - 1}"}
    low = getattr(space, "low", getattr(space, "minimum", None))  # the latter is Navix's name
    high = getattr(space, "high", getattr(space, "maximum", None))
    if low is None or high is None:
        return {}
    dtype = as_jax(np.dtype(space.dtype))
    low = _bound(low, space.shape, dtype)
    high = _bound(high, space.shape, dtype)
    if not space.shape and dtype.kind in "iu":
        return {"values": f"{low} to {high}"}
    return {"shape": str(tuple(space.shape)), "dtype": dtype.name, "low": low, "high": high}


def _bound(value: Any, shape: tuple[int, ...], dtype: Any) -> str:
    """Returns one number if all are equal. Seven digits, as float32 has."""
    texts = [
        f"{bound:.7g}".replace("3.402823e+38", "inf")  # some ports write the largest float32 for no bound
        for bound in np.broadcast_to(np.asarray(value).astype(dtype), shape).flat[:1000].tolist()
    ]
    return texts[0] if len({*texts}) == 1 else f"[{', '.join(texts[:8])}{', …' if len(texts) > 8 else ''}]"
