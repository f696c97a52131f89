"""The state of one env and its wrappers: how it is saved and restored.

`StatefulEnv.restore` restores an `EnvSnapshot` into the same env, or into another of the same constructor.
`snapshots/` copies the attributes. `proof.py` verifies that an env continues from its states.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import gymnasium

from jaxvec import _native
from jaxvec._envs.envs import Env
from jaxvec._errors import EnvStateError
from jaxvec._extensions.states.snapshots import nodes
from jaxvec._extensions.states.snapshots.ale import watch_ale
from jaxvec._extensions.states.snapshots.node_types import name_of
from jaxvec._extensions.states.snapshots.snapshot import NODES, find

# --- The state of one env and its wrappers ---------------------------------------------------------------

StateFunctions: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]

ADVICE = (
    "Give the env methods get_state() and set_state(state) that save and restore the rest of its state, pass "
    "States(functions=(get_state, set_state)), or wrap the env in jaxvec.adapters.replay.ReplayEnv"
)
_MAX_SHARED_NODES = 1000  # nodes that the states of an env share; some envs make new ones in each reset
_GENERATOR = ("_np_random", "_np_random_seed")  # attributes that `gymnasium.Env` adds to a user's own


@dataclass(slots=True, eq=False)
class EnvSnapshot:
    """The result of `StatefulEnv.save`, which does not change. It pickles if everything in the env does."""

    kinds: tuple[str, ...]  # the names of the classes of the wrappers, outermost first, and of the env
    layers: list[nodes.Fields]  # the attributes of each of them
    own: Any  # a snapshot of the result of `get_state`; `None` without such a method


class StatefulEnv:
    """An env that can save its own state, with that of its wrappers, and restore it.

    Create it before the env's first reset: from then on it records the actions that ALE may repeat (sticky
    actions), which are in no attribute.
    """

    def __init__(
        self, env: Env, functions: StateFunctions | None = None, trust: tuple[type, ...] = ()
    ) -> None:
        """Starts to observe an env. The user's `functions` replace its attributes, except `np_random`.

        `trust` are classes to copy by their own protocol.
        """
        self.env = env
        self._functions = functions
        self._trust = trust
        self._shared: nodes.Shared = {}
        self._walked: set[int] = set()  # ids of containers with parts that are also reached from elsewhere
        self._find_layers()
        watch_ale(self._layers[-1])

    def save(self) -> EnvSnapshot:
        """Returns the state of the env and its wrappers.

        It contains their attributes and all objects that these refer to, random generators included. MuJoCo
        and ALE save their own memory. If the env has `get_state` and `set_state`, these save whatever can't
        be copied.

        Raises:
            EnvStateError: Something can't be copied. The message names the attribute and suggests what to do.
        """
        if self._compiled is not None and self._latest is not None:
            self._latest = self._compiled.save_changes(self._layers, self._classes, self._latest, NODES)
            if self._latest is not None:
                return EnvSnapshot(self._kinds, self._latest, None)
        self._update_layers()
        if len(self._shared) > _MAX_SHARED_NODES:
            self._shared.clear()
        state = nodes.save_again(self._walk)
        self._latest = state.layers
        return state

    def _walk(self) -> EnvSnapshot:
        """Saves the attributes of each layer, and the result of `get_state`."""
        saver = nodes.Saver(find, self._nodes.copy(), self._shared, self._walked, trust=self._trust)
        for layer in self._layers:  # an attribute that holds `vars` of a layer is refused
            saver.owners[id(vars(layer))] = self._nodes[id(layer)]
        layers: list[nodes.Fields] = []
        own: Any = None
        layer = base = self._layers[-1]
        try:
            for layer in self._layers:
                layers.append(self._save_layer(saver, layer))
            if self._own is not None:
                (get_state, _), target = self._own
                own = saver.value(get_state(target))
        except nodes.CannotCopy as error:
            path = f"{type(layer).__name__}." + "".join(
                name if name.startswith("[") or not number else f".{name}"
                for number, name in enumerate(error.path)
            )
            # The reason is "it is an open file", or a sentence with a subject of its own.
            reason = error.what[2:] if error.what.startswith("it is ") else f": {error.what}"
            raise EnvStateError(
                f"cannot save {type(base).__name__}: attribute {path}{reason}. {error.advice or ADVICE}"
            ) from error
        return EnvSnapshot(self._kinds, layers, own)

    def _save_layer(self, saver: nodes.Saver, layer: Any) -> nodes.Fields:
        """Returns the attributes of a layer; of an env with `get_state`, those that this may leave out."""
        if self._own is None or layer is not self._layers[-1]:
            return nodes.save_layer(saver, layer)
        if self._functions is not None:
            values = vars(layer)
            generator = {name: saver.value(values[name]) for name in _GENERATOR if name in values}
            return {}, generator, None
        if isinstance(layer, gymnasium.Wrapper):
            return nodes.NOTHING  # its `get_state` covers the env inside, too
        saver.lenient = True
        fields = nodes.save_layer(saver, layer)
        saver.lenient = False
        return fields

    def check_fit(self, state: EnvSnapshot) -> None:
        """Raises `EnvStateError` if a state is of an env of another class, or with other wrappers."""
        self._update_layers()
        if state.kinds != self._kinds:
            raise EnvStateError(
                f"cannot restore a state of {' of '.join(state.kinds)} into {' of '.join(self._kinds)}; "
                "restore it into an env that the same function made"
            )

    def restore(self, state: EnvSnapshot, *, reorders: bool = False) -> bool:
        """Restores a state of this env, or of another that the same function built; it may be used again.

        Values are written into the existing objects, because windows, observation buffers and renderers may
        refer to them. Returns whether env and wrappers have the same attributes as before, with other values.
        With `reorders`, sets get another order of iteration, to find out whether the env depends on it.

        Raises:
            EnvStateError: The state is that of an env of another class, or with other wrappers.
        """
        if (
            self._compiled is not None
            and self._kinds == state.kinds
            and self._compiled.restore_changes(self._layers, self._classes, state.layers, NODES)
        ):
            return True
        self.check_fit(state)
        restorer = nodes.Restorer(self._layers, reorders=reorders)
        try:
            # `set_state` first, so that the saved attributes overwrite its side effects.
            if self._own is not None:
                (_, set_state), target = self._own
                set_state(target, restorer.value(state.own, None))
            for layer, fields in zip(self._layers, state.layers, strict=True):
                nodes.restore_layer(restorer, layer, fields)
        except nodes.CannotCopy as error:
            name = type(self._layers[-1]).__name__
            raise EnvStateError(f"cannot restore {name}: {error.what}. {error.advice or ADVICE}") from error
        return False

    def _find_layers(self) -> None:
        self._layers = _layers(self.env)
        self._pairs = tuple(itertools.pairwise(self._layers))
        self._classes = tuple(map(type, self._layers))
        self._kinds = tuple(map(name_of, self._classes))
        base = self._layers[-1]
        methods = _own_methods(type(base))
        # The user's functions or methods that save and restore, and the env that they take.
        self._own: tuple[StateFunctions, Any] | None = None
        if self._functions is not None:
            self._own = self._functions, self.env
        elif methods is not None:
            self._own = methods, base
        # Between two snapshots, usually only numbers, arrays and random generators change. C++ then shares
        # all unchanged dicts and nodes with the latest snapshot, without a walk. At any other change it does
        # nothing. It covers attributes only.
        is_covered = self._own is None and not any(map(nodes.slots_of, self._classes))
        self._compiled = _native.ext if is_covered else None
        self._latest: list[nodes.Fields] | None = None  # of each layer, if C++ may make the next one from it
        self._nodes: dict[int, Any] = {
            id(layer): nodes.Layer(number) for number, layer in enumerate(self._layers)
        }

    def _update_layers(self) -> None:
        # User code may insert and remove wrappers, and change the class of an env.
        wraps = all(outer.env is inner for outer, inner in self._pairs)
        if not wraps or tuple(map(type, self._layers)) != self._classes:
            self._find_layers()


def _layers(env: Any) -> list[Any]:
    """Returns the wrappers, outermost first, and the env. A wrapper with `get_state` counts as the env."""
    layers = [env]
    while isinstance(env, gymnasium.Wrapper) and _own_methods(type(env)) is None:
        env = env.env
        layers.append(env)
    return layers


@cache
def _own_methods(kind: type) -> StateFunctions | None:
    """Returns `get_state` and `set_state` of a class; `None` without such a pair."""
    methods: Any = getattr(kind, "get_state", None), getattr(kind, "set_state", None)
    return methods if _accepts(methods[0], 1) and _accepts(methods[1], 2) else None


def _accepts(method: Any, count: int) -> bool:
    try:
        inspect.signature(method).bind(*[None] * count)
    except (TypeError, ValueError):
        return False
    return True
