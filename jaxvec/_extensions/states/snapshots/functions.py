"""Nodes of functions with variables of their own and of methods, and the rule for locks."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxvec._extensions.states.snapshots.nodes import KEPT, CannotCopy, Node, Restorer, Saver, is_global


@dataclass(slots=True, eq=False)
class _Method(Node):
    """A method bound to a saved object: the name of a method of its class, or the node of a function."""

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
    elif not any(function is member for base in type(owner).__mro__ for member in vars(base).values()):
        function = saver.value(function)  # else it is an attribute of a class
    return saver.remember(value, _Method(function, saver.value(owner)))


@dataclass(slots=True, eq=False)
class _Cell(Node):
    """A variable that functions close over. `Function` restores it."""

    content: Any = None


@dataclass(slots=True, eq=False)
class Function(Node):
    """A function that no module has by its name: its variables and defaults are part of the state.

    It is made anew from its code, as functions that share variables have to share them again.
    """

    function: Any
    cells: Any = ()
    defaults: Any = None
    keywords: Any = None
    attributes: Any = None

    def restore(self, restorer: Restorer, old: Any) -> Any:
        is_same = type(old) is types.FunctionType and old.__code__ == self.function.__code__
        # A function that was unpickled may lack its globals. The one in its place has them.
        source = old if is_same else self.function
        if not is_same and "__name__" not in source.__globals__:
            raise CannotCopy(f"the function {source.__qualname__} of another process is not in this place")
        old_cells = old.__closure__ or () if is_same else [None] * len(self.cells)
        pairs = zip(self.cells, old_cells, strict=True)
        new_cells = [(node, old_cell) for node, old_cell in pairs if restorer.made(node) is None]
        # All cells exist before any is filled, as functions in one of them may share another one.
        for node, _ in new_cells:
            restorer.begin(node, types.CellType())
        target = _with_cells(source, [restorer.made(node) for node in self.cells])
        restorer.begin(self, target)
        for node, old_cell in new_cells:
            old_content = next(iter(gc.get_referents(old_cell)), None)
            restorer.made(node).cell_contents = restorer.value(node.content, old_content)
        target.__defaults__ = restorer.value(self.defaults, None)
        target.__kwdefaults__ = restorer.value(self.keywords, None)
        target.__dict__ = restorer.value(self.attributes, None)
        return target

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        for name in ("cells", "defaults", "keywords", "attributes"):
            yield f" ({self.function.__qualname__})", getattr(self, name), getattr(other, name)


def _with_cells(function: Any, cells: list[Any]) -> Any:
    """Returns a function with the code of another one and with other variables, without attributes."""
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, closure=tuple(cells) or None
    )
    made.__qualname__ = function.__qualname__
    made.__module__ = function.__module__
    return made


def save_function(saver: Saver, value: Any) -> Any:
    """Takes a function. One that its module has by its name is as global as its module."""
    if value.__closure__ is None and is_global(value):
        return value
    cells = value.__closure__ or ()
    # Not the function itself, as a state must not keep alive what the env refers to by a weak reference.
    node = Function(_with_cells(value, [types.CellType() for _ in cells]))
    saver.remember(value, node)
    try:
        node.cells = [_save_cell(saver, cell) for cell in cells]
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
        contents = gc.get_referents(cell)
        if not contents:
            raise CannotCopy("a variable that it closes over has no value yet")
        node.content = saver.value(contents[0])
    return node


def save_lock(saver: Saver, value: Any) -> Any:
    """Takes a lock, which stays with its env."""
    locked = value._is_owned() if hasattr(value, "_is_owned") else value.locked()
    if locked:
        raise CannotCopy("it is a lock that is held")
    return KEPT
