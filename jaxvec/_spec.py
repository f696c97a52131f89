"""The specification of a pool's data, whose parts are trees of leaves (`_leaves.py`).

    spaces of the envs --make_spec--> `PoolSpec`

    PoolSpec --> layout of the shared memory (_memory/), conversions in the workers (_envs/),
                 shapes and dtypes for JAX (callbacks/)

Pools with equal specifications can use the same compiled program.
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
from jaxvec._leaves import (
    DictNode,
    DtypePolicy,
    Leaf,
    MaxSizes,
    Node,
    builder,
    declared_leaves,
    leaves,
    move,
    walk,
)
from jaxvec._results import ADDED_KEYS, STATISTICS, LastObsTimeStep, TimeStep
from jaxvec._util import logger

_OPTIONS = "reset_options"
_HAS_OPTIONS = Leaf((f"_{_OPTIONS}",), (), np.dtype(np.bool_), np.dtype(np.bool_))


class Autoreset(Enum):
    """The behaviour at the end of an episode: one of Gymnasium's modes, or jaxvec's `EPISODIC`."""

    SAME_STEP = AutoresetMode.SAME_STEP
    NEXT_STEP = AutoresetMode.NEXT_STEP
    DISABLED = AutoresetMode.DISABLED
    EPISODIC = "Episodic"  # the env is idle until it is reset; reported to Gymnasium as DISABLED

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (Autoreset, self.name)  # another interpreter's Gymnasium may lack the value

    @property
    def as_gymnasium(self) -> AutoresetMode:
        """Gymnasium's mode, which users see."""
        return self.value if isinstance(self.value, AutoresetMode) else AutoresetMode.DISABLED

    @property
    def resets(self) -> bool:
        """True if envs reset themselves."""
        return self in (Autoreset.SAME_STEP, Autoreset.NEXT_STEP)

    @property
    def same_step(self) -> bool:
        """True if the step that ends an episode has the first observation of the next one."""
        return self is Autoreset.SAME_STEP


def parse_autoreset(mode: Any) -> Autoreset:
    """Returns the mode for a member of `AutoresetMode`, a name (`"SAME_STEP"`) or a value (`"SameStep"`)."""
    for known in Autoreset:
        value = known.value.value if isinstance(known.value, AutoresetMode) else known.value
        if mode in (known.value, known.name, value):
            return known
    names = ", ".join(known.name for known in Autoreset)
    raise ValueError(f"autoreset_mode must be one of {names}, not {mode!r}")


@dataclass(frozen=True)
class EnvSpaces:
    """The spaces of an env; `reward` is `None` for a scalar reward."""

    observation: Space[Any]
    action: Space[Any]
    reward: Space[Any] | None


