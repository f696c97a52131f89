"""What `bench` measured: plain records, from which the verdict is drawn. `--json` prints them as they are.

Rates are env steps a second; a pool's step is one step of each of its envs. Times in `_us` are microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bare:
    """An env's own speed, without jaxvec.

    Attributes:
        one: rate of a loop of `env.step` in this process.
        all: rate of `copies` such loops together, in as many processes: the limit of this machine.
        copies: how many.
        core_share: of a loop's time, in which the env computes; the rest it waits.
        build_seconds: of its constructor.
        step_us, step_us_median, step_us_p99: of a step, with the reset where it ends an episode.
        reset_us: of a reset; 0 if no episode ended.
        reset_share: of a loop's time that is spent in resets.
    """

    one: float
    all: float
    copies: int
    core_share: float
    build_seconds: float
    step_us: float
    step_us_median: float
    step_us_p99: float
    reset_us: float
    reset_share: float


@dataclass(frozen=True)
class Sample:
    """A pool's speed.

    Attributes:
        num_envs, num_workers: of the pool.
        scan: rate inside a jitted `lax.scan`.
        host: rate of a Python loop of `envs.step`.
        busy: share of the workers' time that they spend in steps and resets, inside the scan.
    """

    num_envs: int
    num_workers: int
    scan: float
    host: float
    busy: float


@dataclass(frozen=True)
class Breakdown:
    """What a step of the best pool is made of: that pool, and cheaper ones, measured in turn.

    Attributes:
        num_envs, num_workers: of the pool.
        step_us: of a step of the pool, inside a jitted `lax.scan`.
        bare_us: of `num_workers` bare loops for as many env steps.
        no_op_us: of a step of the same pool with envs of the same spaces that do nothing.
        flat_us: … with observations of as many bytes, in one array of bytes; `no_op_us` if they are in
            one array already.
        empty_us: … with observations of one byte.
        single_us: … and with one env to each worker.
        callback_us: of a host callback that does nothing; 0 where programs reach the pool without.
        straggling: how much longer the slowest worker's share of a step takes than the mean one's,
            by the spread of the env's step times and by the workers' clocks; 1 for not at all.
        obs_bytes: of one env's observation, as it is stored.
        num_leaves: of one env's observation and action.
        memcpy_us: of a plain copy of all the pool's observations.
    """

    num_envs: int
    num_workers: int
    step_us: float
    bare_us: float
    no_op_us: float
    flat_us: float
    empty_us: float
    single_us: float
    callback_us: float
    straggling: float
    obs_bytes: int
    num_leaves: int
    memcpy_us: float


@dataclass(frozen=True)
class Variant:
    """Another setting of the best pool.

    Attributes:
        name: `"first-ready"`, `"spare envs"` or `"halves"`.
        settings: arguments of `jaxvec.make` besides those of the best pool.
        ratio: its rate over that of the pool without them.
    """

    name: str
    settings: dict[str, Any]
    ratio: float


@dataclass(frozen=True)
class Measurement:
    """All of a run.

    Attributes:
        env, kwargs: what was measured.
        cores: that this process may use.
        load: processes that wanted a core before the run, by the system's average of the last minute.
        platform: that programs ran on.
        transport: by which they reached the pool.
        rounds, seconds: how often each system had its turn, and for how long. Figures are medians.
        bare, samples, breakdown, variants: what was found.
        left_out: what was not measured, and why.
    """

    env: str
    kwargs: dict[str, Any]
    cores: int
    load: float
    platform: str
    transport: str
    rounds: int
    seconds: float
    bare: Bare
    samples: tuple[Sample, ...]
    breakdown: Breakdown
    variants: tuple[Variant, ...] = ()
    left_out: tuple[str, ...] = field(default=())
