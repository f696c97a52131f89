"""Imports the native library, an extension module in C++, or says why there is none.

`ext`, the module, has the dispatch and the engine of native pools, XLA's handlers, and the stepping loop of
workers. The other modules here are their halves in Python.
"""

from __future__ import annotations

import sys

ext = None
_reason: str | None = None
if sys.platform != "linux":
    _reason = f"the native library needs Linux's futexes, not {sys.platform}"
else:
    try:
        import jaxvec._native._ext as ext  # pyright: ignore[reportMissingModuleSource]
    except ModuleNotFoundError:
        _reason = (
            "the native library was not built: "
            "install jaxvec where there are a C++17 compiler and Python's headers"
        )
    except ImportError as error:
        _reason = f"the native library can't be loaded: {error}"


class NativeUnavailableError(ImportError):
    """The native library can't be used here; the text says why."""


def reason_unavailable() -> str | None:
    """Returns why the native library can't be used; `None` if it can."""
    return _reason


def load():
    """Returns the module.

    Raises:
        NativeUnavailableError: it was not built, or can't be loaded.
    """
    if ext is None:
        raise NativeUnavailableError(_reason)
    return ext
