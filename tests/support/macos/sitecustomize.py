"""Makes Python on Linux look like Python on macOS to jaxvec: `PYTHONPATH=tests/support/macos python ...`.

Python imports this file when it starts. Worker processes inherit PYTHONPATH, so they look like macOS, too.

Emulated for all code: what the modules `os`, `fcntl`, `mmap`, `select`, `signal` and `socket` lack there, C
functions that `ctypes` does not find, sockets that macOS refuses, the errors of its shared memory, and the
error of a signal to a process group of zombies. Emulated for jaxvec, with what it calls of the standard
library, and for the build of its wheel: `sys.platform`, and that there are no /proc, /sys and /dev/shm. JAX,
NumPy, psutil and the tests themselves still see Linux.

Not emulated: everything else. Most of all: ARM's order of memory accesses, pages of 16 KB, sockets with
buffers of 8 KB, the scheduler, forks beside Apple's frameworks, and the code of JAX, NumPy and CPython for
macOS.
"""

from __future__ import annotations

import _posixshmem
import _socket
import errno
import fcntl
import mmap
import os
import platform
import posix
import select
import signal
import socket
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

_LACKING: dict[Any, tuple[str, ...]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "posix_fallocate"),
        *("posix_fadvise", "pipe2", "eventfd", "getrandom", "getresuid", "setns", "unshare", "splice"),
        *("copy_file_range", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "O_TMPFILE"),
        *(("waitid",) if sys.version_info < (3, 13) else ()),
    ),
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SETSIG"),
    mmap: ("MAP_POPULATE", "MAP_STACK", "MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_REMOVE"),
    select: ("epoll",),
    signal: ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "pidfd_send_signal", "sigtimedwait"),
    socket: ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "MSG_NOSIGNAL", "MSG_CMSG_CLOEXEC", "SO_PEERCRED"),
}
_LACKING[posix] = _LACKING[os]
_LACKING[_socket] = _LACKING[socket]
_SEEING_MACOS = ("jaxvec", "scikit_build_core")  # packages; the latter builds the wheel
_MAIN_FILE = "/jaxvec/_workers/lifeline.py"  # which workers run as `__main__`
_C_FUNCTIONS = ("prctl", "syscall", "memfd_create", "pidfd_open", "sched_setaffinity", "sched_getaffinity")
_FOLDERS = ("/proc", "/sys", "/dev/shm")
_MAX_NAME = 31  # characters of a name of shared memory

_readlink = os.readlink


def _asked_by_jaxvec(depth: int) -> bool:
    """Returns True if the `depth`-th caller, or the first one outside the standard library, is in jaxvec."""
    frame = sys._getframe(depth).f_back
    while frame is not None:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if name not in sys.stdlib_module_names:
            return name in _SEEING_MACOS or frame.f_code.co_filename.endswith(_MAIN_FILE)
        frame = frame.f_back
    return False


# --- What depends on the caller --------------------------------------------------------------------------


class _Sys(ModuleType):
    def __new__(cls, *args: Any) -> Any:  # importlib makes new modules by `type(sys)`
        return ModuleType(*args)

    @property
    def platform(self) -> str:
        return "darwin" if _asked_by_jaxvec(1) else "linux"


def _hide(path: object) -> None:
    if isinstance(path, (str, bytes, os.PathLike)) and _asked_by_jaxvec(2):
        name = os.fsdecode(path)
        if name.startswith(_FOLDERS):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _wrap_paths(name: str) -> None:
    original = getattr(os, name)

    def wrapper(path: Any, *args: Any, **kwargs: Any) -> Any:
        _hide(path)
        return original(path, *args, **kwargs)

    setattr(os, name, wrapper)


# --- What holds for all code -----------------------------------------------------------------------------


def _refuse_sockets(family: int, kind: int) -> None:
    if family == socket.AF_UNIX and kind == socket.SOCK_SEQPACKET:
        raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))


def _refuse_abstract(address: object) -> None:
    if isinstance(address, (str, bytes)) and address[:1] in ("\0", b"\0"):
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        _hide(args[0])
    elif event == "socket.__new__":
        _refuse_sockets(args[1], args[2])
    elif event in ("socket.bind", "socket.connect"):
        _refuse_abstract(args[1])
    elif event == "ctypes.dlsym" and args[1] in _C_FUNCTIONS:
        raise AttributeError(f"{args[1]}: symbol not found")


def _is_shared_memory(descriptor: int) -> bool:
    with suppress(OSError):
        return _readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/shm/")
    return False


_shm_open = _posixshmem.shm_open
_ftruncate = os.ftruncate
_killpg = os.killpg
_mmap = mmap.mmap


def _open_shared_memory(path: str, flags: int, mode: int = 511) -> int:
    if len(path) > _MAX_NAME:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    return _shm_open(path, flags, mode=mode)


def _resize(descriptor: int, length: int) -> None:
    if _is_shared_memory(descriptor) and os.fstat(descriptor).st_size:  # its size can be set once
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    _ftruncate(descriptor, length)


def _wrap_transfers(name: str) -> None:
    original = getattr(os, name)

    def wrapper(descriptor: int, *args: Any) -> Any:
        if _is_shared_memory(descriptor):
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return original(descriptor, *args)

    setattr(os, name, wrapper)


class _Mmap(_mmap):
    def __new__(
        cls, fileno: int, length: int, flags: int = mmap.MAP_SHARED, *args: Any, **kwargs: Any
    ) -> Any:
        if flags & mmap.MAP_PRIVATE and _is_shared_memory(fileno):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().__new__(cls, fileno, length, flags, *args, **kwargs)


def _kill_group(group: int, number: int) -> None:
    """Sends a signal to a group. XNU finds no zombies, and reports EPERM if the group has nothing else."""
    _killpg(group, 0)
    states: list[str] = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/stat") as file:
            state, _, member_of, *_ = file.read().rpartition(")")[2].split()
            if int(member_of) == (group or os.getpgrp()):
                states.append(state)
    if not {*states} - {"Z", "X"}:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    _killpg(group, number)


for _module, _names in _LACKING.items():
    for _name in _names:
        with suppress(AttributeError):
            delattr(_module, _name)
for _name in ("readlink", "stat", "lstat"):
    _wrap_paths(_name)
for _name in ("read", "pread", "write", "pwrite"):
    _wrap_transfers(_name)
_posixshmem.shm_open = _open_shared_memory
os.ftruncate = _resize
os.killpg = _kill_group
mmap.mmap = _Mmap
platform.mac_ver = lambda *_: ("14.0", ("", "", ""), "arm64")  # scikit-build-core asks for it
sys.__class__ = _Sys
sys.addaudithook(_audit)
