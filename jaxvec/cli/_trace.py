"""`trace ENV`: a timeline of a pool of the env in a compiled program, and what its time went into."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from jaxvec._config import TRANSPORTS, config
from jaxvec._trace import check_file
from jaxvec.callbacks._trace_run import TraceRun, trace_run
from jaxvec.cli import _target
from jaxvec.cli._command import Command, Outcome, UsageError, counted, positive


def run(options: Namespace) -> Outcome:
    """Traces a run of random actions."""
    target = _target.find(options)
    try:
        check_file(options.out)
    except OSError as error:
        raise UsageError(f"--out {options.out}: name a file in an existing folder") from error
    if options.num_workers is not None and options.num_workers > options.num_envs:
        raise UsageError("--num-workers: more workers than envs; raise --num-envs")
    with config.override(transport=options.transport):
        found = trace_run(
            target.env,
            options.num_envs,
            num_workers=options.num_workers,
            num_steps=options.num_steps,
            path=options.out,
            **target.kwargs,
        )
    record = {
        "schema": "jaxvec.trace/1",
        "env": target.name,
        "kwargs": target.kwargs,
        **asdict(found),
        "path": str(found.path),
    }
    return Outcome(record, "\n".join(_report(target.name, found)))


def _report(name: str, found: TraceRun) -> Iterator[str]:
    shares = found.shares
    yield (
        f"{name} x {found.num_envs} on {counted(found.num_workers, 'worker')}, "
        f"{counted(found.num_steps, 'step')} in lax.scan: {counted(shares.hand_offs, 'call')} "
        f"in {shares.seconds * 1e3:,.1f} ms, "
        f"{found.env_steps_per_second:,.0f} env steps a second while traced"
    )
    yield ""
    rest = 1 - shares.wait - shares.hand_off
    yield (
        f"  program: waits for workers {shares.wait:4.0%}, rest of its calls {shares.hand_off:4.0%}, "
        f"its own work {rest:4.0%}"
    )
    for worker in shares.workers:
        yield f"  {worker.name}: step {worker.step:4.0%}, reset {worker.reset:4.0%}, wait {worker.wait:4.0%}"
    for row, number in found.dropped.items():
        yield f"  {row}: {number} earlier events were dropped; fewer --num-steps have room"
    yield f"\nWritten to {found.path}; open it at https://ui.perfetto.dev"


def _add_arguments(parser: ArgumentParser) -> None:
    _target.add_arguments(parser)
    parser.add_argument("--num-envs", type=positive, default=16, metavar="N", help="16 by default")
    parser.add_argument("--num-workers", type=positive, metavar="N", help="the usable cores by default")
    parser.add_argument("--num-steps", type=positive, default=100, metavar="N", help="100 by default")
    parser.add_argument(
        "--out", type=Path, default=Path("pool.json"), metavar="FILE", help="pool.json by default"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="how programs reach the pool")


COMMAND = Command(
    name="trace",
    summary="write a timeline of a pool of an env, stepped inside jit, and say what its time went into",
    details="""\
It steps the env with random actions in a jitted lax.scan. The file has a track for each worker, with its
envs' steps, resets and waits, and one for the program's calls of the pool; Perfetto and chrome://tracing open
it. For your own program, and beside jax.profiler's: `with envs.trace(FILE):` and `jaxvec.merge_traces`.

--json prints {"schema": "jaxvec.trace/1", "env": TEXT, "kwargs": {…}, "path": TEXT, "shares": {…}, …} with
the fields of jaxvec/callbacks/_trace_run.py's TraceRun.

examples:
  python -m jaxvec trace CartPole-v1
  python -m jaxvec trace CartPole-v1 --num-envs 8 --num-workers 2 --num-steps 20 --out trace.json.gz
  python -m jaxvec trace my_package.envs:make_env --kwargs '{"size": 5}' --json""",
    add_arguments=_add_arguments,
    run=run,
)
