"""The env of each slot: its wrappers, its reset, and spare envs."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from jaxvec import _stats
from jaxvec._arguments import NO_SEED, derive_seeds
from jaxvec._config import PoolConfig
from jaxvec._envs.env_states import StatefulEnv
from jaxvec._envs.envs import Env, EnvFn, build_env, end_forks, explain_reset, forked, split_reset
from jaxvec._memory.rows import InvalidValue, scalars
from jaxvec._memory.segment import Arrays
from jaxvec._spec import KeyPath, Node, build, format_path, leaves
from jaxvec._tracing import RecordedEnv, Recorder

# ----------------------------------------------------------------------------------------------------------
# What the compiled loop steps for each env: what is inside Gymnasium's own wrappers, if that is the same.
#
# A step or a reset through `TimeLimit`, `OrderEnforcing` and `PassiveEnvChecker` takes three more calls,
# which do nothing, after an env's first steps, but count to the limit. That is done here and in the loop,
# and in the wrapper's own attribute, so nobody can tell.
# ----------------------------------------------------------------------------------------------------------

_KINDS = (TimeLimit, OrderEnforcing, PassiveEnvChecker)
_METHODS = {kind: (kind.step, kind.reset) for kind in _KINDS}


class WrapperBypass:
    """Of the envs of a slice, which go by their index there.

    Attributes:
        envs: whose `step` and `reset` are called.
        limits: the attributes of the `TimeLimit`s around each that are passed by but count, inmost first.
    """

    def __init__(self, envs: list[Any], *, bypass: bool) -> None:
        """Begins with the envs themselves: their first steps go through all that is around them."""
        self.envs = list(envs)
        self.limits: list[tuple[dict[str, Any], ...]] = [() for _ in envs]
        self._passed: list[tuple[Any, ...]] = [() for _ in envs]  # the wrappers
        self._bypass = bypass
        self._unseen = set(range(len(envs))) if bypass else set[int]()

    def put(self, index: int, env: Any) -> None:
        """Takes a new env, or one that somebody may have changed."""
        self.envs[index], self.limits[index], self._passed[index] = env, (), ()
        if self._bypass:
            self._unseen.add(index)

    def put_back(self, index: int, env: Any) -> None:
        """Takes an env whose attributes have values again that they had before; see `StatefulEnv.put`."""
        if not all(map(_is_done, self._passed[index])):
            self.put(index, env)

    def restart(self, index: int) -> None:
        """Has those that are passed by count anew: the env is about to be reset."""
        for limit in self.limits[index]:
            limit["_elapsed_steps"] = 0

    def look(self) -> None:
        """Looks through the wrappers of those that are new, as soon as these have nothing more to do."""
        for index in tuple(self._unseen):
            env: Any = self.envs[index]
            passed: list[Any] = []
            while _is_plain(env) and _is_done(env):
                passed.append(env)
                env = env.env
            if not _is_plain(env):
                limits = [vars(wrapper) for wrapper in reversed(passed) if isinstance(wrapper, TimeLimit)]
                self.envs[index], self.limits[index], self._passed[index] = env, tuple(limits), tuple(passed)
                self._unseen.remove(index)


def inside(env: Any) -> Any:
    """Returns the env within those of Gymnasium's wrappers that leave observations as they are."""
    while type(env) in _METHODS:
        env = env.env
    return env


def _is_plain(env: Any) -> bool:
    """Says whether steps and resets of an env are Gymnasium's own, of a wrapper that we know."""
    kind = type(env)
    if kind not in _METHODS or (kind.step, kind.reset) != _METHODS[kind]:
        return False
    return vars(env).keys().isdisjoint(("step", "reset"))


def _is_done(env: Any) -> bool:
    """Says whether such a wrapper does no more in a step or a reset than to count, if that."""
    if isinstance(env, OrderEnforcing):
        return env.has_reset
    if isinstance(env, PassiveEnvChecker):
        # Older ones look at the first step only.
        return env.checked_reset and env.checked_step and getattr(env, "checked_data_reuse", True)
    return isinstance(getattr(env, "_elapsed_steps", None), int)


