"""gymnax's spaces: its own classes where it is installed, else these, which sample and check alike."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import Space
from gymnasium import spaces as gymnasium_spaces

from jaxvec._errors import UnsupportedSpaceError


class Discrete:
    """The integers from 0 to `n - 1`."""

    def __init__(self, num_categories: int) -> None:
        self.n = num_categories
        self.shape: tuple[int, ...] = ()
        self.dtype = np.dtype(np.int32)

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns a random element."""
        return jax.random.randint(key, (), 0, self.n, self.dtype)

    def contains(self, x: Any) -> jax.Array:
        """Says whether an integer is an element; may be traced."""
        x = jnp.asarray(x)
        return (x >= 0) & (x < self.n)


class Box:
    """Arrays of a shape, with bounds."""

    def __init__(self, low: Any, high: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> None:
        self.low = low
        self.high = high
        self.shape = shape
        self.dtype = dtype

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns a random element; the bounds have to be finite."""
        return jax.random.uniform(key, self.shape, minval=self.low, maxval=self.high).astype(self.dtype)

    def contains(self, x: Any) -> jax.Array:
        """Says whether an array is within the bounds; may be traced."""
        return jnp.all((x >= self.low) & (x <= self.high))


class Dict:
    """A dict of spaces."""

    def __init__(self, spaces: Mapping[str, Any]) -> None:
        self.spaces = spaces
        self.num_spaces = len(spaces)

    def sample(self, key: jax.Array) -> dict[str, Any]:
        """Returns a random element."""
        keys = jax.random.split(key, self.num_spaces)
        pairs = zip(self.spaces.items(), keys, strict=True)
        return {name: space.sample(key) for (name, space), key in pairs}

    def contains(self, x: Mapping[str, Any]) -> jax.Array:
        """Says whether every value is in its space; may be traced."""
        return _all([space.contains(x[name]) for name, space in self.spaces.items()])


class Tuple:
    """A tuple of spaces."""

    def __init__(self, spaces: Sequence[Any]) -> None:
        self.spaces = spaces
        self.num_spaces = len(spaces)

    def sample(self, key: jax.Array) -> tuple[Any, ...]:
        """Returns a random element."""
        keys = jax.random.split(key, self.num_spaces)
        return tuple(space.sample(key) for space, key in zip(self.spaces, keys, strict=True))

    def contains(self, x: Sequence[Any]) -> jax.Array:
        """Says whether every value is in its space; may be traced."""
        return _all([space.contains(part) for space, part in zip(self.spaces, x, strict=True)])


def convert(space: Space[Any], root: str) -> Any:
    """Returns the gymnax space of a Gymnasium space; `MultiDiscrete` and `MultiBinary` become a `Box`.

    Args:
        space: of an env.
        root: names it in errors.

    Raises:
        UnsupportedSpaceError: gymnax has no such space.
    """
    module = _module()
    match space:
        case gymnasium_spaces.Discrete():
            if space.start != 0:
                raise UnsupportedSpaceError(
                    f"{root}: this Discrete space starts at {space.start}, gymnax's do at 0; wrap the env"
                )
            return module.Discrete(int(space.n))
        case gymnasium_spaces.Box():
            return _box(module, space.low, space.high, space)
        case gymnasium_spaces.MultiDiscrete():
            return _box(module, space.start, space.start + space.nvec - 1, space)
        case gymnasium_spaces.MultiBinary():
            return _box(module, 0, 1, space)
        case gymnasium_spaces.Dict():
            pairs = space.spaces.items()
            return module.Dict({key: convert(child, f"{root}[{key!r}]") for key, child in pairs})
        case gymnasium_spaces.Tuple():
            return module.Tuple([convert(child, f"{root}[{i}]") for i, child in enumerate(space.spaces)])
        case _:
            raise UnsupportedSpaceError(f"{root}: gymnax has no space like {space}")


def _box(module: Any, low: Any, high: Any, space: Space[Any]) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    bounds = [_simplest(np.asarray(bound).astype(dtype)) for bound in (low, high)]
    return module.Box(*bounds, shape=tuple(space.shape or ()), dtype=dtype)


def _simplest(bound: np.ndarray[Any, Any]) -> Any:
    """One number will do where all are equal: images have many."""
    equal = bound.size > 0 and bool((bound == bound.flat[0]).all())
    return bound.flat[0].item() if equal else jnp.asarray(bound)


def _module() -> Any:
    """Returns gymnax's module of spaces, or this one."""
    name = "gymnax.environments.spaces"
    try:
        return importlib.import_module(name)
    except ImportError:
        return importlib.import_module(__name__)


def _all(parts: Sequence[Any]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.asarray(part) for part in parts]))
