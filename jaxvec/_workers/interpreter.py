"""The Python interpreter that runs the workers of a pool: this one, or another one behind its interface."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, ClassVar, cast

import gymnasium

from jaxvec._envs.constructors import Description
from jaxvec._envs.envs import EnvFn
from jaxvec._options import PoolConfig
from jaxvec._workers import lifeline


class Interpreter:
    """This interpreter, and the base class of others.

    Attributes:
        path: Path of the executable.
        is_native: True if the native library can be loaded there.
        is_own: True if its packages are those of the program, so that workers can read all of its pickles.
    """

    is_native: bool = True
    is_own: ClassVar[bool] = True

    def __init__(self, path: str | None = None) -> None:
        self.path: str = sys.executable if path is None else path

    def check(self, config: PoolConfig) -> None:
        """Raises `ValueError` for an option that workers there do not support."""

    def constructor(self, env: Any) -> Any:
        """Returns an env id, or an env's `EnvSpec`, as something that is looked up there, if need be."""
        return env

    def adapt(self, env_fn: EnvFn) -> EnvFn:
        """Returns a constructor that runs there, and builds an env that this Gymnasium understands."""
        return env_fn

    def to_plain(self, description: Description) -> Description:
        """Returns the description of envs there as one that the program can read. Runs in a worker."""
        return description

    def sys_path(self) -> list[str]:
        """Returns entries of `sys.path` for workers. With another interpreter, they follow its own."""
        return list(sys.path)

    def command(self, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """Returns a command to which `spawn.py` adds the arguments of `lifeline.py`, and its environment."""
        if not sys.executable:
            raise FileNotFoundError(
                "there is no Python interpreter to start: sys.executable is empty; set it to the path of one"
            )
        # For the first imports. A worker then applies the program's sys.path and PYTHONPATH.
        path = os.pathsep.join(filter(None, [*_roots(), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, *_flags(), "-u", "-P", str(Path(lifeline.__file__))]
        return command, {**env, "PYTHONPATH": path}


def _flags() -> list[str]:
    """Returns the flags of this interpreter, such as `-O`, `-W error` and `-X dev`, for another one.

    Without those that would ignore PYTHONPATH.
    """
    flags = cast("list[str]", subprocess._args_from_interpreter_flags())  # pyright: ignore
    return [flag for flag in flags if flag not in ("-E", "-I")]


def _roots() -> list[str]:
    """Returns the directories of this package and, if it is not a site directory, of the Gymnasium in use."""
    own = str(Path(__file__).resolve().parents[2])
    other = str(Path(gymnasium.__file__).parents[1])
    return [own] if other in (own, *sysconfig.get_paths().values()) else [other, own]
