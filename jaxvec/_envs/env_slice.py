"""Steps a slice of a pool's envs, in turn, into rows of the segment.

This is the one stepping code path: a worker process runs it on its slice, the serial backend on the
whole pool. A slot is its env's index in the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec import _native, _stats
from jaxvec._arguments import Options
from jaxvec._config import PoolConfig
from jaxvec._envs.env_rows import EnvRows
from jaxvec._envs.env_states import Gone, SlotState, States, pack, unpack
from jaxvec._envs.envs import (
    Env,
    EnvFailure,
    EnvFn,
    Failing,
    FailingAttribute,
    check_dict,
    conform_reward,
    end_forks,
    find_attr,
    forked,
    put_attr,
    wrong_step,
)
from jaxvec._envs.episodes import ENDED, IDLE, LOST, MARKED, UNRESET, CommittedRows, Episodes, Saved
from jaxvec._envs.simulator import Simulator
from jaxvec._envs.slice import Done, Slice, SlotSettings
from jaxvec._envs.slot_envs import SlotEnvs, Spares
from jaxvec._errors import EnvStateError
from jaxvec._memory.segment import Arrays, Index, Marks, index_of
from jaxvec._spec import KeyPath, PoolSpec
from jaxvec._tracing import Record, Recorder, span


class EnvSlice(Slice):
    """The envs `first`, `first + 1`, … of a pool. Inside, an env goes by its index in the slice."""

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
    ) -> None:
        """Makes the slice of envs.

        Args:
            envs: each built by one of `env_fns`.
            env_fns: to build them again.
            first: id of the first env.
            worker: whose row of statistics is ours.
            spec, arrays: of the pool.
            config: options of the pool.
            spares: more envs, to take turns with these.
            lends: whether envs that can may write to the rows themselves.
            replaces: if we take the place of a slice whose process is gone, and which left its rows: the
                leaves of Python objects that the program had from it last.
        """
        left = replaces is not None
        # Of the envs; what there is of workers is cut, too, and not read here.
        rows = {path: array[first : first + len(envs)] for path, array in arrays.items()}
        self.first = first
        self.recorder: Recorder | None = None
        self._record: Record | None = None  # of the last trace
        running = Marks.of(arrays).running[worker]
        self._running = memoryview(running)
        self._running[0] = 0
        self._stats = memoryview(arrays["stats",][worker])
        # The compiled loop knows numbers for rewards, and no spaces.
        compiled = None if config.strict or spec.reward.shape else _native.ext
        self._episodes = Episodes(rows, spec.autoreset, lost=left)
        self._rows = EnvRows(spec, rows, left=left)
        self._delivered = CommittedRows(spec, rows) if spec.has_fault else None
        self._slots = SlotEnvs(
            envs,
            env_fns,
            Spares() if spares is None else spares,
            first=first,
            obs=spec.obs,
            rows=rows,
            stats=self._stats,
            config=config,
            bypass=config.settings.wrapper_bypass and compiled is not None,
            rebuilt=left,
            lends=lends,
        )
        self._reward_shape = spec.reward.shape
        self._run = self._step_one
        if compiled is not None:
            marks = *self._episodes.end_marks, *self._rows.final.columns
            self._run = compiled.stepper(
                states=self._episodes.state,
                infos=self._rows.infos,
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
        self._asked = b""  # the slots of the last step; mostly the next one is of the same
        self._indices: list[int] = []  # theirs
        self._index: Index = slice(0, 0, 1)  # the same, for an array
        self._options: Options = None  # of resets from outside
        self._final_infos: dict[int, dict[str, Any]] = {}  # of those that are UNRESET
        self._resumed: dict[int, SlotState] = {}  # of those that are LOST, or were, and go on from a state
        self._states = States(self._stats)
        self._asked_states, self._oldest = rows["state",], arrays["oldest_state",]  # by the segment
        self._unproved = set(range(len(envs)))  # who may not go on exactly from their states
        self._simulator = Simulator(
            env_fns,
            first=first,
            spec=spec,
            stepper_of=lambda envs, env_fn, arrays: (
                EnvSlice(
                    envs,
                    [env_fn] * len(envs),
                    first=0,
                    worker=0,
                    spec=spec,
                    arrays=arrays,
                    config=replace(config, settings=replace(config.settings, wrapper_bypass=False)),
                    lends=False,
                ).step_from
            ),
        )
        if replaces is None:
            rows["info", "env_id"][:] = range(first, first + len(envs))
        else:
            assert self._delivered is not None
            self._delivered.take_over(replaces)

    def reset(self, slots: NDArray[Any], done: Done | None = None) -> None:
        for place, slot in enumerate(slots.tolist()):
            index = slot - self.first
            self._running[0] = slot + 1
            try:
                self._resumed.pop(index, None)
                options = None if self._options is None else self._options[index]
                self._rows.write_obs(index, self._begin(index, *self._slots.reset(index, options)))
                if done is not None:
                    done(slot, 1)
            except BaseException as error:
                failure = EnvFailure(slot, "reset")
                failure.completed = slots[:place].tolist()
                raise failure from error
        self._running[0] = 0

    def step(self, slots: NDArray[Any], done: Done | None = None) -> None:
        self._counted = monotonic_ns(), self._stats[_stats.RESET_NS]
        asked = slots.tobytes()
        if asked != self._asked:
            self._asked, array = asked, slots - self.first
            self._indices, self._index = array.tolist(), index_of(array)
        indices = self._indices
        if self._delivered is not None:
            self._delivered.keep(slots - self.first)
        actions = self._rows.actions(indices, self._index)
        self._running[0] = self.first + indices[0] + 1
        try:
            self._step_each(indices, actions, done)
        except BaseException as error:
            slot = self._running[0] - 1
            if forked:
                end_forks(slot, "step")
            place = indices.index(slot - self.first)
            self._count_steps(place if done is None else 0)
            failure = self._failure(error, slot, actions[place])
            failure.completed = slots[:place].tolist()
            raise failure from failure.__cause__
        self._count_steps(len(indices) if done is None else 0)
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
        self._slots.keep_options(index, settings.options)
        if settings.state is not None and self._episodes.is_lost(index):
            with Failing(slot, "restore"):
                self._resumed[index] = unpack(settings.state)

    @property
    def can_prepare(self) -> bool:
        return self._slots.spares.unready is not None

    def prepare(self) -> None:
        with span(self.recorder, "reset a spare env"):
            self._slots.prepare()

    def start_trace(self, capacity: int) -> None:
        self.recorder, self._record = Recorder(capacity), None
        self._slots.record(self.recorder)

    def stop_trace(self) -> Record | None:
        recorder, self.recorder = self.recorder, None
        self._slots.record(None)
        if recorder is not None:
            self._record = recorder.take()
        return self._record

    def infos_of(self, slots: Iterable[int]) -> list[dict[str, Any]]:
        return [self._rows.infos[slot - self.first] for slot in slots]

    def set_options(self, options: Options) -> None:
        self._options = options

    def give_actions(self, slots: Iterable[int], actions: Sequence[Any]) -> None:
        self._rows.given = {slot - self.first: action for slot, action in zip(slots, actions, strict=True)}

    def put_objects(self, slots: NDArray[Any], columns: Mapping[KeyPath, NDArray[Any]]) -> None:
        for path, column in columns.items():
            self._rows.objects[path][slots - self.first] = column

    def get_objects(self, slots: NDArray[Any], paths: Iterable[KeyPath]) -> dict[KeyPath, NDArray[Any]]:
        return {path: self._rows.objects[path][slots - self.first] for path in paths}

    def call(self, slots: Iterable[int], args: Sequence[Any], name: str, kwargs: Any) -> list[Any]:

        def ask(slot: int, env: Env, *mine: Any) -> Any:
            with FailingAttribute(slot, name):
                attribute = find_attr(env, name)
            with Failing(slot, name):
                return attribute(*mine, **kwargs) if callable(attribute) else attribute

        return self._ask(slots, args, ask)

    def get_attr(self, slots: Iterable[int], args: Sequence[Any], name: str) -> list[Any]:

        def read(slot: int, env: Env) -> Any:
            with FailingAttribute(slot, name):
                return find_attr(env, name)

        return self._ask(slots, args, read)

    def map(self, slots: Iterable[int], args: Sequence[Any], function: Callable[..., Any]) -> list[Any]:

        def run(slot: int, env: Env, *mine: Any) -> Any:
            with Failing(slot, "map"):
                return function(env, *mine)

        return self._ask(slots, args, run)

    def set_attr(self, slots: Iterable[int], values: Sequence[Any], name: str) -> None:

        def put(slot: int, env: Env, value: Any) -> None:
            with FailingAttribute(slot, f"set_attr({name!r})"):
                put_attr(env, name, value)

        self._ask(slots, [(value,) for value in values], put)

    def try_save(self, slots: NDArray[Any]) -> None:
        indices = slots - self.first
        if not self._unproved.isdisjoint(indices.tolist()):
            return
        with self._states.keeping(int(self._oldest[0])), self._trying():
            states: list[SlotState] = []
            for slot in slots.tolist():
                self._running[0] = slot + 1
                states.append(self.take_state(slot - self.first, slot))
            self._states.keep(self._asked_states[indices].tolist(), states)
            self._asked_states[indices] = 0

    def try_restore(self, slots: NDArray[Any]) -> None:
        indices = slots - self.first
        numbers = self._asked_states[indices].tolist()
        with self._states.keeping(int(self._oldest[0])), self._trying():
            if self._states.missing(numbers):
                return
            for slot, number in zip(slots.tolist(), numbers, strict=True):
                self._running[0] = slot + 1
                self.put_state(slot - self.first, self._states[number])
            self._asked_states[indices] = 0

    @contextmanager
    def _trying(self) -> Generator[None]:
        """Ends the block at what an env raises: its number is left, so it is asked, and then says that."""
        with suppress(BaseException):
            yield
        self._running[0] = 0

    def save_states(
        self, slots: Sequence[int], numbers: Sequence[int], oldest: int, packed: bool
    ) -> list[bytes] | None:
        states: list[SlotState] = []
        slot = slots[0]
        with self._states.keeping(oldest):
            try:
                for slot in slots:
                    index = slot - self.first
                    if index in self._unproved:
                        self._prove(slot)
                    states.append(self.take_state(index, slot))
            except BaseException as error:
                raise EnvFailure(slot, "save") from error
            self._states.keep(numbers, states)
            if not packed:
                return None
            with Failing(slot, "save"):
                return pack(state._replace(obs=self._rows.obs(state.slot - self.first)) for state in states)

    def restore_states(
        self,
        slots: Sequence[int],
        sources: Sequence[int | bytes],
        oldest: int,
        rows: Sequence[NDArray[Any]] | None,
    ) -> Gone | None:
        with self._states.keeping(oldest):
            missing = self._states.missing(source for source in sources if isinstance(source, int))
            if missing:
                return Gone(missing)
            slot = slots[0]
            try:
                for slot, source in zip(slots, sources, strict=True):
                    state = self._states[source] if isinstance(source, int) else unpack(source)
                    self.put_state(slot - self.first, state)
            except BaseException as error:
                raise EnvFailure(slot, "restore") from error
            if rows is not None:
                self._rows.put(np.array(slots) - self.first, rows)
            return None

    def simulate_states(
        self,
        sources: Sequence[int],
        numbers: Sequence[int],
        actions: Sequence[NDArray[Any]],
        oldest: int,
    ) -> list[NDArray[Any]] | Gone:
        with self._states.keeping(oldest):
            missing = self._states.missing(sources)
            if missing:
                return Gone(missing)
            before = self._simulator.steps
            try:
                states, rows = self._simulator.step([self._states[source] for source in sources], actions)
            finally:
                self._stats[_stats.SIMULATED] += self._simulator.steps - before
            self._states.keep(numbers, states)
            return rows

    def export_states(self, numbers: Sequence[int]) -> list[bytes] | Gone:
        missing = self._states.missing(numbers)
        if missing:
            return Gone(missing)
        states = [self._states[number] for number in numbers]
        with Failing(states[0].slot if states else self.first, "export"):
            return pack(states)

    def import_states(
        self, slots: Sequence[int], numbers: Sequence[int], packed: Sequence[bytes], oldest: int
    ) -> None:
        with self._states.keeping(oldest):
            for slot, number, one in zip(slots, numbers, packed, strict=True):
                with Failing(slot, "import"):
                    self._states.keep([number], [unpack(one)._replace(slot=slot)])

    def step_from(self, row: NDArray[Any], state: SlotState) -> SlotState:
        """Steps the env of a row, `[1]`, from a state of another, and returns the state after that."""
        index = int(row[0])
        self.put_state(index, state, new_row=True)
        self.step(row)
        return self.take_state(index, state.slot)

    def take_state(self, index: int, slot: int) -> SlotState:
        """Returns the state of an env, as that of a slot."""
        if self._episodes.state[index] > IDLE or index in self._resumed:
            raise EnvStateError(
                "a fault has cut its last step, so there is nothing to save; step or reset it first"
            )
        info = self._rows.infos[index]
        return SlotState(
            slot,
            self._slots.stateful[index].take(),
            self._episodes.save(index),
            *self._slots.save(index),
            deepcopy(info) if info else {},
            self._rows.final.is_written(index),
            {path: column[index] for path, column in self._rows.objects.items()}
            if self._rows.objects
            else {},
        )

    def put_state(self, index: int, state: SlotState, *, new_row: bool = False) -> None:
        """Has an env go on from a state.

        Args:
            index: of the env.
            state: of this env, or of another that was made by the same function.
            new_row: whether its row is not that of the state, but one that others have used.
        """
        self._put_env(index, state)
        self._episodes.restore(index, state.episode)
        if new_row:
            self._episodes.clear_marks(index)
            return
        self._rows.take_info(index, deepcopy(state.info) if state.info else {})
        self._rows.final.note_written(index, is_written=state.is_final)
        for path, value in state.objects.items():
            self._rows.objects[path][index] = value
        self._final_infos.pop(index, None)

    def _put_env(self, index: int, state: SlotState) -> None:
        self._resumed.pop(index, None)  # what the program restores counts more
        self._slots.make_ready(index)
        self._slots.restore(index, state.env, state.seed, state.new_seed, state.options)

    def close(self) -> None:
        self._simulator.close()

    def _prove(self, slot: int) -> None:
        """Raises `EnvStateError` unless envs of this one's kind go on exactly from their states."""
        kind, index = self._simulator.kind, slot - self.first
        fresh = not self._slots.was_reset(index) or self._episodes.is_over(index)
        infos = self._rows.infos
        infos[index] = deepcopy(infos[index])  # the env may write to the one that it returned
        with self._slots.unlent(index):
            self._slots.stateful[index].prove(fresh=fresh)
        self._unproved = {each for each in self._unproved if kind(self.first + each) != kind(slot)}

    def _ask(self, slots: Iterable[int], args: Sequence[Any], ask: Callable[..., Any]) -> list[Any]:
        """Returns what `ask` returns of each of `slots`, its env, and `args` of it; may change the env."""
        results: list[Any] = []
        for slot, mine in zip(slots, args, strict=True):
            self._slots.changed(slot - self.first)  # also if it fails half-way
            results.append(ask(slot, self._slots.envs[slot - self.first], *mine))
        return results

    def _step_each(self, indices: list[int], actions: list[Any], done: Done | None) -> None:
        """Steps envs in turn; where it ends by an error, `running` says whose that is.

        This is the hot loop: what it adds to `env.step` is what jaxvec costs. So the ordinary step is C++'s
        where that is there, and here is what it leaves: all rules, of every step.

        Args:
            indices: of the envs.
            actions: of each.
            done: is told of each that is done, if it is given.
        """
        after = None if done is None else partial(self._tell, done)
        run, state, targets = self._run, self._episodes.state, self._slots.targets
        targets.look()
        place = 0
        while True:
            place, result = run(place, targets.envs, targets.limits, indices, actions, self._end_step, after)
            if place == len(indices):
                return
            index = indices[place]
            place += 1
            obs = self._resume(index) if state[index] > MARKED else self._take(index, result)
            self._rows.write_obs(index, obs)
            if after is not None:
                after(index)

    def _tell(self, done: Done, index: int) -> None:
        self._count_steps(1)  # before it is told of
        done(self.first + index, 1)

    def _step_one(
        self, place: int, envs: list[Any], limits: Any, indices: list[int], actions: list[Any], *_: Any
    ) -> tuple[int, Any]:
        """Does as `Stepper.run` of C++ does, to which no step is an ordinary one."""
        if place == len(indices):
            return place, None
        index = indices[place]
        self._running[0] = self.first + 1 + index
        return place, None if self._episodes.state[index] > MARKED else envs[index].step(actions[place])

    def _take(self, index: int, result: Any) -> Any:
        """Writes the row of what `step` has returned, but not yet the observation, which it returns."""
        if forked:
            end_forks(self.first + index, "step")
        try:
            obs, reward, terminated, truncated, info = result
        except (TypeError, ValueError) as error:
            raise wrong_step(result) from error
        if type(info) is not dict:
            check_dict("step", info)
        if self._slots.check_member is not None:
            self._slots.check_member(obs)
        if self._reward_shape or not isinstance(reward, float):
            reward = conform_reward(reward, self._reward_shape)
        marked = self._episodes.take(index, reward)
        if terminated or truncated or marked:
            obs, info = self._end_step(index, obs, bool(terminated), bool(truncated), info)
        if info or self._rows.infos[index]:  # else the row says so already
            self._rows.write_info(index, info)
        return obs

    def _resume(self, index: int) -> Any:
        """Does what an env has to do in place of a step; returns the observation for the row.

        An episode that a fault has cut ends with its last observation, in place of the one that never
        came, and without a reward. What its row says was delivered before; whatever is in the row by now
        is of a step that is lost.
        """
        state, delivered = self._episodes.state, self._delivered
        if state[index] == UNRESET:
            obs, info = self._reset_in_step(index)
            self._rows.write_info(index, info)
            return obs
        if state[index] == LOST:
            assert delivered is not None
            resumed = self._resumed[index].episode[1:] if index in self._resumed else None
            cut = delivered.episode(index, resumed)
            if self._episodes.cut(index, cut, over=delivered.over(index)):
                self._stats[_stats.FAULTS] += 1
                self._stats[_stats.EPISODES] += 1
                self._stats[_stats.STEPS] -= 1  # as below; once, though its reset may fail
                obs, info = self._close_row(index, delivered.obs(index), {})
                self._rows.write_info(index, info)
                return obs
            if not delivered.over_by_fault(index):  # nothing was lost
                self._resumed.pop(index, None)
        if state[index] == ENDED:
            with Failing(self.first + index, "reset"):
                obs = self._begin(index, *self._autoreset(index))
        else:
            assert state[index] == IDLE
            self._episodes.idle(index)
            obs = self._rows.obs(index)
        self._stats[_stats.STEPS] -= 1  # this one will be counted, but the env takes none
        return obs

    def _end_step(
        self, index: int, obs: Any, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Does what is left of a step that ends an episode, or whose row is marked; as `_close_row`."""
        if self._episodes.mark(index, terminated, truncated):
            self._stats[_stats.EPISODES] += 1
        return self._close_row(index, obs, info)

    def _close_row(self, index: int, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns observation and info for a row: after same-step autoreset, those of the new episode."""
        if self._episodes.state[index] != UNRESET:
            self._rows.final.clear(index)
            return obs, info
        # Write before the reset: an env may reuse its observation's and its info's memory.
        self._final_infos[index] = dict(info)
        self._rows.final.write(index, obs, self._final_infos[index])
        return self._reset_in_step(index)

    def _reset_in_step(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Does the reset that follows an episode's last step; an env whose reset fails stays UNRESET."""
        try:
            obs, info, saved = self._autoreset(index)
        except BaseException as error:
            raise EnvFailure(self.first + index, "reset") from error
        self._episodes.reset_in_step(index, saved)
        return obs, {**info, "final_info": self._final_infos.pop(index)}

    def _autoreset(self, index: int) -> tuple[Any, dict[str, Any], Saved | None]:
        """Resets an env whose episode is over, or has it go on from its last saved state after a fault.

        Returns:
            Observation, info, and the episode that goes on.
        """
        state = self._resumed.pop(index, None)
        if state is not None:
            self._put_env(index, state)
            if state.episode[0] != ENDED:  # else it was to be reset then, too
                return state.obs, state.info, state.episode
        return *self._slots.autoreset(index), None

    def _begin(self, index: int, obs: Any, info: dict[str, Any], saved: Saved | None = None) -> Any:
        """Writes the row of a reset in a call or a step of its own, but not yet `obs`, which it returns."""
        self._rows.write_info(index, info)
        self._rows.final.clear(index)
        self._episodes.begin(index, saved)  # last: until here, the env is still to be reset
        return obs

    def _failure(self, error: BaseException, slot: int, action: Any) -> EnvFailure:
        """Says how a step has failed, and notes that it is lost, unless that was the reset within it."""
        if isinstance(error, EnvFailure):
            return error
        self._episodes.lose(slot - self.first)
        failure = EnvFailure(slot, "step", action)
        failure.__cause__ = error
        return failure

    def _count_steps(self, count: int) -> None:
        """Counts steps, and the time since the last count, without resets."""
        began, in_resets = self._counted
        self._counted = now, resets = monotonic_ns(), self._stats[_stats.RESET_NS]
        self._stats[_stats.STEPS] += count
        self._stats[_stats.STEP_NS] += now - began - (resets - in_resets)
