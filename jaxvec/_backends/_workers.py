"""The envs of a pool in worker processes: hands them over, waits for them, and asks them."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec import _options
from jaxvec._backends import _handoffs
from jaxvec._backends._backend import Patience
from jaxvec._backends._launcher import Launcher
from jaxvec._backends._messages import Attach, Reply, Request
from jaxvec._backends._plan import Plan
from jaxvec._backends._supervisor import Supervisor, name_envs
from jaxvec._cores import usable_cores
from jaxvec._errors import EnvError, EnvTimeoutError, JaxvecError, NotReadyError, WorkerDiedError
from jaxvec._handoff._channel import WAKE
from jaxvec._handoff._gate import Gate
from jaxvec._handoff._handoff import LOOK_AROUND, ParentHandoff, listen, time_left
from jaxvec._handoff._move import Verb
from jaxvec._handoff._turns import Rules
from jaxvec._memory import _segment
from jaxvec._memory._layout import Layout
from jaxvec._memory._segment import Arrays
from jaxvec._native import interrupts
from jaxvec._options import Options
from jaxvec._restart import Budget
from jaxvec._slices import _failures
from jaxvec._slices._slice import Asked
from jaxvec._spec import PoolSpec
from jaxvec._tracing._recorder import Loss, Record

_HURRY = 1.0  # seconds that the workers of a broken pool have to answer
_SPIN_NS = 200_000  # how long a worker without work looks again before it sleeps


@dataclass(frozen=True)
class _Wait:
    """One operation's wait for the workers; see `_handoff.Supervision`."""

    workers: ProcessWorkers
    name: str  # of the operation
    timeout: float | None  # seconds, as the user set it
    until: float | None  # of time.monotonic()
    check: Callable[[], None]  # raises what should end it
    slots: NDArray[Any] | None = None  # that it waits for, if not for
    owing: Sequence[int] = ()  # workers that owe a message
    give_up: float | None = None  # as of `Patience`

    @property
    def deadline(self) -> float | None:
        """The earlier of when the envs are late, and when the caller has waited long enough."""
        return min((end for end in (self._late, self.give_up) if end is not None), default=None)

    @property
    def _late(self) -> float | None:
        return self.workers.supervisor.extend(self.until, self.timeout)

    def look(self, seconds: float) -> list[tuple[int, Any]]:
        self.check()
        try:
            return self.workers.supervisor.look(seconds, self._late)
        except TimeoutError:  # a message that came in part
            self.expire()
            return []

    def expire(self) -> None:
        """Raises what took too long, unless the workers that hold it up can be replaced."""
        if self.give_up is not None and time.monotonic() >= self.give_up:
            raise NotReadyError(
                f"{self.name}: not ready within the timeout; the envs are still in flight, so call it again "
                "to go on waiting"
            )
        error, late = self.workers.timed_out(self)
        for worker in late:
            self.workers.supervisor.replace(worker, error)


