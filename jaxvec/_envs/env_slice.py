"""Steps the envs of one worker and writes their results into the shared-memory segment.

One step of a slice:

    actions         read from the segment (`EnvRows`)
    env.step        called by the compiled loop, `Stepper.run`, or by `EnvSlice._step_one`
    reward, flags   counted and written by `EpisodeTracker`
    end of episode  handled as the autoreset mode requires (`SlotEnvs.autoreset`)
    obs, info       written into the env's row (`EnvRows`)

A worker process has one `EnvSlice` for its part of the pool. The serial backend has one for the whole pool. A
"slot" is the index of an env in the pool; an "index" is its position in the slice, `slot - first`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec import _native, _stats
from jaxvec._arguments import NO_SEED
from jaxvec._engine.move import merge
from jaxvec._envs.env_access import SlotAccess
from jaxvec._envs.env_rows import EnvRows
from jaxvec._envs.envs import (
    Env,
    EnvErrorContext,
    EnvFailure,
    EnvFn,
    check_dict,
    conform_reward,
    end_forks,
    forked,
    wrong_step,
)
from jaxvec._envs.episodes import ENDED, IDLE, LOST, MARKED, UNRESET, CommittedRows, EpisodeTracker
from jaxvec._envs.slice import Done, Slice, SliceExtension, SlotSettings
from jaxvec._envs.slot_envs import SlotEnvs
from jaxvec._leaves import KeyPath
from jaxvec._memory.rows import store
from jaxvec._memory.segment import Arrays, Index, Marks, index_of
from jaxvec._options import PoolConfig
from jaxvec._spec import PoolSpec
from jaxvec._tracing import SpanRecorder

# Makes the half of an extension in a worker, if it has one.
OnSlice: TypeAlias = Callable[["EnvSlice"], SliceExtension | None]


class _Selection(NamedTuple):
    """The envs of a step. Most steps have the same ones as the step before."""

    slots: bytes
    indices: list[int]
    rows: Index  # the indices, as an index of arrays


class EnvSlice(Slice):
    """Neighbouring envs of a pool that are stepped one after the other.

    It coordinates a step. `SlotEnvs` resets and replaces the envs, `EpisodeTracker` keeps their counters and
    flags, and `EnvRows` reads and writes their rows.

    Attributes:
        slots, rows, episodes: These three.
        access: The requests to the envs between their steps.
        spec, arrays, config: As for the constructor.
        running: The current slot plus 1, `[1]`; 0 while idle.
        stats: The worker's row of statistics.
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
        spares: list[Env] | None = None,
        on_slice: Sequence[OnSlice] = (),
        lends: bool = True,
        replaces: Mapping[KeyPath, NDArray[Any]] | None = None,
    ) -> None:
        """Creates the slice of the slots from `first`, with one env for each, which `env_fns` built.

        `on_slice` makes the extensions, and `spares` are further envs for these. With `lends`, envs may write
        observations directly into their rows. `replaces` is for a slice that replaces one of a dead process:
        the leaves of Python objects that the program received last, `[n, ...]` each.
        """
        left = replaces is not None
        # The cut is meaningless for the arrays with one row per worker, which are not read through `rows`.
        rows = {path: array[first : first + len(envs)] for path, array in arrays.items()}
        if not left:
            rows["last_seed",][:] = NO_SEED
        self.first = first
        # The current slot plus 1; 0 while idle. The parent reads it to name the env of a crash or timeout.
        running = Marks.of(arrays).running[worker]
        self.running = memoryview(running)
        self.running[0] = 0
        self.stats = memoryview(arrays["stats",][worker])
        # The compiled loop writes rewards of these types only, and does not check spaces.
        writes = rows["reward",].dtype.char in "fd"
        compiled = _native.ext if writes and not config.strict else None
        self.episodes = EpisodeTracker(rows, spec.autoreset, lost=left)
        self.rows = EnvRows(spec, rows, left=left, check=config.check)
        self._delivered = CommittedRows(spec, rows) if spec.has_fault else None
        self.slots = SlotEnvs(
            envs,
            env_fns,
            [] if spares is None else spares,
            first=first,
            spec=spec,
            rows=rows,
            stats=self.stats,
            config=config,
            bypass=config.settings.wrapper_bypass and compiled is not None,
            rebuilt=left,
            lends=lends,
        )
        self._reward_shape = spec.reward.shape
        self._strict = config.strict
        self._run = self._step_one
        if compiled is not None:
            marks = *self.episodes.end_marks, *self.rows.final.columns
            self._run = compiled.stepper(
                {
                    "states": self.episodes.state,
                    "infos": self.rows.infos,
                    # C++ can't clear columns of objects; with `None`, every marked row is left to Python.
                    "marks": None if any(column.dtype.hasobject for column in marks) else marks,
                    "returns": self.episodes.returns,
                    "lengths": self.episodes.lengths,
                    "row_reward": rows["reward",],
                    "row_return": rows["info", "episode_return"],
                    "row_length": rows["info", "episode_length"],
                    "running": running,
                    "forked": forked,
                    "write_obs": self.rows.write_obs,
                    "write_info": self.rows.write_info,
                    "first": first,
                    "marked": MARKED,
                }
            ).run
        self._selection = _Selection(b"", [], slice(0, 0, 1))
        self.access = SlotAccess(self.slots, self.rows, first)
        self.spec = spec
        self.arrays = arrays
        self.config = config
        self.extensions = [half for extend in on_slice if (half := extend(self)) is not None]
        self.verbs = merge(extension.verbs for extension in self.extensions)
        for extension in self.extensions:
            self.prepare = extension.prepare or self.prepare
            self.find_retirement = extension.find_retirement or self.find_retirement
            self.slots.autoreset_by = extension.autoreset or self.slots.autoreset_by
        if replaces is None:
            rows["info", "env_id"][:] = range(first, first + len(envs))
        elif self._delivered is not None:
            self._delivered.take_over(replaces)

    # --- Steps and resets -------------------------------------------------------------------------

    def reset(self, slots: NDArray[Any], done: Done | None = None) -> None:
        for place, slot in enumerate(slots.tolist()):
            index = slot - self.first
            self.running[0] = slot + 1
            try:
                reset = self.slots.reset(index, self._options.get(index))
                self.rows.write_obs(index, self._start(index, *reset))
                for extension in self.extensions:
                    extension.env_reset(index, self.slots.given_seed(index))
                if done is not None:
                    done(slot, 1)
            except BaseException as error:
                failure = EnvFailure(slot, "reset")
                failure.completed = slots[:place].tolist()
                raise failure from error
        self.running[0] = 0

    def step(self, slots: NDArray[Any], done: Done | None = None) -> None:
        after = None if done is None else partial(self._report, done)
        self._counted = 0, monotonic_ns(), self.stats[_stats.RESET_NS]
        if (requested := slots.tobytes()) != self._selection.slots:
            array = slots - self.first
            self._selection = _Selection(requested, array.tolist(), index_of(array))
        _, indices, rows = self._selection
        if self._delivered is not None:
            self._delivered.keep(slots - self.first)
        actions, wrong = self.rows.actions(indices, rows, self.episodes.state)
        self.running[0] = self.first + indices[0] + 1
        try:
            if wrong is not None:  # first step the envs before that of the last action
                self._step_each(indices[: len(actions) - 1], actions, after)
                self.running[0] = self.first + indices[len(actions) - 1] + 1
                raise wrong
            self._step_each(indices, actions, after)
        except BaseException as error:
            if forked:  # the worker may be at another env by now
                end_forks(" or ".join(map(str, slots)), "step")
            slot = self.running[0] - 1
            place = indices.index(slot - self.first)
            self._count_steps(place)
            failure = error if isinstance(error, EnvFailure) else EnvFailure(slot, "step", actions[place])
            if failure is not error:  # else a reset has failed, so no step is lost
                self.episodes.lose(slot - self.first)
            failure.completed = slots[:place].tolist()
            raise failure from failure.__cause__ or error
        self._count_steps(len(indices))
        self.running[0] = 0

    def recover(self, failure: EnvFailure, *, rebuild: bool, settings: SlotSettings | None = None) -> None:
        if not rebuild:
            return
        index = failure.env_id - self.first
        self.running[0] = failure.env_id + 1
        self.slots.rebuild(index)
        for extension in self.extensions:
            extension.env_built(index)
        if settings is not None:
            self.reapply_settings(failure.env_id, settings)
        self.running[0] = 0

    def reapply_settings(self, slot: int, settings: SlotSettings) -> None:
        index = slot - self.first
        for name, value in settings.attributes.items():
            self.access.set_attr([slot], [value], name)
        self.slots.kept_options[index] = self.access.copied(settings.options)

    def _step_each(self, indices: list[int], actions: list[Any], after: Callable[[int], None] | None) -> None:
        """Steps envs in turn. If it raises, `_running` names the env.

        This is the hot loop: its overhead over `env.step` is the cost of jaxvec per step. The compiled loop
        makes ordinary steps. Python handles all others, and can handle every step.
        """
        run = self._run
        state = self.episodes.state
        targets = self.slots.targets
        targets.update()
        place = 0
        while True:
            place, result = run(place, targets.envs, targets.limits, indices, actions, self._end_step, after)
            if place == len(indices):
                return
            index = indices[place]
            place += 1
            obs = self._skip_step(index) if state[index] > MARKED else self._finish_step(index, result)
            self.rows.write_obs(index, obs)
            if after is not None:
                after(index)

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
        self.running[0] = self.first + 1 + index
        return place, None if self.episodes.state[index] > MARKED else envs[index].step(actions[place])

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
            self.slots.check_obs(index, obs)
        # NumPy's float64 is a float, but sums of it warn, as those of arrays do.
        is_number = isinstance(reward, float) and not self._reward_shape
        reward = float(reward) if is_number else conform_reward(reward, self._reward_shape)
        with np.errstate(over="ignore", invalid="ignore"):  # see `rows.store`
            marked = self.episodes.take(index, reward)
        if self._strict:
            self._check_reward(index, reward)
        if terminated or truncated or marked:
            obs, info = self._end_step(index, obs, bool(terminated), bool(truncated), info)
        if info or self.rows.infos[index]:  # else the row is empty already
            self.rows.write_info(index, info)
        return obs

    def _check_reward(self, index: int, reward: Any) -> None:
        """Raises `InvalidValue` if a step's reward, or the return so far, is too large for its row."""
        written = (
            (self.spec.reward, reward),
            (self.spec.info.child("episode_return"), self.episodes.returns[index]),
        )
        for leaf, value in written:
            store(leaf, np.empty(leaf.shape, leaf.stored), np.asarray(value), strict=True)

    def _skip_step(self, index: int) -> Any:
        """Makes the row of an env that is not stepped, and returns its observation.

        The env is idle, has to be reset, or a fault has interrupted its step. In the last case, the row ends
        the episode. It repeats the last delivered observation with a reward of zero, because the current row
        may be half-written.
        """
        state = self.episodes.state
        delivered = self._delivered
        if state[index] == UNRESET:
            obs, info = self._reset_in_step(index)
            self.rows.write_info(index, info)
            return obs
        if state[index] == LOST:
            assert delivered is not None
            if self.episodes.cut(index, delivered.episode(index), over=delivered.over(index)):
                self.stats[_stats.FAULTS] += 1
                self.stats[_stats.EPISODES] += 1
                # As below; but here, so that a reset that fails and is tried again is counted once.
                self.stats[_stats.STEPS] -= 1
                obs, info = self._close_row(index, delivered.obs(index), {})
                self.rows.write_info(index, info)
                return obs
        if state[index] == ENDED:
            with EnvErrorContext(self.first + index, "reset"):
                obs = self._start(index, *self.slots.autoreset(index))
        else:
            assert state[index] == IDLE
            self.episodes.idle(index)
            obs = self.rows.obs(index)
        self.stats[_stats.STEPS] -= 1  # the caller counts every slot, but this env took no step
        return obs

    def _end_step(
        self, index: int, obs: Any, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Writes the flags of a step, and returns observation and info for the row. C++ calls it, too."""
        if self.episodes.mark(index, terminated, truncated):
            self.stats[_stats.EPISODES] += 1
        return self._close_row(index, obs, info)

    def _close_row(self, index: int, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns observation and info for a row: after same-step autoreset, those of the new episode."""
        if self.episodes.state[index] != UNRESET:
            self.rows.final.clear(index)
            return obs, info
        # Write before the reset: an env may reuse its observation's and its info's memory.
        self.rows.final.write(index, obs, info)
        return self._reset_in_step(index)

    def _reset_in_step(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Resets an env in the step that ended its episode. If that fails, the env stays UNRESET."""
        try:
            obs, info = self.slots.autoreset(index)
        except BaseException as error:
            raise EnvFailure(self.first + index, "reset") from error
        self.episodes.reset_in_step(index)
        return obs, info | self.rows.final.infos.pop(index)

    def _start(self, index: int, obs: Any, info: dict[str, Any]) -> Any:
        """Writes the row of a reset, except the observation, which it returns."""
        self.rows.write_info(index, info)
        self.rows.final.clear(index)
        self.episodes.begin(index)  # last: if a write fails, the env still has to be reset
        return obs

    def _count_steps(self, place: int) -> None:
        """Counts the steps before `place`, and the time since the last count without the time of resets."""
        counted, started, in_resets = self._counted
        now = monotonic_ns()
        resets = self.stats[_stats.RESET_NS]
        self._counted = place, now, resets
        self.stats[_stats.STEPS] += place - counted
        self.stats[_stats.STEP_NS] += now - started - (resets - in_resets)

    def _record_calls(self, recorder: SpanRecorder | None) -> None:
        self.slots.record(recorder)
