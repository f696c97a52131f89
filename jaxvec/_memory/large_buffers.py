"""Memory in which the large arrays of constructors reach the workers of this machine, once for all of them.

The pickles of constructors lack the buffers of such arrays (pickle's protocol 5). The pool writes each of
them into one shared memory, however many workers get it. A worker maps that: an array that is read-only in
the program is read-only there, and any other one is copied page by page when it is written to. Envs of one
worker that each need a copy of an array map it once more (`map_again`).
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any, NamedTuple

import numpy as np

from jaxvec._memory.segment import align, create_memory, size_advice


def identify(buffer: Any) -> tuple[int, int]:
    """Returns the address and the size in bytes of a buffer, which tell it from all others that exist."""
    view = np.frombuffer(PickleBuffer(buffer).raw(), np.uint8)
    return view.ctypes.data, view.nbytes


class BufferPlace(NamedTuple):
    """The place of a buffer in the memory, in bytes."""

    offset: int
    nbytes: int
    read_only: bool


class LargeBuffers:
    """The large buffers that the constructors of a pool refer to.

    Attributes:
        descriptors: The descriptor of the memory, if there are such buffers.
    """

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self._places: dict[tuple[int, int], BufferPlace] = {}  # by `identify`
        self._buffers: list[memoryview] = []  # kept, so that no other buffer gets one of these addresses
        self._end = 0

    def add(self, buffer: PickleBuffer) -> BufferPlace:
        """Returns the place of a buffer, which is written to the memory unless it is there."""
        raw = buffer.raw()
        key = identify(buffer)
        place = self._places.get(key)
        if place is None:
            if not self.descriptors:
                self.descriptors.append(create_memory("arrays of jaxvec", as_file=True))
            place = self._places[key] = BufferPlace(self._end, raw.nbytes, raw.readonly)
            with size_advice(), open(self.descriptors[0], "wb", closefd=False) as memory:
                memory.seek(self._end)
                memory.write(raw)
            self._buffers.append(raw)
            self._end = align(self._end + raw.nbytes, mmap.PAGESIZE)  # for `map_again`
        return place

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())
        self._buffers = []


class PrivateMemory(mmap.mmap):
    """The memory of one array of one env, whose pages are copied when they are written to."""


# The buffers of this worker that can be written to, with their descriptor and offset, by `identify`.
_origins: dict[tuple[int, int], tuple[memoryview, int, int]] = {}
# Mappings of `map_again`. Before Python 3.13, each of them holds a descriptor, of which envs need some.
_copies = weakref.WeakSet[PrivateMemory]()
_MAX_COPIES = 256 if sys.version_info < (3, 13) else sys.maxsize
_PRIVATE: Any = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
if sys.version_info >= (3, 13):
    _PRIVATE["trackfd"] = False


def map_buffers(descriptor: int, places: Sequence[BufferPlace]) -> list[memoryview]:
    """Maps the memory in a worker, and returns these buffers; keeps a descriptor that `map_again` needs."""
    size = max(place.offset + place.nbytes for place in places)
    shared = memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ))
    private = memoryview(mmap.mmap(descriptor, size, **_PRIVATE))
    buffers: list[memoryview] = []
    for offset, nbytes, read_only in places:
        buffers.append((shared if read_only else private)[offset : offset + nbytes])
        if not read_only:
            _origins[identify(buffers[-1])] = buffers[-1], descriptor, offset
    if not _origins:
        os.close(descriptor)
    return buffers


def map_again(buffer: Any) -> PrivateMemory | None:
    """Returns a copy of one of these buffers as it was sent; `None` for other buffers, and for the 257th."""
    key = identify(buffer) if _origins else None
    if key not in _origins or len(_copies) == _MAX_COPIES:
        return None
    _, descriptor, offset = _origins[key]
    memory = PrivateMemory(descriptor, key[1], **_PRIVATE, offset=offset)
    _copies.add(memory)
    return memory
