"""Small helpers: cores, extras, pickling, and calls in a thread."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shlex
import threading
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import Future
from types import CodeType
from typing import Any, ClassVar, TypeVar

import cloudpickle

# ----------------------------------------------------------------------------------------------------------
# How many cores this process may use.
# ----------------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Counts the cores this process may use, where the platform can tell: containers often allow fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ----------------------------------------------------------------------------------------------------------
# How to install what an optional part of jaxvec needs.
# ----------------------------------------------------------------------------------------------------------


def install_command(extra: str) -> str:
    """Returns the command that installs what an extra of jaxvec needs, however jaxvec itself came here.

    It names the packages and not `jaxvec[extra]`, which an installer could only find in an index.
    """
    try:
        return shlex.join(["pip", "install", *_packages(extra)]).replace("'", '"')
    except importlib.metadata.PackageNotFoundError:  # it was not installed, but found by PYTHONPATH
        return f'pip install ".[{extra}]" in the folder of jaxvec\'s pyproject.toml'


def _packages(extra: str) -> list[str]:
    packages: list[str] = []
    for requirement in importlib.metadata.requires("jaxvec") or ():
        package, _, condition = requirement.partition(";")
        if re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", condition) is None:
            continue
        ours = re.fullmatch(r"jaxvec\[(.+)\]", package.strip())  # an extra may be made of others
        parts = ours[1].split(",") if ours else []
        packages += [each for part in parts for each in _packages(part)] or [package.strip()]
    return packages


# ----------------------------------------------------------------------------------------------------------
# A call that goes on while its caller does something else.
# ----------------------------------------------------------------------------------------------------------

T = TypeVar("T")


def run_in_thread(call: Callable[[Callable[[], None]], T]) -> Future[T]:
    """Begins a call in a thread of its own, which ends with the program if it must.

    Args:
        call: takes a function, which it calls once it can't be overtaken any more.

    Returns:
        Its result to be, as soon as it can't be overtaken.
    """
    future: Future[T] = Future()
    begun = threading.Event()

    def run() -> None:
        try:
            future.set_result(call(begun.set))
        except BaseException as error:
            future.set_exception(error)
        finally:
            begun.set()

    threading.Thread(target=run, daemon=True).start()
    begun.wait()
    return future


# ----------------------------------------------------------------------------------------------------------
# Pickles what another process is to have, functions and classes of a script or a notebook among it.
# ----------------------------------------------------------------------------------------------------------

_THEIRS: Any = cloudpickle.Pickler.dispatch_table  # copyreg's is in it, which goes on to grow


def dumps(value: Any) -> bytes:
    """Pickles by cloudpickle, keeping the names of the files that code comes from.

    `pickle.loads` undoes it. A traceback from a worker names files, and shows their lines, by these names;
    cloudpickle puts `<dynamic-code>` in their place from version 3.1.3 on.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    construct, args = _THEIRS[CodeType](code)
    return _code_of_file, (construct, args, code.co_filename)


def _code_of_file(construct: Callable[..., CodeType], args: tuple[Any, ...], filename: str) -> CodeType:
    return construct(*args).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, _THEIRS)
