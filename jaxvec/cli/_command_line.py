"""Reads the command line, runs the command, prints what it found."""

from __future__ import annotations

import argparse
import json
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict

from jaxvec._config import TRANSPORTS
from jaxvec._errors import EnvError, JaxvecError
from jaxvec._native.library import NativeUnavailableError
from jaxvec.cli import _bench, _check, _doctor, _target
from jaxvec.cli._command import (
    EXIT_CODES,
    FAILED,
    INTERRUPTED,
    USAGE,
    Command,
    Outcome,
    UsageError,
    lacks_package,
)


def _run_bench(options: Namespace) -> Outcome:
    """Measures an env, and recommends a pool."""
    num_envs, num_workers = options.num_envs, options.num_workers
    if num_envs and num_workers and min(num_workers) > max(num_envs):
        raise UsageError("--num-workers: every pool would have more workers than envs")
    target = _target.find(options)
    found = _bench.measure(
        target.make,
        num_envs=num_envs,
        num_workers=num_workers,
        seconds=options.seconds,
        transport=options.transport,
    )
    best = _bench.best(found.samples)
    line = target.line({"num_envs": best.num_envs, "num_workers": best.num_workers})
    record = {
        "schema": "jaxvec.bench/1",
        "env": target.name,
        "kwargs": target.kwargs,
        "measurement": asdict(found),
        "notes": [*_bench.notes(found)],
        "make": line,
    }
    return Outcome(record, "\n".join(_bench.report(found, target.name, line)))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError as error:
        raise ArgumentTypeError(f"expected numbers, as 16,64,256, not {text!r}") from error
    if min(numbers) < 1:
        raise ArgumentTypeError(f"must be at least 1, not {min(numbers)}")
    return numbers


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 60:
        raise ArgumentTypeError(f"must be above 0 and at most 60, not {text!r}")
    return seconds


def _add_bench_arguments(parser: ArgumentParser) -> None:
    _target.add_arguments(parser)
    parser.add_argument(
        "--num-envs",
        type=_numbers,
        metavar="N,N,…",
        help="sizes of pools; 16,64,256 unless the env is too slow",
    )
    parser.add_argument(
        "--num-workers",
        type=_numbers,
        metavar="N,N,…",
        help="worker counts; up to the usable cores by default",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=0.2,
        metavar="S",
        help="seconds of each turn, 0.2 by default; a run has about 100 turns",
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="how programs reach the pool")


_BENCH = Command(
    name="bench",
    summary="measure an env, alone and in pools, and recommend num_envs and num_workers",
    details="""\
It steps the env with random actions: alone, and in pools of several sizes, from a Python loop and inside a
jitted lax.scan. They take turns, and figures are medians. Keep the machine quiet.

--json prints {"schema": "jaxvec.bench/1", "env": TEXT, "kwargs": {…}, "measurement": {…}, "notes": [TEXT],
"make": TEXT}; jaxvec/cli/_bench.py has the fields of Measurement.

examples:
  python -m jaxvec bench CartPole-v1
  python -m jaxvec bench ALE/Pong-v5 --kwargs '{"frameskip": 4}' --num-envs 16,64
  python -m jaxvec bench my_package.envs:make_env --num-workers 1,2
  python -m jaxvec bench CartPole-v1 --num-envs 8 --num-workers 1 --seconds 0.02 --json""",
    add_arguments=_add_bench_arguments,
    run=_run_bench,
)

COMMANDS: tuple[Command, ...] = (_doctor.COMMAND, _BENCH, _check.COMMAND)


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
