"""Stoix's face: an `EnvFactory` of NumPy envs for the actor threads of its Sebulba systems.

Their time steps and spaces are stoa's, which has to be installed.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np
from gymnasium import Space, spaces

from jaxvec import _util
from jaxvec._errors import UnsupportedSpaceError
from jaxvec._spec import KeyPath, TimeStep, fold_space, format_path
from jaxvec._vector_env import VectorEnv
from jaxvec.compat import _base, envpool
from jaxvec.compat.envpool import Task

__all__ = ["EnvFactory", "StoaVectorEnv", "register"]


def _unwrapped(env: Any) -> Any:
    return env


@final
class EnvFactory:
    """Makes pools of equal envs with different seeds; from any thread. A subclass of Stoix's, where it is.

    Example:
        ```python
        from jaxvec.compat.stoix import EnvFactory

        factory = EnvFactory("CartPole-v1", init_seed=42)
        envs = factory(2)
        print(envs.reset().observation.shape)  # (2, 4)
        envs.close()
        ```
    """

    def __init__(
        self,
        task_id: Any,
        init_seed: int = 42,
        apply_wrapper_fn: Callable[[Any], Any] = _unwrapped,
        **kwargs: Any,
    ) -> None:
        """Starts nothing yet.

        Args:
            task_id: the `env` of `jaxvec.make`: a Gymnasium id, an `EnvSpec`, or a callable; or one of
                EnvPool's Atari tasks, such as `Breakout-v5`, for which there is the extra `atari`.
            init_seed: of the first env; each env that is made gets the next one.
            apply_wrapper_fn: what is made is passed through it.
            **kwargs: of `jaxvec.make`, but for `autoreset_mode`, which is `SAME_STEP`; for an Atari task
                EnvPool's options.

        Raises:
            TypeError: an argument can't be given here.
        """
        for name in {"autoreset_mode", "batch_size", "num_envs"} & kwargs.keys():
            raise TypeError(f"{name} can't be set here: Stoix's actors step as many envs as they ask for")
        self.task_id = task_id
        self.seed: int = init_seed
        self.apply_wrapper_fn = apply_wrapper_fn
        self.lock: threading.Lock = threading.Lock()  # of the seed
        self.kwargs = kwargs
        self._task, self._options = envpool.resolve_task(task_id, kwargs)
        theirs = sys.modules.get("stoix.utils.env_factory")
        if theirs is not None:  # its systems ask whether they got one
            theirs.EnvFactory.register(EnvFactory)

    def __call__(self, num_envs: int) -> Any:
        """Starts a pool.

        Returns:
            A `StoaVectorEnv`, wrapped.

        Raises:
            ImportError: stoa is not installed.
            JaxvecError: as `jaxvec.make`.
        """
        _stoa()
        with self.lock:
            seed = self.seed
            self.seed += num_envs
        envs = self._task.start(num_envs, autoreset_mode="SAME_STEP", **self._options)
        return self.apply_wrapper_fn(StoaVectorEnv(self._task, envs, seed=seed))


def register(env_name: str = "jaxvec") -> None:
    """Makes Stoix's Sebulba systems take their envs from here where `config.env.env_name` is `env_name`.

    Stoix's `make_factory` chooses a factory by that name. It then makes an `EnvFactory` for
    `config.env.scenario.name` with the keywords of `config.env.kwargs`, whose pools go through
    `config.env.wrapper`, if there is one. All other names mean what they did. Twice is fine.

    Args:
        env_name: the name. `"envpool"` or `"gymnasium"` take the place of Stoix's own factory.

    Raises:
        ImportError: Stoix is not installed.

    Example:
        ```python
        import jaxvec.compat.stoix

        jaxvec.compat.stoix.register("jaxvec")  # before run_experiment(config)
        ```
    """
    theirs: Any = importlib.import_module("stoix.utils.make_env")
    others: Callable[[Any], Any] = theirs.make_factory

    def make_factory(config: Any) -> Any:
        if config.env.env_name != env_name:
            return others(config)
        apply: Callable[[Any], Any] = _unwrapped
        if config.env.get("wrapper") is not None:
            apply = importlib.import_module("hydra.utils").instantiate(config.env.wrapper, _partial_=True)
        return EnvFactory(config.env.scenario.name, config.arch.seed, apply, **config.env.kwargs)

    theirs.make_factory = make_factory


@final
class StoaVectorEnv:
    """Envs whose time steps are stoa's, of NumPy arrays `[num_envs, ...]`.

    Where an episode ends, the observation is the next one's first; `extras["next_obs"]` has what the env
    returned, of every env, unless the pool was made with `final_obs=False`.

    Example:
        ```python
        from jaxvec.compat.stoix import EnvFactory

        envs = EnvFactory("CartPole-v1")(2)
        envs.reset()
        timestep = envs.step(np.array([0, 1]))
        print(timestep.reward, timestep.extras["metrics"]["is_terminal_step"])  # [1. 1.] [False False]
        envs.close()
        ```
    """

    def __init__(self, task: Task, envs: VectorEnv, *, seed: int) -> None:
        """Makes the face of a task's `envs`, which it owns.

        Args:
            task: of the envs.
            envs: with same-step autoreset.
            seed: for the first reset that is given none.
        """
        self.env = envs
        self._reset_options = task.reset_options
        self._has_games = task.atari is not None
        self.num_envs: int = envs.num_envs
        self._seed: int | None = seed
        stoa = _stoa()
        self._new = stoa.TimeStep
        kinds = (stoa.StepType.FIRST, stoa.StepType.MID, stoa.StepType.TERMINATED, stoa.StepType.TRUNCATED)
        self._kinds = [np.int8(kind) for kind in kinds]  # they are arrays on a device
        self._return = np.zeros(self.num_envs)
        self._length = np.zeros(self.num_envs, np.int64)
        self._score = np.zeros(self.num_envs)  # of the games that are played

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Resets all envs.

        Args:
            seed: an int, or one for each env. `None` takes those that the factory allotted, the first time;
                later the envs go on with their random numbers.
            options: passed to every env's `reset`.

        Returns:
            A `FIRST` time step.
        """
        seed, self._seed = self._seed if seed is None else seed, None
        timestep = self.env.reset(seed=seed, options=self._reset_options if options is None else options)
        self._return = np.zeros(self.num_envs)
        self._length = np.zeros(self.num_envs, np.int64)
        self._score = np.zeros(self.num_envs)
        return self._timestep(np.full(self.num_envs, self._kinds[0]), timestep)

    def step(self, action: Any) -> Any:
        """Steps all envs.

        Args:
            action: pytree of the action space, leaves `[num_envs, ...]`.

        Returns:
            A time step: `MID`, or `TERMINATED` or `TRUNCATED` where an episode has ended; the discount is 0
            where one was terminated. `extras["metrics"]` has `episode_return` and `episode_length` of the
            episode that ended last, and `is_terminal_step`; of an Atari task, its last game's score and
            length, over all its lives and before clipping. The extras of `info=` are of the step itself.
        """
        _, _, terminated, truncated, info = timestep = _base.merge_final_info(self.env.step(action), np)
        _, running, ended, cut = self._kinds
        kind = np.where(terminated, ended, np.where(truncated, cut, running))
        over, total, length = terminated | truncated, info["episode_return"], info["episode_length"]
        if self._has_games:
            self._score += info["reward"]
            over, total, length = (
                info["terminated"].astype(bool) | truncated,
                self._score,
                info["elapsed_step"],
            )
        self._return = np.where(over, total, self._return)
        self._length = np.where(over, length, self._length)
        self._score = np.where(over, 0, self._score)
        return self._timestep(kind, timestep)

    def observation_space(self) -> Any:
        """Returns the space of one env's observations, as stoa has it."""
        return _convert(self.env.single_observation_space, "obs")

    def action_space(self) -> Any:
        """Returns the space of one env's actions, as stoa has it."""
        return _convert(self.env.single_action_space, "action")

    def close(self) -> None:
        """Closes the pool. Twice is fine."""
        self.env.close()

    def _timestep(self, kind: Any, timestep: TimeStep) -> Any:
        extras, last_obs = _base.pop_final_obs(timestep, np)
        if last_obs is not None:
            extras["next_obs"] = last_obs
        extras["metrics"] = {
            "episode_return": self._return,
            "episode_length": self._length,
            "is_terminal_step": timestep.terminated | timestep.truncated,
        }
        return self._new(
            step_type=kind,
            reward=timestep.reward,
            discount=1 - timestep.terminated.astype(np.float32),
            observation=timestep.obs,
            extras=extras,
        )


