"""The command line: arguments and output of the commands, such as `doctor` and `bench`.

Each command is a `Command`. `main` parses the arguments, runs the command, and prints its `Outcome` or the
error.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.metadata
import inspect
import json
import operator
import os
import pickle
import platform
import re
import sys
import warnings
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast, get_args

import gymnasium
import jax
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

import jaxvec
from jaxvec import _native, _util, testing
from jaxvec._backends.ray import cluster
from jaxvec._envs import constructors
from jaxvec._errors import EnvError, JaxvecError, UnsupportedSpaceError
from jaxvec._memory import pinned, segment
from jaxvec._memory.segment import split_evenly
from jaxvec._native import NativeUnavailableError, native_dispatch
from jaxvec._settings import Transport
from jaxvec._util import INTERRUPTED, affinity, can_bind, usable_cores
from jaxvec._vector_env import VectorEnv
from jaxvec._workers import base, fork, lifeline, process, stacks
from jaxvec.adapters import recording
from jaxvec.callbacks import _ffi, _make
from jaxvec.cli import UsageError, _bench, _in_workers, _top
from jaxvec.spaces import pad

FINE, FAILED, USAGE = 0, 1, 2

EXIT_CODES = """\
exit codes:
  0    success
  1    an env or a check failed
  2    usage error: unknown env, bad argument, or missing package
  130  Ctrl-C"""


def lacks_package(error: EnvError) -> bool:
    """Returns whether the constructor of an env failed because a package is not installed."""
    missing = (ImportError, gymnasium.error.DependencyNotInstalled)
    return error.operation == "constructor" and isinstance(error.__cause__, missing)


@dataclass(frozen=True)
class Outcome:
    """Result of a command: the object for `--json`, the text or texts without it, and the exit code."""

    record: dict[str, Any]
    text: str | Iterator[str]
    code: int = FINE


@dataclass(frozen=True)
class Command:
    """A subcommand. `run` may raise `UsageError`, or the typed error of an env."""

    name: str
    summary: str
    details: str
    run: Callable[[Namespace], Outcome]
    add_arguments: Callable[[ArgumentParser], None] = lambda parser: None


# --- The argument ENV ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The env of the command line: its name there, its id or callable, and the constructor's arguments."""

    name: str
    env: str | Callable[..., Any]
    kwargs: dict[str, Any]
    has_mask: bool = False
    mask_key: str | None = None  # `None` for the usual one

    def env_fn(self) -> Callable[[], Any]:
        env_fn = constructors.resolve(self.env, split_evenly(1, 1), self.kwargs)[0]
        return partial(_in_workers.build, env_fn, self.mask_key) if self.has_mask else env_fn

    def make(self, **settings: Any) -> VectorEnv:
        if self.has_mask:
            return jaxvec.make(self.env_fn(), **settings)
        return jaxvec.make(self.env, **settings, **self.kwargs)

    def record(self, command: str, **found: Any) -> dict[str, Any]:
        return {"schema": f"jaxvec.{command}/1", "env": self.name, "kwargs": self.kwargs, **found}

    def line(self, settings: dict[str, Any]) -> str:
        """Returns the Python code that makes a pool with these settings."""
        given = ", ".join(
            f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}"
            for name, value in {**settings, **self.kwargs}.items()
        )
        if isinstance(self.env, str):
            return f"envs = jaxvec.make({json.dumps(self.env)}, {given})"
        module, _, name = self.name.rpartition(":")
        return f"import {module}; envs = jaxvec.make({module}.{name}, {given})"


def _add_target_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "env",
        metavar="ENV",
        help='a Gymnasium id ("CartPole-v1", "ALE/Pong-v5", "module:Env-v0"), or "package.module:callable"',
    )
    text = "JSON object of keyword arguments for the env's constructor"
    parser.add_argument("--kwargs", metavar="JSON", default="{}", help=text)
    text = "key of the mask of legal actions in the info or the observation; default action_mask"
    parser.add_argument("--mask-info", metavar="KEY", help=text)


