"""`AsyncVectorEnv`: Gymnasium's class over a pool of worker processes."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium import Space, logger
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec._cores import usable_cores
from jaxvec._errors import NotReadyError
from jaxvec._run_in_thread import run_in_thread
from jaxvec.compat.gymnasium._errors import as_gymnasium
from jaxvec.compat.gymnasium._pooled import PooledVectorEnv


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
            autoreset_mode: Gymnasium's, or its name.
            max_concurrency: how many envs run at the same time, at most.
            **options: of `jaxvec.make`: `num_workers`, `on_fault`, `worker_env`, …. `episodic=True` implies
                `AutoresetMode.DISABLED`; infos then have `idle`, `[num_envs]` bool.

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
