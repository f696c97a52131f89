"""Stoix's API over a pool: an `EnvFactory` of NumPy envs for the actor threads of its Sebulba systems.

Time steps and spaces are stoa's, which must be installed.
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

from jaxvec._errors import UnsupportedSpaceError
from jaxvec._leaves import KeyPath, fold_space, format_path
from jaxvec._results import TimeStep
from jaxvec._vector_env import VectorEnv
from jaxvec.adapters._packages import import_optional
from jaxvec.compat import _base, envpool
from jaxvec.compat.envpool import Task

__all__ = ["EnvFactory", "StoaVectorEnv", "register"]

_stoa = import_optional("stoa", "jaxvec.compat.stoix", "stoix")
# As NumPy's numbers: stoa's are arrays on a device.
_FIRST, _MID, _TERMINATED, _TRUNCATED = (
    np.int8(getattr(_stoa.StepType, name)) for name in ("FIRST", "MID", "TERMINATED", "TRUNCATED")
)


@final
class EnvFactory:
    """Makes pools of equal envs with different seeds, from any thread.

    Where Stoix is imported, the class is registered as a subclass of Stoix's `EnvFactory`.

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
        apply_wrapper_fn: Callable[[Any], Any] = lambda env: env,
        **kwargs: Any,
    ) -> None:
        """Checks the arguments. The envs are started by `__call__`.

        Args:
            task_id: The `env` of `jaxvec.make`: a Gymnasium id, an `EnvSpec`, or a callable; or one of
                EnvPool's Atari tasks, such as `Breakout-v5`, which need the extra `atari`.
            init_seed: Seed of the first env. Each further env gets the next integer.
            apply_wrapper_fn: Function that wraps each `StoaVectorEnv`.
            **kwargs: Arguments of `jaxvec.make` except `autoreset_mode`, which is `SAME_STEP`. For an Atari
                task, also EnvPool's options.

        Raises:
            TypeError: an argument can't be set here.
        """
        for name in {"autoreset_mode", "batch_size", "num_envs"} & kwargs.keys():
            raise TypeError(f"{name} can't be set here: Stoix's actors step all envs that they request")
        self.task_id = task_id
        self.seed: int = init_seed
        self.apply_wrapper_fn = apply_wrapper_fn
        self.lock: threading.Lock = threading.Lock()  # guards `seed`, which several actor threads advance
        self.kwargs = kwargs
        self._task, self._options = envpool.resolve_task(task_id, kwargs)
        stoix = sys.modules.get("stoix.utils.env_factory")
        if stoix is not None:  # Stoix's systems check that a factory is an instance of its class
            stoix.EnvFactory.register(EnvFactory)

    def __call__(self, num_envs: int) -> Any:
        """Starts a pool and returns it as a `StoaVectorEnv`, wrapped by `apply_wrapper_fn`.

        Raises:
            JaxvecError: see `jaxvec.make`.
        """
        with self.lock:
            seed = self.seed
            self.seed += num_envs
        envs = self._task.start(num_envs, autoreset_mode="SAME_STEP", **self._options)
        return self.apply_wrapper_fn(StoaVectorEnv(self._task, envs, seed=seed))


def register(env_name: str = "jaxvec") -> None:
    """Makes Stoix's Sebulba systems use jaxvec where `config.env.env_name` is `env_name`.

    Stoix's `make_factory` chooses a factory by that name. It then makes an `EnvFactory` for
    `config.env.scenario.name` with the keyword arguments of `config.env.kwargs`. Pools are wrapped by
    `config.env.wrapper`, if it is set. Other names keep their meaning. May be called more than once.

    Args:
        env_name: The name. `"envpool"` or `"gymnasium"` replaces Stoix's own factory.

    Raises:
        ImportError: Stoix is not installed.

    Example:
        ```python
        import jaxvec.compat.stoix

        jaxvec.compat.stoix.register("jaxvec")  # before run_experiment(config)
        ```
    """
    module: Any = importlib.import_module("stoix.utils.make_env")
    make_other: Callable[[Any], Any] = module.make_factory

    def make_factory(config: Any) -> Any:
        if config.env.env_name != env_name:
            return make_other(config)
        kwargs = dict(config.env.kwargs)
        if config.env.get("wrapper") is not None:
            hydra: Any = importlib.import_module("hydra.utils")
            kwargs["apply_wrapper_fn"] = hydra.instantiate(config.env.wrapper, _partial_=True)
        return EnvFactory(config.env.scenario.name, config.arch.seed, **kwargs)

    module.make_factory = make_factory


