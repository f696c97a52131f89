"""The folder of a training run: metrics, checkpoints, films, and how Ctrl-C ends it."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
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
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.multihost_utils import process_allgather
from numpy.typing import NDArray

from jaxvec._envs.constructors import find_spec
from jaxvec._errors import EnvStateError
from jaxvec._util import leave
from jaxvec._vector_env import VectorEnv
from jaxvec.adapters._packages import import_optional
from jaxvec.callbacks._functions import restore
from jaxvec.callbacks._handle import Handle

_PACKAGES = ("jaxvec", "jax", "jaxlib", "gymnasium", "numpy", "flax", "optax", "orbax-checkpoint")
_CHECKPOINTS = "checkpoints"
_TIMES = ("env_steps", "seconds", "steps_per_second")  # columns of `Run` itself
_STOPPING = "stopping: this update is completed and saved; Ctrl-C again ends the program at once"
_PRINT_INTERVAL = 10.0  # seconds between two lines, if stderr is not a terminal
_PLAYING = "['playing']"  # start of the names of leaves that each process has for itself


class Run:
    """A folder with the configuration, the metrics and the results of a training run.

    It writes `config.json` at once, a line of `metrics.csv` per `log`, progress on stderr, and `curve.png` at
    the end, if `episode_return` was logged and matplotlib is installed. `write` adds the program's own files.

    In a program of several processes (`jax.distributed`), each has a run of the same folder. Only the first
    writes files and shows progress. All of them read, so a resumed run needs a folder that all machines see.

    Attributes:
        folder: Path of the folder.
        env_steps: Env steps so far, as of the latest `log`.
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
        self._total = total_steps
        self._progress = progress and self._writes
        self._rows: list[dict[str, Any]] = []
        self._saved: Any = None  # by the run to resume or evaluate
        self._evaluate = evaluate
        if resume or evaluate:
            self._saved = self._read_checkpoint("state")
            self._rows = self._read_metrics(int(self._saved["env_steps"]))
        elif self._csv.exists():
            raise FileExistsError(f"{folder} contains a run; choose another name, or resume it")
        if self._writes:
            self.folder.mkdir(parents=True, exist_ok=True)
        if self._saved is None:
            record = {"config": dict(config or {}), "versions": _versions()}
            self.write("config.json", f"{json.dumps(record, indent=2, default=str)}\n".encode())
        self._columns = list(dict.fromkeys([*_TIMES, *(name for row in self._rows for name in row)]))
        before = self._rows[-1] if self._rows else {"env_steps": 0, "seconds": 0.0}
        self.env_steps: int = int(before["env_steps"])
        if resume:
            self._rewrite()
        # By their step and metrics: a resumed program may log those of the last step again.
        self._resumed = {(row["env_steps"], frozenset(row.keys() - {*_TIMES})): row for row in self._rows}
        self._seconds = before["seconds"]
        self._start = time.perf_counter() - self._seconds
        self._printed = -_PRINT_INTERVAL
        self._first: tuple[float, float] | None = None  # steps and seconds of the first log in this process
        self._save_every = save_every
        self._saved_at = -np.inf
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
        steps = np.asarray(env_steps).item()
        seconds = time.perf_counter() - self._start
        row = {"env_steps": steps, "seconds": round(seconds, 3)}
        row |= {name: +np.asarray(value).item() for name, value in metrics.items()}  # `+`: bools as 0 and 1
        if steps > self.env_steps:  # else it is a second row, such as of an evaluation
            if self._first:  # else the time is mainly that of the compiler
                rate = (steps - self.env_steps) / max(seconds - self._seconds, 1e-9)
                row["steps_per_second"] = round(rate, 1)
            self.env_steps = int(steps)
            self._seconds = seconds
            self._show_progress(row)
        if again := self._resumed.pop((steps, frozenset(metrics)), None):
            self._rows.remove(again)
            row = again | row
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        self._columns += new
        if new or again or len(self._rows) == 1:
            self._rewrite()
        elif self._writes:
            with self._csv.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        for logger in self.loggers:
            logger.log(row, step=int(steps))

    def _show_progress(self, row: Mapping[str, Any]) -> None:
        steps = row["env_steps"]
        shown = f"{steps:>{len(f'{self._total or 0:,}')},} steps"
        if "episode_return" in row:
            mean = row["episode_return"]  # NaN until an episode has ended
            shown += f"  mean return {'-' if np.isnan(mean) else f'{mean:,.3f}':>10}"
        if "steps_per_second" in row:
            shown += f"  {row['steps_per_second']:>9,.0f} steps/s"
        if self._total:
            share = min(steps / self._total, 1)  # whole updates may exceed it
            shown = f"{share:4.0%}  {shown}"
            if self._first and share < 1:
                first, start = self._first  # after compilation
                left = (self._total - steps) * (self._seconds - start) / (steps - first)
                shown += f"  {timedelta(seconds=round(left))} left"
        # The first line says at once that compilation is over, and the last one that training is.
        always = self._first is None or (self._total is not None and steps >= self._total)
        self._first = self._first or (steps, self._seconds)
        self.show(shown, always)

    def _read_metrics(self, env_steps: int) -> list[dict[str, Any]]:
        """Returns the rows up to `env_steps`. A program that was killed may have cut the last line."""
        text = self._csv.read_text() if self._csv.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        # Integers stay integers: `_rewrite` writes the rows again.
        rows = [
            {
                name: (int if text.lstrip("-").isdecimal() else float)(text)
                for name, text in row.items()
                if text
            }
            for row in csv.DictReader(lines)
        ]
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
        receiver.setblocking(True)  # also with a `socket.setdefaulttimeout`
        sender.setblocking(False)
        before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        caught = (signal.SIGINT, signal.SIGTERM)
        handlers = [signal.signal(number, lambda *_: None) for number in caught]
        thread = threading.Thread(target=self._receive_signals, args=(receiver,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            for number, handler in zip(caught, handlers, strict=True):
                signal.signal(number, handler)
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
                sys.stderr.write(f"{newline}{_STOPPING}\n")
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
        options = ocp.CheckpointManagerOptions(
            multiprocessing_options=alone, max_to_keep=1, enable_async_checkpointing=False, create=False
        )
        with ocp.CheckpointManager((self.folder / _CHECKPOINTS).absolute(), options=options) as manager:
            yield ocp, manager

    def _read_checkpoint(self, item: str) -> Any:
        with self._checkpoints() as (ocp, manager):
            if manager.latest_step() is None:
                raise FileNotFoundError(f"{self.folder} has no checkpoint: the run has saved nothing")
            return manager.restore(None, args=ocp.args.Composite(**{item: ocp.args.StandardRestore()}))[item]

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
            params: Pytree of what the policy needs, such as parameters, for `load_params`.
        """
        jax.effects_barrier()  # waits for the last log
        began = time.perf_counter()
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
        now = time.perf_counter()
        self._seconds += now - began  # the next rate is that of the steps
        if self._first and self._saved_at < 0:  # it imports Orbax, which says nothing about the time left
            self._first = self._first[0], self._first[1] + now - began
        self._saved_at = now

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
            envs: The envs, which continue from their saved states. Without them, new episodes start.

        Raises:
            ValueError: The saved state does not match the arguments.
        """
        if self._saved is None:
            return learned, playing
        sizes = self._saved["env_sizes"]
        process = jax.process_index()
        same = bool(sizes.all()) and envs is not None and not self._evaluate
        if self._progress and not self._evaluate:
            episodes = "the episodes continue" if same else "new episodes start"
            sys.stderr.write(f"resuming after {self.env_steps:,} steps; {episodes}\n")
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
            saved = self._saved["leaves"].get(name)
            if saved is not None and name.startswith(_PLAYING):
                saved = saved[process]
            if leaf.size and (saved is None or (saved.shape, saved.dtype) != (leaf.shape, leaf.dtype)):
                raise ValueError(
                    f"the checkpoint of {self.folder} has no {name} of shape {leaf.shape} and dtype "
                    f"{leaf.dtype}; resume the run with the options and the program that wrote it"
                )
            leaves[name] = jnp.asarray(saved) if leaf.size else leaf
        loaded = jax.tree.unflatten(structure, leaves.values())
        return loaded["learned"], loaded["playing"] if same else playing

    def load_params(self) -> Any:
        """Returns the argument `params` of the last `save`, a pytree of NumPy arrays."""
        return jax.tree.map(
            lambda leaf: np.zeros(0, np.float32) if leaf is None else leaf,  # as Orbax refuses empty arrays
            self._read_checkpoint("params"),
            is_leaf=lambda leaf: leaf is None,
        )

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
        construct = constructor_of(env)
        videos = str(self.folder.absolute() / "videos")
        start = f"from_{self.env_steps}_" if self.env_steps else ""  # a resumed run may start new episodes
        name = "evaluation" if self._evaluate else f"{start}env"
        choice: Any = {"episode_trigger": lambda _: True} if self._evaluate else {}

        # Workers call it, and must not import JAX.
        def constructor(index: int, **arguments: Any) -> gymnasium.Env[Any, Any]:
            if index >= number:
                return construct(**arguments)
            film = construct(render_mode="rgb_array", **arguments)
            options: Any = {"name_prefix": f"{name}_{index}", "disable_logger": True, **choice}
            with warnings.catch_warnings(action="ignore"):  # of films of other envs in the folder
                return gymnasium.wrappers.RecordVideo(film, videos, **options)

        return constructor

    def report(self, evaluation: Any, **others: Any) -> None:
        """Prints the result of an evaluation: mean and standard deviation of values of episodes, `[n]`."""
        for name, values in {"mean return": evaluation, **others}.items():
            print(f"{name} {np.mean(values):.6g} ± {np.std(values):.3g} over {np.size(values)} episodes")

    def latest(self, name: str) -> float:
        """Returns the latest value of a metric; NaN without one."""
        return float(next((row[name] for row in reversed(self._rows) if name in row), np.nan))

    def metrics(self) -> dict[str, NDArray[np.float64]]:
        """Returns the columns of `metrics.csv`, float64 `[num_lines]`; NaN where a line has no value."""
        return {
            name: np.array([row.get(name, np.nan) for row in self._rows], float) for name in self._columns
        }

    def close(self) -> None:
        """Draws the curve, and closes the loggers."""
        jax.effects_barrier()  # waits for the last log
        if self._progress and sys.stderr.isatty():
            sys.stderr.write("\n")
        for logger in self.loggers:
            end = getattr(logger, "finish", None) or getattr(logger, "close", None)
            if end is not None:
                end()
        draws = self._writes and not self._evaluate and "episode_return" in self._columns
        if not draws or importlib.util.find_spec("matplotlib") is None:
            return
        from matplotlib.figure import Figure  # slow to import, so after the training

        figure = Figure(figsize=(7, 4), layout="constrained")  # uses Agg; pyplot might open a window
        axes: Any = figure.subplots()
        for name, marker in {"episode_return": "-", "evaluation": "o"}.items():
            points = [(row["env_steps"], row[name]) for row in self._rows if name in row]
            axes.plot(*np.reshape(points, (-1, 2)).T, marker, label=name)
        axes.set(title=self.folder.name, xlabel="env steps", ylabel="mean return")
        axes.legend()
        figure.savefig(self.folder / "curve.png", dpi=150)


def _leaves_by_name(learned: Any, playing: Any) -> tuple[dict[str, Any], Any]:
    both = {"learned": learned, "playing": playing}
    leaves, structure = jax.tree.flatten_with_path(both, is_leaf=lambda node: isinstance(node, Handle))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}, structure


def constructor_of(
    env: str | Callable[..., gymnasium.Env[Any, Any]],
) -> Callable[..., gymnasium.Env[Any, Any]]:
    return partial(gymnasium.make, find_spec(env)) if isinstance(env, str) else env


def _versions() -> dict[str, str]:
    versions = {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions()
    }
    return {"python": platform.python_version()} | {
        name: versions[name] for name in _PACKAGES if name in versions
    }
