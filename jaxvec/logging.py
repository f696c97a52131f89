"""Episode statistics, run folders and the command line of training programs.

    TimeStep --Episodes.add--> means of the latest episodes --Run.log--> metrics.csv, TensorBoard, W&B

`Episodes` is a pytree that a compiled loop carries. `Run` writes files on the host: a compiled program calls
it through `jax.debug.callback`. `training` reads the options of a program, and opens its run.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.metadata
import io
import json
import platform
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray

from jaxvec._envs.constructors import find_spec
from jaxvec._errors import EnvStateError
from jaxvec._spec import TimeStep
from jaxvec._util import import_optional
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks._functions import restore, step
from jaxvec.callbacks._handle import Handle

__all__ = ["Episodes", "Run", "option", "play_episodes", "training"]

Options = TypeVar("Options")

_PACKAGES = ("jaxvec", "jax", "jaxlib", "gymnasium", "numpy", "flax", "optax", "orbax-checkpoint")
_STATE = "state.npz"
_TIMES = {"env_steps", "seconds", "steps_per_second"}  # columns of `Run` itself
_PRINT_INTERVAL = 10.0  # seconds between two lines, if stderr is not a terminal


class Episodes(NamedTuple):
    """Statistics of the latest episodes; a pytree that a compiled loop carries.

    Episodes that a fault has cut (`info["fault"]`) do not count.

    Attributes:
        last: Dict of the latest values, float32 `[window]`, unordered. The key `_name` has the mask of
            `name`: 1 where an episode has ended that has the value, else 0.
        total: Number of episodes that have ended, int32 `[]`.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 8) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            episodes = jaxvec.logging.Episodes.create()
            for _ in range(100):
                handle, timestep = jaxvec.step(handle, jnp.zeros(8, int))
                episodes = episodes.add(timestep)
            print(sorted(episodes.means()))  # ['episode_length', 'episode_return', 'episodes']
        ```
    """

    last: dict[str, jax.Array]
    total: jax.Array

    @classmethod
    def create(cls, infos: Sequence[str] = (), *, window: int = 100) -> Self:
        """Returns statistics without episodes.

        Args:
            infos: Keys of scalar infos that `make(info=...)` declares, to average over the episode ends that
                have them.
            window: Number of episodes to average over.
        """
        names = ("episode_return", "episode_length", *infos)
        return cls({key: jnp.zeros(window) for name in names for key in (name, f"_{name}")}, jnp.int32(0))

    def add(self, timestep: TimeStep) -> Self:
        """Adds the episodes that ended.

        Args:
            timestep: Result of a step; or of several steps, with leaves `[num_steps, num_envs]`. Not that of
                a reset with a mask, which repeats the latest results of the other envs.

        Raises:
            ValueError: An info is not declared, or is not one number per env.
        """
        done = timestep.terminated | timestep.truncated
        for mark in ("idle", "fault"):
            done = done & ~jnp.asarray(timestep.info.get(mark, False))
        ends: dict[str, Any] = {**timestep.info, **timestep.info.get("final_info", {})}
        window = next(iter(self.last.values())).size
        rank = jnp.cumsum(done.reshape(-1))  # from 1, among the episodes that ended
        newest = done.reshape(-1) & (rank > rank[-1] - window)
        slot = jnp.where(newest, (self.total + rank - 1) % window, window)  # `window`: dropped
        columns: dict[str, Any] = {}
        for name in self._names:
            if name not in ends or jnp.shape(ends[name]) != done.shape:
                found = jnp.shape(ends[name]) if name in ends else "no such key; declare it in make"
                raise ValueError(f"info {name!r}: expected one number per env, {done.shape}, got {found}")
            columns |= {name: ends[name], f"_{name}": ends.get(f"_{name}", done)}
        # One scatter for all statistics takes less time than one for each.
        before = jnp.stack(list(self.last.values()), axis=1)
        ended = [columns[key].reshape(-1).astype(jnp.float32) for key in self.last]
        after = before.at[slot].set(jnp.stack(ended, axis=1), mode="drop")
        last = dict(zip(self.last, after.T, strict=True))
        return type(self)(last, self.total + rank[-1].astype(jnp.int32))

    def means(self) -> dict[str, jax.Array]:
        """Returns the mean of each statistic, NaN without values, and the number of `episodes` so far."""
        last = self.last
        means = {name: last[name].mean(where=last[f"_{name}"] > 0) for name in self._names}
        return {"episodes": self.total, **means}

    @property
    def _names(self) -> list[str]:
        return [name for name in self.last if f"_{name}" in self.last]


def play_episodes(
    act: Callable[[Any, TimeStep], tuple[Any, Any]],
    memory: Any,
    handle: Handle,
    timestep: TimeStep,
    *,
    max_steps: int = 10_000,
) -> jax.Array:
    """Plays an episode in each env, such as for an evaluation. Works inside `jit`.

    Args:
        act: Function of the memory and the latest `TimeStep`. It returns the next memory and the actions.
        memory: Pytree of arrays for `act`, such as the state of a recurrent network; or None.
        handle: Handle of envs that were made with `autoreset_mode="EPISODIC"`.
        timestep: Result of `reset`, with the first observations.
        max_steps: Number of steps after which running episodes are cut.

    Returns:
        Returns of the episodes, `[num_envs]` float32; NaN for one that a fault has cut. If the envs have
        several rewards, they are their means.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 8, autoreset_mode="EPISODIC") as envs:
            act = lambda memory, timestep: (memory, jnp.zeros(8, int))
            score = jax.jit(lambda *reset: jaxvec.logging.play_episodes(act, None, *reset))
            print(float(score(*jaxvec.reset(envs, seed=0)).mean()))  # 9.375
        ```
    """

    def unfinished(carry: Any) -> jax.Array:
        _, _, timestep, number = carry
        return ~timestep.done.all() & (number < max_steps)

    def body(carry: Any) -> Any:
        memory, handle, timestep, number = carry
        memory, action = act(memory, timestep)
        return memory, *step(handle, action), number + 1

    _, _, timestep, _ = jax.lax.while_loop(unfinished, body, (memory, handle, timestep, 0))
    returns, cut = timestep.info["episode_return"], jnp.asarray(timestep.info.get("fault", False))
    return jnp.where(cut, jnp.nan, returns.reshape(len(returns), -1).mean(1))


class Run:
    """A folder with the configuration, the metrics and the results of a training run.

    It writes `config.json` at once, a line of `metrics.csv` per `log`, progress on stderr, and `curve.png` at
    the end, if `episode_return` was logged and matplotlib is installed. `write` adds the program's own files.

    Attributes:
        folder: Path of the folder.
        env_steps: Env steps so far, as of the latest `log`.

    Example:
        ```python
        import tempfile

        with jaxvec.logging.Run(tempfile.mkdtemp(), {"lr": 0.1}, progress=False) as run:
            train = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: (run.log(i, loss=x), x / 2)[1], x))
            train(1.0).block_until_ready()
        print(run.metrics()["loss"])  # [1.   0.5  0.25]
        ```
    """

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        total_steps: int | None = None,
        resume: bool = False,
        evaluate: bool = False,
        progress: bool = True,
        tensorboard: bool = False,
        wandb: bool = False,
    ) -> None:
        """Creates the folder.

        Args:
            folder: Path of the folder, such as `"runs/ppo"`. It must not contain a run, unless resumed.
            config: Options of the program for `config.json`, which also contains versions of packages.
            total_steps: Env steps of the whole run, for the progress line.
            resume: Whether to continue the run in `folder` from its last `save`. Later lines are removed, and
                those of the same step are replaced if they are logged again.
            evaluate: Whether to only read the run in `folder`. Then `load` returns the state of training as
                of the last `save`, without that of the envs.
            progress: Whether to show progress on stderr.
            tensorboard: Whether to write event files for TensorBoard, too; needs `tensorboardX`.
            wandb: Whether to log to Weights & Biases, too; needs `wandb`.

        Raises:
            FileExistsError: The folder contains a run.
            FileNotFoundError: The run to resume or evaluate has not been saved.
            ImportError: `tensorboardX` or `wandb` is missing.
        """
        self.folder: Path = Path(folder)
        self._csv = self.folder / "metrics.csv"
        self._total, self._progress = total_steps, progress
        self._rows: list[dict[str, Any]] = []
        self._saved: Mapping[str, Any] | None = None  # by the run to resume or evaluate
        self._evaluate = evaluate
        if resume or evaluate:
            with np.load(self.folder / _STATE) as file:
                self._saved = dict(file)
            self._rows = self._read(self._saved["env_steps"])
        elif self._csv.exists():
            raise FileExistsError(f"{folder} contains a run; choose another name, or resume it")
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._saved is None:
            record = {"config": dict(config or {}), "versions": _versions()}
            (self.folder / "config.json").write_text(json.dumps(record, indent=2, default=str) + "\n")
        path, name = str(self.folder), self.folder.name
        self._tensorboard: Any = tensorboard and _package("tensorboardX").SummaryWriter(path)
        options: Any = {"dir": path, "name": name, "config": dict(config or {}), "resume": "allow"}
        self._wandb: Any = wandb and _package("wandb").init(**options, id=name)
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))
        if resume:
            self._rewrite()
        before = self._rows[-1] if self._rows else {"env_steps": 0.0, "seconds": 0.0}
        self.env_steps: int = int(before["env_steps"])
        # By their step and metrics: a resumed program may log those of the last step again.
        self._resumed = {(row["env_steps"], frozenset(row.keys() - _TIMES)): row for row in self._rows}
        self._seconds = before["seconds"]
        self._start, self._printed = time.perf_counter() - self._seconds, -_PRINT_INTERVAL
        self._signals: socket.socket | None = None
        self._stopping = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, env_steps: Any, **metrics: Any) -> None:
        """Writes a line of metrics. Works inside and outside of `jit`.

        Args:
            env_steps: Env steps so far, a number or array `[]`.
            **metrics: Numbers or arrays `[]`, such as those of `Episodes.means`.
        """
        jax.debug.callback(self._log, env_steps, metrics)

    def _log(self, env_steps: Any, metrics: Mapping[str, Any]) -> None:
        # This runs inside a host callback, where calls of JAX can deadlock; NumPy is safe.
        steps, seconds = np.asarray(env_steps).item(), time.perf_counter() - self._start
        rate = (steps - self.env_steps) / max(seconds - self._seconds, 1e-9)
        row = {"env_steps": steps, "seconds": round(seconds, 3), "steps_per_second": round(rate, 1)}
        row |= {name: +np.asarray(value).item() for name, value in metrics.items()}  # `+`: bools as 0 and 1
        if steps > self.env_steps:
            self.env_steps, self._seconds = int(steps), seconds
            shown = f"{steps:,} steps  {rate:,.0f} steps/s  return {row.get('episode_return', np.nan):.1f}"
            share = min(steps / self._total, 1) if self._total else None  # whole updates may exceed it
            self.show(shown if share is None else f"{share:4.0%}  {shown}", share == 1)
        else:
            del row["steps_per_second"]  # a second row of the same steps, such as of an evaluation
        if again := self._resumed.pop((steps, frozenset(metrics)), None):
            self._rows.remove(again)
            row = again | row
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        self._columns += new
        if new or again:
            self._rewrite()
        else:
            with self._csv.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        if self._tensorboard:
            for name, value in row.items():
                self._tensorboard.add_scalar(name, value, steps)
        if self._wandb:
            self._wandb.log(row, step=int(steps))

    def _read(self, env_steps: int) -> list[dict[str, Any]]:
        """Returns the rows up to `env_steps`. A program that was killed may have cut the last line."""
        text = self._csv.read_text() if self._csv.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        rows = ({name: float(text) for name, text in row.items() if text} for row in csv.DictReader(lines))
        return [row for row in rows if row["env_steps"] <= env_steps]

    def _rewrite(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(self._rows)
        self.write(self._csv.name, text.getvalue().encode())

    def show(self, text: str, always: bool = True) -> None:
        """Shows a line of progress on stderr; without a terminal at most every 10 s, unless `always`."""
        if not self._progress:
            return
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[2K{text}")
        elif always or time.perf_counter() - self._printed >= _PRINT_INTERVAL:
            self._printed = time.perf_counter()
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    @contextmanager
    def signals(self) -> Generator[None]:
        """Within the block, Ctrl-C and SIGTERM do not end the program, but make `stopping` return True.

        Use it in the main thread, around a program that checks `stopping`.
        """
        # Python calls handlers in the main thread, which waits for the compiled program. The wakeup fd
        # receives the signal at once.
        self._signals, writer = socket.socketpair()
        self._signals.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        caught = (signal.SIGINT, signal.SIGTERM)
        handlers = [signal.signal(each, lambda *_: None) for each in caught]
        try:
            yield
        finally:
            self._check()
            for each, handler in zip(caught, handlers, strict=True):
                signal.signal(each, handler)
            signal.set_wakeup_fd(before)
            writer.close()
            self._signals.close()
            self._signals = None

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C or SIGTERM has arrived inside `signals`."""
        return bool(self._check())

    def stopping(self) -> jax.Array:
        """Returns whether the program should stop, bool `[]`, inside `jit`; see `signals`."""
        return io_callback(self._check, jax.ShapeDtypeStruct((), jnp.bool_))

    def _check(self) -> np.bool_:
        with suppress(BlockingIOError):
            received = self._signals.recv(64) if self._signals else b""
            self._stopping |= bool({signal.SIGINT, signal.SIGTERM} & {*received})
        return np.bool_(self._stopping)

    def write(self, name: str, data: bytes) -> None:
        """Replaces a file of the folder, in one step: if the program is killed, the old file stays."""
        temporary = self.folder / f".{name}"
        temporary.write_bytes(data)
        temporary.replace(self.folder / name)

    def save(
        self, learned: Any, playing: Any = None, envs: VectorEnv | None = None, *, params: Any = None
    ) -> None:
        """Writes `state.npz`, from which `Run(folder, resume=True)` continues, and then the folder `params`.

        Both replace those of the last save in one step: if the program is killed, the old ones stay.

        Args:
            learned: Pytree of arrays with the state of training: parameters, optimizer state, statistics.
            playing: Pytree with the state of the running episodes: the handle, observations, memories.
            envs: The envs, made with `states` of at least `num_envs`, to save their states, too. Without
                them, or if the states cannot be saved, a resumed run starts new episodes.
            params: Pytree to write by Orbax's `CheckpointManager`, as NumPy arrays; None for empty ones.
        """
        jax.effects_barrier()  # waits for the last log
        packed, data = np.zeros(0, np.uint8), io.BytesIO()
        if envs is not None:
            with suppress(EnvStateError):  # an env has a state that cannot be saved
                packed = envs.pack_states()
        leaves, _ = _leaves_by_name(learned, playing if packed.size else None)
        arrays: Any = {
            name: np.asarray(leaf) for name, leaf in leaves.items() if not isinstance(leaf, Handle)
        }
        np.savez(data, allow_pickle=False, env_steps=self.env_steps, envs=packed, **arrays)
        self.write(_STATE, data.getvalue())
        if params is not None:
            ocp = _package("orbax-checkpoint", "orbax.checkpoint")
            # The manager deletes the old checkpoint after the new one is complete and has its name.
            here, folder = jax.process_index(), (self.folder / "params").absolute()
            folder.mkdir(exist_ok=True)
            # Each process has its own run, so it does not wait for the others.
            alone = ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})
            options: Any = {"max_to_keep": 1, "enable_async_checkpointing": False, "create": False}
            options = ocp.CheckpointManagerOptions(multiprocessing_options=alone, **options)
            with ocp.CheckpointManager(folder, options=options) as manager:
                whole = jax.tree.map(lambda leaf: np.asarray(leaf) if np.size(leaf) else None, params)
                manager.save((manager.latest_step() or 0) + 1, args=ocp.args.StandardSave(whole))

    def load(self, learned: Any, playing: Any = None, envs: VectorEnv | None = None) -> tuple[Any, Any]:
        """Returns `learned` and `playing` of the last `save`, if the run is resumed; else the arguments.

        If the run is evaluated, it returns the saved `learned`, and the argument `playing`.

        Args:
            learned: State of a new run, with the same structure, shapes and dtypes.
            playing: State of new episodes. It is returned if the states of the envs were not saved.
            envs: The envs, which continue from their saved states.

        Raises:
            ValueError: The saved state does not match the arguments.
        """
        if self._saved is None:
            return learned, playing
        packed = self._saved["envs"]
        same = packed.size > 0 and envs is not None and not self._evaluate
        leaves, structure = _leaves_by_name(learned, playing if same else None)
        for name, leaf in leaves.items():
            if envs is not None and isinstance(leaf, Handle):
                leaves[name], _ = restore(leaf, envs.unpack_states(packed))
                continue
            found = self._saved.get(name)
            if found is None or (found.shape, found.itemsize) != (leaf.shape, leaf.dtype.itemsize):
                raise ValueError(
                    f"{self.folder / _STATE} has no {name} of shape {leaf.shape} and dtype {leaf.dtype}; "
                    "resume the run with the options and the program that wrote it"
                )
            leaves[name] = jnp.asarray(found.view(leaf.dtype))  # NumPy saves bfloat16 as raw bytes
        loaded = jax.tree.unflatten(structure, leaves.values())
        return loaded["learned"], loaded["playing"] if same else playing

    def film(self, env: str | Callable[..., gymnasium.Env[Any, Any]], number: int) -> Any:
        """Returns an argument for `make` which films the first envs by Gymnasium's `RecordVideo`.

        Further arguments of `make` are passed to the envs, as without films.

        The films, in the folder `videos`, show the episodes 0, 1, 8, 27, ..., 1000, 2000, ... of each. They
        need the package `moviepy`.

        Args:
            env: Gymnasium id, or a function that makes an env and takes the keyword `render_mode`.
            number: Number of envs to film. With 0, or if the run is evaluated, the result is `env`.
        """
        if not number or self._evaluate:
            return env
        make = partial(gymnasium.make, find_spec(env)) if isinstance(env, str) else env
        videos = str(self.folder.absolute() / "videos")
        start = f"from_{self.env_steps}_" if self.env_steps else ""  # a resumed run may start new episodes

        # Workers call it, and must not import JAX.
        def constructor(index: int, **arguments: Any) -> gymnasium.Env[Any, Any]:
            if index >= number:
                return make(**arguments)
            film = make(render_mode="rgb_array", **arguments)
            options: Any = {"name_prefix": f"{start}env_{index}", "disable_logger": True}
            with warnings.catch_warnings(action="ignore"):  # of films of other envs in the folder
                return gymnasium.wrappers.RecordVideo(film, videos, **options)

        return constructor

    def report(self, returns: Any) -> None:
        """Prints the result of an evaluation: mean and standard deviation of returns, `[num_episodes]`."""
        returns = np.asarray(returns)
        print(f"mean return {returns.mean():.6g} ± {returns.std():.3g} over {returns.size} episodes")

    def latest(self, name: str) -> float:
        """Returns the latest value of a metric; NaN without one."""
        return float(next((row[name] for row in reversed(self._rows) if name in row), np.nan))

    def metrics(self) -> dict[str, NDArray[np.float64]]:
        """Returns the columns of `metrics.csv`, float64 `[num_lines]`; NaN where a line has no value."""
        rows = self._rows
        return {name: np.array([row.get(name, np.nan) for row in rows], float) for name in self._columns}

    def close(self) -> None:
        """Draws the curve, and closes the files."""
        jax.effects_barrier()  # waits for the last log
        if self._progress and sys.stderr.isatty():
            sys.stderr.write("\n")
        for writer in filter(None, (self._tensorboard, self._wandb)):
            (writer.close if writer is self._tensorboard else writer.finish)()
        if "episode_return" not in self._columns or self._evaluate:
            return
        try:
            from matplotlib.figure import Figure  # slow to import, so after the training
        except ImportError:
            return
        figure = Figure(figsize=(7, 4), layout="constrained")  # uses Agg; pyplot might open a window
        columns = self.metrics()
        axes: Any = figure.subplots()
        known = np.isfinite(columns["episode_return"])
        axes.plot(columns["env_steps"][known], columns["episode_return"][known])
        axes.set(title=self.folder.name, xlabel="env steps", ylabel="mean return of the latest episodes")
        figure.savefig(self.folder / "curve.png", dpi=150)


