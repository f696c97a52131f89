"""`jaxvec.Rollouts`: actors on a Ray cluster that run whole rollouts for a learner in this process.

    Rollouts.push -- weights ---> ActorGroup -- Ray call: weights -------> RolloutActor, which has a pool
    Rollouts.get <-- trajectory -- ActorGroup <-- answer: PackedRollout --- and the compiled function

With `backend="ray"`, `make` uses a cluster in the other way: the pool is here and its workers are there.
"""

from __future__ import annotations

import importlib
import logging
import pickle
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import InitVar, dataclass, field, fields
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvec import _errors
from jaxvec._arguments import derive_seeds
from jaxvec._backends.ray import cluster, nodes
from jaxvec._backends.ray.backend import Ray
from jaxvec._backends.remote.wire import versions
from jaxvec._options import OnFault, PoolConfig, Restart, Timeouts, check_count, parse_restart
from jaxvec._util import dumps
from jaxvec._vector_env import VectorEnv, pool_of
from jaxvec._workers.budget import Budget
from jaxvec._workers.protocol import pickle_given
from jaxvec.callbacks._functions import reset, restore, save
from jaxvec.callbacks._make import make

# --- In an actor: a local pool, and the user's rollout function, compiled for it -------------------------
# A pytree travels as a list of NumPy arrays, which Ray does not copy again, and its structure. cloudpickle
# pickles the structure, so that it may contain classes of a script or a notebook.

Leaves: TypeAlias = list[NDArray[Any]]

# The options of JAX that affect the numbers that a program computes.
_JAX_OPTIONS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)


class Program(NamedTuple):
    """The definition of the rollouts, equal for all actors; see `Rollouts`."""

    rollout: Callable[..., Any]
    env: Any
    num_envs: int
    seed: int
    options: Mapping[str, Any]  # of `make`
    save_states: bool
    jaxvec: str  # the learner's version
    jax: Mapping[str, Any]  # the learner's values of `_JAX_OPTIONS`


@dataclass(frozen=True)
class PackedRollout:
    """A finished rollout on its way to `Rollouts.get`; see `Rollout`."""

    structure: bytes
    leaves: Leaves
    env_steps: int
    pool_restarts: int  # during this rollout
    actor: int
    index: int
    version: int
    snapshot: bytes | None


class RemoteError(NamedTuple):
    """An exception in an actor, as text, and pickled if possible."""

    name: str
    message: str
    traceback: str
    pickled: bytes | None
    pool_restarts: int = 0  # during the rollout that failed


