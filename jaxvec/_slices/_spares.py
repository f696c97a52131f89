"""Envs that a worker resets in advance, when it has nothing else to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxvec import _seeds
from jaxvec._slices import _envs
from jaxvec._slices._envs import Env, EnvFn


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
            (env,) = _envs.build([env_fns[which]], first + which)
            self._ring.append(Spare(env))

    def reseed(self, seed: int) -> None:
        """Gives each a seed of its own, made from one; resets in advance are void."""
        for place, spare in enumerate(self._ring):
            spare.seed, spare.result, spare.failed = _seeds.derive(seed, 1, place), None, False

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
