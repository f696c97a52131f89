"""State that is in other libraries' memory, and how these copy it: MuJoCo's and ALE's."""

from __future__ import annotations

import ctypes
import re
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from jaxvec._slices._snapshots import NAMED, CannotCopy, Node, Putter, Taker

# --- MuJoCo -----------------------------------------------------------------------------------


def _mujoco() -> Any:
    return sys.modules["mujoco"]  # it is loaded: one of its objects is there


class _Memory:
    """The numbers of a model, as blocks of the memory that it has them in.

    Pictures and shapes, which can be megabytes, are left out: an env that changes them says its state itself.
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
            # MuJoCo allocates them at once, and aligns each.
            if blocks and 0 <= start - blocks[-1][1] < 64:
                blocks[-1] = blocks[-1][0], end
            elif not blocks or start >= blocks[-1][1]:
                blocks.append((start, end))
        self.blocks = [
            np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start))
            for start, end in blocks
        ]
        self.last: Any = None  # what was read last, for states to share

    def read(self, options: Any) -> tuple[NDArray[np.uint8], list[Any]]:
        """Returns the numbers, and those of `mjOption`; the same object if they are the same."""
        blocks = np.concatenate(self.blocks)
        values = [getattr(options, name) for name in _option_names(type(options))]
        values = [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]
        last = self.last
        if last is None or last[1] != values or not np.array_equal(last[0], blocks):
            last = self.last = blocks, values
        return last

    def write(self, options: Any, numbers: tuple[NDArray[np.uint8], list[Any]]) -> None:
        """Writes what was read, of this model or of one like it."""
        blocks, values = numbers
        if blocks.size != sum(block.size for block in self.blocks):
            raise CannotCopy("its MjModel has other sizes now")
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
    found = _memories.get(model)
    if found is None:
        found = _memories[model] = _Memory(model)
    return found


def _option_names(kind: type, known: dict[type, list[str]] = {}) -> list[str]:  # noqa: B006
    if kind not in known:
        known[kind] = [name for name in dir(kind) if not name.startswith("_") and name != "signature"]
    return known[kind]


class _Model(Node):
    """A `MjModel`: its numbers are written again."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def put(self, putter: Putter, old: Any) -> Any:
        _check(old, "MjModel")
        memory = _memory(old)
        if memory.read(old.opt) is not self.numbers:
            memory.write(old.opt, self.numbers)
        return old


class _Data(Node):
    """A `MjData`, with all that was computed from its state, because envs read that before they step."""

    __slots__ = ("data", "free")

    def __init__(self, data: Any, free: list[Any]) -> None:
        self.data = data
        self.free = free

    def put(self, putter: Putter, old: Any) -> Any:
        _check(old, "MjData")
        _mujoco().mj_copyData(old, old.model, self.data)
        return old

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        for name in ("time", "qpos", "qvel", "act", "ctrl", "qacc_warmstart", "xpos", "sensordata"):
            yield f".{name}", getattr(self.data, name), getattr(other.data, name)

    def __del__(self) -> None:
        self.free.append(self.data)

    def __reduce__(self) -> Any:
        return _Data, (self.data, [])


# By an env's data, memory for copies that no state uses any more: to make it takes a millisecond.
_free: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def _take_model(taker: Taker, model: Any) -> Any:
    node = _Model(_memory(model).read(model.opt))
    taker.remember(model, node)
    return node


def _take_data(taker: Taker, data: Any) -> Any:
    model = data.model
    taker.value(model)
    free = _free.get(data)
    if free is None:
        free = _free[data] = []
    copy = free.pop() if free else _mujoco().MjData(model)
    _mujoco().mj_copyData(copy, model, data)
    node = _Data(copy, free)
    taker.remember(data, node)
    return node


class _Physics(Node):
    """dm_control's `Physics`, whose many views of its data stay."""

    __slots__ = ("data", "model")

    def __init__(self, model: Any, data: Any) -> None:
        self.model = model
        self.data = data

    def put(self, putter: Putter, old: Any) -> Any:
        _check(old, "Physics")
        putter.value(self.model, old.model.ptr)
        putter.value(self.data, old.data.ptr)
        return old


def _take_physics(taker: Taker, physics: Any) -> Any:
    node = _Physics(taker.value(physics.model.ptr), taker.value(physics.data.ptr))
    taker.remember(physics, node)
    return node


def _check(old: Any, name: str) -> None:
    if all(kind.__name__ != name for kind in type(old).__mro__):
        raise CannotCopy(
            f"there is no {name} where the state has one",
            "Restore it into an env that the same function made and that was reset",
        )


NAMED["mujoco._structs.MjModel"] = _take_model
NAMED["mujoco._structs.MjData"] = _take_data
NAMED["dm_control.mujoco.engine.Physics"] = _take_physics


# --- ALE --------------------------------------------------------------------------------------

_PERIOD, _SHIFT = 624, 397  # of MT19937, of which ALE's random numbers are
_NUMBERS = re.compile(rb"(?:\d+ ){%d}\d+" % _PERIOD)
_STICKY = "repeat_action_probability"


