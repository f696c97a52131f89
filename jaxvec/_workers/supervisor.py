"""Supervision of a pool's worker processes: requests, failures, replacements and shutdown.

    ProcessWorkers (process.py)   waits for envs, and calls their methods
      -> Supervisor               -> Connections -> Launcher (fork.py, spawn.py) starts a worker
      -> control socket           Setup, Attach, Request, Recover
      -> worker.py                -> control socket: Built, Ready, Reply, failure reports, end of file

Step results do not pass through here: workers mark their slots in the segment as completed.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jaxvec._arguments import Options, select_options
from jaxvec._engine.channel import WAKE
from jaxvec._engine.dispatch import DEATH_CHECK_INTERVAL, time_left
from jaxvec._envs import failures
from jaxvec._envs.constructors import Description, merge
from jaxvec._envs.slice import Arguments, EnvSettings, MethodName, Retirement, Slice
from jaxvec._errors import (
    EnvError,
    EnvStateError,
    JaxvecError,
    NotPicklableError,
    NotReadyError,
    SpaceMismatchError,
    WorkerDiedError,
)
from jaxvec._memory.large_buffers import LargeBuffers
from jaxvec._memory.segment import Arrays, Marks, attach_segment, create_segment
from jaxvec._native import interrupts
from jaxvec._options import LimitName
from jaxvec._tracing import Trace
from jaxvec._util import dumps, logger
from jaxvec._workers import protocol
from jaxvec._workers.base import Check, Launcher, WaitLimits
from jaxvec._workers.budget import Budget
from jaxvec._workers.connections import Connections
from jaxvec._workers.diagnosis import Diagnosis, join, take_losses
from jaxvec._workers.fair_locks import FairLocks

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


class Deadlines:
    """The times at which the operations of workers, and the starts of replacements, are late.

    The time of a start or a recovery is not charged to operations that were waiting meanwhile. All times are
    `time.monotonic()` seconds. Only a thread that holds `Supervisor.polling` changes the fields.

    Attributes:
        start_timeout: Seconds for the start of a replacement with its first env, and for each further env.
        starting: Deadlines of replacements that do not serve yet, by worker.
        progress_at: Times at which workers have built or completed an env, from which its next one counts.
    """

    def __init__(self, start_timeout: float | None) -> None:
        self.start_timeout = start_timeout
        self.starting: dict[int, float | None] = {}
        self.progress_at: dict[int, float] = {}
        self._grace = -math.inf  # every timeout counts from here, if its operation is older

    def late(self, limits: WaitLimits, worker: int | None = None) -> float | None:
        """Returns the time at which an operation, of a worker if it is given, times out."""
        progress_at = -math.inf if worker is None else self.progress_at.get(worker, -math.inf)
        return limits.late(max(self._grace, progress_at))

    def time_left(self, limits: WaitLimits, worker: int | None = None) -> float:
        """Returns the seconds until an operation times out, or until its caller gives up."""
        return min(time_left(self.late(limits, worker)), time_left(limits.give_up))

    def extend_start(self, worker: int) -> float | None:
        """Gives a starting worker all of `start_timeout` from now, and returns its deadline."""
        deadline = None if self.start_timeout is None else time.monotonic() + self.start_timeout
        self.starting[worker] = deadline
        self._extend_operations()
        return deadline

    def note_built(self, worker: int) -> None:
        """Notes that a worker has built an env, and gives a starting one all of the time for the next."""
        self.progress_at[worker] = time.monotonic()
        if worker in self.starting:
            self.extend_start(worker)

    def note_serving(self, worker: int) -> None:
        """Notes that a starting worker serves."""
        del self.starting[worker]
        self._extend_operations()

    def note_recovery(self) -> None:
        """Gives all operations their full time from now."""
        self._grace = max(self._grace, time.monotonic())

    def _extend_operations(self) -> None:
        """Gives all operations their full time from the last start."""
        deadlines = [math.inf if deadline is None else deadline for deadline in self.starting.values()]
        self._grace = max(deadlines, default=time.monotonic())


class Supervisor:
    """Supervision of one pool's workers, by messages on their control sockets.

    It builds workers, sends them requests, notices failures, and replaces workers. `Connections` has their
    processes and sockets, and `Deadlines` their time limits. Which faults a pool recovers from is up to its
    `Budget`. Except for `close`, a method raises `EnvError`, `EnvStateError`, `WorkerDiedError` or
    `EnvTimeoutError` if that does not cover a failure.
    """

    def __init__(self, recipe: protocol.WorkerRecipe, budget: Budget, launcher: Launcher) -> None:
        """Starts the workers, which then wait for `build`. `close` also closes `launcher`."""
        interrupts.watch()
        self._recipe = recipe
        self._budget = budget
        self.deadlines: Deadlines = Deadlines(recipe.config.timeouts.start)
        # For replacements: options of resets, settings of the envs, and capacity of the span recorder.
        self.options: Options = {}
        self.env_settings: EnvSettings | None = EnvSettings(dumps) if recipe.has_fault else None
        self.trace: int | None = None
        self.incarnations: list[int] = [0] * len(recipe.slices)
        # Reports of workers that are to be replaced, until they have closed their envs; and the workers whose
        # warnings are in the log. Guarded by `polling`.
        self._retiring: dict[int, Retirement] = {}
        self._warned: set[int] = set()
        self.last_errors: list[JaxvecError | None] = [None] * len(recipe.slices)
        self._request_locks = FairLocks()  # a resource is the index of a worker
        self._poll_lock = FairLocks()  # of one resource, `None`
        # Name of the user's request that each worker has yet to answer, "" for one of the pool's own. A
        # requester adds under `polling`; a replacement removes under `polling` and the channel's `sending`.
        self._requested: dict[int, str] = {}
        # Errors in place of the replies of replaced workers: added under `polling`, taken by the requester.
        self._replaced: dict[int, JaxvecError] = {}
        self._segment: list[int] = []  # its descriptor, from `attach` to `close`
        self._buffers = LargeBuffers()  # of the constructors
        self.connections: Connections = Connections(recipe, launcher)
        self.diagnosis: Diagnosis = Diagnosis(
            recipe.slices, self.connections.processes, recovers=budget.policy is not None
        )

    def build(self, *, learn_info: bool) -> Description:
        """Builds the envs in all workers, and returns their description once all are known to match."""
        limits = WaitLimits("constructor", self._recipe.config.timeouts, "start", interrupts.since_now())
        setup = partial(protocol.make_setup, self._recipe, learn_info=learn_info, buffers=self._buffers)
        workers = range(len(self._recipe.slices))
        replies = self._exchange(workers, setup, limits, descriptors=self._buffers.descriptors)
        self.diagnosis.built.clear()
        descriptions = [pickle.loads(ready.description) for ready in replies.values()]
        self._description: Description = descriptions[0]
        for worker, description in enumerate(descriptions):
            self._merge_spaces(worker, description)
        return self._description

    def attach(self, message: protocol.Attach) -> Arrays:
        """Creates the segment, sends it to all workers, and returns its arrays. `message` is for worker 0."""
        segment = create_segment(message.layout)
        self._segment.append(segment)
        arrays = attach_segment(segment, message.layout)
        limits = WaitLimits("attach", self._recipe.config.timeouts, "start", interrupts.since_now())
        self._attach: protocol.Attach = message  # which replacements get, too
        self.diagnosis.action = message.spec.action
        self.diagnosis.arrays = arrays
        slices = self._recipe.slices
        self._exchange(
            range(len(slices)),
            lambda worker: replace(message, worker=worker, slots=slices[worker]),
            limits,
            descriptors=self._segment,
        )
        return arrays

    # --- Requests ------------------------------------------------------------------------------------------

    def request(
        self, method: Callable[..., Any], arguments: Arguments, limit: LimitName, check: Check
    ) -> list[Any]:
        """Calls a method of each slice; see `WorkerGroup.request`."""
        name = method.__name__

        def refuse(error: Exception) -> NotPicklableError:
            return NotPicklableError(
                f"{name}: the arguments can't be pickled, so they can't be sent to the workers: {error}; "
                'create them inside the workers (envs.map, Workers(init=...)), or use backend="serial"'
            )

        # All arguments are pickled before the first message, so an error leaves every worker unchanged. The
        # rest needs no cloudpickle, which takes three times as long.
        requests = {
            worker: pickle.dumps(protocol.Request(MethodName.of(method), protocol.pickle_given(args, refuse)))
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

    def collect_traces(self) -> list[Trace | JaxvecError | None]:
        """Returns each worker's trace, or an error, after the pool broke: workers may be dead or hang."""
        workers = range(len(self._recipe.slices))
        deadline = time.monotonic() + _BROKEN_REPLY_TIMEOUT
        answers: dict[int, Trace | JaxvecError] = {}
        request = protocol.Request(MethodName.of(Slice.stop_trace), pickle.dumps(()))
        for worker in set(workers) - self.deadlines.starting.keys():
            with suppress(TimeoutError, EOFError):  # one that reads nothing or has ended will not answer
                self._send(worker, request, deadline)
        deadline = max(deadline, time.monotonic() + _BROKEN_REPLY_TIMEOUT / 10)  # sends may have used it up
        while len(answers) < len(workers) and (seconds := time_left(deadline)):
            for worker in self.connections.poll(seconds, set(workers) - answers.keys()):
                try:
                    with suppress(TimeoutError):  # a partial message
                        reply = self.connections.channels[worker].receive(deadline)
                        if isinstance(reply, protocol.Reply) and reply.failure is None:
                            answer = pickle.loads(reply.result)
                            if isinstance(answer, Trace):  # not the reply to an earlier request
                                answers[worker] = answer
                except EOFError:
                    answers[worker] = self._died_error(worker)
        return [answers.get(worker) for worker in workers]

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
                starting = sorted(self.deadlines.starting.keys() & workers)
                if not starting:
                    self._requested.update(dict.fromkeys(workers, name))
                    return
                self.poll(0, limits, only=starting)  # a death of another one is an error of this request
                if self.deadlines.time_left(limits) <= 0:
                    self.time_out(limits, starting)
            self._sleep(starting, limits)

    def _send_request(
        self, worker: int, message: Any, limits: WaitLimits, descriptors: Sequence[int]
    ) -> None:
        try:
            with self.connections.channels[worker].sending:
                if worker in self._requested:
                    self._send(worker, message, self.deadlines.late(limits), descriptors)
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
                self._answer_retiring(self.deadlines.late(limits))
                late = [
                    worker
                    for worker in missing
                    if worker in self._requested and self.deadlines.time_left(limits, worker) <= 0
                ]
                # A message may have come from a recovery, which extends the time.
                if late and not received:
                    self.time_out(limits, late)
        return {worker: replies[worker] for worker in workers}

    def _sleep(self, workers: Collection[int], limits: WaitLimits) -> None:
        """Waits for a message from one of these workers, but never long enough to miss a death."""
        seconds = max(self.deadlines.time_left(limits, worker) for worker in workers)
        self.connections.poll(min(seconds, DEATH_CHECK_INTERVAL), workers)

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
            others |= set(range(len(self._recipe.slices))) - set(only)
        readable = [worker for worker in self.connections.poll(seconds) if worker not in others]
        for worker in readable:
            try:
                deadline = self.deadlines.late(limits, worker)
                message = self.connections.channels[worker].receive(deadline)
                if isinstance(message, protocol.Built):
                    self.diagnosis.built[worker] = message.count, message.total
                    self.deadlines.note_built(worker)
                elif isinstance(message, Retirement):
                    self._retiring[worker] = message
                elif isinstance(message, protocol.Retired):
                    self._replace_retired(worker)
                elif isinstance(message, failures.Report) and message.operation == "close":
                    logger.warning("%s", failures.to_error(message, worker=worker))
                elif isinstance(message, failures.Report):
                    self._recover(worker, failures.to_error(message, worker=worker), deadline)
                elif isinstance(message, protocol.Closed):  # of a worker that ends
                    if worker in self._retiring:  # it has all of the time for its next env
                        self.deadlines.extend_start(worker)
                elif worker in self.deadlines.starting and message is not WAKE:
                    self._continue_start(worker, message, deadline)
                else:
                    received.append((worker, message))
            except EOFError:
                self.replace(worker, self._died_error(worker))
            except TimeoutError:  # a partial message: the caller sees that no time is left
                return []
        if not readable:
            for worker in set(range(len(self._recipe.slices))) - others:
                if self.connections.has_ended(worker):
                    self.replace(worker, self._died_error(worker))
        for worker, start_deadline in [*self.deadlines.starting.items()]:
            if start_deadline is not None and time.monotonic() >= start_deadline:
                timeout = self.deadlines.start_timeout
                late = self.diagnosis.late_start_error(worker, timeout, worker in self._retiring)
                self.replace(worker, late)
        self._answer_retiring(self.deadlines.late(limits))
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
                    if self.connections.channels[worker].ready():
                        message = self.connections.channels[worker].receive(deadline)
                        if isinstance(message, failures.Report):
                            errors[worker] = failures.to_error(message, worker=worker)
                    elif self.connections.has_ended(worker):
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
        self.connections.check_open()
        losses = take_losses(self.env_settings, range(*self._recipe.slices[worker]))
        self._budget.spend(worker, error, losses)
        self.last_errors[worker] = error
        self._relaunch(worker, error)

    def _answer_retiring(self, deadline: float | None) -> None:
        """Asks workers that are to be replaced to close their envs, once no request to them is pending."""
        for worker in self._retiring.keys() - self._requested.keys() - self.deadlines.starting.keys():
            with suppress(EOFError):  # the next poll replaces it
                self._send(worker, protocol.Retire(), deadline)
            self.deadlines.extend_start(worker)  # from now on, requests wait for the new process

    def _replace_retired(self, worker: int) -> None:
        """Replaces a worker that has closed its envs by a new process, which is no fault."""
        retirement = self._retiring[worker]
        name = self.diagnosis.name(worker)
        losses = take_losses(self.env_settings, range(*self._recipe.slices[worker]))
        logger.info("%s is recycled, as %s%s", name, retirement.reason, losses)
        if retirement.warning and worker not in self._warned:
            self._warned.add(worker)
            logger.warning("%s %s", name, retirement.warning)
        self._relaunch(worker, None)

    def _relaunch(self, worker: int, error: JaxvecError | None) -> None:
        """Kills a worker, and starts a new process. Raises `error` if that fails."""
        self.incarnations[worker] += 1
        self._retiring.pop(worker, None)
        self.diagnosis.built.pop(worker, None)

        def release() -> None:
            if error is not None and self._requested.pop(worker, None) is not None:
                self._replaced[worker] = error

        try:
            self.connections.replace(worker, release)
        except JaxvecError as failed:
            raise failed from error
        deadline = self.deadlines.extend_start(worker)
        with suppress(EOFError):  # the next poll replaces it
            setup = protocol.make_setup(self._recipe, worker, learn_info=False, buffers=self._buffers)
            self._send(worker, setup, deadline, self._buffers.descriptors)

    def _recover(self, worker: int, error: EnvError | EnvStateError, deadline: float | None) -> None:
        """Recovers from a failure of an env in a live worker, or raises `error`."""
        # A worker that fails to build an env has ended: it must be replaced.
        if worker in self.deadlines.starting or self.diagnosis.arrays is None or error.env_id is None:
            self.replace(worker, error)
            return
        settings = self._budget.spend_on_env(worker, error.env_id, error, self.env_settings)
        self.deadlines.note_recovery()
        self._send(worker, protocol.Recover(self._budget.rebuilds, settings), deadline)

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
            self._send(worker, attach, deadline, self._segment)
            # The full time again: with no thread polling, `Ready` may have been unread for long.
            self.deadlines.extend_start(worker)
            return
        self.deadlines.note_serving(worker)

    def _merge_spaces(self, worker: int, description: Description) -> None:
        first = self._recipe.slices[worker][0]
        equal = self._recipe.equal_spaces
        merged = merge(self._description.spaces, description.spaces, first, equal=equal)
        if isinstance(merged, str) or description.mismatch is not None:
            raise SpaceMismatchError(merged if isinstance(merged, str) else description.mismatch)
        self._description = replace(self._description, spaces=merged)

    # --- Shutdown and messages -----------------------------------------------------------------------------

    def close(self, timeout: float | None, *, tell: bool = True) -> None:
        """Closes the envs, and kills workers that need more than `timeout` seconds; see `WorkerGroup`."""
        with ExitStack() as stack:  # also after Ctrl-C
            stack.callback(self._forget)
            stack.callback(self._buffers.close)
            self.connections.close(timeout, tell=tell)

    def _forget(self) -> None:
        self.diagnosis.processes = []
        self.diagnosis.arrays = None
        while self._segment:
            os.close(self._segment.pop())

    def _send(
        self, worker: int, message: Any, deadline: float | None, descriptors: Sequence[int] = ()
    ) -> None:
        # First, because a message longer than the socket's buffer is only sent while the worker reads.
        if worker not in self.deadlines.starting:  # those sleep on their sockets
            self.connections.notify_worker(worker)
        self.connections.channels[worker].send(message, deadline=deadline, descriptors=descriptors)

    def _died_error(self, worker: int) -> WorkerDiedError:
        return self.diagnosis.died_error(worker, self._requested.get(worker))