def _convert(space: Space[Any], root: str) -> Any:
    """Returns stoa's space for a Gymnasium space, named `root` in errors."""
    stoa = _stoa()

    def leaf(space: Space[Any], path: KeyPath) -> Any:
        name, dtype = format_path(path), jax.dtypes.canonicalize_dtype(space.dtype or np.int32)
        match space:
            case spaces.Discrete() if space.start == 0:
                return stoa.DiscreteSpace(int(space.n), dtype, name)
            case spaces.MultiDiscrete() if not space.start.any():
                return stoa.MultiDiscreteSpace(space.nvec.astype(dtype), dtype, name)
            case spaces.MultiBinary():
                return stoa.BoundedArraySpace(space.shape, dtype, 0, 1, name)
            case spaces.Box():
                low, high = space.low.astype(dtype), space.high.astype(dtype)
                return stoa.BoundedArraySpace(space.shape, dtype, low, high, name)
            case _:
                raise UnsupportedSpaceError(f"{name}: stoa has no space like {space}; wrap the env")

    return fold_space(
        space,
        leaf,
        root=(root,),
        make_dict=lambda children, path: stoa.DictSpace(children, format_path(path)),
        make_tuple=lambda children, path: stoa.TupleSpace(children, format_path(path)),
    )


def _stoa() -> Any:
    try:
        return importlib.import_module("stoa")
    except ImportError as error:
        raise ImportError(f"Stoix's envs are stoa's: {_util.install_command('stoix')}") from error
