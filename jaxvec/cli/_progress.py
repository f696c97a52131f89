"""Progress of long work, on stderr, for people who look: not with `--json`, nor without a terminal."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[], None]  # one of the total is done
Progress = Callable[[str, int], AbstractContextManager[Advance]]  # of what, and the total


def progress(*, quiet: bool) -> Progress:
    """Returns what shows progress here: by tqdm, by one line without it, or not at all."""
    if quiet or not sys.stderr.isatty():
        return silent
    return _line if importlib.util.find_spec("tqdm") is None else _bar


@contextmanager
def silent(what: str, total: int) -> Generator[Advance]:
    """Shows nothing."""
    yield lambda: None


@contextmanager
def _bar(what: str, total: int) -> Generator[Advance]:
    from tqdm import tqdm

    with tqdm(total=total, desc=what, leave=False, file=sys.stderr) as bar:

        def advance() -> None:
            bar.update()

        yield advance


@contextmanager
def _line(what: str, total: int) -> Generator[Advance]:
    done = 0

    def show(text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def advance() -> None:
        nonlocal done
        done += 1
        show(f"{what}: {done}/{total}")

    show(f"{what} …")
    try:
        yield advance
    finally:
        show("")