class RolloutActor:
    """The class of the Ray actors. Its calls run one at a time, in order."""

    _envs: VectorEnv | None = None

    def identify(self) -> str:
        ray: Any = importlib.import_module("ray")
        return f"node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:12]})"

    def start(
        self, pickled: bytes, number: int, incarnation: int, index: int, snapshot: bytes | None
    ) -> RemoteError | None:
        """Makes the pool of a pickled `Program`, and resets it or restores it from a snapshot.

        `incarnation` counts replacements, from 0; `index` is that of the next rollout.
        """
        try:
            program: Program = cloudpickle.loads(pickled)
            version = versions()["jaxvec"]
            if program.jaxvec != version:
                raise ImportError(
                    f"jaxvec has version {version} on this node, but {program.jaxvec} in the learner's "
                    "process; install the same version"
                )
            for name, value in program.jax.items():
                jax.config.update(name, value)
            self._program = jax.jit(program.rollout)
            self._envs = make(program.env, program.num_envs, **program.options)
            self._number = number
            seed = program.seed + number * program.num_envs
            if incarnation or index:  # the predecessor's seeds would repeat its episodes
                seed = derive_seeds(seed, incarnation, index)
            self._handle, self._timestep = reset(self._envs, seed=seed)
            self._saves = program.save_states
            if snapshot is not None:
                states, carry = pickle.loads(snapshot)
                self._handle, _ = restore(self._handle, self._envs.unpack_states(states))
                self._timestep = jax.device_put(unpack(*carry))
            self._snapshot()  # fails now, rather than after a rollout, if envs have no states
            self._key = jax.random.fold_in(jax.random.key(program.seed), number)
            self._fold_in = jax.jit(jax.random.fold_in)  # takes a tenth of the time of separate operations
            self._params: Any = None
            self._version = -1
            self._total = pool_of(self._envs).stats(processes=False).total
        except Exception as error:
            return _pack_error(error)
        return None

    def run(
        self, version: int, weights: tuple[bytes, Leaves], index: int, count: int
    ) -> list[PackedRollout | RemoteError]:
        """Runs `count` rollouts, or fewer if one fails. `weights` are only unpacked if they are new."""
        assert self._envs is not None
        results: list[PackedRollout | RemoteError] = []
        try:
            if version != self._version:
                self._params, self._version = jax.device_put(unpack(*weights)), version
            while len(results) < count:
                results.append(self._rollout(self._envs, index + len(results)))
        except Exception as error:
            try:
                self._envs.raise_if_failed()
                failure = _pack_error(error)
            except Exception as typed:  # the pool's error; JAX raises an error of its own with the same text
                failure = _pack_error(typed)
            results.append(failure._replace(pool_restarts=self._count_new(self._envs)[1]))
        return results

    def _rollout(self, envs: VectorEnv, index: int) -> PackedRollout:
        key = self._fold_in(self._key, np.uint32(index))
        self._handle, self._timestep, trajectory = self._program(
            self._params, self._handle, self._timestep, key
        )
        structure, leaves = pack(trajectory)
        snapshot = self._snapshot()
        counts = self._count_new(envs)
        return PackedRollout(structure, leaves, *counts, self._number, index, self._version, snapshot)

    def _count_new(self, envs: VectorEnv) -> tuple[int, int]:
        """Returns the numbers of env steps and of restarts since the last call."""
        before, self._total = self._total, pool_of(envs).stats(processes=False).total
        return self._total.steps - before.steps, self._total.restarts - before.restarts

    def _snapshot(self) -> bytes | None:
        """Returns the states of the envs and the argument of the next rollout, if they are to be saved."""
        if not self._saves or self._envs is None:
            return None
        self._handle, state = save(self._handle)
        # Ray copies bytes; an array would keep the whole rollout in its object store.
        return dumps((self._envs.pack_states(state).tobytes(), pack(self._timestep)))

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()


def pack(tree: Any) -> tuple[bytes, Leaves]:
    """Waits for a pytree of arrays; returns its pickled structure and its leaves."""
    check_keys(tree)
    leaves, structure = jax.tree.flatten(tree)
    return _dump(structure), jax.device_get(leaves)


