"""Functions, methods and weak references."""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Iterator
from typing import Any

from jaxvec._slices._snapshots._core import CannotCopy, Node, Putter, TakesParts


class _Method(Node):
    """A method bound to something that a snapshot holds."""

    __slots__ = ("function", "owner")

    def __init__(self, function: Any, owner: Any) -> None:
        self.function = function
        self.owner = owner

    def put(self, putter: Putter, old: Any) -> Any:
        owner = putter.value(self.owner, getattr(old, "__self__", None))
        if isinstance(self.function, str):
            return getattr(owner, self.function)
        return types.MethodType(self.function, owner)


def take_method(taker: TakesParts, value: Any) -> Any:
    owner = value.__self__
    if owner is None or isinstance(owner, (type, types.ModuleType)):
        return value
    function = getattr(value, "__func__", value.__name__)
    node = _Method(function, taker.value(owner))
    taker.remember(value, node)
    return node


class _Function(Node):
    """A function that closes over variables: these are a part of the state, and its code is not."""

    __slots__ = ("cells", "function", "name")

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self.function = function
        self.cells: list[Any] = []

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is types.FunctionType and _full_name(old) == self.name and putter.reuse(old):
            target = old
        elif self.function is None:
            raise CannotCopy(f"the function {self.name} was there, and is not now")
        else:
            target = self.function
            target = types.FunctionType(
                target.__code__,
                target.__globals__,
                target.__name__,
                target.__defaults__,
                tuple(types.CellType() for _ in self.cells),
            )
            target.__kwdefaults__ = self.function.__kwdefaults__
        putter.begin(self, target)
        for cell, node in zip(target.__closure__ or (), self.cells, strict=True):
            value = putter.value(node, None if node is None else _contents(cell))
            if value is not EMPTY:
                cell.cell_contents = value
        return target

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield f" ({self.name})", self.cells, other.cells

    def __reduce__(self) -> Any:
        return _Function, (self.name, None), (None, {"cells": self.cells})


def take_function(taker: TakesParts, value: Any) -> Any:
    if value.__closure__ is None:
        return value
    node = _Function(_full_name(value), value)
    taker.remember(value, node)
    lenient, taker.lenient = taker.lenient, True  # what it closes over may be anybody's
    node.cells = [taker.value(_contents(cell)) for cell in value.__closure__]
    taker.lenient = lenient
    return node


def _full_name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}"


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


class _Empty(enum.Enum):
    EMPTY = "a variable that has no value yet"


EMPTY = _Empty.EMPTY


class _Weak(Node):
    __slots__ = ("target",)

    def __init__(self, target: Any) -> None:
        self.target = target

    def put(self, putter: Putter, old: Any) -> Any:
        target = putter.value(self.target, old() if isinstance(old, weakref.ref) else None)
        return weakref.ref(target)


def take_weak(taker: TakesParts, value: Any) -> Any:
    target = value()
    return value if target is None else _Weak(taker.value(target))
