"""The nodes of a Ray cluster: environments, checks, and places for actors."""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import platform
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxvec._config import Ray
from jaxvec._envs.failures import Report

# ----------------------------------------------------------------------------------------------------------
# What nodes have to provide: some of it Ray takes when this process connects, the rest with each actor.
# ----------------------------------------------------------------------------------------------------------


def check_runtime_env(runtime_env: Mapping[str, Any]) -> None:
    """Checks a runtime environment as Ray does, and that Ray knows all of it, which it does not check.

    Raises:
        ValueError, TypeError: Ray can't provide that; says why.
    """
    known_to: Any = importlib.import_module("ray.runtime_env").RuntimeEnv
    known = {*inspect.signature(known_to).parameters, *known_to.known_fields}
    unknown = sorted(set(runtime_env) - known)
    if unknown and "RAY_RUNTIME_ENV_PLUGINS" not in os.environ:  # these know more
        names = ", ".join(sorted(name for name in known - {"kwargs"} if not name.startswith("_")))
        raise ValueError(f"runtime_env has no {', '.join(map(repr, unknown))}; Ray knows {names}")
    try:
        known_to(**runtime_env)
    except (ValueError, TypeError) as error:
        raise type(error)(f"runtime_env: {error}") from error


def split_runtime_env(runtime_env: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what Ray takes when a process connects, which are directories here, and the rest."""
    here: dict[str, Any] = {}
    if _is_path(runtime_env.get("working_dir")):
        here["working_dir"] = os.path.abspath(runtime_env["working_dir"])
        if "excludes" in runtime_env:
            here["excludes"] = runtime_env["excludes"]
    modules = runtime_env.get("py_modules") or ()
    if any(map(_is_path, modules)):
        here["py_modules"] = [os.path.abspath(each) if _is_path(each) else each for each in modules]
    return here, {name: value for name, value in runtime_env.items() if name not in here}


def _is_path(place: Any) -> bool:
    return isinstance(place, str) and "://" not in place


# ----------------------------------------------------------------------------------------------------------
# Checks the nodes of a Ray cluster: that the head answers, and that an actor's node is like this one.
# ----------------------------------------------------------------------------------------------------------

_HEAD_CHECK_INTERVAL = 1.0  # seconds between looks at the head
_FRACTION = 2 / 3  # of the time that Ray waits for a head to come back


class ActorLostError(Exception):
    """An actor can't serve, or no longer; says why."""


class TooManyFilesError(ActorLostError):
    """An actor can't be reached, for want of descriptors."""

    def __init__(self) -> None:
        super().__init__(
            "can't be reached: this program has too many open files, and each actor needs some; raise its "
            "limit (ulimit -n), or take more workers_per_actor"
        )


class HeadMonitor:
    """Looks whether the cluster's head can be reached, until it is closed.

    Steps don't need the head, so one that comes back in time, as Ray's fault-tolerant ones do, is not
    missed. One that does not is fatal: Ray exits the process, by `RAY_gcs_rpc_server_reconnect_timeout_s`
    (60 s by default). After two thirds of that the pool gets its error, while there is time to save.

    Attributes:
        lost: what is wrong, if it is.
    """

    def __init__(self, address: str, tell: Callable[[str], None]) -> None:
        """Begins to watch.

        Args:
            address: of the head, `host:port`.
            tell: is called once, in another thread, when the head is lost.
        """
        self._address = address
        self._tell = tell
        self.lost = ""
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()

    def _watch(self) -> None:
        patience = _FRACTION * float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112
        seen = time.monotonic()
        while not self._closed.wait(_HEAD_CHECK_INTERVAL):
            if self._answers():
                seen = time.monotonic()
            elif time.monotonic() - seen > patience:
                self.lost = f"was lost: the Ray cluster's head at {self._address} does not answer"
                self._tell(self.lost)
                return

    def _answers(self) -> bool:
        try:
            _connect(self._address, _HEAD_CHECK_INTERVAL)
        except OSError as error:
            return error.errno == errno.EMFILE  # which says nothing of the head
        return True


def check_reachable(address: str, timeout: float) -> None:
    """Checks that somebody listens where a cluster's head should be, for which Ray would wait for minutes.

    Args:
        address: as `ray.init` takes it; only one with a port is checked.
        timeout: seconds.

    Raises:
        ConnectionError: nobody does.
    """
    address = address.rpartition("://")[2]
    if not address.rpartition(":")[2].isdigit():  # such as "auto", for which Ray looks
        return
    try:
        _connect(address, timeout)
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster can be reached at {address}: {error}; check Ray(address=...) or RAY_ADDRESS, "
            "and whether a firewall is between"
        ) from error


