"""The rules for saving each type, and the comparison of snapshots.

A `Saver` (nodes.py) walks an env's attributes and turns each mutable value into a `Node` (node_types.py,
arrays.py, functions.py, pictures.py, ale.py, mujoco.py); a `Restorer` turns nodes back into values. `find`
selects how a type is saved.
"""

from __future__ import annotations

import array
import enum
import io
import itertools
import logging
import mmap
import operator
import pathlib
import random
import re
import struct
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import gymnasium
import numpy as np

from jaxvec._extensions.states.snapshots import arrays, functions, node_types
from jaxvec._extensions.states.snapshots.ale import WatchedALE, save_ale
from jaxvec._extensions.states.snapshots.mujoco import save_data, save_model, save_physics
from jaxvec._extensions.states.snapshots.nodes import (
    ATOMS,
    KEPT,
    SAVE_FUNCTIONS,
    CannotCopy,
    Node,
    SaveFunction,
    Saver,
    has_attributes,
    save_atom,
)
from jaxvec._extensions.states.snapshots.pictures import save_picture

# --- How each type is saved ------------------------------------------------------------------------------


def _save_kept(saver: Saver, value: Any) -> Any:
    return KEPT


def _refuse(what: str) -> SaveFunction:
    def refuse(saver: Saver, value: Any) -> Any:
        raise CannotCopy(f"it is {what}, which can't be copied")

    return refuse


# Rules for classes and their subclasses. Names avoid importing other libraries.
_RULES: dict[type | str, SaveFunction] = {
    type: save_atom,
    enum.Enum: save_atom,
    re.Pattern: save_atom,
    "_thread.lock": functions.save_lock,
    "_thread.RLock": functions.save_lock,
    logging.Logger: save_atom,
    np.dtype: arrays.save_dtype,
    np.ndarray: arrays.save_array,
    np.memmap: arrays.save_memmap,
    np.random.Generator: node_types.save_generator,
    np.random.BitGenerator: node_types.save_bits,
    np.random.RandomState: node_types.save_old_random,
    gymnasium.Space: node_types.save_space,
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer": _save_kept,
    "mujoco.renderer.Renderer": _save_kept,
    "mujoco._structs.MjModel": save_model,
    "mujoco._structs.MjData": save_data,
    "dm_control.mujoco.engine.Physics": save_physics,
    "dm_env.specs.Array": save_atom,
    "ale_py._ale_py.ALEInterface": save_ale,
    "jaxlib._jax.ArrayImpl": save_atom,
    "jaxlib.xla_extension.ArrayImpl": save_atom,
    "pygame.font.Font": _save_kept,
    "pygame.freetype.Font": _save_kept,
    "pygame.surface.Surface": save_picture,
    "pygame.time.Clock": _save_kept,
    "pyspiel.Game": save_atom,
    "pyspiel.GameType": save_atom,
    "pyspiel.State": node_types.save_game_state,
    "_io._IOBase": _refuse("an open file"),
    io.IOBase: _refuse("an open file"),
    mmap.mmap: _refuse("a mapped file"),
    "_socket.socket": _refuse("a socket"),
    threading.Thread: _refuse("a thread"),
    "subprocess.Popen": _refuse("a process"),
    "multiprocessing.process.BaseProcess": _refuse("a process"),
    BaseException: _refuse("an exception"),
    types.GeneratorType: _refuse("a generator"),
}


# Classes with an exact copy protocol: they are immutable, or it covers everything that they hold.
_EXACT: tuple[type, ...] = (
    *(slice, io.BytesIO, io.StringIO, Decimal, Fraction, UUID, date, datetime, time, timedelta, timezone),
    *(OrderedDict, defaultdict, Counter, partial, itertools.count, itertools.cycle, itertools.repeat),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
    *(pathlib.PosixPath, pathlib.PurePosixPath, *map(type, (iter([]), iter(()), iter(range(0)), iter("")))),
    *(bytearray, array.array, random.Random),
)
_EXACT_NAMES = ("pygame.rect.Rect", "pygame.color.Color", "pygame.math.Vector2", "pygame.math.Vector3")


