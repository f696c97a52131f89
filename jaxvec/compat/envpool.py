"""EnvPool's interface over any Python env: `make`, then `reset`, `step`, `send`, `recv` and `xla`.

`make` resolves the task id to a `Task`, which starts a jaxvec pool with next-step autoreset. An `EnvPool`
calls that pool, and its three subclasses convert time steps to Gymnasium's, old Gym's or dm_env's results.
`compat.stoix` starts its pools by `Task`, too.
"""

from __future__ import annotations

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Self, TypeAlias, final

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import Space
from gymnasium.envs import registration
from numpy.typing import NDArray

import jaxvec
from jaxvec._arguments import NO_SEED, check_action, check_ids, check_indices, check_mask, expand_seeds
from jaxvec._engine.move import Move, Verb
from jaxvec._memory.segment import Rows
from jaxvec._options import AutoresetName
from jaxvec._results import TimeStep
from jaxvec._spec import PoolSpec, declarations
from jaxvec._vector_env import VectorEnv, pool_of
from jaxvec.adapters._packages import install_command
from jaxvec.callbacks import _functions
from jaxvec.callbacks._call import token_of
from jaxvec.callbacks._handle import Handle
from jaxvec.compat import _atari
from jaxvec.compat._base import convert_info, spec_of
from jaxvec.compat._spaces import dm_observation_spec, dm_spec, record_type, to_dm_timestep, to_old_gym

__all__ = [
    "DMEnvPool",
    "EnvPool",
    "EnvSpec",
    "GymEnvPool",
    "GymnasiumEnvPool",
    "list_all_envs",
    "make",
    "make_dm",
    "make_gym",
    "make_gymnasium",
    "make_spec",
]


def split(action: Any, env_id: Any) -> tuple[Any, Any]:
    """Splits an action that is a dict of `action` and `env_id`, as EnvPool allows."""
    if isinstance(action, Mapping) and set(action) == {"action", "env_id"} and env_id is None:
        return action["action"], action["env_id"]
    return action, env_id


# --- EnvPool's `spec`: the task and the options of its pool ----------------------------------------------


@final
@dataclass(frozen=True)
class EnvSpec:
    """The spaces and options of a task and its pool.

    Attributes:
        config: Namedtuple of `num_envs`, `batch_size`, `num_threads`, `seed`, `gym_reset_return_info`,
            `max_episode_steps`, and the task's own options.
        observation_space: Space of one env's observations. With `env_type="gym"`, a space of the old `gym`
            package if that is installed.
        action_space: Space of one env's actions, of the same package.
        gymnasium_observation_space: Gymnasium's space of one env's observations.
        gymnasium_action_space: Gymnasium's space of one env's actions.
        data: Shapes and dtypes of the pool's data.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", num_envs=2) as envs:
            print(envs.spec.config.num_envs, envs.spec.action_space.n)  # 2 2
        ```
    """

    config: Any
    observation_space: Any
    action_space: Any
    gymnasium_observation_space: Space[Any]
    gymnasium_action_space: Space[Any]
    data: PoolSpec = field(repr=False)

    @property
    def reward_threshold(self) -> float | None:
        """The return at which the task counts as solved, if the task defines one."""
        return getattr(self.config, "reward_threshold", None)

    def observation_spec(self) -> Any:
        """Returns a namedtuple of the dm_env specs of one env's `TimeStep.observation`. Needs dm_env."""
        return dm_observation_spec(self.gymnasium_observation_space, self.data)

    def action_spec(self) -> Any:
        """Returns the dm_env spec of one env's action, nested like its space. Needs dm_env."""
        return dm_spec(self.gymnasium_action_space, self.data.action)


# --- `EnvPool`: the methods on NumPy arrays, for all result formats --------------------------------------
# These methods do not make handles of `xla` stale. As with EnvPool, users call `xla` first and reset on the
# host afterwards.


