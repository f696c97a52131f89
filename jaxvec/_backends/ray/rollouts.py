"""`jaxvec.Rollouts`: actors on a Ray cluster that run whole rollouts for a learner in this process.

    Rollouts.push -- weights ------> _Actors -- Ray call: weights ----> RolloutActor, which has a pool
    Rollouts.get  <-- trajectory --- _Actors <-- answer: PackedRollout -- and the compiled function

Ray places the actors, and starts the process of a lost one again. With `backend="ray"`, `make` uses a
cluster in the other way: the pool is here and its workers are there.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import queue
import secrets
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxvec import _errors
from jaxvec._backends.ray import cluster
from jaxvec._backends.ray.actor import (
    JAX_OPTIONS,
    PackedRollout,
    RemoteError,
    RolloutActor,
    RolloutProgram,
    check_keys,
    pack,
    unpack,
)
from jaxvec._backends.remote.wire import versions
from jaxvec._options import OnFault, PoolConfig, Restart, Timeouts, check_count, parse_restart
from jaxvec._util import dumps
from jaxvec._workers.budget import Budget
from jaxvec._workers.protocol import pickle_given

# --- In the learner's process: the actors, which are kept busy with the newest weights ---------------------
# An actor has one call at a time. Ray delivers its answer in a thread of Ray, which starts the next call and
# queues rollouts and failures; the learner handles both in `get`. A call of Ray that waits, such as
# `ray.kill`, would never end in Ray's thread, nor under the lock for which that thread may wait.

_logger = logging.getLogger("jaxvec")

# Errors of envs and workers, and not of the rollout function.
_FAULTS = _errors.EnvError, _errors.EnvTimeoutError, _errors.WorkerDiedError, _errors.PoolBrokenError

# A rollout is reported as late after this time in seconds, and this multiple of the actor's longest one.
_LATE_SECONDS = 60.0
_LATE_FACTOR = 10

# Weights up to this size are sent with each call. An object in Ray's store costs milliseconds of CPU time.
_MAX_MESSAGE_BYTES = 64 << 10

_SAME_FAULT_INTERVAL = 10.0  # seconds after a loss, in which another one at the start is no further fault
_MAX_SNAPSHOT_USES = 3  # by an actor that is lost again and again; if its envs raise again, they are reset
_CLOSE_TIMEOUT = 5.0  # seconds for actors to close their envs
_RESTART_CHECK_INTERVAL = 0.2  # seconds between calls of an actor that Ray restarts; Ray itself waits 1 to 10
_SHUTDOWN_CHECK_INTERVAL = 1.0  # seconds between checks for `ray.shutdown()`, after which no answer arrives
_READY_CHECK_INTERVAL = 0.01  # seconds between checks of weights that JAX computes


@dataclass
class _ActorPlace:
    """The place of an actor, and the state of the actor. Ray's thread changes it under the lock."""

    number: int
    index: int  # of the next rollout
    snapshot: bytes | None  # after the last rollout
    uses: int = 0  # of the snapshot, by starts
    actor: Any = None
    incarnation: int = -1  # late answers to an earlier one are ignored
    node: str = "no node yet"
    pending: str = ""  # name of the method that the actor runs; "failed" until the learner knows a failure
    deadline: float = math.inf  # of that call, of `time.monotonic()`
    again: float = math.inf  # time of the next try of `identify`, of `time.monotonic()`
    waits: bool = False  # for free resources, longer than an actor may take to start
    given_up: bool = False  # its limits of faults are exceeded
    unread: int = 0  # finished rollouts that the learner has not taken
    version: int = -1  # of the weights in use
    began: float = 0.0  # time of the start of the running rollout, of `time.monotonic()`
    finished: float | None = None  # time of the end of the last one
    longest_s: float = 0.0  # of the finished ones
    lost: float = -math.inf  # time of the latest loss that counted as a fault
    rollouts: int = 0
    faults: int = 0
    pool_restarts: int = 0


class _Failure(NamedTuple):
    """A failed call of an actor: an exception of Ray, or an exception in the actor."""

    place: _ActorPlace
    incarnation: int
    method: str
    error: BaseException | RemoteError


