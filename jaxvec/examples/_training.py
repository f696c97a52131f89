"""What the training programs share: options, the loop of updates within a compiled program, the outcome."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from tqdm import tqdm

import jaxvec
from jaxvec import _util

_RECENT = 100  # episodes whose mean return is told


def option(default: Any, text: str, kind: Callable[[str], Any] | None = None) -> Any:
    """Declares an option of the command line; `kind` makes its value, where the default does not say how."""
    return field(default=default, metadata={"help": text, "type": kind or type(default)})


@dataclass(frozen=True)
class Options:
    """Holds what every program can be told; each adds what it needs."""

    env: str = option("CartPole-v1", "Gymnasium id")
    num_envs: int = option(64, "envs stepped together")
    num_workers: int | None = option(
        None, "worker processes; None for as many as there are usable cores", int
    )
    total_steps: int = option(524_288, "env steps, rounded up to whole updates of num-envs x num-steps")
    num_steps: int = option(64, "steps of each env in an update")
    seed: int = option(0, "of envs, weights and actions")
    stop_at: float | None = option(None, "end as soon as the mean return is as high; None for never", float)
    log: str | None = option(
        None, "file for lines of env steps, seconds, and the mean return; None for no file", str
    )
    plot: str | None = option(None, "file for the learning curve; None for <program>_<env>.png", str)

    def __post_init__(self) -> None:
        """Raises `ValueError` if there is nothing to do; programs add checks of their own."""
        if min(self.num_envs, self.num_steps, self.total_steps) < 1:
            raise ValueError("the numbers of envs and steps must be at least 1")

    @property
    def steps_per_update(self) -> int:
        """Counts env steps."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Counts the updates that reach `total_steps`."""
        return -(-self.total_steps // self.steps_per_update)


SomeOptions = TypeVar("SomeOptions", bound=Options)


def make_parser(kind: type[Any], module: str, description: str) -> argparse.ArgumentParser:
    """Returns what reads the options that a dataclass declares, for a program of this package."""
    parser = argparse.ArgumentParser(
        prog=f"python -m jaxvec.examples.{module}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for each in fields(kind):
        parser.add_argument(f"--{each.name.replace('_', '-')}", default=each.default, **each.metadata)
    return parser


def parse(kind: type[SomeOptions], module: str, description: str, argv: Sequence[str] | None) -> SomeOptions:
    """Reads a program's options from `argv`, or from the command line."""
    parser = make_parser(kind, module, description)
    try:
        return kind(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))


def need(extra: str, *modules: str) -> None:
    """Ends the program, and says what to install, if a module of an extra is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise SystemExit(f"this example needs {', '.join(missing)}: {_util.install_command(extra)}")


def encode(obs: jax.Array) -> jax.Array:
    """Turns Box observations, `[num_envs, ...]`, into `[num_envs, obs_size]` float32."""
    return obs.reshape(len(obs), -1).astype(jnp.float32)


def discrete_actions(options: Options, envs: jaxvec.VectorEnv, algorithm: str) -> spaces.Discrete:
    """Returns the space of actions; ends the program unless observations are Box and actions Discrete."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if isinstance(obs_space, spaces.Box) and isinstance(action_space, spaces.Discrete):
        return action_space
    raise SystemExit(
        f"{options.env}: this {algorithm} takes Box observations and Discrete actions, not {obs_space} and "
        f"{action_space}"
    )


class Returns(NamedTuple):
    """The returns of the last episodes."""

    last: jax.Array  # [100] float32, the newest last; NaN: none yet

    @classmethod
    def create(cls) -> Returns:
        """Returns those of no episode."""
        return cls(jnp.full(_RECENT, jnp.nan))

    def add(self, done: jax.Array, episode_return: jax.Array) -> Returns:
        """Returns these and those of the episodes that ended; `[...]` bool and float32, the oldest first."""
        ended = jnp.where(done, episode_return, jnp.nan).reshape(-1)
        both = jnp.concatenate([self.last, ended])
        both = both[jnp.argsort(~jnp.isnan(both), stable=True)]  # those of no episode before all others
        return Returns(both[-_RECENT:])

    def mean(self) -> jax.Array:
        """Returns their mean, `[]` float32; NaN if no episode ended."""
        return jnp.nanmean(self.last)


class HasReturns(Protocol):
    """What training carries from update to update, whatever else is in it."""

    @property
    def returns(self) -> Returns:
        """Those of the last episodes."""
        ...


State = TypeVar("State", bound=HasReturns)
Report = Callable[[Any], None]
Trained = tuple[State, jax.Array, jax.Array]


def repeat(
    update: Callable[[State, jax.Array], State],
    state: State,
    key: jax.Array,
    options: Options,
    report: Report,
) -> Trained[State]:
    """Updates until `total_steps`, or until the mean return reaches `stop_at`; called by a compiled program.

    Args:
        update: takes the state and a key, plays and learns.
        state: before the first update.
        key: for all of them.
        options: of the program.
        report: is told on the host, after each update, what the mean return is.

    Returns:
        The last state; the mean return after each update, `[num_updates]` float32; and how many updates
        were made, `[]` int32.
    """
    keys = jax.random.split(key, options.num_updates)
    curve = jnp.full(options.num_updates, jnp.nan)
    goal = jnp.inf if options.stop_at is None else options.stop_at

    def goes_on(carry: tuple[jax.Array, State, jax.Array]) -> jax.Array:
        number, _, curve = carry  # a return that is not known yet is not high enough
        return (number < options.num_updates) & ~(curve[jnp.maximum(number - 1, 0)] >= goal)

    def go_on(carry: tuple[jax.Array, State, jax.Array]) -> tuple[jax.Array, State, jax.Array]:
        number, state, curve = carry
        state = update(state, keys[number])
        mean_return = state.returns.mean()
        jax.debug.callback(report, mean_return)
        return number + 1, state, curve.at[number].set(mean_return)

    number, state, curve = jax.lax.while_loop(goes_on, go_on, (jnp.int32(0), state, curve))
    return state, curve, number


class Result(NamedTuple):
    """What a run came to."""

    mean_return: float  # of the last `num_episodes`; NaN if none ended
    num_episodes: int  # at most 100
    env_steps: int
    seconds: float  # compilation included
    curve: NDArray[np.float32]  # [updates that were made], the mean return after each


@contextmanager
def progress(options: Options) -> Generator[Report]:
    """Yields what to tell the mean return after each update: it moves a bar, and writes the log."""
    total = options.num_updates * options.steps_per_update
    bar = tqdm(total=total, desc=options.env, unit=" steps", unit_scale=True)
    start = time.perf_counter()
    env_steps = 0
    with bar, open(options.log, "w") if options.log else nullcontext() as log:

        def report(mean_return: Any) -> None:
            # A compiled program waits for this, so it must not call jax; NumPy is safe.
            nonlocal env_steps
            env_steps += options.steps_per_update
            known = np.asarray(mean_return).item()
            bar.set_postfix_str(f"mean return {known:.1f}", refresh=False)
            bar.update(options.steps_per_update)
            if log:
                print(f"{env_steps},{time.perf_counter() - start:.3f},{known:.3f}", file=log, flush=True)

        yield report


def run(
    options: Options,
    envs: jaxvec.VectorEnv,
    train: Callable[[Report, jaxvec.Handle, jaxvec.TimeStep, jax.Array], Trained[Any]],
) -> Result:
    """Compiles `train` and calls it once; a progress bar moves meanwhile.

    Args:
        options: of the program.
        envs: that are played.
        train: takes a function for `repeat` to report to, a handle, the first time step, and a key;
            returns what `repeat` returns.
    """
    start = time.perf_counter()
    with progress(options) as report:
        program: Callable[..., Trained[Any]] = jax.jit(partial(train, report))
        handle, timestep = jaxvec.reset(envs, seed=options.seed)
        state, curve, number = program(handle, timestep, jax.random.key(options.seed))
        recent, curve = np.asarray(state.returns.last), np.asarray(curve)[:number]  # waits for the program
        jax.effects_barrier()  # waits for the last report
    seconds = time.perf_counter() - start
    env_steps = curve.size * options.steps_per_update
    return Result(float(curve[-1]), int(np.isfinite(recent).sum()), env_steps, seconds, curve)


def sparkline(curve: NDArray[np.float32], width: int = 60) -> str:
    """Draws the curve as a line of text, between its lowest and highest values."""
    known = curve[np.isfinite(curve)]
    if not known.size:
        return "(no episode ended)"
    points = known[np.linspace(0, known.size - 1, min(width, known.size)).astype(int)]
    heights = np.interp(points, (known.min(), known.max()), (0, 7)).astype(int)
    return f"{known.min():.1f} {''.join('▁▂▃▄▅▆▇█'[height] for height in heights)} {known.max():.1f}"


def plot(options: Options, algorithm: str, result: Result, path: str) -> None:
    """Saves a picture of the learning curve."""
    from matplotlib.figure import Figure  # slow to import, so not before the training

    figure = Figure(figsize=(7, 4), layout="constrained")  # draws with Agg; pyplot might open a window
    axes = figure.subplots()
    axes.plot(np.arange(1, result.curve.size + 1) * options.steps_per_update, result.curve)
    axes.set(
        title=f"{algorithm} on {options.env}",
        xlabel="env steps",
        ylabel=f"mean return of the last {_RECENT} episodes",
    )
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def finish(options: Options, algorithm: str, module: str, result: Result) -> Result:
    """Prints the outcome and plots the learning curve."""
    rate = result.env_steps / result.seconds
    print(f"mean return {result.mean_return:.1f} of the last {result.num_episodes} episodes")
    print(f"{result.env_steps:,} env steps in {result.seconds:.1f} s with compilation: {rate:,.0f} steps/s")
    path = options.plot or f"{module}_" + re.sub(r"[^\w.-]", "_", options.env) + ".png"
    plot(options, algorithm, result, path)
    print(f"learning curve {sparkline(result.curve)}, drawn in {path}")
    return result
