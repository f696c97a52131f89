"""Brax's face: `env = make("Pendulum-v1")`, with `reset(rng)` and `step(state, action)` of one env.

It is vmapped, as brax's own wrappers do, and a step of all lanes is one hand-off; what `compat.gymnax`
says of numbers of lanes holds here, too: train and evaluate on different numbers of envs, or on an env each.

The envs reset themselves: where an episode has ended, `state.obs` is the next one's first. Brax's
`AutoResetWrapper` would put the first observation of all there instead, and finds the right one under that
name. `wrap` is what its trainers should wrap the env with, because to brax's own `EpisodeWrapper` a time
limit of the env is a termination.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from functools import cache
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import Space, spaces

from jaxvec._errors import UnsupportedSpaceError
from jaxvec._spec import TimeStep
from jaxvec.callbacks._call import Handle
from jaxvec.callbacks._family import EnvFamily
from jaxvec.compat._base import PooledEnv

__all__ = ["Env", "State", "make", "wrap"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Stands for `brax.envs.State` where brax is not installed.

    Example:
        ```python
        from jaxvec.compat import brax

        env = brax.make("Pendulum-v1")
        state = env.reset(jax.random.key(0))
        print(state.obs.shape, state.info["env"]["episode_length"])  # (3,) 0
        env.close()
        ```
    """

    pipeline_state: Any
    obs: Any
    reward: jax.Array
    done: jax.Array
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict[str, jax.Array])
    info: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with changes."""
        return dataclasses.replace(self, **changes)


class Env(PooledEnv):
    """A Python env with brax's interface; a `brax.envs.Env`, too, where brax is installed. Made by `make`.

    Example:
        ```python
        from jaxvec.compat import brax

        env = brax.make("Pendulum-v1")
        state = env.reset(jax.random.key(0))
        state = env.step(state, jnp.zeros(1))
        print(state.obs.shape, state.done)  # (3,) 0.0
        env.close()
        ```
    """

    def __init__(self, family: EnvFamily, *, scale_actions: bool) -> None:
        super().__init__(family)
        self._bounds = _bounds(family.first.single_action_space) if scale_actions else None

    def reset(self, rng: jax.Array) -> Any:
        """Resets one env, or under `vmap` one for each lane.

        Args:
            rng: a key; the env's seed is made from it.

        Returns:
            The state: `obs`, `reward` and `done` float32, no `pipeline_state` and no `metrics`. `info` has
            the `handle`, so a state is good for one step, and `env`: `terminated`, `truncated`, `env_id`,
            `episode_return`, `episode_length`, `final_obs` and the declared keys, as in `jaxvec.TimeStep`.

        Raises:
            JaxvecError: as `jaxvec.reset` and, the first time of so many lanes, `jaxvec.make`.
        """
        handle, timestep = self._family.reset(rng)
        return _state_class()(None, *_fields(timestep), {}, _info(handle, timestep))

    def step(self, state: Any, action: Any) -> Any:
        """Steps one env, or under `vmap` that of each lane; resets it if its episode ends.

        Args:
            state: that the last reset or step returned, perhaps with more in `info` and `metrics`.
            action: for a `Box` with finite bounds, within [-1, 1], which is scaled to the bounds, and
                clipped; else, or with `scale_actions=False`, of the action space.

        Returns:
            The state. `info["first_obs"]` of brax's `AutoResetWrapper` is kept equal to `obs`.

        Raises:
            JaxvecError: as `jaxvec.step`.
        """
        handle, timestep = self._family.step(state.info["handle"], self._scaled(action))
        obs, reward, done = _fields(timestep)
        info = {**state.info, **_info(handle, timestep)}
        if "first_obs" in info:
            info["first_obs"] = obs
        return state.replace(obs=obs, reward=reward, done=done, info=info)

    @property
    def observation_size(self) -> Any:
        """The length of a flat observation; the shape of another; a dict of these for a `Dict` space."""
        return _observation_size(self._family.first.single_observation_space)

    @property
    def action_size(self) -> int:
        """The length of a flat action, or the number of actions of a `Discrete` space.

        Raises:
            UnsupportedSpaceError: the action space is another.
        """
        match space := self._family.first.single_action_space:
            case spaces.Discrete():
                return int(space.n)
            case spaces.Box() if len(space.shape) == 1:
                return space.shape[0]
            case _:
                raise UnsupportedSpaceError(
                    f"action_size: brax's actions are flat vectors, not {space}; wrap the env"
                )

    @property
    def backend(self) -> str:
        """No physics of brax's."""
        return "jaxvec"

    @property
    def unwrapped(self) -> Self:
        """This env: what it has of Gymnasium's wrappers is in the workers."""
        return self

    def _scaled(self, action: Any) -> Any:
        if self._bounds is None:
            return action
        low, high = self._bounds
        return jnp.clip(low + (jnp.asarray(action) + 1) / 2 * (high - low), low, high)


