"""Makes single envs as Stable-Baselines3's vector envs take them.

Workers import this module, so it must import neither JAX nor, unless an env is old Gym's, Stable-Baselines3.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cloudpickle
import gymnasium

from jaxvec import _util

IS_WRAPPED = "_jaxvec_is_wrapped"  # a method of each env: whether it is, in a wrapper of this class


class OwnEnvFn:
    """A constructor for a worker; what it refers to is no other env's, though that be in the same worker."""

    def __init__(self, env_fn: Callable[[], Any]) -> None:
        self._env_fn = env_fn

    def __call__(self) -> Any:
        return prepare(self._env_fn())

    def __reduce__(self) -> Any:
        return _load, (_util.dumps(self._env_fn),)


def _load(pickled: bytes) -> OwnEnvFn:
    return OwnEnvFn(cloudpickle.loads(pickled))


def prepare(env: Any) -> gymnasium.Env[Any, Any]:
    """Returns an env that is Gymnasium's, takes `options` in `reset`, and says how it is wrapped.

    Attributes are added to the env itself, since whoever asks for its outermost wrapper wants his own.

    Raises:
        ValueError: it is neither Gymnasium's nor old Gym's.
        ImportError: it is old Gym's, and shimmy or Stable-Baselines3 are not installed here.
    """
    if not isinstance(env, gymnasium.Env):
        env = importlib.import_module("stable_baselines3.common.vec_env.patch_gym")._patch_env(env)
    vars(env)[IS_WRAPPED] = partial(_is_wrapped, env)
    if not all(map(_takes_options, _layers(env))):
        vars(env)["reset"] = partial(_reset, env.reset)
    return env


def _layers(env: Any) -> Iterator[Any]:
    yield env
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        yield env


def _is_wrapped(env: Any, wrapper_class: type) -> bool:
    return any(isinstance(layer, wrapper_class) for layer in _layers(env))


def _takes_options(env: Any) -> bool:
    parameters = inspect.signature(env.reset).parameters
    return "options" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _reset(reset: Callable[..., Any], *, seed: int | None = None, options: Any = None) -> Any:
    """Does as Stable-Baselines3, which passes options only if there are some."""
    return reset(seed=seed, options=options) if options else reset(seed=seed)
