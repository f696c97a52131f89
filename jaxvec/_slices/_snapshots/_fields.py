"""The attributes of an object, as a snapshot has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

# Attributes that are atoms, those that are not or once were not, and how many there were, with those that are
# not taken; -1 where others are nobody's concern.
Fields: TypeAlias = tuple[dict[str, Any], dict[str, Any], int]
NOTHING: Fields = {}, {}, -1


def attributes_of(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object: its own `dict`, where it has no slots."""
    slots = _slots.get(type(owner))
    if slots is None:
        slots = slots_of(type(owner))
    if not slots:
        return owner.__dict__
    held = dict(getattr(owner, "__dict__", {}))
    for name in slots:
        if hasattr(owner, name):
            held[name] = getattr(owner, name)
    return held


_slots: dict[type, tuple[str, ...]] = {}


def slots_of(kind: type) -> tuple[str, ...]:
    found = _slots.get(kind)
    if found is None:
        names: list[str] = []
        for base in kind.__mro__:
            own = vars(base).get("__slots__", ())
            for name in (own,) if isinstance(own, str) else own:
                if name not in ("__dict__", "__weakref__"):
                    hidden = name.startswith("__") and not name.endswith("__")
                    names.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
        found = _slots[kind] = tuple(names)
    return found


class _Absent:
    pass


_ABSENT = _Absent()


def compare_fields(one: Fields, other: Fields) -> Iterator[tuple[str, Any, Any]]:
    """Yields attributes of two objects with their names."""
    one_held, other_held = one[0] | one[1], other[0] | other[1]
    for name in {**one_held, **other_held}:
        yield f".{name}", one_held.get(name, _ABSENT), other_held.get(name, _ABSENT)