@final
class StoaVectorEnv:
    """Envs with stoa's time steps, on NumPy arrays `[num_envs, ...]`.

    Where an episode ends, the observation is the next episode's first one. `extras["next_obs"]` has the
    observation that each env returned before its reset, unless the pool was made with `final_obs=False`.

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
        """Wraps and owns the envs of a task. `seed` is for the first reset that has no seed itself."""
        self.env = envs
        self._reset_options = task.reset_options
        self._has_games = task.atari is not None
        self.num_envs: int = envs.num_envs
        self._seed: int | None = seed

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Resets all envs and returns a `FIRST` time step.

        Args:
            seed: An int or one seed per env. `None` uses the factory's seeds at the first reset. Later resets
                then continue the envs' random numbers.
            options: Options for every env's `reset`.
        """
        seed = self._seed if seed is None else seed
        self._seed = None
        timestep = self.env.reset(seed=seed, options=self._reset_options if options is None else options)
        self._return = np.zeros(self.num_envs)
        self._length = np.zeros(self.num_envs, np.int64)
        self._score = np.zeros(self.num_envs)  # unclipped rewards of the running game, for Atari tasks
        return self._timestep(np.full(self.num_envs, _FIRST), timestep)

    def step(self, action: Any) -> Any:
        """Steps all envs.

        Args:
            action: Pytree of the action space with leaves `[num_envs, ...]`.

        Returns:
            A time step: `MID`, or `TERMINATED` or `TRUNCATED` where an episode has ended. The discount is 0
            where an episode was terminated. `extras["metrics"]` has `is_terminal_step`, and `episode_return`
            and `episode_length` of the last ended episode. For Atari tasks, these are the unclipped score
            and the length of the last game over all its lives. Declared keys in `extras` are the step's own.
        """
        _, _, terminated, truncated, info = timestep = _base.merge_final_info(self.env.step(action))
        step_type = np.where(terminated, _TERMINATED, np.where(truncated, _TRUNCATED, _MID))
        over = terminated | truncated
        total = info["episode_return"]
        length = info["episode_length"]
        if self._has_games:
            # With `episodic_life`, an episode ends with a life, but the metrics are those of whole games.
            self._score += info["reward"]
            over = info["terminated"].astype(bool) | truncated
            total = self._score
            length = info["elapsed_step"]
        self._return = np.where(over, total, self._return)
        self._length = np.where(over, length, self._length)
        self._score = np.where(over, 0, self._score)
        return self._timestep(step_type, timestep)

    def observation_space(self) -> Any:
        """Returns stoa's space of one env's observations."""
        return _convert(self.env.single_observation_space, "obs")

    def action_space(self) -> Any:
        """Returns stoa's space of one env's actions."""
        return _convert(self.env.single_action_space, "action")

    def close(self) -> None:
        """Closes the pool. May be called more than once."""
        self.env.close()

    def _timestep(self, step_type: Any, timestep: TimeStep[Any]) -> Any:
        extras, last_obs = _base.pop_final_obs(timestep)
        if last_obs is not None:
            extras["next_obs"] = last_obs
        extras["metrics"] = {
            "episode_return": self._return,
            "episode_length": self._length,
            "is_terminal_step": timestep.done,
        }
        return _stoa.TimeStep(
            step_type=step_type,
            reward=timestep.reward,
            discount=timestep.discount,
            observation=timestep.obs,
            extras=extras,
        )


def _convert(space: Space[Any], root: str) -> Any:
    """Converts a Gymnasium space to stoa's. `root` is its name in errors."""

    def leaf(space: Space[Any], path: KeyPath) -> Any:
        name = format_path(path)
        dtype = jax.dtypes.canonicalize_dtype(space.dtype or np.int32)
        match space:
            case spaces.Discrete() if space.start == 0:
                return _stoa.DiscreteSpace(int(space.n), dtype, name)
            case spaces.MultiDiscrete() if not space.start.any():
                return _stoa.MultiDiscreteSpace(space.nvec.astype(dtype), dtype, name)
            case spaces.MultiBinary():
                return _stoa.BoundedArraySpace(space.shape, dtype, 0, 1, name)
            case spaces.Box():
                bounds = space.low.astype(dtype), space.high.astype(dtype)
                return _stoa.BoundedArraySpace(space.shape, dtype, *bounds, name)
            case _:
                raise UnsupportedSpaceError(f"{name}: stoa has no space like {space}; wrap the env")

    return fold_space(
        space,
        leaf,
        root=(root,),
        make_dict=lambda children, path: _stoa.DictSpace(children, format_path(path)),
        make_tuple=lambda children, path: _stoa.TupleSpace(children, format_path(path)),
    )
