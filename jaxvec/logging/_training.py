"""The command line of training programs, and their loop of updates, saves, evaluations and signals."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray

from jaxvec._envs import failures
from jaxvec._envs.constructors import find_spec
from jaxvec._envs.envs import EnvErrorContext, EnvFailure
from jaxvec._errors import JaxvecError
from jaxvec._results import TimeStep
from jaxvec._util import INTERRUPTED, leave
from jaxvec._vector_env import VectorEnv
from jaxvec.adapters._packages import import_optional
from jaxvec.callbacks._functions import reset
from jaxvec.callbacks._handle import Handle
from jaxvec.callbacks._make import make
from jaxvec.logging._run import Run, constructor_of

_CONTINUE, _SAVE, _STOP = range(3)  # what a compiled loop does after an update


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

    @property
    def infos(self) -> Sequence[str]:
        """Keys of the infos that the policy needs."""
        return ()

    def env_fn(self) -> Any:
        """Returns the env for `jaxvec.make`: the id, or the class that `MODULE:CLASS` names."""
        module, _, name = self.env.rpartition(":")
        option_class: Any = getattr(importlib.import_module(module), name, None) if module else None
        if callable(option_class):
            return option_class
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


class TrainingRun(Run):
    """The run of a program with `Options`, which `training` opens.

    Attributes:
        options: The options of the program.

    Example:
        ```python
        from jaxvec.logging import Options, training

        with training(Options, ["--num-envs", "2"], program="mine") as (_, run), run.make() as envs:
            print(envs.num_envs)  # 2
        ```
    """

    options: Options

    def train(
        self,
        envs: VectorEnv,
        begin: Callable[[Handle, TimeStep], tuple[Any, Any]],
        update: Callable[[Any, Any], tuple[Any, Any, dict[str, jax.Array]]],
        *,
        params: Callable[[Any], Any],
        act: Callable[[Any, Any, Any, Any], tuple[Any, Any]] | None = None,
        evaluate: Callable[[Any], dict[str, jax.Array]] | None = None,
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
            params: Function of the state of training. It returns what the policy needs, a pytree for `act`
                and `Run.load_params`.
            act: Function that chooses actions in evaluations; its arguments are this pytree, and those of the
                argument `act` of `play`. Without it and `evaluate`, there are none.
            evaluate: Function of the state of training in place of `act`. It returns a dict of arrays with a
                value for each episode.
            evaluate_at_saves: Whether to evaluate during training, too, and not only with `--evaluate`.
            save_envs: Whether to save the states of the envs, too, unless there are spare envs.
        """
        options = self.options
        goal = np.inf if options.stop_at is None else options.stop_at

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
            return {"evaluation": self.play(partial(play, params(state)))} if play else {}

        with self.signals():
            saved_envs = envs if save_envs and not options.spare_envs else None
            state, playing = self.load(*jax.jit(begin)(*reset(envs, seed=options.seed)), envs=saved_envs)
            self.show("compiling")
            if self._evaluate:
                self.report(**score(state))
                return state
            after = _CONTINUE
            while state.number < options.num_updates and after != _STOP:
                state, playing, after = jax.block_until_ready(repeat(state, playing))
                first = self._saved_at < 0
                self.save(state, playing, saved_envs, params=params(state))
                last = after == _STOP or state.number >= options.num_updates
                if evaluate_at_saves and not self._stopping and (last or not first):
                    means = {name: np.mean(values) for name, values in score(state).items()}
                    if not self._stopping:  # else the episodes were cut
                        self.log(state.number * options.steps_per_update, **means)
        return state

    def play(
        self,
        act: Callable[[Any, Any, Any], tuple[Any, Any]],
        seeds: Sequence[int | None] | None = None,
        **arguments: Any,
    ) -> NDArray[np.float64]:
        """Plays episodes in plain Gymnasium, without a pool, with the options of `training`.

        With `--evaluate` and `--video`, it films the first episodes, into the folder `videos`.

        Args:
            act: Function of the memory, the observations and a dict of infos, with leaves `[num_episodes]`.
                It returns the next memory and the actions. The first memory is None.
            seeds: Seed of each episode; by default, `eval_episodes` of them.
            **arguments: Further arguments of the env, such as `render_mode`.

        Returns:
            Returns of the episodes, `[num_episodes]` float64. If an env has several rewards, their means.
        """
        options = self.options
        arguments = options.env_arguments() | arguments
        first = options.seed + 10_000
        seeds = range(first, first + options.eval_episodes) if seeds is None else seeds
        construct = constructor_of(options.env_fn())
        film = self.film(construct, options.video) if self._evaluate and options.video else None
        envs: list[Any] = []
        latest: list[Any] = []
        for number, seed in enumerate(seeds):
            with _typed_errors(number, "constructor"):
                envs.append(film(number, **arguments) if film else construct(**arguments))
            with _typed_errors(number, "reset"):
                latest.append(envs[number].reset(seed=seed))
        returns = np.zeros(len(envs))
        running = [*range(len(envs))]
        memory = None
        for _ in range(options.eval_steps):
            obs, info = zip(*latest, strict=True)
            stacked = {name: np.stack([step_info[name] for step_info in info]) for name in options.infos}
            memory, actions = act(memory, jax.tree.map(lambda *leaves: np.stack(leaves), *obs), stacked)
            actions = jax.tree.map(np.asarray, actions)
            for number in [*running]:
                action = jax.tree.map(lambda leaf, number=number: leaf[number], actions)
                action = _to_space(envs[number].action_space, action)
                with _typed_errors(number, "step", action):
                    *latest_obs, reward, terminated, truncated, info = envs[number].step(action)
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
        own = self.options
        chosen = {"num_envs": own.num_envs, "num_workers": own.num_workers, **options}
        spare = {"spare_envs": own.spare_envs}  # which excludes saved states
        chosen = (spare if own.spare_envs else {"states": chosen["num_envs"]}) | chosen
        if video is None:
            video = 0 if self._evaluate else own.video
        return make(self.film(own.env_fn(), video), **chosen, **own.env_arguments())


