"""The supervisor of worker processes: requests, failures, restarts."""

from __future__ import annotations

import logging
import math
import os
import pickle
import select
import threading
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxvec._arguments import Options, select_options
from jaxvec._config import Budget
from jaxvec._dispatch.channel import WAKE, ParentChannel
from jaxvec._dispatch.dispatch import DEATH_CHECK_INTERVAL, time_left
from jaxvec._dispatch.move import Verb, verbs_of
from jaxvec._envs import failures
from jaxvec._envs.constructors import Description, compare
from jaxvec._envs.slice import Arguments, EnvSettings, RequestName, SlotSettings
from jaxvec._errors import (
    EnvError,
    EnvStateError,
    EnvTimeoutError,
    JaxvecError,
    NotPicklableError,
    NotReadyError,
    SpaceMismatchError,
    WorkerDiedError,
)
from jaxvec._memory.rows import reader
from jaxvec._memory.segment import Arrays, Marks
from jaxvec._native import interrupts
from jaxvec._spec import PoolSpec
from jaxvec._tracing import Loss, Record
from jaxvec._util import dumps
from jaxvec._workers.base import Launcher, Patience, Process, Slices
from jaxvec._workers.worker import (
    Attach,
    Closed,
    Ready,
    Recover,
    Replacement,
    Reply,
    Request,
    WorkerRecipe,
    make_setup,
    pack,
    pickle_given,
)

# ----------------------------------------------------------------------------------------------------------
# Who comes first, is first: for what one thread at a time may do, while others go on with other things.
# ----------------------------------------------------------------------------------------------------------


