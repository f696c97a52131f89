"""`jaxvec.make`, and the placement of results on devices."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from jaxvec._envs import constructors
from jaxvec._errors import JaxvecError
from jaxvec._leaves import as_is, as_jax
from jaxvec._memory.segment import ALIGNMENT, Rows
from jaxvec._options import (
    AutoresetName,
    CheckMode,
    OnFault,
    PoolConfig,
    RecvOrder,
    Restart,
    States,
    Timeouts,
    Workers,
)
from jaxvec._start import choose_interpreter, start
from jaxvec._util import add_note
from jaxvec._vector_env import VectorEnv, pool_of
from jaxvec._workers.base import Backend
from jaxvec.callbacks import _derivatives, _effects, _primitive


@dataclass(frozen=True)
class Placement:
    """Copies the results of the pool's own methods from the segment to devices."""

    sharding: Sharding

    @classmethod
    def of(cls, device: Any) -> Placement | None:
        if device is None:
            return None
        if not isinstance(device, jax.Device | Sharding):
            raise TypeError(f"device must be one of jax.devices() or a jax.sharding.Sharding, not {device!r}")
        sharding = SingleDeviceSharding(device) if isinstance(device, jax.Device) else device
        if not sharding.is_fully_addressable:
            raise NotImplementedError(
                "device: sharding over the devices of several processes is not supported, as each process "
                "has its own envs. Leave it out, and pass arrays to "
                "jax.make_array_from_process_local_data(sharding, array)"
            )
        return cls(sharding)

    def prepare(self, envs: VectorEnv) -> None:
        """Page-locks the segment for GPUs; raises `ValueError` if the sharding does not fit the batch."""
        try:
            self.sharding.shard_shape((envs.batch_size,))
        except ValueError as error:
            raise ValueError(f"device: cannot shard time steps of {envs.batch_size} envs: {error}") from error
        if self._platform == "gpu":
            pool_of(envs).pin()

    def __call__(self, rows: Rows) -> Sequence[jax.Array]:
        """Returns copies of the arrays on the devices, which later steps do not change."""
        # On the CPU, JAX aliases aligned host memory, so it gets a copy. On other devices it copies from
        # the segment, which must stay unchanged until all copies are done.
        if self._platform == "cpu":
            rows = [_copy(array) for array in rows]
        return jax.block_until_ready(jax.device_put(list(rows), self.sharding))

    @property
    def _platform(self) -> str:
        return next(iter(self.sharding.device_set)).platform


