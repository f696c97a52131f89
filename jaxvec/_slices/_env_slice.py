"""Steps a slice of a pool's envs, in turn, into rows of the segment.

This is the one stepping code path: a worker process runs it on its slice, the serial backend on the
whole pool. A slot is its env's index in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import monotonic_ns
from typing import Any

from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec import _stats
from jaxvec._memory._marks import Marks
from jaxvec._memory._segment import Arrays
from jaxvec._options import Options
from jaxvec._slices import _forks
from jaxvec._slices._delivered import Delivered
from jaxvec._slices._env_rows import EnvRows
from jaxvec._slices._envs import Env, EnvFailure, EnvFn, Failing
from jaxvec._slices._episodes import ENDED, IDLE, LOST, MARKED, UNRESET, Episodes
from jaxvec._slices._forks import forked
from jaxvec._slices._results import conform_reward, require_dict, wrong_step
from jaxvec._slices._slice import Done
from jaxvec._slices._slot_envs import SlotEnvs
from jaxvec._slices._spares import Spares
from jaxvec._spaces import Path
from jaxvec._spec import PoolSpec
from jaxvec._tracing._recorder import Record, RecordedEnv, Recorder, span


class EnvSlice:
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
        autoreset_mode: AutoresetMode,
        spares: Spares | None = None,
        strict: bool = False,
        idle: bool = False,
        replaces: Mapping[Path, NDArray[Any]] | None = None,
    ) -> None:
        """Makes the slice of envs.

        Args:
            envs: each built by one of `env_fns`.
            env_fns: to build them again.
            first: id of the first env.
            worker: whose row of statistics is ours.
            spec, arrays: of the pool.
            autoreset_mode: what happens when an episode ends.
            spares: more envs, to take turns with these.
            strict: whether observations have to be members of their space.
            idle: whether an env whose episode has ended takes no steps until it is reset.
            replaces: if we take the place of a slice whose process is gone, and which left its rows: the
                leaves of Python objects that the program had from it last.
        """
        left = replaces is not None
        # Of the envs; what there is of workers is cut, too, and not read here.
        rows = {path: array[first : first + len(envs)] for path, array in arrays.items()}
        self.first = first
        self.recorder: Recorder | None = None
        self._running = memoryview(Marks.of(arrays).running[worker])
        self._running[0] = 0
        self._stats = memoryview(arrays["stats",][worker])
        self._episodes = Episodes(rows, autoreset_mode, idle=idle, lost=left)
        self._rows = EnvRows(spec, rows, left=left)
        self._delivered = Delivered(spec, rows) if spec.has_fault else None
        self._slots = SlotEnvs(
            envs,
            env_fns,
            Spares() if spares is None else spares,
            first=first,
            rows=rows,
            stats=self._stats,
            strict=strict,
            rebuilt=left,
        )
        self._reward_shape = spec.reward.shape
        self._options: Options = None  # of resets from outside
        self._final_infos: dict[int, dict[str, Any]] = {}  # of those that are UNRESET
        if replaces is None:
            rows["info", "env_id"][:] = range(first, first + len(envs))
        else:
            assert self._delivered is not None
            self._delivered.take_over(replaces)

    def reset(self, slots: NDArray[Any], done: Done | None = None) -> None:
        """Resets the envs of `slots` with the seeds in the segment and the options set last; see `Slice`."""
        for place, slot in enumerate(slots.tolist()):
            index = slot - self.first
            self._running[0] = slot + 1
            try:
                options = None if self._options is None else self._options[index]
                self._rows.write_obs(index, self._begin(index, *self._slots.reset(index, options)))
                if done is not None:
                    done(slot, 1)
            except BaseException as error:
                failure = EnvFailure(slot, "reset")
                failure.done = slots[:place].tolist()
                raise failure from error
        self._running[0] = 0

    def step(self, slots: NDArray[Any], done: Done | None = None) -> None:
        """Steps the envs of `slots` with the actions in the segment; see `Slice`."""
        self._counted = monotonic_ns(), self._stats[_stats.RESET_NS]
        array = slots - self.first
        indices: list[int] = array.tolist()
        if self._delivered is not None:
            self._delivered.keep(array)
        actions = self._rows.actions(array)
        observations: list[Any] | None = [] if done is None and self._rows.gathers else None
        wrong: dict[int, BaseException] = {}
        self._running[0] = int(slots[0]) + 1
        try:
            self._step_each(indices, actions, observations, done)
            stepped = indices
        except BaseException as error:
            failing = self._running[0] - 1 - self.first
            if forked:
                _forks.end(self.first + failing, "step")
            wrong[failing] = error
            stepped = indices[: indices.index(failing)]
        if observations and stepped:
            wrong |= self._rows.write_each(stepped, observations[: len(stepped)])
            if wrong:
                stepped = [index for index in stepped if index not in wrong]
        self._count_steps(len(stepped) if done is None else 0)
        if wrong:
            raise self._failure(wrong, dict(zip(indices, actions, strict=True)), stepped)
        self._running[0] = 0

    def recover(self, failure: EnvFailure, *, rebuild: bool) -> None:
        """Makes ready for another try at what `failure` left: slots that are not done are to be asked again.

        A step that failed is not taken again: its row then says that a fault has cut the episode.

        Args:
            failure: that was raised.
            rebuild: whether its env is closed, and another is built in its place.

        Raises:
            EnvFailure: the constructor raised.
        """
        if rebuild:
            self._running[0] = failure.env_id + 1
            self._slots.rebuild(failure.env_id - self.first)
            self._running[0] = 0

    @property
    def can_prepare(self) -> bool:
        """Whether `prepare` would reset an env."""
        return self._slots.spares.unready is not None

    def prepare(self) -> None:
        """Resets a spare env in advance."""
        with span(self.recorder, "reset a spare env"):
            self._slots.prepare()

    def start_trace(self, capacity: int) -> None:
        """Records steps and resets from now on, the latest `capacity` of them."""
        recorder, envs = Recorder(capacity), self._slots.envs
        self.recorder = recorder
        self._slots.called = [
            RecordedEnv(envs, index, f"env {self.first + index}", recorder) for index in range(len(envs))
        ]

    def stop_trace(self) -> Record | None:
        """Records no more, and returns what was."""
        recorder, self.recorder, self._slots.called = self.recorder, None, self._slots.envs
        return None if recorder is None else recorder.take()

    @property
    def infos(self) -> list[dict[str, Any]]:
        """The raw info of each env's last call."""
        return self._rows.infos

    def set_options(self, options: Options) -> None:
        """Sets the options that resets from outside pass to each of our envs from now on."""
        self._options = options

    def give_actions(self, slots: Iterable[int], actions: Sequence[Any]) -> None:
        """Takes the actions of the next step, one for each of `slots`, that are not in the segment."""
        self._rows.given = {slot - self.first: action for slot, action in zip(slots, actions, strict=True)}

    def put_objects(self, slots: NDArray[Any], columns: Mapping[Path, NDArray[Any]]) -> None:
        """Takes over leaves of Python objects from the parent, rows of `slots` each."""
        for path, column in columns.items():
            self._rows.objects[path][slots - self.first] = column

    def get_objects(self, slots: NDArray[Any], paths: Iterable[Path]) -> dict[Path, NDArray[Any]]:
        """Returns leaves of Python objects, rows of `slots` each."""
        return {path: self._rows.objects[path][slots - self.first] for path in paths}

    def call(self, slots: Iterable[int], args: Sequence[Any], name: str, kwargs: Any) -> list[Any]:
        """Returns attribute `name` of the envs of `slots`, called if it can be, with `args` of each."""
        results: list[Any] = []
        for slot, mine in zip(slots, args, strict=True):
            with Failing(slot, name):
                attribute = self._slots.envs[slot - self.first].get_wrapper_attr(name)
                results.append(attribute(*mine, **kwargs) if callable(attribute) else attribute)
        return results

    def set_attr(self, slots: Iterable[int], values: Sequence[Any], name: str) -> None:
        """Sets attribute `name` of the envs of `slots` to one of `values` each."""
        for slot, value in zip(slots, values, strict=True):
            with Failing(slot, f"set_attr({name!r})"):
                self._slots.envs[slot - self.first].set_wrapper_attr(name, value)

    def _step_each(
        self, indices: list[int], actions: list[Any], observations: list[Any] | None, done: Done | None
    ) -> None:
        """Steps envs in turn; where it ends by an error, `running` says whose that is.

        This is the hot loop: what it adds to `env.step` is what jaxvec costs. So attributes are read
        once, the rare is behind one test, and scalars go through memoryviews, NumPy's quicker half.

        Args:
            indices: of the envs.
            actions: of each.
            observations: takes those of the rows, which are then still to be written, if it is given.
            done: is told of each that is done, if it is given.
        """
        envs, running, after_first = self._slots.called, self._running, self.first + 1
        episodes, infos, write_obs = self._episodes, self._rows.infos, self._rows.write_obs
        state, returns, lengths = episodes.state, episodes.returns, episodes.lengths
        row_rewards, row_returns = episodes.row_rewards, episodes.row_returns
        row_lengths = episodes.row_lengths
        require_member, vector_reward = self._slots.require_member, self._reward_shape != ()
        for index, action in zip(indices, actions, strict=True):
            running[0] = after_first + index
            due = state[index]
            if due > MARKED:
                obs = self._resume(index)
            else:  # the ordinary step
                result: Any = envs[index].step(action)
                if forked:
                    _forks.end(self.first + index, "step")
                try:
                    obs, reward, terminated, truncated, info = result
                except (TypeError, ValueError) as error:
                    raise wrong_step(result) from error
                if type(info) is not dict:
                    require_dict("step", info)
                if require_member is not None:
                    require_member(obs)
                if vector_reward or not isinstance(reward, float):
                    reward = conform_reward(reward, self._reward_shape)
                row_rewards[index] = reward
                returns[index] = row_returns[index] = returns[index] + reward
                lengths[index] = row_lengths[index] = lengths[index] + 1
                if terminated or truncated or due:
                    obs, info = self._end_step(index, obs, bool(terminated), bool(truncated), info)
                if info or infos[index]:  # else the row says so already
                    self._rows.write_info(index, info)
            if observations is not None:
                observations.append(obs)
                continue
            write_obs(index, obs)
            if done is not None:
                self._count_steps(1)  # before it is told of
                done(self.first + index, 1)

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
            over = delivered.over(index)
            if self._episodes.cut(index, delivered.episode(index), over=over):
                self._stats[_stats.FAULTS] += 1
                self._stats[_stats.EPISODES] += 1
                self._stats[_stats.STEPS] -= 1  # as below; once, though its reset may fail
                obs, info = self._close_row(index, delivered.obs(index), {})
                self._rows.write_info(index, info)
                return obs
        if state[index] == ENDED:
            with Failing(self.first + index, "reset"):
                obs = self._begin(index, *self._slots.autoreset(index))
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
            obs, info = self._slots.autoreset(index)
        except BaseException as error:
            raise EnvFailure(self.first + index, "reset") from error
        self._episodes.reset_in_step(index)
        return obs, {**info, "final_info": self._final_infos.pop(index)}

    def _begin(self, index: int, obs: Any, info: dict[str, Any]) -> Any:
        """Writes the row of a reset in a call or a step of its own, but not yet `obs`, which it returns."""
        self._rows.write_info(index, info)
        self._rows.final.clear(index)
        self._episodes.begin(index)  # last: until here, the env is still to be reset
        return obs

    def _failure(
        self, wrong: Mapping[int, BaseException], actions: Mapping[int, Any], stepped: list[int]
    ) -> EnvFailure:
        """Notes whose steps are lost; returns the last one's failure."""
        failures: list[EnvFailure] = []
        for index, error in wrong.items():
            if isinstance(error, EnvFailure):  # of a reset within the step, which is not lost
                failures.append(error)
                continue
            self._episodes.lose(index)
            failures.append(EnvFailure(self.first + index, "step", actions[index]))
            failures[-1].__cause__ = error
        failures[-1].done = [self.first + index for index in stepped]
        return failures[-1]

    def _count_steps(self, count: int) -> None:
        """Counts steps, and the time since the last count, without resets."""
        began, in_resets = self._counted
        self._counted = now, resets = monotonic_ns(), self._stats[_stats.RESET_NS]
        self._stats[_stats.STEPS] += count
        self._stats[_stats.STEP_NS] += now - began - (resets - in_resets)