class FairLocks:
    """Lets threads have things for a while, each in the order in which they asked for it.

    Who needs several gets them at once, and whoever came later waits for those alone that it needs, too: so
    nobody has one thing and waits for another, and nobody is overtaken for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[int, frozenset[Hashable]]] = []  # threads, and what each has or waits for

    @contextmanager
    def acquire(self, *things: Hashable) -> Generator[None]:
        """Waits until nobody who came before needs any of the things, which are this thread's in the block.

        A thread does not wait for itself: it is asked from a signal handler.
        """
        me = threading.get_ident()
        entry = me, frozenset(things)

        def is_next() -> bool:
            for each in self._queue:
                if each is entry:
                    break
                thread, others = each
                if thread != me and not others.isdisjoint(entry[1]):
                    return False
            return True

        try:  # first: an interrupt may come between entering and our knowing of it
            with self._changed:
                self._queue.append(entry)
                while not is_next():
                    self._changed.wait()
            yield
        finally:
            with self._changed:
                self._queue = [each for each in self._queue if each is not entry]
                if self._queue:
                    self._changed.notify_all()


# ----------------------------------------------------------------------------------------------------------
# What can be told of workers that died or are late, in the errors' words.
# ----------------------------------------------------------------------------------------------------------

_logger = logging.getLogger("jaxvec")

_DOING: dict[int, str] = {Verb.SAVE: "being saved", Verb.RESTORE: "being restored"}


class Diagnosis:
    """Looks at the segment to say what workers are at.

    Attributes:
        arrays: of the segment; `None` until the workers serve, and once they are ended.
    """

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self.arrays: Arrays | None = None

    def attach(self, spec: PoolSpec, arrays: Arrays) -> None:
        """Makes the segment known."""
        self._action, self.arrays = spec.action, arrays

    def forget(self) -> None:
        """Lets the segment go: the workers are ended."""
        self.arrays = None

    def name(self, worker: int) -> str:
        """Returns a worker and its envs in words."""
        return f"worker {worker} ({name_envs(range(*self._slices[worker]))})"

    def worker_of(self, slot: int) -> int:
        """Returns the worker that holds a slot."""
        return next(w for w, (first, stop) in enumerate(self._slices) if first <= slot < stop)

    def running(self, slots: Iterable[int]) -> str:
        """Says which of `slots` are inside their env's code now, and what for."""
        if self.arrays is None:
            return ""
        marks = Marks.of(self.arrays)
        inside = marks.running[:, 0].tolist()
        running = np.array([slot for slot in slots if slot + 1 in inside], np.intp)
        actions = reader(self._action, self.arrays)(running)
        verbs = verbs_of(marks.requested[running]).tolist()
        return ", ".join(
            f"env {slot} (worker {self.worker_of(slot)}) is {_DOING.get(verb, 'running')}"
            + (f", last action {failures.describe_action(action)}" if verb == Verb.STEP else "")
            for slot, action, verb in zip(running.tolist(), actions, verbs, strict=True)
        )

    def died(self, worker: int, process: Process, *, asked: str | None) -> WorkerDiedError:
        """Returns the error of a worker that has ended; `asked` is the method it was asked for, if any."""
        exitcode, ending = process.ending()
        env_ids = tuple(range(*self._slices[worker]))
        doing = self.running(env_ids) or (f"answering {asked}" if asked else "idle or starting")
        return WorkerDiedError(
            f"{self.name(worker)} {ending} while {doing}; its standard error may tell more",
            worker=worker,
            env_ids=env_ids,
            exitcode=exitcode,
        )

    def late_start(self, worker: int, process: Process, timeout: float | None) -> EnvTimeoutError:
        """Returns the error of a worker that took another's place and has not started in time."""
        where = process.place and f": it is {process.place}"
        return EnvTimeoutError(
            f"{self.name(worker)} took another's place, but did not start within "
            f"Timeouts.start, {timeout} s{where}",
            env_ids=tuple(range(*self._slices[worker])),
        )

    def late(
        self,
        patience: Patience,
        workers: Sequence[int],
        processes: Sequence[Process],
        unfinished: Sequence[int] | None,
    ) -> EnvTimeoutError:
        """Returns the error of an operation that took too long.

        Args:
            patience: of the operation.
            workers: that hold it up.
            processes: of all workers.
            unfinished: those of their slots that it waits for; `None` if it waits for their answers.
        """
        elsewhere = _silent(workers, processes)
        if unfinished is None:
            env_ids = tuple(slot for worker in workers for slot in range(*self._slices[worker]))
            doing = f"the workers of {name_envs(env_ids)} have not answered" + (
                elsewhere and f": {elsewhere}"
            )
        else:
            env_ids = tuple(unfinished)
            running = self.running(env_ids) or elsewhere or "no env is running"
            doing = f"{running}; unfinished: {name_envs(env_ids)}"
        return EnvTimeoutError(
            f"{patience.name} timed out after {patience.timeout} s: {doing}", env_ids=env_ids
        )


def _silent(workers: Iterable[int], processes: Sequence[Process]) -> str:
    """Says which of `workers`, who are late, are on other machines, and where."""
    return ", ".join(
        f"worker {worker} {place} has not answered"
        for worker in workers
        if (place := processes[worker].place)
    )


def join(errors: Iterable[JaxvecError]) -> JaxvecError:
    """Returns the first of the errors of one operation; it then tells of the others, which are logged."""
    first, *others = dict.fromkeys(errors)  # late workers share one
    first.others = tuple(others)
    for other in others:
        _logger.error("failed at the same time: %s", str(other).partition("\n")[0])
    if others:
        what, *traceback = str(first).split("\n")
        more = f"Failed at the same time: {len(others)} more, see `others` and the log."
        first.args = ("\n".join([what, more, *traceback]),)
    return first


def check_all(answers: list[Any]) -> list[Any]:
    """Returns the answers of a request; raises the first error among them, which tells of the others."""
    errors = [answer for answer in answers if isinstance(answer, JaxvecError)]
    if errors:
        raise join(errors)
    return answers


def tell_lost(told: EnvSettings | None, slots: Collection[int]) -> str:
    """Says what the new envs in `slots` can't be told, as it will be lost, and which have a saved state."""
    if told is None:
        return ""
    saved = told.saved(slots)
    lost = told.forget_calls({*slots} - {*saved})
    kept = f" ({name_envs(saved)} can go on from saved states)" if saved else ""
    return kept + (f" (what call or map may have changed in {name_envs(lost)} is lost)" if lost else "")


