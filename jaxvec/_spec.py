"""The leaves of spaces, and the specification of a pool's data.

    Gymnasium spaces --walk--> trees of `Leaf` --make_spec--> `PoolSpec`

    PoolSpec --> layout of the shared memory (_memory/), conversions in the workers (_envs/),
                 shapes and dtypes for JAX (callbacks/)

Every other part of the package derives shapes, dtypes and order of the data from these leaves.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property, partial
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from gymnasium import Space, spaces
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode

if sys.version_info >= (3, 11):
    from typing import NamedTuple
else:  # in workers of another interpreter; typing's own can't be generic
    from typing_extensions import NamedTuple

if TYPE_CHECKING:
    import jax
    from typing_extensions import TypeVar

    Array = TypeVar("Array", default=jax.Array)
else:  # workers import this module, and must not import JAX
    Array = TypeVar("Array")

from jaxvec._errors import UnsupportedSpaceError


class TimeStep(NamedTuple, Generic[Array]):
    """The batched result of a reset or a step, in Gymnasium's order.

    Methods of `VectorEnv` return NumPy arrays, functions such as `jaxvec.step` JAX arrays. The dtypes are
    those of the spaces, as JAX canonicalises them (float64 becomes float32 unless x64 is enabled). The
    properties have the leading axes of the arrays, such as `[num_steps, num_envs]` after a `scan`.

    Attributes:
        obs: Pytree of the observation space with leaves `[num_envs, ...]`.
        reward: Float array `[num_envs]`, or `[num_envs, ...]` for envs with a `reward_space`.
        terminated: Bool array `[num_envs]`.
        truncated: Bool array `[num_envs]`.
        info: Dict with fixed keys and shapes. `env_id` is int32 `[num_envs]`. `episode_return` (with the
            dtype of reward) and `episode_length` (int32) belong to the episode that just ended, or else to
            the running one. Same-step autoreset adds `final_obs`, zero except where an episode ended, and its
            mask `_final_obs`. Each declared key has a mask. With same-step autoreset, `final_info` has the
            same keys and masks, for the steps that ended an episode. `fault` (bool, with
            `on_fault="restart"`) marks steps cut short by a fault. `idle` (bool, with
            `autoreset_mode="EPISODIC"`) marks idle envs. `reset_options`, if declared, has the options that
            started the episode of `obs`, with a mask.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            envs.reset(seed=0)
            obs, reward, terminated, truncated, info = envs.step([0, 1])
            print(obs.shape, reward, info["episode_length"])  # (2, 4) [1. 1.] [1 1]
        ```
    """

    obs: Any
    reward: Array
    terminated: Array
    truncated: Array
    info: dict[str, Any]

    @property
    def done(self) -> Array:
        """Where an episode ended in this step, bool: terminated or truncated."""
        return cast("Any", self.terminated) | self.truncated

    @property
    def discount(self) -> Array:
        """Weight of the value after this step, float32: 0 where the episode terminated, else 1."""
        return (~cast("Any", self.terminated)).astype(np.float32)

    @property
    def last_obs(self) -> Any:
        """Observation in which this step ended, also where the env has been reset since.

        It has the structure of `obs`, in every autoreset mode. So `reward + gamma * discount *
        value(last_obs)` is the value before the step.

        Raises:
            ValueError: The time step has no final observations, or `obs` was replaced by other arrays.
        """
        info = self.info or {}
        if missing := [key for key in ("final_obs", "_final_obs") if key not in info]:
            raise ValueError(_NO_LAST_OBS.format(missing=" and ".join(missing)))
        return select(info["_final_obs"], info["final_obs"], self.obs, "obs")


_NO_LAST_OBS = (
    "last_obs: this time step has no {missing} in its info. Make the pool with final_obs=True, which is the "
    "default, and read last_obs before you replace the info; change time steps by timestep._replace(...)"
)


class LastObsTimeStep(TimeStep[Array]):
    """The time step of a pool that never resets an env in the step that ends its episode."""

    __slots__ = ()

    @property
    def last_obs(self) -> Any:
        return self.obs


def select(ended: Any, final: Any, new: Any, name: str) -> Any:
    """Returns the leaves of `final` where an episode has ended, and the leaves of `new` elsewhere.

    The leaves, nested in dicts and tuples, are arrays of NumPy or JAX. `name` is that of `new` in errors.
    """
    if isinstance(new, dict) and isinstance(final, dict) and final.keys() == new.keys():
        return {key: select(ended, final[key], each, f"{name}[{key!r}]") for key, each in new.items()}
    if isinstance(new, tuple) and isinstance(final, tuple) and len(final) == len(new):
        pairs = enumerate(zip(final, new, strict=True))
        make: Any = getattr(type(new), "_make", tuple)  # a namedtuple's
        return make([select(ended, *pair, f"{name}[{place}]") for place, pair in pairs])
    return _select_leaf(ended, final, new, name)


def _select_leaf(ended: Any, final: Any, new: Any, name: str) -> Any:
    kinds = [(getattr(each, "dtype", type(each).__name__), np.shape(each)) for each in (final, new)]
    if kinds[0] != kinds[1] or not hasattr(new, "dtype"):
        raise ValueError(
            f"last_obs: {name} is {kinds[1]}, but its final value {kinds[0]}; read last_obs before you "
            "replace obs or info, and apply the same function to it"
        )
    others = [each for each in (ended, final, new) if not isinstance(each, np.ndarray | np.generic)]
    numpy: Any = others[0].__array_namespace__() if others else np  # without an import of JAX
    return numpy.where(ended.reshape(*ended.shape, *[1] * (final.ndim - ended.ndim)), final, new)


@dataclass(frozen=True)
class EnvState:
    """Saved states of envs: a pytree with one small array; its last axis identifies a state.

    The workers keep the states themselves. So you can index, reshape, gather, stack and select states as you
    would observations, also with `jax.tree.map`. `state[i]` indexes all axes except the last. A
    state is valid until newer states replace it (`jaxvec.make(states=...)`).

    Attributes:
        ids: Array `[num_envs, 3]` of uint32: the pool id, and the low and high word of the state's number.
            All zero for no state.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 4, states=10) as envs:
            envs.reset(seed=0)
            state = envs.save()
            timestep = envs.restore(state[[0, 0, 2, 2]])  # env 1 from env 0's state, and env 3 from env 2's
            print((timestep.obs[0] == timestep.obs[1]).all())  # True
        ```
    """

    ids: Any

    def __getitem__(self, index: Any) -> EnvState:
        """Selects or reshapes states, as NumPy and JAX index arrays."""
        return EnvState(self.ids[index])


def check_states(state: Any, num_envs: int | None = None, as_array: Callable[[Any], Any] = np.asarray) -> Any:
    """Returns the ids of states as an array `[num_envs, 3]`; `None` allows any `num_envs`."""
    if not isinstance(state, EnvState):
        raise TypeError(f"state must be an EnvState from save or simulate, not {type(state).__name__}")
    ids = as_array(state.ids)
    if num_envs is None:
        num_envs = len(ids) if ids.ndim else 0
    if ids.shape != (num_envs, 3) or ids.dtype != np.uint32:
        raise ValueError(
            f"state: expected one for each of {num_envs} envs, as uint32 ids of shape ({num_envs}, 3); got "
            f"{ids.dtype} of shape {ids.shape}"
        )
    return ids


# --- Trees of leaves -------------------------------------------------------------------------------------
# A `Node` mirrors a space, with arrays of fixed shape as leaves. Leaves are identified by path and not by
# position, because Gymnasium keeps a `Dict`'s insertion order while JAX sorts the keys.

KeyPath: TypeAlias = tuple[Any, ...]
DtypePolicy: TypeAlias = Callable[[np.dtype[Any]], np.dtype[Any]]


@dataclass(frozen=True)
class Leaf:
    """One array of a space, for one env.

    Attributes:
        path: Keys and indices from the root, for example `("camera", 0)`.
        shape: Shape of one env's value.
        dtype: The env's own dtype.
        stored: Dtype in the segment and in JAX. `object` for a value without fixed shape, which is sent as a
            pickle.
    """

    path: KeyPath
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size of one env's value in the env's own dtype."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_object(self) -> bool:
        return self.stored.kind == "O"

    def __str__(self) -> str:
        return format_path(self.path)


@dataclass(frozen=True)
class DictNode:
    """A `Dict` space: its keys in the space's order, and one child per key."""

    path: KeyPath
    keys: tuple[Any, ...]
    children: tuple[Node, ...]

    def child(self, key: Any) -> Any:
        return self.children[self.keys.index(key)]

    def split(self, value: Any) -> list[Any]:
        """Returns the children's parts of a dict, in the space's order."""
        return [value[key] for key in self.keys]

    def join(self, parts: list[Any]) -> dict[Any, Any]:
        return dict(zip(self.keys, parts, strict=True))


