"""The half of saved states in the program.

A state is kept under a number, in three places: its env data in the worker (`slice_states.py`), its time step
in the `TimestepTable` here, and its name (pool id and number) in the user's `EnvState`.

    save      the workers keep the env data under new numbers; the table keeps the time steps
    restore   the workers restore the env data of these numbers; the pool copies the time steps back
    simulate  the workers step copies of envs, and keep the results under new numbers
    files     `pack` turns states into bytes (`state_files.py`), and `unpack` keeps those of bytes

A dispatch does the common case; `PoolStates.request` does the rest, and reports errors.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._engine.move import Move, Verb
from jaxvec._errors import EnvStateError, ResetNeededError, StaleStateError, StateFileError
from jaxvec._extensions.states import state_files
from jaxvec._extensions.states.slice_states import SliceStates
from jaxvec._extensions.states.slot_states import LostStates
from jaxvec._extensions.states.state_files import PackedStates
from jaxvec._memory.segment import Arrays, Deliver, Index, Rows, index_of
from jaxvec._pool.pool import Pool
from jaxvec._pool.pool_extension import Operation, PoolExtension
from jaxvec._pool.state import ActiveMove
from jaxvec._spec import Autoreset, PoolSpec
from jaxvec._workers.diagnosis import check_all

_LOST = -1  # value of `TimestepTable.worker` for a state lost in a fault
Sources: TypeAlias = NDArray[np.int64] | Sequence[int | bytes]  # numbers of states, or their pickles

# --- Operations on a pool --------------------------------------------------------------------------------


def _save(mine: PoolStates, pool: Pool, move: Move, operands: Rows, deliver: Deliver) -> list[Any]:
    """Saves the states of the envs of a move, and returns their names `[n, 3]`."""
    slots = move.slots
    with pool.exclusive_move(move) as active:
        pool.state.check_status(pool.engine.check_envs(slots, stepped=False), slots)
        ids, places = mine.save(pool, active, slots, pool.pending_envs.needs_reset[slots])
        pool.views.read(slots, _copy_into(mine.table.rows, places))
        pool.engine.advance(move)
        return [ids]


def _restore(mine: PoolStates, pool: Pool, move: Move, operands: Rows, deliver: Deliver) -> list[Any]:
    """Restores the envs of a move to states `[n, 3]`, where a mask `[n]` is set; returns the rows of all.

    A failure breaks the pool.
    """
    slots = move.slots
    (states, mask) = operands
    chosen = slots[mask]
    states = states[mask]
    with pool.exclusive_move(move) as active:
        pool.state.check_status(pool.engine.check_envs(slots, stepped=False), slots)
        pool.engine.wait_for_copies()
        sources, rows, needs_reset = mine.find(pool, chosen, states)
        with pool.state.breaking():
            mine.restore(pool, active, chosen, sources, rows)
        pool.views.write(chosen, rows)
        pool.pending_envs.needs_reset[chosen] = needs_reset
        pool.engine.advance(move)
        return pool.views.read(slots, deliver)


def _simulate(mine: PoolStates, pool: Pool, move: Move, operands: Rows, deliver: Deliver) -> list[Any]:
    """Steps copies of envs from states `[k, 3]` with the leaves of actions `[k, ...]`.

    Returns the new states' names, and the time steps.
    """
    states, *actions = operands
    with pool.state.track(move) as active, pool.engine.exclusive():
        pool.state.check()
        ids, rows = mine.simulate(pool, active, states, actions, deliver)
        return [ids, *rows]


def _pack(
    mine: PoolStates, pool: Pool, move: Move, operands: Sequence[Any], deliver: Deliver
) -> list[NDArray[np.uint8]]:
    """Returns states `[n, 3]` as bytes, `[size]`; with a path as second operand, it also writes a file."""
    states, path = operands
    with pool.engine.exclusive():
        pool.state.check()
        packed = mine.pack(pool, states)
    data = state_files.pack_states(packed, pool.spec.fingerprint)
    if path is not None:
        state_files.write_states(path, data)
    return [np.frombuffer(data, np.uint8)]


def _unpack(
    mine: PoolStates, pool: Pool, move: Move, operands: Sequence[Any], deliver: Deliver
) -> list[NDArray[np.uint32]]:
    """Keeps the states in a file, or in an array of bytes, and returns their names `[n, 3]`."""
    name, data = state_files.read_states(operands[0])
    packed = state_files.unpack_states(data, pool.spec.fingerprint, name)
    with pool.engine.exclusive():
        pool.state.check()
        try:
            return [mine.unpack(pool, packed)]
        except EnvStateError as error:
            raise StateFileError(f"{name}: {error}") from error


def _too_many(count: int, capacity: int, pool_id: int) -> ValueError:
    return ValueError(
        f"can't keep {count} states at once, because pool {pool_id} keeps {capacity}; "
        f"make it with states={count} or more, the number that your program uses at the same time"
    )


# --- Time steps of states --------------------------------------------------------------------------------


class TimestepTable:
    """A ring buffer of the time steps that belong to saved states.

    A state's number determines its place in the ring. A number is never reused, so the place of a replaced
    state contains another number. `rows` are arrays of the segment, as workers write to them, too.
    """

    def __init__(self, capacity: int, *, pool_id: int) -> None:
        self._pool_id = pool_id
        self._capacity = capacity
        self.rows: list[NDArray[Any]] = []
        # `np.zeros` takes pages from the kernel only once they are written, so an unused table costs nothing.
        self.worker: NDArray[np.int_] = np.zeros(capacity, np.int_)  # index of the worker that keeps it
        self.needs_reset: NDArray[np.bool_] = np.zeros(capacity, np.bool_)  # before a step of its env
        self._incarnations = np.zeros(capacity, np.int64)  # replacements of the worker before the save
        self._numbers = np.zeros(capacity, np.int64)  # 0 for a free place
        # Pools of other processes have the same ids. The random first number keeps their states apart from
        # those of this pool, also if a program reads their names from a checkpoint.
        self._first = self._next = 1 + secrets.randbits(61) // max(capacity, 1) * capacity

    def attach(self, spec: PoolSpec, arrays: Arrays) -> None:
        """Sets the rows of the table, which `make_layout` has reserved for its capacity."""
        capacity = self._capacity
        self.rows = [
            np.zeros((capacity, *leaf.shape), object) if leaf.is_object else arrays["saved", *leaf.path]
            for leaf in (spec.timestep_leaves if capacity else ())
        ]

    @property
    def count(self) -> int:
        # Does not touch the pages of the places that were never used. Numbers start at the place 1.
        used = slice(min(1 + self._next - self._first, self._capacity))
        return int(np.count_nonzero((self._numbers[used] > 0) & (self.worker[used] != _LOST)))

    @property
    def row_bytes(self) -> int:
        """Size in bytes of the rows that were ever used."""
        used = min(self._next - self._first, self._capacity)
        return sum(row[:used].nbytes for row in self.rows)

    def allocate(self, count: int) -> NDArray[np.int64]:
        """Returns the numbers of `count` new states, and frees their places."""
        if count > self._capacity:
            raise _too_many(count, self._capacity, self._pool_id)
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
        self._numbers[places] = numbers
        self.worker[places] = workers
        self._incarnations[places] = incarnations
        self.needs_reset[places] = needs_reset
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
        ids[:, 0] = self._pool_id
        ids[:, 1:] = numbers.astype("<i8").view("<u4").reshape(-1, 2)
        return ids

    def find(self, ids: NDArray[np.uint32], incarnations: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of the states with the names `ids`, `[n, 3]`.

        `incarnations` is the number of times that each worker was replaced so far, `[num_workers]`.
        """
        foreign = np.flatnonzero(ids[:, 0] != self._pool_id)
        if foreign.size:
            raise StaleStateError(
                f"state {foreign[0]} is of pool {ids[foreign[0], 0]}, not of pool {self._pool_id}. While the "
                "other pool is open, pack_states and unpack_states move states"
                if ids[foreign[0]].any()
                else f"state {foreign[0]} is uninitialised (all zeros); pass a state that save or simulate "
                "returned"
            )
        numbers = np.ascontiguousarray(ids[:, 1:], "<u4").view("<i8").reshape(-1)
        if not self._capacity:
            self.allocate(1)  # raises
        unknown = np.flatnonzero((numbers < self._first) | (numbers >= self._next))
        if unknown.size:
            raise StaleStateError(
                f"state {unknown[0]} was saved in another process, and an EnvState only refers to it. In "
                "checkpoints, keep the bytes of pack_states() instead"
            )
        places = self.places(numbers)
        gone = np.flatnonzero(self._numbers[places] != numbers)
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
            f"{len(numbers)} of these states are lost, because their worker was replaced by a new process; "
            "reset its envs and save states again"
        )


