"""Envs of other interpreters: made by name, adapted to Gymnasium, with spaces that any process can read.

A worker in another interpreter (`Workers(python=...)`) may have an older Gymnasium, or gym, for its envs. Its
own code uses the Gymnasium of the program, which envs do not see. `ForeignEnv` joins the two.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.envs.registration import EnvSpec

from jaxvec import _util
from jaxvec._envs.envs import EnvFn
from jaxvec._spec import EnvSpaces

# --- Constructors -----------------------------------------------------------------------------------------

_LIBRARIES = ("gymnasium", "gym")
_SPEC_FIELDS = ("id", "entry_point", "max_episode_steps", "order_enforce", "disable_env_checker", "kwargs")


def by_name(env: Any) -> Any:
    """Returns a function for an id, an `EnvSpec` or a `"module:attribute"`, which only workers resolve."""
    if isinstance(env, EnvSpec):
        return partial(_make_spec, {name: getattr(env, name) for name in _SPEC_FIELDS})
    return partial(_make, env) if isinstance(env, str) else env


def build_adapted(env_fn: EnvFn) -> Any:
    """Builds an env, and adapts it if it is one of an older library."""
    try:
        env = env_fn()
    except ImportError as error:
        package = (error.name or "the package").partition(".")[0]
        advice = f"(in the interpreter {sys.executable}); install it there: {sys.executable} -m pip install"
        raise ImportError(f"{error} {advice} {package}", name=error.name) from error
    kinds = tuple(sys.modules[name].Env for name in _LIBRARIES if name in sys.modules)
    return ForeignEnv(env) if isinstance(env, kinds) and not isinstance(env, gymnasium.Env) else env


def _make(name: str, **kwargs: Any) -> Any:
    module, _, attribute = name.rpartition(":")
    if module:
        target: Any = importlib.import_module(module)
        for part in attribute.split("."):
            target = getattr(target, part, None)
        if target is not None:
            return target(**kwargs)
    unknown: Exception | None = None
    # A library that is not installed here comes last: importing it finds the program's Gymnasium.
    libraries = sorted(_LIBRARIES, key=lambda name: not any(importlib.metadata.distributions(name=name)))
    for library in [module] if module in _LIBRARIES else libraries:
        try:
            imported: Any = importlib.import_module(library)
        except ModuleNotFoundError:
            continue
        try:
            return imported.make(attribute, **kwargs)
        except imported.error.UnregisteredEnv as error:
            unknown = unknown or error
    raise LookupError(
        f"there is no env {name!r} in the interpreter {sys.executable}: {unknown}. If a package registers it "
        'when it is imported, name the package: "package:id"'
    ) from unknown


def _make_spec(values: Mapping[str, Any], **kwargs: Any) -> Any:
    own: Any = importlib.import_module("gymnasium")
    return own.make(own.envs.registration.EnvSpec(**values), **kwargs)


# --- Adapted envs -----------------------------------------------------------------------------------------


class ForeignEnv(gymnasium.Env[Any, Any]):
    """An env of Gymnasium 0.26 to 1.1, or of gym 0.21 to 0.26, as one of the Gymnasium that jaxvec uses.

    It converts spaces, and resets and steps of gym before 0.26. Other attributes are those of the env.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space = convert_space(env.observation_space)
        self.action_space = convert_space(env.action_space)
        if (layer := self._owner("reward_space")) is not None:
            self.reward_space = convert_space(layer.reward_space)
        self.metadata = dict(env.metadata)
        self.render_mode = layer.render_mode if (layer := self._owner("render_mode")) is not None else None
        self._takes_seed = all(_accepts(layer.reset, "seed") for layer in self._layers())

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        keywords: dict[str, Any] = {} if options is None else {"options": options}
        if seed is not None and self._takes_seed:
            keywords["seed"] = seed
        elif seed is not None:
            self.env.seed(seed)
        result = self.env.reset(**keywords)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}  # gym before 0.26

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if len(result) != 4:
            return result
        obs, reward, done, info = result  # of gym before 0.26
        truncated = bool(info.get("TimeLimit.truncated", False))
        return obs, reward, bool(done) and not truncated, truncated, info

    def render(self) -> Any:
        old = self.render_mode is None and _accepts(self.unwrapped.render, "mode")
        return self.env.render(mode="rgb_array") if old else self.env.render()

    def close(self) -> None:
        self.env.close()

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        layer = self._owner(name)
        if layer is not None or force:
            setattr(self.unwrapped if layer is None else layer, name, value)
        return layer is not None or force

    def __getattr__(self, name: str) -> Any:
        if name == "env" or (name.startswith("__") and name.endswith("__")):  # while it is unpickled
            raise AttributeError(name)
        layer = self._owner(name)
        return getattr(self.unwrapped if layer is None else layer, name)

    def _owner(self, name: str) -> Any:
        # Not by `getattr`, which in wrappers of some versions warns, or refuses private names.
        return next(
            (layer for layer in self._layers() if name in vars(layer) or hasattr(type(layer), name)), None
        )

    def _layers(self) -> list[Any]:
        """Returns the wrappers, outermost first, and the env."""
        layers = [self.env]
        while layers[-1] is not self.env.unwrapped and "env" in vars(layers[-1]):
            layers.append(layers[-1].env)
        return layers


