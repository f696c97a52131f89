"""Raises `KeyboardInterrupt` in threads other than the main thread. Wraps `interrupts.cc`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial

from jaxvec import _native


def watch() -> None:
    """Starts to count SIGINTs, if there is a native library."""
    if _native.ext is not None:
        _native.ext.watch_interrupts()


def count() -> int:
    """Returns the number of SIGINTs so far; 0 without the native library."""
    return 0 if _native.ext is None else _native.ext.interrupts()


def since_now() -> Callable[[], None]:
    """Returns a function that calls `raise_since` with the present count."""
    return partial(raise_since, count())


def raise_since(before: int) -> None:
    """Raises `KeyboardInterrupt` if a SIGINT arrived since `count` returned `before`.

    Does nothing in the main thread, where Python raises it, or if the user handles SIGINT.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and count() != before
    ):
        raise KeyboardInterrupt
