"""An env and its wrappers, which stand for themselves: only their attributes are taken and put back."""

from __future__ import annotations

from typing import Any

from gymnasium import Wrapper
from gymnasium.wrappers import PassiveEnvChecker

from jaxvec._slices._snapshots._core import Node, Putter, TakesParts
from jaxvec._slices._snapshots._fields import NOTHING, Fields

# Of Gymnasium's envs, what their constructors were told. It is the same for all that one function makes.
_TOLD = frozenset(
    {"spec", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs", "metadata", "_metadata"}
)
_TOLD_WRAPPERS = _TOLD | {"env"}


class _Layer(Node):
    """The env, or one of its wrappers."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def put(self, putter: Putter, old: Any) -> Any:
        return putter.layers[self.number]


def layer_nodes(count: int, known: list[_Layer] = []) -> list[_Layer]:  # noqa: B006
    while len(known) < count:
        known.append(_Layer(len(known)))
    return known[:count]


def told(layer: Any) -> frozenset[str] | None:
    """Returns the attributes of an env or a wrapper that are not taken; `None` if none is."""
    kind = type(layer)
    if kind is PassiveEnvChecker:
        return None  # it warns once, and changes nothing
    return _TOLD_WRAPPERS if issubclass(kind, Wrapper) else _TOLD


def take_layer(taker: TakesParts, layer: Any) -> Fields:
    """Takes the attributes of an env or a wrapper."""
    without = told(layer)
    return NOTHING if without is None else taker.fields(layer, without)


def put_layer(putter: Putter, layer: Any, fields: Fields) -> None:
    """Gives an env or a wrapper its attributes."""
    if type(layer) is not PassiveEnvChecker:
        putter.fields(layer, fields, _TOLD_WRAPPERS)
