"""Which kind of thing is taken how."""

from __future__ import annotations

import enum
import io
import random
import types
import weakref
from collections import deque
from typing import Any

import gymnasium
import numpy as np

from jaxvec._slices._snapshots._ale import WatchedALE, take_ale
from jaxvec._slices._snapshots._arrays import take_array
from jaxvec._slices._snapshots._atoms import take_atom
from jaxvec._slices._snapshots._containers import take_deque, take_dict, take_list, take_set, take_tuple
from jaxvec._slices._snapshots._core import KEPT, CannotCopy, TakesParts, Taking
from jaxvec._slices._snapshots._functions import take_function, take_method, take_weak
from jaxvec._slices._snapshots._generators import take_bits, take_generator, take_random
from jaxvec._slices._snapshots._mujoco import take_data, take_model, take_physics
from jaxvec._slices._snapshots._objects import is_ordinary, name_of, take_object, take_reduced
from jaxvec._slices._snapshots._pictures import take_picture
from jaxvec._slices._snapshots._spaces import take_space


def _take_kept(taker: TakesParts, value: Any) -> Any:
    return KEPT


def _refuse(what: str) -> Taking:
    def refuse(taker: TakesParts, value: Any) -> Any:
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


# By class; `Taker` adds to it what `find` says of others.
TAKINGS: dict[type, Taking] = {
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
