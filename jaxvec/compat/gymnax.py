"""gymnax's face: `env, params = make("CartPole-v1")`, with `reset` and `step` of one env, to be vmapped.

A step of all lanes, however nested the `vmap`, is one hand-off. How many envs there are is known when a
program's reset runs; their pool is started then, and kept for the next reset of as many. So there is one
pool for each number of lanes, and a state is stale as soon as that pool is reset again, be it by another
program: whoever trains and evaluates in turn on equally many envs makes an env for each.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax.core import Tracer

from jaxvec._errors import UnsupportedSpaceError
from jaxvec._spec import TimeStep
from jaxvec.callbacks._call import Handle
from jaxvec.callbacks._family import EnvFamily
from jaxvec.compat import _base, _spaces
from jaxvec.compat._base import PooledEnv

__all__ = ["EnvParams", "EnvState", "Environment", "make"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnvParams:
    """What gymnax would let you change of an env. A Python env is configured by `make` instead.

    Attributes:
        max_steps_in_episode: the time limit of the env's spec; `None` where it says nothing.

    Example:
        ```python
        from jaxvec.compat import gymnax

        env, params = gymnax.make("CartPole-v1", max_episode_steps=100)
        print(params.max_steps_in_episode)  # 100
        env.close()
        ```
    """

    max_steps_in_episode: int | None = None

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with changes, which `reset` and `step` are going to refuse."""
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnvState:
    """The state of one env: where it is, not what it is; good for one step.

    Attributes:
        handle: to the one env.
        time: int32, steps of the running episode.

    Example:
        ```python
        from jaxvec.compat import gymnax

        env, params = gymnax.make("CartPole-v1")
        obs, state = env.reset(jax.random.key(0), params)
        print(state.time)  # 0
        env.close()
        ```
    """

    handle: Handle
    time: jax.Array


@final
class Environment(PooledEnv):
    """A Python env with gymnax's interface. Made by `make`; closed by `close`, `with` or its end.

    Hashable by identity, as jit's static arguments have to be. A function that was compiled for it keeps
    it, so close it where its end can't be waited for.

    Example:
        ```python
        from jaxvec.compat import gymnax

        key = jax.random.key(0)
        env, params = gymnax.make("CartPole-v1")
        obs, state = env.reset(key, params)
        obs, state, reward, done, info = env.step(key, state, 1, params)
        print(obs.shape, reward, done, env.num_actions)  # (4,) 1.0 False 2
        env.close()
        ```
    """

    def __init__(self, family: EnvFamily, *, name: str, num_returns: Literal[5, 6]) -> None:
        super().__init__(family)
        self._num_returns = num_returns
        self._max_steps = _base.max_episode_steps(family.first)
        self.name = name

    @property
    def default_params(self) -> EnvParams:
        """The only params there are."""
        return EnvParams(self._max_steps)

    @property
    def num_actions(self) -> int:
        """The number of actions of a `Discrete` space, or the size of a `Box`.

        Raises:
            UnsupportedSpaceError: the action space is another.
        """
        space = self._family.first.single_action_space
        match space:
            case spaces.Discrete():
                return int(space.n)
            case spaces.Box():
                return int(np.prod(space.shape))
            case _:
                raise UnsupportedSpaceError(
                    f"num_actions: {type(space).__name__} actions have no number; see action_space(params)"
                )

    def reset(self, key: jax.Array, params: EnvParams | None = None) -> tuple[Any, EnvState]:
        """Resets one env, or under `vmap` one for each lane.

        Args:
            key: the env's seed is made from it.
            params: `default_params`, or `None`.

        Returns:
            The observation and the state.

        Raises:
            ValueError: other params.
            JaxvecError: as `jaxvec.reset` and, the first time of so many lanes, `jaxvec.make`.
        """
        self._check_default(params)
        handle, timestep = self._family.reset(key)
        return timestep.obs, EnvState(handle, jnp.zeros((), np.int32))

    def step(self, key: jax.Array, state: EnvState, action: Any, params: EnvParams | None = None) -> Any:
        """Steps one env, or under `vmap` that of each lane; resets it if its episode ends.

        Args:
            key: not used: the env goes on with the random numbers of its reset.
            state: that the last reset or step returned.
            action: of the action space.
            params: `default_params`, or `None`.

        Returns:
            `(obs, state, reward, done, info)`; with `num_returns=6`, `(obs, state, reward, terminated,
            truncated, info)`. The observation is the new episode's if one has begun. `info` is a fresh
            dict: `discount` (0 where terminated), `terminated`, `truncated`, `env_id`, `episode_return` and
            `episode_length` of the episode that ended, else of the one that runs, the declared keys, and
            with `final_obs` `final_observation`, what the env returned before its reset.

        Raises:
            JaxvecError: as `jaxvec.step`.
            TypeError: `state` is none that `reset` or `step` returned.
        """
        del key
        self._check_default(params)
        if not isinstance(state, EnvState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"step takes the state that reset or step returned, got {type(state).__name__}")
        handle, timestep = self._family.step(state.handle, action)
        obs, reward, terminated, truncated, _ = timestep
        done = terminated | truncated
        info = _info(timestep)
        state = EnvState(handle, jnp.where(done, 0, info["episode_length"]))
        reward = reward.astype(np.float32)
        if self._num_returns == 5:
            return obs, state, reward, done, info
        return obs, state, reward, terminated, truncated, info

    def action_space(self, params: EnvParams | None = None) -> Any:
        """Returns gymnax's own space where gymnax is installed, else one like it."""
        return _spaces.to_gymnax_space(self._family.first.single_action_space, "action")

    def observation_space(self, params: EnvParams | None = None) -> Any:
        """Returns gymnax's own space where gymnax is installed, else one like it."""
        return _spaces.to_gymnax_space(self._family.first.single_observation_space, "obs")

    def __repr__(self) -> str:
        return f"Environment({self.name!r}, pools of {sorted(self.pools)} envs)"

    def _check_default(self, params: Any) -> None:
        if params is None:
            return
        if not isinstance(params, EnvParams):
            raise TypeError(f"params must be those that make returned, got {type(params).__name__}")
        limit = params.max_steps_in_episode
        if not isinstance(limit, Tracer) and limit != self._max_steps:
            raise ValueError(
                f"params: max_steps_in_episode is {self._max_steps}, not {limit}; a Python env is configured "
                "when it is made: jaxvec.compat.gymnax.make(env, max_episode_steps=…)"
            )