@dataclass(frozen=True)
class TupleNode:
    """A `Tuple` space, with one child per element."""

    path: KeyPath
    children: tuple[Node, ...]

    def split(self, value: Any) -> Any:
        return value

    def join(self, parts: list[Any]) -> tuple[Any, ...]:
        return tuple(parts)


Padding: TypeAlias = Literal["text", "sequence", "stacked", "graph", "one_of"]


@dataclass(frozen=True)
class PaddedNode(DictNode):
    """A space without a fixed shape, as a dict of arrays that are padded with zeros, and their sizes.

    The key `cut`, if present, marks values that were cut to their maximum.

    Attributes:
        kind: The form of the env's values; `"stacked"` for `Sequence(stack=True)`.
        item: Node of one item of a sequence. It has the paths of `items`, without their first axis.
    """

    kind: Padding
    item: Node | None = None

    @property
    def as_stored(self) -> DictNode:
        """The same dict as an ordinary node."""
        return DictNode(self.path, self.keys, self.children)


Node: TypeAlias = Leaf | DictNode | TupleNode


def as_jax(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns JAX's dtype for `dtype` without x64: 64-bit types become 32-bit."""
    return np.dtype(f"{dtype.kind}4") if dtype.kind in "iuf" and dtype.itemsize == 8 else dtype


def as_is(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns `dtype` unchanged: the policy with x64 enabled, and for APIs without JAX."""
    return dtype


def fold_space(
    space: spaces.Space[Any],
    leaf: Callable[[Space[Any], KeyPath], Any],
    *,
    root: KeyPath,
    make_dict: Callable[[dict[Any, Any], KeyPath], Any],
    make_tuple: Callable[[list[Any], KeyPath], Any],
) -> Any:
    """Converts a space bottom-up, with one function per type of space.

    `leaf(space, path)` converts all spaces except `Dict` and `Tuple`. `make_dict(children, path)` and
    `make_tuple(children, path)` get the converted children, in order. `root` is the path of `space`.
    """
    fold = partial(fold_space, leaf=leaf, make_dict=make_dict, make_tuple=make_tuple)
    match space:
        case spaces.Dict():
            return make_dict({key: fold(one, root=(*root, key)) for key, one in space.spaces.items()}, root)
        case spaces.Tuple():
            return make_tuple([fold(one, root=(*root, i)) for i, one in enumerate(space.spaces)], root)
        case _:
            return leaf(space, root)


def union(a: Any, b: Any) -> Any:
    """Returns a space with the bounds of both; `None` if their structure, shapes or dtypes differ.

    A part of a space without a fixed shape keeps the bounds of `a`.
    """
    if a is b or a == b:  # often a class attribute; comparing large boxes is slow
        return a
    if type(a) is not type(b) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return None
    merged = copy(a)
    match a:
        case spaces.Box():
            return spaces.Box(np.minimum(a.low, b.low), np.maximum(a.high, b.high), dtype=a.dtype.type)
        case spaces.Discrete():
            merged.start = np.minimum(a.start, b.start)
            merged.n = np.maximum(a.start + a.n, b.start + b.n) - merged.start
        case spaces.MultiDiscrete():
            merged.start = np.minimum(a.start, b.start)
            merged.nvec = np.maximum(a.start + a.nvec, b.start + b.nvec) - merged.start
        case spaces.Dict() if a.keys() == b.keys():
            merged.spaces = {key: union(each, b[key]) for key, each in a.spaces.items()}
            return None if None in merged.spaces.values() else merged
        case spaces.Tuple() if len(a) == len(b):
            merged.spaces = tuple(map(union, a.spaces, b.spaces))
            return None if None in merged.spaces else merged
        case spaces.Text() | spaces.Sequence() | spaces.Graph() | spaces.OneOf():
            with suppress(NotImplementedError):  # for spaces that are not Gymnasium's
                return a if is_space_dtype_shape_equiv(a, b) else None
            return None
        case _:
            return None
    return merged


@dataclass(frozen=True)
class Cut:
    """A maximum for `make(max_sizes=...)` to which longer values are cut; the key `cut` marks them.

    Attributes:
        size: Maximum number of characters, items, nodes or edges.

    Example:
        ```python
        class Talker(jaxvec.testing.CountingEnv):
            observation_space = gymnasium.spaces.Text(1000)

            def reset(self, *, seed=None, options=None):
                return "once upon a time", super().reset(seed=seed)[1]

        with jaxvec.make(Talker, 1, max_sizes={"obs": jaxvec.spaces.Cut(4)}) as envs:
            obs = envs.reset(seed=0).obs
            print(jaxvec.spaces.decode(obs), obs["cut"])  # ['once'] [ True]
        ```
    """

    size: int


_MAX_OWN_SIZE = 250_000  # of a space itself: 1 MB of characters; programs may choose larger maxima


class MaxSizes:
    """The maxima of spaces without a fixed shape, by the path of the space.

    Args:
        given: The argument `max_sizes` of `make`.
        default: Maximum of the spaces that have none; `None` raises for them.

    Raises:
        TypeError, ValueError: `given` is not a nested mapping from strings to positive integers or `Cut`s.
    """

    def __init__(self, given: Any, default: int | None = None) -> None:
        self._given = dict(_flatten_sizes(given, ""))
        self._default = default
        self._unused, self._known = set(self._given), set[str]()

    def find(self, path: KeyPath, space: Space[Any], own: int | None = None) -> tuple[int, bool]:
        """Returns the maximum at a path, and whether longer values are cut; `own` is that of the space."""
        names = ["/".join(map(str, path[start:])) for start in (0, 1)]
        self._known.add(names[1] or names[0])
        for name in names:
            if (size := self._given.get(name)) is not None:
                self._unused.discard(name)
                return (size.size, True) if isinstance(size, Cut) else (size, False)
        size = self._default if own is None else own
        if size is None or size > _MAX_OWN_SIZE:
            in_dict = path[0] == "obs" and len(path) > 1
            lack = "no maximum size" if size is None else f"the maximum size {size}, too much for an array"
            raise UnsupportedSpaceError(
                f"{format_path(path)}: {type(space).__name__} has {lack}; pass "
                f"make(max_sizes={{{names[1] or names[0]!r}: n}})"
                + (", or remove it by gymnasium.wrappers.FilterObservation" if in_dict else "")
            )
        return size, False

    def check_used(self) -> None:
        """Raises `ValueError` if an entry belongs to no space."""
        if self._unused:
            raise ValueError(
                f"max_sizes: the envs have no Text, Sequence or Graph at {sorted(self._unused)}, only at "
                f"{sorted(self._known)}"
            )


def _flatten_sizes(given: Any, prefix: str) -> Iterator[tuple[str, int | Cut]]:
    if not isinstance(given, Mapping):
        raise TypeError(f"max_sizes must be a dict from paths of leaves to sizes, not {given!r}")
    for key, value in cast("Mapping[Any, Any]", given).items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten_sizes(value, f"{name}/")
            continue
        size: Any = value.size if isinstance(value, Cut) else value
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"max_sizes[{name!r}] must be an integer of at least 1, or a Cut, not {value!r}")
        yield name, Cut(int(size)) if isinstance(value, Cut) else int(size)


def walk(
    space: spaces.Space[Any],
    *,
    root: KeyPath,
    policy: DtypePolicy,
    objects: bool = False,
    sizes: MaxSizes | None = None,
) -> Node:
    """Converts the space of one env to a tree of leaves, or raises `UnsupportedSpaceError`.

    All paths start with `root`, and `policy` maps an env's dtype to the stored one. Spaces without a fixed
    shape become leaves of Python objects, with `objects`, or else padded nodes, with `sizes`.
    """

    def leaf(space: spaces.Space[Any], path: KeyPath) -> Node:
        match space:
            case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
                dtype = np.dtype(space.dtype).newbyteorder("=")
                if dtype.kind not in "biuf" or dtype.itemsize > 8:
                    raise UnsupportedSpaceError(
                        f"{format_path(path)}: dtype {dtype} has no JAX equivalent; use bool, an integer of "
                        "up to 64 bits, or float16, float32 or float64"
                    )
                stored = policy(dtype)
                _check_bounds_fit(space, stored, path)
                return Leaf(path, tuple(space.shape or ()), dtype, stored)
            case _ if objects:
                return Leaf(path, (), np.dtype(object), np.dtype(object))
            case _:
                node = None if sizes is None else _padded(space, path, policy, sizes)
                if node is None:
                    raise UnsupportedSpaceError(_unsupported(space, path))
                return node

    def dict_node(children: dict[Any, Node], path: KeyPath) -> Node:
        try:
            if not objects:
                sorted(children)  # as JAX will, to flatten the dict
        except TypeError as error:
            raise UnsupportedSpaceError(
                f"{format_path(path)}: keys {[*children]!r} of this Dict space can't be sorted, "
                "so JAX can't make a pytree of it; use keys of one type"
            ) from error
        return DictNode(path, tuple(children), tuple(children.values()))

    make_tuple = lambda children, path: TupleNode(path, tuple(children))  # noqa: E731
    return fold_space(space, leaf, root=root, make_dict=dict_node, make_tuple=make_tuple)


def _padded(space: Space[Any], path: KeyPath, policy: DtypePolicy, sizes: MaxSizes) -> PaddedNode | None:
    """Converts a space without a fixed shape; returns `None` for an unknown one."""
    inside = partial(walk, policy=policy, sizes=sizes)

    def scalar(key: str, dtype: Any = np.int32) -> Leaf:
        return Leaf((*path, key), (), np.dtype(dtype), np.dtype(dtype))

    item, cut = None, False
    parts: dict[str, Node]
    match space:
        case spaces.Sequence():
            kind = "stacked" if space.stack else "sequence"
            size, cut = sizes.find(path, space, getattr(space, "max_size", None))
            item = inside(space.feature_space, root=(*path, "items"))
            parts = {"items": _with_axis(item, size), "length": scalar("length")}
        case spaces.Graph():
            kind, parts = "graph", {}
            fields = {"nodes": space.node_space, "edges": space.edge_space}
            for key, features in ((key, one) for key, one in fields.items() if one is not None):
                size, cuts = sizes.find((*path, key), space, getattr(space, f"max_{key}", None))
                cut |= cuts
                parts[key] = _with_axis(inside(features, root=(*path, key)), size)
                if key == "edges":
                    parts["edge_links"] = replace(scalar("edge_links"), shape=(size, 2))
                parts[f"n_{key[:-1]}"] = scalar(f"n_{key[:-1]}")
        case spaces.OneOf():
            kind, root = "one_of", (*path, "values")
            choices = (inside(each, root=(*root, place)) for place, each in enumerate(space.spaces))
            parts = {"index": scalar("index"), "values": TupleNode(root, tuple(choices))}
        case _ if space.dtype is not None and space.dtype.kind == "U":  # such as `Text`
            kind = "text"
            size, cut = sizes.find(path, space, getattr(space, "max_length", None))
            charset = getattr(space, "character_set", None)
            is_latin1 = charset is not None and all(ord(each) < 256 for each in charset)
            chars = scalar("chars", np.uint8 if is_latin1 else np.int32)
            parts = {"chars": replace(chars, shape=(size,)), "length": scalar("length")}
        case _:
            return None
    if cut:
        parts["cut"] = scalar("cut", np.bool_)
    return PaddedNode(path, tuple(parts), tuple(parts.values()), kind, item)


def _with_axis(node: Node, size: int) -> Node:
    """Returns `node` with a first axis for `size` of its values in all leaves."""
    if isinstance(node, Leaf):
        return replace(node, shape=(size, *node.shape))
    node = node.as_stored if isinstance(node, PaddedNode) else node
    return replace(node, children=tuple(_with_axis(child, size) for child in node.children))


class _SizedSequence(spaces.Sequence):
    """A `Sequence` whose samples have at most `max_size` items."""

    max_size: int

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        if mask is None and probability is None:
            mask = min(int(self.np_random.geometric(0.25)), self.max_size), None  # lengths as Gymnasium's
        return super().sample(mask, probability)


class _SizedGraph(spaces.Graph):
    """A `Graph` whose samples have at most `max_nodes` nodes and `max_edges` edges."""

    max_nodes: int
    max_edges: int | None  # `None` without an edge space

    def sample(
        self, mask: Any = None, probability: Any = None, num_nodes: int = 10, num_edges: int | None = None
    ) -> spaces.GraphInstance:
        num_nodes = min(num_nodes, self.max_nodes)
        if num_edges is None and self.max_edges is not None and mask is None and probability is None:
            num_edges = int(self.np_random.integers(max(num_nodes * (num_nodes - 1), 1)))
        if num_edges is not None and self.max_edges is not None:
            num_edges = min(num_edges, self.max_edges)
        return super().sample(mask, probability, num_nodes, num_edges)


def limit(space: Space[Any], node: Any) -> Any:
    """Returns a space whose samples fit the maximum sizes of `node`, as far as it is Gymnasium's own."""
    if not any(padded_nodes(node)):
        return space
    limited: Any = copy(space)
    match limited:
        case spaces.Dict():
            limited.spaces = {key: limit(each, node.child(key)) for key, each in limited.spaces.items()}
        case spaces.Tuple():
            limited.spaces = tuple(map(limit, limited.spaces, node.children))
        case spaces.OneOf():
            limited.spaces = tuple(map(limit, limited.spaces, node.child("values").children))
        case spaces.Sequence() if type(space) is spaces.Sequence and any(leaves(node.child("items"))):
            limited = _SizedSequence(limit(limited.feature_space, node.item), stack=limited.stack)
            limited.max_size = next(leaves(node.child("items"))).shape[0]
        case spaces.Graph() if type(space) is spaces.Graph:
            limited = _SizedGraph(limited.node_space, limited.edge_space)
            limited.max_nodes = node.child("nodes").shape[0]
            limited.max_edges = node.child("edges").shape[0] if "edges" in node.keys else None
        case spaces.Text():
            limited.max_length = node.child("chars").shape[0]
            limited.min_length = min(limited.min_length, limited.max_length)
        case _:
            pass
    return limited


def leaves(node: Node) -> Iterator[Leaf]:
    """Yields the leaves of `node`, depth first, in the space's order."""
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children:
            yield from leaves(child)


def build(node: Node, value: Callable[[Leaf], Any]) -> Any:
    """Builds nested dicts and tuples in the structure of `node`, with `value(leaf)` at each leaf."""
    if isinstance(node, Leaf):
        return value(node)
    return node.join([build(child, value) for child in node.children])


def builder(node: Node, places: Mapping[KeyPath, int]) -> Callable[[Sequence[Any]], Any]:
    """Returns a faster `build` of `node`, which takes a sequence of the leaves' values.

    `places` maps the path of each leaf to the index of its value.
    """
    if isinstance(node, Leaf):
        return itemgetter(places[node.path])
    # A partial and not a closure, as a specification can be pickled.
    return partial(_build_and_join, node.join, [builder(child, places) for child in node.children])


def _build_and_join(
    join: Callable[[list[Any]], Any], builders: list[Callable[[Sequence[Any]], Any]], values: Sequence[Any]
) -> Any:
    return join([build(values) for build in builders])


def map_leaves(node: Node, value: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Returns an env's `value` with each part replaced by `function(leaf or padded node, part)`."""
    if isinstance(node, Leaf | PaddedNode):
        return function(node, value)
    parts = zip(node.children, node.split(value), strict=True)
    return node.join([map_leaves(child, part, function) for child, part in parts])


def move(node: Node, root: KeyPath) -> Node:
    """Returns `node` with the root of all paths replaced by `root`."""
    if isinstance(node, Leaf):
        return replace(node, path=root)
    keys = node.keys if isinstance(node, DictNode) else range(len(node.children))
    pairs = zip(keys, node.children, strict=True)
    moved = replace(node, path=root, children=tuple(move(child, (*root, key)) for key, child in pairs))
    if isinstance(moved, PaddedNode) and moved.item is not None:
        return replace(moved, item=move(moved.item, (*root, "items")))
    return moved


def padded_nodes(node: Node) -> Iterator[PaddedNode]:
    """Yields the spaces in `node` without a fixed shape, but not those within them."""
    if isinstance(node, PaddedNode):
        yield node
    elif not isinstance(node, Leaf):
        for child in node.children:
            yield from padded_nodes(child)


def format_path(path: KeyPath) -> str:
    """Formats a path as a Python expression: `obs['camera'][0]`."""
    head, *tail = path
    return str(head) + "".join(f"[{key!r}]" for key in tail)


def _check_bounds_fit(space: spaces.Space[Any], stored: np.dtype[Any], root: KeyPath) -> None:
    """Rejects `Discrete` and `MultiDiscrete` spaces with elements that would overflow the stored dtype."""
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


# --- The specification of a pool -------------------------------------------------------------------------

STATISTICS = ("env_id", "episode_return", "episode_length")
_OPTIONS = "reset_options"
_HAS_OPTIONS = Leaf((f"_{_OPTIONS}",), (), np.dtype(np.bool_), np.dtype(np.bool_))
_RESERVED = ("final_obs", "_final_obs", "final_info", "fault", "idle")


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

    Pools with equal specifications can use the same compiled program. `declared` is the part of `info` that
    the env itself fills in. `reset_options` are the declared options of resets, `None` for none.
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
        given = (getattr(spec, field.name) for field in fields(spec))
        values = tuple(value for value in given if value is not None)
        return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1

    def batch_shape(self, leaf: Leaf) -> tuple[int, ...]:
        return (self.num_envs, *leaf.shape)

    @cached_property
    def _builders(self) -> tuple[Callable[[Sequence[Any]], Any], ...]:
        places = {leaf.path: place for place, leaf in enumerate(self.timestep_leaves)}
        return tuple(builder(node, places) for node in self.timestep)

    @cached_property
    def _timestep_type(self) -> type[TimeStep[Any]]:
        return TimeStep if self.autoreset is Autoreset.SAME_STEP else LastObsTimeStep

    def build_timestep(self, rows: Sequence[Any]) -> TimeStep[Any]:
        """Builds a `TimeStep` from one array per leaf of `timestep_leaves`, in their order."""
        return self._timestep_type(*[build(rows) for build in self._builders])


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
    and actions may be Python objects. With `max_sizes`, spaces without a fixed shape are padded.
    `reset_options` is the space of the options of a reset.
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
    if autoreset is Autoreset.SAME_STEP:
        if final_obs:
            fields["final_obs"] = move(obs, ("info", "final_obs"))
            fields["_final_obs"] = scalar(np.bool_, "info", "_final_obs")
        if declared:
            fields["final_info"] = move(declared_node, ("info", "final_info"))
    options = None
    if reset_options is not None:
        options = walk(reset_options, root=(_OPTIONS,), policy=policy, sizes=sizes)
        if taken := {_OPTIONS, *_HAS_OPTIONS.path} & {*declared_node.keys}:
            raise ValueError(f"info: {sorted(taken)} are filled in by jaxvec; remove them, or reset_options")
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
    )


def declared_leaves(
    declared: Mapping[str, Any], policy: DtypePolicy, sizes: MaxSizes | None = None
) -> DictNode:
    """Returns the node of the declared info keys, each followed by its mask `_key`.

    A declaration is a Gymnasium space, a NumPy dtype (`int`, `"f4"`, `(np.float32, (3,))`), an object with
    `shape` and `dtype` (an array, a `jax.ShapeDtypeStruct`), or a dict of such.
    """
    keys: list[str] = []
    children: list[Node] = []
    for key, declaration in declared.items():
        mask = f"_{key}"
        if {key, mask} & {*STATISTICS, *_RESERVED, *keys}:
            raise ValueError(f"info: the key {key!r} is reserved by jaxvec or duplicated; rename it")
        keys += [key, mask]
        children += [
            _declared_node(("info", key), declaration, policy, sizes),
            Leaf(("info", mask), (), np.dtype(np.bool_), np.dtype(np.bool_)),
        ]
    return DictNode(("info",), tuple(keys), tuple(children))


def declarations(info: Mapping[str, Any] | Iterable[str] | None) -> dict[str, Any]:
    """Returns `make`'s `info` as a dict of declarations; keys to infer from a first reset have `None`."""
    if info is None:
        return {}
    if isinstance(info, str):
        raise TypeError(f"info must be a dict or a list of keys, not the string {info!r}; use [{info!r}]")
    if not isinstance(info, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"info must be a dict or a list of keys, not {info!r}")
    given = dict(info) if isinstance(info, Mapping) else dict.fromkeys(info)
    for key in given:
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"info: the key {key!r} is no str, as programs need; rename it in a wrapper, or read it with "
                "VectorEnv.infos()"
            )
    return given


def _declared_node(path: KeyPath, declaration: Any, policy: DtypePolicy, sizes: MaxSizes | None) -> Node:
    if isinstance(declaration, Space):
        return walk(declaration, root=path, policy=policy, sizes=sizes)
    if isinstance(declaration, Mapping):
        nested = cast("Mapping[Any, Any]", declaration)
        if not nested or not all(isinstance(key, str) for key in nested):
            raise UnsupportedSpaceError(
                f"{format_path(path)}: a dict needs strings as keys, and at least one, not {[*nested]}"
            )
        children = tuple(_declared_node((*path, key), each, policy, sizes) for key, each in nested.items())
        return DictNode(path, tuple(nested), children)
    shape, dtype = getattr(declaration, "shape", None), getattr(declaration, "dtype", None)
    # NumPy's scalar types have `shape` and `dtype` as descriptors, so types are always parsed.
    if isinstance(declaration, type) or shape is None or dtype is None:
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
            f"{format_path(path)}: {dtype} can't be an array inside jax.jit; declare numbers, bools or a "
            "gymnasium.spaces.Text, or leave the key out and read it with VectorEnv.infos()"
        )
    return Leaf(path, tuple(shape), dtype, policy(dtype))