def name_envs(env_ids: Sequence[int]) -> str:
    """Returns the ids in words."""
    if len(env_ids) == 1:
        return f"env {env_ids[0]}"
    if len(env_ids) > 2 and list(env_ids) == list(range(env_ids[0], env_ids[-1] + 1)):
        return f"envs {env_ids[0]} to {env_ids[-1]}"
    return f"envs {', '.join(map(str, env_ids))}"


# ----------------------------------------------------------------------------------------------------------
# Starts, asks, watches, replaces and ends worker processes; whatever fails there is a typed error.
#
# Several threads may ask, and wait for envs, at a time.
#
# - Of each worker one thread asks at a time (`_askers`), which alone reads that control socket until it has
#   the answer. What comes on the other sockets concerns all, and is read by whoever looks.
# - One thread looks at a time (`polling`). All that becomes of a worker is decided by who looks: that it
#   goes on after a failure, is replaced, or ends the pool. So no two threads replace a worker.
# - Who asks sleeps before it looks, at the sockets that nobody else reads. So it holds nobody up, and
#   nothing that it waits for is taken from it. Remote workers share a descriptor: there it also wakes for
#   what others have yet to read, who have woken, too.
# - A worker may be replaced by another thread before it gets its request. Whoever replaces it strikes it
#   from `_asked`; who asks looks there before it sends. Both have the channel's `sending` meanwhile. So a
#   request is for the worker that was asked, or is not sent, and its answer can't pass for another
#   question's.
# ----------------------------------------------------------------------------------------------------------

_BROKEN_REPLY_TIMEOUT = 1.0  # seconds that the workers of a broken pool have to answer
_COLLECT_TIMEOUT = 0.5  # seconds after a failure that ends the pool, for others to be heard of
_POLL_INTERVAL = 0.01  # between looks for workers that are done by then
_KILL_TIMEOUT = (
    10.0  # seconds that a killed worker has to end; one that is stuck in the kernel goes when it can
)


