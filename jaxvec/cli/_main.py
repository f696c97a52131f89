"""The command line: `doctor`, `bench` and `check`, and how their arguments are parsed."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import re
import sys
import warnings
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any, cast

import gymnasium
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

import jaxvec
from jaxvec import _native, _util, testing
from jaxvec._config import TRANSPORTS
from jaxvec._envs import constructors
from jaxvec._errors import EnvError, JaxvecError, UnsupportedSpaceError
from jaxvec._memory import pinned
from jaxvec._memory.segment import split_evenly
from jaxvec._native import NativeUnavailableError
from jaxvec._ray import cluster
from jaxvec._util import usable_cores
from jaxvec._vector_env import VectorEnv
from jaxvec._workers import base, fork, process
from jaxvec.callbacks import _ffi, _make
from jaxvec.cli import _bench

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


# ----------------------------------------------------------------------------------------------------------
# The env that a command is about
# ----------------------------------------------------------------------------------------------------------

# Packages that register their envs when they are imported, and the extras that have them; by namespace.
_PUBLISHERS = {"ALE": ("ale_py", "atari")}


@dataclass(frozen=True)
class Target:
    """An env.

    Attributes:
        name: as the user wrote it.
        env: a Gymnasium id or a callable.
        kwargs: of its constructor.
    """

    name: str
    env: str | Callable[..., Any]
    kwargs: dict[str, Any]

    def env_fns(self, count: int) -> list[Callable[[], Any]]:
        """Returns what makes the first so many envs of a pool that has a worker for each."""
        return constructors.resolve(self.env, split_evenly(count, count), self.kwargs)

    def make(self, **settings: Any) -> VectorEnv:
        """Makes a pool of it."""
        return jaxvec.make(self.env, **settings, **self.kwargs)

    def line(self, settings: dict[str, Any]) -> str:
        """Returns what a user writes to make that pool."""
        given = _keywords({**settings, **self.kwargs})
        if isinstance(self.env, str):
            return f"envs = jaxvec.make({json.dumps(self.env)}, {given})"
        module, _, name = self.name.rpartition(":")
        return f"import {module}; envs = jaxvec.make({module}.{name}, {given})"


def _keywords(given: dict[str, Any]) -> str:
    """Writes keyword arguments, as Python would read them."""
    return ", ".join(
        f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}"
        for name, value in given.items()
    )


def _add_target_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments that `_find_target` reads."""
    parser.add_argument(
        "env",
        metavar="ENV",
        help='a Gymnasium id ("CartPole-v1", "ALE/Pong-v5", "module:Env-v0"), or "package.module:callable"',
    )
    parser.add_argument("--kwargs", metavar="JSON", default="{}", help="for its constructor: '{\"x\": 1}'")


def _find_target(options: Namespace) -> Target:
    """Finds the env that was named.

    Raises:
        UsageError: there is none of this name, or its arguments are not right.
    """
    name, kwargs = options.env, _kwargs(options.kwargs)
    module, _, rest = name.rpartition(":")
    if module:
        _import(name, module)
        if not re.search(r"-v\d+$", rest):
            return _checked(Target(name, _callable(name, module, rest), kwargs))
    elif name.partition("/")[0] in _PUBLISHERS:
        return _checked(Target(name, f"{_publisher(name)}:{name}", kwargs))
    return _checked(Target(name, name, kwargs))


def _kwargs(text: str) -> dict[str, Any]:
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--kwargs is not valid JSON ({error}); write '{{\"name\": value}}'") from error
    if not isinstance(kwargs, dict):
        raise UsageError(f"--kwargs must be a JSON object, as '{{\"name\": value}}', not {text}")
    kwargs = cast(dict[str, Any], kwargs)
    ours = sorted(kwargs.keys() & inspect.signature(_make.make).parameters.keys())
    if ours:
        raise UsageError(
            f"--kwargs: jaxvec.make has an argument {ours[0]!r}, too; wrap the env in a callable"
        )
    return kwargs


def _import(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name}: there is no module {error.name!r} here; is it installed?") from error
    except Exception as error:
        raise UsageError(f"{name}: importing {module} raised {type(error).__name__}: {error}") from error


