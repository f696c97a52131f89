"""`jaxvec.Rollouts`: actors on a Ray cluster that run whole rollouts for a learner in this process.

    Rollouts.push -- weights ------> _ActorGroup -- Ray call: weights ----> RolloutActor, which has a pool
    Rollouts.get  <-- trajectory --- _ActorGroup <-- answer: PackedRollout -- and the compiled function

Ray places the actors, and starts the process of a lost one again.
"""

from __future__ import annotations

import math
import os
import pickle
import secrets
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvec import __version__, _errors
from jaxvec._backends.ray import cluster
from jaxvec._backends.ray.actor import (
    PackedRollout,
    RemoteError,
    RolloutActor,
    RolloutProgram,
    check_keys,
    pack,
    unpack,
)
from jaxvec._options import OnFault, PoolConfig, Restart, Timeouts, check_count, parse_restart
from jaxvec._util import dumps, logger
from jaxvec._workers.budget import Budget
from jaxvec._workers.protocol import pickle_given

# --- In the learner's process: the actors, which are kept busy with the newest weights ---------------------
# An actor has one call at a time. Two threads share its state:
# - A thread of Ray delivers the answer to a call. It queues rollouts and failures, and starts the next call.
#   It never waits for an answer of Ray, which would have to arrive in this thread.
# - The learner's thread takes rollouts, and handles deadlines and failures, in `get`. A call of Ray that
#   waits, such as `ray.kill`, is made without the lock, for which Ray's thread may wait.
# A failure ends an incarnation of an actor. Later answers to that incarnation are ignored.


# Errors of envs and workers, and not of the rollout function.
_FAULTS = _errors.EnvError, _errors.EnvTimeoutError, _errors.WorkerDiedError, _errors.PoolBrokenError

# The options of JAX that affect the numbers that a program computes.
_JAX_OPTIONS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)

# A rollout is reported as late after this time in seconds, and this multiple of the actor's longest one.
_LATE_SECONDS = 60.0
_LATE_FACTOR = 10

# Weights up to this size are sent with each call. An object in Ray's store costs milliseconds of CPU time.
_MAX_MESSAGE_BYTES = 64 << 10

_SAME_FAULT_INTERVAL = 10.0  # seconds after a loss, in which another one at the start is no further fault
_MAX_SNAPSHOT_USES = 3  # by an actor that is lost again and again; if its envs raise again, they are reset
_CLOSE_TIMEOUT = 5.0  # seconds for actors to close their envs
_RESTART_CHECK_INTERVAL = 0.2  # seconds between calls of an actor that Ray restarts, in 1 to 10 seconds
_CHECK_INTERVAL = 0.02  # seconds between checks of deadlines, `ray.shutdown()`, and weights that JAX computes


class _Stage(Enum):
    """The activity of an actor, or the event that it waits for."""

    PLACING = auto()  # Ray starts its process
    STARTING = auto()  # it makes its pool
    RUNNING = auto()
    IDLE = auto()  # the learner has to take rollouts first
    FAILED = auto()  # the learner has to handle a failure
    GIVEN_UP = auto()  # its limits of faults are exceeded


@dataclass(eq=False)
class _ActorState:
    """The learner's record of an actor."""

    # Written by the learner's thread alone.
    number: int  # constant
    handle: Any = None  # of Ray; constant once the actor is created
    faults: int = 0
    lost: float = -math.inf  # time of the latest loss that counted as a fault

    # Written by both threads, under `_ActorGroup._changed`. Times are those of `time.monotonic()`.
    stage: _Stage = _Stage.PLACING
    incarnation: int = 0  # number of failures
    deadline: float = math.inf  # of the stage
    retry_time: float = math.inf  # of the call of `identify`, while Ray restarts the process
    snapshot: bytes | None = None  # of the envs after the last rollout
    unread: int = 0  # number of finished rollouts that the learner has not taken
    version: int = -1  # of the weights in use; -1 before the first rollout of an incarnation
    began: float = 0.0  # time of the start of the running call of `run`

    # Written by Ray's thread alone, under `_ActorGroup._changed`.
    node: str = "no node yet"
    index: int = 0  # of the next rollout
    uses: int = 0  # number of starts from `snapshot`
    finished: float | None = None  # time of the end of the last call of `run`
    longest_s: float = 0.0  # duration of the longest one
    rollouts: int = 0
    pool_restarts: int = 0