# ----------------------------------------------------------------------------------------------------------
# Lends an env its row of the pool's memory, so that it can write its observations where they are read.
# ----------------------------------------------------------------------------------------------------------

_METHOD = "set_observation_buffer"  # of an env that takes one


class ObservationBuffers:
    """Of the rows of a slice, which go by their index there."""

    def __init__(self, obs: Node, rows: Arrays) -> None:
        """Prepares to lend rows, if they are as the env's observation space says."""
        self._obs, self._rows = obs, rows
        self._is_lendable = all(leaf.stored == leaf.dtype and not leaf.is_object for leaf in leaves(obs))

    def lend(self, index: int, env: Any) -> None:
        """Gives an env that takes one the memory of its observation, nested as that is."""
        take = self._taker(env)
        if take is not None:
            take(build(self._obs, lambda leaf: self._rows[leaf.path][index, ...]))

    def take_back(self, env: Any) -> None:
        """Has an env write to memory of its own again."""
        take = self._taker(env)
        if take is not None:
            take(None)

    def takes(self, env: Any) -> bool:
        """Says whether an env takes such memory."""
        return self._taker(env) is not None

    def _taker(self, env: Any) -> Callable[[Any], None] | None:
        """Returns the env's method; not one behind a wrapper that may have made another observation of it."""
        return getattr(inside(env), _METHOD, None) if self._is_lendable else None


# ----------------------------------------------------------------------------------------------------------
# Whether values are members of their space: for `check="strict"`.
# ----------------------------------------------------------------------------------------------------------

_outline = reprlib.Repr()
_outline.maxother = 200  # characters, of arrays too


def checker(space: Space[Any], path: KeyPath) -> Callable[[Any], None]:
    """Returns `check(value)`, which raises `InvalidValue` and names the leaf that is not in its space.

    Values of another structure or shape pass: who writes them says better what is wrong.
    """
    if isinstance(space, spaces.Dict):
        children = {key: checker(child, (*path, key)) for key, child in space.spaces.items()}

        def check_dict(value: Any) -> None:
            for key, check in children.items():
                if isinstance(value, Mapping) and key in value:
                    check(value[key])

        return check_dict
    if isinstance(space, spaces.Tuple):
        places = [checker(child, (*path, place)) for place, child in enumerate(space.spaces)]

        def check_tuple(value: Any) -> None:
            if isinstance(value, (tuple, list)):
                for check, child in zip(places, value, strict=False):
                    check(child)

        return check_tuple

    def check_leaf(value: Any) -> None:
        has_dtype = hasattr(value, "dtype")
        if isinstance(space, spaces.Box):  # which warns of all but arrays
            try:
                value = np.asarray(value, None if has_dtype else space.dtype)
            except (TypeError, ValueError):
                return
        if not space.contains(value) and np.shape(value) == space.shape:
            dtype = f" ({value.dtype})" if has_dtype else ""
            raise InvalidValue(f"{format_path(path)}: {_outline.repr(value)}{dtype} is not in {space}")

    return check_leaf


# ----------------------------------------------------------------------------------------------------------
# Envs that a worker resets in advance, when it has nothing else to do.
# ----------------------------------------------------------------------------------------------------------


@dataclass
class Spare:
    """An env that no slot holds.

    Attributes:
        env: the env.
        seed, options: for its next reset.
        result: of the reset in advance, if that was done.
        failed: whether the reset in advance raised. It is tried again when the env gets a slot.
    """

    env: Env
    seed: int | None = None
    options: dict[str, Any] | None = None
    result: Any = None
    failed: bool = False


