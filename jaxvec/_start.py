"""Starts a pool: turns the arguments of `make` into workers, a `Pool` and a `VectorEnv`.

The workers make the envs and describe them; the specification of the pool follows from that description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as BatchedVectorEnv

from jaxvec._envs import constructors, foreign_env
from jaxvec._envs.constructors import Description
from jaxvec._errors import UnsupportedSpaceError
from jaxvec._memory.segment import Place, split_evenly
from jaxvec._options import OtherMachines, PoolConfig, Ray
from jaxvec._pool import registry
from jaxvec._pool.pool import Pool
from jaxvec._spec import Autoreset, DtypePolicy, make_spec, undeclared
from jaxvec._util import usable_cores
from jaxvec._vector_env import VectorEnv
from jaxvec._workers import base, foreign
from jaxvec._workers.base import Launcher, WorkerGroup
from jaxvec._workers.budget import Budget
from jaxvec._workers.process import LocalLauncher, ProcessWorkers
from jaxvec._workers.serial import SerialWorkers
from jaxvec._workers.worker import WorkerRecipe

if TYPE_CHECKING:
    from jaxvec._ray.cluster import RayCluster
    from jaxvec._remote.remote import Remote


def start(
    env: Any,
    num_envs: int | None,
    config: PoolConfig,
    *,
    env_kwargs: dict[str, Any],
    policy: DtypePolicy,
    objects: bool = False,
    equal_spaces: bool = True,
    resets_required: bool = True,
    shares_values: bool = False,
    place: Place | None = None,
) -> VectorEnv:
    """Starts a pool for `make` or a compatibility API.

    Args:
        env: The env, as in `jaxvec.make`.
        num_envs: Number of envs, or `None` if `env` defines it.
        config: The checked options of the user.
        env_kwargs: Keyword arguments of the env's constructor.
        policy: Mapping of the dtypes of spaces to stored dtypes.
        objects: True to store leaves without fixed shape as Python objects, which JAX can't use, not padded.
        equal_spaces: True if the observation spaces of all envs must be equal; otherwise bounds may differ.
        resets_required: True if steps of envs that must be reset first raise.
        shares_values: True if envs of the serial backend get values of calls, attributes and reset options
            themselves, as in the vector envs of other libraries that use no processes.
        place: Target of the time steps that `VectorEnv` returns; `None` for NumPy arrays.
    """
    if isinstance(env, BatchedVectorEnv):
        env, num_envs, config = _adopt(env, num_envs, config)
    env = constructors.listed(env)
    size = config.envs_per_instance
    together = size or 1
    num_envs = constructors.count(env, num_envs, size)
    cluster = _cluster(config)
    num_workers = _num_workers(config, num_envs // together, cluster)
    slices = split_evenly(num_envs, num_workers, together)
    python = None if config.workers.python is None else foreign.probe(str(config.workers.python))
    if python is not None:
        if config.takes_states and python.numpy < (2, 0):  # which can't restore generators
            raise ValueError(
                "states and Workers(recycle=...) need NumPy 2 in the workers, but Workers(python="
                f"{python.python!r}) has an older one; install it there, or leave them out"
            )
        env = foreign_env.by_name(env)
    env_fns = constructors.resolve(env, slices, env_kwargs, configs=config.env_configs, size=size)
    if python is not None:
        env_fns = [partial(foreign_env.build_adapted, env_fn) for env_fn in env_fns]
    declared, learnt = undeclared(config.info)
    recipe = WorkerRecipe(env_fns, slices, config, equal_spaces=equal_spaces, shares_values=shares_values)
    workers = _workers(recipe, cluster, learn_info=bool(learnt))
    try:
        description = workers.description
        autoreset = config.autoreset or _autoreset_of(description)
        spec = make_spec(
            description.spaces,
            num_envs=num_envs,
            batch_size=_batch_size(config.batch_size, num_envs, autoreset, together=together),
            autoreset=autoreset,
            final_obs=config.final_obs,
            fault=config.has_fault,
            declared=declared | _learn(learnt, description),
            policy=policy,
            objects=objects,
            max_sizes=None if objects else config.max_sizes or {},
            reset_options=config.reset_options,
        )
        pool = Pool(
            workers,
            spec,
            slices=slices,
            together=together,
            in_order=config.recv_order == "sent",
            timeouts=config.timeouts,
            records=config.record_faults is not None,
            resets_required=resets_required,
            states=config.states.max,
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
    for name, value in (("num_envs", num_envs), ("envs_per_instance", config.envs_per_instance)):
        if value not in (None, env.num_envs):
            raise ValueError(
                f"{name} is {value}, but the VectorEnv has {env.num_envs} envs; leave {name} out"
            )
    return [lambda: env], env.num_envs, replace(config, backend="serial", envs_per_instance=env.num_envs)


def _workers(recipe: WorkerRecipe, cluster: RayCluster | Remote | None, *, learn_info: bool) -> WorkerGroup:
    config = recipe.config
    budget = Budget(config.restart, len(recipe.slices))
    python, dispatch = config.workers.python, config.settings.dispatch
    portable = dispatch == "auto" and python is not None and not foreign.probe(str(python)).is_native
    dispatch = "portable" if portable else base.choose_dispatch(dispatch)
    if config.backend == "serial":
        return SerialWorkers(recipe, dispatch=dispatch, budget=budget, learn_info=learn_info)
    launcher: Launcher
    if cluster is None:
        launcher = LocalLauncher(config, dict(enumerate(recipe.slices)))
    else:
        launcher = cluster.launcher(recipe.slices, config)
    return ProcessWorkers(recipe, launcher=launcher, dispatch=dispatch, budget=budget, learn_info=learn_info)


def _autoreset_of(description: Description) -> Autoreset:
    mode = description.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            f"metadata['autoreset_mode'] of the VectorEnv is {mode!r}; set it to a member of "
            "gymnasium.vector.AutoresetMode"
        )
    return Autoreset(mode)


def _cluster(config: PoolConfig) -> RayCluster | Remote | None:
    """Returns the source of worker hosts, if workers are on other machines; connects to a Ray cluster."""
    if not isinstance(config.backend, OtherMachines):
        return None
    if not isinstance(config.backend, Ray):
        return cast("Remote", config.backend)
    from jaxvec._ray import cluster as ray_cluster  # imports Ray, which is optional

    return ray_cluster.connect(config.backend, config.timeouts.start)


def _num_workers(config: PoolConfig, num_envs: int, cluster: RayCluster | Remote | None) -> int:
    num_workers = config.workers.num
    if config.backend == "serial":
        return 1
    if num_workers is None:
        if cluster is not None:
            return cluster.num_workers(num_envs, config.timeouts.start)
        return min(num_envs, usable_cores())
    if num_workers > num_envs:
        raise ValueError(
            f"num_workers must be an integer from 1 to num_envs ({num_envs}), not {num_workers!r}"
        )
    return num_workers


def _batch_size(batch_size: int | None, num_envs: int, autoreset: Autoreset, *, together: int) -> int:
    if batch_size is None:
        return num_envs
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or not 1 <= batch_size <= num_envs:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"batch_size must be an integer from 1 to num_envs ({num_envs}), not {batch_size!r}")
    if batch_size < num_envs and not autoreset.resets:
        raise ValueError(
            f"batch_size {batch_size} is below num_envs ({num_envs}) and needs envs that reset themselves; "
            "choose another autoreset_mode than DISABLED"
        )
    if batch_size % together:
        raise ValueError(
            f"batch_size must be a multiple of {together}, the envs of one batched env, which step together; "
            f"not {batch_size}"
        )
    return batch_size


def _learn(keys: list[str], description: Description) -> dict[str, Any]:
    """Returns env 0's first values of the info keys that were given without dtype and shape."""
    info = description.info or {}
    for key in keys:
        if key not in info:
            raise UnsupportedSpaceError(
                f"info: env 0's first reset returned no {key!r}, only {sorted(info)}; declare its dtype "
                f"and shape, as in info={{{key!r}: np.float32}}"
            )
    return {key: _as_arrays(info[key]) for key in keys}


def _as_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_arrays(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    return np.asarray(value)