def _connect(address: str, timeout: float) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout).close()


def node_identity() -> dict[str, str]:
    """Returns what a node has to have as this one has it."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "jaxvec": importlib.import_module("jaxvec").__version__,
    }


def check_alike(said: Mapping[str, str]) -> None:
    """Checks what an actor's `identify` has said; raises `ActorLostError` if it can't work with us."""
    if "error" in said:
        raise ActorLostError(
            f"can't import jaxvec ({said['error']}); install it there, or have Ray do so: "
            'backend=jaxvec.Ray(runtime_env={"pip": ["jaxvec"]})'
        )
    for what, ours in node_identity().items():
        if said[what] != ours:
            raise ActorLostError(
                f"has {what} {said[what]}, but this process has {ours}; they must be the same"
            )


def find_dead_nodes(ray: Any) -> set[str]:
    """Returns the nodes that the cluster has had and lost."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def check_descriptors() -> None:
    """Raises `TooManyFilesError` if none is left: Ray would try to connect to an actor without end."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise TooManyFilesError from error


def clock_offset(read_clock: Callable[[], int]) -> int:
    """Returns how many ns an actor's monotonic clock is ahead of ours, to half of the way there and back."""
    found: list[tuple[int, int]] = []
    for _ in range(5):  # the quickest answer counts
        asked = time.monotonic_ns()
        theirs = read_clock()
        answered = time.monotonic_ns()
        found.append((answered - asked, theirs - (asked + answered) // 2))
    return min(found)[1]


def on_node(report: Report, node: str) -> Report:
    """Returns a report that says where it comes from."""
    hint = ""
    if report.kind in ("ModuleNotFoundError", "ImportError"):
        hint = '; install it there, or have Ray do so: backend=jaxvec.Ray(runtime_env={"pip": [...]})'
    return replace(report, message=f"{report.message} (on {node}{hint})")


def describe_loss(error: BaseException) -> str:
    """Says in a line or a few what Ray says in many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"was lost: {type(error).__name__}: {' '.join(lines)[:2000]}"


# ----------------------------------------------------------------------------------------------------------
# Where a pool's actors are put: in a group of its own, in the group of this process, or anywhere.
#
# An actor of Ray's Tune and Train is in a placement group that captures what it starts: its actors are put
# there, too, and wait without end if nothing is reserved for them, though nodes may be idle.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """What there is for actors.

    Attributes:
        free: of all places together.
        places: what each has, free or not: nodes, or bundles of a placement group.
    """

    free: Mapping[str, float]
    places: Sequence[Mapping[str, float]]

    def num_actors(self, wanted: Mapping[str, float]) -> int:
        """Returns how many there is room for that each want this; 0 if that is nothing."""
        return min(_times(self.free, wanted), sum(_times(place, wanted) for place in self.places))

    def num_workers(self, options: Ray) -> int:
        """Returns how many workers there is room for, in actors that are full or in one that is not."""
        actors = self.num_actors(options.of_actor())
        return actors * options.workers_per_actor if actors else self.num_actors(options.of_actor(1))

    def has_place(self, wanted: Mapping[str, float]) -> bool:
        """Says whether an actor that wants this could ever be somewhere."""
        return any(
            all(place.get(name, 0) >= amount for name, amount in wanted.items()) for place in self.places
        )


def cluster_placement(ray: Any) -> Room:
    """Returns what the nodes have."""
    places = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Room(ray.available_resources(), places)


def own_group_placement(ray: Any) -> Room | None:
    """Returns what is left in the placement group that captures what this process starts, if one does."""
    context = ray.get_runtime_context()
    group = ray.util.get_current_placement_group()
    if group is None or not context.should_capture_child_tasks_in_placement_group:
        return None
    places = [dict(bundle) for bundle in group.bundle_specs]
    ours = context.get_assigned_resources()  # which may count as free for a moment yet
    for place in places:
        if all(place.get(name, 0) >= amount for name, amount in ours.items()):
            place.update({name: place[name] - amount for name, amount in ours.items()})
            break
    total = Counter[str]()
    for place in places:
        total.update(place)
    suffix = f"_group_{group.id.hex()}"
    told = ray.available_resources()
    if f"bundle{suffix}" in told:  # which every group has, once the cluster's head has heard of it
        return Room({name: told.get(f"{name}{suffix}", 0) for name in total}, places)
    return Room(total, places)


def check_place(ray: Any, wanted: Mapping[str, float]) -> None:
    """Raises `ValueError` if no node of the cluster has what an actor wants."""
    cluster = cluster_placement(ray)
    if not cluster.has_place(wanted):
        has = "; ".join(str({name: node.get(name, 0) for name in wanted}) for node in cluster.places)
        raise ValueError(
            f"resources_per_worker: no node of the Ray cluster has {wanted}; its nodes have {has}"
        )


class Placement:
    """Where the actors of one pool are put."""

    def __init__(self, ray: Any, options: Ray, counts: Sequence[int], timeout: float | None) -> None:
        """Reserves room, if the pool is to have a group of its own.

        Args:
            ray: the module.
            options: of the user.
            counts: how many workers each actor has; the first has the most.
            timeout: seconds that the cluster has to find room for a group.

        Raises:
            TimeoutError: it found none.
        """
        self._ray = ray
        self._options = options
        self._group: Any = None  # of the pool
        self._parent: Any = None  # the group of this process, which its threads don't know of in a task
        if options.placement_strategy is not None:
            bundles = [options.of_actor(count) for count in counts]
            self._group = self._reserve(bundles, options.placement_strategy, timeout)
        elif (own := own_group_placement(ray)) and own.num_actors(options.of_actor(counts[0])) >= len(counts):
            self._parent = ray.util.get_current_placement_group()

    def actor_options(self, actor: int, num_workers: int, runtime_env: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options by which Ray starts an actor with so many workers."""
        resources = self._options.of_actor(num_workers)
        return {
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "runtime_env": runtime_env,
            "max_restarts": 0,  # who takes its place has to be told what this one was
            "max_task_retries": 0,  # no step may be taken twice
            "scheduling_strategy": self._strategy(actor),
        }

    def _strategy(self, actor: int) -> Any:
        strategy: Any = importlib.import_module(
            "ray.util.scheduling_strategies"
        ).PlacementGroupSchedulingStrategy
        if self._group is not None:
            return strategy(self._group, placement_group_bundle_index=actor)
        return "DEFAULT" if self._parent is None else strategy(self._parent)  # no group captures "DEFAULT"

    def lost(self) -> str:
        """Says why no actor finds a place any more, if that is so: Ray lets it wait without end."""
        group = self._group
        if group is None or _groups().placement_group_table(group).get("state") != "REMOVED":
            return ""
        return "the placement group that had the pool's actors was removed, so none can take another's place"

    def close(self) -> None:
        """Gives back what was reserved."""
        group, self._group = self._group, None
        if group is not None and self._ray.is_initialized():
            _groups().remove_placement_group(group)

    def _reserve(self, bundles: list[dict[str, float]], strategy: str, timeout: float | None) -> Any:
        group = _groups().placement_group(bundles, strategy=strategy)
        if not group.wait(timeout_seconds=1e9 if timeout is None else timeout):
            _groups().remove_placement_group(group)
            raise TimeoutError(
                f"the Ray cluster has no room for {len(bundles)} actors of {bundles[0]} with "
                f"placement_strategy={strategy!r}: none was found within Timeouts.start, {timeout} s; free "
                f"are {self._ray.available_resources()}"
            )
        return group


def _groups() -> Any:
    return importlib.import_module("ray.util.placement_group")


def _times(have: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    """Returns how many times there is what is wanted."""
    return min((int(have.get(name, 0) // amount) for name, amount in wanted.items() if amount > 0), default=0)
