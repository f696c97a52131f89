"""gymnax's API over a Python env: `env, params = make("CartPole-v1")`, with `reset` and `step` of one env.

The env is a single env, to be vmapped. All vmapped instances are stepped in one dispatch, however nested the
`vmap`. The number of instances is known when a program's reset runs: the env then starts a pool of that
many envs, and reuses it for later resets of as many envs. Each reset makes earlier states of its pool stale,
including those of other programs. To train and evaluate alternately on equally many envs, make two envs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax.core import Tracer
from jax.custom_batching import custom_vmap

from jaxvec._errors import UnsupportedSpaceError
from jaxvec.callbacks._handle import Handle
from jaxvec.compat import _base, _spaces
from jaxvec.compat._family import PooledEnv

__all__ = ["EnvParams", "EnvState", "Environment", "evaluate", "make"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnvParams:
    """The params that gymnax's API requires. Only `reset_options` can be changed: `make` configures the env.

    Attributes:
        max_steps_in_episode: Time limit in the env's spec, `None` if there is none.
        reset_options: Options of the next episode, a pytree of the space of `make(reset_options=...)`. `None`
            keeps those that the env was given last.

    Example:
        ```python
        from jaxvec.compat import gymnax

        env, params = gymnax.make("CartPole-v1", max_episode_steps=100)
        print(params.max_steps_in_episode)  # 100
        env.close()
        ```
    """

    max_steps_in_episode: int | None = None
    reset_options: Any = None

    def replace(self, **changes: Any) -> Self:
        """Returns a changed copy. `reset` and `step` reject another `max_steps_in_episode`."""
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnvState:
    """A reference to the current state of one env. It can be stepped once.

    Attributes:
        handle: Handle of the one env.
        time: Number of steps in the running episode, int32.

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
    """A Python env with gymnax's API. Create it with `make`.

    It is closed by `close`, by `with`, or when garbage-collected. Compiled functions keep a reference to it,
    so prefer `close`. It is hashable by identity, as static arguments of `jit` must be.

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

    def __init__(self, env: Any, *, num_returns: Literal[5, 6], **options: Any) -> None:
        """Starts a pool of one env; see `make`."""
        super().__init__(env, **options)
        self._num_returns = num_returns
        self._max_steps: int | None = getattr(_base.spec_of(self._first), "max_episode_steps", None)
        name = env if isinstance(env, str) else getattr(env, "id", None) or getattr(env, "__name__", None)
        self.name: str = name or type(env).__name__

    @property
    def default_params(self) -> EnvParams:
        """The params returned by `make`, the only valid ones."""
        return EnvParams(self._max_steps)

    @property
    def num_actions(self) -> int:
        """The number of actions of a `Discrete` space, or the size of a `Box`.

        Raises:
            UnsupportedSpaceError: the action space is another one.
        """
        space = self._first.single_action_space
        match space:
            case spaces.Discrete():
                return int(space.n)
            case spaces.Box():
                return int(np.prod(space.shape))
            case _:
                raise UnsupportedSpaceError(f"num_actions: not defined for {space}; use action_space(params)")

    def reset(self, key: jax.Array, params: EnvParams | None = None) -> tuple[Any, EnvState]:
        """Resets the env, or under `vmap` one env per vmapped instance.

        Args:
            key: JAX key, from which the env's seed is made.
            params: `default_params`, with the episode's `reset_options` if they are declared, or `None`.

        Returns:
            The observation and the state.

        Raises:
            TypeError: `reset_options` were not declared.
            ValueError: the time limit differs, or `reset_options` are not of their space.
            JaxvecError: see `jaxvec.reset`. The first reset of a number of envs also raises the errors of
                `jaxvec.make`.
        """
        handle, timestep = self._reset(key, self._options(params))
        return timestep.obs, EnvState(handle, jnp.zeros((), np.int32))

    def step(self, key: jax.Array, state: EnvState, action: Any, params: EnvParams | None = None) -> Any:
        """Steps the env, or under `vmap` the env of each instance. Resets it if its episode ends.

        Args:
            key: Ignored. The env continues the random numbers of its reset.
            state: The state returned by the latest `reset` or `step`.
            action: Action of the action space.
            params: `default_params` or `None`. Its `reset_options` are used if the env resets itself.

        Returns:
            `(obs, state, reward, done, info)`, or with `num_returns=6`
            `(obs, state, reward, terminated, truncated, info)`. Where an episode has ended, the observation
            is the first one of the next episode. `info` is a new dict: `discount` (0 where terminated),
            `terminated`, `truncated`, `env_id`, the declared keys of the step itself, and
            `episode_return` and `episode_length` of the ended episode, otherwise of the running one. With
            `final_obs`, `final_observation` is the observation that the env returned before its reset.

        Raises:
            JaxvecError: see `jaxvec.step`.
            TypeError: `state` was not returned by `reset` or `step`.
        """
        del key
        options = self._options(params)
        if not isinstance(state, EnvState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"step takes the state that reset or step returned, got {type(state).__name__}")
        handle, timestep = self._step(state.handle, action, options)
        obs, reward, terminated, truncated, _ = timestep
        done = timestep.done
        info, last_obs = _base.pop_final_obs(_base.merge_final_info(timestep))
        if last_obs is not None:
            info["final_observation"] = last_obs
        info |= {"terminated": terminated, "truncated": truncated, "discount": timestep.discount}
        # `episode_length` still counts the ended episode.
        state = EnvState(handle, jnp.where(done, 0, info["episode_length"]))
        reward = reward.astype(np.float32)
        if self._num_returns == 5:
            return obs, state, reward, done, info
        return obs, state, reward, terminated, truncated, info

    def action_space(self, params: EnvParams | None = None) -> Any:
        """Returns gymnax's space of actions, or Gymnasium's if gymnax is not installed."""
        return _spaces.to_gymnax_space(self._first.single_action_space, "action")

    def observation_space(self, params: EnvParams | None = None) -> Any:
        """Returns gymnax's space of observations, or Gymnasium's if gymnax is not installed."""
        return _spaces.to_gymnax_space(self._first.single_observation_space, "obs")

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # as it stands for processes; rejax copies its configuration

    def __repr__(self) -> str:
        return f"Environment({self.name!r}, pools of {sorted(self.pools)} envs)"

    def _options(self, params: Any) -> Any:
        if params is None:
            return None
        if not isinstance(params, EnvParams):
            raise TypeError(f"params must be those that make returned, got {type(params).__name__}")
        # Traced params can't be compared, so a wrong limit is found only where they are static.
        limit = params.max_steps_in_episode
        if not isinstance(limit, Tracer) and limit != self._max_steps:
            raise ValueError(
                f"params: max_steps_in_episode is {self._max_steps}, not {limit}; pass the limit to "
                "jaxvec.compat.gymnax.make(env, max_episode_steps=…) instead"
            )
        if params.reset_options is not None and self._first.spec.reset_options is None:
            raise TypeError("params: declare reset_options with make(reset_options=spaces.Dict(...)) first")
        return params.reset_options


def make(
    env: Any, *, num_returns: Literal[5, 6] = 5, final_obs: bool | None = None, **kwargs: Any
) -> tuple[Environment, EnvParams]:
    """Starts a pool of one env, and returns gymnax's API of it and its params.

    Args:
        env: A Gymnasium id, an `EnvSpec`, or a callable that makes an env; see `jaxvec.make`.
        num_returns: Number of values that `step` returns: 5 as in gymnax up to 0.0.9, or 6 as in gymnax 1.0.
        final_obs: Whether info has `final_observation`. By default only with `num_returns=6`, as in gymnax.
        **kwargs: Arguments of `jaxvec.make`, except those that set the number of envs.

    Returns:
        The `Environment` and its `EnvParams`.

    Raises:
        ValueError, TypeError: an argument is invalid.
        JaxvecError: see `jaxvec.make`.

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
    pooled = Environment(env, num_returns=num_returns, final_obs=keep, **kwargs)
    return pooled, pooled.default_params


