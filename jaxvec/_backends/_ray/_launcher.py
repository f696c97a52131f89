"""Connects to a Ray cluster and starts actors there, each with a link here. Ray is imported here, and late.

The pool, its supervisor and both transports know nothing of Ray. An actor is the parent of worker processes
on its node (`_actor_host.py`); a link in this process (`_actor_link.py`) takes slots in their place and
passes on what they are told. So a lost actor is workers that died, and they are replaced as such.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxvec._backends._launcher import Slices
from jaxvec._backends._ray._actor_link import ActorLink, RemoteWorker
from jaxvec._backends._ray._nodes import HeadMonitor
from jaxvec._backends._start_method import StartMethod
from jaxvec._handoff import _channel
from jaxvec._handoff._channel import Channel
from jaxvec._ray import Ray

_EXTRA = 'pip install "jaxvec[ray]"'


def connect(options: Ray) -> RayCluster:
    """Connects this process to a cluster, unless it is; may start one on this machine, which ends with us.

    Raises:
        ImportError: Ray is not installed; names the extra.
        ConnectionError: there is no cluster at the address.
        ValueError: this process is connected to another cluster.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(f'backend="ray" needs Ray: {_EXTRA}') from error
    if not ray.is_initialized():
        ray.init(address=options.address)
    elif options.address not in (None, "auto", "local", ray.get_runtime_context().gcs_address):
        raise ValueError(
            f"address is {options.address!r}, but this process is connected to the Ray cluster at "
            f"{ray.get_runtime_context().gcs_address}; leave it out, or call ray.shutdown() before"
        )
    return RayCluster(ray, options)


