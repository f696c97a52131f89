"""`jaxvec.make`, and where the arrays that it returns are placed."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from jaxvec._config import PoolConfig, Ray, Restart
from jaxvec._envs import constructors
from jaxvec._memory.segment import ALIGNMENT, Rows
from jaxvec._spec import as_is, as_jax
from jaxvec._start import start
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _primitive

# ----------------------------------------------------------------------------------------------------------
# Puts time steps on devices, for loops in Python: `jaxvec.make(device=...)` and `sharding=`.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Copies rows of a segment to devices."""

    sharding: Sharding

    @classmethod
    def of(cls, device: Any, sharding: Any) -> Placement | None:
        """Returns that of `make`'s arguments, `None` if there is neither; raises if there are both."""
        if device is None and sharding is None:
            return None
        if device is not None and sharding is not None:
            raise ValueError("device and sharding both say where time steps go; pass one of them")
        if sharding is None:
            if not isinstance(device, jax.Device):
                raise TypeError(f"device must be one of jax.devices(), not {device!r}")
            return cls(SingleDeviceSharding(device))
        if not isinstance(sharding, Sharding):
            raise TypeError(f"sharding must be a jax.sharding.Sharding, not {sharding!r}")
        if not sharding.is_fully_addressable:
            raise NotImplementedError(
                "sharding over the devices of several processes: each process has envs of its own; leave it "
                "out, and pass each array to jax.make_array_from_process_local_data(sharding, array)"
            )
        return cls(sharding)

    def prepare(self, envs: VectorEnv) -> None:
        """Page-locks the pool's memory for GPUs; raises `ValueError` if its rows can't be so sharded."""
        try:
            self.sharding.shard_shape((envs.batch_size,))
        except ValueError as error:
            raise ValueError(f"sharding: time steps of {envs.batch_size} envs: {error}") from error
        if self._platform == "gpu":
            envs.pool.pin()

    def __call__(self, rows: Rows) -> Sequence[jax.Array]:
        """Returns the rows where they should be. Whoever has the envs stepped next can't change them.

        On the CPU JAX aliases the memory that it is given, where it can, so it is given copies; to devices
        it copies from where the envs wrote them, and until it has we may not return.
        """
        if self._platform == "cpu":
            rows = [_copy(array) for array in rows]
        return jax.block_until_ready(jax.device_put(list(rows), self.sharding))

    @property
    def _platform(self) -> str:
        return next(iter(self.sharding.device_set)).platform


