"""The worker processes of a pool, and the pool's ends of their control sockets.

The `Supervisor` decides when a worker is replaced, and what its messages mean. This file starts, polls and
ends the processes.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from jaxvec._engine.channel import Channel
from jaxvec._engine.dispatch import DEATH_CHECK_INTERVAL, time_left
from jaxvec._envs import failures
from jaxvec._errors import EnvTimeoutError, PoolClosedError, WorkerDiedError
from jaxvec._util import logger
from jaxvec._workers import protocol
from jaxvec._workers.base import Launcher, Process
from jaxvec._workers.diagnosis import name_envs, name_worker

_KILL_TIMEOUT = 10.0  # seconds for the end of a killed worker, which may be stuck in a system call


class Connections:
    """The worker processes of a pool with their control sockets.

    Attributes:
        processes: By worker. Only the polling thread replaces entries; `kill` reads them in any thread.
        channels: The control sockets, by worker. A replaced one keeps its descriptor number, so that polls
            remain valid.
        notify_worker: Wakes a serving worker that sleeps on a futex, and so would not notice a message.
    """

    def __init__(self, recipe: protocol.WorkerRecipe, launcher: Launcher) -> None:
        """Starts the workers, which then wait for their `Setup`. `close` also closes `launcher`."""
        self._recipe = recipe
        self._launcher = launcher
        self.processes: list[Process] = []
        self.channels: list[Channel] = []
        self.notify_worker: Callable[[int], None] = lambda worker: None
        self._poll_all = select.poll()
        self._worker_by_descriptor: dict[int, int] = {}
        self._ending = False  # `kill` or `close` was called, in any thread; set once
        try:
            for worker in range(len(recipe.slices)):
                process, channel = self._launch(worker)
                self.processes.append(process)
                self.channels.append(channel)
                self._worker_by_descriptor[channel.fileno()] = worker
                self._poll_all.register(channel, select.POLLIN)
        except BaseException:
            self.close(timeout=0)
            raise

    def poll(self, seconds: float, workers: Iterable[int] | None = None) -> list[int]:
        """Waits for at most `seconds`, and returns the workers with a message or an end of file.

        It looks at `workers`, by default at all, sleeps without the GIL, and lets signal handlers run.
        """
        poll = self._poll_all
        if workers is not None:
            poll = select.poll()
            for worker in workers:
                poll.register(self.channels[worker], select.POLLIN)
        return [self._worker_by_descriptor[descriptor] for descriptor, _ in poll.poll(seconds * 1000)]

    def has_ended(self, worker: int) -> bool:
        """Returns True if the process has ended and all of its messages were read.

        An env may have forked a process that keeps a dead worker's socket open.
        """
        return self.processes[worker].ended() and not self.channels[worker].ready()

    def replace(self, worker: int, release: Callable[[], None]) -> None:
        """Kills a worker, and starts a new process. Calls `release` in between, while no thread sends.

        Raises:
            EnvTimeoutError, WorkerDiedError: The new process could not be started.
            PoolClosedError: Another thread has closed the pool.
        """
        self.check_open()
        # `close` takes other lists
        processes = self.processes
        channels = self.channels
        old = processes[worker]
        old.end()
        channels[worker].shut(both=True)  # a thread that is blocked in a send to it gets an EOFError
        with channels[worker].sending:
            release()
        old.wait(timeout=1)  # a process that is stuck in a system call ends later
        processes[worker], channel = self._launch(worker)
        channels[worker] = channels[worker].replace(channel)
        # `close` waits for this thread, but not for long, so the pool may have been closed during the launch.
        # `close` first sets `_ending`, and then ends the processes in the list; this thread first puts the
        # process into the list, and then reads `_ending`. So at least one of them ends it.
        if self._ending:
            processes[worker].end()
            processes[worker].wait(_KILL_TIMEOUT)
            self.check_open()

    def check_open(self) -> None:
        """Raises `PoolClosedError` if `kill` or `close` was called, after which no worker is replaced."""
        if self._ending:
            raise PoolClosedError("the pool was closed while a worker was replaced")

    def kill(self) -> None:
        """Kills the workers and all processes of their envs at once. Any thread may call it."""
        self._ending = True
        for process in self.processes:
            process.end()

    def close(self, timeout: float | None, *, tell: bool = True) -> None:
        """Closes the envs, and kills workers that need more than `timeout` seconds; see `WorkerGroup`."""
        self._ending = True
        try:
            self._dismiss(timeout, tell=tell)
        finally:  # also after Ctrl-C
            self._end()

    def _launch(self, worker: int) -> tuple[Process, Channel]:
        slots = self._recipe.slices[worker]
        env_ids = tuple(range(*slots))
        name = name_worker(worker, slots)
        try:
            return self._launcher.launch(worker)
        except TimeoutError as error:
            limit = f"{self._recipe.config.timeouts.start} s (Timeouts.start)"
            raise EnvTimeoutError(f"{name} did not start within {limit}: {error}", env_ids=env_ids) from error
        except OSError as error:
            raise WorkerDiedError(
                f"{name} could not be started: {error}", worker=worker, env_ids=env_ids, exitcode=None
            ) from error

    def _dismiss(self, timeout: float | None, *, tell: bool) -> None:
        """Waits until all workers have closed their envs and ended; logs the `close` calls that fail."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker, channel in enumerate(self.channels):
            channel.shut()
            self.notify_worker(worker)
        unclosed = {worker: set(range(*slots)) for worker, slots in enumerate(self._recipe.slices)}
        still_open = set(range(len(self.channels)))
        while still_open:
            remaining = time_left(deadline)  # before the poll, which then sees messages sent by the deadline
            readable = self.poll(min(remaining, DEATH_CHECK_INTERVAL), still_open)
            for worker in readable:
                try:
                    message = self.channels[worker].receive(deadline)
                except (EOFError, TimeoutError):
                    still_open.remove(worker)
                    continue
                if isinstance(message, protocol.Closed):
                    unclosed[worker].difference_update(message.env_ids)
                elif isinstance(message, failures.Report) and message.operation == "close":
                    logger.warning("%s", failures.to_error(message, worker=worker))
            if not readable:
                still_open -= set(filter(self.has_ended, still_open))
                if remaining <= 0:
                    break
        for worker in sorted(still_open) if timeout and tell else ():
            late = sorted(unclosed[worker])
            name = f"{name_envs(late) if late else 'spare envs, threads, atexit functions'} (worker {worker})"
            logger.warning(
                "close of %s was cut off after %s s; close(timeout=None) waits for it", name, timeout
            )

    def _end(self) -> None:
        # Callbacks run in reverse order, and all of them, even if Ctrl-C interrupts one.
        with ExitStack() as stack:
            stack.callback(self._launcher.close)
            for channel in self.channels:
                stack.callback(channel.close)
            for channel in self.channels:  # ends sends of other threads, which hold a lock that `close` needs
                stack.callback(channel.shut, both=True)
            for process in self.processes:
                stack.callback(process.wait, timeout=_KILL_TIMEOUT)
            # Runs first: kills each process group, with all that a worker's envs have started. Before the
            # worker is reaped, its pid can't belong to another process.
            for process in self.processes:
                stack.callback(process.end)
            # New lists, as `kill` may iterate the old one.
            self.processes = []
            self.channels = []
            self.notify_worker = lambda worker: None
