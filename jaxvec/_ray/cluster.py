"""Connects to a Ray cluster and starts actors there, each with a link here. Ray is imported here, and late.

The pool, its supervisor and both transports know nothing of Ray. An actor is the parent of worker processes
on its node (`_actor_host.py`); a link in this process (`_actor_link.py`) takes slots in their place and
passes on what they are told. So a lost actor is workers that died, and they are replaced as such.
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
from jaxvec._ray.link import ActorLink, RemoteWorker, WakePipe
from jaxvec._ray.nodes import (
    HeadMonitor,
    Placement,
    check_place,
    check_reachable,
    check_runtime_env,
    cluster_placement,
    find_dead_nodes,
    own_group_placement,
    split_runtime_env,
)
from jaxvec._util import install_command
from jaxvec._workers.base import Launcher, Slices

_CONNECT_TIMEOUT = 10.0  # seconds for the head's machine to answer

_shipped: dict[str, dict[str, Any]] = {}  # the directories that Ray took when we connected; by connection


def connect(options: Ray, timeout: float | None) -> RayCluster:
    """Connects this process to a cluster, unless it is; may start one on this machine, which ends with us.

    Args:
        options: of the user.
        timeout: seconds within which its head has to answer; a few, if it is `None` or many.

    Raises:
        ImportError: Ray is not installed; names the extra.
        ConnectionError: there is no cluster at the address.
        ValueError: this process is connected to another cluster, or was when there was nothing to ship; or
            `runtime_env` can't be.
        TypeError: `runtime_env` can't be.
    """
    try:
        _version()
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(f'backend="ray" needs Ray: {install_command("ray")}') from error
    runtime_env = options.runtime_env or {}
    if runtime_env:
        check_runtime_env(runtime_env)
    directories, _ = split_runtime_env(runtime_env)
    if not ray.is_initialized():
        address = options.address or os.environ.get("RAY_ADDRESS", "")
        check_reachable(address, _CONNECT_TIMEOUT if timeout is None else min(timeout, _CONNECT_TIMEOUT))
        ray.init(address=options.address, runtime_env=dict(directories) or None)  # Ray changes it
        _shipped[_connection(ray)] = directories
    elif options.address not in (None, "auto", "local", ray.get_runtime_context().gcs_address):
        raise ValueError(
            f"address is {options.address!r}, but this process is connected to the Ray cluster at "
            f"{ray.get_runtime_context().gcs_address}; leave it out, or call ray.shutdown() before"
        )
    elif directories and directories != _shipped.get(_connection(ray)):
        raise ValueError(
            f"runtime_env: Ray ships {' and '.join(directories)} when a process connects to a cluster, and "
            "this one was connected already; give that to ray.init(runtime_env=...), and leave it out here"
        )
    return RayCluster(ray, options)


def _connection(ray: Any) -> str:
    return ray.get_runtime_context().get_worker_id()


def _version() -> str:
    """Returns Ray's version; an `ImportError` tells Ray from a folder `ray`, which can be imported, too."""
    return importlib.metadata.version("ray")


def describe() -> str:
    """Says which Ray there is, and whether this process finds a cluster, for `doctor`; starts nothing."""
    try:
        version = _version()
    except ImportError:
        return f"off: Ray is not installed: {install_command('ray')}"
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        try:
            services = importlib.import_module("ray._private.services")
            address = next(iter(services.find_gcs_addresses()), None)
        except Exception:  # Ray's own affair, which may move
            address = None
    where = f"a cluster at {address}" if address else "no cluster found: make starts one on this machine"
    return f"ready: Ray {version}; {where}"


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self, ray: Any, options: Ray) -> None:
        self._ray = ray
        self._options = options

    def num_workers(self, num_envs: int) -> int:
        """Returns how many workers there is room for now, at least one and at most one for each env."""
        if not any(self._options.of_actor(1).values()):
            return num_envs
        rooms = own_group_placement(self._ray), cluster_placement(self._ray)
        workers = next((count for room in rooms if room and (count := room.num_workers(self._options))), 1)
        return min(num_envs, workers)

    def launcher(self, slices: Slices, config: PoolConfig) -> RayLauncher:
        """Reserves what the actors of the workers need that hold these slots, and returns what starts them.

        Raises:
            ValueError: no node of the cluster has what one actor wants, or Ray can't count that.
            TimeoutError: the placement group could not be placed in time.
        """
        size, num_workers = self._options.workers_per_actor, len(slices)
        counts = [min(size, num_workers - first) for first in range(0, num_workers, size)]
        for count in {*counts}:  # the last actor may have fewer
            self._options.check(count)
        check_place(self._ray, self._options.of_actor(counts[0]))
        placement = Placement(self._ray, self._options, counts, config.timeouts.start)
        return RayLauncher(self._ray, self._options, slices, config, placement)


