"""Gymnasium's vector envs over a pool: drop-in classes, and an entry point for `gymnasium.register`.

`PooledVectorEnv` sends resets, steps and calls to the pool and batches observations and infos as Gymnasium
does. `AsyncVectorEnv` and `SyncVectorEnv` add Gymnasium's signatures and call order. They keep Gymnasium's
dtypes and accept envs of every space: values without a fixed shape are pickled.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from copy import deepcopy
from enum import Enum
from functools import partial
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import Space, logger
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, create_shared_memory, iterate
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from jaxvec import _vector_env
from jaxvec._arguments import EXACT, check_action, expand_seeds
from jaxvec._engine.move import Caller, Verb
from jaxvec._envs.constructors import load_from_main
from jaxvec._errors import (
    ActionError,
    EnvDataError,
    EnvError,
    NotReadyError,
    PoolClosedError,
    SpaceMismatchError,
)
from jaxvec._leaves import Leaf, fold_space, map_leaves
from jaxvec._memory.segment import Copies, Rows, views
from jaxvec._options import AutoresetName
from jaxvec._settings import check_count
from jaxvec._spec import Autoreset, parse_autoreset
from jaxvec._util import run_in_thread, usable_cores
from jaxvec._vector_env import pool_of
from jaxvec.compat._base import AsRaised, row_of, start_pool

__all__ = ["AsyncVectorEnv", "SyncVectorEnv", "vector_entry_point"]


class _AsGymnasium(AsRaised):
    """Logs where an env failed and raises its own exception, as Gymnasium does."""

    def __init__(self, class_name: str) -> None:
        self._class_name = class_name

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, PoolClosedError):
            text = f"Trying to operate on `{self._class_name}`, after a call to `close()`."
            raise ClosedEnvironmentError(text) from error
        if isinstance(error, EnvError) and not isinstance(error, EnvDataError) and error.worker is not None:
            logger.error(f"Received the following error from Worker-{error.env_id} - Shutting it down")
            logger.error(error.remote_traceback)
            logger.error("Raising the last exception back to the main process.")
        super().__exit__(kind, error, trace)


# --- Batched infos: a dict of arrays, each with a mask ---------------------------------------------------


def batch(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Batches the infos of all envs into one dict.

    Numbers and arrays are stacked with a dtype that holds all of them, and are zero where an env has none.
    Dicts are batched recursively. Other objects, and every `final_obs`, go into an array of objects. For each
    key, `_key` is a `[num_envs]` bool mask of the envs that have the key.
    """
    if not any(infos):
        return {}
    by_key: dict[str, dict[int, Any]] = {}
    for env_id, info in enumerate(infos):
        for key, value in info.items():
            by_key.setdefault(key, {})[env_id] = value
    batched: dict[str, Any] = {}
    for key, values in by_key.items():
        mask = np.zeros(len(infos), np.bool_)
        for env_id in values:  # faster than an array of indices
            mask[env_id] = True
        batched[key] = _column(key, values, len(infos))
        batched[f"_{key}"] = mask
    return batched


def _column(key: str, values: dict[int, Any], num_envs: int) -> Any:
    is_final_obs = key == "final_obs"  # always an array of objects, as in Gymnasium
    if not is_final_obs and all(isinstance(value, dict) for value in values.values()):
        return batch([values.get(env_id, {}) for env_id in range(num_envs)])
    if not is_final_obs and all(map(_is_numeric, values.values())):
        with suppress(TypeError, ValueError):  # their dtypes have no common one, or their shapes differ
            rows = np.array([*values.values()])  # of objects for an int beyond 64 bits
            empty = np.empty if rows.dtype.kind == "O" else np.zeros  # `None`s or zeros
            column = empty((num_envs, *rows.shape[1:]), rows.dtype)
            column[[*values]] = rows
            return column
    column = np.empty(num_envs, object)
    for env_id, value in values.items():
        column[env_id] = value
    return column


def _is_numeric(value: Any) -> bool:
    return type(value) in (int, float, bool) or isinstance(value, np.number | np.ndarray)


# --- Base class of both vector envs: a pool behind Gymnasium's `VectorEnv` -------------------------------