class ProcessWorkers:
    """The worker processes of one pool; see `Workers`. `close()` ends them, whatever state they are in."""

    def __init__(
        self, plan: Plan, *, launcher: Launcher, handoff: str, budget: Budget, learn_info: bool
    ) -> None:
        """Starts the workers and waits until every env is built.

        Raises:
            EnvError: an env's constructor raised.
            WorkerDiedError: a worker died.
            EnvTimeoutError: the envs were not built in time.
        """
        self._slices = plan.slices
        self._launcher = launcher
        self._start_timeout = plan.start_timeout
        self._arrays: Arrays | None = None
        self._kind = handoff
        self._budget = budget
        self._handoff: ParentHandoff | None = None
        self.supervisor = Supervisor(plan, budget, launcher)
        try:
            wait = self._wait("constructor", plan.start_timeout)
            for worker in range(len(plan.slices)):
                self._send(worker, self.supervisor.setup(worker, learn_info=learn_info), wait)
            self.description = self.supervisor.agree(self._gather(wait))
        except BaseException:
            self.close(timeout=0)
            raise

    @property
    def restarts(self) -> Sequence[int]:
        return self._budget.restarts

    def attach(self, layout: Layout, spec: PoolSpec, autoreset_mode: AutoresetMode) -> Arrays:
        wait = self._wait("attach", self._start_timeout)
        spin_ns = _spin_ns(len(self._slices))
        descriptor = _segment.create(layout)
        try:
            arrays = _segment.attach(descriptor, layout)
        except BaseException:
            os.close(descriptor)
            raise
        message = Attach(0, layout, spec, autoreset_mode, self._kind, spin_ns, replaces=None)
        self.supervisor.send_attach(message, descriptor, arrays, wait.deadline)
        self._gather(wait)
        self._spec, self._arrays = spec, arrays
        self._objects_out = [leaf.path for leaf in spec.action_leaves if leaf.is_object]
        self._objects_in = [leaf.path for leaf in spec.timestep_leaves if leaf.is_object]
        self._shares = self._launcher.shares(self._slices)
        self._handoff = _handoffs.parent_end(
            self._kind, arrays, slices=self._shares, channels=self.supervisor.channels, spin_ns=spin_ns
        )
        if not self._launcher.at_sockets:
            self.supervisor.knock = self._handoff.knock
        return arrays

    def open_gate(self, rules: Rules) -> Gate:
        assert self._handoff is not None
        assert self._arrays is not None
        return _handoffs.gate(self._handoff, self._spec, self._arrays, slices=self._shares, rules=rules)

    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        assert self._handoff is not None
        if verb is Verb.STEP and self._objects_out:
            self._put_objects(slots)
        self._handoff.send(verb, slots)

    def any_resetting(self, slots: NDArray[Any]) -> bool:
        assert self._handoff is not None
        return self._handoff.any_resetting(slots)

    def wait(self, slots: NDArray[Any], count: int, patience: Patience) -> None:
        assert self._handoff is not None
        until = _deadline(patience.timeout, patience.waited)
        wait = _Wait(
            self, patience.name, patience.timeout, until, patience.check, slots, give_up=patience.give_up
        )
        self._handoff.wait(slots, count, wait)
        if self._objects_in:
            self._get_objects(slots, patience.timeout)

    def first_done(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        assert self._handoff is not None
        return self._handoff.first_done(slots, count)

    def set_options(self, options: Options, timeout: float | None) -> None:
        self.supervisor.options = options  # a worker that is replaced meanwhile gets them, too
        self.request("set_options", lambda *share: (_options.share(options, *share),), timeout=timeout)

    def request(
        self, name: Asked, arguments: Callable[[int, int], tuple[Any, ...]], *, timeout: float | None
    ) -> list[Any]:
        wait = self._wait(name, timeout)
        self._settle(wait)
        for worker, (first, stop) in enumerate(self._slices):
            self._send(worker, Request(name, arguments(first, stop)), wait)
        replies = self._gather(wait)
        return [self._open(worker, name, reply) for worker, reply in enumerate(replies)]

    def start_trace(self, capacity: int) -> None:
        self.supervisor.losses.clear()
        self.supervisor.trace = capacity  # a worker that is replaced is told, too
        self.request("start_trace", lambda *_: (capacity,), timeout=self._start_timeout)

    def stop_trace(self, *, hurry: bool) -> list[Record]:
        self.supervisor.trace = None
        if hurry:
            answers = self._salvage()
        else:
            answers = self.request("stop_trace", lambda *_: (), timeout=self._start_timeout)
        losses = self.supervisor.losses
        for worker, answer in enumerate(answers):
            if isinstance(answer, JaxvecError):
                losses.append((worker, Loss(str(answer), time.monotonic_ns())))
        return [
            replace(
                answer.earlier(self.supervisor.ahead(worker)) if isinstance(answer, Record) else Record([]),
                losses=tuple(loss for whose, loss in losses if whose == worker),
            )
            for worker, answer in enumerate(answers)
        ]

    def close(self, timeout: float) -> None:
        try:
            self.supervisor.close(timeout)
        finally:
            if self._handoff is not None:
                self._handoff.close()
            self._arrays = self._handoff = None

    def kill(self) -> None:
        self.supervisor.kill()

    def timed_out(self, wait: _Wait) -> tuple[EnvTimeoutError, list[int]]:
        """Makes the error of a wait that took too long, which names the envs that hold it up.

        Returns:
            The error, and the workers that are late.
        """
        if self._handoff is None or wait.slots is None:
            late = list(wait.owing)
            slow = [slot for worker in late for slot in range(*self._slices[worker])]
            elsewhere = self.supervisor.silent(late)
            doing = f"the workers of {name_envs(slow)} have not answered" + (elsewhere and f": {elsewhere}")
        else:
            unfinished = self._handoff.unfinished().tolist()
            worker_of = self.supervisor.worker_of
            late = sorted({worker_of(slot) for slot in np.intersect1d(unfinished, wait.slots)})
            # In a first-ready pool those of other workers may have been sent a moment ago.
            slow = [slot for slot in unfinished if worker_of(slot) in late]
            running = self.supervisor.running(slow) or self.supervisor.silent(late) or "no env is running"
            doing = f"{running}; unfinished: {name_envs(slow)}"
        message = f"{wait.name} timed out after {wait.timeout} s: {doing}"
        return EnvTimeoutError(message, env_ids=tuple(slow)), late

    def _salvage(self) -> list[Record | JaxvecError]:
        """Asks each worker for its record, when some may be dead, or hang, and none is replaced any more."""
        request, workers = Request("stop_trace"), range(len(self._slices))
        deadline = time.monotonic() + _HURRY
        for worker in set(workers) - self.supervisor.starting:
            with suppress(WorkerDiedError, TimeoutError):  # then it does not answer either
                self.supervisor.send(worker, request, deadline=deadline)
        return [self._salvage_from(worker, deadline) for worker in workers]

    def _salvage_from(self, worker: int, deadline: float) -> Record | JaxvecError:
        deadline = max(deadline, time.monotonic() + _HURRY / 10)  # others may have used it up
        try:
            while True:  # past wakes, reports, and answers to earlier questions
                said = self.supervisor.hear(worker, deadline)
                if isinstance(said, Reply) and said.failure is None:
                    answer = pickle.loads(said.result)
                    if isinstance(answer, Record):
                        return answer
        except WorkerDiedError as error:
            return error
        except TimeoutError:
            return EnvTimeoutError(
                f"worker {worker} did not answer after the pool broke",
                env_ids=tuple(range(*self._slices[worker])),
            )

    def _put_objects(self, slots: NDArray[Any]) -> None:
        """Gives the workers what of the actions of `slots` is not in the segment."""
        assert self._arrays is not None
        columns = {path: self._arrays[path] for path in self._objects_out}

        def arguments(first: int, stop: int) -> tuple[Any, ...]:
            mine = slots[(first <= slots) & (slots < stop)]
            return mine, {path: column[mine] for path, column in columns.items()}

        _require_all(self.request("put_objects", arguments, timeout=self._start_timeout))

    def _get_objects(self, slots: NDArray[Any], timeout: float | None) -> None:
        """Gets from the workers what of the time steps of `slots` is not in the segment."""
        assert self._arrays is not None

        def arguments(first: int, stop: int) -> tuple[Any, ...]:
            return slots[(first <= slots) & (slots < stop)], self._objects_in

        answers = _require_all(self.request("get_objects", arguments, timeout=timeout))
        for (first, stop), columns in zip(self._slices, answers, strict=True):
            mine, _ = arguments(first, stop)
            for path, column in columns.items():
                self._arrays[path][mine] = column

    def _wait(self, name: str, timeout: float | None) -> _Wait:
        return _Wait(self, name, timeout, _deadline(timeout), interrupts.since_now())

    def _send(self, worker: int, message: Any, wait: _Wait) -> None:
        try:
            self.supervisor.send(worker, message, deadline=wait.deadline)
        except WorkerDiedError as error:
            self.supervisor.replace(worker, error)
        except TimeoutError:  # its buffer is full: it does not read
            replace(wait, owing=[worker]).expire()

    def _settle(self, wait: _Wait) -> None:
        """Waits until workers that take others' places serve; only then can they be asked."""
        while starting := sorted(self.supervisor.starting):
            wait.look(LOOK_AROUND)
            if time_left(wait.deadline) <= 0:
                replace(wait, owing=starting).expire()

    def _gather(self, wait: _Wait) -> list[Any]:
        """Waits for one message from each worker, or the error of one that was replaced instead."""
        messages: dict[int, Any] = {}
        while len(messages) < len(self._slices):
            missing = [worker for worker in range(len(self._slices)) if worker not in messages]
            heard = listen(replace(wait, owing=missing))
            # Who waits for envs in flight looks at their slots before it listens for wakes.
            messages.update((worker, message) for worker, message in heard if message is not WAKE)
        return [messages[worker] for worker in range(len(self._slices))]

    def _open(self, worker: int, name: str, reply: Reply | JaxvecError) -> Any:
        if isinstance(reply, JaxvecError):
            return reply
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


def _require_all(answers: list[Any]) -> list[Any]:
    """Returns the answers of a request; raises the error that is among them."""
    for answer in answers:
        if isinstance(answer, JaxvecError):
            raise answer
    return answers


def _deadline(timeout: float | None, waited: float = 0) -> float | None:
    return None if timeout is None else time.monotonic() + max(timeout - waited, 0)


def _spin_ns(num_workers: int) -> int:
    """Spinning keeps cores awake; where workers share them, somebody else does."""
    return _SPIN_NS if num_workers <= usable_cores() else 0
