"""Supervision of a pool's worker processes: requests, failures, replacements and shutdown.

    ProcessWorkers (process.py)   waits for envs, and calls their methods
      -> Supervisor               -> Launcher (fork.py, spawn.py) starts a worker
      -> control socket           Setup, Attach, Request, Recover
      -> worker.py                -> control socket: Built, Ready, Reply, failure reports, end of file

Step results do not pass through here: workers mark their slots in the segment as completed.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import select
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jaxvec._arguments import Options, select_options
from jaxvec._engine.channel import WAKE, Channel
from jaxvec._engine.dispatch import DEATH_CHECK_INTERVAL, time_left
from jaxvec._envs import failures
from jaxvec._envs.constructors import Description, merge
from jaxvec._envs.slice import Arguments, EnvSettings, MethodName, Slice
from jaxvec._envs.slice_extension import Retirement
from jaxvec._errors import (
    EnvError,
    EnvStateError,
    EnvTimeoutError,
    JaxvecError,
    NotPicklableError,
    NotReadyError,
    PoolClosedError,
    SpaceMismatchError,
    WorkerDiedError,
)
from jaxvec._memory.large_buffers import LargeBuffers
from jaxvec._memory.segment import Arrays, Marks
from jaxvec._native import interrupts
from jaxvec._options import LimitName
from jaxvec._tracing import Loss, Trace
from jaxvec._util import dumps
from jaxvec._workers import protocol
from jaxvec._workers.base import Check, Launcher, Process, WaitLimits
from jaxvec._workers.budget import Budget
from jaxvec._workers.diagnosis import Diagnosis, join, name_envs, take_losses
from jaxvec._workers.fair_locks import FairLocks

_logger = logging.getLogger("jaxvec")

# Any number of threads may send requests and wait for envs at the same time:
# - One thread at a time has a request to a given worker (`_request_locks`). Until it has the reply, only this
#   thread reads that worker's socket. The other sockets are read by the thread that polls.
# - One thread polls at a time (`polling`). Only this thread lets a worker recover, replaces it, or raises the
#   error that ends the pool. So two threads never replace the same worker.
# - A requesting thread sleeps outside of that lock, on the sockets that no other thread reads. So it blocks
#   no poll and loses no message.
# - The polling thread may replace a worker before its request is sent. Under the channel's `sending` lock, it
#   then removes the worker from `_requested`, and the requester checks `_requested` before it sends. So a new
#   worker never gets a request to the old one, and a reply never belongs to another request.

_BROKEN_REPLY_TIMEOUT = 1.0  # seconds for replies from the workers of a broken pool
_COLLECT_TIMEOUT = 0.5  # seconds for further failures to arrive after one that ends the pool
_POLL_INTERVAL = 0.01  # seconds between looks for these
_KILL_TIMEOUT = 10.0  # seconds for the end of a killed worker, which may be stuck in a system call


class Supervisor:
    """The worker processes of one pool, with their control sockets.

    It starts and builds workers, sends them requests, notices failures, and replaces or ends workers. Which
    faults a pool recovers from is up to its `Budget`. Except for `close` and `kill`, a method raises
    `EnvError`, `EnvStateError`, `WorkerDiedError` or `EnvTimeoutError` if that does not cover a failure.
    """

    _description: Description  # from `build` on
    _attach: protocol.Attach  # the message that replacements get, too; from `attach` on

    def __init__(self, recipe: protocol.WorkerRecipe, budget: Budget, launcher: Launcher) -> None:
        """Starts the workers, which then wait for `build`. `close` also closes `launcher`."""
        interrupts.watch()
        self._recipe = recipe
        self._budget = budget
        self._launcher = launcher
        # The polling thread replaces entries of both lists; `kill` reads the processes from any thread. A
        # replaced channel keeps its descriptor number, so that polls remain valid.
        self.processes: list[Process] = []
        self.channels: list[Channel] = []
        # Deadlines in time.monotonic() seconds of replacements that do not serve yet. Guarded by `polling`.
        self.starting: dict[int, float | None] = {}
        # For replacements: options of resets, settings of the envs, and capacity of the span recorder.
        self.options: Options = None
        self.env_settings: EnvSettings | None = EnvSettings(dumps) if recipe.has_fault else None
        self.trace: int | None = None
        self.losses: list[tuple[int, Loss]] = []  # of span records, with the worker, since `trace` was set
        self.incarnations: list[int] = [0] * len(recipe.slices)
        # Reports of workers that are to be replaced, until they have closed their envs; and the workers whose
        # warnings are in the log. Guarded by `polling`.
        self._retiring: dict[int, Retirement] = {}
        self._warned: set[int] = set()
        self.last_errors: list[JaxvecError | None] = [None] * len(recipe.slices)
        # Wakes a serving worker that sleeps on a futex, and so would not notice a message on its socket.
        self.notify_worker: Callable[[int], None] = lambda worker: None
        self._poll_object = select.poll()
        self._worker_by_descriptor: dict[int, int] = {}
        self._request_locks = FairLocks()  # a resource is the index of a worker
        self._poll_lock = FairLocks()  # of one resource, `None`
        # Name of the user's request that each worker has yet to answer, "" for one of the pool's own. A
        # requester adds under `polling`; a replacement removes under `polling` and the channel's `sending`.
        self._requested: dict[int, str] = {}
        # Errors in place of the replies of replaced workers: added under `polling`, taken by the requester.
        self._replaced: dict[int, JaxvecError] = {}
        # Every timeout counts from here, in time.monotonic() seconds, if its operation is older: the time of
        # a recovery is not charged to other operations. Guarded by `polling`.
        self._grace = -math.inf
        self.progress_at: dict[int, float] = {}  # likewise, when a worker has built or completed an env
        recovers = budget.policy is not None
        self.diagnosis: Diagnosis = Diagnosis(recipe.slices, self.processes, recovers=recovers)
        self._segment = -1
        self._buffers = LargeBuffers()  # of the constructors
        self._ending = False  # `kill` or `close` was called, in any thread; set once
        try:
            for worker in range(len(recipe.slices)):
                process, channel = self._launch(worker)
                self.processes.append(process)
                self.channels.append(channel)
                self._worker_by_descriptor[channel.fileno()] = worker
                self._poll_object.register(channel, select.POLLIN)
        except BaseException:
            self.close(timeout=0)
            raise

    def build(self, *, learn_info: bool) -> Description:
        """Builds the envs in all workers, and returns their description once all are known to match."""
        limits = WaitLimits("constructor", self._recipe.config.timeouts, "start", interrupts.since_now())
        setup = partial(protocol.make_setup, self._recipe, learn_info=learn_info, buffers=self._buffers)
        workers = range(len(self.processes))
        replies = self._exchange(workers, setup, limits, descriptors=self._buffers.descriptors)
        self.diagnosis.built.clear()
        descriptions = [pickle.loads(ready.description) for ready in replies.values()]
        self._description = descriptions[0]
        for worker, description in enumerate(descriptions):
            self._merge_spaces(worker, description)
        return self._description

    def attach(self, message: protocol.Attach, segment: int, arrays: Arrays) -> None:
        """Sends the segment to every worker; owns its descriptor from now on. `message` is for worker 0."""
        limits = WaitLimits("attach", self._recipe.config.timeouts, "start", interrupts.since_now())
        self._segment = segment
        self._attach = message
        self.diagnosis.action = message.spec.action
        self.diagnosis.arrays = arrays
        slices = self._recipe.slices
        self._exchange(
            range(len(slices)),
            lambda worker: replace(message, worker=worker, slots=slices[worker]),
            limits,
            descriptors=[segment],
        )

    # --- Requests ------------------------------------------------------------------------------------------

    def request(
        self, method: Callable[..., Any], arguments: Arguments, limit: LimitName, check: Check
    ) -> list[Any]:
        """Calls a method of each slice; see `WorkerGroup.request`."""
        name = method.__name__
        # All arguments are pickled before the first message, so an error leaves every worker unchanged. The
        # rest needs no cloudpickle, which takes three times as long.
        requests = {
            worker: pickle.dumps(protocol.Request(MethodName.of(method), _pickle(name, args)))
            for worker, slots in enumerate(self._recipe.slices)
            if (args := arguments(*slots)) is not None
        }
        with self._request_locks.acquire(*requests):
            interrupt = interrupts.since_now()

            def check_both() -> None:
                interrupt()
                check()

            limits = WaitLimits(name, self._recipe.config.timeouts, limit, check_both)
            replies = self._exchange(requests, requests.__getitem__, limits, name=name)
        workers = range(len(self._recipe.slices))
        return [
            self._unpickle(worker, name, replies[worker]) if worker in replies else None for worker in workers
        ]

    def collect_traces(self) -> list[Trace | JaxvecError]:
        """Returns each worker's trace, or an error, after the pool broke: workers may be dead or hang."""
        workers = range(len(self.processes))
        deadline = time.monotonic() + _BROKEN_REPLY_TIMEOUT
        answers: dict[int, Trace | JaxvecError] = {}
        for worker in set(workers) - self.starting.keys():
            try:
                with suppress(TimeoutError):  # it reads nothing, so it will not answer either
                    self._send(
                        worker, protocol.Request(MethodName.of(Slice.stop_trace), _pickle("", ())), deadline
                    )
            except EOFError:
                answers[worker] = self._died_error(worker)
        deadline = max(deadline, time.monotonic() + _BROKEN_REPLY_TIMEOUT / 10)  # sends may have used it up
        while len(answers) < len(workers) and (seconds := time_left(deadline)):
            for worker in self._readable(self._make_poll(set(workers) - answers.keys()), seconds):
                try:
                    with suppress(TimeoutError):  # a partial message
                        reply = self.channels[worker].receive(deadline)
                        if isinstance(reply, protocol.Reply) and reply.failure is None:
                            answer = pickle.loads(reply.result)
                            if isinstance(answer, Trace):  # not the reply to an earlier request
                                answers[worker] = answer
                except EOFError:
                    answers[worker] = self._died_error(worker)
        for worker in set(workers) - answers.keys():
            answers[worker] = EnvTimeoutError(
                f"worker {worker} did not send its trace after the pool broke",
                env_ids=tuple(range(*self._recipe.slices[worker])),
            )
        return [answers[worker] for worker in workers]

    def _exchange(
        self,
        workers: Collection[int],
        message: Callable[[int], Any],
        limits: WaitLimits,
        *,
        name: str = "",
        descriptors: Sequence[int] = (),
    ) -> dict[int, Any]:
        """Sends each worker its message, and returns its reply or the error for which it was replaced.

        The caller holds the request locks of these workers. `name` names a user's request in error messages.
        """
        try:
            self._register(workers, name, limits)
            for worker in workers:
                self._send_request(worker, message(worker), limits, descriptors)
            return self._gather(workers, limits)
        finally:
            for worker in workers:
                self._requested.pop(worker, None)
                self._replaced.pop(worker, None)

    def _register(self, workers: Collection[int], name: str, limits: WaitLimits) -> None:
        """Reserves the sockets of these workers for the calling thread, once all of them serve."""
        while True:
            with self.polling():
                starting = sorted(self.starting.keys() & workers)
                if not starting:
                    self._requested.update(dict.fromkeys(workers, name))
                    return
                self.poll(0, limits, only=starting)  # a death of another one is an error of this request
                if self.time_left(limits) <= 0:
                    self.time_out(limits, starting)
            self._sleep(starting, limits)

    def _send_request(
        self, worker: int, message: Any, limits: WaitLimits, descriptors: Sequence[int]
    ) -> None:
        try:
            with self.channels[worker].sending:
                if worker in self._requested:
                    self._send(worker, message, limits.late(self._grace), descriptors)
        except EOFError:
            pass  # the next poll replaces it
        except TimeoutError:  # its socket buffer is full: it does not read
            with self.polling():
                if worker in self._requested:
                    self.time_out(limits, [worker])

    def _gather(self, workers: Collection[int], limits: WaitLimits) -> dict[int, Any]:
        replies: dict[int, Any] = {}
        while missing := [worker for worker in workers if worker not in replies]:
            if not self._replaced.keys() & missing:
                self._sleep(missing, limits)
            with self.polling():
                received = self.poll(0, limits, missing)
                # Wakes may be dropped: threads that wait for envs check the slots before they wait for wakes.
                replies |= {
                    worker: reply for worker, reply in received if reply is not WAKE and worker in missing
                }
                for worker in missing:
                    if worker in self._replaced:
                        replies[worker] = self._replaced.pop(worker)
                    elif worker in replies:
                        del self._requested[worker]
                self._answer_retiring(limits.late(self._grace))
                late = [
                    worker
                    for worker in missing
                    if worker in self._requested and self.time_left(limits, worker) <= 0
                ]
                # A message may have come from a recovery, which extends the time.
                if late and not received:
                    self.time_out(limits, late)
        return {worker: replies[worker] for worker in workers}

    def _sleep(self, workers: Collection[int], limits: WaitLimits) -> None:
        """Waits for a message from one of these workers, but never long enough to miss a death."""
        seconds = max(self.time_left(limits, worker) for worker in workers)
        self._make_poll(workers).poll(min(seconds, DEATH_CHECK_INTERVAL) * 1000)

    def _unpickle(self, worker: int, name: str, reply: protocol.Reply | JaxvecError) -> Any:
        if isinstance(reply, JaxvecError):
            return reply
        if reply.failure is not None:
            return failures.to_error(reply.failure, worker=worker)
        try:
            return pickle.loads(reply.result)
        except Exception as error:
            text = f"worker {worker} replied to {name}, but the reply can't be unpickled here: {error}"
            first, _ = self._recipe.slices[worker]
            failure = EnvError(text, env_id=first, worker=worker, operation=name)
            failure.__cause__ = error
            return failure

    # --- Polling -------------------------------------------------------------------------------------------

    def time_left(self, limits: WaitLimits, worker: int | None = None) -> float:
        """Returns the seconds until an operation of a worker times out, or until its caller gives up."""
        return min(time_left(self._late(limits, worker)), time_left(limits.give_up))

    def _late(self, limits: WaitLimits, worker: int | None) -> float | None:
        progress_at = -math.inf if worker is None else self.progress_at.get(worker, -math.inf)
        return limits.late(max(self._grace, progress_at))

    def polling(self) -> AbstractContextManager[None]:
        """Holds the lock under which a thread may call `poll`, `time_out` and `replace`."""
        return self._poll_lock.acquire(None)

    def poll(
        self,
        seconds: float,
        limits: WaitLimits,
        requested: Collection[int] = (),
        only: Collection[int] | None = None,
    ) -> list[tuple[int, Any]]:
        """Waits for wakes and messages, and handles deaths, failure reports and the steps of a start.

        Every wait of the parent calls this, so the death of a worker or the failure of an env either ends the
        wait or is recovered from. It sleeps in `poll(2)`, without the GIL, and lets signal handlers run.
        A message to another thread also ends the sleep. `requested` are workers with replies for the caller;
        `only` are the workers to look at, if not all.
        """
        limits.check()
        received: list[tuple[int, Any]] = []
        others = self._requested.keys() - requested  # their sockets are read by other threads
        if only is not None:
            others |= set(range(len(self.processes))) - set(only)
        readable = [worker for worker in self._readable(self._poll_object, seconds) if worker not in others]
        for worker in readable:
            try:
                deadline = self._late(limits, worker)
                message = self.channels[worker].receive(deadline)
                if isinstance(message, protocol.Built):
                    self._note_built(worker, message)
                elif isinstance(message, Retirement):
                    self._retiring[worker] = message
                elif isinstance(message, protocol.Retired):
                    self._replace_retired(worker)
                elif isinstance(message, failures.Report) and message.operation == "close":
                    _logger.warning("%s", failures.to_error(message, worker=worker))
                elif isinstance(message, failures.Report):
                    self._recover(worker, failures.to_error(message, worker=worker), deadline)
                elif isinstance(message, protocol.Closed):  # of a worker that ends
                    if worker in self._retiring:  # it has all of the time for its next env
                        self._extend_start(worker)
                elif worker in self.starting and message is not WAKE:
                    self._continue_start(worker, message, deadline)
                else:
                    received.append((worker, message))
            except EOFError:
                self.replace(worker, self._died_error(worker))
            except TimeoutError:  # a partial message: the caller sees that no time is left
                return []
        if not readable:
            # An env may have forked a process that keeps a dead worker's socket open.
            for worker, process in enumerate(self.processes):
                # A retired worker may end by itself after its last message.
                if worker not in others and process.ended() and not self.channels[worker].readable():
                    self.replace(worker, self._died_error(worker))
        for worker, start_deadline in [*self.starting.items()]:
            if start_deadline is not None and time.monotonic() >= start_deadline:
                timeout = self._recipe.config.timeouts.start
                late = self.diagnosis.late_start_error(worker, timeout, worker in self._retiring)
                self.replace(worker, late)
        self._answer_retiring(limits.late(self._grace))
        return received

    def collect_errors(
        self, error: EnvError | WorkerDiedError, late: Callable[[], Iterable[int]], limits: WaitLimits
    ) -> None:
        """Collects failures of the workers in `late()` for 0.5 s, and attaches them to `error.others`."""
        errors: dict[int | None, JaxvecError] = {error.worker: error}
        deadline = time.monotonic() + _COLLECT_TIMEOUT
        while (
            missing := [worker for worker in late() if worker not in errors]
        ) and time.monotonic() < deadline:
            limits.check()
            time.sleep(_POLL_INTERVAL)
            for worker in missing:
                try:
                    if self.channels[worker].readable():
                        message = self.channels[worker].receive(deadline)
                        if isinstance(message, failures.Report):
                            errors[worker] = failures.to_error(message, worker=worker)
                    elif self.processes[worker].ended():
                        errors[worker] = self._died_error(worker)
                except EOFError:
                    errors[worker] = self._died_error(worker)
                except TimeoutError:  # a partial message
                    break
        join(errors.values())

    def time_out(
        self, limits: WaitLimits, late: Sequence[int], unfinished: Sequence[int] | None = None
    ) -> None:
        """Replaces late workers, or raises. `unfinished` are their slots, or `None` if they owe replies."""
        if limits.give_up is not None and time.monotonic() >= limits.give_up:
            raise NotReadyError(
                f"{limits.name} was not ready within the timeout; the envs are still pending, so call it "
                "again to continue waiting"
            )
        error = self.diagnosis.late_error(limits, late, unfinished)
        for worker in late:
            self.replace(worker, error)

    # --- Recovery and replacement --------------------------------------------------------------------------

    def replace(self, worker: int, error: JaxvecError) -> None:
        """Kills a worker and starts a replacement, or raises `error` if the pool does not recover from it.

        The replacement builds its envs while other workers continue. It then finds in the segment the slots
        that were dispatched meanwhile.
        """
        if self.diagnosis.arrays is None:
            raise error
        self._check_open()
        losses = take_losses(self.env_settings, range(*self._recipe.slices[worker]))
        self._budget.spend(worker, error, losses)
        self.last_errors[worker] = error
        self._relaunch(worker, error, str(error))

    def _answer_retiring(self, deadline: float | None) -> None:
        """Asks workers that are to be replaced to close their envs, once no request to them is pending."""
        for worker in self._retiring.keys() - self._requested.keys() - self.starting.keys():
            with suppress(EOFError):  # the next poll replaces it
                self._send(worker, protocol.Retire(), deadline)
            self._extend_start(worker)  # from now on, requests wait for the new process

    def _replace_retired(self, worker: int) -> None:
        """Replaces a worker that has closed its envs by a new process, which is no fault."""
        retirement = self._retiring[worker]
        name = self.diagnosis.name(worker)
        losses = take_losses(self.env_settings, range(*self._recipe.slices[worker]))
        _logger.info("%s is recycled, as %s%s", name, retirement.reason, losses)
        if retirement.warning and worker not in self._warned:
            self._warned.add(worker)
            _logger.warning("%s %s", name, retirement.warning)
        self._relaunch(worker, None, "the worker was recycled")

    def _relaunch(self, worker: int, error: JaxvecError | None, loss: str) -> None:
        """Kills a worker, and starts a new process. Raises `error` if that fails.

        `loss` says in the trace why the records of the old process are lost.
        """
        self._check_open()
        if self.trace is not None:
            self.losses.append((worker, Loss(loss, time.monotonic_ns())))
        self.incarnations[worker] += 1
        self._retiring.pop(worker, None)
        self.diagnosis.built.pop(worker, None)
        # `close` takes other lists
        processes = self.processes
        channels = self.channels
        old = processes[worker]
        old.end()
        channels[worker].break_off()  # a thread that is blocked in a send to it gets an EOFError
        with channels[worker].sending:
            if error is not None and self._requested.pop(worker, None) is not None:
                self._replaced[worker] = error
        old.wait(timeout=1)  # a process that is stuck in a system call ends later
        try:
            processes[worker], channel = self._launch(worker)
        except JaxvecError as failed:
            raise failed from error
        channels[worker] = channels[worker].replace(channel)
        # `close` waits for this thread, but not for long, so the pool may have been closed during the launch.
        # `close` first sets `_ending`, and then ends the processes in the list; this thread first puts the
        # process into the list, and then reads `_ending`. So at least one of them ends it.
        if self._ending:
            processes[worker].end()
            processes[worker].wait(_KILL_TIMEOUT)
            self._check_open()
        deadline = self._extend_start(worker)
        with suppress(EOFError):  # the next poll replaces it
            setup = protocol.make_setup(self._recipe, worker, learn_info=False, buffers=self._buffers)
            self._send(worker, setup, deadline, self._buffers.descriptors)

    def _check_open(self) -> None:
        if self._ending:
            raise PoolClosedError("the pool was closed while a worker was replaced")

    def _launch(self, worker: int) -> tuple[Process, Channel]:
        env_ids = tuple(range(*self._recipe.slices[worker]))
        name = self.diagnosis.name(worker)
        try:
            return self._launcher.launch(worker)
        except TimeoutError as error:
            limit = f"{self._recipe.config.timeouts.start} s (Timeouts.start)"
            raise EnvTimeoutError(f"{name} did not start within {limit}: {error}", env_ids=env_ids) from error
        except OSError as error:
            raise WorkerDiedError(
                f"{name} could not be started: {error}", worker=worker, env_ids=env_ids, exitcode=None
            ) from error

    def _recover(self, worker: int, error: EnvError | EnvStateError, deadline: float | None) -> None:
        """Recovers from a failure of an env in a live worker, or raises `error`."""
        # A worker that fails to build an env has ended: it must be replaced.
        if worker in self.starting or self.diagnosis.arrays is None or error.env_id is None:
            self.replace(worker, error)
            return
        rebuild = self._budget.rebuilds
        losses = take_losses(self.env_settings, [error.env_id]) if rebuild else ""
        self._budget.spend(worker, error, losses)
        self._grace = max(self._grace, time.monotonic())
        settings = self.env_settings.of(error.env_id) if rebuild and self.env_settings else None
        self._send(worker, protocol.Recover(rebuild, settings), deadline)

    def _extend_start(self, worker: int) -> float | None:
        """Gives a starting worker all of `Timeouts.start` from now, and returns its deadline."""
        timeout = self._recipe.config.timeouts.start
        deadline = None if timeout is None else time.monotonic() + timeout
        self.starting[worker] = deadline
        self._reset_clocks()
        return deadline

    def _note_built(self, worker: int, message: protocol.Built) -> None:
        """Gives a starting worker all of `Timeouts.start` for its next env."""
        self.diagnosis.built[worker] = message.count, message.total
        self.progress_at[worker] = time.monotonic()
        if worker in self.starting:
            self._extend_start(worker)

    def _continue_start(self, worker: int, message: Any, deadline: float | None) -> None:
        """Handles the two messages of a starting worker: its envs are built, and it serves."""
        if isinstance(message, protocol.Ready):
            self.diagnosis.built.pop(worker, None)
            self._merge_spaces(worker, pickle.loads(message.description))
            arrays = self.diagnosis.arrays
            assert arrays is not None
            first, stop = self._recipe.slices[worker]
            known = self.env_settings
            kept = self._attach.spec.kept_leaves
            replaces = protocol.Replacement(
                select_options(self.options, first, stop),
                self.trace,
                int(Marks.of(arrays).worker_notices[worker, 0]),
                {leaf.path: arrays[leaf.path][first:stop] for leaf in kept if leaf.is_object},
                {
                    slot: settings
                    for slot in range(first, stop)
                    if known and (settings := known.of(slot)) is not None
                },
            )
            attach = replace(self._attach, worker=worker, slots=(first, stop), replaces=replaces)
            self._send(worker, attach, deadline, [self._segment])
            # The full time again: with no thread polling, `Ready` may have been unread for long.
            self._extend_start(worker)
            return
        del self.starting[worker]
        self._reset_clocks()

    def _reset_clocks(self) -> None:
        """Extends all timeouts until the last start."""
        deadlines = [math.inf if deadline is None else deadline for deadline in self.starting.values()]
        self._grace = max(deadlines, default=time.monotonic())

    def _merge_spaces(self, worker: int, description: Description) -> None:
        first = self._recipe.slices[worker][0]
        equal = self._recipe.equal_spaces
        merged = merge(self._description.spaces, description.spaces, first, equal=equal)
        if isinstance(merged, str) or description.mismatch is not None:
            raise SpaceMismatchError(merged if isinstance(merged, str) else description.mismatch)
        self._description = replace(self._description, spaces=merged)

    # --- Shutdown ------------------------------------------------------------------------------------------

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

    def _end(self) -> None:
        # Callbacks run in reverse order, and all of them, even if Ctrl-C interrupts one.
        with ExitStack() as stack:
            if self._segment >= 0:
                stack.callback(os.close, self._segment)
            stack.callback(self._buffers.close)
            stack.callback(self._launcher.close)
            for channel in self.channels:
                stack.callback(channel.close)
            for channel in self.channels:  # ends sends of other threads, which hold a lock that `close` needs
                stack.callback(channel.break_off)
            processes = self.processes
            for process in processes:
                stack.callback(process.wait, timeout=_KILL_TIMEOUT)
            # Runs first: kills each process group, with all that a worker's envs have started. Before the
            # worker is reaped, its pid can't belong to another process.
            for process in processes:
                stack.callback(process.end)
            # A new list, as `kill` may iterate the old one.
            self.processes = []
            self.channels = []
            self._worker_by_descriptor = {}
            self.diagnosis.processes = []
            self.diagnosis.arrays = None
            self._segment = -1
            self.notify_worker = lambda worker: None

    def _dismiss(self, timeout: float | None, *, tell: bool) -> None:
        """Waits until all workers have closed their envs and ended; logs the `close` calls that fail."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker, channel in enumerate(self.channels):
            channel.shut()
            self.notify_worker(worker)
        unclosed = {worker: set(range(*slots)) for worker, slots in enumerate(self._recipe.slices)}
        still_open = set(self._worker_by_descriptor.values())
        while still_open:
            remaining = time_left(deadline)  # before the poll, which then sees messages sent by the deadline
            readable = self._readable(self._make_poll(still_open), min(remaining, DEATH_CHECK_INTERVAL))
            for worker in readable:
                try:
                    message = self.channels[worker].receive(deadline)
                except (EOFError, TimeoutError):
                    still_open.remove(worker)
                    continue
                if isinstance(message, protocol.Closed):
                    unclosed[worker].difference_update(message.env_ids)
                elif isinstance(message, failures.Report) and message.operation == "close":
                    _logger.warning("%s", failures.to_error(message, worker=worker))
            if not readable:
                # An env may have forked a process that keeps a dead worker's socket open.
                still_open -= {
                    worker
                    for worker in still_open
                    if self.processes[worker].ended() and not self.channels[worker].readable()
                }
                if remaining <= 0:
                    break
        for worker in sorted(still_open) if timeout and tell else ():
            late = sorted(unclosed[worker])
            name = f"{name_envs(late) if late else 'spare envs, threads, atexit functions'} (worker {worker})"
            _logger.warning(
                "close of %s was cut off after %s s; close(timeout=None) waits for it", name, timeout
            )

    # --- Messages ------------------------------------------------------------------------------------------

    def _send(
        self, worker: int, message: Any, deadline: float | None, descriptors: Sequence[int] = ()
    ) -> None:
        def notify() -> None:
            if worker not in self.starting:  # those sleep on their sockets
                self.notify_worker(worker)

        self.channels[worker].send(message, deadline=deadline, descriptors=descriptors, notify=notify)

    def _make_poll(self, workers: Iterable[int]) -> select.poll:
        poll = select.poll()
        for worker in workers:
            poll.register(self.channels[worker], select.POLLIN)
        return poll

    def _readable(self, poll: select.poll, seconds: float) -> list[int]:
        """Waits for at most `seconds`, and returns the workers with a message or an end of file."""
        return [self._worker_by_descriptor[descriptor] for descriptor, _ in poll.poll(seconds * 1000)]

    def _died_error(self, worker: int) -> WorkerDiedError:
        return self.diagnosis.died_error(worker, self._requested.get(worker))


def _pickle(name: str, arguments: tuple[Any, ...]) -> bytes:
    return protocol.pickle_given(
        arguments,
        lambda error: NotPicklableError(
            f"{name}: the arguments can't be pickled, so they can't be sent to the workers: {error}; create "
            'them inside the workers (envs.map, Workers(init=...)), or use backend="serial"'
        ),
    )
