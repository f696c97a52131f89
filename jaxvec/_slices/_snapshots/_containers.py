"""Python's containers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from jaxvec._slices._snapshots._atoms import ATOMS
from jaxvec._slices._snapshots._core import Node, Putter, TakesParts
from jaxvec._slices._snapshots._plain import LARGE, Plain, take_plain


class _List(Node):
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, putter: Putter, old: Any) -> Any:
        target: list[Any] = []
        putter.begin(self, target)
        target.extend(putter.items(self.items, old if type(old) is list else ()))
        return target


def take_list(taker: TakesParts, value: list[Any]) -> Any:
    if len(value) > LARGE and (plain := take_plain(taker, value)) is not None:
        taker.remember(value, plain)
        return plain
    node = _List()
    taker.remember(value, node)
    node.items = taker.items(value)
    return node


class _Deque(Node):
    __slots__ = ("items", "maxlen")

    def __init__(self, maxlen: int | None) -> None:
        self.items: list[Any] = []
        self.maxlen = maxlen

    def put(self, putter: Putter, old: Any) -> Any:
        target: deque[Any] = deque(maxlen=self.maxlen)
        putter.begin(self, target)
        target.extend(putter.items(self.items, old if type(old) is deque else ()))
        return target


def take_deque(taker: TakesParts, value: deque[Any]) -> Any:
    node = _Deque(value.maxlen)
    taker.remember(value, node)
    node.items = taker.items(value)
    return node


class _Tuple(Node):
    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def put(self, putter: Putter, old: Any) -> Any:
        return tuple(putter.items(self.items, old if type(old) is tuple else ()))


def take_tuple(taker: TakesParts, value: tuple[Any, ...]) -> Any:
    items = taker.items(value)
    if all(item is one for item, one in zip(items, value, strict=True)):
        return value
    node = _Tuple(items)
    taker.remember(value, node)
    return node


class _Dict(Node):
    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def put(self, putter: Putter, old: Any) -> Any:
        target: dict[Any, Any] = {}
        putter.begin(self, target)
        olds: dict[Any, Any] = old if type(old) is dict else {}
        for key, item in self.pairs:
            if isinstance(key, Node):
                target[putter.value(key, None)] = putter.value(item, None)
            else:
                target[key] = putter.value(item, olds.get(key)) if isinstance(item, Node) else item
        return target


def take_dict(taker: TakesParts, value: dict[Any, Any]) -> Any:
    if len(value) > LARGE and (plain := take_plain(taker, value)) is not None:
        taker.remember(value, plain)
        return plain
    node = _Dict()
    taker.remember(value, node)
    node.pairs = taker.pairs(value)
    return node


class _Set(Node):
    __slots__ = ("items", "kind")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind = kind
        self.items = items

    def put(self, putter: Putter, old: Any) -> Any:
        return self.kind(putter.value(item, None) for item in self.items)

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", len(self.items), len(other.items)  # which have no order


def take_set(taker: TakesParts, value: Any) -> Any:
    if all(type(item) in ATOMS for item in value):
        node: Any = Plain(value.copy())
    else:
        node = _Set(type(value), taker.items(value))
    taker.remember(value, node)
    return node