class PooledVectorEnv(gymnasium.vector.VectorEnv[Any, Any, NDArray[Any]]):
    """A `gymnasium.vector.VectorEnv` over a pool. Abstract.

    Attributes:
        pool: The jaxvec `VectorEnv` that runs the envs. It offers `stats()`, `raise_if_failed()` and, if the
            dtypes are JAX's, the functions for compiled programs. Its own time steps have no last observation
            that does not fit the space: `_final_obs` is False there.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        *,
        copy: bool,
        observation_mode: str | tuple[Space[Any], Space[Any]],
        autoreset_mode: AutoresetName | AutoresetMode,
        shared_memory: bool,
        **options: Any,
    ) -> None:
        """Starts the pool. `options` are those of `start_pool`."""
        super().__init__()
        _check_mode(observation_mode)
        self._as_gymnasium = _AsGymnasium(type(self).__name__)
        self.env_fns = env_fns
        self.copy = copy
        self.observation_mode = observation_mode
        self._autoreset = parse_autoreset(autoreset_mode)
        self.autoreset_mode: AutoresetMode = self._autoreset.as_gymnasium
        self.pool: _vector_env.VectorEnv = self._start(env_fns, options)
        self._deliver = Copies(unread=self.pool.spec.statistics) if copy else views
        try:
            self.num_envs: int = self.pool.num_envs
            self.metadata: dict[str, Any] = self.pool.metadata
            self.render_mode: str | None = self.pool.render_mode
            self.action_space: Space[Any] = deepcopy(self.pool.action_space)
            self.observation_space: Space[Any] = deepcopy(self.pool.observation_space)
            self.single_action_space: Space[Any] = deepcopy(self.pool.single_action_space)
            self.single_observation_space: Space[Any] = deepcopy(self.pool.single_observation_space)
            if observation_mode == "different":
                env_spaces = list(self.pool.call("observation_space"))
                self.observation_space = batch_differing_spaces(env_spaces)
                self.single_observation_space = deepcopy(env_spaces[0])
            elif isinstance(observation_mode, tuple):
                self.observation_space, self.single_observation_space = observation_mode
            if shared_memory:
                _check_known(self.single_observation_space)
        except BaseException:
            self.pool.close()
            raise

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The seed of each env's generator."""
        return self.get_attr("np_random_seed")

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A copy of each env's generator."""
        return self.get_attr("np_random")

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each env, or reads an attribute. Returns one result per env."""
        with self._as_gymnasium:
            return self._call(name, args, kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns an attribute of each env."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of each env. A list or tuple contains one value per env."""
        if isinstance(values, (list, tuple)) and len(values) != self.num_envs:  # pyright: ignore[reportUnknownArgumentType]
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. Got "
                f"`{len(values)}` values for {self.num_envs} environments."  # pyright: ignore[reportUnknownArgumentType]
            )
        with self._as_gymnasium:
            self.pool.set_attr(name, values)

    def render(self) -> tuple[Any, ...]:
        """Returns each env's frame."""
        return self.call("render")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the pool. The envs' `close` may take `timeout` seconds, or no time with `terminate`."""
        self.pool.close(0 if terminate else timeout)

    def _call(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        on_started: Callable[[], None] | None = None,
    ) -> tuple[Any, ...]:
        if name in ("reset", "step", "close", "_setattr", "_check_spaces"):  # as in Gymnasium
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        pool = pool_of(self.pool)
        arguments_of_envs = [args] * self.num_envs
        return tuple(
            pool.env_calls.call(
                pool.move_all(Verb.CALL), name, arguments_of_envs, kwargs, on_started=on_started
            )
        )

    def _send_reset(self, seed: Any, options: dict[str, Any] | None) -> NDArray[np.bool_] | None:
        """Starts a reset. Returns the mask of the reset envs, or `None` for all."""
        if seed is not None and not isinstance(seed, int) and len(seed) != self.num_envs:
            raise ValueError(
                "If seeds are passed as a list the length must match "
                f"num_envs={self.num_envs} but got length={len(seed)}."
            )
        mask = None
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = _check_mask(options.pop("reset_mask"), self.num_envs)
        seeds = expand_seeds(seed, self.num_envs)
        pool = pool_of(self.pool)
        pool.reset_async(pool.move_all(Verb.RESET, Caller.HOST), seeds=seeds, mask=mask, options=options)
        return mask

    def _step(self, actions: Any) -> Rows:
        """Steps all envs in one pool operation, which is faster than a send and a receive."""
        pool = pool_of(self.pool)
        batch, as_objects = self._check_actions(actions)
        if not as_objects:
            return pool.step(pool.move_all(Verb.STEP, Caller.HOST), batch, deliver=self._deliver)
        pool.send(pool.move_all(Verb.SEND, Caller.HOST), pool.all, batch, as_objects=True)
        return self._recv()

    def _check_actions(self, actions: Any) -> tuple[Sequence[Any], bool]:
        """Returns a batch of actions for `Pool.send`, and whether it holds one object per env."""
        try:
            return check_action(self.pool.spec, actions, self.num_envs, conversion=EXACT), False
        except ActionError:
            # Gymnasium passes actions outside the space to the envs, which decide what to do with them.
            env_actions = list(iterate(self.action_space, actions))
            if len(env_actions) != self.num_envs:
                raise
            return env_actions, True

    def _recv(self, timeout: float | None = None) -> Rows:
        pool = pool_of(self.pool)
        move = pool.move_all(Verb.RECV, Caller.HOST)
        return pool.recv(move, deliver=self._deliver, timeout=timeout, wait_for_all=True)

    def _after_reset(self, rows: Rows, mask: NDArray[np.bool_] | None) -> tuple[Any, dict[str, Any]]:
        infos = self._infos()
        if mask is not None:
            infos = [info if reset else {} for info, reset in zip(infos, mask.tolist(), strict=True)]
        timestep = self.pool.spec.build_timestep(rows)
        return self._observations(timestep.obs), self._batch(infos, timestep.info)

    def _after_step(self, rows: Rows) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        spec = self.pool.spec
        obs, reward, terminated, truncated, info = spec.build_timestep(rows)
        infos = self._infos()
        if spec.has_final_obs:
            for env_id in info["_final_obs"].nonzero()[0].tolist():
                final_obs = row_of(spec.info.child("final_obs"), info["final_obs"], env_id)
                infos[env_id] = {"final_obs": final_obs, **infos[env_id]}
        if spec.has_fault:
            for env_id in info["fault"].nonzero()[0].tolist():
                infos[env_id] = {"fault": True, **infos[env_id]}
        # `copy=False` concerns the returned observations only.
        scalars = [part if self.copy else part.copy() for part in (reward, terminated, truncated)]
        return self._observations(obs), *scalars, self._batch(infos, info)

    def _infos(self) -> list[dict[str, Any]]:
        return pool_of(self.pool).env_calls.known_infos() or list(self.pool.infos())

    def _batch(self, infos: Sequence[dict[str, Any]], pool_info: dict[str, Any]) -> dict[str, Any]:
        """Batches infos as Gymnasium does. Adds `idle`, `[num_envs]` bool, for episodic envs."""
        if self.pool.spec.autoreset is not Autoreset.EPISODIC:
            return batch(infos)
        idle = pool_info["idle"].copy()
        return {**batch(infos), "idle": idle, "_idle": np.ones(self.num_envs, np.bool_)}

    def _observations(self, obs: Any) -> Any:
        """Converts observations to Gymnasium's: arrays of objects to tuples, and views to writable arrays."""

        def convert(leaf: Leaf, part: Any) -> Any:
            if leaf.is_object:
                return tuple(part)
            if not self.copy:
                part.flags.writeable = True
            return part

        return map_leaves(self.pool.spec.obs, obs, convert)

    def _start(self, env_fns: Sequence[Any], options: dict[str, Any]) -> _vector_env.VectorEnv:
        name = type(self).__name__
        mode = self.observation_mode
        try:
            with self._as_gymnasium:
                return start_pool(
                    env_fns, autoreset_mode=self._autoreset.name, equal_spaces=mode == "same", **options
                )
        except SpaceMismatchError as error:
            if "action space" in str(error):
                raise RuntimeError(f"Some environments have another action space: {error}") from error
            if mode == "same":
                reason = (
                    "'same') however the sub-environments observation spaces are not equivalent. If this is "
                    "intentional, use `observation_mode='different'` instead."
                )
            else:
                reason = (
                    "'different' or custom space) however the sub-environments observation spaces do not "
                    "share a common shape and dtype."
                )
            raise RuntimeError(f"{name}(..., observation_mode={reason} {error}") from error