class Policy:
    """The policy of a saved run, which maps an observation of one env to the best action.

    A program offers it by a function `load`, such as `jaxvec.examples.ppo.load`.

    Attributes:
        run: The run, of which `options` are those of the program.
        act: Function for compiled programs and several envs. Its arguments are a memory, first None,
            observations, and a dict of the infos that the options name, with leaves `[num_envs, ...]`. It
            returns the next memory and the actions.
        memory: Memory of a recurrent policy after the latest call. Before an episode, set it to None.

    Example:
        ```python
        from jaxvec.examples import ppo

        ppo.main(["--total-steps", "512", "--num-envs", "8", "--name", "first"])  # or in a shell
        policy = ppo.load("runs/first")
        env = gymnasium.make("CartPole-v1")
        obs, info = env.reset(seed=0)
        print(env.step(policy(obs))[1])  # 1.0
        policy.play(seed=0, render_mode="rgb_array")  # the return of an episode
        ```
    """

    def __init__(
        self,
        folder: str | Path,
        options: type[Options],
        actor: Callable[[Any, Any, Any], Callable[[Any, Any, Any, Any], tuple[Any, Any]]],
    ) -> None:
        """Reads the folder of a run.

        Args:
            folder: Path of the folder.
            options: Class of the program's options.
            actor: Function of the options and of the observation and action space of an env. It returns the
                argument `act` of `TrainingRun.train`.

        Raises:
            FileNotFoundError: The run has not been saved.
            ValueError: The folder contains no run, or that of another program.
        """
        config = replace(_read_options(Path(folder), options), video=0)
        self.run: TrainingRun = TrainingRun(folder, evaluate=True)
        self.run.options = config
        with closing(constructor_of(config.env_fn())(**config.env_arguments())) as env:
            self._space: Any = env.action_space
            act = actor(config, env.observation_space, env.action_space)
        self.act: Callable[..., tuple[Any, Any]] = partial(jax.jit(act), self.run.load_params())
        self.memory: Any = None

    def __call__(self, obs: Any, info: Mapping[str, Any] | None = None) -> Any:
        """Returns the best action for `env.step`.

        Args:
            obs: Observation of `env.reset` or `env.step`.
            info: Info of the same call, for a policy that needs infos.
        """
        infos = {name: (info or {})[name] for name in self.run.options.infos}
        batch = jax.tree.map(lambda leaf: np.asarray(leaf)[None], (obs, infos))
        self.memory, actions = self.act(self.memory, *batch)
        return _to_space(self._space, jax.tree.map(lambda leaf: np.asarray(leaf)[0], actions))

    def play(self, seed: int | None = None, **arguments: Any) -> float:
        """Plays an episode, and returns its return.

        Args:
            seed: Seed of the episode; by default a random one.
            **arguments: Further arguments of the env, such as `render_mode="human"`.
        """
        return float(self.run.play(self.act, [seed], **arguments)[0])


@contextmanager
def _typed_errors(env_id: int, operation: str, action: Any = None) -> Generator[None]:
    """Turns an exception of an env into the error that a pool would raise."""
    try:
        with EnvErrorContext(env_id, operation, action):
            yield
    except EnvFailure as failure:
        raise failures.to_error(failures.report(failure), worker=None) from failure.__cause__