def check_keys(tree: Any) -> None:
    """Raises `TypeError` if a pytree contains JAX keys, which NumPy can't hold."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                "params and trajectories can't contain JAX keys, nor, with save_states, the second result of "
                "the rollout; send jax.random.key_data(key), and call "
                "jax.random.wrap_key_data at the other end"
            )


def copy_leaf(leaf: Any) -> Any:
    """Returns a copy, which JAX may make later, but which stays valid if the original is donated."""
    if isinstance(leaf, jax.Array):
        return jnp.copy(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def unpack(structure: bytes, leaves: Leaves) -> Any:
    return jax.tree.unflatten(_load(structure), leaves)


@lru_cache(maxsize=16)
def _dump(structure: Any) -> bytes:
    return dumps(jax.tree.unflatten(structure, range(structure.num_leaves)))


@lru_cache(maxsize=16)
def _load(structure: bytes) -> Any:
    return jax.tree.structure(cloudpickle.loads(structure))


def _pack_error(error: Exception) -> RemoteError:
    pickled = None
    with suppress(Exception):
        pickled = dumps(error)
    return RemoteError(type(error).__name__, str(error), "".join(traceback.format_exception(error)), pickled)


# --- In the learner's process: the actors, which are kept busy with the newest weights and replaced when lost
# One thread owns all state of the actors. It executes events from a queue: Ray adds the answers of actors,
# and the learner adds the rollouts that it has taken. So answers are handled in the order in which they
# arrive, without polling or locks.

_logger = logging.getLogger("jaxvec")

# Errors of envs and workers, and not of the rollout function.
_FAULTS = _errors.EnvError, _errors.EnvTimeoutError, _errors.WorkerDiedError, _errors.PoolBrokenError

# A rollout is reported as late after this time in seconds, and this multiple of the actor's longest one.
_LATE_SECONDS = 60.0
_LATE_FACTOR = 10

# Weights up to this size are sent with each call. An object in Ray's store costs milliseconds of CPU time.
_MAX_MESSAGE_BYTES = 64 << 10

_CLOSE_TIMEOUT = 5.0  # seconds for actors to close their envs
_JOIN_TIMEOUT = 10.0  # seconds for the group's thread to end, with all actors
_SHUTDOWN_CHECK_INTERVAL = 1.0  # seconds between checks for `ray.shutdown()`, after which no answer arrives


# The next rollout of an actor, and the snapshot that it starts with, if there is one.
Progress: TypeAlias = tuple[int, bytes | None]


@dataclass
class _Place:
    """The place of an actor in the group, and its current actor."""

    number: int
    incarnation: int = -1
    actor: Any = None
    node: str = "no node yet"
    pending: str = ""  # name of the method that the actor runs, if any
    deadline: float = float("inf")  # of that call, of `time.monotonic()`
    dead_nodes: set[str] = field(default_factory=set[str])  # at the start of the actor
    waits: bool = False  # for free resources, longer than an actor may take to start
    given_up: bool = False  # its limits of faults are exceeded
    unread: int = 0  # finished rollouts that the learner has not taken
    index: int = 0  # of the next rollout
    snapshot: bytes | None = None  # after the last rollout, until it is used
    version: int = -1  # of the weights in use
    began: float = 0.0  # time of the start of the running rollout, of `time.monotonic()`
    finished: float | None = None  # time of the end of the last one
    longest_s: float = 0.0  # of the finished ones
    rollouts: int = 0
    faults: int = 0
    pool_restarts: int = 0


@dataclass(eq=False)
class ActorGroup:
    """Actors that run rollouts, and the thread that serves them. Timeouts are in seconds, or `None`."""

    ray: Any  # the module
    backend: Ray
    num_actors: tuple[int, int]  # least and most
    start_timeout: float | None
    rollout_timeout: float | None
    in_flight: int
    rollouts_per_call: int
    policy: Restart | None
    newest: tuple[int, Any]  # version and weights, a pytree; `Rollouts.push` replaces the tuple
    pickled: InitVar[bytes]  # the `Program`
    resume: InitVar[Sequence[Progress]]
    error: BaseException | None = None  # set before the end is queued; `None` after `stop`

    def __post_init__(self, pickled: bytes, resume: Sequence[Progress]) -> None:
        self.finished: queue.SimpleQueue[PackedRollout | None] = queue.SimpleQueue()  # `None` is the end
        self._budget = Budget(self.policy, self.num_actors[1], who="actor")
        self._program = self.ray.put(pickled)
        self._published = self.newest[0], self._store(self.newest[1])
        workers = [self.backend.workers_per_actor] * self.num_actors[1]
        self._placement = nodes.Placement(self.ray, self.backend, workers, self.start_timeout)
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # `None` ends it
        self._places = [_Place(number) for number in range(self.num_actors[1])]
        for place, progress in zip(self._places, resume, strict=False):
            place.index, place.snapshot = progress
        self._num_started = 0
        self._enough_started = threading.Event()  # also set at the end
        address = self.ray.get_runtime_context().gcs_address
        self._head = nodes.HeadMonitor(address, lambda why: self._events.put(partial(self._fail, why)))
        self._thread = threading.Thread(target=self._run, name="jaxvec-rollouts", daemon=True)
        self._thread.start()

    # --- Calls of the learner, from any thread ------------------------------------------------------

    def wait_until_started(self) -> None:
        """Waits until the least number of actors has started; raises the error that prevents it."""
        self._enough_started.wait()
        if self.error is not None:
            raise self.error

    def release(self, actor: int) -> None:
        """Allows an actor another rollout, because the learner has taken one."""
        self._events.put(partial(self._release, self._places[actor]))

    def stats(self) -> tuple[ActorStats, ...]:
        now = time.monotonic()
        return tuple(
            ActorStats(
                p.node, p.rollouts, p.finished and now - p.finished, p.faults, p.pool_restarts, p.version
            )
            for p in self._places
        )

    def stop(self) -> None:
        self._events.put(None)

    def close(self) -> None:
        self.stop()
        self._thread.join(_JOIN_TIMEOUT)

    # --- The group's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for place in self._places:
                self._start(place)
            while (event := self._next_event()) is not None:
                event()
        except BaseException as error:  # any error must reach the learner
            self.error = error
        finally:
            self._head.close()
            with suppress(Exception):
                self._end()
            self.finished.put(None)
            self._enough_started.set()

    def _next_event(self) -> Callable[[], None] | None:
        while True:
            first = min(self._places, key=lambda place: place.deadline)
            timeout = max(min(first.deadline - time.monotonic(), _SHUTDOWN_CHECK_INTERVAL), 0)
            try:
                return self._events.get(timeout=timeout)
            except queue.Empty:
                self._check_connected()
                if time.monotonic() >= first.deadline:
                    return partial(self._time_out, first)

    def _start(self, place: _Place) -> None:
        self._kill(place)
        place.incarnation += 1
        place.version = -1
        place.dead_nodes = nodes.find_dead_nodes(self.ray)
        place.node = "no node yet"
        options = self._placement.actor_options(place.number, self.backend.workers_per_actor)
        if not options["num_gpus"]:
            env_vars = options["runtime_env"].get("env_vars", {})
            options["runtime_env"]["env_vars"] = {"JAX_PLATFORMS": "cpu", **env_vars}
        place.actor = self.ray.remote(**options)(RolloutActor).remote()
        place.deadline = _deadline(self.start_timeout)
        # Retried: until Ray notices the death of a node it reports "unavailable", and lists no dead node.
        self._call(place, "identify", self._on_identified, retried=True)

    def _on_identified(self, place: _Place, node: str) -> None:
        place.node, place.waits = node, False
        place.deadline = _deadline(self.start_timeout)
        # A snapshot is used once: if the envs fail again from there, they are reset.
        snapshot, place.snapshot = place.snapshot, None
        numbers = place.number, place.incarnation, place.index
        self._call(place, "start", self._on_started, self._program, *numbers, snapshot)

    def _on_started(self, place: _Place, failure: RemoteError | None) -> None:
        if failure is not None:
            self._on_error(place, failure, "when it started")
            return
        place.deadline = float("inf")
        self._num_started += 1
        if self._num_started >= self.num_actors[0]:
            self._enough_started.set()
        self._start_rollout(place)

    def _start_rollout(self, place: _Place) -> None:
        """Starts the next rollout with the newest weights, unless the actor is busy or too far ahead."""
        count = self.rollouts_per_call
        if place.given_up or place.pending or place.unread + count > max(self.in_flight, count):
            return
        place.version, weights = self._publish()
        place.began = time.monotonic()
        late_s = max(_LATE_SECONDS, _LATE_FACTOR * place.longest_s)
        place.deadline = min(_deadline(self.rollout_timeout), _deadline(late_s))
        self._call(place, "run", self._on_rollouts, place.version, weights, place.index, count)

    def _publish(self) -> tuple[int, Any]:
        """Returns the version of the newest weights that are computed, and these weights for the actors."""
        version, params = self.newest
        arrays: list[Any] = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
        if version != self._published[0] and all(array.is_ready() for array in arrays):
            self._published = version, self._store(params)
        return self._published

    def _store(self, params: Any) -> Any:
        """Returns packed weights, or a reference to them in Ray's object store if they are large."""
        packed = pack(params)
        nbytes = sum(np.asarray(leaf).nbytes for leaf in packed[1])
        return packed if nbytes <= _MAX_MESSAGE_BYTES else self.ray.put(packed)

    def _on_rollouts(self, place: _Place, results: list[PackedRollout | RemoteError]) -> None:
        place.deadline, now = float("inf"), time.monotonic()
        for result in results:
            place.pool_restarts += result.pool_restarts
            if isinstance(result, RemoteError):
                self._on_error(place, result, f"in rollout {place.index}")
                return
            place.finished = now
            place.rollouts += 1
            self.finished.put(result)
            place.snapshot = result.snapshot
            place.index += 1
            place.unread += 1
        place.longest_s = max(place.longest_s, now - place.began)
        self._start_rollout(place)

    def _on_error(self, place: _Place, failure: RemoteError, when: str) -> None:
        """Replaces an actor with a pool that can't start or is broken; raises any other error."""
        error = _unpack_error(failure, place, when)
        # If others have started, one that can't start is a fault of its node, such as a missing package.
        if place.version != -1 and not isinstance(error.__cause__, _FAULTS):
            raise error
        self._restart(place, error)

    def _release(self, place: _Place) -> None:
        place.unread -= 1
        self._start_rollout(place)

    def _time_out(self, place: _Place) -> None:
        if place.pending == "run":
            limit_s, now = self.rollout_timeout, time.monotonic()
            if limit_s is None or now < place.began + limit_s:
                _logger.warning(
                    "actor %d on %s has not finished rollout %d after %.0f s; rollout_timeout=... replaces "
                    "actors that hang",
                    *(place.number, place.node, place.index, now - place.began),
                )
                place.deadline = float("inf") if limit_s is None else place.began + limit_s
                return
            limit = f"rollout_timeout, {limit_s} s"
            self._replace(place, f"did not finish rollout {place.index} within {limit}; raise the limit")
            return
        why = f"was not ready within Timeouts.start, {self.start_timeout} s"
        if place.pending == "identify":
            # The call of `Rollouts` has an end; later, a lack of resources is no fault.
            if self._enough_started.is_set() and not self._placement.loss():
                self._wait_for_resources(place)
                return
            needs, free = self.backend.of_actor(), self.ray.available_resources()
            why += f": Ray has not started it; it needs {needs}, available: {free}"
        self._replace(place, why)

    def _replace(self, place: _Place, why: str) -> None:
        """Replaces an actor that can't be used any more; raises an error if the policy does not allow it."""
        self._check_connected()
        # Ray places actors on a dead node until it notices the death. That does not count as a fault.
        if place.pending == "identify" and not nodes.find_dead_nodes(self.ray) <= place.dead_nodes:
            self._start(place)
            return
        where = f"actor {place.number} on {place.node}"
        error = _errors.ActorDiedError(f"{where} {why}", actor=place.number, node=place.node)
        if loss := self._placement.loss():
            error.args = (f"{error}\n{loss}",)
            raise error
        self._restart(place, error)

    def _restart(self, place: _Place, error: _errors.RolloutError | _errors.ActorDiedError) -> None:
        """Counts a fault of an actor, and starts another one, or gives up its place if enough are left."""
        self._kill(place)
        if not self._enough_started.is_set():
            raise error
        place.faults += 1
        try:
            self._budget.spend(place.number, error, ", and resets its envs")
        except (_errors.ActorDiedError, _errors.RolloutError):  # the error itself
            place.given_up = True
            left = sum(not each.given_up for each in self._places)
            if self.policy is None or left < self.num_actors[0]:
                raise
            place.actor, place.deadline, place.version = None, float("inf"), -1
            place.incarnation += 1  # late answers are of no interest
            _logger.error("%s The other actors continue: %d are left", error, left)
            return
        self._start(place)

    def _wait_for_resources(self, place: _Place) -> None:
        place.deadline = _deadline(self.start_timeout)
        if not place.waits:
            place.waits = True
            _logger.warning(
                "the cluster has had no free resources for actor %d for %s s; it waits, and %d others work",
                *(place.number, self.start_timeout),
                sum(not (each.waits or each.given_up) for each in self._places),
            )

    def _check_connected(self) -> None:
        # After a shutdown, most calls of Ray would start another cluster.
        if not self.ray.is_initialized():
            self._fail("was lost: Ray was shut down")

    def _fail(self, why: str) -> None:
        """Raises an error that concerns all actors, in the name of the first."""
        node = self._places[0].node
        raise _errors.ActorDiedError(f"actor 0 on {node} {why}", actor=0, node=node)

    def _call(
        self, place: _Place, method: str, on_result: Callable[..., None], *args: Any, retried: bool = False
    ) -> None:
        """Calls a method of an actor. `on_result` gets the result in this thread."""
        incarnation = place.incarnation

        def handle(future: Future[Any]) -> None:
            if place.incarnation != incarnation:  # a late answer of an actor that was replaced
                return
            if (error := future.exception()) is not None:
                self._replace(place, nodes.describe_loss(error))
                return
            place.pending = ""
            on_result(place, future.result())

        place.pending = method
        bound = getattr(place.actor, method)
        if retried:
            bound = bound.options(max_task_retries=-1)
        future: Future[Any] = bound.remote(*args).future()
        future.add_done_callback(lambda future: self._events.put(partial(handle, future)))

    def _end(self) -> None:
        if self._head.lost or not self.ray.is_initialized():
            return
        if self.error is None:
            calls = [place.actor.close.remote() for place in self._places if place.actor is not None]
            self.ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_TIMEOUT)
        for place in self._places:
            self._kill(place)
        self._placement.close()

    def _kill(self, place: _Place) -> None:
        if place.actor is not None:
            with suppress(Exception):
                self.ray.kill(place.actor, no_restart=True)


