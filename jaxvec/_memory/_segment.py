"""Creates and maps a pool's memory; NumPy views of it by path.

The memory has no name: nothing to collide with, nothing to leak whatever is killed. It lives for as
long as any process or any NumPy view holds it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._memory._layout import Layout
from jaxvec._spaces import KeyPath

Arrays: TypeAlias = dict[KeyPath, NDArray[Any]]


def create(layout: Layout, *, sparse: bool = False) -> int:
    """Creates zeroed shared memory for `layout`; returns its file descriptor, not inheritable.

    Args:
        layout: of the pool.
        sparse: whether only what is ever touched takes memory, and may then find none.

    Raises:
        OSError: no memory or no descriptor was left.
    """
    fd = _anonymous()
    try:
        # ftruncate alone would let a full machine kill a process at the first touch of a page.
        if sys.platform == "linux" and not sparse:
            os.posix_fallocate(fd, 0, layout.nbytes)
        else:
            os.ftruncate(fd, layout.nbytes)
        if sys.platform == "linux":  # who made it shorter would kill all processes that touch it
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def attach(fd: int, layout: Layout) -> Arrays:
    """Maps `fd` and returns the array of each field. The views keep the mapping alive."""
    return view(memoryview(mmap.mmap(fd, layout.nbytes)), layout)


def view(buffer: memoryview, layout: Layout) -> Arrays:
    """Returns the arrays of `layout` over `buffer`, and new ones of its objects, by path."""
    shared = {f.path: np.ndarray(f.shape, f.dtype, buffer, f.offset) for f in layout.fields}
    return shared | {path: np.empty(layout.num_envs, object) for path in layout.objects}


def private(layout: Layout) -> Arrays:
    """Returns the arrays of `layout` over memory of this process alone."""
    return view(memoryview(mmap.mmap(-1, layout.nbytes)), layout)


def whole(arrays: Arrays, layout: Layout) -> NDArray[np.uint8]:
    """Returns all bytes of the segment behind `arrays`, which it keeps mapped."""
    first = arrays[layout.fields[0].path]
    memory: Any = first.base
    return np.frombuffer(memory, np.uint8, layout.nbytes)


def _anonymous() -> int:
    if sys.platform == "linux":
        return os.memfd_create("jaxvec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # POSIX elsewhere: a name that lives for the instant between these two calls.
    import _posixshmem  # pyright: ignore[reportMissingImports]  # CPython's own, behind shared_memory

    name = f"/jaxvec-{secrets.token_hex(8)}"
    fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd
