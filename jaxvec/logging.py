"""Episode statistics, run folders and the command line of training programs.

    TimeStep --Episodes.add--> means of the latest episodes --Run.log--> metrics.csv, other loggers

`Episodes` is a pytree that a compiled loop carries. `Run` writes files on the host: a compiled program calls
it through `jax.debug.callback`. `training` reads the `Options` of a program, and opens its run. `Run.train`
is the loop of a program: updates, saves, evaluations and signals.
"""

from __future__ import annotations

import csv
import importlib
import importlib.metadata
import io
import json
import platform
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.multihost_utils import process_allgather
from numpy.typing import NDArray

from jaxvec._envs.constructors import find_spec
from jaxvec._errors import EnvStateError
from jaxvec._spec import TimeStep
from jaxvec._util import INTERRUPTED, Interrupted, import_optional, leave
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks._functions import reset, restore, step
from jaxvec.callbacks._handle import Handle
from jaxvec.callbacks._make import make

__all__ = ["Episodes", "Options", "Run", "play_episodes", "training"]

_PACKAGES = ("jaxvec", "jax", "jaxlib", "gymnasium", "numpy", "flax", "optax", "orbax-checkpoint")
_CHECKPOINTS = "checkpoints"
_TIMES = {"env_steps", "seconds", "steps_per_second"}  # columns of `Run` itself
_PRINT_INTERVAL = 10.0  # seconds between two lines, if stderr is not a terminal
_PLAYING = "['playing']"  # start of the names of leaves that each process has for itself
_CONTINUE, _SAVE, _STOP = range(3)  # what a compiled loop does after an update


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


