"""Steps batched envs: each instance is a `gymnasium.vector.VectorEnv` that fills neighbouring slots.

`BatchSlice` replaces `EnvSlice` for simulators that step many envs in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec import _stats
from jaxvec._arguments import read_seed
from jaxvec._envs.env_access import EnvAccess
from jaxvec._envs.env_rows import WITHOUT_FINAL_OBS, one_of
from jaxvec._envs.env_slice import OnSlice
from jaxvec._envs.envs import (
    AttributeErrorContext,
    BatchedEnv,
    EnvErrorContext,
    EnvFn,
    declares,
    split_reset,
    wrong_step,
)
from jaxvec._envs.slice import Done, Slice
from jaxvec._leaves import DictNode, Leaf, Node, PaddedNode, leaves, map_leaves, padded_nodes
from jaxvec._memory.rows import InvalidValue, Write, column, conform, reader, store, writer, wrong_structure
from jaxvec._memory.segment import Arrays, Marks, kind_of
from jaxvec._options import PoolConfig
from jaxvec._spec import Autoreset, PoolSpec
from jaxvec._tracing import RecordedEnv, SpanRecorder

# Paths of the leaves that a reset zeroes.
_OF_EPISODE = (
    ("reward",),
    ("terminated",),
    ("truncated",),
    ("info", "episode_return"),
    ("info", "episode_length"),
)


class BatchAccess(EnvAccess):
    """The requests to batched envs. Each uses an instance once, and splits a result with one entry per env.

    Attributes:
        infos: Raw info of the last step or reset of each instance.
    """

    def __init__(self, instances: list[BatchedEnv], size: int, first: int) -> None:
        self._instances = instances
        self._size = size
        self._first = first
        self.infos: list[dict[str, Any]] = [{} for _ in instances]

    def infos_of(self, slots: Iterable[int]) -> list[dict[str, Any]]:
        places = (divmod(slot - self._first, self._size) for slot in slots)
        return [self.copied(one_of(self.infos[which], row, self._size)) for which, row in places]

    def call(self, slots: Iterable[int], args: Sequence[Any], name: str, kwargs: Any) -> list[Any]:
        def call(instance: Any, mine: Sequence[Any], keywords: Any) -> Any:
            # Not all vector envs have `call`, and those that do may not forward `render`.
            if declares(instance, "call") and name != "render":
                return instance.call(name, *mine, **keywords)
            attribute = attrgetter(name)(instance)
            return attribute(*mine, **keywords) if callable(attribute) else attribute

        arguments_of_slots = [(mine, kwargs) for mine in args]
        return self._apply(slots, arguments_of_slots, call, lambda slot: AttributeErrorContext(slot, name))

    def map(self, slots: Iterable[int], args: Sequence[Any], function: Callable[..., Any]) -> list[Any]:
        return self._apply(slots, args, function, lambda slot: EnvErrorContext(slot, "map"))

    def set_attr(self, slots: Iterable[int], values: Sequence[Any], name: str) -> None:
        by_instance: dict[int, dict[int, Any]] = {}
        for slot, value in zip(slots, values, strict=True):
            which, row = divmod(slot - self._first, self._size)
            by_instance.setdefault(which, {})[row] = self.copied(value)
        for which, rows in by_instance.items():
            instance: Any = self._instances[which]
            with AttributeErrorContext(self._first + which * self._size + min(rows), f"set_attr({name!r})"):
                if not declares(instance, "set_attr"):
                    for value in rows.values():
                        setattr(instance.unwrapped, name, value)
                    continue
                # `set_attr` takes values for all envs of the instance, so pass the other envs their own.
                whole = len(rows) == self._size
                values_of_envs = [None] * self._size if whole else list(instance.get_attr(name))
                for row, value in rows.items():
                    values_of_envs[row] = value
                instance.set_attr(name, values_of_envs)

    def _apply(
        self,
        slots: Iterable[int],
        args: Sequence[Any],
        function: Callable[..., Any],
        error_context: Callable[[int], EnvErrorContext],
    ) -> list[Any]:
        answers: dict[int, Any] = {}
        results: list[Any] = []
        for slot, arguments in zip(slots, args, strict=True):
            which, row = divmod(slot - self._first, self._size)
            if which not in answers:
                with error_context(slot):
                    answers[which] = function(self._instances[which], *self.copied(arguments))
            value = answers[which]
            batched = isinstance(value, (list, tuple, np.ndarray)) and len(value) == self._size
            results.append(value[row] if batched else value)
        return results


class BatchSlice(Slice):
    """The instances that fill the slots from `first` on, `size` each.

    A step has all slots. A reset may have all slots of some instances only, or any slots without autoreset.
    """

    def __init__(
        self,
        envs: list[BatchedEnv],
        env_fns: Sequence[EnvFn],
        *,
        first: int,
        worker: int,
        spec: PoolSpec,
        arrays: Arrays,
        config: PoolConfig,
        spares: Sequence[BatchedEnv] = (),
        on_slice: Sequence[OnSlice] = (),
    ) -> None:
        """Takes over built envs. It has no halves of extensions, no spare envs, and replaces no slice."""
        assert config.envs_per_instance is not None
        self._instances = envs
        self._targets: list[Any] = envs  # or objects that record their steps and resets
        self._size = size = config.envs_per_instance
        self._check = check = config.check
        self.first = first
        self._spec = spec
        self._arrays = arrays
        self._running = memoryview(Marks.of(arrays).running[worker])
        self._stats = memoryview(arrays["stats",][worker])
        count = len(envs) * size
        self._returns = np.zeros((count, *spec.reward.shape))
        self._lengths = np.zeros(count, np.int32)
        self._over = np.zeros(count, np.bool_)  # True after a step that ended an episode
        access = BatchAccess(envs, size, first)
        self.access = access
        self._infos = access.infos  # which it gives to those who ask
        # Creating a writer for a single row is slow, so do it once.
        infos = [spec.declared, *([spec.info.child("final_info")] if spec.has_final_info else [])]
        nodes: list[Node] = [child for info in infos for child in info.children[::2]]
        nodes += [spec.info.child("final_obs")] if spec.has_final_obs else []
        nodes += padded_nodes(spec.obs)
        self._write_row = {node.path: writer(node, arrays, check=check) for node in nodes}
        arrays["info", "env_id"][first : first + count] = range(first, first + count)

    def reset(self, slots: NDArray[Any], done: Done | None = None) -> None:
        for which in np.unique((slots - self.first) // self._size).tolist():
            started = monotonic_ns()
            rows = self._rows(which)
            self._running[0] = rows.start + 1
            chosen = np.isin(np.arange(rows.start, rows.stop), slots)
            seeds = self._arrays["seed",][rows]
            reset = rows.start + np.flatnonzero(chosen)
            indices = reset - self.first
            of_envs = (self._options[index] for index in indices.tolist() if index in self._options)
            options = next(of_envs, None)  # one for the whole instance
            if not chosen.all():
                options = {**(options or {}), "reset_mask": chosen}
            with self._error_context(which, "reset"):  # ends forks before they write rows
                if self._spec.autoreset.resets and not chosen.all():
                    raise InvalidValue(
                        f"envs {rows.start} to {rows.stop - 1} are one batched env, which with autoreset is "
                        f"reset as a whole; reset all of them, not {int(chosen.sum())}"
                    )
                result: Any = self._targets[which].reset(seed=_as_seed(seeds), options=options)
            with self._error_context(which, "reset"):
                obs, info = split_reset(result)
                self._write(self._spec.obs, obs, rows)
                self._write_infos(which, rows, info, np.zeros(self._size, np.bool_), chosen)
            self._returns[indices] = 0
            self._lengths[indices] = 0
            self._over[indices] = False
            for path in _OF_EPISODE:
                self._arrays[path][reset] = 0
            self._stats[_stats.RESETS] += int(chosen.sum())
            self._stats[_stats.RESET_NS] += monotonic_ns() - started
        self._running[0] = 0

    def step(self, slots: NDArray[Any], done: Done | None = None) -> None:
        for which in range(len(self._instances)):
            started = monotonic_ns()
            rows = self._rows(which)
            self._running[0] = rows.start + 1
            with self._error_context(which, "step"):
                actions = self._actions(self._spec.action, rows)
            with self._error_context(which, "step", actions):  # ends forks before they write rows
                result: Any = self._targets[which].step(actions)
            with self._error_context(which, "step", actions):
                if not isinstance(result, tuple) or len(result) != 5:
                    raise wrong_step(result)
                obs, reward, terminated, truncated, info = result
                self._write(self._spec.obs, obs, rows)
                self._write(self._spec.reward, reward, rows)
                self._write(self._spec.terminated, terminated, rows)
                self._write(self._spec.truncated, truncated, rows)
                over = self._arrays["terminated",][rows] | self._arrays["truncated",][rows]
                self._count(rows, np.asarray(reward), over)
                self._write_infos(which, rows, info, over, np.ones(self._size, np.bool_))
            self._stats[_stats.STEP_NS] += monotonic_ns() - started
        self._running[0] = 0

    def _record_calls(self, recorder: SpanRecorder | None) -> None:
        self._targets = self._instances
        if recorder is not None:
            starts = [self.first + which * self._size for which in range(len(self._instances))]
            self._targets = [
                RecordedEnv(self._instances, which, f"envs {start}-{start + self._size - 1}", recorder)
                for which, start in enumerate(starts)
            ]

    def _actions(self, node: Node, rows: slice) -> Any:
        """Returns a batch of actions, which is a tuple for a space without a fixed shape."""
        if isinstance(node, Leaf):
            return self._arrays[node.path][rows].astype(node.dtype)
        if isinstance(node, PaddedNode):
            return tuple(reader(node, self._arrays)(np.arange(rows.start, rows.stop)))
        return node.join([self._actions(child, rows) for child in node.children])

    def _rows(self, which: int) -> slice:
        """Returns the rows of an instance in the segment."""
        start = self.first + which * self._size
        return slice(start, start + self._size)

    def _error_context(self, which: int, operation: str, action: Any = None) -> EnvErrorContext:
        return EnvErrorContext(self.first + which * self._size, operation, action)

    def _write(self, node: Node, value: Any, rows: slice) -> None:
        """Writes a batch of values, with Gymnasium's checks and casts."""
        match node:
            case Leaf():
                whole = Leaf(node.path, (self._size, *node.shape), node.dtype, node.stored)
                try:
                    store(whole, self._arrays[node.path][rows], conform(whole, value, self._check))
                except InvalidValue:
                    if np.shape(value) == whole.shape:
                        write_row = writer(node, self._arrays, check=self._check)  # names the env
                        self._write_each(write_row, rows, enumerate(value))
                    raise
            case PaddedNode():
                pairs = zip(range(self._size), value, strict=True)
                self._write_each(self._write_row[node.path], rows, pairs)
            case DictNode():
                keys = {*value} if isinstance(value, Mapping) else set[Any]()
                if not keys.issuperset(node.keys) or (len(keys) > len(node.keys) and self._check != "cast"):
                    raise InvalidValue(wrong_structure(node, value))
                for key, child in zip(node.keys, node.children, strict=True):
                    self._write(child, value[key], rows)
            case _:
                if not isinstance(value, (tuple, list)) or len(value) != len(node.children):
                    raise InvalidValue(wrong_structure(node, value))
                for child, part in zip(node.children, value, strict=True):
                    self._write(child, part, rows)

    def _write_each(self, write: Write, rows: slice, values: Iterable[tuple[int, Any]]) -> None:
        """Writes the values of some envs, each with the env's index in the instance."""
        for index, value in values:
            try:
                write(rows.start + index, value)
            except InvalidValue as error:
                error.row = index
                raise

    def _count(self, rows: slice, reward: NDArray[Any], over: NDArray[np.bool_]) -> None:
        """Updates and writes return and length of each episode."""
        indices = slice(rows.start - self.first, rows.stop - self.first)
        # With next-step autoreset, the step after an episode's end is the reset.
        was_reset = self._over[indices] & (self._spec.autoreset is Autoreset.NEXT_STEP)
        returns = self._returns[indices]
        lengths = self._lengths[indices]
        with np.errstate(over="ignore", invalid="ignore"):  # see `rows.store`
            returns += reward
            returns[was_reset] = 0
            self._arrays["info", "episode_return"][rows] = returns
        lengths += 1
        lengths[was_reset] = 0
        self._arrays["info", "episode_length"][rows] = lengths
        if self._spec.autoreset.same_step:
            returns[over] = 0
            lengths[over] = 0
            self._stats[_stats.RESETS] += int(over.sum())
        self._over[indices] = over
        self._stats[_stats.RESETS] += int(was_reset.sum())
        self._stats[_stats.STEPS] += self._size - int(was_reset.sum())
        self._stats[_stats.EPISODES] += int(over.sum())

    def _write_infos(
        self, which: int, rows: slice, info: Any, over: NDArray[np.bool_], chosen: NDArray[np.bool_]
    ) -> None:
        """Writes an info. It has declared keys of the `chosen` envs only; rows of others must not change."""
        if not isinstance(info, dict):
            raise InvalidValue(f"info must be a dict, got {type(info).__name__}")
        self._infos[which] = info
        self._arrays["raw_info",][rows] = kind_of(info)
        self._write_declared(self._spec.declared, info, rows, chosen)
        if self._spec.has_final_obs:
            node = self._spec.info.child("final_obs")
            if self._arrays["info", "_final_obs"][rows].any():  # set by the last step
                for leaf in leaves(node):
                    self._arrays[leaf.path][rows] = 0
            self._arrays["info", "_final_obs"][rows] = over
            finals = [(row, _final_obs(self._spec.obs, info, row)) for row in np.flatnonzero(over).tolist()]
            try:
                self._write_each(self._write_row[node.path], rows, finals)
            except InvalidValue as error:
                error.args = (f"{error}{WITHOUT_FINAL_OBS}",)
                raise
        if self._spec.has_final_info:
            final = info.get("final_info", {})
            self._write_declared(self._spec.info.child("final_info"), final, rows, chosen)

    def _write_declared(
        self, node: DictNode, info: Mapping[str, Any], rows: slice, chosen: NDArray[np.bool_]
    ) -> None:
        for key, child, mask in zip(node.keys[::2], node.children[::2], node.children[1::2], strict=True):
            value = info.get(key)
            has = chosen & np.broadcast_to(value is not None and info.get(f"_{key}", True), (self._size,))
            masks = column(mask, self._arrays)[rows]
            if has.all() and isinstance(value, np.ndarray) and value.dtype != object:
                masks[:] = True
                self._write(child, value, rows)
                continue
            parts = [(row, _row(child, value, row)) for row in np.flatnonzero(has).tolist()]
            parts = [(row, part) for row, part in parts if part is not None]
            for leaf in leaves(child):
                self._arrays[leaf.path][rows][chosen] = 0
            masks[chosen] = False
            masks[[row for row, _ in parts]] = True
            self._write_each(self._write_row[child.path], rows, parts)


def _as_seed(words: NDArray[np.int64]) -> Any:
    """Returns seeds in the simplest equivalent form, because not all batched envs accept lists."""
    seeds = [*map(read_seed, words)]
    first = seeds[0]
    if first is None:
        return None if seeds.count(None) == len(seeds) else seeds
    return first if seeds == [*range(first, first + len(seeds))] else seeds


def _final_obs(node: Node, info: Mapping[str, Any], row: int) -> Any:
    if "final_obs" not in info:
        raise InvalidValue(
            "an episode ended under same-step autoreset, but info has no 'final_obs'; make the pool with "
            "final_obs=False"
        )
    observations = info["final_obs"]
    # Gymnasium's vector envs return an array of objects, others a batch of observations.
    return (
        observations[row]
        if isinstance(observations, np.ndarray) and observations.dtype == object
        else _row(node, observations, row)
    )


def _row(node: Node, value: Any, row: int) -> Any:
    return map_leaves(node, value, lambda _, part: part[row])
