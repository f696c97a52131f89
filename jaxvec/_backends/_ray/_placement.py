"""Where a pool's actors are put: in a group of its own, in the group of this process, or anywhere.

An actor of Ray's Tune and Train is in a placement group that captures what it starts: its actors are put
there, too, and wait without end if nothing is reserved for them, though nodes may be idle.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxvec._ray import Ray


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


def of_cluster(ray: Any) -> Room:
    """Returns what the nodes have."""
    places = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Room(ray.available_resources(), places)


def of_own_group(ray: Any) -> Room | None:
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
    cluster = of_cluster(ray)
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
        elif (own := of_own_group(ray)) and own.num_actors(options.of_actor(counts[0])) >= len(counts):
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
                f"placement_strategy={strategy!r}: none was found within start_timeout, {timeout} s; free "
                f"are {self._ray.available_resources()}"
            )
        return group


def _groups() -> Any:
    return importlib.import_module("ray.util.placement_group")


def _times(have: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    """Returns how many times there is what is wanted."""
    return min((int(have.get(name, 0) // amount) for name, amount in wanted.items() if amount > 0), default=0)
