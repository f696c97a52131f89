"""`python -m jaxvec doctor`: says which parts of jaxvec are active here, and why others are not."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Iterator, Sequence

import jaxvec
from jaxvec import _handoffs, _pinned
from jaxvec._cores import usable_cores
from jaxvec._native import library
from jaxvec.callbacks import _ffi


def examine() -> Iterator[tuple[str, str]]:
    """Yields what was examined and what was found."""
    yield "jaxvec", jaxvec.__version__
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in ("jax", "jaxlib", "numpy", "gymnasium"):
        yield package, importlib.metadata.version(package)
    yield "usable cores", str(usable_cores())
    reason = library.reason_unavailable()
    yield "native library", "loaded" if reason is None else f"off: {reason}"
    yield "hand-off", _handoffs.choose("auto")
    reason = _ffi.reason_unavailable()
    yield "XLA FFI", "ready" if reason is None else f"off: {reason}"
    yield "transport", "io_callback" if reason else "ffi on the CPU and on CUDA, io_callback elsewhere"
    reason = _pinned.reason_unavailable()
    yield "page-locking", "ready" if reason is None else f"off: {reason}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m jaxvec", description=__doc__)
    parser.add_argument("command", choices=["doctor"])
    parser.parse_args(argv)
    for what, found in examine():
        print(f"{what:15} {found}")


if __name__ == "__main__":
    main()