# --- The states of one pool ------------------------------------------------------------------------------


class PoolStates(PoolExtension):
    """The saved states of a pool's envs. The calls are made by the only thread inside the engine."""

    verbs: ClassVar[Mapping[Verb, Operation]] = {
        Verb.SAVE: _save,
        Verb.RESTORE: _restore,
        Verb.SIMULATE: _simulate,
        Verb.PACK_STATES: _pack,
        Verb.UNPACK_STATES: _unpack,
    }

    def __init__(self, pool: Pool, arrays: Arrays, capacity: int) -> None:
        spec = self._spec = pool.spec
        self.table: TimestepTable = TimestepTable(capacity, pool_id=pool.id)
        self.table.attach(spec, arrays)
        self._numbers = arrays["state",]
        self._oldest = arrays["oldest_state",]
        self._first_simulated = arrays["first_simulated",]
        # What a dispatched simulation passes to the workers: states before and after it, and actions.
        self._simulated: list[NDArray[Any]] = []
        if capacity and pool.workers.takes_verbs and not any(leaf.is_object for leaf in spec.action_leaves):
            leaves = [("simulated", *leaf.path) for leaf in spec.action_leaves]
            paths = ("simulated_before",), ("simulated_after",), *leaves
            self._simulated = [arrays[path] for path in paths]
        self._worker_of = pool.env_calls.worker_of
        self._leaf = {leaf.path: index for index, leaf in enumerate(spec.timestep_leaves)}

    def stats(self) -> Mapping[str, int]:
        return {"states": self.table.count, "state_row_bytes": self.table.row_bytes}

    def forget(self) -> None:
        nothing = np.zeros(0, np.int64)
        self.table.rows = []
        self._simulated = []
        self._numbers = self._oldest = self._first_simulated = nothing

    def save(
        self, pool: Pool, active: ActiveMove, slots: NDArray[Any], needs_reset: NDArray[np.bool_]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int_]]:
        """Saves the states of envs, and returns their names `[n, 3]` and the places of their time steps.

        `needs_reset`, `[n]`, has the envs that must be reset before they are stepped.
        """
        table = self.table
        workers = self._worker_of[slots]
        numbers = table.allocate(len(slots))
        rest = self._dispatch(pool, active, Verb.SAVE, slots, numbers)
        self._request(
            pool,
            SliceStates.save,
            workers[rest],
            lambda mine: (slots[rest[mine]].tolist(), numbers[rest[mine]].tolist(), table.oldest),
        )
        places = table.fill(numbers, workers, _incarnations(pool)[workers], needs_reset)
        return table.ids(numbers), places

    def find(
        self, pool: Pool, slots: NDArray[Any], ids: NDArray[np.uint32]
    ) -> tuple[Sources, list[NDArray[Any]], NDArray[np.bool_]]:
        """Returns the states for `slots`: sources for the workers, time steps, and `needs_reset`."""
        numbers = self.table.find(ids, _incarnations(pool))
        places = self.table.places(numbers)
        sources = self._sources_for(pool, slots, numbers)
        rows = self.table.read(places)
        rows[self._leaf["info", "env_id"]] = slots.astype(np.int32)
        # Before the envs change, as a failure of `restore` breaks the pool.
        if not isinstance(sources, np.ndarray):
            moved = [place for place, source in enumerate(sources) if isinstance(source, bytes)]
            data = np.array(sources, object)[moved]
            self._request(
                pool,
                SliceStates.receive_states,
                self._worker_of[slots[moved]],
                lambda mine: (slots[moved][mine].tolist(), data[mine].tolist()),
            )
        return sources, rows, self.table.needs_reset[places]

    def restore(
        self, pool: Pool, active: ActiveMove, slots: NDArray[Any], sources: Sources, rows: Rows
    ) -> None:
        """Restores envs to the states that `find` returned."""
        rest = np.arange(len(slots))
        if isinstance(sources, np.ndarray):
            rest = self._dispatch(pool, active, Verb.RESTORE, slots, sources)
            sources = sources.tolist()
        self._request(
            pool,
            SliceStates.restore,
            self._worker_of[slots[rest]],
            lambda mine: (
                slots[rest[mine]].tolist(),
                [sources[place] for place in rest[mine]],
                self.table.oldest,
            ),
        )

    def simulate(
        self, pool: Pool, active: ActiveMove, ids: NDArray[np.uint32], actions: Rows, deliver: Deliver
    ) -> tuple[NDArray[np.uint32], Rows]:
        """Steps copies of envs; see the function `simulate`."""
        table = self.table
        sources = table.find(ids, _incarnations(pool))
        before = table.places(sources)
        # Read before `allocate`, which may give the places of the sources to the new states.
        workers = table.worker[before]
        env_ids = table.rows[self._leaf["info", "env_id"]][before]
        ended = np.flatnonzero(table.needs_reset[before])
        if ended.size and pool.resets_required:
            raise ResetNeededError(
                f"state {ended[0]} can't be simulated: its episode is over, or its env was never reset. "
                "Choose between such states and others with jnp.where, or make the pool with "
                'autoreset_mode="EPISODIC" or with autoreset'
            )
        idle, idle_rows = self._idle_rows(before)
        numbers = table.allocate(len(workers))
        oldest = table.oldest
        rest = workers
        if self._simulated and len(workers) and not len(pool.pending_envs.sent):  # which can't be dispatched
            rest = self._dispatch_simulation(pool, active, workers, sources, numbers, actions)
        answers = self._request(
            pool,
            SliceStates.simulate,
            rest,
            lambda mine: (sources[mine].tolist(), numbers[mine].tolist(), [a[mine] for a in actions], oldest),
        )
        after = table.fill(numbers, workers, _incarnations(pool)[workers], np.False_)
        for worker, answer in enumerate(answers):
            for row, part in zip(table.rows, answer or (), strict=bool(answer)):
                row[after[workers == worker]] = part
        for row, part in zip(table.rows, idle_rows, strict=bool(idle_rows)):
            row[after[idle]] = part
        table.rows[self._leaf["info", "env_id"]][after] = env_ids
        if pool.resets_required and self._spec.autoreset is Autoreset.DISABLED:
            table.needs_reset[after] = self._ended(after)
        return table.ids(numbers), deliver(table.rows, index_of(after))

    def pack(self, pool: Pool, ids: NDArray[np.uint32]) -> PackedStates:
        """Returns states in a form that other pools can restore."""
        numbers = self.table.find(ids, _incarnations(pool))
        places = self.table.places(numbers)
        return PackedStates(
            self._export(pool, numbers), self.table.read(places), self.table.needs_reset[places]
        )

    def unpack(self, pool: Pool, packed: PackedStates) -> NDArray[np.uint32]:
        """Keeps states of another pool, and returns their names `[n, 3]`."""
        slots = packed.rows[self._leaf["info", "env_id"]].astype(np.intp) % self._spec.num_envs
        workers = self._worker_of[slots]
        numbers = self.table.allocate(len(workers))
        oldest = self.table.oldest
        data = np.array(packed.data, object)
        self._request(
            pool,
            SliceStates.import_states,
            workers,
            lambda mine: (slots[mine].tolist(), numbers[mine].tolist(), data[mine].tolist(), oldest),
        )
        places = self.table.fill(numbers, workers, _incarnations(pool)[workers], packed.needs_reset)
        for row, part in zip(self.table.rows, packed.rows, strict=True):
            row[places] = part
        self.table.rows[self._leaf["info", "env_id"]][places] = slots
        return self.table.ids(numbers)

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
        self,
        pool: Pool,
        active: ActiveMove,
        verb: Verb,
        slots: NDArray[Any],
        numbers: NDArray[np.int64],
    ) -> NDArray[np.int_]:
        """Saves, restores or simulates by a dispatch, and returns the indices of the envs that were left out.

        A request for those is slower, but handles all cases and reports their errors.
        """
        if not pool.workers.takes_verbs:
            return np.arange(len(slots))
        before = [*pool.workers.last_errors]
        self._numbers[slots], self._oldest[0] = numbers, self.table.oldest
        pool.dispatch(active, verb, slots)
        rest = np.flatnonzero(self._numbers[slots])  # a worker sets the number to 0 when it is done
        late = set(self._worker_of[slots[rest]].tolist())
        errors = pool.workers.last_errors
        check_all([errors[each] for each in late if errors[each] is not before[each]])
        return rest

    def _dispatch_simulation(
        self,
        pool: Pool,
        active: ActiveMove,
        workers: NDArray[np.int_],
        sources: NDArray[np.int64],
        numbers: NDArray[np.int64],
        actions: Rows,
    ) -> NDArray[np.int_]:
        """Steps copies of envs by a dispatch; the workers write the rows.

        Returns the worker of each state `[n]` that was left out, and -1 for the others.
        """
        counts = np.bincount(workers)
        involved = np.flatnonzero(counts)
        stops = counts.cumsum()
        slots = self._worker_of.searchsorted(involved)  # the first env of each
        is_sorted = (workers[1:] >= workers[:-1]).all()
        order = slice(None) if is_sorted else workers.argsort(kind="stable")
        values = [array[order] for array in (sources, numbers, *actions)]
        self._write_simulation(slots, (stops - counts)[involved], values)
        late = self._dispatch(pool, active, Verb.SIMULATE, slots, stops[involved])
        return np.where(np.isin(workers, involved[late]), workers, -1) if late.size else workers[:0]

    def _write_simulation(self, slots: NDArray[Any], starts: NDArray[Any], values: Rows) -> None:
        # A function of its own: views of the segment in the traceback of an error would keep it mapped.
        self._first_simulated[slots] = starts
        for array, each in zip(self._simulated, values, strict=True):
            array[: len(each)] = each

    def _sources_for(self, pool: Pool, slots: NDArray[Any], numbers: NDArray[np.int64]) -> Sources:
        """Returns the number of each state, or its pickle if another worker than the env's keeps it."""
        far = np.flatnonzero(self.table.worker[self.table.places(numbers)] != self._worker_of[slots])
        if not far.size:
            return numbers
        sources: list[int | bytes] = numbers.tolist()
        for place, data in zip(far.tolist(), self._export(pool, numbers[far]), strict=True):
            sources[place] = data
        return sources

    def _export(self, pool: Pool, numbers: NDArray[np.int64]) -> list[bytes]:
        """Returns the pickles of states, from the workers that keep them."""
        workers = self.table.worker[self.table.places(numbers)]
        answers = self._request(
            pool, SliceStates.export_states, workers, lambda mine: (numbers[mine].tolist(),)
        )
        packed: list[bytes] = [b""] * len(numbers)
        for worker, answer in enumerate(answers):
            for place, data in zip(np.flatnonzero(workers == worker).tolist(), answer or (), strict=True):
                packed[place] = data
        return packed

    def _request(
        self,
        pool: Pool,
        method: Callable[..., Any],
        workers: NDArray[np.int_],
        arguments: Callable[[NDArray[np.bool_]], tuple[Any, ...]],
    ) -> list[Any]:
        """Calls a method of `SliceStates` in the workers with an entry in `workers`, `[n]`.

        `arguments` maps the mask `[n]` of a worker's entries to the arguments of its call.
        """

        def each(first: int, stop: int) -> tuple[Any, ...] | None:
            mine = workers == self._worker_of[first]
            return arguments(mine) if mine.any() else None

        if not workers.size:
            return []
        answers = pool.env_calls.request(method, each)
        gone = [number for answer in answers if isinstance(answer, LostStates) for number in answer.numbers]
        if gone:
            raise self.table.lost(np.array(gone))
        return answers


def _incarnations(pool: Pool) -> NDArray[np.int64]:
    """Returns how often each worker was replaced, `[num_workers]`."""
    return np.array(pool.workers.incarnations, np.int64)


def _copy_into(rows: Rows, places: NDArray[np.int_]) -> Deliver:
    """Returns a `Deliver` function that copies leaves into these places of `rows`."""

    def deliver(leaves: Rows, index: Index) -> Rows:
        onto = index_of(places)
        for row, leaf in zip(rows, leaves, strict=True):
            row[onto] = leaf[index]
        return rows

    return deliver