class EnvPool(ABC):
    """A pool with EnvPool's methods. Create it with `make`.

    The pool is closed by `close`, by `with`, or when it is garbage-collected.

    Attributes:
        spec: Spaces and options of the task. `spec.config` contains the arguments of `make`.
        num_envs: Number of envs.
        observation_space: Space of one env's observations, as in EnvPool. CleanRL assigns to this attribute;
            the next three can be assigned, too.
        action_space: Space of one env's actions.
        single_observation_space: Equal to `observation_space`.
        single_action_space: Equal to `action_space`.
        is_vector_env: `True`.
        vector_env: The `jaxvec.VectorEnv` that runs the envs.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", num_envs=4, batch_size=2) as envs:
            envs.async_reset()
            obs, reward, terminated, truncated, info = envs.recv()
            envs.send(np.array([0, 1]), info["env_id"])
            print(obs.shape)  # (2, 4)
        ```
    """

    def __init__(
        self, vector_env: VectorEnv, spec: EnvSpec, *, seed: Any, reset_options: dict[str, Any] | None
    ) -> None:
        """Wraps and owns a pool with next-step autoreset. `seed` is for each env's first reset."""
        self.vector_env = vector_env
        self.spec: Any = spec
        self.num_envs: int = vector_env.num_envs
        self.observation_space: Any = deepcopy(spec.observation_space)
        self.action_space: Any = deepcopy(spec.action_space)
        self.single_observation_space: Any = self.observation_space
        self.single_action_space: Any = self.action_space
        self.is_vector_env = True
        self.metadata: dict[str, Any] = vector_env.metadata
        self.render_mode: str | None = vector_env.render_mode
        self._pool = pool_of(vector_env)
        self._seeds = expand_seeds(seed, len(self))  # of each env's next reset, `NO_SEED` after its first one
        self._reset_options = reset_options
        self._sent: list[int] = []  # pending envs in the order of `send`; unused in an asynchronous pool

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of `make`, and the task's options."""
        return self.spec.config._asdict()

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self.vector_env.closed

    @property
    def all_env_ids(self) -> NDArray[np.int32]:
        """The ids of all envs, `[num_envs]` int32."""
        return np.arange(len(self), dtype=np.int32)

    @property
    def is_async(self) -> bool:
        """Whether `recv` returns only the envs that are ready first, while others are still pending."""
        return self.vector_env.spec.first_ready

    def __len__(self) -> int:
        return self.vector_env.num_envs

    def reset(self, env_id: Any = None) -> Any:
        """Resets all envs, or the envs of `env_id`, `[k]` integers, and returns their results in that order.

        Each env's first reset uses its seed. Later resets continue the env's random numbers. An asynchronous
        pool returns the result of `recv`.

        Raises:
            PendingEnvError: an env of `env_id` is pending, or too few envs would be pending for `recv` of an
                asynchronous pool. No env was reset.
            EnvIdError: an id is duplicated or out of range. No env was reset.
            JaxvecError: see `jaxvec.VectorEnv.reset`.
        """
        ids = self._check_ids(env_id)
        mask = None
        if len(ids) < len(self):
            mask = np.zeros(len(self), np.bool_)
            mask[ids] = True
        seeds = expand_seeds(None, len(self))
        seeds[ids] = self._seeds[ids]
        move = self._pool.move_all(Verb.RESET)
        rows = self._pool.reset(move, seeds=seeds, mask=mask, options=self._reset_options)
        self._seeds[ids] = NO_SEED
        if mask is None:
            self._sent.clear()
        order = None if self.is_async else ids
        return self._finish(rows, order, reset=True, return_info=self.config["gym_reset_return_info"])

    def async_reset(self) -> None:
        """Starts a reset of all envs without waiting. `recv` returns the results."""
        move = self._pool.move_all(Verb.RESET)
        self._pool.reset_async(move, seeds=self._seeds, mask=None, options=self._reset_options)
        self._seeds = expand_seeds(None, len(self))
        self._sent.clear()

    def step(self, action: Any, env_id: Any = None) -> Any:
        """Steps all envs, or the envs of `env_id`, once. An asynchronous pool calls `send`, then `recv`.

        See `send` for the arguments and errors.

        Returns:
            The results of the stepped envs, in the order of `env_id`, or the result of `recv`.
        """
        action, env_id = split(action, env_id)
        if self.is_async or env_id is not None:
            self.send(action, env_id)
            return self.recv()
        actions = check_action(self.vector_env.spec, action, len(self))
        rows = self._pool.step(self._pool.move_all(Verb.STEP), actions)
        return self._finish(rows, None, reset=False)

    def send(self, action: Any, env_id: Any = None) -> None:
        """Starts a step of all envs, or of the envs of `env_id`, without waiting. `recv` returns the results.

        Args:
            action: Array `[k, ...]` or pytree of the action space; or a dict with keys `action` and `env_id`.
            env_id: Ids of the envs, `[k]` integers. `None` for all envs.

        Raises:
            ActionError: the actions have a wrong structure, shape or dtype. No env was stepped.
            EnvIdError: an id is duplicated or out of range. No env was stepped.
            PendingEnvError: an env is already pending. No env was stepped.
            ResetNeededError: an env was never reset. No env was stepped.
            PoolBrokenError, PoolClosedError: the pool is broken or closed.
        """
        action, env_id = split(action, env_id)
        ids = self._check_ids(env_id)
        actions = check_action(self.vector_env.spec, action, len(ids), name_row=lambda row: f"env {ids[row]}")
        self._pool.send(self._pool.move_all(Verb.SEND), ids, actions)
        if not self.is_async:
            self._sent += ids.tolist()

    def recv(self, reset: bool = False, return_info: bool = True) -> Any:
        """Waits for `batch_size` pending envs or, without `batch_size`, for all envs that were sent.

        Args:
            reset: Whether to return the result in the format of `reset` instead of `step`.
            return_info: Whether old Gym's format of `reset` includes the info.

        Returns:
            The results of the envs that are ready first or, without `batch_size`, in the order of `send`.

        Raises:
            PendingEnvError: too few envs are pending. The pool is unchanged.
            JaxvecError: see `jaxvec.VectorEnv.recv`.
        """
        sent = self._sent
        # `wait_for_all` waits for the pending envs, also where these are not all envs of the pool.
        rows = self._pool.recv(self._pool.move_all(Verb.RECV), wait_for_all=0 < len(sent) < len(self))
        self._sent = []
        return self._finish(rows, np.array(sent) if sent else None, reset=reset, return_info=return_info)

    def xla(self) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """Returns `(handle, recv, send, step)` for compiled programs.

        `step(handle, action, env_id=None)` and `recv(handle)` return a handle and the result of `step`.
        `send(handle, action, env_id=None)` returns a handle. A handle is an array `[num_envs, 3]` uint32,
        which can be copied, donated, stacked and saved.

        The functions work under `jit`, `scan`, `vmap` and other transformations, and a handle can be used
        once, as for jaxvec's own functions. The methods on NumPy arrays leave handles valid. So the handles
        of two calls of `xla` are both valid until one is used.
        """
        # As in EnvPool, the handle is a plain array, which users may convert and save: the token of a
        # `Handle`. The functions hold its static part.
        spec = self.vector_env.spec

        def to_handle(handle: Any, function: str) -> Handle:
            dtype = getattr(handle, "dtype", type(handle).__name__)
            if dtype != np.uint32 or handle.ndim != 2 or handle.shape[1] != 3:
                raise TypeError(
                    f"{function} takes the handle that xla() or the last call returned, uint32 of shape "
                    f"({spec.num_envs}, 3), got {dtype} of shape {np.shape(handle)}; under vmap, split it "
                    "like the action"
                )
            return Handle(jnp.asarray(handle), spec, self.vector_env.transport)

        def recv(handle: Any) -> tuple[jax.Array, Any]:
            after, timestep = _functions.recv(to_handle(handle, "recv"))
            return after.token, self._convert(timestep)

        def send(handle: Any, action: Any, env_id: Any = None) -> jax.Array:
            action, env_id = split(action, env_id)
            env_id = None if env_id is None else jnp.atleast_1d(env_id)
            return _functions.send(to_handle(handle, "send"), action, env_id).token

        def step(handle: Any, action: Any, env_id: Any = None) -> tuple[jax.Array, Any]:
            action, env_id = split(action, env_id)
            if spec.first_ready:
                return recv(send(handle, action, env_id))
            before = to_handle(handle, "step")
            if env_id is None:
                after, timestep = _functions.step(before, action)
            else:
                after, timestep = _step_some(before, action, jnp.atleast_1d(env_id))
            return after.token, self._convert(timestep)

        return jnp.asarray(token_of(self._pool, self._pool.move_all(Verb.RECV))), recv, send, step

    def render(self, env_ids: Any = 0) -> NDArray[Any]:
        """Returns the frames, `[k, height, width, 3]`, of one or more envs.

        Raises:
            RuntimeError: the envs were made without `render_mode="rgb_array"`.
            EnvError: an env raised.
        """
        ids = self._check_ids(env_ids)
        frames = self._pool.env_calls.call(Move(Verb.CALL, ids), "render", [()] * len(ids), {})
        if any(frame is None for frame in frames):
            raise RuntimeError('render: the envs return no frames; pass render_mode="rgb_array" to make')
        return np.stack(frames)

    def close(self, **kwargs: Any) -> None:
        """Closes the envs and ends the workers, within about six seconds. May be called more than once."""
        self.vector_env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Closes the pool. Raises the pool's typed error if a program failed because of the pool."""
        self.vector_env.__exit__(*error)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.config.items())})"

    @abstractmethod
    def _convert(self, timestep: TimeStep[Any], *, reset: bool = False, return_info: bool = True) -> Any:
        """Converts a time step of NumPy or JAX arrays to the result of `step`, or of `reset`."""

    def _finish(
        self, rows: Rows, order: NDArray[Any] | None, *, reset: bool, return_info: bool = True
    ) -> Any:
        """Selects and orders the envs' results by `order`, then converts them."""
        if order is not None and not np.array_equal(order, np.arange(len(self))):
            rows = [row[order] for row in rows]
        timestep = self.vector_env.spec.build_timestep(rows)
        return self._convert(timestep, reset=reset, return_info=return_info)

    def _check_ids(self, env_id: Any) -> NDArray[Any]:
        """Returns `[k]` ids. `env_id` may be a single number."""
        return check_indices(env_id, len(self), "env_id", from_end=False)


