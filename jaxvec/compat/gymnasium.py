"""Gymnasium's vector envs over a pool: drop-in classes, and an entry point for `gymnasium.register`.

They keep Gymnasium's dtypes and take envs of every space: values without fixed shape travel pickled.
"""

from __future__ import annotations

import dataclasses
import inspect
import multiprocessing
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, NoReturn, cast

import gymnasium
import numpy as np
from gymnasium import Space, logger
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, create_shared_memory, iterate
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from jaxvec import _start, _vector_env
from jaxvec._arguments import check_on_host, expand_seeds
from jaxvec._config import PoolConfig, Timeouts, Workers
from jaxvec._dispatch.move import Caller, Verb
from jaxvec._errors import (
    ActionError,
    EnvDataError,
    EnvError,
    NotReadyError,
    PoolClosedError,
    SpaceMismatchError,
)
from jaxvec._memory.segment import Rows, copies, views
from jaxvec._spec import Autoreset, Leaf, Node, as_is, fold_space, map_leaves, parse_autoreset
from jaxvec._util import run_in_thread, usable_cores

__all__ = ["AsyncVectorEnv", "SyncVectorEnv", "vector_entry_point"]


@contextmanager
def as_gymnasium(name: str) -> Generator[None]:
    """Raises an env's own exception, as Gymnasium does; `name` is that of the class."""
    try:
        yield
    except PoolClosedError as error:
        raise ClosedEnvironmentError(f"Trying to operate on `{name}`, after a call to `close()`.") from error
    except EnvDataError:
        raise  # wrong data has no exception of the env's own
    except EnvError as error:
        raise_original(error)


def raise_original(error: EnvError) -> NoReturn:
    """Logs where an env failed, and raises its exception; ours, if that did not travel."""
    if error.worker is not None:
        logger.error(f"Received the following error from Worker-{error.env_id} - Shutting it down")
        logger.error(error.remote_traceback)
        logger.error("Raising the last exception back to the main process.")
    if error.__cause__ is None:
        raise error
    raise error.__cause__ from error


# ----------------------------------------------------------------------------------------------------------
# Infos, batched as Gymnasium does: a dict of arrays, each with a mask.
# ----------------------------------------------------------------------------------------------------------


