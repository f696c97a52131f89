"""`jaxvec.Rollouts`: what a learner sees of its actors."""

from __future__ import annotations

import importlib
import queue
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

import jax

from jaxvec import _restart
from jaxvec._backends._messages import pickle_given
from jaxvec._backends._ray import _launcher, _nodes, _placement
from jaxvec._backends._ray._placement import Placement
from jaxvec._config import PoolConfig
from jaxvec._errors import NotPicklableError, NotReadyError, PoolBrokenError, PoolClosedError
from jaxvec._ray import Ray
from jaxvec._restart import Restart
from jaxvec._rollouts._actor import Program, jax_options, pack, unpack
from jaxvec._rollouts._actors import Actors, Terms

_PATIENCE = 10.0  # seconds for actors to end

_POOL_OPTIONS = {option.name for option in fields(PoolConfig)}
_ELSEWHERE = {
    "num_workers": "Ray(workers_per_actor=) says how many workers each actor's pool has",
    "sharding": "device takes it",
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
        start_timeout: seconds that an actor may take until it has made and reset its pool, and of `make`.
        rollout_timeout: seconds that a rollout may take, with compilation, before its actor counts as lost;
            `None` for ever. Steps have their own, `step_timeout`.
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
        start_timeout: float | None = 60,
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
        policy = _restart.parse(on_fault)
        workers = ray_options.workers_per_actor
        options |= {"num_workers": workers, "on_fault": on_fault, "start_timeout": start_timeout}
        PoolConfig(**{name: options[name] for name in _POOL_OPTIONS & {*options}})  # checks them
        program = Program(rollout, env, num_envs, seed, options, _nodes.identity()["jaxvec"], jax_options())
        pickled = pickle_given(program, _refuse)
        _launcher.connect(ray_options, start_timeout)
        self._ray: Any = importlib.import_module("ray")
        _placement.check_place(self._ray, ray_options.of_actor())
        self._max_lag = max_lag
        self._device = device
        self._version = 0
        self._closed = False
        self._broken: BaseException | None = None
        self._rollouts = self._env_steps = self._dropped = 0
        terms = Terms(self._ray, ray_options, num_actors, start_timeout, rollout_timeout, in_flight, policy)
        placement = Placement(self._ray, ray_options, [workers] * num_actors, start_timeout)
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
        self._actors.join(_PATIENCE)

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