def evaluate(
    act: Callable[[Any, jax.Array], Any], key: jax.Array, env: Environment, num_episodes: int = 128
) -> tuple[jax.Array, jax.Array]:
    """Plays one episode in each of `num_episodes` envs, also inside a program that trains, and under `vmap`.

    It replaces evaluations by `vmap` of a `while_loop`, such as rejax's, in which an env can't wait for the
    others after its episode. Here it continues with the next episode, which is not counted. An episode that a
    fault has cut (`info["fault"]`) is not counted either, but the next one is.

    Args:
        act: Function of one observation and a key that returns an action.
        key: JAX key, for the env's seeds and for `act`.
        env: The env. Pass another one than the program trains, if that has `num_episodes` instances, too.
        num_episodes: Number of envs, each with one episode.

    Returns:
        Lengths and returns of the episodes, int32 and float32 `[num_episodes]`.

    Raises:
        JaxvecError: see `jaxvec.reset` and `jaxvec.step`.

    Example:
        ```python
        from jaxvec.compat import gymnax

        env, params = gymnax.make("CartPole-v1")
        lengths, returns = gymnax.evaluate(lambda obs, key: jnp.int32(obs[2] > 0), jax.random.key(0), env, 4)
        print((lengths == returns).all())  # True
        env.close()
        ```
    """
    key, reset_key = jax.random.split(key)
    obs, state = jax.vmap(env.reset)(jax.random.split(reset_key, num_episodes))
    zeros = jnp.zeros(num_episodes, np.int32)

    def play(carry: Any) -> Any:
        key, obs, state, over, lengths, returns = carry
        key, act_key = jax.random.split(key)
        action = jax.vmap(act)(obs, jax.random.split(act_key, num_episodes))
        obs, state, *_, info = jax.vmap(env.step, (None, 0, 0))(key, state, action)
        lengths = jnp.where(over, lengths, info["episode_length"])
        returns = jnp.where(over, returns, info["episode_return"].astype(np.float32))
        ended = (info["terminated"] | info["truncated"]) & ~jnp.asarray(info.get("fault", False))
        return key, obs, state, over | ended, lengths, returns

    start = key, obs, state, zeros.astype(np.bool_), zeros, zeros.astype(np.float32)
    return jax.lax.while_loop(lambda carry: ~_all(carry[3]), play, start)[-2:]


# Under `vmap`, also returns one bool for all instances, so that one loop steps all of them together.
_all = custom_vmap(lambda over: over.all())
_all.def_vmap(lambda axis_size, in_batched, over: (_all(over), False))
