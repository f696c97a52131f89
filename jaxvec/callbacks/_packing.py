"""Packs the operands, or the small results, of a call into one array, because each array is one transfer.

Starting a copy to a GPU takes about as long as copying 16 KiB, and a TPU transfers each array over its own
channel. The program joins operands and splits results on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Struct = jax.ShapeDtypeStruct

_LARGE = 16 * 1024  # bytes; a result of this size or more is transferred separately, without a copy
WORD = 4  # bytes; most results are 32-bit and need no conversion


@dataclass(frozen=True)
class Packing:
    """The position of each operand or result of a call in the transferred arrays.

    The first array holds the packed ones, `[num_words]` uint32, if there are any. Each other array is one
    result, flattened: JAX lowers a callback for several TPUs only if all results have equally many axes.

    Attributes:
        types: Types of the operands or results.
        places: Index of each one's first word in the packed array, or `None` for a result of its own.
        num_words: Size of the packed array in words.
    """

    types: tuple[Struct, ...]
    places: tuple[int | None, ...]
    num_words: int

    @classmethod
    def of(cls, types: Sequence[Struct], *, pack_all: bool = False) -> Packing:
        """Packs the results that are small and that every device can build from words, or `pack_all`."""
        places: list[int | None] = []
        num_words = 0
        for struct in types:
            dtype = np.dtype(struct.dtype)
            size = prod(struct.shape)
            small = dtype.kind in "biuf" and dtype.itemsize <= WORD and size * dtype.itemsize < _LARGE
            if pack_all or small:
                places.append(num_words)
                num_words += -(-size * dtype.itemsize // WORD)
            else:
                places.append(None)
        return cls(tuple(types), tuple(places), num_words)

    @property
    def transfers(self) -> list[Struct]:
        """Types of the transferred arrays."""
        words = [Struct((self.num_words,), np.uint32)] if self.num_words else []
        alone = zip(self.types, self.places, strict=True)
        return words + [
            Struct((prod(struct.shape),), struct.dtype) for struct, place in alone if place is None
        ]

    @cached_property
    def layout(self) -> NDArray[np.int64]:
        """The packing, for `unpack` in C++.

        The first number is 1 if there is a packed array, else 0. For each operand or result, its offset in
        the packed array in bytes, or -1, its dtype, rank and shape follow.
        """
        layout = [int(self.num_words > 0)]
        for struct, place in zip(self.types, self.places, strict=True):
            dtype = np.dtype(struct.dtype)
            start = -1 if place is None else place * WORD
            layout += [start, ord(dtype.kind) + 256 * dtype.itemsize, len(struct.shape), *struct.shape]
        return np.array(layout, np.int64)

    def join(self, operands: Sequence[jax.Array]) -> jax.Array:
        """Returns the packed array of operands, inside a program that packs everything."""
        return jnp.concatenate([_to_words(operand) for operand in operands])

    def views(self, transferred: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns the operands or results as views into the transferred arrays, on the host."""
        return self._unpack(transferred, _view)

    def split(self, transferred: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results from the received arrays, inside a program."""
        return self._unpack(transferred, _from_words)

    def _unpack(self, transferred: Sequence[Any], take: Callable[[Any, int, Struct], Any]) -> list[Any]:
        """Returns one array for each type; `take(words, place, struct)` takes it from the packed array."""
        others = iter(transferred)
        words = next(others) if self.num_words else np.empty(0, np.uint32)
        return [
            next(others).reshape(struct.shape) if place is None else take(words, place, struct)
            for struct, place in zip(self.types, self.places, strict=True)
        ]


def _view(words: NDArray[np.uint32], place: int, struct: Struct) -> NDArray[Any]:
    start = place * WORD
    stop = start + prod(struct.shape) * np.dtype(struct.dtype).itemsize
    return words.view(np.uint8)[start:stop].view(struct.dtype).reshape(struct.shape)


def _to_words(array: jax.Array) -> jax.Array:
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    if array.dtype.itemsize < WORD:
        per_word = WORD // array.dtype.itemsize
        array = jnp.pad(array.reshape(-1), (0, -array.size % per_word)).reshape(-1, per_word)
    return jax.lax.bitcast_convert_type(array, np.uint32).reshape(-1)


def _from_words(words: jax.Array, place: int, struct: Struct) -> jax.Array:
    dtype = np.dtype(struct.dtype)
    size = prod(struct.shape)
    part = words[place : place - (-size * dtype.itemsize // WORD), None]
    # A bitcast would be enough, but each would be a copy on a GPU. XLA fuses a shift, even by 0, with what
    # reads the leaf, and launches all of these at once, as a CUDA graph.
    bits = 8 * dtype.itemsize
    stored = part >> np.arange(0, 8 * WORD, bits, dtype=np.uint32)[None]
    values = stored.astype(f"uint{bits}").reshape(-1)[:size].reshape(struct.shape)
    return values != 0 if dtype == np.bool_ else jax.lax.bitcast_convert_type(values, dtype)
