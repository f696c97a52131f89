"""Pickling for workers, and the program's `__main__` there, which they can't import.

Classes and functions of a script or notebook are pickled by value. Those that a pool's constructors use are
put into a module `__main__` of each worker. There, the envs' code finds them by name: `pickle`, processes of
`multiprocessing`, `typing.get_type_hints`. All of them share its globals, as in the program.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, GenericAlias, ModuleType, UnionType
from typing import Any

import numpy as np

from jaxvec._util import Pickler, dumps

# Packages that every worker imports. Annotations that name others are left alone.
_PACKAGES = {*sys.stdlib_module_names, "numpy", "gymnasium"}


class WorkerPickler(Pickler):
    """Pickles for workers, which do not import JAX: JAX arrays become read-only arrays of NumPy.

    Typed PRNG keys become their key data, and arrays in mapped files plain arrays.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.memmap:  # unpickled, it would be one without a file
            return np.asarray(obj).__reduce_ex__(5)
        jax: Any = sys.modules.get("jax")
        if jax is None or not isinstance(obj, jax.Array):
            return super().reducer_override(obj)
        data = jax.random.key_data(obj) if jax.dtypes.issubdtype(obj.dtype, jax.dtypes.prng_key) else obj
        return np.asarray(data).__reduce_ex__(5)


def dumps_for_worker(value: Any) -> bytes:
    """Pickles a value of the program for workers, without arrays of JAX. `pickle.loads` reads it."""
    return dumps(value, WorkerPickler)


MIN_LARGE = 1 << 20  # bytes of a large buffer


def dumps_with_main(value: Any, large: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Pickles a value with which a worker starts. `pickle.loads` also fills the worker's `__main__`.

    With a list `large`, it appends the buffers of large arrays to that. The pickle then lacks them, and
    `pickle.loads` needs them in this order.
    """
    main = sys.modules["__main__"]
    in_hints: set[str] = set()

    def keeps(buffer: pickle.PickleBuffer) -> bool:
        if large is None or buffer.raw().nbytes < MIN_LARGE:
            return True
        large.append(buffer)
        return False

    pickled = _dump(value, main, in_hints, keeps)
    hints: dict[str, bytes] = {}
    while names := in_hints - hints.keys():
        for name in names:
            try:
                hints[name] = _dump(vars(main)[name], main, in_hints)
            except Exception:  # few envs evaluate annotations, so this may stop none
                hints[name] = b""
    copied = ("__name__", "__doc__", "__package__", "__file__")
    attributes = {name: vars(main)[name] for name in copied if name in vars(main)}
    spec = getattr(main, "__spec__", None)
    guarded = _has_guard(getattr(main, "__file__", None))
    loader = _Loader(attributes, spec and spec.name, guarded, hints, pickled, large or ())
    return pickle.dumps(loader, 5, buffer_callback=lambda _: False)


def _dump(value: Any, main: ModuleType, in_hints: set[str], keeps: Any = None) -> bytes:
    return dumps(value, lambda buffer: _MainPickler(buffer, main, in_hints, keeps))


class _MainPickler(WorkerPickler):
    """Pickles functions and classes of `main`, and collects names of `main` in their annotations."""

    def __init__(self, buffer: io.BytesIO, main: ModuleType, in_hints: set[str], keeps: Any) -> None:
        super().__init__(buffer, 5, buffer_callback=keeps)
        self._main = main.__name__
        self._names = vars(main)
        self._in_hints = in_hints

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not isinstance(obj, (type, FunctionType)) or not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced
        make, args, state, *_, complete = reduced
        if isinstance(obj, FunctionType) and obj.__globals__ is self._names:
            code, _, *others = args
            make = _make_function
            args = (code, *others)
        if obj.__module__ == self._main:
            self._collect(obj)
        name = obj.__name__ if self._names.get(obj.__qualname__) is obj else None
        return make, args, (complete, state, name), None, None, _complete

    def _collect(self, obj: Any) -> None:
        annotations: dict[str, Any] = {}
        with suppress(Exception):  # Python 3.14 evaluates them here
            annotations = obj.__annotations__
        for text in annotations.values():
            if isinstance(text, str):
                words = {*re.findall(r"\w+", text)} & self._names.keys()
                self._in_hints.update(word for word in words if self._is_hint(self._names[word]))

    def _is_hint(self, value: Any) -> bool:
        if isinstance(value, ModuleType):
            return value.__name__.partition(".")[0] in _PACKAGES
        if isinstance(value, (type, GenericAlias, UnionType)) or type(value).__module__ == "typing":
            module: str = getattr(value, "__module__", "typing")
            return module == self._main or module.partition(".")[0] in _PACKAGES
        return False


def _has_guard(file: str | None) -> bool:
    """Returns whether a script can be imported: it tests `__name__` before it runs anything."""
    try:
        text = "" if file is None else Path(file).read_text()
    except (OSError, ValueError):
        return False
    return re.search(r"^if\s.*__name__", text, re.MULTILINE) is not None


# --- In a worker ------------------------------------------------------------------------------------------


class _MainModule(ModuleType):
    """The module `__main__` of a worker."""


class _Unguarded(_MainModule):
    """The same for a script without a main guard, which processes of `multiprocessing` may not run again.

    They would look for its file here. Functions find `__file__` among their globals nevertheless.
    """

    @property
    def __file__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise AttributeError("__file__")


def lacks(error: BaseException) -> bool:
    """Returns True if an error in a worker may come from a name that only the program's `__main__` has."""
    if not isinstance(sys.modules["__main__"], _MainModule):
        return False
    if not isinstance(error, NameError):
        return isinstance(error, (AttributeError, pickle.PicklingError)) and "__main__" in str(error)
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    # The class of which `get_type_hints` evaluates annotations has its module among the locals.
    names = {} if frame is None else frame.tb_frame.f_locals | frame.tb_frame.f_globals
    return names.get("__name__") == "__main__"


class _Loader:
    """An object that unpickles as the value of `dumps_with_main`."""

    def __init__(self, *args: Any) -> None:
        self._args = args

    def __reduce__(self) -> Any:
        return _load, self._args


def _load(
    attributes: dict[str, Any],
    spec: str | None,
    guarded: bool,
    hints: dict[str, bytes],
    pickled: bytes,
    large: Sequence[memoryview],
) -> Any:
    main = sys.modules["__main__"]
    if not isinstance(main, _MainModule):
        main = (_MainModule if guarded else _Unguarded)("__main__")
        vars(main).update(attributes)
        if spec is not None and guarded:
            main.__spec__ = ModuleSpec(spec, None)
        # The second name is that of classes of the script in processes of `multiprocessing`.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    value = pickle.loads(pickled, buffers=large)
    for name in hints.keys() - vars(main).keys():
        with suppress(Exception):
            setattr(main, name, pickle.loads(hints[name]))
    return value


def _make_function(*args: Any) -> FunctionType:
    code, *others = args
    return FunctionType(code, vars(sys.modules["__main__"]), *others)


def _complete(obj: Any, state: tuple[Any, Any, str | None]) -> Any:
    complete, attributes, name = state
    names = vars(sys.modules["__main__"])
    if isinstance(obj, FunctionType) and obj.__globals__ is names:
        # Other values are newer: `Workers(init=...)` has run before the constructors are unpickled.
        new = attributes[1]["__globals__"].items()
        attributes[1]["__globals__"] = {key: value for key, value in new if key not in names}
    complete(obj, attributes)
    if name is not None:
        names.setdefault(name, obj)
    return obj