def _copy(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a copy that is aligned as JAX wants what it aliases."""
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


# ----------------------------------------------------------------------------------------------------------
# `make`: starts a pool that stores what JAX will see.
# ----------------------------------------------------------------------------------------------------------

# What other libraries' functions that make vector envs are given, and what takes its place.
_PROCESSES = 'leave it out: envs are in worker processes, or with backend="serial" in this one'
_WRAPPERS = "pass a function that wraps each env: make(lambda: Wrapper(gymnasium.make(env)), num_envs)"
_SPACES = "leave it out: make asks the envs for their spaces"
_ELSEWHERE = {
    "asynchronous": _PROCESSES,
    "vectorization_mode": _PROCESSES,
    "vec_env_cls": _PROCESSES,
    "wrappers": _WRAPPERS,
    "wrapper_class": _WRAPPERS,
    "observation_space": _SPACES,
    "action_space": _SPACES,
    "shared_memory": "leave it out: observations are always in shared memory",
    "context": "start_method says how workers are started",
    "num_threads": "num_workers says how many processes share the envs",
    "env_kwargs": "pass its entries to make itself; those of each env's own in env_configs",
    "seed": "pass it to reset(seed=)",
}


def make(
    env: str | EnvSpec | Callable[..., Any] | Iterable[Callable[..., Any]],
    num_envs: int | None = None,
    *,
    num_workers: int | None = None,
    batch_size: int | None = None,
    recv_order: str = "ready",
    backend: str | Ray = "process",
    autoreset_mode: AutoresetMode | str | None = None,
    episodic: bool = False,
    final_obs: bool = True,
    info: Mapping[str, Any] | Iterable[str] | None = None,
    env_configs: Sequence[Mapping[str, Any]] | None = None,
    envs_per_instance: int | None = None,
    worker_env: Mapping[str, str | None] | None = None,
    worker_init: Callable[..., Any] | None = None,
    start_method: str = "auto",
    preload: Iterable[str] = (),
    pin_workers: bool = False,
    max_running: int | None = None,
    on_fault: str | Restart = "raise",
    check: str = "structure",
    see_through: bool = True,
    spare_envs: int = 0,
    states: int = 0,
    state_functions: tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None = None,
    start_timeout: float | None = 60,
    reset_timeout: float | None = 60,
    step_timeout: float | None = 60,
    device: Any = None,
    sharding: jax.sharding.Sharding | None = None,
    transport: str = "auto",
    handoff: str = "auto",
    **env_kwargs: Any,
) -> VectorEnv:
    """Starts worker processes, builds the envs in them, and returns the pool.

    Args: Envs
        env: a Gymnasium id, an `EnvSpec`, a callable that makes an env, or a list or other iterable of such
            callables. A callable with a required positional parameter gets the env's index, and so does one
            with a parameter `env_id`, unless its default or annotation is a text, such as an id. A callable
            with a parameter `worker_id` gets the worker's index. Arguments that you have bound stay bound.
            Lambdas, closures and classes of `__main__` or a notebook work, and no main guard is needed. You
            can also pass a `gymnasium.vector.VectorEnv`: its envs are stepped in this process, and it is
            closed with the pool.
        num_envs: how many envs; may be left out for a list or a `VectorEnv`.
        env_configs: keyword arguments of each env's own, besides `env_kwargs`.
        envs_per_instance: how many envs each call of `env` makes, if it makes `VectorEnv`s: simulators that
            step many envs at once. `num_envs` must be a multiple of it.
        info: keys of the envs' info to return as arrays: a dict of key to dtype (`int`, `"f4"`,
            `(np.float32, (3,))`), array, `jax.ShapeDtypeStruct` or Gymnasium space; or a list of
            keys. dtype and shape of a key without a declaration are those of env 0's first info, for
            which env 0 is reset once. Each key comes with a mask `_key`; a missing one reads as 0.
        check: of what envs return: `"structure"` looks at structure, shapes and dtypes; `"strict"` also
            refuses observations outside of their space, NaN among them, and costs time.
        see_through: step the env inside Gymnasium's `TimeLimit`, `OrderEnforcing` and `PassiveEnvChecker`
            as soon as a step through them gives the same, and count the limit's steps. Data, errors and the
            wrappers' attributes are as without; `False` calls every wrapper.
        **env_kwargs: for `gymnasium.make`, or the callables.

    Args: Episodes
        autoreset_mode: `gymnasium.vector.AutoresetMode`, or its name; `SAME_STEP` by default. Batched envs
            have their own.
        episodic: instead of autoreset, envs whose episode has ended idle until they are reset: a step
            leaves their observation and flags as they are, its reward is 0, and `info["idle"]` is set. All
            are done when `terminated | truncated` is true of all.
        final_obs: under `SAME_STEP`, return the last observation of episodes in `info`.
        spare_envs: for envs that are slow to reset: how many more of them each worker builds, and
            resets in advance when it has nothing else to do. When an episode ends, the next spare env
            takes over the slot, so envs have to be alike. Which env that is, and its seed, depend on
            the pool's seed and on the order in which the worker's episodes end, not on time. `call`
            and `set_attr` reach the envs that are in the slots then.

    Args: Workers
        num_workers: how many processes share them; by default as many as there are usable cores, or
            as a Ray cluster has free CPUs for.
        backend: `"process"`; `"serial"` to step all envs in this process, for debugging; `"ray"`, or a
            `jaxvec.Ray` that says more, for workers on the nodes of a Ray cluster.
        worker_env: environment variables of the workers; `None` as a value unsets one. By default
            they run numerical libraries on one thread, keep off the accelerator, and lack those by which MPI
            knows its processes (`OMPI_*`, `PMI_*`, `PMIX_*`).
        worker_init: a function that each worker runs before it builds its envs, as do workers that replace
            others. It prepares the process: registers envs, sets global options, opens what the envs
            share. It gets the index of its worker if it has a parameter `worker_id`. `start_timeout`
            includes it.
        start_method: how worker processes are started: `"forkserver"` forks them from a helper process
            that has imported NumPy and Gymnasium, but neither JAX nor your code; `"spawn"` starts each
            as a Python interpreter of its own, which takes longer; `"auto"` is the first where it works.
        preload: modules that the helper process imports before it forks, such as `("ale_py",)`: those that
            are slow to import and that every env needs.
        pin_workers: bind each worker to a core of its own, one after the other, of those that this process
            may use; needs Linux. Threads that an env starts are then on that core, too.
        max_running: how many workers may run envs at the same time; the others wait for their turn. For
            simulators that need a process each and more of a core or of memory than there is for all at
            once. The time that a worker waits counts for `step_timeout` and `reset_timeout`. Needs Linux.

    Args: Asynchronous mode
        batch_size: how many envs `recv` returns at a time, while the others are pending; all by
            default.
        recv_order: which: `"ready"`, those that are done first, or `"sent"`, those that were sent
            first, so that a program's batches are the same in every run.

    Args: Faults
        on_fault: what happens if an env raises, or a worker dies or takes longer than the timeouts:
            `"raise"` raises the error and breaks the pool; `"restart"`, or a `jaxvec.Restart` with limits
            of your own, resets the env or replaces the worker, and the program continues. The step's results
            then have `truncated` and `info["fault"]` set, and repeat the last observation.
        start_timeout: seconds that the workers may take to build their envs, `None` for ever; also each of
            those that replace others later. Timeouts need processes; the serial backend has none.
        reset_timeout: seconds that a reset may take.
        step_timeout: seconds that a step may take.

    Args: Env states
        states: how many states of envs the pool keeps for `jaxvec.save`, `restore` and `simulate`; a newer
            one takes the place of the oldest. Not with `spare_envs` or batched envs.
        state_functions: `(get_state, set_state)` for envs whose state jaxvec can't take by itself:
            `get_state(env)` returns all of the state of an env and its wrappers, `set_state(env, state)` has
            an env that was made by the same function go on from it.

    Args: JAX
        device: a `jax.Device`, on which the pool's own `reset`, `step` and `recv` put their time steps,
            as JAX arrays; by default they are NumPy's. A GPU copies them straight from the memory that the
            envs write to. Programs have theirs where they run. Env arguments of this name, and of the
            next, go in `env_configs`.
        sharding: instead of `device`; of the env axis, such as `NamedSharding(mesh, PartitionSpec("envs"))`.
        transport: how compiled programs reach the pool: `"ffi"`, on the CPU and on NVIDIA's GPUs,
            without Python; `"io_callback"`, on every platform; or `"auto"` for the first that works
            where they run.
        handoff: how this process and the workers synchronise: `"native"` by futexes,
            `"portable"` over sockets, or `"auto"` for the first that works here.

    Returns:
        The pool. Keep it for as long as its handles are used.

    Raises:
        UnsupportedSpaceError: a space has a leaf without fixed shape and dtype; names the leaf.
        SpaceMismatchError: the envs' spaces differ.
        EnvError: a constructor, or `worker_init`, raised; names the env or worker, with its traceback.
        WorkerDiedError, EnvTimeoutError: a worker died, or was not ready in time.
        ValueError, TypeError: a bad argument.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", num_envs=4) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            print(timestep.obs.shape)  # (4, 4)

        make_env = lambda: gymnasium.wrappers.FlattenObservation(gymnasium.make("Pendulum-v1", g=9.81))
        with jaxvec.make(make_env, 2, num_workers=1, on_fault="restart") as envs:
            print(envs.single_observation_space.shape)  # (3,)
        ```
    """
    given = locals()  # the record's fields among them, by the same names
    env = constructors.listed(env)
    _refuse_unknown(env, env_kwargs)
    config = PoolConfig(**{option.name: given[option.name] for option in fields(PoolConfig)})
    place = Placement.of(device, sharding)
    envs = start(
        env,
        num_envs,
        replace(config, transport=_primitive.choose_transport(config.transport)),
        env_kwargs=env_kwargs,
        policy=as_is if jax.config.jax_enable_x64 else as_jax,  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        place=place,
    )
    if place is not None:
        try:
            place.prepare(envs)
        except BaseException:
            envs.close()
            raise
    return envs


def _refuse_unknown(env: Any, env_kwargs: Mapping[str, Any]) -> None:
    """Refuses a keyword of others' `make`, or one like an option of ours, unless the env knows it."""
    options = inspect.signature(make).parameters
    for name in env_kwargs:
        if name in _ELSEWHERE:
            instead = f": {_ELSEWHERE[name]}"
        elif meant := difflib.get_close_matches(name, options, n=1, cutoff=0.85):
            instead = f"; did you mean {meant[0]!r}?"
        else:
            continue
        if not constructors.takes(env, name):
            raise TypeError(f"make has no option {name!r}, and the env no such argument{instead}")
