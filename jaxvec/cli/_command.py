"""What a command is, and what it comes to; `_command_line` lists the commands and prints."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

from jaxvec._errors import EnvError

FINE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

EXIT_CODES = """\
exit codes:
  0    all went well
  1    an env failed, or a check did
  2    the command can't be done so: an unknown env, a bad argument, a missing package
  130  Ctrl-C"""


class UsageError(Exception):
    """The command can't be done as it was given; the text says why, and what to do."""


def lacks_package(error: EnvError) -> bool:
    """Says whether an env can't be made for want of a package. Gymnasium has an error of its own for this."""
    missing = (ImportError, gymnasium.error.DependencyNotInstalled)
    return error.operation == "constructor" and isinstance(error.__cause__, missing)


@dataclass(frozen=True)
class Outcome:
    """What a command found.

    Attributes:
        record: for `--json`.
        text: for people.
        code: to exit with.
    """

    record: dict[str, Any]
    text: str
    code: int = FINE


@dataclass(frozen=True)
class Command:
    """One of the words after `python -m jaxvec`.

    Attributes:
        name: the word.
        summary: what it does, in one line.
        details: the end of its help: what `--json` prints, and examples.
        add_arguments: besides `--json`.
        run: does it; raises `UsageError`, or the typed error of an env that failed.
    """

    name: str
    summary: str
    details: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], Outcome]
