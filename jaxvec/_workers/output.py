"""Output of worker processes, which `Workers(output=...)` sends to the program's log or to files.

env or C code writes to the descriptors 1 and 2
  -> tag_lines (in the worker)   marks lines of Python code with their stream and the env that runs
  -> pipe, thread of the worker  takes lines at once, so that the worker does not wait, and counts repeats
  -> thread of the pool          calls `logging`: handlers may be slow
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import re
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress

FOLDER = "jaxvec-output"  # of `output="file"`, in the working directory
_INTERVAL = 1.0  # seconds in which each text is logged once
_MAX_TEXTS = 200  # different texts in an interval
_TOO_MANY = logging.WARNING, "prints more different lines than are logged"
_MAX_LINE = 4000  # characters; longer lines are split
_MAX_LAST = 5  # lines in the error of a worker that died
_END_TIMEOUT = 1.0  # seconds for the last lines: a process of an env may survive, and a log handler may hang
_TAG = re.compile("\x1e(stdout|stderr)(-?[0-9]+)\x1f")

_logger = logging.getLogger("jaxvec")


def tag_lines(env_id: Callable[[], int]) -> None:
    """Marks what Python code of this worker prints with the result of `env_id`: the running env, or -1."""

    def tag_stream(name: str) -> None:
        stream = getattr(sys, name)
        original = stream.write

        def write(text: str) -> int:
            tag = f"\x1e{name}{env_id()}\x1f"
            original(tag + text[:-1].replace("\n", "\n" + tag) + text[-1:])
            return len(text)

        stream.write = write

    tag_stream("stdout")
    tag_stream("stderr")
    warnings.formatwarning = lambda message, category, filename, lineno, line=None: (  # without the source
        f"{filename}:{lineno}: {category.__name__}: {message}\n"
    )
    with suppress(ValueError):  # C's stdout has another symbol
        libc = ctypes.CDLL(None)
        # Line-buffered, as at a terminal. A crash would lose whole blocks.
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)


class Output:
    """Standard streams for the workers on this machine: by default, those of this process."""

    def advice(self, worker: int) -> str:
        """Returns the end of the error message of a worker that died."""
        return "Look at the worker's output on stderr."

    @contextmanager
    def streams(self, worker: int) -> Generator[list[int]]:
        """Yields descriptors for stdout and stderr of a new process."""
        usable = [_is_inheritable(descriptor) for descriptor in (1, 2)]  # daemons close even these
        with open(os.devnull, "w") as null:
            yield [number if is_usable else null.fileno() for number, is_usable in enumerate(usable, 1)]

    def close(self) -> None:
        """Delivers the last lines, after the end of the workers."""


class OutputFiles(Output):
    """A file per worker, to which its replacements append."""

    def __init__(self) -> None:
        os.makedirs(FOLDER, exist_ok=True)
        prefix = time.strftime(f"%Y%m%d-%H%M%S-pid{os.getpid()}-")
        self._prefix = tempfile.mkdtemp(prefix=prefix, dir=os.path.abspath(FOLDER)) + "/worker-"
        _logger.info("the output of workers goes to %s*.log", self._prefix)

    def advice(self, worker: int) -> str:
        return f"Look at the worker's output in {self._prefix}{worker}.log."

    @contextmanager
    def streams(self, worker: int) -> Generator[list[int]]:
        with open(f"{self._prefix}{worker}.log", "ab") as file:
            yield [file.fileno()] * 2


class OutputLog(Output):
    """Records of the logger "jaxvec": once a second, each text with the number of its repetitions."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        # By worker; written by the thread that starts it, and read by the one that reports its death.
        self._readers: dict[int, list[threading.Thread]] = defaultdict(list)
        # Last lines by worker, for `advice`, which first waits for the reader thread that appends them.
        self._last: dict[int, deque[str]] = {}
        # The latest worker and the number, by level and text. Readers add to them, and the writer takes them,
        # under `_lock`. It and the queues are reentrant, because the garbage collector may close a pool
        # anywhere.
        self._texts: dict[tuple[int, str], tuple[str, int]] = {}
        self._lock = threading.RLock()
        self._wakes = queue.SimpleQueue[None]()  # an entry when `_texts` gets its first text, and at the end
        self._closed = queue.SimpleQueue[None]()  # an entry from `close` on
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def advice(self, worker: int) -> str:
        _join(self._readers[worker])
        return "Its last lines:" + "".join(f"\n  {line}" for line in [*self._last[worker]] or ["(none)"])

    @contextmanager
    def streams(self, worker: int) -> Generator[list[int]]:
        self._last[worker] = deque(maxlen=_MAX_LAST)
        reading, writing = os.pipe()
        try:
            reader = threading.Thread(target=self._read, args=(worker, reading), daemon=True)
            reader.start()
            self._readers[worker] = [reader, *filter(threading.Thread.is_alive, self._readers[worker])]
            yield [writing] * 2
        finally:
            os.close(writing)

    def close(self) -> None:
        _join([reader for readers in self._readers.values() for reader in readers])
        self._closed.put(None)
        self._wakes.put(None)
        _join([self._writer])

    def _read(self, worker: int, pipe: int) -> None:
        last = self._last[worker]
        with open(pipe, encoding="utf-8", errors="replace") as lines:  # a carriage return ends a line, too
            while line := lines.readline(_MAX_LINE):
                if not (text := _TAG.sub("", line).rstrip()):
                    continue
                last.append(text)
                name = self._names[worker]
                tags = _TAG.findall(line) or [("", "-1")]
                stream, env_id = tags[-1]
                if env_id != "-1" and not name.endswith(f"(env {env_id})"):
                    name += f", env {env_id}"
                key = logging.INFO if stream == "stdout" else logging.WARNING, text
                with self._lock:
                    if not self._texts:
                        self._wakes.put(None)
                    if key not in self._texts and len(self._texts) >= _MAX_TEXTS:
                        key = _TOO_MANY
                    self._texts[key] = name, self._texts.get(key, ("", 0))[1] + 1

    def _write(self) -> None:
        is_closed = False
        while not is_closed:
            self._wakes.get()
            is_closed = not self._closed.empty()
            with self._lock:
                texts = self._texts
                self._texts = {}
            for (level, text), (name, count) in texts.items():
                times = f" ({count} times)" if count > 1 else ""
                _logger.log(level, "%s: %s%s", name, text, times)
            with suppress(queue.Empty):
                self._closed.put(self._closed.get(timeout=_INTERVAL))


def _is_inheritable(descriptor: int) -> bool:
    # Unlike a stream, a file that was opened after the stream was closed, and took its number, is not.
    with suppress(OSError):
        return os.get_inheritable(descriptor)
    return False


def _join(threads: list[threading.Thread]) -> None:
    """Waits for the end of the threads, for `_END_TIMEOUT` in all."""
    deadline = time.monotonic() + _END_TIMEOUT
    for thread in threads:
        if thread is not threading.current_thread():  # the garbage collector closes pools in any thread
            thread.join(max(deadline - time.monotonic(), 0))