def batch(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one dict for the infos of all envs.

    Numbers and arrays are stacked, in a dtype that holds them all, and zero where an env has none; dicts
    are batched in turn; anything else, and every `final_obs`, goes into an array of objects.

    Args:
        infos: of each env.

    Returns:
        For each key an array `[num_envs, ...]`, and as `_key` the `[num_envs]` bool of envs that have it.
    """
    by_key: dict[str, dict[int, Any]] = {}
    for env_id, info in enumerate(infos):
        for key, value in info.items():
            by_key.setdefault(key, {})[env_id] = value
    batched: dict[str, Any] = {}
    for key, values in by_key.items():
        mask = np.zeros(len(infos), np.bool_)
        mask[list(values)] = True
        batched[key] = _column(key, values, len(infos))
        batched[f"_{key}"] = mask
    return batched


def _column(key: str, values: dict[int, Any], num_envs: int) -> Any:
    if key == "final_obs":
        return _objects(values, num_envs)
    if all(isinstance(value, dict) for value in values.values()):
        return batch([values.get(env_id, {}) for env_id in range(num_envs)])
    shapes = {_shape(value) for value in values.values()}
    if len(shapes) > 1 or None in shapes:
        return _objects(values, num_envs)
    (shape,) = shapes
    dtypes = {np.asarray(value).dtype for value in values.values()}  # a huge int is an object
    try:
        dtype = np.result_type(*dtypes)
    except TypeError:  # strings and numbers, and the like
        return _objects(values, num_envs)
    column = np.full((num_envs, *(shape or ())), None if dtype.kind == "O" else np.zeros((), dtype), dtype)
    for env_id, value in values.items():
        column[env_id] = value
    return column


def _shape(value: Any) -> tuple[int, ...] | None:
    """Returns the shape of what is stacked, `None` of other objects."""
    if isinstance(value, np.ndarray):
        return value.shape
    return () if type(value) in (int, float, bool) or isinstance(value, np.number) else None


def _objects(values: dict[int, Any], num_envs: int) -> NDArray[Any]:
    column = np.full(num_envs, None, object)
    for env_id, value in values.items():
        column[env_id] = value
    return column


# ----------------------------------------------------------------------------------------------------------
# Base class of both vector envs: a pool behind Gymnasium's `VectorEnv`.
# ----------------------------------------------------------------------------------------------------------

_NOT_CALLED = ("reset", "step", "close", "_setattr", "_check_spaces")


class PooledVectorEnv(gymnasium.vector.VectorEnv[Any, Any, NDArray[Any]]):
    """A `gymnasium.vector.VectorEnv` over a pool. Abstract.

    Attributes:
        pool: the jaxvec `VectorEnv` behind it, with what Gymnasium has no word for: `stats()`,
            `raise_if_failed()`, and the JAX face, if the dtypes are JAX's.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        *,
        copy: bool,
        observation_mode: str | tuple[Space[Any], Space[Any]],
        autoreset_mode: str | AutoresetMode,
        shared_memory: bool,
        **options: Any,
    ) -> None:
        """Starts the pool; `options` are those of `jaxvec.make`."""
        super().__init__()
        _check_mode(observation_mode)
        self.env_fns = env_fns
        self.copy = copy
        self.observation_mode = observation_mode
        self._autoreset = parse_autoreset(autoreset_mode)
        self.autoreset_mode: AutoresetMode = self._autoreset.as_gymnasium
        self.pool: _vector_env.VectorEnv = self._start(env_fns, options)
        try:
            self.num_envs: int = self.pool.num_envs
            self.metadata: dict[str, Any] = self.pool.metadata
            self.render_mode: str | None = self.pool.render_mode
            self.single_action_space: Space[Any] = self.pool.single_action_space
            self.action_space: Space[Any] = self.pool.action_space
            self.single_observation_space: Space[Any] = self.pool.single_observation_space
            self.observation_space: Space[Any] = self.pool.observation_space
            if observation_mode == "different":
                self.observation_space = batch_differing_spaces(list(self.pool.call("observation_space")))
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
        """Calls a method of each env, or reads an attribute."""
        with as_gymnasium(type(self).__name__):
            return self._call(name, args, kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns an attribute of each env."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of each env; a list or tuple gives each its own value."""
        if isinstance(values, (list, tuple)) and len(values) != self.num_envs:  # pyright: ignore[reportUnknownArgumentType]
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. Got "
                f"`{len(values)}` values for {self.num_envs} environments."  # pyright: ignore[reportUnknownArgumentType]
            )
        with as_gymnasium(type(self).__name__):
            self.pool.set_attr(name, values)

    def render(self) -> tuple[Any, ...]:
        """Returns each env's frame."""
        return self.call("render")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the pool; see `jaxvec.VectorEnv.close`.

        Args:
            timeout: seconds that the envs have for their `close`, `None` for any time.
            terminate: whether they have none.
        """
        self.pool.close(0 if terminate else timeout)

    def _call(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        begun: Callable[[], None] | None = None,
    ) -> tuple[Any, ...]:
        if name in _NOT_CALLED:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        pool = self.pool.pool
        each = [args] * self.num_envs
        return tuple(pool.env_calls.call(pool.move_all(Verb.CALL), name, each, kwargs, begun=begun))

    def _send_reset(self, seed: Any, options: dict[str, Any] | None) -> NDArray[np.bool_] | None:
        """Starts a reset; returns the mask of the envs that are reset, `None` for all."""
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
        pool = self.pool.pool
        pool.reset_async(pool.move_all(Verb.RESET, Caller.HOST), seeds=seeds, mask=mask, options=options)
        return mask

    def _send_step(self, actions: Any) -> None:
        pool = self.pool.pool
        given, as_they_are = self._check_actions(actions)
        pool.send(pool.move_all(Verb.SEND, Caller.HOST), pool.all, given, as_they_are=as_they_are)

    def _step(self, actions: Any) -> Rows:
        """Steps all envs by one move, where `_send_step` and `_recv` are two."""
        pool, deliver = self.pool.pool, copies if self.copy else views
        given, as_they_are = self._check_actions(actions)
        if not as_they_are:
            return pool.step(pool.move_all(Verb.STEP, Caller.HOST), given, deliver=deliver)
        pool.send(pool.move_all(Verb.SEND, Caller.HOST), pool.all, given, as_they_are=True)
        return self._recv()

    def _check_actions(self, actions: Any) -> tuple[Sequence[Any], bool]:
        """Returns the leaves of a batch of actions, or one object for each env, and whether it is that."""
        try:
            return check_on_host(self.pool.spec, actions, self.num_envs, exact=True), False
        except ActionError:  # Gymnasium hands on whatever it gets
            given = list(iterate(self.action_space, actions))
            if len(given) != self.num_envs:
                raise
            return given, True

    def _recv(self, timeout: float | None = None) -> Rows:
        pool, deliver = self.pool.pool, copies if self.copy else views
        move = pool.move_all(Verb.RECV, Caller.HOST)
        return pool.recv(move, deliver=deliver, timeout=timeout, everything=True)

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
            for env_id in np.flatnonzero(info["_final_obs"]).tolist():
                final_obs = _row(spec.info.child("final_obs"), info["final_obs"], env_id)
                infos[env_id] = {"final_obs": final_obs, **infos[env_id]}
        if spec.has_fault:
            for env_id in np.flatnonzero(info["fault"]).tolist():
                infos[env_id] = {"fault": True, **infos[env_id]}
        scalars = (reward, terminated, truncated)
        if not self.copy:  # which is said of observations alone
            scalars = tuple(array.copy() for array in scalars)
        return self._observations(obs), *scalars, self._batch(infos, info)

    def _infos(self) -> list[dict[str, Any]]:
        return self.pool.pool.env_calls.known_infos() or list(self.pool.infos())

    def _batch(self, infos: Sequence[dict[str, Any]], ours: dict[str, Any]) -> dict[str, Any]:
        """Returns the infos as Gymnasium batches them; of episodic envs with `idle`, `[num_envs]` bool."""
        if self.pool.spec.autoreset is not Autoreset.EPISODIC:
            return batch(infos)
        return {**batch(infos), "idle": ours["idle"].copy(), "_idle": np.ones(self.num_envs, np.bool_)}

    def _observations(self, obs: Any) -> Any:
        return _as_batch(self.pool.spec.obs, obs, writable=not self.copy)

    @staticmethod
    def _mismatch(mode: Any) -> str:
        """Returns the rest of Gymnasium's sentence on envs whose observation spaces differ."""
        if mode == "same":
            return (
                "'same') however the sub-environments observation spaces are not equivalent. If this is "
                "intentional, use `observation_mode='different'` instead."
            )
        return (
            "'different' or custom space) however the sub-environments observation spaces do not share a "
            "common shape and dtype."
        )

    def _start(self, env_fns: Sequence[Any], options: dict[str, Any]) -> _vector_env.VectorEnv:
        name, mode = type(self).__name__, self.observation_mode
        # Gymnasium waits for ever, unless it is told otherwise.
        options = {"timeouts": Timeouts(None, None, None), **options}
        try:
            return _start.start(
                list(env_fns),
                None,
                PoolConfig(autoreset_mode=self._autoreset.name, **options),
                env_kwargs={},
                policy=as_is,
                objects=True,
                equal_spaces=mode == "same",
                resets_required=False,
            )
        except SpaceMismatchError as error:
            if "action space" in str(error):
                raise RuntimeError(f"Some environments have another action space: {error}") from error
            raise RuntimeError(f"{name}(..., observation_mode={self._mismatch(mode)} {error}") from error
        except EnvError as error:
            raise_original(error)


