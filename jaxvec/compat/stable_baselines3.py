"""Stable-Baselines3's vector envs over a pool: `SubprocVecEnv` and `DummyVecEnv`, drop-in classes.

They keep the dtypes of the spaces, and take envs of every space: values without fixed shape travel pickled.
"""

from __future__ import annotations

import importlib
import multiprocessing
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec import _arguments, _start, _util
from jaxvec._config import PoolConfig, Timeouts, Workers
from jaxvec._dispatch.move import Caller, Move, Verb
from jaxvec._errors import ActionError, EnvDataError, EnvError
from jaxvec._memory.segment import Rows
from jaxvec._spec import Leaf, Node, PoolSpec, as_is, builder, leaves, map_leaves
from jaxvec._vector_env import VectorEnv
from jaxvec.compat._sb3_envs import IS_WRAPPED, OwnEnvFn, prepare

__all__ = ["DummyVecEnv", "SubprocVecEnv"]

if TYPE_CHECKING:

    class _VecEnv:
        """Stands for Stable-Baselines3's class, which need not be installed."""

        def __init__(self, num_envs: int, observation_space: Any, action_space: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    try:
        _VecEnv = importlib.import_module("stable_baselines3.common.vec_env").VecEnv
    except ImportError as error:
        raise ImportError(
            "these vector envs are Stable-Baselines3's, which can't be imported: "
            + _util.install_command("sb3")
        ) from error

Result: TypeAlias = tuple[Any, NDArray[Any], NDArray[np.bool_], list[dict[str, Any]]]

_OURS = {"autoreset_mode", "batch_size", "envs_per_instance", "final_obs"}


class _PooledVecEnv(_VecEnv):
    """A `stable_baselines3.common.vec_env.VecEnv` over a pool. Abstract."""

    def __init__(self, env_fns: Sequence[Callable[[], Any]], options: dict[str, Any]) -> None:
        """Starts the pool; `options` are those of `jaxvec.make`."""
        for name in _OURS & options.keys():
            raise TypeError(
                f"{name} can't be set here: every step is of all envs, which reset themselves in it"
            )
        # Stable-Baselines3 waits for ever, unless it is told otherwise.
        options = {"timeouts": Timeouts(None, None, None), **options}
        with _as_raised():
            self.pool: VectorEnv = _start.start(
                env_fns,
                None,
                PoolConfig(autoreset_mode=AutoresetMode.SAME_STEP, **options),
                env_kwargs={},
                policy=as_is,
                objects=True,
                equal_spaces=False,
                resets_required=False,
            )
        places = {leaf.path: place for place, leaf in enumerate(leaves(self.pool.spec.obs))}
        self._num_obs = len(places)
        self._build_obs = builder(self.pool.spec.obs, places)
        try:
            super().__init__(
                self.pool.num_envs, self.pool.single_observation_space, self.pool.single_action_space
            )
        except BaseException:
            self.pool.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.pool.closed

    def reset(self) -> Any:
        """Resets all envs, with the seeds and options set last, once.

        Returns:
            Observations, batched as Stable-Baselines3 does; `reset_infos` has the infos.

        Raises:
            Exception: that of an env; the pool is broken by it.
            JaxvecError: an env returned wrong data, a worker died, or the pool is broken or closed.
        """
        pool = self.pool.pool
        options = [one or None for one in self._options]
        with _as_raised():
            rows = pool.reset(
                pool.move_all(Verb.RESET, Caller.HOST),
                seeds=_arguments.expand_seeds(self._seeds, self.num_envs),
                mask=None,
                options=options if any(options) else None,
            )
            self.reset_infos: list[dict[str, Any]] = self._infos()
        self._reset_seeds()
        self._reset_options()
        return self._batch(rows)

    def step(self, actions: Any) -> Result:
        """Steps all envs; see `step_async` and `step_wait`, which are slower than this alone."""
        return self._step(actions)

    def step_async(self, actions: Any) -> None:
        """Begins a step of all envs, and does not wait for it.

        Args:
            actions: one for each env: an array `[num_envs, ...]`, or a sequence.

        Raises:
            ActionError: there is not one for each env; nothing was stepped.
            PendingEnvError: a step is under way.
            JaxvecError: the pool is broken or closed.
        """
        self._send(actions)

    def step_wait(self) -> Result:
        """Ends a step.

        Returns:
            `(obs, rewards, dones, infos)`. Where an episode has ended, `obs` is the next one's first,
            `infos[i]["terminal_observation"]` what the env returned, and `reset_infos[i]` the info of the
            reset; `infos[i]["TimeLimit.truncated"]` says in every step whether it ended by truncation.

        Raises:
            PendingEnvError: no step is under way.
            Exception: as of `reset`.
        """
        return self._recv()

    def close(self) -> None:
        """Closes the envs and ends the workers; at most five seconds. Twice is fine."""
        with _as_raised():
            self.pool.close()

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """Returns each env's frame; `None` for each, with a warning, unless they render RGB arrays."""
        if self.render_mode == "rgb_array":
            return self.env_method("render")
        warnings.warn(
            f"get_images: the envs' render_mode is {self.render_mode!r}; make them with 'rgb_array'",
            stacklevel=2,
        )
        return [None] * self.num_envs

    def has_attr(self, attr_name: str) -> bool:
        """Says whether all envs have an attribute; wrappers are looked through."""
        return all(self.env_method("has_wrapper_attr", attr_name))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Returns an attribute of envs, whatever it is; wrappers are looked through.

        Args:
            attr_name: of the attribute.
            indices: which envs, an int or several; `None` for all.

        Raises:
            AttributeError: an env has no such attribute.
        """
        return self.env_method("get_wrapper_attr", attr_name, indices=indices)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Sets an attribute of envs, of their outermost wrapper, to one value.

        Args:
            attr_name: of the attribute.
            value: for each of them.
            indices: as of `get_attr`.
        """
        self.env_method("__setattr__", attr_name, value, indices=indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Calls a method of envs; wrappers are looked through.

        Args:
            method_name: of the method.
            *method_args: for each call.
            indices: as of `get_attr`.
            **method_kwargs: for each call.

        Returns:
            What each call returned.

        Raises:
            Exception: that of an env, which leaves the pool usable.
        """
        places = [range(self.num_envs)[place] for place in self._get_indices(indices)]
        if not places:
            return []
        if len(set(places)) < len(places):  # then an env is called several times
            calls = (self.env_method(method_name, *method_args, indices=i, **method_kwargs) for i in places)
            return [result for (result,) in calls]
        move = Move(Verb.CALL, np.array(places))
        with _as_raised():
            return self.pool.pool.env_calls.call(
                move, method_name, [method_args] * len(places), method_kwargs
            )

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Says of each env whether it is wrapped in a wrapper of this class; `indices` as of `get_attr`."""
        return self.env_method(IS_WRAPPED, wrapper_class, indices=indices)

    def _send(self, actions: Any) -> None:
        pool = self.pool.pool
        given: Sequence[Any] | None = _rows_of(pool.spec, actions)
        as_they_are = given is None
        if given is None:
            given = list(actions)
            if len(given) != self.num_envs:
                raise ActionError(f"got {len(given)} actions for {self.num_envs} envs; pass one for each env")
        move = pool.move_all(Verb.SEND, Caller.HOST)
        with _as_raised():
            pool.send(move, pool.all, given, as_they_are=as_they_are)

    def _recv(self) -> Result:
        pool = self.pool.pool
        with _as_raised():
            return self._result(pool.recv(pool.move_all(Verb.RECV, Caller.HOST)))

    def _step(self, actions: Any) -> Result:
        """Steps all envs by one move, where `_send` and `_recv` are two."""
        pool = self.pool.pool
        given = _rows_of(pool.spec, actions)
        if given is None:
            self._send(actions)
            return self._recv()
        with _as_raised():
            return self._result(pool.step(pool.move_all(Verb.STEP, Caller.HOST), given))

    def _result(self, rows: Rows) -> Result:
        spec = self.pool.spec
        rewards, terminated, truncated = rows[self._num_obs : self._num_obs + 3]
        dones = terminated | truncated
        infos = self._infos()
        ended = dones.nonzero()[0].tolist()
        ends = spec.build_timestep(rows).info if ended else {}
        for env_id in ended:
            self.reset_infos[env_id] = infos[env_id]
            infos[env_id] = infos[env_id].pop("final_info")
            if spec.has_fault and ends["fault"][env_id]:
                infos[env_id]["fault"] = True
        for info, cut in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = cut
        for env_id in ended:
            infos[env_id]["terminal_observation"] = _row(spec.obs, ends["final_obs"], env_id)
        return self._batch(rows), rewards, dones, infos

    def _batch(self, rows: Rows) -> Any:
        """Returns a batch of observations as Stable-Baselines3's, which stacks whatever it gets."""
        return self._build_obs(
            [np.stack(list(row)) if row.dtype.hasobject else row for row in rows[: self._num_obs]]
        )

    def _infos(self) -> list[dict[str, Any]]:
        """Returns each env's last info, which the caller may change."""
        return self.pool.pool.env_calls.known_infos() or self._ask_infos()

    def _ask_infos(self) -> list[dict[str, Any]]:
        return list(self.pool.infos())


class SubprocVecEnv(_PooledVecEnv):
    """`stable_baselines3.common.vec_env.SubprocVecEnv`, over a pool of worker processes.

    Its guide, `docs/porting/stable_baselines3.md`, tells where it does what Stable-Baselines3's does not.

    Attributes:
        pool: the jaxvec `VectorEnv` behind it, with what Stable-Baselines3 has no word for: `stats()`,
            `raise_if_failed()`, `trace(path)`.
        num_envs: how many.
        observation_space: of one env.
        action_space: of one env.
        reset_infos: of each env's last reset.
        render_mode: how the envs render.
        metadata: of the envs.

    Example:
        ```python
        from jaxvec.compat.stable_baselines3 import SubprocVecEnv

        envs = SubprocVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
        envs.seed(0)
        obs = envs.reset()
        obs, rewards, dones, infos = envs.step(np.array([0, 1]))
        print(obs.shape, rewards)  # (2, 4) [1. 1.]
        envs.close()
        ```
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], start_method: str | None = None, **options: Any
    ) -> None:
        """Starts the workers.

        Args:
            env_fns: make the envs.
            start_method: `"spawn"` starts each worker as a new interpreter. `None`, `"forkserver"` and
                `"fork"` fork them from a helper process where that is safe, and never from this one.
            **options: of `jaxvec.make`: `num_workers`, `on_fault`, `workers`, ….

        Raises:
            Exception: that of a constructor.
            JaxvecError: as of `jaxvec.make`; the envs' spaces differ.
            ValueError, TypeError: a bad argument.
        """
        multiprocessing.get_context(start_method)  # raises what Stable-Baselines3 would
        if start_method == "spawn":
            options["workers"] = replace(options.get("workers", Workers()), start_method="spawn")
        super().__init__([OwnEnvFn(env_fn) for env_fn in env_fns], options)


class DummyVecEnv(_PooledVecEnv):
    """`stable_baselines3.common.vec_env.DummyVecEnv`, over jaxvec's serial backend.

    It has the attributes of `SubprocVecEnv`, too.

    Attributes:
        envs: the envs themselves.

    Example:
        ```python
        from jaxvec.compat.stable_baselines3 import DummyVecEnv

        envs = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
        print(envs.reset().shape, len(envs.envs))  # (2, 4) 2
        envs.close()
        ```
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **options: Any) -> None:
        """Builds the envs.

        Args:
            env_fns: make the envs.
            **options: of `jaxvec.make`, as far as they need no worker processes.

        Raises:
            Exception: that of a constructor.
            JaxvecError: as of `jaxvec.make`; the envs' spaces differ.
            ValueError: two constructors returned the same env; or a bad argument.
            TypeError: a bad argument.
        """
        # A list that the constructors fill, and none of them refers to the pool, which it would keep open.
        envs: list[Any] = [None] * len(env_fns)
        self.envs: list[gymnasium.Env[Any, Any]] = envs
        builders = [partial(_build, envs, place, env_fn) for place, env_fn in enumerate(env_fns)]
        super().__init__(builders, {**options, "backend": "serial"})
        if len({id(env.unwrapped) for env in envs}) < len(envs):
            self.close()
            raise ValueError(
                "env_fns returned the same env more than once; each has to make a new one, as in "
                "[lambda: gymnasium.make(env_id)] * num_envs, and not in [lambda: env] * num_envs"
            )
        self.metadata: dict[str, Any] = envs[0].metadata

    def step_async(self, actions: Any) -> None:
        """Keeps the actions for `step_wait`, which steps the envs; see `SubprocVecEnv.step_async`."""
        self.actions = actions

    def step_wait(self) -> Result:
        """Steps the envs; see `SubprocVecEnv.step_wait`. Rewards are float32."""
        return self._step(self.actions)

    def _result(self, rows: Rows) -> Result:
        obs, rewards, dones, infos = super()._result(rows)
        return obs, rewards.astype(np.float32), dones, infos

    def _ask_infos(self) -> list[dict[str, Any]]:
        return deepcopy(super()._ask_infos())  # these are the envs' own


def _build(envs: list[Any], place: int, env_fn: Callable[[], Any]) -> Any:
    envs[place] = prepare(env_fn())
    return envs[place]


@contextmanager
def _as_raised() -> Generator[None]:
    """Raises an env's own exception in place of ours, if it travelled."""
    try:
        yield
    except EnvDataError:
        raise  # wrong data has no exception of the env's own
    except EnvError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from error


def _rows_of(spec: PoolSpec, actions: Any) -> list[NDArray[Any]] | None:
    """Returns actions as the segment holds them; `None` of those that the envs get as they are."""
    if not isinstance(spec.action, Leaf):  # here a batch is one action for each env, not one for each leaf
        return None
    try:
        return _arguments.check_on_host(spec, actions, spec.num_envs, exact=True)
    except ActionError:
        return None


def _row(node: Node, obs: Any, env_id: int) -> Any:
    """Returns one env's observation of a batch, which does not keep the others'."""
    return map_leaves(node, obs, lambda leaf, part: part[env_id].copy() if leaf.shape else part[env_id])
