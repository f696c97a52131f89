"""How a pool's workers become actors of a Ray cluster: the record that `make(backend=...)` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_STEP = 0.0001
DATA = ("auto", "tcp", "ray")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class Ray:
    """Hosts a pool's workers on a Ray cluster, for `make(backend=...)`; `"ray"` stands for `Ray()`.

    Attributes:
        address: of the cluster, as `ray.init` takes it. `None` for the one that this process is
            connected to, or else that `ray.init()` finds or starts on this machine.
        workers_per_actor: how many worker processes each actor has on its node. What they do travels
            together, so few actors with many workers each spare the driver work, up to one a node.
        resources_per_worker: that its actor holds for each worker, such as
            `{"CPU": 2, "GPU": 0.5, "memory": 4e9}`; one CPU by default.
        placement_strategy: of the placement group that the actors are started in: `"PACK"`, `"SPREAD"`,
            `"STRICT_PACK"` or `"STRICT_SPREAD"`. `None` for no group: Ray places each by itself.
        runtime_env: what the actors' nodes have to provide, as Ray takes it: `pip`, `working_dir`, …
            Directories of this machine are shipped when the process connects to the cluster, so they are
            refused if it is connected by then.
        data: how actions and results travel: `"tcp"`, by a connection to each actor, at a free port of its
            node; `"ray"`, by Ray's calls, at several times the work; `"auto"`, by the first that is possible.

    Example:
        ```python
        cluster = jaxvec.Ray("auto", workers_per_actor=16, resources_per_worker={"CPU": 0.5})
        envs = jaxvec.make("CartPole-v1", 256, num_workers=64, backend=cluster)
        ```
    """

    address: str | None = None
    workers_per_actor: int = 1
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    data: str = "auto"

    def __post_init__(self) -> None:
        if self.placement_strategy not in (None, *STRATEGIES):
            raise ValueError(
                f"placement_strategy must be one of {', '.join(STRATEGIES)}, or None, not "
                f"{self.placement_strategy!r}"
            )
        if self.data not in DATA:
            raise ValueError(f"data must be one of {', '.join(DATA)}, not {self.data!r}")
        count = self.workers_per_actor
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"workers_per_actor must be an integer of at least 1, not {count!r}")
        for name, amount in self._of_worker.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"resources_per_worker[{name!r}] must be a number of at least 0, not {amount!r}"
                )
        self.check(count)

    def check(self, num_workers: int) -> None:
        """Checks that Ray can count what an actor of so many workers holds; raises `ValueError`."""
        for name, amount in self.of_actor(num_workers).items():
            why = ""
            if 0 < amount < _STEP:
                why = f"Ray counts in steps of {_STEP}"
            elif name == "GPU" and amount > 1 and amount % 1:
                why = "Ray gives out parts of one GPU, or whole ones"
            if why:
                raise ValueError(
                    f"resources_per_worker[{name!r}] is {self._of_worker[name]!r}, so an actor of "
                    f"{num_workers} workers holds {amount}, but {why}"
                )

    def of_actor(self, num_workers: int | None = None) -> dict[str, float]:
        """Returns what an actor holds that has so many workers; as many as one can have, by default."""
        count = self.workers_per_actor if num_workers is None else num_workers
        return {name: round(amount * count, 8) for name, amount in self._of_worker.items()}

    @property
    def _of_worker(self) -> dict[str, float]:
        return {"CPU": 1, **(self.resources_per_worker or {})}
