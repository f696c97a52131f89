"""The specification of a pool: what goes into a step and what comes out, hashable by value.

Two pools of equal specification can serve the same compiled program. The memory layout and the
`jax.ShapeDtypeStruct`s are both made from the leaves listed here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from typing import Any, cast

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from jaxvec._errors import UnsupportedSpaceError
from jaxvec._spaces import (
    DictNode,
    DtypePolicy,
    KeyPath,
    Leaf,
    Node,
    builder,
    format_path,
    leaves,
    move,
    walk,
)
from jaxvec._timestep import TimeStep

STATISTICS = ("env_id", "episode_return", "episode_length")
_OURS = ("final_obs", "_final_obs", "final_info", "fault", "idle")


class Autoreset(Enum):
    """What happens when an episode ends: one of Gymnasium's modes, or one of ours."""

    SAME_STEP = AutoresetMode.SAME_STEP
    NEXT_STEP = AutoresetMode.NEXT_STEP
    DISABLED = AutoresetMode.DISABLED
    EPISODIC = "Episodic"  # the env takes no steps until it is reset; to Gymnasium that is DISABLED

    @property
    def as_gymnasium(self) -> AutoresetMode:
        """Gymnasium's mode, which is what users see."""
        return self.value if isinstance(self.value, AutoresetMode) else AutoresetMode.DISABLED

    @property
    def resets(self) -> bool:
        """Whether envs begin their next episode by themselves."""
        return self in (Autoreset.SAME_STEP, Autoreset.NEXT_STEP)


def parse_autoreset_mode(mode: Any) -> AutoresetMode:
    """Returns Gymnasium's mode for itself, its name (`"SAME_STEP"`) or its value (`"SameStep"`).

    Raises:
        ValueError: it is none of them.
    """
    for known in AutoresetMode:
        if mode in (known, known.name, known.value):
            return known
    names = ", ".join(known.name for known in AutoresetMode)
    raise ValueError(f"autoreset_mode must be one of {names}, not {mode!r}")


@dataclass(frozen=True)
class EnvSpaces:
    """What an env says of itself; `reward` is `None` for a scalar reward."""

    observation: Space[Any]
    action: Space[Any]
    reward: Space[Any] | None


