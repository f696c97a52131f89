"""Measures CUDA's driver with shared memory, without JAX: `python -m benchmarks.accelerator.driver FILE`.

The shared memory is allocated as for the segment of a pool. Times are medians in microseconds unless the name
of a result contains another unit.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BIG = 256 << 20  # bytes
SIZES = (256, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 128 << 20)  # bytes
ATTRIBUTES = {
    "multiprocessors": 16,
    "copy engines": 40,
    "pageable memory access": 88,
    "registered memory has the same pointer": 91,
    "host memory can be registered": 99,
    "uses page tables of the host": 100,
}
PORTABLE, NON_BLOCKING, NO_TIMING = 1, 1, 2  # flags of an allocation, a stream and an event
MEMORY_TYPE = 2  # an attribute of a pointer


def shared(size: int) -> NDArray[np.uint8]:
    """Returns shared memory that is allocated like the segment of a pool."""
    fd = os.memfd_create("jaxvec")
    os.posix_fallocate(fd, 0, size)
    return np.frombuffer(mmap.mmap(fd, size), np.uint8)


class Driver:
    """CUDA's driver, called through `ctypes`, with the primary context, which JAX uses, and one stream."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        self.device, self.context, self.stream = device, context, stream

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver.

        Args:
            name: Name of the function.
            arguments: Arguments. An `int` is passed as `size_t`, and other values must be `ctypes` objects.

        Raises:
            RuntimeError: The call failed. The message contains CUDA's name of the error.
        """
        arguments = tuple(ctypes.c_size_t(x) if isinstance(x, int) else x for x in arguments)
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {code} {(text.value or b'').decode()}")

    def allocate(self, size: int) -> int:
        """Allocates device memory and returns its address."""
        there = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(there), size)
        return there.value

    def allocate_host(self, size: int) -> int:
        """Allocates page-locked host memory and returns its address."""
        here = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(here), size, PORTABLE)
        assert here.value is not None
        return here.value

    def wait(self) -> None:
        """Blocks until the stream is idle."""
        self("cuStreamSynchronize", self.stream)

    def to_device(self, there: int, here: int, size: int) -> None:
        """Starts an asynchronous copy from host address `here` to device address `there`."""
        self("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(there), ctypes.c_void_p(here), size, self.stream)

    def to_host(self, here: int, there: int, size: int) -> None:
        """Starts an asynchronous copy from device address `there` to host address `here`."""
        self("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(here), ctypes.c_uint64(there), size, self.stream)


def timed(turn: Callable[[], None], rounds: int = 100) -> float:
    """Returns the median duration of `turn` in microseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        turn()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 2)


def fork_writer(rows: NDArray[np.uint8], flags: NDArray[np.int64], rounds: int) -> None:
    """Forks a process that writes rows like a worker.

    Args:
        rows: Shared memory that the process fills with `i % 251` in round `i`.
        flags: Shared array of two elements: the last round written and the last round read. The process
            writes the next round when the two are equal.
        rounds: Number of rounds.
    """
    parent = os.getpid()
    if os.fork():
        return
    for i in range(1, rounds + 1):
        rows[:] = i % 251
        flags[0] = i
        while flags[1] != i:
            if os.getppid() != parent:
                os._exit(0)
    os._exit(0)


def main(file: Path) -> None:
    """Runs all measurements. The file is rewritten after each result, so a crash loses no earlier one."""
    results: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        results[name] = value
        file.write_text(json.dumps(results, indent=1))

    size, rounds = 4 << 20, 300
    rows, flags = shared(size), shared(4096).view(np.int64)
    fork_writer(
        rows, flags, rounds
    )  # before the driver is initialised, because CUDA does not support fork after that

    try:
        driver = Driver()
    except OSError as error:
        keep("no driver", str(error))
        return
    for name, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        driver("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), driver.device)
        keep(name, value.value)

    segment = shared(BIG)
    address = segment.ctypes.data
    start = time.perf_counter()
    driver("cuMemHostRegister_v2", ctypes.c_void_p(address), BIG, PORTABLE)
    keep("page-lock 256 MiB, ms", round((time.perf_counter() - start) * 1e3, 2))
    kind = ctypes.c_uint()
    driver("cuPointerGetAttribute", ctypes.byref(kind), MEMORY_TYPE, ctypes.c_uint64(address))
    keep("memory type of page-locked memory (1: host)", kind.value)

    there, allocated = driver.allocate(BIG), driver.allocate_host(BIG)
    pageable = shared(BIG)
    places = {
        "segment, page-locked": address,
        "segment": pageable.ctypes.data,
        "cuMemHostAlloc": allocated,
    }
    copies: dict[str, Any] = {}
    for place, here in places.items():
        for count in SIZES:

            def copy(here: int = here, count: int = count) -> None:
                driver.to_device(there, here, count)
                driver.wait()

            taken = timed(copy, 15)
            copies.setdefault(place, {})[count] = {"us": taken, "GB/s": round(count / taken / 1e3, 2)}
            keep("to the device", copies)

    def copy_back(count: int) -> None:
        driver.to_host(address, there, count)
        driver.wait()

    keep("to the host", {count: timed(lambda count=count: copy_back(count)) for count in (256, 4096, 65536)})
    keep("wait for an idle stream", timed(driver.wait))
    event = ctypes.c_void_p()
    driver("cuEventCreate", ctypes.byref(event), ctypes.c_uint(NO_TIMING))
    keep("record an event", timed(lambda: driver("cuEventRecord", event, driver.stream)))
    driver.wait()

    def copy_leaves(count: int) -> None:
        for i in range(count):
            driver.to_device(there + i * 4096, address + i * 4096, 256)
        driver.wait()

    keep(
        "copies of 256 bytes, by number",
        {count: timed(lambda count=count: copy_leaves(count)) for count in (1, 4, 8, 16)},
    )

    driver("cuMemHostRegister_v2", ctypes.c_void_p(rows.ctypes.data), size, PORTABLE)
    mine, wrong, done = np.empty(size, np.uint8), 0, 0
    deadline = time.monotonic() + 15
    for i in range(1, rounds + 1):
        while flags[0] != i and time.monotonic() < deadline:
            pass
        if time.monotonic() >= deadline:
            break
        driver.to_device(there, rows.ctypes.data, size)
        driver.to_host(mine.ctypes.data, there, size)
        driver.wait()
        wrong += int((mine != i % 251).any())
        done, flags[1] = i, i
    keep("rows written by another process", {"rounds": done, "wrong": wrong})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
