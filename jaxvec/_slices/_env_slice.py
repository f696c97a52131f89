"""Steps a slice of a pool's envs, in turn, into rows of the segment.

This is the one stepping code path: a worker process runs it on its slice, the serial backend on the
whole pool. A slot is its env's index in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec import _seeds, _stats
from jaxvec._memory import _rows
from jaxvec._memory._rows import InvalidValue
from jaxvec._memory._segment import Arrays
from jaxvec._options import Options
from jaxvec._seeds import NONE
from jaxvec._slices import _envs, _forks
from jaxvec._slices._delivered import Delivered
from jaxvec._slices._envs import Env, EnvFailure, EnvFn
from jaxvec._slices._forks import forked
from jaxvec._slices._info_rows import DeclaredInfo, FinalStep
from jaxvec._slices._membership import checker
from jaxvec._slices._slice import Done
from jaxvec._slices._spares import Spares
from jaxvec._spaces import Path
from jaxvec._spec import PoolSpec
from jaxvec._tracing._recorder import Record, RecordedEnv, Recorder

# What an env's next step has to do before, or in place of, stepping it. All but the first are rare.
PLAYING = 0
OVER = 1  # its last step ended an episode: clear the row's flags or, under next-step autoreset, reset
LOST = 2  # the episode was cut by a fault: end it
UNRESET = 3  # the step was taken, but the reset that follows it failed: reset


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
        self._envs = envs
        self._steppers: list[Any] = envs  # or what records their steps
        self.recorder: Recorder | None = None
        self._env_fns = env_fns
        self.first = first
        self._autoreset_mode = autoreset_mode
        self._spec = spec
        count = len(envs)
        data = [leaf.path for leaf in (*spec.action_leaves, *spec.timestep_leaves)]
        rows = {path: arrays[path][first : first + count] for path in data}
        self._seeds, self._last_seeds, self._rebuilds = (
            arrays[name,][first : first + count] for name in ("seed", "last_seed", "rebuilds")
        )
        self._delivered = Delivered(spec, arrays, first, count) if spec.has_fault else None
        self._running = memoryview(arrays["running",][worker])
        self._stats = memoryview(arrays["stats",][worker])
        self._running[0] = 0
        self._read_actions = _rows.reader(spec.action, rows)
        self._write_obs = _rows.writer(spec.obs, rows)
        self._gather_obs = _rows.gatherer(spec.obs, rows)
        self._read_obs = _rows.reader(spec.obs, rows)
        self._reward = _rows.scalars(rows[spec.reward.path])
        self._terminated = _rows.scalars(rows[spec.terminated.path])
        self._truncated = _rows.scalars(rows[spec.truncated.path])
        self._idles = idle
        self._idle = rows["info", "idle"] if spec.has_idle else np.zeros(count, np.bool_)
        self._fault = rows["info", "fault"] if spec.has_fault else np.zeros(count, np.bool_)
        self._return = _rows.scalars(rows["info", "episode_return"])
        self._length = _rows.scalars(rows["info", "episode_length"])
        self._declared = DeclaredInfo(spec.declared, rows)
        self._declares = bool(spec.declared.keys)
        self._vector_reward = spec.reward.shape != ()
        self._final = FinalStep(spec, rows, () if replaces is None else range(count))
        self._spares = Spares() if spares is None else spares
        self._require_member = checker(envs[0].observation_space, ("obs",)) if strict else None

        # Returns add up in float64 here, whatever the segment stores.
        self._zero: Any = np.zeros(spec.reward.shape) if self._vector_reward else 0.0
        self._returns: list[Any] = [self._zero] * count
        self._lengths = [0] * count
        self._state = [PLAYING] * count
        self._has_info = arrays["has_info",][first : first + count]
        self._has_info[:] = False
        self._given: dict[int, Any] | None = None  # actions of the next step, in place of the segment's
        self._objects = {leaf.path: rows[leaf.path] for leaf in spec.object_leaves}
        self._final_infos: dict[int, dict[str, Any]] = {}  # of those that are UNRESET
        self._new_seeds: dict[int, int] = {}  # for the next unseeded reset of envs that were built anew
        self._options: Options = None  # of resets from outside
        self.infos: list[dict[str, Any]] = [{} for _ in range(count)]  # raw, of each env's last call
        if replaces is not None:
            assert self._delivered is not None
            self._delivered.take_over(replaces)
            self._state = [LOST] * count
            for index in range(count):
                self._note_rebuilt(index)
            if 0 in self._new_seeds:
                self._spares.reseed(self._new_seeds[0])
            self._spares.used = True
        else:
            rows["info", "env_id"][:] = range(first, first + count)
            self._last_seeds[:] = NONE

    def reset(self, slots: NDArray[Any], done: Done | None = None) -> None:
        """Resets the envs of `slots` with the seeds in the segment and the options set last; see `Slice`."""
        for place, index in enumerate((slots - self.first).tolist()):
            seed = None if self._seeds[index] == NONE else int(self._seeds[index])
            self._running[0] = self.first + index + 1
            try:
                options = None if self._options is None else self._options[index]
                self._write_obs(index, self._begin_episode(index, *self._restart(index, seed, options)))
                if seed is not None and index == 0:
                    self._spares.reseed(seed)
                self._spares.used = True
                if done is not None:
                    done(self.first + index, 1)
            except BaseException as error:
                failure = self._failure(index, "reset", None, error)
                failure.done = slots[:place].tolist()
                raise failure from failure.__cause__
        self._running[0] = 0

    def step(self, slots: NDArray[Any], done: Done | None = None) -> None:
        """Steps the envs of `slots` with the actions in the segment; see `Slice`.

        This is the hot loop: what it adds to `env.step` is what jaxvec costs. So attributes are read
        once, the rare is behind one test, and scalars go through memoryviews, NumPy's quicker half.
        """
        began, in_resets = monotonic_ns(), self._stats[_stats.RESET_NS]
        envs, running, after_first = self._steppers, self._running, self.first + 1
        rewards, episode_returns, episode_lengths = self._reward, self._return, self._length
        returns, lengths, state, infos = self._returns, self._lengths, self._state, self.infos
        require_member = self._require_member
        write_obs, vector_reward, declares = self._write_obs, self._vector_reward, self._declares
        gather_obs, gathered = self._gather_obs if done is None else None, list[Any]()
        resumes = self._autoreset_mode is AutoresetMode.NEXT_STEP or self._idles
        rows = slots - self.first
        indices: list[int] = rows.tolist()
        index, action = -1, None
        failure: EnvFailure | None = None
        if self._delivered is not None:
            self._delivered.keep(rows)
        given, self._given = self._given, None
        actions = self._read_actions(rows) if given is None else (given[index] for index in indices)
        try:
            for index, action in zip(indices, actions, strict=True):
                running[0] = after_first + index
                if state[index] and (resumes or state[index] > OVER):
                    obs = self._resume(index, resumes)
                    if gather_obs is None:
                        write_obs(index, obs)
                    else:
                        gathered.append(obs)
                    if done is not None:
                        began, in_resets = self._finish_step(index, began, in_resets, done)
                    continue
                result: Any = envs[index].step(action)
                if forked:
                    _forks.end(self.first + index, "step")
                try:
                    obs, reward, terminated, truncated, info = result
                except (TypeError, ValueError) as error:
                    raise InvalidValue(
                        f"step must return (obs, reward, terminated, truncated, info), got {_outline(result)}"
                    ) from error
                if info.__class__ is not dict:
                    _require_dict("step", info)
                if require_member is not None:
                    require_member(obs)
                if vector_reward or not isinstance(reward, float):
                    reward = self._conform_reward(reward)
                rewards[index] = reward
                returns[index] = episode_returns[index] = returns[index] + reward
                lengths[index] = episode_lengths[index] = lengths[index] + 1
                if terminated or truncated or state[index]:
                    obs, info = self._end_step(index, obs, bool(terminated), bool(truncated), info)
                if gather_obs is None:
                    write_obs(index, obs)
                else:
                    gathered.append(obs)
                if declares:
                    self._declared.write(index, info)
                if info or infos[index]:
                    self._note_info(index, info)
                if done is not None:
                    began, in_resets = self._finish_step(index, began, in_resets, done)
        except BaseException as error:
            if forked:
                _forks.end(self.first + index, "step")
            failure = self._failure(index, "step", action, error)
            indices = indices[: indices.index(index)]
        if gathered and not gather_obs(indices, gathered[: len(indices)]):  # pyright: ignore[reportOptionalCall]
            failure, indices = self._write_each(indices, gathered, rows, failure)
        self._count_steps(len(indices) if done is None else 0, monotonic_ns() - began, in_resets)
        if failure is not None:
            failure.done = [self.first + index for index in indices]
            raise failure
        running[0] = 0

    def recover(self, failure: EnvFailure, *, rebuild: bool) -> None:
        """Makes ready for another try at what `failure` left: slots that are not done are to be asked again.

        A step that failed is not taken again: its row then says that a fault has cut the episode.

        Args:
            failure: that was raised.
            rebuild: whether its env is closed, and another is built in its place.

        Raises:
            EnvFailure: the constructor raised.
        """
        if not rebuild:
            return
        index = failure.env_id - self.first
        self._running[0] = failure.env_id + 1
        with suppress(BaseException):
            self._envs[index].close()
        (self._envs[index],) = _envs.build([self._env_fns[index]], failure.env_id)
        self._note_rebuilt(index)
        self._running[0] = 0

    @property
    def can_prepare(self) -> bool:
        """Whether `prepare` would reset an env."""
        return self._spares.unready is not None

    def prepare(self) -> None:
        """Resets a spare env in advance."""
        self._spares.prepare(self._reset)

    def start_trace(self, capacity: int) -> None:
        """Records steps and resets from now on, the latest `capacity` of them."""
        recorder = self.recorder = Recorder(capacity)
        self._steppers = [
            RecordedEnv(self._envs, index, f"env {self.first + index}", recorder)
            for index in range(len(self._envs))
        ]

    def stop_trace(self) -> Record | None:
        """Records no more, and returns what was."""
        recorder, self.recorder, self._steppers = self.recorder, None, self._envs
        return None if recorder is None else recorder.take()

    def set_options(self, options: Options) -> None:
        """Sets the options that resets from outside pass to each of our envs from now on."""
        self._options = options

    def give_actions(self, slots: Iterable[int], actions: Sequence[Any]) -> None:
        """Takes the actions of the next step, one for each of `slots`, that are not in the segment."""
        self._given = {slot - self.first: action for slot, action in zip(slots, actions, strict=True)}

    def put_objects(self, slots: NDArray[Any], columns: Mapping[Path, NDArray[Any]]) -> None:
        """Takes over leaves of Python objects from the parent, rows of `slots` each."""
        for path, column in columns.items():
            self._objects[path][slots - self.first] = column

    def get_objects(self, slots: NDArray[Any], paths: Iterable[Path]) -> dict[Path, NDArray[Any]]:
        """Returns leaves of Python objects, rows of `slots` each."""
        return {path: self._objects[path][slots - self.first] for path in paths}

    def call(self, slots: Iterable[int], args: Sequence[Any], name: str, kwargs: Any) -> list[Any]:
        """Returns attribute `name` of the envs of `slots`, called if it can be, with `args` of each."""
        results: list[Any] = []
        for slot, mine in zip(slots, args, strict=True):
            try:
                attribute = self._envs[slot - self.first].get_wrapper_attr(name)
                results.append(attribute(*mine, **kwargs) if callable(attribute) else attribute)
            except BaseException as error:
                raise EnvFailure(slot, name) from error
        return results

    def set_attr(self, slots: Iterable[int], values: Sequence[Any], name: str) -> None:
        """Sets attribute `name` of the envs of `slots` to one of `values` each."""
        for slot, value in zip(slots, values, strict=True):
            try:
                self._envs[slot - self.first].set_wrapper_attr(name, value)
            except BaseException as error:
                raise EnvFailure(slot, f"set_attr({name!r})") from error

    def _end_step(
        self, index: int, obs: Any, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Does what is left of a step that ends an episode, or whose row is marked.

        Returns:
            Observation and info for the row: after same-step autoreset, those of the new episode.
        """
        over = terminated or truncated
        self._terminated[index] = terminated
        self._truncated[index] = truncated
        self._fault[index] = False
        self._state[index] = OVER if over else PLAYING
        if over:
            self._stats[_stats.EPISODES] += 1
        if over and self._autoreset_mode is AutoresetMode.SAME_STEP:
            # Write before the reset: an env may reuse its observation's and its info's memory.
            final_info = dict(info)
            self._final.write(index, obs, final_info)
            return self._reset_after(index, final_info)
        self._final.clear(index)
        return obs, info

    def _reset_after(self, index: int, final_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Does the reset that follows an episode's last step, in the same step."""
        try:
            obs, info = self._autoreset(index)
        except BaseException as error:
            self._state[index] = UNRESET
            self._final_infos[index] = final_info
            raise EnvFailure(self.first + index, "reset") from error
        self._state[index] = OVER
        return obs, {**info, "final_info": final_info}

    def _resume(self, index: int, resumes: bool) -> Any:
        """Takes the step of an env that has something else to do; returns the observation for the row.

        An episode that a fault has cut ends with its last observation, in place of the one that never
        came, and without a reward. What its row says was delivered before; whatever is in the row by now
        is of a step that is lost.
        """
        delivered = self._delivered
        if self._state[index] == LOST and resumes and delivered is not None and delivered.over(index):
            self._state[index] = OVER  # there was no episode that could be cut
        if self._state[index] == OVER and self._idles:
            (obs,) = self._read_obs(np.array([index]))
            self._reward[index] = self._zero
            self._idle[index] = True
            self._stats[_stats.STEPS] -= 1  # as below
            return obs
        if self._state[index] == OVER:
            try:
                obs = self._begin_episode(index, *self._autoreset(index))
            except BaseException as error:
                raise EnvFailure(self.first + index, "reset") from error
            self._stats[_stats.STEPS] -= 1  # this one will be counted, but the env takes none
            return obs
        if self._state[index] == UNRESET:
            obs, info = self._reset_after(index, self._final_infos.pop(index))
        else:
            assert delivered is not None
            self._reward[index] = self._zero
            self._return[index], self._length[index] = delivered.episode(index)
            self._stats[_stats.FAULTS] += 1
            self._stats[_stats.STEPS] -= 1  # once, though it may be UNRESET next
            try:
                obs, info = self._end_step(index, delivered.obs(index), False, True, {})
            finally:
                self._fault[index] = True
        self._declared.write(index, info)
        self._note_info(index, info)
        return obs

    def _begin_episode(self, index: int, obs: Any, info: dict[str, Any]) -> Any:
        """Ends a reset in a call of its own: the row holds no reward and a new episode.

        Returns:
            The observation, which is still to be written.
        """
        self._state[index] = PLAYING
        self._reward[index] = self._zero
        self._terminated[index] = False
        self._truncated[index] = False
        self._fault[index] = False
        self._idle[index] = False
        self._return[index] = self._zero
        self._length[index] = 0
        self._final.clear(index)
        self._declared.write(index, info)
        self._note_info(index, info)
        return obs

    def _note_info(self, index: int, info: dict[str, Any]) -> None:
        self.infos[index] = info
        self._has_info[index] = bool(info)

    def _restart(
        self, index: int, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the env, as it was asked to from outside or because its episode is over."""
        if seed is None:
            seed = self._new_seeds.get(index)
        else:
            self._last_seeds[index] = seed
        result = self._reset(self._envs[index], seed, options)
        self._new_seeds.pop(index, None)
        return self._check_reset(index, result)

    def _autoreset(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Resets the env, whose episode is over, or has a spare one take its slot."""
        if not self._spares:
            return self._restart(index, None, None)
        spare = self._spares.swap(self._envs[index], self._new_seeds.pop(index, None))
        self._envs[index] = spare.env
        result = self._reset(spare.env, spare.seed) if spare.result is None else spare.result
        return self._check_reset(index, result)

    def _reset(self, env: Env, seed: int | None, options: dict[str, Any] | None = None) -> Any:
        began = monotonic_ns()
        try:
            result = env.reset(seed=seed, options=options)
        finally:
            if forked:
                _forks.end(max(self._running[0] - 1, self.first), "reset")
            self._stats[_stats.RESET_NS] += monotonic_ns() - began
            if self.recorder is not None:
                mark = self._running[0]  # 0 while none in a slot runs
                self.recorder.add(f"reset env {mark - 1}" if mark else "reset a spare env", began)
        self._stats[_stats.RESETS] += 1
        return result

    def _check_reset(self, index: int, result: Any) -> tuple[Any, dict[str, Any]]:
        """Returns what `reset` returned, if it will do, and begins to add up the new episode."""
        self._returns[index] = self._zero
        self._lengths[index] = 0
        if not isinstance(result, tuple) or len(result) != 2:
            raise InvalidValue(f"reset must return (obs, info), got {_outline(result)}")
        obs, info = result
        if self._require_member is not None:
            self._require_member(obs)
        return obs, _require_dict("reset", info)

    def _note_rebuilt(self, index: int) -> None:
        """Gives an env that was built anew its next seed, if the one before it was seeded."""
        self._rebuilds[index] += 1
        seed, count = int(self._last_seeds[index]), int(self._rebuilds[index])
        if seed != NONE:
            self._new_seeds[index] = _seeds.derive(seed, 0, count)

    def _failure(self, index: int, operation: str, action: Any, error: BaseException) -> EnvFailure:
        """Makes the failure of an env that raised, and notes that its step is lost."""
        if isinstance(error, EnvFailure):  # of a reset within the step
            return error
        if operation == "step":
            self._state[index] = LOST
        failure = EnvFailure(self.first + index, operation, action)
        failure.__cause__ = error
        return failure

    def _write_each(
        self, indices: list[int], gathered: list[Any], rows: NDArray[Any], failure: EnvFailure | None
    ) -> tuple[EnvFailure | None, list[int]]:
        """Writes observations that have to be looked at one by one; returns whose are written."""
        written: list[int] = []
        for index, obs, action in zip(indices, gathered, self._read_actions(rows), strict=False):
            try:
                self._write_obs(index, obs)
                written.append(index)
            except BaseException as error:
                failure = self._failure(index, "step", action, error)
        return failure, written

    def _finish_step(self, index: int, began: int, in_resets: int, done: Done) -> tuple[int, int]:
        """Counts a step and tells of it, in this order; returns what the next one began with."""
        now = monotonic_ns()
        self._count_steps(1, now - began, in_resets)
        done(self.first + index, 1)
        return now, self._stats[_stats.RESET_NS]

    def _count_steps(self, count: int, elapsed_ns: int, in_resets: int) -> None:
        self._stats[_stats.STEPS] += count
        self._stats[_stats.STEP_NS] += elapsed_ns - (self._stats[_stats.RESET_NS] - in_resets)

    def _conform_reward(self, reward: Any) -> Any:
        """Returns the reward in float64 and the spec's shape."""
        shape = self._spec.reward.shape
        value = np.asarray(reward)
        if shape == () and value.size == 1:
            value = value.reshape(())  # Gymnasium takes shape (1,) for a scalar too
        if value.shape != shape:
            raise InvalidValue(
                f"reward: expected shape {shape}, got {value.shape}; an env with vector rewards says so in "
                "a reward_space attribute"
            )
        if value.dtype.kind not in "biuf":
            raise InvalidValue(f"reward: expected a number, got {type(reward).__name__}")
        return float(value) if shape == () else value.astype(np.float64)


def _require_dict(operation: str, info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise InvalidValue(f"{operation} must return info as a dict, got {type(info).__name__}")
    return info


def _outline(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