def make(env: Any, *, scale_actions: bool = True, **kwargs: Any) -> Env:
    """Starts a pool of one env, and returns brax's API of it.

    Args:
        env: a Gymnasium id, an `EnvSpec`, or a callable that makes an env; see `jaxvec.make`.
        scale_actions: whether actions within [-1, 1] are scaled to the bounds of a `Box`, if they are finite.
        **kwargs: of `jaxvec.make`, but for those that say how many envs there are.

    Returns:
        The env; where brax is installed, it is a `brax.envs.Env`, too.

    Raises:
        JaxvecError: as `jaxvec.make`.

    Example:
        ```python
        from jaxvec.compat import brax

        env = brax.make("Pendulum-v1")
        state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 2))
        print(state.obs.shape, env.observation_size, env.action_size)  # (2, 3) 3 1
        env.close()
        ```
    """
    return _env_class()(EnvFamily(env, **kwargs), scale_actions=scale_actions)


def wrap(env: Env, episode_length: int = 1000, action_repeat: int = 1, randomization_fn: Any = None) -> Any:
    """Wraps an env for brax's trainers: `ppo.train(env, wrap_env_fn=wrap, …)`. Needs brax.

    They are brax's own wrappers, and `info["truncation"]` is set where the env was truncated, too.

    Args:
        env: of `make`.
        episode_length: not below the env's own time limit: the env is not reset where brax sees an end.
        action_repeat: 1.
        randomization_fn: `None`.

    Returns:
        The wrapped env, to be stepped in batches, `[num_envs, ...]`.

    Raises:
        ImportError: brax is not installed.
        ValueError: an action is to be repeated, which would lose the ends of episodes, or physics to be
            randomised.

    Example:
        ```python
        from jaxvec.compat import brax

        env = brax.make("Pendulum-v1")
        state = brax.wrap(env, episode_length=200).reset(jax.random.split(jax.random.PRNGKey(0), 2))
        print(state.obs.shape, state.info["truncation"])  # (2, 3) [0. 0.]
        env.close()
        ```
    """
    if action_repeat != 1:
        raise ValueError(
            f"action_repeat must be 1, not {action_repeat}: the env resets itself between the repetitions; "
            "repeat actions in a wrapper of the Python env"
        )
    if randomization_fn is not None:
        raise ValueError(
            "randomization_fn: a Python env has no brax System to be randomised; do so in its reset"
        )
    training = importlib.import_module("brax.envs.wrappers.training")
    return _wrapper_class()(training.wrap(env, episode_length, action_repeat))


def _fields(timestep: TimeStep) -> tuple[Any, jax.Array, jax.Array]:
    done = (timestep.terminated | timestep.truncated).astype(np.float32)
    return timestep.obs, timestep.reward.astype(np.float32), done


def _info(handle: Handle, timestep: TimeStep) -> dict[str, Any]:
    flags = {"terminated": timestep.terminated, "truncated": timestep.truncated}
    return {"handle": handle, "env": {**timestep.info, **flags}}


def _bounds(space: Space[Any]) -> tuple[jax.Array, jax.Array] | None:
    """Returns what actions are scaled to."""
    if not isinstance(space, spaces.Box) or np.dtype(space.dtype).kind != "f":
        return None
    low, high = (np.asarray(bound) for bound in (space.low, space.high))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return None
    return jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32)


def _observation_size(space: Space[Any]) -> Any:
    match space:
        case spaces.Dict():
            return {key: _observation_size(child) for key, child in space.spaces.items()}
        case _:
            shape = space.shape or ()
            return shape[0] if len(shape) == 1 else shape


@cache
def _state_class() -> Any:
    base = _brax()
    return State if base is None else base.State


@cache
def _env_class() -> type[Env]:
    base = _brax()
    return Env if base is None else types.new_class("Env", (Env, base.Env))


@cache
def _wrapper_class() -> Any:
    base: Any = importlib.import_module("brax.envs.base")

    class Truncations(base.Wrapper):  # where the env was truncated, brax's EpisodeWrapper says terminated
        def step(self, state: Any, action: Any) -> Any:
            state = self.env.step(state, action)
            env = state.info["env"]
            cut = (env["truncated"] & ~env["terminated"]).astype(np.float32)
            truncation = jnp.maximum(state.info["truncation"], cut)
            return state.replace(info={**state.info, "truncation": truncation})

    return Truncations


def _brax() -> Any:
    """Returns brax's own classes, which take seconds to import, or `None`."""
    try:
        return importlib.import_module("brax.envs.base")
    except ImportError:
        return None
