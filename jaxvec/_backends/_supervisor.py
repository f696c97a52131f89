"""Starts, watches, replaces and ends worker processes; every way in which one can fail is a typed error."""

from __future__ import annotations

import logging
import math
import os
import pickle
import select
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from jaxvec import _options
from jaxvec._backends._launcher import Launcher, Process
from jaxvec._backends._messages import Attach, Ready, Recover, Replacement, Setup
from jaxvec._backends._plan import Plan
from jaxvec._backends._setup import make_setup
from jaxvec._errors import EnvError, EnvTimeoutError, JaxvecError, SpaceMismatchError, WorkerDiedError
from jaxvec._handoff._channel import WAKE, Channel
from jaxvec._handoff._move import Verb
from jaxvec._memory._rows import reader
from jaxvec._memory._segment import Arrays
from jaxvec._native import interrupts
from jaxvec._options import Options
from jaxvec._restart import Budget
from jaxvec._slices import _failures
from jaxvec._slices._description import Description, compare
from jaxvec._tracing._recorder import Loss

_logger = logging.getLogger("jaxvec")

_LAST = 10.0  # seconds that a killed worker has to end; one that is stuck in the kernel goes when it can


class Supervisor:
    """The worker processes of one pool. `close()` ends them, whatever state they are in.

    Attributes:
        channels: the control socket to each worker; a replaced worker's has the same descriptor.
        starting: workers that take another's place and are not ready yet.
        options: what resets pass to the envs; for workers that take another's place.
        trace: how many spans each worker records, if any; for those, too.
        losses: what spans are lost with workers that were replaced since `trace` was set.
        knock: tells a worker that serves that a message is on its socket.
    """

    def __init__(self, plan: Plan, budget: Budget, launcher: Launcher) -> None:
        """Starts the workers, which wait for what `setup` makes, and closes `launcher` in the end."""
        interrupts.watch()
        self._plan = plan
        self._budget = budget
        self._launcher = launcher
        self._processes: list[Process] = []
        self.channels: list[Channel] = []
        self.starting: set[int] = set()
        self.options: Options = None
        self.trace: int | None = None
        self.losses: list[tuple[int, Loss]] = []
        self.knock: Callable[[int], None] = _no_knock
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        self._news: list[tuple[int, JaxvecError]] = []  # of replaced workers, for `look`
        self._grace = -math.inf  # until when nobody is late, in time.monotonic() seconds
        self._attach: Attach | None = None  # to a worker's place; None until the workers serve
        self._description: Description | None = None
        self._arrays: Arrays | None = None
        self._segment = -1
        try:
            for worker in range(len(plan.slices)):
                process, channel = self._launch(worker)
                self._processes.append(process)
                self.channels.append(channel)
                self._by_fd[channel.fileno()] = worker
                self._poll.register(channel, select.POLLIN)
        except BaseException:
            self.close(timeout=0)
            raise

    def setup(self, worker: int, *, learn_info: bool) -> Setup:
        """Makes the message that tells a worker what to build."""
        return make_setup(self._plan, worker, learn_info=learn_info)

    def send_attach(self, message: Attach, segment: int, arrays: Arrays, deadline: float | None) -> None:
        """Gives every worker the segment, whose descriptor is ours from now on; raises as `send`.

        Args:
            message: as worker 0 gets it.
            segment: the descriptor.
            arrays: our own view of it.
            deadline: in `time.monotonic()` seconds.
        """
        self._segment, self._arrays, self._attach = segment, arrays, message
        for worker in range(len(self._processes)):
            self.send(worker, replace(message, worker=worker), deadline=deadline, descriptors=[segment])

    def send(
        self, worker: int, message: Any, *, deadline: float | None, descriptors: Sequence[int] = ()
    ) -> None:
        """Sends a message.

        Raises:
            WorkerDiedError: the worker is dead.
            TimeoutError: it did not take the message by `deadline`.
        """
        try:
            self._tell(worker, message, deadline, descriptors)
        except EOFError as error:
            raise self._died(worker) from error

    def agree(self, ready: Sequence[Ready]) -> Description:
        """Returns worker 0's description, which all others must equal."""
        descriptions: list[Description] = [pickle.loads(said.description) for said in ready]
        self._description = descriptions[0]
        for worker, description in enumerate(descriptions):
            self._require_equal(worker, description)
        return descriptions[0]

    def extend(self, deadline: float | None, timeout: float | None) -> float | None:
        """Returns a deadline that leaves time for what is gone on from, and then `timeout` seconds."""
        if deadline is None or timeout is None:
            return None
        return max(deadline, self._grace + timeout)

    def look(self, seconds: float, deadline: float | None) -> list[tuple[int, Any]]:
        """Waits for wakes and messages, for at most `seconds`, and returns them with their workers.

        Every wait of the parent comes by here, so a worker's death or an env's failure ends it, or is
        gone on from; the error stands for the message of a worker that was replaced. It sleeps in
        `poll`, without the GIL, and lets signal handlers run.

        Raises:
            EnvError, WorkerDiedError: it can't be gone on from.
            TimeoutError: a message came in part, but not whole by `deadline`.
        """
        heard: list[tuple[int, Any]] = []
        for fd, _ in self._poll.poll(0 if self._news else seconds * 1000):
            worker = self._by_fd[fd]
            try:
                message = self.channels[worker].receive(deadline)
                if isinstance(message, _failures.Report):
                    self._recover(worker, _failures.to_error(message, worker=worker), deadline)
                elif worker in self.starting and message is not WAKE:
                    self._go_on_starting(worker, message, deadline)
                else:
                    heard.append((worker, message))
            except EOFError:
                self.replace(worker, self._died(worker))
        if not heard and not self._news:
            # An env may have forked a process that keeps a dead worker's socket open.
            for worker, process in enumerate(self._processes):
                if process.ended():
                    self.replace(worker, self._died(worker))
        news, self._news = self._news, []
        return news + heard

    def hear(self, worker: int, deadline: float) -> Any:
        """Waits for a wake or a message of one worker, whatever it is.

        Raises:
            WorkerDiedError: the worker is dead.
            TimeoutError: nothing came by `deadline`.
        """
        channel = self.channels[worker]
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise TimeoutError
        try:
            return channel.receive(deadline)
        except EOFError as error:
            raise self._died(worker) from error

    def replace(self, worker: int, error: JaxvecError) -> None:
        """Ends a worker and starts another in its place, if the pool goes on; else raises `error`.

        The new one builds its envs while others work. What its place is asked for in the meantime, it
        finds in the segment.
        """
        if self._arrays is None:
            raise error
        self._budget.spend(worker, error)
        self._news.append((worker, error))
        self.losses.append((worker, Loss(str(error), time.monotonic_ns())))
        old = self._processes[worker]
        old.end()
        old.wait(timeout=1)  # if it is stuck in the kernel, it goes when it can
        try:
            self._processes[worker], channel = self._launch(worker)
        except ConnectionError as lost:
            raise error from lost
        except JaxvecError as failed:
            raise failed from error
        self.channels[worker].replace(channel)
        self.starting.add(worker)
        timeout = self._plan.start_timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        self._grace = math.inf if deadline is None else deadline
        with suppress(EOFError):  # the next look will tell
            self._tell(worker, self.setup(worker, learn_info=False), deadline)

    def _launch(self, worker: int) -> tuple[Process, Channel]:
        try:
            return self._launcher.launch(worker)
        except ConnectionError:
            raise
        except OSError as error:
            env_ids = tuple(range(*self._plan.slices[worker]))
            who = f"worker {worker} ({name_envs(env_ids)})"
            if isinstance(error, TimeoutError):
                limit = f"start_timeout, {self._plan.start_timeout} s"
                raise EnvTimeoutError(
                    f"{who} did not start within {limit}: {error}", env_ids=env_ids
                ) from error
            raise WorkerDiedError(
                f"{who} could not be started: {error}", worker=worker, env_ids=env_ids, exitcode=None
            ) from error

    def kill(self) -> None:
        """Ends the workers, and whatever their envs have started, at once; from any thread."""
        for process in self._processes:
            process.end()

    def close(self, timeout: float) -> None:
        """Ends the workers: politely for `timeout` seconds, so that envs can close; then by SIGKILL."""
        try:
            self._dismiss(time.monotonic() + timeout)
        finally:  # also if Ctrl-C comes first
            self._end()

    def _end(self) -> None:
        with ExitStack() as stack:  # of which Ctrl-C may end one call, and all others are made
            if self._segment >= 0:
                stack.callback(os.close, self._segment)
            stack.callback(self._launcher.close)
            for channel in self.channels:
                stack.callback(channel.close)
            for process in self._processes:
                stack.callback(process.wait, timeout=_LAST)
            # The last is the first. The whole group goes: with a worker that won't end, whatever its envs
            # have started. Only then is it reaped, so its pid can't have been given to another process.
            for process in self._processes:
                stack.callback(process.end)
            self._processes, self.channels, self._by_fd = [], [], {}
            self._segment, self._arrays, self.knock = -1, None, _no_knock

    def running(self, slots: Iterable[int]) -> str:
        """Says which of `slots` are inside their env's code now, and with what action."""
        if self._arrays is None:
            return ""
        assert self._attach is not None
        marks = self._arrays["running",][:, 0].tolist()
        running = np.array([slot for slot in slots if slot + 1 in marks], np.intp)
        actions = reader(self._attach.spec.action, self._arrays)(running)
        resetting = self._arrays["asked",][running] % 2 == int(Verb.RESET)
        return ", ".join(
            f"env {slot} (worker {self.worker_of(slot)}) is running"
            + ("" if resets else f", last action {_failures.describe_action(action)}")
            for slot, action, resets in zip(running.tolist(), actions, resetting, strict=True)
        )

    def silent(self, workers: Iterable[int]) -> str:
        """Says which of `workers`, who are late, are elsewhere, and where."""
        return ", ".join(
            f"worker {worker} {place} has not answered"
            for worker in workers
            if (place := self._processes[worker].place)
        )

    def ahead(self, worker: int) -> int:
        """Returns how far a worker's monotonic clock is ahead of ours, in ns."""
        return self._processes[worker].ahead

    def worker_of(self, slot: int) -> int:
        """Returns the worker that holds a slot."""
        return next(w for w, (first, stop) in enumerate(self._plan.slices) if first <= slot < stop)

    def _recover(self, worker: int, error: EnvError, deadline: float | None) -> None:
        """Lets a worker go on after a failure of its env, if the pool goes on; else raises `error`."""
        if worker in self.starting or self._arrays is None:  # it could not build the env, and has ended
            self.replace(worker, error)
            return
        self._budget.spend(worker, error)
        assert self._budget.policy is not None
        self._grace = max(self._grace, time.monotonic())
        self._tell(worker, Recover(self._budget.policy.retry == "rebuild"), deadline)

    def _go_on_starting(self, worker: int, message: Any, deadline: float | None) -> None:
        """Answers a worker that takes another's place: its envs are built, or it serves by now."""
        if isinstance(message, Ready):
            self._require_equal(worker, pickle.loads(message.description))
            assert self._attach is not None
            assert self._arrays is not None
            share = slice(*self._plan.slices[worker])
            kept = self._attach.spec.kept_leaves
            replaces = Replacement(
                _options.share(self.options, *self._plan.slices[worker]),
                self.trace,
                int(self._arrays["knocks",][worker, 0]),
                {leaf.path: self._arrays[leaf.path][share] for leaf in kept if leaf.is_object},
            )
            attach = replace(self._attach, worker=worker, replaces=replaces)
            self._tell(worker, attach, deadline, [self._segment])
            return
        self.starting.remove(worker)
        if not self.starting:
            self._grace = time.monotonic()

    def _tell(
        self, worker: int, message: Any, deadline: float | None, descriptors: Sequence[int] = ()
    ) -> None:
        if worker not in self.starting:  # those wait at their sockets
            self.knock(worker)  # first: a long message needs its reader
        self.channels[worker].send(message, deadline=deadline, descriptors=descriptors)

    def _require_equal(self, worker: int, description: Description) -> None:
        assert self._description is not None
        first, _ = self._plan.slices[worker]
        mine, equal = description.spaces, self._plan.kind.equal_spaces
        mismatch = compare(self._description.spaces, 0, mine, first, equal=equal) or description.mismatch
        if mismatch is not None:
            raise SpaceMismatchError(mismatch)

    def _died(self, worker: int) -> WorkerDiedError:
        exitcode, ending = self._processes[worker].ending()
        first, stop = self._plan.slices[worker]
        doing = self.running(range(first, stop))
        return WorkerDiedError(
            f"worker {worker} ({name_envs(range(first, stop))}) {ending} while "
            f"{doing or 'idle or starting'}; its standard error may tell more",
            worker=worker,
            env_ids=tuple(range(first, stop)),
            exitcode=exitcode,
        )

    def _dismiss(self, deadline: float) -> None:
        """Waits until every worker has closed its envs and its end; logs envs whose `close` failed."""
        for worker, channel in enumerate(self.channels):
            channel.shut()
            self.knock(worker)
        open_fds = dict(self._by_fd)
        poll = select.poll()
        for fd in open_fds:
            poll.register(fd, select.POLLIN)
        while open_fds and (remaining := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(remaining * 1000):
                try:
                    message = self.channels[open_fds[fd]].receive(deadline)
                except (EOFError, TimeoutError):
                    poll.unregister(fd)
                    del open_fds[fd]
                    continue
                if isinstance(message, _failures.Report) and message.operation == "close":
                    _logger.warning("%s", _failures.to_error(message, worker=open_fds[fd]))


def name_envs(env_ids: Sequence[int]) -> str:
    """Returns the ids in words."""
    if len(env_ids) == 1:
        return f"env {env_ids[0]}"
    if len(env_ids) > 2 and list(env_ids) == list(range(env_ids[0], env_ids[-1] + 1)):
        return f"envs {env_ids[0]} to {env_ids[-1]}"
    return f"envs {', '.join(map(str, env_ids))}"


def _no_knock(worker: int) -> None:
    """Workers that don't serve yet wait at their sockets."""