def _find_target(options: Namespace) -> Target:
    """Returns the env of the arguments, or raises `UsageError` if it does not exist or does not fit them."""
    target, key = _resolve(options), options.mask_info
    found: Any = ()
    with suppress(Exception), closing(target.env_fn()()) as env:  # an env that fails is examined later
        found = env.action_space, *env.reset(seed=0)
    mask = _in_workers.find_mask(found[0], key, *found[1:]) if found else None
    if key is not None and found and mask is None:
        keys = [name for part in found[1:] if isinstance(part, dict) for name in part]
        raise UsageError(f"--mask-info: reset returned no mask of {found[0]} at {key!r}, only {keys}")
    return replace(target, has_mask=mask is not None, mask_key=key)


def _resolve(options: Namespace) -> Target:
    name, kwargs = options.env, _kwargs(options.kwargs)
    module, _, rest = name.rpartition(":")
    if module:
        imported = _import(name, module)
        if not re.search(r"-v\d+$", rest):
            return _checked(Target(name, _callable(name, imported, rest), kwargs))
    elif (package := constructors.PUBLISHERS.get(name.partition("/")[0])) is not None:
        _import(name, package, _util.install_command(constructors.EXTRAS.get(package, package)))
        return _checked(Target(name, f"{package}:{name}", kwargs))
    return _checked(Target(name, name, kwargs))


def _kwargs(text: str) -> dict[str, Any]:
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--kwargs is not valid JSON ({error}); write '{{\"name\": value}}'") from error
    if not isinstance(kwargs, dict):
        raise UsageError(f"--kwargs must be a JSON object such as '{{\"name\": value}}', not {text}")
    kwargs = cast(dict[str, Any], kwargs)
    if clash := sorted(kwargs.keys() & inspect.signature(_make.make).parameters.keys()):
        raise UsageError(
            f"--kwargs: jaxvec.make also has an argument {clash[0]!r}; wrap the env in a callable"
        )
    return kwargs


def _import(name: str, module: str, advice: str = "is it installed?") -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name}: there is no module named {error.name!r}; {advice}") from error
    except Exception as error:
        raise UsageError(f"{name}: importing {module} raised {type(error).__name__}: {error}") from error


def _callable(name: str, module: Any, rest: str) -> Any:
    try:
        found = operator.attrgetter(rest)(module)
    except AttributeError as error:
        raise UsageError(
            f"{name}: module {module.__name__!r} has no {rest!r}; a Gymnasium id ends in -v and a number"
        ) from error
    if not callable(found):
        raise UsageError(f"{name} must be a callable that returns an env, not of type {type(found).__name__}")
    return found


def _checked(target: Target) -> Target:
    """Returns `target`, or raises `UsageError` if its id or the names of its arguments are wrong."""
    try:
        target.env_fn()
    except gymnasium.error.Error as error:
        raise UsageError(
            f"{target.name}: {error} On the command line, write MODULE:CLASS, or MODULE:ID if importing the "
            "module registers it"
        ) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{target.name}: {error}") from error
    if not isinstance(target.env, str):
        try:
            inspect.signature(target.env).bind_partial(**target.kwargs)
        except TypeError as error:
            raise UsageError(f"{target.name}: --kwargs: {error}") from error
        except ValueError:
            pass  # a builtin without a signature; a wrong argument is an error of the constructor
    return target


# --- doctor ----------------------------------------------------------------------------------------------


def _examine() -> Iterator[tuple[str, str]]:
    """Yields the name and the status of each component."""
    yield "jaxvec", jaxvec.__version__
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in ("jax", "jaxlib", "numpy", "gymnasium"):
        yield package, importlib.metadata.version(package)
    yield "usable cores", str(usable_cores())
    reason = fork.reason_unavailable()
    yield "start method", process.choose_start_method("auto") if reason is None else f"spawn: {reason}"
    yield "pin_workers", "ready" if can_bind() else "off: this system does not bind processes to cores"
    # Calls that some containers deny. Pools work without.
    yield "getaffinity", "permitted" if affinity() else "off: usable cores are those of the machine"
    reason = lifeline.reason_for_thread()
    yield "F_SETSIG", "permitted" if reason is None else f"off: {reason}; a thread ends each worker"
    for call, reason in segment.denied_calls().items():
        yield call, "permitted" if reason is None else f"off: {reason}"
    reason = _native.reason_unavailable()
    yield "native library", "loaded" if reason is None else f"off: {reason}"
    yield "dispatch", base.choose_dispatch("auto")
    reason = reason or native_dispatch.reason_for_long_slices()
    yield "short slices", "granted" if reason is None else f"off: {reason}"
    reason = _ffi.reason_unavailable()
    yield "XLA FFI", "ready" if reason is None else f"off: {reason}"
    yield "transport", "io_callback" if reason else "ffi on the CPU and on CUDA, io_callback elsewhere"
    reason = pinned.reason_unavailable()
    yield "page-locking", "ready" if reason is None else f"off: {reason}"
    yield "ray", cluster.describe()


