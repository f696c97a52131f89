"""Starts a pool: from what the user gives to workers, memory and a `VectorEnv`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as BatchedVectorEnv

from jaxvec import _pools, _restart
from jaxvec._backends import _handoffs, _start_method
from jaxvec._backends._launcher import Launcher
from jaxvec._backends._plan import Plan
from jaxvec._backends._serial import SerialWorkers
from jaxvec._backends._start_method import LocalLauncher
from jaxvec._backends._workers import ProcessWorkers
from jaxvec._cores import usable_cores
from jaxvec._errors import UnsupportedSpaceError
from jaxvec._memory._layout import split
from jaxvec._memory._views import Place
from jaxvec._pool import Pool, Timeouts
from jaxvec._ray import Ray
from jaxvec._restart import Budget, Restart
from jaxvec._slices import _env_fns
from jaxvec._slices._description import Description
from jaxvec._slices._kind import Kind
from jaxvec._spaces import DtypePolicy
from jaxvec._spec import make_spec, undeclared
from jaxvec._vector_env import VectorEnv

if TYPE_CHECKING:
    from jaxvec._backends._ray._launcher import RayCluster


def start(
    env: Any,
    num_envs: int | None,
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
    start_method: str = "auto",
    preload: Iterable[str] = (),
    on_fault: str | Restart = "raise",
    check: str = "structure",
    spare_envs: int = 0,
    timeouts: Timeouts,
    transport: str = "auto",
    handoff: str = "auto",
    place: Place | None = None,
    policy: DtypePolicy,
    objects: bool = False,
    equal_spaces: bool = True,
    resets_required: bool = True,
    env_kwargs: dict[str, Any],
) -> VectorEnv:
    """Starts a pool; see `jaxvec.make`.

    Args:
        place: where the time steps of its own verbs go; to NumPy arrays if `None`.
        policy: maps the spaces' dtypes to the stored ones.
        objects: whether spaces without fixed shape are taken, at the cost of the JAX face.
        equal_spaces: whether observation spaces have to be equal, and not only alike but for their bounds.
        resets_required: whether to refuse steps of envs that have to be reset.
        And those of `jaxvec.make`.
    """
    declared, learnt = undeclared(info)
    if isinstance(env, BatchedVectorEnv):
        env, num_envs, envs_per_instance = _adopt(env, num_envs, envs_per_instance)
        backend = "serial"
    num_envs = _env_fns.count(env, num_envs, envs_per_instance)
    cluster = _cluster(backend)
    num_workers = _num_workers(num_workers, num_envs // (envs_per_instance or 1), backend, cluster)
    slices = split(num_envs, num_workers, envs_per_instance or 1)
    env_fns = _env_fns.resolve(env, slices, env_kwargs, configs=env_configs, size=envs_per_instance)
    mode = _autoreset_mode(autoreset_mode, batched=envs_per_instance is not None, episodic=episodic)
    budget = Budget(_restart.parse(on_fault), num_workers)
    handoff = _handoffs.choose(handoff)
    if recv_order not in ("ready", "sent"):
        raise ValueError(f'recv_order must be "ready" or "sent", not {recv_order!r}')
    if check not in ("structure", "strict"):
        raise ValueError(f'check must be "structure" or "strict", not {check!r}')
    if isinstance(spare_envs, bool) or not isinstance(spare_envs, int) or spare_envs < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"spare_envs must be an integer of at least 0, not {spare_envs!r}")
    if spare_envs and mode is AutoresetMode.DISABLED:
        raise ValueError("spare_envs needs autoreset: without it, no env is reset in advance")
    strict = check == "strict"
    if envs_per_instance is not None:
        _refuse(
            "does not go with a batched env",
            on_fault=budget.policy,
            check=strict,
            spare_envs=spare_envs,
            episodic=episodic,
        )
    kind = Kind(envs_per_instance, spare_envs, strict=strict, equal_spaces=equal_spaces, idle=episodic)
    plan = Plan(env_fns, slices, timeouts.start, kind)
    method = _start_method.parse(start_method, worker_env=worker_env, preload=preload, timeout=timeouts.start)
    if backend == "serial":
        _refuse(
            'needs worker processes; backend="serial" has none',
            worker_env=worker_env,
            preload=method.preload,
            spare_envs=spare_envs,
        )
        workers = SerialWorkers(plan, budget=budget, learn_info=bool(learnt))
    else:
        if cluster is None:
            launcher: Launcher = LocalLauncher(method)
        else:
            launcher = cluster.launcher(num_workers, method)
        workers = ProcessWorkers(
            plan, launcher=launcher, handoff=handoff, budget=budget, learn_info=bool(learnt)
        )
    try:
        description = workers.description
        mode = mode or _mode_of(description)
        spec = make_spec(
            description.spaces,
            num_envs=num_envs,
            batch_size=_batch_size(batch_size, num_envs, mode, together=envs_per_instance or 1),
            autoreset_mode=mode,
            final_obs=final_obs,
            fault=budget.policy is not None,
            idle=episodic,
            declared=declared | _learn(learnt, description),
            policy=policy,
            objects=objects,
        )
        pool = Pool(
            workers,
            spec,
            slices=slices,
            together=envs_per_instance or 1,
            autoreset_mode=mode,
            in_order=recv_order == "sent",
            timeouts=timeouts,
            resets_required=resets_required,
        )
        _pools.publish(pool)
        return VectorEnv(
            pool, description, slices=slices, autoreset_mode=mode, transport=transport, place=place
        )
    except BaseException:
        workers.close(timeout=1)
        raise


def _adopt(
    env: BatchedVectorEnv[Any, Any, Any], num_envs: int | None, size: int | None
) -> tuple[Any, int, int]:
    """Returns what makes the pool of a batched env that is there already."""
    for name, value in (("num_envs", num_envs), ("envs_per_instance", size)):
        if value not in (None, env.num_envs):
            raise ValueError(f"{name} is {value}, but the VectorEnv has {env.num_envs} envs; leave it out")
    return [lambda: env], env.num_envs, env.num_envs


def _refuse(why: str, **values: Any) -> None:
    for name, value in values.items():
        if value:
            raise ValueError(f"{name} {why}")


def _autoreset_mode(
    mode: AutoresetMode | str | None, *, batched: bool, episodic: bool
) -> AutoresetMode | None:
    """Returns the mode that was asked for; `None` for that of a batched env, which has its own."""
    if mode is None and not batched:
        return AutoresetMode.DISABLED if episodic else AutoresetMode.SAME_STEP
    if mode is None:
        return None
    for known in AutoresetMode:
        if mode in (known, known.name, known.value):
            if batched:
                raise ValueError("autoreset_mode: a batched env resets its envs itself; leave it out")
            if episodic and known is not AutoresetMode.DISABLED:
                raise ValueError(
                    f"episodic envs idle after their episode's end, so autoreset_mode can't be {known.name}; "
                    "leave it out"
                )
            return known
    names = ", ".join(known.name for known in AutoresetMode)
    raise ValueError(f"autoreset_mode must be one of {names}, not {mode!r}")


def _mode_of(description: Description) -> AutoresetMode:
    mode = description.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            "the VectorEnv does not say how it resets its envs: set metadata['autoreset_mode'] to one of "
            f"gymnasium.vector.AutoresetMode, not {mode!r}"
        )
    return mode


def _cluster(backend: str | Ray) -> RayCluster | None:
    """Connects to the cluster that a pool's workers are to be on, if one is."""
    if isinstance(backend, Ray) or backend == "ray":
        from jaxvec._backends._ray import _launcher  # for those who ask

        return _launcher.connect(Ray() if isinstance(backend, str) else backend)
    if backend not in ("process", "serial"):
        raise ValueError(f'backend must be "process", "serial", "ray" or a jaxvec.Ray, not {backend!r}')
    return None


