"""The command line: arguments and output of the commands, such as `doctor` and `bench`.

Each command is a `Command`. `main` parses the arguments, runs the command, and prints its `Outcome` or the
error.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.metadata
import json
import os
import pickle
import platform
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import jaxvec
from jaxvec import _native
from jaxvec._backends.ray import cluster
from jaxvec._engine import choice
from jaxvec._errors import EnvError, JaxvecError
from jaxvec._memory import pinned, segment
from jaxvec._native import NativeUnavailableError
from jaxvec._settings import Transport
from jaxvec._util import INTERRUPTED, affinity, can_bind, usable_cores
from jaxvec._workers import fork, lifeline, process, stacks
from jaxvec.adapters import recording
from jaxvec.callbacks import _ffi
from jaxvec.cli import UsageError, _bench, _check, _top
from jaxvec.cli._target import find_target, lacks_package, load

FINE = 0
FAILED = 1
USAGE = 2
NOT_TESTED = 3
_JSON = "print one JSON object instead of text"

EXIT_CODES = """\
exit codes:
  0    success
  1    an env or a check failed
  2    usage error: unknown env, bad argument, or missing package; of compare, also that an env failed
  3    compare found no difference, but a part was not tested
  130  Ctrl-C"""


@dataclass(frozen=True)
class Outcome:
    """Result of a command: the object for `--json`, the text or texts without it, and the exit code."""

    record: dict[str, Any]
    text: str | Iterator[str]
    code: int = FINE


def _argument(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns the arguments of a call of `ArgumentParser.add_argument`."""
    return names, settings


@dataclass(frozen=True)
class Command:
    """A subcommand. `run` may raise `UsageError`, or the typed error of an env."""

    name: str
    summary: str
    details: str
    run: Callable[[Namespace], Outcome]
    arguments: Sequence[tuple[tuple[str, ...], dict[str, Any]]] = ()
    json: Mapping[str, Any] = field(default_factory=lambda: {"action": "store_true", "help": _JSON})


# Arguments of the commands with one env; `find_target` reads them.
_TARGET = (
    _argument(
        "env",
        metavar="ENV",
        help='a Gymnasium id ("CartPole-v1", "ALE/Pong-v5", "module:Env-v0"), or "package.module:callable"',
    ),
    _argument(
        "--kwargs",
        metavar="JSON",
        default="{}",
        help="JSON object of keyword arguments for the env's constructor",
    ),
    _argument(
        "--reset-options",
        metavar="JSON",
        default="{}",
        help="JSON object of options for each reset of the env",
    ),
    _argument(
        "--mask-info",
        metavar="KEY",
        help="key of the mask of legal actions in the info or the observation; default action_mask",
    ),
)


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
    # Calls that some containers deny, and that macOS lacks. Pools work without.
    yield "getaffinity", "permitted" if affinity() else "off: usable cores are those of the machine"
    reason = lifeline.reason_for_thread()
    yield "F_SETSIG", "permitted" if reason is None else f"off: {reason}; a thread ends each worker"
    for call, reason in _denied_calls().items() if sys.platform == "linux" else ():
        yield call, "permitted" if reason is None else f"off: {reason}"
    reason = _native.reason_unavailable()
    yield "native library", "loaded" if reason is None else f"off: {reason}"
    yield "dispatch", choice.choose_dispatch("auto")
    reason = reason or _reason_for_long_slices()
    yield "short slices", "granted" if reason is None else f"off: {reason}"
    reason = _ffi.reason_unavailable()
    yield "XLA FFI", "ready" if reason is None else f"off: {reason}"
    yield "transport", "io_callback" if reason else "ffi on the CPU and on CUDA, io_callback elsewhere"
    reason = pinned.reason_unavailable()
    yield "page-locking", "ready" if reason is None else f"off: {reason}"
    yield "ray", cluster.describe()


