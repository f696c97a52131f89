"""Saved states of envs as the parent keeps them: numbers, files, saves and restores."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._dispatch.move import Verb
from jaxvec._envs.env_states import Gone
from jaxvec._envs.slice import RequestName
from jaxvec._errors import ResetNeededError, StaleStateError, StateFileError
from jaxvec._memory.segment import Deliver, Index, Rows, index_of
from jaxvec._pool.env_calls import EnvCalls
from jaxvec._spec import Autoreset, PoolSpec
from jaxvec._workers.base import WorkerGroup
from jaxvec._workers.supervisor import check_all

# ----------------------------------------------------------------------------------------------------------
# The saved states of a pool, as the parent knows them: which there are, who has each, and its time step.
# ----------------------------------------------------------------------------------------------------------

_NO_WORKER, _LOST = -1, -2  # in place of a worker that has a state


@dataclass(frozen=True)
class PackedStates:
    """States on their way to another pool, or to a file.

    Attributes:
        data: `[n]` states of envs, each the bytes of a pickle.
        rows: the leaves of the time steps that were current then, `[n, ...]`.
        needs_reset: `[n]` bool, whether the env has to be reset before it is stepped.
    """

    data: Sequence[bytes]
    rows: Rows
    needs_reset: NDArray[np.bool_]


class StateTable:
    """A ring of places. A state's number says its place, and that it is this state: no other ever has it.

    The states themselves are in their workers. Nobody but who is inside the pool's engine, alone, uses this.

    Attributes:
        rows: the leaves of the time steps, `[capacity, ...]`.
        worker: `[capacity]` who has each.
        needs_reset: `[capacity]` bool, of its env.
    """

    def __init__(self, spec: PoolSpec, capacity: int, *, pool_id: int) -> None:
        """Begins without states.

        Args:
            spec: of the pool.
            capacity: how many are kept.
            pool_id: by which the states name their pool.
        """
        self._pool_id, self._capacity = pool_id, capacity
        # Memory that nobody touches yet is none.
        self.rows: list[NDArray[Any]] = [
            np.zeros((capacity, *leaf.shape), object if leaf.is_object else leaf.stored)
            for leaf in spec.timestep_leaves
        ]
        self.worker: NDArray[np.int_] = np.full(capacity, _NO_WORKER)
        self.needs_reset: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self._life = np.zeros(capacity, np.int64)
        self._numbers = np.zeros(capacity, np.int64)
        self._next = 1

    @property
    def count(self) -> int:
        """How many states there are."""
        return int(np.count_nonzero(self.worker >= 0))

    @property
    def row_bytes(self) -> int:
        """Bytes of the time steps that were ever kept."""
        used = min(self._next - 1, self._capacity)
        return sum(row[:used].nbytes for row in self.rows)

    def allocate(self, count: int) -> NDArray[np.int64]:
        """Returns numbers for as many new states, whose places nobody else has any more.

        Raises:
            ValueError: the pool keeps fewer than that.
        """
        if count > self._capacity:
            raise ValueError(
                f"{count} states at once, but pool {self._pool_id} keeps {self._capacity}"
                + ("" if self._capacity else ", none at all")
                + f"; make it with states={count} or more: as many as your program uses at the same time"
            )
        numbers = np.arange(self._next, self._next + count)
        self._next += count
        self.worker[self.places(numbers)] = _NO_WORKER
        return numbers

    @property
    def oldest(self) -> int:
        """The number before which workers are to forget all states."""
        return self._next - self._capacity

    def fill(
        self,
        numbers: NDArray[np.int64],
        workers: NDArray[np.int_],
        lives: NDArray[np.int64],
        needs_reset: NDArray[np.bool_],
    ) -> NDArray[np.int_]:
        """Takes note of states that workers keep by now; returns their places, whose rows are the caller's.

        Args:
            numbers: `[n]`, as `allocate` returned them.
            workers: `[n]`, who has each.
            lives: `[n]`, how often that worker was replaced.
            needs_reset: `[n]`, of their envs.
        """
        places = self.places(numbers)
        self._numbers[places], self.worker[places], self._life[places] = numbers, workers, lives
        self.needs_reset[places] = needs_reset
        return places

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int_]:
        """Returns where in `rows` the states of these numbers are, if they are."""
        return numbers % max(self._capacity, 1)

    def read(self, places: NDArray[np.int_]) -> list[NDArray[Any]]:
        """Returns copies of the time steps in these places."""
        return [row[places] for row in self.rows]

    def ids(self, numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Returns the names of states, `[n, 3]`: the pool, and the number's low and high word."""
        ids = np.empty((len(numbers), 3), np.uint32)
        ids[:, 0], ids[:, 1:] = self._pool_id, numbers.astype("<i8").view("<u4").reshape(-1, 2)
        return ids

    def find(self, ids: NDArray[np.uint32], lives: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of states by their names.

        Args:
            ids: `[n, 3]`.
            lives: `[num_workers]` how often each worker was replaced.

        Raises:
            StaleStateError: one is gone, or of another pool.
        """
        foreign = np.flatnonzero(ids[:, 0] != self._pool_id)
        if foreign.size:
            raise StaleStateError(
                f"state {foreign[0]} is of pool {ids[foreign[0], 0]}, not of pool {self._pool_id}"
                if ids[foreign[0]].any()
                else f"state {foreign[0]} is all zeros, which is none that save or simulate returned"
            )
        numbers = np.ascontiguousarray(ids[:, 1:]).astype("<u4").view("<i8").reshape(-1)
        if not self._capacity:
            self.allocate(1)
        places = self.places(numbers)
        kept = (self._numbers[places] == numbers) & (self.worker[places] != _NO_WORKER) & (numbers > 0)
        gone = np.flatnonzero(~kept)
        if gone.size:
            raise StaleStateError(
                f"state {gone[0]} is gone: pool {self._pool_id} keeps {self._capacity}, and newer ones took "
                f"the place of the oldest. Make the pool with more states than {self._capacity}, as many as "
                "your program uses at the same time"
            )
        lost = (self.worker[places] == _LOST) | (self._life[places] != lives[self.worker[places]])
        if lost.any():
            raise self.lost(numbers[lost])
        return numbers

    def lost(self, numbers: NDArray[np.int64]) -> StaleStateError:
        """Takes note of states that went with a worker, and returns the error of who asks for them."""
        self.worker[self.places(numbers)] = _LOST
        return StaleStateError(
            f"{len(numbers)} of these states are gone: the worker that had them was replaced after a fault; "
            "reset its envs, and save states anew"
        )


# ----------------------------------------------------------------------------------------------------------
# Saved states as bytes: the format of files, and of arrays in others' checkpoints.
#
# A line that says what it is and the version of the format, the fingerprint of the specification of the
# pool, a check of what follows, and then that: a pickle. So reading it runs code, as opening any pickle
# does.
# ----------------------------------------------------------------------------------------------------------

_MAGIC = b"jaxvec states 1\n"
_HEAD = struct.Struct("<q16s")  # fingerprint, check


def pack_states(states: PackedStates, fingerprint: int) -> bytes:
    """Returns states of a pool with a specification of this fingerprint as bytes."""
    content = pickle.dumps((states.data, states.rows, states.needs_reset), 5)
    return _MAGIC + _HEAD.pack(fingerprint, _check(content)) + content


def unpack_states(data: bytes, fingerprint: int, name: str) -> PackedStates:
    """Returns the states in these bytes.

    Args:
        data: the bytes.
        fingerprint: of the pool's specification, which has to be the same.
        name: what they are, for errors.

    Raises:
        StateFileError: they are something else, cut short or changed, or of envs of another specification.
    """
    start = len(_MAGIC) + _HEAD.size
    if data[: len(_MAGIC)] != _MAGIC:
        kind = _MAGIC.rpartition(b" ")[0]
        why = "another version wrote it" if data.startswith(kind) else "it is something else"
        raise StateFileError(f"{name}: no saved states that this version of jaxvec can read; {why}")
    if len(data) < start:
        raise StateFileError(f"{name}: cut short")
    theirs, check = _HEAD.unpack(data[len(_MAGIC) : start])
    content = data[start:]
    if check != _check(content):
        raise StateFileError(f"{name}: cut short or changed since it was written")
    if theirs != fingerprint:
        raise StateFileError(
            f"{name}: of envs with other spaces, or of a pool with other options, than this one; make the "
            "pool as the one was made that saved them"
        )
    return PackedStates(*pickle.loads(content))


def write_states(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all, whenever the process or the machine ends."""
    descriptor, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _check(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


# ----------------------------------------------------------------------------------------------------------
# The parent's part of saving, restoring and simulating: which worker has to do with which states.
#
# Whoever calls is inside the pool's engine, alone.
# ----------------------------------------------------------------------------------------------------------

# Has states of these numbers saved, or restored; returns the places of those that are left.
Send: TypeAlias = Callable[[Verb, NDArray[Any], NDArray[np.int64]], NDArray[np.int_]]
Read: TypeAlias = Callable[[NDArray[Any], Deliver], Any]
Sources: TypeAlias = NDArray[np.int64] | Sequence[int | bytes]  # numbers of states, or bytes that are some


class SavedStates:
    """The states of a pool's envs that are kept.

    Attributes:
        table: which there are.
    """

    def __init__(
        self,
        spec: PoolSpec,
        workers: WorkerGroup,
        env_calls: EnvCalls,
        *,
        capacity: int,
        pool_id: int,
        resets_required: bool,
    ) -> None:
        """Begins without states.

        Args:
            spec: of the envs.
            workers: who keep the states.
            env_calls: by which they are asked.
            capacity: how many states are kept.
            pool_id: by which states name their pool.
            resets_required: whether envs refuse to step whose episode is over.
        """
        self.table: StateTable = StateTable(spec, capacity, pool_id=pool_id)
        self._spec = spec
        self._workers = workers
        self._env_calls = env_calls
        self._worker_of = env_calls.worker_of
        self._resets_required = resets_required
        self._ends_need_reset = resets_required and spec.autoreset is Autoreset.DISABLED

    def save(
        self, send: Send, slots: NDArray[Any], needs_reset: NDArray[np.bool_], read: Read
    ) -> NDArray[np.uint32]:
        """Has the workers keep the states of envs, and keeps their time steps; returns their names, `[n, 3]`.

        Args:
            send: of the pool. It would keep the pool alive, were it kept here.
            slots: `[n]`, whose.
            needs_reset: `[n]`, whether each has to be reset before it is stepped.
            read: delivers the time steps of slots.
        """
        workers, told = self._worker_of[slots], self._workers.env_settings
        packed = told is not None and told.keeps_states
        numbers = self.table.allocate(len(slots))
        rest = np.arange(len(slots)) if packed else self._try(send, Verb.SAVE, slots, numbers)
        answers = self._ask_states(
            "save_states",
            workers[rest],
            lambda mine: (
                slots[rest[mine]].tolist(),
                numbers[rest[mine]].tolist(),
                self.table.oldest,
                packed,
            ),
        )
        if told is not None and packed:
            for worker, answer in enumerate(answers):
                told.save(slots[workers == worker], answer or ())
        places = self.table.fill(numbers, workers, self._lives[workers], needs_reset)
        read(slots, _onto(self.table.rows, places))
        return self.table.ids(numbers)

    def find(
        self, slots: NDArray[Any], ids: NDArray[np.uint32], packed: PackedStates | None
    ) -> tuple[Sources, list[NDArray[Any]], NDArray[np.bool_]]:
        """Returns what envs are to go on from: by what their workers find it, time steps, and `needs_reset`.

        Args:
            slots: `[n]`, whose.
            ids: `[n, 3]`, the states' names.
            packed: the states themselves, if they are of another pool.

        Raises:
            StaleStateError: a state is gone.
        """
        sources: Sources
        if packed is None:
            numbers = self.table.find(ids, self._lives)
            places, sources = self.table.places(numbers), self._fetch(numbers, self._worker_of[slots])
            rows, needs_reset = self.table.read(places), self.table.needs_reset[places]
        else:
            sources, rows, needs_reset = packed.data, list(packed.rows), packed.needs_reset
        rows[self._env_id_leaf] = slots.astype(np.int32)
        return sources, rows, needs_reset

    def put(self, send: Send, slots: NDArray[Any], sources: Sources, rows: Rows) -> None:
        """Has envs go on from what `find` returned."""
        rest = np.arange(len(slots))
        if isinstance(sources, np.ndarray):
            rest = self._try(send, Verb.RESTORE, slots, sources)
            sources = sources.tolist()
        far = None if self._workers.maps_segment else rows
        self._ask_states(
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
        self, ids: NDArray[np.uint32], actions: Rows, deliver: Deliver
    ) -> tuple[NDArray[np.uint32], Rows]:
        """Steps copies of envs; see `Pool.simulate`."""
        sources = self.table.find(ids, self._lives)
        before = self.table.places(sources)
        workers, env_ids = self.table.worker[before], self.table.rows[self._env_id_leaf][before]
        late = np.flatnonzero(self.table.needs_reset[before])
        if late.size and self._resets_required:
            raise ResetNeededError(
                f"simulate of state {late[0]}: its episode is over, or its env was never reset. Choose "
                "between such states and others with jnp.where, or let episodes end in a pool with "
                'autoreset_mode="EPISODIC" or with autoreset'
            )
        idle = self._idle_rows(before)
        numbers = self.table.allocate(len(workers))
        answers = self._ask_states(
            "simulate_states",
            workers,
            lambda mine: (
                sources[mine].tolist(),
                numbers[mine].tolist(),
                [action[mine] for action in actions],
                self.table.oldest,
            ),
        )
        nothing = np.zeros(len(numbers), np.bool_)
        after = self.table.fill(numbers, workers, self._lives[workers], nothing)
        for worker, answer in enumerate(answers):
            for row, part in zip(self.table.rows, answer or (), strict=bool(answer)):
                row[after[workers == worker]] = part
        for row, part in zip(self.table.rows, idle[1], strict=True):
            row[after[idle[0]]] = part
        self.table.rows[self._env_id_leaf][after] = env_ids
        if self._ends_need_reset:
            terminated, truncated = self._over_leaves
            over = self.table.rows[terminated][after] | self.table.rows[truncated][after]
            self.table.needs_reset[after] = over
        return self.table.ids(numbers), deliver(self.table.rows, index_of(after))

    def pack(self, ids: NDArray[np.uint32]) -> PackedStates:
        """Returns states by which envs of other pools can go on, `[n]`."""
        numbers = self.table.find(ids, self._lives)
        places = self.table.places(numbers)
        rows, needs_reset = self.table.read(places), self.table.needs_reset[places]
        return PackedStates(self._export(numbers), rows, needs_reset)

    def unpack(self, packed: PackedStates) -> NDArray[np.uint32]:
        """Keeps states of another pool; returns their names, `[n, 3]`."""
        slots = np.arange(len(packed.data)) % self._spec.num_envs
        workers = self._worker_of[slots]
        numbers = self.table.allocate(len(workers))
        self._ask_states(
            "import_states",
            workers,
            lambda mine: (
                slots[mine].tolist(),
                numbers[mine].tolist(),
                list(compress(packed.data, mine)),
                self.table.oldest,
            ),
        )
        places = self.table.fill(numbers, workers, self._lives[workers], packed.needs_reset)
        for row, part in zip(self.table.rows, packed.rows, strict=True):
            row[places] = part
        self.table.rows[self._env_id_leaf][places] = slots
        return self.table.ids(numbers)

    @property
    def _lives(self) -> NDArray[np.int64]:
        return np.array(self._workers.incarnations, np.int64)

    def _idle_rows(self, places: NDArray[np.int_]) -> tuple[NDArray[np.int_], Rows]:
        """Returns which of these states take no step, and the rows that they return in place of one."""
        if self._spec.autoreset is not Autoreset.EPISODIC:
            return np.zeros(0, np.int_), [row[:0] for row in self.table.rows]
        terminated, truncated = (self.table.rows[leaf][places] for leaf in self._over_leaves)
        idle = np.flatnonzero(terminated | truncated)
        rows = self.table.read(places[idle])
        rows[self._leaf("reward")][:] = 0
        rows[self._leaf("info", "idle")][:] = True
        return idle, rows

    @cached_property
    def _env_id_leaf(self) -> int:
        return self._leaf("info", "env_id")

    @cached_property
    def _over_leaves(self) -> tuple[int, int]:
        return self._leaf("terminated"), self._leaf("truncated")

    def _leaf(self, *path: str) -> int:
        """Returns the number of a leaf among those of the time step."""
        return [leaf.path for leaf in self._spec.timestep_leaves].index(path)

    def _try(
        self, send: Send, verb: Verb, slots: NDArray[Any], numbers: NDArray[np.int64]
    ) -> NDArray[np.int_]:
        """Has the workers save or restore what they can without being asked; returns what is left of `slots`.

        That has to be asked for, which is slower, but knows all cases, and the errors.

        Raises:
            JaxvecError: a worker was replaced before it was done; says why.
        """
        if not self._workers.moves_states:
            return np.arange(len(slots))
        ends = [*self._workers.last_errors]
        rest = send(verb, slots, numbers)
        late = set(self._worker_of[slots[rest]].tolist())
        check_all(
            [
                self._workers.last_errors[each]
                for each in late
                if self._workers.last_errors[each] is not ends[each]
            ]
        )
        return rest

    def _fetch(self, numbers: NDArray[np.int64], workers: NDArray[np.int_]) -> Sources:
        """Returns by what these workers find states: by the number, or another's by its bytes."""
        far = np.flatnonzero(self.table.worker[self.table.places(numbers)] != workers)
        if not far.size:
            return numbers
        sources: list[int | bytes] = numbers.tolist()
        for place, data in zip(far.tolist(), self._export(numbers[far]), strict=True):
            sources[place] = data
        return sources

    def _export(self, numbers: NDArray[np.int64]) -> list[bytes]:
        """Returns the bytes of states, from whoever has them."""
        workers = self.table.worker[self.table.places(numbers)]
        answers = self._ask_states("export_states", workers, lambda mine: (numbers[mine].tolist(),))
        packed: list[bytes] = [b""] * len(numbers)
        for worker, answer in enumerate(answers):
            for place, data in zip(np.flatnonzero(workers == worker).tolist(), answer or (), strict=True):
                packed[place] = data
        return packed

    def _ask_states(
        self,
        name: RequestName,
        workers: NDArray[np.int_],
        arguments: Callable[[NDArray[np.bool_]], tuple[Any, ...]],
    ) -> list[Any]:
        """Makes a request of those workers that have to do with some states.

        Args:
            name: of a method of `EnvSlice`.
            workers: `[n]`, for each state or env whose affair it is.
            arguments: of the worker's part of these, `[n]` bool.

        Raises:
            StaleStateError: states went with a worker.
        """

        def each(first: int, stop: int) -> tuple[Any, ...] | None:
            mine = workers == self._worker_of[first]
            return arguments(mine) if mine.any() else None

        if not workers.size:
            return []
        answers = self._env_calls.request(name, each)
        gone = [number for answer in answers if isinstance(answer, Gone) for number in answer.numbers]
        if gone:
            raise self.table.lost(np.array(gone))
        return answers


def _onto(rows: Rows, places: NDArray[np.int_]) -> Deliver:
    """Delivers into these places of other rows."""

    def deliver(leaves: Rows, index: Index) -> Rows:
        onto = index_of(places)
        for row, leaf in zip(rows, leaves, strict=True):
            row[onto] = leaf[index]
        return rows

    return deliver
