"""Steps the envs of one worker and writes their results into the shared-memory segment.

One step of a slice:

    actions         read from the segment (`EnvRows`)
    env.step        called by the compiled loop, `Stepper.run`, or by `EnvSlice._step_one`
    reward, flags   counted and written by `Episodes`
    end of episode  handled as the autoreset mode requires (`SlotEnvs.autoreset`)
    obs, info       written into the env's row (`EnvRows`)

A worker process has one `EnvSlice` for its part of the pool. The serial backend has one for the whole pool. A
"slot" is the index of an env in the pool; an "index" is its position in the slice, `slot - first`.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec import _native, _stats
from jaxvec._arguments import NO_SEED
from jaxvec._envs.env_rows import EnvRows
from jaxvec._envs.env_states import (
    EnvState,
    ForkedProcessEnded,
    LostStates,
    SavedStates,
    SlotState,
    StatefulEnv,
    call_in_fork,
    pack,
    unpack,
)
from jaxvec._envs.envs import (
    AttributeErrorContext,
    Env,
    EnvErrorContext,
    EnvFailure,
    EnvFn,
    check_dict,
    conform_reward,
    end_forks,
    find_attr,
    forked,
    put_attr,
    wrong_step,
)
from jaxvec._envs.episodes import ENDED, IDLE, LOST, MARKED, UNRESET, CommittedRows, Episodes
from jaxvec._envs.flight import FlightRecorder
from jaxvec._envs.simulator import Simulator
from jaxvec._envs.slice import Done, ExportedSlots, ImportedSlots, Slice, SlotSettings
from jaxvec._envs.slot_envs import SlotEnvs, Spares
from jaxvec._errors import EnvStateError
from jaxvec._memory.rows import store
from jaxvec._memory.segment import Arrays, Index, Marks, index_of
from jaxvec._options import PoolConfig
from jaxvec._snapshots.pickling import dumps
from jaxvec._spec import KeyPath, PoolSpec, padded_nodes
from jaxvec._tracing import Recorder, span

_EMPTY: dict[Any, Any] = {}  # shared by states, which never change


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _copied(value: Any) -> Any:
    """Copies the dicts and arrays of an info."""
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


class EnvSlice(Slice):
    """Neighbouring envs of a pool that are stepped one after the other.

    It coordinates a step. `SlotEnvs` resets and replaces the envs, `Episodes` keeps their counters and flags,
    `EnvRows` reads and writes their rows, and `SavedStates` keeps their states.
    """

    def __init__(
        self,
        envs: list[Env],
        env_fns: Sequence[EnvFn],
        *,
        first: int,
        worker: int,
        spec: PoolSpec,
        arrays: Arrays,
        config: PoolConfig,
        spares: Spares | None = None,
        lends: bool = True,
        replaces: Mapping[KeyPath, NDArray[Any]] | None = None,
        moved: bool = False,
    ) -> None:
        """Creates the slice of the slots from `first`, with one env for each, which `env_fns` built.

        `spares` take turns with `envs`. With `lends`, envs may write observations directly into their rows.
        `replaces` is for a slice that replaces one of a dead process: the leaves of Python objects that the
        program received last, `[n, ...]` each. With `moved`, `import_slots` follows.
        """
        left = replaces is not None
        # The cut is meaningless for the arrays with one row per worker, which are not read through `rows`.
        rows = {path: array[first : first + len(envs)] for path, array in arrays.items()}
        if not left:
            rows["last_seed",][:] = NO_SEED
        self.first = first
        # The current slot plus 1; 0 while idle. The parent reads it to name the env of a crash or timeout.
        running = Marks.of(arrays).running[worker]
        self._running = memoryview(running)
        self._running[0] = 0
        self._stats = memoryview(arrays["stats",][worker])
        # The compiled loop writes rewards of these types only, and does not check spaces.
        writes = rows["reward",].dtype.char in "fd"
        compiled = _native.ext if writes and not config.strict else None
        self._episodes = Episodes(rows, spec.autoreset, lost=left)
        self._rows = EnvRows(spec, rows, left=left, strict=config.strict)
        self._delivered = CommittedRows(spec, rows) if spec.has_fault else None
        self._flight = None
        if (directory := config.record_faults) is not None:
            self._flight = FlightRecorder(
                env_fns, first=first, spec=spec, arrays=arrays, directory=str(directory)
            )
        self._slots = SlotEnvs(
            envs,
            env_fns,
            Spares() if spares is None else spares,
            first=first,
            spec=spec,
            rows=rows,
            stats=self._stats,
            config=config,
            bypass=config.settings.wrapper_bypass and compiled is not None,
            rebuilt=left and not moved,
            lends=lends,
            flight=self._flight,
        )
        self._step_slots = self._step_until_wrong if any(padded_nodes(spec.action)) else self._step_each
        self._reward_shape, self._strict = spec.reward.shape, config.strict
        self._run = self._step_one
        if compiled is not None:
            marks = *self._episodes.end_marks, *self._rows.final.columns
            self._run = compiled.stepper(
                states=self._episodes.state,
                infos=self._rows.infos,
                # C++ can't clear columns of objects; with `None`, every marked row is left to Python.
                marks=None if any(column.dtype.hasobject for column in marks) else marks,
                returns=self._episodes.returns,
                lengths=self._episodes.lengths,
                row_reward=rows["reward",],
                row_return=rows["info", "episode_return"],
                row_length=rows["info", "episode_length"],
                running=running,
                forked=forked,
                write_obs=self._rows.write_obs,
                write_info=self._rows.write_info,
                first=first,
                marked=MARKED,
            ).run
        # The slots of the last step, as bytes, a list and an index. Most steps have the same slots again.
        self._last_slots = b""
        self._indices: list[int] = []
        self._index: Index = slice(0, 0, 1)
        self._final_infos: dict[int, dict[str, Any]] = {}  # of envs that are UNRESET
        self._states = SavedStates(self._stats)
        self._received: dict[bytes, SlotState] = {}  # compared with their originals, to be restored next
        # The parent writes the numbers before it dispatches a save or restore; 0 marks one that is done.
        self._state_numbers, self._oldest_state = rows["state",], arrays["oldest_state",]
        self._spec, self._arrays = spec, arrays
        # The serial backend runs in the program, and a fork of that would lack its threads.
        self._verifies_in_fork = config.backend != "serial" and hasattr(os, "fork")
        self._unverified = set(range(len(envs)))  # envs without a verified restore
        self._simulator = Simulator(
            env_fns,
            first=first,
            running=self._running,
            spec=spec,
            stepper_of=lambda envs, env_fn, arrays: (
                EnvSlice(
                    envs,
                    [env_fn] * len(envs),
                    first=0,
                    worker=0,
                    spec=spec,
                    arrays=arrays,
                    config=replace(config, record_faults=None),
                    lends=False,
                ).step_from
            ),
            others=lambda: self._slots.named,
        )
        if replaces is None:
            rows["info", "env_id"][:] = range(first, first + len(envs))
        elif self._delivered is not None:
            self._delivered.take_over(replaces)

    # --- Steps and resets -------------------------------------------------------------------------

    def reset(self, slots: NDArray[Any], done: Done | None = None) -> None:
        for place, slot in enumerate(slots.tolist()):
            index = slot - self.first
            self._running[0] = slot + 1
            try:
                options = None if self._options is None else self._options[index]
                self._rows.write_obs(index, self._start(index, *self._slots.reset(index, options)))
                if done is not None:
                    done(slot, 1)
            except BaseException as error:
                failure = EnvFailure(slot, "reset")
                failure.completed = slots[:place].tolist()
                failure.__cause__ = error
                if self._flight is not None:
                    self._flight.record_failure(failure)
                raise failure from error
        if self._flight is not None:
            self._flight.check()
        self._running[0] = 0

    def step(self, slots: NDArray[Any], done: Done | None = None) -> None:
        self._step(slots, None if done is None else partial(self._report, done))

    def _step(self, slots: NDArray[Any], after: Callable[[int], None] | None) -> None:
        """Steps the envs of `slots` in turn, and calls `after` when the row of one is written."""
        self._counted = 0, monotonic_ns(), self._stats[_stats.RESET_NS]
        if (requested := slots.tobytes()) != self._last_slots:
            self._last_slots, array = requested, slots - self.first
            self._indices, self._index = array.tolist(), index_of(array)
        indices = self._indices
        if self._delivered is not None:
            self._delivered.keep(slots - self.first)
        actions = self._rows.actions(indices, self._index)
        if self._flight is not None:
            self._flight.step(self._index)
        self._running[0] = self.first + indices[0] + 1
        try:
            self._step_slots(indices, actions, after)
        except BaseException as error:
            if forked:  # the worker may be at another env by now
                end_forks(" or ".join(map(str, slots)), "step")
            slot = self._running[0] - 1
            place = indices.index(slot - self.first)
            self._count_steps(place)
            if isinstance(error, EnvFailure):  # a reset has failed, so no step is lost
                failure = error
            else:
                self._episodes.lose(slot - self.first)
                failure = EnvFailure(slot, "step", actions[place])
                failure.__cause__ = error
            failure.completed = slots[:place].tolist()
            if self._flight is not None:
                self._flight.record_failure(failure, unstepped=indices[place + 1 :])
            raise failure from failure.__cause__
        if self._flight is not None:
            self._flight.check()
        self._count_steps(len(indices))
        self._running[0] = 0

    def recover(self, failure: EnvFailure, *, rebuild: bool, settings: SlotSettings | None = None) -> None:
        if rebuild:
            self._running[0] = failure.env_id + 1
            self._slots.rebuild(failure.env_id - self.first)
            if settings is not None:
                self.reapply_settings(failure.env_id, settings)
            self._running[0] = 0

    def reapply_settings(self, slot: int, settings: SlotSettings) -> None:
        index = slot - self.first
        for name, value in settings.attributes.items():
            self.set_attr([slot], [value], name)
        self._slots.keep_options(index, self._copied(settings.options))
        if not settings.keeps_options:
            self._slots.withhold_options(index)

    @property
    def can_prepare(self) -> bool:
        return self._slots.spares.unready is not None

    def prepare(self) -> None:
        with span(self.recorder, "reset a spare env"):
            self._slots.prepare()

    def close(self) -> None:
        self._simulator.close()

    def _step_each(self, indices: list[int], actions: list[Any], after: Callable[[int], None] | None) -> None:
        """Steps envs in turn. If it raises, `_running` names the env.

        This is the hot loop: its overhead over `env.step` is the cost of jaxvec per step. The compiled loop
        makes ordinary steps. Python handles all others, and can handle every step.
        """
        run, state, targets = self._run, self._episodes.state, self._slots.targets
        targets.update()
        place = 0
        while True:
            place, result = run(place, targets.envs, targets.limits, indices, actions, self._end_step, after)
            if place == len(indices):
                return
            index = indices[place]
            place += 1
            obs = self._skip_step(index) if state[index] > MARKED else self._finish_step(index, result)
            self._rows.write_obs(index, obs)
            if after is not None:
                after(index)

    def _step_until_wrong(
        self, indices: list[int], actions: list[Any], after: Callable[[int], None] | None
    ) -> None:
        """Steps the envs before the first invalid action, and raises its error."""
        wrong, state = self._rows.take_wrong_actions(), self._episodes.state
        needed = (place for place, index in enumerate(indices) if index in wrong and state[index] <= MARKED)
        place = next(needed, len(indices))
        if place:
            self._step_each(indices[:place], actions[:place], after)
        if place < len(indices):
            self._running[0] = self.first + indices[place] + 1
            raise wrong[indices[place]]

    def _report(self, done: Done, index: int) -> None:
        # Count first: the parent may read the statistics as soon as `done` marks the slot as completed.
        self._count_steps(self._counted[0] + 1)
        done(self.first + index, 1)

    def _step_one(
        self, place: int, envs: list[Any], limits: Any, indices: list[int], actions: list[Any], *_: Any
    ) -> tuple[int, Any]:
        """Replaces `Stepper.run` of C++: steps one env, and leaves its result to the caller."""
        if place == len(indices):
            return place, None
        index = indices[place]
        self._running[0] = self.first + 1 + index
        return place, None if self._episodes.state[index] > MARKED else envs[index].step(actions[place])

    def _finish_step(self, index: int, result: Any) -> Any:
        """Checks the result of `env.step`, writes all of it but the observation, and returns that."""
        if forked:
            end_forks(self.first + index, "step")
        try:
            obs, reward, terminated, truncated, info = result
        except (TypeError, ValueError) as error:
            raise wrong_step(result) from error
        if type(info) is not dict:
            check_dict("step", info)
        if self._strict:
            self._slots.check_obs(index, obs)
        if self._reward_shape:
            with np.errstate(over="ignore", invalid="ignore"):  # see `rows.store`
                reward = conform_reward(reward, self._reward_shape)
                marked = self._episodes.take(index, reward)
        else:
            # NumPy's float64 is a float, but sums of it warn, too.
            reward = float(reward) if isinstance(reward, float) else conform_reward(reward, ())
            marked = self._episodes.take(index, reward)
        if self._strict:
            self._check_reward(index, reward)
        if terminated or truncated or marked:
            obs, info = self._end_step(index, obs, bool(terminated), bool(truncated), info)
        if info or self._rows.infos[index]:  # else the row is empty already
            self._rows.write_info(index, info)
        return obs

    def _check_reward(self, index: int, reward: Any) -> None:
        """Raises `InvalidValue` if a step's reward, or the return so far, is too large for its row."""
        written = (
            (self._spec.reward, reward),
            (self._spec.info.child("episode_return"), self._episodes.returns[index]),
        )
        for leaf, value in written:
            store(leaf, np.empty(leaf.shape, leaf.stored), np.asarray(value), strict=True)

    def _skip_step(self, index: int) -> Any:
        """Makes the row of an env that is not stepped, and returns its observation.

        The env is idle, has to be reset, or a fault has interrupted its step. In the last case, the row ends
        the episode. It repeats the last delivered observation with a reward of zero, because the current row
        may be half-written.
        """
        state, delivered = self._episodes.state, self._delivered
        if state[index] == UNRESET:
            obs, info = self._reset_in_step(index)
            self._rows.write_info(index, info)
            return obs
        if state[index] == LOST:
            assert delivered is not None
            if self._episodes.cut(index, delivered.episode(index), over=delivered.over(index)):
                self._stats[_stats.FAULTS] += 1
                self._stats[_stats.EPISODES] += 1
                # As below; but here, so that a reset that fails and is tried again is counted once.
                self._stats[_stats.STEPS] -= 1
                obs, info = self._close_row(index, delivered.obs(index), {})
                self._rows.write_info(index, info)
                return obs
        if state[index] == ENDED:
            with EnvErrorContext(self.first + index, "reset"):
                obs = self._start(index, *self._slots.autoreset(index))
        else:
            assert state[index] == IDLE
            self._episodes.idle(index)
            obs = self._rows.obs(index)
        self._stats[_stats.STEPS] -= 1  # the caller counts every slot, but this env took no step
        return obs

    def _end_step(
        self, index: int, obs: Any, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Writes the flags of a step, and returns observation and info for the row. C++ calls it, too."""
        if self._episodes.mark(index, terminated, truncated):
            self._stats[_stats.EPISODES] += 1
        return self._close_row(index, obs, info)

    def _close_row(self, index: int, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns observation and info for a row: after same-step autoreset, those of the new episode."""
        if self._episodes.state[index] != UNRESET:
            self._rows.final.clear(index)
            return obs, info
        if self._flight is not None:
            self._flight.check_end(index, obs)
        # Write before the reset: an env may reuse its observation's and its info's memory.
        self._final_infos[index] = {key: _copied(value) for key, value in info.items()}
        self._rows.final.write(index, obs, self._final_infos[index])
        return self._reset_in_step(index)

    def _reset_in_step(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Resets an env in the step that ended its episode. If that fails, the env stays UNRESET."""
        try:
            obs, info = self._slots.autoreset(index)
        except BaseException as error:
            raise EnvFailure(self.first + index, "reset") from error
        self._episodes.reset_in_step(index)
        return obs, {**info, "final_info": self._final_infos.pop(index)}

    def _start(self, index: int, obs: Any, info: dict[str, Any]) -> Any:
        """Writes the row of a reset, except the observation, which it returns."""
        self._rows.write_info(index, info)
        self._rows.final.clear(index)
        self._episodes.begin(index)  # last: if a write fails, the env still has to be reset
        return obs

    def _count_steps(self, place: int) -> None:
        """Counts the steps before `place`, and the time since the last count without the time of resets."""
        counted, started, in_resets = self._counted
        now, resets = monotonic_ns(), self._stats[_stats.RESET_NS]
        self._counted = place, now, resets
        self._stats[_stats.STEPS] += place - counted
        self._stats[_stats.STEP_NS] += now - started - (resets - in_resets)

    # --- Requests over the control socket ---------------------------------------------------------

    def _record_calls(self, recorder: Recorder | None) -> None:
        self._slots.record(recorder)

    def infos_of(self, slots: Iterable[int]) -> list[dict[str, Any]]:
        return [self._rows.infos[slot - self.first] for slot in slots]

    def give_actions(self, slots: Iterable[int], actions: Sequence[Any]) -> None:
        self._rows.given = {slot - self.first: action for slot, action in zip(slots, actions, strict=True)}

    def put_objects(self, slots: NDArray[Any], columns: Mapping[KeyPath, NDArray[Any]]) -> None:
        for path, column in columns.items():
            self._rows.objects[path][slots - self.first] = column

    def get_objects(self, slots: NDArray[Any], paths: Iterable[KeyPath]) -> dict[KeyPath, NDArray[Any]]:
        return {path: self._rows.objects[path][slots - self.first] for path in paths}

    def call(self, slots: Iterable[int], args: Sequence[Any], name: str, kwargs: Any) -> list[Any]:
        results: list[Any] = []
        for slot, env, (arguments, keywords) in self._accessed(slots, [(each, kwargs) for each in args]):
            with AttributeErrorContext(slot, name):
                attribute = find_attr(env, name)
            with EnvErrorContext(slot, name):
                results.append(attribute(*arguments, **keywords) if callable(attribute) else attribute)
        return results

    def get_attr(self, slots: Iterable[int], args: Sequence[Any], name: str) -> list[Any]:
        values: list[Any] = []
        for slot, env, _ in self._accessed(slots, args):
            with AttributeErrorContext(slot, name):
                values.append(find_attr(env, name))
        return values

    def map(self, slots: Iterable[int], args: Sequence[Any], function: Callable[..., Any]) -> list[Any]:
        results: list[Any] = []
        for slot, env, arguments in self._accessed(slots, args):
            with EnvErrorContext(slot, "map"):
                results.append(function(env, *arguments))
        return results

    def set_attr(self, slots: Iterable[int], values: Sequence[Any], name: str) -> None:
        for slot, env, value in self._accessed(slots, values):
            with AttributeErrorContext(slot, f"set_attr({name!r})"):
                put_attr(env, name, value)

    def _accessed(self, slots: Iterable[int], args: Sequence[Any]) -> Iterator[tuple[int, Env, Any]]:
        """Yields each slot with its env and a copy of its arguments. User code may then change the env."""
        for slot, arguments in zip(slots, args, strict=True):
            self._slots.changed(slot - self.first)  # before the access, which may fail half-way
            with EnvErrorContext(slot, "the copy of its arguments"):
                own = self._copied(arguments)
            yield slot, self._slots.envs[slot - self.first], own

    # --- The replacement of the process -----------------------------------------------------------

    def can_export(self) -> bool:
        """Returns whether `export_slots` can be called: no env has to recover from a fault."""
        return not any(each > IDLE for each in self._episodes.state)

    def export_slots(self) -> ExportedSlots:
        """Returns a message for the next process, which cuts episodes that it can't continue exactly."""
        try:
            for index in range(len(self._slots.envs)):
                if index in self._unverified:
                    self._verify(self.first + index)
            return ExportedSlots(self._pack_slots())
        except Exception as error:  # also one of a user's own functions
            return ExportedSlots(None, _first_line(error))

    def import_slots(self, data: bytes) -> ImportedSlots:
        """Continues the slots of an old process, and reports which could not be continued.

        The envs of these are built anew. Their rows will show that their episodes were cut, as after a fault.
        """
        slots, kept, self._unverified, self._rows.given = pickle.loads(data)
        cut: dict[int, str] = {}
        for index, packed in enumerate(slots):
            try:
                self._restore_slot(index, unpack(packed), moved=True)
            except (Exception, SystemExit) as error:
                cut[self.first + index] = _first_line(error)
                self._slots.rebuild(index)
                self._episodes.lose(index)
        try:
            states: dict[int, SlotState] = pickle.loads(kept)
            self._compare(list(states.values()))
        except Exception:
            return ImportedSlots(cut, keeps_states=False)
        self._states.add(list(states), list(states.values()))
        return ImportedSlots(cut, keeps_states=True)

    def _pack_slots(self) -> bytes:
        """Pickles all that the new process needs."""
        slots: list[bytes] = []
        for index, stateful in enumerate(self._slots.stateful):
            self._slots.set_buffer(index, lend=False)
            state = self._save_slot(index, self.first + index)
            state.env.original = stateful.digest()
            slots += pack([state])
        try:
            states = self._states.by_number
            kept = dumps(dict(zip(states, self._with_originals(list(states.values())), strict=True)))
        except Exception:
            kept = b""  # they are lost
        return dumps((slots, kept, self._unverified, self._rows.given))

    # --- Saved states -----------------------------------------------------------------------------

    def try_save(self, slots: NDArray[Any]) -> None:
        indices = slots - self.first
        listed = indices.tolist()
        if not self._unverified.isdisjoint(listed):
            return
        # After an error, the numbers remain, and the parent's request `save_states` raises it again.
        with self._states.evicting(int(self._oldest_state[0])), suppress(BaseException):
            states: list[SlotState] = []
            for slot in slots.tolist():
                self._running[0] = slot + 1
                states.append(self._save_slot(slot - self.first, slot))
            self._states.add(self._state_numbers[indices].tolist(), states)
            self._state_numbers[indices] = 0
        self._running[0] = 0

    def try_restore(self, slots: NDArray[Any]) -> None:
        indices = slots - self.first
        numbers = self._state_numbers[indices].tolist()
        with self._states.evicting(int(self._oldest_state[0])), suppress(BaseException):  # as in `try_save`
            if self._states.missing(numbers):
                return
            for slot, number in zip(slots.tolist(), numbers, strict=True):
                self._running[0] = slot + 1
                self._restore_slot(slot - self.first, self._states[number])
            self._state_numbers[indices] = 0
        self._running[0] = 0

    def save_states(self, slots: Sequence[int], numbers: Sequence[int], oldest: int) -> None:
        """Saves the states of envs under these numbers, and evicts those with numbers below `oldest`.

        The first save of each kind of env verifies that its envs can be restored exactly.

        Raises:
            EnvFailure: A state can't be saved, or a restored env does not reproduce it.
        """
        states: list[SlotState] = []
        slot = slots[0]
        with self._states.evicting(oldest):
            try:
                for slot in slots:
                    index = slot - self.first
                    if index in self._unverified:
                        self._verify(slot)
                    states.append(self._save_slot(index, slot))
            except BaseException as error:
                raise EnvFailure(slot, "save") from error
            self._states.add(numbers, states)

    def restore_states(
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
        with self._states.evicting(oldest):
            missing = self._states.missing(source for source in sources if isinstance(source, int))
            if missing:
                return LostStates(missing)
            slot = slots[0]
            try:
                for slot, source in zip(slots, sources, strict=True):
                    if isinstance(source, int):
                        state = self._states[source]
                    else:
                        state = self._received.get(source) or unpack(source)
                    self._restore_slot(slot - self.first, state)
            except BaseException as error:
                raise EnvFailure(slot, "restore") from error
            finally:
                self._received.clear()
            if rows is not None:
                self._rows.put(np.array(slots) - self.first, rows)
            return None

    def try_simulate(self, slots: NDArray[Any]) -> None:
        (index,) = (slots - self.first).tolist()
        arrays = self._arrays
        part = slice(arrays["first_simulated",][slots[0]], self._state_numbers[index])
        before, after = (arrays[name,][part] for name in ("simulated_before", "simulated_after"))
        actions = [arrays[("simulated", *leaf.path)][part] for leaf in self._spec.action_leaves]
        rows = [arrays[("saved", *leaf.path)] for leaf in self._spec.timestep_leaves]
        with suppress(BaseException):  # as in `try_save`
            self._simulate(
                before.tolist(), after, actions, int(self._oldest_state[0]), rows, after % len(rows[0])
            )
            self._state_numbers[index] = 0

    def simulate_states(
        self, sources: Sequence[int], numbers: Sequence[int], actions: Sequence[NDArray[Any]], oldest: int
    ) -> list[NDArray[Any]] | LostStates:
        """Steps copies of envs from `k` states, and saves the next states under `numbers`.

        `actions` and the result are the leaves of actions and time step, `[k, ...]` each. The caller fills in
        `env_id`. The states to step from may have numbers below `oldest`.

        Raises:
            EnvFailure: An env raised. It names the slot that the first state of its line was saved from.
        """
        missing = self._states.missing(sources)
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
        with self._states.evicting(oldest):
            before, states = self._simulator.steps, [self._states[source] for source in sources]
            try:
                after = self._simulator.step(states, actions, rows, places)
            finally:
                self._stats[_stats.SIMULATED] += self._simulator.steps - before
            self._states.add(numbers.tolist(), after)

    def export_states(self, numbers: Sequence[int]) -> list[bytes] | LostStates:
        """Returns states as bytes; raises `EnvFailure` if one can't be pickled."""
        missing = self._states.missing(numbers)
        if missing:
            return LostStates(missing)
        states = [self._states[number] for number in numbers]
        with EnvErrorContext(states[0].slot if states else self.first, "export"):
            return pack(self._with_originals(states))

    def import_states(
        self, slots: Sequence[int], numbers: Sequence[int], packed: Sequence[bytes], oldest: int
    ) -> None:
        """Adds states that `export_states` returned, as states of `slots`.

        Raises:
            EnvFailure: A state can't be unpickled, does not fit the env of its slot, or would not be exact.
        """
        with self._states.evicting(oldest):
            self._states.add(numbers, self._receive(slots, packed, "import"))

    def compare_states(self, slots: Sequence[int], packed: Sequence[bytes]) -> None:
        """Prepares for `restore_states` from these bytes, and leaves the envs unchanged.

        Raises:
            EnvFailure: As for `import_states`.
        """
        self._received = dict(zip(packed, self._receive(slots, packed, "restore"), strict=True))

    def _receive(self, slots: Sequence[int], packed: Sequence[bytes], operation: str) -> list[SlotState]:
        states: list[SlotState] = []
        for slot, one in zip(slots, packed, strict=True):
            with EnvErrorContext(slot, operation):
                states.append(unpack(one)._replace(slot=slot))
                self._slots.check_fit(slot - self.first, states[-1].env)
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

    def _visit(self, states: Sequence[SlotState], visit: Callable[[StatefulEnv, EnvState], Any]) -> list[Any]:
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
                states[places[0]].slot - self.first, lambda env, envs=envs: [visit(env, one) for one in envs]
            )
            for place, result in zip(places, found, strict=True):
                results[place] = result
        return results

    def _call_with_another(self, index: int, function: Callable[[StatefulEnv], Any]) -> Any:
        """Calls a function with an env of this one's kind: in a worker, with itself in a forked child."""
        if not self._verifies_in_fork:
            with self._slots.another(index) as another:
                return function(another)
        stateful = self._slots.stateful[index]

        def call() -> Any:
            if not self._slots.was_reset(index):
                stateful.env.reset(seed=0)
            return function(stateful)

        with self._slots.unlent(index):
            return call_in_fork(call, stateful.env)

    def step_from(self, states: Sequence[SlotState], after: list[SlotState], running: memoryview) -> None:
        """Steps the envs of the first rows from `states`, and appends each next state to `after`.

        All rows share one env, so each state is restored when the step before it is saved. `running` gets the
        slot of each state in turn.
        """
        for index, state in enumerate(states):
            self._episodes.restore(index, state.episode)
            self._episodes.clear_marks(index)  # the row may contain flags of another state
        save, restore, last = self._save_slot, self._restore_env, len(states) - 1

        def save_and_restore_next(index: int) -> None:
            after.append(save(index, states[index].slot))
            if index < last:
                self._running[0] = index + 2  # an error of the restore is one of the next env
                running[0] = states[index + 1].slot + 1
                restore(index + 1, states[index + 1])

        running[0] = states[0].slot + 1
        restore(0, states[0])
        self._step(np.arange(len(states)), save_and_restore_next)

    def _save_slot(self, index: int, slot: int) -> SlotState:
        """Returns the state of the env at `index`, labelled with `slot`."""
        if self._episodes.state[index] > IDLE:
            raise EnvStateError("after this fault, the env has no state to save until it is stepped or reset")
        info, objects = self._rows.infos[index], self._rows.objects
        return SlotState(
            slot,
            self._slots.stateful[index].save(),
            self._episodes.save(index),
            self._slots.save(index),
            deepcopy(info) if info else _EMPTY,
            self._rows.final.is_written(index),
            {path: column[index] for path, column in objects.items()} if objects else _EMPTY,
        )

    def _restore_slot(self, index: int, state: SlotState, *, moved: bool = False) -> None:
        """Restores a state except its row of the segment, which the caller or the parent writes.

        If it was `moved` from an old process, the program may have given newer reset options.
        """
        self._restore_env(index, state, fault=moved)
        self._episodes.restore(index, state.episode)
        self._rows.take_info(index, deepcopy(state.info) if state.info else {})
        self._rows.final.note_written(index, is_written=state.is_final)
        for path, value in state.objects.items():
            self._rows.objects[path][index] = value
        self._final_infos.pop(index, None)

    def _restore_env(self, index: int, state: SlotState, *, fault: bool = False) -> None:
        if self._flight is not None:
            self._flight.forget(index)
        self._slots.restore(index, state.env, state.resets, fault=fault)

    def _verify(self, slot: int) -> None:
        """Verifies that envs of this one's kind continue exactly from restored states, once per kind."""
        kind, index = self._simulator.kind, slot - self.first
        fresh = not self._slots.was_reset(index) or self._episodes.is_over(index)
        stateful = self._slots.stateful[index]
        stateful.save()  # first: an error here needs no child
        try:
            self._call_apart(index, partial(stateful.verify, fresh=fresh))
        except ForkedProcessEnded as error:
            warnings.warn(f"the states of env {slot} are used without a proof: {error}", stacklevel=1)
        self._unverified = {each for each in self._unverified if kind(self.first + each) != kind(slot)}

    def _call_apart(self, index: int, verify: Callable[[], None]) -> None:
        """Calls a function that steps an env, in a forked child of a worker."""
        infos = self._rows.infos
        infos[index] = deepcopy(infos[index])  # the env may reuse the dict that it returned
        with self._slots.unlent(index):
            if self._verifies_in_fork:
                call_in_fork(verify, self._slots.envs[index])
            else:
                verify()
