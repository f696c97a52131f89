"""EnvPool's interface over any Python env: `make`, then `reset`, `step`, `send`, `recv` and `xla`."""

from __future__ import annotations

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, final

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import Space
from gymnasium.envs import registration
from numpy.typing import NDArray

import jaxvec
from jaxvec._arguments import NO_SEED, check_env_id, check_ids, check_mask, check_on_host, expand_seeds
from jaxvec._config import Workers
from jaxvec._dispatch.move import Move, Verb
from jaxvec._errors import EnvIdError
from jaxvec._memory.segment import Rows
from jaxvec._spec import PoolSpec, TimeStep
from jaxvec._util import install_command
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _functions
from jaxvec.callbacks._call import Handle, token_of
from jaxvec.compat import _atari
from jaxvec.compat._base import convert_info
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
    """Takes apart an action that is a dict of `action` and `env_id`, as EnvPool allows."""
    if isinstance(action, Mapping) and set(action) == {"action", "env_id"} and env_id is None:
        return action["action"], action["env_id"]
    return action, env_id


# ----------------------------------------------------------------------------------------------------------
# EnvPool's `spec`: the task and the options of its pool.
# ----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class EnvSpec:
    """The spaces and options of a task and its pool.

    Attributes:
        config: namedtuple: `num_envs`, `batch_size`, `num_threads`, `seed`, `gym_reset_return_info`,
            `max_episode_steps`, and the task's own options.
        observation_space: of one env; of the old `gym` with `env_type="gym"`, if that is installed.
        action_space: likewise.
        gymnasium_observation_space: of one env.
        gymnasium_action_space: of one env.
        data: the shapes and dtypes of the pool's data.

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
        """The reward at which the task counts as solved, if it says so."""
        return getattr(self.config, "reward_threshold", None)

    def observation_spec(self) -> Any:
        """Returns dm_env's specs of `TimeStep.observation`, of one env, in a namedtuple.

        Raises:
            ImportError: dm_env is not installed.
        """
        return dm_observation_spec(self.gymnasium_observation_space, self.data)

    def action_spec(self) -> Any:
        """Returns dm_env's spec of one env's action, nested in dicts and tuples as its space is.

        Raises:
            ImportError: dm_env is not installed.
        """
        return dm_spec(self.gymnasium_action_space, self.data.action)


# ----------------------------------------------------------------------------------------------------------
# `xla`: EnvPool's three functions for compiled programs, made of jaxvec's functions.
#
# As in EnvPool the handle is a plain array, which users may convert and save: the token of a `Handle`. The
# functions keep its static part.
# ----------------------------------------------------------------------------------------------------------


def make_xla(
    envs: VectorEnv, convert: Callable[[TimeStep], Any]
) -> tuple[jax.Array, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Makes a fresh handle, `recv`, `send` and `step`; see `EnvPool.xla`.

    Args:
        envs: the pool.
        convert: from a time step to what users get.
    """
    spec, transport = envs.spec, envs.transport

    def whole(handle: Any, verb: str) -> Handle:
        """Returns jaxvec's handle of which users have the array."""
        dtype, shape = getattr(handle, "dtype", None), getattr(handle, "shape", ())
        if dtype != np.uint32 or len(shape) != 2 or shape[1] != 3:
            what = type(handle).__name__ if dtype is None else f"{dtype} of shape {shape}"
            raise TypeError(
                f"{verb} takes the handle that xla() or the last call returned, uint32 of shape "
                f"({spec.num_envs}, 3), got {what}; under vmap, split it like the action"
            )
        return Handle(jnp.asarray(handle), spec, transport)

    def recv(handle: Any) -> tuple[jax.Array, Any]:
        """Waits for `batch_size` envs of those in flight; see `jaxvec.recv`."""
        after, timestep = _functions.recv(whole(handle, "recv"))
        return after.token, convert(timestep)

    def send(handle: Any, action: Any, env_id: Any = None) -> jax.Array:
        """Starts a step of some envs, and does not wait for it; see `jaxvec.send`."""
        action, env_id = split(action, env_id)
        env_id = None if env_id is None else jnp.atleast_1d(env_id)
        return _functions.send(whole(handle, "send"), action, env_id).token

    def step(handle: Any, action: Any, env_id: Any = None) -> tuple[jax.Array, Any]:
        """Steps all envs once, or those of `env_id`; with `batch_size` sends and receives."""
        action, env_id = split(action, env_id)
        if spec.first_ready:
            return recv(send(handle, action, env_id))
        before = whole(handle, "step")
        if env_id is None:
            after, timestep = _functions.step(before, action)
        else:
            after, timestep = _step_some(before, action, jnp.atleast_1d(env_id))
        return after.token, convert(timestep)

    return jnp.asarray(token_of(envs.pool, envs.pool.move_all(Verb.RECV))), recv, send, step


