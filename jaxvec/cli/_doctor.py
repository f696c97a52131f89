"""`doctor`: says which parts of jaxvec are active here, and why others are not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

import jaxvec
from jaxvec import _native
from jaxvec._memory import pinned
from jaxvec._ray import cluster
from jaxvec._util import usable_cores
from jaxvec._workers import base, fork, process
from jaxvec.callbacks import _ffi
from jaxvec.cli import _plot
from jaxvec.cli._command import Command, Outcome


def examine() -> Iterator[tuple[str, str]]:
    """Yields what was examined and what was found."""
    yield "jaxvec", jaxvec.__version__
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in ("jax", "jaxlib", "numpy", "gymnasium"):
        yield package, importlib.metadata.version(package)
    yield "usable cores", str(usable_cores())
    reason = fork.reason_unavailable()
    yield "start method", process.choose_start_method("auto") if reason is None else f"spawn: {reason}"
    pins = hasattr(os, "sched_setaffinity")
    yield "pin_workers", "ready" if pins else "off: this system does not bind processes to cores"
    reason = _native.reason_unavailable()
    yield "native library", "loaded" if reason is None else f"off: {reason}"
    yield "dispatch", base.choose_dispatch("auto")
    reason = _ffi.reason_unavailable()
    yield "XLA FFI", "ready" if reason is None else f"off: {reason}"
    yield "transport", "io_callback" if reason else "ffi on the CPU and on CUDA, io_callback elsewhere"
    reason = pinned.reason_unavailable()
    yield "page-locking", "ready" if reason is None else f"off: {reason}"
    yield "ray", cluster.describe()
    reason = _plot.reason_unavailable()
    yield "plots", "ready" if reason is None else f"off: {reason}"


def run(options: Namespace) -> Outcome:
    """Examines this machine."""
    found = dict(examine())
    text = "\n".join(f"{what:15} {said}" for what, said in found.items())
    return Outcome({"schema": "jaxvec.doctor/1", "found": found}, text)


def _add_arguments(parser: ArgumentParser) -> None:
    """There are none."""


COMMAND = Command(
    name="doctor",
    summary="say which parts of jaxvec are active here, and why others are not",
    details="""\
--json prints {"schema": "jaxvec.doctor/1", "found": {NAME: TEXT}}; what is off has a text that begins
with "off: ".

examples:
  python -m jaxvec doctor
  python -m jaxvec doctor --json""",
    add_arguments=_add_arguments,
    run=run,
)