def _leaves_by_name(learned: Any, playing: Any) -> tuple[dict[str, Any], Any]:
    both = {"learned": learned, "playing": playing}
    leaves, structure = jax.tree.flatten_with_path(both, is_leaf=lambda node: isinstance(node, Handle))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}, structure


def option(default: Any, text: str, kind: Callable[[str], Any] | None = None) -> Any:
    """Declares a field of a dataclass as a command-line option of `training`.

    Args:
        default: Value without the option.
        text: Text for `--help`.
        kind: Function that converts the text of the option; by default, the type of `default`.

    Example:
        ```python
        lr = jaxvec.logging.option(1e-3, "learning rate")
        print(lr.default, lr.metadata["help"])  # 0.001 learning rate
        ```
    """
    flag = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {}
    return field(default=default, metadata={"help": text, **(flag or {"type": kind or type(default)})})


@contextmanager
def training(
    options: type[Options],
    argv: Sequence[str] | None = None,
    *,
    program: str,
    about: str | None = None,
    check_env: bool = True,
    quiet: bool = False,
) -> Generator[tuple[Options, Run]]:
    """Reads the options of a training program, and opens its run in the folder `runs`.

    At the end of the block it prints the score. After a Ctrl-C or SIGTERM it prints a line, and exits with
    code 130. Wrong options end the program with a usage error. `--resume RUN` continues a run with its
    options, except those that are given again.

    Args:
        options: Dataclass with the options as fields, declared with `option`. It must have `seed` and
            `name`, the folder in `runs` or None. If they are fields, `env` is part of the default name, and
            `total_steps`, `tensorboard` and `wandb` are passed to `Run`. A field `evaluate` is None, or the
            folder of a run to evaluate with its options: the program loads it, plays episodes and calls
            `run.report`. A ValueError in `__post_init__` becomes a usage error.
        argv: Words of the command line; by default those of this process.
        program: Name of the program, for the default name of the folder.
        about: Description for `--help`.
        check_env: Whether `env`, if it is a field, must be a Gymnasium id.
        quiet: Whether to print no progress and no score, and to use neither TensorBoard nor W&B, such as in
            all but one of several processes.

    Raises:
        SystemExit: Options are wrong, or a signal ended the run.

    Example:
        ```python
        from dataclasses import dataclass
        from jaxvec.logging import option, training

        @dataclass(frozen=True)
        class Config:
            env: str = option("CartPole-v1", "Gymnasium id")
            seed: int = option(0, "random seed")
            name: str | None = option(None, "name of the folder in runs", str)

        with training(Config, ["--seed", "3"], program="mine") as (config, run), run.signals():
            run.log(3, episode_return=1.0)  # or train until `run.stopping()`, and call `run.save`
        print(run.env_steps)  # 3
        ```
    """
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=defaults)
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue the run in this folder")
    for each in fields(options):  # pyright: ignore[reportArgumentType]
        parser.add_argument(f"--{each.name.replace('_', '-')}", default=each.default, **each.metadata)
    try:
        given = vars(parser.parse_args(argv))
        resumed, evaluated = given["resume"], given.get("evaluate")
        if resumed and evaluated:
            raise ValueError("--evaluate and --resume exclude each other")
        old = Path(evaluated) if evaluated else resumed
        if old:  # with its options, except those that are given again
            parser.set_defaults(**json.loads((old / "config.json").read_text())["config"])
            if not (old / _STATE).exists():
                raise ValueError(f"{old} has no {_STATE}: the run saved nothing to continue from or evaluate")
        known = vars(parser.parse_args(argv))
        del known["resume"]
        config = options(**known)
        if check_env and "env" in known:
            find_spec(known["env"])  # imports its module, as `make` does
    except (gymnasium.error.Error, OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    env = [known["env"].replace("/", "-")] if "env" in known else []
    default = "_".join([program, *env, str(known["seed"]), time.strftime("%Y%m%d-%H%M%S")])
    folder = old or Path("runs") / (known["name"] or default)
    extra = not quiet and not evaluated
    run_options = {name: known.get(name, False) and extra for name in ("tensorboard", "wandb")}
    run_options |= {"total_steps": known.get("total_steps"), "resume": bool(resumed)}
    try:
        with Run(folder, known, progress=not quiet, evaluate=bool(evaluated), **run_options) as run:
            yield config, run
    except KeyboardInterrupt:  # before or after `signals`, which handles Ctrl-C itself
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None
    mean, score = run.latest("episode_return"), run.latest("evaluation")
    score = mean if np.isnan(score) else score
    steps = f"{run.env_steps:,} env steps"
    text = f"score {score:.6g}, mean return {mean:.1f}, {steps}\nresults are in {folder}"
    if run.stopped:
        text = f"stopped after {steps}, score {score:.6g}; continue with --resume {folder}"
    if extra:
        print(text)
    if run.stopped:
        raise SystemExit(130)


def _package(name: str, module: str | None = None) -> Any:
    """Imports a package that only some runs need, as it would take time."""
    return import_optional(module or name, "jaxvec.logging.Run", name)


def _versions() -> dict[str, str]:
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {name: found[name] for name in _PACKAGES if name in found}
