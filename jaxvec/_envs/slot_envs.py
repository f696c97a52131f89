"""The env of each slot: how it is reset, replaced and stepped past wrappers.

`SlotEnvs` is the entry point for `EnvSlice`. An env with `set_observation_buffer` gets the memory of its row
from it, and then writes observations where the program reads them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic_ns
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from jaxvec import _stats
from jaxvec._arguments import NO_SEED, derive_seeds, read_seed
from jaxvec._envs.envs import (
    SPARE,
    Env,
    EnvFn,
    build_env,
    declares,
    end_forks,
    explain_reset,
    forked,
    split_reset,
)
from jaxvec._leaves import KeyPath, build, format_path, leaves, padded_nodes
from jaxvec._memory.rows import InvalidValue, reader, scalars
from jaxvec._memory.segment import Arrays
from jaxvec._options import PoolConfig
from jaxvec._spec import PoolSpec
from jaxvec._tracing import RecordedEnv, SpanRecorder

# --- Bypass of Gymnasium's own wrappers ------------------------------------------------------------------
# After the first steps of an env, `TimeLimit`, `OrderEnforcing` and `PassiveEnvChecker` only forward calls;
# the first one also counts steps. The compiled loop then calls the env inside them, and counts in
# `TimeLimit`'s own attribute. So the wrappers have the same attributes as if they had been called.

_WRAPPERS = (TimeLimit, OrderEnforcing, PassiveEnvChecker)
_METHODS = {kind: (kind.step, kind.reset) for kind in _WRAPPERS}  # as imported; a user may patch them later


class WrapperBypass:
    """The objects that are stepped and reset in place of the envs, by index in the slice.

    Attributes:
        envs: One object with `step` and `reset` per env: the env itself, or the env inside its wrappers.
        limits: For each env, the attributes of the bypassed `TimeLimit`s, innermost first.
    """

    def __init__(self, envs: list[Any], *, bypass: bool) -> None:
        self.envs = list(envs)
        self.limits: list[tuple[dict[str, Any], ...]] = [() for _ in envs]
        self._bypassed: list[tuple[Any, ...]] = [() for _ in envs]
        self._bypass = bypass
        # Envs with wrappers that may still have work to do; the first steps go through all of them.
        self._unchecked = set(range(len(envs))) if bypass else set[int]()

    def set_env(self, index: int, env: Any) -> None:
        """Replaces an env, or checks it again because its wrappers may have changed."""
        self.envs[index] = env
        self.limits[index] = ()
        self._bypassed[index] = ()
        if self._bypass:
            self._unchecked.add(index)

    def note_restore(self, index: int, env: Any) -> None:
        """Keeps the bypass of an env after a restore that changed values only, if it is still valid."""
        if not all(map(_only_counts, self._bypassed[index])):
            self.set_env(index, env)

    def reset_limits(self, index: int) -> None:
        """Resets the step counts of bypassed `TimeLimit`s, before the env is reset."""
        for limit in self.limits[index]:
            limit["_elapsed_steps"] = 0

    def update(self) -> None:
        """Bypasses the wrappers of new or changed envs as soon as these wrappers do nothing but count."""
        for index in tuple(self._unchecked):
            env: Any = self.envs[index]
            bypassed: list[Any] = []
            while _is_unmodified(env) and _only_counts(env):
                bypassed.append(env)
                env = env.env
            if not _is_unmodified(env):
                limits = [vars(wrapper) for wrapper in reversed(bypassed) if isinstance(wrapper, TimeLimit)]
                self.envs[index] = env
                self.limits[index] = tuple(limits)
                # Restores do not touch a `PassiveEnvChecker`.
                self._bypassed[index] = tuple(w for w in bypassed if not isinstance(w, PassiveEnvChecker))
                self._unchecked.remove(index)


def _is_unmodified(env: Any) -> bool:
    """Returns True if an env is exactly one of `_WRAPPERS`, with Gymnasium's own `step` and `reset`."""
    kind = type(env)
    if kind not in _METHODS or (kind.step, kind.reset) != _METHODS[kind]:
        return False
    return vars(env).keys().isdisjoint(("step", "reset"))


