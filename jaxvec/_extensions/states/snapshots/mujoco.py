"""Nodes of MuJoCo's models and data, which are in memory of its own, and of dm_control's `Physics`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from jaxvec._extensions.states.snapshots.nodes import CannotCopy, Node, Restorer, Saver


def _mujoco() -> Any:
    mujoco = sys.modules["mujoco"]  # already imported, since one of its objects exists
    if not hasattr(mujoco, "mj_copyData"):
        raise CannotCopy(
            f"it is of MuJoCo {mujoco.__version__}, and states need 3.5 or newer",
            'Install a newer one (pip install "mujoco>=3.5"), or save the actions by '
            "jaxvec.adapters.replay.ReplayEnv",
        )
    return mujoco


class _Memory:
    """The memory blocks that contain a model's numbers.

    Textures and shapes can be megabytes and are left out; an env that changes them must save its own state.
    """

    def __init__(self, model: Any) -> None:
        spans: list[tuple[int, int]] = []
        for name in dir(model):
            value = getattr(model, name, None) if not name.startswith(("_", *_SHAPES)) else None
            if isinstance(value, np.ndarray) and value.flags.writeable and value.nbytes:
                start = value.__array_interface__["data"][0]
                spans.append((start, start + value.nbytes))
        blocks: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            # MuJoCo aligns the arrays of its one block to at most 64 bytes: a smaller gap is padding.
            if blocks and 0 <= start - blocks[-1][1] < 64:
                blocks[-1] = blocks[-1][0], end
            elif not blocks or start >= blocks[-1][1]:
                blocks.append((start, end))
        self.blocks = [
            np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start))
            for start, end in blocks
        ]
        self.last: Any = None  # the latest result of `read`, which states share

    def read(self, options: Any) -> tuple[NDArray[np.uint8], list[Any]]:
        """Returns the numbers of a model and its `mjOption`; the previous tuple itself if unchanged."""
        blocks = np.concatenate(self.blocks)
        values = [getattr(options, name) for name in _option_names(type(options))]
        values = [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]
        last = self.last
        if last is None or last[1] != values or not np.array_equal(last[0], blocks):
            last = self.last = blocks, values
        return last

    def write(self, options: Any, numbers: tuple[NDArray[np.uint8], list[Any]]) -> None:
        """Writes the result of `read`, of this model or of one with the same sizes."""
        blocks, values = numbers
        if blocks.size != sum(block.size for block in self.blocks):
            raise CannotCopy("its MjModel has other sizes than the state's model")
        place = 0
        for block in self.blocks:
            np.copyto(block, blocks[place : place + block.size])
            place += block.size
        for name, value in zip(_option_names(type(options)), values, strict=True):
            if isinstance(value, bytes):
                array = getattr(options, name)
                array[...] = np.frombuffer(value, array.dtype).reshape(array.shape)
            else:
                setattr(options, name, value)


_SHAPES = ("tex_", "mesh_", "hfield_", "skin_", "bvh_", "oct_", "names", "paths", "text_")
_memories: WeakKeyDictionary[Any, _Memory] = WeakKeyDictionary()  # by model


def _memory(model: Any) -> _Memory:
    memory = _memories.get(model)
    if memory is None:
        memory = _memories[model] = _Memory(model)
    return memory


@cache
def _option_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_") and name != "signature"]


@dataclass(slots=True, eq=False)
class _Model(Node):
    """An `MjModel`; its numbers are restored in place."""

    numbers: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        _check(old, "MjModel")
        memory = _memory(old)
        if memory.read(old.opt) is not self.numbers:
            memory.write(old.opt, self.numbers)
        return old


def save_model(saver: Saver, model: Any) -> Any:
    return saver.remember(model, _Model(_memory(model).read(model.opt)))


@dataclass(slots=True, eq=False)
class _Data(Node):
    """An `MjData`, including quantities derived from its state, since envs read these before they step."""

    model: Any
    data: Any
    free: list[Any]

    def restore(self, restorer: Restorer, old: Any) -> Any:
        _check(old, "MjData")
        restorer.value(self.model, old.model)
        _mujoco().mj_copyData(old, old.model, self.data)
        return old

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield ".model", self.model, other.model
        for name in ("time", "qpos", "qvel", "act", "ctrl", "qacc_warmstart", "xpos", "sensordata"):
            yield f".{name}", getattr(self.data, name), getattr(other.data, name)

    def __del__(self) -> None:
        self.free.append(self.data)

    def __reduce__(self) -> Any:
        return _Data, (self.model, self.data, [])


# By an env's `MjData`, unused `MjData`s of dropped states, because making one takes a millisecond.
_free: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def save_data(saver: Saver, data: Any) -> Any:
    model = data.model
    mujoco = _mujoco()
    free = _free.setdefault(data, [])
    copy = free.pop() if free else mujoco.MjData(model)
    mujoco.mj_copyData(copy, model, data)
    return saver.remember(data, _Data(saver.value(model), copy, free))


@dataclass(slots=True, eq=False)
class _Physics(Node):
    """A `Physics` of dm_control. Its model and data are restored in place, so its views stay valid."""

    model: Any
    data: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        _check(old, "Physics")
        restorer.value(self.model, old.model.ptr)
        restorer.value(self.data, old.data.ptr)
        return old


def save_physics(saver: Saver, physics: Any) -> Any:
    return saver.remember(physics, _Physics(saver.value(physics.model.ptr), saver.value(physics.data.ptr)))


def _check(old: Any, name: str) -> None:
    if all(kind.__name__ != name for kind in type(old).__mro__):
        raise CannotCopy(
            f"the env has no {name} in this place",
            "Restore the state to an env that the same function made and that was reset",
        )
