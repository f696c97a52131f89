"""Rollouts on a Ray cluster: actors that step pools of their own for a learner here."""

from __future__ import annotations

import importlib
import pickle
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, TypeAlias

import cloudpickle
import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from jaxvec._arguments import derive_seeds
from jaxvec._config import Budget, PoolConfig, Ray, Restart, Timeouts, parse_restart
from jaxvec._errors import (
    ActorDiedError,
    NotPicklableError,
    NotReadyError,
    PoolBrokenError,
    PoolClosedError,
    RolloutError,
)
from jaxvec._ray import cluster
from jaxvec._ray.nodes import (
    HeadMonitor,
    Placement,
    check_place,
    describe_loss,
    find_dead_nodes,
    node_identity,
    split_runtime_env,
)
from jaxvec._util import dumps
from jaxvec._vector_env import VectorEnv
from jaxvec._workers.worker import pickle_given
from jaxvec.callbacks._functions import reset
from jaxvec.callbacks._make import make

# ----------------------------------------------------------------------------------------------------------
# What runs in an actor: a local pool, and the user's rollout, compiled for it.
#
# Pytrees travel as a list of NumPy arrays, which Ray does not copy once more, and their structure. That is
# pickled by the pickler that the program came by, so that classes of a script or a notebook are found
# again.
# ----------------------------------------------------------------------------------------------------------

Leaves: TypeAlias = list[NDArray[Any]]

# Of JAX's options, those that decide which numbers a program computes.
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)


@dataclass(frozen=True)
class Program:
    """What all actors are given.

    Attributes:
        rollout, env, num_envs, seed: of the user.
        options: of `make`.
        jaxvec: its version.
        jax: options of JAX.
    """

    rollout: Callable[..., Any]
    env: Any
    num_envs: int
    seed: int
    options: Mapping[str, Any]
    jaxvec: str
    jax: Mapping[str, Any]


@dataclass(frozen=True)
class Played:
    """A rollout that is done: its trajectory, and how many env steps were taken for it."""

    structure: bytes
    leaves: Leaves
    env_steps: int


@dataclass(frozen=True)
class Raised:
    """An exception of the user's code, as text, and pickled if it can be."""

    kind: str
    message: str
    traceback: str
    pickled: bytes | None


class Actor:
    """Makes rollouts, one after the other."""

    _envs: VectorEnv | None = None

    def identify(self) -> str:
        """Says where this is."""
        ray: Any = importlib.import_module("ray")
        return f"node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:12]})"

    def start(self, pickled: bytes, number: int, incarnation: int) -> Raised | None:
        """Makes the pool and resets it.

        Args:
            pickled: the `Program`.
            number: of this actor.
            incarnation: how many were there before in its place.
        """
        try:
            self._start(cloudpickle.loads(pickled), number, incarnation)
        except Exception as error:
            return _describe(error)
        return None

    def rollout(self, version: int, weights: tuple[bytes, Leaves], index: int) -> Played | Raised:
        """Makes a rollout, with weights that are converted only if their version is new."""
        try:
            return self._play(version, weights, index)
        except Exception as error:
            return _describe(self._typed(error))

    def close(self) -> None:
        """Closes the envs."""
        if self._envs is not None:
            self._envs.close()

    def _typed(self, error: Exception) -> Exception:
        """Returns the pool's own error, of which a compiled program tells the text."""
        assert self._envs is not None
        try:
            self._envs.raise_if_failed()
        except Exception as typed:
            return typed
        return error

    def _start(self, program: Program, number: int, incarnation: int) -> None:
        ours = node_identity()["jaxvec"]
        if program.jaxvec != ours:
            raise ImportError(f"jaxvec is {ours} here, and {program.jaxvec} where the learner is")
        for name, value in program.jax.items():
            jax.config.update(name, value)
        self._rollout = jax.jit(program.rollout)
        self._envs = make(program.env, program.num_envs, **program.options)
        seed = program.seed + number * program.num_envs
        if incarnation:  # the same episodes again would tell nothing new
            seed = derive_seeds(seed, incarnation)
        self._handle, self._timestep = reset(self._envs, seed=seed)
        self._key = jax.random.fold_in(jax.random.key(program.seed), number)
        self._params: Any = None
        self._version = -1

    def _play(self, version: int, weights: tuple[bytes, Leaves], index: int) -> Played:
        assert self._envs is not None
        if version != self._version:
            self._params, self._version = jax.device_put(unpack(*weights)), version
        before = self._envs.stats().total.steps
        key = jax.random.fold_in(self._key, index)
        self._handle, self._timestep, trajectory = self._rollout(
            self._params, self._handle, self._timestep, key
        )
        structure, leaves = pack(trajectory)
        return Played(structure, leaves, self._envs.stats().total.steps - before)


