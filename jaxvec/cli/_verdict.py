"""What `bench` concludes: pure functions of what it measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec.cli._command import counted
from jaxvec.cli._records import Breakdown, Measurement, Sample, Variant

_AS_GOOD = 0.95  # of the best rate: fewer workers and envs are worth that
_GAIN = 1.1  # what a variant must gain to be recommended
_RESETS = 0.15  # share of the env's time from which resets are worth a word
_BUSY = 0.5  # of the cores: a load from which other programs are worth a word
_SHARED = 0.75  # of what they would be on cores of their own: loops below share cores, or the cores slow down
_WAITS = 0.5  # share of a core below which an env waits more than it computes


@dataclass(frozen=True)
class Verdict:
    """What limits an env, and what to do.

    Attributes:
        limit: the largest of `parts`.
        parts: microseconds of the best pool's step: `"env"`, in `env.step` and `env.reset`; `"dispatch"`,
            waking workers and being woken; `"python"`, around each env in the workers and in a host
            callback; `"memory"`, copying observations; `"waiting"`, what is left: for the slowest
            worker, and for cores.
        of_limit: the best pool's rate over that of bare loops, this machine's limit.
        because: says so.
        advice: what would help.
        doubts: what makes the figures lower than this machine could have them.
        settings: arguments of `jaxvec.make` that are recommended.
        overlapping: others, that let a policy work on one half of the envs while the other half steps; `None`
            for an odd number of envs.
        overlap_from_us: how long a policy must take, for all envs, to make `overlapping` the better choice.
    """

    limit: str
    parts: dict[str, float]
    of_limit: float
    because: str
    advice: tuple[str, ...]
    doubts: tuple[str, ...]
    settings: dict[str, Any]
    overlapping: dict[str, Any] | None
    overlap_from_us: float


def best(samples: Sequence[Sample]) -> Sample:
    """Returns the pool with the fewest workers, then envs, that is about as fast as the fastest."""
    fastest = max(sample.scan for sample in samples)
    good = [sample for sample in samples if sample.scan >= _AS_GOOD * fastest]
    return min(good, key=lambda sample: (sample.num_workers, sample.num_envs))


def straggling(times: Sequence[NDArray[np.float64]], num_envs: int, num_workers: int) -> float:
    """Returns how much longer the slowest worker's share of a step takes than the mean one's.

    Draws steps at random, each worker's envs from one of `times`.

    Args:
        times: `[n]` seconds of steps, of some envs.
        num_envs, num_workers: of the pool.

    Returns:
        1 if all steps take the same time; at most `num_workers`.
    """
    rng = np.random.default_rng(0)
    each = num_envs // num_workers
    shares = np.stack(
        [
            rng.choice(times[worker % len(times)], (200, each)).sum(axis=1)  # of 200 steps of the pool
            for worker in range(num_workers)
        ]
    )
    return float(shares.max(axis=0).mean() / shares.mean())


def parts(found: Breakdown) -> dict[str, float]:
    """Splits the time of a step: each cheaper pool lacks one of its parts. See `Verdict`."""
    callback = min(found.callback_us, found.single_us)
    around = max(found.empty_us - found.single_us, 0.0) + max(found.no_op_us - found.flat_us, 0.0)
    split = {
        "env": found.bare_us,
        "dispatch": found.single_us - callback,
        "python": callback + around,
        "memory": max(found.flat_us - found.empty_us, 0.0),
    }
    return split | {"waiting": max(found.step_us - sum(split.values()), 0.0)}


def judge(found: Measurement) -> Verdict:
    """Draws the conclusions."""
    pieces = parts(found.breakdown)
    limit = max(pieces, key=lambda name: pieces[name])
    pool = best(found.samples)
    settings: dict[str, Any] = {"num_envs": pool.num_envs, "num_workers": pool.num_workers}
    gains = [variant for variant in found.variants if variant.name != "halves" and variant.ratio >= _GAIN]
    halves = next((variant for variant in found.variants if variant.name == "halves"), None)
    share = pieces[limit] / sum(pieces.values())
    return Verdict(
        limit=limit,
        parts=pieces,
        of_limit=pool.scan / found.bare.all,
        because=f"{_BECAUSE[limit]}: {share:.0%} of that time",
        advice=tuple(_advice(limit, found)),
        doubts=tuple(_doubts(found)),
        settings=settings | (max(gains, key=lambda variant: variant.ratio).settings if gains else {}),
        overlapping=None if halves is None else settings | halves.settings,
        overlap_from_us=0.0 if halves is None else _overlap_from(found.breakdown, halves),
    )


_BECAUSE = {
    "env": "the env itself, its step and reset",
    "dispatch": "the dispatch, waking workers and being woken by them",
    "python": "Python around the envs",
    "memory": "memory, copying observations",
    "waiting": "waiting, for the slowest worker and for cores",
}


def _advice(limit: str, found: Measurement) -> list[str]:
    bare, pool = found.bare, found.breakdown
    said: list[str] = []
    match limit:
        case "env" if bare.core_share < _WAITS:
            said.append(
                f"it computes for {bare.core_share:.0%} of its time and waits for the rest: with more "
                "workers than cores, more envs wait at once"
            )
        case "env":
            said.append("only a faster env.step, or more cores, would make it faster")
        case "dispatch":
            said.append("more envs to a worker share one dispatch: more num_envs, or fewer num_workers")
        case "python" if pool.callback_us > pool.empty_us - pool.single_us:
            said.append(
                "programs reach the pool by a host callback: more num_envs share one; on the CPU, "
                'transport="ffi" does without (python -m jaxvec doctor says why it is off)'
            )
        case "python":
            said.append(
                f"each env has {pool.num_leaves} arrays of observation and action: fewer and larger ones, "
                "stacked in a wrapper, cost less"
            )
        case "memory":
            said.append(
                f"an observation has {pool.obs_bytes:,} bytes, is written once and copied once; a plain copy "
                f"of all takes {pool.memcpy_us:,.0f} us. Smaller ones cost less: uint8, resized or cropped "
                "in the env, frames stacked in the program"
            )
        case _:
            said.append(
                f"the slowest worker takes {pool.straggling:.2f} times as long as the mean one; the rest of "
                "it is for cores, which workers share with the program and with what else runs here"
            )
    if bare.reset_share > _RESETS:
        said.append(
            f"resets take {bare.reset_share:.0%} of the env's time, {bare.reset_us:,.0f} us each: where a "
            "program computes between steps, spare_envs=1 or more has them done in advance"
        )
    return said


def _doubts(found: Measurement) -> Iterator[str]:
    bare = found.bare
    if found.load > _BUSY * found.cores:
        yield (
            f"other programs keep this machine busy (load {found.load:.1f} on "
            f"{counted(found.cores, 'core')}): pools wait for them, and all figures are lower than they "
            "would be on a quiet machine"
        )
    # Loops that wait more than they compute don't need a core each.
    at_once = min(bare.copies, found.cores)
    if bare.core_share >= _WAITS and at_once > 1 and bare.all < _SHARED * at_once * bare.one:
        yield (
            f"{bare.copies} loops together are only {bare.all / bare.one:.2f} times as fast as one: the "
            "cores are shared with others or slow down together, and no pool can be faster than these loops"
        )


def _overlap_from(found: Breakdown, halves: Variant) -> float:
    """Returns the time of a policy from which the slower halves, which hide it, win: `t + p > t / ratio`."""
    return max(found.step_us / halves.ratio - found.step_us, 0.0)
