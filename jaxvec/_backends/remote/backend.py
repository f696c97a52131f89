"""The base class of backends with workers on other machines."""

from __future__ import annotations

from abc import abstractmethod

from jaxvec._backends.remote.link import HostLauncher
from jaxvec._memory.segment import split_evenly
from jaxvec._options import PoolConfig
from jaxvec._workers.backend import Backend
from jaxvec._workers.base import Slices, WorkerGroup
from jaxvec._workers.process import ProcessWorkers
from jaxvec._workers.protocol import WorkerRecipe


class HostsBackend(Backend):
    """A backend whose workers are at hosts on other machines."""

    def check(self, config: PoolConfig) -> None:
        if config.workers.python is not None:
            raise ValueError(
                "Workers(python=...) needs workers on this machine; on a Ray cluster, use "
                'Ray(options={"runtime_env": ...})'
            )
        if config.states.max and config.reset_options is not None:
            raise ValueError(
                "reset_options and states can be combined only with workers on this machine: on others, a "
                "restore would not reach the options that this process keeps for the envs. Remove one of them"
            )

    def start(self, recipe: WorkerRecipe, *, learn_info: bool) -> WorkerGroup:
        launcher = self.launcher(recipe.slices, recipe.config)
        return ProcessWorkers(recipe, launcher, learn_info=learn_info)

    @abstractmethod
    def launcher(self, slices: Slices, config: PoolConfig) -> HostLauncher:
        """Returns the launcher of the workers of these slices."""


def split_workers(slices: Slices, hosts: int) -> list[range]:
    """Returns the workers of each host; raises `ValueError` if there are fewer workers than hosts."""
    if len(slices) < hosts:
        raise ValueError(f"hosts is {hosts}, but the pool has only {len(slices)} workers")
    return [range(*group) for group in split_evenly(len(slices), hosts)]