def _only_counts(env: Any) -> bool:
    """Returns True if one of `_WRAPPERS` has finished its checks of the first steps."""
    if isinstance(env, OrderEnforcing):
        return env.has_reset
    if isinstance(env, PassiveEnvChecker):
        # Older versions of Gymnasium lack `checked_data_reuse`.
        return env.checked_reset and env.checked_step and getattr(env, "checked_data_reuse", True)
    return isinstance(getattr(env, "_elapsed_steps", None), int)  # `None` before the first reset


# --- Membership of values in their space, for `check="strict"` -------------------------------------------

_outline = reprlib.Repr()
_outline.maxother = 200  # characters, of arrays too


def check_member(space: Space[Any], value: Any, path: KeyPath) -> None:
    """Raises `InvalidValue` and names the leaf if a value is not in its space.

    Values of another structure or shape pass, because the writer of the row raises a more specific error.
    """
    if isinstance(space, spaces.Dict):
        if isinstance(value, Mapping):
            for key, child in space.spaces.items():
                if key in value:
                    check_member(child, value[key], (*path, key))
        return
    if isinstance(space, spaces.Tuple):
        if isinstance(value, (tuple, list)):
            for place, (child, part) in enumerate(zip(space.spaces, value, strict=False)):
                check_member(child, part, (*path, place))
        return
    has_dtype = hasattr(value, "dtype")
    if isinstance(space, spaces.Box):  # `Box.contains` warns about values that are no arrays
        try:
            value = np.asarray(value, None if has_dtype else space.dtype)
        except (TypeError, ValueError):
            return
    if not space.contains(value) and np.shape(value) == space.shape:
        dtype = f" ({value.dtype})" if has_dtype else ""
        cure = 'clip it, declare wider bounds, or pass make(check="structure")'
        raise InvalidValue(f"{format_path(path)}: {_outline.repr(value)}{dtype} is not in {space}; {cure}")


# --- Resets, replacement and states of the envs that hold the slots --------------------------------------


class ResetOptions:
    """The declared options of resets: those that the program gave last, and those of the running episode."""

    def __init__(self, spec: PoolSpec, rows: Arrays) -> None:
        assert spec.reset_options is not None
        self._read = reader(spec.reset_options, rows)
        self._given = [rows[leaf.path] for leaf in spec.option_leaves]
        self._running = [rows[("info", *leaf.path)] for leaf in spec.option_leaves]

    def next(self, index: int) -> dict[str, Any] | None:
        if not self._given[-1][index]:
            return None
        (options,) = self._read(slice(index, index + 1, 1))
        return options

    def begin(self, index: int) -> None:
        """Writes to the row that an episode was started with the options of `next`."""
        for given, running in zip(self._given, self._running, strict=True):
            running[index] = given[index]

    def save(self, index: int) -> list[tuple[Any, Any]]:
        pairs = zip(self._given, self._running, strict=True)
        return [(given[index].copy(), running[index].copy()) for given, running in pairs]

    def restore(self, index: int, saved: list[tuple[Any, Any]]) -> None:
        for place, (next_options, running) in enumerate(saved):
            self._given[place][index] = next_options
            self._running[place][index] = running