@dataclass(eq=False)
class _Actors:
    """The actors of a `Rollouts` object. Timeouts are in seconds, or `None`."""

    ray: Any  # the module
    options: Mapping[str, Any]  # of the actors
    places: list[_ActorPlace]
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
        self.num_started = 0
        self._budget = Budget(self.policy, len(self.places), who="actor")
        self._lock = threading.RLock()  # an answer that has arrived already is handled by its caller
        # Finished rollouts, failures, and `None` for an actor that has started, in order of arrival.
        self._events: queue.SimpleQueue[PackedRollout | _Failure | None] = queue.SimpleQueue()
        self._published = self.newest[0], self._store(self.newest[1])
        self._program = self.ray.put(self.program)
        actor_class = self.ray.remote(**self.options)(RolloutActor)
        for place in self.places:
            place.actor = actor_class.remote(self.jax_options)
            self._start(place)

    def wait(self, timeout: float | None) -> PackedRollout | None:
        """Waits for at most a second, and returns a rollout if one is finished. Handles faults of actors.

        Raises:
            RolloutError, ActorDiedError: A fault that the policy does not cover.
        """
        is_published = self.publish()
        for place in self.places:
            if time.monotonic() >= place.again and self.ray.is_initialized():
                with self._lock:
                    place.again = math.inf
                    self._call(place, "identify")
        first = min(self.places, key=lambda place: place.deadline)
        limits = [first.deadline - time.monotonic(), _SHUTDOWN_CHECK_INTERVAL if timeout is None else timeout]
        limits.append(_SHUTDOWN_CHECK_INTERVAL if is_published else _READY_CHECK_INTERVAL)
        limits.append(min(place.again for place in self.places) - time.monotonic())
        try:
            event = self._events.get(timeout=max(min(limits), 0))
        except queue.Empty:
            if not self.ray.is_initialized():  # most calls of Ray would start another cluster
                raise self._died(self.places[0], "was lost: Ray was shut down") from None
            if time.monotonic() >= first.deadline:
                self._time_out(first, first.incarnation)
            return None
        if isinstance(event, _Failure):
            self._handle(event)
            return None
        return event

    def publish(self) -> bool:
        """Publishes the newest weights, if JAX has computed them, and returns whether it has."""
        version, params = self.newest
        if version != self._published[0]:
            arrays: list[Any] = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
            if not all(array.is_ready() for array in arrays):
                return False
            self._published = version, self._store(params)
        return True

    def release(self, number: int) -> None:
        """Allows an actor another rollout, because the learner has taken one."""
        with self._lock:
            self.places[number].unread -= 1
            self._start_rollout(self.places[number])

    def stats(self) -> tuple[ActorStats, ...]:
        now = time.monotonic()
        return tuple(
            ActorStats(
                p.node, p.rollouts, p.finished and now - p.finished, p.faults, p.pool_restarts, p.version
            )
            for p in self.places
        )

    def close(self, *, gently: bool) -> None:
        with self._lock:
            working = [place.actor for place in self.places if place.version != -1]
            for place in self.places:
                place.incarnation += 1
        if gently and self.ray.is_initialized():
            calls = [actor.close.remote() for actor in working]
            self.ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_TIMEOUT) if calls else None
        for place in self.places:
            self._kill(place, no_restart=True)

    # --- Calls, and their answers in a thread of Ray ------------------------------------------------

    def _start(self, place: _ActorPlace) -> None:
        """Starts the envs of a new actor, or of one that Ray starts again, once it is there."""
        with self._lock:
            place.incarnation += 1
            place.version = -1
            place.deadline, place.again = _deadline(self.start_timeout), math.inf
            self._call(place, "identify")

    def _call(self, place: _ActorPlace, method: str, *args: Any) -> None:
        place.pending = method
        future: Future[Any] = getattr(place.actor, method).remote(*args).future()
        future.add_done_callback(partial(self._on_answer, place, place.incarnation, method))

    def _on_answer(self, place: _ActorPlace, incarnation: int, method: str, future: Future[Any]) -> None:
        with self._lock:
            if place.incarnation != incarnation:
                return
            failure = future.exception()
            if method == "identify" and isinstance(failure, self.ray.exceptions.ActorUnavailableError):
                place.again = time.monotonic() + _RESTART_CHECK_INTERVAL  # Ray is starting the process
                return
            place.pending, place.deadline = "", math.inf
            try:
                failure = failure or getattr(self, f"_on_{method}")(place, future.result())
            except Exception as error:  # of the next call; Ray would only log it
                failure = error
            if failure is not None:
                place.pending = "failed"
                self._events.put(_Failure(place, incarnation, method, failure))

    def _on_identify(self, place: _ActorPlace, node: str) -> None:
        place.node, place.waits = node, False
        place.deadline = _deadline(self.start_timeout)
        place.uses += 1
        given = place.number, place.incarnation, place.index, place.snapshot
        self._call(place, "start", self._program, *given)

    def _on_start(self, place: _ActorPlace, failure: RemoteError | None) -> RemoteError | None:
        if failure is None:
            self.num_started += 1
            self._events.put(None)
            self._start_rollout(place)
        return failure

    def _start_rollout(self, place: _ActorPlace) -> None:
        """Starts the next rollout with the newest weights, unless the actor is busy or too far ahead."""
        count = self.rollouts_per_call
        if place.given_up or place.pending or place.unread + count > max(self.in_flight, count):
            return
        place.version, weights = self._published
        place.began = time.monotonic()
        late_s = max(_LATE_SECONDS, _LATE_FACTOR * place.longest_s)
        place.deadline = min(_deadline(self.rollout_timeout), _deadline(late_s))
        self._call(place, "run", place.version, weights, place.index, count)

    def _on_run(self, place: _ActorPlace, results: list[PackedRollout | RemoteError]) -> RemoteError | None:
        now = time.monotonic()
        for result in results:
            place.pool_restarts += result.pool_restarts
            if isinstance(result, RemoteError):
                return result
            place.finished, place.snapshot, place.uses = now, result.snapshot, 0
            place.rollouts += 1
            place.index += 1
            place.unread += 1
            self._events.put(result)
        place.longest_s = max(place.longest_s, now - place.began)
        self._start_rollout(place)
        return None

    # --- Faults, in the learner's thread ------------------------------------------------------------

    def _handle(self, failure: _Failure) -> None:
        place, error = failure.place, failure.error
        if place.incarnation != failure.incarnation:
            return
        if isinstance(error, RemoteError):
            when = "when it started" if failure.method == "start" else f"in rollout {place.index}"
            typed = _unpack_error(error, place, when)
            # If others have started, one that can't start is a fault of its node, such as a missing package.
            if place.version != -1 and not isinstance(typed.__cause__, _FAULTS):
                raise typed
            self._recover(place, typed, failure.method)
        else:  # of Ray, which repeats `ActorUnavailableError` while it starts a process again
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = f"was lost: {type(error).__name__}: {' '.join(lines)[:2000]}"
            # The process of a lost node lives on for a moment, and may answer `identify` before it ends.
            if failure.method == "start" and time.monotonic() - place.lost < _SAME_FAULT_INTERVAL:
                self._start(place)
                return
            place.lost = time.monotonic()
            self._recover(place, self._died(place, why), failure.method)

    def _time_out(self, place: _ActorPlace, incarnation: int) -> None:
        with self._lock:
            if place.incarnation != incarnation or time.monotonic() < place.deadline:
                return
            limit_s, late_s = self.rollout_timeout, time.monotonic() - place.began
            if place.pending == "run" and (limit_s is None or late_s < limit_s):
                _logger.warning(
                    "actor %d on %s has not finished rollout %d after %.0f s; rollout_timeout=... replaces "
                    "actors that hang",
                    *(place.number, place.node, place.index, late_s),
                )
                place.deadline = math.inf if limit_s is None else place.began + limit_s
                return
            # The call of `Rollouts` has an end; later, a lack of resources is no fault.
            if place.pending == "identify" and self.num_started >= self.least:
                self._report_wait(place)
                return
        if place.pending == "run":
            limit = f"rollout_timeout, {limit_s} s"
            why = f"did not finish rollout {place.index} within {limit}; raise the limit"
        else:
            why = f"was not ready within Timeouts.start, {self.start_timeout} s"
            if place.pending == "identify":
                free = self.ray.available_resources()
                why += f": Ray has not started it; it needs {dict(self.options)}, available: {free}"
        self._kill(place, no_restart=False)
        error = self._died(place, why)
        if self.num_started < self.least:
            raise error
        self._recover(place, error, place.pending)

    def _report_wait(self, place: _ActorPlace) -> None:
        place.deadline = _deadline(self.start_timeout)
        if not place.waits:
            place.waits = True
            _logger.warning(
                "the cluster has had no free resources for actor %d for %s s; it waits, and %d others work",
                *(place.number, self.start_timeout),
                sum(not (each.waits or each.given_up) for each in self.places),
            )

    def _recover(
        self, place: _ActorPlace, error: _errors.RolloutError | _errors.ActorDiedError, method: str
    ) -> None:
        """Counts a fault of an actor, and starts its envs again, or gives it up if enough are left."""
        if self.num_started < self.least and isinstance(error, _errors.RolloutError):
            raise error
        place.faults += 1
        if place.uses >= (1 if isinstance(error, _errors.RolloutError) else _MAX_SNAPSHOT_USES):
            place.snapshot = None  # the envs fail again and again from there
        try:
            if method == "identify":  # Ray has given it up
                raise error
            what = "resets" if place.snapshot is None else "restores"
            self._budget.spend(place.number, error, f", and {what} its envs")
        except (_errors.ActorDiedError, _errors.RolloutError):  # the error itself
            left = sum(not each.given_up for each in self.places) - 1
            if self.policy is None or left < self.least:
                raise
            with self._lock:
                place.given_up, place.version, place.deadline = True, -1, math.inf
                place.incarnation += 1
            self._kill(place, no_restart=True)
            _logger.error("%s The other actors continue: %d are left", error, left)
            return
        self._start(place)

    def _died(self, place: _ActorPlace, why: str) -> _errors.ActorDiedError:
        message = f"actor {place.number} on {place.node} {why}"
        return _errors.ActorDiedError(message, actor=place.number, node=place.node)

    def _kill(self, place: _ActorPlace, *, no_restart: bool) -> None:
        if self.ray.is_initialized():
            with suppress(Exception):
                self.ray.kill(place.actor, no_restart=no_restart)

    def _store(self, params: Any) -> Any:
        """Returns packed weights, or a reference to them in Ray's object store if they are large."""
        packed = pack(params)
        nbytes = sum(np.asarray(leaf).nbytes for leaf in packed[1])
        return packed if nbytes <= _MAX_MESSAGE_BYTES else self.ray.put(packed)