def _denied_calls() -> dict[str, str | None]:
    """Returns what replaces each system call for shared memory that is denied here; `None` for the others."""
    calls: dict[str, str | None] = dict.fromkeys(("memfd_create", "fallocate", "F_ADD_SEALS"))
    try:
        memory = os.memfd_create("jaxvec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        calls["memfd_create"] = f"{error}; pools use POSIX shared memory"
        memory = segment.create_memory("jaxvec")
    try:
        os.posix_fallocate(memory, 0, 1)
    except OSError as error:
        calls["fallocate"] = f"{error}; pools write zeros to allocate memory"
    try:
        segment.seal(memory)
    except OSError as error:
        calls["F_ADD_SEALS"] = f"{error}; envs could change the size of the shared memory"
    os.close(memory)
    return calls


def _reason_for_long_slices() -> str | None:
    """Returns why threads that wait for steps get no short slices; `None` if they get them."""
    with ThreadPoolExecutor(1) as pool:  # so that this thread keeps its slices
        return pool.submit(_native.load().request_short_slices).result()


def _run_doctor(options: Namespace) -> Outcome:
    findings = dict(_examine())
    text = "\n".join(f"{component:15} {status}" for component, status in findings.items())
    return Outcome({"schema": "jaxvec.doctor/1", "found": findings}, text)


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
    num_envs = options.num_envs
    num_workers = options.num_workers
    if num_envs and num_workers and min(num_workers) > max(num_envs):
        raise UsageError("--num-workers: every pool would have more workers than envs")
    target = find_target(options)
    measured = _bench.measure(
        target.make,
        num_envs=num_envs,
        num_workers=num_workers,
        seconds=options.seconds,
        transport=options.transport,
    )
    best = _bench.best(measured.samples)
    line = target.line({"num_envs": best.num_envs, "num_workers": best.num_workers})
    record = target.record("bench", measurement=asdict(measured), notes=[*_bench.notes(measured)], make=line)
    return Outcome(record, "\n".join(_bench.report(measured, target.name, line)))


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
    arguments=(
        *_TARGET,
        _argument(
            "--num-envs",
            type=_numbers,
            metavar="N,N,…",
            help="pool sizes; default 16,64,256, fewer for slow envs",
        ),
        _argument(
            "--num-workers",
            type=_numbers,
            metavar="N,N,…",
            help="worker counts; default up to the usable cores",
        ),
        _argument(
            "--seconds",
            type=_seconds,
            default=0.2,
            metavar="S",
            help="length of each measurement in seconds, default 0.2; a run has about 100 measurements",
        ),
        _argument(
            "--transport", choices=get_args(Transport), default="auto", help="how programs reach the pool"
        ),
    ),
    run=_run_bench,
)


# --- check -----------------------------------------------------------------------------------------------


def _run_check(options: Namespace) -> Outcome:
    target = find_target(options)
    checks = list(_check.checks(target))
    failed = sum(check.status == _check.FAIL for check in checks)
    indent = "\n         "
    lines = [f"{c.status:8} {indent.join([c.name, *c.reason.splitlines()])}" for c in checks]
    verdict = f"{failed} of {len(checks)} checks failed" if failed else "ok"
    if warned := sum(check.warnings for check in checks):
        verdict += f", with {warned} warning{'s' if warned > 1 else ''}"
    lines.append(f"\n{target.name}: {verdict}")
    record = target.record("check", ok=not failed, checks=[asdict(check) for check in checks])
    return Outcome(record, "\n".join(lines), FAILED if failed else FINE)


_CHECK = Command(
    name="check",
    summary="check that an env meets the requirements of jaxvec and Gymnasium",
    details="""\
The command steps the env with random actions, in this process and in workers, and runs Gymnasium's own
check_env. Observations must be members of their space. Two envs of one process must give the same data as
each alone, so they may not share state, such as a global variable. Violations are reported as FAIL (exit
code 1). Gymnasium's warnings, workers that import JAX, and states that cannot be saved or resumed in another
process are reported, but do not fail the check. Actions are legal if the env has a mask of legal ones
(--mask-info).

--json prints {"schema": "jaxvec.check/1", "env": TEXT, "kwargs": {…}, "ok": BOOL, "checks": [{"name": TEXT,
"status": "ok", "FAIL", "warn" or "not run", "reason": TEXT, "warnings": COUNT}]}.

examples:
  jaxvec check CartPole-v1
  jaxvec check my_package.envs:make_env --kwargs '{"size": 5}'
  jaxvec check Pendulum-v1 --json""",
    arguments=_TARGET,
    run=_run_check,
)


# --- compare ---------------------------------------------------------------------------------------------


