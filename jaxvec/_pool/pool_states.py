"""Saved states of envs, as the pool keeps them.

A state is kept under a number, in three places: its env data in the worker (`_envs/env_states.py`), its time
step in the `StateTable` here, and its name (pool id and number) in the user's `EnvState`.

    save      the workers keep the env data under new numbers; the table keeps the time steps
    restore   the workers restore the env data of these numbers; the pool copies the time steps back
    simulate  the workers step copies of envs, and keep the results under new numbers
    files     `pack_states` turns exported states into bytes, and `unpack_states` reads them

`SavedStates` sends the requests to the workers. All calls are made by the only thread inside the engine.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.move import Verb
from jaxvec._envs.env_states import LostStates
from jaxvec._envs.slice import RequestName
from jaxvec._errors import ResetNeededError, StaleStateError, StateFileError
from jaxvec._memory.segment import Arrays, Deliver, Index, Rows, index_of
from jaxvec._pool.env_calls import EnvCalls
from jaxvec._spec import Autoreset, PoolSpec
from jaxvec._workers.base import WorkerGroup
from jaxvec._workers.diagnosis import check_all

_LOST = -1  # value of `StateTable.worker` for a state lost in a fault


@dataclass(frozen=True)
class PackedStates:
    """States on their way to another pool or to a file."""

    data: Sequence[bytes]  # `[n]` pickles of the env data
    rows: Rows  # leaves `[n, ...]` of the time steps that were current when the states were saved
    needs_reset: NDArray[np.bool_]  # `[n]` envs that must be reset before they are stepped


class StateTable:
    """A ring buffer of the time steps that belong to saved states.

    A state's number determines its place in the ring. A number is never reused, so the place of a replaced
    state contains another number. `rows` are arrays of the segment, as workers write to them, too.
    """

    def __init__(self, capacity: int, *, pool_id: int) -> None:
        self._pool_id, self._capacity = pool_id, capacity
        self.rows: list[NDArray[Any]] = []
        # `np.zeros` takes pages from the kernel only once they are written, so an unused table costs nothing.
        try:
            self.worker: NDArray[np.int_] = np.zeros(capacity, np.int_)  # index of the worker that keeps it
            self.needs_reset: NDArray[np.bool_] = np.zeros(capacity, np.bool_)  # before a step of its env
            self._incarnations = np.zeros(capacity, np.int64)  # replacements of the worker before the save
            self._numbers = np.zeros(capacity, np.int64)  # 0 for a free place
        except (MemoryError, ValueError, OverflowError) as error:
            raise ValueError(f"can't keep {capacity} states: {error}; keep fewer") from error
        self._next = 1

    def attach(self, spec: PoolSpec, arrays: Arrays) -> None:
        """Sets the rows of the table, which `make_layout` has reserved for its capacity."""
        capacity = self._capacity
        self.rows = [
            np.zeros((capacity, *leaf.shape), object) if leaf.is_object else arrays["saved", *leaf.path]
            for leaf in (spec.timestep_leaves if capacity else ())
        ]

    @property
    def count(self) -> int:
        used = slice(min(self._next, self._capacity))  # does not touch the pages of the others
        return int(np.count_nonzero((self._numbers[used] > 0) & (self.worker[used] != _LOST)))

    @property
    def row_bytes(self) -> int:
        """Size in bytes of the rows that were ever used."""
        used = min(self._next - 1, self._capacity)
        return sum(row[:used].nbytes for row in self.rows)

    def allocate(self, count: int) -> NDArray[np.int64]:
        """Returns the numbers of `count` new states, and frees their places."""
        if count > self._capacity:
            raise ValueError(
                f"can't keep {count} states at once, because pool {self._pool_id} keeps {self._capacity}; "
                f"make it with states={count} or more, the number that your program uses at the same time"
            )
        numbers = np.arange(self._next, self._next + count)
        self._next += count
        self._numbers[self.places(numbers)] = 0
        return numbers

    @property
    def oldest(self) -> int:
        """The oldest number that can still exist. Workers forget the states before it."""
        return self._next - self._capacity

    def fill(
        self,
        numbers: NDArray[np.int64],
        workers: NDArray[np.int_],
        incarnations: NDArray[np.int64],
        needs_reset: NDArray[np.bool_] | np.bool_,
    ) -> NDArray[np.int_]:
        """Registers states that workers keep. Returns their places; the caller writes the rows there.

        All are `[n]`, or one flag for all. `incarnations` are the numbers of replacements of `workers`.
        """
        places = self.places(numbers)
        self._numbers[places], self.worker[places] = numbers, workers
        self._incarnations[places], self.needs_reset[places] = incarnations, needs_reset
        return places

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int_]:
        """Returns the places of states in `rows`, without a check that the states exist."""
        return numbers % max(self._capacity, 1)

    def read(self, places: NDArray[np.int_]) -> list[NDArray[Any]]:
        """Returns copies of the time steps in these places."""
        return [row[places] for row in self.rows]

    def ids(self, numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Returns the names `[n, 3]` of states: the pool's id, and the low and high word of the number."""
        ids = np.empty((len(numbers), 3), np.uint32)
        ids[:, 0], ids[:, 1:] = self._pool_id, numbers.astype("<i8").view("<u4").reshape(-1, 2)
        return ids

    def find(self, ids: NDArray[np.uint32], incarnations: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of the states with the names `ids`, `[n, 3]`.

        `incarnations` is the number of times that each worker was replaced so far, `[num_workers]`.
        """
        foreign = np.flatnonzero(ids[:, 0] != self._pool_id)
        if foreign.size:
            raise StaleStateError(
                f"state {foreign[0]} is of pool {ids[foreign[0], 0]}, not of pool {self._pool_id}; pass it "
                "to the pool that saved it"
                if ids[foreign[0]].any()
                else f"state {foreign[0]} is uninitialised (all zeros); pass a state that save or simulate "
                "returned"
            )
        numbers = np.ascontiguousarray(ids[:, 1:], "<u4").view("<i8").reshape(-1)
        if not self._capacity:
            self.allocate(1)  # raises
        places = self.places(numbers)
        kept = (self._numbers[places] == numbers) & (numbers > 0)
        gone = np.flatnonzero(~kept)
        if gone.size:
            raise StaleStateError(
                f"state {gone[0]} is gone: pool {self._pool_id} keeps {self._capacity} states, and newer "
                f"ones have replaced it. Make the pool with a `states` above {self._capacity}, the number "
                "that your program uses at the same time"
            )
        workers = self.worker[places]
        lost = (workers == _LOST) | (self._incarnations[places] != incarnations[workers])
        if lost.any():
            raise self.lost(numbers[lost])
        return numbers

    def lost(self, numbers: NDArray[np.int64]) -> StaleStateError:
        """Marks states as lost with their worker, and returns the error for the caller."""
        self.worker[self.places(numbers)] = _LOST
        return StaleStateError(
            f"{len(numbers)} of these states are lost, because their worker was replaced after a fault; "
            "reset its envs and save states again"
        )


# --- The format of files, and of arrays in checkpoints ---------------------------------------------------
# A line with the version of the format; the fingerprint of the pool's specification; a checksum of the rest;
# and a pickle. Reading it can run code, as any pickle can.

_MAGIC = b"jaxvec states 1\n"
_HEAD = struct.Struct("<q16s")  # fingerprint, checksum


def pack_states(states: PackedStates, fingerprint: int) -> bytes:
    """Returns states as bytes, marked with the fingerprint of their pool's specification."""
    content = pickle.dumps((states.data, states.rows, states.needs_reset), 5)
    return _MAGIC + _HEAD.pack(fingerprint, _checksum(content)) + content


def unpack_states(data: bytes, fingerprint: int, name: str) -> PackedStates:
    """Returns the states in bytes of `pack_states`, for a pool with this fingerprint.

    Raises:
        StateFileError: The file or array `name` has no states, damaged ones, or ones of another pool.
    """
    start = len(_MAGIC) + _HEAD.size
    if data[: len(_MAGIC)] != _MAGIC:
        if data.startswith(_MAGIC.rpartition(b" ")[0]):
            raise StateFileError(
                f"{name}: another version of jaxvec wrote these states; read them with that one"
            )
        raise StateFileError(f"{name}: this is not a file or array of saved states; use one of save_states")
    if len(data) < start:
        raise StateFileError(f"{name}: the states are cut short; save them again")
    saved_fingerprint, checksum = _HEAD.unpack(data[len(_MAGIC) : start])
    content = data[start:]
    if checksum != _checksum(content):
        raise StateFileError(
            f"{name}: the states were cut short or changed after they were written; save again"
        )
    if saved_fingerprint != fingerprint:
        raise StateFileError(
            f"{name}: the states are of envs with other spaces, or of a pool with other options; make the "
            "pool with the spaces and options of the pool that saved them"
        )
    try:
        return PackedStates(*pickle.loads(content))
    except Exception as error:  # an observation may be an object of a class that is not known here
        raise StateFileError(
            f"{name}: the states can't be unpickled in this process: {type(error).__name__}: {error}; the "
            "classes of their objects have to be importable here"
        ) from error


def write_states(path: Path, data: bytes) -> None:
    """Writes a file atomically: after a crash it has either its old or its new content."""
    descriptor, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)  # the rename must not reach the disk before the data
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