def _run_doctor(options: Namespace) -> Outcome:
    found = dict(_examine())
    text = "\n".join(f"{component:15} {status}" for component, status in found.items())
    return Outcome({"schema": "jaxvec.doctor/1", "found": found}, text)


_DOCTOR = Command(
    name="doctor",
    summary="show which parts of jaxvec are active on this machine, and why others are not",
    details="""\
--json prints {"schema": "jaxvec.doctor/1", "found": {NAME: TEXT}}. The text of an inactive part starts
with "off: ".

examples:
  jaxvec doctor
  jaxvec doctor --json""",
    run=_run_doctor,
)


# --- bench -----------------------------------------------------------------------------------------------


def _run_bench(options: Namespace) -> Outcome:
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
    record = target.record("bench", measurement=asdict(found), notes=[*_bench.notes(found)], make=line)
    return Outcome(record, "\n".join(_bench.report(found, target.name, line)))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError as error:
        raise ArgumentTypeError(f"must be integers such as 16,64,256, not {text!r}") from error
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
    numbers: dict[str, Any] = {"type": _numbers, "metavar": "N,N,…"}
    parser.add_argument("--num-envs", **numbers, help="pool sizes; default 16,64,256, fewer for slow envs")
    parser.add_argument("--num-workers", **numbers, help="worker counts; default up to the usable cores")
    text = "length of each measurement in seconds, default 0.2; a run has about 100 measurements"
    parser.add_argument("--seconds", type=_seconds, default=0.2, metavar="S", help=text)
    parser.add_argument(
        "--transport", choices=get_args(Transport), default="auto", help="how programs reach the pool"
    )


_BENCH = Command(
    name="bench",
    summary="benchmark an env, alone and in pools, and recommend num_envs and num_workers",
    details="""\
The command steps the env with random actions: alone, and in pools of several sizes, from a Python loop and
inside a jitted lax.scan. Measurements alternate, and the output shows medians. Run nothing else meanwhile.

--json prints {"schema": "jaxvec.bench/1", "env": TEXT, "kwargs": {…}, "measurement": {…}, "notes": [TEXT],
"make": TEXT}. The class Measurement in jaxvec/cli/_bench.py describes the fields.

examples:
  jaxvec bench CartPole-v1
  jaxvec bench ALE/Pong-v5 --kwargs '{"frameskip": 4}' --num-envs 16,64
  jaxvec bench my_package.envs:make_env --num-workers 1,2
  jaxvec bench CartPole-v1 --num-envs 8 --num-workers 1 --seconds 0.02 --json""",
    add_arguments=_add_bench_arguments,
    run=_run_bench,
)


# --- check -----------------------------------------------------------------------------------------------

OK, FAIL, WARN, NOT_RUN = "ok", "FAIL", "warn", "not run"

_BUILDS, _SPACES, _DATA, _REPRODUCIBLE = _STAGES = (
    "the constructor returns a gymnasium.Env",
    "its spaces have fixed shapes, and dtypes that JAX supports",
    "reset and step return data that match the spaces",
    "equal seeds and actions give equal data",
)
_WORKER = "it runs in a worker process"
_ISOLATED = "two envs of one process give the same data as each alone"
_NO_JAX = "workers with it do not import JAX"
_SAVED = "its states can be saved, also late in an episode"
_GYMNASIUM = "Gymnasium's check_env"

_UNWRAPPED = "different from the unwrapped version"  # part of a warning about any wrapper
_REUSE = "share an object"  # part of Gymnasium's error for envs that return one array twice