def _as_batch(node: Node, value: Any, *, writable: bool) -> Any:
    """Returns a batch of observations as Gymnasium's: tuples of objects, arrays that can be written to."""

    def convert(leaf: Leaf, part: Any) -> Any:
        if leaf.is_object:
            return tuple(part)
        if writable:
            part.flags.writeable = True
        return part

    return map_leaves(node, value, convert)


def _row(node: Node, value: Any, index: int) -> Any:
    """Returns one env's value of a batch, as most envs would: with Python's integers."""

    def pick(leaf: Leaf, part: Any) -> Any:
        return int(part[index]) if leaf.shape == () and leaf.dtype.kind in "iu" else part[index]

    return map_leaves(node, value, pick)


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
    if isinstance(mode, tuple) and len(mode) == 2:  # pyright: ignore[reportUnknownArgumentType]
        batched, single = cast("tuple[Any, Any]", mode)
        if not (isinstance(batched, Space) and isinstance(single, Space)):
            raise TypeError(
                "Expected both elements of observation_mode to be Spaces, got "
                f"{type(batched)} and {type(single)}"
            )
    elif mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch "
            f"observation space, actual got {mode}"
        )


def _check_known(space: Space[Any]) -> None:
    """Refuses spaces of the user's own under `shared_memory`, as Gymnasium does."""

    def check(space: Space[Any], _: Any) -> None:
        if create_shared_memory.dispatch(type(space)) is create_shared_memory.dispatch(object):  # pyright: ignore
            raise ValueError(
                "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this feature "
                f"with `shared_memory=False` however this is slower. {space} is not one of Gymnasium's own "
                "spaces."
            )

    fold_space(space, check, root=(), make_dict=lambda *_: None, make_tuple=lambda *_: None)


