"""A wrapper that keeps the episodes that end in a fault, and their replay: `jaxvec replay FILE`.

    start of an episode   seed, options, and the state of the env's generator   -> file of the env
    reset and step        the action; afterwards a checksum of the result       -> file of the env
    fault                 the cause, in words                                   -> the file gets its last name

Each of these is a pickle, which is written at once. So the file outlives a process that is killed within a
call, and then lacks the result of that.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pdb
import pickle
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast, final
from weakref import WeakKeyDictionary

import gymnasium
import numpy as np

from jaxvec._envs.envs import declared
from jaxvec._util import add_note, dumps, logger

__all__ = ["RecordFaults"]

RECORD = ".episode"
RUNNING = ".running"
_MAX_FILES = 1000  # in a directory
_NON_FINITE = "it returned numbers that are not finite"

_numbers = itertools.count()


class Fault(NamedTuple):
    """The last entry of a record."""

    cause: str


@final
class RecordFaults(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Records an env's running episode in a file, which remains if the episode ends in a fault.

    A fault is an error of the env, an observation or reward with a number that is not finite, or the end of
    the process within a reset or step: a crash in C, or a kill by the pool after a timeout. `jaxvec replay
    FILE` then makes the episode again, and `jaxvec replay DIRECTORY` lists the records. Closing the env
    removes the file of an episode without a fault.

    Example:
        ```python
        from jaxvec.adapters.recording import RecordFaults

        with jaxvec.make(lambda: RecordFaults("CartPole-v1", "runs/faults"), 4) as envs:
            print(envs.reset(seed=0).obs.shape)  # (4, 4)
        ```
    """

    def __init__(
        self,
        env: str | Callable[[], gymnasium.Env[Any, Any]],
        directory: str | os.PathLike[str],
        *,
        name: str = "env",
    ) -> None:
        """Makes the env.

        Args:
            env: A Gymnasium id, or a function that makes the env, which a replay calls again.
            directory: Folder of the files; it is created.
            name: Start of the files' names.
        """
        env_fn = partial(gymnasium.make, env) if isinstance(env, str) else env
        super().__init__(env_fn())
        _files[self] = _File(Path(directory).absolute(), name, dumps(env_fn))
        self._position: Any = None  # an attribute, so saved states contain it; see `_File.position`

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        file = _files[self]
        start = seed, None if options is None else dumps(options), _generator_of(self.env)
        self._position = file.begin(start)
        return file.record("reset", partial(self.env.reset, seed=seed, options=options))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        file = _files[self]
        # No episode is recorded before the first reset, and after the restore of a saved state.
        if file.position is None or file.position != self._position:
            return self.env.step(action)
        self._position = file.add(action)
        return file.record("step", partial(self.env.step, action))

    def close(self) -> None:
        try:
            self.env.close()
        finally:
            _files[self].remove()


# Beside the wrappers, not in their attributes: saved states contain these, and a file belongs to one env.
_files: WeakKeyDictionary[RecordFaults, _File] = WeakKeyDictionary()


class _File:
    """The record of the running episode of one env.

    Attributes:
        position: Name of the episode and number of its steps; `None` if nothing is recorded until the next
            reset. It differs from the position that the env remembers after a restore.
    """

    def __init__(self, directory: Path, name: str, env_fn: bytes) -> None:
        self.position: tuple[str, int] | None = None
        self._directory = directory
        self._name = name
        self._env_fn = env_fn
        self._path = directory
        self._file = cast("io.FileIO | None", None)
        self._pid = os.getpid()

    @property
    def _out(self) -> io.FileIO | None:
        """The open file, unless there is none; a forked copy of the env must not write, and has none."""
        return self._file if os.getpid() == self._pid else None

    def begin(self, start: tuple[Any, ...]) -> tuple[str, int]:
        """Starts the record of an episode, in place of the last one; returns the position."""
        self.position = secrets.token_hex(8), 0
        if os.getpid() == self._pid:
            try:
                file = self._file = self._file or self._open()
                file.seek(0)
                file.truncate()
            except OSError as error:
                self._give_up(error)
        self._write(self._env_fn + pickle.dumps(start))
        return self.position

    def add(self, action: Any) -> tuple[str, int]:
        """Adds the action of a step that begins; returns the position."""
        assert self.position is not None
        self.position = self.position[0], self.position[1] + 1
        self._write(pickle.dumps(action))
        return self.position

    def record(self, call: str, function: Callable[[], Any]) -> Any:
        """Calls a method of the env. Adds a checksum of its result, or keeps the record if it fails."""
        try:
            result = function()
        except (Exception, SystemExit) as error:
            if advice := self._keep(f"{type(error).__name__} in {call}: {error}"):
                add_note(error, advice)
            raise
        checksum, finite = _inspect(result[:-1] if isinstance(result, tuple) else result)  # without the info
        self._write(pickle.dumps(checksum))
        if not finite and (advice := self._keep(_NON_FINITE)):
            logger.warning("%s %s. %s", self._name, _NON_FINITE, advice)
        return result

    def remove(self) -> None:
        if (out := self._out) is not None:
            out.close()
            self._path.unlink(missing_ok=True)
            self._file = None

    def _open(self) -> io.FileIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        if sum(1 for _ in self._directory.iterdir()) >= _MAX_FILES:
            raise OSError(f"{self._directory} has {_MAX_FILES} files already")
        name = f"{self._name}-{time.strftime('%Y%m%d-%H%M%S')}-{self._pid}-{next(_numbers)}"
        self._path = self._directory / f"{name}{RUNNING}"
        return self._path.open("xb", buffering=0)

    def _keep(self, cause: str) -> str:
        """Ends the record with a fault. Returns a sentence with its path; "" if there is none."""
        self._write(pickle.dumps(Fault(cause)))
        self.position = None
        if (out := self._out) is None:
            return ""
        self._file = None
        out.close()
        return f"Make the episode again by: jaxvec replay {self._path.rename(self._path.with_suffix(RECORD))}"

    def _write(self, entry: bytes) -> None:
        if (out := self._out) is None:
            return
        try:
            if out.write(entry) != len(entry):
                raise OSError("the disk is full")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Drops the record until the next reset: a full disk is no fault of the env."""
        logger.warning("no record of %s in %s: %s", self._name, self._directory, error)
        with suppress(OSError):
            self.remove()
        self._file = None


def _generator_of(env: gymnasium.Env[Any, Any]) -> Any:
    """Returns the state of an env's generator; `None` before it has one."""
    generator = declared(env.unwrapped, "_np_random")
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else None