def describe() -> str:
    """Says which Ray there is, and whether this process finds a cluster, for `doctor`; starts nothing."""
    if importlib.util.find_spec("ray") is None:
        return f"off: Ray is not installed: {_EXTRA}"
    version = importlib.metadata.version("ray")
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
        free = self._ray.available_resources()  # of all nodes together
        actor, worker = self._options.of_actor(), self._options.of_actor(1)
        if not any(worker.values()):
            return num_envs
        actors = min(_room(free, actor), sum(_room(node, actor) for node in self._nodes()))
        workers = actors * self._options.workers_per_actor if actors else _room(free, worker)
        return max(1, min(num_envs, workers))

    def launcher(self, num_workers: int, method: StartMethod) -> RayLauncher:
        """Reserves what the actors of `num_workers` workers need, and returns what starts them.

        Raises:
            ValueError: no node of the cluster has what one actor wants.
            TimeoutError: the placement group could not be placed in time.
        """
        size = self._options.workers_per_actor
        counts = [min(size, num_workers - first) for first in range(0, num_workers, size)]
        resources = self._options.of_actor(counts[0])
        nodes = self._nodes()
        if not any(all(node.get(name, 0) >= amount for name, amount in resources.items()) for node in nodes):
            has = "; ".join(str({name: node.get(name, 0) for name in resources}) for node in nodes)
            raise ValueError(
                f"resources_per_worker: no node of the Ray cluster has {resources}; its nodes have {has}"
            )
        group = None
        if self._options.placement_strategy is not None:
            group = self._reserve([self._options.of_actor(count) for count in counts], method.timeout)
        return RayLauncher(self._ray, self._options, num_workers, method, group)

    def _nodes(self) -> list[dict[str, float]]:
        """Returns what each node has, free or not."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _reserve(self, bundles: list[dict[str, float]], timeout: float | None) -> Any:
        groups = importlib.import_module("ray.util.placement_group")
        strategy = self._options.placement_strategy
        group = groups.placement_group(bundles, strategy=strategy)
        if not group.wait(timeout_seconds=1e9 if timeout is None else timeout):
            groups.remove_placement_group(group)
            raise TimeoutError(
                f"the Ray cluster has no room for {len(bundles)} actors of {bundles[0]} with "
                f"placement_strategy={strategy!r}: none was found within start_timeout, {timeout} s; free "
                f"are {self._ray.available_resources()}"
            )
        return group


class RayLauncher:
    """Starts actors, and workers in them; see `Launcher`."""

    at_sockets = True

    def __init__(
        self,
        ray: Any,
        options: Ray,
        num_workers: int,
        method: StartMethod,
        group: Any | None,
    ) -> None:
        """Prepares to start workers.

        Args:
            ray: the module.
            options: of the user.
            num_workers: of the pool.
            method: how the actors start them.
            group: the placement group, if there is one, with a bundle for each actor.
        """
        self._ray = ray
        self._options = options
        self._num_workers = num_workers
        self._method = method
        self._group = group
        self._links: dict[int, ActorLink] = {}  # by actor; the latest
        self._incarnations: Counter[int] = Counter()  # of each worker
        self._head = HeadMonitor(ray.get_runtime_context().gcs_address, self._lose)

    def shares(self, slices: Slices) -> Slices:
        # The first worker of each actor has the bell for all.
        shares: list[tuple[int, int]] = []
        for worker in range(len(slices)):
            members = self._members(worker)
            stop = slices[members[-1]][1]
            shares.append((slices[worker][0] if worker == members[0] else stop, stop))
        return tuple(shares)

    def launch(self, worker: int) -> tuple[RemoteWorker, Channel]:
        if self._head.lost:
            raise ConnectionError(self._head.lost)
        members = self._members(worker)
        link = self._links.get(members[0])
        if link is None or link.lost:
            link = self._links[members[0]] = ActorLink(
                self._ray,
                partial(self._start_actor, members),
                workers=members,
                method=self._method,
                predecessor=link,
            )
        ours, theirs = _channel.pair()
        self._incarnations[worker] += 1
        return link.launch(worker, self._incarnations[worker], _channel.adopt(theirs)), ours

    def close(self) -> None:
        self._head.close()
        for link in self._links.values():
            link.close(timeout=1)
        self._links.clear()
        group, self._group = self._group, None
        if group is not None and self._ray.is_initialized() and not self._head.lost:
            importlib.import_module("ray.util.placement_group").remove_placement_group(group)

    def _members(self, worker: int) -> range:
        """Returns the workers that live in the same actor."""
        size = self._options.workers_per_actor
        first = worker // size * size
        return range(first, min(first + size, self._num_workers))

    def _start_actor(self, workers: range) -> Any:
        resources = self._options.of_actor(len(workers))
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "runtime_env": dict(self._options.runtime_env or {}),
            "max_restarts": 0,  # who takes its place has to be told of the envs
            "max_task_retries": 0,  # no step may be taken twice
            "concurrency_groups": {"stream": 1},
        }
        if self._group is not None:
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=workers[0] // self._options.workers_per_actor
            )
        return self._ray.remote(**options)(_actor_class()).remote()

    def _lose(self, why: str) -> None:
        for link in list(self._links.values()):
            link.lose(why, reachable=False)


def _room(have: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    """Returns how many times there is what is wanted, of which something is."""
    return min(int(have.get(name, 0) // amount) for name, amount in wanted.items() if amount > 0)


def _actor_class() -> type:
    """Returns the actor's class. It travels by value: a node that lacks jaxvec is to say so itself."""

    class JaxvecWorkers:
        def identify(self) -> dict[str, str]:
            import importlib
            import platform

            ray: Any = importlib.import_module("ray")
            context = ray.get_runtime_context()
            said = {
                "node": f"node {ray.util.get_node_ip_address()} ({context.get_node_id()[:12]})",
                "Python": ".".join(platform.python_version_tuple()[:2]),
            }
            try:
                said["jaxvec"] = importlib.import_module("jaxvec").__version__
                self._module = importlib.import_module("jaxvec._backends._ray._actor_host")
            except Exception as error:
                said["error"] = f"{type(error).__name__}: {error}"
            return said

        def clock(self) -> int:
            import time

            return time.monotonic_ns()

        def init(self, workers: range, method: Any) -> None:
            self._host = self._module.ActorHost(workers, method)

        def do(self, name: str, *args: Any) -> None:
            try:
                getattr(self._host, name)(*args)
            except Exception as error:  # nobody waits for this to return
                self._host.fail(f"failed: {type(error).__name__}: {error}")

        def run(self) -> Any:
            yield from self._host.run()

    return JaxvecWorkers
