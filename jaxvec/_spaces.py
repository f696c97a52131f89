"""Walks a space once into a tree of leaves; the only file that names space classes.

A `Node` mirrors a space with fixed-shape arrays at its leaves. Everything else in jaxvec is a loop
over `leaves(node)`, addressed by path, because Gymnasium keeps a `Dict`'s insertion order and JAX
sorts its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from jaxvec._errors import UnsupportedSpaceError

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

    def descend(key: Any, child: spaces.Space[Any]) -> Node:
        return walk(child, root=(*root, key), policy=policy, objects=objects)

    match space:
        case spaces.Dict():
            if not objects:
                _check_sortable_keys(space, root)
            children = tuple(descend(key, child) for key, child in space.spaces.items())
            return DictNode(root, tuple(space.spaces), children)
        case spaces.Tuple():
            return TupleNode(root, tuple(descend(*pair) for pair in enumerate(space.spaces)))
        case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            dtype = np.dtype(space.dtype).newbyteorder("=")
            _check_known_dtype(dtype, root)
            stored = policy(dtype)
            _check_bounds_fit(space, stored, root)
            return Leaf(root, tuple(space.shape or ()), dtype, stored)
        case _ if objects:
            return Leaf(root, (), np.dtype(object), np.dtype(object))
        case _:
            raise UnsupportedSpaceError(_unsupported(space, root))


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


def _check_sortable_keys(space: spaces.Dict, root: KeyPath) -> None:
    """JAX flattens a dict by sorted keys; keys that don't compare can't be a pytree."""
    try:
        sorted(space.spaces)
    except TypeError as error:
        raise UnsupportedSpaceError(
            f"{format_path(root)}: keys {list(space.spaces)!r} of this Dict space can't be sorted, "
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
