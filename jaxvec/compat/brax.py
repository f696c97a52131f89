"""Brax's API over a Python env: `env = make("Pendulum-v1")`, with `reset(rng)` and `step(state, action)`.

The env is a single env, to be vmapped as brax's wrappers do. All vmapped instances are stepped in one
dispatch. As in `compat.gymnax`, there is one pool per number of instances. So train and evaluate on different
numbers of envs, or make one env for each.

The envs reset themselves: where an episode has ended, `state.obs` is the first observation of the next one.
Brax's `AutoResetWrapper` would replace it by `info["first_obs"]`, which `step` therefore keeps equal to
`obs`. Wrap the env with `wrap` for brax's trainers, because brax's own `EpisodeWrapper` treats a time limit
of the env as a termination.
"""

from __future__ import annotations

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import Space, spaces

from jaxvec._errors import UnsupportedSpaceError
from jaxvec._results import TimeStep
from jaxvec.adapters._packages import import_class, import_optional
from jaxvec.callbacks._handle import Handle
from jaxvec.compat._base import merge_final_info
from jaxvec.compat._family import PooledEnv

__all__ = ["Env", "make", "wrap"]

_base = import_optional("brax.envs.base", "jaxvec.compat.brax", "brax")
_training = import_optional("brax.envs.wrappers.training", "jaxvec.compat.brax", "brax")
_BraxEnv = import_class("brax.envs.base", "Env", "jaxvec.compat.brax", "brax")
_Wrapper = import_class("brax.envs.base", "Wrapper", "jaxvec.compat.brax", "brax")


class Env(PooledEnv, _BraxEnv):
    """A Python env with brax's API, and a `brax.envs.Env`. Create it with `make`.

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

    def __init__(self, env: Any, *, scale_actions: bool, **options: Any) -> None:
        """Starts a pool of one env; see `make`."""
        super().__init__(env, **options)
        self._bounds = _bounds(self._first.single_action_space) if scale_actions else None

    def reset(self, rng: jax.Array) -> Any:
        """Resets the env, or under `vmap` one env per vmapped instance.

        Args:
            rng: JAX key, from which the env's seed is made.

        Returns:
            The state, with float32 `reward` and `done`, and without `pipeline_state` and `metrics`. `info`
            has `handle`, so each state can be stepped once, and `env`: a dict of `terminated`, `truncated`
            and the keys of `jaxvec.TimeStep.info`, declared ones as in `last_info`.

        Raises:
            JaxvecError: see `jaxvec.reset`. The first reset of a number of envs also raises the errors of
                `jaxvec.make`.
        """
        return _base.State(pipeline_state=None, metrics={}, **_fields(*self._reset(rng)))

    def step(self, state: Any, action: Any) -> Any:
        """Steps the env, or under `vmap` the env of each instance. Resets it if its episode ends.

        Args:
            state: The state returned by the latest `reset` or `step`. `info` and `metrics` may have more
                entries.
            action: Action of the action space. For a `Box` with finite bounds, values within [-1, 1], which
                are scaled to the bounds and clipped, unless `scale_actions=False`.

        Returns:
            The next state.

        Raises:
            JaxvecError: see `jaxvec.step`.
        """
        if self._bounds is not None:
            low, high = self._bounds
            action = jnp.clip(low + (jnp.asarray(action) + 1) / 2 * (high - low), low, high)
        fields = _fields(*self._step(state.info["handle"], action))
        fields["info"] = {**state.info, **fields["info"]}
        if "first_obs" in state.info:  # set by brax's `AutoResetWrapper`
            fields["info"]["first_obs"] = fields["obs"]
        return state.replace(**fields)

    @property
    def observation_size(self) -> Any:
        """The length of a flat observation, otherwise its shape; a dict of these for a `Dict` space."""
        return _observation_size(self._first.single_observation_space)

    @property
    def action_size(self) -> int:
        """The length of a flat action, or the number of actions of a `Discrete` space.

        Raises:
            UnsupportedSpaceError: the action space is another one.
        """
        match space := self._first.single_action_space:
            case spaces.Discrete():
                return int(space.n)
            case spaces.Box() if len(space.shape) == 1:
                return space.shape[0]
            case _:
                raise UnsupportedSpaceError(
                    f"action_size: brax needs flat actions, not {space}; wrap the env"
                )

    @property
    def backend(self) -> str:
        """`"jaxvec"`, because the env uses no physics of brax."""
        return "jaxvec"

    @property
    def unwrapped(self) -> Self:
        """The env itself. Gymnasium's wrappers are in the workers."""
        return self


