"""Nodes of arrays and of the memory that they share.

A snapshot keeps which arrays share memory. An array that has its own memory is an `Array`, or an `_Objects`
if it holds Python objects. Any other array is a `_View`: an offset, a shape and strides in the memory of its
owner, which is a node itself. The owner may also be a `bytearray`, an `array.array` or an object of ctypes
(`_Buffer`). An array in memory of another library is restored in place, if it still exists (`_Foreign`).
"""

from __future__ import annotations

import array
import copy
import ctypes
import mmap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._extensions.states.snapshots.nodes import CannotCopy, Node, Restorer, Saver
from jaxvec._memory.large_buffers import PrivateMemory

# Array classes without further attributes.
_ARRAY_CLASSES = (np.ndarray, np.recarray, np.matrix)


@dataclass(slots=True, eq=False)
class Array(Node):
    """An array that has its own memory. The native code knows this class and its slot."""

    array: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        return _copy(self.array)


@dataclass(slots=True, eq=False)
class _View(Node):
    """An array in the memory of `owner`, or a record in it if `shape` is None."""

    owner: Any
    kind: type
    dtype: Any
    shape: tuple[int, ...] | None
    strides: tuple[int, ...]
    offset: int
    writeable: bool

    def restore(self, restorer: Restorer, old: Any) -> Any:
        old_owner: Any = None
        if isinstance(self.owner, _Foreign):
            old_owner = owner_of(old) if isinstance(old, np.ndarray) else None
        elif not isinstance(self.owner, (Array, _Objects)):
            old_owner = memory_of(old)
        owner = restorer.value(self.owner, old_owner)
        shape = () if self.shape is None else self.shape
        if isinstance(owner, np.ndarray):
            locked = not owner.flags.writeable
            if locked:  # the view may have been made before, and may be written to
                owner.flags.writeable = True
            view = _view(owner, self.dtype, shape, self.strides, self.offset)
            if locked:
                owner.flags.writeable = False
        else:
            view = np.ndarray(shape, self.dtype, np.frombuffer(owner, np.uint8), self.offset, self.strides)
        if self.shape is None:
            return view[()]
        if self.kind is not np.ndarray:
            view = view.view(self.kind)
        if view.flags.writeable and not self.writeable:
            view.flags.writeable = False
        return view


