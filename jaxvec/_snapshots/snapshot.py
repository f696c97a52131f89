"""Snapshots of object graphs: taken, taken again, and compared."""

from __future__ import annotations

import enum
import io
import random
import struct
import types
import weakref
from collections import deque
from typing import Any

import gymnasium
import numpy as np

from jaxvec import _native
from jaxvec._snapshots.ale import WatchedALE, take_ale
from jaxvec._snapshots.mujoco import take_data, take_model, take_physics
from jaxvec._snapshots.node_types import (
    Array,
    BitGenerator,
    Generator,
    Space,
    is_ordinary,
    name_of,
    take_array,
    take_bits,
    take_deque,
    take_dict,
    take_function,
    take_generator,
    take_list,
    take_method,
    take_object,
    take_picture,
    take_random,
    take_reduced,
    take_set,
    take_space,
    take_tuple,
    take_weak,
)
from jaxvec._snapshots.nodes import (
    ATOMS,
    KEPT,
    TAKINGS,
    CannotCopy,
    Fields,
    Node,
    Taker,
    Taking,
    slots_of,
    take_atom,
    told,
)

# ----------------------------------------------------------------------------------------------------------
# Which kind of thing is taken how.
# ----------------------------------------------------------------------------------------------------------


def _take_kept(taker: Taker, value: Any) -> Any:
    return KEPT


def _refuse(what: str) -> Taking:
    def refuse(taker: Taker, value: Any) -> Any:
        raise CannotCopy(f"it is {what}")

    return refuse


# Of classes in other libraries, and so of their subclasses, by module and name.
_NAMED: dict[str, Taking] = {
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer": _take_kept,
    "mujoco.renderer.Renderer": _take_kept,
    "pygame.font.Font": _take_kept,
    "pygame.freetype.Font": _take_kept,
    "pygame.time.Clock": _take_kept,
    "_thread.lock": _take_kept,
    "_thread.RLock": _take_kept,
    "gymnasium.envs.registration.EnvSpec": take_atom,
    "pygame.surface.Surface": take_picture,
    "mujoco._structs.MjModel": take_model,
    "mujoco._structs.MjData": take_data,
    "dm_control.mujoco.engine.Physics": take_physics,
    "ale_py._ale_py.ALEInterface": take_ale,
    "_io._IOBase": _refuse("an open file"),
    "io.IOBase": _refuse("an open file"),
    "mmap.mmap": _refuse("a mapped file"),
    "numpy.memmap": _refuse("a mapped file"),
    "numpy.core.memmap.memmap": _refuse("a mapped file"),
    "_socket.socket": _refuse("a socket"),
    "threading.Thread": _refuse("a thread"),
    "subprocess.Popen": _refuse("a process"),
    "multiprocessing.process.BaseProcess": _refuse("a process"),
    "builtins.generator": _refuse("a generator in the middle of its work"),
}


TAKINGS.update(
    {
        np.ndarray: take_array,
        list: take_list,
        dict: take_dict,
        tuple: take_tuple,
        deque: take_deque,
        set: take_set,
        frozenset: take_set,
        types.FunctionType: take_function,
        types.MethodType: take_method,
        types.BuiltinMethodType: take_method,
        types.MethodWrapperType: take_method,
        weakref.ref: take_weak,
        io.BytesIO: take_reduced,
        io.StringIO: take_reduced,
        WatchedALE: take_ale,
    }
)


def find(kind: type, value: Any) -> Taking:
    """Returns how values of a class are taken that was not seen yet."""
    for base in kind.__mro__:
        named = _NAMED.get(f"builtins.{name_of(base)}") or _NAMED.get(name_of(base))
        if named is not None:
            return named
    if kind is object or issubclass(kind, (type, enum.Enum, np.dtype, np.ufunc)):
        return take_atom
    if issubclass(kind, gymnasium.Space):
        return take_space
    if issubclass(kind, np.random.Generator):
        return take_generator
    if issubclass(kind, np.random.BitGenerator):
        return take_bits
    if kind in (random.Random, np.random.RandomState):
        return take_random
    return take_object if is_ordinary(kind, value) else take_reduced


# ----------------------------------------------------------------------------------------------------------
# Takes and puts back what was taken before, in C++, as long as only what is ordinary has changed.
#
# From one snapshot of an env to the next hardly anything changes but numbers, arrays and random numbers.
# For these there is no need to walk: all else is what it was. A snapshot that is taken so has the same
# dicts and nodes as the one before, but where there is a change. At whatever else there is, C++ says so,
# and has done nothing yet: then all is walked through, where the rules are.
# ----------------------------------------------------------------------------------------------------------

_NODES = ATOMS, Node, Array, Generator, BitGenerator, Space


class IncrementalSnapshot:
    """Of an env and its wrappers."""

    def __init__(self, layers: list[Any]) -> None:
        """Takes the wrappers, outmost first, and the env."""
        self._layers = layers
        self._told = [told(layer) for layer in layers]
        self._before: list[Fields] | None = None
        slotted = any(slots_of(type(layer)) for layer in layers)
        self._compiled = None if slotted else _native.ext

    def take(self) -> list[Fields] | None:
        """Returns the attributes of each layer; `None` if they have to be walked through."""
        compiled, before = self._compiled, self._before
        if compiled is None or before is None:
            return None
        self._before = compiled.take_again(self._layers, self._told, before, _NODES)
        return self._before

    def note(self, fields: list[Fields]) -> None:
        """Takes what the walk has taken."""
        self._before = fields

    def put(self, fields: list[Fields]) -> bool:
        """Gives each layer its attributes; says whether that could be done so."""
        compiled = self._compiled
        return compiled is not None and compiled.put_again(self._layers, self._told, fields, _NODES)


# ----------------------------------------------------------------------------------------------------------
# Where two snapshots, or two results of an env, differ first: bit for bit.
# ----------------------------------------------------------------------------------------------------------


def difference(one: Any, other: Any, seen: dict[Any, Any] | None = None) -> str | None:
    """Returns the way to what differs, empty for the whole; `None` if nothing does.

    What is one object in one of them has to be one in the other.
    """
    if one is other or one is KEPT or other is KEPT:
        return None
    if type(one) is not type(other):
        return ""
    seen = {} if seen is None else seen
    if isinstance(one, Node):
        mine, its = seen.setdefault(id(one), other), seen.setdefault(-id(other), one)
        if mine is not other or its is not one:
            return " (another object)"
        if (id(one), True) in seen:
            return None
        seen[id(one), True] = True
    match one:
        case float():
            return None if struct.pack("d", one) == struct.pack("d", other) else ""
        case np.ndarray():
            same = (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
            return None if same else ""
        case np.generic():
            return None if one.tobytes() == other.tobytes() else ""
        case dict():
            if one.keys() != other.keys():
                return f"[{next(iter(one.keys() ^ other.keys()))!r}]"
            return _first(((f"[{key!r}]", one[key], other[key]) for key in one), seen)
        case list() | tuple():
            if len(one) != len(other):
                return ""
            pairs = zip(one, other, strict=True)
            return _first(((f"[{number}]", *pair) for number, pair in enumerate(pairs)), seen)
        case Node():
            return _first(one.parts(other), seen)
        case _:
            try:
                return None if bool(one == other) else ""
            except Exception:
                return None  # it can't be compared


def _first(parts: Any, seen: dict[Any, Any]) -> str | None:
    for name, one, other in parts:
        found = difference(one, other, seen)
        if found is not None:
            return name + found
    return None