@dataclass(eq=False)
class _ActorGroup:
    """The actors of a `Rollouts` object. Timeouts are in seconds, or `None`."""

    ray: Any  # the module
    options: Mapping[str, Any]  # of the actors
    states: list[_ActorState]
    num_envs: int
    least: int  # number of actors that must not be given up
    start_timeout: float | None
    rollout_timeout: float | None
    in_flight: int
    rollouts_per_call: int
    policy: Restart | None
    newest: tuple[int, Any]  # version and weights, a pytree
    jax_options: Mapping[str, Any]  # of the actors' processes
    program: bytes  # the pickled `RolloutProgram`

    def __post_init__(self) -> None:
        self._budget = Budget(self.policy, len(self.states), who="actor")
        # Held to read or write what both threads share, and notified after each answer. Its lock is
        # reentrant: if the answer to a call has arrived already, the caller handles it at once.
        self._changed = threading.Condition()
        # Ray's thread appends, and the learner's thread removes.
        self._finished: deque[PackedRollout] = deque()
        self._failures: deque[tuple[_ActorState, _Stage, BaseException | RemoteError]] = deque()
        self._num_started = 0  # number of pools; written by Ray's thread
        # Written by the learner's thread. Once it is set, answers are ignored.
        self._error: Exception | None = None
        # Version and packed weights for the next call; written by the learner's thread, as one tuple.
        self._published = self.newest[0], self._store(self.newest[1])
        self._program = self.ray.put(self.program)
        learner_path = [os.path.abspath(entry) for entry in sys.path]  # "" is the working directory
        actor_class = self.ray.remote(**self.options)(RolloutActor)
        for actor in self.states:
            actor.handle = actor_class.remote(self.jax_options, learner_path)
            self._start(actor)

    # --- In the learner's thread ------------------------------------------------------------------------

    def wait_until_started(self) -> None:
        """Waits until the least number of actors has made pools."""
        self._wait(lambda: self._num_started >= self.least, None)

    def get(self, timeout: float | None) -> PackedRollout:
        """Waits for a finished rollout, and lets its actor start another one."""
        self._wait(lambda: bool(self._finished), timeout)
        with self._changed:
            done = self._finished.popleft()
            actor = self.states[done.actor]
            actor.unread -= 1
            self._start_rollout(actor)
        return done

    def _wait(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        """Waits until `is_done`, and handles faults, whether or not it is done already.

        Raises:
            NotReadyError: It was not done in time.
            RolloutError, ActorDiedError: A fault that the policy does not cover. Rollouts that were finished
                before it come first.
        """
        deadline = _deadline(timeout)
        while True:
            self.publish()
            self._check()
            with self._changed:
                if is_done():
                    return
                if self._error is not None:
                    raise self._error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _errors.NotReadyError(f"no rollout was done within {timeout} s; call get again")
                if not self._failures:
                    self._changed.wait(min(left, _CHECK_INTERVAL))

    def _check(self) -> None:
        """Handles deadlines that have passed, and failures."""
        if not self.ray.is_initialized():  # most calls of Ray would start another cluster
            raise self._died(self.states[0], "was lost: Ray was shut down")
        try:
            for actor in self.states:
                if time.monotonic() >= actor.deadline:
                    self._time_out(actor)
                if actor.stage is _Stage.PLACING and time.monotonic() >= actor.retry_time:
                    with self._changed:
                        self._place(actor)
            while self._failures:
                self._handle_failure(*self._failures.popleft())
        except (_errors.RolloutError, _errors.ActorDiedError) as error:
            with self._changed:
                self._error = error

    def publish(self) -> None:
        """Publishes the newest weights, if JAX has computed them."""
        version, params = self.newest
        if version != self._published[0]:
            arrays: list[Any] = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
            if all(array.is_ready() for array in arrays):
                self._published = version, self._store(params)

    def stats(self) -> tuple[ActorStats, ...]:
        now = time.monotonic()
        with self._changed:
            return tuple(
                ActorStats(
                    actor.node,
                    actor.rollouts,
                    actor.finished and now - actor.finished,
                    actor.faults,
                    actor.pool_restarts,
                    actor.version,
                )
                for actor in self.states
            )

    def close(self, *, gently: bool) -> None:
        with self._changed:
            self._error = self._error or _errors.PoolClosedError("the Rollouts were closed")
            working = [actor.handle for actor in self.states if actor.version != -1]
        if gently and working and self.ray.is_initialized():
            calls = [handle.close.remote() for handle in working]
            self.ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_TIMEOUT)
        for actor in self.states:
            self._kill(actor, no_restart=True)

    # --- Calls, from either thread, and their answers in Ray's thread -----------------------------------

    def _start(self, actor: _ActorState) -> None:
        """Starts the envs of a new actor, or of one that Ray starts again, once it is there."""
        with self._changed:
            actor.version = -1
            actor.deadline = _deadline(self.start_timeout)
            self._place(actor)

    def _place(self, actor: _ActorState) -> None:
        actor.retry_time = math.inf
        self._call(actor, _Stage.PLACING, actor.handle.identify.remote(), self._on_placed)

    def _start_rollout(self, actor: _ActorState) -> None:
        """Starts the next rollout with the newest weights, unless the actor is busy or too far ahead."""
        count = self.rollouts_per_call
        if actor.stage is not _Stage.IDLE or actor.unread + count > max(self.in_flight, count):
            return
        actor.version, weights = self._published
        actor.began = time.monotonic()
        late_s = max(_LATE_SECONDS, _LATE_FACTOR * actor.longest_s)
        actor.deadline = min(_deadline(self.rollout_timeout), _deadline(late_s))
        answer = actor.handle.run.remote(actor.version, weights, actor.index, count)
        self._call(actor, _Stage.RUNNING, answer, self._on_finished)

    def _call(
        self,
        actor: _ActorState,
        stage: _Stage,
        answer: Any,
        on_result: Callable[[_ActorState, Any], RemoteError | None],
    ) -> None:
        """Starts a stage with a call, whose answer Ray's thread handles."""
        actor.stage = stage
        answer.future().add_done_callback(partial(self._on_answer, actor, actor.incarnation, on_result))

    def _on_answer(
        self,
        actor: _ActorState,
        incarnation: int,
        on_result: Callable[[_ActorState, Any], RemoteError | None],
        future: Future[Any],
    ) -> None:
        with self._changed:
            if actor.incarnation != incarnation or self._error is not None:
                return
            stage = actor.stage
            failure: BaseException | RemoteError | None = future.exception()
            if stage is _Stage.PLACING and isinstance(failure, self.ray.exceptions.ActorUnavailableError):
                actor.retry_time = time.monotonic() + _RESTART_CHECK_INTERVAL  # Ray is starting the process
                return
            actor.deadline = math.inf
            actor.stage = _Stage.IDLE
            try:
                failure = failure or on_result(actor, future.result())
            except Exception as error:  # of the next call; Ray would only log it
                failure = error
            if failure is not None:
                self._end_incarnation(actor)
                self._failures.append((actor, stage, failure))
            self._changed.notify_all()

    def _on_placed(self, actor: _ActorState, node: str) -> None:
        actor.node = node
        actor.deadline = _deadline(self.start_timeout)
        actor.uses += 1
        answer = actor.handle.start.remote(
            self._program, actor.number, actor.incarnation, actor.index, actor.snapshot
        )
        self._call(actor, _Stage.STARTING, answer, self._on_started)

    def _on_started(self, actor: _ActorState, failure: RemoteError | None) -> RemoteError | None:
        if failure is None:
            self._num_started += 1
            self._start_rollout(actor)
        return failure

    def _on_finished(
        self, actor: _ActorState, results: list[PackedRollout | RemoteError]
    ) -> RemoteError | None:
        now = time.monotonic()
        for result in results:
            actor.pool_restarts += result.pool_restarts
            if isinstance(result, RemoteError):
                return result
            actor.finished = now
            actor.snapshot = result.snapshot
            actor.uses = 0
            actor.rollouts += 1
            actor.index += 1
            actor.unread += 1
            self._finished.append(result)
        actor.longest_s = max(actor.longest_s, now - actor.began)
        self._start_rollout(actor)
        return None

    def _end_incarnation(self, actor: _ActorState) -> None:
        """Ignores later answers of an actor; called under the lock, by either thread."""
        actor.stage = _Stage.FAILED
        actor.deadline = math.inf
        actor.incarnation += 1

    # --- Faults, in the learner's thread ----------------------------------------------------------------

    def _handle_failure(self, actor: _ActorState, stage: _Stage, error: BaseException | RemoteError) -> None:
        if isinstance(error, RemoteError):
            when = f"in rollout {actor.index}" if stage is _Stage.RUNNING else "when it started"
            typed = _unpack_error(error, actor, when)
            # If others have started, one that can't start is a fault of its node, such as a missing package.
            if stage is _Stage.RUNNING and not isinstance(typed.__cause__, _FAULTS):
                raise typed
            self._recover(actor, typed, stage)
        # The process of a lost node lives on for a moment, and may answer `identify` before it ends.
        elif stage is _Stage.STARTING and time.monotonic() - actor.lost < _SAME_FAULT_INTERVAL:
            self._start(actor)
        else:
            actor.lost = time.monotonic()
            self._recover(actor, self._lost(actor, stage, error), stage)

    def _time_out(self, actor: _ActorState) -> None:
        with self._changed:
            now = time.monotonic()
            if now < actor.deadline:  # its answer has just arrived
                return
            stage = actor.stage
            late_s = now - actor.began
            if stage is _Stage.RUNNING and (self.rollout_timeout is None or late_s < self.rollout_timeout):
                actor.deadline = actor.began + (self.rollout_timeout or math.inf)
                logger.warning(
                    "actor %d on %s has not finished rollout %d after %.0f s; rollout_timeout=... replaces "
                    "actors that hang",
                    actor.number,
                    actor.node,
                    actor.index,
                    late_s,
                )
                return
            # The call of `Rollouts` has an end; later, a lack of resources is no fault.
            if stage is _Stage.PLACING and self._num_started >= self.least:
                actor.deadline = math.inf
                logger.warning(
                    "the cluster has had no free resources for actor %d for %s s; it waits, and others work",
                    actor.number,
                    self.start_timeout,
                )
                return
            self._end_incarnation(actor)
        if stage is _Stage.RUNNING:
            why = (
                f"did not finish rollout {actor.index} within rollout_timeout, {self.rollout_timeout} s; "
                "raise the limit if a rollout may take longer"
            )
        else:
            why = f"was not ready within Timeouts.start, {self.start_timeout} s"
            if stage is _Stage.PLACING:
                free = self.ray.available_resources()
                why += f": Ray has not started it; it needs {dict(self.options)}, available: {free}"
        self._kill(actor, no_restart=False)
        error = self._died(actor, why)
        if self._num_started < self.least:
            raise error
        self._recover(actor, error, stage)

    def _recover(
        self, actor: _ActorState, error: _errors.RolloutError | _errors.ActorDiedError, stage: _Stage
    ) -> None:
        """Counts a fault of an actor, and starts its envs again, or gives it up if enough are left."""
        if self._num_started < self.least and isinstance(error, _errors.RolloutError):
            raise error
        actor.faults += 1
        if actor.uses >= (1 if isinstance(error, _errors.RolloutError) else _MAX_SNAPSHOT_USES):
            actor.snapshot = None  # the envs fail again and again from there
        try:
            if stage is _Stage.PLACING:  # Ray has given it up
                raise error
            what = "resets" if actor.snapshot is None else "restores"
            self._budget.spend(actor.number, error, f", and {what} its envs")
        except (_errors.ActorDiedError, _errors.RolloutError):  # the error itself
            left = sum(other.stage is not _Stage.GIVEN_UP for other in self.states) - 1
            if self.policy is None or left < self.least:
                raise
            with self._changed:
                actor.stage = _Stage.GIVEN_UP
                actor.version = -1
            self._kill(actor, no_restart=True)
            logger.error("%s The other actors continue: %d are left", error, left)
            return
        self._start(actor)

    def _lost(self, actor: _ActorState, stage: _Stage, error: BaseException) -> _errors.ActorDiedError:
        """Returns the error for a call that Ray could not finish, with Ray's text below the first line."""
        when = {_Stage.PLACING: "while Ray started it", _Stage.STARTING: "while it made its pool"}
        is_dead = isinstance(error, self.ray.exceptions.RayActorError)
        return self._died(
            actor,
            f"was lost {when.get(stage, f'in rollout {actor.index}')}: "
            + ("its process or its node ended" if is_dead else f"Ray raised {type(error).__name__}")
            + '; on_fault="restart" replaces lost actors, and workers=jaxvec.Workers() keeps an actor alive '
            f"if an env crashes\n\nRay's own text:\n{error}\n",
        )

    def _died(self, actor: _ActorState, why: str) -> _errors.ActorDiedError:
        return _errors.ActorDiedError(
            f"actor {actor.number} on {actor.node}, with envs 0 to {self.num_envs - 1}, {why}",
            actor=actor.number,
            node=actor.node,
        )

    def _kill(self, actor: _ActorState, *, no_restart: bool) -> None:
        if self.ray.is_initialized():
            with suppress(Exception):
                self.ray.kill(actor.handle, no_restart=no_restart)

    def _store(self, params: Any) -> Any:
        """Returns packed weights, or a reference to them in Ray's object store if they are large."""
        packed = pack(params)
        nbytes = sum(np.asarray(leaf).nbytes for leaf in packed[1])
        return packed if nbytes <= _MAX_MESSAGE_BYTES else self.ray.put(packed)


