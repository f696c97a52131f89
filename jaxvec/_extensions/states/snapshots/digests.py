"""Digests of envs, which show whether an env that was made anew in another process equals the original.

    sender      env --save, take--> Digest --with the state--> receiver
    receiver    state --restore--> env --save, take--> Digest, compared with the one of the sender

A digest covers a snapshot of the live env, in one order, with types, values and aliases. It also covers what
a snapshot only refers to: code, the variables of local classes, and which objects are global, too.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import marshal
import sys
import types
import weakref
from collections.abc import Container, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from jaxvec._extensions.states.snapshots import arrays, node_types, snapshot
from jaxvec._extensions.states.snapshots.functions import Function
from jaxvec._extensions.states.snapshots.nodes import (
    ATOMS,
    KEPT,
    SAVE_FUNCTIONS,
    Fields,
    Node,
    SaveAgain,
    SaveFunction,
    Saver,
    attributes_of,
    save_atom,
)

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_NUMBERS = frozenset({bool, int, float})
_DESCRIPTORS = types.MemberDescriptorType, types.GetSetDescriptorType
_WITH_ADDRESS = object, weakref.ref, types.MappingProxyType  # in their `repr`, so no two are equal
_MAX_ITEMS = 10_000  # of a global container that is searched for objects


@dataclass(frozen=True)
class Digest:
    """The canonical form of an env and its wrappers, as far as their states contain them.

    Attributes:
        attributes: A hash of each attribute of each layer.
        named: By number, the globals and class attributes that refer to an object of the env.
    """

    attributes: dict[str, bytes]
    named: dict[int, set[str]]


class DigestTaker:
    """Walks through a snapshot of an env and its wrappers in one order, and numbers the objects in it.

    The snapshot of the `layers`, their `fields`, was made by `saver`, with nothing saved as a whole.
    """

    def __init__(self, saver: Saver, layers: Sequence[Any], fields: Sequence[Fields]) -> None:
        self._saver = saver
        saver.lenient = True  # code can refer to anything
        self._attributes: dict[str, bytes] = {}
        self._attribute = ""  # that is walked now
        self._hash = hashlib.blake2b(digest_size=16)
        # By `id`: numbers in the order of the walk, and each node or value with the attribute that has it.
        self._numbers: dict[int, int] = {}
        self._found: dict[int, tuple[Any, str]] = {}
        self._classes: dict[type, int] = {}
        for layer in layers:
            self._is_known(saver.memo[id(layer)])
        for number, (layer, (atoms, others, _)) in enumerate(zip(layers, fields, strict=True)):
            held, name = atoms | others, type(layer).__name__
            with self._hashing(f"{number} type({name})"):
                self._class(type(layer), hidden=attributes_of(layer))
            for attribute in sorted(held, key=str):
                with self._hashing(f"{number} {name}.{attribute}"):
                    self._value(held[attribute])

    def result(self) -> Digest:
        return Digest(self._attributes, self._names())

    def difference(self, original: Digest) -> str | None:
        """Returns the first attribute that differs from the original, or `None`."""
        mine = self.result()
        for name in {**original.attributes, **mine.attributes}:
            if original.attributes.get(name) != mine.attributes.get(name):
                return name.partition(" ")[2]
        found = {number: self._found[identity] for identity, number in self._numbers.items()}
        for number in {**original.named, **mine.named}:
            value, where = found[number]
            for name in original.named.get(number, set[str]()) ^ mine.named.get(number, set[str]()):
                # A value is copied, and is equal while the global one has the same content.
                if not self._equals_global(value, name):
                    return f"{where} (identity with {name})"
        return None

    # --- The walk ---------------------------------------------------------------------------------

    @contextmanager
    def _hashing(self, name: str) -> Generator[None]:
        self._attribute, self._hash = name.partition(" ")[2], hashlib.blake2b(digest_size=16)
        yield
        self._attributes[name] = self._hash.digest()

    @contextmanager
    def _isolated(self) -> Generator[None]:
        """Ignores within the block which objects are found outside of it, too."""
        before, self._numbers = self._numbers, {}
        try:
            yield
        finally:
            self._numbers = before

    def _hash_alone(self, value: Any) -> bytes:
        """Returns a hash of a value that does not depend on what was found before."""
        before = self._hash, self._classes
        self._hash, self._classes = hashlib.blake2b(digest_size=16), {}
        try:
            with self._isolated():
                self._value(value)
            return self._hash.digest()
        finally:
            self._hash, self._classes = before

    def _write(self, *values: Any) -> None:
        self._hash.update(marshal.dumps(values, 2))  # later versions depend on aliases

    def _save(self, value: Any) -> Any:
        """Saves a live object that the snapshot only refers to; what can't be copied does not count."""
        try:
            return self._saver.value(value)
        except SaveAgain:
            return KEPT

    def _is_known(self, value: Any) -> bool:
        """Writes the number of an object that was found before; otherwise gives it a number."""
        number = self._numbers.get(id(value))
        if number is None:
            self._numbers[id(value)] = len(self._numbers)
            self._found.setdefault(id(value), (value, self._attribute))  # keeps it alive, and so its id
            return False
        self._write("same", number)
        return True

    def _value(self, value: Any) -> None:
        """Walks through a node, a part of one, or a value that snapshots hold directly."""
        kind = type(value)
        if kind in _PLAIN:
            self._write(0, value)  # all other values start with a text
        elif kind in (list, tuple):
            self._write(kind.__name__, len(value))
            if _PLAIN.issuperset(map(type, value)):
                self._write(0, [*value])
            else:
                for item in value:
                    self._value(item)
        elif kind is dict:
            self._value([*value.items()])
        elif issubclass(kind, np.generic):
            self._write("scalar", repr(value.dtype), value.tobytes())
        elif issubclass(kind, type):
            self._class(value)
        elif issubclass(kind, types.ModuleType):
            self._write("module", value.__name__)
        elif value is KEPT:
            self._write("kept")
        elif kind is node_types.Space:
            self._space(value)
        elif not self._is_known(value):
            if isinstance(value, Node):
                self._node(value)
            else:
                self._constant(value)

    def _node(self, node: Node) -> None:
        self._write(type(node).__name__)
        if isinstance(node, Function):
            self._write(node.function.__module__, node.function.__qualname__)
            if not _is_importable(node.function):
                self._value(node.function.__code__)
        for name, part, _ in sorted(node.parts(node), key=itemgetter(0)):
            self._write(name)
            self._value(part)
        if isinstance(node, node_types.Set):
            items = node.items
            # Only numbers are in the same order in all processes, and programs may depend on it.
            if not _NUMBERS.issuperset(map(type, items)):
                items = sorted(
                    items, key=lambda item: (self._numbers.get(id(item), -1), self._hash_alone(item))
                )
            self._value(items)

    def _space(self, node: node_types.Space) -> None:
        # An equal space is kept, with its arrays. Its generators are restored.
        self._class(type(node.space))
        with self._isolated():
            for name, value in sorted(attributes_of(node.space).items()):
                if name != "_np_random":
                    self._write(name)
                    self._value(self._save(value))
        self._value(node.generators)

    def _constant(self, value: Any) -> None:
        """Walks through a value that snapshots hold directly."""
        kind = type(value)
        self._write(node_types.name_of(kind))
        if isinstance(value, np.ndarray):
            # A stride without a second item has no effect.
            strides = [step for step, size in zip(value.strides, value.shape, strict=True) if size > 1]
            self._write(repr(value.dtype), value.shape, strides if value.size else [], value.flags.writeable)
            self._hash.update(value.tobytes())  # `marshal` would copy them once more
        elif isinstance(value, types.CodeType):
            names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
            self._write(value.co_name, value.co_firstlineno, value.co_code, names)
            self._value([self._save(each) for each in value.co_consts])
        elif isinstance(value, types.FunctionType):
            self._value(self._save(value))
        elif isinstance(value, memoryview):
            self._write(value.format, value.shape, value.tobytes())
        elif isinstance(value, logging.Logger):
            self._write(value.name, value.level, value.disabled, value.propagate)
        elif isinstance(value, enum.Enum):
            self._class(kind)
            self._value(value._name_ or value._value_)
        elif node_types.is_ordinary(kind):
            self._class(kind)
            self._value([(name, self._save(held)) for name, held in sorted(attributes_of(value).items())])
        elif hasattr(kind, "__array__"):
            self._value(np.asarray(value))
        elif kind not in _WITH_ADDRESS:
            if isinstance(getattr(value, "__self__", None), type):
                self._class(value.__self__)
            self._write(node_types.global_name(value) or repr(value))

    def _class(self, kind: type, hidden: Container[str] = ()) -> None:
        # `hidden` are variables of the class that attributes of the object hide.
        if kind in self._classes:
            self._write("class", self._classes[kind])
            return
        self._classes[kind] = len(self._classes)
        # cloudpickle loses the qualified names of classes.
        self._write("class", getattr(kind, "__module__", ""), kind.__name__)
        if not _is_local(kind):
            return
        # It can have variables of the env, and may have come with the state. Otherwise it is code.
        for base in kind.__bases__:
            self._class(base)
        for name, value in sorted(vars(kind).items()):
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, (types.FunctionType, property)):
                functions = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
                self._write(name)
                self._value([self._save(each) for each in functions])
            elif name not in hidden and not name.startswith("__") and not isinstance(value, _DESCRIPTORS):
                self._write(name)
                with self._isolated():
                    self._value(self._save(value))

    # --- Objects of the env that are globals, too --------------------------------------------------

    def _globals(self) -> Iterator[tuple[str, Any]]:
        """Yields the class attributes of all classes, the globals of their methods, and items of these."""
        seen: set[int] = set()  # not the result of `vars`, whose id is soon another class's
        for kind in [*self._classes]:
            spaces: list[tuple[str, Any]] = [(node_types.name_of(kind), vars(kind))]
            for value in [*vars(kind).values()]:
                held = getattr(getattr(value, "__func__", value), "__globals__", None)
                if type(held) is dict and id(held) not in seen:
                    seen.add(id(held))
                    spaces.append((held.get("__name__", ""), held))
            for prefix, held in spaces:
                for key, value in [*held.items()]:
                    if key in ("__builtins__", "__dict__", "_value2member_map_"):
                        continue
                    yield f"{prefix}.{key}", value
                    if type(value) in (list, dict, tuple, set, frozenset) and len(value) <= _MAX_ITEMS:
                        items = [*value.items()] if type(value) is dict else enumerate([*value])
                        for number, item in items:
                            if type(item) not in _PLAIN:
                                yield f"{prefix}.{key}[{number if type(number) in _PLAIN else '...'}]", item

    def _names(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for name, value in self._globals():
            number = self._numbers.get(id(self._saver.memo.get(id(value), value)))
            if number is not None and not isinstance(value, types.FunctionType):
                found.setdefault(number, set()).add(name)
        return found

    def _equals_global(self, value: Any, name: str) -> bool:
        """Returns whether a global object of this name is a value that equals a node or a constant."""
        mine = self._hash_alone(value)
        named = [other for each, other in self._globals() if each == name]
        return any(_is_value(other) and self._hash_alone(self._save(other)) == mine for other in named)


def _is_value(value: Any) -> bool:
    """Returns whether programs compare objects of this class by their content, not by identity."""
    kind = type(value)
    rule = save_atom if kind in ATOMS else SAVE_FUNCTIONS.get(kind) or snapshot.find(kind)
    return kind is not object and rule in _RULES_OF_VALUES


_RULES_OF_VALUES: tuple[SaveFunction, ...] = (
    *(node_types.save_list, node_types.save_dict, node_types.save_tuple, node_types.save_set),
    *(arrays.save_array, node_types.save_reduced, save_atom),
)


def _is_local(kind: type) -> bool:
    """Returns whether a class was made by a function."""
    made = kind, *[value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    return any("<locals>" in one.__qualname__ for one in made)


def _is_importable(function: Any) -> bool:
    """Returns whether a function is pickled by name. `__main__` is another module in each process."""
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        return False
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function