def _callable(name: str, module: str, rest: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in rest.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise UsageError(
                f"{name}: module {module!r} has no {rest!r}; a Gymnasium id ends in -v and a number"
            ) from error
    if not callable(found):
        raise UsageError(f"{name} is a {type(found).__name__}, not a callable that makes an env")
    return found


def _publisher(name: str) -> str:
    """Returns the package that registers such ids."""
    package, extra = _PUBLISHERS[name.partition("/")[0]]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{name}: there is no package {package!r} here; {_util.install_command(extra)}"
        ) from error
    return package


def _checked(target: Target) -> Target:
    try:
        target.env_fns(1)
    except gymnasium.error.Error as error:
        raise UsageError(
            f"{target.name}: {error} An env that a module registers when imported is MODULE:{target.name}"
        ) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{target.name}: {error}") from error
    if not isinstance(target.env, str):
        try:
            inspect.signature(target.env).bind_partial(**target.kwargs)
        except TypeError as error:
            raise UsageError(f"{target.name}: --kwargs: {error}") from error
        except ValueError:
            pass  # a builtin without a signature: its own error will say
    return target


# ----------------------------------------------------------------------------------------------------------
# doctor
# ----------------------------------------------------------------------------------------------------------


def _examine() -> Iterator[tuple[str, str]]:
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


def _run_doctor(options: Namespace) -> Outcome:
    """Examines this machine."""
    found = dict(_examine())
    text = "\n".join(f"{what:15} {said}" for what, said in found.items())
    return Outcome({"schema": "jaxvec.doctor/1", "found": found}, text)


def _add_no_arguments(parser: ArgumentParser) -> None:
    """There are none."""


_DOCTOR = Command(
    name="doctor",
    summary="say which parts of jaxvec are active here, and why others are not",
    details="""\
--json prints {"schema": "jaxvec.doctor/1", "found": {NAME: TEXT}}; what is off has a text that begins
with "off: ".

examples:
  python -m jaxvec doctor
  python -m jaxvec doctor --json""",
    add_arguments=_add_no_arguments,
    run=_run_doctor,
)


# ----------------------------------------------------------------------------------------------------------
# bench
# ----------------------------------------------------------------------------------------------------------


def _run_bench(options: Namespace) -> Outcome:
    """Measures an env, and recommends a pool."""
    num_envs, num_workers = options.num_envs, options.num_workers
    if num_envs and num_workers and min(num_workers) > max(num_envs):
        raise UsageError("--num-workers: every pool would have more workers than envs")
    target = _find_target(options)
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
    _add_target_arguments(parser)
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


# ----------------------------------------------------------------------------------------------------------
# check
# ----------------------------------------------------------------------------------------------------------

OK, FAIL, WARN, NOT_RUN = "ok", "FAIL", "warn", "not run"

_BUILDS, _SPACES, _DATA, _REPRODUCIBLE = _STAGES = (
    "the constructor returns a gymnasium.Env",
    "its spaces have fixed shapes, and dtypes that JAX has",
    "reset and step return what the spaces say",
    "the same seed and actions give the same data",
)
_WORKER = "it steps in a worker process"
_GYMNASIUM = "Gymnasium's check_env"

_REUSE = "share an object"  # says Gymnasium of envs that return the same arrays again

_NUM_STEPS = 100


@dataclass(frozen=True)
class Check:
    """What came of one check.

    Attributes:
        name: what should be so.
        status: `"ok"`, `"FAIL"`, `"warn"` or `"not run"`.
        reason: why it is not ok.
        warnings: how many it gave.
    """

    name: str
    status: str
    reason: str = ""
    warnings: int = 0


def _run_check(options: Namespace) -> Outcome:
    """Checks an env."""
    target = _find_target(options)
    checks = list(_checks(target))
    failed = sum(check.status == FAIL for check in checks)
    lines = [f"{check.status:8} {check.name}{_indent(check.reason)}" for check in checks]
    warned = sum(check.warnings for check in checks)
    verdict = f"{failed} of {len(checks)} checks failed" if failed else "ok"
    if warned:
        verdict += f", with {warned} warning{'s' if warned > 1 else ''}"
    lines.append(f"\n{target.name}: {verdict}")
    record = {
        "schema": "jaxvec.check/1",
        "env": target.name,
        "kwargs": target.kwargs,
        "ok": not failed,
        "checks": [asdict(check) for check in checks],
    }
    return Outcome(record, "\n".join(lines), FAILED if failed else FINE)