def _accepts(method: Any, name: str) -> bool:
    parameters = inspect.signature(method).parameters
    return name in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


# --- Spaces as plain data ---------------------------------------------------------------------------------


def convert_space(space: Any) -> Space[Any]:
    """Converts a space of another version of Gymnasium, or of gym, or of a subclass that others lack."""
    return build_space(*describe_space(space))


def describe_space(space: Any) -> tuple[str, dict[str, Any]]:
    """Returns the name of a space's class in Gymnasium, and the arguments that make an equal one."""
    for kind in type(space).__mro__:
        if kind.__module__.startswith(_LIBRARIES) and kind.__name__ in _ARGUMENTS:
            return kind.__name__, _ARGUMENTS[kind.__name__](space)
    raise TypeError(f"{type(space).__module__}.{type(space).__qualname__} is no space of Gymnasium or gym")


def build_space(name: str, arguments: dict[str, Any]) -> Space[Any]:
    return getattr(spaces, name)(**arguments)


def to_plain(description: Any) -> Any:
    """Returns a `Description` without subclasses of spaces. From now on spaces pickle as plain data."""
    for name in _ARGUMENTS:
        _util.Pickler.dispatch_table[getattr(spaces, name)] = lambda space: (
            build_space,
            describe_space(space),
        )
    env_spaces = description.spaces
    converted = (env_spaces.observation, env_spaces.action, env_spaces.reward)
    return replace(description, spaces=EnvSpaces(*(space and convert_space(space) for space in converted)))


def _integers(space: Any) -> dict[str, Any]:
    # Older spaces have no `start`. Older constructors take no `dtype`: it is always int64.
    start = getattr(space, "start", None)
    dtype = np.dtype(space.dtype)
    arguments = {} if start is None or not np.any(start) else {"start": start}
    return arguments if dtype == np.int64 else {**arguments, "dtype": dtype}


def _each(space: Any) -> dict[str, Any]:
    return {"spaces": tuple(map(convert_space, space.spaces))}


_ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Box": lambda s: {"low": np.array(s.low), "high": np.array(s.high), "dtype": np.dtype(s.dtype)},
    "Discrete": lambda s: {"n": int(s.n), **_integers(s)},
    "MultiDiscrete": lambda s: {"nvec": np.array(s.nvec), **_integers(s)},
    "MultiBinary": lambda s: {"n": tuple(s.shape) if len(s.shape) > 1 else int(s.n)},
    "Tuple": _each,
    "OneOf": _each,
    "Dict": lambda s: {"spaces": {key: convert_space(child) for key, child in s.spaces.items()}},
    "Text": lambda s: {
        **{name: int(getattr(s, name)) for name in ("min_length", "max_length")},
        "charset": frozenset(s.character_set),
    },
    "Sequence": lambda s: {"space": convert_space(s.feature_space), "stack": getattr(s, "stack", False)},
    "Graph": lambda s: {
        "node_space": convert_space(s.node_space),
        "edge_space": s.edge_space and convert_space(s.edge_space),
    },
}
