"""Conversions of values of `Text`, `Sequence`, `Graph` and `OneOf` spaces to padded arrays and back.

Programs get and pass such values as dicts of arrays, which `docs/how-to/padded_and_batched.md` describes. The
functions here are for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from gymnasium import Space, spaces

from jaxvec._arguments import flatten
from jaxvec._errors import ActionError
from jaxvec._leaves import Cut, KeyPath, MaxSizes, Node, as_is, build, leaves, walk
from jaxvec._memory.rows import InvalidValue, reader, writer

__all__ = ["Cut", "decode", "encode", "pad", "unpad"]


def pad(
    space: Space[Any], value: Any, max_sizes: Mapping[str, Any] | None = None, *, root: str = "action"
) -> Any:
    """Converts a value of a space, such as an action, to padded arrays of fixed shape.

    Args:
        space: The space of one env.
        value: A value of the space; or a list with a value for each env.
        max_sizes: Maximum sizes, as in `jaxvec.make`; further entries have no effect.
        root: First part of the paths of the space: `"action"`, `"obs"`, `"info"` or `"reset_options"`.

    Returns:
        Pytree of NumPy arrays, with leaves `[num_envs, ...]` if `value` is a list. Dtypes are those of the
        space.

    Raises:
        ActionError: The value does not fit the space or a maximum size. The message names the leaf.
        UnsupportedSpaceError: A space is unknown, or has no maximum size.

    Example:
        ```python
        space = gymnasium.spaces.Dict({"say": gymnasium.spaces.Text(5)})
        print(jaxvec.spaces.pad(space, {"say": "hi"})["say"])
        # {'chars': array([104, 105,   0,   0,   0], dtype=uint8), 'length': array(2, dtype=int32)}
        ```
    """
    return _pad(walk(space, root=(root,), policy=as_is, sizes=MaxSizes(max_sizes or {})), value)


def _pad(node: Node, value: Any) -> Any:
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    arrays = {leaf.path: np.zeros((len(values), *leaf.shape), leaf.stored) for leaf in leaves(node)}
    write = writer(node, arrays)
    for slot, slot_value in enumerate(values):
        try:
            write(slot, slot_value)
        except InvalidValue as error:
            raise ActionError(str(error)) from error
    return build(node, lambda leaf: arrays[leaf.path] if isinstance(value, list) else arrays[leaf.path][0])


def unpad(space: Space[Any], tree: Any) -> Any:
    """Converts padded arrays to the value that the space contains; the inverse of `pad`.

    Args:
        space: The space of one env.
        tree: Pytree of arrays for one env; or with leaves `[num_envs, ...]`, such as `timestep.obs`.

    Returns:
        The value, such as a str, a tuple or a `GraphInstance`; or a list with a value for each env.

    Raises:
        ActionError: The tree has another structure, or a wrong size. The message names the leaf.

    Example:
        ```python
        space = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(9))
        tree = {"items": np.array([3, 1, 0, 0]), "length": 2}
        print(jaxvec.spaces.unpad(space, tree))  # (np.int64(3), np.int64(1))
        ```
    """
    node = walk(space, root=("obs",), policy=as_is, sizes=_SizesOf(tree))
    return _unpad(node, tree)


def _unpad(node: Node, tree: Any) -> Any:
    pairs = flatten(node, tree, lambda leaf, value: (leaf, np.asarray(value)))
    batched = any(array.ndim > len(leaf.shape) for leaf, array in pairs)
    arrays = {leaf.path: array if batched else array[None] for leaf, array in pairs}
    count = next((len(array) for array in arrays.values()), 1)
    values = list(reader(node, arrays)(slice(0, count, 1)))
    return values if batched else values[0]


class _SizesOf(MaxSizes):
    """Stands for the maxima of padded arrays. The sizes are dummies; only the presence of `cut` matters."""

    def __init__(self, tree: Any) -> None:
        super().__init__({})
        self._tree = tree

    def find(self, path: KeyPath, space: Space[Any], own: int | None = None) -> tuple[int, bool]:
        part = self._tree
        for key in path[1:-1] if isinstance(space, spaces.Graph) else path[1:]:
            try:
                part = part[key]
            except (KeyError, IndexError, TypeError):
                return 1, False  # `flatten` will raise an error with the path
        return 1, isinstance(part, Mapping) and "cut" in part


def encode(text: Any, max_length: int, dtype: Any = np.uint8) -> dict[str, Any]:
    """Converts text to padded code points, such as a `Text` action of a program.

    Args:
        text: A str, or a list of them.
        max_length: Length of the arrays; the `max_length` of the space.
        dtype: `np.uint8` if all characters of the space are in Latin-1, else `np.int32`.

    Returns:
        Dict with `chars`, `dtype [..., max_length]`, and `length`, int32 `[...]`.

    Raises:
        ActionError: A text is longer than `max_length`, or has characters that do not fit `dtype`.

    Example:
        ```python
        print(jaxvec.spaces.encode("go", 4))
        # {'chars': array([103, 111,   0,   0], dtype=uint8), 'length': array(2, dtype=int32)}
        ```
    """
    return _pad(_text_node(dtype, max_length), text)


def decode(tree: Mapping[str, Any]) -> Any:
    """Converts padded code points to text.

    Args:
        tree: Dict with `chars`, `[..., max_length]`, and `length`, `[...]`.

    Returns:
        A str, or nested lists of str in the shape of `length`.

    Raises:
        ActionError: A length is out of range, or a number is not a code point.

    Example:
        ```python
        text = jaxvec.spaces.encode(["go", "stop"], 8)
        print(jaxvec.spaces.decode(text))  # ['go', 'stop']
        ```
    """
    chars = np.asarray(tree["chars"])
    length = np.asarray(tree["length"])
    rows = {"chars": chars.reshape(-1, chars.shape[-1]), "length": length.reshape(-1)}
    texts = np.empty(length.size, object)
    texts[:] = _unpad(_text_node(chars.dtype), rows)
    return texts.reshape(length.shape).tolist()


def _text_node(dtype: Any, max_length: int = 1) -> Node:
    # `walk` stores the characters of a `Text` space as uint8 if its charset is within Latin-1, else as int32.
    charset = "a" if np.dtype(dtype) == np.uint8 else "\u0100"
    return walk(spaces.Text(max_length, charset=charset), root=("text",), policy=as_is, sizes=MaxSizes({}))
