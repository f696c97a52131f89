"""Starts and supervises worker processes; every way in which one can fail becomes a typed error."""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec import _failures, _handoffs, _segment, _spawn
from jaxvec._backend import Patience
from jaxvec._channel import WAKE, Channel
from jaxvec._cores import usable_cores
from jaxvec._description import Description, compare
from jaxvec._envs import EnvFn
from jaxvec._errors import EnvError, EnvTimeoutError, SpaceMismatchError, WorkerDiedError
from jaxvec._gate import Gate
from jaxvec._handoff import ParentHandoff, listen
from jaxvec._layout import Layout, split
from jaxvec._messages import Attach, Reply, Request
from jaxvec._native import interrupts
from jaxvec._rows import reader
from jaxvec._segment import Arrays
from jaxvec._spec import PoolSpec
from jaxvec._turns import Turns

_logger = logging.getLogger("jaxvec")

_SPIN_NS = 200_000  # how long a worker without work looks again before it sleeps


@dataclass(frozen=True)
class _Wait:
    """One operation's wait for the workers; see `_handoff.Supervision`."""

    workers: ProcessWorkers
    name: str  # of the operation
    timeout: float | None  # seconds, as the user set it
    deadline: float | None  # of time.monotonic()
    check: Callable[[], None]  # raises what should end it
    waiting_for: Sequence[int] = ()  # workers that owe a message

    def look(self, seconds: float) -> list[tuple[int, Any]]:
        self.check()
        try:
            return self.workers.look(seconds, self.deadline)
        except TimeoutError:  # a message that came in part
            self.expire()

    def expire(self) -> NoReturn:
        raise self.workers.timed_out(self.name, self.timeout, self.waiting_for)


