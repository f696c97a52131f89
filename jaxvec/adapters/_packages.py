"""Imports of packages that jaxvec does not require, and the commands that install them."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shlex
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


def install_command(extra: str) -> str:
    """Returns the command that installs the requirements of an extra of jaxvec, or a package of that name.

    It lists the packages instead of `jaxvec[extra]`, which an installer would look for in a package index:
    jaxvec may have been installed from a folder.
    """
    try:
        return shlex.join(["pip", "install", *(_packages(extra) or [extra])]).replace("'", '"')
    except importlib.metadata.PackageNotFoundError:  # not installed, but found by PYTHONPATH
        return f'pip install ".[{extra}]" in the folder of jaxvec\'s pyproject.toml'


def _packages(extra: str) -> list[str]:
    """Returns the requirements of an extra, or those of jaxvec itself if `extra` is empty."""
    packages: list[str] = []
    for requirement in importlib.metadata.requires("jaxvec") or ():
        package, _, condition = requirement.partition(";")
        named_extra = re.search(r"""extra == ['"](.+?)['"]""", condition)
        if extra != (named_extra[1] if named_extra else ""):
            continue
        nested = re.fullmatch(r"jaxvec\[(.+)\]", package.strip())  # an extra can include other extras
        parts = nested[1].split(",") if nested else []
        packages += [name for part in parts for name in _packages(part)] or [package.strip()]
    return packages


@contextmanager
def optional_imports(user: str, extra: str) -> Generator[None]:
    """Adds the install command to a failed import of an extra's packages."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{user} needs {error.name}: {install_command(extra)}") from error


def import_optional(module: str, user: str, extra: str) -> Any:
    """Imports a module of an extra, or of a package of that name; an error has the install command."""
    with optional_imports(user, extra):
        return importlib.import_module(module)


class ForeignClass:
    """Stands for a class of a package that may not be installed where types are checked."""

    def __init__(self, *arguments: Any) -> None: ...
    def __getattr__(self, name: str) -> Any: ...


def import_class(module: str, name: str, user: str, extra: str) -> type[ForeignClass]:
    """Imports a class of an extra, to derive another class from it."""
    return getattr(import_optional(module, user, extra), name)