def make(
    env: Any,
    *,
    num_returns: Literal[5, 6] = 5,
    final_obs: bool | None = None,
    **kwargs: Any,
) -> tuple[Environment, EnvParams]:
    """Starts a pool of one env, and returns gymnax's API of it, and its params.

    Args:
        env: a Gymnasium id, an `EnvSpec`, or a callable that makes an env; see `jaxvec.make`.
        num_returns: of `step`: 5, as gymnax up to 0.0.9 and what was written for it, or 6, as gymnax 1.0.
        final_obs: whether info has `final_observation`; by default as gymnax: with `num_returns=6`.
        **kwargs: of `jaxvec.make`, but for those that say how many envs there are.

    Returns:
        The `Environment` and its `EnvParams`, the only ones it takes.

    Raises:
        ValueError, TypeError: a bad argument.
        JaxvecError: as `jaxvec.make`.

    Example:
        ```python
        from jaxvec.compat import gymnax

        env, params = gymnax.make("CartPole-v1")
        keys = jax.random.split(jax.random.key(0), 2)
        obs, state = jax.jit(jax.vmap(env.reset, in_axes=(0, None)))(keys, params)
        print(obs.shape)  # (2, 4)
        env.close()
        ```
    """
    if num_returns not in (5, 6):
        raise ValueError(f"num_returns must be 5 or 6, not {num_returns!r}")
    keep = num_returns == 6 if final_obs is None else final_obs
    name = env if isinstance(env, str) else getattr(env, "id", None) or getattr(env, "__name__", None)
    family = EnvFamily(env, final_obs=keep, **kwargs)
    made = Environment(family, name=name or type(env).__name__, num_returns=num_returns)
    return made, made.default_params


def _info(timestep: TimeStep) -> dict[str, Any]:
    info, last_obs = _base.pop_final_obs(timestep, jnp)
    if last_obs is not None:
        info["final_observation"] = last_obs
    flags = {"terminated": timestep.terminated, "truncated": timestep.truncated}
    return {**info, **flags, "discount": 1 - timestep.terminated.astype(np.float32)}