def _copy(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a copy with the alignment that JAX needs to alias it."""
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


_RECORDS = (Workers, Restart, States, Timeouts, Backend)

# Keywords of other libraries' functions that make vector envs, with advice.
_PROCESSES = 'Remove it: envs always run in worker processes; use backend="serial" to run them in this one'
_WRAPPERS = "Pass a function that wraps each env: make(lambda: Wrapper(gymnasium.make(env)), num_envs)"
_START_METHOD = "Pass the start method in workers=jaxvec.Workers(start_method=...)"
_SPACES = "Remove it: make reads the spaces from the envs"
_ELSEWHERE = {
    "asynchronous": _PROCESSES,
    "vectorization_mode": _PROCESSES,
    "vec_env_cls": _PROCESSES,
    "wrappers": _WRAPPERS,
    "wrapper_class": _WRAPPERS,
    "observation_space": _SPACES,
    "action_space": _SPACES,
    "shared_memory": "Remove it: observations are always in shared memory",
    "context": _START_METHOD,
    "num_threads": "Pass the number of worker processes as num_workers",
    "env_kwargs": "Pass its entries directly to make, or per env in env_configs",
    "seed": "Pass it to reset(seed=...)",
    **dict.fromkeys(
        ("autoreset", "auto_reset"),
        'Pass autoreset_mode="SAME_STEP", "NEXT_STEP", "DISABLED" or "EPISODIC"',
    ),
    **dict.fromkeys(
        ("start_timeout", "reset_timeout", "step_timeout"),
        "Pass timeouts=jaxvec.Timeouts(start=..., reset=..., step=...)",
    ),
    **dict.fromkeys(("start_method", "worker_start_method"), _START_METHOD),
    "daemon": "Remove it: workers end with the program",
    "record_faults": (
        "Wrap each env: make(lambda: jaxvec.adapters.recording.RecordFaults(make_env, folder), n)"
    ),
    "copy": "Remove it: time steps are copies; recv(copy=False) returns views",
}


def make(
    env: str | EnvSpec | Callable[..., Any] | Iterable[Callable[..., Any]],
    num_envs: int | None = None,
    *,
    num_workers: int | None = None,
    workers: Workers = Workers(),  # noqa: B008 - it is immutable
    batch_size: int | None = None,
    recv_order: RecvOrder = "ready",
    backend: Backend | Literal["process", "serial"] = "process",
    autoreset_mode: AutoresetMode | AutoresetName | None = None,
    final_obs: bool = True,
    info: Mapping[str, Any] | Iterable[str] | None = None,
    max_sizes: Mapping[str, Any] | None = None,
    env_configs: Sequence[Mapping[str, Any]] | None = None,
    envs_per_instance: int | None = None,
    on_fault: OnFault | Restart = "raise",
    check: CheckMode = "structure",
    spare_envs: int = 0,
    reset_options: spaces.Dict | None = None,
    states: States | int = 0,
    timeouts: Timeouts = Timeouts(),  # noqa: B008 - it is immutable
    device: Any = None,
    **env_kwargs: Any,
) -> VectorEnv:
    """Starts worker processes, builds the envs in them, and returns the pool.

    Args: Envs
        env: A Gymnasium id, an `EnvSpec`, a function that makes an env, or an iterable of such functions.
            jaxvec passes the env's index to a parameter `env_id` and to a required positional parameter,
            which in a class must be named `env_id`, `env_index`, `index` or `rank`, and the worker's index to
            a parameter `worker_id`. It does not fill a parameter that is annotated `str`, has a string
            default, or is already bound by `functools.partial`. Lambdas, closures and classes of `__main__`
            or a notebook work, and no main guard is needed. A `gymnasium.vector.VectorEnv` is stepped in this
            process, and closed with the pool.
        num_envs: Number of envs. Optional for a list or a `VectorEnv`.
        env_configs: Keyword arguments for individual envs, one dict per env, in addition to `env_kwargs`. An
            argument of the env with the name of an option of `make`, such as `batch_size`, also goes here.
        envs_per_instance: Number of envs that each call of `env` makes, if it returns a `VectorEnv`, such as
            a simulator that steps many envs at once. `num_envs` must be a multiple of it. A step then has all
            envs of the pool.
        info: Keys of the envs' info to return as arrays: a dict from key to dtype (`int`, `"f4"`,
            `(np.float32, (3,))`), array, `jax.ShapeDtypeStruct` or Gymnasium space; or a list of keys. For a
            key without a declaration, jaxvec resets env 0 once and uses the shape and dtype in its info. Each
            key has a mask `_key`; a missing value, or `None`, reads as 0.
        max_sizes: Maximum sizes of `Sequence` and `Graph` spaces, which become padded arrays, by the path of
            the space: `{"inventory": 16, "scene/nodes": 32, "scene/edges": 64}`. A path may start with `obs`,
            `action`, `info` or `reset_options`; at the root it is that word alone. An entry replaces the
            maximum of a `Text`. A longer value is an error, or is cut if the maximum is a
            `jaxvec.spaces.Cut`.
        check: Validation of observations, rewards and flags: `"structure"` checks structure, shapes and
            dtypes. `"cast"` accepts what NumPy casts and broadcasts, and ignores further keys, as Gymnasium's
            `AsyncVectorEnv` does; integers still do not wrap. `"strict"` also rejects observations outside
            their space, such as NaN, and floats that are too large for the stored dtype, at some cost.
        **env_kwargs: Keyword arguments for `gymnasium.make` or the functions. Each env gets its own copy of
            them, and of `env_configs`. Read-only arrays are shared by the envs of a worker.

    Args: Episodes
        autoreset_mode: A `gymnasium.vector.AutoresetMode` or its name; `SAME_STEP` by default. With
            `"EPISODIC"`, an env is idle from the end of its episode until it is reset: steps leave its
            observation and flags unchanged, give reward 0, and set `info["idle"]`. All episodes are over when
            `(terminated | truncated).all()`. Batched envs have their own mode.
        final_obs: Whether `info` contains the last observation of an episode, with `SAME_STEP`.
        spare_envs: Number of spare envs per worker, for envs that are slow to reset. A worker resets spare
            envs whenever it has nothing else to do. When an episode ends, the next spare env takes its slot,
            so all envs must be alike. Which spare env comes next, and its seed, depend on the pool's seed and
            on the order in which the worker's episodes end, not on timing. `call` and `set_attr` reach the
            envs that currently occupy the slots.
        reset_options: Space of the options of `env.reset`. They then are arrays, also in programs, which pass
            them to `reset(options=...)` and, for envs that reset themselves, to `step(reset_options=...)`.
            `env.reset` gets a dict that the space contains, or `None` until the program has passed some.
            `info["reset_options"]` has the options of the running episode. Not with `spare_envs` or batched
            envs.

    Args: Workers
        num_workers: Number of worker processes; by default the number of usable cores (a container's CPU
            quota counts).
        backend: `"process"`; `"serial"`, which steps all envs in this process, for debugging and for a few
            fast envs; or a `Backend`.
        workers: A `jaxvec.Workers`, such as the start method and environment variables of the workers.

    Args: Asynchronous mode
        batch_size: Number of envs that `recv` returns at a time, while others stay pending; by default all.
        recv_order: Order in which `recv` returns pending envs: `"ready"` returns the envs that finish first;
            `"sent"` returns those that were sent first, so every run of a program has the same batches.

    Args: Faults
        on_fault: Reaction to an env that raises, or a worker that dies or exceeds a timeout. `"raise"` raises
            the error and breaks the pool. `"restart"`, or a `jaxvec.Restart` with your own limits, resets the
            env or replaces the worker, and the program continues. The step's results then have `truncated`
            and `info["fault"]` set, and repeat the last observation.
        timeouts: A `jaxvec.Timeouts` with limits for the start of the workers, a reset and a step; by default
            60 s.

    Args: Env states
        states: Number of saved states that the pool keeps for `jaxvec.save`, `restore` and `simulate`, or a
            `jaxvec.States`, which also has functions for envs with a state that jaxvec cannot save itself.

    Args: JAX
        device: A `jax.Device`, or a `jax.sharding.Sharding` of the env axis such as
            `NamedSharding(mesh, PartitionSpec("envs"))`. The pool's own `reset`, `step` and `recv` then
            return JAX arrays there, not NumPy arrays. A GPU copies them directly from the memory that the
            envs write to.

    Returns:
        The pool. Keep a reference to it while its handles are in use.

    Raises:
        UnsupportedSpaceError: A space is unknown, or has no maximum size. The message names it.
        SpaceMismatchError: The envs' spaces differ in more than bounds of observations.
        EnvError: A constructor or `Workers(init=...)` raised. The message names the env or worker.
        WorkerDiedError, EnvTimeoutError: A worker died, or was not ready in time.
        MemoryError: The pool is larger than the free memory.
        ValueError, TypeError: An argument is invalid.

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
    options: dict[str, Any] = {
        "num_workers": num_workers,
        "workers": workers,
        "batch_size": batch_size,
        "recv_order": recv_order,
        "backend": backend,
        "autoreset_mode": autoreset_mode,
        "final_obs": final_obs,
        "info": info,
        "max_sizes": max_sizes,
        "env_configs": env_configs,
        "envs_per_instance": envs_per_instance,
        "on_fault": on_fault,
        "check": check,
        "spare_envs": spare_envs,
        "reset_options": reset_options,
        "states": states,
        "timeouts": timeouts,
    }
    if _primitive.in_program():
        raise RuntimeError(
            "jaxvec.make was called while JAX traces a program, as in jit or scan. Python code runs only "
            "once there, and the pool would end before the program runs. Make the pool outside: envs = "
            "jaxvec.make(...), then handle, timestep = jaxvec.reset(envs) outside or inside the program"
        )
    env = constructors.listed(env)
    try:
        config = PoolConfig(**options)
        interpreter = choose_interpreter(config)
        env = interpreter.constructor(env)
        _refuse_unknown(env, env_kwargs)
        _effects.install()
        _derivatives.install()
        config.settings.transport = _primitive.choose_transport(config.settings.transport)
        place = Placement.of(device)
        envs = start(
            env,
            num_envs,
            config,
            interpreter,
            env_kwargs=env_kwargs,
            policy=as_is if jax.config.jax_enable_x64 else as_jax,  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            place=place,
        )
    except Exception as error:
        for name, text in _options_of_env(env, options | {"device": device}, load=True):
            if name in str(error):
                add_note(error, text)
        for name in env_kwargs:
            if f"argument '{name}'" in str(error):
                add_note(error, _unknown(name))
        if isinstance(error, JaxvecError):
            error.with_traceback(None)  # without jaxvec's own frames
        raise
    try:
        if place is not None:
            place.prepare(envs)
        for _, text in _options_of_env(env, options | {"device": device}, load=False):
            warnings.warn(text, stacklevel=2)
    except BaseException:
        envs.close()
        raise
    return envs


