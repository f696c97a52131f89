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
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jaxvec._engine.move import Move, Verb
from jaxvec._errors import EnvStateError, ResetNeededError, StaleStateError, StateFileError
from jaxvec._extensions.states import state_files
from jaxvec._extensions.states.slice_states import SliceStates
from jaxvec._extensions.states.slot_states import LostStates
from jaxvec._extensions.states.state_files import PackedStates
from jaxvec._memory.segment import Arrays, Deliver, Rows, index_of, views
from jaxvec._pool.pool import Pool
from jaxvec._pool.pool_extension import Operation, PoolExtension
from jaxvec._pool.state import ActiveMove
from jaxvec._spec import Autoreset, PoolSpec
from jaxvec._workers.diagnosis import check_all

_LOST = -1  # value of `TimestepTable.worker` for a state lost in a fault

# --- Time steps of states --------------------------------------------------------------------------------


class TimestepTable:
    """A ring buffer of the time steps that belong to saved states.

    A state's number determines its place in the ring. A number is never reused, so the place of a replaced
    state contains another number. `rows` are arrays of the segment, as workers write to them, too.
    """

    def __init__(self, capacity: int, spec: PoolSpec, arrays: Arrays, *, pool_id: int) -> None:
        self._pool_id = pool_id
        self._capacity = capacity
        self.rows: list[NDArray[Any]] = [
            np.zeros((capacity, *leaf.shape), object) if leaf.is_object else arrays["saved", *leaf.path]
            for leaf in spec.timestep_leaves
        ]
        # `np.zeros` takes pages from the kernel only once they are written, so an unused table costs nothing.
        self.worker: NDArray[np.int_] = np.zeros(capacity, np.int_)  # index of the worker that keeps it
        self.needs_reset: NDArray[np.bool_] = np.zeros(capacity, np.bool_)  # before a step of its env
        self._incarnations = np.zeros(capacity, np.int64)  # replacements of the worker before the save
        self._numbers = np.zeros(capacity, np.int64)  # 0 for a free place
        # Pools of other processes have the same ids. The random first number keeps their states apart from
        # those of this pool, also if a program reads their names from a checkpoint.
        self._first = self._next = 1 + secrets.randbits(61) // capacity * capacity

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
        """Registers states that workers keep. Returns their places; the caller writes the rows by `write`.

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
        return numbers % self._capacity

    def read(self, places: NDArray[np.int_]) -> list[NDArray[Any]]:
        """Returns copies of the time steps in these places."""
        return [row[places] for row in self.rows]

    def write(self, places: NDArray[np.int_], rows: Rows) -> None:
        """Writes time steps to these places."""
        index = index_of(places)
        for column, row in zip(self.rows, rows, strict=True):
            column[index] = row

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

    def __init__(self, pool: Pool, arrays: Arrays, capacity: int) -> None:
        spec = self._spec = pool.spec
        self.table: TimestepTable = TimestepTable(capacity, spec, arrays, pool_id=pool.id)
        self._numbers = arrays["state",]
        self._oldest = arrays["oldest_state",]
        self._first_simulated = arrays["first_simulated",]
        # What a dispatched simulation passes to the workers: states before and after it, and actions.
        self._simulated: list[NDArray[Any]] = []
        if pool.workers.takes_verbs and not any(leaf.is_object for leaf in spec.action_leaves):
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

    # --- Operations, see `PoolExtension.verbs` ---------------------------------------------------------

    def _save(self, pool: Pool, move: Move, operands: Rows, deliver: Deliver) -> list[Any]:
        """Saves the states of the envs of a move, and returns their names `[n, 3]`."""
        slots = move.slots
        table = self.table
        workers = self._worker_of[slots]
        with pool.exclusive_move(move) as active:
            pool.state.check_status(pool.engine.check_envs(slots, stepped=False), slots)
            numbers = table.allocate(len(slots))
            rest = self._dispatch(pool, active, Verb.SAVE, slots, numbers)
            self._request(
                pool,
                SliceStates.save,
                workers[rest],
                lambda chosen: (slots[rest[chosen]].tolist(), numbers[rest[chosen]].tolist(), table.oldest),
            )
            needs_reset = pool.pending_envs.needs_reset[slots]
            places = table.fill(numbers, workers, _incarnations(pool)[workers], needs_reset)
            table.write(places, pool.views.read(slots, views))
            pool.engine.advance(move)
        return [table.ids(numbers)]

    def _restore(self, pool: Pool, move: Move, operands: Rows, deliver: Deliver) -> list[Any]:
        """Restores the envs of a move to states `[n, 3]`, where a mask `[n]` is set; returns the rows of all.

        A failure breaks the pool.
        """
        states, mask = operands
        slots = move.slots[mask]
        table = self.table
        with pool.exclusive_move(move) as active:
            pool.state.check_status(pool.engine.check_envs(move.slots, stepped=False), move.slots)
            pool.engine.wait_for_copies()
            numbers = table.find(states[mask], _incarnations(pool))
            places = table.places(numbers)
            rows = table.read(places)
            rows[self._leaf["info", "env_id"]] = slots.astype(np.int32)
            sources = self._send_far_states(pool, slots, numbers)
            with pool.state.breaking():
                rest = np.arange(len(slots))
                if sources is numbers:
                    rest = self._dispatch(pool, active, Verb.RESTORE, slots, numbers)
                self._request(
                    pool,
                    SliceStates.restore,
                    self._worker_of[slots[rest]],
                    lambda chosen: (
                        slots[rest[chosen]].tolist(),
                        sources[rest[chosen]].tolist(),
                        table.oldest,
                    ),
                )
            pool.views.write(slots, rows)
            pool.pending_envs.needs_reset[slots] = table.needs_reset[places]
            pool.engine.advance(move)
            return pool.views.read(move.slots, deliver)

    def _simulate(self, pool: Pool, move: Move, operands: Rows, deliver: Deliver) -> list[Any]:
        """Steps copies of envs from states `[k, 3]` with the leaves of actions `[k, ...]`.

        Returns the new states' names, and the time steps.
        """
        states, *actions = operands
        table = self.table
        with pool.state.track(move) as active, pool.engine.exclusive():
            pool.state.check()
            sources = table.find(states, _incarnations(pool))
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
            # While envs are pending, nothing else can be dispatched.
            if self._simulated and len(workers) and not len(pool.pending_envs.sent):
                rest = self._dispatch_simulation(pool, active, workers, sources, numbers, actions)
            answers = self._request(
                pool,
                SliceStates.simulate,
                rest,
                lambda chosen: (
                    sources[chosen].tolist(),
                    numbers[chosen].tolist(),
                    [action[chosen] for action in actions],
                    oldest,
                ),
            )
            after = table.fill(numbers, workers, _incarnations(pool)[workers], np.False_)
            for worker, rows in enumerate(answers):
                if rows is not None:
                    table.write(after[workers == worker], rows)
            if idle.size:
                table.write(after[idle], idle_rows)
            table.rows[self._leaf["info", "env_id"]][after] = env_ids
            if pool.resets_required and self._spec.autoreset is Autoreset.DISABLED:
                table.needs_reset[after] = self._ended(after)
            return [table.ids(numbers), *deliver(table.rows, index_of(after))]

    def _pack(
        self, pool: Pool, move: Move, operands: Sequence[Any], deliver: Deliver
    ) -> list[NDArray[np.uint8]]:
        """Returns states `[n, 3]` as bytes, `[size]`, and writes them to a file if the operands name one."""
        states, path = operands
        with pool.engine.exclusive():
            pool.state.check()
            numbers = self.table.find(states, _incarnations(pool))
            places = self.table.places(numbers)
            exported = self._export(pool, numbers).tolist()
            packed = PackedStates(exported, self.table.read(places), self.table.needs_reset[places])
        data = state_files.pack_states(packed, pool.spec.fingerprint)
        if path is not None:
            state_files.write_states(path, data)
        return [np.frombuffer(data, np.uint8)]

    def _unpack(
        self, pool: Pool, move: Move, operands: Sequence[Any], deliver: Deliver
    ) -> list[NDArray[np.uint32]]:
        """Keeps the states in a file, or in an array of bytes, and returns their names `[n, 3]`."""
        name, data = state_files.read_states(operands[0])
        packed = state_files.unpack_states(data, pool.spec.fingerprint, name)
        table = self.table
        with pool.engine.exclusive():
            pool.state.check()
            slots = packed.rows[self._leaf["info", "env_id"]].astype(np.intp) % self._spec.num_envs
            workers = self._worker_of[slots]
            numbers = table.allocate(len(workers))
            states = np.array(packed.data, object)
            try:
                self._request(
                    pool,
                    SliceStates.import_states,
                    workers,
                    lambda chosen: (
                        slots[chosen].tolist(),
                        numbers[chosen].tolist(),
                        states[chosen].tolist(),
                        table.oldest,
                    ),
                )
            except EnvStateError as error:
                raise StateFileError(f"{name}: {error}") from error
            places = table.fill(numbers, workers, _incarnations(pool)[workers], packed.needs_reset)
            table.write(places, packed.rows)
            table.rows[self._leaf["info", "env_id"]][places] = slots
            return [table.ids(numbers)]

    verbs: ClassVar[Mapping[Verb, Operation]] = {
        Verb.SAVE: _save,
        Verb.RESTORE: _restore,
        Verb.SIMULATE: _simulate,
        Verb.PACK_STATES: _pack,
        Verb.UNPACK_STATES: _unpack,
    }

    # --- Parts of the operations -----------------------------------------------------------------------

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
        self._numbers[slots] = numbers
        self._oldest[0] = self.table.oldest
        pool.dispatch(active, verb, slots)
        rest = np.flatnonzero(self._numbers[slots])  # a worker sets the number to 0 when it is done
        late = set(self._worker_of[slots[rest]].tolist())
        errors = pool.workers.last_errors
        check_all([errors[worker] for worker in late if errors[worker] is not before[worker]])
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
        for array, value in zip(self._simulated, values, strict=True):
            array[: len(value)] = value

    def _send_far_states(self, pool: Pool, slots: NDArray[Any], numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Returns the number of each state, or its pickle if another worker than the env's keeps it.

        The workers of the envs check the pickles now, since a failure after a change breaks the pool.
        """
        far = np.flatnonzero(self.table.worker[self.table.places(numbers)] != self._worker_of[slots])
        if not far.size:
            return numbers
        sources = numbers.astype(object)
        sources[far] = self._export(pool, numbers[far])
        self._request(
            pool,
            SliceStates.receive_states,
            self._worker_of[slots[far]],
            lambda chosen: (slots[far][chosen].tolist(), sources[far][chosen].tolist()),
        )
        return sources

    def _export(self, pool: Pool, numbers: NDArray[np.int64]) -> NDArray[np.object_]:
        """Returns the pickles of states `[n]`, from the workers that keep them."""
        workers = self.table.worker[self.table.places(numbers)]
        answers = self._request(
            pool, SliceStates.export_states, workers, lambda chosen: (numbers[chosen].tolist(),)
        )
        packed = np.empty(len(numbers), object)
        for worker, answer in enumerate(answers):
            packed[workers == worker] = answer or []
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

        def arguments_of(first: int, stop: int) -> tuple[Any, ...] | None:
            chosen = workers == self._worker_of[first]
            return arguments(chosen) if chosen.any() else None

        if not workers.size:
            return []
        answers = pool.env_calls.request(method, arguments_of)
        gone = [number for answer in answers if isinstance(answer, LostStates) for number in answer.numbers]
        if gone:
            raise self.table.lost(np.array(gone))
        return answers


def _incarnations(pool: Pool) -> NDArray[np.int64]:
    """Returns how often each worker was replaced, `[num_workers]`."""
    return np.array(pool.workers.incarnations, np.int64)
