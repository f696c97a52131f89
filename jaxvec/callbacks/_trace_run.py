"""Traces a run of random actions in a compiled loop, and says what its time went into."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxvec._tracing import _shares, _timeline
from jaxvec._tracing._shares import Shares
from jaxvec.callbacks import _functions, _make


@dataclass(frozen=True)
class TraceRun:
    """A traced run.

    Attributes:
        path: of the trace.
        num_envs, num_workers, num_steps: what was run.
        env_steps_per_second: while it was traced, which costs some time itself.
        shares: what the time went into.
        dropped: how many earlier events the file does not have, by row; raise `max_events`.
    """

    path: Path
    num_envs: int
    num_workers: int
    num_steps: int
    env_steps_per_second: float
    shares: Shares
    dropped: dict[str, int]


def trace_run(
    env: Any,
    num_envs: int,
    *,
    num_workers: int | None = None,
    num_steps: int = 100,
    path: str | Path = "pool.json",
    seed: int = 0,
    max_events: int = 100_000,
    **options: Any,
) -> TraceRun:
    """Steps envs by random actions in `lax.scan` under `jit`, and writes a trace of it.

    The program is compiled, and the envs are reset, before the trace begins.

    Args:
        env, num_envs, num_workers: as of `jaxvec.make`.
        num_steps: how often each env is stepped.
        path, max_events: as of `VectorEnv.trace`.
        seed: of envs and actions.
        **options: more for `jaxvec.make`.

    Raises:
        ValueError: `num_steps` is not at least 1.
        And as `jaxvec.make`, `VectorEnv.trace` and `jaxvec.step`.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, not {num_steps}")
    with _make.make(env, num_envs, num_workers=num_workers, **options) as envs:
        envs.action_space.seed(seed)
        samples = [envs.action_space.sample() for _ in range(num_steps)]
        actions = jax.tree.map(lambda *steps: np.stack(steps), *samples)
        handle, _ = _functions.reset(envs, seed=seed)

        def step(handle: Any, action: Any) -> tuple[Any, None]:
            return _functions.step(handle, action)[0], None

        program: Any = jax.jit(lambda handle, actions: jax.lax.scan(step, handle, actions)[0])
        compiled = program.lower(handle, actions).compile()
        with envs.trace(path, max_events=max_events) as path:
            jax.block_until_ready(compiled(handle, actions))
        timeline = _timeline.read(path)
        shares = _shares.of(timeline)
        return TraceRun(
            path,
            envs.num_envs,
            envs.num_workers,
            num_steps,
            envs.num_envs * num_steps / shares.seconds,
            shares,
            timeline["otherData"]["dropped"],
        )