@dataclass(frozen=True)
class Options:
    """Options that training programs have in common. A program adds its own in a subclass.

    `training` reads them from the command line. The comment of a field is its text in `--help`.

    Example:
        ```python
        from dataclasses import dataclass
        from jaxvec.logging import Options

        @dataclass(frozen=True)
        class Config(Options):
            lr: float = 1e-3  # learning rate

        print(Config(num_envs=8, total_steps=1000).num_updates)  # 2
        ```
    """

    env: str = "CartPole-v1"  # Gymnasium id, MODULE:ID if the module registers it, or MODULE:CLASS
    env_kwargs: str = "{}"  # JSON object with arguments of the env, such as '{"gravity": 5}'
    num_envs: int = 64  # number of envs
    num_workers: int | None = None  # number of worker processes; by default, one per usable core
    spare_envs: int = 0  # number of envs that each worker resets in advance, for envs with slow resets
    total_steps: int = 500_000  # env steps, rounded up to whole updates
    num_steps: int = 64  # steps of each env in an update
    stop_at: float | None = None  # stop once the mean return of the latest 100 episodes reaches this value
    save_every: float = 60.0  # seconds between two saves; the first one follows the first update
    eval_episodes: int = 8  # episodes of an evaluation
    eval_steps: int = 10_000  # maximum number of steps of an evaluated episode
    seed: int = 0  # random seed
    name: str | None = None  # name of the folder in runs; by default program, env, seed and time
    video: int = 0  # number of envs, or of episodes of --evaluate, to film; needs moviepy
    logger: Literal["tensorboard", "trackio", "wandb"] | None = None  # also log there
    resume: Path | None = None  # continue the run in this folder, with its options
    evaluate: Path | None = None  # play episodes with the policy of the run in this folder

    def __post_init__(self) -> None:
        """Checks the options that all programs have; a ValueError becomes a usage error."""
        if min(self.num_envs, self.total_steps, self.num_steps, self.eval_episodes) < 1:
            raise ValueError("the numbers of envs, steps and episodes must be at least 1")
        self.env_arguments()

    @property
    def steps_per_update(self) -> int:
        """Number of env steps of an update."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Number of updates of the whole run."""
        return -(-self.total_steps // self.steps_per_update)

    def env_fn(self) -> Any:
        """Returns the env for `jaxvec.make`: the id, or the class that `MODULE:CLASS` names."""
        module, _, name = self.env.rpartition(":")
        found: Any = getattr(importlib.import_module(module), name, None) if module else None
        if callable(found):
            return found
        find_spec(self.env)  # raises an error that says why there is no such env
        return self.env

    def env_arguments(self) -> dict[str, Any]:
        """Returns the arguments of the env, from the JSON of `env_kwargs`."""
        try:
            arguments = json.loads(self.env_kwargs)
        except json.JSONDecodeError as error:
            raise ValueError(f"--env-kwargs is not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise ValueError('--env-kwargs must be a JSON object, such as {"gravity": 5}')
        return arguments


OptionsT = TypeVar("OptionsT", bound=Options)


class Run:
    """A folder with the configuration, the metrics and the results of a training run.

    It writes `config.json` at once, a line of `metrics.csv` per `log`, progress on stderr, and `curve.png` at
    the end, if `episode_return` was logged and matplotlib is installed. `write` adds the program's own files.

    In a program of several processes (`jax.distributed`), each has a run of the same folder. Only the first
    writes files and shows progress. All of them read, so a resumed run needs a folder that all machines see.

    Attributes:
        folder: Path of the folder.
        env_steps: Env steps so far, as of the latest `log`.
        options: Options of the program, if `training` opened the run.
        loggers: Objects with a method `log(metrics, step)`, such as a run of Weights & Biases or trackio.
            They get each line of metrics, too, as a dict of numbers. At the end, their method `finish` or
            `close` is called, if they have one.

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
        save_every: float = 60.0,
        resume: bool = False,
        evaluate: bool = False,
        progress: bool = True,
        loggers: Sequence[Any] = (),
    ) -> None:
        """Creates the folder.

        Args:
            folder: Path of the folder, such as `"runs/ppo"`. It must not contain a run, unless resumed.
            config: Options of the program for `config.json`, which also contains versions of packages.
            total_steps: Env steps of the whole run, for the progress line.
            save_every: Seconds after a save, until `save_due` is True again.
            resume: Whether to continue the run in `folder` from its last `save`. Later lines are removed, and
                those of the same step are replaced if they are logged again.
            evaluate: Whether to only read the run in `folder`. Then `load` returns the state of training as
                of the last `save`, without that of the envs.
            progress: Whether to show progress on stderr.
            loggers: First entries of the attribute `loggers`.

        Raises:
            FileExistsError: The folder contains a run.
            FileNotFoundError: The run to resume or evaluate has not been saved.
        """
        self.folder: Path = Path(folder)
        self.loggers: list[Any] = [*loggers]
        self._csv = self.folder / "metrics.csv"
        self._writes = jax.process_index() == 0
        self._total, self._progress = total_steps, progress and self._writes
        self._rows: list[dict[str, Any]] = []
        self._saved: Any = None  # by the run to resume or evaluate
        self._evaluate = evaluate
        self.options: Options = Options()
        if resume or evaluate:
            self._saved = self._read_checkpoint()
            self._rows = self._read_metrics(int(self._saved["env_steps"]))
        elif self._csv.exists():
            raise FileExistsError(f"{folder} contains a run; choose another name, or resume it")
        if self._writes:
            self.folder.mkdir(parents=True, exist_ok=True)
        if self._saved is None:
            record = {"config": dict(config or {}), "versions": _versions()}
            self.write("config.json", f"{json.dumps(record, indent=2, default=str)}\n".encode())
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))
        if resume:
            self._rewrite()
        before = self._rows[-1] if self._rows else {"env_steps": 0.0, "seconds": 0.0}
        self.env_steps: int = int(before["env_steps"])
        # By their step and metrics: a resumed program may log those of the last step again.
        self._resumed = {(row["env_steps"], frozenset(row.keys() - _TIMES)): row for row in self._rows}
        self._seconds = before["seconds"]
        self._start, self._printed = time.perf_counter() - self._seconds, -_PRINT_INTERVAL
        self._first: tuple[float, float] | None = None  # steps and seconds of the first log in this process
        self._save_every, self._saved_at = save_every, -np.inf
        self._stopping = False  # set by the thread of `signals`

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
            self._show_progress(steps, rate, row.get("episode_return", np.nan))
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
        elif self._writes:
            with self._csv.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        for logger in self.loggers:
            logger.log(row, step=int(steps))

    def _show_progress(self, steps: float, rate: float, mean: float) -> None:
        shown = f"{steps:,} steps  {rate:,.0f} steps/s  mean return {mean:.5g}"
        if self._total:
            share = min(steps / self._total, 1)  # whole updates may exceed it
            shown = f"{share:4.0%}  {shown}"
            if self._first and share < 1:
                first, start = self._first  # after compilation
                left = (self._total - steps) * (self._seconds - start) / (steps - first)
                shown += f"  {_duration(left)} left"
        # The first line says at once that compilation is over, and the last one that training is.
        always = self._first is None or (self._total is not None and steps >= self._total)
        self._first = self._first or (steps, self._seconds)
        self.show(shown, always)

    def _read_metrics(self, env_steps: int) -> list[dict[str, Any]]:
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
        """Within the block, Ctrl-C and SIGTERM make `stopping` return True, and print a line at once.

        The same signal again ends the process at once, with exit code 130. So does the first one before the
        first `log`, while the program compiles: then nothing is lost. One of several processes does not leave
        then, as the others may be further. Use it in the main thread, around a program that checks
        `stopping`.
        """
        # Python calls handlers in the main thread, which waits for the compiled program. A thread receives
        # the signal at once, through the wakeup fd.
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        caught = (signal.SIGINT, signal.SIGTERM)
        handlers = [signal.signal(each, lambda *_: None) for each in caught]
        thread = threading.Thread(target=self._receive_signals, args=(receiver,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            for each, handler in zip(caught, handlers, strict=True):
                signal.signal(each, handler)
            signal.set_wakeup_fd(before)
            sender.close()
            thread.join()
            receiver.close()

    def _receive_signals(self, receiver: socket.socket) -> None:
        seen: set[int] = set()  # a terminal's SIGINT and a launcher's SIGTERM are one request
        while received := receiver.recv(1):
            number = received[0]
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            newline = "\n" if sys.stderr.isatty() else ""
            if number in seen or (self._first is None and jax.process_count() == 1):
                # A normal exit would wait for the compiler or the program. Workers end with this process.
                sys.stderr.write(f"{newline}interrupted\n")
                leave()
            seen.add(number)
            if self._progress and not self._stopping:
                text = "stopping: this update is completed and saved; Ctrl-C again ends the program at once"
                sys.stderr.write(f"{newline}{text}\n")
                sys.stderr.flush()
            self._stopping = True

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C or SIGTERM has arrived inside `signals`."""
        return self._stopping

    @property
    def save_due(self) -> bool:
        """Whether the last `save` is `save_every` seconds ago, or there was none."""
        return time.perf_counter() - self._saved_at >= self._save_every

    def stopping(self) -> jax.Array:
        """Returns whether the program should stop, bool `[]`, inside `jit`; see `signals`."""
        return io_callback(lambda: np.bool_(self._stopping), jax.ShapeDtypeStruct((), jnp.bool_))

    def write(self, name: str, data: bytes) -> None:
        """Replaces a file of the folder, in one step: if the program is killed, the old file stays."""
        if not self._writes:
            return
        temporary = self.folder / f".{name}"
        temporary.write_bytes(data)
        temporary.replace(self.folder / name)

    @contextmanager
    def _checkpoints(self) -> Generator[tuple[Any, Any]]:
        """Yields Orbax's module and its `CheckpointManager`, which keeps the newest checkpoint."""
        # The import takes 0.8 s, so it is here.
        ocp: Any = import_optional("orbax.checkpoint", "jaxvec.logging.Run", "orbax-checkpoint")
        # One process writes, and each reads when it likes, so none waits for the others.
        here = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})
        options: Any = {"max_to_keep": 1, "enable_async_checkpointing": False, "create": False}
        options = ocp.CheckpointManagerOptions(multiprocessing_options=alone, **options)
        with ocp.CheckpointManager((self.folder / _CHECKPOINTS).absolute(), options=options) as manager:
            yield ocp, manager

    def _read_checkpoint(self) -> Any:
        missing = FileNotFoundError(f"{self.folder} has no checkpoint: the run has saved nothing")
        if not (self.folder / _CHECKPOINTS).is_dir():
            raise missing
        with self._checkpoints() as (ocp, manager):
            if manager.latest_step() is None:
                raise missing
            return manager.restore(None, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state

    def save(
        self, learned: Any, playing: Any = None, envs: VectorEnv | None = None, *, params: Any = None
    ) -> None:
        """Writes a checkpoint by Orbax, from which `Run(folder, resume=True)` continues.

        It replaces the last one in one step: if the program is killed, the old one stays. If there are
        several processes, all of them call it after the same update.

        Args:
            learned: Pytree of arrays with the state of training: parameters, optimizer state, statistics.
                It is equal in all processes.
            playing: Pytree with the state of the running episodes: the handle, observations, memories.
            envs: The envs, made with `states` of at least `num_envs`, to save their states, too. Without
                them, or if the states cannot be saved, a resumed run starts new episodes.
            params: Pytree for other programs, the item `params` of the checkpoint. Empty arrays are None.
        """
        jax.effects_barrier()  # waits for the last log
        packed = np.zeros(0, np.uint8)
        if envs is not None:
            with suppress(EnvStateError):  # an env has a state that cannot be saved
                packed = envs.pack_states()
        sizes = process_allgather(np.int32(packed.size)).reshape(-1)
        padded = process_allgather(np.pad(packed, (0, int(sizes.max()) - packed.size)))
        leaves, _ = _leaves_by_name(learned, playing if sizes.all() else None)
        leaves = {
            name: process_allgather(leaf) if name.startswith(_PLAYING) else leaf
            for name, leaf in leaves.items()
            if not isinstance(leaf, Handle)
        }
        if self._writes:
            self._write_checkpoint(sizes, padded, leaves, params)
        self._saved_at = time.perf_counter()

    def _write_checkpoint(self, sizes: Any, padded: Any, leaves: dict[str, Any], params: Any) -> None:
        """Writes what all processes have; `padded` has the packed envs of each, uint8 `[num, longest]`."""
        state = {
            "env_steps": np.int64(self.env_steps),
            "envs": np.concatenate([row[:size] for row, size in zip(padded, sizes, strict=True)]),
            "env_sizes": sizes,  # bytes of `envs` of each process
            "leaves": leaves,
        }
        items = {"state": state} | ({} if params is None else {"params": params})
        # Orbax refuses arrays of size 0.
        arrays = jax.tree.map(lambda leaf: np.asarray(leaf) if np.size(leaf) else None, items)
        (self.folder / _CHECKPOINTS).mkdir(exist_ok=True)
        with self._checkpoints() as (ocp, manager):
            saved = {name: ocp.args.StandardSave(item) for name, item in arrays.items()}
            # The manager deletes the old checkpoint after the new one is complete and has its name.
            manager.save((manager.latest_step() or 0) + 1, args=ocp.args.Composite(**saved))

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
        sizes, process = self._saved["env_sizes"], jax.process_index()
        same = bool(sizes.all()) and envs is not None and not self._evaluate
        if same and len(sizes) != jax.process_count():
            raise ValueError(
                f"{self.folder} was written by {len(sizes)} processes, and there are {jax.process_count()}; "
                "resume it with as many"
            )
        leaves, structure = _leaves_by_name(learned, playing if same else None)
        for name, leaf in leaves.items():
            if envs is not None and isinstance(leaf, Handle):
                packed = np.split(self._saved["envs"], np.cumsum(sizes)[:-1])[process]
                leaves[name], _ = restore(leaf, envs.unpack_states(packed))
                continue
            found = self._saved["leaves"].get(name)
            if found is not None and name.startswith(_PLAYING):
                found = found[process]
            if leaf.size and (found is None or (found.shape, found.dtype) != (leaf.shape, leaf.dtype)):
                raise ValueError(
                    f"the checkpoint of {self.folder} has no {name} of shape {leaf.shape} and dtype "
                    f"{leaf.dtype}; resume the run with the options and the program that wrote it"
                )
            leaves[name] = jnp.asarray(found) if leaf.size else leaf
        loaded = jax.tree.unflatten(structure, leaves.values())
        return loaded["learned"], loaded["playing"] if same else playing

    def train(
        self,
        envs: VectorEnv,
        begin: Callable[[Handle, TimeStep], tuple[Any, Any]],
        update: Callable[[Any, Any], tuple[Any, Any, dict[str, jax.Array]]],
        *,
        params: Callable[[Any], Any],
        act: Callable[[Any, Any, Any, Any], tuple[Any, Any]] | None = None,
        evaluate: Callable[[Any], dict[str, jax.Array]] | None = None,
        infos: Sequence[str] = (),
        evaluate_at_saves: bool = True,
        save_envs: bool = True,
    ) -> Any:
        """Trains with the options of `training`, and returns the last state of training.

        One compiled `while_loop` repeats `update`, and logs its metrics. It returns to Python after the first
        update and then every `save_every` seconds, to save and, except for the first time, to evaluate. With
        `--resume` it continues, and with `--evaluate` it only evaluates.

        Args:
            envs: The envs, which are reset with `seed`.
            begin: Function of the handle and the time step of the reset. It returns the state of training, a
                pytree with an attribute `number`, the updates so far; and that of the running episodes.
            update: Function of both states. It returns the next ones, and metrics, a dict of arrays `[]`.
            params: Function of the state of training; what other programs may read, see `save`.
            act: Function that chooses actions in evaluations; see `play`. Without it and `evaluate`, there
                are none.
            evaluate: Function of the state of training in place of `act`. It returns a dict of arrays with a
                value for each episode.
            infos: Keys of infos for `act`.
            evaluate_at_saves: Whether to evaluate during training, too, and not only with `--evaluate`.
            save_envs: Whether to save the states of the envs, too, unless there are spare envs.
        """
        options, stop_at = self.options, self.options.stop_at
        goal = np.inf if stop_at is None else stop_at

        def pause(reached: Any) -> Any:
            return np.int32(_STOP if self._stopping or reached else _SAVE if self.save_due else _CONTINUE)

        def body(carry: Any) -> Any:
            state, playing, metrics = update(*carry[:2])
            self.log(state.number * options.steps_per_update, **metrics)
            reached = metrics.get("episode_return", -jnp.inf) >= goal
            return state, playing, io_callback(pause, jax.ShapeDtypeStruct((), jnp.int32), reached)

        @jax.jit
        def repeat(state: Any, playing: Any) -> Any:
            unfinished = lambda carry: (carry[0].number < options.num_updates) & (carry[2] == _CONTINUE)  # noqa: E731
            return jax.lax.while_loop(unfinished, body, (state, playing, jnp.int32(_CONTINUE)))

        play = jax.jit(act) if act else None

        def score(state: Any) -> dict[str, Any]:
            if evaluate is not None:
                return evaluate(state)
            return {"evaluation": self.play(partial(play, state), infos)} if play else {}

        with self.signals():
            self.show("compiling")
            state, playing = self.load(*jax.jit(begin)(*reset(envs, seed=options.seed)), envs=envs)
            if self._evaluate:
                self.report(**score(state))
                return state
            after, first = _CONTINUE, True
            saved_envs = envs if save_envs and not options.spare_envs else None
            while state.number < options.num_updates and after != _STOP:
                state, playing, after = jax.block_until_ready(repeat(state, playing))
                self.save(state, playing, saved_envs, params=params(state))
                last = after == _STOP or state.number >= options.num_updates
                if evaluate_at_saves and not self._stopping and (last or not first):
                    means = {name: np.mean(values) for name, values in score(state).items()}
                    if not self._stopping:  # else the episodes were cut
                        self.log(state.number * options.steps_per_update, **means)
                first = False
        return state

    def play(
        self, act: Callable[[Any, Any, Any], tuple[Any, Any]], infos: Sequence[str] = ()
    ) -> NDArray[np.float64]:
        """Plays episodes in plain Gymnasium, without a pool, with the options of `training`.

        With `--evaluate` and `--video`, it films the first episodes, into the folder `videos`.

        Args:
            act: Function of the memory, the observations and a dict of infos, with leaves `[num_episodes]`.
                It returns the next memory and the actions. The first memory is None.
            infos: Keys of the infos that it needs.

        Returns:
            Returns of the episodes, `[num_episodes]` float64. If an env has several rewards, their means.
        """
        options = self.options
        arguments, construct = options.env_arguments(), _constructor(options.env_fn())
        film = self.film(construct, options.video) if self._evaluate and options.video else None
        numbers = range(options.eval_episodes)
        envs = [film(number, **arguments) if film else construct(**arguments) for number in numbers]
        latest = [env.reset(seed=options.seed + 10_000 + number) for number, env in enumerate(envs)]
        returns, running, memory = np.zeros(len(envs)), [*range(len(envs))], None
        for _ in range(options.eval_steps):
            obs, info = zip(*latest, strict=True)
            stacked = {name: np.stack([each[name] for each in info]) for name in infos}
            memory, actions = act(memory, jax.tree.map(lambda *leaves: np.stack(leaves), *obs), stacked)
            actions = jax.tree.map(np.asarray, actions)
            for number in [*running]:
                action = jax.tree.map(lambda leaf, number=number: leaf[number], actions)
                env = envs[number]
                *latest_obs, reward, terminated, truncated, info = env.step(
                    _to_space(env.action_space, action)
                )
                latest[number] = latest_obs[0], info
                returns[number] += np.mean(np.asarray(reward))
                if terminated or truncated:
                    running.remove(number)
            if not running or self._stopping:
                break
        for env in envs:
            env.close()
        return returns

    def make(self, *, video: int | None = None, **options: Any) -> VectorEnv:
        """Makes the envs of the options of `training` by `jaxvec.make`, with saved states or spare envs.

        Args:
            video: Number of envs to film; by default that of the options, and 0 if the run is evaluated.
            **options: Further arguments of `jaxvec.make`, which replace those of the options.
        """
        given = self.options
        chosen = {"num_envs": given.num_envs, "num_workers": given.num_workers, **options}
        spare = {"spare_envs": given.spare_envs}  # which excludes saved states
        chosen = (spare if given.spare_envs else {"states": chosen["num_envs"]}) | chosen
        if video is None:
            video = 0 if self._evaluate else given.video
        return make(self.film(given.env_fn(), video), **chosen, **given.env_arguments())

    def film(self, env: str | Callable[..., gymnasium.Env[Any, Any]], number: int) -> Any:
        """Returns an argument for `make` which films the first envs by Gymnasium's `RecordVideo`.

        Further arguments of `make` are passed to the envs, as without films.

        The films, in the folder `videos`, show the episodes 0, 1, 8, 27, ..., 1000, 2000, ... of each, or all
        if the run is evaluated. They need the package `moviepy`.

        Args:
            env: Gymnasium id, or a function that makes an env and takes the keyword `render_mode`.
            number: Number of envs to film. With 0, the result is `env`.
        """
        if not number:
            return env
        construct = _constructor(env)
        videos = str(self.folder.absolute() / "videos")
        start = f"from_{self.env_steps}_" if self.env_steps else ""  # a resumed run may start new episodes
        start, name = ("", "evaluation") if self._evaluate else (start, "env")
        choice: Any = {"episode_trigger": lambda _: True} if self._evaluate else {}

        # Workers call it, and must not import JAX.
        def constructor(index: int, **arguments: Any) -> gymnasium.Env[Any, Any]:
            if index >= number:
                return construct(**arguments)
            film = construct(render_mode="rgb_array", **arguments)
            options: Any = {"name_prefix": f"{start}{name}_{index}", "disable_logger": True, **choice}
            with warnings.catch_warnings(action="ignore"):  # of films of other envs in the folder
                return gymnasium.wrappers.RecordVideo(film, videos, **options)

        return constructor

    def report(self, evaluation: Any, **others: Any) -> None:
        """Prints the result of an evaluation: mean and standard deviation of values of episodes, `[n]`."""
        for name, each in {"evaluation": evaluation, **others}.items():
            each = np.asarray(each)
            label = "mean return" if name == "evaluation" else name
            print(f"{label} {each.mean():.6g} ± {each.std():.3g} over {each.size} episodes")

    def latest(self, name: str) -> float:
        """Returns the latest value of a metric; NaN without one."""
        return float(next((row[name] for row in reversed(self._rows) if name in row), np.nan))

    def metrics(self) -> dict[str, NDArray[np.float64]]:
        """Returns the columns of `metrics.csv`, float64 `[num_lines]`; NaN where a line has no value."""
        rows = self._rows
        return {name: np.array([row.get(name, np.nan) for row in rows], float) for name in self._columns}

    def close(self) -> None:
        """Draws the curve, and closes the loggers."""
        jax.effects_barrier()  # waits for the last log
        if self._progress and sys.stderr.isatty():
            sys.stderr.write("\n")
        for logger in self.loggers:
            end = getattr(logger, "finish", None) or getattr(logger, "close", None)
            if end is not None:
                end()
        if "episode_return" not in self._columns or self._evaluate or not self._writes:
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


def _constructor(env: str | Callable[..., gymnasium.Env[Any, Any]]) -> Callable[..., gymnasium.Env[Any, Any]]:
    return partial(gymnasium.make, find_spec(env)) if isinstance(env, str) else env


def _to_space(space: gymnasium.Space[Any], action: Any) -> Any:
    """Converts NumPy numbers to those of a space, which have the dtypes of JAX's."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: _to_space(each, action[name]) for name, each in space.items()}
    return int(action) if isinstance(space, gymnasium.spaces.Discrete) else np.asarray(action, space.dtype)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class _TensorBoard:
    """Writes metrics as event files into a folder."""

    def __init__(self, folder: Path) -> None:
        self._writer = import_optional("tensorboardX", "jaxvec.logging.Run", "tensorboardX").SummaryWriter(
            str(folder)
        )
        self.close = self._writer.close

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)


def _open_logger(name: str, folder: Path, config: Mapping[str, Any]) -> Any:
    if name == "tensorboard":
        return _TensorBoard(folder)
    # trackio has the interface of wandb. A resumed run continues under its name.
    options = {"project": "jaxvec", "name": folder.name, "config": dict(config), "resume": "allow"}
    options |= {"id": folder.name, "dir": str(folder)} if name == "wandb" else {}
    return import_optional(name, "jaxvec.logging.Run", name).init(**options)


@dataclass(frozen=True)
class _Source:
    resume: Path | None = None
    evaluate: Path | None = None


@contextmanager
def training(
    options: type[OptionsT],
    argv: Sequence[str] | None = None,
    *,
    program: str,
) -> Generator[tuple[OptionsT, Run]]:
    """Reads the options of a training program by `tyro`, and opens its run in the folder `runs`.

    At the end of the block it prints the score. After a Ctrl-C or SIGTERM it prints a line, and exits with
    code 130. Wrong options end the program with a usage error. With `--resume RUN` and `--evaluate RUN`, the
    options are those of the run, except those that are given again.

    Args:
        options: `Options`, or a subclass with further options. Its docstring is the description of `--help`.
        argv: Words of the command line; by default those of this process.
        program: Name of the program, for the default name of the folder.

    Raises:
        SystemExit: Options are wrong, or a signal ended the run.

    Example:
        ```python
        from dataclasses import dataclass
        from jaxvec.logging import Options, training

        @dataclass(frozen=True)
        class Config(Options):
            lr: float = 1e-3  # learning rate

        with training(Config, ["--seed", "3"], program="mine") as (config, run), run.signals():
            run.log(3, episode_return=1.0)  # or call `run.train`
        print(run.env_steps)  # 3
        ```
    """
    tyro: Any = import_optional("tyro", "jaxvec.logging.training", "demo")
    source, _ = tyro.cli(_Source, args=argv, return_unknown_args=True, add_help=False)
    old = source.evaluate or source.resume
    try:
        if source.evaluate and source.resume:
            raise ValueError("--evaluate and --resume exclude each other")
        saved = json.loads((old / "config.json").read_text())["config"] if old else {}
        lists = {name: tuple(value) for name, value in saved.items() if isinstance(value, list)}
        values: Any = {**saved, **lists, "resume": None, "evaluate": None}
        default = options(**values)
        config: OptionsT = tyro.cli(options, prog=Path(sys.argv[0]).name, args=argv, default=default)
        config.env_fn()  # raises an error if there is no such env
        folder = old or Path("runs") / (config.name or _default_name(program, config))
        extra = jax.process_index() == 0 and not config.evaluate
        known = {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()
        }
        run_options: Any = {"resume": config.resume is not None, "evaluate": config.evaluate is not None}
        run_options |= {"total_steps": config.total_steps, "save_every": config.save_every}
        loggers = [_open_logger(config.logger, folder, known)] if config.logger and extra else []
        opened = Run(folder, known, loggers=loggers, **run_options)
    except (gymnasium.error.Error, OSError, TypeError, ValueError, ImportError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    opened.options = config
    try:
        with opened as run:
            yield config, run
    except KeyboardInterrupt:  # before or after `signals`, which handles Ctrl-C itself
        sys.stderr.write("interrupted\n")
        raise Interrupted from None
    mean, score = run.latest("episode_return"), run.latest("evaluation")
    text = f"mean return {mean:.5g} of the latest 100 episodes, {run.env_steps:,} env steps"
    if run.stopped:
        text = f"stopped: {text}; continue with --resume {folder}"
    elif not np.isnan(score):
        text = (
            f"score {score:.6g}: mean return of {config.eval_episodes} episodes with the best actions\n{text}"
        )
    if extra:
        print(text if run.stopped else f"{text}\nresults are in {folder}")
    if run.stopped:
        raise SystemExit(INTERRUPTED)


def _default_name(program: str, config: Options) -> str:
    env = config.env.rpartition(":")[2].replace("/", "-")
    return "_".join([program, env, str(config.seed), time.strftime("%Y%m%d-%H%M%S")])


def _versions() -> dict[str, str]:
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {name: found[name] for name in _PACKAGES if name in found}
