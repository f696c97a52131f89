"""Small helpers: the logger, usable cores, free memory, calls in a thread, and pickling."""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, NoReturn, TypeVar

import cloudpickle

T = TypeVar("T")

logger = logging.getLogger("jaxvec")


def usable_cores(proc: str = "/proc/self") -> int:
    """Returns the number of cores that this process may use: its CPU affinity, or a lower quota of a cgroup.

    A container limits CPU time by a quota, as `docker run --cpus=2.5` does: it sees all cores, but uses at
    most that many seconds of CPU time per second. The result is rounded up.

    Args:
        proc: Folder of this process in procfs.
    """
    cores = len(affinity()) or os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _cpu_quotas(Path(proc)))]))


def affinity() -> set[int]:
    """Returns the cores to which this thread is bound; an empty set if the system does not say."""
    with suppress(AttributeError, OSError):  # not Linux, or a sandbox
        return os.sched_getaffinity(0)
    return set()


def can_bind() -> bool:
    """Returns whether this thread can be bound to cores."""
    with suppress(AttributeError, OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        return True
    return False


def _cpu_quotas(proc: Path) -> Iterator[float]:
    """Yields the CPU quotas, in cores, of the cgroups of this process and of their parents."""
    for folder in _cgroups(proc, "cpu"):
        with suppress(OSError, ValueError):  # no quota at this level, or "max"
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # -1: none
                yield int(quota) / int(period)


def free_memory(proc: str = "/proc/self") -> int | None:
    """Returns the bytes of memory and swap that this process can get; `None` if that is unknown.

    It counts caches as free, which the kernel can drop. The memory of a cgroup and of its parents is limited,
    too.

    Args:
        proc: Folder of this process in procfs.
    """
    machine = _numbers_of(Path(proc).parent / "meminfo")
    if (available := machine.get("MemAvailable:")) is None:
        return None
    swap = machine.get("SwapFree:", 0)
    groups = [free for group in _cgroups(Path(proc), "memory") for free in _free_in(group)]
    return min([available, *groups]) + swap


def _free_in(group: Path) -> Iterator[int]:
    """Yields the memory that is left of the limit of a cgroup, if it has one."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # another version, or "max"
            most, used = (int((group / name).read_text()) for name in (limit, usage))
            stat = _numbers_of(group / "memory.stat")
            cached = (
                stat.get(f"total_{name}", stat.get(name, 0)) for name in ("active_file", "inactive_file")
            )
            yield max(most - used + sum(cached), 0)


def _numbers_of(file: Path) -> dict[str, int]:
    """Returns the numbers of a file with a name and a number per line, in bytes; empty without the file."""
    numbers: dict[str, int] = {}
    with suppress(OSError):
        for name, number, *unit in map(str.split, file.read_text().splitlines()):
            numbers[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return numbers


def _cgroups(proc: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of the cgroups of this process, and of their parents, with a controller."""
    try:
        groups = dict(line.split(":", 2)[1:] for line in (proc / "cgroup").read_text().splitlines())
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux, or procfs is not mounted
        return
    for mount in mounts:
        (_, _, _, root, point, *_), (kind, _, options, *_) = (half.split(" ") for half in mount.split(" - "))
        for controllers, group in groups.items():  # version 2 has no list of controllers
            version_1 = kind == "cgroup" and controller in {*options.split(",")} & {*controllers.split(",")}
            if version_1 or (kind == "cgroup2" and not controllers):
                # Of a group outside the mounted part, only the group at the mount point, a container, can
                # be read.
                inside = os.path.relpath(group, root)
                mount_point = Path(point)
                folder = mount_point if inside.startswith("..") else mount_point / inside
                yield from (level for level in (folder, *folder.parents) if level.is_relative_to(mount_point))


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error; to its text on Python 3.10, which a worker's interpreter may be."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}",)


INTERRUPTED = 130  # exit code of a program that Ctrl-C has ended


def leave() -> NoReturn:
    """Ends the process at once with `INTERRUPTED`, after it has written its output.

    The interpreter's own end would crash while XLA compiles in its threads (SIGSEGV, jax 0.10.2).
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or its reader has ended
            stream.flush()
    os._exit(INTERRUPTED)


def run_in_thread(call: Callable[[Callable[[], None]], T]) -> Future[T]:
    """Runs a call in a new daemon thread, and returns its future once no later call can overtake it.

    `call` takes a callback, which it calls at that moment.
    """
    future: Future[T] = Future()
    started = threading.Event()

    def run() -> None:
        try:
            future.set_result(call(started.set))
        except BaseException as error:
            future.set_exception(error)
        finally:
            started.set()  # a call that fails early must not block the caller

    threading.Thread(target=run, daemon=True).start()
    started.wait()
    return future


# --- Pickling, which keeps the file names of code objects -------------------------------------------------

# The table includes that of copyreg, and follows its later entries.
_CLOUDPICKLE_TABLE: Any = cloudpickle.Pickler.dispatch_table
_private: Any = cloudpickle.cloudpickle  # its registry of classes that were pickled by value


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    construct, args = _CLOUDPICKLE_TABLE[CodeType](code)
    return _code_of_file, (construct, args, code.co_filename, sys.version_info[:2])


def _code_of_file(
    construct: Callable[..., CodeType], args: tuple[Any, ...], filename: str, version: tuple[int, int]
) -> CodeType:
    if version != sys.version_info[:2]:
        pickled_by, running = (".".join(map(str, numbers)) for numbers in (version, sys.version_info[:2]))
        raise TypeError(
            f"a function or class of {filename} is code of Python {pickled_by}, but this process has "
            f'{running}. Put it in a module that both can import; an env can be passed as "module:attribute"'
        )
    return construct(*args).replace(co_filename=filename)


class Pickler(cloudpickle.Pickler):
    """Pickles with cloudpickle, and keeps the names of source files.

    Where a class exists that was pickled by value, unpickling does not change it. cloudpickle would assign
    the pickled attributes again, and with them methods that have a copy of their globals.
    """

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, _CLOUDPICKLE_TABLE)

    def dump(self, obj: Any) -> None:
        if (script := sys.modules.get("__mp_main__")) is not None:  # others can't import it
            cloudpickle.register_pickle_by_value(script)
        super().dump(obj)

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == 6:  # by value
            make, args, state, *_, set_state = reduced
            return _make_class, (make, *args), (set_state, state), None, None, _complete_class
        return reduced


def dumps(value: Any, make_pickler: Callable[[io.BytesIO], cloudpickle.Pickler] = Pickler) -> bytes:
    """Pickles a value with cloudpickle, and keeps the file names of its code. `pickle.loads` reads it.

    A traceback from a worker shows source lines by these names. cloudpickle 3.1.3 and later replaces them
    with `<dynamic-code>`.
    """
    buffer = io.BytesIO()
    make_pickler(buffer).dump(value)
    return buffer.getvalue()


_incomplete: set[type] = set()  # classes that were made here and whose attributes are not set yet


def _make_class(make: Callable[..., type], *args: Any) -> type:
    number = args[-2]  # by which cloudpickle finds the class, for both its classes and its enums
    known_class: type | None = _private._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)
    if known_class is None:
        known_class = make(*args)
        _incomplete.add(known_class)
    return known_class


def _complete_class(kind: type, state: tuple[Callable[..., type], Any]) -> type:
    if kind in _incomplete:
        set_state, attributes = state
        set_state(kind, attributes)
        _incomplete.discard(kind)  # after an error, the next unpickling tries again
    return kind