@dataclass(frozen=True)
class Check:
    """Result of one check: the requirement, its status, the reason if it is not met, number of warnings."""

    name: str
    status: str
    reason: str = ""
    warnings: int = 0


def _run_check(options: Namespace) -> Outcome:
    target = _find_target(options)
    checks = list(_checks(target))
    failed = sum(check.status == FAIL for check in checks)
    indent = "\n         "
    lines = [f"{c.status:8} {indent.join([c.name, *c.reason.splitlines()])}" for c in checks]
    verdict = f"{failed} of {len(checks)} checks failed" if failed else "ok"
    if warned := sum(check.warnings for check in checks):
        verdict += f", with {warned} warning{'s' if warned > 1 else ''}"
    lines.append(f"\n{target.name}: {verdict}")
    record = target.record("check", ok=not failed, checks=[asdict(check) for check in checks])
    return Outcome(record, "\n".join(lines), FAILED if failed else FINE)


def _checks(target: Target) -> Iterator[Check]:
    stages = _check_stages(target)
    yield from stages
    # An env that fails one of the first three stages would also fail in a worker, for the known reason.
    sound = all(check.status == OK for check in stages[:3])
    yield from _check_workers(target) if sound else [Check(name, NOT_RUN) for name in (_WORKER, _ISOLATED)]
    yield from _check_options(target) if sound else [Check(name, NOT_RUN) for name in (_NO_JAX, _SAVED)]
    built = stages[0].status == OK
    yield _check_with_gymnasium(target) if built else Check(_GYMNASIUM, NOT_RUN)


def _check_stages(target: Target) -> list[Check]:
    """Runs `jaxvec.testing.check_env`, which stops at the first violation. Returns a `Check` per stage."""
    try:
        testing.check_env(target.env_fn())
        return [Check(name, OK) for name in _STAGES]
    except UnsupportedSpaceError as error:
        stage, reason = _SPACES, str(error)
    except EnvError as error:
        if lacks_package(error):
            raise  # a usage error, not a violation
        stage, reason = _BUILDS if error.operation == "constructor" else _DATA, str(error)
    except AssertionError as error:
        stage, reason = _REPRODUCIBLE, str(error)
    failed = _STAGES.index(stage)
    checks = [Check(name, OK) for name in _STAGES[:failed]] + [Check(stage, FAIL, reason)]
    return checks + [Check(name, NOT_RUN) for name in _STAGES[failed + 1 :]]


Trace: TypeAlias = list[dict[str, Any]]  # the leaves of each time step, by name

_WORKER_STEPS = 50


def _step_in_workers(target: Target, num_workers: int) -> Trace:
    """Steps two envs, in one process or in one each."""
    with target.make(num_envs=2, num_workers=num_workers) as envs:
        space = envs.single_action_space
        space.seed(0)
        steps = (envs.step(pad(space, [space.sample(), space.sample()])) for _ in range(_WORKER_STEPS))
        timesteps = [envs.reset(seed=0), *steps]
    leaves = map(jax.tree_util.tree_leaves_with_path, timesteps)
    return [{jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in each} for each in leaves]


def _check_workers(target: Target) -> tuple[Check, Check]:
    """Checks that workers can have the env, one and two of them."""
    together: Trace = []
    try:
        together += _step_in_workers(target, 1)
    except Exception as error:
        failed = Check(_WORKER, FAIL, str(error) if isinstance(error, JaxvecError) else repr(error))
        if isinstance(error, EnvError) and error.operation == "constructor":  # may be that of the second env
            alone = _check(_WORKER, lambda: _step_in_workers(target, 2))
            if alone.status == OK:
                return alone, replace(failed, name=_ISOLATED)
        return failed, Check(_ISOLATED, NOT_RUN)
    return Check(_WORKER, OK), _check_isolation(target, together)


def _check_options(target: Target) -> list[Check]:
    """Checks what some pools need: little memory per worker, and states that can be saved."""
    checks = [Check(_NO_JAX, OK), Check(_SAVED, OK)]
    try:
        with target.make(num_envs=1, num_workers=1, states=1) as envs:
            space = envs.single_action_space
            space.seed(0)
            envs.reset(seed=0)
            for _ in range(_WORKER_STEPS):
                envs.step(pad(space, [space.sample()]))
            if any(envs.map(_in_workers.imports_jax)):
                checks[0] = Check(_NO_JAX, WARN, _IMPORTS_JAX, 1)
            envs.reset()
            for _ in range(_WORKER_STEPS):
                envs.save()  # in each step, as the env may create objects late
                envs.step(pad(space, [space.sample()]))
    except JaxvecError as error:
        checks[1] = Check(_SAVED, WARN, f"{error}\nThe env works without states.", 1)
    return checks