def jax_options() -> dict[str, Any]:
    """Returns what actors have to set so that they compute what this process would."""
    return {name: getattr(jax.config, name) for name in _OPTIONS}


def pack(tree: Any) -> tuple[bytes, Leaves]:
    """Returns what a pytree of arrays travels as, once it is computed."""
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                "JAX keys can't travel; take jax.random.key_data, and wrap_key_data where it arrives"
            )
    return _dump(structure), jax.device_get(leaves)


def unpack(structure: bytes, leaves: Leaves) -> Any:
    """Returns the pytree."""
    return jax.tree.unflatten(_load(structure), leaves)


@lru_cache(maxsize=16)
def _dump(structure: Any) -> bytes:
    return dumps(jax.tree.unflatten(structure, range(structure.num_leaves)))


@lru_cache(maxsize=16)
def _load(structure: bytes) -> Any:
    return jax.tree.structure(cloudpickle.loads(structure))


def _describe(error: Exception) -> Raised:
    pickled = None
    with suppress(Exception):
        pickled = dumps(error)
    return Raised(type(error).__name__, str(error), "".join(traceback.format_exception(error)), pickled)


# ----------------------------------------------------------------------------------------------------------
# The actors of a learner: started, kept busy with the newest weights, and replaced when they are lost.
#
# One thread does all of this. It takes its turns from a queue, which Ray fills when an answer is there, and
# the learner when it has taken a rollout. So who is done first comes first, and nobody polls or takes
# locks.
# ----------------------------------------------------------------------------------------------------------

_CLOSE_TIMEOUT = 5.0  # seconds for envs to be closed
_SHUTDOWN_CHECK_INTERVAL = (
    1.0  # seconds between looks whether Ray was shut down, after which no answer ever comes
)


@dataclass(frozen=True)
class Done:
    """A rollout that is done."""

    played: Played
    actor: int
    index: int
    version: int


@dataclass(frozen=True)
class Terms:
    """What actors are held to.

    Attributes:
        ray: the module.
        options: of the user.
        num_actors: how many there are.
        start_timeout: seconds until one is ready; `None` for ever.
        rollout_timeout: seconds that a rollout may take.
        in_flight: how many rollouts an actor may be ahead.
        policy: whether a lost one is replaced.
    """

    ray: Any
    options: Ray
    num_actors: int
    start_timeout: float | None
    rollout_timeout: float | None
    in_flight: int
    policy: Restart | None


@dataclass
class _Place:
    """One of the places for actors, and who is there now."""

    number: int
    incarnation: int = -1
    actor: Any = None
    node: str = "no node yet"
    asked: str = ""  # what it is at, if anything
    deadline: float = float("inf")  # when it has to be done with that
    dead_nodes: set[str] = field(default_factory=set[str])  # when it was started
    unread: int = 0
    index: int = 0  # of the next rollout
    version: int = -1  # that it plays with


