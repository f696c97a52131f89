"""Digests of live object graphs, which show whether an env that was made anew equals the original.

    sender      env --take--> Digest --with the state--> receiver
    receiver    state --restore--> env --take--> Digest, compared with the one of the sender

A digest does not rely on the snapshots (`snapshot.py`) from which objects are restored. It covers all that is
reachable, in one order, with types, values and aliases. An object of an unknown type is an error.
"""

from __future__ import annotations

import array
import copyreg
import enum
import gc
import hashlib
import logging
import marshal
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np

from jaxvec._extensions.states.snapshots import arrays, node_types, snapshot
from jaxvec._extensions.states.snapshots.nodes import (
    ATOMS,
    SAVE_FUNCTIONS,
    CannotCopy,
    Node,
    Saver,
    attributes_of,
    excluded_fields,
    save_atom,
)

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_NUMBERS = frozenset({bool, int, float})
_TABLES: tuple[type, ...] = (list, dict, tuple, set, frozenset, np.ndarray)
_GENERATORS = np.random.Generator, np.random.BitGenerator, np.random.RandomState
_REDUCED = node_types.save_reduced, node_types.save_trusted, node_types.save_exception
_DESCRIPTORS = types.MemberDescriptorType, types.GetSetDescriptorType
_FIELDS_OF_LOGGERS = vars(logging.Logger("")).keys()
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
    """Walks through an env and its wrappers, `layers`, in one order, and numbers the objects that it finds.

    States of the env may contain objects of the classes `trust`, which are copied by their own protocol.
    """

    def __init__(self, layers: list[Any], trust: tuple[type, ...]) -> None:
        self._saver = Saver(snapshot.find, {}, {}, trust=trust)
        self._attributes: dict[str, bytes] = {}
        self._attribute = ""  # that is walked now
        self._hash = hashlib.blake2b(digest_size=16)
        self._lenient = False
        # By `id`: numbers in the order of the walk, and each object with the attribute where it was found.
        self._numbers: dict[int, int] = {}
        self._numbers_of_generators = self._numbers
        self._found: dict[int, tuple[Any, str]] = {}
        self._classes: dict[type, int] = {}
        for layer in layers:
            self._add(layer)
            self._add(vars(layer))

    def layer(self, layer: Any, names: Iterable[str] | None = None, *, lenient: bool = False) -> None:
        """Walks through the attributes of a layer that its states contain; only `names`, if given.

        With `lenient`, objects that can't be copied count as equal, because they are not restored.
        """
        without = excluded_fields(layer)
        self._lenient = lenient
        held, number, name = attributes_of(layer), self._numbers[id(layer)], type(layer).__name__
        with self._hashing(f"{number} type({name})"):
            self._class(type(layer), hidden=held)
        for attribute in sorted({*(held if names is None else names)} - without, key=str):
            if attribute in held:
                with self._hashing(f"{number} {name}.{attribute}"):
                    self._field(attribute, held[attribute])

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
                if not (_is_value(value) and self._equals_global(value, name)):
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

    def _write(self, *values: Any) -> None:
        self._hash.update(marshal.dumps(values, 2))  # later versions depend on aliases

    def _add(self, value: Any) -> None:
        numbers = self._numbers_for(value)
        numbers[id(value)] = len(numbers)
        self._found.setdefault(id(value), (value, self._attribute))  # keeps it alive, and so its id

    def _is_known(self, value: Any) -> bool:
        """Writes the number of an object that was found before; otherwise gives it a number."""
        number = self._numbers_for(value).get(id(value))
        if number is None:
            self._add(value)
            return False
        self._write("same", number)
        return True

    def _numbers_for(self, value: Any) -> dict[int, int]:
        return self._numbers_of_generators if issubclass(type(value), _GENERATORS) else self._numbers

    def _value(self, value: Any) -> None:
        kind = type(value)  # `isinstance` would look through weak proxies
        if kind in _PLAIN or (kind is tuple and _PLAIN.issuperset(map(type, value))):
            self._write(0, value)  # all other values start with a text
        elif issubclass(kind, np.generic) and not issubclass(kind, np.void):
            self._write("scalar", repr(value.dtype), value.tobytes())
        elif issubclass(kind, type):
            self._class(value)
        elif issubclass(kind, types.ModuleType):
            self._write("module", value.__name__)
        elif issubclass(kind, gymnasium.Space):
            # An equal one is kept, with its arrays. Its generators are restored.
            self._class(kind)
            with self._isolated():
                self._fields(value)
        elif not self._is_known(value):
            try:
                self._walks.get(kind, DigestTaker._other)(self, value)
            except CannotCopy:
                if not self._lenient:
                    raise
                self._write("not restored")

    def _values(self, values: Iterable[Any]) -> None:
        values = list(values)
        self._write(len(values))
        for value in values:
            self._value(value)

    def _sequence(self, value: Any) -> None:
        if _PLAIN.issuperset(map(type, value)):
            self._write(type(value).__name__, list(value))
            return
        self._write(type(value).__name__)
        self._values(value)

    def _dict(self, value: dict[Any, Any]) -> None:
        self._write("dict", len(value))
        for key, item in dict.items(value):
            self._value(key)
            self._value(item)

    def _set(self, value: Any) -> None:
        items = list(_base_of(value, (set, frozenset)).__iter__(value))
        self._write("set", len(items))
        # Only numbers are in the same order in all processes, and programs may depend on it.
        if not _NUMBERS.issuperset(map(type, items)):
            items.sort(key=lambda item: (self._numbers.get(id(item), -1), self._hash_alone(item)))
        for item in items:
            self._value(item)

    def _hash_alone(self, value: Any) -> bytes:
        """Returns a hash of a value that does not depend on what was found before."""
        before = self._hash, self._numbers, self._numbers_of_generators, self._classes
        self._hash, self._numbers, self._classes = hashlib.blake2b(digest_size=16), {}, {}
        self._numbers_of_generators = self._numbers
        try:
            self._value(value)
            return self._hash.digest()
        finally:
            self._hash, self._numbers, self._numbers_of_generators, self._classes = before

    def _object(self, value: Any) -> None:
        """Walks through an object of a Python class: its content as a container, and its attributes."""
        self._write("object")
        self._class(type(value))
        if isinstance(value, dict):
            self._dict(value)
        elif isinstance(value, (set, frozenset)):
            self._set(value)
        elif isinstance(value, (list, deque)):
            self._write(value.maxlen if isinstance(value, deque) else None)
            self._values(_base_of(value, (list, deque)).__iter__(value))
        self._fields(value)

    def _fields(self, value: Any) -> None:
        # The descriptors, as a subclass may have a slot with the name of another one.
        for base in type(value).__mro__:
            for name, slot in vars(base).items() if "__slots__" in vars(base) else ():
                if isinstance(slot, types.MemberDescriptorType):
                    try:
                        held = slot.__get__(value)
                    except AttributeError:
                        continue
                    self._write(name)
                    self._field(name, held)
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict) and not self._is_known(held):
            # Restored attributes are in another order.
            self._write(len(held))
            for name in sorted(held, key=str):
                self._value(name)
                self._field(name, held[name])

    def _field(self, name: Any, value: Any) -> None:
        try:
            self._value(value)
        except CannotCopy as error:
            error.path.insert(0, str(name))
            raise

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
        # It can have variables of the env, and may have come with the state. Otherwise it is code, so what
        # can't be copied does not count.
        before, self._lenient = self._lenient, True
        self._values(kind.__bases__)
        for name, value in sorted(vars(kind).items()):
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, (types.FunctionType, property)):
                self._write(name)
                self._value(value)
            elif name not in hidden and not name.startswith("__") and not isinstance(value, _DESCRIPTORS):
                self._write(name)
                with self._isolated():
                    self._value(value)
        self._lenient = before

    def _function(self, value: Any) -> None:
        self._write("function", value.__module__, value.__qualname__)
        self._value(value.__dict__)
        if _is_importable(value):
            return
        self._value(value.__code__)
        self._value(value.__defaults__)
        self._value(value.__kwdefaults__)
        for cell in value.__closure__ or ():
            if not self._is_known(cell):
                self._values(gc.get_referents(cell))  # none, if it is empty

    def _code_object(self, value: types.CodeType) -> None:
        names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
        self._write("code", value.co_name, value.co_firstlineno, value.co_code, names)
        self._values(value.co_consts)

    def _property(self, value: property) -> None:
        self._values((value.fget, value.fset, value.fdel))

    def _method(self, value: Any) -> None:
        self._write("method", value.__name__)
        self._value(getattr(value, "__func__", None))
        self._value(value.__self__)

    def _weak(self, value: Any) -> None:
        self._write("weak", type(value).__name__)
        try:
            target = value() if type(value) is weakref.ref else value.__repr__.__self__
        except ReferenceError:
            target = None
        self._value(target)

    def _partial(self, value: partial[Any]) -> None:
        # By its own protocol, an object without a `__dict__` differs from one with an empty one.
        self._values((value.func, value.args, value.keywords))
        self._fields(value)

    def _mapping_proxy(self, value: Any) -> None:
        (mapping,) = gc.get_referents(value)
        self._write("proxy")
        self._value(mapping.get("__module__", mapping))

    def _array(self, value: Any) -> None:
        # A stride without a second item has no effect.
        strides = [step for step, size in zip(value.strides, value.shape, strict=True) if size > 1]
        self._write("array", repr(value.dtype), value.shape, strides if value.size else [])
        self._write(value.flags.writeable)
        self._memory(value)
        if value.dtype.hasobject:
            self._values(value.ravel().tolist())
        else:
            self._write(value.tobytes())

    def _memory(self, value: Any) -> None:
        """Writes which part of which memory an array or a record is; nothing for its own, or a library's."""
        owner = arrays.owner_of(value)
        if not owner.flags.owndata:
            owner = arrays.memory_of(owner)
        if owner is not value and isinstance(owner, (np.ndarray, *arrays.BUFFERS)):
            self._write("part", value.__array_interface__["data"][0] - arrays.address_of(owner))
            self._value(owner)

    def _record(self, value: Any) -> None:
        self._write("record", repr(value.dtype), value.tobytes())
        if isinstance(value.base, np.ndarray):
            self._memory(value)

    def _buffer(self, value: Any) -> None:
        self._write("buffer", getattr(value, "typecode", ""), bytes(memoryview(value).cast("B")))
        self._class(type(value))

    def _memory_view(self, value: memoryview) -> None:
        self._write("memoryview", value.format, value.shape, value.readonly, value.tobytes())
        if isinstance(value.obj, (np.ndarray, *arrays.BUFFERS)):
            self._write(arrays.address_of(value) - arrays.address_of(value.obj))
            self._value(value.obj)

    def _generator(self, value: Any) -> None:
        self._value(value.bit_generator)
        self._fields(value)

    def _bits(self, value: Any) -> None:
        self._value(value.state)
        self._value(value.seed_seq)
        self._fields(value)

    def _seeds(self, value: Any) -> None:
        self._value(value.entropy)
        self._write(value.spawn_key, value.pool_size, value.n_children_spawned)
        self._fields(value)

    def _logger(self, value: logging.Logger) -> None:
        self._write(value.name, value.level, value.disabled, value.propagate)
        for name in sorted(vars(value).keys() - _FIELDS_OF_LOGGERS):
            self._write(name)
            self._field(name, vars(value)[name])

    def _random(self, value: Any) -> None:
        if isinstance(value, np.random.RandomState):
            # Only its identity: the seed sequence of a legacy generator is random and has no effect.
            self._is_known(value._bit_generator)
            self._value(value.get_state(legacy=False))
        else:
            self._value(random.Random.getstate(value))
        self._fields(value)

    def _node(self, node: Node) -> None:
        self._write(type(node).__name__)
        for name, part, _ in node.parts(node):
            self._write(name)
            self._value(part)

    def _reduced(self, value: Any) -> None:
        """Walks through the values from which an object is copied by its own protocol."""
        registered = copyreg.dispatch_table.get(type(value))
        try:
            reduced: Any = value.__reduce_ex__(4) if registered is None else registered(value)
        except Exception as error:
            raise CannotCopy(f"{node_types.name_of(type(value))} can't be copied ({error})") from error
        if isinstance(reduced, str):
            self._write("global", reduced)
            return
        function, arguments, state, items, pairs, setter = (*reduced, *[None] * (6 - len(reduced)))
        self._values((function, arguments, state, [*(items or ())], [*(pairs or ())], setter))

    def _other(self, value: Any) -> None:
        kind = type(value)
        self._write(node_types.name_of(kind))
        for base, walk in self._walks_of_subclasses.items():
            if isinstance(value, base):
                if base is not Node:
                    self._class(kind)
                walk(self, value)
                return
        rule = _rule_of(value)
        if rule in (node_types.save_object, node_types.save_subclass):
            self._object(value)
        elif rule in _REDUCED:
            if rule is not node_types.save_reduced:
                rule(self._saver, value)  # raises for a class on no list, unless it is trusted
            self._reduced(value)
        elif rule is not save_atom:
            self._value(rule(self._saver, value))
        elif node_types.is_ordinary(kind, value) or isinstance(value, enum.Enum):
            self._object(value)
        elif hasattr(kind, "__array__"):
            self._value(np.asarray(value))
        elif kind is not object:  # with an address, no two are equal
            self._write(repr(value))

    _walks: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        list: _sequence,
        deque: _object,
        tuple: _sequence,
        dict: _dict,
        set: _set,
        frozenset: _set,
        types.FunctionType: _function,
        types.CodeType: _code_object,
        property: _property,
        types.MethodType: _method,
        types.BuiltinMethodType: _method,
        types.MethodWrapperType: _method,
        weakref.ref: _weak,
        weakref.ProxyType: _weak,
        weakref.CallableProxyType: _weak,
        types.MappingProxyType: _mapping_proxy,
        np.ndarray: _array,
        memoryview: _memory_view,
        bytearray: _buffer,
        array.array: _buffer,
    }
    _walks_of_subclasses: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Node: _node,
        partial: _partial,
        np.void: _record,
        np.ndarray: _array,
        arrays.CData: _buffer,
        np.random.Generator: _generator,
        np.random.BitGenerator: _bits,
        np.random.SeedSequence: _seeds,
        np.random.RandomState: _random,
        random.Random: _random,
        logging.Logger: _logger,
    }

    # --- Objects of the env that are globals, too --------------------------------------------------

    def _globals(self) -> Iterator[tuple[str, Any]]:
        """Yields the class attributes of all classes, the globals of their methods, and items of these."""
        seen: set[int] = set()  # not the result of `vars`, whose id is soon another class's
        for kind in self._classes:
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
                    if type(value) in _TABLES[:-1] and len(value) <= _MAX_ITEMS:
                        items = value.items() if type(value) is dict else enumerate(value)
                        for number, item in items:
                            if type(item) not in _PLAIN:
                                yield f"{prefix}.{key}[{number if type(number) in _PLAIN else '...'}]", item

    def _names(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for name, value in self._globals():
            number = self._numbers.get(id(value))
            if number is not None and not isinstance(value, types.FunctionType):
                found.setdefault(number, set()).add(name)
        return found

    def _equals_global(self, value: Any, name: str) -> bool:
        mine = self._hash_alone(value)
        return any(self._hash_alone(other) == mine for each, other in self._globals() if each == name)


def _is_value(value: Any) -> bool:
    """Returns whether programs compare objects of this class by their content, not by identity."""
    if type(value) in _TABLES:
        return True
    return type(value) is not object and _rule_of(value) in (node_types.save_reduced, save_atom)


def _base_of(value: Any, bases: tuple[type, ...]) -> Any:
    return next(base for base in bases if isinstance(value, base))


def _rule_of(value: Any) -> Callable[[Saver, Any], Any]:
    kind = type(value)
    return save_atom if kind in ATOMS else SAVE_FUNCTIONS.get(kind) or snapshot.find(kind, value)


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