def _options_of_env(env: Any, options: Mapping[str, Any], *, load: bool) -> Iterator[tuple[str, str]]:
    """Yields each option that was set and that the env takes, too, with a text that names `env_configs`."""
    configs = options["env_configs"] or ()
    parameters = inspect.signature(make).parameters
    for name, value in options.items():
        if value is parameters[name].default:
            continue
        # A record of jaxvec is not meant for the env. An entry in `env_configs` shows that both are meant.
        if isinstance(value, _RECORDS) or any(name in config for config in configs):
            continue
        taken = False
        with suppress(Exception):  # the env's module may not be importable here
            taken = constructors.takes(env, name, load=load)
        if taken:
            yield (
                name,
                f"{name} is an option of jaxvec.make, but the env takes an argument {name}, too, which keeps "
                f"its default. To set that one, pass env_configs=[{{{name!r}: ...}}] * num_envs",
            )


def _unknown(name: str) -> str:
    """Returns a note for a keyword that is neither an option of `make` nor an argument of the env."""
    options = [option for option in inspect.signature(make).parameters if option != "env_kwargs"]
    close = difflib.get_close_matches(name, options, n=1) or [option for option in options if name in option]
    question = f"; did you mean {close[0]}?" if close else ""
    return f"{name} is no option of jaxvec.make either, which passes unknown keywords to the env{question}"


def _refuse_unknown(env: Any, env_kwargs: Mapping[str, Any]) -> None:
    """Rejects misspelt options and options of other libraries, unless the env takes them."""
    known = {*inspect.signature(make).parameters, *_ELSEWHERE} - {"env_kwargs"}
    for name in env_kwargs:
        meant = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if name not in _ELSEWHERE and not meant:
            continue
        taken = constructors.takes(env, name)
        if taken or (taken is None and name in _ELSEWHERE):
            continue
        advice = _ELSEWHERE.get(name) or f"Did you mean {meant[0]!r}?"
        if name not in _ELSEWHERE and meant[0] in _ELSEWHERE:
            advice += f" {_ELSEWHERE[meant[0]]}"
        # `taken` is None for a function with **kwargs, which might accept the keyword.
        also = "the env does not accept it either" if taken is False else "env arguments go in env_configs"
        raise TypeError(f"make() got an unexpected option {name!r} ({also}). {advice}")
