"""Subsystems beside the core. Each is imported if the options of a pool need it."""

from __future__ import annotations

from jaxvec._extension import Extension
from jaxvec._options import PoolConfig


def make_states(config: PoolConfig) -> Extension | None:
    if not config.states.max:
        return None
    from jaxvec._extensions.states import StatesExtension

    return StatesExtension(config.states)


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
