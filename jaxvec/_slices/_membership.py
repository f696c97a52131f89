"""Whether values are members of their space: for `check="strict"`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from jaxvec._memory._rows import InvalidValue
from jaxvec._spaces import KeyPath, format_path

_outline = reprlib.Repr()
_outline.maxother = 200  # characters, of arrays too


def checker(space: Space[Any], path: KeyPath) -> Callable[[Any], None]:
    """Returns `check(value)`, which raises `InvalidValue` and names the leaf that is not in its space.

    Values of another structure or shape pass: who writes them says better what is wrong.
    """
    if isinstance(space, spaces.Dict):
        children = {key: checker(child, (*path, key)) for key, child in space.spaces.items()}

        def check_dict(value: Any) -> None:
            for key, check in children.items():
                if isinstance(value, Mapping) and key in value:
                    check(value[key])

        return check_dict
    if isinstance(space, spaces.Tuple):
        places = [checker(child, (*path, place)) for place, child in enumerate(space.spaces)]

        def check_tuple(value: Any) -> None:
            if isinstance(value, (tuple, list)):
                for check, child in zip(places, value, strict=False):
                    check(child)

        return check_tuple

    def check_leaf(value: Any) -> None:
        has_dtype = hasattr(value, "dtype")
        if isinstance(space, spaces.Box):  # which warns of all but arrays
            try:
                value = np.asarray(value, None if has_dtype else space.dtype)
            except (TypeError, ValueError):
                return
        if not space.contains(value) and np.shape(value) == space.shape:
            dtype = f" ({value.dtype})" if has_dtype else ""
            raise InvalidValue(f"{format_path(path)}: {_outline.repr(value)}{dtype} is not in {space}")

    return check_leaf