def _checks(target: Target) -> Iterator[Check]:
    ours = list(_our_contract(target))
    yield from ours
    sound = all(check.status == OK for check in ours[:3])  # an env that isn't would fail in the others, too
    yield _check(_WORKER, lambda: _step_in_worker(target)) if sound else Check(_WORKER, NOT_RUN)
    built = ours[0].status == OK
    yield _of_gymnasium(target) if built else Check(_GYMNASIUM, NOT_RUN)


def _our_contract(target: Target) -> Iterator[Check]:
    """Yields what `jaxvec.testing.check_env` came to: it stops at the first breach."""
    (env_fn,) = target.env_fns(1)
    try:
        testing.check_env(env_fn, num_steps=_NUM_STEPS)
        stage, reason = None, ""
    except UnsupportedSpaceError as error:
        stage, reason = _SPACES, str(error)
    except EnvError as error:
        if lacks_package(error):
            raise  # not the env's fault
        if error.operation == "constructor":
            stage, reason = _BUILDS, str(error)
        else:
            stage, reason = _DATA, str(error)
    except AssertionError as error:
        stage, reason = _REPRODUCIBLE, str(error)
    reached = len(_STAGES) if stage is None else _STAGES.index(stage)
    for place, name in enumerate(_STAGES):
        yield (
            Check(name, OK)
            if place < reached
            else Check(name, NOT_RUN)
            if place > reached
            else Check(name, FAIL, reason)
        )


def _step_in_worker(target: Target) -> None:
    with target.make(num_envs=2, num_workers=1) as envs:
        envs.reset(seed=0)
        envs.action_space.seed(0)
        for _ in range(10):
            envs.step(envs.action_space.sample())


def _of_gymnasium(target: Target) -> Check:
    """Returns what Gymnasium finds wrong, on the env itself, without its wrappers; its warnings, too."""

    def check() -> None:
        (env_fn,) = target.env_fns(1)
        with closing(env_fn()) as env:
            gymnasium_check_env(env.unwrapped, skip_render_check=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _check(_GYMNASIUM, check)
    said = [_plain(str(warning.message)) for warning in caught]
    reuses = _REUSE in found.reason
    if reuses:  # a pool copies each row before the env's next call
        said.append(f"{found.reason} A pool doesn't mind.")
    said = list(dict.fromkeys(said))
    if found.status == FAIL and not reuses:
        return Check(_GYMNASIUM, FAIL, "\n".join([found.reason, *said]), len(said))
    return Check(_GYMNASIUM, WARN if said else OK, "\n".join(said), len(said))


def _plain(text: str) -> str:
    """Returns what Gymnasium warns of, without its colours and marks."""
    return re.sub(r"\x1b\[[\d;]*m|^WARN: ", "", re.sub(r"^\x1b\[\d+m", "", text))


def _check(name: str, function: Callable[[], Any]) -> Check:
    try:
        function()
    except JaxvecError as error:
        return Check(name, FAIL, str(error))
    except Exception as error:
        return Check(name, FAIL, f"{type(error).__name__}: {error}")
    return Check(name, OK)


def _indent(reason: str) -> str:
    return "".join(f"\n         {line}" for line in reason.splitlines())


_CHECK = Command(
    name="check",
    summary="check that an env keeps jaxvec's contract, and Gymnasium's",
    details="""\
It steps the env with random actions, in this process and in a worker, and has Gymnasium's own check_env
look at it. Observations have to be members of their space. A breach is a FAIL, and the exit status 1; what
Gymnasium warns of is a warning, and fails nothing.

--json prints {"schema": "jaxvec.check/1", "env": TEXT, "kwargs": {…}, "ok": BOOL, "checks": [{"name": TEXT,
"status": "ok", "FAIL", "warn" or "not run", "reason": TEXT, "warnings": COUNT}]}.

examples:
  python -m jaxvec check CartPole-v1
  python -m jaxvec check my_package.envs:make_env --kwargs '{"size": 5}'
  python -m jaxvec check Pendulum-v1 --json""",
    add_arguments=_add_target_arguments,
    run=_run_check,
)


# ----------------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------------

COMMANDS: tuple[Command, ...] = (_DOCTOR, _BENCH, _CHECK)


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