def _run_compare(options: Namespace) -> Outcome:
    from jaxvec import ports  # which imports JAX

    names = {
        name: text
        for name in ("port", "original", *_FUNCTIONS)
        if (text := getattr(options, name)) is not None
    }
    try:
        result = ports.compare_port(
            **{name: load(text) for name, text in names.items()},
            mode="free_running" if options.free_running or options.set_state is None else "one_step",
            num_envs=options.num_envs,
            num_steps=options.num_steps,
            seed=options.seed,
            tolerances=options.tolerance,
        )
        # Refuses unknown names.
        result.assert_equal(ignore=[*result.differences, *result.untested, *options.ignore])
        different = {*result.differences} - {*options.ignore}
        code = FAILED if different else NOT_TESTED if {*result.untested} - {*options.ignore} else FINE
        start = ["from importlib import import_module", *(_definition(*item) for item in names.items())]
        replays = {
            path: "\n".join([*start, result.replay(path), ""]) for path in result.leaves if path in different
        }
        record = {"schema": "jaxvec.compare/1", "exit_code": code, **result.to_dict(), "replays": replays}
        if isinstance(options.json, Path):
            options.json.write_text(json.dumps(record, indent=2))
        if options.replay is not None and replays:
            options.replay.write_text(next(iter(replays.values())))
        return Outcome(record, str(result), code)
    except Exception as error:
        raise UsageError(
            str(error)
            if isinstance(error, JaxvecError | TypeError | ValueError | UsageError)
            else f"{type(error).__name__}: {error}"
        ) from error


def _definition(name: str, text: str) -> str:
    """Returns Python that gives `name` to what an argument says."""
    module, _, rest = text.rpartition(":")
    return f"{name} = " + (f"import_module({module!r}).{rest}" if module and "-" not in rest else repr(text))


_FUNCTIONS = ("set_state", "get_state", "select_state", "draws", "actions", "observe", "policy")

_COMPARE = Command(
    name="compare",
    summary="compare a JAX port of an env with its Python original",
    details="""\
The command plays both sides with equal random actions (jaxvec.ports.compare_port). Without --set-state,
episodes start from the resets of the original. --replay writes a program that repeats the largest error of
the first difference.

--json prints {"schema": "jaxvec.compare/1", "exit_code": CODE, "differences": [NAME], "untested": {NAME:
TEXT}, "replays": {NAME: PYTHON}, …}, or writes it to FILE. The attributes of jaxvec.ports.Comparison
describe the other fields.

example:
jaxvec compare my_port:port my_envs:Env --set-state my_port:set_state --json out.json""",
    arguments=(
        _argument("port", metavar="PORT", help="a Port or an env of a library, as package.module:name"),
        _argument("original", metavar="ORIGINAL", help="a Gymnasium id, or package.module:callable"),
        *(
            _argument(
                f"--{name.replace('_', '-')}",
                metavar="MODULE:NAME",
                help="function, as for jaxvec.ports.compare_port",
            )
            for name in _FUNCTIONS
        ),
        _argument("--free-running", action="store_true", help="set states only when an episode starts"),
        _argument("--num-envs", type=int, default=64, metavar="N", help="default 64"),
        _argument("--num-steps", type=int, default=1000, metavar="N", help="default 1000"),
        _argument("--seed", type=int, default=0, metavar="N", help="default 0"),
        _argument("--tolerance", type=float, default=0.0, metavar="X", help="accepted error, default 0"),
        _argument(
            "--ignore",
            metavar="NAME",
            action="append",
            default=[],
            help="accepted difference or gap; may be repeated",
        ),
        _argument("--replay", type=Path, metavar="FILE", help="write a program that repeats the first one"),
    ),
    run=_run_compare,
    json={"metavar": "FILE", "nargs": "?", "const": True, "type": Path, "help": f"{_JSON}, or write it"},
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


_NEW = Command(
    name="new",
    summary="write a copy of an example program, to change it",
    details="""\
The copy is one file, whose first lines say how to run it. It needs jaxvec and the packages of the extra
[demo]. An existing file is not overwritten.

--json prints {"schema": "jaxvec.new/1", "file": TEXT}.

examples:
  jaxvec new ppo my_ppo.py""",
    arguments=(
        _argument("program", metavar="PROGRAM", choices=_PROGRAMS, help="one of: " + ", ".join(_PROGRAMS)),
        _argument("file", metavar="FILE", type=Path, help="file to write, such as my_ppo.py"),
    ),
    run=_run_new,
)


# --- top -------------------------------------------------------------------------------------------------


def _run_top(options: Namespace) -> Outcome:
    workers = _top.look(options.pid)
    record = {"schema": "jaxvec.top/1", "pid": options.pid, "workers": workers}
    return Outcome(record, _top.table(workers) if options.once else _top.live(options.pid, options.seconds))


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
    arguments=(
        _argument("pid", type=int, metavar="PID", help="process id of the program that made the pools"),
        _argument("--once", action="store_true", help="print one table, and exit"),
        _argument(
            "--seconds",
            type=_seconds,
            default=2.0,
            metavar="S",
            help="time between two tables in seconds, default 2",
        ),
    ),
    run=_run_top,
)


