"""The nodes of a Ray cluster: their runtime environments, checks of them, and the placement of actors."""

from __future__ import annotations

import errno
import importlib
import inspect
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxvec._backends.remote.wire import HostLostError

if TYPE_CHECKING:
    from jaxvec._backends.ray.backend import Ray

# --- Runtime environments: Ray ships directories when a process connects, and the rest with each actor


def check_runtime_env(runtime_env: Mapping[str, Any]) -> None:
    """Checks a runtime environment as Ray does, and also its field names, which Ray ignores if unknown."""
    ray_class: Any = importlib.import_module("ray.runtime_env").RuntimeEnv
    known = {*inspect.signature(ray_class).parameters, *ray_class.known_fields}
    unknown = sorted(set(runtime_env) - known)
    if unknown and "RAY_RUNTIME_ENV_PLUGINS" not in os.environ:  # plugins add fields
        names = ", ".join(sorted(name for name in known - {"kwargs"} if not name.startswith("_")))
        raise ValueError(f"runtime_env has no {', '.join(map(repr, unknown))}; fields of Ray are {names}")
    try:
        ray_class(**runtime_env)
    except (ValueError, TypeError) as error:
        raise type(error)(f"runtime_env: {error}") from error


def split_runtime_env(runtime_env: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the local directories, which Ray ships only when a process connects, and the other fields."""
    here: dict[str, Any] = {}
    if _is_path(runtime_env.get("working_dir")):
        here["working_dir"] = os.path.abspath(runtime_env["working_dir"])
        if "excludes" in runtime_env:
            here["excludes"] = runtime_env["excludes"]
    modules = runtime_env.get("py_modules") or ()
    if any(map(_is_path, modules)):
        here["py_modules"] = [os.path.abspath(each) if _is_path(each) else each for each in modules]
    return here, {name: value for name, value in runtime_env.items() if name not in here}


def _is_path(location: Any) -> bool:
    return isinstance(location, str) and "://" not in location


# --- Checks of the cluster's head and of an actor's node -------------------------------------------------

_HEAD_CHECK_INTERVAL = 1.0  # seconds between checks of the head
_HEAD_TIMEOUT_FRACTION = 2 / 3  # of the time that Ray waits for a head to come back


class HeadMonitor:
    """A thread that checks the cluster's head until `close`.

    Steps don't need the head, so a restart of a fault-tolerant head has no effect. But if the head stays away
    for `RAY_gcs_rpc_server_reconnect_timeout_s` (60 s by default), Ray exits this process. The pool gets its
    error after two thirds of that time, so that the program can still save its work.
    """

    def __init__(self, address: str, on_loss: Callable[[str], None]) -> None:
        self._address = address
        self._on_loss = on_loss
        self.lost = ""  # reason of the loss; only the monitor's thread writes it, before it calls `on_loss`
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        ray_timeout = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112
        last_answer = time.monotonic()
        while not self._closed.wait(_HEAD_CHECK_INTERVAL):
            if self._answers():
                last_answer = time.monotonic()
            elif time.monotonic() - last_answer > _HEAD_TIMEOUT_FRACTION * ray_timeout:
                self.lost = f"was lost: the Ray cluster's head at {self._address} does not answer"
                self._on_loss(self.lost)
                return

    def _answers(self) -> bool:
        try:
            _connect(self._address, _HEAD_CHECK_INTERVAL)
        except OSError as error:
            return error.errno == errno.EMFILE  # this process's limit, not a sign of a lost head
        return True


def check_reachable(address: str, timeout: float) -> None:
    """Raises `ConnectionError` if no head listens at an address. Ray itself would wait for minutes."""
    address = address.rpartition("://")[2]
    if not address.rpartition(":")[2].isdigit():  # such as "auto": Ray finds the address itself
        return
    try:
        _connect(address, timeout)
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster can be reached at {address}: {error}; check Ray(address=...) or RAY_ADDRESS, "
            "and the firewalls between this machine and the head"
        ) from error


def is_same_head(address: str | None, connected: str, here: str) -> bool:
    """Returns whether an option `address` names the head at `connected`; `here` is this machine's address."""
    if address in (None, "auto", "local", connected):
        return True
    scheme, _, rest = str(address).rpartition("://")
    (host, _, port), (head, _, head_port) = rest.rpartition(":"), connected.rpartition(":")
    with suppress(OSError):  # an unknown name
        found = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None)}
        is_local = head == here and not found.isdisjoint(("127.0.0.1", "::1"))
        # The port of "ray://" is that of Ray's client server.
        return (head in found or is_local) and (port == head_port or scheme == "ray")
    return False


def _connect(address: str, timeout: float) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout).close()


def find_dead_nodes(ray: Any) -> set[str]:
    """Returns the ids of the nodes that the cluster has lost."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def check_descriptors() -> None:
    """Raises `HostLostError` if no descriptor is left. Ray would retry its connection forever."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise HostLostError(
            "can't be reached: this program has too many open files, and each actor needs some; raise its "
            "limit (ulimit -n), or raise workers_per_actor"
        ) from error