def _deadline(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds


def _unpack_error(packed: RemoteError, place: _ActorPlace, when: str) -> _errors.RolloutError:
    error = _errors.RolloutError(
        f"actor {place.number} on {place.node} raised {packed.name} {when}: {packed.message}\n\n"
        f"The actor's own traceback:\n{packed.traceback}",
        actor=place.number,
        node=place.node,
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
            than any before. `get` checks this. `timeouts` can limit single steps.
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
        self._early: deque[PackedRollout] = deque()  # finished before the least number of actors had started
        self._broken: BaseException | None = None
        self._rollouts = self._env_steps = 0
        # The version of the weights; for each actor, its next rollout and the snapshot before it.
        self._version = 0
        self._progress: list[tuple[int, bytes | None]] = [(0, None)] * most
        self._origin = {"seed": seed, "num_envs": num_envs}
        if resume is not None:
            self._load(resume)
        workers = options.setdefault("num_workers", 1)
        actor_options = {"num_cpus": workers, **(actor_options or {})}
        # One worker would only wait for the actor's process, and the other way round.
        needs_process = workers > 1 or not {"workers", "spare_envs", "batch_size"}.isdisjoint(options)
        needs_process |= bool(timeouts.step or timeouts.reset or actor_options.get("num_gpus"))
        options |= {"on_fault": on_fault, "timeouts": timeouts}
        options["backend"] = "process" if needs_process else "serial"
        if save_states:
            options.setdefault("states", num_envs)
        names = options.keys() & {option.name for option in fields(PoolConfig)}
        PoolConfig(**{name: options[name] for name in names})  # raises if one is invalid
        # Programs that an actor has compiled are there when its process is started again. On the CPU, JAX
        # keeps those that step envs only if it dispatches none asynchronously; an actor waits anyway.
        cache = os.path.join(tempfile.gettempdir(), f"jaxvec-{secrets.token_hex(8)}")
        jax_options: dict[str, Any] = {name: getattr(jax.config, name) for name in JAX_OPTIONS}
        jax_options |= {"jax_compilation_cache_dir": cache, "jax_persistent_cache_min_compile_time_secs": 0}
        jax_options["jax_cpu_enable_async_dispatch"] = False
        if not actor_options.get("num_gpus"):
            jax_options["jax_platforms"] = "cpu"
        for name in actor_options.get("runtime_env", {}).get("env_vars", {}):  # these have precedence
            jax_options.pop(name.lower(), None)
        program = RolloutProgram(
            rollout, env, num_envs, seed, options, save_states, cache, versions()["jaxvec"]
        )
        pickled = pickle_given(program, _refuse, dumps)
        check_keys(params)
        policy = parse_restart(on_fault)
        ray = cluster.connect()
        self._actors = _Actors(
            ray,
            {"max_restarts": -1 if policy else 0, **actor_options},
            [_ActorPlace(number, *progress) for number, progress in enumerate(self._progress)],
            least=least,
            start_timeout=timeouts.start,
            rollout_timeout=rollout_timeout,
            in_flight=in_flight,
            rollouts_per_call=rollouts_per_call,
            policy=policy,
            newest=(self._version, jax.tree.map(_copy_leaf, params)),
            jax_options=jax_options,
            program=pickled,
        )
        # In a thread, as a call of Ray that waits must not run in one of Ray's. Not at exit: Ray itself ends
        # the actors then.
        end = threading.Thread(target=partial(self._actors.close, gently=False), daemon=True).start
        self._finalizer = weakref.finalize(self, end)
        self._finalizer.atexit = False
        try:
            while self._actors.num_started < least:
                if (done := self._wait(None)) is not None:
                    self._early.append(done)
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
        deadline, left = _deadline(timeout), timeout
        while (done := self._early.popleft() if self._early else self._wait(left)) is None:
            if left == 0:
                raise _errors.NotReadyError(f"no rollout was done within {timeout} s; call get again")
            left = None if timeout is None else max(deadline - time.monotonic(), 0)
        self._actors.release(done.actor)
        self._progress[done.actor] = (done.index + 1, done.snapshot)
        self._rollouts += 1
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
        self._actors.newest = self._version, jax.tree.map(_copy_leaf, params)
        self._actors.publish()

    def checkpoint(self) -> bytes:
        """Returns the progress of the actors up to the last `get`, for `Rollouts(resume=...)`.

        It has the version of the weights, and for each actor the index of its next rollout. With
        `save_states`, it also has the states of its envs. Save it together with the weights.
        """
        return dumps({**self._origin, "version": self._version, "actors": self._progress})

    def stats(self) -> RolloutStats:
        """Returns the counters so far."""
        return RolloutStats(self._rollouts, self._env_steps, self._version, self._actors.stats())

    def close(self) -> None:
        """Closes the envs and ends the actors, within about ten seconds. May be called more than once."""
        if self._finalizer.detach():
            self._actors.close(gently=self._broken is None)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "Rollouts can't be pickled because they own actors; create them in the process that uses them"
        )

    def _load(self, resume: bytes) -> None:
        """Adopts the version and the progress of a checkpoint."""
        found = pickle.loads(resume)
        for name, value in self._origin.items():
            if found[name] != value:
                raise ValueError(f"resume: the checkpoint has {name}={found[name]}, not {value}")
        self._version = found["version"]
        self._progress = [*found["actors"], *self._progress[len(found["actors"]) :]][: len(self._progress)]

    def _wait(self, timeout: float | None) -> PackedRollout | None:
        self._check_open()
        try:
            return self._actors.wait(timeout)
        except (_errors.RolloutError, _errors.ActorDiedError) as error:
            self._broken = error
            raise

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise _errors.PoolClosedError("the Rollouts were closed; create new ones")
        if self._broken is not None:
            raise _errors.PoolBrokenError(
                f"the Rollouts failed before; create new ones: {self._broken}"
            ) from self._broken


def _copy_leaf(leaf: Any) -> Any:
    """Returns a copy, which JAX may make later, but which stays valid if the original is donated."""
    if isinstance(leaf, jax.Array):
        return jnp.copy(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _refuse(error: Exception) -> _errors.NotPicklableError:
    return _errors.NotPicklableError(
        f"the rollout, the env or an option can't be pickled, so it can't be sent to actors: {error}; create "
        "such objects inside the rollout function or the env"
    )
