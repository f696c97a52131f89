"""The half of saved states in a worker: saves, restores, simulations, and exchanges with other processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._engine.move import Verb
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.envs import EnvErrorContext, EnvFailure
from jaxvec._envs.slice import SliceExtension
from jaxvec._extensions.states.env_states import EnvSnapshot
from jaxvec._extensions.states.proof import ForkedProcessEnded, call_in_fork, jax_has_threads, patience, prove
from jaxvec._extensions.states.simulator import Simulator
from jaxvec._extensions.states.slot_states import LostStates, SlotState, SlotStates, StateTable, pack, unpack
from jaxvec._options import States


class SliceStates(SliceExtension):
    """The saved states of the envs of one slice."""

    def __init__(self, env_slice: EnvSlice, options: States) -> None:
        self._slice = env_slice
        self._first = env_slice.first
        self._states = SlotStates(env_slice, options)
        self._slots = env_slice.slots
        self._arrays = env_slice.arrays
        self._running = env_slice.running
        self._table = StateTable(env_slice.stats)
        self._received: dict[bytes, SlotState] = {}  # to be restored next
        # The parent writes the numbers before it dispatches a save or restore; 0 marks one that is done.
        indices = range(len(env_slice.slots.envs))
        self._numbers = self._arrays["state",][self._first : self._first + len(indices)]
        self._oldest = self._arrays["oldest_state",]
        self._unproved = set(indices)  # envs without a proof of exact restores
        self._unproved_copies = set(indices)  # and of exact pickled copies of their states
        self._simulator = Simulator(env_slice, options)
        self.verbs = {
            Verb.SAVE: self.try_save,
            Verb.RESTORE: self.try_restore,
            Verb.SIMULATE: self.try_simulate,
        }

    def env_built(self, index: int) -> None:
        self._states.stateful[index] = self._states.observe(self._slots.envs[index])

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
            if self.restore(slots.tolist(), sources, int(self._oldest[0])) is None:
                self._numbers[indices] = 0

    def try_simulate(self, slots: NDArray[Any]) -> None:
        """Steps copies of envs as the segment specifies at the one slot, and sets its number there to 0.

        If the number remains, no new states were kept.
        """
        (index,) = (slots - self._first).tolist()
        arrays = self._arrays
        part = slice(arrays["first_simulated",][slots[0]], self._numbers[index])
        before, after = (arrays[name,][part] for name in ("simulated_before", "simulated_after"))
        actions = [arrays[("simulated", *leaf.path)][part] for leaf in self._slice.spec.action_leaves]
        rows = [arrays[("saved", *leaf.path)] for leaf in self._slice.spec.timestep_leaves]
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
                        self._prove(index, self._unproved)
                    states.append(self._states.save(index, slot))
            except BaseException as error:
                raise EnvFailure(slot, "save") from error
            finally:
                self._running[0] = 0
            self._table.add(numbers, states)

    def restore(self, slots: Sequence[int], sources: Sequence[int | bytes], oldest: int) -> LostStates | None:
        """Restores a state, given by its number or its bytes, into each of `k` envs.

        The parent writes the rows of their time steps.

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
                        state = self._table.states[source]
                    else:
                        state = self._received.get(source) or unpack(source)
                    self._states.restore(slot - self._first, state)
            except BaseException as error:
                raise EnvFailure(slot, "restore") from error
            finally:
                self._running[0] = 0
                self._received.clear()
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
            for leaf in self._slice.spec.timestep_leaves
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
            states = [self._table.states[source] for source in sources]
            after = self._simulator.step(states, actions, rows, places)
            self._table.add(numbers.tolist(), after)

    def export_states(self, numbers: Sequence[int]) -> list[bytes] | LostStates:
        """Returns states as bytes. The first export of each kind of env verifies that copies are exact.

        Raises:
            EnvFailure: A state can't be pickled, or an env does not continue from a copy as it did before.
        """
        missing = self._table.missing(numbers)
        if missing:
            return LostStates(missing)
        packed: list[bytes] = []
        for number in numbers:
            state = self._table.states[number]
            with EnvErrorContext(state.slot, "export"):
                packed.append(pack(state))
                index = state.slot - self._first
                if index in self._unproved_copies:
                    self._prove(index, self._unproved_copies, state.env)
        return packed

    def import_states(
        self, slots: Sequence[int], numbers: Sequence[int], packed: Sequence[bytes], oldest: int
    ) -> None:
        """Adds states that `export_states` returned, as states of `slots`.

        Raises:
            EnvFailure: A state can't be unpickled, or does not fit the env of its slot.
        """
        with self._table.evicting(oldest):
            self._table.add(numbers, self._receive(slots, packed, "import"))

    def receive_states(self, slots: Sequence[int], packed: Sequence[bytes]) -> None:
        """Prepares for `restore` from these bytes, and leaves the envs unchanged.

        Raises:
            EnvFailure: As for `import_states`.
        """
        self._received = dict(zip(packed, self._receive(slots, packed, "restore"), strict=True))

    def _receive(self, slots: Sequence[int], packed: Sequence[bytes], operation: str) -> list[SlotState]:
        states: list[SlotState] = []
        for slot, data in zip(slots, packed, strict=True):
            with EnvErrorContext(slot, operation):
                state = unpack(data)._replace(slot=slot)
                self._states.stateful[slot - self._first].check_fit(state.env)
            states.append(state)
        return states

    def _prove(self, index: int, unproved: set[int], copied: EnvSnapshot | None = None) -> None:
        """Proves that envs of this one's kind continue exactly, and removes them from `unproved`.

        With a state `copied`, they do so from pickled copies, else from restored states. The proof is made in
        a forked child if possible, so that nothing that the env can reach changes. A child lacks the threads
        of the program and of JAX.
        """
        stateful = self._states.stateful[index]
        fresh = not self._slots.was_reset(index) or self._slice.episodes.is_over(index)
        stateful.save()  # first: an error here needs no child
        infos = self._slice.rows.infos
        infos[index] = deepcopy(infos[index])  # the env may reuse the dict that it returned
        proof = partial(prove, stateful, fresh=fresh, copied=copied)
        with self._slots.unlent(index):
            if self._slice.in_program or jax_has_threads() or not hasattr(os, "fork"):
                proof()
            else:
                try:
                    seconds = patience(self._slice.stats)
                    call_in_fork(lambda progress: proof(progress=progress), stateful.env, seconds)
                except ForkedProcessEnded as error:
                    text = f"the states of env {self._first + index} are used without a proof: {error}"
                    warnings.warn(text, stacklevel=1)
        kinds = self._simulator.kinds
        unproved.difference_update([other for other in unproved if kinds[other] == kinds[index]])