_IMPORTS_JAX = (
    "Each worker imports JAX, which takes memory and threads. Use NumPy in the env and in the variables of "
    "its modules; np.asarray converts arrays."
)


def _check_isolation(target: Target, together: Trace) -> Check:
    """Compares two envs that one process stepped in turns with the same envs in a process each."""
    try:
        alone = _step_in_workers(target, 2)
        found = _difference(alone, together)
        if found and _difference(alone, _step_in_workers(target, 2)):
            return Check(_ISOLATED, NOT_RUN)  # not reproducible in any case, as another check has found
    except JaxvecError as error:
        return Check(_ISOLATED, FAIL, str(error))
    if found is None:
        return Check(_ISOLATED, OK)
    name, env_id, call, one, other = found
    reason = (
        f"{name}: env {env_id} returned {other} at {call} in one process with env {1 - env_id}, but {one} "
        "alone.\nThey share state, such as a global variable, a class attribute or a simulator that exists "
        "once per process. Move it into the env, or give each env its own process: "
        "jaxvec.make(..., num_workers=num_envs)"
    )
    return Check(_ISOLATED, FAIL, reason)


def _difference(first: Trace, second: Trace) -> tuple[str, int, str, Any, Any] | None:
    """Returns name, env, call and both values of the first difference."""
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        for name, rows in one.items():
            for env_id, (row, another) in enumerate(zip(rows, other[name], strict=True)):
                if row.tobytes() != another.tobytes():
                    return name, env_id, f"step {number}" if number else "reset", row, another
    return None


def _check_with_gymnasium(target: Target) -> Check:
    """Runs Gymnasium's `check_env` on the env without its wrappers, and includes the warnings."""

    def check() -> None:
        with closing(target.env_fn()()) as env:
            inner = env.unwrapped
            masked = _in_workers.LegalActions(inner, target.mask_key) if target.has_mask else inner
            gymnasium_check_env(masked, skip_render_check=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _check(_GYMNASIUM, check)
    # Without the terminal colours and the mark that Gymnasium adds.
    texts = [re.sub(r"\x1b\[[\d;]*m", "", str(warning.message)).removeprefix("WARN: ") for warning in caught]
    reuses = _REUSE in found.reason
    if reuses:  # harmless: a worker copies each observation before the env's next call
        texts.append(f"{found.reason} jaxvec copies observations, so its pools work with this env.")
    texts = list(dict.fromkeys(text for text in texts if not (target.has_mask and _UNWRAPPED in text)))
    if found.status == FAIL and not reuses:
        return Check(_GYMNASIUM, FAIL, "\n".join([found.reason, *texts]), len(texts))
    return Check(_GYMNASIUM, WARN if texts else OK, "\n".join(texts), len(texts))


def _check(name: str, function: Callable[[], Any]) -> Check:
    try:
        function()
    except JaxvecError as error:
        return Check(name, FAIL, str(error))
    except Exception as error:
        return Check(name, FAIL, f"{type(error).__name__}: {error}")
    return Check(name, OK)


_CHECK = Command(
    name="check",
    summary="check that an env meets the requirements of jaxvec and Gymnasium",
    details="""\
The command steps the env with random actions, in this process and in workers, and runs Gymnasium's own
check_env. Observations must be members of their space. Two envs of one process must give the same data as
each alone, so they may not share state, such as a global variable. Violations are reported as FAIL (exit
code 1). Gymnasium's warnings, workers that import JAX, and states that cannot be saved are reported, but do
not fail the check. Actions are legal if the env has a mask of legal ones (--mask-info).

--json prints {"schema": "jaxvec.check/1", "env": TEXT, "kwargs": {…}, "ok": BOOL, "checks": [{"name": TEXT,
"status": "ok", "FAIL", "warn" or "not run", "reason": TEXT, "warnings": COUNT}]}.

examples:
  jaxvec check CartPole-v1
  jaxvec check my_package.envs:make_env --kwargs '{"size": 5}'
  jaxvec check Pendulum-v1 --json""",
    add_arguments=_add_target_arguments,
    run=_run_check,
)


# --- new -------------------------------------------------------------------------------------------------

_EXAMPLES = Path(jaxvec.__file__).parent / "examples"
_PROGRAMS = tuple(sorted(path.stem for path in _EXAMPLES.glob("[!_]*.py")))


def _run_new(options: Namespace) -> Outcome:
    text = (
        (_EXAMPLES / f"{options.program}.py")
        .read_text()
        .replace(f"-m jaxvec.examples.{options.program}", options.file.name)
    )
    try:
        with options.file.open("x") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {options.file}: {error.strerror}") from error
    return Outcome({"schema": "jaxvec.new/1", "file": str(options.file)}, f"wrote {options.file}")


def _add_new_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "program", metavar="PROGRAM", choices=_PROGRAMS, help="one of: " + ", ".join(_PROGRAMS)
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="file to write, such as my_ppo.py")


