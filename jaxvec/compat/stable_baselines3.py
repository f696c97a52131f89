"""Stable-Baselines3's vector envs over a pool: `SubprocVecEnv` and `DummyVecEnv`, drop-in classes.

They keep the dtypes of the spaces, and accept envs of every space: values without a fixed shape are pickled.
Methods without a docstring behave as in `stable_baselines3.common.vec_env.VecEnv`.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec._arguments import EXACT, check_action, expand_seeds
from jaxvec._engine.move import Caller, Move, Verb
from jaxvec._errors import ActionError
from jaxvec._leaves import Leaf, builder
from jaxvec._memory.segment import Copies, Rows
from jaxvec._options import Workers
from jaxvec._spec import PoolSpec
from jaxvec._vector_env import VectorEnv, pool_of
from jaxvec.adapters._packages import import_class
from jaxvec.compat._base import AsRaised, row_of, start_pool
from jaxvec.compat._sb3_envs import IS_WRAPPED, OwnEnvFn, prepare

__all__ = ["DummyVecEnv", "SubprocVecEnv"]

_VecEnv = import_class("stable_baselines3.common.vec_env", "VecEnv", "jaxvec.compat.stable_baselines3", "sb3")

Result: TypeAlias = tuple[Any, NDArray[Any], NDArray[np.bool_], list[dict[str, Any]]]

_AS_RAISED = AsRaised()
_FIXED_OPTIONS = {"autoreset_mode", "batch_size", "envs_per_instance", "final_obs"}


class _PooledVecEnv(_VecEnv):
    """A `stable_baselines3.common.vec_env.VecEnv` over a pool. Abstract."""

    def __init__(self, env_fns: Sequence[Callable[[], Any]], options: dict[str, Any]) -> None:
        """Starts the pool. `options` are those of `start_pool`."""
        for name in _FIXED_OPTIONS & options.keys():
            raise TypeError(f"{name} can't be set here: every step is of all envs, with SAME_STEP autoreset")
        with _AS_RAISED:
            self.pool: VectorEnv = start_pool(env_fns, autoreset_mode=AutoresetMode.SAME_STEP, **options)
        spec = self.pool.spec
        places = {leaf.path: place for place, leaf in enumerate(spec.timestep_leaves)}
        self._num_obs = places["reward",]
        self._deliver = Copies(unread=spec.statistics)
        self._build_obs = builder(spec.obs, places)
        self._build_info = builder(spec.info, places)
        try:
            (obs_space,) = self.pool.get_attr("observation_space", indices=[0])
            spaces = obs_space, self.pool.single_action_space
            super().__init__(self.pool.num_envs, *deepcopy(spaces))  # `VecNormalize` changes them
        except BaseException:
            self.pool.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.pool.closed

    def reset(self) -> Any:
        """Resets all envs with the seeds and options set since the last reset.

        Returns:
            Observations, batched as Stable-Baselines3 does. The infos are in `reset_infos`.

        Raises:
            Exception: an env's own exception. The pool is broken afterwards.
            JaxvecError: an env returned wrong data, a worker died, or the pool is broken or closed.
        """
        pool = pool_of(self.pool)
        options = [env_options or None for env_options in self._options]
        with _AS_RAISED:
            seeds = expand_seeds(self._seeds, self.num_envs)
            move = pool.move_all(Verb.RESET, Caller.HOST)
            # One options dict per env, or `None` if all are empty: some envs do not accept options.
            rows = pool.reset(move, seeds=seeds, mask=None, options=options if any(options) else None)
            self.reset_infos: list[dict[str, Any]] = self._infos()
        self._reset_seeds()
        self._reset_options()
        return self._batch(rows)

    def step(self, actions: Any) -> Result:
        """Steps all envs. This is faster than `step_async` and `step_wait`."""
        pool = pool_of(self.pool)
        batch, as_objects = _check_actions(pool.spec, actions)
        if as_objects:
            _PooledVecEnv.step_async(self, batch)  # not `self.`: `DummyVecEnv` defers to `step`
            return _PooledVecEnv.step_wait(self)
        with _AS_RAISED:
            return self._result(
                pool.step(pool.move_all(Verb.STEP, Caller.HOST), batch, deliver=self._deliver)
            )

    def step_async(self, actions: Any) -> None:
        """Starts a step of all envs without waiting.

        Args:
            actions: One action per env: an array `[num_envs, ...]` or a sequence.

        Raises:
            ActionError: the number of actions is not the number of envs. No env was stepped.
            PendingEnvError: a step is already pending.
            JaxvecError: the pool is broken or closed.
        """
        pool = pool_of(self.pool)
        batch, as_objects = _check_actions(pool.spec, actions)
        move = pool.move_all(Verb.SEND, Caller.HOST)
        with _AS_RAISED:
            pool.send(move, pool.all, batch, as_objects=as_objects)

    def step_wait(self) -> Result:
        """Waits for the pending step.

        Returns:
            `(obs, rewards, dones, infos)`. Where an episode has ended, `obs` is the next episode's first
            observation, `infos[i]["terminal_observation"]` is the last one, and `reset_infos[i]` is the info
            of the reset. Every `infos[i]` has `"TimeLimit.truncated"`: whether the step ended an episode by
            truncation.

        Raises:
            PendingEnvError: no step is pending.
            Exception: see `reset`.
        """
        pool = pool_of(self.pool)
        with _AS_RAISED:
            return self._result(pool.recv(pool.move_all(Verb.RECV, Caller.HOST), deliver=self._deliver))

    def close(self) -> None:
        """Closes the envs and ends the workers, within about six seconds. May be called more than once."""
        with _AS_RAISED:
            self.pool.close()

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """Returns each env's frame, or warns and returns `None`s without `render_mode="rgb_array"`."""
        if self.render_mode == "rgb_array":
            return self.env_method("render")
        warnings.warn(
            f"get_images: the envs' render_mode is {self.render_mode!r}; make them with 'rgb_array'",
            stacklevel=2,
        )
        return [None] * self.num_envs

    def has_attr(self, attr_name: str) -> bool:
        return all(self.env_method("has_wrapper_attr", attr_name))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return self.env_method("get_wrapper_attr", attr_name, indices=indices)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        self.env_method("__setattr__", attr_name, value, indices=indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Calls a method of the envs, or of their wrappers. An exception of an env leaves the pool usable."""
        places = [range(self.num_envs)[place] for place in self._get_indices(indices)]
        if not places:
            return []
        if len(set(places)) < len(places):  # the pool calls each env at most once, so call one by one
            calls = (self.env_method(method_name, *method_args, indices=i, **method_kwargs) for i in places)
            return [result for (result,) in calls]
        move = Move(Verb.CALL, np.array(places))
        args = [method_args] * len(places)
        with _AS_RAISED:
            return pool_of(self.pool).env_calls.call(move, method_name, args, method_kwargs)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        return self.env_method(IS_WRAPPED, wrapper_class, indices=indices)

    def _result(self, rows: Rows) -> Result:
        spec = self.pool.spec
        rewards, terminated, truncated = rows[self._num_obs : self._num_obs + 3]
        dones = terminated | truncated
        infos = self._infos()
        ended = dones.nonzero()[0].tolist()
        ends = self._build_info(rows) if ended else {}
        for env_id in ended:  # the info is that of the reset, and contains the last step's
            self.reset_infos[env_id] = infos[env_id]
            infos[env_id] = infos[env_id].pop("final_info")
            if spec.has_fault and ends["fault"][env_id]:
                infos[env_id]["fault"] = True
        for info in infos:
            info["TimeLimit.truncated"] = False
        for env_id in ended:
            infos[env_id]["TimeLimit.truncated"] = not terminated[env_id]
            if ends["_final_obs"][env_id]:
                last_obs = row_of(spec.obs, ends["final_obs"], env_id)
            else:  # it does not fit the space
                last_obs = self.reset_infos[env_id].pop("final_obs")
            infos[env_id]["terminal_observation"] = last_obs
        return self._batch(rows), rewards, dones, infos

    def _batch(self, rows: Rows) -> Any:
        """Batches observations as Stable-Baselines3 does: objects are stacked, too."""
        obs = rows[: self._num_obs]
        return self._build_obs([np.stack(list(leaf)) if leaf.dtype.hasobject else leaf for leaf in obs])

    def _infos(self) -> list[dict[str, Any]]:
        """Returns each env's last info. The caller may modify the dicts."""
        return pool_of(self.pool).env_calls.known_infos() or self._ask_infos()

    def _ask_infos(self) -> list[dict[str, Any]]:
        return list(self.pool.infos())


class SubprocVecEnv(_PooledVecEnv):
    """`stable_baselines3.common.vec_env.SubprocVecEnv`, over a pool of worker processes.

    `docs/porting/stable_baselines3.md` lists the differences from Stable-Baselines3's class.

    Attributes:
        pool: The jaxvec `VectorEnv` that runs the envs. It offers `stats()`, `raise_if_failed()`,
            `trace(path)`.
        reset_infos: The info of each env's last reset.

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
            env_fns: One constructor per env.
            start_method: `"spawn"` starts each worker as a new interpreter. `None`, `"forkserver"` and
                `"fork"` fork workers from a helper process where that is safe, and never from this process.
            **options: Arguments of `jaxvec.make`: `num_workers`, `on_fault`, `workers`, ….

        Raises:
            Exception: a constructor's own exception.
            JaxvecError: the envs' spaces differ; see also `jaxvec.make`.
            ValueError, TypeError: an argument is invalid.
        """
        multiprocessing.get_context(start_method)  # raises what Stable-Baselines3 would
        if start_method == "spawn":
            options["workers"] = replace(options.get("workers", Workers()), start_method="spawn")
        super().__init__([OwnEnvFn(env_fn) for env_fn in env_fns], options)


class DummyVecEnv(_PooledVecEnv):
    """`stable_baselines3.common.vec_env.DummyVecEnv`, over jaxvec's serial backend.

    Attributes:
        envs: The envs themselves.
        pool: See `SubprocVecEnv`.
        reset_infos: See `SubprocVecEnv`.

    Example:
        ```python
        from jaxvec.compat.stable_baselines3 import DummyVecEnv

        envs = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
        print(envs.reset().shape, len(envs.envs))  # (2, 4) 2
        envs.close()
        ```
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **options: Any) -> None:
        """Builds the envs; see `SubprocVecEnv` for the arguments and errors.

        Raises:
            ValueError: two constructors returned the same env.
        """
        # The constructors fill this list. If they referred to `self`, they would keep the pool open.
        envs: list[Any] = [None] * len(env_fns)
        self.envs: list[gymnasium.Env[Any, Any]] = envs
        builders = [partial(_build, envs, place, env_fn) for place, env_fn in enumerate(env_fns)]
        super().__init__(builders, {**options, "backend": "serial", "shares_values": True})
        self.metadata: dict[str, Any] = envs[0].metadata

    def step_async(self, actions: Any) -> None:
        """Stores the actions for `step_wait`, which steps the envs."""
        self.actions = actions

    def step_wait(self) -> Result:
        """Steps the envs; see `SubprocVecEnv.step_wait`. Rewards are float32."""
        return self.step(self.actions)

    def _result(self, rows: Rows) -> Result:
        obs, rewards, dones, infos = super()._result(rows)
        return obs, rewards.astype(np.float32), dones, infos

    def _ask_infos(self) -> list[dict[str, Any]]:
        return deepcopy(super()._ask_infos())  # in this process, infos are the envs' own objects


def _build(envs: list[Any], place: int, env_fn: Callable[[], Any]) -> Any:
    envs[place] = prepare(env_fn())
    return envs[place]


def _check_actions(spec: PoolSpec, actions: Any) -> tuple[list[Any], bool]:
    """Returns a batch of actions for `Pool.send`, and whether it holds one object per env."""
    # A batch is one action per env. For nested spaces, jaxvec's format is another: one array per leaf.
    if isinstance(spec.action, Leaf):
        try:
            return check_action(spec, actions, spec.num_envs, conversion=EXACT), False
        except ActionError:
            pass
    env_actions = list(actions)
    if len(env_actions) != spec.num_envs:
        raise ActionError(f"got {len(env_actions)} actions for {spec.num_envs} envs; pass one for each env")
    return env_actions, True
