"""`jaxvec.Ray`: hosts of workers in tasks of a Ray cluster.

Ray places, starts and ends the tasks. Each dials in to this process, as `jaxvec worker` does (`remote/`).
"""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxvec._backends.ray import cluster
from jaxvec._backends.remote.backend import HostsBackend, split_workers
from jaxvec._backends.remote.link import CHECK_INTERVAL, HostLauncher, HostSource
from jaxvec._backends.remote.wire import Host, HostLostError, Listener
from jaxvec._options import PoolConfig, check_count
from jaxvec._workers.base import Slices

_RETRY_TIMEOUT = 10.0  # seconds in which a lost host may dial in again, before another task starts


@dataclass(frozen=True)
class Ray(HostsBackend):
    """Hosts of workers on a Ray cluster, for `make(backend=...)`; `"ray"` is short for `Ray()`.

    Each host is a Ray task, on the cluster that this process is connected to or that `ray.init()` finds.

    Attributes:
        hosts: Number of hosts of each pool. They share its workers evenly. Each step needs one message per
            host, so use few hosts with many workers each, down to one per node.
        options: Options of the tasks, as for Ray's `.options(...)`: `num_cpus`, `resources`,
            `scheduling_strategy`, `runtime_env`, and others. By default, a task reserves a CPU per worker.

    Example:
        ```python
        cluster = jaxvec.Ray(hosts=4, options={"num_cpus": 16, "scheduling_strategy": "SPREAD"})
        envs = jaxvec.make("CartPole-v1", 256, num_workers=64, backend=cluster)
        ```
    """

    hosts: int = 1
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        check_count("hosts", self.hosts, 1)

    def num_workers(self, num_instances: int, timeout: float | None) -> int:
        return min(num_instances, self.hosts * max(int(self.options.get("num_cpus", 1)), 1))

    def launcher(self, slices: Slices, config: PoolConfig) -> HostLauncher:
        groups = split_workers(slices, self.hosts)
        ray = cluster.connect()
        # Ray starts a task again if its node is lost. A process that has served a pool is not used again.
        options = {"num_cpus": max(map(len, groups)), "max_retries": -1, "max_calls": 1, **self.options}
        if ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
            # Ray knows the group only in this thread, but a lost host is replaced in another one.
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            options.setdefault("scheduling_strategy", strategy(ray.util.get_current_placement_group()))
        task = ray.remote(**options)(_host_task())
        listener = Listener(ray.util.get_node_ip_address(), 0, secrets.token_bytes(32))
        missing = f"Ray has not started their host with {options}; `ray status` shows what is free"
        sources = [RayHost(ray, task, listener, missing) for _ in groups]
        return HostLauncher(groups, slices, config, sources, on_close=listener.close)


class RayHost(HostSource):
    """A host in a Ray task, which Ray starts again if its process or node is lost.

    Tasks end with their connection. They are not cancelled: if a task ends at the same time, `ray.cancel`
    ends this process (Ray 2.60).
    """

    def __init__(self, ray: Any, task: Any, listener: Listener, missing: str) -> None:
        super().__init__(listener, missing)
        self._ray, self._task, self._token = ray, task, secrets.token_hex()
        self._serving = self._start_task()

    def _start_task(self) -> Any:
        return self._task.remote(self.listener.address, self.listener.key, self._token)

    def start(self, check: Callable[[], None]) -> Host:
        deadline, is_new = time.monotonic() + _RETRY_TIMEOUT, not self.node
        while (host := self.listener.take(self._token, CHECK_INTERVAL)) is None:
            check()
            if not self._ray.is_initialized():  # otherwise, Ray would start another cluster
                raise HostLostError("was lost: Ray was shut down")
            has_ended = bool(self._ray.wait([self._serving], timeout=0)[0])
            if has_ended and is_new:
                self.node, why = self._ray.get(self._serving)
                raise HostLostError(why)
            if not is_new and (has_ended or time.monotonic() > deadline):
                self._serving = self._start_task()
                is_new = True
        self.node = host.node
        return host


def _host_task() -> Callable[..., tuple[str, str]]:
    """Returns the function of the tasks. Ray pickles it by value, so a node without jaxvec reports that."""

    def serve(address: tuple[str, int], key: bytes, token: str) -> tuple[str, str]:
        ray: Any = importlib.import_module("ray")
        node = f"node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:12]})"
        try:
            host = importlib.import_module("jaxvec._backends.remote.host")
            host.serve_pool(address, key, node=node, token=token)
        except Exception as error:
            why = f"could not be served: {type(error).__name__}: {error}; install jaxvec on the node, and "
            why += "allow TCP connections from the nodes to free ports of this machine"
            return node, str(error) if type(error).__name__ == "HostLostError" else why
        return node, "was ended"

    return serve
