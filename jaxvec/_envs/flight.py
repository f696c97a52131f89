"""The flight recorder of `make(record_faults=...)`: the latest episode of each env, to make it again.

    start of an episode   its seed and the state of the env's generator       -> segment
    step                  the action, in a ring for each env                  -> segment
    fault                 the record of the env that failed, with its actions -> one file

The segment outlives a worker. So a worker writes the file if its env raised or returned numbers that are not
finite, and the program writes it if a worker died or was late. `replay` makes the episode again.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import pdb
import pickle
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._arguments import NO_SEED
from jaxvec._envs.envs import Env, EnvFailure, EnvFn, declared
from jaxvec._errors import ActionError
from jaxvec._memory.rows import InvalidValue, reader, writer
from jaxvec._memory.segment import Arrays, Index
from jaxvec._spec import KeyPath, PoolSpec, format_path, leaves
from jaxvec._util import dumps

_UNKNOWN = -(1 << 62)  # in "flight_count", for an episode without a recorded start
_BEGIN = struct.Struct("<qBB")  # seed, whether the reset got options, whether the generator's memory follows
_MEMORY = slice(16, 64)
_SUFFIX = ".episode"
_MAX_FILES = 100  # in the directory
NON_FINITE = "the env returned numbers that are not finite"

_logger = logging.getLogger("jaxvec")


@dataclass(frozen=True)
class Record:
    """The record of an episode that ended in a fault."""

    env_id: int
    cause: str  # the fault, in words
    raised: bool  # whether the env raised, rather than hanging, ending its process or returning bad numbers
    env_fn: EnvFn
    spec: PoolSpec
    seed: int | None  # of the episode's reset
    options: dict[str, Any] | None  # of the episode's reset
    generator: dict[str, Any] | None  # state of the env's `np_random` before the reset; `None` if unknown
    missing: int  # number of steps since the episode's start that the ring has lost
    actions: list[Any]
    seen: int  # number of steps after which the env had returned `obs`; -1 if that is unknown
    obs: dict[KeyPath, NDArray[Any]]


class FlightRecorder:
    """The recorder of the envs of one slice."""

    def __init__(
        self, env_fns: Sequence[EnvFn], *, first: int, spec: PoolSpec, arrays: Arrays, directory: str
    ) -> None:
        mine = slice(first, first + len(env_fns))
        self._env_fns, self._first = env_fns, first
        self._spec, self._arrays, self._directory = spec, arrays, directory
        self._indices, self._counts = np.arange(len(env_fns)), arrays["flight_count",][mine]
        self._columns = [
            (arrays[("flight", *leaf.path)][mine], arrays[leaf.path][mine]) for leaf in spec.action_leaves
        ]
        self._counts[:] = _UNKNOWN  # also those of a dead worker
        self._begins = [memoryview(begin) for begin in arrays["flight_begin",][mine]]
        # For each env: the env, its innermost env, that one's generator, and a view of its memory.
        self._generators: list[tuple[Any, ...]] = [(None, None, None, None)] * len(env_fns)
        obs = [arrays[leaf.path][mine] for leaf in leaves(spec.obs) if leaf.stored.kind == "f"]
        self._obs, self._rewards = obs, arrays[spec.reward.path][mine]
        # Of the slice, flat, to find a number that is not finite by one product.
        self._floats = [rows.reshape(-1) for rows in (*obs, self._rewards) if rows.dtype.kind == "f"]
        self._last_obs, self._write_last_obs = _make_row(spec)
        self._options: dict[int, dict[str, Any] | None] = {}
        self._reported: set[int] = set()  # envs with bad numbers in their episode

    def begin(self, index: int, env: Env, seed: int | None, options: dict[str, Any] | None) -> None:
        """Records that an env is about to be reset."""
        known, base, generator, memory = self._generators[index]
        if known is not env or declared(base, "_np_random") is not generator:
            base = env.unwrapped
            generator = declared(base, "_np_random")
            memory = _memory_of(generator)
            self._generators[index] = env, base, generator, memory
        begin = self._begins[index]
        _BEGIN.pack_into(begin, 0, NO_SEED if seed is None else seed, options is not None, memory is not None)
        if memory is not None:
            begin[_MEMORY] = memory
        self._options[index] = options
        self._counts[index] = 0
        self._reported.discard(index)

    def forget(self, index: int) -> None:
        """Records that an env was restored to a state, from which no record can start."""
        self._counts[index] = _UNKNOWN

    def step(self, index: Index) -> None:
        """Records the actions in the segment for the envs of `index`, which are about to be stepped."""
        counts = self._counts[index]
        for ring, actions in self._columns:
            ring[self._indices[index], counts % ring.shape[1]] = actions[index]
        self._counts[index] = counts + 1

    def check(self) -> None:
        """Writes a record for each env with an observation or reward that is not finite, once an episode."""
        if all(math.isfinite(flat.dot(flat)) for flat in self._floats):  # may also overflow
            return
        for index, count in enumerate(self._counts.tolist()):
            # After a reset within a step, the reward is the last one of the episode before.
            rewards = [] if count == 0 else [self._rewards]
            self._check(index, [rows[index] for rows in (*self._obs, *rewards)])

    def check_end(self, index: int, obs: Any) -> None:
        """Checks the last step of an episode, as `check` does, before a reset within the step.

        `obs` is its observation, which is not in the row of the env.
        """
        try:
            self._write_last_obs(0, obs)
        except InvalidValue:  # the pool raises it, unless it drops this observation
            return
        self._check(index, [*self._last_obs.values(), self._rewards[index]], seen=-1)

    def _check(self, index: int, results: Sequence[Any], *, seen: int = 0) -> None:
        if index in self._reported or _are_finite(results):
            return
        self._reported.add(index)
        if advice := self._write(index, NON_FINITE, raised=False, seen=seen):
            _logger.warning("env %d: %s. %s", self._first + index, NON_FINITE, advice)

    def record_failure(self, failure: EnvFailure, unstepped: Sequence[int] = ()) -> None:
        """Writes the record of an env that failed. `unstepped` are envs that will get their actions again."""
        error = failure.__cause__
        self._counts[[*unstepped]] -= 1
        if isinstance(error, ActionError):  # the env was not called
            self._counts[failure.env_id - self._first] -= 1
            return
        cause = f"{type(error).__name__} in {failure.operation}: {error}"
        # An observation of wrong data may have been written in part.
        seen = -1 if failure.operation != "step" or isinstance(error, InvalidValue) else 1
        index = failure.env_id - self._first
        failure.advice = self._write(index, cause, raised=True, seen=seen)
        self._reported.add(index)
        self.check()  # of the envs before it

    def _write(self, index: int, cause: str, *, raised: bool, seen: int) -> str:
        slot, env_fn, options = self._first + index, self._env_fns[index], self._options.get(index)
        return write(
            self._directory, self._arrays, self._spec, slot, env_fn, options, cause, raised=raised, seen=seen
        )


def _make_row(spec: PoolSpec) -> tuple[Arrays, Callable[[int, Any], None]]:
    """Returns arrays `[1, ...]` for one observation, and the function that writes it to index 0."""
    arrays: Arrays = {leaf.path: np.zeros((1, *leaf.shape), leaf.stored) for leaf in leaves(spec.obs)}
    return arrays, writer(spec.obs, arrays)


def _are_finite(values: Iterable[Any]) -> bool:
    """Returns False if one of the arrays or numbers contains a float that is not finite."""
    return all(array.dtype.kind != "f" or np.isfinite(array).all() for array in map(np.asarray, values))


def _memory_of(generator: Any) -> memoryview | None:
    """Returns a view of the memory of NumPy's PCG64; `None` for another generator, or version of NumPy.

    Reading `state` at each reset would cost several times as much.
    """
    with suppress(AttributeError):
        bits = generator.bit_generator
        if type(bits) is np.random.PCG64:
            address = bits.ctypes.state_address
            (pointer,) = struct.unpack("P", ctypes.string_at(address, struct.calcsize("P")))
            memory = memoryview((ctypes.c_ubyte * 48).from_address(address + 8)).cast("B")
            if pointer == address + 24 and _decode(bytes(memory)) == bits.state:
                return memory
    return None


def _decode(memory: bytes) -> dict[str, Any]:
    """Returns the state of a PCG64."""
    has_uint32, uinteger = struct.unpack("<iI", memory[:8])
    state, inc = (int.from_bytes(memory[place : place + 16], "little") for place in (16, 32))
    values = {"state": {"state": state, "inc": inc}, "has_uint32": has_uint32, "uinteger": uinteger}
    return {"bit_generator": "PCG64", **values}


def write(
    directory: str,
    arrays: Arrays,
    spec: PoolSpec,
    slot: int,
    env_fn: EnvFn,
    options: dict[str, Any] | None,
    cause: str,
    *,
    raised: bool = False,
    seen: int = 1,
) -> str:
    """Writes the record of an env to a new file, and returns a sentence with its name; "" if it can't.

    `seen` is the number of steps since the observation in the segment: 1 if the last step did not return,
    0 if it did. It is -1 if the observation is of another episode.
    """
    count = int(arrays["flight_count",][slot])
    if count < 0:
        return ""
    begin = arrays["flight_begin",][slot].tobytes()
    seed, has_options, has_memory = _BEGIN.unpack_from(begin)
    rings = {leaf.path: arrays[("flight", *leaf.path)][slot] for leaf in spec.action_leaves}
    capacity = min(map(len, rings.values()), default=1)
    kept = np.arange(max(0, count - capacity), count) % capacity
    columns = {path: ring[kept] for path, ring in rings.items()}
    record = Record(
        env_id=slot,
        cause=cause,
        raised=raised,
        env_fn=env_fn,
        spec=spec,
        seed=None if seed == NO_SEED else seed,
        options=options if has_options else None,
        generator=_decode(begin[_MEMORY]) if has_memory else None,
        missing=count - len(kept),
        actions=list(reader(spec.action, columns)(slice(0, len(kept), 1))),
        seen=len(kept) - seen if seen >= 0 else -1,
        obs={leaf.path: arrays[leaf.path][slot].copy() for leaf in leaves(spec.obs) if not leaf.is_object},
    )
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if sum(1 for _ in folder.glob(f"*{_SUFFIX}")) >= _MAX_FILES:
            raise OSError(f"it has {_MAX_FILES} files already")
        name = f"env{slot}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns()}"
        path = folder / f"{name}{_SUFFIX}"
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(dumps(record))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except Exception as error:
        _logger.warning("no record of env %d was written to %s: %s", slot, folder, error)
        return ""
    return f"Make the episode again by: python -m jaxvec replay {path}"


def replay(path: str, report: Callable[[str], None], *, debug: bool) -> bool:
    """Makes the episode of a file again, and reports in words. Returns whether it ended in the same fault.

    With `debug`, opens pdb where the env raises, or else before its last step.
    """
    record: Record = pickle.loads(Path(path).read_bytes())
    last, spec = len(record.actions), record.spec
    report(f"env {record.env_id}, {last} steps. Recorded: {record.cause}")
    if record.missing:
        report("The episode is longer than the record, which lacks its start, so it can't be made again.")
        return False
    if record.generator is None and record.seed is None:
        report("The state of the env's generator is unknown, so the episode may differ.")
    (now, write_obs), same, step = _make_row(spec), True, 0

    def is_fault(call: str, *results: Any) -> bool:
        if record.cause != NON_FINITE or _are_finite(results):
            return False
        report(f"{call} returned numbers that are not finite.")
        return True

    env = record.env_fn()
    if record.generator is not None:
        generator = np.random.PCG64()
        generator.state = record.generator  # pyright: ignore[reportAttributeAccessIssue]
        env.unwrapped.np_random = np.random.Generator(generator)
    try:
        obs, _ = env.reset(seed=record.seed, options=record.options)
        write_obs(0, obs)
        if is_fault("The reset", *now.values()):
            return last == 0
        for step, action in enumerate(record.actions, start=1):
            if step == record.seen + 1:
                for leaf, old in record.obs.items():
                    if now[leaf][0].tobytes() != old.tobytes():
                        change = f"{format_path(leaf)} was {old}, now it is {now[leaf][0]}"
                        report(f"The env did not repeat: after step {record.seen}, {change}")
                        same = False
                if same:
                    report(f"After step {record.seen}, the observation is the recorded one.")
            if step == last:
                report(f"step {step}, action {action!r}")
            stops = debug and step == last and not record.raised
            result: Any = pdb.runcall(env.step, action) if stops else env.step(action)
            obs, reward, *_ = result
            write_obs(0, obs)
            if is_fault(f"Step {step}", *now.values(), reward):
                return same and step == last
    except Exception as error:
        report(f"It raised {type(error).__name__} in {f'step {step}' if step else 'reset'}: {error}")
        if debug:
            pdb.post_mortem(error.__traceback__)
        same = same and step == last and record.raised and record.cause.startswith(type(error).__name__ + " ")
        if not same:
            report("The env did not repeat: this is another fault, or another step.")
        return same
    report(f"The env did not repeat: step {step} returned without a fault.")
    return False