def _step_some(handle: Handle, action: Any, env_id: Any) -> tuple[Handle, TimeStep]:
    check_ids(env_id.dtype, env_id.shape)
    ids = env_id.astype(np.uint32)
    # Only the generation is gathered from the token. Gathering clips an id that is out of range, so the ids
    # must come from the caller for the pool to reject them.
    part = jnp.stack([jnp.broadcast_to(handle.token[0, 0], ids.shape), ids, handle.token[ids, 2]], axis=1)
    moved, timestep = _functions.step(handle.next(part), action)
    return handle.next(handle.token.at[ids].set(moved.token)), timestep


# --- Tasks: envs with their options, including the Atari tasks of EnvPool --------------------------------

TaskId: TypeAlias = str | registration.EnvSpec | Callable[..., Any]

_NO_LIMIT = 2**31 - 1  # EnvPool's `max_episode_steps` of a task without a limit


@dataclass(frozen=True)
class Task:
    """A task id with its options resolved: the arguments of `jaxvec.make`, and EnvPool's view of the task.

    Attributes:
        env: Env argument of `jaxvec.make`.
        env_kwargs: Keyword arguments of the env.
        info: Declared keys of the envs' info.
        atari: Options of an Atari task, otherwise `None`.
        reset_options: Options for the envs' `reset`, except where an env resets itself.
    """

    env: Any
    env_kwargs: dict[str, Any]
    info: Mapping[str, Any]
    atari: _atari.AtariOptions | None = None
    reset_options: dict[str, Any] | None = None

    def start(
        self,
        num_envs: int,
        *,
        autoreset_mode: AutoresetName,
        info: Mapping[str, Any] | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> VectorEnv:
        """Starts a pool. `info` declares more keys of the envs' info; see `jaxvec.make` for all arguments."""
        declared = {**self.info, **declarations(info)}
        try:
            return jaxvec.make(
                self.env, num_envs, info=declared, autoreset_mode=autoreset_mode, **kwargs, **self.env_kwargs
            )
        except gymnasium.error.Error as error:
            if str(self.env).endswith("-v5") and importlib.util.find_spec("ale_py") is None:
                error.add_note(f"EnvPool's Atari tasks need ALE: {install_command('atari')}")
            raise

    def options(self, envs: VectorEnv) -> dict[str, Any]:
        """Returns the options of the task, as in EnvPool's `spec.config`."""
        if self.atari is not None:
            return asdict(self.atari)
        # The env's own spec contains the arguments of `gymnasium.make`, for example the time limit.
        spec = spec_of(envs)
        return {
            **self.env_kwargs,
            "reward_threshold": getattr(spec, "reward_threshold", None),
            "max_episode_steps": getattr(spec, "max_episode_steps", None) or _NO_LIMIT,
        }


def resolve_task(task_id: TaskId, kwargs: Mapping[str, Any]) -> tuple[Task, dict[str, Any]]:
    """Returns the task, and the arguments of `jaxvec.make`. Other arguments are the task's options."""
    parameters = inspect.signature(jaxvec.make).parameters
    pool_options = {key: value for key, value in kwargs.items() if key in parameters}
    options = {key: value for key, value in kwargs.items() if key not in parameters}
    ale_id = _atari.find(task_id)
    if ale_id is None:
        return Task(task_id, options, {}), pool_options
    atari = _atari.parse(str(task_id), options)
    task = Task(partial(_atari.build, ale_id, atari), {}, _atari.INFO, atari, _atari.NEW_GAME)
    return task, pool_options


def list_all_envs() -> list[str]:
    """Returns the ids of all tasks: Gymnasium's ids, and EnvPool's Atari tasks if ALE is installed.

    Example:
        ```python
        from jaxvec.compat import envpool

        print("CartPole-v1" in envpool.list_all_envs())  # True
        ```
    """
    return sorted({*gymnasium.registry, *_atari.tasks()})


# --- Result formats: Gymnasium's, old Gym's and dm_env's -------------------------------------------------


@final
class GymEnvPool(EnvPool):
    """A pool with old Gym's results: `reset` returns observations, `step` four values.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", "gym", num_envs=2) as envs:
            obs = envs.reset()
            obs, reward, done, info = envs.step(np.array([0, 1]))
            print(obs.shape)  # (2, 4)
        ```
    """

    def _convert(self, timestep: TimeStep[Any], *, reset: bool = False, return_info: bool = True) -> Any:
        info = convert_info(timestep)
        if reset:
            return (timestep.obs, info) if return_info else timestep.obs
        return timestep.obs, timestep.reward, timestep.done, info


@final
class GymnasiumEnvPool(EnvPool, gymnasium.vector.VectorEnv[Any, Any, Any]):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """A pool with Gymnasium's results, which is also a `gymnasium.vector.VectorEnv`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", "gymnasium", num_envs=2) as envs:
            handle, recv, send, step = envs.xla()
            obs, info = envs.reset()
            handle, (obs, reward, terminated, truncated, info) = jax.jit(step)(handle, jnp.array([0, 1]))
            print(obs.shape)  # (2, 4)
        ```
    """

    def reset(self, env_id: Any = None, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Resets all envs, or the envs of `env_id` or of `options["reset_mask"]`; see `EnvPool.reset`.

        Args:
            env_id: Ids of the envs, `[k]` integers.
            seed: Replaces the pool's seed: an int (env *i* gets `seed + i`) or one seed per env.
            options: May contain `reset_mask`, `[num_envs]` bool.

        Raises:
            ValueError: an option is unknown, or both `env_id` and a mask are given.
        """
        unknown = sorted(set(options or {}) - {"reset_mask"})
        if unknown:
            raise ValueError(f"options: {unknown} cannot be passed to the envs; only reset_mask is supported")
        mask = check_mask((options or {}).get("reset_mask"), len(self))
        if mask is not None:
            if env_id is not None:
                raise ValueError('give env_id or options["reset_mask"], not both')
            env_id = np.flatnonzero(mask)
        if seed is not None:
            self._seeds = expand_seeds(seed, len(self))
        return super().reset(env_id)

    def _convert(self, timestep: TimeStep[Any], *, reset: bool = False, return_info: bool = True) -> Any:
        info = convert_info(timestep)
        if reset:
            return timestep.obs, info
        return timestep.obs, timestep.reward, timestep.terminated, timestep.truncated, info


@final
class DMEnvPool(EnvPool):
    """A pool with batches of dm_env's `TimeStep` as results, or of a stand-in if dm_env is not installed.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", "dm", num_envs=2) as envs:
            timestep = envs.reset()
            timestep = envs.step(np.array([0, 1]))
            print(timestep.observation.obs.shape, timestep.reward)  # (2, 4) [1. 1.]
        ```
    """

    def observation_spec(self) -> Any:
        """Returns the dm_env specs of one env's `TimeStep.observation`; see `EnvSpec`."""
        return self.spec.observation_spec()

    def action_spec(self) -> Any:
        """Returns the dm_env spec of one env's action; see `EnvSpec`."""
        return self.spec.action_spec()

    def _convert(self, timestep: TimeStep[Any], *, reset: bool = False, return_info: bool = True) -> Any:
        return to_dm_timestep(timestep)


# --- `make` and its variants -----------------------------------------------------------------------------

_POOL_CLASSES = {"gymnasium": GymnasiumEnvPool, "gym": GymEnvPool, "dm": DMEnvPool}
_DEFAULTS: dict[str, Any] = {
    "num_envs": 1,
    "batch_size": 0,
    "num_threads": 0,
    "seed": 42,
    "gym_reset_return_info": None,
    "thread_affinity_offset": -1,
}


def make(task_id: TaskId, env_type: str = "gymnasium", **kwargs: Any) -> Any:
    """Starts a pool of any Python env with EnvPool's interface.

    Args:
        task_id: A Gymnasium id, an `EnvSpec`, a callable as for `jaxvec.make`, or one of EnvPool's Atari
            tasks, such as `Breakout-v5`, which need the extra `atari`. With `episodic_life`, a lost life ends
            the episode, and the next episode continues the same game.
        env_type: `"gymnasium"`; `"gym"` for old Gym's results, and its spaces where it is installed; or
            `"dm"` for dm_env's `TimeStep`.
        **kwargs: The arguments below, other arguments of `jaxvec.make` such as `info`, and the task's own
            options. These are EnvPool's options for an Atari task, the arguments of `gymnasium.make` such as
            `max_episode_steps` for an id, or the arguments of the callable.

    Keyword Args:
        num_envs (int): Number of envs. Default: 1.
        batch_size (int): Number of envs that `recv` returns, those that are ready first. Default: 0, for all.
        num_threads (int): Number of worker processes. Default: 0, for the number of usable cores.
        seed (int): Seed of env 0 (env *i* gets `seed + i`) or one seed per env, for each env's first reset.
            Default: 42.
        gym_reset_return_info (bool): Whether `reset` returns `(obs, info)` with `env_type="gym"`. By default,
            it returns observations only.
        thread_affinity_offset (int): Ignored. The operating system schedules the workers.

    Returns:
        A `GymnasiumEnvPool`, `GymEnvPool` or `DMEnvPool`. An env resets itself in the step after the step
        that ended its episode. `info` has `env_id`, `elapsed_step`, `reward`, `terminated`,
        `TimeLimit.truncated`, the keys declared with `info=`, and for Atari tasks `lives` and `ram`.

    Raises:
        ValueError, TypeError: an argument is invalid.
        gymnasium.error.Error: the task does not exist.
        JaxvecError: see `jaxvec.make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2) as envs:
            obs, info = envs.reset()
            obs, reward, terminated, truncated, info = envs.step(np.array([0, 1]))
            print(obs.shape, info["elapsed_step"])  # (2, 4) [1 1]
        ```
    """
    if env_type not in _POOL_CLASSES:
        raise ValueError(f'env_type must be "gymnasium", "gym" or "dm", not {env_type!r}')
    config, pool_options, task = _split_kwargs(task_id, kwargs)
    envs = task.start(config["num_envs"], **pool_options)
    try:
        spec = _build_spec(config, task, envs, env_type)
        return _POOL_CLASSES[env_type](envs, spec, seed=config["seed"], reset_options=task.reset_options)
    except BaseException:
        envs.close()
        raise


make_gymnasium: Callable[..., GymnasiumEnvPool] = partial(make, env_type="gymnasium")
make_gym: Callable[..., GymEnvPool] = partial(make, env_type="gym")
make_dm: Callable[..., DMEnvPool] = partial(make, env_type="dm")


def make_spec(task_id: TaskId, **kwargs: Any) -> EnvSpec:
    """Returns the `spec` of a pool. Builds one env in a worker to learn the spaces, and closes it again.

    See `make` for the arguments and errors.

    Example:
        ```python
        from jaxvec.compat import envpool

        spec = envpool.make_spec("CartPole-v1", num_envs=2)
        print(spec.observation_space.shape, spec.config.max_episode_steps)  # (4,) 500
        ```
    """
    config, pool_options, task = _split_kwargs(task_id, kwargs)
    pool_options |= {"num_workers": 1, "batch_size": 1}
    with task.start(1, **pool_options) as envs:
        return _build_spec(config, task, envs, "gymnasium")


def _split_kwargs(task_id: TaskId, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Task]:
    """Splits keyword arguments into EnvPool's, with defaults, and those of `jaxvec.make` and of the task."""
    if "autoreset_mode" in kwargs:
        raise TypeError(
            "autoreset_mode can't be set here: EnvPool always uses NEXT_STEP; use jaxvec.make for other modes"
        )
    config = {key: kwargs.get(key, default) for key, default in _DEFAULTS.items()}
    others = {key: value for key, value in kwargs.items() if key not in _DEFAULTS}
    task, pool_options = resolve_task(task_id, others)
    pool_options["autoreset_mode"] = "NEXT_STEP"
    pool_options["batch_size"] = config["batch_size"] or None
    # `num_workers` of `jaxvec.make` takes precedence over EnvPool's `num_threads`.
    if config["num_threads"]:
        pool_options.setdefault("num_workers", min(config["num_threads"], config["num_envs"]))
    config["batch_size"] = config["batch_size"] or config["num_envs"]
    return config, pool_options, task


def _build_spec(config: dict[str, Any], task: Task, envs: VectorEnv, env_type: str) -> EnvSpec:
    if config["gym_reset_return_info"] is None:
        config = {**config, "gym_reset_return_info": env_type != "gym"}
    options = {**config, **task.options(envs)}
    translate = to_old_gym if env_type == "gym" else lambda space: space
    return EnvSpec(
        config=record_type("Config", tuple(options))(*options.values()),
        observation_space=translate(envs.single_observation_space),
        action_space=translate(envs.single_action_space),
        gymnasium_observation_space=envs.single_observation_space,
        gymnasium_action_space=envs.single_action_space,
        data=envs.spec,
    )