def _to_space(space: gymnasium.Space[Any], action: Any) -> Any:
    """Converts NumPy numbers to those of a space, which have the dtypes of JAX's."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: _to_space(subspace, action[name]) for name, subspace in space.items()}
    return int(action) if isinstance(space, gymnasium.spaces.Discrete) else np.asarray(action, space.dtype)


def _open_logger(name: str, folder: Path, config: Mapping[str, Any]) -> Any:
    if name == "tensorboard":
        package = import_optional("tensorboardX", "jaxvec.logging.Run", "tensorboardX")
        writer = package.SummaryWriter(str(folder))

        def log(metrics: Mapping[str, Any], step: int) -> None:
            for metric in metrics.items():
                writer.add_scalar(*metric, step)

        return SimpleNamespace(log=log, close=writer.close)
    # trackio has the interface of wandb. A resumed run continues under its name.
    options = {"project": "jaxvec", "name": folder.name, "config": dict(config), "resume": "allow"}
    options |= {"id": folder.name, "dir": str(folder)} if name == "wandb" else {}
    return import_optional(name, "jaxvec.logging.Run", name).init(**options)


def _read_options(folder: Path, options: type[OptionsT]) -> OptionsT:
    """Returns the options of the run in a folder."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}/config.json does not exist; pass the folder of a run, such as runs/NAME")
    saved = json.loads((folder / "config.json").read_text())["config"]
    if unknown := sorted(saved.keys() - {field.name for field in fields(options)}):
        raise ValueError(f"{folder} is a run of another program, with the options {', '.join(unknown)}")
    values: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return options(**values | {"resume": None, "evaluate": None})


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
) -> Generator[tuple[OptionsT, TrainingRun]]:
    """Reads the options of a training program by `tyro`, and opens its run in the folder `runs`.

    At the end of the block it prints the score. After a Ctrl-C or SIGTERM it prints a line, and exits with
    code 130. Wrong options end the program with a usage error, and a failure of an env, a file or a package
    with one line. With `--resume RUN` and `--evaluate RUN`, the options are those of the run, except those
    that are given again.

    Without `argv`, JAX keeps compiled programs for the next start in the folder `~/.cache/jaxvec`, unless
    `JAX_COMPILATION_CACHE_DIR` names another one or `JAX_ENABLE_COMPILATION_CACHE` is `false`.

    Args:
        options: `Options`, or a subclass with further options. Its docstring is the description of `--help`.
        argv: Words of the command line; by default those of this process.
        program: Name of the program, for the default name of the folder.

    Raises:
        SystemExit: Options are wrong, an env failed, or a signal ended the run. Before the first update, that
            also removes the folder of the run.

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
    command = _command() if argv is None else program
    if argv is None:
        _keep_compiled()
    source, _ = tyro.cli(_Source, args=argv, return_unknown_args=True, add_help=False)
    old = source.evaluate or source.resume
    try:
        if source.evaluate and source.resume:
            raise ValueError("--evaluate and --resume exclude each other")
        default = _read_options(old, options) if old else options()
        config: OptionsT = tyro.cli(options, prog=command, args=argv, default=default)
        config.env_fn()  # raises an error if there is no such env
        folder = old or Path("runs") / (config.name or _default_name(program, config))
        is_new = not folder.exists()
        extra = jax.process_index() == 0 and not config.evaluate
        known = {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()
        }
        opened = TrainingRun(
            folder,
            known,
            total_steps=config.total_steps,
            save_every=config.save_every,
            resume=config.resume is not None,
            evaluate=config.evaluate is not None,
            loggers=[_open_logger(config.logger, folder, known)] if config.logger and extra else [],
        )
    except (gymnasium.error.Error, OSError, TypeError, ValueError, ImportError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    opened.options = config
    if not old:
        opened.write(".gitignore", b"*\n")  # as other programs do in folders of results
    try:
        with opened as run:
            yield config, run
    except KeyboardInterrupt:  # before or after `signals`, which handles Ctrl-C itself
        sys.stderr.write("interrupted\n")
        raise Interrupted from None
    except (JaxvecError, gymnasium.error.Error, OSError, ImportError) as error:
        places = re.findall(r'File ("[^"\n]+", line \d+)', getattr(error, "remote_traceback", ""))
        place = f" ({places[-1]})" if places else ""  # of the env's code
        print(f"{command}: {str(error).splitlines()[0]}{place}", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        if extra and is_new and not opened.env_steps:
            shutil.rmtree(folder, ignore_errors=True)
    score = run.latest("evaluation")
    mean = run.latest("episode_return")
    text = f"mean return {mean:.5g} of the latest 100 episodes, {run.env_steps:,} env steps"
    if run.stopped:
        text = f"stopped: {text}; continue with {command} --resume {folder}"
    elif not np.isnan(score):
        text = (
            f"score {score:.6g}: mean return of {config.eval_episodes} episodes with the best actions\n{text}"
        )
    if extra:
        print(text if run.stopped else f"{text}\nresults are in {folder}")
    if run.stopped:
        raise SystemExit(INTERRUPTED)


class Interrupted(SystemExit):
    """Ends the program by `leave`, unless it is caught."""

    @property
    def code(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        if sys._getframe().f_back is None:  # pyright: ignore[reportPrivateUsage]
            leave()  # the interpreter itself asks: nothing has caught it
        return INTERRUPTED


def _keep_compiled() -> None:
    """Makes JAX keep compiled programs, by the name of the machine: a shared home may have several kinds."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(parent, "jaxvec", platform.node())
    with suppress(OSError):  # of a home that is read-only
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _command() -> str:
    """Returns the words that started this program."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name}" if spec else f"python {sys.argv[0]}"


def _default_name(program: str, config: Options) -> str:
    env = config.env.rpartition(":")[2].replace("/", "-")
    return "_".join([program, env, str(config.seed), time.strftime("%Y%m%d-%H%M%S")])
