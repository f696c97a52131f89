"""Spaces as leaves, and the specification of a pool: what all parts of the package agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property, partial
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec._errors import UnsupportedSpaceError

# ----------------------------------------------------------------------------------------------------------
# What a reset or a step returns.
# ----------------------------------------------------------------------------------------------------------


class TimeStep(NamedTuple):
    """The batched result of a reset or a step, in Gymnasium's order.

    Arrays are NumPy's from `VectorEnv`'s methods and JAX's from `jaxvec.reset` and `jaxvec.step`.
    dtypes are the spaces', as JAX canonicalises them (float64 becomes float32 unless x64 is on).

    Attributes:
        obs: pytree in the structure of the observation space, leaves `[num_envs, ...]`.
        reward: `[num_envs]` float, or `[num_envs, ...]` where the env has a `reward_space`.
        terminated: `[num_envs]` bool.
        truncated: `[num_envs]` bool.
        info: dict of fixed keys and shapes: `env_id` `[num_envs]` int32; `episode_return` (as
            reward) and `episode_length` `[num_envs]` int32 of the episode that just ended, else
            of the one that runs; under same-step autoreset `final_obs` (as obs, zero where no
            episode ended) and its mask `_final_obs`; and each declared key with its mask, under same-step
            autoreset once more in `final_info`, of the steps that ended an episode. `fault` `[num_envs]` bool
            with `on_fault="restart"`: which steps were cut short; `idle` `[num_envs]` bool with
            `autoreset_mode="EPISODIC"`: which were not taken.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            envs.reset(seed=0)
            obs, reward, terminated, truncated, info = envs.step([0, 1])
            print(obs.shape, reward, info["episode_length"])  # (2, 4) [1. 1.] [1 1]
        ```
    """

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: dict[str, Any]


# ----------------------------------------------------------------------------------------------------------
# `EnvState`: what stands for the states of envs, in programs and out.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnvState:
    """Saved states of envs: a pytree of one small array, whose first axes are those of the envs.

    It names the states, which stay in the workers. So it is indexed, reshaped, gathered, stacked and chosen
    from like an observation, also by `jax.tree.map`; `state[i]` indexes the axes before the last. It stays
    good until newer states have taken its place (`jaxvec.make(states=...)`).

    Attributes:
        ids: `[num_envs, 3]` uint32: the pool, and the low and high word of the state's number in it. Zeros
            name no state.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 4, states=10) as envs:
            envs.reset(seed=0)
            state = envs.save()
            timestep = envs.restore(state[[0, 0, 2, 2]])  # env 1 goes on as env 0, and env 3 as env 2
            print((timestep.obs[0] == timestep.obs[1]).all())  # True
        ```
    """

    ids: Any

    def __getitem__(self, index: Any) -> EnvState:
        """Returns some of the states, or each with more axes, as NumPy and JAX index arrays."""
        return EnvState(self.ids[index])


def check_states(state: Any, num_envs: int | None) -> NDArray[np.uint32]:
    """Returns the `[num_envs, 3]` ids of a state on the host; raises if it is something else.

    `None` stands for any number.
    """
    ids = np.asarray(state_ids(state))
    check_states_type(ids.shape, ids.dtype, num_envs if num_envs is not None else len(ids) if ids.ndim else 0)
    return ids


def state_ids(state: Any) -> Any:
    """Returns the ids of a state, which may be traced; raises `TypeError` if it is something else."""
    if not isinstance(state, EnvState):
        raise TypeError(f"state must be what save or simulate returned, not {type(state).__name__}")
    return state.ids


def check_states_type(shape: tuple[int, ...], dtype: Any, num_envs: int) -> None:
    """Raises `ValueError` unless ids of this type name a state for each env."""
    if shape != (num_envs, 3) or dtype != np.uint32:
        raise ValueError(
            f"state: expected one for each of {num_envs} envs, uint32 ids of shape ({num_envs}, 3); got "
            f"{dtype} of shape {shape}"
        )


# ----------------------------------------------------------------------------------------------------------
# Walks a space once into a tree of leaves; the only file that names space classes.
#
# A `Node` mirrors a space with fixed-shape arrays at its leaves. Everything else in jaxvec is a loop over
# `leaves(node)`, addressed by path, because Gymnasium keeps a `Dict`'s insertion order and JAX sorts its
# keys.
# ----------------------------------------------------------------------------------------------------------

KeyPath: TypeAlias = tuple[Any, ...]
DtypePolicy: TypeAlias = Callable[[np.dtype[Any]], np.dtype[Any]]


@dataclass(frozen=True)
class Leaf:
    """One array of a space, as one env sees it.

    Attributes:
        path: keys and indices from the root, `("camera", 0)`.
        shape: of one env's value, without the batch axis.
        dtype: what the env speaks; actions reach it in this dtype.
        stored: what the segment holds and JAX sees; `object` for a value without fixed shape, which
            travels beside the segment, pickled.
    """

    path: KeyPath
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Of one env's value, as the env speaks it."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_object(self) -> bool:
        return self.stored.kind == "O"

    def __str__(self) -> str:
        return format_path(self.path)


@dataclass(frozen=True)
class DictNode:
    """A `Dict` space: keys in the space's own order, and a child each."""

    path: KeyPath
    keys: tuple[Any, ...]
    children: tuple[Node, ...]

    def child(self, key: Any) -> Any:
        """Returns the child at `key`."""
        return self.children[self.keys.index(key)]