class Supervisor:
    """The worker processes of one pool. `close()` ends them, whatever state they are in.

    Attributes:
        channels: the control socket to each worker, or what stands for it; the descriptor stays the same.
        starting: workers that take another's place and are not ready yet; by when they have to be, if ever.
        options: what resets pass to the envs; for workers that take another's place.
        env_settings: what envs were told, if the pool goes on after faults.
        trace: how many spans each worker records, if any; for those, too.
        losses: what spans are lost with workers that were replaced since `trace` was set.
        incarnations: how often each worker was replaced.
        last_errors: by what error it was last, if it was.
        notify_worker: tells a worker that serves that a message is on its socket.
    """

    def __init__(self, recipe: WorkerRecipe, budget: Budget, launcher: Launcher) -> None:
        """Starts the workers, which wait for `build`, and closes `launcher` in the end."""
        interrupts.watch()
        self._recipe = recipe
        self._budget = budget
        self._launcher = launcher
        self._processes: list[Process] = []
        self.channels: list[ParentChannel] = []
        self.starting: dict[int, float | None] = {}
        self.options: Options = None
        self.env_settings = EnvSettings(budget.policy, dumps) if budget.policy else None
        self.trace: int | None = None
        self.incarnations = [0] * len(recipe.slices)
        self.last_errors: list[JaxvecError | None] = [None] * len(recipe.slices)
        self.losses: list[tuple[int, Loss]] = []
        self.notify_worker: Callable[[int], None] = _no_notice
        self._poll_object = select.poll()
        self._by_fd: dict[int, list[int]] = {}  # the workers whose channels have a descriptor
        self._askers = FairLocks()  # at workers
        self._pollers = FairLocks()
        self._asked: dict[int, str] = {}  # the workers that have yet to answer, and what
        self._replaced: dict[int, JaxvecError] = {}  # the errors that are the answers of those that are gone
        self._grace = -math.inf  # until when nobody is late, in time.monotonic() seconds
        self._attach: Attach | None = None  # to a worker's place; None until the workers serve
        self._description: Description | None = None
        self._diagnosis = Diagnosis(recipe.slices)
        self._segment = -1
        try:
            for worker in range(len(recipe.slices)):
                process, channel = self._launch(worker)
                self._processes.append(process)
                self.channels.append(channel)
                self._by_fd.setdefault(channel.fileno(), []).append(worker)
                self._poll_object.register(channel, select.POLLIN)
        except BaseException:
            self.close(timeout=0)
            raise

    def build(self, *, learn_info: bool) -> Description:
        """Lets the workers build their envs, and returns what all of them say of these; raises as `poll`."""
        patience = self._patience("constructor", self._recipe.config.timeouts.start)
        setup = partial(make_setup, self._recipe, learn_info=learn_info)
        said = self._exchange(range(len(self._processes)), setup, patience)
        descriptions = [pickle.loads(ready.description) for ready in said.values()]
        self._description = descriptions[0]
        for worker, description in enumerate(descriptions):
            self._check_equal(worker, description)
        return descriptions[0]

    def attach(self, message: Attach, segment: int, arrays: Arrays) -> None:
        """Gives every worker the segment, whose descriptor is ours from now on; raises as `poll`.

        Args:
            message: as worker 0 gets it.
            segment: the descriptor.
            arrays: our own view of it.
        """
        patience = self._patience("attach", self._recipe.config.timeouts.start)
        self._segment, self._attach = segment, message
        self._diagnosis.attach(message.spec, arrays)
        slices = self._recipe.slices
        self._exchange(
            range(len(slices)),
            lambda worker: replace(message, worker=worker, slots=slices[worker]),
            patience,
            descriptors=[segment],
        )

    def ask(
        self, name: RequestName, arguments: Arguments, timeout: float | None, check: Callable[[], None]
    ) -> list[Any]:
        """Calls a method of each slice; see `Workers.request`."""
        each = [arguments(*slots) for slots in self._recipe.slices]
        requests = {
            worker: pack(Request(name, _pickle(name, mine)))
            for worker, mine in enumerate(each)
            if mine is not None
        }
        with self._askers.acquire(*requests):
            patience = self._patience(name, timeout, check)
            replies = self._exchange(
                requests, requests.__getitem__, patience, question=name.removesuffix("_states")
            )
        return [
            self._open(worker, name, replies[worker]) if worker in replies else None
            for worker in range(len(each))
        ]

    def collect_traces(self) -> list[Record | JaxvecError]:
        """Asks each worker for its record, when some may be dead, or hang, and none is replaced any more."""
        workers = range(len(self._processes))
        deadline = time.monotonic() + _BROKEN_REPLY_TIMEOUT
        answers: dict[int, Record | JaxvecError] = {}
        for worker in set(workers) - self.starting.keys():
            try:
                self._tell(worker, Request("stop_trace", _pickle("stop_trace", ())), deadline)
            except EOFError:
                answers[worker] = self._died(worker)
            except TimeoutError:  # then it does not answer either
                pass
        deadline = max(deadline, time.monotonic() + _BROKEN_REPLY_TIMEOUT / 10)  # they may have used it up
        while len(answers) < len(workers) and (seconds := time_left(deadline)):
            for worker in self._readable(self._poll_of(set(workers) - answers.keys()), seconds):
                try:
                    said = self.channels[worker].receive(deadline)
                    if isinstance(said, Reply) and said.failure is None:
                        answer = pickle.loads(said.result)
                        if isinstance(answer, Record):  # not an answer to another question
                            answers[worker] = answer
                except EOFError:
                    answers[worker] = self._died(worker)
                except TimeoutError:
                    pass
        for worker in set(workers) - answers.keys():
            answers[worker] = EnvTimeoutError(
                f"worker {worker} did not answer after the pool broke",
                env_ids=tuple(range(*self._recipe.slices[worker])),
            )
        return [answers[worker] for worker in workers]

    def time_left(self, patience: Patience) -> float:
        """Returns the seconds until an operation is late, or its caller has waited long enough."""
        return min(time_left(patience.late(self._grace)), time_left(patience.give_up))

    def polling(self) -> AbstractContextManager[None]:
        """Waits until nobody looks who came before; then this thread may `poll`, `time_out` and `replace`."""
        return self._pollers.acquire(None)

    def poll(self, seconds: float, patience: Patience, asking: Collection[int] = ()) -> list[tuple[int, Any]]:
        """Waits for wakes and messages, for at most `seconds`, and returns them with their workers.

        Every wait of the parent comes by here, so a worker's death or an env's failure ends it, or is
        recovered from. It sleeps in `poll`, without the GIL, and lets signal handlers run.

        Args:
            seconds: how long it may sleep; a message to another thread ends that, too, which looks next.
            patience: of the operation.
            asking: workers whose answers are the caller's.

        Raises:
            EnvError, WorkerDiedError: it can't be recovered from.
        """
        patience.check()
        deadline = patience.late(self._grace)
        heard: list[tuple[int, Any]] = []
        others = self._asked.keys() - asking
        for worker in self._readable(self._poll_object, seconds):
            if worker in others:
                continue
            try:
                message = self.channels[worker].receive(deadline)
                if isinstance(message, failures.Report):
                    self._recover(worker, failures.to_error(message, worker=worker), deadline)
                elif worker in self.starting and message is not WAKE:
                    self._go_on_starting(worker, message, deadline)
                else:
                    heard.append((worker, message))
            except EOFError:
                self.replace(worker, self._died(worker))
            except TimeoutError:  # it came in part: the caller sees that no time is left
                return []
        if not heard:
            # An env may have forked a process that keeps a dead worker's socket open.
            for worker, process in enumerate(self._processes):
                if worker not in others and process.ended():
                    self.replace(worker, self._died(worker))
        self._replace_late_starters()
        return heard

    def collect_errors(
        self, error: EnvError | WorkerDiedError, late: Callable[[], Iterable[int]], patience: Patience
    ) -> None:
        """Hears for a short time what else fails, and lets the error that ends the pool tell of it.

        Args:
            error: what is known.
            late: returns the workers that the operation waits for.
            patience: of the operation.
        """
        errors: dict[int | None, JaxvecError] = {error.worker: error}
        deadline = time.monotonic() + _COLLECT_TIMEOUT
        while (missing := [each for each in late() if each not in errors]) and time.monotonic() < deadline:
            patience.check()
            time.sleep(_POLL_INTERVAL)
            said = [worker for worker in missing if self.channels[worker].readable()]
            for worker in missing:
                try:
                    message = self.channels[worker].receive(deadline) if worker in said else WAKE
                except EOFError:
                    errors[worker] = self._died(worker)
                except TimeoutError:  # it came in part
                    break
                else:
                    if isinstance(message, failures.Report):
                        errors[worker] = failures.to_error(message, worker=worker)
                    elif worker not in said and self._processes[worker].ended():
                        errors[worker] = self._died(worker)
        join(errors.values())

    def time_out(
        self, patience: Patience, late: Sequence[int], unfinished: Sequence[int] | None = None
    ) -> None:
        """Raises what took too long, unless the workers that hold it up can be replaced.

        Args:
            patience: that is over.
            late: the workers.
            unfinished: those of their slots that are waited for; `None` if it is for their answers.
        """
        if patience.give_up is not None and time.monotonic() >= patience.give_up:
            raise NotReadyError(
                f"{patience.name}: not ready within the timeout; the envs are still in flight, so call it "
                "again to go on waiting"
            )
        error = self._diagnosis.late(patience, late, self._processes, unfinished)
        for worker in late:
            self.replace(worker, error)

    def replace(self, worker: int, error: JaxvecError) -> None:
        """Ends a worker and starts another in its place, if the pool goes on; else raises `error`.

        The new one builds its envs while others work. What its place is asked for in the meantime, it
        finds in the segment.
        """
        if self._diagnosis.arrays is None:
            raise error
        self._budget.spend(worker, error, tell_lost(self.env_settings, range(*self._recipe.slices[worker])))
        self.losses.append((worker, Loss(str(error), time.monotonic_ns())))
        self.incarnations[worker] += 1
        self.last_errors[worker] = error
        old = self._processes[worker]
        old.end()
        self.channels[worker].break_off()  # whoever is still sending to it stops
        with self.channels[worker].sending:
            if self._asked.pop(worker, None) is not None:
                self._replaced[worker] = error
        old.wait(timeout=1)  # if it is stuck in the kernel, it goes when it can
        try:
            self._processes[worker], channel = self._launch(worker)
        except ConnectionError as lost:
            raise error from lost
        except JaxvecError as failed:
            raise failed from error
        self.channels[worker] = self.channels[worker].replace(channel)
        deadline = self._allow_start(worker)
        with suppress(EOFError):  # the next look will tell
            self._tell(worker, make_setup(self._recipe, worker, learn_info=False), deadline)

    def _launch(self, worker: int) -> tuple[Process, ParentChannel]:
        try:
            return self._launcher.launch(worker)
        except ConnectionError:
            raise
        except OSError as error:
            env_ids, who = tuple(range(*self._recipe.slices[worker])), self._diagnosis.name(worker)
            if isinstance(error, TimeoutError):
                limit = f"Timeouts.start, {self._recipe.config.timeouts.start} s"
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

    def close(self, timeout: float | None, *, tell: bool = True) -> None:
        """Ends the workers: politely for `timeout` seconds, so that envs can close; then by SIGKILL.

        `tell` whose close that cuts off.
        """
        try:
            self._dismiss(timeout, tell=tell)
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
                stack.callback(process.wait, timeout=_KILL_TIMEOUT)
            # The last is the first. The whole group goes: with a worker that won't end, whatever its envs
            # have started. Only then is it reaped, so its pid can't have been given to another process.
            for process in self._processes:
                stack.callback(process.end)
            self._processes, self.channels, self._by_fd = [], [], {}
            self._diagnosis.forget()
            self._segment, self.notify_worker = -1, _no_notice

    def ahead(self, worker: int) -> int:
        """Returns how far a worker's monotonic clock is ahead of ours, in ns."""
        return self._processes[worker].ahead

    def worker_of(self, slot: int) -> int:
        """Returns the worker that holds a slot."""
        return self._diagnosis.worker_of(slot)

    def _patience(
        self, name: str, timeout: float | None, check: Callable[[], None] = lambda: None
    ) -> Patience:
        interrupt = interrupts.since_now()

        def check_all() -> None:
            interrupt()
            check()

        return Patience(name, timeout, check_all)

    def _exchange(
        self,
        workers: Collection[int],
        message: Callable[[int], Any],
        patience: Patience,
        *,
        question: str = "",
        descriptors: Sequence[int] = (),
    ) -> dict[int, Any]:
        """Sends a message to each of these workers, and waits for what it says to it; raises as `poll`.

        Args:
            workers: whom nobody else asks meanwhile.
            message: for a worker.
            patience: of the operation.
            question: what is asked, as users call it, if a user asks.
            descriptors: that go with each message.

        Returns:
            The answers; of a worker that was replaced, the error that took its place.
        """
        try:
            self._note_asked(workers, question, patience)
            for worker in workers:
                self._send(worker, message(worker), patience, descriptors)
            return self._gather(workers, patience)
        finally:
            for worker in workers:
                self._asked.pop(worker, None)
                self._replaced.pop(worker, None)

    def _note_asked(self, workers: Collection[int], question: str, patience: Patience) -> None:
        """Waits until all of these workers serve, and keeps others from reading what they say."""
        while True:
            with self.polling():
                starting = sorted(self.starting.keys() & workers)
                if not starting:
                    self._asked.update(dict.fromkeys(workers, question))
                    return
                self.poll(0, patience)
                if self.time_left(patience) <= 0:
                    self.time_out(patience, starting)
            self._sleep(starting, patience)

    def _send(self, worker: int, message: Any, patience: Patience, descriptors: Sequence[int]) -> None:
        try:
            with self.channels[worker].sending:
                if worker in self._asked:
                    self._tell(worker, message, patience.late(self._grace), descriptors)
        except EOFError:
            pass  # the next look will tell
        except TimeoutError:  # its buffer is full: it does not read
            with self.polling():
                if worker in self._asked:
                    self.time_out(patience, [worker])

    def _gather(self, workers: Collection[int], patience: Patience) -> dict[int, Any]:
        """Waits for one message from each of these workers, or the error of one that was replaced instead."""
        messages: dict[int, Any] = {}
        while missing := [worker for worker in workers if worker not in messages]:
            if not self._replaced.keys() & missing:
                self._sleep(missing, patience)
            with self.polling():
                heard = self.poll(0, patience, missing)
                # Who waits for envs in flight looks at their slots before it listens for wakes.
                messages |= {worker: said for worker, said in heard if said is not WAKE and worker in missing}
                for worker in missing:
                    if worker in self._replaced:
                        messages[worker] = self._replaced.pop(worker)
                    elif worker in messages:
                        del self._asked[worker]
                late = [worker for worker in missing if worker in self._asked]
                if late and not heard and self.time_left(patience) <= 0:  # what was seen may have moved it
                    self.time_out(patience, late)
        return {worker: messages[worker] for worker in workers}

    def _sleep(self, workers: Collection[int], patience: Patience) -> None:
        """Waits until one of these workers says something; for a short time, within that of the operation."""
        self._poll_of(workers).poll(min(self.time_left(patience), DEATH_CHECK_INTERVAL) * 1000)

    def _open(self, worker: int, name: str, reply: Reply | JaxvecError) -> Any:
        if isinstance(reply, JaxvecError):
            return reply
        if reply.failure is not None:
            return failures.to_error(reply.failure, worker=worker)
        try:
            return pickle.loads(reply.result)
        except Exception as error:
            first, _ = self._recipe.slices[worker]
            failure = EnvError(
                f"worker {worker} answered {name}, but the answer can't be unpickled here: {error}",
                env_id=first,
                worker=worker,
                operation=name,
            )
            failure.__cause__ = error
            return failure

    def _poll_of(self, workers: Iterable[int]) -> select.poll:
        poll = select.poll()
        for worker in workers:
            poll.register(self.channels[worker], select.POLLIN)
        return poll

    def _readable(self, poll: select.poll, seconds: float) -> list[int]:
        """Waits for at most `seconds`, and returns the workers that have said something."""
        said = [self._by_fd[fd] for fd, _ in poll.poll(seconds * 1000)]
        # Where several share a descriptor, it does not say who.
        return [
            worker
            for workers in said
            for worker in workers
            if len(workers) == 1 or self.channels[worker].readable()
        ]

    def _recover(self, worker: int, error: EnvError | EnvStateError, deadline: float | None) -> None:
        """Lets a worker go on after a failure of its env, if the pool goes on; else raises `error`."""
        if (
            worker in self.starting or self._diagnosis.arrays is None or error.env_id is None
        ):  # it could not build the env, and has ended
            self.replace(worker, error)
            return
        rebuild = self._budget.rebuilds
        self._budget.spend(worker, error, tell_lost(self.env_settings, [error.env_id]) if rebuild else "")
        self._grace = max(self._grace, time.monotonic())
        settings = self._settings(error.env_id) if rebuild else None
        self._tell(worker, Recover(rebuild, settings), deadline)

    def _allow_start(self, worker: int) -> float | None:
        """Gives a worker that takes another's place all of `Timeouts.start`; returns when that is over."""
        timeout = self._recipe.config.timeouts.start
        deadline = None if timeout is None else time.monotonic() + timeout
        self.starting[worker] = deadline
        self._grace = math.inf if deadline is None else deadline
        return deadline

    def _replace_late_starters(self) -> None:
        for worker, deadline in [*self.starting.items()]:
            if deadline is not None and time.monotonic() >= deadline:
                late = self._diagnosis.late_start(
                    worker, self._processes[worker], self._recipe.config.timeouts.start
                )
                self.replace(worker, late)

    def _go_on_starting(self, worker: int, message: Any, deadline: float | None) -> None:
        """Answers a worker that takes another's place: its envs are built, or it serves by now."""
        if isinstance(message, Ready):
            self._check_equal(worker, pickle.loads(message.description))
            arrays = self._diagnosis.arrays
            assert self._attach is not None
            assert arrays is not None
            slots = range(*self._recipe.slices[worker])
            rows = slice(slots.start, slots.stop)
            kept = self._attach.spec.kept_leaves
            replaces = Replacement(
                select_options(self.options, slots.start, slots.stop),
                self.trace,
                int(Marks.of(arrays).worker_notices[worker, 0]),
                {leaf.path: arrays[leaf.path][rows] for leaf in kept if leaf.is_object},
                {slot: each for slot in slots if (each := self._settings(slot)) is not None},
            )
            attach = replace(self._attach, worker=worker, slots=(slots.start, slots.stop), replaces=replaces)
            self._tell(worker, attach, deadline, [self._segment])
            self._allow_start(worker)  # once more, as at first; nobody may have looked for long
            return
        del self.starting[worker]
        if not self.starting:
            self._grace = time.monotonic()

    def _settings(self, slot: int) -> SlotSettings | None:
        """Returns what a new env in a slot is told."""
        return None if self.env_settings is None else self.env_settings.of(slot)

    def _tell(
        self, worker: int, message: Any, deadline: float | None, descriptors: Sequence[int] = ()
    ) -> None:
        # Those that start wait at their sockets.
        notify = _no_notice if worker in self.starting else self.notify_worker
        self.channels[worker].send(
            message, deadline=deadline, descriptors=descriptors, notify=partial(notify, worker)
        )

    def _check_equal(self, worker: int, description: Description) -> None:
        assert self._description is not None
        first, _ = self._recipe.slices[worker]
        mine, equal = description.spaces, self._recipe.equal_spaces
        mismatch = compare(self._description.spaces, 0, mine, first, equal=equal) or description.mismatch
        if mismatch is not None:
            raise SpaceMismatchError(mismatch)

    def _died(self, worker: int) -> WorkerDiedError:
        return self._diagnosis.died(worker, self._processes[worker], asked=self._asked.get(worker))

    def _dismiss(self, timeout: float | None, *, tell: bool) -> None:
        """Waits until every worker has closed its envs and its end; logs whose `close` failed or was late."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker, channel in enumerate(self.channels):
            channel.shut()
            self.notify_worker(worker)
        unclosed = {worker: set(range(*slots)) for worker, slots in enumerate(self._recipe.slices)}
        still_open = {worker for workers in self._by_fd.values() for worker in workers}
        while still_open:
            remaining = time_left(deadline)  # first: what was said by then is heard
            said = self._readable(self._poll_of(still_open), min(remaining, DEATH_CHECK_INTERVAL))
            for worker in said:
                try:
                    message = self.channels[worker].receive(deadline)
                except (EOFError, TimeoutError):
                    still_open.remove(worker)
                    continue
                if isinstance(message, Closed):
                    unclosed[worker].difference_update(message.env_ids)
                elif isinstance(message, failures.Report) and message.operation == "close":
                    _logger.warning("%s", failures.to_error(message, worker=worker))
            if not said:
                # An env may have forked a process that keeps a dead worker's socket open.
                still_open -= {
                    worker
                    for worker in still_open
                    if self._processes[worker].ended() and not self.channels[worker].readable()
                }
                if remaining <= 0:
                    break
        for worker in sorted(still_open) if timeout and tell else ():
            late = sorted(unclosed[worker])
            who = f"{name_envs(late)} (worker {worker})" if late else f"spare envs of worker {worker}"
            _logger.warning(
                "close of %s was cut off after %s s; close(timeout=None) waits for it", who, timeout
            )


def _pickle(name: str, arguments: tuple[Any, ...]) -> bytes:
    """Pickles what somebody asks with, before anybody is asked."""
    return pickle_given(
        arguments,
        lambda error: NotPicklableError(
            f"{name}: what it is given can't be pickled, so it can't be sent to the workers: {error}; make "
            'it there, or use backend="serial"'
        ),
    )


def _no_notice(worker: int) -> None:
    """WorkerGroup that don't serve yet wait at their sockets."""
