"""Shared code of the training programs: options, the compiled loop of updates, and the report."""

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

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from tqdm import tqdm

import jaxvec
from jaxvec import _util
from jaxvec._envs.constructors import find_spec as find_env

_RECENT = 100  # number of episodes in the reported mean return


def option(default: Any, text: str, kind: Callable[[str], Any] | None = None) -> Any:
    """Declares a command-line option. `kind` converts its text; by default, the type of `default` does."""
    return field(default=default, metadata={"help": text, "type": kind or type(default)})


@dataclass(frozen=True)
class Options:
    """Options of every training program. Programs add their own in subclasses."""

    env: str = option("CartPole-v1", "Gymnasium id")
    num_envs: int = option(64, "number of envs")
    num_workers: int | None = option(
        None, "number of worker processes; by default, one for each usable core", int
    )
    total_steps: int = option(524_288, "env steps, rounded up to a multiple of num-envs x num-steps")
    num_steps: int = option(64, "steps of each env per update")
    seed: int = option(0, "random seed")
    stop_at: float | None = option(None, "stop once the mean return reaches this value", float)
    log: str | None = option(None, "write lines of env steps, seconds and mean return to this file", str)
    plot: str | None = option(None, "file for the learning curve; by default <program>_<env>.png", str)

    def __post_init__(self) -> None:
        if min(self.num_envs, self.num_steps, self.total_steps) < 1:
            raise ValueError("the numbers of envs and steps must be at least 1")

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Number of updates that reach `total_steps`."""
        return -(-self.total_steps // self.steps_per_update)


SomeOptions = TypeVar("SomeOptions", bound=Options)


def make_parser(kind: type[Any], module: str, description: str) -> argparse.ArgumentParser:
    """Returns an argument parser with the options of a dataclass, for a program of this package."""
    parser = argparse.ArgumentParser(
        prog=f"{module}.py",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for each in fields(kind):
        parser.add_argument(f"--{each.name.replace('_', '-')}", default=each.default, **each.metadata)
    return parser


def parse(
    kind: type[SomeOptions], module: str, about: str, argv: Sequence[str] | None, *, is_id: bool = True
) -> SomeOptions:
    """Reads a program's options from `argv`, or from the command line. With `is_id`, checks the env id."""
    parser = make_parser(kind, module, about)
    try:
        options = kind(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
    if is_id:
        check_env_id(parser, options.env)
    return options


def check_env_id(parser: argparse.ArgumentParser, env_id: str) -> None:
    """Ends the program with a usage error, rather than a traceback, if the id is misspelt."""
    try:
        find_env(env_id)
    except (gymnasium.error.NameNotFound, gymnasium.error.VersionNotFound, ImportError) as error:
        parser.error(str(error))


def need(extra: str, *modules: str) -> None:
    """Ends the program with the command to run if a module of an extra is not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise SystemExit(f"this example needs {', '.join(missing)}: {_util.install_command(extra)}")


def encode(obs: jax.Array) -> jax.Array:
    """Flattens Box observations, `[num_envs, ...]`, to `[num_envs, obs_size]` float32."""
    return obs.reshape(len(obs), -1).astype(jnp.float32)


def discrete_actions(options: Options, envs: jaxvec.VectorEnv, algorithm: str) -> spaces.Discrete:
    """Returns the action space. Ends the program unless observations are Box and actions are Discrete."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if isinstance(obs_space, spaces.Box) and isinstance(action_space, spaces.Discrete):
        return action_space
    raise SystemExit(
        f"{options.env}: this {algorithm} takes Box observations and Discrete actions, not {obs_space} and "
        f"{action_space}"
    )


class Returns(NamedTuple):
    """The returns of the latest episodes."""

    last: jax.Array  # [100] float32, newest last; NaN while fewer episodes have ended

    @classmethod
    def create(cls) -> Returns:
        return cls(jnp.full(_RECENT, jnp.nan))

    def add(self, done: jax.Array, episode_return: jax.Array) -> Returns:
        """Adds the returns of the episodes that ended; `[...]` bool and float32, oldest first."""
        ended = jnp.where(done, episode_return, jnp.nan).reshape(-1)
        both = jnp.concatenate([self.last, ended])
        both = both[jnp.argsort(~jnp.isnan(both), stable=True)]  # NaN first
        return Returns(both[-_RECENT:])

    def mean(self) -> jax.Array:
        """Returns the mean, `[]` float32; NaN if no episode ended."""
        return jnp.nanmean(self.last)


class HasReturns(Protocol):
    """Type of a state of training: it has at least `returns`."""

    @property
    def returns(self) -> Returns: ...


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
    """Calls `update` until `total_steps`, or until the mean return reaches `stop_at`. Runs inside `jit`.

    It calls `report` on the host with the mean return after each update. Returns the last state; the mean
    return after each update, `[num_updates]` float32; and the number of updates made, `[]` int32.
    """
    keys = jax.random.split(key, options.num_updates)
    curve = jnp.full(options.num_updates, jnp.nan)
    goal = jnp.inf if options.stop_at is None else options.stop_at

    def unfinished(carry: tuple[jax.Array, State, jax.Array]) -> jax.Array:
        number, _, curve = carry  # the curve is NaN until an episode has ended, and NaN >= goal is false
        return (number < options.num_updates) & ~(curve[jnp.maximum(number - 1, 0)] >= goal)

    def body(carry: tuple[jax.Array, State, jax.Array]) -> tuple[jax.Array, State, jax.Array]:
        number, state, curve = carry
        state = update(state, keys[number])
        mean_return = state.returns.mean()
        jax.debug.callback(report, mean_return)
        return number + 1, state, curve.at[number].set(mean_return)

    number, state, curve = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, curve))
    return state, curve, number


