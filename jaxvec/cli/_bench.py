"""`bench ENV`: how fast the env is, bare and in pools, what limits it, and which settings suit it."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from jaxvec._config import TRANSPORTS
from jaxvec.cli import _plot, _target, _verdict
from jaxvec.cli._bench_setup import Request
from jaxvec.cli._command import Command, Outcome, counted
from jaxvec.cli._measure import measure
from jaxvec.cli._progress import progress
from jaxvec.cli._records import Measurement
from jaxvec.cli._target import Target
from jaxvec.cli._verdict import Verdict


def run(options: Namespace) -> Outcome:
    """Measures an env and concludes."""
    if options.plot:
        _plot.require(options.plot)
    target = _target.find(options)
    request = Request(options.num_envs, options.num_workers, options.seconds, options.transport)
    with _jax_log_off():
        found = measure(target, request, progress(quiet=options.json))
    verdict = _verdict.judge(found)
    line = target.line(verdict.settings)
    overlapping = None if verdict.overlapping is None else target.line(verdict.overlapping)
    if options.plot:
        _plot.draw(found, verdict, options.plot)
    record = {
        "schema": "jaxvec.bench/1",
        "measurement": asdict(found),
        "verdict": asdict(verdict),
        "make": line,
        "make_overlapping": overlapping,
    }
    return Outcome(record, "\n".join(_report(found, verdict, target, options.plot)))


def _report(found: Measurement, verdict: Verdict, target: Target, plot: Path | None) -> Iterator[str]:
    bare = found.bare
    yield (
        f"{found.env}, env steps a second; medians of {found.rounds} turns of {found.seconds} s "
        f"on {counted(found.cores, 'core')}, programs on {found.platform} by {found.transport}"
    )
    yield ""
    yield f"  env.step in a loop             {bare.one:12,.0f}"
    loops = f"{counted(bare.copies, 'such loop')}, a process each"
    yield f"  {loops:30} {bare.all:12,.0f}   the limit of this machine"
    yield (
        f"  a step takes {bare.step_us:,.1f} us (median {bare.step_us_median:,.1f}, 99% within "
        f"{bare.step_us_p99:,.1f}), a reset {bare.reset_us:,.1f} us"
        if bare.reset_us
        else f"  a step takes {bare.step_us:,.1f} us (median {bare.step_us_median:,.1f}, 99% within "
        f"{bare.step_us_p99:,.1f}); no episode ended"
    )
    yield ""
    yield "  num_envs  num_workers   in lax.scan  of limit   envs.step  of limit  workers busy"
    for each in found.samples:
        yield (
            f"  {each.num_envs:8}  {each.num_workers:11}  {each.scan:12,.0f}  {each.scan / bare.all:8.2f}"
            f"  {each.host:10,.0f}  {each.host / bare.all:8.2f}  {each.busy:12.0%}"
        )
    for why in found.left_out:
        yield f"  not measured: {why}"
    yield ""
    pool = found.breakdown
    yield (
        f"A step of {counted(pool.num_envs, 'env')} on {counted(pool.num_workers, 'worker')} takes "
        f"{pool.step_us:,.0f} us "
        "in lax.scan: " + ", ".join(f"{name} {us:,.0f}" for name, us in verdict.parts.items())
    )
    yield f"Limited by {verdict.because}."
    for advice in verdict.advice:
        yield f"  {advice}"
    for doubt in verdict.doubts:
        yield f"  note: {doubt}"
    for variant in found.variants:
        yield f"  tried {_target.arguments(variant.settings)}: {variant.ratio:.2f} times as fast"
    yield ""
    yield "Recommended:"
    yield f"  {target.line(verdict.settings)}"
    if verdict.overlapping is not None:
        policy = "for a policy on an accelerator"
        if verdict.overlap_from_us >= 0.5:
            policy += f" that takes more than {verdict.overlap_from_us:,.0f} us for {pool.num_envs} envs"
        yield f"or, double buffering, {policy}:"
        yield f"  {target.line(verdict.overlapping)}"
    if plot:
        yield f"\nPlotted to {plot}"


@contextmanager
def _jax_log_off() -> Generator[None]:
    """Keeps JAX from logging a failing env's error: it is told once, by its own error."""
    log = logging.getLogger("jax")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError as error:
        raise ArgumentTypeError(f"expected numbers, as 16,64,256, not {text!r}") from error
    if min(numbers) < 1:
        raise ArgumentTypeError(f"must be at least 1, not {min(numbers)}")
    return numbers


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 60:
        raise ArgumentTypeError(f"must be above 0 and at most 60, not {text!r}")
    return seconds


def _add_arguments(parser: ArgumentParser) -> None:
    _target.add_arguments(parser)
    parser.add_argument(
        "--num-envs",
        type=_numbers,
        metavar="N,N,…",
        help="sizes of pools; 16,64,256 unless the env is too slow",
    )
    parser.add_argument(
        "--num-workers",
        type=_numbers,
        metavar="N,N,…",
        help="worker counts; up to the usable cores by default",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=0.2,
        metavar="S",
        help="seconds of each turn, 0.2 by default; a run has about 120 turns",
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="how programs reach the pool")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw it, to a .png, .pdf or .svg file"
    )


COMMAND = Command(
    name="bench",
    summary="measure an env, bare and in pools, say what limits it, and recommend settings",
    details="""\
It steps the env with random actions: alone, in pools of all sizes, from a Python loop and inside a jitted
lax.scan. Then it measures what a step of the best pool is made of, with envs of the same spaces that do
nothing, of as many bytes, and of none. Systems take turns, and figures are medians. Keep the machine quiet.

--json prints {"schema": "jaxvec.bench/1", "measurement": {…}, "verdict": {…}, "make": TEXT,
"make_overlapping": TEXT or null}; jaxvec/cli/_records.py has the fields of Measurement, and
jaxvec/cli/_verdict.py those of Verdict.

examples:
  python -m jaxvec bench CartPole-v1
  python -m jaxvec bench ALE/Pong-v5 --kwargs '{"frameskip": 4}' --num-envs 16,64
  python -m jaxvec bench my_package.envs:make_env --num-workers 1,2 --plot speed.png
  python -m jaxvec bench CartPole-v1 --num-envs 8 --num-workers 1 --seconds 0.02 --json""",
    add_arguments=_add_arguments,
    run=run,
)
