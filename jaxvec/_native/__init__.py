"""Imports the native library, an extension module in C++, if it is available.

`ext`, the module or `None`, contains the dispatch and the engine of native pools, XLA's handlers, and the
stepping loop of workers. `_engine` wraps the former two in Python.
"""

from __future__ import annotations

import sys
import warnings
from hashlib import sha256
from pathlib import Path

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
        _reason = f"the native library can't be loaded: {error}; reinstall jaxvec"
    else:
        # A clone has sources, and `git pull` changes them but not the library.
        sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cc", ".h"))
        digests = "".join(sha256(source.read_bytes()).hexdigest() for source in sources)
        if sources and getattr(ext, "SOURCES", "") != sha256(digests.encode()).hexdigest():
            ext = None
            _reason = (
                "the native library was built from other sources than those of this clone; run "
                "`pip install -e .` again"
            )
            warnings.warn(_reason, RuntimeWarning, stacklevel=2)


class NativeUnavailableError(ImportError):
    """The native library can't be used here, for the reason in the message."""


def reason_unavailable() -> str | None:
    """Returns the reason why the native library can't be used; `None` if it can."""
    return _reason


def load():
    """Returns the module, or raises `NativeUnavailableError`."""
    if ext is None:
        raise NativeUnavailableError(_reason)
    return ext