@dataclass(frozen=True)
class PoolSpec:
    """The shapes and dtypes of a pool's data, and when its envs begin their next episode.

    Attributes:
        num_envs: how many envs.
        batch_size: how many of them `recv` returns.
        autoreset: what happens when an episode ends.
        action: leaves that a step takes.
        obs, reward, terminated, truncated, info: leaves that a step returns.
        declared: the part of `info` that the env itself fills in.
    """

    num_envs: int
    batch_size: int
    autoreset: Autoreset
    action: Node
    obs: Node
    reward: Leaf
    terminated: Leaf
    truncated: Leaf
    info: DictNode
    declared: DictNode

    def __repr__(self) -> str:
        """Names it in a line: JAX repeats it in errors of its own, and all leaves would be pages."""
        return f"<PoolSpec of {self.num_envs} envs, {self.fingerprint:016x}>"

    @property
    def first_ready(self) -> bool:
        """Whether `recv` returns some envs while others are in flight."""
        return self.batch_size < self.num_envs

    @property
    def has_final_obs(self) -> bool:
        return "final_obs" in self.info.keys

    @property
    def has_fault(self) -> bool:
        return "fault" in self.info.keys

    @property
    def has_final_info(self) -> bool:
        return "final_info" in self.info.keys

    @property
    def timestep(self) -> tuple[Node, ...]:
        """The nodes of a `TimeStep`, in its order."""
        return (self.obs, self.reward, self.terminated, self.truncated, self.info)

    @cached_property
    def object_leaves(self) -> tuple[Leaf, ...]:
        """Those of Python objects, which compiled programs can't have."""
        return tuple(leaf for leaf in (*self.action_leaves, *self.timestep_leaves) if leaf.is_object)

    @cached_property
    def timestep_leaves(self) -> tuple[Leaf, ...]:
        return tuple(leaf for node in self.timestep for leaf in leaves(node))

    @cached_property
    def kept_leaves(self) -> tuple[Leaf, ...]:
        """Those that the row of a fault repeats, so that they are kept while an env steps."""
        if not self.has_fault:
            return ()
        statistics = (self.info.child(name) for name in ("episode_return", "episode_length"))
        return tuple(leaf for node in (self.obs, *statistics) for leaf in leaves(node))

    @cached_property
    def action_leaves(self) -> tuple[Leaf, ...]:
        return tuple(leaves(self.action))

    @cached_property
    def fingerprint(self) -> int:
        """A number, of 63 bits and the same in every process, that stands for equality.

        Of specs that differ in nothing but `num_envs` it is the same, unless they are first-ready: a handle
        may be to any number of a pool's envs, and which they are is checked when it is used.
        """
        spec = self if self.first_ready else replace(self, num_envs=1, batch_size=1)
        values = tuple(getattr(spec, field.name) for field in fields(spec))
        return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest()) >> 1

    def batch_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Returns `(num_envs, *leaf.shape)`."""
        return (self.num_envs, *leaf.shape)

    @cached_property
    def _builders(self) -> tuple[Callable[[Sequence[Any]], Any], ...]:
        places = {leaf.path: place for place, leaf in enumerate(self.timestep_leaves)}
        return tuple(builder(node, places) for node in self.timestep)

    def build_timestep(self, rows: Sequence[Any]) -> TimeStep:
        """Builds a `TimeStep` of one array for each of `timestep_leaves`, in their order."""
        return TimeStep(*[build(rows) for build in self._builders])


def make_spec(
    spaces: EnvSpaces,
    *,
    num_envs: int,
    batch_size: int | None = None,
    autoreset: Autoreset,
    final_obs: bool,
    fault: bool = False,
    declared: Mapping[str, Any],
    policy: DtypePolicy,
    objects: bool = False,
) -> PoolSpec:
    """Makes the specification of a pool of `num_envs` envs.

    Args:
        spaces: of every env.
        num_envs: how many envs.
        batch_size: how many of them `recv` returns; `None` for all.
        autoreset: under `SAME_STEP` info has `final_obs`, and `final_info` if keys are declared; under
            `EPISODIC` it says in `idle` which envs took no step.
        final_obs: whether to keep the last observation of an episode under `SAME_STEP`.
        fault: whether info says which steps were cut short by a fault.
        declared: info keys with a declaration each, see `declared_leaves`.
        policy: from an env's dtypes to the stored ones.
        objects: whether observations and actions may have leaves of Python objects.

    Raises:
        UnsupportedSpaceError: a leaf has no fixed shape or no dtype that JAX can hold.
    """

    def scalar(dtype: Any, *path: Any) -> Leaf:
        return Leaf(path, (), np.dtype(dtype), policy(np.dtype(dtype)))

    obs = walk(spaces.observation, root=("obs",), policy=policy, objects=objects)
    reward = scalar(np.float64, "reward")
    if spaces.reward is not None:
        node = walk(spaces.reward, root=("reward",), policy=policy)
        if not isinstance(node, Leaf):
            raise UnsupportedSpaceError("reward: reward_space must be a single Box, not a nested space")
        reward = node

    declared_node = declared_leaves(declared, policy)
    fields: dict[str, Node] = {
        "env_id": scalar(np.int32, "info", "env_id"),
        "episode_return": move(reward, ("info", "episode_return")),
        "episode_length": scalar(np.int32, "info", "episode_length"),
    }
    if fault:
        fields["fault"] = scalar(np.bool_, "info", "fault")
    if autoreset is Autoreset.EPISODIC:
        fields["idle"] = scalar(np.bool_, "info", "idle")
    if autoreset is Autoreset.SAME_STEP:
        if final_obs:
            fields["final_obs"] = move(obs, ("info", "final_obs"))
            fields["_final_obs"] = scalar(np.bool_, "info", "_final_obs")
        if declared:
            fields["final_info"] = move(declared_node, ("info", "final_info"))
    fields |= zip(declared_node.keys, declared_node.children, strict=True)
    return PoolSpec(
        num_envs=num_envs,
        batch_size=num_envs if batch_size is None else batch_size,
        autoreset=autoreset,
        action=walk(spaces.action, root=("action",), policy=policy, objects=objects),
        obs=obs,
        reward=reward,
        terminated=scalar(np.bool_, "terminated"),
        truncated=scalar(np.bool_, "truncated"),
        info=DictNode(("info",), tuple(fields), tuple(fields.values())),
        declared=declared_node,
    )


def declared_leaves(declared: Mapping[str, Any], policy: DtypePolicy) -> DictNode:
    """Returns the node of the declared info keys, each followed by its mask `_key`.

    Args:
        declared: key to a Gymnasium space, a NumPy dtype (`int`, `"f4"`, `(np.float32, (3,))`), or
            anything with `shape` and `dtype` (an array, a `jax.ShapeDtypeStruct`); or to a dict of such.
        policy: from the declared dtypes to the stored ones.
    """
    keys: list[str] = []
    children: list[Node] = []
    for key, declaration in declared.items():
        mask = f"_{key}"
        if {key, mask} & {*STATISTICS, *_OURS, *keys}:
            raise ValueError(f"info: the key {key!r} is taken by jaxvec or declared twice; rename it")
        keys += [key, mask]
        children += [
            _declared_node(("info", key), declaration, policy),
            Leaf(("info", mask), (), np.dtype(np.bool_), np.dtype(np.bool_)),
        ]
    return DictNode(("info",), tuple(keys), tuple(children))


def undeclared(info: Mapping[str, Any] | Iterable[str] | None) -> tuple[dict[str, Any], list[str]]:
    """Splits the user's `info=` into declarations and keys to be learnt from a first reset."""
    if info is None:
        return {}, []
    if isinstance(info, str):
        raise TypeError(f"info must be a dict or a list of keys, not the string {info!r}; use [{info!r}]")
    given = dict(info) if isinstance(info, Mapping) else dict.fromkeys(info)
    return given, [key for key, declaration in given.items() if declaration is None]


