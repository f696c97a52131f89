"""Prepares single envs for Stable-Baselines3's vector envs.

Workers import this module. So it must not import JAX, and it imports Stable-Baselines3 only for envs of old
Gym.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import gymnasium

from jaxvec import _util
from jaxvec._envs.envs import layers_of

IS_WRAPPED = "_jaxvec_is_wrapped"  # name of a method of each env, which takes a wrapper class


class OwnEnvFn:
    """Env constructor that is pickled on its own, so that envs of one worker share no objects."""

    def __init__(self, env_fn: Callable[[], Any]) -> None:
        self._env_fn = env_fn

    def __call__(self) -> Any:
        return prepare(self._env_fn())

    def __reduce__(self) -> Any:
        return _load, (_util.dumps(self._env_fn),)


def _load(pickled: bytes) -> OwnEnvFn:
    return OwnEnvFn(cloudpickle.loads(pickled))


def prepare(env: Any) -> gymnasium.Env[Any, Any]:
    """Converts old Gym's env to Gymnasium's, makes `reset` accept `options`, and adds `IS_WRAPPED`.

    Raises `ValueError` for other objects, and `ImportError` without shimmy, which converts old Gym's envs.
    """
    if not isinstance(env, gymnasium.Env):
        env = importlib.import_module("stable_baselines3.common.vec_env.patch_gym")._patch_env(env)
    # Set on the env itself: an extra wrapper would become the outermost one, which `set_attr` writes to.
    vars(env)[IS_WRAPPED] = partial(_is_wrapped, env)
    try:
        for layer in layers_of(env):
            inspect.signature(layer.reset).bind_partial(options=None)
    except TypeError:  # it takes no options
        vars(env)["reset"] = partial(_reset, env.reset)
    return env


def _is_wrapped(env: Any, wrapper_class: type) -> bool:
    return any(isinstance(layer, wrapper_class) for layer in layers_of(env))


def _reset(reset: Callable[..., Any], *, seed: int | None = None, options: Any = None) -> Any:
    # As Stable-Baselines3 does, pass options only if there are any: some envs do not accept them.
    return reset(seed=seed, options=options) if options else reset(seed=seed)