def describe_loss(error: BaseException) -> str:
    """Joins the lines of Ray's error, up to 2,000 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"was lost: {type(error).__name__}: {' '.join(lines)[:2000]}"


# --- Placement: in a group of the pool, in the group of this process, or on any node ---------------------
# Ray Tune and Ray Train run a process in a placement group that captures its child actors. If the group has
# no resources left for them, they would wait forever, even while nodes are idle.


@dataclass(frozen=True)
class Capacity:
    """Resources for actors, by name."""

    free: Mapping[str, float]  # of all places together
    places: Sequence[Mapping[str, float]]  # of each node, or bundle of a placement group; free or in use

    def num_actors(self, wanted: Mapping[str, float]) -> int:
        """Returns the number of actors that fit; 0 if an actor wants nothing."""
        return min(_count_fits(self.free, wanted), sum(_count_fits(place, wanted) for place in self.places))

    def num_workers(self, options: Ray) -> int:
        """Returns the number of workers that fit: in full actors, or else in one smaller actor."""
        actors = self.num_actors(options.of_actor())
        return actors * options.workers_per_actor if actors else self.num_actors(options.of_actor(1))


def cluster_capacity(ray: Any) -> Capacity:
    places = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Capacity(ray.available_resources(), places)


def own_group_capacity(ray: Any) -> Capacity | None:
    """Returns the capacity left in the placement group that captures this process's actors, if any."""
    context = ray.get_runtime_context()
    group = ray.util.get_current_placement_group()
    if group is None or not context.should_capture_child_tasks_in_placement_group:
        return None
    places = [dict(bundle) for bundle in group.bundle_specs]
    # Ray may count this process's own resources as free for a moment.
    own = context.get_assigned_resources()
    for place in places:
        if all(place.get(name, 0) >= amount for name, amount in own.items()):
            place.update({name: place[name] - amount for name, amount in own.items()})
            break
    total = Counter[str]()
    for place in places:
        total.update(place)
    suffix = f"_group_{group.id.hex()}"
    available = ray.available_resources()
    if f"bundle{suffix}" in available:  # Ray adds it to each group, but the head may not know the group yet
        return Capacity({name: available.get(f"{name}{suffix}", 0) for name in total}, places)
    return Capacity(total, places)


def check_place(ray: Any, wanted: Mapping[str, float]) -> None:
    """Raises `ValueError` if no node of the cluster has the resources that an actor wants."""
    nodes = cluster_capacity(ray).places
    if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
        has = "; ".join(str({name: node.get(name, 0) for name in wanted}) for node in nodes)
        raise ValueError(f"resources_per_worker: no node of the Ray cluster has {wanted}; nodes have {has}")


class Placement:
    """The placement of one pool's actors.

    Args:
        counts: Number of workers of each actor. The first has the most.
        timeout: Seconds to wait for a placement group, if `options` ask for one, before a `TimeoutError`.
    """

    def __init__(self, ray: Any, options: Ray, counts: Sequence[int], timeout: float | None) -> None:
        self._ray = ray
        self._options = options
        self._group: Any = None  # the pool's own group
        self._parent: Any = None  # the group of this process; other threads of a Ray task can't look it up
        if (strategy := options.placement_strategy) is not None:
            bundles = [options.of_actor(count) for count in counts]
            self._group = ray.util.placement_group(bundles, strategy=strategy)
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            try:
                while not self._group.wait(timeout_seconds=0.5):  # Ctrl-C does not end this wait
                    if time.monotonic() >= deadline:
                        raise TimeoutError(
                            f"the Ray cluster has no room for {len(bundles)} actors of {bundles[0]} with "
                            f"placement_strategy={strategy!r}: none was found within Timeouts.start, "
                            f"{timeout} s; available: {ray.available_resources()}"
                        )
            except BaseException:
                self.close()
                raise
        elif (own := own_group_capacity(ray)) and own.num_actors(options.of_actor(counts[0])) >= len(counts):
            self._parent = ray.util.get_current_placement_group()

    def actor_options(self, actor: int, num_workers: int) -> dict[str, Any]:
        resources = self._options.of_actor(num_workers)
        in_group = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        if self._group is not None:
            strategy = in_group(self._group, placement_group_bundle_index=actor)
        else:  # "DEFAULT" escapes a group that captures child actors
            strategy = "DEFAULT" if self._parent is None else in_group(self._parent)
        return {
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "runtime_env": split_runtime_env(self._options.runtime_env or {})[1],
            "max_restarts": 0,  # a replacement needs the state of its predecessor, which Ray does not know
            "max_task_retries": 0,  # no step may run twice
            "scheduling_strategy": strategy,
        }

    def loss(self) -> str:
        """Returns why no actor can be placed any more, or an empty string. Ray would wait forever."""
        group = self._group
        if group is None or self._ray.util.placement_group_table(group).get("state") != "REMOVED":
            return ""
        return "the placement group of the pool's actors was removed, so lost actors can't be replaced"

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self._ray.is_initialized():
            self._ray.util.remove_placement_group(group)


def _count_fits(have: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    return min((int(have.get(name, 0) // amount) for name, amount in wanted.items() if amount > 0), default=0)
