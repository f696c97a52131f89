"""Computes the performance targets of jaxvec from the results of a run, and whether they are reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from benchmarks import costs, overlap, starts
from benchmarks.loads import LOADS
from benchmarks.report import Results

_FFI = "jaxvec in scan: ffi, native"
_IO = "jaxvec in scan: io_callback, native"
_SERIAL = "jaxvec in scan: ffi, serial backend"
_HOST = "jaxvec, Python loop"
_SERIAL_HOST = "jaxvec, Python loop: serial backend"
_JAXVEC_SYNC = "jaxvec's SyncVectorEnv for Gymnasium"
_BARE = "bare env.step loops, one per core"
_MEETING = "bare loops that meet after each step"
_SYNC, _ASYNC = "Gymnasium SyncVectorEnv", "Gymnasium AsyncVectorEnv (spawn)"

# Lower bounds of the rates of `_FFI` relative to `_BARE`, by load.
_OVER_BARE_LOOPS = {
    "CartPole x 8": 0.6,
    "CartPole x 64": 0.95,
    "CartPole x 256": 1.05,
    "Acrobot x 256": 1.0,
    "MountainCar x 256": 1.0,
    "nested Dict x 64": 0.8,
}


@dataclass(frozen=True)
class Target:
    """A measured value and its bound.

    Attributes:
        name: Description in the report.
        value: Measured value.
        bound: Value to reach.
        at_least: Whether `bound` is a lower bound. Otherwise, it is an upper bound.
        unit: Suffix for the value and the bound, with a leading space.
    """

    name: str
    value: float
    bound: float
    at_least: bool = True
    unit: str = ""

    @property
    def reached(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def targets(
    results: Results,
    *,
    memory: dict[str, float],
    rounds: int,
    seconds: float,
) -> Iterator[Target]:
    """Yields the targets for the systems and loads in `results`, and measures the other values.

    Args:
        results: Results by load and system.
        memory: Values that `costs.memory` returned.
        rounds: Number of rounds of further measurements.
        seconds: Approximate duration of a further measurement.
    """
    cartpoles = results.get("CartPole x 256", {})

    def ratio(load: str, one: str, other: str) -> Iterator[float]:
        rates = [results.get(load, {}).get(name) for name in (one, other)]
        if all(result is not None and result.rate for result in rates):
            yield rates[0].rate / rates[1].rate  # pyright: ignore[reportOptionalMemberAccess]

    for load, bound in _OVER_BARE_LOOPS.items():
        for value in ratio(load, _FFI, _BARE):
            yield Target(f"{load} over bare loops", value, bound)
    for value in ratio("CartPole x 256", _FFI, _MEETING):
        yield Target("CartPole x 256 over bare loops that meet after each step", value, 1.1)
    for value in ratio("CartPole x 256", _HOST, _BARE):
        yield Target("CartPole x 256 in a Python loop over bare loops", value, 0.95)
    for value in ratio("CartPole x 256", _JAXVEC_SYNC, _SYNC):
        yield Target("CartPole x 256, SyncVectorEnv over Gymnasium's own", value, 1.1)
    if (cpus := [cartpoles.get(name) for name in (_FFI, _BARE)]) and all(cpus):
        quotient = cpus[0].cpu / cpus[1].cpu  # pyright: ignore[reportOptionalMemberAccess]
        yield Target("CartPole x 256, CPU an env step over bare loops", quotient, 0.95, at_least=False)
    for value in ratio("CartPole x 64", _FFI, _ASYNC):
        yield Target("CartPole x 64 over AsyncVectorEnv", value, 8)
    for value in ratio("CartPole x 64", _FFI, _SYNC):
        yield Target("CartPole x 64 over SyncVectorEnv", value, 1.3)
    if (noop := results.get("no-op x 8", {}).get(_FFI)) and noop.rate:
        step = 1e6 * 8 / noop.rate
        yield Target("8 no-op envs, a jitted step", step, 12, at_least=False, unit=" us")
    for name, system, bound in (
        ("a jitted step", _SERIAL, 35),
        ("a step in a Python loop", _SERIAL_HOST, 20),
    ):
        if (result := results.get("no-op x 8", {}).get(system)) and result.rate:
            step = 1e6 * 8 / result.rate
            yield Target(f"8 no-op envs in this process, {name}", step, bound, at_least=False, unit=" us")
    for load in ("CartPole x 4", "CartPole x 8"):
        for value in ratio(load, _SERIAL, _SYNC):
            yield Target(f"{load} in this process over SyncVectorEnv", value, 0.8)
    for value in ratio("CartPole x 64", _IO, _FFI):
        yield Target("CartPole x 64, steps over io_callback over FFI's", value, 0.75)
    value = costs.callback(rounds, seconds)
    yield Target("8 no-op envs over io_callback over a bare io_callback", value, 1.6, at_least=False)
    for kind, added in costs.padded(rounds, seconds).items():
        yield Target(f"{kind} as observation, beyond 32 bytes", added, 5, at_least=False, unit=" us")
    if (image := results.get("image x 64", {}).get(_FFI)) and image.rate:
        row = prod(LOADS["image x 64"].env_fns()[0]().observation_space.shape or ())
        plain = costs.memcpy(64 * row, seconds)
        yield Target("image x 64: bytes handed out over memcpy's", image.rate * row / plain, 0.5)
        # Each byte is copied into the shared segment and out of it.
        yield Target("image x 64: bytes written over memcpy's", 2 * image.rate * row / plain, 0.5)
    yield Target("8 workers on CartPole x 256 over 2", costs.workers(rounds, seconds), 0.75)
    yield Target("time per env, 4,096 over 256", costs.size(rounds, seconds), 1.1, at_least=False)
    for transport, value in overlap.policy_between(rounds, seconds).items():
        yield Target(f"CartPole x 64 and a policy over the sum of both alone, {transport}", value, 0.95)
    yield Target(
        "1 ms envs, 1 ms policy: two halves over one", overlap.double_buffering(rounds, seconds), 1.7
    )
    yield Target("one env in eight ten times slower: first ready over all", overlap.mixed(rounds, seconds), 2)
    worker, bare, *_ = memory.values()
    yield Target("a worker over a bare interpreter", worker - bare, 10, at_least=False, unit=" MB")
    for workers, bound in ((2, 0.5), (64, 6)):
        quotient = starts.ratio(workers, rounds)
        yield Target(f"start of {workers} workers over a bare interpreter's", quotient, bound, at_least=False)
    yield Target("a worker of 64, PSS", starts.memory(), 9, at_least=False, unit=" MB")
    started = results.get("CartPole x 64", {})
    if _FFI in started and _ASYNC in started and started[_ASYNC].start:
        quotient = started[_FFI].start / started[_ASYNC].start
        yield Target("start of 64 CartPoles over AsyncVectorEnv's", quotient, 0.5, at_least=False)


def table(found: list[Target]) -> Iterator[str]:
    """Yields the lines of a Markdown table of targets."""
    yield "| target | measured | wanted | reached |"
    yield "| --- | ---: | ---: | --- |"
    for target in found:
        sign = "≥" if target.at_least else "≤"
        yield (
            f"| {target.name} | {target.value:.2f}{target.unit} | {sign} {target.bound:g}{target.unit} | "
            f"{'yes' if target.reached else 'no'} |"
        )
