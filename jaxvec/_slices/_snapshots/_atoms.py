"""What a snapshot holds as it is, because it can't change."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from jaxvec._slices._snapshots._core import TakesParts

# What can't change, or is the same wherever it is: classes, functions and modules too, as in `copy.deepcopy`.
ATOMS: set[type] = {
    *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, type),
    *(types.ModuleType, types.CodeType, property, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.MappingProxyType),
    *(kind for kind in vars(np).values() if isinstance(kind, type) and issubclass(kind, np.generic)),
} - {np.void, np.object_}


def take_atom(taker: TakesParts, value: Any) -> Any:
    return value