class RayLauncher(Launcher):
    """Starts actors, and workers in them."""

    at_sockets = True

    def __init__(
        self,
        ray: Any,
        options: Ray,
        slices: Slices,
        config: PoolConfig,
        placement: Placement,
    ) -> None:
        """Prepares to start workers.

        Args:
            ray: the module.
            options: of the user.
            slices: the slots of each worker.
            config: options of the pool.
            placement: where the actors are put.
        """
        self._ray = ray
        self._options = options
        self._slices = slices
        self._config = config.for_workers()
        self._placement = placement
        self._dead_nodes = find_dead_nodes(ray)
        self._wake_pipe: WakePipe | None = None  # once a worker is launched
        self._arrays: Arrays | None = None  # of the segment, once it is there
        self._links: dict[int, ActorLink] = {}  # by actor; the latest
        self._incarnations: Counter[int] = Counter()  # of each worker
        self._head = HeadMonitor(ray.get_runtime_context().gcs_address, self._lose)

    def partition(self, slices: Slices) -> Slices:
        # The first worker's doorbell is rung for all of an actor.
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
        link = self._link_of(self._members(worker), self._wake_pipe)
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

    def _link_of(self, members: range, wake_pipe: WakePipe) -> ActorLink:
        """Returns the link to the actor of these workers, which may be a new one."""
        link = self._links.get(members[0])
        if link is None or link.lost:
            if link is not None and (why := self._placement.lost()):
                raise ConnectionError(why)
            link = self._links[members[0]] = ActorLink(
                self._ray,
                partial(self._start_actor, members),
                placement=self._placement,
                workers=members,
                slices=self._slices[members.start : members.stop],
                resources=self._options.of_actor(len(members)),
                config=self._config,
                data=self._options.data,
                wake_pipe=wake_pipe,
                map_segment=self._map_segment,
                dead_nodes=self._dead_nodes,
                predecessor=link,
            )
        return link

    def _map_segment(self, descriptor: int, layout: Layout) -> Arrays:
        """Maps the pool's segment once for all links: a mapping holds a descriptor."""
        if self._arrays is None:
            self._arrays = attach_segment(descriptor, layout)
        return self._arrays

    def _members(self, worker: int) -> range:
        """Returns the workers that live in the same actor."""
        size = self._options.workers_per_actor
        first = worker // size * size
        return range(first, min(first + size, len(self._slices)))

    def _start_actor(self, workers: range) -> Any:
        number = workers[0] // self._options.workers_per_actor
        runtime_env = split_runtime_env(self._options.runtime_env or {})[1]
        options = self._placement.actor_options(number, len(workers), runtime_env)
        options["concurrency_groups"] = {"stream": 2}  # one may yet wait for a connection
        return self._ray.remote(**options)(_actor_class()).remote()

    def _lose(self, why: str) -> None:
        for link in list(self._links.values()):
            link.lose(why, reachable=False)


def _actor_class() -> type:
    """Returns the actor's class. It travels by value: a node that lacks jaxvec is to say so itself."""
    method: Any = importlib.import_module("ray").method

    class JaxvecWorkers:
        def identify(self) -> dict[str, str]:
            import importlib
            import platform

            ray: Any = importlib.import_module("ray")
            context = ray.get_runtime_context()
            self._ip_address: str = ray.util.get_node_ip_address()
            said = {
                "node": f"node {self._ip_address} ({context.get_node_id()[:12]})",
                "Python": ".".join(platform.python_version_tuple()[:2]),
            }
            try:
                said["jaxvec"] = importlib.import_module("jaxvec").__version__
                self._wire = importlib.import_module("jaxvec._ray.link")
            except Exception as error:
                said["error"] = f"{type(error).__name__}: {error}"
            return said

        def clock(self) -> int:
            import time

            return time.monotonic_ns()

        def init(self, workers: range, slices: Any, config: Any) -> None:
            self._host = self._wire.ActorHost(workers, slices, config)

        def do(self, name: str, *args: Any) -> None:
            self._host.do(name, *args)

        def listen(self, key: bytes) -> tuple[str, int]:
            self._listener = self._wire.Listener(self._ip_address, key)
            return self._listener.address

        @method(concurrency_group="stream")
        def serve(self) -> None:
            self._wire.serve(self._host, self._listener)

        @method(concurrency_group="stream")
        def run(self) -> Any:
            yield from self._host.run()

    return JaxvecWorkers
