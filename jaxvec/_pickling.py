"""Pickles what another process is to have, functions and classes of a script or a notebook among it."""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

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
