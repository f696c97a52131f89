"""Conversions between values of envs and rows of the segment."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, TypeAlias, cast

import numpy as np
from gymnasium.spaces import GraphInstance
from numpy.typing import NDArray

from jaxvec import _native
from jaxvec._arguments import find_first
from jaxvec._errors import ActionError
from jaxvec._leaves import (
    DictNode,
    KeyPath,
    Leaf,
    Node,
    PaddedNode,
    Padding,
    TupleNode,
    format_path,
    leaves,
)
from jaxvec._memory.segment import Arrays

# --- Writing and reading values --------------------------------------------------------------------------
# Values are cast by NumPy's `same_kind`, as in `gymnasium.vector.SyncVectorEnv`: float64 values fit a
# float32 space, but floats do not fit an integer space. `store` has the rule for values out of range.

Write: TypeAlias = Callable[[int, Any], None]


class InvalidValue(Exception):
    """A value that does not fit its leaf. It becomes an `EnvDataError`, which also names the env.

    Attributes:
        row: Index of the env in a batched env.
    """

    row = 0


def writer(node: Node, arrays: Arrays, *, check: str = "structure") -> Write:
    """Returns a function `write(slot, value)`, which writes a nested value of an env to its row of `arrays`.

    It raises `InvalidValue` if the value does not have the structure, shapes and dtypes of `node`, and for
    values out of range, see `store`. `check` is the option of `make`.
    """
    compiled = _native.ext
    if isinstance(node, Leaf):
        write_leaf = _leaf_writer(node, arrays[node.path], check)
        return write_leaf if compiled is None else compiled.leaf_writer(write_leaf, arrays[node.path])
    if isinstance(node, PaddedNode):
        return _padded_writer(node, arrays, check)
    children = tuple(writer(child, arrays, check=check) for child in node.children)
    keys = node.keys if isinstance(node, DictNode) else tuple(range(len(children)))
    kinds = (dict, Mapping) if isinstance(node, DictNode) else (tuple, list)
    lax = check == "cast"
    if lax:
        kinds = (*kinds, np.ndarray)
    pairs = tuple(zip(keys, children, strict=True))

    def write(slot: int, value: Any) -> None:
        if not isinstance(value, kinds) or (
            len(value) != len(pairs) and not (lax and len(value) > len(pairs))
        ):
            raise InvalidValue(wrong_structure(node, value))
        try:
            for key, write_child in pairs:
                write_child(slot, value[key])
        except KeyError as error:
            raise InvalidValue(wrong_structure(node, value)) from error

    if compiled is None:
        return write
    return compiled.nested_writer(write, keys if isinstance(node, DictNode) else None, children)


def reader(
    node: Node, arrays: Arrays, *, stored: bool = False
) -> Callable[[slice | NDArray[Any]], Iterator[Any]]:
    """Returns a function `read(index)`, which yields the nested value of each slot, as envs expect it.

    `index` is an array of slots or, faster, a slice with start, stop and step. Values are copies in the env's
    own dtype, which the env may keep and modify; leaves of shape `()` are NumPy scalars. If `stored`, padded
    values are a `PaddedValue`; otherwise a wrong size or index in them raises `ActionError`.
    """
    if isinstance(node, PaddedNode):
        if stored:
            read_parts = reader(node.as_stored, arrays, stored=True)
            return lambda index: map(PaddedValue, read_parts(index))
        read = _READERS[node.kind](node, arrays)
        return lambda index: map(read, _slots(index))
    if isinstance(node, Leaf):
        array = arrays[node.path]
        dtype = node.dtype
        if node.shape == ():
            return lambda index: array[index].astype(dtype).flat
        return lambda index: iter(array[index].astype(dtype))
    children = [reader(child, arrays, stored=stored) for child in node.children]
    if isinstance(node, TupleNode):
        if not children:
            return lambda index: repeat((), len(_slots(index)))
        return lambda index: zip(*(read(index) for read in children), strict=True)
    if not children:
        return lambda index: ({} for _ in _slots(index))
    keys = repeat(node.keys)
    # `dict(zip(node.keys, values))` for each of the values, without bytecode per value.
    return lambda index: map(dict, map(zip, keys, zip(*(read(index) for read in children), strict=True)))


def _slots(index: slice | NDArray[Any]) -> Sequence[int]:
    if isinstance(index, slice):
        return range(index.start, index.stop, index.step)
    return cast("list[int]", index.tolist())


def zeroer(node: Node, arrays: Arrays) -> Callable[[int], None]:
    """Returns a function `clear(slot)`, which zeroes the slot's row of every leaf."""
    fields = [(arrays[leaf.path], None if leaf.is_object else 0) for leaf in leaves(node)]

    def clear(slot: int) -> None:
        for array, zero in fields:
            array[slot] = zero

    return clear