def _check_mask(mask: Any, num_envs: int) -> NDArray[np.bool_]:
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            "`options['reset_mask']` must contain a boolean array with at least one True value, got "
            f"reset_mask={mask}"
        )
    return cast("NDArray[np.bool_]", mask)


def _check_mode(mode: Any) -> None:
    pair = isinstance(mode, tuple) and [isinstance(space, Space) for space in cast("tuple[Any, ...]", mode)]
    if pair != [True, True] and mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch "
            f"observation space, actual got {mode}"
        )


def _check_known(space: Space[Any]) -> None:
    # As Gymnasium with `shared_memory=True`, reject spaces for which it has no handler.
    def check(space: Space[Any], _: Any) -> None:
        if create_shared_memory.dispatch(type(space)) is create_shared_memory.dispatch(object):  # pyright: ignore
            raise ValueError(
                "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this feature "
                f"with `shared_memory=False` however this is slower. {space} is not one of Gymnasium's own "
                "spaces."
            )

    fold_space(space, check, root=(), make_dict=lambda *_: None, make_tuple=lambda *_: None)


# --- `AsyncVectorEnv`: Gymnasium's class over a pool of worker processes ---------------------------------


class AsyncState(Enum):
    """The pending call of an `AsyncVectorEnv`."""

    DEFAULT = "default"
    WAITING_RESET = "reset"
    WAITING_STEP = "step"
    WAITING_CALL = "call"


