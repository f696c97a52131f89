"""State that is in other libraries' memory, and how these copy it: MuJoCo's and ALE's."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from jaxvec._slices._snapshots import NAMED, CannotCopy, Node, Putter, Taker

# --- MuJoCo -----------------------------------------------------------------------------------


class _Image:
    """The bytes of a model, which hardly ever changes, so all states of all envs that have it share one.

    Attributes:
        words: as `mj_saveModel` writes them, `[n]` uint64, zeros at the end.
        size: how many they are, without these.
        free: memory for data of such a model that no state uses any more; to make it takes a millisecond.
    """

    def __init__(self, words: NDArray[np.uint64], size: int) -> None:
        self.words = words
        self.size = size
        self.free: list[Any] = []

    def __reduce__(self) -> Any:
        return _intern, (self.words, self.size)


_images: WeakValueDictionary[int, _Image] = WeakValueDictionary()  # by the hash of their bytes
_last_images: WeakKeyDictionary[Any, _Image] = WeakKeyDictionary()  # by model


def _mujoco() -> Any:
    return sys.modules["mujoco"]  # it is loaded: one of its objects is there


def _words(model: Any) -> NDArray[np.uint64]:
    mujoco = _mujoco()
    size = mujoco.mj_sizeModel(model)
    words = np.zeros(-(-size // 8), np.uint64)
    mujoco.mj_saveModel(model, None, words.view(np.uint8)[:size])
    return words


def _intern(words: NDArray[np.uint64], size: int) -> _Image:
    key = hash(words.tobytes())
    image = _images.get(key)
    if image is None or not np.array_equal(image.words, words):
        image = _images[key] = _Image(words, size)
    return image


def _image(model: Any) -> _Image:
    mujoco = _mujoco()
    words = _words(model)
    image = _last_images.get(model)
    if image is None or not np.array_equal(image.words, words):
        image = _last_images[model] = _intern(words, mujoco.mj_sizeModel(model))
    return image


class _Model(Node):
    """A `MjModel`: its numbers are written again where they are others now."""

    __slots__ = ("image",)

    def __init__(self, image: _Image) -> None:
        self.image = image

    def put(self, putter: Putter, old: Any) -> Any:
        _check(old, "MjModel")
        if np.array_equal(_image(old).words, self.image.words):
            return old
        mujoco = _mujoco()
        name = "model.mjb"
        model = mujoco.MjModel.from_binary_path(name, {name: self.image.words.tobytes()[: self.image.size]})
        _write(old, model)
        for part in ("opt", "stat", "vis"):
            _write(getattr(old, part), getattr(model, part))
        if not np.array_equal(_words(old), self.image.words):
            raise CannotCopy(
                "its MjModel has other sizes now, or was changed where Python can't change it back",
                "Change it in the env's constructor only, or pass state_functions=(get_state, set_state)",
            )
        return old


def _write(target: Any, source: Any) -> None:
    """Copies numbers from one of MuJoCo's records to another."""
    for name in dir(source):
        value = getattr(source, name, None)
        if name.startswith("_") or callable(value):
            continue
        if isinstance(value, np.ndarray):
            own = getattr(target, name)
            if own.shape == value.shape and own.flags.writeable:
                np.copyto(own, value)
        elif isinstance(value, (bool, int, float)):
            if value != getattr(target, name):
                try:
                    setattr(target, name, value)
                except AttributeError:  # a size
                    continue
        elif type(value).__module__ == type(source).__module__:
            _write(getattr(target, name), value)  # a part of `vis`


class _Data(Node):
    """A `MjData`, with all that was computed from its state, because envs read that before they step."""

    __slots__ = ("data", "image")

    def __init__(self, image: _Image, data: Any) -> None:
        self.image = image
        self.data = data

    def put(self, putter: Putter, old: Any) -> Any:
        mujoco = _mujoco()
        _check(old, "MjData")
        mujoco.mj_copyData(old, old.model, self.data)
        return old

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        for name in ("time", "qpos", "qvel", "act", "ctrl", "qacc_warmstart", "xpos", "sensordata"):
            yield f".{name}", getattr(self.data, name), getattr(other.data, name)

    def __del__(self) -> None:
        self.image.free.append(self.data)

    def __reduce__(self) -> Any:
        return _Data, (self.image, self.data)


def _take_model(taker: Taker, model: Any) -> Any:
    node = _Model(_image(model))
    taker.remember(model, node)
    return node


def _take_data(taker: Taker, data: Any) -> Any:
    mujoco = _mujoco()
    # That of the model that is a part of the same state comes first or later, but it is taken once.
    image = taker.value(data.model).image
    try:
        copy = image.free.pop()
    except IndexError:
        copy = mujoco.MjData(data.model)
    mujoco.mj_copyData(copy, data.model, data)
    node = _Data(image, copy)
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