# --- stack -----------------------------------------------------------------------------------------------


def _run_stack(options: Namespace) -> Outcome:
    pid = options.pid
    if not (workers := [*stacks.find_all(pid)]):
        _top.look(pid)  # raises if there is no such process, or if it has no workers
    workers = [worker for worker in workers if options.env in (None, *range(worker.first, worker.last + 1))]
    if not workers:
        raise UsageError(f"process {pid} has no worker with env {options.env}")
    reads = [worker.request_stack() for worker in workers]
    stacks_found: list[dict[str, Any]] = [
        {"pid": w.pid, "worker": w.worker, "envs": [w.first, w.last], "stack": read()}
        for w, read in zip(workers, reads, strict=True)
    ]
    text = "\n\n".join(
        f"worker {row['worker']} (envs {row['envs'][0]} to {row['envs'][1]}, pid {row['pid']})\n"
        + (row["stack"].strip() or "no answer: the process is stopped, or blocks the signal")
        for row in stacks_found
    )
    record = {"schema": "jaxvec.stack/1", "pid": pid, "workers": stacks_found}
    return Outcome(record, text, FINE if all(row["stack"] for row in stacks_found) else FAILED)


_STACK = Command(
    name="stack",
    summary="show where the workers of a running program are in their code",
    details="""\
The command also shows workers that hang, in Python or in C code. It interrupts a worker by a real-time
signal, so C code may see EINTR; the worker then continues. The exit code is 1 if a worker does not answer.

--json prints {"schema": "jaxvec.stack/1", "pid": PID, "workers": [{…}]}; each worker has a "pid", a "worker"
index, its first and last "envs", and a "stack".

example:
  jaxvec stack 4711 --env 17""",
    arguments=(
        _argument("pid", type=int, metavar="PID", help="process id of the program, or of a worker"),
        _argument("--env", type=int, metavar="N", help="only the worker of this env"),
    ),
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
    record = {"schema": "jaxvec.replay/1", "folder": str(folder), "records": lines}
    return Outcome(record, "\n".join(lines) or f"{folder} has no records of faults.")


_REPLAY = Command(
    name="replay",
    summary="make an episode that ended in a fault again, in this process",
    details="""\
The exit code is 0 if the env repeats the fault, and 1 if it does not. jaxvec.adapters.recording.RecordFaults
makes the records. A record is a pickle, which can run any code: replay only records that you trust.

--json prints {"schema": "jaxvec.replay/1", "file": TEXT, "repeated": BOOL, "report": [TEXT]}.""",
    arguments=(
        _argument(
            "file", metavar="FILE", help="a record of RecordFaults, or its folder, to list the records"
        ),
        _argument("--pdb", action="store_true", help="open pdb at the fault, or before the last step"),
    ),
    run=_run_replay,
)


# --- The command line ------------------------------------------------------------------------------------

COMMANDS: tuple[Command, ...] = (_DOCTOR, _BENCH, _CHECK, _COMPARE, _NEW, _TOP, _STACK, _REPLAY)


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
    except (KeyboardInterrupt, RuntimeError) as error:
        # JAX turns a KeyboardInterrupt inside a host callback into a JaxRuntimeError.
        if isinstance(error, RuntimeError) and "KeyboardInterrupt" not in str(error):
            raise
        return _fail(command, "interrupted", INTERRUPTED)
    text = json.dumps(outcome.record, indent=2) if options.json is True else outcome.text
    for paragraph in [text] if isinstance(text, str) else text:
        print(paragraph, flush=True)
    return outcome.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxvec",
        description="Diagnose this installation or a program; check or benchmark an env; start a program.",
        epilog=EXIT_CODES,
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
        for names, settings in (*command.arguments, _argument("--json", **command.json)):
            sub.add_argument(*names, **settings)
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