class Spares:
    """A ring: the env whose episode is over goes to its end, the one at its head takes the slot.

    So which env plays which episode depends on the order in which episodes end, and never on whether
    there was time to reset one in advance.

    Attributes:
        used: whether an env in a slot was reset by now. Earlier there is no seed, and no hurry.
    """

    def __init__(self) -> None:
        self._ring: deque[Spare] = deque()
        self.used = False

    def __bool__(self) -> bool:
        return bool(self._ring)

    @property
    def envs(self) -> list[Env]:
        """All that are in no slot."""
        return [spare.env for spare in self._ring]

    def build(self, count: int, env_fns: Sequence[EnvFn], first: int) -> None:
        """Builds `count` envs by the functions of the envs `first`, `first + 1`, … in turn.

        Raises:
            EnvFailure: a constructor raised.
        """
        for i in range(count):
            which = i % len(env_fns)
            (env,) = build_env([env_fns[which]], first + which)
            self._ring.append(Spare(env))

    def reseed(self, seed: int) -> None:
        """Gives each a seed of its own, made from one; resets in advance are void."""
        for place, spare in enumerate(self._ring):
            spare.seed, spare.result, spare.failed = derive_seeds(seed, 1, place), None, False

    @property
    def unready(self) -> Spare | None:
        """The next one that could be reset in advance."""
        if not self.used:
            return None
        return next((spare for spare in self._ring if spare.result is None and not spare.failed), None)

    def prepare(self, reset: Callable[[Spare], Any]) -> None:
        """Resets one in advance by `reset`, which returns what the env did, if there is one to reset."""
        spare = self.unready
        if spare is None:
            return
        try:
            spare.result = reset(spare)
        except BaseException:
            spare.failed = True

    def swap(self, retired: Env, seed: int | None, options: dict[str, Any] | None) -> Spare:
        """Takes an env back, with seed and options for its next reset, and gives the next one out."""
        self._ring.append(Spare(retired, seed, options))
        return self._ring.popleft()


# ----------------------------------------------------------------------------------------------------------
# The env of each slot: reset with its seed, and replaced by a spare one or by one that is built anew.
# ----------------------------------------------------------------------------------------------------------


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
        config: PoolConfig,
        bypass: bool,
        rebuilt: bool,
        lends: bool,
    ) -> None:
        """Takes new envs; see `EnvSlice`.

        With `bypass`, steps may pass by some of Gymnasium's wrappers. `rebuilt` are those that follow
        others, which are gone; only a slice that `lends` gives envs its rows.
        """
        self.envs = envs
        self._bypass = bypass
        self.record(None)
        self.spares = spares
        self._states = config.states
        # The slots of a simulator have one env.
        stateful = {id(env): StatefulEnv(env, config.states.functions) for env in envs if config.states.max}
        self.stateful = [stateful[id(env)] for env in envs if config.states.max]
        self._has_spares = bool(spares)  # quicker to ask
        self._env_fns = env_fns
        self._first = first
        self._seeds, self._rebuilds = rows["seed",], rows["rebuilds",]
        self._last_seeds = scalars(rows["last_seed",])
        self._stats = stats
        self._lending, self._lends = ObservationBuffers(obs, rows), lends
        # Who was lent nothing yet: that is done with their next reset.
        self._unlent = set(range(len(envs) if lends else 0))
        self._borrowers = {index for index, env in enumerate(envs) if self._lending.takes(env)}
        self.check_member = checker(envs[0].observation_space, ("obs",)) if config.strict else None
        self._new_seeds: dict[int, int] = {}  # for the next unseeded reset of envs that were built anew
        self._kept_options: dict[int, dict[str, Any]] = {}  # for the next reset of such envs in a step
        if not rebuilt:
            rows["last_seed",][:] = NO_SEED
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
        self.targets = WrapperBypass(self.called, bypass=self._bypass)

    def changed(self, index: int) -> None:
        """Takes note that an env is another, or that somebody may have changed it."""
        self.targets.put(index, self.called[index])

    def reset(self, index: int, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Resets an env as the parent asks, with the seed in the segment; returns observation and info."""
        seed = None if self._seeds[index] == NO_SEED else int(self._seeds[index])
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
        (self.envs[index],) = build_env([self._env_fns[index]], self._first + index)
        if self._states.max:
            self.stateful[index] = StatefulEnv(self.envs[index], self._states.functions)
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
                end_forks(env_id, "reset")
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
        if seed != NO_SEED:
            self._new_seeds[index] = derive_seeds(seed, 0, count)
