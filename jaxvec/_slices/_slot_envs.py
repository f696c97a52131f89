"""The env of each slot: reset with its seed, and replaced by a spare one or by one that is built anew."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic_ns
from typing import Any

from jaxvec import _seeds, _stats
from jaxvec._memory import _rows
from jaxvec._memory._segment import Arrays
from jaxvec._seeds import NONE
from jaxvec._slices import _envs, _forks
from jaxvec._slices._env_states import StatefulEnv, StateFunctions
from jaxvec._slices._envs import Env, EnvFn
from jaxvec._slices._forks import forked
from jaxvec._slices._lending import Lending
from jaxvec._slices._membership import checker
from jaxvec._slices._results import explain_reset, split_reset
from jaxvec._slices._spares import Spares
from jaxvec._slices._targets import Targets
from jaxvec._spaces import Node
from jaxvec._tracing._recorder import RecordedEnv, Recorder


class SlotEnvs:
    """Of a slice, by the slots' index there.

    Attributes:
        envs: that hold the slots now.
        called: `envs`, or what stands for each while its steps and resets are recorded.
        targets: what is stepped and reset for each.
        stateful: of each, if states are kept: what takes them and puts them back.
        spares: more envs, to take turns with these.
        check_member: raises unless an observation is a member of its space; `None` for no check.
    """

    def __init__(
        self,
        envs: list[Env],
        env_fns: Sequence[EnvFn],
        spares: Spares,
        *,
        first: int,
        obs: Node,
        rows: Arrays,
        stats: memoryview,
        strict: bool,
        see_through: bool,
        rebuilt: bool,
        lends: bool,
        keeps_states: bool,
        state_functions: StateFunctions | None,
    ) -> None:
        """Takes new envs; see `EnvSlice`.

        `rebuilt` are those that follow others, which are gone; only a slice that `lends` gives envs its rows.
        """
        self.envs = envs
        self._see_through = see_through
        self.record(None)
        self.spares = spares
        self._keeps_states, self._state_functions = keeps_states, state_functions
        # The slots of a simulator have one env.
        stateful = {id(env): StatefulEnv(env, state_functions) for env in envs if keeps_states}
        self.stateful = [stateful[id(env)] for env in envs if keeps_states]
        self._has_spares = bool(spares)  # quicker to ask
        self._env_fns = env_fns
        self._first = first
        self._seeds, self._rebuilds = rows["seed",], rows["rebuilds",]
        self._last_seeds = _rows.scalars(rows["last_seed",])
        self._stats = stats
        self._lending, self._lends = Lending(obs, rows), lends
        # Who was lent nothing yet: that is done with their next reset.
        self._unlent = set(range(len(envs) if lends else 0))
        self._borrowers = {index for index, env in enumerate(envs) if self._lending.takes(env)}
        self.check_member = checker(envs[0].observation_space, ("obs",)) if strict else None
        self._new_seeds: dict[int, int] = {}  # for the next unseeded reset of envs that were built anew
        self._kept_options: dict[int, dict[str, Any]] = {}  # for the next reset of such envs in a step
        if not rebuilt:
            rows["last_seed",][:] = NONE
            return
        for index in range(len(envs)):
            self._note_rebuilt(index)
        if 0 in self._new_seeds:
            spares.reseed(self._new_seeds[0])
        spares.used = True

    def record(self, recorder: Recorder | None) -> None:
        """Has all steps and resets from now on recorded, or not."""
        self.called: list[Any] = self.envs
        if recorder is not None:
            self.called = [
                RecordedEnv(self.envs, index, f"env {self._first + index}", recorder)
                for index in range(len(self.envs))
            ]
        self.targets = Targets(self.called, see_through=self._see_through)

    def changed(self, index: int) -> None:
        """Takes note that an env is another, or that somebody may have changed it."""
        self.targets.put(index, self.called[index])

    def reset(self, index: int, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Resets an env as the parent asks, with the seed in the segment; returns observation and info."""
        seed = None if self._seeds[index] == NONE else int(self._seeds[index])
        result = self._reset(index, seed, options)
        if seed is not None and index == 0:
            self.spares.reseed(seed)
        self.spares.used = True
        return result

    def autoreset(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Resets an env whose episode is over, or has a spare one take its slot."""
        if not self._has_spares:
            return self._reset(index, None, self._kept_options.get(index))
        self._lending.take_back(self.envs[index])
        spare = self.spares.swap(
            self.envs[index], self._new_seeds.pop(index, None), self._kept_options.pop(index, None)
        )
        self.envs[index] = spare.env
        self._lending.lend(index, spare.env)
        self.changed(index)
        if spare.result is None:
            return self._check(self._call(self.called[index], self._first + index, spare.seed, spare.options))
        return self._check(spare.result)

    def prepare(self) -> None:
        """Resets a spare env in advance."""
        self.spares.prepare(lambda spare: self._call(spare.env, self._first, spare.seed, spare.options))

    def rebuild(self, index: int) -> None:
        """Closes an env, and builds another in its place.

        Raises:
            EnvFailure: the constructor raised.
        """
        with suppress(BaseException):
            self.envs[index].close()
        (self.envs[index],) = _envs.build([self._env_fns[index]], self._first + index)
        if self._keeps_states:
            self.stateful[index] = StatefulEnv(self.envs[index], self._state_functions)
        self._unlent.add(index)
        self.changed(index)
        self._note_rebuilt(index)

    def was_reset(self, index: int) -> bool:
        """Says whether an env was ever reset."""
        return index not in self._unlent

    def make_ready(self, index: int) -> None:
        """Resets an env that never was: wrappers and simulators want that before they go on from a state."""
        if not self.was_reset(index):
            self.envs[index].reset(seed=0)
            self._unlent.remove(index)

    @contextmanager
    def unlent(self, index: int) -> Generator[None]:
        """Lets an env write to memory of its own within the block, so that its row stays as it is."""
        self._lending.take_back(self.envs[index])
        try:
            yield
        finally:
            self._lend(index)

    def save(self, index: int) -> tuple[int, int | None, dict[str, Any] | None]:
        """Returns the last seed of an env, and seed and options for its next reset."""
        return self._last_seeds[index], self._new_seeds.get(index), self._kept_options.get(index)

    def restore(
        self, index: int, env: Any, seed: int, new_seed: int | None, options: dict[str, Any] | None
    ) -> None:
        """Has an env go on from a saved state: that of the env, and what `save` has returned."""
        if self.stateful[index].put(env):
            self.targets.put_back(index, self.called[index])
        else:
            self.changed(index)
        if index in self._borrowers:
            self._lend(index)
        self._last_seeds[index] = seed
        self._new_seeds.pop(index, None)
        if new_seed is not None:
            self._new_seeds[index] = new_seed
        self.keep_options(index, options)

    def _lend(self, index: int) -> None:
        if not self._lends:
            self._lending.take_back(self.envs[index])
        elif self.was_reset(index):
            self._lending.lend(index, self.envs[index])

    def keep_options(self, index: int, options: dict[str, Any] | None) -> None:
        """Keeps options for the next reset of an env, if that is in a step and has none."""
        self._kept_options.pop(index, None)
        if options is not None:
            self._kept_options[index] = options

    def _reset(
        self, index: int, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            seed = self._new_seeds.get(index)
        else:
            self._last_seeds[index] = seed
        if index in self._unlent:
            self._unlent.remove(index)
            self._lend(index)
        self.targets.restart(index)
        result = self._call(self.targets.envs[index], self._first + index, seed, options)
        self._new_seeds.pop(index, None)
        self._kept_options.pop(index, None)
        return self._check(result)

    def _call(self, env: Any, env_id: int, seed: int | None, options: dict[str, Any] | None = None) -> Any:
        """Calls `reset`, and counts it and its time."""
        began = monotonic_ns()
        try:
            result = env.reset(seed=seed, options=options)
        except TypeError as error:
            explain_reset(error, self.envs[env_id - self._first])
            raise
        finally:
            if forked:
                _forks.end(env_id, "reset")
            self._stats[_stats.RESET_NS] += monotonic_ns() - began
        self._stats[_stats.RESETS] += 1
        return result

    def _check(self, result: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = split_reset(result)
        if self.check_member is not None:
            self.check_member(obs)
        return obs, info

    def _note_rebuilt(self, index: int) -> None:
        """Gives an env that was built anew its next seed, if the one before it was seeded."""
        self._rebuilds[index] += 1
        seed, count = self._last_seeds[index], int(self._rebuilds[index])
        if seed != NONE:
            self._new_seeds[index] = _seeds.derive(seed, 0, count)
