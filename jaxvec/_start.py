"""Starts a pool: turns the arguments of `make` into workers, a `Pool` and a `VectorEnv`.

The workers make the envs and describe them; the specification of the pool follows from that description.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from typing import Any

from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as BatchedVectorEnv

from jaxvec import _extension
from jaxvec._envs import constructors
from jaxvec._envs.constructors import Description
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.envs import check_vector
from jaxvec._leaves import DtypePolicy
from jaxvec._memory.segment import CopyToDevice, split_evenly
from jaxvec._options import PoolConfig
from jaxvec._pool import registry
from jaxvec._pool.pool import Pool
from jaxvec._settings import check_count
from jaxvec._spec import Autoreset, learn, make_spec
from jaxvec._vector_env import VectorEnv
from jaxvec._workers.base import Backend
from jaxvec._workers.interpreter import Interpreter
from jaxvec._workers.process import LocalProcesses
from jaxvec._workers.protocol import WorkerRecipe
from jaxvec._workers.serial import SerialBackend


def start(
    env: Any,
    num_envs: int | None,
    config: PoolConfig,
    interpreter: Interpreter,
    *,
    env_kwargs: dict[str, Any],
    policy: DtypePolicy,
    objects: bool = False,
    equal_spaces: bool = False,
    resets_required: bool = True,
    shares_values: bool = False,
    place: CopyToDevice | None = None,
) -> VectorEnv:
    """Starts a pool for `make` or a compatibility API.

    Args:
        env: The env, as in `jaxvec.make`, looked up by `Interpreter.constructor`.
        num_envs: Number of envs, or `None` if `env` defines it.
        config: The checked options of the user.
        interpreter: The interpreter of the workers, from `choose_interpreter`.
        env_kwargs: Keyword arguments of the env's constructor.
        policy: Mapping of the dtypes of spaces to stored dtypes.
        objects: True to store leaves without fixed shape as Python objects, which JAX can't use, not padded.
        equal_spaces: True if observation and reward spaces of all envs must be equal. Otherwise bounds may
            differ, and the pool's include those of all envs.
        resets_required: True if steps of envs that must be reset first raise.
        shares_values: True if envs of the serial backend get values of calls, attributes and reset options
            themselves, as in the vector envs of other libraries that use no processes.
        place: Target of the time steps that `VectorEnv` returns; `None` for NumPy arrays.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a process of multiprocessing makes a pool while it imports the script, and so would each "
            'process that its envs start; make the pool under `if __name__ == "__main__":`'
        )
    if isinstance(env, BatchedVectorEnv):
        env, num_envs, config = _adopt(env, num_envs, config)
    size = config.envs_per_instance
    num_envs = constructors.count(env, num_envs, size)
    backend = _choose_backend(config.backend)
    backend.check(config)
    batch_size = _batch_size(config, num_envs)
    num_instances = num_envs // (size or 1)
    num_workers = config.num_workers or backend.num_workers(num_instances, config.timeouts.start)
    check_count("num_workers", num_workers, 1, num_instances)
    slices = split_evenly(num_envs, num_workers, size or 1)
    env_fns = constructors.resolve(env, slices, env_kwargs, configs=config.env_configs, size=size)
    env_fns = [interpreter.adapt(env_fn) for env_fn in env_fns]
    extensions = [extension for make in _extension.extensions if (extension := make(config)) is not None]
    other_slices = (choose(config) for choose in _extension.slices)
    has_fault = config.restart is not None or any(extension.retires_workers for extension in extensions)
    recipe = WorkerRecipe(
        env_fns,
        slices,
        config,
        interpreter,
        next(filter(None, other_slices), EnvSlice),
        [extension.on_slice for extension in extensions],
        spares=sum(extension.spares for extension in extensions),
        equal_spaces=equal_spaces,
        has_fault=has_fault,
        shares_values=shares_values,
    )
    declared: Any = config.info  # a dict, from `declarations`
    workers = backend.start(recipe, learn_info=any(kind is None for kind in declared.values()))
    try:
        description = workers.description
        declared = learn(declared, description.info)
        spec = make_spec(
            description.spaces,
            num_envs=num_envs,
            batch_size=batch_size,
            autoreset=config.autoreset or _autoreset_of(description),
            final_obs=config.final_obs,
            fault=has_fault,
            declared=declared,
            policy=policy,
            objects=objects,
            max_sizes=None if objects else config.max_sizes or {},
            reset_options=config.reset_options,
        )
        pool = Pool(
            workers,
            spec,
            slices=slices,
            in_order=config.recv_order == "sent",
            all_at_once=size is not None,
            timeouts=config.timeouts,
            resets_required=resets_required,
            extended=[array for extension in extensions for array in extension.arrays(spec)],
            on_pool=[extension.on_pool for extension in extensions],
        )
        registry.publish(pool)
        return VectorEnv(pool, description, slices=slices, transport=config.settings.transport, place=place)
    except BaseException:
        workers.close(timeout=1)  # seconds; the envs have not been used
        raise


def _adopt(
    env: BatchedVectorEnv[Any, Any, Any], num_envs: int | None, config: PoolConfig
) -> tuple[Any, int, PoolConfig]:
    """Returns the env, number of envs and configuration for a pool over an existing batched env."""
    check_vector(env)
    for name, value in (("num_envs", num_envs), ("envs_per_instance", config.envs_per_instance)):
        if value not in (None, env.num_envs):
            raise ValueError(
                f"{name} is {value}, but the VectorEnv has {env.num_envs} envs; leave {name} out"
            )
    return [lambda: env], env.num_envs, replace(config, backend="serial", envs_per_instance=env.num_envs)


def _autoreset_of(description: Description) -> Autoreset:
    mode = description.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            f"metadata['autoreset_mode'] of the VectorEnv is {mode!r}; set it to a member of "
            "gymnasium.vector.AutoresetMode"
        )
    return Autoreset(mode)


def choose_interpreter(config: PoolConfig) -> Interpreter:
    """Returns the interpreter of the workers: this one, unless the options name another.

    Raises:
        ValueError: It can't run workers with these options.
    """
    others = (choose(config) for choose in _extension.interpreters)
    interpreter = next(filter(None, others), None) or Interpreter()
    interpreter.check(config)
    return interpreter


def _choose_backend(backend: Any) -> Backend:
    """Returns a backend, given it or its name."""
    if isinstance(backend, Backend):
        return backend
    if backend not in ("process", "serial"):
        raise ValueError(f'backend must be "process", "serial", or a jaxvec.Backend, not {backend!r}')
    return LocalProcesses() if backend == "process" else SerialBackend()


def _batch_size(config: PoolConfig, num_envs: int) -> int:
    chosen = config.batch_size
    batch_size = num_envs if chosen is None else check_count("batch_size", chosen, 1, num_envs)
    if batch_size < num_envs and config.envs_per_instance is not None:
        raise ValueError(
            f"batch_size {batch_size} is below num_envs ({num_envs}), but batched envs step all at once; "
            "leave batch_size out, or make the envs one by one"
        )
    if batch_size < num_envs and config.autoreset is not None and not config.autoreset.resets:
        raise ValueError(
            f"batch_size {batch_size} is below num_envs ({num_envs}) and needs envs that reset themselves; "
            "choose autoreset_mode SAME_STEP or NEXT_STEP"
        )
    return batch_size
