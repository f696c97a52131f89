"""The connection to a Ray cluster, and the launcher that runs hosts of workers in actors there.

Ray places, starts and ends the hosts. Each dials in to this process, as those of `jaxvec.Remote` do: see
`_backends/remote/link.py`. Ray is imported only when `connect` is called.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxvec._backends.ray import nodes
from jaxvec._backends.remote.link import CHECK_INTERVAL, HostLauncher, HostSource
from jaxvec._backends.remote.wire import Host, HostLostError, Listener
from jaxvec._options import PoolConfig
from jaxvec._util import check_versions, install_command
from jaxvec._workers.base import Slices

if TYPE_CHECKING:
    from jaxvec._backends.ray.backend import Ray

_CONNECT_TIMEOUT = 10.0  # seconds for the head's machine to answer
_PLACE_CHECK_INTERVAL = 1.0  # seconds between checks that an actor can still be placed
_CAUSE_TIMEOUT = 2.0  # seconds in which Ray may find out why an actor's connection ended

_shipped: dict[str, dict[str, Any]] = {}  # directories that Ray shipped at connection, by its id


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
    nodes.check_runtime_env(runtime_env)
    directories, _ = nodes.split_runtime_env(runtime_env)
    if not ray.is_initialized():
        address = options.address or os.environ.get("RAY_ADDRESS", "")
        seconds = _CONNECT_TIMEOUT if timeout is None else min(timeout, _CONNECT_TIMEOUT)
        nodes.check_reachable(address, seconds)
        ray.init(address=options.address, runtime_env=dict(directories) or None)  # Ray modifies the dict
        _shipped[ray.get_runtime_context().get_worker_id()] = directories
        return RayCluster(ray, options)
    context = ray.get_runtime_context()
    if not nodes.is_same_head(options.address, context.gcs_address, ray.util.get_node_ip_address()):
        raise ValueError(
            f"address is {options.address!r}, but this process is connected to the Ray cluster at "
            f"{context.gcs_address}; omit address, or call ray.shutdown() first"
        )
    if directories and directories != _shipped.get(context.get_worker_id()):
        raise ValueError(
            f"runtime_env: Ray ships {' and '.join(directories)} only when a process connects to a cluster, "
            "and this one was connected already; pass it to ray.init(runtime_env=...) instead"
        )
    return RayCluster(ray, options)


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
        with suppress(Exception):  # a private function of Ray, which may change
            services = importlib.import_module("ray._private.services")
            address = next(iter(services.find_gcs_addresses()), None)
    where = f"a cluster at {address}" if address else "no cluster found: make starts one on this machine"
    return f"ready: Ray {version}; {where}"


@dataclass
class RayCluster:
    """A cluster that this process is connected to."""

    ray: Any  # the module
    options: Ray

    def num_workers(self, num_envs: int) -> int:
        """Returns the number of workers that fit now, at least one and at most one per env."""
        if not any(self.options.of_actor(1).values()):
            return num_envs
        capacities = nodes.own_group_capacity(self.ray), nodes.cluster_capacity(self.ray)
        counts = (each.num_workers(self.options) for each in capacities if each)
        return min(num_envs, next(filter(None, counts), 1))

    def launcher(self, slices: Slices, config: PoolConfig) -> RayLauncher:
        """Reserves resources for the workers of these slices, and returns their launcher."""
        return RayLauncher(self.ray, self.options, slices, config)


class RayLauncher(HostLauncher):
    """The launcher of hosts in actors of a Ray cluster.

    Raises `ValueError` if no node can hold an actor, `TimeoutError` if a placement group finds no room.
    """

    def __init__(self, ray: Any, options: Ray, slices: Slices, config: PoolConfig) -> None:
        size, num_workers = options.workers_per_actor, len(slices)
        groups = [range(first, min(first + size, num_workers)) for first in range(0, num_workers, size)]
        counts = [len(group) for group in groups]
        for count in {*counts}:  # the last actor may have fewer
            options.check_resources(count)
        nodes.check_place(ray, options.of_actor(counts[0]))
        self._ray = ray
        self.key = secrets.token_bytes(32)  # Ray brings it to the actors
        self.placement = nodes.Placement(ray, options, counts, config.timeouts.start)
        self.listener = Listener(ray.util.get_node_ip_address(), 0, self.key)
        self._options = options
        super().__init__(groups, slices, config, self._make_actor_host)
        self._head = nodes.HeadMonitor(ray.get_runtime_context().gcs_address, self._lose)

    def close(self) -> None:
        self._head.close()
        super().close()
        self.listener.close()
        if not self._head.lost:
            self.placement.close()

    def _make_actor_host(self, number: int, workers: range) -> HostSource:
        if why := self._head.lost or self.placement.loss():
            raise ConnectionError(why)
        actor_options = self.placement.actor_options(number, len(workers))
        actor_class = self._ray.remote(**actor_options)(_actor_class())
        return _RayHost(self, self._ray, actor_class, self._options.of_actor(len(workers)))

    def _lose(self, why: str) -> None:
        for link in list(self._links.values()):
            link.lose(why, reachable=False)


@dataclass
class _RayHost(HostSource):
    """A host in an actor. The actor is started again if its node dies before it answers.

    Ray places actors on a dead node until it notices the death, seconds later. If that counted as another
    fault, one dead node could use up all restarts.
    """

    launcher: RayLauncher
    ray: Any
    actor_class: Any
    needs: dict[str, float]  # resources of the actor
    actor: Any = None
    serving: Any = None  # pending call of `serve`, which fails if the actor is lost
    node: str = ""
    missing: str = ""

    def start(self, check: Callable[[], None]) -> Host:
        listener, token = self.launcher.listener, secrets.token_hex()
        try:
            self._start_actor(check)
            self.serving = self.actor.serve.remote(listener.address, self.launcher.key, self.node, token)
            while (host := listener.take(lambda host: host.token == token, CHECK_INTERVAL)) is None:
                self._check(check)
                if failure := self._failure(timeout=0):
                    raise failure
            return host
        except OSError as error:
            host, port = listener.address
            raise HostLostError(
                f"can't connect to this process at {host}:{port}: {error}; allow TCP connections from the "
                "nodes to free ports of this machine in the firewall"
            ) from error
        except self.ray.exceptions.RayError as error:
            raise HostLostError(nodes.describe_loss(error)) from error

    def cause(self) -> HostLostError | None:
        if not self.ray.is_initialized():  # `ray.wait` would start another cluster
            return None
        failure = self._failure(_CAUSE_TIMEOUT)
        return failure if isinstance(failure, HostLostError) else None  # an OSError reports the same end

    def _failure(self, timeout: float) -> Exception | None:
        """Returns the error of `serve`, if it ends in time."""
        try:
            if self.ray.wait([self.serving], timeout=timeout)[0]:
                self.ray.get(self.serving)
        except self.ray.exceptions.RayTaskError as error:
            return error.cause if isinstance(error.cause, OSError) else HostLostError(str(error.cause))
        except self.ray.exceptions.RayError as error:
            return HostLostError(nodes.describe_loss(error))
        return None

    def end(self) -> None:
        # `ray.kill` blocks if Ray's head node is gone, and starts another cluster if Ray was shut down.
        if self.actor is not None and self.ray.is_initialized():
            self.ray.kill(self.actor, no_restart=True)

    def _start_actor(self, check: Callable[[], None]) -> None:
        while True:
            dead_nodes = nodes.find_dead_nodes(self.ray)
            self.actor = self.actor_class.remote()
            try:
                # Retried, since until Ray notices the death, it reports "unavailable" and lists no dead node.
                reference = self.actor.identify.options(max_task_retries=-1).remote()
                while not self.ray.wait([reference], timeout=_PLACE_CHECK_INTERVAL)[0]:
                    self.missing = (
                        f"Ray has not started their actor; it needs {self.needs}, "
                        f"available: {self.ray.available_resources()}"
                    )
                    self._check(check)
                self.node, self.missing = self.ray.get(reference), ""
                return
            except self.ray.exceptions.RayActorError:
                self._check(check)
                if nodes.find_dead_nodes(self.ray) <= dead_nodes:
                    raise

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except HostLostError:  # `end` ran before there was an actor, or beside its start
            self.end()
            raise
        if why := self.launcher.placement.loss():
            raise HostLostError(f"was not started: {why}")
        nodes.check_descriptors()


def _actor_class() -> type:
    """Returns the actor's class, which Ray pickles by value. So a node without jaxvec can report that."""

    class JaxvecWorkers:
        def identify(self) -> str:
            ray: Any = importlib.import_module("ray")
            context = ray.get_runtime_context()
            return f"node {ray.util.get_node_ip_address()} ({context.get_node_id()[:12]})"

        def serve(self, address: tuple[str, int], key: bytes, node: str, token: str) -> None:
            try:
                host = importlib.import_module("jaxvec._backends.remote.host")
            except Exception as error:
                raise ImportError(
                    f"can't import jaxvec ({type(error).__name__}: {error}); install it on the node, or let "
                    'Ray install it: backend=jaxvec.Ray(runtime_env={"pip": ["jaxvec"]})'
                ) from None
            host.serve_pool(address, key, node=node, token=token)

    return JaxvecWorkers
