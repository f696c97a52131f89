"""Steps copies of envs from their saved states, and leaves the envs themselves alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec import _stats
from jaxvec._envs.env_states import SlotState
from jaxvec._envs.envs import Env, EnvFailure, EnvFn, Failing, build_env
from jaxvec._envs.episodes import IDLE
from jaxvec._memory.segment import Arrays, make_layout, private_segment
from jaxvec._spec import PoolSpec
from jaxvec._util import dumps

_MAX_ROWS = 64  # steps whose rows are held at once


# Steps the env of a row, `[1]`, from a state, and returns the state after that.
Stepper: TypeAlias = Callable[[NDArray[Any], SlotState], SlotState]


class Simulator:
    """Of a slice. For each function that makes envs it builds an env of its own, when one is needed.

    Attributes:
        steps: that envs have taken here so far.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        first: int,
        spec: PoolSpec,
        stepper_of: Callable[[list[Env], EnvFn, Arrays], Stepper],
    ) -> None:
        """Begins without envs.

        Args:
            env_fns: of the envs `first`, `first + 1`, …
            first: id of the first env.
            spec: of the pool.
            stepper_of: makes the stepper of envs, by the function that made them, over these arrays.
        """
        self.steps = 0
        self._env_fns, self._first = env_fns, first
        self._spec = replace(spec, num_envs=_MAX_ROWS, batch_size=_MAX_ROWS)
        self._stepper_of = stepper_of
        self._kinds: list[Hashable] | None = None
        self._built: dict[Hashable, tuple[Env, Stepper, Arrays]] = {}
        self._layout = make_layout(self._spec, 1)

    def kind(self, slot: int) -> Hashable:
        """Returns what is the same for slots whose envs are made in the same way."""
        if self._kinds is None:
            self._kinds = [_kind(place, env_fn) for place, env_fn in enumerate(self._env_fns)]
        return self._kinds[slot - self._first]

    def step(
        self, states: Sequence[SlotState], actions: Sequence[NDArray[Any]]
    ) -> tuple[list[SlotState], list[NDArray[Any]]]:
        """Steps from each state with its action.

        Args:
            states: `[k]`.
            actions: a leaf each, `[k, ...]`.

        Returns:
            The states after the steps, and a leaf of the time step each, `[k, ...]`; but for `env_id`, and
            not of envs that idle.

        Raises:
            EnvFailure: an env raised, or could not be built.
        """
        out = [
            np.empty((len(states), *leaf.shape), object if leaf.is_object else leaf.stored)
            for leaf in self._spec.timestep_leaves
        ]
        after: list[Any] = [None] * len(states)
        kinds = [self.kind(state.slot) for state in states]
        for kind in dict.fromkeys(kinds):
            places = [place for place, each in enumerate(kinds) if each == kind]
            for start in range(0, len(places), _MAX_ROWS):
                chunk = places[start : start + _MAX_ROWS]
                arrays = self._step_alike([states[place] for place in chunk], chunk, actions, after)
                for leaf, array in zip(self._spec.timestep_leaves, out, strict=True):
                    array[chunk] = arrays[leaf.path][: len(chunk)]
        return after, out

    def close(self) -> None:
        """Closes the envs that were built."""
        built, self._built = self._built, {}
        for env, _, _ in built.values():
            with suppress(BaseException):
                env.close()

    def _step_alike(
        self,
        states: Sequence[SlotState],
        places: Sequence[int],
        actions: Sequence[NDArray[Any]],
        after: list[Any],
    ) -> Arrays:
        """Steps from states of one kind, whose places among all are given; returns the rows' arrays."""
        kind = self.kind(states[0].slot)
        if kind not in self._built:
            self._build(kind, states[0].slot)
        env, stepper, arrays = self._built[kind]
        taken = arrays["stats",][0]
        before = taken[_stats.STEPS]
        for leaf, action in zip(self._spec.action_leaves, actions, strict=True):
            arrays[leaf.path][: len(places)] = action[places]
        rows = np.arange(len(places))
        for index, (state, place) in enumerate(zip(states, places, strict=True)):
            if state.episode[0] == IDLE:  # it takes no step, and the parent knows its row
                after[place] = state
                continue
            try:
                after[place] = stepper(rows[index : index + 1], state)
            except BaseException as error:
                del self._built[kind]  # who knows how it is now
                with suppress(BaseException):
                    env.close()
                if not isinstance(error, EnvFailure):
                    raise EnvFailure(state.slot, "simulate") from error
                error.env_id, error.operation = state.slot, "simulate"
                raise error from error.__cause__
            finally:
                self.steps += int(taken[_stats.STEPS] - before)
                before = taken[_stats.STEPS]
        return arrays

    def _build(self, kind: Hashable, slot: int) -> None:
        env_fn = self._env_fns[slot - self._first]
        envs = build_env([env_fn], slot)
        with Failing(slot, "simulate"):
            arrays = private_segment(self._layout)
            stepper = self._stepper_of(envs * _MAX_ROWS, env_fn, arrays)  # first, since it watches the env
            envs[0].reset(seed=0)  # wrappers and simulators want that before they go on from a state
        self._built[kind] = envs[0], stepper, arrays


def _kind(place: int, env_fn: EnvFn) -> Hashable:
    """Returns the same for functions that are the same once they are sent to a worker."""
    try:
        return dumps(env_fn)
    except Exception:  # of the serial backend, which sends nothing
        return place