def _step_some(handle: Handle, action: Any, env_id: Any) -> tuple[Handle, TimeStep]:
    check_ids(env_id.dtype, env_id.shape)
    ids = env_id.astype(np.uint32)
    # Not taken out of the token: an id that the pool doesn't have would be taken for one that it has.
    part = jnp.stack([jnp.broadcast_to(handle.token[0, 0], ids.shape), ids, handle.token[ids, 2]], axis=1)
    moved, timestep = _functions.step(handle.next(part), action)
    return handle.next(handle.token.at[ids].set(moved.token)), timestep


# ----------------------------------------------------------------------------------------------------------
# `EnvPool`: the methods on NumPy arrays, for all result formats.
#
# Handles from `xla` stay fresh while these methods move envs, as in EnvPool: its users take the handle first
# and reset on the host afterwards.
# ----------------------------------------------------------------------------------------------------------


class EnvPool(ABC):
    """A pool with EnvPool's methods. Made by `make`; closed by `close`, `with` or its end.

    Attributes:
        spec: of the task; `spec.config` is what the pool was made with.
        num_envs: how many.
        observation_space: of one env, as in EnvPool. CleanRL sets it; the next three may be set, too.
        action_space: of one env.
        single_observation_space: the same as `observation_space`.
        single_action_space: the same as `action_space`.
        is_vector_env: true.
        vector_env: the pool below, `jaxvec.VectorEnv`.

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
        self,
        vector_env: VectorEnv,
        spec: EnvSpec,
        *,
        seed: Any,
        reset_options: dict[str, Any] | None,
    ) -> None:
        """Makes the face of a pool.

        Args:
            vector_env: with next-step autoreset.
            spec: of the task.
            seed: as `jaxvec.VectorEnv.reset`; each env's first reset takes its own.
            reset_options: for the envs' `reset` when it is called from outside.
        """
        self.vector_env = vector_env
        self.spec: Any = spec
        self.num_envs: int = vector_env.num_envs
        self.observation_space: Any = spec.observation_space
        self.action_space: Any = spec.action_space
        self.single_observation_space: Any = spec.observation_space
        self.single_action_space: Any = spec.action_space
        self.is_vector_env = True
        self._pool = vector_env.pool
        self._seeds = self._expand(seed)
        self._reset_options = reset_options
        self._sent: list[int] = []  # those in flight that `send` has sent, unless `recv` returns some of all

    @property
    def config(self) -> dict[str, Any]:
        """What the pool was made with."""
        return self.spec.config._asdict()

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self.vector_env.closed

    @property
    def all_env_ids(self) -> NDArray[np.int32]:
        """`[num_envs]` int32, 0 and so on."""
        return np.arange(len(self), dtype=np.int32)

    @property
    def is_async(self) -> bool:
        """Whether `recv` returns some envs, the first that are ready, while others are in flight."""
        return self.vector_env.spec.first_ready

    def __len__(self) -> int:
        return self.vector_env.num_envs

    def reset(self, env_id: Any = None) -> Any:
        """Resets all envs, or those of `env_id`, `[k]` integers, and returns their rows in that order.

        Each env's first reset is with its seed, later ones go on with its random numbers. Of an
        asynchronous pool the rows are those of `recv`.

        Raises:
            PendingEnvError: one of `env_id` is in flight or, of an asynchronous pool, too few would be for
                `recv`; nothing was reset.
            EnvIdError: an id comes twice, or is none of the pool's; nothing was reset.
            JaxvecError: and all that `jaxvec.VectorEnv.reset` raises.
        """
        ids = self._check_ids(env_id)
        mask = None
        if len(ids) < len(self):
            mask = np.zeros(len(self), np.bool_)
            mask[ids] = True
        rows = self._pool.reset(
            self._pool.move_all(Verb.RESET), seeds=self._seeds_of(ids), mask=mask, options=self._reset_options
        )
        self._seeds[ids] = NO_SEED
        if mask is None:
            self._sent.clear()
        order = None if self.is_async else ids
        return self._finish(rows, order, reset=True, return_info=self.config["gym_reset_return_info"])

    def async_reset(self) -> None:
        """Starts a reset of all envs, and does not wait for it; `recv` does."""
        ids = np.arange(len(self))
        seeds = self._seeds_of(ids)
        self._pool.reset_async(
            self._pool.move_all(Verb.RESET), seeds=seeds, mask=None, options=self._reset_options
        )
        self._seeds[ids] = NO_SEED
        self._sent.clear()

    def step(self, action: Any, env_id: Any = None) -> Any:
        """Steps all envs, or those of `env_id`, once; of an asynchronous pool `send`, then `recv`.

        Args and errors are those of `send`.

        Returns:
            The rows of the envs that were stepped, in the order of `env_id`; or those of `recv`.
        """
        action, env_id = split(action, env_id)
        if self.is_async or env_id is not None:
            self.send(action, env_id)
            return self.recv()
        actions = check_on_host(self.vector_env.spec, action, len(self))
        rows = self._pool.step(self._pool.move_all(Verb.STEP), actions)
        return self._finish(rows, None, reset=False)

    def send(self, action: Any, env_id: Any = None) -> None:
        """Starts a step of all envs, or of those of `env_id`, and does not wait for it; `recv` does.

        Args:
            action: `[k, ...]`, or pytree of the action space; or a dict of it as `action` and of `env_id`.
            env_id: `[k]` integers.

        Raises:
            ActionError: wrong structure, shape or dtype; nothing was sent.
            EnvIdError: an id comes twice, or is none of the pool's; nothing was sent.
            PendingEnvError: an env is in flight already; nothing was sent.
            ResetNeededError: an env was never reset; nothing was sent.
            PoolBrokenError, PoolClosedError: the pool is broken, or closed.
        """
        action, env_id = split(action, env_id)
        ids = self._check_ids(env_id)
        actions = check_on_host(self.vector_env.spec, action, len(ids))
        self._pool.send(self._pool.move_all(Verb.SEND), ids, actions)
        if not self.is_async:
            self._sent += ids.tolist()

    def recv(self, reset: bool = False, return_info: bool = True) -> Any:
        """Waits for envs in flight: for `batch_size` of them or, without, for those that were sent.

        Args:
            reset: whether to return what `reset` does, and not `step`.
            return_info: of old Gym's reset, whether to return the info, too.

        Returns:
            The rows of the first that are ready or, without `batch_size`, in the order sent.

        Raises:
            PendingEnvError: too few envs are in flight; the pool is as it was.
            JaxvecError: and all that `jaxvec.VectorEnv.recv` raises.
        """
        sent = self._sent
        part = 0 < len(sent) < len(self)
        rows = self._pool.recv(self._pool.move_all(Verb.RECV), everything=part)
        self._sent = []
        return self._finish(rows, np.array(sent) if sent else None, reset=reset, return_info=return_info)

    def xla(self) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """Returns `(handle, recv, send, step)`, to be used in compiled programs.

        `step(handle, action, env_id=None)` and `recv(handle)` return a handle and what `step` returns
        here, `send(handle, action, env_id=None)` a handle, which is an array, `[num_envs, 3]` uint32: it can
        be copied, donated, stacked and saved as any other. They are jaxvec's own verbs: they work under
        `jit`, `scan`, `vmap` and the like, keep its promises, and a handle can be used once. The verbs on
        NumPy leave handles fresh; so two handles of two calls of `xla` are fresh until one is used.
        """
        return make_xla(self.vector_env, self._convert)

    def render(self, env_ids: Any = 0) -> NDArray[Any]:
        """Returns frames, `[k, height, width, 3]`, of the envs of `env_ids`, one or more.

        Raises:
            RuntimeError: the envs have no frames: they were made without `render_mode="rgb_array"`.
            EnvError: an env raised.
        """
        ids = self._check_ids(env_ids)
        frames = self._pool.env_calls.call(Move(Verb.CALL, ids), "render", [()] * len(ids), {})
        if any(frame is None for frame in frames):
            raise RuntimeError('there are no frames; make the pool with render_mode="rgb_array"')
        return np.stack(frames)

    def close(self, **kwargs: Any) -> None:
        """Closes the envs and ends the workers, which have five seconds to do so. Twice is fine."""
        self.vector_env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes; where a program failed because of the pool, raises the pool's own, typed error."""
        self.vector_env.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.config.items())})"

    @abstractmethod
    def _convert(self, timestep: TimeStep, *, reset: bool = False, return_info: bool = True) -> Any:
        """Returns a time step, on NumPy or in JAX, as users expect it from `step`, or from `reset`."""

    def _finish(
        self, rows: Rows, order: NDArray[Any] | None, *, reset: bool, return_info: bool = True
    ) -> Any:
        """Returns the rows of all envs in another order, or some of them; or as they are."""
        if order is not None and not np.array_equal(order, np.arange(len(self))):
            rows = [row[order] for row in rows]
        timestep = self.vector_env.spec.build_timestep(rows)
        return self._convert(timestep, reset=reset, return_info=return_info)

    def _expand(self, seed: Any) -> NDArray[np.int64]:
        seeds = expand_seeds(seed, len(self))
        return np.full(len(self), NO_SEED) if seeds is None else seeds

    def _seeds_of(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        seeds = np.full(len(self), NO_SEED)
        seeds[ids] = self._seeds[ids]
        return seeds

    def _check_ids(self, env_id: Any) -> NDArray[Any]:
        """Returns `[k]` ids; a single one may come as a number."""
        ids = check_env_id(None if env_id is None else np.atleast_1d(env_id), len(self))
        wrong = ids[(ids < 0) | (ids >= len(self))]
        if len(wrong):
            raise EnvIdError(
                f"env_id {wrong[0]} is out of range for a pool of {len(self)} envs (0 to {len(self) - 1})"
            )
        if len(np.unique(ids)) < len(ids):
            raise EnvIdError(f"env_id names an env twice: {ids.tolist()}")
        return ids


# ----------------------------------------------------------------------------------------------------------
# Tasks: envs with their options, including the Atari tasks of EnvPool.
# ----------------------------------------------------------------------------------------------------------

TaskId: TypeAlias = str | registration.EnvSpec | Callable[..., Any]

NO_LIMIT = 2**31 - 1  # EnvPool's `max_episode_steps` of a task without a limit


@dataclass(frozen=True)
class Task:
    """What `jaxvec.make` needs to know of a task, and what EnvPool says of it.

    Attributes:
        env, env_kwargs: as of `jaxvec.make`.
        info: keys of the envs' info that are declared.
        atari: the options, of an Atari task.
        reset_options: for the envs' `reset` when it is called from outside.
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
        autoreset_mode: str,
        info: Mapping[str, Any] | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> VectorEnv:
        """Starts a pool.

        Args:
            num_envs: how many envs.
            autoreset_mode: as of `jaxvec.make`.
            info: more keys of the envs' info, as of `jaxvec.make`.
            **kwargs: of `jaxvec.make`.
        """
        if isinstance(info, Iterable) and not isinstance(info, (str, Mapping)):
            info = dict.fromkeys(info)
        if self.info and isinstance(info, Mapping | None):
            info = {**self.info, **(info or {})}
        try:
            return jaxvec.make(
                self.env, num_envs, info=info, autoreset_mode=autoreset_mode, **kwargs, **self.env_kwargs
            )
        except gymnasium.error.Error as error:
            if str(self.env).endswith("-v5") and importlib.util.find_spec("ale_py") is None:
                error.add_note(f"EnvPool's Atari tasks need ALE: {install_command('atari')}")
            raise

    def options(self, envs: VectorEnv) -> dict[str, Any]:
        """Returns the options of the task, as EnvPool's `spec.config` has them."""
        if self.atari is not None:
            return asdict(self.atari)
        threshold, limit = None, None
        if isinstance(
            self.env, str | registration.EnvSpec
        ):  # gymnasium.make made it, and knows all that was asked of it
            (spec,) = envs.pool.env_calls.call(Move(Verb.CALL, np.arange(1)), "spec", [()], {})
            threshold, limit = spec.reward_threshold, spec.max_episode_steps
        return {**self.env_kwargs, "reward_threshold": threshold, "max_episode_steps": limit or NO_LIMIT}


def resolve_task(task_id: TaskId, kwargs: Mapping[str, Any]) -> tuple[Task, dict[str, Any]]:
    """Returns the task of this id, and those of `kwargs` that are `jaxvec.make`'s; the others are the task's.

    Raises:
        TypeError: an Atari task has no such option.
    """
    ours = inspect.signature(jaxvec.make).parameters
    pool_options = {key: value for key, value in kwargs.items() if key in ours}
    options = {key: value for key, value in kwargs.items() if key not in ours}
    ale_id = _atari.find(task_id)
    if ale_id is None:
        return Task(task_id, options, {}), pool_options
    atari = _atari.parse(str(task_id), options)
    task = Task(partial(_atari.build, ale_id, atari), {}, _atari.INFO, atari, _atari.NEW_GAME)
    return task, pool_options


def list_all_envs() -> list[str]:
    """Returns the ids of all tasks: Gymnasium's, and EnvPool's Atari ones if ALE is installed.

    Example:
        ```python
        from jaxvec.compat import envpool

        print("CartPole-v1" in envpool.list_all_envs())  # True
        ```
    """
    return sorted({*gymnasium.registry, *_atari.tasks()})


# ----------------------------------------------------------------------------------------------------------
# Result formats: Gymnasium's, old Gym's and dm_env's.
# ----------------------------------------------------------------------------------------------------------


@final
class GymEnvPool(EnvPool):
    """Returns what old Gym did: `reset` the observations, `step` `(obs, reward, done, info)`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", "gym", num_envs=2) as envs:
            obs = envs.reset()
            obs, reward, done, info = envs.step(np.array([0, 1]))
            print(obs.shape)  # (2, 4)
        ```
    """

    def _convert(self, timestep: TimeStep, *, reset: bool = False, return_info: bool = True) -> Any:
        info = convert_info(timestep)
        if reset:
            return (timestep.obs, info) if return_info else timestep.obs
        return timestep.obs, timestep.reward, timestep.terminated | timestep.truncated, info


@final
class GymnasiumEnvPool(EnvPool, gymnasium.vector.VectorEnv[Any, Any, Any]):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """Returns what Gymnasium does: `reset` `(obs, info)`, `step` five values; and is a `VectorEnv` of its.

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

    def __init__(self, vector_env: VectorEnv, spec: EnvSpec, **kwargs: Any) -> None:
        """Makes the face of a pool; see `EnvPool`."""
        super().__init__(vector_env, spec, **kwargs)
        self.metadata: dict[str, Any] = vector_env.metadata
        self.render_mode: str | None = vector_env.render_mode

    def reset(
        self,
        env_id: Any = None,
        *,
        seed: Any = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Resets all envs, or those of `env_id` or of `options["reset_mask"]`; see `EnvPool.reset`.

        Args:
            env_id: `[k]` integers.
            seed: takes the place of the pool's; an int (env *i* gets `seed + i`) or one for each env.
            options: may have a `reset_mask`, `[num_envs]` bool.
        """
        unknown = sorted(set(options or {}) - {"reset_mask"})
        if unknown:
            raise ValueError(f"options: a pool knows reset_mask, not {unknown}")
        mask = check_mask((options or {}).get("reset_mask"), len(self))
        if mask is not None:
            if env_id is not None:
                raise ValueError('give env_id or options["reset_mask"], not both')
            env_id = np.flatnonzero(mask)
        if seed is not None:
            self._seeds = self._expand(seed)
        return super().reset(env_id)

    def _convert(self, timestep: TimeStep, *, reset: bool = False, return_info: bool = True) -> Any:
        info = convert_info(timestep)
        if reset:
            return timestep.obs, info
        return timestep.obs, timestep.reward, timestep.terminated, timestep.truncated, info


@final
class DMEnvPool(EnvPool):
    """Returns batches of dm_env's `TimeStep`: its own class if it is installed, else one like it.

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
        """Returns dm_env's specs of one env's `TimeStep.observation`; see `EnvSpec`."""
        return self.spec.observation_spec()

    def action_spec(self) -> Any:
        """Returns dm_env's spec of one env's action; see `EnvSpec`."""
        return self.spec.action_spec()

    def _convert(self, timestep: TimeStep, *, reset: bool = False, return_info: bool = True) -> Any:
        return to_dm_timestep(timestep)


# ----------------------------------------------------------------------------------------------------------
# `make` and its variants.
# ----------------------------------------------------------------------------------------------------------

_FACES = {"gymnasium": GymnasiumEnvPool, "gym": GymEnvPool, "dm": DMEnvPool}
_DEFAULTS: dict[str, Any] = {
    "num_envs": 1,
    "batch_size": 0,
    "num_threads": 0,
    "seed": 42,
    "gym_reset_return_info": None,
    "thread_affinity_offset": -1,
}


def make(task_id: TaskId, env_type: str = "gymnasium", **kwargs: Any) -> Any:
    """Starts a pool of any Python env behind EnvPool's interface.

    Args:
        task_id: a Gymnasium id, an `EnvSpec`, a callable as for `jaxvec.make`, or one of EnvPool's Atari
            tasks, such as `Breakout-v5`, for which there is the extra `atari`. With `episodic_life` a lost
            life ends the episode, and the next one goes on with the same game.
        env_type: `"gymnasium"`; `"gym"`, old Gym's `reset` and `step` of four values, and its spaces where
            it is installed; or `"dm"`, dm_env's `TimeStep`.
        **kwargs: EnvPool's, which are below; others of `jaxvec.make`, such as `info`; and the task's own: for
            an Atari task EnvPool's options, for others `gymnasium.make`'s, such as `max_episode_steps`, or
            the callable's.

    Keyword Args:
        num_envs (int): how many envs; 1 by default.
        batch_size (int): how many of them `recv` returns, the first that are ready; 0, the default, for all.
        num_threads (int): how many worker processes; 0, the default, for as many as there are usable cores.
        seed (int): that of env 0 (env *i* gets `seed + i`), or one for each env, for each env's first reset;
            42 by default.
        gym_reset_return_info (bool): with `env_type="gym"`, whether `reset` returns `(obs, info)`; by default
            the observations alone.
        thread_affinity_offset (int): is ignored: workers run where the system lets them.

    Returns:
        A `GymnasiumEnvPool`, `GymEnvPool` or `DMEnvPool`. An env resets itself in the step after the one
        that ended its episode. `info` has `env_id`, `elapsed_step`, `reward`, `terminated`,
        `TimeLimit.truncated`, what is declared with `info=`, and for Atari tasks `lives` and `ram`.

    Raises:
        ValueError, TypeError: a bad argument.
        gymnasium.error.Error: there is no such task.
        JaxvecError: as `jaxvec.make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2) as envs:
            obs, info = envs.reset()
            obs, reward, terminated, truncated, info = envs.step(np.array([0, 1]))
            print(obs.shape, info["elapsed_step"])  # (2, 4) [1 1]
        ```
    """
    if env_type not in _FACES:
        raise ValueError(f'env_type must be "gymnasium", "gym" or "dm", not {env_type!r}')
    config, pool_options, task = _sort(task_id, kwargs)
    envs = task.start(config["num_envs"], **pool_options)
    try:
        spec = _spec(config, task, envs, env_type)
        return _FACES[env_type](envs, spec, seed=config["seed"], reset_options=task.reset_options)
    except BaseException:
        envs.close()
        raise


def make_gymnasium(task_id: TaskId, **kwargs: Any) -> GymnasiumEnvPool:
    """Starts a pool whose results are Gymnasium's; see `make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make_gymnasium("CartPole-v1", num_envs=2) as envs:
            obs, info = envs.reset()
            print(obs.shape)  # (2, 4)
        ```
    """
    return make(task_id, "gymnasium", **kwargs)


def make_gym(task_id: TaskId, **kwargs: Any) -> GymEnvPool:
    """Starts a pool whose results are old Gym's; see `make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make_gym("CartPole-v1", num_envs=2) as envs:
            obs = envs.reset()
            obs, reward, done, info = envs.step(np.array([0, 1]))
            print(done)  # [False False]
        ```
    """
    return make(task_id, "gym", **kwargs)


def make_dm(task_id: TaskId, **kwargs: Any) -> DMEnvPool:
    """Starts a pool whose results are dm_env's; see `make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make_dm("CartPole-v1", num_envs=2) as envs:
            timestep = envs.reset()
            print(timestep.observation.obs.shape, timestep.discount)  # (2, 4) [1. 1.]
        ```
    """
    return make(task_id, "dm", **kwargs)


def make_spec(task_id: TaskId, **kwargs: Any) -> EnvSpec:
    """Returns the `spec` of a pool; to learn the spaces, one env is built in a worker and closed again.

    Args and errors are those of `make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        spec = envpool.make_spec("CartPole-v1", num_envs=2)
        print(spec.observation_space.shape, spec.config.max_episode_steps)  # (4,) 500
        ```
    """
    config, pool_options, task = _sort(task_id, kwargs)
    workers = replace(pool_options.get("workers", Workers()), num=1)
    pool_options |= {"num_workers": 1, "workers": workers, "batch_size": 1}
    with task.start(1, **pool_options) as envs:
        return _spec(config, task, envs, "gymnasium")


def _sort(task_id: TaskId, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Task]:
    """Sorts keywords into EnvPool's own with its defaults, those of `jaxvec.make`, and the task's."""
    if "autoreset_mode" in kwargs:
        raise TypeError("autoreset_mode can't be set here: EnvPool's is NEXT_STEP; jaxvec.make takes others")
    config = {key: kwargs.get(key, default) for key, default in _DEFAULTS.items()}
    others = {key: value for key, value in kwargs.items() if key not in _DEFAULTS}
    task, pool_options = resolve_task(task_id, others)
    pool_options["autoreset_mode"] = "NEXT_STEP"
    num_envs, num_threads = config["num_envs"], config["num_threads"]
    pool_options["batch_size"] = config["batch_size"] or None
    if num_threads and pool_options.get("workers", Workers()).num is None:
        pool_options.setdefault("num_workers", min(num_threads, num_envs))
    config["batch_size"] = config["batch_size"] or num_envs
    return config, pool_options, task


def _spec(config: dict[str, Any], task: Task, envs: VectorEnv, env_type: str) -> EnvSpec:
    returns_info = config["gym_reset_return_info"]
    if returns_info is None:
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