@dataclass(frozen=True)
class PoolSpec:
    """The shapes and dtypes of a pool's data, and its autoreset mode. Hashable, compared by value.

    `declared` is the part of `info` that the env itself fills in. `reset_options` are the declared options of
    resets, `None` for none. With `objects`, values without a fixed shape are Python objects.
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
    reset_options: Node | None = None
    objects: bool = False

    def __hash__(self) -> int:
        return self.fingerprint

    def __repr__(self) -> str:
        """Short, because JAX includes it in its own error messages."""
        return f"<PoolSpec of {self.num_envs} envs, {self.fingerprint:016x}>"

    @property
    def first_ready(self) -> bool:
        """True if `recv` returns some of the envs, the first that are ready, while others are pending."""
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
        return (self.obs, self.reward, self.terminated, self.truncated, self.info)

    @cached_property
    def object_leaves(self) -> tuple[Leaf, ...]:
        """Leaves of Python objects, which compiled programs cannot use."""
        return tuple(leaf for leaf in (*self.action_leaves, *self.timestep_leaves) if leaf.is_object)

    @cached_property
    def timestep_leaves(self) -> tuple[Leaf, ...]:
        return tuple(leaf for node in self.timestep for leaf in leaves(node))

    @cached_property
    def statistics(self) -> frozenset[int]:
        """Places in `timestep_leaves` of the statistics that jaxvec adds to the info."""
        paths = {("info", name) for name in STATISTICS}
        return frozenset(place for place, leaf in enumerate(self.timestep_leaves) if leaf.path in paths)

    @cached_property
    def kept_leaves(self) -> tuple[Leaf, ...]:
        """Leaves that a time step with a fault repeats from the step before; workers keep copies of them."""
        if not self.has_fault:
            return ()
        statistics = (self.info.child(name) for name in ("episode_return", "episode_length"))
        return tuple(leaf for node in (self.obs, *statistics) for leaf in leaves(node))

    @cached_property
    def action_leaves(self) -> tuple[Leaf, ...]:
        return tuple(leaves(self.action))

    @cached_property
    def option_leaves(self) -> tuple[Leaf, ...]:
        """Leaves of the declared reset options, and last the flag of envs to which some were given."""
        return () if self.reset_options is None else (*leaves(self.reset_options), _HAS_OPTIONS)

    @cached_property
    def fingerprint(self) -> int:
        """A 63-bit hash of the specification that is equal in every process.

        It ignores `num_envs`, except with `batch_size`, because a handle may be to only some of the envs.
        """
        spec = self if self.first_ready else replace(self, num_envs=1, batch_size=1)
        field_values = (getattr(spec, field.name) for field in fields(spec))
        values = tuple(value for value in field_values if value is not None)
        return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1

    @cached_property
    def _builders(self) -> tuple[Callable[[Sequence[Any]], Any], ...]:
        places = {leaf.path: place for place, leaf in enumerate(self.timestep_leaves)}
        return tuple(builder(node, places) for node in self.timestep)

    def build_timestep(self, rows: Sequence[Any]) -> TimeStep[Any]:
        """Builds a `TimeStep` from one array per leaf of `timestep_leaves`, in their order."""
        timestep_type = TimeStep if self.autoreset.same_step else LastObsTimeStep
        return timestep_type(*[build(rows) for build in self._builders])


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
    max_sizes: Any = None,
    reset_options: Space[Any] | None = None,
) -> PoolSpec:
    """Makes the specification of a pool of envs with these `spaces`, or raises `UnsupportedSpaceError`.

    A `batch_size` of `None` means all envs. `policy` maps an env's dtype to the stored one. With `fault`,
    info has the key `fault`. `declared` is as for `declared_leaves`. With `objects`, leaves of observations
    and actions may be Python objects, and so may an episode's last observation. With `max_sizes`, spaces
    without a fixed shape are padded. `reset_options` is the space of the options of a reset.
    """
    sizes = None if max_sizes is None else MaxSizes(max_sizes)

    def scalar(dtype: Any, *path: Any) -> Leaf:
        return Leaf(path, (), np.dtype(dtype), policy(np.dtype(dtype)))

    obs = walk(spaces.observation, root=("obs",), policy=policy, objects=objects, sizes=sizes)
    action = walk(spaces.action, root=("action",), policy=policy, objects=objects, sizes=sizes)
    reward = scalar(np.float64, "reward")
    if spaces.reward is not None:
        node = walk(spaces.reward, root=("reward",), policy=policy)
        if not isinstance(node, Leaf):
            raise UnsupportedSpaceError("reward: reward_space must be a single Box, not a nested space")
        # Rewards are floats, whatever the space: fractions would be cut off in an integer row.
        reward = node if node.dtype.kind == "f" else replace(reward, shape=node.shape)

    declared_node = declared_leaves(declared, policy, sizes)
    fields: dict[str, Node] = {
        "env_id": scalar(np.int32, "info", "env_id"),
        "episode_return": move(reward, ("info", "episode_return")),
        "episode_length": scalar(np.int32, "info", "episode_length"),
    }
    if fault:
        fields["fault"] = scalar(np.bool_, "info", "fault")
    if autoreset is Autoreset.EPISODIC:
        fields["idle"] = scalar(np.bool_, "info", "idle")
    if autoreset.same_step:
        if final_obs:
            fields["final_obs"] = move(obs, ("info", "final_obs"))
            fields["_final_obs"] = scalar(np.bool_, "info", "_final_obs")
        if declared:
            fields["final_info"] = move(declared_node, ("info", "final_info"))
    options = None
    if reset_options is not None:
        options = walk(reset_options, root=(_OPTIONS,), policy=policy, sizes=sizes)
        fields[_OPTIONS] = move(options, ("info", _OPTIONS))
        fields[f"_{_OPTIONS}"] = move(_HAS_OPTIONS, ("info", *_HAS_OPTIONS.path))
    fields |= zip(declared_node.keys, declared_node.children, strict=True)
    if sizes is not None:
        sizes.check_used()
    return PoolSpec(
        num_envs=num_envs,
        batch_size=num_envs if batch_size is None else batch_size,
        autoreset=autoreset,
        action=action,
        obs=obs,
        reward=reward,
        terminated=scalar(np.bool_, "terminated"),
        truncated=scalar(np.bool_, "truncated"),
        info=DictNode(("info",), tuple(fields), tuple(fields.values())),
        declared=declared_node,
        reset_options=options,
        objects=objects,
    )


def declarations(info: Mapping[str, Any] | Iterable[str] | None) -> dict[str, Any]:
    """Returns `make`'s `info` as a dict of declarations; keys to infer from a first reset have `None`."""
    if info is None:
        return {}
    if isinstance(info, str):
        raise TypeError(f"info must be a dict or a list of keys, not the string {info!r}; use [{info!r}]")
    if not isinstance(info, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"info must be a dict or a list of keys, not {info!r}")
    declared = dict(info) if isinstance(info, Mapping) else dict.fromkeys(info)
    for key in declared:
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"info: the key {key!r} is no str, as programs need; rename it in a wrapper, or read it with "
                "VectorEnv.infos()"
            )
        mask = f"_{key}"
        if mask in declared or {key, mask}.intersection(ADDED_KEYS):
            raise ValueError(f"info: the key {key!r} is reserved by jaxvec or duplicated; rename it")
    return declared


def learn(declared: Mapping[str, Any], info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns declarations in which keys without one have arrays, the values in env 0's first info."""
    info = info or {}
    learnt: dict[str, Any] = {}
    uncertain: list[str] = []
    for key, declaration in declared.items():
        if declaration is None and info.get(key) is None:
            raise UnsupportedSpaceError(
                f"info: env 0's first reset returned no {key!r}, only "
                f"{sorted(name for name, value in info.items() if value is not None)}; declare its dtype "
                f"and shape, as in info={{{key!r}: np.float32}}"
            )
        learnt[key] = _as_arrays(info[key], f"[{key!r}]", uncertain) if declaration is None else declaration
    if uncertain:
        logger.warning(
            "make: info has integers or bools at %s in env 0's first reset, and keeps these types. If they "
            "can become fractions, declare info={key: float}; to hide this message, info={key: int} or bool",
            ", ".join(uncertain),
        )
    return learnt


def _as_arrays(value: Any, where: str, uncertain: list[str]) -> Any:
    """Returns a value with arrays as leaves. Adds places of Python's integers and bools to `uncertain`."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: _as_arrays(item, f"{where}[{key!r}]", uncertain) for key, item in items}
    array = np.asarray(value)
    if array.dtype.kind in "biu" and not isinstance(value, np.ndarray | np.generic):
        uncertain.append(where)
    return array
