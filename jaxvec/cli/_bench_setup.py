"""Makes pools of an env, and of toys, and gives them turns, all in the way of one run of `bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space

import jaxvec
from jaxvec._spec import Leaf, PoolSpec
from jaxvec._vector_env import VectorEnv
from jaxvec.cli._progress import Progress
from jaxvec.cli._systems import System, Turn, take_turns
from jaxvec.cli._target import Target
from jaxvec.cli._toys import NoOpEnv

ROUNDS = 5


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        num_envs, num_workers: of pools; `None` for what suits env and machine.
        seconds: of one system's turn.
        transport: of programs.
    """

    num_envs: tuple[int, ...] | None
    num_workers: tuple[int, ...] | None
    seconds: float
    transport: str


@dataclass(frozen=True)
class BenchSetup:
    """All that pools and turns of a run have in common.

    Attributes:
        target, request, progress: of the run.
        step_seconds: of the bare env.
        lanes: how many envs this machine steps at a time.
        spec: of a pool of the env.
    """

    target: Target
    request: Request
    progress: Progress
    step_seconds: float
    lanes: int
    spec: PoolSpec

    def pool(self, num_envs: int, num_workers: int, **settings: Any) -> VectorEnv:
        """Makes a pool of the env."""
        transport = self.request.transport
        return self.target.make(num_envs=num_envs, num_workers=num_workers, transport=transport, **settings)

    def no_op(self, num_envs: int, num_workers: int, obs: Space[Any], action: Space[Any]) -> VectorEnv:
        """Makes a pool of envs that have these spaces and do nothing."""
        make = partial(NoOpEnv, obs, action)
        return jaxvec.make(make, num_envs, num_workers=num_workers, transport=self.request.transport)

    def length(self, num_envs: int, num_workers: int, *, no_op: bool = False) -> int:
        """Returns the length of scans, of which a turn should have some: by a rough and high estimate."""
        step = 30e-6 + num_envs * (1e-6 + 4e-9 * obs_bytes(self.spec))
        if not no_op:
            step += num_envs * self.step_seconds / min(num_workers, self.lanes)
        return int(np.clip(self.request.seconds / 4 / step, 1, 1000))

    def turns(self, systems: Mapping[str, System], what: str) -> dict[str, Turn]:
        """Gives turns to systems; returns the medians."""
        return take_turns(
            systems, rounds=ROUNDS, seconds=self.request.seconds, what=what, progress=self.progress
        )


def obs_leaves(spec: PoolSpec) -> list[Leaf]:
    """Returns the leaves of an observation."""
    return [leaf for leaf in spec.timestep_leaves if leaf.path[0] == "obs"]


def obs_bytes(spec: PoolSpec) -> int:
    """Returns the size of one env's observation, as it is stored."""
    return sum(int(np.prod(leaf.shape)) * leaf.stored.itemsize for leaf in obs_leaves(spec))
