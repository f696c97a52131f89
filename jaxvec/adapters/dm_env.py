"""dm_env's environments, including dm_control's, as Gymnasium envs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from gymnasium import Space, spaces
from gymnasium.error import ResetNeeded

from jaxvec._errors import UnsupportedSpaceError
from jaxvec._leaves import KeyPath, format_path, full_box
from jaxvec.adapters._adapter import Adapter
from jaxvec.adapters._packages import optional_imports

with optional_imports("jaxvec.adapters.dm_env", "dm-env"):
    import dm_env
    from dm_env import specs


__all__ = ["INFO", "DmEnv"]

INFO = ("discount", "step_type")
"""Keys of info that the adapter adds: `jaxvec.make(..., info=INFO)` returns them."""


# --- specs and spaces ------------------------------------------------------------------------------------


def to_space(spec: Any, root: KeyPath) -> spaces.Space[Any]:
    """Converts a spec, or nested dicts, tuples and lists of specs, to a space. A list becomes a `Tuple`.

    Raises `UnsupportedSpaceError` for a spec of strings or objects. `root` is its path in errors.
    """
    match spec:
        case specs.Array() if spec.dtype.kind not in "biuf":
            raise UnsupportedSpaceError(
                f"{format_path(root)}: {spec!r} has no fixed size, so it can't be an array inside jax.jit; "
                "wrap the env in a dm_env.Environment to leave it out or encode it as a fixed-length array"
            )
        case specs.DiscreteArray():
            return spaces.Discrete(spec.num_values, dtype=spec.dtype)
        case specs.BoundedArray():
            low, high = (np.broadcast_to(bound, spec.shape) for bound in (spec.minimum, spec.maximum))
            return spaces.Box(low, high, spec.shape, spec.dtype)
        case specs.Array():
            return full_box(spec.shape, spec.dtype)
        case Mapping():
            # A list of pairs, because `Dict` would sort the keys of a dict.
            return spaces.Dict([(key, to_space(child, (*root, key))) for key, child in spec.items()])
        case tuple() | list():
            return spaces.Tuple([to_space(child, (*root, index)) for index, child in enumerate(spec)])
        case _:
            raise UnsupportedSpaceError(
                f"{format_path(root)}: expected a spec of dm_env, or nested dicts, tuples and lists of them; "
                f"got {type(spec).__name__}"
            )


def _map(spec: Any, value: Any, function: Callable[[specs.Array, Any], Any]) -> Any:
    """Applies `function` to leaves. Parts that do not match the spec are unchanged, for others to reject."""
    match spec:
        case specs.Array():
            return function(spec, value)
        case Mapping() if isinstance(value, Mapping) and value.keys() == spec.keys():
            return {key: _map(child, value[key], function) for key, child in spec.items()}
        case tuple() | list() if isinstance(value, (tuple, list)) and len(value) == len(spec):
            children = [_map(child, item, function) for child, item in zip(spec, value, strict=True)]
            return children if isinstance(spec, list) else tuple(children)
        case _:
            return value


def _as_array(spec: specs.Array, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    array = np.asarray(value)
    return array.astype(spec.dtype) if np.can_cast(array.dtype, spec.dtype, "same_kind") else array


# --- the env ---------------------------------------------------------------------------------------------


@final
class DmEnv(Adapter):
    """A `dm_env.Environment` as a `gymnasium.Env`.

    An episode's last time step is `terminated` if its discount is 0, otherwise `truncated`. info has
    `discount`, which is 1 after a reset, and `step_type`: 0, 1 or 2 for FIRST, MID or LAST. Read those of an
    episode's last step from `timestep.last_info`.

    dm_env has no seeds. `reset(seed=...)` uses the first of these methods that applies:

    - If DmEnv was given a function with a parameter `seed` or `random`, the function makes a new env.
    - It seeds the `numpy.random.RandomState` of the env's task (`env.task.random`, as in dm_control's suite)
      or of the env (`env.random_state`, as in its composer), as `random=seed` would. Numbers drawn at
      construction and other generators are not affected.
    - It raises `TypeError`.

    `reset` ignores options. Array rewards are described by `reward_space`.

    Example:
        ```python
        from dm_control import suite
        from jaxvec.adapters.dm_env import DmEnv

        with jaxvec.make(lambda: DmEnv(suite.load("cartpole", "swingup")), 2) as envs:
            print(envs.reset(seed=0).obs["position"].shape)  # (2, 3)
        ```
    """

    def __init__(
        self,
        env: dm_env.Environment | Callable[..., dm_env.Environment],
        *,
        render_mode: str | None = None,
        render_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Adapts an env.

        Args:
            env: The env, or a function that makes it, optionally with a keyword argument `seed` or `random`.
            render_mode: `None`, or `"rgb_array"` for envs with a `physics`, such as dm_control's.
            render_kwargs: Arguments of `physics.render`: `height`, `width`, `camera_id`, ….

        Raises:
            UnsupportedSpaceError: a spec has no fixed shape and dtype, or the spec of rewards or discounts is
                nested.
            TypeError, ValueError: an argument is invalid.
        """
        self._env_fn, self._seed_name = (None, None) if isinstance(env, dm_env.Environment) else _factory(env)
        self.adapted: Any = _checked(self._env_fn() if self._env_fn else env)
        self._observation_spec = self.adapted.observation_spec()
        self.observation_space: Space[Any] = to_space(self._observation_spec, ("observation_spec",))
        self._action_spec = self.adapted.action_spec()
        self.action_space: Space[Any] = to_space(self._action_spec, ("action_spec",))
        reward, discount = (
            _single(name, getattr(self.adapted, name)()) for name in ("reward_spec", "discount_spec")
        )
        self._scalar_reward = reward.shape == ()
        if not self._scalar_reward:
            self.reward_space: Space[Any] = to_space(reward, ("reward_spec",))
        self._no_discount = np.ones(discount.shape, discount.dtype)

        render_modes = [] if self._optional("physics", object) is None else ["rgb_array"]
        if render_mode is not None and render_mode not in render_modes:
            raise ValueError(
                f'render_mode must be None or, for an env with a physics, "rgb_array"; not {render_mode!r} '
                f"for {type(self.adapted).__name__}"
            )
        self.metadata: dict[str, Any] = {"render_modes": render_modes}
        control_timestep = self._optional("control_timestep", object)
        seconds = control_timestep() if callable(control_timestep) else None  # dm_control: of one step
        if isinstance(seconds, (int, float)):
            self.metadata["render_fps"] = round(1 / seconds)
        self.render_mode: str | None = render_mode
        self._render_kwargs = dict(render_kwargs or {})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: Seed of the env; see the class.
            options: Ignored.

        Raises:
            TypeError: the env can't be seeded.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._seed(seed)
        timestep = self.adapted.reset()
        return self._observe(timestep), {
            "discount": self._no_discount,
            "step_type": np.int64(timestep.step_type),
        }

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the env.

        Returns:
            `(obs, reward, terminated, truncated, info)`. The reward is a float, or an array with
            `reward_space`.

        Raises:
            ResetNeeded: the episode is over, or `reset` was never called. dm_env has started an episode.
        """
        # Spaces have tuples where the spec has lists.
        timestep = self.adapted.step(_map(self._action_spec, action, lambda _, value: value))
        if timestep.first():
            raise ResetNeeded("step: the episode is over, or reset was never called; call reset first")
        last = timestep.last()
        ended = not np.any(timestep.discount)
        reward = float(timestep.reward) if self._scalar_reward else np.asarray(timestep.reward)
        info = {"discount": timestep.discount, "step_type": np.int64(timestep.step_type)}
        return self._observe(timestep), reward, last and ended, last and not ended, info

    def render(self) -> Any:
        """Returns a frame `[height, width, 3]` uint8.

        Raises:
            ValueError: the env was adapted without a render mode.
        """
        if self.render_mode is None:
            raise ValueError('render: pass render_mode="rgb_array" to DmEnv')
        return self.adapted.physics.render(**self._render_kwargs)

    def _observe(self, timestep: dm_env.TimeStep) -> Any:
        # dm_env allows numbers where Gymnasium requires arrays.
        return _map(self._observation_spec, timestep.observation, _as_array)

    def _seed(self, seed: int) -> None:
        if self._env_fn is not None and self._seed_name is not None:
            # Make the new env first: if its constructor raises, the old env stays usable.
            env = _checked(self._env_fn(**{self._seed_name: seed}))
            self.adapted.close()
            self.adapted = env
            return
        for name in ("task.random", "random_state"):
            if (random := self._optional(name, np.random.RandomState)) is not None:
                # RandomState accepts integers of 32 bits. A small seed gives the stream of RandomState(seed).
                words = [seed >> shift & 0xFFFFFFFF for shift in range(0, seed.bit_length(), 32)]
                random.seed(seed if seed < 2**32 else words)
                return
        raise TypeError(
            f"reset: {type(self.adapted).__name__} has no RandomState to seed; give DmEnv a function with a "
            "parameter for it, such as lambda seed=None: MyEnvironment(seed), or reset without a seed"
        )


def _factory(env: Any) -> tuple[Callable[..., Any], str | None]:
    """Returns the function, and the name of its parameter for a seed, if it has one."""
    if not callable(env):
        raise TypeError(
            f"env must be a dm_env.Environment or a function that makes one, not {type(env).__name__}"
        )
    parameters = inspect.signature(env).parameters
    return env, next((name for name in ("seed", "random") if name in parameters), None)


def _checked(env: Any) -> Any:
    if not isinstance(env, dm_env.Environment):
        raise TypeError(f"env must make a dm_env.Environment, not {type(env).__name__}")
    return env


def _single(name: str, spec: Any) -> specs.Array:
    if not isinstance(spec, specs.Array):
        raise UnsupportedSpaceError(
            f"{name}: expected one Array, got {type(spec).__name__}; wrap the env in a dm_env.Environment "
            "that returns one array"
        )
    return spec
