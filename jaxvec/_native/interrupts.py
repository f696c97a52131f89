"""Tells threads of Ctrl-C that Python does not tell. Twin of `interrupts.cc`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial

from jaxvec import _native


def watch() -> None:
    """Counts Ctrl-C from now on, if there is a native library."""
    if _native.ext is not None:
        _native.ext.watch_interrupts()


def count() -> int:
    """Returns how many there were."""
    return 0 if _native.ext is None else _native.ext.interrupts()


def since_now() -> Callable[[], None]:
    """Returns a call of `raise_since` this moment."""
    return partial(raise_since, count())


def raise_since(before: int) -> None:
    """Raises `KeyboardInterrupt` if there was one since `count` returned `before`.

    Not in the main thread, where Python does it, and not where the user handles the signal.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and count() != before
    ):
        raise KeyboardInterrupt
