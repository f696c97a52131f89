"""Trees of leaves, which mirror spaces: every other part derives shapes, dtypes and order of data from them.

    Gymnasium spaces --walk--> trees of `Leaf` --make_spec (_spec.py)--> `PoolSpec`

A `Node` mirrors a space, with arrays of fixed shape as leaves. Spaces without a fixed shape are padded to a
maximum size. Leaves are identified by path and not by position, because Gymnasium keeps a `Dict`'s insertion
order while JAX sorts the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from gymnasium import Space, spaces
from gymnasium.spaces.utils import is_space_dtype_shape_equiv

from jaxvec._errors import UnsupportedSpaceError
from jaxvec._settings import check_count

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
        item: Node of one item of a sequence, or None. It has the paths of `items`, without their first axis.
    """

    kind: Padding
    item: Any = None

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
            return make_dict(
                {key: fold(subspace, root=(*root, key)) for key, subspace in space.spaces.items()}, root
            )
        case spaces.Tuple():
            return make_tuple(
                [fold(subspace, root=(*root, i)) for i, subspace in enumerate(space.spaces)], root
            )
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
            merged.spaces = {key: union(subspace, b[key]) for key, subspace in a.spaces.items()}
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
        self._unused = set(self._given)
        self._known = set[str]()

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
        size = check_count(f"max_sizes[{name!r}]", value.size if isinstance(value, Cut) else value, 1)
        yield name, Cut(size) if isinstance(value, Cut) else size


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
                    raise UnsupportedSpaceError(
                        f"{format_path(path)}: {type(space).__name__} has no fixed shape and dtype, so it "
                        "can't be an array inside jax.jit; wrap the env so that this leaf is a Box, "
                        "Discrete, MultiDiscrete or MultiBinary (gymnasium.ObservationWrapper, "
                        "gymnasium.ActionWrapper), or drop the leaf there"
                    )
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

    item = None
    cut = False
    parts: dict[str, Node]
    match space:
        case spaces.Sequence():
            kind = "stacked" if space.stack else "sequence"
            size, cut = sizes.find(path, space, getattr(space, "max_size", None))
            item = inside(space.feature_space, root=(*path, "items"))
            parts = {"items": _with_axis(item, size), "length": scalar("length")}
        case spaces.Graph():
            kind = "graph"
            parts = {}
            fields = {"nodes": space.node_space, "edges": space.edge_space}
            for key, features in fields.items():
                if features is None:
                    continue
                size, cuts = sizes.find((*path, key), space)
                cut |= cuts
                parts[key] = _with_axis(inside(features, root=(*path, key)), size)
                if key == "edges":
                    parts["edge_links"] = replace(scalar("edge_links"), shape=(size, 2))
                parts[f"n_{key[:-1]}"] = scalar(f"n_{key[:-1]}")
        case spaces.OneOf():
            kind = "one_of"
            root = (*path, "values")
            choices = (inside(choice, root=(*root, place)) for place, choice in enumerate(space.spaces))
            parts = {"index": scalar("index"), "values": TupleNode(root, tuple(choices))}
        case _ if space.dtype is not None and space.dtype.kind == "U":  # such as `Text`
            kind = "text"
            size, cut = sizes.find(path, space, getattr(space, "max_length", None))
            charset = getattr(space, "character_set", None)
            is_latin1 = charset is not None and all(ord(character) < 256 for character in charset)
            chars = scalar("chars", np.uint8 if is_latin1 else np.int32)
            parts = {"chars": replace(chars, shape=(size,)), "length": scalar("length")}
        case _:
            return None
    if cut:
        parts["cut"] = scalar("cut", np.bool_)
    return PaddedNode(path, tuple(parts), tuple(parts.values()), kind, item)


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
        keys += [key, mask]
        children += [
            _declared_node(("info", key), declaration, policy, sizes),
            Leaf(("info", mask), (), np.dtype(np.bool_), np.dtype(np.bool_)),
        ]
    return DictNode(("info",), tuple(keys), tuple(children))


def _declared_node(path: KeyPath, declaration: Any, policy: DtypePolicy, sizes: MaxSizes | None) -> Node:
    if isinstance(declaration, Space):
        return walk(declaration, root=path, policy=policy, sizes=sizes)
    if isinstance(declaration, Mapping):
        nested = cast("Mapping[Any, Any]", declaration)
        if not nested or not all(isinstance(key, str) for key in nested):
            raise UnsupportedSpaceError(
                f"{format_path(path)}: a dict needs strings as keys, and at least one, not {[*nested]}"
            )
        children = tuple(
            _declared_node((*path, key), nested_declaration, policy, sizes)
            for key, nested_declaration in nested.items()
        )
        return DictNode(path, tuple(nested), children)
    shape = getattr(declaration, "shape", None)
    dtype = getattr(declaration, "dtype", None)
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


def limit(space: Space[Any], node: Any) -> Any:
    """Returns a space whose samples fit the maximum sizes of `node`, as far as it is Gymnasium's own.

    Samples of a `Graph` may be larger.
    """
    if not any(padded_nodes(node)):
        return space
    limited: Any = copy(space)
    match limited:
        case spaces.Dict():
            limited.spaces = {
                key: limit(subspace, node.child(key)) for key, subspace in limited.spaces.items()
            }
        case spaces.Tuple():
            limited.spaces = tuple(map(limit, limited.spaces, node.children))
        case spaces.OneOf():
            limited.spaces = tuple(map(limit, limited.spaces, node.child("values").children))
        case spaces.Sequence() if type(space) is spaces.Sequence and any(leaves(node.child("items"))):
            limited = _SizedSequence(limit(limited.feature_space, node.item), stack=limited.stack)
            limited.max_size = next(leaves(node.child("items"))).shape[0]
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


def full_box(shape: Sequence[int], dtype: Any) -> spaces.Box:
    """Returns the space of all arrays of a shape and dtype."""
    dtype = np.dtype(dtype)
    bounds: tuple[Any, Any] = (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype).min, np.iinfo(dtype).max
    return spaces.Box(*bounds, shape, dtype)


def _check_bounds_fit(space: spaces.Space[Any], stored: np.dtype[Any], root: KeyPath) -> None:
    """Rejects `Discrete` and `MultiDiscrete` spaces with elements that would overflow the stored dtype."""
    match space:
        case spaces.Discrete():
            low = int(space.start)
            high = int(space.start) + int(space.n) - 1
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