def make(env: Any, *, scale_actions: bool = True, **kwargs: Any) -> Env:
    """Starts a pool of one env and returns brax's API of it.

    Args:
        env: A Gymnasium id, an `EnvSpec`, or a callable that makes an env; see `jaxvec.make`.
        scale_actions: Whether actions within [-1, 1] are scaled to the bounds of a `Box`, if they are finite.
        **kwargs: Arguments of `jaxvec.make`, except those that set the number of envs.

    Returns:
        The env, which is also a `brax.envs.Env`.

    Raises:
        JaxvecError: see `jaxvec.make`.

    Example:
        ```python
        from jaxvec.compat import brax

        env = brax.make("Pendulum-v1")
        state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 2))
        print(state.obs.shape, env.observation_size, env.action_size)  # (2, 3) 3 1
        env.close()
        ```
    """
    return Env(env, scale_actions=scale_actions, **kwargs)


def wrap(env: Env, episode_length: int = 1000, action_repeat: int = 1, randomization_fn: Any = None) -> Any:
    """Wraps an env for brax's trainers: `ppo.train(env, wrap_env_fn=wrap, …)`.

    Applies brax's own training wrappers, and also sets `info["truncation"]` where the env was truncated.

    Args:
        env: An env of `make`.
        episode_length: Maximum number of steps of an episode, not below the env's own time limit: an end that
            only brax sees does not reset the env.
        action_repeat: Must be 1.
        randomization_fn: Must be `None`.

    Returns:
        The wrapped env, which steps batches `[num_envs, ...]`.

    Raises:
        ValueError: `action_repeat` is not 1, or `randomization_fn` is given.

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
            f"action_repeat must be 1, not {action_repeat}: later repetitions would step an env that has "
            "already reset itself; repeat actions in a wrapper of the Python env"
        )
    if randomization_fn is not None:
        raise ValueError("randomization_fn: a Python env has no brax System; randomize it in its reset")
    return _TruncationWrapper(_training.wrap(env, episode_length, action_repeat))


class _TruncationWrapper(_Wrapper):
    """Reports the env's own truncations, too: brax's `EpisodeWrapper` has only those by its time limit."""

    def step(self, state: Any, action: Any) -> Any:
        state = self.env.step(state, action)
        env = state.info["env"]
        cut = (env["truncated"] & ~env["terminated"]).astype(np.float32)
        truncation = jnp.maximum(state.info["truncation"], cut)
        return state.replace(info={**state.info, "truncation": truncation})


def _fields(handle: Handle, timestep: TimeStep) -> dict[str, Any]:
    """Returns the fields of a state that change in each step."""
    obs, reward, terminated, truncated, info = merge_final_info(timestep)
    return {
        "obs": obs,
        "reward": reward.astype(np.float32),
        "done": timestep.done.astype(np.float32),
        "info": {"handle": handle, "env": {**info, "terminated": terminated, "truncated": truncated}},
    }


def _bounds(space: Space[Any]) -> tuple[jax.Array, jax.Array] | None:
    """Returns the finite bounds of a float `Box`, to which actions are scaled."""
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f" and space.is_bounded():
        return jnp.asarray(space.low, jnp.float32), jnp.asarray(space.high, jnp.float32)
    return None


def _observation_size(space: Space[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _observation_size(child) for key, child in space.spaces.items()}
    shape = space.shape or ()
    return shape[0] if len(shape) == 1 else shape
