"""Python objects as values: what they hold is copied out, and put back into them or into others like them.

`copy.deepcopy` makes new objects. Here those that are there keep their identity, because closures, renderers
and memory outside of Python may refer to them: only what they hold is put back.
"""

from jaxvec._slices._snapshots._again import Again
from jaxvec._slices._snapshots._ale import watch_ale
from jaxvec._slices._snapshots._core import KEPT, CannotCopy, Node, Putter, Shared
from jaxvec._slices._snapshots._fields import NOTHING, Fields, compare_fields
from jaxvec._slices._snapshots._layers import layer_nodes, put_layer, take_layer
from jaxvec._slices._snapshots._taker import Taker

__all__ = [
    "KEPT",
    "NOTHING",
    "Again",
    "CannotCopy",
    "Fields",
    "Node",
    "Putter",
    "Shared",
    "Taker",
    "compare_fields",
    "layer_nodes",
    "put_layer",
    "take_layer",
    "watch_ale",
]