class AsyncVectorEnv(PooledVectorEnv):
    """`gymnasium.vector.AsyncVectorEnv`, over a pool of worker processes.

    `docs/porting/gymnasium.md` lists the differences from Gymnasium's class.

    Example:
        ```python
        from jaxvec.compat.gymnasium import AsyncVectorEnv

        envs = AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
        obs, info = envs.reset(seed=0)
        obs, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
        print(obs.shape, reward)  # (2, 4) [1. 1.]
        envs.close()
        ```
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: AutoresetName | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        **options: Any,
    ) -> None:
        """Starts the workers.

        Args:
            env_fns: One constructor per env.
            shared_memory: Whether to reject spaces of classes that are not Gymnasium's own. Values with a
                fixed shape are in shared memory in any case.
            copy: Whether to return copies of observations. With `False`, the next step overwrites them.
            context: Name of a `multiprocessing` context. It is checked, and has no other effect.
            daemon: Ignored.
            worker: Must be `None`; change the env in a wrapper instead.
            observation_mode: `"same"`, `"different"`, or a tuple of the batched and the single space.
            autoreset_mode: Gymnasium's mode or its name, or `"EPISODIC"`; see `jaxvec.make`. `"EPISODIC"`
                appears as `AutoresetMode.DISABLED`, and infos then have `idle`, `[num_envs]` bool.
            max_concurrency: Maximum number of envs that run at the same time.
            **options: Arguments of `jaxvec.make`: `num_workers`, `on_fault`, `workers`, ….

        Raises:
            RuntimeError: the envs' spaces differ.
            ValueError: an argument is invalid.
        """
        if worker is not None:
            raise ValueError(
                "a custom `worker` must accept 8 arguments, which are Gymnasium's pipes and others that this "
                "vector env does not have; change what the env does in a wrapper"
            )
        if context is not None:
            multiprocessing.get_context(context)  # raises what Gymnasium would
        if max_concurrency is not None:
            most = check_count("max_concurrency", max_concurrency, 1)
            options.setdefault("num_workers", min(len(env_fns), usable_cores(), most))
        self.shared_memory = shared_memory
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.max_concurrency = max_concurrency
        self._state = AsyncState.DEFAULT
        self._mask: NDArray[np.bool_] | None = None  # envs of the pending reset, `None` for all
        self._calls: Future[tuple[Any, ...]] | None = None  # results of the pending call
        super().__init__(
            env_fns,
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
            shared_memory=shared_memory,
            **options,
        )

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, or the envs of `options["reset_mask"]`.

        Args:
            seed: An int (env *i* gets `seed + i`), one seed per env, or `None`.
            options: Options for every env's `reset`, and optionally `reset_mask`, `[num_envs]` bool.

        Returns:
            Observations, batched as Gymnasium does, and infos. For errors see `reset_async` and `reset_wait`.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None) -> None:
        """Starts a reset; see `reset` for the arguments.

        Raises:
            ClosedEnvironmentError: the vector env is closed.
            AlreadyPendingCallError: another call is pending.
        """
        self._check_can_start("reset_async")
        with self._as_gymnasium:
            self._mask = self._send_reset(seed, options)
        self._state = AsyncState.WAITING_RESET

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits for a pending reset and returns its result; see `reset`.

        Args:
            timeout: Maximum time to wait, in seconds. `None` for no limit.

        Raises:
            NoAsyncCallError: no reset is pending.
            multiprocessing.TimeoutError: the time is over. The reset is still pending.
            Exception: an env's own exception. The pool is broken afterwards, except with
                `on_fault="restart"`.
        """
        self._check_pending(AsyncState.WAITING_RESET)
        with self._as_gymnasium:
            return self._after_reset(self._receive(timeout), self._mask)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all envs.

        Args:
            actions: A batch of the batched action space.

        Returns:
            `(obs, reward, terminated, truncated, info)`: rewards `[num_envs]` float64, flags `[num_envs]`
            bool. For errors see `reset_async` and `reset_wait`.
        """
        self._check_can_start("step_async")
        with self._as_gymnasium:
            return self._after_step(self._step(actions))

    def step_async(self, actions: Any) -> None:
        """Starts a step with a batch of the batched action space. Raises the errors of `reset_async`."""
        self._check_can_start("step_async")
        with self._as_gymnasium:
            pool = pool_of(self.pool)
            batch, as_objects = self._check_actions(actions)
            pool.send(pool.move_all(Verb.SEND, Caller.HOST), pool.all, batch, as_objects=as_objects)
        self._state = AsyncState.WAITING_STEP

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Waits up to `timeout` seconds for a pending step; see `step` and, for errors, `reset_wait`."""
        self._check_pending(AsyncState.WAITING_STEP)
        with self._as_gymnasium:
            return self._after_step(self._receive(timeout))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Starts a call. Raises the errors of `reset_async`."""
        self._check_can_start("call_async")
        self._calls = run_in_thread(lambda on_started: self._call(name, args, kwargs, on_started))
        self._state = AsyncState.WAITING_CALL

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits up to `timeout` seconds for a pending call; see `call` and, for errors, `reset_wait`."""
        self._check_pending(AsyncState.WAITING_CALL)
        assert self._calls is not None
        if not wait([self._calls], timeout).done:
            raise self._timeout_error(timeout)
        self._state = AsyncState.DEFAULT
        with self._as_gymnasium:
            return self._calls.result()

    def set_attr(self, name: str, values: Any) -> None:
        self._check_can_start("set_attr")
        super().set_attr(name, values)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the pool. Waits up to `timeout` seconds for a pending call, unless `terminate` is set."""
        if self._state is not AsyncState.DEFAULT:
            logger.warn(
                f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete."
            )
            try:
                getattr(self, f"{self._state.value}_wait")(0 if terminate else timeout)
            except multiprocessing.TimeoutError:
                terminate = True
            except Exception as error:
                logger.warn(f"The pending call failed: {error}")
        super().close_extras(timeout, terminate)

    def _receive(self, timeout: float | None) -> Any:
        """Receives the results of the pending call, which stays pending only after a timeout."""
        state = self._state
        self._state = AsyncState.DEFAULT
        try:
            return self._recv(timeout)
        except NotReadyError as error:
            self._state = state
            raise self._timeout_error(timeout) from error

    def _timeout_error(self, timeout: float | None) -> multiprocessing.TimeoutError:
        return multiprocessing.TimeoutError(
            f"The call to `{self._state.value}_wait` has timed out after {timeout} second(s)."
        )

    def _check_can_start(self, name: str) -> None:
        self._assert_is_running()
        if self._state is not AsyncState.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._state.value}` to complete.",
                self._state.value,
            )

    def _check_pending(self, state: AsyncState) -> None:
        self._assert_is_running()
        if self._state is not state:
            name = state.value
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )


# --- `SyncVectorEnv`: Gymnasium's class over a pool in this process --------------------------------------


class SyncVectorEnv(PooledVectorEnv):
    """`gymnasium.vector.SyncVectorEnv`, over jaxvec's serial backend.

    Attributes:
        envs: The envs themselves.

    Example:
        ```python
        from jaxvec.compat.gymnasium import SyncVectorEnv

        envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
        obs, info = envs.reset(seed=0)
        print(obs.shape, len(envs.envs))  # (2, 4) 2
        envs.close()
        ```
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        copy: bool = True,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: AutoresetName | AutoresetMode = AutoresetMode.NEXT_STEP,
        **options: Any,
    ) -> None:
        """Builds the envs; see `AsyncVectorEnv` for the arguments."""
        self.envs: list[gymnasium.Env[Any, Any]] = [env_fn() for env_fn in env_fns]
        super().__init__(
            [lambda env=env: env for env in self.envs],
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
            shared_memory=False,
            backend="serial",
            shares_values=True,
            **options,
        )
        self.env_fns = env_fns
        self._ended: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)  # in the last step

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, or the envs of `options["reset_mask"]`; see `AsyncVectorEnv.reset`."""
        with self._as_gymnasium:
            mask = self._send_reset(seed, options)
            rows = self._recv()
            self._ended[... if mask is None else mask] = False
            return self._after_reset(rows, mask)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all envs; see `AsyncVectorEnv.step`.

        Raises:
            AssertionError: An env of `AutoresetMode.DISABLED` has ended and was not reset.
        """
        if self._autoreset is Autoreset.DISABLED and self._ended.any():
            raise AssertionError(
                f"envs {np.flatnonzero(self._ended).tolist()} have ended; reset them before the next step by "
                'options={"reset_mask": ...}'
            )
        with self._as_gymnasium:
            result = self._after_step(self._step(actions))
            self._ended = result[2] | result[3]
            return result


