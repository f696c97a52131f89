"""Reads the command line, runs the command, prints what it found."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout

from jaxvec._errors import EnvError, JaxvecError
from jaxvec._native import NativeUnavailableError
from jaxvec.cli import _bench, _check, _doctor, _trace
from jaxvec.cli._command import EXIT_CODES, FAILED, INTERRUPTED, USAGE, Command, UsageError, lacks_package

# A new command is a module with a `Command`, and its place here.
COMMANDS: tuple[Command, ...] = (_doctor.COMMAND, _bench.COMMAND, _check.COMMAND, _trace.COMMAND)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after `python -m jaxvec`; those of this process by default.

    Returns:
        The exit code; see `EXIT_CODES`.
    """
    options = _parser().parse_args(argv)
    command: Command = options.command
    try:
        with _chatter_on_stderr():
            outcome = command.run(options)
    except (UsageError, NativeUnavailableError) as error:
        return _fail(command, error, USAGE)
    except EnvError as error:
        if lacks_package(error):
            return _fail(command, f"the env lacks a package: {error.__cause__}", USAGE)
        return _fail(command, error, FAILED)
    except JaxvecError as error:
        return _fail(command, error, FAILED)
    except KeyboardInterrupt:
        return _fail(command, "interrupted", INTERRUPTED)
    except RuntimeError as error:
        if "KeyboardInterrupt" not in str(
            error
        ):  # in a host callback, of which JAX makes an error of its own
            raise
        return _fail(command, "interrupted", INTERRUPTED)
    print(json.dumps(outcome.record, indent=2) if options.json else outcome.text)
    return outcome.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxvec",
        description="Looks at jaxvec on this machine, and at envs of yours.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=f"{command.details}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=command)
        command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print a record, and nothing else")
    return parser


@contextmanager
def _chatter_on_stderr() -> Generator[None]:
    """Sends what envs print, here and in workers, to stderr: stdout is for what was found."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _fail(command: Command, why: object, code: int) -> int:
    print(f"python -m jaxvec {command.name}: {why}", file=sys.stderr)
    return code