SAVE_FUNCTIONS.update(
    {
        np.ndarray: arrays.save_array,
        list: node_types.save_list,
        dict: node_types.save_dict,
        tuple: node_types.save_tuple,
        deque: node_types.save_deque,
        set: node_types.save_set,
        frozenset: node_types.save_set,
        types.FunctionType: functions.save_function,
        types.MethodType: functions.save_method,
        types.BuiltinMethodType: functions.save_method,
        types.MethodWrapperType: functions.save_method,
        weakref.ref: _refuse("a weak reference"),
        weakref.ProxyType: _refuse("a weak reference"),
        weakref.CallableProxyType: _refuse("a weak reference"),
        types.MappingProxyType: _refuse("a view of a dict"),
        memoryview: _refuse("a view of memory"),
        np.void: _refuse("a record"),
        np.record: _refuse("a record"),
        np.random.SeedSequence: _refuse("a SeedSequence"),
        SimpleNamespace: node_types.save_object,
        object: save_atom,
        **dict.fromkeys(_EXACT, node_types.save_reduced),
        WatchedALE: save_ale,
    }
)


def find(kind: type) -> SaveFunction:
    """Returns the function that saves values of a new class."""
    for base in kind.__mro__:
        rule = _RULES.get(base) or _RULES.get(node_types.name_of(base))
        if rule is not None:
            return rule
    if node_types.is_ordinary(kind):
        return node_types.save_object
    is_immutable = issubclass(kind, _IMMUTABLE) and not has_attributes(kind)
    if is_immutable or node_types.name_of(kind) in _EXACT_NAMES:
        return node_types.save_reduced
    return node_types.save_trusted


_IMMUTABLE = (tuple, frozenset, int, float, complex, str, bytes)  # for example named tuples


# Atoms, and the nodes that C++ makes, reads or shares; it uses their attributes by name, see states.cc.
NODES = (
    *(ATOMS, Node, arrays.Array, node_types.Generator, node_types.BitGenerator, node_types.Space),
    *(node_types.Dict, node_types.Object),
)


# --- Bit-for-bit comparison of two snapshots, or of two results of an env --------------------------------


def difference(first: Any, second: Any, seen: dict[Any, Any] | None = None) -> str | None:
    """Returns the path to the first difference, empty for the whole value; `None` if there is none.

    Aliases must match: objects that are identical in one snapshot must be identical in the other.
    """
    if first is second or first is KEPT or second is KEPT:
        return None
    if type(first) is not type(second):
        return ""
    seen = {} if seen is None else seen
    if isinstance(first, Node):
        # Positive keys map ids of `first` to partners, negative keys those of `second`.
        partner = seen.setdefault(id(first), second)
        reverse = seen.setdefault(-id(second), first)
        if partner is not second or reverse is not first:
            return " (another object)"
        if (id(first), True) in seen:
            return None
        seen[id(first), True] = True
    match first:
        case float():
            return None if struct.pack("d", first) == struct.pack("d", second) else ""
        case np.ndarray():
            same = (first.dtype, first.shape) == (second.dtype, second.shape)
            return None if same and first.tobytes() == second.tobytes() else ""
        case np.generic():
            return None if first.tobytes() == second.tobytes() else ""
        case dict():
            if first.keys() != second.keys():
                return f"[{next(iter(first.keys() ^ second.keys()))!r}]"
            return _first(((f"[{key!r}]", first[key], second[key]) for key in first), seen)
        case list() | tuple():
            if len(first) != len(second):
                return ""
            pairs = zip(first, second, strict=True)
            return _first(((f"[{number}]", *pair) for number, pair in enumerate(pairs)), seen)
        case Node():
            return _first(first.parts(second), seen)
        case _:
            try:
                return None if bool(first == second) else ""
            except Exception:
                return None  # not comparable, so not a known difference


def _first(parts: Any, seen: dict[Any, Any]) -> str | None:
    for name, first, second in parts:
        where = difference(first, second, seen)
        if where is not None:
            return name + where
    return None
