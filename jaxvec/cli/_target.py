"""The argument ENV of the commands: an id or a callable, with keyword arguments, becomes a `Target`."""

from __future__ import annotations

import importlib
import inspect
import json
import operator
import re
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import gymnasium

import jaxvec
from jaxvec._envs import constructors
from jaxvec._errors import EnvError
from jaxvec._memory.segment import split_evenly
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _make
from jaxvec.cli import UsageError, _in_workers


@dataclass(frozen=True)
class Target:
    """The env of the command line: its name there, its id or callable, and the constructor's arguments."""

    name: str
    env: str | Callable[..., Any]
    kwargs: dict[str, Any]
    reset_options: dict[str, Any]
    is_wrapped: bool  # for reset options or a mask of legal actions
    mask_key: str | None = None  # `None` for the usual one

    def env_fn(self) -> Callable[[], Any]:
        env_fn = constructors.resolve(self.env, split_evenly(1, 1), self.kwargs)[0]
        wrapped = partial(_in_workers.LegalUse, env_fn, self.mask_key, self.reset_options)
        return wrapped if self.is_wrapped else env_fn

    def make(self, **settings: Any) -> VectorEnv:
        if self.is_wrapped:
            return jaxvec.make(self.env_fn(), **settings)
        return jaxvec.make(self.env, **settings, **self.kwargs)

    def record(self, command: str, **found: Any) -> dict[str, Any]:
        return {"schema": f"jaxvec.{command}/1", "env": self.name, "kwargs": self.kwargs, **found}

    def line(self, settings: dict[str, Any]) -> str:
        """Returns the Python code that makes a pool with these settings."""
        arguments = ", ".join(
            f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}"
            for name, value in {**settings, **self.kwargs}.items()
        )
        if isinstance(self.env, str):
            return f"envs = jaxvec.make({json.dumps(self.env)}, {arguments})"
        module, _, name = self.name.rpartition(":")
        return f"import {module}; envs = jaxvec.make({module}.{name}, {arguments})"


def find_target(options: Namespace) -> Target:
    """Returns the env of the arguments, or raises `UsageError` if it does not exist or does not fit them."""
    target = _resolve(options)
    key = options.mask_info
    first_step: Any = ()
    with suppress(Exception), closing(target.env_fn()()) as env:  # an env that fails is examined later
        first_step = env.action_space, *env.reset(seed=0)
    mask = _in_workers.find_mask(first_step[0], key, *first_step[1:]) if first_step else None
    if key is not None and first_step and mask is None:
        keys = [name for part in first_step[1:] if isinstance(part, dict) for name in part]
        raise UsageError(f"--mask-info: reset returned no mask of {first_step[0]} at {key!r}, only {keys}")
    return replace(target, is_wrapped=target.is_wrapped or mask is not None, mask_key=key)


def _resolve(options: Namespace) -> Target:
    name = options.env
    kwargs = _parse("--kwargs", options.kwargs)
    if clash := sorted(kwargs.keys() & inspect.signature(_make.make).parameters.keys()):
        raise UsageError(
            f"--kwargs: jaxvec.make also has an argument {clash[0]!r}; wrap the env in a callable"
        )
    resets = _parse("--reset-options", options.reset_options)
    target = partial(Target, kwargs=kwargs, reset_options=resets, is_wrapped=bool(resets))
    if ":" in name:
        env = load(name)
        if not callable(env) and env is not name:
            raise UsageError(
                f"{name} must be a callable that returns an env, not of type {type(env).__name__}"
            )
        return _checked(target(name, env))
    if (package := constructors.PUBLISHERS.get(name.partition("/")[0])) is not None:
        _import(name, package, f"pip install {constructors.PACKAGES.get(package, package)}")
        return _checked(target(name, f"{package}:{name}"))
    return _checked(target(name, name))


def _parse(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag} is not valid JSON ({error}); write '{{\"name\": value}}'") from error
    if not isinstance(value, dict):
        raise UsageError(f"{flag} must be a JSON object such as '{{\"name\": value}}', not {text}")
    return cast(dict[str, Any], value)


def _import(name: str, module: str, advice: str = "") -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{name}: there is no module named {error.name!r}; "
            + (advice or f"start in the folder of {error.name}.py, set PYTHONPATH, or install its package")
        ) from error
    except Exception as error:
        raise UsageError(f"{name}: importing {module} raised {type(error).__name__}: {error}") from error


def load(name: str) -> Any:
    """Returns the object that "package.module:name" names. A Gymnasium id stays as it is."""
    module, _, rest = name.rpartition(":")
    imported = _import(name, module) if module else None
    if imported is None or re.search(r"-v\d+$", rest):
        return name
    try:
        return operator.attrgetter(rest)(imported)
    except AttributeError as error:
        raise UsageError(
            f"{name}: module {module!r} has no {rest!r}; a Gymnasium id ends in -v and a number"
        ) from error


def _checked(target: Target) -> Target:
    """Returns `target`, or raises `UsageError` if its id or the names of its arguments are wrong."""
    module, _, name = target.name.rpartition(".")  # such as my_envs.Maze
    callable_name = f"{module}:{name}" if module and ":" not in module else "MODULE:CLASS"
    try:
        target.env_fn()
    except gymnasium.error.Error as error:
        raise UsageError(
            f"{target.name}: {error} On the command line, write {callable_name}, or MODULE:ID if importing "
            "the module registers it"
        ) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{target.name}: {error}") from error
    if not isinstance(target.env, str):
        try:
            inspect.signature(target.env).bind_partial(**target.kwargs)
        except TypeError as error:
            raise UsageError(f"{target.name}: --kwargs: {error}") from error
        except ValueError:
            pass  # a builtin without a signature; a wrong argument is an error of the constructor
    return target


def lacks_package(error: EnvError) -> bool:
    """Returns whether the constructor of an env failed because a package is not installed."""
    missing = (ImportError, gymnasium.error.DependencyNotInstalled)
    return error.operation == "constructor" and isinstance(error.__cause__, missing)