# ----------------------------------------------------------------------------------------------------------
# `AsyncVectorEnv`: Gymnasium's class over a pool of worker processes.
# ----------------------------------------------------------------------------------------------------------


class AsyncState(Enum):
    """What was begun and not waited for."""

    DEFAULT = "default"
    WAITING_RESET = "reset"
    WAITING_STEP = "step"
    WAITING_CALL = "call"


class AsyncVectorEnv(PooledVectorEnv):
    """`gymnasium.vector.AsyncVectorEnv`, over a pool of worker processes.

    Its guide, `docs/porting/gymnasium.md`, tells where it does what Gymnasium's class does not.

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
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        **options: Any,
    ) -> None:
        """Starts the workers.

        Args:
            env_fns: make the envs.
            shared_memory: `True` refuses spaces of the user's own; data are in shared memory anyhow, but
                for values without fixed shape.
            copy: `False` returns observations that the next step overwrites.
            context: has no meaning here: workers are interpreters of their own.
            daemon: nor has this.
            worker: refused; wrap the env instead.
            observation_mode: `"same"`, `"different"`, or the batched and the single space.
            autoreset_mode: Gymnasium's, or its name; or `"EPISODIC"`, as of `jaxvec.make`, which is
                `AutoresetMode.DISABLED` to Gymnasium; infos then have `idle`, `[num_envs]` bool.
            max_concurrency: how many envs run at the same time, at most.
            **options: of `jaxvec.make`: `num_workers`, `on_fault`, `workers`, ….

        Raises:
            RuntimeError: the envs' spaces differ.
            ValueError: a bad argument.
        """
        if worker is not None:
            raise _refusal(worker)
        if context is not None:
            multiprocessing.get_context(context)  # raises what Gymnasium would
        if max_concurrency is not None:
            if not isinstance(max_concurrency, (int, np.integer)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}."
                )
            if max_concurrency < 1:
                raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
            if options.get("workers", Workers()).num is None:
                options.setdefault("num_workers", min(len(env_fns), usable_cores(), int(max_concurrency)))
        self.shared_memory = shared_memory
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.max_concurrency = max_concurrency
        self._state = AsyncState.DEFAULT
        self._mask: NDArray[np.bool_] | None = None  # of the reset under way
        self._calls: Future[tuple[Any, ...]] | None = None
        super().__init__(
            env_fns,
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
            shared_memory=shared_memory,
            **options,
        )

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, or those of `options["reset_mask"]`.

        Args:
            seed: an int (env *i* gets `seed + i`), one for each env, or `None`.
            options: for every env's `reset`, but for `reset_mask`, `[num_envs]` bool.

        Returns:
            Observations, batched as Gymnasium does, and infos. Raises as `reset_async` and `reset_wait`.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None) -> None:
        """Begins a reset.

        Args:
            seed: as of `reset`.
            options: as of `reset`.

        Raises:
            ClosedEnvironmentError: the vector env is closed.
            AlreadyPendingCallError: something else is under way.
        """
        self._begin("reset_async")
        with as_gymnasium(type(self).__name__):
            self._mask = self._send_reset(seed, options)
        self._state = AsyncState.WAITING_RESET

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Ends a reset.

        Args:
            timeout: seconds; `None` for ever.

        Returns:
            What `reset` does.

        Raises:
            NoAsyncCallError: none is under way.
            multiprocessing.TimeoutError: it was not done in time; it still is under way.
            Exception: that of an env; the pool is broken by it, but with `on_fault="restart"`.
        """
        self._require(AsyncState.WAITING_RESET, timeout)
        with as_gymnasium(type(self).__name__):
            return self._after_reset(self._end(timeout), self._mask)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all envs.

        Args:
            actions: of the batched action space.

        Returns:
            `(obs, reward, terminated, truncated, info)`: rewards `[num_envs]` float64, flags `[num_envs]`
            bool. Raises as `step_async` and `step_wait`.
        """
        self._begin("step_async")
        with as_gymnasium(type(self).__name__):
            return self._after_step(self._step(actions))

    def step_async(self, actions: Any) -> None:
        """Begins a step with actions of the batched action space; raises as `reset_async`."""
        self._begin("step_async")
        with as_gymnasium(type(self).__name__):
            self._send_step(actions)
        self._state = AsyncState.WAITING_STEP

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Ends a step, within `timeout` seconds; returns what `step` does, and raises as `reset_wait`."""
        self._require(AsyncState.WAITING_STEP, timeout)
        with as_gymnasium(type(self).__name__):
            return self._after_step(self._end(timeout))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each env, or reads an attribute.

        Args:
            name: of the method or attribute.
            *args: for each call.
            **kwargs: for each call.

        Returns:
            One result for each env.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begins a call; raises as `reset_async`."""
        self._begin("call_async")
        self._calls = run_in_thread(lambda begun: self._call(name, args, kwargs, begun))
        self._state = AsyncState.WAITING_CALL

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Ends a call, within `timeout` seconds; returns what `call` does, and raises as `reset_wait`."""
        self._require(AsyncState.WAITING_CALL, timeout)
        assert self._calls is not None
        try:
            with as_gymnasium(type(self).__name__):
                result = self._calls.result(timeout)
        except TimeoutError as error:
            if self._calls.done():  # the env's own
                self._state = AsyncState.DEFAULT
                raise
            self._time_out(timeout, error)
        except BaseException:
            self._state = AsyncState.DEFAULT
            raise
        self._state = AsyncState.DEFAULT
        return result

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of each env; a list or tuple gives each its own value."""
        self._begin("set_attr")
        super().set_attr(name, values)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the pool; what is under way is waited for, `timeout` seconds, or ended by `terminate`."""
        if self._state is not AsyncState.DEFAULT:
            logger.warn(
                f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete."
            )
            wait = getattr(self, f"{self._state.value}_wait")
            try:
                wait(0 if terminate else timeout)
            except multiprocessing.TimeoutError:
                terminate = True
            except Exception as error:
                logger.warn(f"The pending call failed: {error}")
        super().close_extras(timeout, terminate)

    def _end(self, timeout: float | None) -> Any:
        """Receives what is under way, which then is over, however it ends but for time."""
        try:
            rows = self._recv(timeout)
        except NotReadyError as error:
            self._time_out(timeout, error)
        except BaseException:
            self._state = AsyncState.DEFAULT
            raise
        self._state = AsyncState.DEFAULT
        return rows

    def _time_out(self, timeout: float | None, error: BaseException) -> NoReturn:
        raise multiprocessing.TimeoutError(
            f"The call to `{self._state.value}_wait` has timed out after {timeout} second(s)."
        ) from error

    def _begin(self, name: str) -> None:
        self._assert_is_running()
        if self._state is not AsyncState.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._state.value}` to complete.",
                self._state.value,
            )

    def _require(self, state: AsyncState, timeout: float | None) -> None:
        self._assert_is_running()
        if self._state is not state:
            name = state.value
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )


def _refusal(worker: Callable[..., None]) -> ValueError:
    try:
        inspect.signature(worker).bind(*(None,) * 8)
    except TypeError:
        return ValueError(
            f"A custom `worker` must accept 8 arguments. Got the signature {inspect.signature(worker)}."
        )
    return ValueError(
        "a custom `worker` speaks over Gymnasium's pipes, which this vector env does not have; change what "
        "the env does in a wrapper"
    )


# ----------------------------------------------------------------------------------------------------------
# `SyncVectorEnv`: Gymnasium's class over a pool in this process.
# ----------------------------------------------------------------------------------------------------------


class SyncVectorEnv(PooledVectorEnv):
    """`gymnasium.vector.SyncVectorEnv`, over jaxvec's serial backend.

    Attributes:
        envs: the envs themselves.

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
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **options: Any,
    ) -> None:
        """Builds the envs; see `AsyncVectorEnv` for the arguments."""
        self.envs: list[gymnasium.Env[Any, Any]] = [env_fn() for env_fn in env_fns]
        super().__init__(
            [partial(_the_same, env) for env in self.envs],
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
            shared_memory=False,
            backend="serial",
            **options,
        )
        self.env_fns = env_fns

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, or those of `options["reset_mask"]`; see `AsyncVectorEnv.reset`."""
        with as_gymnasium(type(self).__name__):
            mask = self._send_reset(seed, options)
            return self._after_reset(self._recv(), mask)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all envs; see `AsyncVectorEnv.step`."""
        with as_gymnasium(type(self).__name__):
            return self._after_step(self._step(actions))


def _the_same(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    return env


# ----------------------------------------------------------------------------------------------------------
# `vector_entry_point` for `gymnasium.register` and for registered envs.
# ----------------------------------------------------------------------------------------------------------


def vector_entry_point(
    entry_point: str | EnvSpec | Callable[..., Any], **options: Any
) -> Callable[..., AsyncVectorEnv]:
    """Returns what makes an `AsyncVectorEnv` of one kind of env, for Gymnasium's registry.

    `gymnasium.register(id, entry_point=MyEnv, vector_entry_point=vector_entry_point(MyEnv))` lets
    `gymnasium.make_vec(id, num_envs, vectorization_mode="vector_entry_point")` make a pool. For an id that is
    registered, `gymnasium.spec(id).vector_entry_point = vector_entry_point(gymnasium.spec(id))` does.

    Args:
        entry_point: of the env, as `gymnasium.register` takes it: a callable or `"module:name"`; or a spec,
            whose env is made as by `gymnasium.make`, with its wrappers.
        **options: of `AsyncVectorEnv`.

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
        # Not with what may be this very function, and with kwargs of its own: make_vec adds to the spec's.
        spec = dataclasses.replace(entry_point, vector_entry_point=None, kwargs={**entry_point.kwargs})
        return partial(_make_registered, partial(gymnasium.make, spec), options)
    return partial(_make_vec, entry_point, options)


def _make_registered(
    make: Callable[..., Any], options: dict[str, Any], *, num_envs: int, **kwargs: Any
) -> AsyncVectorEnv:
    return AsyncVectorEnv([partial(make, **kwargs)] * num_envs, **options)


def _make_vec(
    entry_point: str | Callable[..., Any],
    options: dict[str, Any],
    *,
    num_envs: int,
    max_episode_steps: int | None = None,
    **env_kwargs: Any,
) -> AsyncVectorEnv:
    make = partial(_make, entry_point, max_episode_steps, env_kwargs)
    return AsyncVectorEnv([make] * num_envs, **options)


def _make(
    entry_point: str | Callable[..., Any], max_episode_steps: int | None, env_kwargs: dict[str, Any]
) -> gymnasium.Env[Any, Any]:
    env: Any = (entry_point if callable(entry_point) else load_env_creator(entry_point))(**env_kwargs)
    return env if max_episode_steps is None else TimeLimit(env, max_episode_steps)