@dataclass(slots=True, eq=False)
class _Objects(Node):
    """An array of Python objects that has its own memory; `items` are in the order of that memory."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    writeable: bool
    items: list[Any] = field(default_factory=list)

    def restore(self, restorer: Restorer, old: Any) -> Any:
        inverse = np.argsort(self.axes) if self.axes else ()
        new = np.empty([self.shape[axis] for axis in self.axes], object).transpose(*inverse).copy("K")
        restorer.begin(self, new)
        flat = new.transpose(self.axes).reshape(-1)
        same = type(old) is np.ndarray and old.dtype == object and old.shape == self.shape
        olds: list[Any] = old.transpose(self.axes).ravel().tolist() if same else [None] * len(self.items)
        for number, item in enumerate(self.items):
            flat[number] = restorer.value(item, olds[number])
        new.flags.writeable = self.writeable
        return new


@dataclass(slots=True, eq=False)
class _DType(Node):
    """A dtype with fields; their names can be changed."""

    dtype: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        is_same = isinstance(old, np.dtype) and old == self.dtype and restorer.reuse(old)
        return old if is_same else _copy_dtype(self.dtype)


def save_dtype(saver: Saver, value: Any) -> Any:
    return value if value.names is None else saver.remember(value, _DType(_copy_dtype(value)))


def _copy_dtype(dtype: Any) -> Any:
    """Returns a copy of a dtype with fields, as their names can be changed, and any other dtype itself."""
    return copy.copy(dtype) if dtype.names else dtype


@dataclass(slots=True, eq=False)
class _Buffer(Node):
    """The memory of a `bytearray`, an `array.array` or an object of ctypes that owns it."""

    kind: Any
    typecode: str | None
    content: bytes

    def restore(self, restorer: Restorer, old: Any) -> Any:
        if type(old) is not self.kind or _nbytes(old) != len(self.content) or not restorer.reuse(old):
            if self.typecode is not None:
                return self.kind(self.typecode, self.content)
            if self.kind is bytearray:
                return bytearray(self.content)
            old = self.kind()
        if self.content:  # in place: a library may know the address
            memoryview(old).cast("B")[:] = self.content
        return old


@dataclass(slots=True, eq=False)
class _MemoryView(Node):
    """A contiguous `memoryview` of an array or of a buffer."""

    owner: Any
    offset: int
    nbytes: int
    format: str
    shape: tuple[int, ...]
    readonly: bool

    def restore(self, restorer: Restorer, old: Any) -> Any:
        owner = restorer.value(self.owner, old.obj if isinstance(old, memoryview) else None)
        part: Any = memoryview(owner).cast("B")[self.offset : self.offset + self.nbytes]
        view = part.cast(self.format, self.shape) if self.shape != (self.nbytes,) else part.cast(self.format)
        return view.toreadonly() if self.readonly else view


@dataclass(slots=True, eq=False)
class _Foreign(Node):
    """An array in memory of another library: restoring writes into that memory."""

    array: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        foreign = isinstance(old, np.ndarray) and not owner_of(old).flags.owndata
        fits = foreign and (old.shape, old.dtype) == (self.array.shape, self.array.dtype)
        if fits and restorer.reuse(old):  # what were several may be one array now
            if old.flags.writeable:
                np.copyto(old, self.array)
            return old
        memory = bytearray(self.array.tobytes())  # not NumPy's either, so it is taken the same way again
        made = np.ndarray(self.array.shape, self.array.dtype, memory)
        made.flags.writeable = self.array.flags.writeable
        return made


def save_array(saver: Saver, value: Any) -> Any:
    """Takes an array, and the memory that it shares with others."""
    if type(value) not in _ARRAY_CLASSES:
        raise CannotCopy(f"it is a {type(value).__qualname__}, which may hold more than an array")
    if value.base is not None:
        if is_constant(value):
            return value
        node = _save_part(saver, value)
    elif value.dtype.hasobject:
        return _save_objects(saver, value)
    else:
        node = Array(_copy(value))
    return saver.remember(value, node)


def save_memmap(saver: Saver, value: Any) -> Any:
    """Takes an array in a file that nothing can write to by it."""
    if type(value) is not np.memmap or value.mode != "r":
        raise CannotCopy("it is a mapped file, which can't be copied; open it with mode='r'")
    return value


def save_record(saver: Saver, value: Any) -> Any:
    """Takes a record of a structured array, which is a view of that, or has its own memory."""
    if value.dtype.hasobject:
        raise CannotCopy("it is a record with Python objects in it")
    if isinstance(value.base, np.ndarray):
        node = _save_view(saver, value, owner_of(value.base))
    else:
        own = np.array(value)
        node = _save_view(saver, own, own)
    node.shape = None
    return saver.remember(value, node)


def save_buffer(saver: Saver, value: Any) -> Any:
    """Takes a `bytearray`, an `array.array` or an object of ctypes."""
    if isinstance(value, CData) and not _owns_memory(value):
        raise CannotCopy("it is an object of ctypes that holds pointers or does not own its memory")
    typecode = value.typecode if isinstance(value, array.array) else None
    return saver.remember(value, _Buffer(type(value), typecode, bytes(memoryview(value).cast("B"))))


def save_memoryview(saver: Saver, value: memoryview) -> Any:
    """Takes a view of memory that another object owns."""
    owner: Any = value.obj
    if isinstance(owner, bytes):
        return value
    if not value.c_contiguous or not isinstance(owner, (np.ndarray, *BUFFERS)):
        raise CannotCopy("it is a memoryview that is not contiguous, or of memory of another library")
    if isinstance(owner, np.ndarray) and not owner.flags.c_contiguous:
        raise CannotCopy("it is a memoryview of an array that is not contiguous")
    if value.format not in {*"cbBhHiIlLqQnNfd?P"}:  # those that `memoryview.cast` accepts
        raise CannotCopy(f"it is a memoryview of the format {value.format!r}")
    node = _MemoryView(
        owner=saver.value(owner),
        offset=address_of(value) - address_of(owner),
        nbytes=value.nbytes,
        format=value.format,
        shape=tuple(value.shape or ()),
        readonly=value.readonly,
    )
    return saver.remember(value, node)


# --- The memory behind an array -----------------------------------------------------------------------------

CData: Any = ctypes.c_int.__mro__[-2]  # the base of all objects of ctypes, which has no public name
BUFFERS = (bytearray, array.array, CData)


def is_constant(value: Any) -> bool:
    """Returns whether an array can't change: it is in `bytes`, in a map to read, or in another such array."""
    owner = owner_of(value)
    if type(owner) is np.memmap:
        return owner.mode == "r"
    base = owner.base
    if isinstance(base, bytes):
        return True
    if not (isinstance(base, memoryview) and base.readonly):
        return False
    return isinstance(base.obj, mmap.mmap) or (isinstance(base.obj, np.ndarray) and is_constant(base.obj))