def _inspect(value: Any, checksum: int = 0) -> tuple[int, bool]:
    """Returns a checksum of a nested value, which continues one, and whether all its numbers are finite."""
    kind = type(value)
    if kind is bool or kind is int:
        return zlib.crc32(b"%d" % value, checksum), True
    if kind is float:
        return zlib.crc32(value.hex().encode(), checksum), math.isfinite(value)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        # The sum is not finite if a number is not, and may overflow; it costs less than the exact answer.
        finite = value.dtype.kind != "f" or math.isfinite(value.sum()) or bool(np.isfinite(value).all())
        return zlib.crc32(value.tobytes(), checksum), finite
    if isinstance(value, Mapping):
        value = [part for pair in cast("Mapping[Any, Any]", value).items() for part in pair]
    if not isinstance(value, tuple | list):
        return zlib.crc32(repr(value).encode(), checksum), True
    all_finite = True
    for part in cast("Sequence[Any]", value):
        checksum, finite = _inspect(part, checksum)
        all_finite = all_finite and finite
    return checksum, all_finite


# --- Replay ----------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """A record as it was read from its file."""

    env_fn: Callable[[], Any]
    seed: int | None
    options: dict[str, Any] | None
    generator: dict[str, Any] | None  # state of the env's `np_random` before the reset; `None` if it had none
    actions: list[Any]
    checksums: list[int]  # of the results of the reset and of each step
    cause: str  # of the fault; "" if the process ended within a call, or the episode still runs

    @property
    def in_call(self) -> bool:
        """True if the last reset or step has not returned."""
        return len(self.checksums) <= len(self.actions)


def read(path: str | os.PathLike[str]) -> Record:
    """Reads a record; raises `OSError`, or any error of unpickling the env's function."""
    with open(path, "rb") as file:
        env_fn = pickle.load(file)
        seed, options, generator = pickle.load(file)
        entries: list[Any] = []
        with suppress(EOFError, pickle.UnpicklingError):  # the last one may be cut
            while True:
                entries.append(pickle.load(file))
    cause = entries.pop().cause if entries and isinstance(entries[-1], Fault) else ""
    return Record(
        env_fn, seed, options and pickle.loads(options), generator, entries[1::2], entries[::2], cause
    )


def describe(path: Path) -> str:
    """Returns a line about a record, for a list; "" if it has no fault."""
    record = read(path)
    if record.cause:
        return f"{path}  {record.cause}"
    if not record.in_call or _runs(int(path.stem.split("-")[-2])):
        return ""
    return f"{path}  the process ended in {f'step {len(record.actions)}' if record.actions else 'the reset'}"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def replay(path: str, report: Callable[[str], None], *, debug: bool) -> bool:
    """Makes the episode of a file again, and reports in words. Returns whether it ended in the same fault.

    With `debug`, opens pdb where the env raises, or else before its last step.
    """
    record = read(path)
    last = len(record.actions)
    cause = record.cause or "the process ended within the call"
    report(f"{last} steps. Recorded: {cause}")
    if record.generator is None and record.seed is None:
        report("The state of the env's generator is unknown, so the episode may differ.")
    env = record.env_fn()
    raised = bool(record.cause) and record.in_call
    if record.generator is not None:
        bits = getattr(np.random, record.generator["bit_generator"])()
        bits.state = record.generator
        env.unwrapped.np_random = np.random.Generator(bits)
    step = 0
    try:
        for step, action in enumerate([None, *record.actions]):
            if step == last:
                report(f"step {step}, action {action!r}" if step else "reset")
            call: Any = partial(env.step, action)
            if step == 0:
                call = partial(env.reset, seed=record.seed, options=record.options)
            stops = debug and step == last and not raised
            result: Any = pdb.runcall(call) if stops else call()
            checksum, finite = _inspect(result[:-1])
            name = f"step {step}" if step else "the reset"
            if step < len(record.checksums) and checksum != record.checksums[step]:
                report(f"The env did not repeat: {name} returned other values than recorded.")
                return False
            if not finite:
                report(f"{name} returned numbers that are not finite.".capitalize())
                return cause == _NON_FINITE and step == last
    except (Exception, SystemExit) as error:
        report(f"It raised {type(error).__name__} in {f'step {step}' if step else 'the reset'}: {error}")
        if debug:
            pdb.post_mortem(error.__traceback__)
        repeated = step == last and raised and cause.startswith(type(error).__name__ + " ")
        if not repeated:
            report("The env did not repeat: this is another fault, or another step.")
        return repeated
    report(f"The env did not repeat: step {step} returned without a fault.")
    return False
