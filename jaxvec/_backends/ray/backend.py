"""`jaxvec.Ray`: the options for workers on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from jaxvec._backends.remote.backend import HostsBackend
from jaxvec._backends.remote.link import HostLauncher
from jaxvec._options import PoolConfig, check_count
from jaxvec._settings import check_choice
from jaxvec._workers.base import Slices

if TYPE_CHECKING:
    from jaxvec._backends.ray.cluster import RayCluster

_RESOURCE_STEP = 0.0001  # Ray stores amounts of resources in multiples of this
Strategy: TypeAlias = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@dataclass(frozen=True)
class Ray(HostsBackend):
    """Options for workers on a Ray cluster, for `make(backend=...)`; `"ray"` is short for `Ray()`.

    Attributes:
        address: Address of the cluster, as for `ray.init`. `None` uses the cluster that this process is
            connected to, or else the one that `ray.init()` finds or starts.
        workers_per_actor: Number of worker processes per actor. Each step needs one message per actor, so use
            few actors with many workers each, down to one per node.
        resources_per_worker: Resources that an actor reserves per worker, such as
            `{"CPU": 2, "GPU": 0.5, "memory": 4e9}`; one CPU by default.
        placement_strategy: Strategy of the actors' placement group: `"PACK"`, `"SPREAD"`, `"STRICT_PACK"` or
            `"STRICT_SPREAD"`. `None` for no group, so that Ray places each actor independently.
        runtime_env: Runtime environment of the actors, as for Ray: `pip`, `working_dir`, … Ray uploads local
            directories when the process connects to the cluster, so they are rejected after that.

    Example:
        ```python
        cluster = jaxvec.Ray("auto", workers_per_actor=16, resources_per_worker={"CPU": 0.5})
        envs = jaxvec.make("CartPole-v1", 256, num_workers=64, backend=cluster)
        ```
    """

    address: str | None = None
    workers_per_actor: int = 1
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: Strategy | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_choice("placement_strategy", self.placement_strategy, (*get_args(Strategy), None))
        check_count("workers_per_actor", self.workers_per_actor, 1)
        for name, amount in self._of_worker.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"resources_per_worker[{name!r}] must be a number >= 0, not {amount!r}")
        self.check_resources(self.workers_per_actor)

    def check_resources(self, num_workers: int) -> None:
        """Raises `ValueError` if Ray cannot reserve the resources of an actor with `num_workers` workers."""
        for name, amount in self.of_actor(num_workers).items():
            why = ""
            if 0 < amount < _RESOURCE_STEP:
                why = f"Ray counts in steps of {_RESOURCE_STEP}"
            elif name == "GPU" and amount > 1 and amount % 1:
                why = "Ray can reserve a part of one GPU or whole GPUs"
            if why:
                raise ValueError(
                    f"resources_per_worker[{name!r}] is {self._of_worker[name]!r}, so an actor with "
                    f"{num_workers} workers reserves {amount}, but {why}"
                )

    def of_actor(self, num_workers: int | None = None) -> dict[str, float]:
        """Returns the resources of an actor with `num_workers` workers, by default `workers_per_actor`."""
        count = self.workers_per_actor if num_workers is None else num_workers
        return {name: round(amount * count, 8) for name, amount in self._of_worker.items()}

    @property
    def _of_worker(self) -> dict[str, float]:
        return {"CPU": 1, **(self.resources_per_worker or {})}

    def num_workers(self, num_instances: int, timeout: float | None) -> int:
        return self._connect(timeout).num_workers(num_instances)

    def launcher(self, slices: Slices, config: PoolConfig) -> HostLauncher:
        return self._connect(config.timeouts.start).launcher(slices, config)

    def _connect(self, timeout: float | None) -> RayCluster:
        from jaxvec._backends.ray import cluster  # imports Ray, which is optional

        return cluster.connect(self, timeout)
