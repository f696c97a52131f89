"""Checks actions given on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._errors import ActionError
from jaxvec._spaces import DictNode, Leaf, Node, TupleNode, format_path
from jaxvec._spec import PoolSpec


def flatten(spec: PoolSpec, action: Any) -> list[NDArray[Any]]:
    """Returns the leaves of a batch of actions, each `[num_envs, ...]`, in the order of the spec.

    Raises:
        ActionError: wrong structure, shape or dtype; names the leaf.
    """
    found: list[NDArray[Any]] = []
    _collect(spec, spec.action, action, found)
    return found


def castable(given: np.dtype[Any], leaf: Leaf) -> bool:
    """Says whether an action of dtype `given` may stand for the leaf's: bool < integer < float."""
    ranks = {"b": 0, "u": 1, "i": 1, "f": 2, "V": 2}  # V: bfloat16 and its like
    return given.kind in ranks and ranks[given.kind] <= ranks[leaf.dtype.kind]


def _collect(spec: PoolSpec, node: Node, action: Any, found: list[NDArray[Any]]) -> None:
    match node:
        case Leaf():
            found.append(_leaf(spec, node, action))
        case DictNode():
            if not isinstance(action, Mapping) or set(action) != set(node.keys):
                got = list(action) if isinstance(action, Mapping) else type(action).__name__
                raise ActionError(
                    f"{format_path(node.path)}: expected a dict with keys {list(node.keys)}, got {got}"
                )
            for key, child in zip(node.keys, node.children, strict=True):
                _collect(spec, child, action[key], found)
        case TupleNode():
            if not isinstance(action, (tuple, list)) or len(action) != len(node.children):
                got = f"{len(action)}" if isinstance(action, (tuple, list)) else type(action).__name__
                raise ActionError(
                    f"{format_path(node.path)}: expected a tuple of {len(node.children)}, got {got}"
                )
            for child, part in zip(node.children, action, strict=True):
                _collect(spec, child, part, found)


def _leaf(spec: PoolSpec, leaf: Leaf, action: Any) -> NDArray[Any]:
    try:
        array = np.asarray(action)
    except ValueError as error:
        raise ActionError(f"{leaf}: got a ragged sequence; expected {_expected(spec, leaf)}") from error
    if array.shape != spec.batch_shape(leaf) or not castable(array.dtype, leaf):
        raise ActionError(
            f"{leaf}: expected {_expected(spec, leaf)}, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(leaf.stored, copy=False)


def _expected(spec: PoolSpec, leaf: Leaf) -> str:
    return f"{leaf.stored} of shape {spec.batch_shape(leaf)}, env axis first"
