"""Beside `jax.profiler`: what the host does for programs, in its traces; and its traces in ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax

from jaxvec._tracing import _timeline


def annotate(verb: str, by: str) -> jax.profiler.TraceAnnotation:
    """Makes the block an event of `jax.profiler`'s trace, if it makes one."""
    return jax.profiler.TraceAnnotation(f"{verb} ({by})")


def merge_traces(trace: str | Path, log_dir: str | Path, out: str | Path) -> None:
    """Writes a trace of a pool and one of `jax.profiler` into one file, on one time axis.

    Both read the machine's clocks, so tracks line up to within some µs; the profiler's beginning is 0.

    Args:
        trace: that `envs.trace` wrote.
        log_dir: that `jax.profiler.trace` or `start_trace` was given; of several traces there, the newest.
        out: the file to be written, compressed if its name ends in `.gz`; opens like the others.

    Raises:
        FileNotFoundError: one of them is not there.
        ValueError: `trace` is not of a pool, or the profile does not say when it began.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            with jax.profiler.trace("profile"), envs.trace("envs.json"):
                jax.block_until_ready(jaxvec.step(handle, jnp.array([0, 1])))
            jaxvec.merge_traces("envs.json", "profile", "both.json.gz")
        ```
    """
    ours = _timeline.read(Path(trace))
    profiles = sorted(Path(log_dir).glob("plugins/profile/*/*.xplane.pb"))
    if not profiles:
        raise FileNotFoundError(
            f"{log_dir} has no trace of jax.profiler's, plugins/profile/*/*.xplane.pb; has it stopped?"
        )
    if "epoch_ns" not in ours.get("otherData", {}):
        raise ValueError(f"{trace} was not written by envs.trace: it does not say when it began")
    profile = profiles[-1]
    theirs = _timeline.read(profile.with_name(profile.name.removesuffix(".xplane.pb") + ".trace.json.gz"))
    shift = (ours["otherData"]["epoch_ns"] - _start_of(profile)) / 1e3
    events: list[dict[str, Any]] = [event for event in theirs["traceEvents"] if event]
    events += [
        event | {"ts": event["ts"] + shift} if "ts" in event else event for event in ours["traceEvents"]
    ]
    _timeline.write({**theirs, "otherData": ours["otherData"], "traceEvents": events}, Path(out))


def _start_of(profile: Path) -> int:
    """Returns when a profile began, in ns since 1970."""
    with warnings.catch_warnings():
        # jaxlib 0.12's own classes raise one under Python 3.13 and, where it is an error, end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(profile)).planes:
            for name, value in plane.stats:
                if name == "profile_start_time":
                    return int(value)
    raise ValueError(f"{profile} does not say when it began")