class Actors:
    """Actors that make rollouts.

    Attributes:
        weights: the newest version, and what Ray knows them by.
        done: rollouts, the first done first; `None`, which is to be put back, when there will be no more.
        error: why there will be no more; `None` if they were closed.
        budget: how often each was replaced.
    """

    def __init__(self, terms: Terms, placement: Placement, program: bytes, weights: tuple[int, Any]) -> None:
        """Begins to start them.

        Args:
            terms: of the user.
            placement: where they are put.
            program: for all of them, pickled.
            weights: the first.
        """
        self.weights = weights
        self.done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.budget = Budget(terms.policy, terms.num_actors, who="actor")
        self._terms = terms
        self._ray = terms.ray
        self._placement = placement
        self._program = self._ray.put(program)
        self._turns: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._places = [_Place(number) for number in range(terms.num_actors)]
        self._num_started = 0
        self._up = threading.Event()  # or over
        self._head = HeadMonitor(self._ray.get_runtime_context().gcs_address, self._lose_head)
        self._thread = threading.Thread(target=self._run, name="jaxvec-rollouts", daemon=True)
        self._thread.start()

    # --- what the learner does, in any thread -------------------------------------------------------

    def wait_until_up(self) -> None:
        """Waits until all have started; raises what kept one from it."""
        self._up.wait()
        if self.error is not None:
            raise self.error

    def take(self, actor: int) -> None:
        """Notes that a rollout of an actor was taken, so that it may make another."""
        self._turns.put(partial(self._release, self._places[actor]))

    def versions(self) -> tuple[int, ...]:
        """Returns the weights' version with which each plays."""
        return tuple(place.version for place in self._places)

    def stop(self) -> None:
        """Has them end soon."""
        self._turns.put(None)

    def join(self, timeout: float) -> None:
        """Waits for the end, but no longer than so many seconds."""
        self._thread.join(timeout)

    # --- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            dead_nodes = find_dead_nodes(self._ray)
            for place in self._places:
                self._start(place, dead_nodes)
            while (turn := self._next_turn()) is not None:
                turn()
        except BaseException as error:  # whatever it is, the learner is to hear of it
            self.error = error
        finally:
            self._head.close()
            with suppress(Exception):
                self._end()
            self.done.put(None)
            self._up.set()

    def _next_turn(self) -> Callable[[], None] | None:
        while True:
            first = min(self._places, key=lambda place: place.deadline)
            try:
                return self._turns.get(
                    timeout=max(min(first.deadline - time.monotonic(), _SHUTDOWN_CHECK_INTERVAL), 0)
                )
            except queue.Empty:
                self._check_connected()
                if time.monotonic() >= first.deadline:
                    return partial(self._give_up, first)

    def _start(self, place: _Place, dead_nodes: set[str]) -> None:
        place.incarnation += 1
        place.version = -1
        place.dead_nodes = dead_nodes
        place.node = "no node yet"
        wanted = self._terms.options
        runtime_env = split_runtime_env(wanted.runtime_env or {})[1]
        if not wanted.of_actor().get("GPU"):
            runtime_env["env_vars"] = {"JAX_PLATFORMS": "cpu", **runtime_env.get("env_vars", {})}
        options = self._placement.actor_options(place.number, wanted.workers_per_actor, runtime_env)
        place.actor = self._ray.remote(**options)(Actor).remote()
        place.deadline = _deadline(self._terms.start_timeout)
        # Retried: until Ray knows that a node is dead, it says "unavailable", and misses no node.
        self._ask(place, "identify", self._meet, options={"max_task_retries": -1})

    def _meet(self, place: _Place, node: str) -> None:
        place.node = node
        self._ask(place, "start", self._welcome, self._program, place.number, place.incarnation)

    def _welcome(self, place: _Place, failure: Raised | None) -> None:
        if failure is not None:
            raise _to_error(failure, place, "when it started")
        place.deadline = float("inf")
        self._num_started += 1
        if self._num_started >= len(self._places):
            self._up.set()
        self._feed(place)

    def _feed(self, place: _Place) -> None:
        """Has an actor make the next rollout, with the newest weights, unless it is busy or far ahead."""
        if place.asked or place.unread >= self._terms.in_flight:
            return
        place.version, weights = self.weights
        place.deadline = _deadline(self._terms.rollout_timeout)
        self._ask(place, "rollout", self._receive, place.version, weights, place.index)

    def _receive(self, place: _Place, came: Played | Raised) -> None:
        if isinstance(came, Raised):
            raise _to_error(came, place, f"in rollout {place.index}")
        place.deadline = float("inf")
        self.done.put(Done(came, place.number, place.index, place.version))
        place.index += 1
        place.unread += 1
        self._feed(place)

    def _release(self, place: _Place) -> None:
        place.unread -= 1
        self._feed(place)

    def _give_up(self, place: _Place) -> None:
        if place.asked == "rollout":
            why = f"was not done with rollout {place.index} within rollout_timeout"
            self._lose(place, f"{why}, {self._terms.rollout_timeout} s")
            return
        why = f"was not ready within Timeouts.start, {self._terms.start_timeout} s"
        if place.asked == "identify":
            needs, free = self._terms.options.of_actor(), self._ray.available_resources()
            why += f": Ray has not started it; it needs {needs}, and free are {free}"
        self._lose(place, why)

    def _lose(self, place: _Place, why: str) -> None:
        """Replaces an actor that can't be used any more; raises if that must not be."""
        self._check_connected()
        self._kill(place)
        dead_nodes = find_dead_nodes(self._ray)
        # Ray gives out a dead node until it misses it. That is no further fault.
        if place.asked != "identify" or dead_nodes <= place.dead_nodes:
            where = f"actor {place.number} on {place.node}"
            error = ActorDiedError(f"{where} {why}", actor=place.number, node=place.node)
            if not self._up.is_set():
                raise error
            if gone := self._placement.lost():
                error.args = (f"{error}\n{gone}",)
                raise error
            self.budget.spend(place.number, error, ", and starts anew")
        self._start(place, dead_nodes)

    def _check_connected(self) -> None:
        """Raises if Ray was shut down, as most calls would start another one then."""
        if not self._ray.is_initialized():
            self._fail("was lost: Ray was shut down")

    def _lose_head(self, why: str) -> None:
        self._turns.put(partial(self._fail, why))

    def _fail(self, why: str) -> None:
        """Raises what has happened to all actors."""
        node = self._places[0].node  # as good as any
        raise ActorDiedError(f"actor 0 on {node} {why}", actor=0, node=node)

    def _ask(
        self,
        place: _Place,
        method: str,
        reply: Callable[[_Place, Any], None],
        *args: Any,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Calls an actor; `reply` gets its answer in a turn of this thread."""
        incarnation = place.incarnation

        def answer(future: Future[Any]) -> None:
            if place.incarnation != incarnation:  # the late word of one that was lost
                return
            if (error := future.exception()) is not None:
                self._lose(place, describe_loss(error))
                return
            place.asked = ""
            reply(place, future.result())

        place.asked = method
        call = getattr(place.actor, method).options(**(options or {}))
        future: Future[Any] = call.remote(*args).future()
        future.add_done_callback(lambda future: self._turns.put(partial(answer, future)))

    def _end(self) -> None:
        if self._head.lost or not self._ray.is_initialized():
            return
        if self.error is None:
            asked = [place.actor.close.remote() for place in self._places if place.actor is not None]
            self._ray.wait(asked, num_returns=len(asked), timeout=_CLOSE_TIMEOUT)
        for place in self._places:
            self._kill(place)
        self._placement.close()

    def _kill(self, place: _Place) -> None:
        if place.actor is not None:
            with suppress(Exception):
                self._ray.kill(place.actor, no_restart=True)


def _deadline(seconds: float | None) -> float:
    return float("inf") if seconds is None else time.monotonic() + seconds


def _to_error(said: Raised, place: _Place, when: str) -> RolloutError:
    error = RolloutError(
        f"actor {place.number} on {place.node} raised {said.kind} {when}: {said.message}\n\n"
        f"The actor's own traceback:\n{said.traceback}",
        actor=place.number,
        node=place.node,
        remote_traceback=said.traceback,
    )
    if said.pickled is not None:
        with suppress(Exception):
            error.__cause__ = pickle.loads(said.pickled)
    return error


# ----------------------------------------------------------------------------------------------------------
# `jaxvec.Rollouts`: what a learner sees of its actors.
# ----------------------------------------------------------------------------------------------------------

_JOIN_TIMEOUT = 10.0  # seconds for actors to end

_POOL_OPTIONS = {option.name for option in fields(PoolConfig)}
_ELSEWHERE = {
    "num_workers": "Ray(workers_per_actor=) says how many workers each actor's pool has",
}


@dataclass(frozen=True)
class Rollout:
    """A rollout that an actor has made.

    Attributes:
        trajectory: what the user's function returned of it, on the learner's device. On the CPU its arrays
            may lie in Ray's object store, so copy what you keep for long.
        actor: index of the actor.
        index: how many rollouts of this actor were done before.
        version: of the weights that it was made with.
        lag: how many versions older these are than the newest.

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
class RolloutStats:
    """The work of actors so far.

    Attributes:
        rollouts: that `get` has returned.
        env_steps: that were taken for these.
        dropped: rollouts that were too old.
        restarts: `[num_actors]`, how often each was replaced.
        version: of the newest weights.
        versions: `[num_actors]`, of the weights with which each plays; -1 while it starts.

    Example:
        ```python
        with jaxvec.Rollouts(rollout, "CartPole-v1", 16, num_actors=4, params=params) as rollouts:
            rollouts.get()
            print(rollouts.stats().env_steps)
        ```
    """

    rollouts: int
    env_steps: int
    dropped: int
    restarts: tuple[int, ...]
    version: int
    versions: tuple[int, ...]


class Rollouts:
    """Lets actors on a Ray cluster make rollouts, each in a local pool of its own, for a learner here.

    Each actor runs `rollout(params, handle, timestep, key)`, compiled by `jax.jit`, again and again: it steps
    its envs as often as the function says, and returns the next handle, what the next rollout gets as
    `timestep`, and a trajectory. So the learner's process does some work for each rollout, and none for each
    step. The first rollout gets the time step of the reset.

    Rollout number `index` of actor `i` gets the key
    `jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), i), index)`, and env `j` of the actor gets
    the seed `seed + i * num_envs + j`. An actor that replaces a lost one continues the numbers of its
    rollouts, and resets its envs with seeds of its own.

    Actors compute on the CPU, unless `backend` gives them GPUs. They get the function, and `env`, by
    cloudpickle, and the learner's JAX options that decide what is computed, such as x64.

    Args:
        rollout: takes the newest weights, the handle of the actor's envs, what the last rollout returned
            second, and a key; returns the handle, what the next one gets, and the trajectory. All are pytrees
            of arrays.
        env: as of `jaxvec.make`.
        num_envs: of each actor.
        num_actors: how many there are.
        params: the first weights, version 0; a pytree of arrays.
        seed: of envs and keys.
        backend: where actors are, and what each holds: `resources_per_worker`, `workers_per_actor` times. The
            latter is the number of worker processes of its pool.
        device: a `jax.Device`, or a sharding, on which trajectories are put; by default JAX's own.
        max_lag: by how many versions weights may be older than the newest. A trajectory whose are older is
            dropped when its turn comes, and counted. `None` for any number.
        in_flight: how many rollouts each actor may make before the first of them is taken. A learner that is
            slow holds actors back so.
        on_fault: of the actors' pools, as of `jaxvec.make`. `"restart"`, or a `jaxvec.Restart`, also replaces
            actors that are lost, with limits of their own for each.
        timeouts: of the actors' pools, as of `jaxvec.make`; `start` is also for an actor to make and reset
            its pool.
        rollout_timeout: seconds that a rollout may take, with compilation, before its actor counts as lost;
            `None` for ever. Steps have their own limit in `timeouts`.
        **options: other options of `jaxvec.make`, and arguments of the env.

    Raises:
        RolloutError: an actor's pool could not be made; `__cause__` is the error of `make`.
        ActorDiedError: an actor was lost, or not ready in time.
        NotPicklableError: the function, the env or an option can't be sent.
        ImportError, ConnectionError: there is no Ray, or no cluster.
        ValueError, TypeError: a bad argument.

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
        num_actors: int,
        params: Any,
        seed: int = 0,
        backend: str | Ray = "ray",
        device: Any = None,
        max_lag: int | None = None,
        in_flight: int = 1,
        on_fault: str | Restart = "raise",
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - it can't be changed
        rollout_timeout: float | None = None,
        **options: Any,
    ) -> None:
        """Starts the actors, and waits until all are ready."""
        if not callable(rollout):
            raise TypeError(f"rollout must be a function, not {rollout!r}")
        ray_options = Ray() if backend == "ray" else backend
        if not isinstance(ray_options, Ray):
            raise ValueError(f'backend must be "ray" or a jaxvec.Ray, not {backend!r}')
        for name, count in (("num_envs", num_envs), ("num_actors", num_actors), ("in_flight", in_flight)):
            _check_count(name, count, 1)
        _check_count("seed", seed, 0)
        if max_lag is not None:
            _check_count("max_lag", max_lag, 0)
        for name, instead in _ELSEWHERE.items():
            if name in options:
                raise TypeError(f"Rollouts has no option {name!r}: {instead}")
        policy = parse_restart(on_fault)
        workers = ray_options.workers_per_actor
        options |= {"num_workers": workers, "on_fault": on_fault, "timeouts": timeouts}
        PoolConfig(**{name: options[name] for name in _POOL_OPTIONS & {*options}})  # checks them
        program = Program(rollout, env, num_envs, seed, options, node_identity()["jaxvec"], jax_options())
        pickled = pickle_given(program, _refuse)
        cluster.connect(ray_options, timeouts.start)
        self._ray: Any = importlib.import_module("ray")
        check_place(self._ray, ray_options.of_actor())
        self._max_lag = max_lag
        self._device = device
        self._version = 0
        self._closed = False
        self._broken: BaseException | None = None
        self._rollouts = self._env_steps = self._dropped = 0
        terms = Terms(self._ray, ray_options, num_actors, timeouts.start, rollout_timeout, in_flight, policy)
        placement = Placement(self._ray, ray_options, [workers] * num_actors, timeouts.start)
        self._actors = Actors(terms, placement, pickled, (0, self._put(params)))
        weakref.finalize(self, self._actors.stop).atexit = False  # Ray ends them then
        try:
            self._actors.wait_until_up()
        except BaseException:
            self.close()
            raise

    def get(self, timeout: float | None = None) -> Rollout:
        """Returns the rollout that was done first of those that were not returned yet.

        Its actor may then make another, with the newest weights.

        Args:
            timeout: seconds to wait for one; `None` for ever.

        Raises:
            NotReadyError: none was done in time; nothing is lost by that.
            RolloutError: an actor's rollout, or an env, raised.
            ActorDiedError: an actor was lost, and not replaced.
            PoolBrokenError, PoolClosedError: there was an error before, or `close`.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_open()
            try:
                done = self._actors.done.get(timeout=until and max(until - time.monotonic(), 0))
            except queue.Empty:
                raise NotReadyError(f"no rollout was done within {timeout} s; call get again") from None
            if done is None:
                self._actors.done.put(None)
                self._end()
                continue
            self._actors.take(done.actor)
            lag = self._version - done.version
            if self._max_lag is None or lag <= self._max_lag:
                break
            self._dropped += 1
        self._rollouts += 1
        self._env_steps += done.played.env_steps
        trajectory = jax.device_put(unpack(done.played.structure, done.played.leaves), self._device)
        return Rollout(trajectory, done.actor, done.index, done.version, lag)

    def push(self, params: Any) -> None:
        """Gives actors new weights, for each one's next rollout; those before are not sent any more.

        Args:
            params: a pytree of arrays. With another structure, other shapes or dtypes, actors compile anew.

        Raises:
            PoolBrokenError, PoolClosedError: there was an error before, or `close`.
        """
        self._check_open()
        weights = self._put(params)
        self._version += 1
        self._actors.weights = self._version, weights

    def stats(self) -> RolloutStats:
        """Returns what was done so far."""
        return RolloutStats(
            self._rollouts,
            self._env_steps,
            self._dropped,
            tuple(self._actors.budget.restarts),
            self._version,
            self._actors.versions(),
        )

    def close(self) -> None:
        """Closes the envs and ends the actors, within about ten seconds; twice is fine."""
        self._closed = True
        self._actors.stop()
        self._actors.join(_JOIN_TIMEOUT)

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("Rollouts can't be pickled: they own actors; make them where they are needed")

    def _put(self, params: Any) -> Any:
        return self._ray.put(pack(params))

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosedError("the Rollouts were closed")
        if self._broken is not None:
            raise PoolBrokenError(f"the Rollouts failed before: {self._broken}") from self._broken

    def _end(self) -> None:
        """Raises what ended the actors, for the first time."""
        self._broken = self._actors.error
        if self._broken is not None:
            raise self._broken


def _check_count(name: str, count: Any, least: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {count!r}")


def _refuse(error: Exception) -> NotPicklableError:
    return NotPicklableError(
        f"the rollout, the env or an option can't be pickled, so it can't be sent to actors: {error}; make "
        "what they need inside them"
    )
