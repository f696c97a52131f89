"""Subsystems beside the core. Each is imported if the options of a pool need it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from jaxvec._extension import Extension
from jaxvec._options import PoolConfig

if TYPE_CHECKING:  # workers import this file, and never the pool
    from jaxvec._envs.slice import Slice
    from jaxvec._pool.pool import Pool


def make_states(config: PoolConfig) -> Extension | None:
    if not config.states.max:
        return None
    from jaxvec._extensions.states import StatesExtension

    return StatesExtension(config.states)


def make_module_values(config: PoolConfig) -> Extension | None:
    """Returns none if the envs' modules are those of the program, or of another Python."""
    if config.backend == "serial" or config.workers.python is not None:
        return None
    from jaxvec._extensions.module_values import ValuesExtension

    return ValuesExtension()


def trace_pool(
    pool: Pool, slices: tuple[tuple[int, int], ...], path: str | Path, max_events: int
) -> AbstractContextManager[Path]:
    from jaxvec._extensions import timeline

    return timeline.trace_pool(pool, slices, path, max_events)


def choose_batch_slice(config: PoolConfig) -> Callable[..., Slice] | None:
    if config.envs_per_instance is None:
        return None
    from jaxvec._extensions.batch_slice import BatchSlice

    return BatchSlice


def make_spare_envs(config: PoolConfig) -> Extension | None:
    if not config.spare_envs:
        return None
    from jaxvec._extensions.spare_envs import SpareEnvs

    return SpareEnvs(config.spare_envs)


def make_recycling(config: PoolConfig) -> Extension | None:
    if config.workers.recycle is None:
        return None
    from jaxvec._extensions.recycling import Recycling

    return Recycling(config.workers.recycle)