def column(node: Node, arrays: Arrays) -> NDArray[Any]:
    """Returns the array `[num_envs, ...]` of a node that must be a leaf."""
    (leaf,) = leaves(node)
    return arrays[leaf.path]


def scalars(array: NDArray[Any]) -> Any:
    """Returns the view of `array` that writes single elements, or rows, fastest."""
    # A memoryview can't write float16 or long double.
    return array.data if array.ndim == 1 and array.dtype.char not in "eg" else array


def _leaf_writer(leaf: Leaf, array: NDArray[Any], check: str) -> Write:
    if leaf.is_object:
        return array.__setitem__
    if leaf.shape == () and leaf.dtype.kind in "iu":

        def write_integer(slot: int, value: Any) -> None:
            # NumPy checks the range of a Python int, but not that of an array.
            try:
                number = operator.index(value)
            except TypeError:
                number = int(conform(leaf, value, check))
            try:
                array[slot] = number
            except OverflowError as error:
                raise InvalidValue(_overflow(leaf, number)) from error

        return write_integer

    shape = leaf.shape
    ndarray = np.ndarray
    dtype = np.dtype(leaf.dtype.str)  # NumPy's own object, for `is` below; an unpickled dtype is a copy
    rows = [array[slot : slot + 1].reshape(shape) for slot in range(len(array))]  # faster than array[slot]

    def write(slot: int, value: Any) -> None:
        # Locals and `is` keep the usual case fast: this runs once per leaf and step.
        if (
            value.__class__ is not ndarray
            or (value.dtype is not dtype and value.dtype != dtype)
            or value.shape != shape
        ):
            value = conform(leaf, value, check)
        store(leaf, rows[slot], value, strict=check == "strict")

    return write


def store(leaf: Leaf, row: NDArray[Any], value: NDArray[Any], *, strict: bool = False) -> None:
    """Writes an array that `conform` accepts.

    Integers never wrap: `InvalidValue` is raised for the first that does not fit. Floats are rounded, and are
    infinite if they are too large, as in NumPy, JAX and Gymnasium; `InvalidValue` is raised if `strict`.
    """
    stored = row.dtype
    if value.dtype == stored:
        row[...] = value
        return
    if stored.kind in "iu":
        row[...] = value
        place = find_first(row != value)
    else:
        with np.errstate(over="ignore"):  # NumPy's warning would be an error in some programs
            row[...] = value
        place = find_first(np.isinf(row) & np.isfinite(value)) if strict else None
    if place is not None:
        raise InvalidValue(_overflow(leaf, value.flat[place].item()))


def conform(leaf: Leaf, value: Any, check: str = "structure") -> NDArray[Any]:
    """Returns `value` as an array that has the leaf's shape and casts to its dtype; raises `InvalidValue`."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        text = f"{leaf}: expected shape {leaf.shape}, got a ragged sequence; pad it, as in np.pad"
        raise InvalidValue(text) from error
    check_unmasked(str(leaf), value)
    keys = _declared_keys(leaf)
    if check == "cast" and not keys:
        array = _cast(leaf, array)
    if array.shape != leaf.shape:
        text = f"{leaf}: expected shape {leaf.shape}, got {array.shape}"
        if keys:
            raise InvalidValue(f"{text}; declare {_declaration(keys, array)}")
        cure = _SPACE
        if _longer_axes(array.shape) == _longer_axes(leaf.shape):
            cure = f"reshape it: np.reshape(value, {leaf.shape}){_or_cast(leaf.path)}"
        elif sorted(array.shape) == sorted(leaf.shape):
            cure = "change the order of its axes, as np.moveaxis does"
        raise InvalidValue(f"{text}; {cure}")
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        name = type(value).__name__
        dtype = name if array.dtype.kind == "O" else f"{array.dtype} ({name})"
        text = f"{leaf}: expected {leaf.dtype}, got {dtype}"
        if keys and array.dtype.kind in "biuf":
            with np.errstate(invalid="ignore"):
                exact = array.astype(leaf.dtype)
            if (exact == array).all():
                return exact
            text += f"; declare a type that has all of its values: {_declaration(keys, array)}"
        elif array.dtype.kind in "biufO":
            text += f"; cast it: np.asarray(value).astype(np.{leaf.dtype.name}){_or_cast(leaf.path)}"
        else:
            text += f"; {_SPACE}"
        raise InvalidValue(text)
    return array


_SPACE = "give a value of the space, or change the space"


def check_unmasked(name: str, value: Any) -> None:
    """Raises `InvalidValue` for a masked array, whose hidden numbers NumPy would give."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise InvalidValue(
            f"{name}: got a masked array; give each of its elements a value: np.ma.filled(value, 0)"
        )


