"""The door for backends: the places where the workers of a pool run."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxvec._options import PoolConfig
from jaxvec._workers.base import WorkerGroup
from jaxvec._workers.protocol import WorkerRecipe


class Backend(ABC):
    """A place where the workers of a pool run, for `make(backend=...)`.

    `make` calls `check`, then `num_workers` unless the user gave a number, and then `start`. An instance may
    serve several pools. Backends with worker processes start a `ProcessWorkers` with a `Launcher` of their
    own, which is all that differs between them.

    Example:
        ```python
        from jaxvec.backends import LocalLauncher, ProcessWorkers

        class TwoProcesses(jaxvec.Backend):
            def num_workers(self, num_instances, timeout):
                return min(num_instances, 2)

            def start(self, recipe, *, learn_info):
                return ProcessWorkers(recipe, LocalLauncher(recipe), learn_info=learn_info)

        with jaxvec.make("CartPole-v1", 4, backend=TwoProcesses()) as envs:
            print(envs.num_workers)  # 2
        ```
    """

    def check(self, config: PoolConfig) -> None:  # noqa: B027 - a default
        """Raises `ValueError` for an option that this backend does not support."""

    @abstractmethod
    def num_workers(self, num_instances: int, timeout: float | None) -> int:
        """Returns the number of workers for a pool of that many envs, or batched envs.

        Raises:
            TimeoutError: The place was not known within `timeout` seconds.
        """

    @abstractmethod
    def start(self, recipe: WorkerRecipe, *, learn_info: bool) -> WorkerGroup:
        """Starts the workers, and waits until they have built their envs.

        With `learn_info`, the description of the envs contains an info of env 0.
        """
