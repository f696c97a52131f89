"""The env that a command is about: from words of the command line to what `jaxvec.make` takes."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import gymnasium

import jaxvec
from jaxvec import _util
from jaxvec._envs import constructors
from jaxvec._memory.segment import split_evenly
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _make
from jaxvec.cli._command import UsageError

# Packages that register their envs when they are imported, and the extras that have them; by namespace.
_PUBLISHERS = {"ALE": ("ale_py", "atari")}


@dataclass(frozen=True)
class Target:
    """An env.

    Attributes:
        name: as the user wrote it.
        env: a Gymnasium id or a callable.
        kwargs: of its constructor.
    """

    name: str
    env: str | Callable[..., Any]
    kwargs: dict[str, Any]

    def env_fns(self, count: int) -> list[Callable[[], Any]]:
        """Returns what makes the first so many envs of a pool that has a worker for each."""
        return constructors.resolve(self.env, split_evenly(count, count), self.kwargs)

    def make(self, **settings: Any) -> VectorEnv:
        """Makes a pool of it."""
        return jaxvec.make(self.env, **settings, **self.kwargs)

    def line(self, settings: dict[str, Any]) -> str:
        """Returns what a user writes to make that pool."""
        given = arguments({**settings, **self.kwargs})
        if isinstance(self.env, str):
            return f"envs = jaxvec.make({json.dumps(self.env)}, {given})"
        module, _, name = self.name.rpartition(":")
        return f"import {module}; envs = jaxvec.make({module}.{name}, {given})"


def arguments(given: dict[str, Any]) -> str:
    """Writes keyword arguments, as Python would read them."""
    return ", ".join(
        f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}"
        for name, value in given.items()
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments that `find` reads."""
    parser.add_argument(
        "env",
        metavar="ENV",
        help='a Gymnasium id ("CartPole-v1", "ALE/Pong-v5", "module:Env-v0"), or "package.module:callable"',
    )
    parser.add_argument("--kwargs", metavar="JSON", default="{}", help="for its constructor: '{\"x\": 1}'")


def find(options: Namespace) -> Target:
    """Finds the env that was named.

    Raises:
        UsageError: there is none of this name, or its arguments are not right.
    """
    name, kwargs = options.env, _kwargs(options.kwargs)
    module, _, rest = name.rpartition(":")
    if module:
        _import(name, module)
        if not re.search(r"-v\d+$", rest):
            return _checked(Target(name, _callable(name, module, rest), kwargs))
    elif name.partition("/")[0] in _PUBLISHERS:
        return _checked(Target(name, f"{_publisher(name)}:{name}", kwargs))
    return _checked(Target(name, name, kwargs))


def _kwargs(text: str) -> dict[str, Any]:
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--kwargs is not valid JSON ({error}); write '{{\"name\": value}}'") from error
    if not isinstance(kwargs, dict):
        raise UsageError(f"--kwargs must be a JSON object, as '{{\"name\": value}}', not {text}")
    kwargs = cast(dict[str, Any], kwargs)
    ours = sorted(kwargs.keys() & inspect.signature(_make.make).parameters.keys())
    if ours:
        raise UsageError(
            f"--kwargs: jaxvec.make has an argument {ours[0]!r}, too; wrap the env in a callable"
        )
    return kwargs


def _import(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name}: there is no module {error.name!r} here; is it installed?") from error
    except Exception as error:
        raise UsageError(f"{name}: importing {module} raised {type(error).__name__}: {error}") from error


def _callable(name: str, module: str, rest: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in rest.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise UsageError(
                f"{name}: module {module!r} has no {rest!r}; a Gymnasium id ends in -v and a number"
            ) from error
    if not callable(found):
        raise UsageError(f"{name} is a {type(found).__name__}, not a callable that makes an env")
    return found


def _publisher(name: str) -> str:
    """Returns the package that registers such ids."""
    package, extra = _PUBLISHERS[name.partition("/")[0]]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{name}: there is no package {package!r} here; {_util.install_command(extra)}"
        ) from error
    return package


def _checked(target: Target) -> Target:
    try:
        target.env_fns(1)
    except gymnasium.error.Error as error:
        raise UsageError(
            f"{target.name}: {error} An env that a module registers when imported is MODULE:{target.name}"
        ) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{target.name}: {error}") from error
    if not isinstance(target.env, str):
        try:
            inspect.signature(target.env).bind_partial(**target.kwargs)
        except TypeError as error:
            raise UsageError(f"{target.name}: --kwargs: {error}") from error
        except ValueError:
            pass  # a builtin without a signature: its own error will say
    return target
