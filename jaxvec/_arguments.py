"""Checks and conversions of seeds, masks, reset options, env ids and actions.

Actions and declared reset options are checked in the same way for the host and for programs. What differs is
their `Conversion`: to NumPy's arrays here, and to JAX's, traced or not, in `callbacks/_operands.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxvec._errors import ActionError, EnvIdError
from jaxvec._leaves import DictNode, Leaf, Node, PaddedNode, format_path, leaves
from jaxvec._spec import PoolSpec

# A seed is an array of words, lowest first, so that there is room for an env's `np_random_seed` of 128 bits.
SEED_WORDS = 3
_MAX_SEED = 2 ** (64 * SEED_WORDS - 1) - 1
NO_SEED = -(2**63)  # each word of an env that gets no seed
_NO_SEED_BYTES = np.full(SEED_WORDS, NO_SEED).tobytes()


def expand_seeds(seed: Any, num_envs: int) -> NDArray[np.int64]:
    """Returns the words of each env's seed, `[num_envs, SEED_WORDS]` int64; see `read_seed`.

    An int gives env *i* the seed `seed + i`; a sequence has an int or `None` per env.
    """
    if seed is None:
        return np.full((num_envs, SEED_WORDS), NO_SEED)
    if np.ndim(seed) == 0:
        seeds: list[int | None] = [_index(seed) + i for i in range(num_envs)]
    else:
        seeds = [None if env_seed is None else _index(env_seed) for env_seed in seed]
        if len(seeds) != num_envs:
            raise ValueError(f"seed: got {len(seeds)} seeds for {num_envs} envs; pass one, or one per env")
    for env_id, env_seed in enumerate(seeds):
        if env_seed is not None and not 0 <= env_seed <= _MAX_SEED:
            raise ValueError(_out_of_range(env_seed, env_id))
    size = 8 * SEED_WORDS
    rows = [_NO_SEED_BYTES if env_seed is None else env_seed.to_bytes(size, "little") for env_seed in seeds]
    return np.frombuffer(bytearray().join(rows), "<i8").reshape(num_envs, SEED_WORDS)


def read_seed(words: NDArray[np.int64]) -> int | None:
    """Returns the seed of one env from its words; `None` for an env without a seed."""
    return None if words[-1] == NO_SEED else int.from_bytes(words.tobytes(), "little", signed=True)


def derive_seeds(seed: int, *numbers: int) -> int:
    """Returns a seed derived from `seed`, different for each combination of `numbers`."""
    return int(np.random.SeedSequence([seed, *numbers]).generate_state(1)[0])


def check_seeds(words: NDArray[np.int64]) -> None:
    """Raises `ValueError` if a seed, in the form that `expand_seeds` returns, is negative."""
    env_id = find_first((words[:, -1] < 0) & (words[:, -1] != NO_SEED))
    if env_id is not None:
        raise ValueError(_out_of_range(read_seed(words[env_id]), env_id))


def check_mask(mask: Any, num_envs: int, as_array: Callable[[Any], Any] = np.asarray) -> Any:
    if mask is None:
        return None
    mask = as_array(mask)
    if mask.dtype != np.bool_ or mask.shape != (num_envs,):
        raise ValueError(f"mask must be bool of shape ({num_envs},), got {mask.dtype} of shape {mask.shape}")
    return mask


def _out_of_range(seed: int | None, env_id: int) -> str:
    return f"seed {seed} of env {env_id} is out of range (0 to 2**191 - 1); larger ones fit as seed % 2**191"


def _index(seed: Any) -> int:
    try:
        return operator.index(seed)
    except TypeError as error:
        raise TypeError(f"a seed must be an integer, got {seed!r}") from error


# Options of resets by slot, for the envs that have some.
Options: TypeAlias = Mapping[int, dict[str, Any]]


def expand_options(options: Any, slots: NDArray[Any]) -> Options:
    """Returns the options of a reset of `slots`.

    `options` is a dict for all of `slots`, or a sequence with a dict or `None` for each slot.

    Raises `ValueError` for a wrong number of dicts, and `TypeError` for other types.
    """
    if options is None:
        return {}
    if isinstance(options, Mapping):
        dicts: list[Any] = [options] * len(slots)
    elif isinstance(options, Sequence) and not isinstance(options, (str, bytes)):
        dicts = list(options)
    else:
        raise TypeError(f"options must be a dict, or one for each env, not {type(options).__name__}")
    if len(dicts) != len(slots):
        raise ValueError(f"options: got {len(dicts)} dicts for {len(slots)} envs; pass one, or one per env")
    by_slot = zip(slots.tolist(), dicts, strict=True)
    chosen = {slot: env_options for slot, env_options in by_slot if env_options is not None}
    for slot, env_options in chosen.items():
        if not isinstance(env_options, Mapping):
            raise TypeError(f"options of env {slot} must be a dict or None, not {type(env_options).__name__}")
    return {slot: dict(env_options) for slot, env_options in chosen.items()}


def merge_options(current: Options, options: Options, slots: NDArray[Any]) -> Options:
    """Returns `current` with the options of `slots` replaced by those in `options`.

    The other envs keep their options, because an earlier reset of them may not have started yet.
    """
    replaced = set(slots.tolist())
    others = {slot: env_options for slot, env_options in current.items() if slot not in replaced}
    return others | {slot: options[slot] for slot in replaced & options.keys()}


def options_changed(before: Options, after: Options, first: int, stop: int) -> bool:
    """Returns True if envs `first` to `stop - 1` have other dicts, compared by identity, in `after`."""
    return any(before.get(slot) is not after.get(slot) for slot in range(first, stop))


def select_options(options: Options, first: int, stop: int) -> Options:
    """Returns the options of a slice, by index within the slice."""
    return {slot - first: options[slot] for slot in range(first, stop) if slot in options}


T = TypeVar("T")


def flatten(node: Node, action: Any, check: Callable[[Leaf, Any], T]) -> list[T]:
    """Returns `check(leaf, value)` for each leaf, in order; raises `ActionError` if the structure differs."""
    if isinstance(node, Leaf):
        return [check(node, action)]
    if isinstance(node, DictNode):
        if not isinstance(action, Mapping) or set(action) != set(node.keys):
            got = list(action) if isinstance(action, Mapping) else type(action).__name__
            padded = isinstance(node, PaddedNode) and not isinstance(action, Mapping)
            raise ActionError(
                f"{format_path(node.path)}: expected a dict with keys {[*node.keys]}, got {got}"
                + ("; convert the envs' values by jaxvec.spaces.pad(space, values)" if padded else "")
            )
    elif not isinstance(action, (tuple, list)) or len(action) != len(node.children):
        got = len(action) if isinstance(action, (tuple, list)) else type(action).__name__
        raise ActionError(f"{format_path(node.path)}: expected a tuple of {len(node.children)}, got {got}")
    pairs = zip(node.children, node.split(action), strict=True)
    return [value for child, part in pairs for value in flatten(child, part, check)]


# Returns the name of a row of a batch for an error, such as "env 3".
RowName: TypeAlias = Callable[[int], str]


def cast_rows(
    leaf: Leaf, array: NDArray[Any], name_row: RowName = "env {}".format, *, exact: bool = False
) -> NDArray[Any]:
    """Returns an array `[n, ...]` of the program in the leaf's stored dtype.

    Integers never wrap: an `ActionError` names row, leaf and value. Floats are rounded, and are infinite if
    they are too large; with `exact`, values that would change are rejected.
    """
    if array.dtype == leaf.stored:
        return array
    if leaf.stored.kind in "iu":
        stored = array.astype(leaf.stored)
        place = find_first(stored != array)
    else:
        with np.errstate(over="ignore"):  # NumPy's warning would be an error in some programs
            stored = array.astype(leaf.stored)
        is_checked = exact and not np.can_cast(array.dtype, leaf.stored)
        place = find_first(stored != array) if is_checked else None
    if place is None:
        return stored
    row = place * len(array) // array.size
    value = array.flat[place].item()
    raise ActionError(f"{leaf}: {value} for {name_row(row)} doesn't fit into {leaf.stored}")


class Conversion(NamedTuple):
    """How the values of a batch become arrays.

    Attributes:
        as_array: Returns a value as an array; raises `TypeError`, `ValueError` or `OverflowError` if it is
            none.
        cast: Returns an array `[n, ...]` in the leaf's stored dtype, as `cast_rows` does.
        advice: What to do about a wrong shape, after the error.
    """

    as_array: Callable[[Any], Any]
    cast: Callable[[Leaf, Any, RowName], Any]
    advice: str = ""


HOST = Conversion(np.asarray, cast_rows)
EXACT = Conversion(np.asarray, partial(cast_rows, exact=True))  # rejects floats that would be rounded


def check_action(
    spec: PoolSpec,
    action: Any,
    num_envs: int,
    name_row: RowName = "env {}".format,
    conversion: Conversion = HOST,
) -> list[Any]:
    """Returns the leaves of a batch of actions, each `[num_envs, ...]`, in the order of the spec.

    For a `Dict` space, `action` may also be a tuple or list with one dict per env. Raises an `ActionError`
    that names the leaf.
    """
    return _check_batch(spec.action, action, num_envs, name_row, conversion)


def check_options(
    spec: PoolSpec,
    options: Any,
    num_envs: int,
    name_row: RowName = "env {}".format,
    conversion: Conversion = HOST,
) -> list[Any]:
    """Returns the leaves of declared reset options, in the order of `spec.option_leaves`; `[]` for `None`.

    The options are a pytree of the declared space with leaves `[num_envs, ...]`, or `[...]` for all envs.

    Raises:
        TypeError: The pool has no declared options.
        ValueError: They have the wrong structure, shape, dtype or range. The message names the leaf.
    """
    if options is None:
        return []
    if spec.reset_options is None:
        raise TypeError("reset_options: declare them with make(reset_options=spaces.Dict(...)) first")
    with _as_value_error():
        columns = _check_batch(spec.reset_options, options, num_envs, name_row, conversion, one_for_all=True)
        return [*columns, conversion.as_array(np.ones(num_envs, np.bool_))]


@contextmanager
def _as_value_error() -> Generator[None]:
    """Turns the errors of actions into those of reset options."""
    try:
        yield
    except ActionError as error:
        raise ValueError(str(error)) from None


def cast_operands(spec: PoolSpec, arrays: Sequence[NDArray[Any]], name_row: RowName) -> list[NDArray[Any]]:
    """Returns the leaves of actions and, if given, reset options of a program, cast by `cast_rows`.

    Shapes were checked when the program was traced, by `check_action` and `check_options`, and the transport
    passes arrays of the traced types only.
    """
    num_actions = len(spec.action_leaves)
    actions = zip(spec.action_leaves, arrays[:num_actions], strict=True)
    cast = [cast_rows(leaf, array, name_row) for leaf, array in actions]
    if len(arrays) > num_actions:
        options = zip(spec.option_leaves, arrays[num_actions:], strict=True)
        with _as_value_error():
            cast += [cast_rows(leaf, array, name_row) for leaf, array in options]
    return cast


def _check_batch(
    node: Node,
    batch: Any,
    num_envs: int,
    name_row: RowName,
    conversion: Conversion,
    *,
    one_for_all: bool = False,
) -> list[Any]:
    """Returns the leaves of a batch; with `one_for_all`, a leaf without env axis is for each env."""

    def check(leaf: Leaf, value: Any) -> Any:
        if leaf.is_object:
            return _objects(leaf, value, num_envs)
        shape = (num_envs, *leaf.shape)
        if type(value) is np.ndarray and value.dtype == leaf.stored and value.shape == shape:
            return conversion.cast(leaf, value, name_row)
        if np.ma.is_masked(value):  # NumPy would give the hidden numbers
            raise _unexpected(leaf, shape, "a masked array; fill it by np.ma.filled(action, value)")
        try:
            array = conversion.as_array(value)
        except ValueError as error:
            raise _unexpected(leaf, shape, "a ragged sequence") from error
        except (TypeError, OverflowError) as error:
            raise _unexpected(leaf, shape, f"{type(value).__name__}: {error}") from error
        if one_for_all and array.shape == leaf.shape:
            array = array.__array_namespace__().broadcast_to(array, shape)
        if array.shape != shape or not castable(array.dtype, leaf):
            advice = conversion.advice if array.shape != shape else f"; cast it by .astype({leaf.stored})"
            raise _unexpected(leaf, shape, f"{array.dtype} of shape {array.shape}{advice}")
        return conversion.cast(leaf, array, name_row)

    if isinstance(node, DictNode) and isinstance(batch, (tuple, list)):
        # One sample per env. Not supported for a `Tuple` space, where samples and a batch can look alike.
        if len(batch) != num_envs:
            raise ActionError(
                f"{format_path(node.path)}: expected a dict, or a list of {num_envs} dicts, one per env, "
                f"got {len(batch)}"
            )
        samples = [_take_apart(node, number, sample) for number, sample in enumerate(batch)]
        return [check(leaf, [sample[i] for sample in samples]) for i, leaf in enumerate(leaves(node))]
    return flatten(node, batch, check)


def _take_apart(node: Node, number: int, sample: Any) -> list[Any]:
    try:
        return flatten(node, sample, lambda leaf, value: value)
    except ActionError as error:
        raise ActionError(f"item {number} of the list: {error}") from None


def _unexpected(leaf: Leaf, shape: tuple[int, ...], got: str) -> ActionError:
    return ActionError(f"{leaf}: expected {leaf.stored} of shape {shape}, env axis first; got {got}")


def _objects(leaf: Leaf, value: Any, num_envs: int) -> NDArray[Any]:
    if not isinstance(value, (tuple, list, np.ndarray)) or len(value) != num_envs:
        got = type(value).__name__
        raise ActionError(f"{leaf}: expected a tuple or list of {num_envs} values, one per env, got {got}")
    array = np.empty(num_envs, object)
    for row, item in enumerate(value):
        array[row] = item
    return array


def check_env_id(env_id: Any, num_envs: int) -> NDArray[Any]:
    """Returns env ids `[k]`, or all for `None`; raises `EnvIdError` unless they are integers `[k]`."""
    if env_id is None:
        return np.arange(num_envs)
    array = np.asarray(env_id)
    check_ids(array.dtype, array.shape)
    return array.astype(np.intp)


def check_indices(
    indices: Any, num_envs: int, name: str = "indices", *, from_end: bool = True
) -> NDArray[Any]:
    """Returns distinct env ids `[k]` for an index, a list of indices, or `None` for all envs.

    With `from_end`, negative indices count from the end. Raises `EnvIdError`, with the argument's name, for
    anything else.
    """
    if indices is None:
        return np.arange(num_envs)
    expected = f"{name}: expected an integer or a list of them, got"
    lowest = -num_envs if from_end else 0
    try:
        array = np.asarray(indices)
    except ValueError as error:
        raise EnvIdError(f"{expected} a ragged sequence") from error
    if not array.size and array.ndim == 1:
        return np.zeros(0, np.intp)
    if array.ndim > 1 or array.dtype.kind not in "iu":
        raise EnvIdError(f"{expected} {array.dtype} of shape {array.shape}")
    array = np.atleast_1d(array)
    wrong = array[(array < lowest) | (array >= num_envs)]
    if wrong.size:
        raise EnvIdError(
            f"{name}: {wrong[0]} is out of range for {num_envs} envs ({lowest} to {num_envs - 1})"
        )
    slots = array.astype(np.intp) % num_envs
    counts = np.bincount(slots)
    if counts.max() > 1:
        raise EnvIdError(f"{name}: env {counts.argmax()} is named twice; name each env once")
    return slots


def check_name(name: Any) -> None:
    """Raises a `TypeError` unless `name` can name a method or an attribute of an env."""
    if not isinstance(name, str):
        advice = "; to run a function, use envs.map" if callable(name) else ""
        raise TypeError(f"the name of a method or attribute must be a str, not {name!r}{advice}")


def check_ids(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raises `EnvIdError` if an array of this dtype and shape cannot contain env ids."""
    if len(shape) != 1 or dtype.kind not in "iu":
        raise EnvIdError(f"env_id must be integers of shape [k], got {dtype} of shape {shape}")


def find_first(wrong: NDArray[np.bool_]) -> int | None:
    """Returns the flat index of the first True, or `None`."""
    return int(wrong.argmax()) if np.count_nonzero(wrong) else None  # faster than `any` for few values


def castable(given: np.dtype[Any], leaf: Leaf) -> bool:
    """Returns True if `given` comes no later than the leaf's dtype in the order bool, integer, float."""
    kind = getattr(given, "kind", None)  # keys of JAX have none
    ranks = {"b": 0, "u": 1, "i": 1, "f": 2, "V": 2}  # V: bfloat16 and other custom floats
    return kind in ranks and ranks[kind] <= ranks[leaf.dtype.kind]
