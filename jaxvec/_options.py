"""What a reset passes to each env: the `options` of Gymnasium's `reset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

Options: TypeAlias = (
    tuple[dict[str, Any] | None, ...] | None
)  # one for each env of the pool; None for none at all


def expand(options: Any, slots: NDArray[Any], num_envs: int) -> Options:
    """Returns the options of each env of the pool.

    Args:
        options: a dict for all of `slots`, or one dict or `None` for each; `None` for none.
        slots: `[n]`, the envs to be reset.
        num_envs: of the pool.

    Raises:
        ValueError: there is not one for each of `slots`.
        TypeError: one is no dict.
    """
    if options is None:
        return None
    if isinstance(options, Mapping):
        given: list[Any] = [dict(options)] * len(slots)
    elif isinstance(options, Sequence) and not isinstance(options, (str, bytes)):
        given = list(options)
    else:
        raise TypeError(f"options must be a dict, or one for each env, not {type(options).__name__}")
    if len(given) != len(slots):
        raise ValueError(
            f"options: got {len(given)} dicts for {len(slots)} envs; pass one dict, or one for each env"
        )
    each: list[dict[str, Any] | None] = [None] * num_envs
    for slot, one in zip(slots.tolist(), given, strict=True):
        if one is not None and not isinstance(one, Mapping):
            raise TypeError(f"options of env {slot} must be a dict or None, not {type(one).__name__}")
        each[slot] = None if one is None else dict(one)
    return tuple(each)


def merge(held: Options, options: Options, slots: NDArray[Any], num_envs: int) -> Options:
    """Returns what the envs of the pool hold once `slots` are given theirs of `options`.

    Others keep what they hold, since a reset that they were sent may have yet to begin.
    """
    nothing = (None,) * num_envs
    given, after = options or nothing, list(held or nothing)
    for slot in slots.tolist():
        after[slot] = given[slot]
    return None if all(one is None for one in after) else tuple(after)


def changed(before: Options, after: Options, first: int, stop: int) -> bool:
    """Says whether one of the envs `first` to `stop - 1` is given other options."""
    nothing = (None,) * stop
    pairs = zip((before or nothing)[first:stop], (after or nothing)[first:stop], strict=True)
    return any(one is not other for one, other in pairs)


def select(options: Options, first: int, stop: int) -> Options:
    """Returns the options of the envs `first` to `stop - 1`."""
    return None if options is None else options[first:stop]