def _declared_node(path: KeyPath, declaration: Any, policy: DtypePolicy) -> Node:
    if isinstance(declaration, Space):
        return walk(declaration, root=path, policy=policy)
    if isinstance(declaration, Mapping):
        nested = cast("Mapping[Any, Any]", declaration)
        if not nested or not all(isinstance(key, str) for key in nested):
            raise UnsupportedSpaceError(
                f"{format_path(path)}: a dict needs keys that are texts, not {[*nested]}"
            )
        children = tuple(_declared_node((*path, key), each, policy) for key, each in nested.items())
        return DictNode(path, tuple(nested), children)
    shape, dtype = getattr(declaration, "shape", None), getattr(declaration, "dtype", None)
    if isinstance(declaration, type) or shape is None or dtype is None:  # NumPy's scalar types have both
        try:
            parsed = np.dtype(declaration)
        except TypeError as error:
            raise UnsupportedSpaceError(
                f"{format_path(path)}: can't read a shape and dtype from {declaration!r}; declare a "
                "Gymnasium space, a NumPy dtype, or an array"
            ) from error
        dtype, shape = parsed.subdtype or (parsed, ())
    dtype = np.dtype(dtype).newbyteorder("=")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise UnsupportedSpaceError(
            f"{format_path(path)}: {dtype} can't be an array inside jax.jit; declare numbers or bools, or "
            "leave the key out and read it with VectorEnv.infos"
        )
    return Leaf(path, tuple(shape), dtype, policy(dtype))
