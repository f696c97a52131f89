"""The connection to a Ray cluster, and the launcher that runs a pool's workers in actors there.

    RayCluster --makes--> RayLauncher --one per actor--> ActorLink (link.py) --wire--> ActorHost (actor.py)

The pool and its supervisor know nothing of Ray: a lost actor is a group of dead workers, which are replaced
as such. Ray is imported only when `connect` is called.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections import Counter
from functools import partial
from typing import Any

from jaxvec._config import PoolConfig, Ray
from jaxvec._memory.segment import Arrays, Layout, attach_segment
from jaxvec._ray import nodes
from jaxvec._ray.link import ActorLink, RemoteWorker, WakePipe
from jaxvec._util import check_versions, install_command
from jaxvec._workers.base import Launcher, Slices

_CONNECT_TIMEOUT = 10.0  # seconds for the head's machine to answer

_shipped: dict[str, dict[str, Any]] = {}  # directories that Ray shipped at connection, by `_connection`


def connect(options: Ray, timeout: float | None) -> RayCluster:
    """Connects this process to a cluster, unless it is connected already.

    Without an address Ray may start a cluster on this machine, which ends with this process. The head has
    `timeout` seconds to answer, and at most `_CONNECT_TIMEOUT`.

    Raises:
        ConnectionError: No cluster answers at the address.
        ValueError, TypeError: `options` do not fit the existing connection, or Ray rejects `runtime_env`.
    """
    try:
        _version()
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(f'backend="ray" needs Ray: {install_command("ray")}') from error
    check_versions('backend="ray"', "ray")
    runtime_env = options.runtime_env or {}
    if runtime_env:
        nodes.check_runtime_env(runtime_env)
    directories, _ = nodes.split_runtime_env(runtime_env)
    if not ray.is_initialized():
        address = options.address or os.environ.get("RAY_ADDRESS", "")
        seconds = _CONNECT_TIMEOUT if timeout is None else min(timeout, _CONNECT_TIMEOUT)
        nodes.check_reachable(address, seconds)
        ray.init(address=options.address, runtime_env=dict(directories) or None)  # Ray modifies the dict
        _shipped[_connection(ray)] = directories
    elif options.address not in (None, "auto", "local", ray.get_runtime_context().gcs_address):
        raise ValueError(
            f"address is {options.address!r}, but this process is connected to the Ray cluster at "
            f"{ray.get_runtime_context().gcs_address}; omit address, or call ray.shutdown() first"
        )
    elif directories and directories != _shipped.get(_connection(ray)):
        raise ValueError(
            f"runtime_env: Ray ships {' and '.join(directories)} only when a process connects to a cluster, "
            "and this one was connected already; pass it to ray.init(runtime_env=...) instead"
        )
    return RayCluster(ray, options)


def _connection(ray: Any) -> str:
    return ray.get_runtime_context().get_worker_id()


def _version() -> str:
    """Returns Ray's version. Unlike `import ray`, this fails for a mere folder with the name `ray`."""
    return importlib.metadata.version("ray")


def describe() -> str:
    """Describes Ray and the cluster that `connect` would find, for `jaxvec doctor`; starts nothing."""
    try:
        version = _version()
    except ImportError:
        return f"off: Ray is not installed: {install_command('ray')}"
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        try:
            services = importlib.import_module("ray._private.services")
            address = next(iter(services.find_gcs_addresses()), None)
        except Exception:  # a private function of Ray, which may change
            address = None
    where = f"a cluster at {address}" if address else "no cluster found: make starts one on this machine"
    return f"ready: Ray {version}; {where}"


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self, ray: Any, options: Ray) -> None:
        self._ray = ray
        self._options = options

    def num_workers(self, num_envs: int) -> int:
        """Returns the number of workers that fit now, at least one and at most one per env."""
        if not any(self._options.of_actor(1).values()):
            return num_envs
        capacities = nodes.own_group_capacity(self._ray), nodes.cluster_capacity(self._ray)
        counts = (each.num_workers(self._options) for each in capacities if each)
        return min(num_envs, next(filter(None, counts), 1))

    def launcher(self, slices: Slices, config: PoolConfig) -> RayLauncher:
        """Reserves resources for the workers of these slices, and returns their launcher.

        Raises `ValueError` if no node can hold an actor, `TimeoutError` if a placement group finds no room.
        """
        size, num_workers = self._options.workers_per_actor, len(slices)
        counts = [min(size, num_workers - first) for first in range(0, num_workers, size)]
        for count in {*counts}:  # the last actor may have fewer
            self._options.check(count)
        nodes.check_place(self._ray, self._options.of_actor(counts[0]))
        placement = nodes.Placement(self._ray, self._options, counts, config.timeouts.start)
        return RayLauncher(self._ray, self._options, slices, config, placement)