# --- `vector_entry_point` for `gymnasium.register` and for registered envs -------------------------------


def vector_entry_point(
    entry_point: str | EnvSpec | Callable[..., Any], **options: Any
) -> Callable[..., AsyncVectorEnv]:
    """Returns a function that makes an `AsyncVectorEnv` of one kind of env, for Gymnasium's registry.

    `gymnasium.register(id, entry_point=MyEnv, vector_entry_point=vector_entry_point(MyEnv))` makes
    `gymnasium.make_vec(id, num_envs, vectorization_mode="vector_entry_point")` start a pool. For a registered
    id, set `gymnasium.spec(id).vector_entry_point = vector_entry_point(gymnasium.spec(id))`.

    Args:
        entry_point: Entry point of the env as in `gymnasium.register`: a callable or `"module:name"`. Or an
            `EnvSpec`, which `gymnasium.make` turns into an env with its wrappers.
        **options: Arguments of `AsyncVectorEnv`.

    Example:
        ```python
        from jaxvec.compat.gymnasium import vector_entry_point

        spec = gymnasium.spec("MountainCar-v0")
        spec.vector_entry_point = vector_entry_point(spec, num_workers=1)
        envs = gymnasium.make_vec("MountainCar-v0", num_envs=2)
        print(type(envs).__name__, envs.num_envs)  # AsyncVectorEnv 2
        envs.close()
        ```
    """
    if isinstance(entry_point, EnvSpec):
        # Without `vector_entry_point`, which may be the returned function itself. With a copy of `kwargs`,
        # because `make_vec` adds entries to those of the registered spec.
        spec = dataclasses.replace(entry_point, vector_entry_point=None, kwargs={**entry_point.kwargs})
        return partial(_make_vec, partial(gymnasium.make, load_from_main(spec)), options)
    return partial(_make_vec, partial(_make, entry_point), options)


def _make_vec(
    make: Callable[..., Any], options: dict[str, Any], /, *, num_envs: int, **kwargs: Any
) -> AsyncVectorEnv:
    return AsyncVectorEnv([partial(make, **kwargs)] * num_envs, **options)


def _make(
    entry_point: str | Callable[..., Any], /, *, max_episode_steps: int | None = None, **env_kwargs: Any
) -> gymnasium.Env[Any, Any]:
    env: Any = (entry_point if callable(entry_point) else load_env_creator(entry_point))(**env_kwargs)
    return env if max_episode_steps is None else TimeLimit(env, max_episode_steps)
