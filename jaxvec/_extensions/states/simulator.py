"""Steps copies of envs from saved states. The envs of the pool are not touched."""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from pickle import PickleBuffer
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec import _stats
from jaxvec._envs.envs import Env, EnvErrorContext, EnvFailure, EnvFn, build_env
from jaxvec._envs.episodes import IDLE
from jaxvec._extensions.states.slot_states import SlotState
from jaxvec._memory.large_buffers import identify
from jaxvec._memory.segment import Arrays, Rows, index_of, make_layout, private_segment
from jaxvec._script import MIN_LARGE
from jaxvec._spec import PoolSpec
from jaxvec._util import Pickler

_USE = "simulate"  # of the envs here, for errors
_MAX_ROWS = 64  # rows of steps that are in memory at the same time

# Steps an env from each state in turn, into the first rows, and appends the next states to the list. It notes
# the slot that runs.
Stepper: TypeAlias = Callable[[Sequence[SlotState], list[SlotState], memoryview], None]


class Simulator:
    """The envs that are stepped from saved states: one per kind, which is given by the constructor."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        first: int,
        running: memoryview,
        spec: PoolSpec,
        stepper_of: Callable[[list[Env], EnvFn, PoolSpec, Arrays], Stepper],
        others: Callable[[], list[tuple[str | int, Env]]],
    ) -> None:
        self.steps = 0  # so far
        self._env_fns = env_fns
        self._first = first
        self._running = running
        self._spec = replace(spec, num_envs=_MAX_ROWS, batch_size=_MAX_ROWS)
        self._stepper_of = stepper_of  # takes envs, their function, specification and arrays
        self._others = others  # returns the envs of the pool, each with its slot
        self._kinds: list[Hashable] | None = None
        # Built when needed: the env of each kind, its stepper, statistics, and leaves of actions and results.
        self._built: dict[Hashable, tuple[Env, Stepper, memoryview, Rows, Rows]] = {}
        self._layout = make_layout(self._spec, 1)

    def kind(self, slot: int) -> Hashable:
        """Returns a value that is equal for slots with equal constructors."""
        if self._kinds is None:
            self._kinds = [_kind(place, env_fn) for place, env_fn in enumerate(self._env_fns)]
        return self._kinds[slot - self._first]

    def step(
        self,
        states: Sequence[SlotState],
        actions: Sequence[NDArray[Any]],
        rows: Sequence[NDArray[Any]],
        targets: NDArray[np.int64],
    ) -> list[SlotState]:
        """Steps once from each of `k` states, with the leaves of actions `[k, ...]`.

        It writes the time steps to the places `targets`, `[k]`, of the leaves `rows`; not those of idle envs.
        Returns the next states.
        """
        after = list(states)  # an idle env takes no step, and the parent has its row
        by_kind: dict[Hashable, list[int]] = {}
        for place, state in enumerate(states):
            if state.data.episode[0] != IDLE:
                by_kind.setdefault(self.kind(state.slot), []).append(place)
        for kind, places in by_kind.items():
            for start in range(0, len(places), _MAX_ROWS):
                chunk = places[start : start + _MAX_ROWS]
                index = index_of(np.array(chunk))  # a slice, if the kinds are in order
                next_states, stepped = self._step_chunk(
                    kind, [states[place] for place in chunk], [leaf[index] for leaf in actions]
                )
                for place, state in zip(chunk, next_states, strict=True):
                    after[place] = state
                index = index_of(targets[index])
                for array, row in zip(rows, stepped, strict=True):
                    array[index] = row[: len(chunk)]
        return after

    def close(self) -> None:
        built = self._built
        self._built = {}
        for env, *_ in built.values():
            with suppress(BaseException):
                env.close()

    def _step_chunk(
        self, kind: Hashable, states: Sequence[SlotState], actions: Sequence[NDArray[Any]]
    ) -> tuple[list[SlotState], Rows]:
        """Steps from states of one kind. Returns the next states, and the leaves of the first rows."""
        if kind not in self._built:
            self._build(kind, states[0].slot)
        env, stepper, counters, stored, rows = self._built[kind]
        before = counters[_stats.STEPS]
        for array, action in zip(stored, actions, strict=True):
            array[: len(states)] = action
        after: list[SlotState] = []
        try:
            stepper(states, after, self._running)
        except BaseException as error:
            del self._built[kind]  # its state is unknown now
            with suppress(BaseException):
                env.close()
            slot = states[len(after)].slot
            if not isinstance(error, EnvFailure):
                raise EnvFailure(slot, "simulate") from error
            error.env_id = slot
            error.operation = "simulate"
            raise error from error.__cause__
        finally:
            self._running[0] = 0
            self.steps += counters[_stats.STEPS] - before
        return after, rows

    def _build(self, kind: Hashable, slot: int) -> None:
        env_fn = self._env_fns[slot - self._first]
        own = [(_USE, env) for env, *_ in self._built.values()]
        envs = build_env([env_fn], slot, use=_USE, others=[*self._others(), *own])
        with EnvErrorContext(slot, "simulate"):
            arrays = private_segment(self._layout)
            # Before the reset, because `StatefulEnv` has to observe the env from its first reset on.
            stepper = self._stepper_of(envs * _MAX_ROWS, env_fn, self._spec, arrays)
            envs[0].reset(seed=0)  # wrappers and simulators require a reset before a restore
        stored = [arrays[leaf.path] for leaf in self._spec.action_leaves]
        rows = [arrays[leaf.path] for leaf in self._spec.timestep_leaves]
        self._built[kind] = envs[0], stepper, memoryview(arrays["stats",][0]), stored, rows


def _kind(place: int, env_fn: EnvFn) -> Hashable:
    """Returns the pickled function, because equal functions are no longer identical in a worker.

    Large arrays are equal here if they are in the same memory.
    """
    buffer = io.BytesIO()
    places = list[tuple[int, int]]()

    def is_small(array: PickleBuffer) -> bool:
        if array.raw().nbytes < MIN_LARGE:
            return True
        places.append(identify(array))
        return False

    try:
        Pickler(buffer, 5, buffer_callback=is_small).dump(env_fn)
    except Exception:  # possible with the serial backend, which pickles nothing
        return place
    return buffer.getvalue(), tuple(places)