# --- Requests to the workers -----------------------------------------------------------------------------

# `Pool._send_states`: dispatches saves or restores, and returns the indices of the envs that were left out.
Send: TypeAlias = Callable[[Verb, NDArray[Any], NDArray[np.int64]], NDArray[np.int_]]
Sources: TypeAlias = NDArray[np.int64] | Sequence[int | bytes]  # numbers of states, or their pickles


class SavedStates:
    """The saved states of a pool's envs: saves, restores and simulates them in the workers."""

    def __init__(
        self,
        spec: PoolSpec,
        workers: WorkerGroup,
        env_calls: EnvCalls,
        table: StateTable,
        arrays: Arrays,
        *,
        resets_required: bool,
    ) -> None:
        self.table: StateTable = table
        table.attach(spec, arrays)
        self._first_simulated = arrays["first_simulated",]
        # What a dispatched simulation passes to the workers: states before and after it, and actions.
        self._simulated: list[NDArray[Any]] = []
        if table.rows and workers.moves_states and not any(leaf.is_object for leaf in spec.action_leaves):
            leaves = [("simulated", *leaf.path) for leaf in spec.action_leaves]
            paths = ("simulated_before",), ("simulated_after",), *leaves
            self._simulated = [arrays[path] for path in paths]
        self._spec = spec
        self._workers = workers
        self._env_calls = env_calls
        self._worker_of = env_calls.worker_of
        self._resets_required = resets_required
        self._leaf = {leaf.path: index for index, leaf in enumerate(spec.timestep_leaves)}

    def forget(self) -> None:
        """Drops the views of the segment."""
        self.table.rows, self._simulated, self._first_simulated = [], [], np.zeros(0, np.int64)

    def save(
        self, send: Send, slots: NDArray[Any], needs_reset: NDArray[np.bool_]
    ) -> tuple[NDArray[np.uint32], Deliver]:
        """Saves the states of envs. Returns their names `[n, 3]`, and a function that keeps their time steps.

        `needs_reset`, `[n]`, has the envs that must be reset before they are stepped. `send` refers to the
        pool, so it is an argument: as an attribute it would be part of a reference cycle.
        """
        table, workers = self.table, self._worker_of[slots]
        numbers = table.allocate(len(slots))
        rest = self._dispatch(send, Verb.SAVE, slots, numbers)
        self._request(
            "save_states",
            workers[rest],
            lambda mine: (slots[rest[mine]].tolist(), numbers[rest[mine]].tolist(), table.oldest),
        )
        places = table.fill(numbers, workers, self._incarnations[workers], needs_reset)
        return table.ids(numbers), _copy_into(table.rows, places)

    def find(
        self, slots: NDArray[Any], ids: NDArray[np.uint32], packed: PackedStates | None
    ) -> tuple[Sources, list[NDArray[Any]], NDArray[np.bool_]]:
        """Returns the states for `slots`: sources for the workers, time steps, and `needs_reset`."""
        sources: Sources
        if packed is None:
            numbers = self.table.find(ids, self._incarnations)
            places, sources = self.table.places(numbers), self._sources_for(slots, numbers)
            rows, needs_reset = self.table.read(places), self.table.needs_reset[places]
        else:
            sources, rows, needs_reset = packed.data, list(packed.rows), packed.needs_reset
        rows[self._leaf["info", "env_id"]] = slots.astype(np.int32)
        # Before the envs change, as a failure of `restore` breaks the pool.
        if not isinstance(sources, np.ndarray):
            moved = [place for place, source in enumerate(sources) if isinstance(source, bytes)]
            data = np.array(sources, object)[moved]
            self._request(
                "compare_states",
                self._worker_of[slots[moved]],
                lambda mine: (slots[moved][mine].tolist(), data[mine].tolist()),
            )
        return sources, rows, needs_reset

    def restore(self, send: Send, slots: NDArray[Any], sources: Sources, rows: Rows) -> None:
        """Restores envs to the states that `find` returned."""
        rest = np.arange(len(slots))
        if isinstance(sources, np.ndarray):
            rest = self._dispatch(send, Verb.RESTORE, slots, sources)
            sources = sources.tolist()
        far = None if self._workers.maps_segment else rows  # workers on other nodes need copies of the rows
        self._request(
            "restore_states",
            self._worker_of[slots[rest]],
            lambda mine: (
                slots[rest[mine]].tolist(),
                [sources[place] for place in rest[mine]],
                self.table.oldest,
                None if far is None else [row[rest[mine]] for row in far],
            ),
        )

    def simulate(
        self, send: Send | None, ids: NDArray[np.uint32], actions: Rows, deliver: Deliver
    ) -> tuple[NDArray[np.uint32], Rows]:
        """Steps copies of envs; see `Pool.simulate`. Without `send`, by requests only."""
        table = self.table
        sources = table.find(ids, self._incarnations)
        before = table.places(sources)
        # Read before `allocate`, which may give the places of the sources to the new states.
        workers, env_ids = table.worker[before], table.rows[self._leaf["info", "env_id"]][before]
        ended = np.flatnonzero(table.needs_reset[before])
        if ended.size and self._resets_required:
            raise ResetNeededError(
                f"state {ended[0]} can't be simulated: its episode is over, or its env was never reset. "
                "Choose between such states and others with jnp.where, or make the pool with "
                'autoreset_mode="EPISODIC" or with autoreset'
            )
        idle, idle_rows = self._idle_rows(before)
        numbers, oldest = table.allocate(len(workers)), table.oldest
        rest = workers
        if send is not None and self._simulated and len(workers):
            rest = self._dispatch_simulation(send, workers, sources, numbers, actions)
        answers = self._request(
            "simulate_states",
            rest,
            lambda mine: (sources[mine].tolist(), numbers[mine].tolist(), [a[mine] for a in actions], oldest),
        )
        after = table.fill(numbers, workers, self._incarnations[workers], np.False_)
        for worker, answer in enumerate(answers):
            for row, part in zip(table.rows, answer or (), strict=bool(answer)):
                row[after[workers == worker]] = part
        for row, part in zip(table.rows, idle_rows, strict=bool(idle_rows)):
            row[after[idle]] = part
        table.rows[self._leaf["info", "env_id"]][after] = env_ids
        if self._resets_required and self._spec.autoreset is Autoreset.DISABLED:
            table.needs_reset[after] = self._ended(after)
        return table.ids(numbers), deliver(table.rows, index_of(after))

    def pack(self, ids: NDArray[np.uint32]) -> PackedStates:
        """Returns states in a form that other pools can restore."""
        numbers = self.table.find(ids, self._incarnations)
        places = self.table.places(numbers)
        return PackedStates(self._export(numbers), self.table.read(places), self.table.needs_reset[places])

    def unpack(self, packed: PackedStates) -> NDArray[np.uint32]:
        """Keeps states of another pool, and returns their names `[n, 3]`."""
        slots = packed.rows[self._leaf["info", "env_id"]].astype(np.intp) % self._spec.num_envs
        workers = self._worker_of[slots]
        numbers, oldest = self.table.allocate(len(workers)), self.table.oldest
        data = np.array(packed.data, object)
        self._request(
            "import_states",
            workers,
            lambda mine: (slots[mine].tolist(), numbers[mine].tolist(), data[mine].tolist(), oldest),
        )
        places = self.table.fill(numbers, workers, self._incarnations[workers], packed.needs_reset)
        for row, part in zip(self.table.rows, packed.rows, strict=True):
            row[places] = part
        self.table.rows[self._leaf["info", "env_id"]][places] = slots
        return self.table.ids(numbers)

    @property
    def _incarnations(self) -> NDArray[np.int64]:
        return np.array(self._workers.incarnations, np.int64)

    def _ended(self, places: NDArray[np.int_]) -> NDArray[np.bool_]:
        terminated, truncated = (self.table.rows[self._leaf[name,]] for name in ("terminated", "truncated"))
        return terminated[places] | truncated[places]

    def _idle_rows(self, places: NDArray[np.int_]) -> tuple[NDArray[np.int_], Rows]:
        """Returns the indices of the states that take no step, and the rows that they return instead."""
        if self._spec.autoreset is not Autoreset.EPISODIC:
            return np.zeros(0, np.int_), []
        idle = np.flatnonzero(self._ended(places))
        rows = self.table.read(places[idle])
        rows[self._leaf["reward",]][:] = 0
        rows[self._leaf["info", "idle"]][:] = True
        return idle, rows

    def _dispatch(
        self, send: Send, verb: Verb, slots: NDArray[Any], numbers: NDArray[np.int64]
    ) -> NDArray[np.int_]:
        """Saves or restores states by a dispatch, and returns the indices of the envs that were left out.

        A request for those is slower, but handles all cases and reports their errors.
        """
        if not self._workers.moves_states:
            return np.arange(len(slots))
        before = [*self._workers.last_errors]
        rest = send(verb, slots, numbers)
        late = set(self._worker_of[slots[rest]].tolist())
        errors = self._workers.last_errors
        check_all([errors[each] for each in late if errors[each] is not before[each]])
        return rest

    def _dispatch_simulation(
        self,
        send: Send,
        workers: NDArray[np.int_],
        sources: NDArray[np.int64],
        numbers: NDArray[np.int64],
        actions: Rows,
    ) -> NDArray[np.int_]:
        """Steps copies of envs by a dispatch; the workers write the rows.

        Returns the worker of each state `[n]` that was left out, and -1 for the others.
        """
        counts = np.bincount(workers)
        involved, stops = np.flatnonzero(counts), counts.cumsum()
        slots = self._worker_of.searchsorted(involved)  # the first env of each
        is_sorted = (workers[1:] >= workers[:-1]).all()
        order = slice(None) if is_sorted else workers.argsort(kind="stable")
        values = [array[order] for array in (sources, numbers, *actions)]
        self._write_simulation(slots, (stops - counts)[involved], values)
        late = self._dispatch(send, Verb.SIMULATE, slots, stops[involved])
        return np.where(np.isin(workers, involved[late]), workers, -1) if late.size else workers[:0]

    def _write_simulation(self, slots: NDArray[Any], starts: NDArray[Any], values: Rows) -> None:
        # A function of its own: views of the segment in the traceback of an error would keep it mapped.
        self._first_simulated[slots] = starts
        for array, each in zip(self._simulated, values, strict=True):
            array[: len(each)] = each

    def _sources_for(self, slots: NDArray[Any], numbers: NDArray[np.int64]) -> Sources:
        """Returns the number of each state, or its pickle if another worker than the env's keeps it."""
        far = np.flatnonzero(self.table.worker[self.table.places(numbers)] != self._worker_of[slots])
        if not far.size:
            return numbers
        sources: list[int | bytes] = numbers.tolist()
        for place, data in zip(far.tolist(), self._export(numbers[far]), strict=True):
            sources[place] = data
        return sources

    def _export(self, numbers: NDArray[np.int64]) -> list[bytes]:
        """Returns the pickles of states, from the workers that keep them."""
        workers = self.table.worker[self.table.places(numbers)]
        answers = self._request("export_states", workers, lambda mine: (numbers[mine].tolist(),))
        packed: list[bytes] = [b""] * len(numbers)
        for worker, answer in enumerate(answers):
            for place, data in zip(np.flatnonzero(workers == worker).tolist(), answer or (), strict=True):
                packed[place] = data
        return packed

    def _request(
        self,
        name: RequestName,
        workers: NDArray[np.int_],
        arguments: Callable[[NDArray[np.bool_]], tuple[Any, ...]],
    ) -> list[Any]:
        """Calls a method of `EnvSlice` in the workers with an entry in `workers`, `[n]`.

        `arguments` maps the mask `[n]` of a worker's entries to the arguments of its call.
        """

        def each(first: int, stop: int) -> tuple[Any, ...] | None:
            mine = workers == self._worker_of[first]
            return arguments(mine) if mine.any() else None

        if not workers.size:
            return []
        answers = self._env_calls.request(name, each)
        gone = [number for answer in answers if isinstance(answer, LostStates) for number in answer.numbers]
        if gone:
            raise self.table.lost(np.array(gone))
        return answers


def _copy_into(rows: Rows, places: NDArray[np.int_]) -> Deliver:
    """Returns a `Deliver` function that copies leaves into these places of `rows`."""

    def deliver(leaves: Rows, index: Index) -> Rows:
        onto = index_of(places)
        for row, leaf in zip(rows, leaves, strict=True):
            row[onto] = leaf[index]
        return rows

    return deliver