class SlotEnvs:
    """The envs of a slice, by index in the slice.

    Attributes:
        new_seeds: Seeds of the next unseeded resets of rebuilt envs.
        kept_options: Options of the next resets of envs, if those are autoresets.
    """

    def __init__(
        self,
        envs: list[Env],
        env_fns: Sequence[EnvFn],
        spares: list[Env],
        *,
        first: int,
        spec: PoolSpec,
        rows: Arrays,
        stats: memoryview,
        config: PoolConfig,
        bypass: bool,
        rebuilt: bool,
        lends: bool,
    ) -> None:
        """Takes over built envs, which replace those of a dead worker if `rebuilt`.

        `bypass` allows steps that bypass Gymnasium's own wrappers. `EnvSlice` documents the other arguments.
        """
        self.envs = envs
        self._bypass = bypass
        self._first = first
        self.record(None)
        self.autoreset_by: Callable[[int], Any] | None = None  # see `SliceExtension.autoreset`
        self.rebuilt = rebuilt
        self.spares = spares
        self.env_fns = env_fns
        self._seeds = rows["seed",]
        self._rebuilds = rows["rebuilds",]
        self._last_seeds = scalars(rows["last_seed",])
        self._stats = stats
        # An env writes the dtype of its space, so it gets its row only if the segment stores this dtype.
        fits = all(leaf.stored == leaf.dtype and not leaf.is_object for leaf in leaves(spec.obs))
        self._can_lend = fits and not any(padded_nodes(spec.obs))
        self._obs = spec.obs
        self._rows = rows
        self._lends = lends
        # Envs that were never reset. Some can't take a buffer earlier, so their next reset lends it.
        self._unlent = set(range(len(envs) if lends else 0))
        self._borrowers = {index for index in range(len(envs)) if self._buffer_setter(index) is not None}
        self._strict = config.strict
        self.new_seeds: dict[int, int | None] = {}
        self.kept_options: dict[int, dict[str, Any] | None] = {}
        self._options = None if spec.reset_options is None else ResetOptions(spec, rows)  # if declared
        for index in range(len(envs) if rebuilt else 0):
            self._note_rebuilt(index)

    def record(self, recorder: SpanRecorder | None) -> None:
        """Starts to record all steps and resets, or stops with `None`."""
        self.called: list[Any] = self.envs  # or an object for each that records its calls
        if recorder is not None:
            self.called = [
                RecordedEnv(self.envs, index, f"env {self._first + index}", recorder)
                for index in range(len(self.envs))
            ]
        self.targets = WrapperBypass(self.called, bypass=self._bypass)

    def check_obs(self, index: int, obs: Any) -> None:
        """Raises `InvalidValue` if an observation is not in the space of its env."""
        check_member(self.envs[index].observation_space, obs, ("obs",))

    @property
    def named(self) -> list[tuple[str | int, Env]]:
        """The envs of this process, each with its slot, or its use in words."""
        return [*enumerate(self.envs, self._first), *((SPARE, env) for env in self.spares)]

    def changed(self, index: int) -> None:
        """Notes that an env was replaced, or that user code may have changed it."""
        self.targets.set_env(index, self.called[index])

    def reset(self, index: int, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Resets an env with the seed in the segment, and returns observation and info."""
        return self._reset(index, self.given_seed(index), options)

    def given_seed(self, index: int) -> int | None:
        """Returns the seed in the segment, which the program gave for this reset."""
        return read_seed(self._seeds[index])

    def autoreset(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Resets an env after its episode, or the env that takes its slot."""
        if self.autoreset_by is None:
            return self._reset(index, None, self.kept_options.get(index), is_own=True)
        return self._check(index, self.autoreset_by(index))

    def replace(self, index: int, env: Env) -> tuple[Env, int | None, dict[str, Any] | None]:
        """Puts an env into a slot. Returns the old one, with seed and options of its next reset."""
        self.set_buffer(index, lend=False)
        retired = self.envs[index]
        self.envs[index] = env
        self.set_buffer(index, lend=True)
        self.changed(index)
        return retired, self.new_seeds.pop(index, None), self.kept_options.pop(index, None)

    def rebuild(self, index: int) -> None:
        with suppress(BaseException):
            self.envs[index].close()
        others = [other for other in self.named if other[0] != self._first + index]
        (self.envs[index],) = build_env([self.env_fns[index]], self._first + index, others=others)
        self._unlent.add(index)
        self.changed(index)
        self._note_rebuilt(index)

    def was_reset(self, index: int) -> bool:
        return index not in self._unlent

    @contextmanager
    def unlent(self, index: int) -> Generator[None]:
        """Makes an env write to memory of its own within the block, so that its row is unchanged."""
        self.set_buffer(index, lend=False)
        try:
            yield
        finally:
            self._lend(index)

    def save(self, index: int) -> tuple[int, int | None, Any]:
        """Returns the last seed of an env, and seed and options of its next reset.

        If the options are declared, these are the ones of `ResetOptions.save`.
        """
        options = self.kept_options.get(index) if self._options is None else self._options.save(index)
        return self._last_seeds[index], self.new_seeds.get(index), options

    def restore(
        self, index: int, restore_env: Callable[[], bool], resets: tuple[int, int | None, Any]
    ) -> None:
        """Restores an env by `restore_env`, and the values that `save` returned.

        The function returns whether env and wrappers have the attributes that they had, with other values.
        """
        if index in self._unlent:  # wrappers and simulators require a reset before a restore
            self.envs[index].reset(seed=0)
            self._unlent.remove(index)
        if restore_env():
            self.targets.note_restore(index, self.called[index])
        else:
            self.changed(index)
        if index in self._borrowers:
            self._lend(index)
        self._last_seeds[index], self.new_seeds[index], options = resets
        if self._options is not None:
            self._options.restore(index, options)
        else:
            self.kept_options[index] = options

    def _lend(self, index: int) -> None:
        if not self._lends or self.was_reset(index):
            self.set_buffer(index, lend=self._lends)

    def set_buffer(self, index: int, *, lend: bool) -> None:
        """Passes an env the memory of its row, nested as the observation space, or `None` to take it back."""
        if (set_buffer := self._buffer_setter(index)) is not None:
            row = build(self._obs, lambda leaf: self._rows[leaf.path][index, ...]) if lend else None
            set_buffer(row)

    def _buffer_setter(self, index: int) -> Callable[[Any], None] | None:
        env: Any = self.envs[index]
        while type(env) in _METHODS:  # other wrappers may change observations
            env = env.env
        if not self._can_lend or not declares(env, "set_observation_buffer"):
            return None
        return env.set_observation_buffer

    def _reset(
        self, index: int, seed: int | None, options: dict[str, Any] | None, *, is_own: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Resets an env. If it `is_own`, by autoreset, it leaves out what is not given, as Gymnasium does."""
        if seed is None:
            seed = self.new_seeds.get(index)
        else:
            self._last_seeds[index] = seed % (2**63 - 1)  # new seeds are derived from it
        if index in self._unlent:
            self._unlent.remove(index)
            self._lend(index)
        self.targets.reset_limits(index)
        if self._options is not None:
            options = self._options.next(index)
        env = self.targets.envs[index]
        arguments = {"seed": seed, "options": options}
        # Wrappers that are bypassed would pass None on.
        if is_own and env is self.called[index] and seed is options is None:
            arguments = {}
        result = self.call_reset(env, index, **arguments)
        # After the reset: if it fails, the next try needs the same seed and options.
        self.new_seeds.pop(index, None)
        self.kept_options.pop(index, None)
        if self._options is not None:
            self._options.begin(index)
        return self._check(index, result)

    def call_reset(self, env: Any, index: int, **arguments: Any) -> Any:
        """Calls `reset`, and adds it and its duration to the statistics. Errors name the env at `index`."""
        started = monotonic_ns()
        try:
            result = env.reset(**arguments)
        except TypeError as error:
            explain_reset(error, self.envs[index])
            raise
        finally:
            if forked:
                end_forks(self._first + index, "reset")
            self._stats[_stats.RESET_NS] += monotonic_ns() - started
        self._stats[_stats.RESETS] += 1
        return result

    def _check(self, index: int, result: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = split_reset(result)
        if self._strict:
            self.check_obs(index, obs)
        return obs, info

    def _note_rebuilt(self, index: int) -> None:
        """Derives the next seed of a rebuilt env, if the old env was seeded."""
        self._rebuilds[index] += 1
        seed = self._last_seeds[index]
        count = int(self._rebuilds[index])
        if seed != NO_SEED:
            self.new_seeds[index] = derive_seeds(seed, 0, count)
