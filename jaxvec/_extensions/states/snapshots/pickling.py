"""Pickling of states without their code: classes and functions stay those of the process that unpickles.

Classes and functions of a script or a notebook are not importable in another process, so cloudpickle pickles
them by value. Unpickling has side effects then: it assigns the pickled attributes to a class that exists
already, and it gives functions a copy of their globals. Here a class is a reference, which is looked up by
the number under which cloudpickle knows it, then by its name. Functions are looked up by name, or made with
the process's globals.
"""

from __future__ import annotations

import gc
import io
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from cloudpickle import cloudpickle

from jaxvec._extensions.states.snapshots.arrays import is_constant
from jaxvec._util import Pickler

_ids: Any = cloudpickle  # its registry of classes that were pickled by value has no public names


def dumps(value: Any) -> bytes:
    """Pickles a value; `pickle.loads` restores it without a change to any class, function or module."""
    buffer = io.BytesIO()
    _StatePickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce_memmap(value: Any) -> Any:
    """Pickles a read-only mapping of a file, or a part of it, as the name of the file."""
    whole = value
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    start = value.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return _map_file, (
        value.filename,
        whole.nbytes,
        whole.offset,
        start,
        value.shape,
        value.dtype,
        value.strides,
    )


def _map_file(
    filename: str, nbytes: int, offset: int, start: int, shape: Any, dtype: Any, strides: Any
) -> Any:
    whole = np.memmap(filename, np.uint8, "r", offset, (nbytes,))
    part = np.ndarray.__new__(np.memmap, shape, dtype, whole, start, strides)
    part.__array_finalize__(whole)  # gives it the name of the file and the mode
    return part


def _reduce_constant(value: Any) -> Any:
    """Pickles an array in memory that can't change so that it is in such memory again."""
    array: Any = value if value.flags.forc else np.array(value)
    order = "C" if array.flags.c_contiguous else "F"
    array.flags.writeable = False
    return np.ndarray, (value.shape, value.dtype, pickle.PickleBuffer(array), 0, None, order)


def unpickled(value: Any) -> Any:
    """Returns what another process would unpickle, with the memory of the arrays in the value."""
    data, arrays = _dump_apart(value)
    return pickle.loads(data, buffers=arrays)


def size_of(value: Any) -> int:
    """Returns the size of the pickle of a value, without read-only arrays, which values may share."""
    data, arrays = _dump_apart(value)
    return len(data) + sum(array.nbytes for array in arrays if not array.readonly)


def _dump_apart(value: Any) -> tuple[memoryview, list[memoryview]]:
    """Returns the pickle of a value, and the memory of its arrays, which is not in it."""
    buffer = io.BytesIO()
    arrays: list[pickle.PickleBuffer] = []
    _StatePickler(buffer, arrays.append).dump(value)
    return buffer.getbuffer(), [array.raw() for array in arrays]


class _StatePickler(Pickler):
    """Pickles references to classes and functions."""

    def __init__(self, file: io.BytesIO, take_buffer: Any = None) -> None:
        super().__init__(file, 5, buffer_callback=take_buffer)

    def reducer_override(self, obj: Any) -> Any:
        kind: type = type(obj)
        if kind is np.memmap and obj.mode == "r":
            return _reduce_memmap(obj)
        if kind is np.ndarray and obj.base is not None and is_constant(obj):
            return _reduce_constant(obj)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:  # by reference: it can be imported
            return reduced
        if isinstance(obj, type) and obj.__module__ != "builtins":  # such as the class of code
            if _find_global(obj.__module__, obj.__qualname__) is not obj:
                raise pickle.PicklingError(f"the class {obj.__qualname__} is not found by its name")
            return _find_class, (_ids._get_or_create_tracker_id(obj), obj.__module__, obj.__qualname__)
        if isinstance(obj, types.FunctionType) and not any(map(gc.get_referents, obj.__closure__ or ())):
            names = set(_ids._extract_code_globals(obj.__code__)) & obj.__globals__.keys()
            made = obj.__name__, obj.__defaults__, obj.__kwdefaults__
            return _find_function, (obj.__module__, obj.__qualname__, obj.__code__, names, *made)
        return reduced


# --- Where a state is unpickled ---------------------------------------------------------------------------


def _find_class(number: str, module: str, name: str) -> type:
    """Returns the class with this number, or else of this name."""
    known = _ids._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)
    if known is None:
        known = _find_global(module, name)
    if not isinstance(known, type):
        raise pickle.UnpicklingError(f"there is no class {module}.{name} in this process")
    return known


def _find_function(module: str, name: str, code: Any, names: set[str], *made: Any) -> types.FunctionType:
    """Returns the function of this name and code here, or makes one.

    It has the globals `names` of its module. If they are not in this process, a function with variables has
    none: `functions.py` then needs the function of the env that receives the state.
    """
    known = _find_global(module, name)
    if isinstance(known, types.FunctionType) and known.__code__.co_firstlineno == code.co_firstlineno:
        return known
    scopes = (*_globals_of(module), {"__name__": module})
    scope = next((scope for scope in scopes if names <= scope.keys()), None)
    if scope is None and not code.co_freevars:
        raise pickle.UnpicklingError(f"{module}.{name} needs the globals {sorted(names)} of its module here")
    short, defaults, keywords = made
    cells = tuple(types.CellType() for _ in code.co_freevars)
    function = types.FunctionType(code, scope or {}, short, defaults, cells)
    function.__kwdefaults__ = keywords
    function.__qualname__ = name
    function.__module__ = module
    return function


def _find_global(module: str, name: str) -> Any:
    first, *rest = name.split(".")
    for scope in _globals_of(module):
        value = scope.get(first)
        for part in rest:
            value = getattr(value, part, None)
        if value is not None:
            return value
    return None


def _globals_of(module: str) -> Iterator[dict[str, Any]]:
    """Yields the globals of a module: those of the methods of classes pickled by value, then its own.

    The module itself comes later, because `__main__` of a worker is not the script with the classes.
    """
    by_value = [kind for kind in list(_ids._DYNAMIC_CLASS_TRACKER_BY_CLASS) if kind.__module__ == module]
    seen: set[int] = set()
    for kind in by_value:
        for member in list(vars(kind).values()):
            scope = getattr(member, "__globals__", None)
            if scope is not None and scope.get("__name__") == module and id(scope) not in seen:
                seen.add(id(scope))
                yield scope
    if module in sys.modules:
        yield vars(sys.modules[module])
    yield {kind.__name__: kind for kind in by_value}  # they need not be among the globals of their methods