@dataclass(frozen=True)
class TupleNode:
    """A `Tuple` space: a child for each element."""

    path: KeyPath
    children: tuple[Node, ...]


Node: TypeAlias = Leaf | DictNode | TupleNode


def as_jax(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype JAX gives to `dtype` while x64 is off: 64-bit types become 32-bit."""
    return np.dtype(f"{dtype.kind}4") if dtype.kind in "iuf" and dtype.itemsize == 8 else dtype


def as_is(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns `dtype` itself: the policy under x64, and of faces that never meet JAX."""
    return dtype


def fold_space(
    space: spaces.Space[Any],
    leaf: Callable[[Space[Any], KeyPath], Any],
    *,
    root: KeyPath,
    make_dict: Callable[[dict[Any, Any], KeyPath], Any],
    make_tuple: Callable[[list[Any], KeyPath], Any],
) -> Any:
    """Converts a space from its leaves up: `Dict` and `Tuple` spaces after the spaces in them.

    Args:
        space: Space to convert.
        leaf: Converts a space that is neither a `Dict` nor a `Tuple`, given its path.
        root: Path of `space`.
        make_dict: Converts a `Dict`, given what its spaces became, in their order, and its path.
        make_tuple: The same for a `Tuple`.
    """

    def fold(space: Space[Any], path: KeyPath) -> Any:
        match space:
            case spaces.Dict():
                return make_dict(
                    {key: fold(child, (*path, key)) for key, child in space.spaces.items()}, path
                )
            case spaces.Tuple():
                return make_tuple([fold(child, (*path, i)) for i, child in enumerate(space.spaces)], path)
            case _:
                return leaf(space, path)

    return fold(space, root)


def walk(space: spaces.Space[Any], *, root: KeyPath, policy: DtypePolicy, objects: bool = False) -> Node:
    """Walks `space` into a tree of leaves.

    Args:
        space: the space of one env.
        root: what the leaves' paths begin with; names the space in errors.
        policy: from an env's dtype to the stored one.
        objects: whether what JAX can't hold becomes leaves of Python objects.

    Raises:
        UnsupportedSpaceError: a leaf has no fixed shape, or no dtype that JAX can hold.
    """

    def leaf(space: spaces.Space[Any], path: KeyPath) -> Node:
        match space:
            case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
                dtype = np.dtype(space.dtype).newbyteorder("=")
                _check_known_dtype(dtype, path)
                stored = policy(dtype)
                _check_bounds_fit(space, stored, path)
                return Leaf(path, tuple(space.shape or ()), dtype, stored)
            case _ if objects:
                return Leaf(path, (), np.dtype(object), np.dtype(object))
            case _:
                raise UnsupportedSpaceError(_unsupported(space, path))

    def dict_node(children: dict[Any, Node], path: KeyPath) -> Node:
        if not objects:
            _check_sortable(children, path)
        return DictNode(path, tuple(children), tuple(children.values()))

    def tuple_node(children: list[Node], path: KeyPath) -> Node:
        return TupleNode(path, tuple(children))

    return fold_space(space, leaf, root=root, make_dict=dict_node, make_tuple=tuple_node)


def leaves(node: Node) -> Iterator[Leaf]:
    """Yields the leaves of `node`, depth first, in the space's own order."""
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children:
            yield from leaves(child)


def build(node: Node, value: Callable[[Leaf], Any]) -> Any:
    """Builds the nested dicts and tuples of `node`, with `value(leaf)` at each leaf."""
    match node:
        case Leaf():
            return value(node)
        case DictNode():
            return {key: build(child, value) for key, child in zip(node.keys, node.children, strict=True)}
        case TupleNode():
            return tuple(build(child, value) for child in node.children)


def builder(node: Node, places: Mapping[KeyPath, int]) -> Callable[[Sequence[Any]], Any]:
    """Returns what builds the nested dicts and tuples of `node` of a sequence of values.

    Args:
        node: whose leaves' values are in the sequence.
        places: where, by the leaves' paths.
    """
    match node:
        case Leaf():
            return itemgetter(places[node.path])
        case DictNode():
            return partial(_build_dict, node.keys, [builder(child, places) for child in node.children])
        case TupleNode():
            return partial(_build_tuple, [builder(child, places) for child in node.children])


def _build_dict(
    keys: Sequence[Any], builders: Sequence[Callable[[Sequence[Any]], Any]], values: Sequence[Any]
) -> dict[Any, Any]:
    return {key: build(values) for key, build in zip(keys, builders, strict=True)}


def _build_tuple(
    builders: Sequence[Callable[[Sequence[Any]], Any]], values: Sequence[Any]
) -> tuple[Any, ...]:
    return tuple([build(values) for build in builders])


def map_leaves(node: Node, value: Any, function: Callable[[Leaf, Any], Any]) -> Any:
    """Returns `value`, of the structure of `node`, with `function(leaf, part)` in place of each part."""
    match node:
        case Leaf():
            return function(node, value)
        case DictNode():
            pairs = zip(node.keys, node.children, strict=True)
            return {key: map_leaves(child, value[key], function) for key, child in pairs}
        case TupleNode():
            pairs = zip(node.children, value, strict=True)
            return tuple(map_leaves(child, part, function) for child, part in pairs)


def move(node: Node, root: KeyPath) -> Node:
    """Returns `node` with its own path replaced by `root`, all the way down."""
    match node:
        case Leaf():
            return replace(node, path=root)
        case DictNode():
            keyed = zip(node.keys, node.children, strict=True)
            return DictNode(root, node.keys, tuple(move(c, (*root, k)) for k, c in keyed))
        case TupleNode():
            moved = (move(child, (*root, i)) for i, child in enumerate(node.children))
            return TupleNode(root, tuple(moved))


def format_path(path: KeyPath) -> str:
    """Formats a path as Python would write it: `obs['camera'][0]`."""
    head, *tail = path
    return str(head) + "".join(f"[{key!r}]" for key in tail)


def _check_sortable(keys: Iterable[Any], root: KeyPath) -> None:
    """Refuses keys that don't compare: JAX flattens a dict by sorted keys."""
    try:
        sorted(keys)
    except TypeError as error:
        raise UnsupportedSpaceError(
            f"{format_path(root)}: keys {list(keys)!r} of this Dict space can't be sorted, "
            "so JAX can't make a pytree of it; use keys of one type"
        ) from error


def _check_known_dtype(dtype: np.dtype[Any], root: KeyPath) -> None:
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise UnsupportedSpaceError(
            f"{format_path(root)}: dtype {dtype} has no JAX equivalent; use bool, an integer of up to "
            "64 bits, or float16, float32 or float64"
        )


def _check_bounds_fit(space: spaces.Space[Any], stored: np.dtype[Any], root: KeyPath) -> None:
    """Refuses counted spaces whose largest or smallest element would wrap when stored."""
    match space:
        case spaces.Discrete():
            low, high = int(space.start), int(space.start) + int(space.n) - 1
        case spaces.MultiDiscrete() if space.nvec.size:
            low = int(space.start.min())
            high = int((space.start.astype(object) + space.nvec.astype(object)).max()) - 1
        case _:
            return
    limits = np.iinfo(stored)
    if low < limits.min or high > limits.max:
        raise UnsupportedSpaceError(
            f"{format_path(root)}: values from {low} to {high} don't fit into {stored}, the dtype in which "
            'JAX stores them; call jax.config.update("jax_enable_x64", True) before jaxvec.make'
        )


def _unsupported(space: object, root: KeyPath) -> str:
    match space:
        case spaces.Text():
            advice = "encode the text as a fixed-length array of integers in a wrapper"
        case spaces.Graph() | spaces.Sequence():
            advice = "pad it to a fixed size, with a mask, in a wrapper"
        case spaces.OneOf():
            advice = "use a Tuple of a Discrete choice and every alternative in a wrapper"
        case _:
            advice = "wrap the env so that this leaf is a Box, Discrete, MultiDiscrete or MultiBinary"
    return (
        f"{format_path(root)}: {type(space).__name__} has no fixed shape and dtype, so it can't be an "
        f"array inside jax.jit; {advice} (gymnasium.ObservationWrapper, gymnasium.ActionWrapper), or "
        "drop the leaf there"
    )


# ----------------------------------------------------------------------------------------------------------
# The specification of a pool: what goes into a step and what comes out, hashable by value.
#
# Two pools of equal specification can serve the same compiled program. The memory layout and the
# `jax.ShapeDtypeStruct`s are both made from the leaves listed here.
# ----------------------------------------------------------------------------------------------------------

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


def parse_autoreset(mode: Any) -> Autoreset:
    """Returns the mode for Gymnasium's, for a name (`"SAME_STEP"`) or for a value (`"SameStep"`).

    Raises:
        ValueError: it is none of them.
    """
    for known in Autoreset:
        value = known.value.value if isinstance(known.value, AutoresetMode) else known.value
        if mode in (known.value, known.name, value):
            return known
    names = ", ".join(known.name for known in Autoreset)
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
            "leave the key out and read it with VectorEnv.infos()"
        )
    return Leaf(path, tuple(shape), dtype, policy(dtype))
