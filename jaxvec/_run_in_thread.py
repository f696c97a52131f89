"""A call that goes on while its caller does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
