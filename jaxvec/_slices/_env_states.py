"""The state of one env and of its wrappers as a value: taken, put back, and proved."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium
import numpy as np

from jaxvec._errors import EnvStateError
from jaxvec._slices import _foreign
from jaxvec._slices._envs import Env
from jaxvec._slices._snapshots import CannotCopy, Fields, Node, Putter, Taker

__all__ = ["EnvState", "prove", "put", "take", "watch"]

StateFunctions: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]

_ADVICE = (
    "Give the env methods get_state() and set_state(state), or pass state_functions=(get_state, set_state), "
    "which take and put all that is not in such attributes"
)
_GENERATOR = ("_np_random", "_np_random_seed")  # what a `gymnasium.Env` has beside a user's own state


class EnvState:
    """What `take` returns. It never changes, and pickles if what the env holds does.

    Attributes:
        kinds: the names of the classes of the wrappers, outmost first, and of the env.
        layers: the attributes of each.
        own: what the user's function, or the env's own method, has returned, taken the same way.
    """

    __slots__ = ("kinds", "layers", "own")

    def __init__(self, kinds: tuple[str, ...], layers: list[Fields], own: Any) -> None:
        self.kinds = kinds
        self.layers = layers
        self.own = own


def watch(env: Env) -> None:
    """Has an env note what its state can't be told from: the actions that sticky ones of ALE may repeat.

    Call it when the env was made, before its first reset; others are left as they are.
    """
    _foreign.watch(_layers(env)[-1])


def take(env: Env, functions: StateFunctions | None = None) -> EnvState:
    """Takes the state of an env and its wrappers.

    It is what their attributes hold, and what those hold, random numbers among it. Where that is memory of
    MuJoCo or ALE, it is taken by their own ways; where an env has `get_state` and `set_state`, these are
    asked for the rest.

    Args:
        env: the env, with its wrappers.
        functions: the user's `(get_state, set_state)`; then they say all of the env within the wrappers, but
            for its `np_random`.

    Raises:
        EnvStateError: something is no value; names the attribute, and says what to do.
    """
    layers = _layers(env)
    base = layers[-1]
    methods = _own_methods(type(base)) if functions is None else None
    taker = Taker(layers)
    taken: list[Fields] = []
    own: Any = None
    layer: Any = base
    try:
        for layer in layers:
            if layer is not base:
                taken.append(taker.layer(layer))
            elif functions is not None:
                held = {name: vars(base)[name] for name in _GENERATOR if name in vars(base)}
                taken.append(({}, {name: taker.value(value) for name, value in held.items()}, -1))
                own = taker.value(functions[0](env))
            else:
                taker.lenient = methods is not None
                taken.append(taker.layer(base))
                taker.lenient = False
                if methods is not None:
                    own = taker.value(methods[0](base))
    except CannotCopy as error:
        path = f"{type(layer).__name__}." + "".join(
            name if name.startswith("[") or not number else f".{name}" for number, name in enumerate(error.path)
        )
        raise EnvStateError(
            f"the state of {type(base).__name__} can't be taken: of {path}, {error.what}. "
            + (error.advice or _ADVICE)
        ) from error
    return EnvState(tuple(map(_kind, layers)), taken, own)


def put(env: Env, state: EnvState, functions: StateFunctions | None = None) -> Env:
    """Has an env go on from a state, as often as you like, and returns it.

    The env and its wrappers stay the objects that they are, so windows, the memory that
    `set_observation_buffer` gave, and whatever refers to them stay theirs.

    Args:
        env: the env of which the state was taken, or another that the same function made.
        state: of `take`.
        functions: as for `take`.

    Raises:
        EnvStateError: the state is that of an env of another class, or with other wrappers.
    """
    layers = _layers(env)
    if tuple(map(_kind, layers)) != state.kinds:
        raise EnvStateError(
            f"a state of {' of '.join(state.kinds)} can't be put into {' of '.join(map(_kind, layers))}; "
            "restore states into envs that the same function made"
        )
    base = layers[-1]
    putter = Putter(layers)
    try:
        # First what others do, so that what the attributes say is the last word.
        if functions is not None:
            functions[1](env, putter.value(state.own, None))
        elif (methods := _own_methods(type(base))) is not None:
            methods[1](base, putter.value(state.own, None))
        for layer, fields in zip(layers, state.layers, strict=True):
            putter.layer(layer, fields)
    except CannotCopy as error:
        raise EnvStateError(
            f"a state of {type(base).__name__} can't be put back: {error.what}. {error.advice or _ADVICE}"
        ) from error
    return env


def _layers(env: Any) -> list[Any]:
    layers = [env]
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        layers.append(env)
    return layers


def _kind(layer: Any, known: dict[type, str] = {}) -> str:  # noqa: B006: a cache
    kind = type(layer)
    name = known.get(kind)
    if name is None:
        name = known[kind] = f"{kind.__module__}.{kind.__qualname__}"
    return name


def _own_methods(kind: type, known: dict[type, Any] = {}) -> Any:  # noqa: B006: a cache
    """Returns an env's own `get_state` and `set_state`, if it has such a pair."""
    if kind not in known:
        methods = getattr(kind, "get_state", None), getattr(kind, "set_state", None)
        known[kind] = methods if _takes(methods[0], 1) and _takes(methods[1], 2) else None
    return known[kind]


def _takes(method: Any, count: int) -> bool:
    try:
        inspect.signature(method).bind(*[None] * count)
    except (TypeError, ValueError):
        return False
    return True
