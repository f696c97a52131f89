"""`EnvPool`: the verbs on NumPy, whatever the form of what they return.

Handles that `xla` returned stay fresh while these verbs move envs, as EnvPool's do: EnvPool's users take the
handle first, and reset on the host afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from jaxvec import _actions, _seeds
from jaxvec._errors import EnvIdError
from jaxvec._handoff._move import Move, Verb
from jaxvec._memory._views import Rows
from jaxvec._timestep import TimeStep
from jaxvec._vector_env import VectorEnv
from jaxvec.compat.envpool import _xla
from jaxvec.compat.envpool._arguments import split
from jaxvec.compat.envpool._spec import EnvSpec


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
            InFlightError: one of `env_id` is in flight or, of an asynchronous pool, too few would be for
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
        self._seeds[ids] = _seeds.NONE
        if mask is None:
            self._sent.clear()
        order = None if self.is_async else ids
        return self._finish(rows, order, reset=True, return_info=self.config["gym_reset_return_info"])

    def async_reset(self) -> None:
        """Starts a reset of all envs, and does not wait for it; `recv` does."""
        ids = np.arange(len(self))
        seeds = self._seeds_of(ids)
        self._pool.send_reset(
            self._pool.move_all(Verb.RESET), seeds=seeds, mask=None, options=self._reset_options
        )
        self._seeds[ids] = _seeds.NONE
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
        actions = _actions.check_on_host(self.vector_env.spec, action, len(self))
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
            InFlightError: an env is in flight already; nothing was sent.
            ResetNeededError: an env was never reset; nothing was sent.
            PoolBrokenError, PoolClosedError: the pool is broken, or closed.
        """
        action, env_id = split(action, env_id)
        ids = self._check_ids(env_id)
        actions = _actions.check_on_host(self.vector_env.spec, action, len(ids))
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
            InFlightError: too few envs are in flight; the pool is as it was.
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
        return _xla.make(self.vector_env, self._convert)

    def render(self, env_ids: Any = 0) -> NDArray[Any]:
        """Returns frames, `[k, height, width, 3]`, of the envs of `env_ids`, one or more.

        Raises:
            RuntimeError: the envs have no frames: they were made without `render_mode="rgb_array"`.
            EnvError: an env raised.
        """
        ids = self._check_ids(env_ids)
        frames = self._pool.questions.call(Move(Verb.CALL, ids), "render", [()] * len(ids), {})
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
        seeds = _seeds.expand(seed, len(self))
        return np.full(len(self), _seeds.NONE) if seeds is None else seeds

    def _seeds_of(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        seeds = np.full(len(self), _seeds.NONE)
        seeds[ids] = self._seeds[ids]
        return seeds

    def _check_ids(self, env_id: Any) -> NDArray[Any]:
        """Returns `[k]` ids; a single one may come as a number."""
        ids = _actions.check_env_id(None if env_id is None else np.atleast_1d(env_id), len(self))
        wrong = ids[(ids < 0) | (ids >= len(self))]
        if len(wrong):
            raise EnvIdError(
                f"env_id {wrong[0]} is out of range for a pool of {len(self)} envs (0 to {len(self) - 1})"
            )
        if len(np.unique(ids)) < len(ids):
            raise EnvIdError(f"env_id names an env twice: {ids.tolist()}")
        return ids
