"""The half of saved states in a worker: saves, restores, simulations, and moves to a new process."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec import _stats
from jaxvec._dispatch.move import Verb
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.envs import Env, EnvErrorContext, EnvFailure, EnvFn, build_env
from jaxvec._envs.episodes import IDLE
from jaxvec._envs.extension import SliceExtension
from jaxvec._extensions.states.env_states import EnvSnapshot, StatefulEnv
from jaxvec._extensions.states.proof import ForkedProcessEnded, call_in_fork, patience, prove
from jaxvec._extensions.states.simulator import Simulator, Stepper
from jaxvec._extensions.states.slot_states import LostStates, SlotState, SlotStates, StateTable, pack, unpack
from jaxvec._extensions.states.snapshots.pickling import dumps
from jaxvec._memory.segment import Arrays
from jaxvec._options import States
from jaxvec._spec import PoolSpec
from jaxvec._workers.recycling import ExportedSlots, ImportedSlots


class SliceStates(SliceExtension):
    """The saved states of the envs of one slice."""

    def __init__(self, env_slice: EnvSlice, options: States) -> None:
        self._slice, self._options = env_slice, options
        self._states = SlotStates(env_slice, options)
        self._slots, self._first = env_slice.slots, env_slice.first
        self._spec, self._arrays, self._stats = env_slice.spec, env_slice.arrays, env_slice.stats
        self._running = env_slice.running
        self._table = StateTable(self._stats)
        self._received: dict[bytes, SlotState] = {}  # compared with their originals, to be restored next
        # The parent writes the numbers before it dispatches a save or restore; 0 marks one that is done.
        mine = slice(self._first, self._first + len(self._slots.envs))
        self._numbers, self._oldest = self._arrays["state",][mine], self._arrays["oldest_state",]
        # The serial backend runs in the program, and a fork of that would lack its threads.
        self._forks = env_slice.config.backend != "serial" and hasattr(os, "fork")
        self._unproved = set(range(len(self._slots.envs)))  # envs without a proof of exact restores
        self._simulator = Simulator(
            env_slice.env_fns,
            first=self._first,
            running=self._running,
            spec=self._spec,
            stepper_of=self._stepper_of,
            others=lambda: self._slots.named,
        )
        self.requests = {
            "save": self.save,
            "restore": self.restore,
            "simulate": self.simulate,
            "export": self.export_states,
            "import": self.import_states,
            "compare": self.compare,
            "can_export_slots": self.can_export_slots,
            "export_slots": self.export_slots,
            "import_slots": self.import_slots,
        }
        self.verbs = {
            Verb.SAVE: self.try_save,
            Verb.RESTORE: self.try_restore,
            Verb.SIMULATE: self.try_simulate,
        }

    def env_built(self, index: int) -> None:
        self._states.note_built(index)

    def close(self) -> None:
        self._simulator.close()

    # --- Saves and restores by a dispatch ---------------------------------------------------------
    # If a number remains in the segment, the request of the same name repeats the operation, and may raise.

    def try_save(self, slots: NDArray[Any]) -> None:
        """Saves the states of `slots` under their numbers in the segment, and sets these numbers to 0.

        If a number remains, nothing was saved.
        """
        indices = slots - self._first
        if self._unproved.isdisjoint(indices.tolist()):
            with suppress(BaseException):
                self.save(slots.tolist(), self._numbers[indices].tolist(), int(self._oldest[0]))
                self._numbers[indices] = 0

    def try_restore(self, slots: NDArray[Any]) -> None:
        """Restores the states with the numbers in the segment, and sets these numbers to 0.

        If a number remains, some envs may be restored. The request then restores all.
        """
        indices = slots - self._first
        with suppress(BaseException):
            sources = self._numbers[indices].tolist()
            if self.restore(slots.tolist(), sources, int(self._oldest[0]), None) is None:
                self._numbers[indices] = 0

    def try_simulate(self, slots: NDArray[Any]) -> None:
        """Steps copies of envs as the segment specifies at the one slot, and sets its number there to 0.

        If the number remains, no new states were kept.
        """
        (index,) = (slots - self._first).tolist()
        arrays = self._arrays
        part = slice(arrays["first_simulated",][slots[0]], self._numbers[index])
        before, after = (arrays[name,][part] for name in ("simulated_before", "simulated_after"))
        actions = [arrays[("simulated", *leaf.path)][part] for leaf in self._spec.action_leaves]
        rows = [arrays[("saved", *leaf.path)] for leaf in self._spec.timestep_leaves]
        with suppress(BaseException):
            self._simulate(before.tolist(), after, actions, int(self._oldest[0]), rows, after % len(rows[0]))
            self._numbers[index] = 0

    # --- Requests ---------------------------------------------------------------------------------

    def save(self, slots: Sequence[int], numbers: Sequence[int], oldest: int) -> None:
        """Saves the states of envs under these numbers, and evicts those with numbers below `oldest`.

        The first save of each kind of env verifies that its envs can be restored exactly.

        Raises:
            EnvFailure: A state can't be saved, or a restored env does not reproduce it.
        """
        states: list[SlotState] = []
        slot = slots[0]
        with self._table.evicting(oldest):
            try:
                for slot in slots:
                    index = slot - self._first
                    self._running[0] = slot + 1
                    if index in self._unproved:
                        self._prove(slot)
                    states.append(self._states.save(index, slot))
            except BaseException as error:
                raise EnvFailure(slot, "save") from error
            finally:
                self._running[0] = 0
            self._table.add(numbers, states)

    def restore(
        self,
        slots: Sequence[int],
        sources: Sequence[int | bytes],
        oldest: int,
        rows: Sequence[NDArray[Any]] | None,
    ) -> LostStates | None:
        """Restores a state, given by its number or its bytes, into each of `k` envs.

        `rows` are the leaves of the states' time steps, `[k, ...]` each; `None` if the parent writes them.

        Raises:
            EnvFailure: A state can't be restored. The envs before it have been restored.
        """
        with self._table.evicting(oldest):
            missing = self._table.missing(source for source in sources if isinstance(source, int))
            if missing:
                return LostStates(missing)
            slot = slots[0]
            try:
                for slot, source in zip(slots, sources, strict=True):
                    self._running[0] = slot + 1
                    if isinstance(source, int):
                        state = self._table[source]
                    else:
                        state = self._received.get(source) or unpack(source)
                    self._states.restore(slot - self._first, state)
            except BaseException as error:
                raise EnvFailure(slot, "restore") from error
            finally:
                self._running[0] = 0
                self._received.clear()
            if rows is not None:
                self._slice.rows.put(np.array(slots) - self._first, rows)
            return None

    def simulate(
        self, sources: Sequence[int], numbers: Sequence[int], actions: Sequence[NDArray[Any]], oldest: int
    ) -> list[NDArray[Any]] | LostStates:
        """Steps copies of envs from `k` states, and saves the next states under `numbers`.

        `actions` and the result are the leaves of actions and time step, `[k, ...]` each. The caller fills in
        `env_id`. The states to step from may have numbers below `oldest`.

        Raises:
            EnvFailure: An env raised. It names the slot that the first state of its line was saved from.
        """
        missing = self._table.missing(sources)
        if missing:
            return LostStates(missing)
        rows = [
            np.empty((len(sources), *leaf.shape), object if leaf.is_object else leaf.stored)
            for leaf in self._spec.timestep_leaves
        ]
        self._simulate(sources, np.array(numbers), actions, oldest, rows, np.arange(len(sources)))
        return rows

    def _simulate(
        self,
        sources: Sequence[int],
        numbers: NDArray[np.int64],
        actions: Sequence[NDArray[Any]],
        oldest: int,
        rows: Sequence[NDArray[Any]],
        places: NDArray[np.int64],
    ) -> None:
        """Steps from states, keeps the next ones, and writes the time steps to these places of `rows`."""
        with self._table.evicting(oldest):
            before, states = self._simulator.steps, [self._table[source] for source in sources]
            try:
                after = self._simulator.step(states, actions, rows, places)
            finally:
                self._stats[_stats.SIMULATED] += self._simulator.steps - before
            self._table.add(numbers.tolist(), after)

    def export_states(self, numbers: Sequence[int]) -> list[bytes] | LostStates:
        """Returns states as bytes; raises `EnvFailure` if one can't be pickled."""
        missing = self._table.missing(numbers)
        if missing:
            return LostStates(missing)
        states = [self._table[number] for number in numbers]
        with EnvErrorContext(states[0].slot if states else self._first, "export"):
            return pack(self._with_originals(states))

    def import_states(
        self, slots: Sequence[int], numbers: Sequence[int], packed: Sequence[bytes], oldest: int
    ) -> None:
        """Adds states that `export_states` returned, as states of `slots`.

        Raises:
            EnvFailure: A state can't be unpickled, does not fit the env of its slot, or would not be exact.
        """
        with self._table.evicting(oldest):
            self._table.add(numbers, self._receive(slots, packed, "import"))

    def compare(self, slots: Sequence[int], packed: Sequence[bytes]) -> None:
        """Prepares for `restore` from these bytes, and leaves the envs unchanged.

        Raises:
            EnvFailure: As for `import_states`.
        """
        self._received = dict(zip(packed, self._receive(slots, packed, "restore"), strict=True))

    # --- The replacement of the process -----------------------------------------------------------

    def can_export_slots(self) -> bool:
        """Returns whether `export_slots` can be called: no env has to recover from a fault."""
        return not any(each > IDLE for each in self._slice.episodes.state)

    def export_slots(self) -> ExportedSlots:
        """Returns a message for the next process, which cuts episodes that it can't continue exactly."""
        try:
            for index in range(len(self._states.stateful)):
                if index in self._unproved:
                    self._prove(self._first + index)
            return ExportedSlots(self._pack_slots())
        except Exception as error:  # also one of a user's own functions
            return ExportedSlots(None, _first_line(error))

    def import_slots(self, data: bytes) -> ImportedSlots:
        """Continues the slots of an old process, and reports which could not be continued.

        The envs of these are built anew. Their rows will show that their episodes were cut, as after a fault.
        """
        slots, kept, self._unproved, self._slice.rows.given = pickle.loads(data)
        cut: dict[int, str] = {}
        for index, packed in enumerate(slots):
            try:
                self._states.restore(index, unpack(packed), moved=True)
            except (Exception, SystemExit) as error:
                cut[self._first + index] = _first_line(error)
                self._slice.rebuild(index)
                self._slice.episodes.lose(index)
        try:
            states: dict[int, SlotState] = pickle.loads(kept)
            self._compare(list(states.values()))
        except Exception:
            return ImportedSlots(cut, keeps_states=False)
        self._table.add(list(states), list(states.values()))
        return ImportedSlots(cut, keeps_states=True)

    def _pack_slots(self) -> bytes:
        """Pickles all that the new process needs."""
        slots: list[bytes] = []
        for index, stateful in enumerate(self._states.stateful):
            self._slots.set_buffer(index, lend=False)
            state = self._states.save(index, self._first + index)
            state.env.original = stateful.digest()
            slots += pack([state])
        try:
            states = self._table.by_number
            kept = dumps(dict(zip(states, self._with_originals(list(states.values())), strict=True)))
        except Exception:
            kept = b""  # they are lost
        return dumps((slots, kept, self._unproved, self._slice.rows.given))

    # --- Comparison with originals in another process ---------------------------------------------

    def _receive(self, slots: Sequence[int], packed: Sequence[bytes], operation: str) -> list[SlotState]:
        states: list[SlotState] = []
        for slot, one in zip(slots, packed, strict=True):
            with EnvErrorContext(slot, operation):
                states.append(unpack(one)._replace(slot=slot))
                self._states.stateful[slot - self._first].check_fit(states[-1].env)
        with EnvErrorContext(slots[0], operation):
            self._compare(states)
        return states

    def _compare(self, states: Sequence[SlotState]) -> None:
        """Compares states with their originals in another process; raises `EnvStateError` if one differs."""
        self._visit(states, StatefulEnv.compare)
        for state in states:
            state.env.original = None

    def _with_originals(self, states: Sequence[SlotState]) -> list[SlotState]:
        """Returns states with the digests of their envs, for the process that gets them."""
        digests = self._visit(states, StatefulEnv.digest)
        return [
            state._replace(env=replace(state.env, original=digest))
            for state, digest in zip(states, digests, strict=True)
        ]

    def _visit(
        self, states: Sequence[SlotState], visit: Callable[[StatefulEnv, EnvSnapshot], Any]
    ) -> list[Any]:
        """Calls a function that restores each state to an env of its kind.

        Not to one of the slice, because a second restore need not undo the first: if the env refers to a
        global object, it may then have a copy of that.
        """
        results: list[Any] = [None] * len(states)
        by_kind: dict[Hashable, list[int]] = {}
        for place, state in enumerate(states):
            by_kind.setdefault(self._simulator.kind(state.slot), []).append(place)
        for places in by_kind.values():
            envs = [states[place].env for place in places]
            found = self._call_with_another(
                states[places[0]].slot - self._first, lambda env, envs=envs: [visit(env, one) for one in envs]
            )
            for place, result in zip(places, found, strict=True):
                results[place] = result
        return results

    def _call_with_another(self, index: int, function: Callable[[StatefulEnv], Any]) -> Any:
        """Calls a function with an env of this one's kind: in a worker, with itself in a forked child."""
        if not self._forks:
            with self._another(index) as another:
                return function(another)
        stateful = self._states.stateful[index]

        def call(_: Any) -> Any:
            if not self._slots.was_reset(index):
                stateful.env.reset(seed=0)
            return function(stateful)

        with self._slots.unlent(index):
            return call_in_fork(call, stateful.env, patience(self._stats))

    @contextmanager
    def _another(self, index: int) -> Generator[StatefulEnv]:
        """Builds another env for a slot, resets it, and closes it after the block."""
        (env,) = build_env([self._slice.env_fns[index]], self._first + index)
        with closing(env):
            stateful = self._states.observe(env)
            env.reset(seed=0)
            yield stateful

    def _prove(self, slot: int) -> None:
        """Proves that envs of this one's kind continue exactly from restored states, once per kind."""
        kind, index, rows = self._simulator.kind, slot - self._first, self._slice.rows
        fresh = not self._slots.was_reset(index) or self._slice.episodes.is_over(index)
        stateful = self._states.stateful[index]
        stateful.save()  # first: an error here needs no child
        rows.infos[index] = deepcopy(rows.infos[index])  # the env may reuse the dict that it returned
        with self._slots.unlent(index):
            if not self._forks:
                prove(stateful, fresh=fresh)
            else:
                try:
                    call_in_fork(
                        lambda progress: prove(stateful, fresh=fresh, progress=progress),
                        stateful.env,
                        patience(self._stats),
                    )
                except ForkedProcessEnded as error:
                    warnings.warn(f"the states of env {slot} are used without a proof: {error}", stacklevel=1)
        self._unproved = {each for each in self._unproved if kind(self._first + each) != kind(slot)}

    def _stepper_of(self, envs: list[Env], env_fn: EnvFn, spec: PoolSpec, arrays: Arrays) -> Stepper:
        """Returns the stepper of a slice of envs that hold no slot of the pool."""
        config = self._slice.config
        plain = replace(config.workers, recycle=None)
        config = replace(config, states=States(), workers=plain)  # without extensions
        env_fns = [env_fn] * len(envs)
        other = EnvSlice(
            envs, env_fns, first=0, worker=0, spec=spec, arrays=arrays, config=config, lends=False
        )
        return SlotStates(other, self._options).step_from


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
