"""Where two snapshots, or two results of an env, differ first: bit for bit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from jaxvec._slices._snapshots import KEPT, Node


def difference(one: Any, other: Any, seen: dict[Any, Any] | None = None) -> str | None:
    """Returns the way to what differs, empty for the whole; `None` if nothing does.

    What is one object in one of them has to be one in the other.
    """
    if one is other or one is KEPT or other is KEPT:
        return None
    if type(one) is not type(other):
        return ""
    seen = {} if seen is None else seen
    if isinstance(one, Node):
        mine, its = seen.setdefault(id(one), other), seen.setdefault(-id(other), one)
        if mine is not other or its is not one:
            return " (another object)"
        if (id(one), True) in seen:
            return None
        seen[id(one), True] = True
    match one:
        case float():
            return None if struct.pack("d", one) == struct.pack("d", other) else ""
        case np.ndarray():
            same = (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
            return None if same else ""
        case np.generic():
            return None if one.tobytes() == other.tobytes() else ""
        case dict():
            if one.keys() != other.keys():
                return f"[{next(iter(one.keys() ^ other.keys()))!r}]"
            return _first(((f"[{key!r}]", one[key], other[key]) for key in one), seen)
        case list() | tuple():
            if len(one) != len(other):
                return ""
            pairs = zip(one, other, strict=True)
            return _first(((f"[{number}]", *pair) for number, pair in enumerate(pairs)), seen)
        case Node():
            return _first(one.parts(other), seen)
        case _:
            try:
                return None if bool(one == other) else ""
            except Exception:
                return None  # it can't be compared


def _first(parts: Any, seen: dict[Any, Any]) -> str | None:
    for name, one, other in parts:
        found = difference(one, other, seen)
        if found is not None:
            return name + found
    return None