def _deadline(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds


def _unpack_error(packed: RemoteError, actor: _ActorState, when: str) -> _errors.RolloutError:
    error = _errors.RolloutError(
        f"actor {actor.number} on {actor.node} raised {packed.name} {when}: {packed.message}\n\n"
        f"The actor's own traceback:\n{packed.traceback}",
        actor=actor.number,
        node=actor.node,
        remote_traceback=packed.traceback,
    )
    if packed.pickled is not None:
        with suppress(Exception):  # the exception's class may be unknown here
            error.__cause__ = pickle.loads(packed.pickled)
    return error


# --- The learner's interface -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """A finished rollout of an actor.

    Attributes:
        trajectory: Trajectory that the rollout function returned, on the learner's device. On the CPU, its
            arrays may lie in Ray's object store; copy those that you keep for long.
        actor: Index of the actor.
        index: Number of earlier rollouts of this actor.
        version: Version of the weights that the rollout used.
        lag: Number of versions between these weights and the newest.

    Example:
        ```python
        print(rollouts.get().trajectory.obs.shape)
        ```
    """

    trajectory: Any
    actor: int
    index: int
    version: int
    lag: int


class ActorStats(NamedTuple):
    """Counters of one actor of a `Rollouts` object, and of its predecessors.

    Attributes:
        node: Node of the actor, as text.
        rollouts: Number of finished rollouts.
        age_s: Seconds since the last of them was finished; `None` before the first.
        faults: Number of times that the actor was lost, or its pool was broken.
        pool_restarts: Number of faults from which its pool recovered.
        version: Version of the weights that it uses; -1 while it starts or after it was given up.
    """

    node: str
    rollouts: int
    age_s: float | None
    faults: int
    pool_restarts: int
    version: int


class RolloutStats(NamedTuple):
    """Counters of a `Rollouts` object.

    Attributes:
        rollouts: Number of rollouts that `get` has returned.
        env_steps: Number of env steps in these rollouts.
        version: Version of the newest weights.
        actors: `ActorStats` of each actor.

    Example:
        ```python
        print(rollouts.stats().actors[0].faults)
        ```
    """

    rollouts: int
    env_steps: int
    version: int
    actors: tuple[ActorStats, ...]


class Rollouts(AbstractContextManager["Rollouts"]):
    """Actors on a Ray cluster that run rollouts, each in a local pool, for a learner in this process.

    Each actor runs `rollout(params, handle, timestep, key)`, compiled by `jax.jit`, again and again. The
    function steps the actor's envs as often as it likes. It returns the next handle, the `timestep` argument
    of the next rollout, and a trajectory. The first rollout gets the time step of the reset. Arguments and
    results are pytrees of arrays. Actors adopt those JAX options of the learner that affect results.

    Rollout `index` of actor `i` gets the key
    `jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), i), index)`, and env `j` of that actor gets
    the seed `seed + i * num_envs + j`. An actor whose process was lost continues the numbering of its
    rollouts, and resets its envs with other seeds, or restores them (`save_states`).

    Args:
        rollout: Function that the actors run; see above. They receive it and `env` by cloudpickle.
        env: Env id or constructor, as for `jaxvec.make`.
        num_envs: Number of envs of each actor.
        num_actors: Least and most number of actors, as `(2, 16)`; `16` means `(1, 16)`. The call waits until
            the least number has started, and `get` raises if faults leave fewer. The others start as soon as
            the cluster has free resources, and so do lost actors.
        params: First weights, version 0; a pytree of arrays.
        seed: Seed of the envs and keys.
        actor_options: Options of the actors, as for Ray's `.options(...)`: `num_cpus`, `resources`,
            `scheduling_strategy`, `runtime_env`, and others. By default, an actor reserves a CPU per worker.
            It computes on the CPU unless it has `num_gpus`.
        device: `jax.Device` or sharding for trajectories; JAX's default if `None`.
        rollouts_per_call: Number of rollouts that an actor runs per message, all with the same weights. They
            arrive together, and `rollout_timeout` limits all of them.
        in_flight: Number of rollouts that an actor may finish before `get` returns the first of them; at
            least `rollouts_per_call`.
        on_fault: Fault policy of the actors' pools, as for `jaxvec.make`. With `"restart"`, or a
            `jaxvec.Restart`, Ray also starts lost actors again, and actors make a pool anew that is broken;
            the limits count separately for each actor. One that exceeds them is given up, while enough
            others are left. An exception of `rollout` always ends all.
        save_states: Whether actors save the states of their envs with each rollout. A lost actor then
            continues from its last rollout, and so does `resume`, bit for bit. Its envs are reset if the next
            rollout fails in them again, or if the actor is lost four times in it.
        resume: Result of `checkpoint`. Actors continue with the next rollouts, and `params` have the version
            that was the newest. Load only what you trust: it contains pickles.
        timeouts: Timeouts of the actors' pools, as for `jaxvec.make`. `start` also limits the time in which
            an actor makes and resets its pool.
        rollout_timeout: Seconds for one rollout, including compilation, before its actor counts as lost;
            `None` for no limit, but the log reports a rollout that takes over a minute and ten times longer
            than any before. Each `get` checks this, whether or not rollouts of other actors are finished.
            `timeouts` can limit single steps.
        **options: Other options of `jaxvec.make`, and arguments of the env. By default, the actor itself is
            the only worker, unless `timeouts` limits steps or resets, the actor has a GPU, or
            `workers=jaxvec.Workers()` asks for a process. Envs that use JAX need a process.

    Raises:
        RolloutError: An actor could not make its pool; `__cause__` is the error of `make`.
        ActorDiedError: An actor was lost beyond the limits of `on_fault`, or was not ready in time.
        NotPicklableError: The function, the env or an option can't be pickled.
        ImportError, ConnectionError: Ray is not installed, or no cluster answers.
        ValueError, TypeError: An argument is invalid.

    Example:
        ```python
        with jaxvec.Rollouts(rollout, "CartPole-v1", 16, num_actors=4, params=params) as rollouts:
            for _ in range(100):
                params = learn(params, rollouts.get(timeout=60).trajectory)
                rollouts.push(params)
        ```
    """

    def __init__(
        self,
        rollout: Callable[..., Any],
        env: Any,
        num_envs: int,
        *,
        num_actors: int | tuple[int, int],
        params: Any,
        seed: int = 0,
        actor_options: Mapping[str, Any] | None = None,
        device: Any = None,
        rollouts_per_call: int = 1,
        in_flight: int = 1,
        on_fault: OnFault | Restart = "raise",
        save_states: bool = False,
        resume: bytes | None = None,
        timeouts: Timeouts = Timeouts(reset=None, step=None),  # noqa: B008 - it can't be changed
        rollout_timeout: float | None = None,
        **options: Any,
    ) -> None:
        if not callable(rollout):
            raise TypeError(f"rollout must be a function, not {rollout!r}")
        if "backend" in options:
            raise TypeError("Rollouts has no option 'backend': actor_options= has the options of Ray actors")
        least, most = num_actors if isinstance(num_actors, tuple) else (1, num_actors)
        counts = {"num_envs": num_envs, "rollouts_per_call": rollouts_per_call, "in_flight": in_flight}
        for name, count in {"num_actors": most, "num_actors[0]": least, **counts}.items():
            check_count(name, count, 1)
        if least > most:
            raise ValueError(f"num_actors must be (least, most), not {num_actors}")
        check_count("seed", seed, 0)
        self._device = device
        self._broken: BaseException | None = None
        self._num_rollouts = 0
        self._env_steps = 0
        self._version = 0  # of the newest weights
        # For each actor, its next rollout and the snapshot before it, after those that `get` has returned.
        self._progress: list[tuple[int, bytes | None]] = [(0, None)] * most
        self._origin = {"seed": seed, "num_envs": num_envs}
        if resume is not None:
            self._resume(resume)
        actor_options = {"num_cpus": options.setdefault("num_workers", 1), **(actor_options or {})}
        options |= {"on_fault": on_fault, "timeouts": timeouts}
        if save_states:
            options.setdefault("states", num_envs)
        needs_process = _needs_process(options) or actor_options.get("num_gpus")
        options["backend"] = "process" if needs_process else "serial"
        names = options.keys() & {option.name for option in fields(PoolConfig)}
        PoolConfig(**{name: options[name] for name in names})  # raises if one is invalid
        # An actor whose process is started again finds there the programs that it has compiled.
        cache = os.path.join(tempfile.gettempdir(), f"jaxvec-{secrets.token_hex(8)}")
        program = RolloutProgram(rollout, env, num_envs, seed, options, save_states, cache, __version__)
        pickled = pickle_given(program, _refuse, dumps)
        check_keys(params)
        policy = parse_restart(on_fault)
        self._actors = _ActorGroup(
            cluster.connect(),
            {"max_restarts": -1 if policy else 0, **actor_options},
            [
                _ActorState(number, index=index, snapshot=snapshot)
                for number, (index, snapshot) in enumerate(self._progress)
            ],
            num_envs=num_envs,
            least=least,
            start_timeout=timeouts.start,
            rollout_timeout=rollout_timeout,
            in_flight=in_flight,
            rollouts_per_call=rollouts_per_call,
            policy=policy,
            newest=(self._version, jax.tree.map(_copy_leaf, params)),
            jax_options=_jax_options(cache, actor_options),
            program=pickled,
        )
        # In a thread, as a call of Ray that waits must not run in one of Ray's. Not at exit: Ray itself ends
        # the actors then.
        self._finalizer = weakref.finalize(
            self, threading.Thread(target=partial(self._actors.close, gently=False), daemon=True).start
        )
        self._finalizer.atexit = False
        try:
            self._actors.wait_until_started()
        except BaseException:
            self.close()
            raise

    def get(self, timeout: float | None = None) -> Rollout:
        """Returns the earliest finished rollout that was not returned yet.

        Its actor may then start another rollout, with the newest weights.

        Args:
            timeout: Seconds to wait; `None` for no limit.

        Raises:
            NotReadyError: No rollout was finished in time. Nothing is lost; call `get` again.
            RolloutError: A rollout, or an env, raised an exception in an actor.
            ActorDiedError: An actor was lost, and was not replaced.
            PoolBrokenError, PoolClosedError: An earlier call raised an error, or `close` was called.
        """
        self._check_open()
        try:
            done = self._actors.get(timeout)
        except (_errors.RolloutError, _errors.ActorDiedError) as error:
            self._broken = error
            raise
        self._progress[done.actor] = (done.index + 1, done.snapshot)
        self._num_rollouts += 1
        self._env_steps += done.env_steps
        trajectory = jax.device_put(unpack(done.structure, done.leaves), self._device)
        return Rollout(trajectory, done.actor, done.index, done.version, self._version - done.version)

    def push(self, params: Any) -> None:
        """Publishes new weights. Each actor uses the newest weights from its next rollout on.

        The call does not wait until JAX has computed the weights. Until then, rollouts start with the newest
        ones that were computed at a call of `push` or `get`. The weights are copied, so they may be donated.

        Args:
            params: Pytree of arrays. Actors compile again if its structure, shapes or dtypes are new.

        Raises:
            PoolBrokenError, PoolClosedError: An earlier call raised an error, or `close` was called.
        """
        self._check_open()
        check_keys(params)
        self._version += 1
        self._actors.newest = (self._version, jax.tree.map(_copy_leaf, params))
        self._actors.publish()

    def checkpoint(self) -> bytes:
        """Returns the progress of the actors up to the last `get`, for `Rollouts(resume=...)`.

        It has the version of the weights, and for each actor the index of its next rollout. With
        `save_states`, it also has the states of its envs. Save it together with the weights.
        """
        return dumps({**self._origin, "version": self._version, "actors": self._progress})

    def stats(self) -> RolloutStats:
        """Returns the counters so far."""
        return RolloutStats(self._num_rollouts, self._env_steps, self._version, self._actors.stats())

    def close(self) -> None:
        """Closes the envs and ends the actors, within about ten seconds. May be called more than once."""
        if self._finalizer.detach():
            self._actors.close(gently=self._broken is None)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resume(self, checkpoint: bytes) -> None:
        """Adopts the version and the progress of a checkpoint."""
        saved = pickle.loads(checkpoint)
        for name, value in self._origin.items():
            if saved[name] != value:
                raise ValueError(f"resume: the checkpoint has {name}={saved[name]}, not {value}")
        self._version = saved["version"]
        self._progress[: len(saved["actors"])] = saved["actors"][: len(self._progress)]

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise _errors.PoolClosedError("the Rollouts were closed; create new ones")
        if self._broken is not None:
            raise _errors.PoolBrokenError(
                f"the Rollouts failed before; create new ones: {self._broken}"
            ) from self._broken


def _needs_process(options: Mapping[str, Any]) -> bool:
    """Returns whether an actor's pool needs processes. A single one would only wait for the actor's."""
    timeouts: Timeouts = options["timeouts"]
    return (
        options["num_workers"] > 1
        or bool(timeouts.step or timeouts.reset)
        or not options.keys().isdisjoint({"workers", "spare_envs", "batch_size"})
    )


def _jax_options(cache: str, actor_options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of JAX for actors. Their environment variables have precedence."""
    options: dict[str, Any] = {name: getattr(jax.config, name) for name in _JAX_OPTIONS} | {
        "jax_compilation_cache_dir": cache,
        "jax_persistent_cache_min_compile_time_secs": 0,
        # On the CPU, JAX keeps programs that step envs only if it dispatches none asynchronously; an actor
        # waits anyway.
        "jax_cpu_enable_async_dispatch": False,
    }
    if not actor_options.get("num_gpus"):
        options["jax_platforms"] = "cpu"
    for name in actor_options.get("runtime_env", {}).get("env_vars", {}):
        options.pop(name.lower(), None)
    return options


def _copy_leaf(leaf: Any) -> Any:
    """Returns a copy, which JAX may make later, but which stays valid if the original is donated."""
    return leaf.copy() if isinstance(leaf, jax.Array | np.ndarray) else leaf


def _refuse(error: Exception) -> _errors.NotPicklableError:
    return _errors.NotPicklableError(
        f"the rollout, the env or an option can't be pickled, so it can't be sent to actors: {error}; create "
        "such objects inside the rollout function or the env"
    )
