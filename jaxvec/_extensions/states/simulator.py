"""Steps copies of envs from saved states. The envs of the pool are not touched."""

from __future__ import annotations

import io
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pickle import PickleBuffer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec import _stats
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.envs import EnvErrorContext, EnvFailure, EnvFn, build_env
from jaxvec._envs.episodes import IDLE
from jaxvec._extensions.states.slot_states import SlotState, SlotStates
from jaxvec._memory.large_buffers import identify
from jaxvec._memory.segment import Rows, index_of, make_layout, private_segment
from jaxvec._options import States
from jaxvec._script import MIN_LARGE
from jaxvec._util import Pickler

_USE = "simulate"  # of the envs here, for errors
_MAX_ROWS = 64  # rows of steps that are in memory at the same time


class Simulator:
    """The envs that are stepped from saved states: one per kind, which is given by the constructor."""

    def __init__(self, env_slice: EnvSlice, options: States) -> None:
        self._slice = env_slice
        self._options = options
        self._spec = replace(env_slice.spec, num_envs=_MAX_ROWS, batch_size=_MAX_ROWS)
        # Built when needed: the env of each kind, which has all slots of a slice of its own; the states of
        # these slots; and the leaves of actions and results.
        self._built: dict[Hashable, tuple[Any, SlotStates, Rows, Rows]] = {}

    @cached_property
    def kinds(self) -> list[Hashable]:
        """Values that are equal for slots with equal constructors, by index."""
        return [_kind(place, env_fn) for place, env_fn in enumerate(self._slice.slots.env_fns)]

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
            if state.episode[0] != IDLE:
                by_kind.setdefault(self.kinds[state.slot - self._slice.first], []).append(place)
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
        for kind in [*self._built]:
            self._discard(kind)

    def _discard(self, kind: Hashable) -> None:
        env, *_ = self._built.pop(kind)
        with suppress(BaseException):
            env.close()

    def _step_chunk(
        self, kind: Hashable, states: Sequence[SlotState], actions: Sequence[NDArray[Any]]
    ) -> tuple[list[SlotState], Rows]:
        """Steps from states of one kind. Returns the next states, and the leaves of the first rows."""
        if kind not in self._built:
            self._build(kind, states[0].slot)
        _, simulated, stored, rows = self._built[kind]
        running = self._slice.running
        counters = simulated.env_slice.stats
        before = counters[_stats.STEPS]
        for array, action in zip(stored, actions, strict=True):
            array[: len(states)] = action
        after: list[SlotState] = []
        try:
            simulated.step_from(states, after, running)
        except BaseException as error:
            self._discard(kind)  # its state is unknown now
            slot = states[len(after)].slot
            if not isinstance(error, EnvFailure):
                raise EnvFailure(slot, "simulate") from error
            raise EnvFailure(slot, "simulate", error.action) from error.__cause__
        finally:
            running[0] = 0
            self._slice.stats[_stats.SIMULATED] += counters[_stats.STEPS] - before
        return after, rows

    def _build(self, kind: Hashable, slot: int) -> None:
        slots = self._slice.slots
        env_fn = slots.env_fns[slot - self._slice.first]
        own = [(_USE, env) for env, *_ in self._built.values()]
        (env,) = build_env([env_fn], slot, use=_USE, others=[*slots.named, *own])
        with EnvErrorContext(slot, "simulate"):
            arrays = private_segment(make_layout(self._spec, 1))
            simulated = EnvSlice(
                [env] * _MAX_ROWS,
                [env_fn] * _MAX_ROWS,
                first=0,
                worker=0,
                spec=self._spec,
                arrays=arrays,
                config=self._slice.config,
                lends=False,
            )
            # Before the reset, because `StatefulEnv` has to observe the env from its first reset on.
            states = SlotStates(simulated, self._options)
            env.reset(seed=0)  # wrappers and simulators require a reset before a restore
        stored = [arrays[leaf.path] for leaf in self._spec.action_leaves]
        rows = [arrays[leaf.path] for leaf in self._spec.timestep_leaves]
        self._built[kind] = env, states, stored, rows


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
