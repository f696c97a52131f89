"""Objects of classes that are written in Python, and what says itself how it is copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxvec._slices._snapshots._core import CannotCopy, Node, Putter, TakesParts
from jaxvec._slices._snapshots._fields import Fields, compare_fields, slots_of


class _Object(Node):
    __slots__ = ("fields", "kind")

    kind: type
    fields: Fields

    def put(self, putter: Putter, old: Any) -> Any:
        fits = type(old) is self.kind and putter.reuse(old)
        target = old if fits else object.__new__(self.kind)
        putter.begin(self, target)
        putter.fields(target, self.fields)
        return target

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.kind, other.kind
        yield from compare_fields(self.fields, other.fields)


def take_object(taker: TakesParts, value: Any) -> Any:
    node = _Object()
    taker.remember(value, node)
    node.kind = type(value)
    node.fields = taker.fields(value)
    return node


def is_ordinary(kind: type, value: Any) -> bool:
    """Says whether all that an object holds is in its attributes.

    Those of `EzPickle` say that they are made anew from their constructor's arguments, without their state.
    """
    for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__"):
        method = getattr(kind, name, None)
        if method is not getattr(object, name, None) and _qualname(method) != f"EzPickle.{name}":
            return False
    if kind.__new__ is not object.__new__ or not (hasattr(value, "__dict__") or slots_of(kind)):
        return False
    try:
        object.__reduce_ex__(value, 2)  # which refuses where C holds something
    except TypeError:
        return False
    except Exception:
        return True  # `EzPickle` was never told its arguments
    return True


def _qualname(method: Any) -> str:
    return getattr(method, "__qualname__", "")


class _Reduced(Node):
    """What says itself how it is made anew, as for pickle."""

    __slots__ = ("arguments", "function", "items", "pairs", "setter", "state")

    function: Any
    arguments: list[Any]
    state: Any
    items: list[Any]
    pairs: list[tuple[Any, Any]]
    setter: Any

    def put(self, putter: Putter, old: Any) -> Any:
        target = self.function(*putter.items(self.arguments, ()))
        putter.begin(self, target)
        # An object's attributes may be such as stay, so what is there is handed on.
        state = putter.value(self.state, None)
        if state is not None:
            if self.setter is not None:
                self.setter(target, state)
            elif hasattr(target, "__setstate__"):
                target.__setstate__(state)
            else:
                held, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
                vars(target).update(held or {})
                for name, value in (slots or {}).items():
                    setattr(target, name, value)
        for item in putter.items(self.items, ()):
            target.append(item)
        for key, value in self.pairs:
            target[putter.value(key, None)] = putter.value(value, None)
        return target


def take_reduced(taker: TakesParts, value: Any) -> Any:
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:
        raise CannotCopy(f"{name_of(type(value))} can't be copied ({error})") from error
    if isinstance(reduced, str):
        return value  # the name of a global
    function, arguments, state, items, pairs, setter = (*reduced, *[None] * (6 - len(reduced)))
    node = _Reduced()
    taker.remember(value, node)
    taker.remember(reduced, node)  # it lives as long as what was taken of it
    node.function, node.setter = function, setter
    node.arguments = taker.items(arguments)
    node.state = taker.value(state)
    node.items = taker.items(items or ())
    node.pairs = taker.pairs(dict(pairs or ()))
    return node


def name_of(kind: type) -> str:
    module = getattr(kind, "__module__", "builtins")  # which some of SWIG's lack
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