def _num_workers(
    num_workers: int | None, num_envs: int, backend: str | Ray, cluster: RayCluster | None
) -> int:
    if backend == "serial":
        if num_workers not in (None, 1):
            raise ValueError(f'backend="serial" has one worker, this process, not {num_workers}')
        return 1
    if num_workers is None:
        return min(num_envs, usable_cores()) if cluster is None else cluster.num_workers(num_envs)
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or not 1 <= num_workers <= num_envs:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"num_workers must be an integer from 1 to num_envs ({num_envs}), not {num_workers!r}"
        )
    return num_workers


def _batch_size(batch_size: int | None, num_envs: int, mode: AutoresetMode, *, together: int) -> int:
    if batch_size is None:
        return num_envs
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or not 1 <= batch_size <= num_envs:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"batch_size must be an integer from 1 to num_envs ({num_envs}), not {batch_size!r}")
    if batch_size < num_envs and mode is AutoresetMode.DISABLED:
        raise ValueError(
            "batch_size needs envs that reset themselves; choose another autoreset_mode than DISABLED"
        )
    if batch_size % together:
        raise ValueError(
            f"batch_size must be a multiple of {together}, the envs of one batched env, which step together; "
            f"not {batch_size}"
        )
    return batch_size


def _learn(keys: list[str], description: Description) -> dict[str, Any]:
    """Takes the arrays of undeclared info keys from env 0's first reset."""
    info = description.info or {}
    for key in keys:
        if key not in info:
            raise UnsupportedSpaceError(
                f"info: env 0's first reset returned no {key!r}, only {sorted(info)}; declare its dtype "
                f"and shape, as in info={{{key!r}: np.float32}}"
            )
    return {key: np.asarray(info[key]) for key in keys}