def _deadline(seconds: float | None) -> float:
    return float("inf") if seconds is None else time.monotonic() + seconds


def _unpack_error(packed: RemoteError, place: _Place, when: str) -> _errors.RolloutError:
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

_POOL_OPTIONS = {option.name for option in fields(PoolConfig)}


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
        with jaxvec.Rollouts(rollout, "CartPole-v1", 16, num_actors=4, params=params) as rollouts:
            done = rollouts.get()
            print(done.actor, done.index, done.lag, done.trajectory.obs.shape)
        ```
    """

    trajectory: Any
    actor: int
    index: int
    version: int
    lag: int


@dataclass(frozen=True)
class ActorStats:
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


@dataclass(frozen=True)
class RolloutStats:
    """Counters of a `Rollouts` object.

    Attributes:
        rollouts: Number of rollouts that `get` has returned.
        env_steps: Number of env steps in these rollouts.
        dropped: Number of rollouts that were dropped because of `max_lag`.
        version: Version of the newest weights.
        actors: `ActorStats` of each actor.

    Example:
        ```python
        with jaxvec.Rollouts(rollout, "CartPole-v1", 16, num_actors=4, params=params) as rollouts:
            rollouts.get()
            print(rollouts.stats().env_steps, rollouts.stats().actors[0].faults)
        ```
    """

    rollouts: int
    env_steps: int
    dropped: int
    version: int
    actors: tuple[ActorStats, ...]


class Rollouts(AbstractContextManager["Rollouts"]):
    """Actors on a Ray cluster that run rollouts, each in a local pool, for a learner in this process.

    Each actor runs `rollout(params, handle, timestep, key)`, compiled by `jax.jit`, again and again. The
    function steps the actor's envs as often as it likes. It returns the next handle, the `timestep` argument
    of the next rollout, and a trajectory. So the learner's process does some work per rollout, and none per
    step. The first rollout gets the time step of the reset.

    Rollout `index` of actor `i` gets the key
    `jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), i), index)`, and env `j` of that actor gets
    the seed `seed + i * num_envs + j`. An actor that replaces a lost one continues the numbering of its
    rollouts, and resets its envs with other seeds, or restores them (`save_states`).

    Actors compute on the CPU, unless `backend` gives them GPUs. They receive the function and `env` by
    cloudpickle. They adopt those JAX options of the learner that affect results, such as x64.

    Args:
        rollout: Function of the newest weights, the handle of the actor's envs, the second result of the
            previous rollout, and a key; see above. Arguments and results are pytrees of arrays.
        env: Env id or constructor, as for `jaxvec.make`.
        num_envs: Number of envs of each actor.
        num_actors: Least and most number of actors, as `(2, 16)`; `16` means `(1, 16)`. The call waits until
            the least number has started, and `get` raises if faults leave fewer. The others start as soon as
            the cluster has free resources, and so do replacements of lost actors.
        params: First weights, version 0; a pytree of arrays.
        seed: Seed of the envs and keys.
        backend: `"ray"`, or a `jaxvec.Ray`. An actor holds `resources_per_worker` times
            `workers_per_actor`, and its pool has `workers_per_actor` worker processes. A single worker is
            the actor itself, unless `timeouts` limits steps or resets, the actor has a GPU, or
            `workers=jaxvec.Workers()` asks for a process. Envs that use JAX need a process.
        device: `jax.Device` or sharding for trajectories; JAX's default if `None`.
        max_lag: Largest number of versions between the weights of a trajectory and the newest weights. Older
            trajectories are dropped and counted. `None` for no limit.
        rollouts_per_call: Number of rollouts that an actor runs per message, all with the same weights. This
            saves time if they are short. They arrive together, and `rollout_timeout` limits all of them.
        in_flight: Number of rollouts that an actor may finish before `get` returns the first of them; at
            least `rollouts_per_call`.
        on_fault: Fault policy of the actors' pools, as for `jaxvec.make`. `"restart"`, or a
            `jaxvec.Restart`, also replaces lost actors, and those with a pool that its envs or workers have
            broken; its limits count separately for each actor. One that exceeds them is given up, while
            enough others are left. An exception of `rollout` always ends all.
        save_states: Whether actors save the states of their envs with each rollout. A replacement of an actor
            then continues from its last rollout, and so does `resume`, bit for bit.
        resume: Result of `checkpoint`. Actors continue with the next rollouts, and `params` have the version
            that was the newest. Load only what you trust: it contains pickles.
        timeouts: Timeouts of the actors' pools, as for `jaxvec.make`. `start` also limits the time in which
            an actor makes and resets its pool.
        rollout_timeout: Seconds for one rollout, including compilation, before its actor counts as lost;
            `None` for no limit, but the log reports a rollout that takes over a minute and ten times longer
            than any before. `timeouts` can limit single steps.
        **options: Other options of `jaxvec.make`, and arguments of the env.

    Raises:
        RolloutError: An actor could not make its pool; `__cause__` is the error of `make`.
        ActorDiedError: An actor was lost, or was not ready in time.
        NotPicklableError: The function, the env or an option can't be pickled.
        ImportError, ConnectionError: Ray is not installed, or no cluster answers.
        ValueError, TypeError: An argument is invalid.

    Example:
        ```python
        def rollout(params, handle, timestep, key):
            def step(carry, key):
                handle, obs = carry
                action = jax.random.categorical(key, obs @ params)
                handle, timestep = jaxvec.step(handle, action)
                return (handle, timestep.obs), (obs, action, timestep)

            (handle, obs), trajectory = jax.lax.scan(step, (handle, timestep.obs), jax.random.split(key, 64))
            return handle, timestep._replace(obs=obs), trajectory

        params = jnp.zeros((4, 2))
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
        backend: Literal["ray"] | Ray = "ray",
        device: Any = None,
        max_lag: int | None = None,
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
        ray_options = Ray() if backend == "ray" else backend
        if not isinstance(ray_options, Ray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f'backend must be "ray" or a jaxvec.Ray, not {backend!r}')
        least, most = num_actors if isinstance(num_actors, tuple) else (1, num_actors)
        counts = {"num_envs": num_envs, "rollouts_per_call": rollouts_per_call, "in_flight": in_flight}
        for name, count in {"num_actors": most, "num_actors[0]": least, **counts}.items():
            check_count(name, count, 1)
        if least > most:
            raise ValueError(f"num_actors must be (least, most), not {num_actors}")
        check_count("seed", seed, 0)
        if max_lag is not None:
            check_count("max_lag", max_lag, 0)
        if "num_workers" in options:
            raise TypeError(
                "Rollouts has no option 'num_workers': Ray(workers_per_actor=) sets the number of workers of "
                "each actor's pool"
            )
        workers = ray_options.workers_per_actor
        # One worker would only wait for the actor's process, and the other way round.
        needs_process = workers > 1 or not {"workers", "spare_envs", "batch_size"}.isdisjoint(options)
        needs_process |= bool(timeouts.step or timeouts.reset or ray_options.of_actor().get("GPU"))
        options |= {"num_workers": workers, "on_fault": on_fault, "timeouts": timeouts}
        options["backend"] = "process" if needs_process else "serial"
        if save_states:
            options.setdefault("states", num_envs)
        PoolConfig(**{name: options[name] for name in _POOL_OPTIONS & {*options}})  # raises if one is invalid
        here = versions()["jaxvec"], {name: getattr(jax.config, name) for name in _JAX_OPTIONS}
        program = Program(rollout, env, num_envs, seed, options, save_states, *here)
        pickled = pickle_given(program, _refuse, dumps)
        ray = cluster.connect(ray_options, timeouts.start).ray
        nodes.check_place(ray, ray_options.of_actor())
        self._max_lag = max_lag
        self._device = device
        self._version = 0
        self._progress: list[Progress] = [(0, None)] * most
        self._origin = {"seed": seed, "num_envs": num_envs}
        if resume is not None:
            self._load(resume)
        self._closed = False
        self._broken: BaseException | None = None
        self._rollouts = self._env_steps = self._dropped = 0
        self._actors = ActorGroup(
            ray,
            ray_options,
            num_actors=(least, most),
            start_timeout=timeouts.start,
            rollout_timeout=rollout_timeout,
            in_flight=in_flight,
            rollouts_per_call=rollouts_per_call,
            policy=parse_restart(on_fault),
            newest=(self._version, jax.tree.map(copy_leaf, params)),
            pickled=pickled,
            resume=self._progress,
        )
        # Not at exit: Ray itself ends the actors then.
        weakref.finalize(self, self._actors.stop).atexit = False
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
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_open()
            try:
                done = self._actors.finished.get(timeout=until and max(until - time.monotonic(), 0))
            except queue.Empty:
                why = f"no rollout was done within {timeout} s; call get again"
                raise _errors.NotReadyError(why) from None
            if done is None:
                self._actors.finished.put(None)  # the mark of the end, for other threads and later calls
                self._broken = self._actors.error
                if self._broken is not None:
                    raise self._broken
                continue
            self._actors.release(done.actor)
            self._progress[done.actor] = (done.index + 1, done.snapshot)
            lag = self._version - done.version
            if self._max_lag is None or lag <= self._max_lag:
                break
            self._dropped += 1
        self._rollouts += 1
        self._env_steps += done.env_steps
        trajectory = jax.device_put(unpack(done.structure, done.leaves), self._device)
        return Rollout(trajectory, done.actor, done.index, done.version, lag)

    def push(self, params: Any) -> None:
        """Publishes new weights. Each actor uses the newest weights from its next rollout on.

        The call does not wait until JAX has computed the weights. Until then, rollouts start with the newest
        ones that are computed. The weights are copied, so they may be donated to the next update.

        Args:
            params: Pytree of arrays. Actors compile again if its structure, shapes or dtypes are new.

        Raises:
            PoolBrokenError, PoolClosedError: An earlier call raised an error, or `close` was called.
        """
        self._check_open()
        check_keys(params)
        weights = jax.tree.map(copy_leaf, params)
        self._version += 1
        self._actors.newest = self._version, weights

    def checkpoint(self) -> bytes:
        """Returns the progress of the actors up to the last `get`, for `Rollouts(resume=...)`.

        It has the version of the weights, and for each actor the index of its next rollout. With
        `save_states`, it also has the states of its envs. Save it together with the weights.
        """
        return dumps({**self._origin, "version": self._version, "actors": self._progress})

    def stats(self) -> RolloutStats:
        """Returns the counters so far."""
        counts = self._rollouts, self._env_steps, self._dropped
        return RolloutStats(*counts, self._version, self._actors.stats())

    def close(self) -> None:
        """Closes the envs and ends the actors, within about ten seconds. May be called more than once."""
        self._closed = True
        self._actors.close()

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

    def _check_open(self) -> None:
        if self._closed:
            raise _errors.PoolClosedError("the Rollouts were closed; create new ones")
        if self._broken is not None:
            raise _errors.PoolBrokenError(
                f"the Rollouts failed before; create new ones: {self._broken}"
            ) from self._broken


def _refuse(error: Exception) -> _errors.NotPicklableError:
    return _errors.NotPicklableError(
        f"the rollout, the env or an option can't be pickled, so it can't be sent to actors: {error}; create "
        "such objects inside the rollout function or the env"
    )