class ProcessWorkers:
    """The worker processes of one pool; see `Workers`. `close()` ends them, whatever state they are in."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        num_workers: int,
        handoff: str,
        worker_env: Mapping[str, str | None] | None,
        learn_info: bool,
        timeout: float | None,
    ) -> None:
        """Starts the workers and waits until every env is built.

        Raises:
            EnvError: an env's constructor raised.
            WorkerDiedError: a worker died.
            EnvTimeoutError: the envs were not built within `timeout` seconds.
        """
        interrupts.watch()
        self._slices = split(len(env_fns), num_workers)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        self._arrays: Arrays | None = None
        self._kind = handoff
        self._handoff: ParentHandoff | None = None
        read_end, self._lifeline = os.pipe()
        try:
            for worker in range(num_workers):
                process, channel = _spawn.spawn(read_end, worker_env or {})
                self._processes.append(process)
                self._channels.append(channel)
                self._by_fd[channel.fileno()] = worker
                self._poll.register(channel, select.POLLIN)
            wait = self._wait("constructor", timeout)
            for worker, (first, stop) in enumerate(self._slices):
                self._send(
                    worker, _spawn.setup(env_fns[first:stop], first=first, learn_info=learn_info), wait
                )
            self.description = self._describe(wait)
        except BaseException:
            self.close(timeout=0)
            raise
        finally:
            os.close(read_end)

    def attach(
        self, layout: Layout, spec: PoolSpec, autoreset_mode: AutoresetMode, timeout: float | None
    ) -> Arrays:
        wait = self._wait("attach", timeout)
        spin_ns = _spin_ns(len(self._slices))
        descriptor = _segment.create(layout)
        try:
            for worker in range(len(self._slices)):
                message = Attach(worker, layout, spec, autoreset_mode, self._kind, spin_ns)
                self._send(worker, message, wait, descriptors=[descriptor])
            arrays = _segment.attach(descriptor, layout)
        finally:
            os.close(descriptor)
        self._spec = spec
        self._gather(wait)
        self._arrays = arrays
        self._handoff = _handoffs.parent_end(
            self._kind, arrays, slices=self._slices, channels=self._channels, spin_ns=spin_ns
        )
        return arrays

    def open_gate(
        self,
        pool_id: int,
        turns: Turns,
        in_order: bool,
        over: Sequence[NDArray[np.bool_]] | None,
        timeout: float | None,
    ) -> Gate:
        assert self._handoff is not None
        assert self._arrays is not None
        return _handoffs.gate(
            self._handoff,
            self._spec,
            self._arrays,
            slices=self._slices,
            pool_id=pool_id,
            turns=turns,
            in_order=in_order,
            over=over,
            timeout=timeout,
        )

    def send(self, operation: int, slots: NDArray[Any]) -> None:
        assert self._handoff is not None
        self._handoff.send(operation, slots)

    def wait(self, slots: NDArray[Any], count: int, patience: Patience) -> None:
        assert self._handoff is not None
        deadline = _deadline(patience.timeout, patience.waited)
        self._handoff.wait(
            slots, count, _Wait(self, patience.name, patience.timeout, deadline, patience.check)
        )

    def first_done(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        assert self._handoff is not None
        return self._handoff.first_done(slots, count)

    def request(
        self, name: str, arguments: Callable[[int, int], tuple[Any, ...]], *, timeout: float | None
    ) -> list[Any]:
        wait = self._wait(name, timeout)
        for worker, (first, stop) in enumerate(self._slices):
            self._send(worker, Request(name, arguments(first, stop)), wait)
        replies = self._gather(wait)
        return [self._open(worker, name, reply) for worker, reply in enumerate(replies)]

    def close(self, timeout: float) -> None:
        """Ends the workers: politely for `timeout` seconds, so that envs can close; then by SIGKILL."""
        for worker, channel in enumerate(self._channels):
            channel.shut()
            if self._handoff is not None:
                self._handoff.knock(worker)
        self._await_end(time.monotonic() + timeout)
        # The whole group goes: with a worker that won't end, whatever its envs have started. Only
        # then is it reaped, so its pid can't have been given to another process.
        self.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it goes when it can
                process.wait(timeout=1)
        for channel in self._channels:
            channel.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
        self._lifeline = -1
        self._processes, self._channels, self._by_fd = [], [], {}
        self._arrays = self._handoff = None

    def kill(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _wait(self, name: str, timeout: float | None) -> _Wait:
        return _Wait(self, name, timeout, _deadline(timeout), interrupts.since_now())

    def _send(self, worker: int, message: Any, wait: _Wait, *, descriptors: Sequence[int] = ()) -> None:
        if self._handoff is not None:
            self._handoff.knock(worker)  # first: a long message needs its reader
        try:
            self._channels[worker].send(message, deadline=wait.deadline, descriptors=descriptors)
        except EOFError as error:
            raise self._died(worker) from error
        except TimeoutError:  # its buffer is full: it does not read
            replace(wait, waiting_for=[worker]).expire()

    def _describe(self, wait: _Wait) -> Description:
        """Waits for every worker's description; returns worker 0's, which all others must equal."""
        ready = self._gather(wait)
        descriptions: list[Description] = [pickle.loads(said.description) for said in ready]
        first = descriptions[0]
        for (env_id, _), other in zip(self._slices, descriptions, strict=True):
            mismatch = compare(first.spaces, 0, other.spaces, env_id) or other.mismatch
            if mismatch is not None:
                raise SpaceMismatchError(mismatch)
        return first

    def _gather(self, wait: _Wait) -> list[Any]:
        """Waits for one message from each worker."""
        messages: dict[int, Any] = {}
        while len(messages) < len(self._slices):
            missing = [worker for worker in range(len(self._slices)) if worker not in messages]
            heard = listen(replace(wait, waiting_for=missing))
            # Who waits for envs in flight looks at their slots before it listens for wakes.
            messages.update((worker, message) for worker, message in heard if message is not WAKE)
        return [messages[worker] for worker in range(len(self._slices))]

    def look(self, seconds: float, deadline: float | None) -> list[tuple[int, Any]]:
        """Waits for wakes and messages, for at most `seconds`, and returns them with their workers.

        Every wait of the parent comes by here, so a worker's death or an env's failure ends it. It
        sleeps in `poll`, without the GIL, and lets signal handlers run.
        """
        heard: list[tuple[int, Any]] = []
        for fd, _ in self._poll.poll(seconds * 1000):
            worker = self._by_fd[fd]
            try:
                message = self._channels[worker].receive(deadline)
            except EOFError as error:
                raise self._died(worker) from error
            if isinstance(message, _failures.Report):
                raise _failures.to_error(message, worker=worker)
            heard.append((worker, message))
        if not heard:
            # An env may have forked a process that keeps a dead worker's socket open.
            for worker, process in enumerate(self._processes):
                if process.poll() is not None:
                    raise self._died(worker)
        return heard

    def timed_out(self, name: str, timeout: float | None, waiting_for: Sequence[int]) -> EnvTimeoutError:
        """Makes the error of a wait that took too long; names the envs that hold it up."""
        if self._handoff is None or waiting_for:
            slow = [slot for worker in waiting_for for slot in range(*self._slices[worker])]
            doing = f"the workers of {_envs(slow)} have not answered"
        else:
            slow = self._handoff.unfinished().tolist()
            doing = f"{self._running(slow) or 'no env is running'}; unfinished: {_envs(slow)}"
        return EnvTimeoutError(f"{name} timed out after {timeout} s: {doing}", env_ids=tuple(slow))

    def _open(self, worker: int, name: str, reply: Reply) -> Any:
        if reply.failure is not None:
            return _failures.to_error(reply.failure, worker=worker)
        try:
            return pickle.loads(reply.result)
        except Exception as error:
            first, _ = self._slices[worker]
            failure = EnvError(
                f"worker {worker} answered {name}, but the answer can't be unpickled here: {error}",
                env_id=first,
                worker=worker,
                operation=name,
            )
            failure.__cause__ = error
            return failure

    def _died(self, worker: int) -> WorkerDiedError:
        try:
            exitcode = self._processes[worker].wait(timeout=1)
        except subprocess.TimeoutExpired:
            exitcode = None  # closed its socket, but lives; close() will kill it
        first, stop = self._slices[worker]
        doing = self._running(range(first, stop))
        return WorkerDiedError(
            f"worker {worker} ({_envs(range(first, stop))}) {_ending(exitcode)} while "
            f"{doing or 'idle or starting'}; what it printed on its standard error may tell more",
            worker=worker,
            env_ids=tuple(range(first, stop)),
            exitcode=exitcode,
        )

    def _running(self, slots: Iterable[int]) -> str:
        """Says which of `slots` are inside their env's code now, and with what action."""
        if self._arrays is None:
            return ""
        marks = self._arrays["running",][:, 0].tolist()
        running = np.array([slot for slot in slots if slot + 1 in marks], np.intp)
        actions = reader(self._spec.action, self._arrays)(running)
        return ", ".join(
            f"env {slot} (worker {self._worker_of(slot)}) is running, last action "
            f"{_failures.describe_action(action)}"
            for slot, action in zip(running.tolist(), actions, strict=True)
        )

    def _worker_of(self, slot: int) -> int:
        return next(w for w, (first, stop) in enumerate(self._slices) if first <= slot < stop)

    def _await_end(self, deadline: float) -> None:
        """Waits until every worker has closed its end; logs envs whose `close` failed."""
        open_fds = dict(self._by_fd)
        poll = select.poll()
        for fd in open_fds:
            poll.register(fd, select.POLLIN)
        while open_fds and (remaining := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(remaining * 1000):
                try:
                    message = self._channels[open_fds[fd]].receive(deadline)
                except (EOFError, TimeoutError):
                    poll.unregister(fd)
                    del open_fds[fd]
                    continue
                if isinstance(message, _failures.Report) and message.operation == "close":
                    _logger.warning("%s", _failures.to_error(message, worker=open_fds[fd]))


def _deadline(timeout: float | None, waited: float = 0) -> float | None:
    return None if timeout is None else time.monotonic() + timeout - waited


def _spin_ns(num_workers: int) -> int:
    """Spinning keeps cores awake; where workers share them, somebody else does."""
    return _SPIN_NS if num_workers <= usable_cores() else 0


def _envs(env_ids: Sequence[int]) -> str:
    if len(env_ids) == 1:
        return f"env {env_ids[0]}"
    if len(env_ids) > 2 and list(env_ids) == list(range(env_ids[0], env_ids[-1] + 1)):
        return f"envs {env_ids[0]} to {env_ids[-1]}"
    return f"envs {', '.join(map(str, env_ids))}"


def _ending(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its control socket"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    name = signal.Signals(-exitcode).name
    hint = " (perhaps by the kernel, for want of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