class Result(NamedTuple):
    """Result of a run."""

    mean_return: float  # over the last `num_episodes`; NaN if none ended
    num_episodes: int  # at most 100
    env_steps: int
    seconds: float  # including compilation
    curve: NDArray[np.float32]  # [number of updates made], the mean return after each update


@contextmanager
def progress(options: Options) -> Generator[Report]:
    """Yields a function to call with the mean return after each update. It moves a bar and writes the log."""
    total = options.num_updates * options.steps_per_update
    bar = tqdm(total=total, desc=options.env, unit=" steps", unit_scale=True)
    start = time.perf_counter()
    env_steps = 0
    with bar, open(options.log, "w") if options.log else nullcontext() as log:

        def report(mean_return: Any) -> None:
            # This runs inside a host callback, where calls of JAX can deadlock; NumPy is safe.
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
    """Compiles `train`, which returns the result of `repeat`, and calls it once, with a progress bar."""
    start = time.perf_counter()
    with progress(options) as report:
        program: Callable[..., Trained[Any]] = jax.jit(partial(train, report))
        handle, timestep = jaxvec.reset(envs, seed=options.seed)
        state, curve, number = program(handle, timestep, jax.random.key(options.seed))
        recent, curve = np.asarray(state.returns.last), np.asarray(curve)[:number]  # waits for the program
        jax.effects_barrier()  # waits for the last call of report
    seconds = time.perf_counter() - start
    env_steps = curve.size * options.steps_per_update
    return Result(float(curve[-1]), int(np.isfinite(recent).sum()), env_steps, seconds, curve)


def plot(options: Options, algorithm: str, result: Result, path: str) -> None:
    from matplotlib.figure import Figure  # slow to import, so after the training

    figure = Figure(figsize=(7, 4), layout="constrained")  # uses Agg; pyplot might open a window
    axes = figure.subplots()
    axes.plot(np.arange(1, result.curve.size + 1) * options.steps_per_update, result.curve)
    axes.set(
        title=f"{algorithm} on {options.env}",
        xlabel="env steps",
        ylabel=f"mean return of the last {_RECENT} episodes",
    )
    figure.savefig(path, dpi=150)


def finish(options: Options, algorithm: str, module: str, result: Result) -> Result:
    rate = result.env_steps / result.seconds
    print(f"mean return {result.mean_return:.1f} of the last {result.num_episodes} episodes")
    print(
        f"{result.env_steps:,} env steps in {result.seconds:.1f} s including compilation: {rate:,.0f} steps/s"
    )
    path = options.plot or f"{module}_" + re.sub(r"[^\w.-]", "_", options.env) + ".png"
    plot(options, algorithm, result, path)
    print(f"learning curve saved to {path}")
    return result