class WatchedALE:
    """An `ALEInterface` that notes the last actions.

    ALE repeats the action before with some probability, but does not say which one it was: neither it nor its
    state does. What its random numbers were can be told from its state.
    """

    def __init__(self, ale: Any) -> None:
        self.ale = ale
        self.actions: deque[tuple[Any, ...]] = deque(maxlen=128)
        self.before: Any = _UNKNOWN  # which action could have been repeated before those
        self.act_itself = ale.act

    def act(self, *action: Any) -> Any:
        actions = self.actions
        if len(actions) == 128:
            self.before = _UNKNOWN
        actions.append(action)
        return self.act_itself(*action)

    def forget(self, before: Any) -> None:
        self.actions.clear()
        self.before = before

    def reset_game(self) -> None:
        self.ale.reset_game()
        self.forget(None)

    def loadROM(self, *args: Any) -> None:  # noqa: N802
        self.ale.loadROM(*args)
        self.forget(None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.ale, name)

    def repeated(self, probability: float, random: _Twister) -> Any:
        """Returns the action that ALE would repeat next, `None` for none."""
        # Of two numbers for an action, the second is for a second player.
        kept = random.last(2 * len(self.actions))[-2::-2] / 2**32
        for action, number in zip(reversed(self.actions), kept[: len(self.actions)], strict=False):
            if number >= probability:
                return action
        return self.before


_UNKNOWN = object()


class _Twister:
    """The generator of a state, for what comes next and what was before."""

    def __init__(self, state: Any) -> None:
        text = state.serialize()
        *_, match = _NUMBERS.finditer(text)
        size = int.from_bytes(text[match.start() - 4 : match.start()], "little")
        *words, self.place = map(int, text[match.start() : match.start() + size].split())
        self.words = np.array(words, np.uint32)

    def last(self, count: int) -> NDArray[np.uint32]:
        """Returns the last numbers that were drawn, as far as they can be told."""
        words = self.words
        first = _PERIOD - _SHIFT + 1
        # The words of the period before, by the inverse of the recurrence.
        mixed = words[first - 1 :] ^ words[first - 1 - (_PERIOD - _SHIFT) : _SHIFT]
        high = mixed >> np.uint32(31)
        mixed = ((mixed ^ (high * np.uint32(0x9908B0DF))) << np.uint32(1)) | high
        earlier = (mixed[1:] & np.uint32(0x80000000)) | (mixed[:-1] & np.uint32(0x7FFFFFFF))
        return _temper(np.concatenate([earlier, words[: self.place]]))[-count or _PERIOD * 2 :]

    def next(self, count: int) -> NDArray[np.uint64]:
        """Returns the numbers that will be drawn."""
        bits = np.random.MT19937()
        bits.state = {"bit_generator": "MT19937", "state": {"key": self.words, "pos": self.place}}
        return bits.random_raw(count)


def _temper(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    words = words ^ (words >> np.uint32(11))
    words = words ^ ((words << np.uint32(7)) & np.uint32(0x9D2C5680))
    words = words ^ ((words << np.uint32(15)) & np.uint32(0xEFC60000))
    return words ^ (words >> np.uint32(18))


def watch(base: Any) -> None:
    """Notes the actions of ALE from now on, if it repeats some."""
    ale = vars(base).get("ale")
    if _is_ale(ale) and ale.getFloat(_STICKY) > 0:
        base.ale = WatchedALE(ale)
        if ale.getEpisodeFrameNumber() == 0:
            base.ale.forget(None)


def _is_ale(value: Any) -> bool:
    return f"{type(value).__module__}.{type(value).__qualname__}" == "ale_py._ale_py.ALEInterface"


class _ALE(Node):
    """ALE's own state, and the action that it may repeat: how often to give it until ALE takes it."""

    __slots__ = ("action", "state", "times")

    def __init__(self, state: Any, action: Any, times: int) -> None:
        self.state = state
        self.action = action
        self.times = times

    def put(self, putter: Putter, old: Any) -> Any:
        watched = isinstance(old, WatchedALE)
        ale = old.ale if watched else old
        if not _is_ale(ale):
            raise CannotCopy("there is no ALEInterface where the state has one")
        ale.restoreState(self.state)
        if self.times:
            for _ in range(self.times):
                ale.act(*self.action)
            ale.restoreState(self.state)
        if watched:
            old.forget(self.action)
        elif ale.getFloat(_STICKY) > 0:
            old = WatchedALE(ale)
            old.forget(self.action)
        return old

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.state.serialize(), other.state.serialize()


def _take_ale(taker: Taker, value: Any) -> Any:
    watched = isinstance(value, WatchedALE)
    ale = value.ale if watched else value
    state = ale.cloneState(include_rng=True)
    action, times = None, 0
    probability = ale.getFloat(_STICKY)
    if probability > 0:
        random = _Twister(state)
        action = value.repeated(probability, random) if watched else _UNKNOWN
        if action is _UNKNOWN:
            raise CannotCopy(
                "ALE does not say which action it may repeat",
                "Take the env's first state right after a reset" if not watched else "Lower the probability",
            )
        if action is None:
            action = (0,)  # no operation, as after a reset
        takes = random.next(1000)[::2] / 2**32 >= probability
        times = int(takes.argmax()) + 1
        if not takes.any():
            times = 0  # it is never taken
    node = _ALE(state, action, times)
    taker.remember(value, node)
    return node


NAMED["ale_py._ale_py.ALEInterface"] = _take_ale
NAMED[f"{WatchedALE.__module__}.WatchedALE"] = _take_ale
