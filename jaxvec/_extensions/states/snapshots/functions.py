"""Nodes of functions with variables, of methods, weak references, mapping proxies and locks."""

from __future__ import annotations

import enum
import gc
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxvec._extensions.states.snapshots.nodes import CannotCopy, Node, Restorer, Saver, is_global


@dataclass(slots=True, eq=False)
class _Method(Node):
    """A method bound to a saved object."""

    function: Any
    owner: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        owner = restorer.value(self.owner, getattr(old, "__self__", None))
        if isinstance(self.function, str):
            return getattr(owner, self.function)
        return types.MethodType(restorer.value(self.function, getattr(old, "__func__", None)), owner)


def save_method(saver: Saver, value: Any) -> Any:
    owner = value.__self__
    if owner is None or isinstance(owner, (type, types.ModuleType)):
        return value
    function = getattr(value, "__func__", None)
    if function is None:
        function = value.__name__
    elif not any(function is each for base in type(owner).__mro__ for each in vars(base).values()):
        function = saver.value(function)  # else it is an attribute of a class
    return saver.remember(value, _Method(function, saver.value(owner)))


@dataclass(slots=True, eq=False)
class _Cell(Node):
    """A variable that functions close over."""

    content: Any = None

    def fill(self, restorer: Restorer, cell: Any) -> None:
        value = restorer.value(self.content, _contents(cell))
        if value is not EMPTY:
            cell.cell_contents = value
        elif _contents(cell) is not EMPTY:
            del cell.cell_contents


class Function(Node):
    """A function: its variables, attributes and defaults are part of the state, and its code is not.

    A function without variables that its module has by its name is restored in place, wherever it is held.
    """

    _SAVED = ("cells", "defaults", "keywords", "attributes")
    __slots__ = (*_SAVED, "function", "is_global", "name")

    cells: list[Any]
    defaults: Any
    keywords: Any
    attributes: Any

    def __init__(self, name: str, function: Any, is_global: bool) -> None:
        self.name = name
        self.function = function
        self.is_global = is_global

    def restore(self, restorer: Restorer, old: Any) -> Any:
        if self.is_global:
            old = self.function
        is_same = type(old) is types.FunctionType and old.__code__ == self.function.__code__
        olds = old.__closure__ or () if is_same else ()
        if is_same and all(map(restorer.is_free_for, self.cells, olds)) and restorer.reuse(old):
            target, cells = old, olds
        elif not is_same and "__name__" not in self.function.__globals__:
            raise CannotCopy(f"the function {self.name} of another process is not in this place")
        else:
            cells = [restorer.made(node) or types.CellType() for node in self.cells]
            target = _with_cells(old if is_same else self.function, cells)
        restorer.begin(self, target)
        fresh = [pair for pair in zip(self.cells, cells, strict=True) if restorer.made(pair[0]) is None]
        for node, cell in fresh:  # all of them first, as functions in one may share another one
            restorer.begin(node, cell)
            restorer.reuse(cell)
        for node, cell in fresh:
            node.fill(restorer, cell)
        target.__defaults__ = restorer.value(self.defaults, target.__defaults__)
        target.__kwdefaults__ = restorer.value(self.keywords, target.__kwdefaults__)
        target.__dict__ = restorer.value(self.attributes, target.__dict__)
        return target

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        for name in self._SAVED:
            yield f" ({self.name})", getattr(self, name), getattr(other, name)

    def __reduce__(self) -> Any:
        held = {name: getattr(self, name) for name in self._SAVED}
        return Function, (self.name, self.function, self.is_global), (None, held)


def _with_cells(function: Any, cells: list[Any]) -> Any:
    """Returns a function with the code of another one and with other variables, without attributes."""
    held = function.__globals__
    made = types.FunctionType(function.__code__, held, function.__name__, None, tuple(cells) or None)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def save_function(saver: Saver, value: Any) -> Any:
    if id(value.__globals__) in saver.memo:
        raise CannotCopy("its global variables are a dict that the env holds")
    saver.scopes.add(id(value.__globals__))
    is_named = value.__closure__ is None and is_global(value)
    # Not the function itself, as a state must not keep alive what the env refers to by a weak reference.
    function = value if is_named else _with_cells(value, [types.CellType() for _ in value.__closure__ or ()])
    node = Function(_full_name(value), function, is_named)
    saver.remember(value, node)
    try:
        node.cells = [_save_cell(saver, cell) for cell in value.__closure__ or ()]
        node.defaults = saver.value(value.__defaults__)
        node.keywords = saver.value(value.__kwdefaults__)
        node.attributes = saver.value(value.__dict__)
    except CannotCopy as error:
        error.path.insert(0, f"({value.__qualname__})")
        raise
    return node


def _save_cell(saver: Saver, cell: Any) -> Any:
    node = saver.memo.get(id(cell))
    if node is None:
        node = _Cell()
        saver.remember(cell, node)
        node.content = saver.value(_contents(cell))
    return node


def save_ufunc(saver: Saver, value: Any) -> Any:
    if set("".join(value.types)) <= set("O->"):
        raise CannotCopy("it may be made of a Python function, by np.frompyfunc")
    return value


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
    """A weak reference or, with `weakref.proxy` as `make`, a weak proxy."""

    make: Callable[[Any], Any]
    target: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        # Not `isinstance`, which fails for a proxy of something that is gone.
        return self.make(restorer.value(self.target, old() if type(old) is weakref.ref else None))


def save_weak(saver: Saver, value: Any) -> Any:
    target = value()
    if target is None:
        return value
    if value.__callback__ is not None:
        raise CannotCopy("it is a weak reference with a callback")
    return saver.remember(value, _Weak(weakref.ref, saver.value(target)))


def save_weak_proxy(saver: Saver, value: Any) -> Any:
    try:
        target = value.__repr__.__self__  # the proxy forwards the attribute to its target
    except ReferenceError:
        raise CannotCopy("it is a weak proxy of something that is gone") from None
    return saver.remember(value, _Weak(weakref.proxy, saver.value(target)))


@dataclass(slots=True, eq=False)
class _MappingProxy(Node):
    mapping: Any = None

    def restore(self, restorer: Restorer, old: Any) -> Any:
        return types.MappingProxyType(restorer.value(self.mapping, None))


def save_mapping_proxy(saver: Saver, value: Any) -> Any:
    (mapping,) = gc.get_referents(value)
    if type(mapping) is dict and "__module__" in mapping:
        return value  # the attributes of a class
    node = _MappingProxy()
    saver.remember(value, node)  # first: the mapping may hold the proxy
    node.mapping = saver.value(mapping)
    return node


@dataclass(slots=True, eq=False)
class _Lock(Node):
    """A lock that no thread holds."""

    kind: str

    def restore(self, restorer: Restorer, old: Any) -> Any:
        if type(old).__name__ == self.kind and restorer.reuse(old):
            return old
        return threading.RLock() if self.kind == "RLock" else threading.Lock()


def save_lock(saver: Saver, value: Any) -> Any:
    locked = value._is_owned() if hasattr(value, "_is_owned") else value.locked()
    if locked:
        raise CannotCopy("it is a lock that is held")
    return saver.remember(value, _Lock(type(value).__name__))