_NEW = Command(
    name="new",
    summary="write a copy of an example program, to change it",
    details="""\
The copy is one file, whose first lines say how to run it. It needs jaxvec and the packages of the extra
[demo]. An existing file is not overwritten.

--json prints {"schema": "jaxvec.new/1", "file": TEXT}.

examples:
  jaxvec new ppo my_ppo.py""",
    add_arguments=_add_new_arguments,
    run=_run_new,
)


# --- top -------------------------------------------------------------------------------------------------


def _run_top(options: Namespace) -> Outcome:
    workers = _top.look(options.pid)
    record = {"schema": "jaxvec.top/1", "pid": options.pid, "workers": workers}
    return Outcome(record, _top.table(workers) if options.once else _top.live(options.pid, options.seconds))


def _add_top_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("pid", type=int, metavar="PID", help="process id of the program that made the pools")
    parser.add_argument("--once", action="store_true", help="print one table, and exit")
    text = "time between two tables in seconds, default 2"
    parser.add_argument("--seconds", type=_seconds, default=2.0, metavar="S", help=text)


_TOP = Command(
    name="top",
    summary="show memory, age and speed of a program's workers",
    details="""\
The command reads /proc and the shared memory of the program's pools, and changes nothing. The workers with
the most memory come first. MEMORY is resident memory, with that of child processes; in SHARE, a page that n
processes share counts 1/n. Ctrl-C ends the command.

--json prints {"schema": "jaxvec.top/1", "pid": PID, "workers": [{…}]} once.

examples:
  jaxvec top 4711 --once""",
    add_arguments=_add_top_arguments,
    run=_run_top,
)


# --- stack -----------------------------------------------------------------------------------------------


def _run_stack(options: Namespace) -> Outcome:
    pid, env_id = options.pid, options.env
    if not (workers := [*stacks.find_all(pid)]):
        _top.look(pid)  # raises if there is no such process, or if it has no workers
    workers = [each for each in workers if env_id is None or each.first <= env_id <= each.last]
    if not workers:
        raise UsageError(f"process {pid} has no worker with env {env_id}")
    reads = [each.request_stack() for each in workers]
    found: list[dict[str, Any]] = [
        {"pid": w.pid, "worker": w.worker, "envs": [w.first, w.last], "stack": read()}
        for w, read in zip(workers, reads, strict=True)
    ]
    text = "\n\n".join(
        f"worker {each['worker']} (envs {each['envs'][0]} to {each['envs'][1]}, pid {each['pid']})\n"
        + (each["stack"].strip() or "no answer: the process is stopped, or blocks the signal")
        for each in found
    )
    record = {"schema": "jaxvec.stack/1", "pid": pid, "workers": found}
    return Outcome(record, text, FINE if all(each["stack"] for each in found) else FAILED)


def _add_stack_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("pid", type=int, metavar="PID", help="process id of the program, or of a worker")
    parser.add_argument("--env", type=int, metavar="N", help="only the worker of this env")


