"""Chooses, by name, how compiled programs reach their pool."""

from __future__ import annotations

import logging

from jaxvec._native import NativeUnavailableError
from jaxvec.callbacks import _ffi

_logger = logging.getLogger("jaxvec")


def choose(name: str) -> str:
    """Returns what a handle should say: `"auto"` only where there is something to choose.

    Raises:
        NativeUnavailableError: `"ffi"` was asked for and can't be had; says why.
    """
    if name == "io_callback":
        return name
    reason = _ffi.reason_unavailable()
    if reason is None:
        return name
    if name == "ffi":
        raise NativeUnavailableError(reason)
    _logger.info("io_callback transport: %s", reason)
    return "io_callback"