def _longer_axes(shape: tuple[int, ...]) -> list[int]:
    """Returns the sizes that tell which element is which; axes of size 1 do not."""
    return [size for size in shape if size != 1]


def _or_cast(path: KeyPath) -> str:
    """Returns the end of a remedy for wrong observations."""
    return ', or pass make(check="cast")' if "obs" in path[:1] or "final_obs" in path[1:2] else ""


def _cast(leaf: Leaf, array: NDArray[Any]) -> NDArray[Any]:
    """Casts an array as `np.copyto(row, array, "unsafe")` does, except that no number wraps or is invented.

    Only axes of size 1 may be missing or too many: another order of axes would scramble the values.
    """
    kept = array
    if kept.dtype.kind == "O" and any(element is None for element in kept.flat):  # NumPy makes it nan
        raise InvalidValue(f"{leaf}: expected {leaf.dtype}, got None; {_SPACE}")
    if array.dtype.kind in "biufOSU":  # casts of other types lose more than digits
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                array = array.astype(leaf.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            text = f"{leaf}: can't cast {kept.dtype} to {leaf.dtype}: {error}; {_SPACE}"
            raise InvalidValue(text) from error
    if leaf.dtype.kind in "iu" and kept.dtype.kind in "iuf":
        place = find_first(array != np.trunc(kept))
        if place is not None:
            raise InvalidValue(_overflow(replace(leaf, stored=leaf.dtype), kept.flat[place].item()))
    if _longer_axes(array.shape) == _longer_axes(leaf.shape):
        return array.reshape(leaf.shape)
    return np.broadcast_to(array, leaf.shape) if array.size == 1 else array


def _declared_keys(leaf: Leaf) -> KeyPath:
    """Returns the keys of a leaf that the user declares in `info`; none for other leaves."""
    head, *keys = leaf.path
    if head == "info" and keys[0] == "final_info":
        keys = keys[1:]
    return tuple(keys) if head == "info" and keys[0] not in ("final_obs", "reset_options") else ()


def _declaration(keys: KeyPath, array: NDArray[Any]) -> str:
    """Returns an argument of `make` that declares the type of an info."""
    kind = {"b": "bool", "f": "float"}.get(array.dtype.kind, "int")
    text = kind if array.shape == () else f"({kind}, {array.shape})"
    for key in reversed(keys):
        text = f"{{{key!r}: {text}}}"
    return f"info={text}"


def wrong_structure(node: DictNode | TupleNode, value: Any) -> str:
    """Returns the text of an error for a value without the structure of `node`."""
    where = format_path(node.path)
    if isinstance(node, TupleNode):
        expected = f"a tuple of {len(node.children)}"
        got = f"one of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
        return f"{where}: expected {expected}, got {got}; {_SPACE}"
    if not isinstance(value, Mapping):
        got = type(value).__name__
        return f"{where}: expected a dict with keys {list(node.keys)}, got {got}; {_SPACE}"
    missing = [key for key in node.keys if key not in value]
    extra = [key for key in value if key not in node.keys]
    cure = _SPACE if missing else f"remove the others{_or_cast(node.path)}"
    return f"{where}: expected keys {list(node.keys)}; missing {missing}, not in the space {extra}; {cure}"


def _overflow(leaf: Leaf, value: Any) -> str:
    text = f"{leaf}: {value!r} doesn't fit into {leaf.stored}"
    if leaf.stored == leaf.dtype:
        return f"{text}; clip it, as np.clip does, or declare a wider dtype"
    text += f", in which JAX stores the space's {leaf.dtype}"
    return f"{text}; to keep {leaf.dtype}, set jax_enable_x64 before you make the pool"


# --- Values without a fixed shape: text, sequences, graphs and choices -----------------------------------
# The arrays of a sequence, `[num_envs, size, ...]`, are also rows `[num_envs * size, ...]` of its items. So
# an item is written and read like the value of an env, and sequences can be nested. Unused parts are zeros.


class PaddedValue(dict[str, Any]):
    """The stored arrays of a padded value, for writing them to another row."""


def _padded_writer(node: PaddedNode, arrays: Arrays, check: str) -> Write:
    write_stored = writer(node.as_stored, arrays)
    write_value = _WRITERS[node.kind](node, arrays, check)

    def write(slot: int, value: Any) -> None:
        (write_stored if value.__class__ is PaddedValue else write_value)(slot, value)

    return write


def _max_size(node: Node, arrays: Arrays) -> int:
    """Returns the length of the first axis of the leaves of `node`."""
    return min((arrays[leaf.path].shape[1] for leaf in leaves(node)), default=2**31 - 1)


def _fitter(
    node: PaddedNode, arrays: Arrays, part: str = "", size: str = "length"
) -> Callable[[int, int], int]:
    """Returns a function that writes the size of a value, and returns how much of it to write."""
    most = _max_size(node.child(part) if part else node.children[0], arrays)
    sizes = arrays[(*node.path, size)]
    cuts = arrays.get((*node.path, "cut"))
    keeps_mark = size == "n_edge"  # of the same graph's nodes, which are written before

    def fit(slot: int, count: int) -> int:
        if cuts is not None:
            cuts[slot] = count > most or (keeps_mark and cuts[slot])
        elif count > most:
            where = format_path((*node.path, part) if part else node.path)
            raise InvalidValue(
                f"{where}: its size is {count}, and its maximum {most}; raise that in "
                "make(max_sizes={path: n}), or pass jaxvec.spaces.Cut(n)"
            )
        sizes[slot] = min(count, most)
        return min(count, most)

    return fit


def _sizer(node: PaddedNode, arrays: Arrays, part: str, size: str) -> Callable[[int], int]:
    """Returns a function that reads the size of a value, and checks it, as it can be part of an action."""
    most = _max_size(node.child(part), arrays)
    path = (*node.path, size)
    sizes = arrays[path]
    return lambda slot: _check_number(path, int(sizes[slot]), most)


def _check_number(path: KeyPath, number: int, most: int) -> int:
    if not 0 <= number <= most:
        raise ActionError(f"{format_path(path)}: {number} is not from 0 to {most}")
    return number


def _encoding(chars: NDArray[Any]) -> tuple[str, str]:
    if chars.dtype == np.uint8:
        return "latin-1", "strict"
    return f"utf-32-{sys.byteorder[0]}e", "surrogatepass"


def _text_writer(node: PaddedNode, arrays: Arrays, check: str) -> Write:
    chars = arrays[(*node.path, "chars")]
    fit = _fitter(node, arrays)
    encoding = _encoding(chars)

    def write(slot: int, value: Any) -> None:
        if not isinstance(value, str):
            raise InvalidValue(
                f"{format_path(node.path)}: expected a str, got {type(value).__name__}; {_SPACE}"
            )
        try:
            codes = np.frombuffer(value.encode(*encoding), chars.dtype)
        except UnicodeEncodeError as error:
            raise InvalidValue(
                f"{format_path(node.path)}: {value[error.start]!r} is not in the charset of the space; "
                "declare it in Text(charset=...)"
            ) from error
        count = fit(slot, len(codes))
        row = chars[slot]
        row[:count] = codes[:count]
        row[count:] = 0

    return write


def _text_reader(node: PaddedNode, arrays: Arrays) -> Callable[[int], str]:
    chars = arrays[(*node.path, "chars")]
    size = _sizer(node, arrays, "chars", "length")
    encoding = _encoding(chars)

    def read(slot: int) -> str:
        try:
            return chars[slot, : size(slot)].tobytes().decode(*encoding)
        except UnicodeDecodeError as error:
            raise ActionError(f"{format_path((*node.path, 'chars'))}: not code points: {error}") from error

    return read


def _item_rows(node: PaddedNode, arrays: Arrays) -> Arrays:
    stacked = {leaf.path: arrays[leaf.path] for leaf in leaves(node.child("items"))}
    return {
        path: array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
        for path, array in stacked.items()
    }


def _sequence_writer(node: PaddedNode, arrays: Arrays, check: str) -> Write:
    fit = _fitter(node, arrays)
    most = _max_size(node.child("items"), arrays)
    parts = [arrays[leaf.path] for leaf in leaves(node.child("items"))]
    write_item = writer(node.item, _item_rows(node, arrays), check=check)

    def write(slot: int, value: Any) -> None:
        if node.kind == "stacked":
            value = _unstack(node.item, value)
        elif not isinstance(value, (tuple, list)):
            raise InvalidValue(
                f"{format_path(node.path)}: expected a tuple, got {type(value).__name__}; {_SPACE}"
            )
        count = fit(slot, len(value))
        for row, item_value in enumerate(value[:count], slot * most):
            write_item(row, item_value)
        for part in parts:
            part[slot, count:] = 0

    return write


def _sequence_reader(node: PaddedNode, arrays: Arrays) -> Callable[[int], Any]:
    size = _sizer(node, arrays, "items", "length")
    most = _max_size(node.child("items"), arrays)
    read_items = reader(node.item, _item_rows(node, arrays))

    def read(slot: int) -> Any:
        start = slot * most
        items = tuple(read_items(slice(start, start + size(slot), 1)))
        return _stack(node.item, items) if node.kind == "stacked" else items

    return read


def _unstack(node: Node, value: Any) -> Sequence[Any]:
    if isinstance(node, PaddedNode):
        return value
    if isinstance(node, Leaf):
        array = np.asarray(value)
        if array.shape[:1] == () or array.shape[1:] != node.shape:
            raise InvalidValue(f"{node}: expected shape (n, *{node.shape}), got {array.shape}; {_SPACE}")
        return cast("Sequence[Any]", array)
    try:
        parts = zip(node.children, node.split(value), strict=True)
        columns = [_unstack(child, part) for child, part in parts]
        return [node.join(list(row)) for row in zip(*columns, strict=True)]
    except (TypeError, KeyError, ValueError) as error:
        text = f"{format_path(node.path)}: not the stacked values of a space: {error}; {_SPACE}"
        raise InvalidValue(text) from error


def _stack(node: Node, items: Sequence[Any]) -> Any:
    if isinstance(node, PaddedNode):
        return tuple(items)
    if isinstance(node, Leaf):
        return np.array(items, node.dtype).reshape(len(items), *node.shape)
    columns = [node.split(item) for item in items]
    return node.join([_stack(child, [row[i] for row in columns]) for i, child in enumerate(node.children)])


def _rows_writer(leaf: Leaf, array: NDArray[Any], check: str) -> Callable[[int, NDArray[Any]], None]:
    dtype = np.dtype(leaf.dtype.str)
    shape = leaf.shape[1:]

    def write(slot: int, value: NDArray[Any]) -> None:
        count = len(value)
        if value.dtype != dtype or value.shape[1:] != shape:
            value = conform(replace(leaf, shape=(count, *shape)), value, check)
        row = array[slot]
        store(leaf, row[:count], value, strict=check == "strict")
        row[count:] = 0

    return write


def _graph_writer(node: PaddedNode, arrays: Arrays, check: str) -> Write:
    keys = [key for key in ("nodes", "edges", "edge_links") if key in node.keys]
    write_nodes, *write_edges = [
        _rows_writer(node.child(key), arrays[(*node.path, key)], check) for key in keys
    ]
    fit_nodes = _fitter(node, arrays, "nodes", "n_node")
    fit_edges = _fitter(node, arrays, "edges", "n_edge") if write_edges else None

    def write(slot: int, value: Any) -> None:
        if not isinstance(value, tuple) or len(value) != 3:
            got = type(value).__name__
            raise InvalidValue(f"{format_path(node.path)}: expected a GraphInstance, got {got}; {_SPACE}")
        if value[0] is None or (value[1] is None) != (value[2] is None):
            text = f"{format_path(node.path)}: nodes, or one of edges and edge_links, are None; {_SPACE}"
            raise InvalidValue(text)
        nodes, *edges = (np.atleast_1d(part) for part in value if part is not None)
        count = fit_nodes(slot, len(nodes))
        write_nodes(slot, nodes[:count])
        if fit_edges is None:
            if edges:
                raise InvalidValue(f"{format_path(node.path)}: got edges, which the space has not; {_SPACE}")
            return
        if not edges:
            edges = [np.zeros((0, *node.child(key).shape[1:]), node.child(key).dtype) for key in keys[1:]]
        if len(edges[0]) != len(edges[1]):
            numbers = f"{len(edges[0])} edges and {len(edges[1])} edge_links"
            raise InvalidValue(f"{format_path(node.path)}: got {numbers}; give as many of both")
        if count < len(nodes):  # also cut the edges of nodes that were cut
            kept = (edges[1] < count).all(axis=-1)
            edges = [part[kept] for part in edges]
        count = fit_edges(slot, len(edges[0]))
        for write_part, part in zip(write_edges, edges, strict=True):
            write_part(slot, part[:count])

    return write


def _graph_reader(node: PaddedNode, arrays: Arrays) -> Callable[[int], GraphInstance]:
    keys = [key for key in ("nodes", "edges", "edge_links") if key in node.keys]
    columns: list[tuple[NDArray[Any], Any]] = [
        (arrays[(*node.path, key)], node.child(key).dtype) for key in keys
    ]
    size = _sizer(node, arrays, "nodes", "n_node")
    num_edges = _sizer(node, arrays, "edges", "n_edge") if "edges" in keys else lambda slot: 0

    def read(slot: int) -> GraphInstance:
        counts = size(slot), *[num_edges(slot)] * 2
        parts = [array[slot, :n].astype(dtype) for (array, dtype), n in zip(columns, counts, strict=False)]
        return GraphInstance(*parts) if counts[1] else GraphInstance(parts[0], None, None)

    return read


def _choice_writer(node: PaddedNode, arrays: Arrays, check: str) -> Write:
    choices = node.child("values").children
    writers = [writer(choice, arrays, check=check) for choice in choices]
    clearers = [zeroer(choice, arrays) for choice in choices]
    indices = arrays[(*node.path, "index")]

    def write(slot: int, value: Any) -> None:
        try:
            index, chosen = value
            index = operator.index(index)
            if not 0 <= index < len(choices):
                raise ValueError(f"index {index} is out of range")
        except (TypeError, ValueError) as error:
            expected = f"expected an index from 0 to {len(choices) - 1} and a value"
            raise InvalidValue(f"{format_path(node.path)}: {expected}: {error}; {_SPACE}") from error
        indices[slot] = index
        writers[index](slot, chosen)
        for place, clear in enumerate(clearers):
            if place != index:
                clear(slot)

    return write


def _choice_reader(node: PaddedNode, arrays: Arrays) -> Callable[[int], tuple[Any, Any]]:
    readers = [reader(choice, arrays) for choice in node.child("values").children]
    path = (*node.path, "index")
    indices = arrays[path]

    def read(slot: int) -> tuple[Any, Any]:
        index = _check_number(path, int(indices[slot]), len(readers) - 1)
        (value,) = readers[index](slice(slot, slot + 1, 1))
        return np.int64(index), value

    return read


_WRITERS: dict[Padding, Callable[[PaddedNode, Arrays, str], Write]] = {
    "text": _text_writer,
    "sequence": _sequence_writer,
    "stacked": _sequence_writer,
    "graph": _graph_writer,
    "one_of": _choice_writer,
}
_READERS: dict[Padding, Callable[[PaddedNode, Arrays], Callable[[int], Any]]] = {
    "text": _text_reader,
    "sequence": _sequence_reader,
    "stacked": _sequence_reader,
    "graph": _graph_reader,
    "one_of": _choice_reader,
}