_STACK = Command(
    name="stack",
    summary="show where the workers of a running program are in their code",
    details="""\
The command also shows workers that hang, with the native stack if the native library is there. It interrupts
a worker by a real-time signal, so C code may see EINTR; the worker then continues. The exit code is 1 if a
worker does not answer.

--json prints {"schema": "jaxvec.stack/1", "pid": PID, "workers": [{…}]}; each worker has a "pid", a "worker"
index, its first and last "envs", and a "stack".

example:
  jaxvec stack 4711 --env 17""",
    add_arguments=_add_stack_arguments,
    run=_run_stack,
)


# --- replay ----------------------------------------------------------------------------------------------


def _run_replay(options: Namespace) -> Outcome:
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        print(line, file=sys.stderr, flush=True)  # at once, because the env may end this process

    faulthandler.enable()
    try:
        if (folder := Path(options.file)).is_dir():
            return _list_records(folder)
        repeated = recording.replay(options.file, report, debug=options.pdb)
    except (OSError, pickle.UnpicklingError, ImportError, AttributeError) as error:
        raise UsageError(f"{options.file} can't be read: {type(error).__name__}: {error}") from error
    record = {"schema": "jaxvec.replay/1", "file": options.file, "repeated": repeated, "report": lines}
    text = "The env repeated the fault." if repeated else "The env did not repeat the fault."
    return Outcome(record, text, FINE if repeated else FAILED)


def _list_records(folder: Path) -> Outcome:
    """Lists the records of faults, and of episodes that ended with their process."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (recording.RECORD, recording.RUNNING))
    lines = [line for path in files if (line := recording.describe(path))]
    text = "\n".join(lines) if lines else f"{folder} has no records of faults."
    return Outcome({"schema": "jaxvec.replay/1", "folder": str(folder), "records": lines}, text, FINE)


def _add_replay_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a record of RecordFaults, or its folder, to list the records"
    )
    parser.add_argument("--pdb", action="store_true", help="open pdb at the fault, or before the last step")


_REPLAY = Command(
    name="replay",
    summary="make an episode that ended in a fault again, in this process",
    details="""\
The exit code is 0 if the env repeats the fault, and 1 if it does not. jaxvec.adapters.recording.RecordFaults
makes the records. A record is a pickle, which can run any code: replay only records that you trust.

--json prints {"schema": "jaxvec.replay/1", "file": TEXT, "repeated": BOOL, "report": [TEXT]}.""",
    add_arguments=_add_replay_arguments,
    run=_run_replay,
)


# --- The command line ------------------------------------------------------------------------------------

COMMANDS: tuple[Command, ...] = (_DOCTOR, _BENCH, _CHECK, _NEW, _TOP, _STACK, _REPLAY)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the exit code (see `EXIT_CODES`).

    Args:
        argv: the arguments after `jaxvec`; by default those of this process.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    command: Command | None = options.command
    if command is None:
        parser.print_help(sys.stderr)
        sys.exit(USAGE)
    try:
        with _stdout_to_stderr():
            outcome = command.run(options)
    except (UsageError, NativeUnavailableError) as error:
        return _fail(command, error, USAGE)
    except JaxvecError as error:
        if isinstance(error, EnvError) and lacks_package(error):
            return _fail(command, f"a package of the env is not installed: {error.__cause__}", USAGE)
        return _fail(command, error, FAILED)
    except KeyboardInterrupt:
        return _fail(command, "interrupted", INTERRUPTED)
    except RuntimeError as error:
        # JAX turns a KeyboardInterrupt inside a host callback into a JaxRuntimeError.
        if "KeyboardInterrupt" not in str(error):
            raise
        return _fail(command, "interrupted", INTERRUPTED)
    text = json.dumps(outcome.record, indent=2) if options.json else outcome.text
    for each in [text] if isinstance(text, str) else text:
        print(each, flush=True)
    return outcome.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxvec",
        description="Diagnose this installation or a program; check or benchmark an env; start a program.",
        epilog=f"Another command, worker, serves envs of remote pools: see its --help.\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxvec {jaxvec.__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
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
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


@contextmanager
def _stdout_to_stderr() -> Generator[None]:
    """Redirects the output of envs, here and in workers, to stderr. Stdout contains only the result."""
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
    print(f"jaxvec {command.name}: {why}", file=sys.stderr)
    return code