class RayLauncher(Launcher):
    """The launcher of workers in actors of a Ray cluster."""

    at_sockets = True

    def __init__(
        self, ray: Any, options: Ray, slices: Slices, config: PoolConfig, placement: nodes.Placement
    ) -> None:
        self._ray = ray
        self._options = options
        self._slices = slices
        self._config = config.for_workers()
        self._placement = placement
        self._dead_nodes = nodes.find_dead_nodes(ray)
        self._wake_pipe: WakePipe | None = None  # once a worker is launched
        self._arrays: Arrays | None = None  # of the pool's segment, once a worker attaches
        self._links: dict[int, ActorLink] = {}  # latest link of each actor, by the actor's first worker
        self._incarnations: Counter[int] = Counter()  # by worker
        self._head = nodes.HeadMonitor(ray.get_runtime_context().gcs_address, self._lose)

    def partition(self, slices: Slices) -> Slices:
        # Ring only the first worker's doorbell for all slots of an actor: its `Shipper` waits for that one.
        parts: list[tuple[int, int]] = []
        for worker in range(len(slices)):
            members = self._members(worker)
            stop = slices[members[-1]][1]
            parts.append((slices[worker][0] if worker == members[0] else stop, stop))
        return tuple(parts)

    def launch(self, worker: int) -> tuple[RemoteWorker, RemoteWorker]:
        if self._head.lost:
            raise ConnectionError(self._head.lost)
        if self._wake_pipe is None:
            self._wake_pipe = WakePipe()
        self._incarnations[worker] += 1
        members = self._members(worker)
        link = self._links.get(members[0])
        if link is None or link.lost:
            if link is not None and (why := self._placement.loss()):
                raise ConnectionError(why)
            link = self._links[members[0]] = ActorLink(
                self._ray,
                partial(self._start_actor, members),
                options=self._options,
                placement=self._placement,
                workers=members,
                slices=self._slices[members.start : members.stop],
                config=self._config,
                wake_pipe=self._wake_pipe,
                map_segment=self._map_segment,
                dead_nodes=self._dead_nodes,
                predecessor=link,
            )
        remote = link.launch(worker, self._incarnations[worker])
        return remote, remote

    def close(self) -> None:
        self._head.close()
        for link in self._links.values():
            link.close(timeout=1)
        self._links.clear()
        self._arrays = None
        if self._wake_pipe is not None:
            self._wake_pipe.close()
        if not self._head.lost:
            self._placement.close()

    def _map_segment(self, descriptor: int, layout: Layout) -> Arrays:
        """Maps the pool's segment, once for all links, because each mapping holds a descriptor."""
        if self._arrays is None:
            self._arrays = attach_segment(descriptor, layout)
        return self._arrays

    def _members(self, worker: int) -> range:
        size = self._options.workers_per_actor
        first = worker // size * size
        return range(first, min(first + size, len(self._slices)))

    def _start_actor(self, workers: range) -> Any:
        number = workers[0] // self._options.workers_per_actor
        runtime_env = nodes.split_runtime_env(self._options.runtime_env or {})[1]
        options = self._placement.actor_options(number, len(workers), runtime_env)
        # Two threads: if the pool falls back to Ray, `serve` may still wait for a connection during `run`.
        options["concurrency_groups"] = {"stream": 2}
        return self._ray.remote(**options)(_actor_class()).remote()

    def _lose(self, why: str) -> None:
        for link in list(self._links.values()):
            link.lose(why, reachable=False)


def _actor_class() -> type:
    """Returns the actor's class, which Ray pickles by value. So a node without jaxvec can report that."""
    method: Any = importlib.import_module("ray").method

    class JaxvecWorkers:
        def identify(self) -> dict[str, str]:
            import importlib
            import platform

            ray: Any = importlib.import_module("ray")
            context = ray.get_runtime_context()
            self._ip_address: str = ray.util.get_node_ip_address()
            identity = {
                "node": f"node {self._ip_address} ({context.get_node_id()[:12]})",
                "Python": ".".join(platform.python_version_tuple()[:2]),
            }
            try:
                identity["jaxvec"] = importlib.import_module("jaxvec").__version__
                self._link = importlib.import_module("jaxvec._ray.link")
            except Exception as error:
                identity["error"] = f"{type(error).__name__}: {error}"
            return identity

        def clock(self) -> int:
            import time

            return time.monotonic_ns()

        def init(self, workers: range, slices: Any, config: Any) -> None:
            self._host = self._link.ActorHost(workers, slices, config)

        def call(self, name: str, *args: Any) -> None:
            self._host.call(name, *args)

        def listen(self, key: bytes) -> tuple[str, int]:
            self._listener = self._link.Listener(self._ip_address, key)
            return self._listener.address

        @method(concurrency_group="stream")
        def serve(self) -> None:
            self._link.serve(self._host, self._listener)

        @method(concurrency_group="stream")
        def run(self) -> Any:
            yield from self._host.run()

    return JaxvecWorkers