def _owns_memory(value: Any) -> bool:
    return bool(value._b_needsfree_) and not value._objects


def owner_of(value: Any) -> Any:
    """Returns the array at the end of a chain of views."""
    while True:
        base = value.base
        if type(base).__name__ == "DummyArray":  # of `numpy.lib.stride_tricks.as_strided`
            base = base.base
        if not isinstance(base, np.ndarray):
            return value
        value = base


def memory_of(value: Any) -> Any:
    """Returns the object that owns the memory of a view; `None` for anything but an array or a record."""
    if not isinstance(value, (np.ndarray, np.void)):
        return None
    base = owner_of(value).base
    return base.obj if isinstance(base, memoryview) else base


def _save_part(saver: Saver, value: Any) -> Any:
    """Takes an array that has no memory of its own."""
    owner = owner_of(value)
    if owner.flags.owndata:
        return _save_view(saver, value, owner)
    memory = memory_of(value)
    if type(memory).__name__ == "BufferProxy":
        raise CannotCopy("it is an array in the memory of a pygame surface", "Keep the surface instead")
    if value.dtype.hasobject:
        raise CannotCopy("it is an array of Python objects in memory of another library")
    if isinstance(memory, (bytes, *BUFFERS)) and (not isinstance(memory, CData) or _owns_memory(memory)):
        return _save_view(saver, value, memory)
    if value is not owner and isinstance(memory, PrivateMemory):  # other memory may have other users, too
        return _save_view(saver, value, owner)
    return _Foreign(_copy(value))


def _save_view(saver: Saver, value: Any, owner: Any) -> _View:
    if isinstance(owner, np.ndarray):
        if owner.dtype != object and owner.dtype.hasobject:
            raise CannotCopy("it is in an array of records with Python objects in them")
        if not _is_dense(owner):
            raise CannotCopy("it is in an array whose memory has gaps")
    return _View(
        owner=saver.value(owner),
        kind=type(value),
        dtype=_copy_dtype(value.dtype),
        shape=value.shape,
        strides=value.strides,
        offset=value.__array_interface__["data"][0] - address_of(owner),
        writeable=value.flags.writeable,
    )


def _save_objects(saver: Saver, value: Any) -> Any:
    if value.dtype != object:
        raise CannotCopy("it is an array of records with Python objects in them")
    if not _is_dense(value):
        raise CannotCopy("it is an array of Python objects whose memory has gaps")
    node = _Objects(value.shape, _axes(value), value.flags.writeable)
    saver.remember(value, node)
    node.items = saver.items(value.transpose(node.axes).reshape(-1).tolist())
    return node


def _axes(value: Any) -> tuple[int, ...]:
    """Returns the axes of an array, from the largest stride to the smallest."""
    strides = value.strides
    return tuple(sorted(range(value.ndim), key=lambda axis: -abs(strides[axis])))


def _is_dense(value: Any) -> bool:
    """Returns whether an array that owns its memory fills it, in some order of its axes."""
    return bool(value.flags.forc or value.transpose(_axes(value)).flags.c_contiguous)


def _flat(owner: Any) -> Any:
    """Returns all of a dense array as one axis, in the order of its memory, without a copy."""
    owner = owner.view(np.ndarray)
    if owner.flags.forc:
        return owner.reshape(-1, order="A")
    return owner.transpose(_axes(owner)).reshape(-1)


def _view(
    owner: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> NDArray[Any]:
    flat = _flat(owner)
    if dtype.hasobject:  # NumPy lets no bytes be taken for references
        first = flat[offset // flat.itemsize :]
        return np.lib.stride_tricks.as_strided(first, shape, strides)
    return np.ndarray(shape, dtype, flat.view(np.uint8), offset, strides)


def address_of(owner: Any) -> int:
    if isinstance(owner, np.ndarray):
        return owner.__array_interface__["data"][0]
    if not _nbytes(owner):
        return 0
    return np.frombuffer(owner, np.uint8).__array_interface__["data"][0]


def _nbytes(value: Any) -> int:
    return memoryview(value).nbytes


def _copy(value: Any) -> Any:
    """Returns a copy that is as writeable: an env may lock its own array, and unlock it for a change."""
    if not value.dtype.names:
        made = value.copy("K")
    else:
        made = np.empty_like(value, _copy_dtype(value.dtype))
        made[...] = value
        if _is_dense(value):  # the bytes between fields, too, which views show
            _flat(made).view(np.uint8)[...] = _flat(value).view(np.uint8)
    if not value.flags.writeable:
        made.flags.writeable = False
    return made
