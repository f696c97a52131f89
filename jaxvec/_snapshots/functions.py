"""Nodes of functions with variables, of methods, weak references, mapping proxies and locks."""

from __future__ import annotations

import enum
import gc
import threading
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxvec._snapshots.nodes import ATOMS, CannotCopy, Node, Putter, Taker


@dataclass(slots=True, eq=False)
class _Method(Node):
    """A method bound to a saved object."""

    function: Any
    owner: Any

    def put(self, putter: Putter, old: Any) -> Any:
        owner = putter.value(self.owner, getattr(old, "__self__", None))
        if isinstance(self.function, str):
            return getattr(owner, self.function)
        return types.MethodType(self.function, owner)


def take_method(taker: Taker, value: Any) -> Any:
    owner = value.__self__
    if owner is None or isinstance(owner, (type, types.ModuleType)):
        return value
    function = getattr(value, "__func__", value.__name__)
    return taker.remember(value, _Method(function, taker.value(owner)))


@dataclass(slots=True, eq=False)
class _Cell(Node):
    """A variable that functions close over."""

    content: Any = None

    def fill(self, putter: Putter, cell: Any) -> None:
        value = putter.value(self.content, _contents(cell))
        if value is not EMPTY:
            cell.cell_contents = value
        elif _contents(cell) is not EMPTY:
            del cell.cell_contents


class _Function(Node):
    """A function with variables, attributes or defaults: these are part of the state, and its code is not."""

    _SAVED = ("cells", "defaults", "keywords", "fields")
    __slots__ = (*_SAVED, "function", "name")

    cells: list[Any]
    defaults: Any
    keywords: Any
    fields: Any

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self.function = function

    def put(self, putter: Putter, old: Any) -> Any:
        is_same = type(old) is types.FunctionType and old.__code__ == self.function.__code__
        olds = old.__closure__ or () if is_same else ()
        if is_same and all(map(putter.is_free_for, self.cells, olds)) and putter.reuse(old):
            target, cells = old, olds
        elif not is_same and "__name__" not in self.function.__globals__:
            raise CannotCopy(f"the function {self.name} of another process is not in this place")
        else:
            cells = [putter.made(node) or types.CellType() for node in self.cells]
            target = _with_cells(old if is_same else self.function, cells)
        putter.begin(self, target)
        fresh = [pair for pair in zip(self.cells, cells, strict=True) if putter.made(pair[0]) is None]
        for node, cell in fresh:  # all of them first, as functions in one may share another one
            putter.begin(node, cell)
            putter.reuse(cell)
        for node, cell in fresh:
            node.fill(putter, cell)
        target.__defaults__ = putter.value(self.defaults, target.__defaults__)
        target.__kwdefaults__ = putter.value(self.keywords, target.__kwdefaults__)
        held = putter.value(self.fields, target.__dict__) or {}
        if held is not target.__dict__ and (held or target.__dict__):
            target.__dict__ = held
        return target

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        for name in self._SAVED:
            yield f" ({self.name})", getattr(self, name), getattr(other, name)

    def __reduce__(self) -> Any:
        held = {name: getattr(self, name) for name in self._SAVED}
        return _Function, (self.name, self.function), (None, held)


def _with_cells(function: Any, cells: list[Any]) -> Any:
    """Returns a function with the code of another one and with other variables, without attributes."""
    held = function.__globals__
    made = types.FunctionType(function.__code__, held, function.__name__, None, tuple(cells) or None)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def take_function(taker: Taker, value: Any) -> Any:
    if (
        value.__closure__ is None
        and not value.__dict__
        and _are_atoms(value.__defaults__, value.__kwdefaults__)
    ):
        return value
    # Not the function itself, as a state must not keep alive what the env refers to by a weak reference.
    node = _Function(
        _full_name(value), _with_cells(value, [types.CellType() for _ in value.__closure__ or ()])
    )
    taker.remember(value, node)
    try:
        node.cells = [_take_cell(taker, cell) for cell in value.__closure__ or ()]
        node.defaults = taker.value(value.__defaults__)
        node.keywords = taker.value(value.__kwdefaults__)
        node.fields = taker.value(value.__dict__)
    except CannotCopy as error:
        error.path.insert(0, f"({value.__qualname__})")
        raise
    return node


def _take_cell(taker: Taker, cell: Any) -> Any:
    node = taker.memo.get(id(cell))
    if node is None:
        node = _Cell()
        taker.remember(cell, node)
        node.content = taker.value(_contents(cell))
    return node


def _are_atoms(defaults: tuple[Any, ...] | None, keywords: dict[str, Any] | None) -> bool:
    return ATOMS.issuperset(map(type, (*(defaults or ()), *(keywords or {}).values())))


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


@dataclass(slots=True, eq=False)
class _Weak(Node):
    target: Any

    def put(self, putter: Putter, old: Any) -> Any:
        target = putter.value(self.target, old() if isinstance(old, weakref.ref) else None)
        return weakref.ref(target)


def take_weak(taker: Taker, value: Any) -> Any:
    target = value()
    if target is None:
        return value
    if value.__callback__ is not None:
        raise CannotCopy("it is a weak reference with a callback")
    return taker.remember(value, _Weak(taker.value(target)))


@dataclass(slots=True, eq=False)
class _WeakProxy(Node):
    target: Any

    def put(self, putter: Putter, old: Any) -> Any:
        return weakref.proxy(putter.value(self.target, None))


def take_weak_proxy(taker: Taker, value: Any) -> Any:
    try:
        target = value.__repr__.__self__  # the proxy forwards the attribute to its target
    except ReferenceError:
        raise CannotCopy("it is a weak proxy of something that is gone") from None
    return taker.remember(value, _WeakProxy(taker.value(target)))


@dataclass(slots=True, eq=False)
class _MappingProxy(Node):
    mapping: Any = None

    def put(self, putter: Putter, old: Any) -> Any:
        return types.MappingProxyType(putter.value(self.mapping, None))


def take_mapping_proxy(taker: Taker, value: Any) -> Any:
    (mapping,) = gc.get_referents(value)
    if type(mapping) is dict and "__module__" in mapping:
        return value  # the attributes of a class
    node = _MappingProxy()
    taker.remember(value, node)  # first: the mapping may hold the proxy
    node.mapping = taker.value(mapping)
    return node


@dataclass(slots=True, eq=False)
class _Lock(Node):
    """A lock that no thread holds."""

    kind: str

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old).__name__ == self.kind and putter.reuse(old):
            return old
        return threading.RLock() if self.kind == "RLock" else threading.Lock()


def take_lock(taker: Taker, value: Any) -> Any:
    locked = value._is_owned() if hasattr(value, "_is_owned") else value.locked()
    if locked:
        raise CannotCopy("it is a lock that is held")
    return taker.remember(value, _Lock(type(value).__name__))
